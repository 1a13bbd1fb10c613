import torch


def chunked_attention(q, k, v, mask=None, chunk=3):
    """Online softmax over blocks of keys; q, k, v (batch, heads, tokens, d); mask True = keep."""
    B, H, T, D = q.shape
    top = torch.full((B, H, T, 1), -torch.inf)
    total = torch.zeros(B, H, T, 1)
    out = torch.zeros(B, H, T, v.shape[-1])
    for start in range(0, k.shape[2], chunk):
        s = q @ k[:, :, start : start + chunk].transpose(-1, -2) / D ** 0.5
        if mask is not None:
            s = s.masked_fill(~mask[..., start : start + chunk], -1e9)
        new = torch.maximum(top, s.max(-1, keepdim=True).values)
        p = torch.exp(s - new)
        old = torch.exp(top - new)
        total = total * old + p.sum(-1, keepdim=True)
        out = out * old + p @ v[:, :, start : start + chunk]
        top = new
    return out / total
