import torch
import torch.nn as nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        assert d_out % num_heads == 0
        self.d_out = d_out
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1))

    def split(self, z):
        return z.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def forward(self, x):
        b, n, _ = x.size()
        k = self.split(self.W_key(x))
        q = self.split(self.W_query(x))
        v = self.split(self.W_value(x))
        s = torch.matmul(q, k.transpose(-2, -1))
        s = s.masked_fill(self.mask[:n, :n] > 0, float("-inf"))
        s = s / self.head_dim**0.5
        a = s.softmax(-1)
        a = self.dropout(a)
        ctx = torch.matmul(a, v).transpose(1, 2).flatten(2)
        return self.out_proj(ctx)
