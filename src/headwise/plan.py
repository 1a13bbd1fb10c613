"""What each key/value head of a model keeps of a text: all of it, or its first tokens and its latest ones.

    {"headwise_plan": 1, "n_layers": 2, "n_kv_heads": 4, "keep": {"L0.KV0": {"sinks": 4, "window": 64}}}

Heads that are not listed keep all. The formats of other projects are told in docs/memory.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from headwise.errors import HeadwiseError
from headwise.files import read_json, write_whole
from headwise.masks import LARGEST_POSITION, Causal, Mask, Streaming
from headwise.records import from_json

KV_NAME = re.compile(r"L(\d{1,6})\.KV(\d{1,6})")
MOST_HEADS = 2**20  # of a file: no model has as many


@dataclass(frozen=True)
class Keep:
    """A streaming head: it keeps the first `sinks` tokens of a text and the last `window`, the current one counted."""

    sinks: int
    window: int

    def __post_init__(self) -> None:
        if not (0 <= self.sinks <= LARGEST_POSITION and 1 <= self.window <= LARGEST_POSITION):
            raise HeadwiseError(
                f"sinks={self.sinks} and window={self.window}: a head keeps 0 or more first tokens and 1 or more last "
                f"ones, the current one counted"
            )

    def rows(self, tokens: int) -> int:
        """Tokens whose key and value are held of a text of that length."""
        return min(tokens, self.sinks + self.window)


Kept = Keep | None  # None: all


@dataclass(frozen=True)
class Plan:
    """What each key/value head keeps: `keep[n][g]` is that of head g of layer n, None where it keeps all.

    Raises HeadwiseError where layers differ in their number of heads, or there are none.
    """

    keep: tuple[tuple[Kept, ...], ...]

    def __post_init__(self) -> None:
        sizes = {len(layer) for layer in self.keep}
        if len(sizes) != 1 or 0 in sizes:
            raise HeadwiseError(f"a plan has layers of {sorted(sizes)} key/value heads; give all the same number")

    @property
    def n_layers(self) -> int:
        return len(self.keep)

    @property
    def n_kv_heads(self) -> int:
        return len(self.keep[0])

    def layer(self, n: int) -> tuple[Kept, ...]:
        """What the key/value heads of layer n keep, for `KVCache(plan=...)`."""
        return self.keep[n]

    def rows(self, tokens: int) -> int:
        """Rows of keys, and as many of values, that all heads together hold of a text of that many tokens."""
        return sum(tokens if kept is None else kept.rows(tokens) for layer in self.keep for kept in layer)

    def share(self, tokens: int) -> float:
        """The share of the cache that is left at that length; 1 where every head keeps all."""
        return self.rows(tokens) / (self.n_layers * self.n_kv_heads * tokens) if tokens else 1.0

    def mask(self, n: int, n_heads: int | None = None) -> Mask:
        """What the plan means in layer n: who sees whom among all keys, for equal adjacent groups of query heads.

        n_heads  query heads of the layer; default: as many as key/value heads
        """
        return kept_mask(self.layer(n), [g * self.n_kv_heads // n_heads for g in range(n_heads)] if n_heads else None)

    def check(self, n_layers: int, n_kv_heads: int) -> None:
        """Raise HeadwiseError for a model of other sizes."""
        if (n_layers, n_kv_heads) != (self.n_layers, self.n_kv_heads):
            raise HeadwiseError(
                f"the plan is for {self.n_layers} layers of {self.n_kv_heads} key/value heads, and the model has "
                f"{n_layers} of {n_kv_heads}; pass a plan that was made for it"
            )

    def write(self, path: str | Path) -> None:
        """The plan as JSON, whole or not at all."""
        keep = {f"L{n}.KV{g}": kept for n, layer in enumerate(self.keep) for g, kept in enumerate(layer) if kept}
        write_whole(path, json.dumps(asdict(_Document(1, self.n_layers, self.n_kv_heads, keep)), indent=1) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """The plan of a file. Raises HeadwiseError for one that is damaged, or names what is not there."""
        try:
            return _plan(from_json(_Document, read_json(path), "the plan"))
        except HeadwiseError as error:
            raise HeadwiseError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


@dataclass(frozen=True)
class _Document:
    """A plan as JSON."""

    headwise_plan: int  # version of the format
    n_layers: int
    n_kv_heads: int
    keep: dict[str, Keep]


def _plan(document: _Document) -> Plan:
    n_layers, n_kv_heads = document.n_layers, document.n_kv_heads
    if document.headwise_plan != 1:
        raise HeadwiseError(f"headwise_plan={document.headwise_plan}; this headwise reads version 1")
    if n_layers < 1 or n_kv_heads < 1 or n_layers * n_kv_heads > MOST_HEADS:
        raise HeadwiseError(f"{n_layers} layers of {n_kv_heads} key/value heads; a plan has 1 to {MOST_HEADS:,} heads")
    keep: list[list[Kept]] = [[None] * n_kv_heads for _ in range(n_layers)]
    for name, kept in document.keep.items():
        match = KV_NAME.fullmatch(name)
        if match is None:
            raise HeadwiseError(f"{name!r} is no key/value head; L3.KV1 is head 1 of layer 3, both counted from 0")
        n, g = map(int, match.groups())
        if n >= n_layers or g >= n_kv_heads:
            raise HeadwiseError(f"{name} is not there: the plan has {n_layers} layers of {n_kv_heads} key/value heads")
        keep[n][g] = kept
    return Plan(tuple(map(tuple, keep)))


def layer_keep(plan: Plan | Sequence[Kept | tuple[int, int]]) -> tuple[Kept, ...]:
    """What the key/value heads of a layer keep, out of None, Keep or (sinks, window) for each; or a plan of one layer."""
    if isinstance(plan, Plan):
        if plan.n_layers > 1:
            raise HeadwiseError(f"the plan has {plan.n_layers} layers, and a cache serves one; pass plan.layer(n)")
        return plan.layer(0)
    try:
        return tuple(kept if kept is None or isinstance(kept, Keep) else Keep(*kept) for kept in plan)
    except TypeError:
        raise HeadwiseError(f"plan={plan!r:.60} must give each key/value head None or (sinks, window)") from None


def kept_mask(keep: Sequence[Kept], kv_index: Sequence[int] | None = None) -> Mask:
    """Who sees whom where query head h reads key/value head kv_index[h], default h, which keeps `keep` of that."""
    heads = [keep[g] for g in (range(len(keep)) if kv_index is None else kv_index)]
    if not any(heads):
        return Causal()
    sinks = [kept.sinks if kept else 0 for kept in heads]
    return Streaming(sinks, [kept.window if kept else LARGEST_POSITION for kept in heads])
