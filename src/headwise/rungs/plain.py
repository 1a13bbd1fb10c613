"""The plain rung: attention as loops over nested lists. This is the definition; the other rungs are held to it.

Numbers are floats, or `Value`s of the scalar autograd where gradients are wanted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from headwise.errors import HeadwiseError
from headwise.masks import Mask
from headwise.records import Trace
from headwise.rungs.autograd import Scalar, dot, exp, log, number, tanh
from headwise.shapes import check_even, flat, shape_of
from headwise.spec import Options, check_per_head, check_shapes, check_softcap, resolve_kv_index

Row = Sequence[Scalar]


@dataclass
class _Grid:
    """One place (b, h, i, j) of a call, for the mask algebra."""

    B: int
    H: int
    T: int
    S: int
    b: int = 0
    h: int = 0
    i: int = 0
    j: int = 0

    def read(self, values: Any) -> Iterable[Any]:
        return flat(values)

    def pick(self, values: Any, axes: str) -> Any:
        place = {"b": self.b, "h": self.h, "t": self.i, "s": self.j}
        for axis in axes[len(axes) - len(shape_of(values)) :]:
            values = values[0 if len(values) == 1 else place[axis]]
        return values


def attend(q: Any, k: Any, v: Any, options: Options) -> Any:
    """Multi-head attention of nested lists; see `headwise.attend`."""
    return trace(q, k, v, options).out


def trace(q: Any, k: Any, v: Any, options: Options) -> Trace:
    """As `attend`, with every step kept. q (H,T,D) without a batch axis gives records without one."""
    mask, scale, softcap, sink, dropout, gate, _ = options
    if dropout:
        raise HeadwiseError(f"dropout={dropout} on nested lists: dropout needs the tensor rung; pass torch tensors")
    if len(shape_of(q)) == 3:
        batched = trace([q], [k], [v], options)
        return Trace(**{f.name: getattr(batched, f.name)[0] for f in fields(Trace)})
    B, H, G, T, S, D, _ = check_shapes(check_even("q", q), check_even("k", k), check_even("v", v))
    check_softcap(softcap)
    for name, per_head in (("sink", sink), ("gate", gate)):
        if per_head is not None:
            check_per_head(name, shape_of(per_head), H)
    kv_index = resolve_kv_index(H, G, options.kv_index)
    scale = 1 / math.sqrt(D) if scale is None else scale
    allowed, bias = _masks(mask, _Grid(B, H, T, S))

    steps = Trace([], [], [], [], [], [])
    for b in range(B):
        heads = []
        for h in range(H):
            g = kv_index[h]
            # A key that no query of the heads that read it may attend is not read: it stands as zeros.
            heard = [any(allowed[b][o][i][j] for o in range(H) if kv_index[o] == g for i in range(T)) for j in range(S)]
            keys = [k[b][g][j] if heard[j] else [0.0] * D for j in range(S)]
            one_sink = None if sink is None else sink[h]
            one_gate = None if gate is None else gate[h]
            heads.append(
                [
                    _row(q[b][h][i], keys, v[b][g], allowed[b][h][i], bias[b][h][i], scale, softcap, one_sink, one_gate)
                    for i in range(T)
                ]
            )
        for step, name in enumerate(f.name for f in fields(Trace)):
            getattr(steps, name).append([[row[step] for row in head] for head in heads])
    return steps


def _row(
    q_d: Row,
    keys_sd: Sequence[Row],
    values_se: Sequence[Row],
    allowed_s: Sequence[bool],
    bias_s: Row,
    scale: float,
    softcap: float | None,
    sink: Scalar | None,
    gate: Scalar | None,
) -> tuple[list[Scalar], list[Scalar], list[Scalar], list[Scalar], Scalar, list[Scalar]]:
    """One query of one head: scores, capped, masked, weights, lse, out."""
    scores = [dot(q_d, key_d) * scale for key_d in keys_sd]
    capped = scores if softcap is None else [softcap * tanh(s / softcap) for s in scores]
    masked: list[Scalar] = [
        c + bias if ok else -math.inf for c, bias, ok in zip(capped, bias_s, allowed_s, strict=True)
    ]
    seen = [j for j, ok in enumerate(allowed_s) if ok]
    weights: list[Scalar] = [0.0] * len(scores)
    width = len(values_se[0]) if values_se else 0
    if not seen:
        return scores, capped, masked, weights, -math.inf, [0.0] * width

    # The largest logit is taken off before exp, so that nothing overflows; it cancels in the ratio.
    logits = [masked[j] for j in seen] + ([] if sink is None else [sink])
    top = max(number(x) for x in logits)
    powers = [exp(x - top) for x in logits]
    total = sum(powers)
    for j, power in zip(seen, powers, strict=False):  # the sink's power, at the end, has no key
        weights[j] = power / total
    lse = log(total) + top

    seen_weights = [weights[j] for j in seen]
    out = [dot(seen_weights, [values_se[j][e] for j in seen]) for e in range(width)]
    if gate is not None:
        out = [gate * x for x in out]
    return scores, capped, masked, weights, lse, out


def _masks(mask: Mask | None, grid: _Grid) -> tuple[Any, Any]:
    """Who may attend (bool) and what is added (float), both as nested lists (B,H,T,S)."""
    if mask is not None:
        mask.check(grid)

    def one(b: int, h: int, i: int, j: int) -> tuple[bool, Scalar]:
        grid.b, grid.h, grid.i, grid.j = b, h, i, j
        allowed, bias = (None, None) if mask is None else (mask.allowed(grid), mask.bias(grid))
        bias = 0.0 if bias is None else bias
        return (allowed is None or bool(allowed)) and number(bias) != -math.inf, bias

    pairs = [
        [[[one(b, h, i, j) for j in range(grid.S)] for i in range(grid.T)] for h in range(grid.H)]
        for b in range(grid.B)
    ]
    allowed, bias = ([[[[pair[n] for pair in row] for row in head] for head in doc] for doc in pairs] for n in (0, 1))
    return allowed, bias
