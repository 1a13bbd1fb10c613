import numpy as np


def apply_rope(q, k, v):
    """q, k, v: (B, H, T, D). Queries and keys are turned by their positions; values stay."""
    T, D = q.shape[-2:]
    inv = 1.0 / 10000 ** (np.arange(0, D, 2) / D)
    ang = np.concatenate([np.outer(np.arange(T), inv)] * 2, axis=-1)

    def turn(x):
        a, b = np.split(x, 2, axis=-1)
        return x * np.cos(ang) + np.concatenate([-b, a], axis=-1) * np.sin(ang)

    return turn(q), turn(k), v
