import math

import numpy as np


def softmax(scores):
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def attention(q, k, v):
    """q (H, T, d), k and v (G, T, d): query head h reads key/value head h // (H // G). Returns (H, T, d)."""
    H, T, d = q.shape
    group = H // k.shape[0]  # query heads for each key/value head
    # give k and v as many heads as q has
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)  #?
    scores = q @ k.transpose(0, 2, 1) / math.sqrt(d)
    return softmax(scores) @ v
