import numpy as np


def join(heads):
    n_heads, T, d = heads.shape
    return heads.transpose(1, 0, 2).reshape(T, n_heads * d)


def output(heads, w_o):
    """heads (H, T, d), w_o (H * d, width) -> (T, width)"""
    return join(heads) @ w_o  #?


def parts(heads, w_o):
    """What each head adds to the output: a list of H arrays (T, width) whose sum is the output."""
    n_heads, T, d = heads.shape
    return [heads[h] @ w_o[h * d : (h + 1) * d] for h in range(n_heads)]  #?
