"""The data that crosses packages: what was measured, in plain types and NumPy arrays. No torch here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    NamedTuple,
    Protocol,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from headwise.errors import HeadwiseError
from headwise.shapes import flat, shape_of
from headwise.table import Cell, Table, escaped, number

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from headwise.spec import Options

# what the plain, array and tensor backends take
AnyArray = TypeVar("AnyArray", list[Any], "NDArray[Any]", "Tensor")

Vector = tuple[float, ...]  # its numbers, one a feature
# of arrays in plain data: of numbers up to 1, as weights are, float32 has no more that mean anything
DECIMALS = 6
PICTURED = 16  # heads, queries and keys of a trace in a notebook, at most
# "L3.H5", "encoder.L3.H5"
HEAD_NAME = re.compile(r"(?:(?P<part>.+)\.)?L(?P<layer>\d+)\.H(?P<head>\d+)")


def head_name(site: int | str, head: int) -> str:
    """`L3.H5` is head 5 of layer 3, both counted from 0; in a model of several stacks `encoder.L3.H5`.

    site  the number of the layer, or the name of its attention, such as "L3" or "encoder.L3"
    """
    return f"L{site}.H{head}" if isinstance(site, int) else f"{site}.H{head}"


def parse_head(name: str) -> tuple[str, int, int]:
    """Stack ("" where there is one alone), layer and head of a name that `head_name` made."""
    match = HEAD_NAME.fullmatch(name)
    if match is None:
        raise HeadwiseError(
            f"{name!r} is no name of a head; L3.H5 is head 5 of layer 3, both counted from 0"
        )
    return match["part"] or "", int(match["layer"]), int(match["head"])


def plain_data(value: Any) -> Any:
    """Records, arrays and tuples as dicts and lists, paths as text; None for what is not finite, which JSON has not."""
    if isinstance(value, Path):
        return str(value)
    # an array; rounded as float64, so that 0.1 does not become 0.10000000149
    if hasattr(value, "tolist"):
        return plain_data(
            (
                value.astype("float64").round(DECIMALS)
                if value.dtype.kind == "f"
                else value
            ).tolist()
        )
    if isinstance(value, dict):
        return {key: plain_data(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return plain_data(vars(value)) if is_dataclass(value) else value


def record_of(kind: Any, value: Any) -> Any:
    """The reverse of `plain_data`: a value of this type, such as a dataclass, whose records and tuples JSON has not.

    Raises TypeError, KeyError or AttributeError for data of another form.
    """
    inner = get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        kinds = get_type_hints(kind)
        fields = {name: record_of(kinds[name], part) for name, part in value.items()}
        return kind(**fields)
    if isinstance(kind, UnionType):  # one kind, or None
        return None if value is None else record_of(inner[0], value)
    if get_origin(kind) is tuple:
        return tuple(record_of(inner[0], part) for part in value)
    return kind(*value) if hasattr(kind, "_fields") else value


@dataclass(frozen=True)
class Trace(Generic[AnyArray]):
    """Every step of one attention call, in the backend's own kind of array (nested lists on the loop backend)."""

    scores: AnyArray  # (B,H,T,S)  q.k * scale, before anything is forbidden
    capped: AnyArray  # (B,H,T,S)  after the softcap; the scores themselves where there is none
    masked: (
        AnyArray  # (B,H,T,S)  after bias and mask; -inf where a query may not attend
    )
    # (B,H,T,S)  after softmax; a row sums to 1, to less beside a sink, to 0 if it may attend nothing
    weights: AnyArray
    # (B,H,T)    log of the softmax's denominator, sink included: weights = exp(masked - lse)
    lse: AnyArray
    out: AnyArray  # (B,H,T,E)  weights (after dropout) times V, times the gate

    def __repr__(self) -> str:
        dtype = getattr(self.weights, "dtype", "nested lists")
        weights, lse, out = map(shape_of, (self.weights, self.lse, self.out))
        return f"Trace({dtype}: scores, capped, masked, weights {weights}, lse {lse}, out {out})"

    def _repr_html_(self) -> str:
        """The weights of the first heads, queries and keys of the first document: a table a head, a row a query."""
        html = f"<p>{escaped(repr(self))}</p>"
        shape = shape_of(self.weights)
        if 0 in shape:
            return html
        heads: Any = self.weights[0] if len(shape) == 4 else self.weights
        for h, weights in enumerate([heads] if len(shape) == 2 else heads[:PICTURED]):
            rows: list[list[Cell]] = []
            for query, row in enumerate(weights[:PICTURED]):
                # a Value of the scalar autograd has its number in `data`
                keys: list[float] = [
                    getattr(x, "data", x) for x in flat(row[:PICTURED])
                ]
                rows.append([str(query), *(number(weight, 3) for weight in keys)])
            columns = ["query", *map(str, range(len(rows[0]) - 1))]
            html += f"<p>head {h}</p>{Table(columns, rows).html()}"
        return html


