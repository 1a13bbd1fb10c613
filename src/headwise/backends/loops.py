"""The loop backend: attention as loops over nested lists. This is the definition; the other backends are held to it.

`_head` is the formula, softmax(q k^T * scale) v. Around it stand the checks, the mask and the loops over documents and
heads. Numbers are floats, or `Value`s of the scalar autograd where gradients are wanted.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headwise.backends.autograd import Scalar, dot, exp, log, number, tanh
from headwise.errors import HeadwiseError
from headwise.masks import Mask
from headwise.records import Trace
from headwise.shapes import check_even, flat, shape_of
from headwise.spec import (
    Options,
    check_per_head,
    check_scores,
    check_shapes,
    resolve_kv_index,
)

Vector = Sequence[Scalar]
Matrix = Sequence[Vector]


def attend(q: list[Any], k: list[Any], v: list[Any], options: Options) -> list[Any]:
    """Multi-head attention of nested lists; see `headwise.attend`."""
    return trace(q, k, v, options).out


def trace(
    q: list[Any], k: list[Any], v: list[Any], options: Options
) -> Trace[list[Any]]:
    """As `attend`, with every step kept. q (H,T,D) without a batch axis gives records without one."""
    mask, scale, softcap, sink, dropout, gate, kv_index = options
    if dropout:
        raise HeadwiseError(
            f"dropout={dropout} on nested lists: dropout needs the torch backend; pass torch tensors"
        )
    if len(shape_of(q)) == 3:
        batched = trace([q], [k], [v], options)
        # each field without its axis of documents
        return Trace(*(steps[0] for steps in vars(batched).values()))
    B, H, G, T, S, D, _ = check_shapes(
        check_even("q", q), check_even("k", k), check_even("v", v)
    )
    check_scores(scale, softcap)
    for name, per_head in (("sink", sink), ("gate", gate)):
        if per_head is not None:
            check_per_head(name, shape_of(per_head), H)
    kv_index = resolve_kv_index(H, G, kv_index)
    scale = 1 / math.sqrt(D) if scale is None else scale
    grid = _Grid(B, H, T, S)
    if mask is not None:
        mask.check(grid)

    documents = []
    for b in range(B):
        masks = [_mask_of_head(mask, grid, b, h) for h in range(H)]
        heads = []
        for h in range(H):
            g = kv_index[h]
            # A key that no query of the heads of its key/value head may attend is not read: it stands as zeros. The
            # other backends have one K for all these heads, so this backend asks them all, too: its trace has the same
            # scores as theirs.
            rows = []  # of who may attend
            for n in range(H):
                if kv_index[n] == g:
                    rows += masks[n][0]
            keys = []
            for j, key in enumerate(k[b][g]):
                keys.append(key if any(row[j] for row in rows) else [0.0] * D)
            # Values need no zeros: `_row_out` reads only those that its query may attend.
            inputs = q[b][h], keys, v[b][g], *masks[h]
            # Either may be an array: `list` is there for the types alone.
            extras = [None if x is None else list(x)[h] for x in (sink, gate)]
            heads.append(_head(*inputs, scale, softcap, *extras))
        documents.append(heads)
    # Traces of heads become one Trace, each of whose fields has the axes of documents and heads in front.
    steps = {}
    for name in Trace.__dataclass_fields__:
        steps[name] = [[getattr(head, name) for head in heads] for heads in documents]
    return Trace(**steps)


def _head(
    q: Matrix,  # (T,D)
    k: Matrix,  # (S,D)
    v: Matrix,  # (S,E)
    allowed: Sequence[Sequence[bool]],  # (T,S)
    bias: Matrix,  # (T,S)
    scale: float,
    softcap: float | None,
    sink: Scalar | None,
    gate: Scalar | None,
) -> Trace[list[Any]]:
    """One head of one document: softmax(q k^T * scale) v."""
    scores = [[dot(query, key) * scale for key in k] for query in q]
    capped = scores
    if softcap is not None:
        capped = [[softcap * tanh(score / softcap) for score in row] for row in scores]
    # What is forbidden is replaced, not added to: NaN there cannot leak.
    masked: list[list[Scalar]] = [
        [
            score + extra if ok else -math.inf
            for score, extra, ok in zip(*rows, strict=True)
        ]
        for rows in zip(capped, bias, allowed, strict=True)
    ]
    rows = [_softmax(row, sink) for row in masked]
    weights = [row for row, _ in rows]
    lse = [log_of_sum for _, log_of_sum in rows]
    out = [_row_out(*row, v, gate) for row in zip(weights, allowed, strict=True)]
    return Trace(scores, capped, masked, weights, lse, out)


def _softmax(logits: Vector, sink: Scalar | None) -> tuple[list[Scalar], Scalar]:
    """exp(x) over the sum of them all, and the log of that sum; -inf gets 0. A sink adds to the sum alone.

    Where all are -inf a sink changes nothing, as on every backend: the log is -inf.
    """
    weights: list[Scalar] = [0.0] * len(logits)
    visible = [j for j, x in enumerate(logits) if number(x) != -math.inf]
    if not visible:
        return weights, -math.inf
    terms = [logits[j] for j in visible]
    if sink is not None:
        # inf - inf below would be NaN
        terms.append(sink if number(sink) != math.inf else sys.float_info.max)
    # taken off before exp, so that nothing overflows; it cancels in the ratio
    top = max(number(x) for x in terms)
    powers = [exp(x - top) for x in terms]
    total = sum(powers)
    # the sink's power, at the end, has no key
    for j, power in zip(visible, powers, strict=False):
        weights[j] = power / total
    return weights, log(total) + top


def _row_out(
    weights: Vector, allowed: Sequence[bool], v: Matrix, gate: Scalar | None
) -> list[Scalar]:
    """The values (S,E) times their weights (S,), added up, times the gate: (E,). What is forbidden is not read."""
    seen = [j for j, ok in enumerate(allowed) if ok]
    width = len(v[0]) if v else 0
    if not seen:
        return [0.0] * width
    seen_weights = [weights[j] for j in seen]
    row = [dot(seen_weights, [v[j][e] for j in seen]) for e in range(width)]
    return row if gate is None else [gate * x for x in row]


@dataclass
class _Grid:
    """One place (b, h, i, j) of a call, the `Grid` of this backend: masks then answer with a bool and a number."""

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
        # As arrays broadcast: axes in front may be left out, and one of length 1 has the same entry everywhere.
        for axis in axes[len(axes) - len(shape_of(values)) :]:
            values = values[0 if len(values) == 1 else place[axis]]
        return values


def _mask_of_head(
    mask: Mask | None, grid: _Grid, b: int, h: int
) -> tuple[list[list[bool]], list[list[Scalar]]]:
    """Who may attend and what is added in one head, (T,S) each."""
    allowed = [[True] * grid.S for _ in range(grid.T)]
    bias: list[list[Scalar]] = [[0.0] * grid.S for _ in range(grid.T)]
    if mask is None:
        return allowed, bias
    for i in range(grid.T):
        for j in range(grid.S):
            grid.b = b
            grid.h = h
            grid.i = i
            grid.j = j
            may = mask.allowed(grid)
            extra = mask.bias(grid)
            bias[i][j] = 0.0 if extra is None else extra
            allowed[i][j] = (may is None or bool(may)) and number(
                bias[i][j]
            ) != -math.inf
    return allowed, bias
