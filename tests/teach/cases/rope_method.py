import torch
from torch import nn

def rope(x, offset=0, base=10000.0):
    b, h, t, d = x.shape
    inv = 1.0 / (base ** (torch.arange(0, d, 2).float() / d))
    pos = torch.arange(offset, offset + t).float()
    ang = pos[:, None] * inv[None, :]
    cos, sin = ang.cos(), ang.sin()
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack([x1 * cos - x2 * sin, x1 * sin + x2 * cos], dim=-1).flatten(-2)

class RotaryAttention(nn.Module):
    def __init__(self, d_model, n_heads, max_len=128):
        super().__init__()
        self.h, self.dk = n_heads, d_model // n_heads
        self.wq, self.wk = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.wv, self.wo = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.register_buffer("causal", torch.tril(torch.ones(max_len, max_len)).bool())

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (w(x).reshape(b, t, self.h, self.dk).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rope(q), rope(k)
        s = (q @ k.mT) / self.dk ** 0.5
        s = s.masked_fill(~self.causal[:t, :t], float("-inf"))
        return self.wo((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))
