def multi_head_attention(q, keys, values, n_head):
    head_dim = len(q) // n_head
    x_attn = []
    for h in range(n_head):
        hs = h * head_dim
        q_h = q[hs:hs + head_dim]
        k_h = [key[hs:hs + head_dim] for key in keys]
        v_h = [value[hs:hs + head_dim] for value in values]
        attn_logits = []
        for t in range(len(k_h)):
            attn_logits.append(sum(a * b for a, b in zip(q_h, k_h[t])) / head_dim ** 0.5)
        attn_weights = softmax(attn_logits)
        head_out = [sum(w * v[j] for w, v in zip(attn_weights, v_h)) for j in range(head_dim)]
        x_attn.extend(head_out)
    return x_attn

import math
def softmax(logits):
    exps = [math.exp(x - max(logits)) for x in logits]
    return [e / sum(exps) for e in exps]
