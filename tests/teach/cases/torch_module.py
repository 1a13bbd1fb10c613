import torch, torch.nn as nn
class SelfAttention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
    def forward(self, x):
        return self.attn(x, x, x, need_weights=False)[0]
