import torch
from torch import nn


class GPTNeoAttention(nn.Module):
    """Fused weights stand head by head: q, k, v of head 0, then of head 1."""

    def __init__(self, hidden_size, num_attention_heads):
        super().__init__()
        self.n = num_attention_heads
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states):
        B, T, C = hidden_states.shape
        qkv = self.query_key_value(hidden_states).view(B, T, self.n, 3 * C // self.n).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=-1)
        s = q @ k.mT * (C // self.n) ** -0.5
        keep = torch.arange(T)[:, None] >= torch.arange(T)[None, :]
        s = torch.where(keep, s, torch.finfo(s.dtype).min)
        return self.dense((s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))
