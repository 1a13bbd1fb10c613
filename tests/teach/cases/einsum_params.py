import torch
from torch import nn, einsum


class EinsumMHA(nn.Module):
    def __init__(self, n_heads: int, d_model: int, d_head: int, causal: bool = True):
        super().__init__()
        self.causal = causal
        self.W_Q = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.02)
        self.W_K = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.02)
        self.W_V = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.02)
        self.W_O = nn.Parameter(torch.randn(n_heads, d_head, d_model) * 0.02)
        self.b_Q = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_K = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_V = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_O = nn.Parameter(torch.zeros(d_model))

    def forward(self, x):
        q = einsum("bpm,nmh->bpnh", x, self.W_Q) + self.b_Q
        k = einsum("bpm,nmh->bpnh", x, self.W_K) + self.b_K
        v = einsum("bpm,nmh->bpnh", x, self.W_V) + self.b_V
        scores = einsum("bqnh,bknh->bnqk", q, k) / self.W_Q.shape[-1] ** 0.5
        if self.causal:
            later = torch.triu(torch.ones(scores.shape[-2:], device=x.device), diagonal=1).bool()
            scores = scores.masked_fill(later, -1e5)
        pattern = scores.softmax(dim=-1)
        z = einsum("bnqk,bknh->bqnh", pattern, v)
        return einsum("bqnh,nhm->bqm", z, self.W_O) + self.b_O
