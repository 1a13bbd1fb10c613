"""Rotary position embedding on torch tensors. The formula and its fields stand in `spec.RoPE`."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.positions import RoPE
from headwise.rungs.tensor import widest


class Rotation:
    """Turns the features of queries and keys by angles that grow with the position.

    With `last` it turns the last features instead of the first.
    Cosines and sines are kept in float32 for as many positions as were asked for so far, whatever the model's dtype.
    """

    def __init__(self, rope: RoPE, head_dim: int, last: bool = False) -> None:
        self.rope, self.last = rope, last
        self.dim = rope.dim or head_dim
        self.frequencies, self.factor = rope.frequencies(head_dim)
        self._cos = self._sin = torch.empty(0, self.dim // 2)

    def __call__(self, x_bhtd: Tensor, start: int, positions: Tensor | None = None) -> Tensor:
        """x (B,H,T,D) turned; position of the first token `start`, or `positions` (T,) or (B,T) of all."""
        # A table kept while torch traces would hold symbols, and its size would be a reason to compile again.
        real = type(x_bhtd) is Tensor and not torch.compiler.is_compiling()
        cos, sin = self._angles(start, x_bhtd.shape[2], positions, x_bhtd.device, real)
        first, second = x_bhtd.tensor_split([-self.dim if self.last else self.dim], -1)
        turned, rest = (second, first) if self.last else (first, second)
        if self.rope.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        else:
            a, b = turned.chunk(2, -1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        turned = turned.to(x_bhtd.dtype)
        if not rest.shape[-1]:
            return turned
        return torch.cat([rest, turned] if self.last else [turned, rest], -1)

    def _angles(
        self, start: int, length: int, positions: Tensor | None, device: torch.device, real: bool
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines, (T, dim/2) or (B, 1, T, dim/2)."""
        if positions is not None:
            cos, sin = self._cos_sin(positions.to(device))
            return (cos[:, None], sin[:, None]) if positions.ndim == 2 else (cos, sin)
        end = start + length
        if not real:
            return self._cos_sin(torch.arange(start, end, device=device))
        if self._cos.shape[0] < end or self._cos.device != device:
            self._cos, self._sin = self._cos_sin(torch.arange(max(end, 2 * self._cos.shape[0]), device=device))
        return self._cos[start:end], self._sin[start:end]

    def _cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """In float64 first: at position 100,000 a float32 angle is off by 0.004."""
        with torch.inference_mode(False):  # the table outlives the call, and must serve training later
            place = positions.device
            positions = positions.cpu() if widest(place) != torch.float64 else positions.clone()
            frequencies = torch.tensor(self.frequencies, dtype=torch.float64, device=positions.device)
            angles = positions[..., None].double() * frequencies
            return (angles.cos() * self.factor).float().to(place), (angles.sin() * self.factor).float().to(place)
