import math

import torch
import torch.nn as nn


class CausalSelfAttention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.head_dim = d_model // n_heads
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.o = nn.Linear(d_model, d_model, bias=False)
        with torch.no_grad():
            self.q.weight.div_(math.sqrt(self.head_dim))  # the scale lives in W_Q

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (m(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2) for m in (self.q, self.k, self.v))
        s = q @ k.transpose(-2, -1)
        s = s.masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf"))
        return self.o((s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))
