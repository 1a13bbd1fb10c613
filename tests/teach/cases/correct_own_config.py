import torch, torch.nn as nn, torch.nn.functional as F
class Cfg:
    width = 30
    blocks = 5
class Attention(nn.Module):
    def __init__(self, config=Cfg):
        super().__init__()
        self.n = config.blocks
        self.attn_wq = nn.Linear(config.width, config.width, bias=False)
        self.attn_wk = nn.Linear(config.width, config.width, bias=False)
        self.attn_wv = nn.Linear(config.width, config.width, bias=False)
        self.attn_wo = nn.Linear(config.width, config.width, bias=False)
    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (m(x).view(B, T, self.n, C // self.n).transpose(1, 2) for m in (self.attn_wq, self.attn_wk, self.attn_wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attn_wo(y.transpose(1, 2).reshape(B, T, C))
