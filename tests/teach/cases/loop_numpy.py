import numpy as np

def head_loop(q, keys, values, n_head, head_dim):
    outs = []
    for h in range(n_head):
        hs = h * head_dim
        logits = keys[:, hs:hs + head_dim] @ q[hs:hs + head_dim] / np.sqrt(head_dim)
        w = np.exp(logits - logits.max())
        w /= w.sum()
        outs.append(w @ values[:, hs:hs + head_dim])
    return np.concatenate(outs)
