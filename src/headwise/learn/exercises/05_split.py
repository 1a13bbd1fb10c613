import numpy as np


def split(x, n_heads):
    """(T, n_heads * d) -> (n_heads, T, d)"""
    T, width = x.shape
    return x.reshape(T, n_heads, width // n_heads).transpose(1, 0, 2)  #?


def join(heads):
    """(n_heads, T, d) -> (T, n_heads * d)"""
    n_heads, T, d = heads.shape
    return heads.transpose(1, 0, 2).reshape(T, n_heads * d)  #?
