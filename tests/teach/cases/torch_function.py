import torch
import torch.nn.functional as F


def attention(q, k, v, mask=None):
    B, H, T, D = q.shape
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * D ** -0.5
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    weights = F.softmax(scores, dim=-1)
    return torch.einsum("bhts,bhsd->bhtd", weights, v)
