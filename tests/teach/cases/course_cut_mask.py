import torch, torch.nn as nn
class CausalAttention(nn.Module):
    def __init__(self, d_in, d_out, context_length, num_heads):
        super().__init__()
        self.h = num_heads
        self.W_query, self.W_key, self.W_value = (nn.Linear(d_in, d_out) for _ in range(3))
        self.out_proj = nn.Linear(d_out, d_out)
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1))
    def forward(self, x):
        b, T, _ = x.shape
        q, k, v = (m(x).view(b, T, self.h, -1).transpose(1, 2) for m in (self.W_query, self.W_key, self.W_value))
        s = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
        s.masked_fill_(self.mask.bool()[:T, :T], -torch.inf)
        return self.out_proj((torch.softmax(s, -1) @ v).transpose(1, 2).reshape(b, T, -1))
