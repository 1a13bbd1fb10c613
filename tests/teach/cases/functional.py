import numpy as np


def multi_head_attention(X, W_q, W_k, W_v, W_o, n_heads, causal=True):
    """X (T, d_model); all W (d_model, d_model)."""
    T, d_model = X.shape
    d_k = d_model // n_heads
    Q, K, V = X @ W_q, X @ W_k, X @ W_v
    heads = []
    for h in range(n_heads):
        cols = slice(h * d_k, (h + 1) * d_k)
        S = Q[:, cols] @ K[:, cols].T / np.sqrt(d_k)
        if causal:
            S = np.where(np.tril(np.ones((T, T))) == 1, S, -np.inf)
        A = np.exp(S - S.max(axis=1, keepdims=True))
        A = A / A.sum(axis=1, keepdims=True)
        heads.append(A @ V[:, cols])
    return np.concatenate(heads, axis=-1) @ W_o
