import math
import random


def matmul(a, b):
    return [[sum(x * y for x, y in zip(row, col)) for col in zip(*b)] for row in a]


def softmax(xs):
    m = max(xs)
    es = [math.exp(x - m) for x in xs]
    return [e / sum(es) for e in es]


class TinyMultiHeadAttention:
    def __init__(self, d_model, n_heads):
        random.seed(0)
        self.n_heads = n_heads
        self.head_dim = d_model // n_heads
        make = lambda: [[random.gauss(0, 0.3) for _ in range(d_model)] for _ in range(d_model)]
        self.Wq, self.Wk, self.Wv, self.Wo = make(), make(), make(), make()

    def __call__(self, x):
        q, k, v = matmul(x, self.Wq), matmul(x, self.Wk), matmul(x, self.Wv)
        joined = [[] for _ in x]
        for h in range(self.n_heads):
            lo, hi = h * self.head_dim, (h + 1) * self.head_dim
            for t in range(len(x)):
                # causal: only keys up to t
                scores = [sum(a * b for a, b in zip(q[t][lo:hi], k[s][lo:hi])) / math.sqrt(self.head_dim)
                          for s in range(t + 1)]
                w = softmax(scores)
                joined[t] += [sum(w[s] * v[s][j] for s in range(t + 1)) for j in range(lo, hi)]
        return matmul(joined, self.Wo)
