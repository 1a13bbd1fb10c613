import torch


class KVCache:
    def __init__(self):
        self.k = None
        self.v = None

    def update(self, k, v):
        # k, v: (batch, heads, new tokens, head_dim)
        if self.k is None:
            self.k, self.v = k, v
        else:
            self.k = torch.cat([self.k, k], dim=2)
            self.v = torch.cat([self.v, v], dim=2)
        return self.k, self.v
