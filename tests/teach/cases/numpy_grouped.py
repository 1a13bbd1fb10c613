import numpy as np


class GroupedAttention:
    def __init__(self, d_model, n_heads, n_kv_heads, seed=0):
        rng = np.random.default_rng(seed)
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.d = d_model // n_heads
        s = d_model ** -0.5
        self.W_q = rng.normal(size=(d_model, n_heads * self.d)) * s
        self.W_k = rng.normal(size=(d_model, n_kv_heads * self.d)) * s
        self.W_v = rng.normal(size=(d_model, n_kv_heads * self.d)) * s
        self.W_o = rng.normal(size=(n_heads * self.d, d_model)) * s

    def __call__(self, x, mask=None):
        B, T, _ = x.shape
        q = (x @ self.W_q).reshape(B, T, self.n_heads, self.d).transpose(0, 2, 1, 3)
        k = (x @ self.W_k).reshape(B, T, self.n_kv_heads, self.d).transpose(0, 2, 1, 3)
        v = (x @ self.W_v).reshape(B, T, self.n_kv_heads, self.d).transpose(0, 2, 1, 3)
        r = self.n_heads // self.n_kv_heads
        k = np.repeat(k, r, axis=1)
        v = np.repeat(v, r, axis=1)
        s = q @ k.swapaxes(-1, -2) * self.d ** -0.5
        if mask is not None:
            s = np.where(mask, s, -np.inf)
        w = np.exp(s - s.max(-1, keepdims=True))
        w /= w.sum(-1, keepdims=True)
        return (w @ v).transpose(0, 2, 1, 3).reshape(B, T, -1) @ self.W_o
