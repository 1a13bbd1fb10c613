import torch
from torch import nn


class InterleavedAttention(nn.Module):
    """Feature i of the width belongs to head i % n_heads, when it is split and when it is joined."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        B, T, C = x.shape
        cut = lambda y: y.view(B, T, C // self.n_heads, self.n_heads).permute(0, 3, 1, 2)
        q, k, v = cut(self.wq(x)), cut(self.wk(x)), cut(self.wv(x))
        a = torch.softmax(q @ k.transpose(-1, -2) / (C / self.n_heads) ** 0.5, -1)
        return self.wo((a @ v).permute(0, 2, 3, 1).reshape(B, T, C))
