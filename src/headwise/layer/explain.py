"""Which path a call of the layer takes, why not another, and its operations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headwise.backends import paths
from headwise.backends.cache import KVCache
from headwise.backends.torch_ import checked_grid
from headwise.errors import HeadwiseError
from headwise.layer.layer import MultiHeadAttention
from headwise.masks import Mask
from headwise.spec import Sizes, check_per_head
from headwise.table import DECIMAL, plural, scaled


@dataclass(frozen=True)
class Explanation:
    """The way of one call.

    Attributes:
        path: the way taken: "fused", "fused causal", "fused masked", "fused blocks", "fused apart" or "explicit"; the
            top of `headwise.backends.paths` explains them
        refused: for each other way the reason
        sizes: B, H, G, T, S, D, E; S counts what a cache holds
        keys: the number of keys read, after windows have cut K and V
        flops: of the projections and of the attention products, a multiplication and an addition counting 2
    """

    path: str
    refused: dict[str, str]
    sizes: Sizes
    keys: int
    flops: dict[str, int]

    def __str__(self) -> str:
        B, H, G, T, S, _, _ = self.sizes
        queries = "1 query" if T == 1 else f"{T} queries"
        heads = plural(H, "head")
        groups = plural(G, "head")
        summary = f"{self.path}: {queries} of {heads} read {self.keys} of {S} keys of {groups}, batch {B}"
        counts = {"": sum(self.flops.values()), **self.flops}
        flops = [f"{scaled(n, 1000, DECIMAL)} {name}" for name, n in counts.items()]
        lines = [summary, f"  flops  {flops[0]}= {' + '.join(flops[1:])}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)


def explain(
    layer: MultiHeadAttention,
    x: Tensor,
    context: Tensor | None = None,
    values: Tensor | None = None,
    *,
    mask: Mask | None = None,
    cache: KVCache | None = None,
    positions: Tensor | None = None,
    gate: Tensor | None = None,
) -> Explanation:
    """What `layer(x, ...)` would do: the way it takes, why no other, and what that costs.

    Nothing is computed, and the cache stays as it is. The other arguments are those of `MultiHeadAttention.forward`.

    Args:
        layer: a layer of ours
    """
    if not isinstance(layer, MultiHeadAttention):
        raise HeadwiseError(
            f"explain reads a MultiHeadAttention; this is a {type(layer).__name__}; pass a layer, and what it is "
            f"called with"
        )
    # as they were passed: a cache knows the very tensors that it was filled from
    sources = context, context if values is None else values
    x, context, _, mask, _ = layer.prepared(x, context, values, mask, cache, positions)
    spec = layer.spec
    B, T, _ = x.shape
    held = cache.kept if cache else 0
    source = x if context is None else context
    # tokens that become keys
    n_new = 0 if cache and cache.holds_context else source.shape[1]
    sizes = Sizes(
        B, spec.n_heads, spec.n_kv_heads, T, held + n_new, spec.head_dim, spec.value_dim
    )
    options = layer.options(mask, gate)
    # What follows, up to the path, raises what the call would raise.
    grid = checked_grid(mask, sizes, x.device)
    if gate is not None:
        check_per_head("gate", gate.shape, sizes.H)
    if cache and cache.holds_context:
        cache.held(sources)
    elif cache:
        cache.check_room(n_new)
    path = paths.choose(sizes, options, grid)
    explicit = paths.why_explicit(sizes, options)
    refused = {
        name: explicit or reason
        for name, reason in paths.REASONS.items()
        if name != path.name
    }
    # A multiplication and an addition for each weight that a token meets, and for each pair and feature: hence the 2.
    per_token = T * (spec.q_weights + spec.o_weights) + n_new * spec.kv_weights
    flops = {"projections": 2 * B * per_token}
    flops["attention"] = 2 * sizes.H * path.pairs(B, T) * (sizes.D + sizes.E)
    return Explanation(
        path=path.name,
        refused=refused,
        sizes=sizes,
        keys=path.last - path.first,
        flops=flops,
    )
