"""What the bench holds against the truth: each method gives every head a number, and gets right and wrong ones.

A method is a function of a model, clean and corrupted texts (N,T) and targets (N,2), which gives a score to each head.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import headwise as hw
from benchmarks.headbench_models import Known
from headwise.heads.effect import ablation, importance
from headwise.heads.patching import path_effects

CLEAR = 0.1  # share of the difference from which `headwise why` names a head

Scores = dict[str, float]
Method = Callable[[nn.Module, Tensor, Tensor, Tensor], Scores]


# --- Methods of ours ---


def either(model: nn.Module, clean: Tensor, corrupted: Tensor, target: Tensor) -> Scores:
    """What a head brings to the corrupted text or takes from the clean one, the larger."""
    effects = hw.patch(model, clean, corrupted, target=target, contexts=0).effects
    return {name: effect.mean for name, effect in effects.items()}


def beside(model: nn.Module, clean: Tensor, corrupted: Tensor, target: Tensor) -> Scores:
    """The same, and beside random halves of the heads."""
    effects = hw.patch(model, clean, corrupted, target=target, contexts=8).effects
    return {name: effect.mean for name, effect in effects.items()}


def patched(at: str = "out", fast: bool = False) -> Method:
    def method(model: nn.Module, clean: Tensor, corrupted: Tensor, target: Tensor) -> Scores:
        effects = hw.patch(model, clean, corrupted, at, target=target, fast=fast).effects
        return _of_query_heads(model, {name: effect.mean for name, effect in effects.items()})

    return method


def taken(model: nn.Module, clean: Tensor, corrupted: Tensor, target: Tensor) -> Scores:
    """The clean text with what a head had in the corrupted one."""
    return patched()(model, corrupted, clean, target.flip(1))


def attributed(model: nn.Module, clean: Tensor, corrupted: Tensor, target: Tensor) -> Scores:
    pairs = zip(clean, target.tolist(), strict=True)
    return _means({name: abs(x) for name, x in hw.attribute(model, ids, pair).heads.items()} for ids, pair in pairs)


def attributed_difference(model: nn.Module, clean: Tensor, corrupted: Tensor, target: Tensor) -> Scores:
    tables = []
    for good, bad, pair in zip(clean, corrupted, target.tolist(), strict=True):
        first, second = (hw.attribute(model, ids, pair).heads for ids in (good, bad))
        tables.append({name: abs(first[name] - second[name]) for name in first})
    return _means(tables)


def silenced(how: str) -> Method:
    """The change of the loss at the answer without the head."""

    def method(model: nn.Module, clean: Tensor, corrupted: Tensor, target: Tensor) -> Scores:
        tables = []
        for row in torch.cat([clean, target[:, :1]], 1):
            effects = ablation(model, [row[None]], how, after=int(row[-2]))
            tables.append({name: effect.mean for name, effect in effects.items()})
        return _means(tables)

    return method


def important(model: nn.Module, clean: Tensor, corrupted: Tensor, target: Tensor) -> Scores:
    texts = torch.cat([clean, target[:, :1]], 1)
    return _means(importance(model, [row[None]], after=int(row[-2])) for row in texts)


def copying(model: nn.Module, clean: Tensor, corrupted: Tensor, target: Tensor) -> Scores:
    """By the weights alone: how much oftener than chance a head copies, or suppresses, the token that it reads."""
    scores = {}
    for name, head in hw.circuits(model).heads.items():
        shares = [score for score in (head.copies, head.suppresses) if score is not None]
        scores[name] = max((score.share - score.control for score in shares), default=0.0)
    return scores


METHODS: dict[str, Method] = {
    "`why`, `patch`: what a head brings": patched(),
    "`patch`, texts exchanged: what it takes": taken,
    "`patch(contexts=0)`: brings or takes": either,
    "`patch(contexts=8)`": beside,
    "`patch(fast=True)`": patched(fast=True),
    '`patch(at="q")`': patched("q"),
    '`patch(at="k")`': patched("k"),
    '`patch(at="v")`': patched("v"),
    "`attribute`": attributed,
    "`attribute`, clean less corrupted": attributed_difference,
    "`ablation`, zero": silenced("zero"),
    "`ablation`, mean": silenced("mean"),
    "`importance`": important,
    "`circuits`, copying or suppressing": copying,
}


def _means(tables: Iterable[Mapping[str, float]]) -> Scores:
    """Of each head the mean of its sizes."""
    values: dict[str, list[float]] = defaultdict(list)
    for table in tables:
        for name, value in table.items():
            values[name].append(abs(value))
    return {name: sum(each) / len(each) for name, each in values.items()}


def _of_query_heads(model: Any, scores: Scores) -> Scores:
    """Keys and values of a group count for each of its query heads."""
    if not any(".KV" in name for name in scores):
        return scores
    by_head = {}
    for number, block in enumerate(model.blocks):
        for h, g in enumerate(block.attention.spec.kv_index):
            by_head[f"L{number}.H{h}"] = scores[f"L{number}.KV{g}"]
    return by_head


# --- Against the truth ---


class Marks(NamedTuple):
    auroc: float  # how often a head of the circuit stands above one that is not; ties count half
    precision: float  # average precision
    exact: float  # 1 where the heads with the highest scores are the circuit
    named: float  # 1 where the heads with a score of at least CLEAR are the circuit: for scores that are shares
    smallest: float  # the lowest score of a head of the circuit
    passes: float  # texts read, one forward each
    seconds: float


def marks(scores: Mapping[Any, float], right: Iterable[Any], beside: Iterable[Any] = ()) -> tuple[float, ...]:
    """AUROC, average precision, whether the first are the right ones, and those over the bar; `beside` do not count."""
    right, beside = set(right), set(beside)
    most = max((abs(value) for value in scores.values()), default=0.0) or 1.0
    sizes = {name: round(abs(value) / most, 6) for name, value in scores.items() if name not in beside}  # ties
    good = [size for name, size in sizes.items() if name in right]
    bad = [size for name, size in sizes.items() if name not in right]
    wins = sum((g > b) + 0.5 * (g == b) for g in good for b in bad) / (len(good) * len(bad))
    above = [sum(x >= g for x in good) / sum(x >= g for x in sizes.values()) for g in good]
    over = {name for name, value in scores.items() if abs(value) >= CLEAR and name not in beside}
    return wins, sum(above) / len(above), float(min(good) > max(bad)), float(over == right), most * min(good)


def tried(known: Known, method: Method, right: frozenset[str] | None = None) -> Marks:
    """The marks of a method on one model."""
    counted = [0]

    def count(module: nn.Module, args: Any) -> None:
        counted[0] += args[0].shape[0]

    handle = known.model.lm_head.register_forward_pre_hook(count)
    began = time.perf_counter()
    try:
        scores = method(known.model, *known.texts())
    finally:
        handle.remove()
    seconds = time.perf_counter() - began
    scores = {head: scores.get(head, 0.0) for head in known.heads}
    return Marks(*marks(scores, right or known.circuit, known.spare), counted[0], seconds)


def path_marks(known: Known) -> dict[str, tuple[float, ...]]:
    """Paths into the heads of the circuit, by path patching and by the weights, against those that are known."""
    clean, corrupted, target = known.texts()
    weights, names = hw.circuits(known.model).scores, list(known.heads)
    by_patching, by_weights = {}, {}
    for receiver in sorted(known.circuit):
        layer, h = (int(part[1:]) for part in receiver.split("."))
        group = known.model.blocks[layer].attention.spec.kv_index[h]
        for at in "qkv":
            place = receiver if at == "q" else f"L{layer}.KV{group}"
            effects = path_effects(known.model, clean, corrupted, place, at, target=target) if layer else {}
            for sender, effect in effects.items():
                by_patching[sender, receiver, at] = effect.mean
                by_weights[sender, receiver, at] = weights[at][names.index(receiver), names.index(sender)]
    return {
        "`path_effects`": marks(by_patching, known.paths),
        "`circuits`, composition": marks(by_weights, known.paths),
    }
