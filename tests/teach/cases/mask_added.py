import torch, math
import torch.nn.functional as F

class MHA(torch.nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.qkv = torch.nn.Linear(embed_dim, 3 * embed_dim)
        self.out = torch.nn.Linear(embed_dim, embed_dim)

    def forward(self, x, attn_mask=None):
        """attn_mask: float mask added to the scores, 0 or -inf"""
        B, L, E = x.shape
        qkv = self.qkv(x).reshape(B, L, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.head_dim)
        if attn_mask is not None:
            scores = scores + attn_mask
        return self.out(F.softmax(scores, -1).matmul(v).permute(0, 2, 1, 3).reshape(B, L, E))
