"""What each key/value head of a model keeps of a text, and how far each looks, from which such a plan is made.

A `Plan` is the first, and its file reads so:

    {"headwise_plan": 1, "n_layers": 2, "n_kv_heads": 4, "keep": {"L0.KV0": {"sinks": 4, "window": 64}}}

Heads that are not listed keep all. docs/memory.md tells the story, and the format of DuoAttention.

`Windows` is the result of `hw.windows`. Mass outside the first s and the last w tokens is what a cache that keeps those
alone would drop (Xiao et al. 2023, arXiv 2309.17453). Mass misses what is looked up rarely, so a needle test stands
beside it (Wu et al. 2024, arXiv 2404.15574). Of the query heads that read a key/value head, the largest number counts.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError
from headwise.files import read_json, read_text, write_whole
from headwise.intervals import Interval
from headwise.masks import LARGEST_POSITION, Causal, Mask, Streaming
from headwise.records import from_json, plain_data
from headwise.words import unknown

MOST_HEADS = 2**20  # that a plan's file may name, a round choice: no model has as many
FORMATS = ("headwise", "duo")
# DuoAttention gives each head a trained number from 0 to 1 in this file: how much it needs all of the text. From the
# threshold on a head keeps all.
DUO_HEADS, DUO_THRESHOLD = "full_attention_heads.tsv", 0.5
DUO_BEYOND = 0.1  # so far beyond 0 and 1 its optimisation may have stepped; DuoAttention takes that for 0 and 1


@dataclass(frozen=True)
class Keep:
    """A streaming head: it keeps the first `sinks` tokens of a text and the last `window`, the current one counted."""

    sinks: int
    window: int

    def __post_init__(self) -> None:
        whole = type(self.sinks) is type(self.window) is int  # both; not True, which is an int to isinstance
        if not (whole and 0 <= self.sinks <= LARGEST_POSITION and 1 <= self.window <= LARGEST_POSITION):
            fact = f"sinks={self.sinks} and window={self.window}"
            raise HeadwiseError(f"{fact}: a head keeps 0 or more first tokens and 1 or more last ones, its own counted")


HeadPlan = Keep | None  # what one key/value head keeps; None: all


@dataclass(frozen=True)
class Plan:
    """What each key/value head keeps: `keep[n][g]` is that of head g of layer n, None where it keeps all.

    Raises:
        HeadwiseError: where layers differ in their number of heads, or there are none; for what is neither None, nor
            a Keep or its (sinks, window).
    """

    keep: tuple[tuple[HeadPlan, ...], ...]

    def __post_init__(self) -> None:
        layers = []
        try:
            for layer in self.keep:
                layers.append(tuple(kept if kept is None or isinstance(kept, Keep) else Keep(*kept) for kept in layer))
        except TypeError:
            raise HeadwiseError(
                f"{self.keep!r:.60} must give each key/value head of each layer None or (sinks, window)"
            ) from None
        vars(self)["keep"] = tuple(layers)  # the way around a frozen dataclass, which refuses self.keep = ...
        sizes = {len(layer) for layer in self.keep}
        if len(sizes) != 1 or 0 in sizes:  # none where there are no layers
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
        """The fraction of the cache that is left at that length; 1 where every head keeps all."""
        return self.rows(tokens) / (self.n_layers * self.n_kv_heads * tokens) if tokens else 1.0  # of nothing: all

    def mask(self, n: int, n_heads: int | None = None) -> Mask:
        """What the plan means in layer n: who sees whom among all keys, for equal adjacent groups of query heads.

        Args:
            n: the layer, from 0
            n_heads: query heads of the layer; default: as many as key/value heads
        """
        n_heads = self.n_kv_heads if n_heads is None else n_heads
        if n_heads < 1 or n_heads % self.n_kv_heads:
            raise HeadwiseError(f"n_heads={n_heads} is no multiple of the plan's {self.n_kv_heads} key/value heads")
        if not any(self.layer(n)):
            return Causal()
        everything = Keep(0, LARGEST_POSITION)  # a window that no text fills, for heads that keep all
        readers = range(n_heads // self.n_kv_heads)  # query heads of one key/value head
        of_heads = [kept or everything for kept in self.layer(n) for _ in readers]
        return Streaming(tuple(kept.sinks for kept in of_heads), tuple(kept.window for kept in of_heads))

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
        else:  # the format of DuoAttention has one size for all streaming heads: the largest loses nothing of any
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
    """A plan as JSON; `keep` has the heads that do not keep all, by name."""

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
        known = list(itertools.chain(*names))
        for name in self.keep.keys() - set(known):  # a single wrong name is enough to refuse the file
            offer = f"they go from L0.KV0 to {known[-1]}"
            raise unknown(f"{name!r} is no key/value head of the plan", name, known, offer)
        return Plan(tuple(tuple(map(self.keep.get, layer)) for layer in names))


def _of_duo(text: str, sizes: Any) -> Plan:
    """Of the matrix of a folder of DuoAttention, layers x key/value heads of 0 to 1, and its config.json."""
    config = sizes if isinstance(sizes, dict) else {}
    keep = from_json(Keep, {"sinks": config.get("sink_size"), "window": config.get("recent_size")}, "config.json")
    try:
        layers = [[float(number) for number in line.split("\t")] for line in text.splitlines() if line.strip()]
    except ValueError:
        raise HeadwiseError(f"{DUO_HEADS} has no numbers between tabs") from None
    for number in itertools.chain(*layers):
        if not -DUO_BEYOND <= number <= 1 + DUO_BEYOND:
            raise HeadwiseError(f"{DUO_HEADS} has {number}; give each key/value head a number from 0 to 1")
    return Plan(tuple(tuple(None if number >= DUO_THRESHOLD else keep for number in layer) for layer in layers))


def _write(path: str | Path, document: Any) -> None:
    write_whole(path, json.dumps(document, indent=1) + "\n")


def kept_rows(kept: HeadPlan, tokens: int) -> int:
    """Tokens whose key and value a head holds of a text of that length."""
    return tokens if kept is None else min(tokens, kept.sinks + kept.window)


def layer_keep(plan: Plan | Sequence[HeadPlan | tuple[int, int]]) -> tuple[HeadPlan, ...]:
    """What the key/value heads of one layer keep, out of None, Keep or (sinks, window) for each."""
    if isinstance(plan, Plan):
        raise HeadwiseError(f"the plan has {plan.n_layers} layers, and a cache serves one; pass plan.layer(n)")
    layers: Any = (plan,)  # a Plan of this one layer: it checks each head, and makes a Keep of (sinks, window)
    return Plan(layers).layer(0)


# How far heads look, and what that lets them drop.

# Mass is the part of a head's weights that falls on some tokens.
SINKS = (0, 1, 4, 16)  # numbers of first tokens with which mass is measured: none, one, Xiao's 4, and more
TOLERANCE = 0.01  # mass that a head may lose where nothing else is said, a hundredth
SHARES = (0.5, 0.9, 0.99)  # parts of the mass: how far back lies the nearest half of it, nine tenths, nearly all?
# A needle is random tokens that are planted in a text and begun again at its end: at each of them the planted token
# that came next is the answer. A head looks things up where it weighs answers twice as much as the needle's other
# tokens (log 2 nats), and gives them a hundredth of its weight: less is not missed. Both are round choices: in three
# trained models such heads had low ends of 0.9 to 3.0 and weights of 0.1 and more, and no other a low end above 0.
LIFT = 0.69
LEAST = 0.01


def check_plan(tolerance: float | None, cache: float | None, sinks: int) -> None:
    """Raise HeadwiseError where two things say how a plan is chosen, or one says what cannot be."""
    if sinks not in SINKS:
        raise HeadwiseError(f"sinks={sinks} is not measured; one of {', '.join(map(str, SINKS))}")
    if tolerance is not None and cache is not None:
        raise HeadwiseError("tolerance= says which mass a head may lose, and cache= what stays; pass one of them")
    if tolerance is not None and not 0 <= tolerance <= 1:
        raise HeadwiseError(f"tolerance={tolerance} must lie between 0 and 1; 0.01 is a hundredth of the mass")
    if cache is not None and not 0 < cache <= 1:
        raise HeadwiseError(f"cache={cache} must lie above 0 and be at most 1; 0.5 keeps half of the bytes")


@dataclass(frozen=True)
class KVReach:
    """One key/value head; intervals over documents, the needle's over needles."""

    name: str  # "L3.KV1"
    layer: int
    kv_head: int
    outside: tuple[tuple[Interval, ...], ...]  # mass outside, for each of SINKS and each window; a mean over queries
    reached: tuple[Interval, ...]  # tokens back within which each of SHARES of the mass lies
    needle: Interval  # mass on the token that continues a planted needle; NaN where none could be planted
    lift: Interval  # natural log of that mass over the mean one of the needle's other tokens

    @property
    def retrieves(self) -> bool:
        # The low end, since one needle met by chance can make a large mean. NaN, where none was planted, is no.
        return self.lift.low >= LIFT and self.needle.mean >= LEAST

    def keep(self, windows: tuple[int, ...], sinks: int, tolerance: float) -> Keep | None:
        """The smallest window that leaves out a mass of at most `tolerance`; None where the head needs all."""
        if not self.retrieves:
            # The last window is the whole text, which saves nothing: hence no `strict`.
            for window, mass in zip(windows[:-1], self.outside[SINKS.index(sinks)], strict=False):
                if mass.mean <= tolerance:
                    return Keep(sinks, window)
        return None


