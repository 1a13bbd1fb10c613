"""What every attention layer of ours shares: its spec, its watchers, the way of a call; and modules of shapes alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise.backends.cache import KVCache
from headwise.backends.torch_ import Rotation
from headwise.errors import HeadwiseError
from headwise.files import read_toml
from headwise.masks import Mask, all_of, bare_mask_error, bounds
from headwise.records import Call
from headwise.spec import AttentionSpec, Options

_numbers = itertools.count()  # of layers, one each
# What those type who come from torch.nn, transformers or a course, and what it is called here: in "built" of the
# arguments of a layer, in "called" of those of a call, in "asked" of a layer's attributes.
ELSEWHERE = read_toml("layer/elsewhere.toml")


class AttentionLayer(nn.Module):
    """What `MultiHeadAttention` and `MultiHeadLatentAttention` share."""

    spec: AttentionSpec
    q_proj: nn.Linear
    o_proj: nn.Linear | None
    sink: nn.Parameter | None
    watchers: list[Callable[[Call], Tensor | None]]

    def __init__(self, spec: AttentionSpec, rotation: Rotation | None = None) -> None:
        super().__init__()
        self.spec = spec
        self._rotation = rotation
        # Each gets the `Call` of every forward pass; what it returns, unless None, takes the place of `out`.
        self.watchers = []
        self._number = next(_numbers)  # by which a cache knows its layer

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is another layer: a cache must not take it for this one, and nobody watches it."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._number = next(_numbers)
        self.watchers = []

    @classmethod
    def from_spec(
        cls,
        spec: AttentionSpec,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """The layer that a spec describes."""
        # A spec's instance variables are its fields, and a layer's arguments.
        return cls(**vars(spec), device=device, dtype=dtype)  # type: ignore[call-arg]

    def reset_parameters(self) -> None:
        """Draw anew what belongs to no module inside, which each have such a method: the sink, which starts at 0."""
        if self.sink is not None:
            nn.init.zeros_(self.sink)

    def mask_with(
        self, mask: Mask | None, cache: KVCache | None = None, n_queries: int = 0
    ) -> Mask | None:
        """The layer's own mask joined with that of a call, whose `n_queries` follow what a cache has seen."""
        of_layer = self.spec.mask
        if of_layer is None or cache is None:
            return all_of((of_layer, mask))
        start = cache.length
        first = cache.length - cache.kept
        end = start + n_queries
        _, high = bounds(of_layer)
        # whether a mask forbids what comes later, code that is traced cannot look up
        is_causal = torch.compiler.is_compiling() or (high is not None and high <= 0)
        rows = (part.rows(start, end, first, is_causal) for part in of_layer.parts())
        return all_of((*rows, mask))

    @property
    def n_heads(self) -> int:
        return self.spec.n_heads

    @property
    def n_kv_heads(self) -> int:
        return self.spec.n_kv_heads

    @property
    def d_model(self) -> int:
        return self.spec.d_model

    @property
    def head_dim(self) -> int:
        return self.spec.head_dim

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name not in ELSEWHERE["asked"]:
                raise
            hint = ELSEWHERE["asked"][name]
            raise AttributeError(f"{error}; it is here {hint}") from None

    def options(self, mask: Mask | None, gate: Tensor | None) -> Options:
        """What the layer passes to `attend` besides q, k and v."""
        dropout = self.spec.dropout if self.training else 0.0
        return Options(
            mask,
            self.spec.scale,
            self.spec.softcap,
            self.sink,
            dropout,
            gate,
            self.spec.kv_index,
        )

    def split(self, x: Tensor, n_heads: int, width: int) -> Tensor:
        """(B,T,h*d) -> (B,h,T,d): head h is the h-th slice of the width, d wide."""
        held = x.shape[-1] / width
        if held != n_heads:
            raise HeadwiseError(
                f"this process holds {held:g} of {n_heads} heads, as tensor parallelism leaves them; run the whole "
                "layer in each process"
            )
        return x.reshape(*x.shape[:2], n_heads, width).transpose(1, 2)

    def ready(
        self,
        x: Tensor,
        n_heads: int,
        width: int,
        norm: nn.Module | None,
        start: int,
        positions: Tensor | None,
    ) -> Tensor:
        """Projected queries or keys as (B,h,T,d), normed and rotated; which comes first the RoPE says."""
        x_bhtd = self.split(x, n_heads, width)
        rotation = self._rotation
        norms_last = rotation and rotation.rope.before_norm
        if norm and not norms_last:
            x_bhtd = normed(norm, x_bhtd)
        if rotation:
            x_bhtd = rotation(x_bhtd, start, positions)
        if norm and norms_last:
            x_bhtd = normed(norm, x_bhtd)
        return x_bhtd

    def answer(self, call: Call) -> Tensor:
        """What the layer gives, after all watchers have seen the call, and may have changed what the heads give."""
        for watcher in self.watchers:
            changed = watcher(call)
            call = call if changed is None else call._replace(out=changed)
        joined = call.out.transpose(1, 2).flatten(2)
        return self.o_proj(joined) if self.o_proj else joined

    def check_self(
        self,
        x: Tensor,
        mask: Mask | None,
        cache: KVCache | None,
        positions: Tensor | None,
    ) -> None:
        """Raise HeadwiseError where x (B,T,d_in), masks, a cache or positions do not fit the layer."""
        self.check_fit("x", x, "d_in")
        # beside a mask of the layer `mask_with` has refused it
        if mask is not None and not isinstance(mask, Mask):
            raise bare_mask_error(mask)
        if positions is not None:
            self._check_positions(x, positions)
        # an empty cache of others is falsy
        if cache is not None:
            if not isinstance(cache, KVCache):
                raise HeadwiseError(
                    f"cache is a {type(cache).__name__}; a layer takes the one KVCache that is its own: pass "
                    f"cache=hw.KVCache(), or caches[i] of a list"
                )
            # a layer has a number of its own, and so has its copy
            cache.check_layer(self._number)
            if cache.batch not in (None, x.shape[0]):
                raise HeadwiseError(
                    f"the cache holds {cache.batch} documents, x has {x.shape[0]}; use one cache for each batch"
                )

    def check_fit(self, name: str, x: Tensor, field: str) -> None:
        if x.ndim != 3:
            raise HeadwiseError(
                f"{name} has shape {tuple(x.shape)}, {x.ndim} axes; the layer takes (batch, tokens, width), or all of "
                f"one document as (tokens, width)"
            )
        width = getattr(self.spec, field)
        if x.shape[-1] != width:
            raise HeadwiseError(
                f"{name} has width {x.shape[-1]}; this layer has {field}={width}"
            )
        # Of an adapter that stands for W_Q no dtype is known: then any x passes.
        weight = self.q_proj.weight if type(self.q_proj) is nn.Linear else x
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise HeadwiseError(
                f"{name} is {x.dtype} and the weights of this layer are {weight.dtype}; pass "
                f"{name}.to({weight.dtype}), or cast the layer"
            )

    def _check_positions(self, x: Tensor, positions: Tensor) -> None:
        if not self._rotation:
            raise HeadwiseError(
                "positions= is for RoPE, and this layer has none; build it with rope=RoPE()"
            )
        is_whole = isinstance(positions, Tensor) and not (
            positions.is_floating_point() or positions.dtype == torch.bool
        )
        shapes = (x.shape[1],), tuple(x.shape[:2])
        if not is_whole or tuple(positions.shape) not in shapes:
            raise HeadwiseError(
                f"positions= must be a tensor of whole numbers, one for each of {x.shape[1]} tokens of "
                f"{x.shape[0]} documents, {shapes[0]} or {shapes[1]}"
            )

    def extra_repr(self) -> str:
        return repr(self.spec)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """x normed in the precision of the gain, and given back in its own: under autocast that is lower."""
    # nn.Identity, of latents without norm, has no gain
    return norm(x.to(getattr(norm, "weight", x).dtype)).to(x.dtype)


def check_rolling(window: int, mask: Mask | None) -> None:
    """A rolling cache has only the latest keys: the mask must want no others, and must not count from the first."""
    for part in mask.parts() if mask else ():
        if part.counts_from_first():
            raise HeadwiseError(
                f"{part!r} with a cache of window={window}: it counts from the first key, which rolls away; "
                f"leave it out, or its offset, or use a growing cache"
            )
    low, _ = bounds(mask)
    if low is None or low < -window:
        raise HeadwiseError(
            f"a cache of window={window} drops what is older, and this layer looks further back with mask={mask}; "
            f"give the layer Window(left, 0) with left <= {window}, or use a growing cache"
        )


class _NothingDrawn(TorchFunctionMode):
    """While it is on, the functions of torch.nn.init leave their tensor as it is."""

    # torch hands every call of its functions to the mode instead.
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            # the tensor, their first argument, which they give back
            return next(iter((*args, *kwargs.values())))
        return func(*args, **kwargs)


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Modules that are built within this block have shapes and no numbers: they lie on the meta device.

    First weights are not drawn: on the meta device torch only pretends to draw, for which it imports its compiler, and
    that takes over a second.
    """
    with torch.device("meta"), _NothingDrawn():
        yield
