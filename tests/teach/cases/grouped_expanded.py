import torch
from torch import nn
import torch.nn.functional as F


class GQA(nn.Module):
    """Grouped-query attention."""

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int, bias: bool = False):
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.hd = d_model // n_heads
        self.q_proj = nn.Linear(d_model, n_heads * self.hd, bias=bias)
        self.k_proj = nn.Linear(d_model, n_kv_heads * self.hd, bias=bias)
        self.v_proj = nn.Linear(d_model, n_kv_heads * self.hd, bias=bias)
        self.o_proj = nn.Linear(n_heads * self.hd, d_model, bias=bias)

    def forward(self, x, is_causal=True):
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.n_heads, self.hd).permute(0, 2, 1, 3)
        k = self.k_proj(x).view(B, T, self.n_kv_heads, self.hd).permute(0, 2, 1, 3)
        v = self.v_proj(x).view(B, T, self.n_kv_heads, self.hd).permute(0, 2, 1, 3)
        rep = self.n_heads // self.n_kv_heads
        k = k[:, :, None].expand(-1, -1, rep, -1, -1).flatten(1, 2)
        v = v[:, :, None].expand(-1, -1, rep, -1, -1).flatten(1, 2)
        w = torch.einsum("bhtd,bhsd->bhts", q, k) * self.hd ** -0.5
        if is_causal:
            i = torch.arange(T, device=x.device)
            w = torch.where(i[:, None] >= i[None, :], w, torch.finfo(w.dtype).min)
        w = torch.softmax(w.float(), dim=-1).to(v.dtype)
        o = torch.einsum("bhts,bhsd->bthd", w, v).reshape(B, T, -1)
        return self.o_proj(o)
