import torch


def attention(q, k, v, n_heads=4):
    B, T, C = q.shape
    d = C // n_heads
    q, k, v = (x.view(B, T, n_heads, d).transpose(1, 2) for x in (q, k, v))
    weights = (q @ k.transpose(-2, -1) / d**0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(B, T, C)