@dataclass(frozen=True)
class Windows:
    """How far every key/value head of a model looks: `windows["L3.KV1"].reached`."""

    model: str
    texts: tuple[str, ...]
    n_documents: int
    n_tokens: int
    longest: int  # tokens of the longest document
    windows: tuple[int, ...]  # 16, 32, ... and the longest document
    heads: tuple[KVReach, ...]
    needle_found: float | None  # share of the needles that the model itself completes; None where none was planted
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[str]:
        return (head.name for head in self.heads)

    def __getitem__(self, name: str) -> KVReach:
        heads = {head.name: head for head in self.heads}
        if name not in heads:
            raise unknown(f"no key/value head {name!r}", name, heads)
        return heads[name]

    def plan(self, tolerance: float | None = None, cache: float | None = None, sinks: int = 4) -> Plan:
        """What each head should keep: the smallest window that drops little mass; all where it retrieves.

        Args:
            tolerance: the mass that may lie outside, a mean over queries; default: 0.01
            cache: or the share of the cache that may stay, at the length of the longest document: the smallest
                tolerance that gets there is taken
            sinks: first tokens that each head keeps, one of SINKS

        Raises:
            HeadwiseError: where heads that retrieve need more than that share.
        """
        check_plan(tolerance, cache, sinks)
        if cache is None:
            return self._plan(TOLERANCE if tolerance is None else tolerance, sinks)
        place = SINKS.index(sinks)
        # A plan changes only where the tolerance reaches a mass that was measured, so no other needs to be tried, but
        # for 0: a `cache` of 1 need not lose even the least of them.
        steps = sorted({0.0, *(mass.mean for head in self.heads for mass in head.outside[place])})
        for step in steps:
            plan = self._plan(step, sinks)
            if plan.share(self.longest) <= cache:
                return plan
        fact = f"cache={cache} cannot be had at {self.longest:,} tokens"
        if len(self.windows) == 1:
            raise HeadwiseError(f"{fact}: no window that is measured is shorter; measure longer texts")
        n_full = sum(head.retrieves for head in self.heads)
        least = self._plan(1.0, sinks).share(self.longest)  # all mass may be lost: the smallest windows
        raise HeadwiseError(
            f"{fact}: heads that retrieve, {n_full} of {len(self.heads)}, keep all, which makes {least:.3f} with "
            f"{sinks} first tokens and windows of {self.windows[0]}; pass a larger share"
        )

    def _plan(self, tolerance: float, sinks: int) -> Plan:
        layers: dict[int, list[Keep | None]] = {}
        for head in self.heads:  # they stand layer by layer, and there by their number
            layers.setdefault(head.layer, []).append(head.keep(self.windows, sinks, tolerance))
        return Plan(tuple(map(tuple, layers.values())))

    def document(self) -> dict[str, Any]:
        """All of it, as JSON has it; what is not finite is null."""
        heads = [{**vars(head), "retrieves": head.retrieves} for head in self.heads]
        return plain_data({**vars(self), "sinks": SINKS, "shares": SHARES, "heads": heads})

    def rows(self) -> list[dict[str, Any]]:
        """A row a head: `outside_s4_w64`, `reached_90`, `needle`, `lift`; each with the ends of its interval.

        s4 are 4 first tokens and w64 the last 64; 90 is a percentage of the mass.
        """
        rows = []
        for head in self.heads:
            row = {"name": head.name, "layer": head.layer, "kv_head": head.kv_head}
            named = {f"reached_{round(100 * share)}": x for share, x in zip(SHARES, head.reached, strict=True)}
            named |= {"needle": head.needle, "lift": head.lift}
            for s, of_windows in zip(SINKS, head.outside, strict=True):
                named |= {f"outside_s{s}_w{w}": x for w, x in zip(self.windows, of_windows, strict=True)}
            for name, x in named.items():
                row |= {name: x.mean, f"{name}_low": x.low, f"{name}_high": x.high}
            rows.append(row)
        return rows
