import torch, torch.nn as nn
class MultiHeadAttention(nn.Module):
    def __init__(self, num_hiddens, num_heads, dropout=0.0, bias=False):
        super().__init__()
        self.num_heads = num_heads
        self.dropout = nn.Dropout(dropout)
        self.W_q = nn.Linear(num_hiddens, num_hiddens, bias=bias)
        self.W_k, self.W_v, self.W_o = (nn.Linear(num_hiddens, num_hiddens, bias=bias) for _ in range(3))
    def forward(self, queries, keys, values, valid_lens=None):
        def split(x):
            return x.reshape(x.shape[0], x.shape[1], self.num_heads, -1).permute(0, 2, 1, 3)
        q, k, v = split(self.W_q(queries)), split(self.W_k(keys)), split(self.W_v(values))
        s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if valid_lens is not None:
            m = torch.arange(k.shape[2])[None] < valid_lens[:, None]
            s = s.masked_fill(~m[:, None, None], -1e6)
        return self.W_o((self.dropout(s.softmax(-1)) @ v).permute(0, 2, 1, 3).reshape(*queries.shape))
