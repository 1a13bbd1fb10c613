"""What each key/value head of a model keeps of a text: all of it, or its first tokens and its latest ones.

    {"headwise_plan": 1, "n_layers": 2, "n_kv_heads": 4, "keep": {"L0.KV0": {"sinks": 4, "window": 64}}}

Heads that are not listed keep all. docs/memory.md tells the story, and the format of DuoAttention.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError
from headwise.files import read_json, read_text, write_whole
from headwise.masks import LARGEST_POSITION, Causal, Mask, Streaming
from headwise.records import from_json
from headwise.words import unknown

MOST_HEADS = 2**20  # of a file: no model has as many
FORMATS = ("headwise", "duo")
DUO_HEADS, DUO_THRESHOLD = "full_attention_heads.tsv", 0.5  # from there on a head keeps all


@dataclass(frozen=True)
class Keep:
    """A streaming head: it keeps the first `sinks` tokens of a text and the last `window`, the current one counted."""

    sinks: int
    window: int

    def __post_init__(self) -> None:
        if not (0 <= self.sinks <= LARGEST_POSITION and 1 <= self.window <= LARGEST_POSITION):
            fact = f"sinks={self.sinks} and window={self.window}"
            raise HeadwiseError(f"{fact}: a head keeps 0 or more first tokens and 1 or more last ones, its own counted")


HeadPlan = Keep | None  # what one key/value head keeps; None: all


@dataclass(frozen=True)
class Plan:
    """What each key/value head keeps: `keep[n][g]` is that of head g of layer n, None where it keeps all.

    Raises:
        HeadwiseError: where layers differ in their number of heads, or there are none.
    """

    keep: tuple[tuple[HeadPlan, ...], ...]

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

    def layer(self, n: int) -> tuple[HeadPlan, ...]:
        """What the key/value heads of layer n keep, for `KVCache(plan=...)`."""
        return self.keep[n]

    def rows(self, tokens: int) -> int:
        """Rows of keys, and as many of values, that all heads together hold of a text of that many tokens."""
        return sum(kept_rows(kept, tokens) for layer in self.keep for kept in layer)

    def share(self, tokens: int) -> float:
        """The share of the cache that is left at that length; 1 where every head keeps all."""
        return self.rows(tokens) / (self.n_layers * self.n_kv_heads * tokens) if tokens else 1.0

    def mask(self, n: int, n_heads: int | None = None) -> Mask:
        """What the plan means in layer n: who sees whom among all keys, for equal adjacent groups of query heads.

        Args:
            n: the layer, from 0
            n_heads: query heads of the layer; default: as many as key/value heads
        """
        if not any(self.layer(n)):
            return Causal()
        group = (n_heads or self.n_kv_heads) // self.n_kv_heads  # query heads that read one key/value head
        sinks: list[int] = []
        windows: list[int] = []
        for kept in self.layer(n):
            sinks += [kept.sinks if kept else 0] * group
            windows += [kept.window if kept else LARGEST_POSITION] * group
        return Streaming(tuple(sinks), tuple(windows))

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
        _write(path, asdict(_Document(1, self.n_layers, self.n_kv_heads, keep)))

    def export(self, path: str | Path, format: str = "headwise") -> None:
        """Write the plan as others read it; docs/memory.md tells what stands in each format, and what it leaves out.

        Args:
            path: of a file, or for "duo" of a folder
            format: "headwise" (as `write`), or "duo" (a folder; streaming heads get the largest sizes)
        """
        if format not in FORMATS:
            raise unknown(f"there is no format {format!r}", format, FORMATS)
        if format == "headwise":
            self.write(path)
        else:
            Path(path).mkdir(parents=True, exist_ok=True)
            lines = ["\t".join("0.0" if kept else "1.0" for kept in layer) for layer in self.keep]
            write_whole(Path(path) / DUO_HEADS, "".join(f"{line}\n" for line in lines))
            streaming = [kept for layer in self.keep for kept in layer if kept]
            sinks = max((kept.sinks for kept in streaming), default=0)
            window = max((kept.window for kept in streaming), default=1)
            _write(Path(path) / "config.json", {"sink_size": sinks, "recent_size": window})

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """The plan of a file, or of a folder of DuoAttention. Raises HeadwiseError for one that is damaged."""
        path = Path(path)
        content = read_json(path / "config.json" if path.is_dir() else path)
        try:
            if path.is_dir():
                return _of_duo(read_text(path / DUO_HEADS), content)
            return from_json(_Document, content, "the plan").plan()
        except HeadwiseError as error:
            raise HeadwiseError(f"{path}: {error}") from None


@dataclass(frozen=True)
class _Document:
    """A plan as JSON."""

    headwise_plan: int  # version of the format
    n_layers: int
    n_kv_heads: int
    keep: dict[str, Keep]

    def plan(self) -> Plan:
        layers, heads, total = self.n_layers, self.n_kv_heads, self.n_layers * self.n_kv_heads
        if self.headwise_plan != 1 or min(layers, heads) < 1 or total > MOST_HEADS:
            fact = f"headwise_plan={self.headwise_plan}, {layers} layers of {heads} key/value heads"
            raise HeadwiseError(f"{fact}; this headwise reads version 1, of 1 to {MOST_HEADS:,} heads")
        names = [[f"L{n}.KV{g}" for g in range(heads)] for n in range(layers)]
        for name in self.keep.keys() - {name for layer in names for name in layer}:
            offer = f"they go from L0.KV0 to {names[-1][-1]}"
            raise unknown(f"{name!r} is no key/value head of the plan", name, names[-1], offer)
        return Plan(tuple(tuple(map(self.keep.get, layer)) for layer in names))


def _of_duo(text: str, sizes: Any) -> Plan:
    """Of the matrix of a folder of DuoAttention, layers x key/value heads of 0 to 1, and its config.json."""
    config = sizes if isinstance(sizes, dict) else {}
    keep = from_json(Keep, {"sinks": config.get("sink_size"), "window": config.get("recent_size")}, "config.json")
    layers: list[tuple[HeadPlan, ...]] = []
    try:
        for line in text.splitlines():
            numbers = map(float, line.split("\t"))
            layers.append(tuple(None if number >= DUO_THRESHOLD else keep for number in numbers))
    except ValueError:
        raise HeadwiseError(f"{DUO_HEADS} has no numbers between tabs") from None
    return Plan(tuple(layers))


def _write(path: str | Path, document: Any) -> None:
    write_whole(path, json.dumps(document, indent=1) + "\n")


def kept_rows(kept: HeadPlan, tokens: int) -> int:
    """Tokens whose key and value a head holds of a text of that length."""
    return tokens if kept is None else min(tokens, kept.sinks + kept.window)


def layer_keep(plan: Plan | Sequence[HeadPlan | tuple[int, int]]) -> tuple[HeadPlan, ...]:
    """What the key/value heads of one layer keep, out of None, Keep or (sinks, window) for each."""
    if isinstance(plan, Plan):
        raise HeadwiseError(f"the plan has {plan.n_layers} layers, and a cache serves one; pass plan.layer(n)")
    heads: list[HeadPlan] = []
    try:
        for kept in plan:
            heads.append(kept if kept is None or isinstance(kept, Keep) else Keep(*kept))
    except TypeError:
        raise HeadwiseError(f"plan={plan!r:.60} must give each key/value head None or (sinks, window)") from None
    return Plan((tuple(heads),)).layer(0)  # refused where there are no heads
