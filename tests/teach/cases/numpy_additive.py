import numpy as np


def softmax(z, axis=-1):
    z = np.exp(z - z.max(axis=axis, keepdims=True))
    return z / z.sum(axis=axis, keepdims=True)


def attention(q, k, v, mask=None):
    d_k = q.shape[-1]
    logits = np.matmul(q, np.swapaxes(k, -1, -2)) / d_k**0.5
    if mask is not None:
        logits = logits + (1.0 - mask) * -1e9
    weights = softmax(logits)
    return weights @ v, weights
