import numpy as np


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def multi_head_attention(x, attn_wq, attn_wk, attn_wv, attn_wo, n_head):
    """x (T, n_embd); causal."""
    q, k, v = x @ attn_wq.T, x @ attn_wk.T, x @ attn_wv.T
    T, n_embd = x.shape
    head_dim = n_embd // n_head
    x_attn = np.zeros((T, n_embd))
    for h in range(n_head):
        hs = h * head_dim
        q_h, k_h, v_h = q[:, hs:hs + head_dim], k[:, hs:hs + head_dim], v[:, hs:hs + head_dim]
        attn_logits = q_h @ k_h.T / np.sqrt(head_dim)
        attn_logits = np.where(np.tri(T, dtype=bool), attn_logits, -np.inf)
        x_attn[:, hs:hs + head_dim] = softmax(attn_logits) @ v_h
    return x_attn @ attn_wo.T
