import torch
import torch.nn as nn


class AttentionHead(nn.Module):
    def __init__(self, hidden_size, head_size):
        super().__init__()
        self.wq = nn.Linear(hidden_size, head_size)
        self.wk = nn.Linear(hidden_size, head_size)
        self.wv = nn.Linear(hidden_size, head_size)

    def forward(self, x, key_padding_mask=None):
        scores = self.wq(x) @ self.wk(x).mT / self.wq.out_features ** 0.5
        if key_padding_mask is not None:  # True marks padding
            scores = scores.masked_fill(key_padding_mask.unsqueeze(1), -torch.inf)
        return scores.softmax(-1) @ self.wv(x)


class EncoderSelfAttention(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.heads = nn.ModuleList(AttentionHead(hidden_size, hidden_size // num_heads) for _ in range(num_heads))
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(self, x, key_padding_mask=None):
        return self.output(torch.cat([head(x, key_padding_mask) for head in self.heads], -1))
