import numpy as np


class MultiHeadAttention:
    def __init__(self, d_model, n_heads, seed=0):
        assert d_model % n_heads == 0
        rng = np.random.default_rng(seed)
        self.n_heads = n_heads
        self.d_k = d_model // n_heads
        s = 1 / np.sqrt(d_model)
        self.W_q = rng.uniform(-s, s, (d_model, d_model))
        self.W_k = rng.uniform(-s, s, (d_model, d_model))
        self.W_v = rng.uniform(-s, s, (d_model, d_model))
        self.W_o = rng.uniform(-s, s, (d_model, d_model))

    def _heads(self, y):
        b, t, _ = y.shape
        return np.moveaxis(y.reshape(b, t, self.n_heads, self.d_k), 2, 1)

    def __call__(self, x, mask=None):
        """x (B, T, d_model); mask is True where attention is allowed."""
        q, k, v = self._heads(x @ self.W_q), self._heads(x @ self.W_k), self._heads(x @ self.W_v)
        scores = np.einsum("bhid,bhjd->bhij", q, k) / np.sqrt(self.d_k)
        if mask is not None:
            scores = np.where(mask, scores, -1e9)
        e = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p = e / e.sum(axis=-1, keepdims=True)
        y = np.moveaxis(p @ v, 1, 2)
        return y.reshape(x.shape) @ self.W_o
