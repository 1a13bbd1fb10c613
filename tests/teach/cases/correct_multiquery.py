import torch
from torch import nn


class MultiQueryAttention(nn.Module):
    def __init__(self, dim, n_heads, is_causal=False):
        super().__init__()
        self.h, self.hd, self.is_causal = n_heads, dim // n_heads, is_causal
        self.Wq = nn.Linear(dim, dim)
        self.Wkv = nn.Linear(dim, 2 * self.hd)
        self.Wo = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, c = x.size()
        q = self.Wq(x).view(b, t, self.h, self.hd).transpose(1, 2)
        k, v = self.Wkv(x).unsqueeze(1).split(self.hd, dim=-1)
        a = torch.einsum("bhqd,bukd->bhqk", q, k).div(self.hd ** 0.5)
        if self.is_causal:
            a = a + torch.triu(torch.full((t, t), -1e9), 1)
        return self.Wo(torch.einsum("bhqk,bukd->bqhd", a.softmax(-1), v).flatten(2))
