import math


def softmax(row):
    top = max(row)
    powers = [math.exp(r - top) for r in row]
    return [p / sum(powers) for p in powers]


def causal_multi_head(queries, keys, values, n_head):
    """All tokens of a text: lists of vectors (T, n_embd)."""
    n_embd = len(queries[0])
    head_dim = n_embd // n_head
    outputs = []
    for i, q in enumerate(queries):
        x_attn = []
        for h in range(n_head):
            hs = h * head_dim
            q_h = q[hs:hs + head_dim]
            k_h = [key[hs:hs + head_dim] for key in keys[:i + 1]]
            v_h = [value[hs:hs + head_dim] for value in values[:i + 1]]
            weights = softmax([sum(a * b for a, b in zip(q_h, k)) / head_dim ** 0.5 for k in k_h])
            x_attn += [sum(w * v[j] for w, v in zip(weights, v_h)) for j in range(head_dim)]
        outputs.append(x_attn)
    return outputs
