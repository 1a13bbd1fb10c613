"""The parameters of a layer, as its spec says: Linears, gains, sinks; and modules that have shapes alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise.records import Call
from headwise.rungs.tensor import Rotation
from headwise.spec import AttentionSpec

_numbers = itertools.count()  # of layers, one each, in the order in which they are made


class Projections(nn.Module):
    """The parameters of `MultiHeadAttention`, whose docstring names them.

    A class apart, as `layer.head` reads them and `layer.layer` imports that.

    fields  those of AttentionSpec, which decide which parameters there are
    """

    def __init__(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None, **fields: Any
    ) -> None:
        super().__init__()
        spec = self.spec = AttentionSpec(**fields)
        linear = partial(nn.Linear, device=device, dtype=dtype)
        norm = partial(nn.RMSNorm, eps=spec.qk_norm_eps, device=device, dtype=dtype)
        latent_norm = norm if spec.latent_norm else nn.Identity
        zeros = partial(torch.zeros, device=device, dtype=dtype)
        if spec.q_latent_dim is None:
            self.q_proj = linear(spec.d_in, spec.q_dim, bias=spec.q_bias)
        else:
            self.q_down = linear(spec.d_in, spec.q_latent_dim, bias=spec.q_bias)
            self.q_latent_norm = latent_norm(spec.q_latent_dim)
            # As in DeepSeek's layers, what reads a latent has no bias: the matrix that makes it may have one.
            self.q_proj = linear(spec.q_latent_dim, spec.q_dim, bias=False)
        if spec.latent_dim is None:
            self.k_proj = linear(spec.d_context, spec.k_dim, bias=spec.kv_bias)
            self.v_proj = linear(spec.d_values, spec.v_dim, bias=spec.kv_bias)
        else:
            self.kv_down = linear(spec.d_context, spec.latent_dim + spec.rope_dim, bias=spec.kv_bias)
            self.kv_latent_norm = latent_norm(spec.latent_dim)
            self.kv_up = linear(spec.latent_dim, spec.n_heads * spec.up_dim, bias=False)
        self.o_proj = linear(spec.joined_dim, spec.d_out, bias=spec.out_bias) if spec.out_proj else None
        self.q_norm = norm(spec.head_dim) if spec.qk_norm else None
        self.k_norm = norm(spec.head_dim) if spec.qk_norm else None
        self.sink = nn.Parameter(zeros(spec.n_heads)) if spec.sink else None
        rule = spec.relative_bias
        self.relative_bias = nn.Parameter(zeros(rule.n_buckets, spec.n_heads)) if rule else None
        # Each gets the `Call` of every forward pass; what it returns, unless None, takes the place of `out`.
        self.watchers: list[Callable[[Call], Tensor | None]] = []
        self._rotation = None
        if spec.rope is not None and spec.latent_dim is None:
            self._rotation = Rotation(spec.rope, spec.head_dim)
        elif spec.rope is not None:  # with a latent only the last features, which carry positions, are rotated
            self._rotation = Rotation(spec.rope, spec.rope_dim, last=True)
        self._number = next(_numbers)  # by which a cache knows its layer

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is another layer: a cache must not take it for this one, and nobody watches it."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._number, self.watchers = next(_numbers), []

    @classmethod
    def from_spec(
        cls, spec: AttentionSpec, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """The layer that a spec describes."""
        return cls(**vars(spec), device=device, dtype=dtype)  # a spec's instance variables are its fields


class _NothingDrawn(TorchFunctionMode):
    """While it is on, the functions of torch.nn.init leave their tensor as it is."""

    # torch hands every call of its functions to the mode instead.
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return next(iter((*args, *kwargs.values())))  # the tensor, their first argument, which they give back
        return func(*args, **kwargs)


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Modules that are built within this block have shapes and no numbers: they lie on the meta device.

    First weights are not drawn: on the meta device torch only pretends to draw, for which it imports its compiler, and
    that takes over a second.
    """
    with torch.device("meta"), _NothingDrawn():
        yield
