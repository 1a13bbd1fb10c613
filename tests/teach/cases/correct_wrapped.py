import torch
from torch import nn


class CausalMHA(nn.Module):
    def __init__(self, d_model, nhead, dropout=0.1, block_size=64):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, nhead, dropout=dropout, batch_first=True)
        self.register_buffer("future", torch.triu(torch.ones(block_size, block_size), 1).bool())

    def forward(self, x):
        T = x.size(1)
        y, _ = self.attn(x, x, x, attn_mask=self.future[:T, :T], need_weights=False)
        return y
