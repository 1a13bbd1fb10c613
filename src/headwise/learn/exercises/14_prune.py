import numpy as np


def prune(w_q, w_k, w_v, w_o, n_heads, head):
    """The four matrices without head `head`; w_q, w_k, w_v (width, H * d), w_o (H * d, width), used as y = x @ W."""
    d = w_q.shape[1] // n_heads
    mine = np.arange(head * d, (head + 1) * d)  # the features of that head
    w_q, w_k, w_v = (np.delete(w, mine, axis=1) for w in (w_q, w_k, w_v))  #?
    w_o = np.delete(w_o, mine, axis=0)  #?
    return w_q, w_k, w_v, w_o
