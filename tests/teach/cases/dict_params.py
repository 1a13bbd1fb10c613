import numpy as np


class SelfAttention:
    def __init__(self, embed_dim, num_heads):
        rng = np.random.RandomState(1)
        self.num_heads = num_heads
        self.params = {name: rng.randn(embed_dim, embed_dim) * 0.1 for name in ("Wq", "Wk", "Wv", "Wo")}
        self.params.update({name: np.zeros(embed_dim) for name in ("bq", "bk", "bv", "bo")})

    def _heads(self, x):
        b, t, c = x.shape
        return x.reshape(b, t, self.num_heads, c // self.num_heads).swapaxes(1, 2)

    def forward(self, x):
        p = self.params
        q = self._heads(x @ p["Wq"] + p["bq"])
        k = self._heads(x @ p["Wk"] + p["bk"])
        v = self._heads(x @ p["Wv"] + p["bv"])
        att = np.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5
        att = np.exp(att - att.max(-1, keepdims=True))
        att /= att.sum(-1, keepdims=True)
        y = np.einsum("bhij,bhjd->bihd", att, v)
        y = y.reshape(x.shape)
        return y @ p["Wo"] + p["bo"]
