import numpy as np

def softmax(z, axis=-1):
    z = z - z.max(axis=axis, keepdims=True)
    e = np.exp(z)
    return e / e.sum(axis=axis, keepdims=True)

class SelfAttention:
    def __init__(self, embed_dim, num_heads, seed=42):
        rng = np.random.RandomState(seed)
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.Wq = rng.randn(embed_dim, embed_dim) * 0.02
        self.Wk = rng.randn(embed_dim, embed_dim) * 0.02
        self.Wv = rng.randn(embed_dim, embed_dim) * 0.02
        self.Wo = rng.randn(embed_dim, embed_dim) * 0.02

    def forward(self, X):
        """X: (T, embed_dim)"""
        T, d = X.shape
        Q, K, V = X @ self.Wq, X @ self.Wk, X @ self.Wv
        Q = Q.reshape(T, self.num_heads, self.head_dim).transpose(1, 0, 2)
        K = K.reshape(T, self.num_heads, self.head_dim).transpose(1, 0, 2)
        V = V.reshape(T, self.num_heads, self.head_dim).transpose(1, 0, 2)
        scores = Q @ K.transpose(0, 2, 1) / np.sqrt(self.head_dim)
        future = np.triu(np.ones((T, T)), k=1) * -1e9
        weights = softmax(scores + future)
        out = (weights @ V).transpose(1, 0, 2).reshape(T, d)
        return out @ self.Wo
