import torch, torch.nn as nn
class CachedAttention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.h = n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))
    def forward(self, x, cache=None):
        B, T, C = x.shape
        q, k, v = (m(x).view(B, T, self.h, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        S = k.shape[2]
        s = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        s = s.masked_fill(torch.triu(torch.ones(T, S), S - T + 1).bool(), float('-inf'))
        return self.o((s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C)), (k, v)
