import math

import torch
from torch import nn


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
        # 1 where a query may NOT look
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1))

    def split(self, y):
        """(B, T, d_out) -> (B, num_heads, T, head_dim)"""
        B, T, _ = y.shape
        return y.view(B, T, self.num_heads, self.head_dim).transpose(1, 2)  #?

    def forward(self, x):
        """(B, T, d_in) -> (B, T, d_out)"""
        B, T, _ = x.shape
        q = self.split(self.W_query(x))
        k = self.split(self.W_key(x))
        v = self.split(self.W_value(x))
        # scores, mask, softmax, dropout, as before, now with an axis of heads
        scores = q @ k.transpose(2, 3) / math.sqrt(self.head_dim)  #?
        scores = scores.masked_fill(self.mask.bool()[:T, :T], -math.inf)  #?
        weights = self.dropout(torch.softmax(scores, dim=-1))  #?
        # joined (B, T, d_out), then out_proj
        joined = (weights @ v).transpose(1, 2).reshape(B, T, self.d_out)  #?
        return self.out_proj(joined)  #?
