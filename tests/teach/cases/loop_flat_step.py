import math


def attention_step(x, state_dict, keys, values, n_head):
    """One token in, its attention out; keys and values keep those before."""
    def lin(v, w):
        return [sum(a * b for a, b in zip(row, v)) for row in w]

    q = lin(x, state_dict['attn_wq'])
    keys.append(lin(x, state_dict['attn_wk']))
    values.append(lin(x, state_dict['attn_wv']))
    head_dim = len(q) // n_head
    x_attn = []
    for h in range(n_head):
        hs = h * head_dim
        logits = [sum(q[hs + j] * k[hs + j] for j in range(head_dim)) / math.sqrt(head_dim) for k in keys]
        top = max(logits)
        powers = [math.exp(l - top) for l in logits]
        probs = [p / sum(powers) for p in powers]
        x_attn += [sum(p * v[hs + j] for p, v in zip(probs, values)) for j in range(head_dim)]
    return lin(x_attn, state_dict['attn_wo'])
