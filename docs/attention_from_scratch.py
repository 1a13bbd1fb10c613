"""A layer of multi-head attention in NumPy, as a learner may write it: an example for `headwise check`."""

import numpy as np


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


class MultiHeadAttention:
    def __init__(self, d_model, n_heads, seed=0):
        rng = np.random.default_rng(seed)
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        self.W_q = rng.normal(size=(d_model, d_model)) / np.sqrt(d_model)
        self.W_k = rng.normal(size=(d_model, d_model)) / np.sqrt(d_model)
        self.W_v = rng.normal(size=(d_model, d_model)) / np.sqrt(d_model)
        self.W_o = rng.normal(size=(d_model, d_model)) / np.sqrt(d_model)

    def __call__(self, x, mask=None):
        B, T, C = x.shape
        q = (x @ self.W_q).reshape(B, T, self.n_heads, self.d_head).transpose(0, 2, 1, 3)
        k = (x @ self.W_k).reshape(B, T, self.n_heads, self.d_head).transpose(0, 2, 1, 3)
        v = (x @ self.W_v).reshape(B, T, self.n_heads, self.d_head).transpose(0, 2, 1, 3)
        scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(self.d_head)
        if mask is not None:
            scores = np.where(mask == 0, -1e9, scores)
        w = softmax(scores)
        out = (w @ v).transpose(0, 2, 1, 3).reshape(B, T, C)
        return out @ self.W_o
