import numpy as np


def masked_attention(Q, K, V, key_mask=None):
    """Q, K, V (B, T, d); key_mask (B, T): 1 for real tokens, 0 for padding."""
    scores = Q @ K.transpose(0, 2, 1) / np.sqrt(Q.shape[-1])
    if key_mask is not None:
        scores = np.where(key_mask[:, None, :] == 1, scores, -np.inf)
    scores = scores - scores.max(-1, keepdims=True)
    w = np.exp(scores)
    w /= w.sum(-1, keepdims=True)
    return w @ V
