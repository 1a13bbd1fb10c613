"""What each bug of the catalogue changes in `headwise.teach.form`: for every bug the ways to write it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Change = Mapping[str, Any]

_AXES = [(axes, axis, way) for axes in ("bgsd", "bsgd") for axis in range(4) for way in ("repeat", "tile")]
_RIGHT_OR_TILE = {("bgsd", 1, "repeat"), ("bgsd", 1, "tile"), ("bsgd", 2, "repeat"), ("bsgd", 2, "tile")}

SWITCHES: dict[str, Sequence[Change]] = {
    "scale-missing": [{"scale": "none"}],
    "scale-model-width": [{"scale": "model"}, {"scale": "input"}],
    "scale-multiplied": [{"scale": "times"}],
    "scale-after-softmax": [{"scale_at": "weights"}],
    "scale-no-root": [{"scale": "square"}, {"scale": "whole-model"}, {"scale": "times-width"}],
    "scale-other-size": [{"scale": "heads"}, {"scale": "tokens"}],
    "softmax-axis": [
        {"axis": axis, "top": top} for top in ("all", "row") for axis in (-2, 1, 0, "folded", "rows", "all")
    ],
    "norm-missing": [{"norm": "none"}, {"norm": "exp"}, {"norm": "exp", "top": "row"}],
    "mask-missing": [{"see": "all", "padding": "nothing"}, {"see": "all"}, {"padding": "nothing"}],
    "mask-inverted": [{"see": "future"}, {"see": "later"}, {"see": "inverse"}],
    "mask-sees-next": [{"see": "next"}],
    "mask-hides-self": [{"see": "others"}],
    "mask-weak-fill": [
        {"fill": x, "fill_by": by, "fill_at": at}
        for at in ("scaled", "raw")
        for by in ("replace", "add")
        for x in (0.0, 1e-9, -1e-9, -1.0, 1.0)
    ],
    "mask-after-softmax": [{"mask_at": "weights"}],
    "mask-head-order": [{"mask_of": "cycle"}, {"mask_of": "block"}, {"mask_of": "next"}],
    "padding-on-queries": [{"padding": "queries"}, {"padding": "both"}],
    "split-no-transpose": [
        {"split_q": "raw", "split_k": "raw", "split_v": "raw"},
        {"split_q": "tokens", "split_k": "tokens", "split_v": "tokens"},
        {"split_q": "tokens", "split_k": "tokens", "split_v": "tokens", "join": "raw"},
        {"split_v": "raw"},
        {"split_k": "raw"},
        {"split_q": "raw"},
        {"split_k": "raw", "split_v": "raw"},
        {"split_q": "raw", "split_k": "raw"},
    ],
    "join-no-transpose": [{"join": "raw"}],
    "layout-mixed": [
        {"join": "interleaved"},
        {"split_q": "interleaved"},
        {"split_k": "interleaved"},
        {"split_v": "interleaved"},
        {"split_q": "interleaved", "split_k": "interleaved", "split_v": "interleaved"},
    ],
    "heads-averaged": [{"join": "mean"}, {"join": "sum"}, {"join": "mean-tiled"}, {"join": "divided"}],
    "heads-share-projection": [{"shared": roles} for roles in ("qkv", "QKV", "q", "qk", "v", "k", "kv")],
    "output-projection-missing": [{"out_proj": False}],
    "values-from-keys": [
        {"v_from": "k"},
        {"v_input": "k"},
        {"v_from": "k", "v_input": "k"},
        {"v_from": "q"},
        {"v_from": "k", "bias_of": "place"},
    ],
    "keys-from-queries": [{"k_from": "q"}, {"q_from": "k"}],
    "rope-mixed-layout": [],  # depends on the layout that is right: see `changes`
    "rope-on-values": [{"rope_values": True}],
    "group-tile": [{"group": "tile"}, {"group": "tile", "grouped": "v"}, {"group": "tile", "grouped": "k"}],
    "group-axis": [{"group": how} for how in _AXES if how not in _RIGHT_OR_TILE],
    "batch-mixed": [
        {"batch": how} for how in ("flat", "swapped", "rolled", "rolled-back", "reversed", "renamed", "renamed-back")
    ],
    "bias-dropped": [{"no_bias": roles} for roles in ("o", "qkv", "v", "q", "qkvo", "qk", "qv", "k", "kv", "vo")],
    "weights-transposed": [
        {"turned": "".join(roles)} for n in (1, 2, 3, 4) for roles in itertools.combinations("qkvo", n)
    ],
    "cache-offset": [],  # seen step by step: see `headwise.teach.caches`
    "cache-order": [],
    "dropout-in-eval": [],  # seen in the calls of dropout: see `headwise.teach.probe`
    "dropout-on-scores": [],
}


def changes(bug: str, base: Mapping[str, Any], fills: Sequence[float] = ()) -> Iterator[dict[str, Any]]:
    """Every way in which a bug changes a layer whose correct settings are `base`.

    fills  numbers of the learner's source that may stand in the place of a forbidden score
    """
    rope = base.get("rope")
    if bug == "rope-mixed-layout" and rope:
        turn, _, theta = rope
        other = "half" if turn == "interleaved" else "interleaved"
        for way in ((turn, other, theta), (other, turn, theta)):
            yield {"rope": way}
        yield {"rope": (turn, turn, theta), "rope_k": (other, other, theta)}
        yield {"rope": (other, other, theta), "rope_k": (turn, turn, theta)}
    if bug == "mask-weak-fill":
        for by in ("replace", "add"):
            for at in ("scaled", "raw"):
                yield from ({"fill": fill, "fill_by": by, "fill_at": at} for fill in fills if fill > -1e4)
    for change in SWITCHES[bug]:
        if all(base.get(key) != value or key not in base for key, value in change.items()):
            yield dict(change)
