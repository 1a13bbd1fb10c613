import torch
import torch.nn as nn


class PaddedSelfAttention(nn.Module):
    """Bidirectional self-attention over padded batches."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, padding_mask=None):
        # padding_mask: (batch, tokens), True for real tokens, False for padding
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q * (C // self.num_heads) ** -0.5) @ k.transpose(-2, -1)
        if padding_mask is not None:
            attn = attn.masked_fill(~padding_mask[:, None, None, :], float("-inf"))
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)
