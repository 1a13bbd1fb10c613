import torch
from torch import nn


def rotary(x, theta=500000.0):
    """x (B, H, T, D): neighbouring features form pairs."""
    T, D = x.shape[-2:]
    freq = theta ** (-torch.arange(0, D, 2, dtype=torch.float32) / D)
    angle = torch.arange(T, dtype=torch.float32)[:, None] * freq
    cos, sin = angle.cos(), angle.sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class CausalGQA(nn.Module):
    def __init__(self, d_model, n_heads, n_kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.d = d_model // n_heads
        self.wq = nn.Linear(d_model, n_heads * self.d, bias=False)
        self.wk = nn.Linear(d_model, n_kv_heads * self.d, bias=False)
        self.wv = nn.Linear(d_model, n_kv_heads * self.d, bias=False)
        self.wo = nn.Linear(n_heads * self.d, d_model, bias=False)

    def forward(self, x):
        B, T, _ = x.shape
        r = self.n_heads // self.n_kv_heads
        q = rotary(self.wq(x).view(B, T, self.n_heads, self.d).transpose(1, 2))
        k = rotary(self.wk(x).view(B, T, self.n_kv_heads, self.d).transpose(1, 2))
        v = self.wv(x).view(B, T, self.n_kv_heads, self.d).transpose(1, 2)
        q = q.view(B, self.n_kv_heads, r, T, self.d)
        scores = torch.einsum("bgrtd,bgsd->bgrts", q, k) / self.d ** 0.5
        scores = scores + torch.full((T, T), float("-inf")).triu(1)
        heads = torch.einsum("bgrts,bgsd->bgrtd", scores.softmax(-1), v)
        return self.wo(heads.reshape(B, self.n_heads, T, self.d).transpose(1, 2).reshape(B, T, -1))
