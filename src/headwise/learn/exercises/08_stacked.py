import math

import torch
from torch import nn


class CausalAttention(nn.Module):
    def __init__(self, d_in, d_out, context_length, dropout, qkv_bias=False):
        super().__init__()
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.dropout = nn.Dropout(dropout)
        # 1 where a query may NOT look: above the diagonal
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1))

    def forward(self, x):
        """(B, T, d_in) -> (B, T, d_out)"""
        T = x.shape[1]
        queries = self.W_query(x)
        keys = self.W_key(x)
        values = self.W_value(x)
        # scores, mask, softmax, dropout; then the weights times the values
        scores = queries @ keys.transpose(1, 2) / math.sqrt(keys.shape[-1])  #?
        scores = scores.masked_fill(self.mask.bool()[:T, :T], -math.inf)  #?
        weights = self.dropout(torch.softmax(scores, dim=-1))  #?
        return weights @ values  #?


class MultiHeadAttentionWrapper(nn.Module):
    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        self.heads = nn.ModuleList(
            CausalAttention(d_in, d_out, context_length, dropout, qkv_bias) for _ in range(num_heads)
        )

    def forward(self, x):
        """(B, T, d_in) -> (B, T, num_heads * d_out)"""
        return torch.cat([head(x) for head in self.heads], dim=-1)  #?
