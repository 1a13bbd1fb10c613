"""The key/value cache: what earlier tokens said, kept so that it need not be computed again."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.errors import HeadwiseError


class KVCache:
    """Keys (B,G,S,D) and values (B,G,S,E) of the tokens seen so far; S grows as they come.

    Use one cache for each layer and each batch of documents. It grows by doubling, so that an append costs O(1) per
    token on average. It changes speed, never the answer: `layer(x, cache=cache)` on the next tokens equals the last
    rows of `layer` on all of them.

    Tensors that carry gradients are joined anew at each append, so that gradients flow through the cache.
    """

    def __init__(self) -> None:
        self.length = 0
        self._k: Tensor | None = None
        self._v: Tensor | None = None

    def __repr__(self) -> str:
        return f"KVCache(length={self.length}, bytes={self.nbytes})"

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values kept; the room that waits for more is not counted."""
        kept = [x[:, :, : self.length] for x in (self._k, self._v) if x is not None]
        return sum(x.numel() * x.element_size() for x in kept)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys (B,G,T,D) and values (B,G,T,E); returns all of them, (B,G,S,D) and (B,G,S,E)."""
        self._check(k, v)
        length = self.length + k.shape[2]
        self._k, all_k = _appended(self._k, k, self.length)
        self._v, all_v = _appended(self._v, v, self.length)
        self.length = length
        return all_k, all_v

    def _check(self, k: Tensor, v: Tensor) -> None:
        for name, kept, new in (("keys", self._k, k), ("values", self._v, v)):
            if kept is None:
                continue
            old_shape, new_shape = ((x.shape[0], x.shape[1], x.shape[3]) for x in (kept, new))
            if old_shape != new_shape:
                raise HeadwiseError(
                    f"the cache holds {name} of (batch, heads, width) = {old_shape}, and these are {new_shape}; "
                    f"use one cache for each layer and batch"
                )
            if (kept.dtype, kept.device) != (new.dtype, new.device):
                raise HeadwiseError(
                    f"the cache holds {name} in {kept.dtype} on {kept.device}, not {new.dtype} on {new.device}"
                )


def _appended(store: Tensor | None, new: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The store with `new` behind its first `length` positions, and a view of what it then holds."""
    total = length + new.shape[2]
    if store is not None and (new.requires_grad or store.requires_grad):
        joined = torch.cat([store[:, :, :length], new], 2)
        return joined, joined
    if store is None or store.shape[2] < total:
        room = new if store is None else new.new_empty(*new.shape[:2], max(total, 2 * length), new.shape[3])
        if store is None:
            return room, room
        room[:, :, :length] = store[:, :, :length]
        store = room
    store[:, :, length:total] = new
    return store, store[:, :, :total]
