import math
import random


class MultiHeadAttention:
    """Causal: a token sees itself and those before it."""

    def __init__(self, n_embd, n_head):
        self.n_head, self.head_dim = n_head, n_embd // n_head
        matrix = lambda: [[random.gauss(0, 0.1) for _ in range(n_embd)] for _ in range(n_embd)]
        self.attn_wq, self.attn_wk, self.attn_wv, self.attn_wo = matrix(), matrix(), matrix(), matrix()

    def linear(self, x, w):
        return [sum(a * b for a, b in zip(row, x)) for row in w]

    def __call__(self, xs):
        keys, values, outputs = [], [], []
        for x in xs:
            q = self.linear(x, self.attn_wq)
            keys.append(self.linear(x, self.attn_wk))
            values.append(self.linear(x, self.attn_wv))
            x_attn = []
            for h in range(self.n_head):
                hs = h * self.head_dim
                he = hs + self.head_dim
                logits = [sum(a * b for a, b in zip(q[hs:he], k[hs:he])) / math.sqrt(self.head_dim) for k in keys]
                top = max(logits)
                exps = [math.exp(l - top) for l in logits]
                weights = [e / sum(exps) for e in exps]
                x_attn.extend(sum(w * v[j] for w, v in zip(weights, values)) for j in range(hs, he))
            outputs.append(self.linear(x_attn, self.attn_wo))
        return outputs
