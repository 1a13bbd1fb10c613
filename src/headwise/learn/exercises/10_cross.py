import math

import numpy as np


def softmax(scores):
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def cross(x, memory, w_q, w_k, w_v):
    """x (T, c) looks at memory (S, c): weights (T, S) and the mixed values (T, d)."""
    # q, k, v: who asks, and who is looked at?
    q = x @ w_q  #?
    k, v = memory @ w_k, memory @ w_v  #?
    weights = softmax(q @ k.T / math.sqrt(q.shape[1]))
    return weights, weights @ v
