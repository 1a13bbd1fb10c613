import torch, torch.nn as nn, torch.nn.functional as F
class Attention(nn.Module):
    def __init__(self, size=30, parts=5):
        super().__init__()
        assert size % parts == 0
        self.n = parts
        self.Wc = nn.Linear(size, size)
        self.Wk = nn.Linear(size, size)
        self.Wv = nn.Linear(size, size)
        self.Wo = nn.Linear(size, size)
    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (m(x).view(B, T, self.n, C // self.n).transpose(1, 2) for m in (self.Wc, self.Wk, self.Wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.Wo(y.transpose(1, 2).reshape(B, T, C))
