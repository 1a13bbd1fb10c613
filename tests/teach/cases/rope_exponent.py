import torch, torch.nn as nn
def rope(x):
    T, d = x.shape[-2:]
    inv = 10000.0 ** (-torch.arange(0, d, 2).float() / d)
    a = torch.arange(T).float()[:, None] * inv[None]
    cos, sin = torch.cos(torch.cat([a, a], -1)), torch.sin(torch.cat([a, a], -1))
    r = torch.cat([-x[..., d // 2:], x[..., :d // 2]], -1)
    return x * cos + r * sin
class CausalAttention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))
    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (m(x).view(B, T, self.n_heads, self.d_head).transpose(1, 2) for m in (self.q, self.k, self.v))
        s = rope(q) @ rope(k).transpose(-2, -1) / self.d_head ** 0.5
        s = s.masked_fill(torch.triu(torch.ones(T, T), 1).bool(), float('-inf'))
        return self.o((s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))
