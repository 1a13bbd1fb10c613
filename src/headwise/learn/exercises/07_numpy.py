import math

import numpy as np


def softmax(scores):
    """Along the last axis."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


class MultiHeadAttention:
    def __init__(self, d_model, n_heads, seed=0):
        assert d_model % n_heads == 0
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        rng = np.random.default_rng(seed)
        self.W_Q, self.W_K, self.W_V, self.W_O = (
            (rng.standard_normal((d_model, d_model)) / math.sqrt(d_model)).astype(np.float32) for _ in range(4)
        )

    def split(self, x):
        """(T, d_model) -> (heads, T, d_head)"""
        return x.reshape(len(x), self.n_heads, self.d_head).transpose(1, 0, 2)

    def forward(self, x, mask=None):
        """x (T, d_model), mask (T, T) to be added to the scores, or None. Returns (T, d_model)."""
        # queries, keys, values; scores; mask; weights; join; W_O
        q, k, v = self.split(x @ self.W_Q), self.split(x @ self.W_K), self.split(x @ self.W_V)  #?
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(self.d_head)  #?
        if mask is not None:  #?
            scores = scores + mask  #?
        heads = softmax(scores) @ v  #?
        joined = heads.transpose(1, 0, 2).reshape(len(x), -1)  #?
        return joined @ self.W_O  #?
