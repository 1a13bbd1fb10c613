import torch, torch.nn as nn
class CausalAttention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        self.scale = self.d_head ** -0.5
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))
    def heads(self, x):
        B, T, C = x.shape
        return x.view(B, T, self.n_heads, self.d_head).transpose(1, 2)
    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        s = q @ k.transpose(-2, -1) * self.scale
        mask = torch.triu(torch.ones(T, T), 1).bool()
        s = s.masked_fill(mask, float('-inf'))
        return x + self.o((s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))
