import numpy as np


def rotate(x, start=0, theta=10_000.0):
    """Queries or keys x (T, d) of positions start, start + 1, ..., turned."""
    T, d = x.shape
    half = d // 2
    frequencies = theta ** (-np.arange(half) / half)  # one for each pair, from fast to slow
    angles = (start + np.arange(T))[:, None] * frequencies  # (T, half)
    a, b = x[:, :half], x[:, half:]  # a pair is (a[:, i], b[:, i])
    # turn each pair by its angle
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=1)  #?
