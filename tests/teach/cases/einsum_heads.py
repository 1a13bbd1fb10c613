import torch
import torch.nn as nn


class MHA(nn.Module):
    def __init__(self, n_heads, d_model, d_head):
        super().__init__()
        self.n_heads, self.d_model, self.d_head = n_heads, d_model, d_head
        self.W_Q = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.02)
        self.W_K = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.02)
        self.W_V = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.02)
        self.W_O = nn.Parameter(torch.randn(n_heads, d_head, d_model) * 0.02)
        self.b_Q = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_K = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_V = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_O = nn.Parameter(torch.zeros(d_model))

    def forward(self, resid):
        q = torch.einsum("bpm,hmd->bphd", resid, self.W_Q) + self.b_Q
        k = torch.einsum("bpm,hmd->bphd", resid, self.W_K) + self.b_K
        v = torch.einsum("bpm,hmd->bphd", resid, self.W_V) + self.b_V
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / self.d_head**0.5
        scores = self.apply_causal_mask(scores)
        pattern = scores.softmax(dim=-1)
        z = torch.einsum("bhqk,bkhd->bqhd", pattern, v)
        return torch.einsum("bqhd,hdm->bqm", z, self.W_O) + self.b_O

    def apply_causal_mask(self, scores):
        n = scores.size(-1)
        mask = torch.ones(n, n, dtype=torch.bool).triu(1)
        return scores.masked_fill(mask, -1e5)
