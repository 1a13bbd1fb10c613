import torch
import torch.nn as nn


class CachedCausalAttention(nn.Module):
    def __init__(self, d_model, n_heads, max_len=64, base=10000.0):
        super().__init__()
        self.n_heads = n_heads
        self.head_dim = d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)
        inv_freq = base ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        self.register_buffer("inv_freq", inv_freq)

    def rotate(self, x, start):
        t = torch.arange(start, start + x.shape[2]).float()
        angles = torch.outer(t, self.inv_freq)
        angles = torch.cat([angles, angles], dim=-1)
        a, b = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat([-b, a], dim=-1) * angles.sin()

    def forward(self, x, past=None):
        B, T, C = x.shape
        q, k, v = (p(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
                   for p in (self.q_proj, self.k_proj, self.v_proj))
        start = past[0].shape[2] if past is not None else 0
        q, k = self.rotate(q, start), self.rotate(k, start)
        if past is not None:
            k = torch.cat([past[0], k], dim=2)
            v = torch.cat([past[1], v], dim=2)
        S = k.shape[2]
        scores = q @ k.transpose(-2, -1) / self.head_dim ** 0.5
        visible = torch.ones(T, S, dtype=torch.bool).tril(diagonal=S - T)
        scores = scores.masked_fill(~visible, float("-inf"))
        y = scores.softmax(-1) @ v
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.o_proj(y), (k, v)
