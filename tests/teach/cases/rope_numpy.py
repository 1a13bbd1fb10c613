import numpy as np


def rope(x, base=10000.0):
    """x: (T, d), d even. Turns the pair (2i, 2i + 1) of row t by the angle t * base ** (-2i / d)."""
    T, d = x.shape
    freqs = base ** (-np.arange(0, d, 2) / d)
    angle = np.arange(T)[:, None] * freqs[None, :]
    c, s = np.cos(angle), np.sin(angle)
    out = np.empty_like(x)
    out[:, 0::2] = x[:, 0::2] * c - x[:, 1::2] * s
    out[:, 1::2] = x[:, 0::2] * s + x[:, 1::2] * c
    return out