class Call(NamedTuple):
    """What the attention inside a layer was given and gave, on the torch backend; handed to watchers."""

    # a MultiHeadAttention; for a watched model of another library, its own attention module
    layer: nn.Module
    q: Tensor  # (B,H,T,D), normed and rotated
    k: Tensor  # (B,G,S,D), with what a cache held
    v: Tensor  # (B,G,S,E)
    options: (
        Options  # as given to the backend; `trace(q, k, v, options)` gives every step
    )
    # (B,H,T,E), before the heads are joined; of transformers what enters W_O, gated or normed
    out: Tensor
    cross: bool = (
        False  # do keys and values come from another sequence than the queries?
    )
    # tokens before these, which a cache has seen; None where the layer does not know
    past: int | None = None
    # is `out` what W_O reads, where there is one? Else it is what left the attention
    at_w_o: bool = True
    note: str = ""  # what a reader of the numbers must know
    # (B,H,T,S), where the model made them itself; q and k are empty then, D = 0
    weights: Tensor | None = None
    # (B,H,T,E), what attention gave, where `out` is behind a gate; None: not known
    before_gate: Tensor | None = None

    @property
    def n_queries(self) -> int:
        return self.q.shape[2]

    @property
    def n_keys(self) -> int:
        return self.k.shape[2]


class Watchable(Protocol):
    """What a torch module answers so that `watch` and `ablate` find its heads, though it is no layer of ours.

    For each forward call it hands one `Call` with all of its heads to every entry of `watchers`, in turn, before the
    heads are joined; what an entry returns takes the place of the heads' output (B,H,T,E). Watchable modules inside it
    are its parts, not attentions of their own.
    """

    watchers: list[Callable[[Call], Tensor | None]]

    def watched(self) -> tuple[int, Tensor | None, Tensor | None]:
        """H, its number of heads; W_O (C,H*E), None without projection; W_V (G*E,C), None where it is not known."""


@dataclass(frozen=True)
class HeadMap:
    """Where one head looked: `weights[i, j]` is how much position i (row) attends to position j (column)."""

    layer: int
    head: int
    # (T, S), each row sums to 1, or to less where a sink takes a share
    weights: NDArray[np.float32]

    @property
    def name(self) -> str:
        return head_name(self.layer, self.head)


@dataclass(frozen=True)
class HeadMaps:
    """The exact attention maps of every head of a model on one short text."""

    model: str  # how the reader knows the model: the name of its run folder
    tokens: tuple[str, ...]  # one string a position, as the tokenizer shows it
    maps: tuple[HeadMap, ...]  # sorted by layer, then head


@dataclass(frozen=True)
class CurvePoint:
    """One evaluation during training; losses are mean cross-entropies in nats per token."""

    step: int
    train_loss: float
    held_out_loss: float


@dataclass(frozen=True)
class RunSummary:
    """What a training run reports, for the terminal, the report and `--json`."""

    # label -> value, in the order to be shown: preset, parameters, seconds, ...
    facts: dict[str, str]
    curve: tuple[CurvePoint, ...]
    held_out_loss: float
    # n-gram baseline on the same held-out tokens, nats per token
    baseline_loss: float
    baseline_name: str  # for example "5-gram, Kneser-Ney"
    samples: tuple[str, ...] = ()


@dataclass(frozen=True)
class KeySteps:
    """What one head makes of one key that it may see."""

    position: int
    key: Vector  # (D,) as it is scored
    value: Vector  # (E,)
    dot: float  # of query and key
    score: float  # dot * scale
    capped: float  # after the softcap; the score itself where there is none
    bias: float  # what the mask adds
    logit: float  # capped + bias, which the softmax reads
    weight: float


@dataclass(frozen=True)
class HeadSteps:
    """The arithmetic of one head at one position, in float64; `dataclasses.asdict` gives it as plain data.

    Keys that the mask hides are left out. x is the residual stream, C numbers wide.
    """

    model: str  # how the reader knows the model
    tokens: tuple[str, ...]
    layer: int
    head: int
    at: int  # the position whose query it is
    n_heads: int
    n_kv_heads: int
    kv_head: int  # the key/value head that this head reads
    sharing: tuple[int, ...]  # the other query heads that read it
    query: Vector  # (D,) as it is scored
    scale: float
    softcap: float | None
    keys: tuple[KeySteps, ...]
    sink: float | None  # a logit that takes a share of the softmax and gives nothing
    sink_weight: float | None
    gate: float | None
    # (E,) the head's output: the weighted sum of the values, times the gate where there is one
    out: Vector
    # (H, C) what each head adds: its out through its block of W_O
    added: tuple[Vector, ...]
    norms: Vector  # (H,) their lengths
    out_bias: Vector | None  # (C,) of W_O
    layer_out: Vector  # (C,) sum of all rows of `added`, and the bias
    x: Vector  # (C,) before the layer
    x_new: Vector  # (C,) x + layer_out

    @property
    def name(self) -> str:
        return head_name(self.layer, self.head)
