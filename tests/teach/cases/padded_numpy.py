import numpy as np


class EncoderAttention:
    def __init__(self, d_model=32, n_heads=4, seed=0):
        g = np.random.default_rng(seed)
        self.h = n_heads
        self.Wq, self.Wk, self.Wv, self.Wo = (g.standard_normal((d_model, d_model)) / d_model**0.5 for _ in range(4))

    def forward(self, x, attention_mask=None):
        """attention_mask (B, T): 1 for tokens, 0 for padding."""
        B, T, C = x.shape
        d = C // self.h
        parts = []
        for i in range(self.h):
            sl = slice(i * d, (i + 1) * d)
            q, k, v = x @ self.Wq[:, sl], x @ self.Wk[:, sl], x @ self.Wv[:, sl]
            s = q @ k.transpose(0, 2, 1) / np.sqrt(d)
            if attention_mask is not None:
                s = s + (1.0 - attention_mask[:, None, :]) * -1e9
            s = np.exp(s - s.max(-1, keepdims=True))
            w = s / s.sum(-1, keepdims=True)
            parts.append(w @ v)
        return np.concatenate(parts, axis=-1) @ self.Wo
