import torch
from torch import nn
import torch.nn.functional as F


class QwenAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n, self.g, self.d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.n * self.d, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.g * self.d, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.g * self.d, bias=False)
        self.o_proj = nn.Linear(self.n * self.d, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(self.d, eps=1e-6)
        self.k_norm = nn.RMSNorm(self.d, eps=1e-6)

    def forward(self, x, position_embeddings):
        B, T, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(B, T, self.n, self.d)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(B, T, self.g, self.d)).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.g, self.d).transpose(1, 2)
        cos, sin = position_embeddings
        half = self.d // 2
        turn = lambda t: t * cos + torch.cat([-t[..., half:], t[..., :half]], -1) * sin
        y = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))
