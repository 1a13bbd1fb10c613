import numpy as np
class Head:
    def __init__(self, d_model, d_k, rng):
        self.Wq, self.Wk, self.Wv = (rng.normal(0, 0.1, (d_model, d_k)) for _ in range(3))
    def __call__(self, x, mask):
        q, k, v = x @ self.Wq, x @ self.Wk, x @ self.Wv
        s = q @ np.swapaxes(k, -1, -2) / np.sqrt(k.shape[-1])
        s = np.where(mask, s, -np.inf) if mask is not None else s
        e = np.exp(s - s.max(-1, keepdims=True))
        return (e / e.sum(-1, keepdims=True)) @ v
class MultiHead:
    def __init__(self, d_model=64, num_heads=4):
        rng = np.random.default_rng(0)
        self.heads = [Head(d_model, d_model // num_heads, rng) for _ in range(num_heads)]
        self.Wo = rng.normal(0, 0.1, (d_model, d_model))
    def __call__(self, x, mask=None):
        """mask: True where a token may be attended to"""
        return np.concatenate([h(x, mask) for h in self.heads], axis=-1) @ self.Wo
