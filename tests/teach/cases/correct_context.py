import torch, torch.nn as nn
class CrossAttention(nn.Module):
    def __init__(self, query_dim, context_dim=None, heads=8, dim_head=64, dropout=0.0):
        super().__init__()
        inner = heads * dim_head
        context_dim = query_dim if context_dim is None else context_dim
        self.h, self.scale = heads, dim_head ** -0.5
        self.to_q = nn.Linear(query_dim, inner, bias=False)
        self.to_k = nn.Linear(context_dim, inner, bias=False)
        self.to_v = nn.Linear(context_dim, inner, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, query_dim), nn.Dropout(dropout))
    def forward(self, x, context=None, mask=None):
        b, n, _ = x.shape
        context = x if context is None else context
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
        q, k, v = (t.view(b, -1, self.h, t.shape[-1] // self.h).transpose(1, 2) for t in (q, k, v))
        s = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            s = s.masked_fill(~mask[:, None, None, :], float('-inf'))
        return self.to_out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, n, -1))
