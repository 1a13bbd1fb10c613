"""How far back each key/value head looks: the result of `hw.windows`, in plain types, and the plan it suggests.

Mass outside the first s and the last w tokens is what a cache that keeps those alone would drop (Xiao et al. 2023,
arXiv 2309.17453). Mass misses what is looked up rarely, so a needle test stands beside it (Wu et al. 2024, arXiv
2404.15574). Of the query heads that read a key/value head, the largest number counts. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from headwise.errors import HeadwiseError
from headwise.intervals import Interval
from headwise.plan import Keep, Plan
from headwise.words import unknown

SINKS = (0, 1, 4, 16)  # first tokens that are kept
TOLERANCE = 0.01  # of the mass, where a plan is asked for and nothing else is said
SHARES = (0.5, 0.9, 0.99)  # of the mass that are reached
# A head looks things up where, at the low end of the interval, it weighs what answers twice as much (log 2 nats) as the
# needle's other tokens, and where it gives that a hundredth of its weight: less is not missed.
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
    lift: Interval  # log of how often that is what the needle's other tokens get

    @property
    def retrieves(self) -> bool:
        return self.lift.low >= LIFT and self.needle.mean >= LEAST

    def keep(self, windows: tuple[int, ...], sinks: int, tolerance: float) -> Keep | None:
        """The smallest window that leaves out a mass of at most `tolerance`; None where the head needs all."""
        if not self.retrieves:
            # The last window is the whole text, which saves nothing.
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
        steps = sorted({0.0, *(mass.mean for head in self.heads for mass in head.outside[place])})
        for step in steps:
            plan = self._plan(step, sinks)
            if plan.share(self.longest) <= cache:
                return plan
        least = self._plan(1.0, sinks).share(self.longest)
        raise HeadwiseError(
            f"cache={cache} cannot be had at {self.longest:,} tokens: heads that retrieve keep all, which makes "
            f"{least:.3f} with {sinks} first tokens and windows of {self.windows[0]}; pass a larger share"
        )

    def _plan(self, tolerance: float, sinks: int) -> Plan:
        layers: dict[int, list[Keep | None]] = {}
        for head in self.heads:  # layer by layer
            layers.setdefault(head.layer, []).append(head.keep(self.windows, sinks, tolerance))
        return Plan(tuple(map(tuple, layers.values())))

    def document(self) -> dict[str, Any]:
        """All of it, as JSON has it; what is not finite is null."""
        fields = asdict(self) | {"sinks": SINKS, "shares": SHARES}
        fields["heads"] = [asdict(head) | {"retrieves": head.retrieves} for head in self.heads]
        return json.loads(json.dumps(fields), parse_constant=lambda constant: None)

    def rows(self) -> list[dict[str, Any]]:
        """A row a head: `outside_s4_w64` and the like, `reached_90`, `needle`, each with low and high."""
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
