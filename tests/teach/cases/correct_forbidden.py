import torch
from torch import nn


class MultiheadSelfAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, dropout=0.0, bias=True):
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim).uniform_(-0.1, 0.1))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.dropout = dropout

    def forward(self, x, attn_mask=None):
        B, T, C = x.shape
        qkv = torch.nn.functional.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = qkv.chunk(3, dim=-1)
        q, k, v = (t.view(B, T, self.num_heads, -1).transpose(1, 2) for t in (q, k, v))
        q = q * (C // self.num_heads) ** -0.5
        w = q @ k.transpose(-1, -2)
        if attn_mask is not None:
            w = w.masked_fill(attn_mask, float("-inf"))
        w = torch.softmax(w.float(), dim=-1).type_as(w)
        w = nn.functional.dropout(w, p=self.dropout, training=self.training)
        y = (w @ v).transpose(1, 2).flatten(2)
        return self.out_proj(y), w.mean(dim=1)
