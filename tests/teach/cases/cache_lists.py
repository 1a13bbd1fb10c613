import numpy as np
class KVCache:
    """Holds keys and values (T, d)."""
    def __init__(self):
        self.keys = []
        self.values = []
    def add(self, k, v):
        self.keys.append(k); self.values.append(v)
    def get(self):
        return np.concatenate(self.keys, axis=0), np.concatenate(self.values, axis=0)
