import numpy as np


def mha(params, x, n_heads):
    T, C = x.shape
    q, k, v = (x @ params[n] for n in ("wq", "wk", "wv"))
    hd = C // n_heads
    outs = []
    for h in range(n_heads):
        sl = slice(h * hd, (h + 1) * hd)
        s = q[:, sl] @ k[:, sl].T / np.sqrt(hd)
        s[np.triu_indices(T, 1)] = -np.inf
        w = np.exp(s - s.max(1, keepdims=True))
        w = w / w.sum(1, keepdims=True)
        outs.append(w @ v[:, sl])
    return np.hstack(outs) @ params["wo"]
