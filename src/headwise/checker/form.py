"""The attention layer, with every step of it as a setting: correct as it stands, wrong in a known way by a switch.

`compute` is the layer for NumPy arrays. The right settings, and what each bug changes, stand in `checker/bugs.toml`.
Axis letters as in `headwise.spec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headwise.checker.bugs import Settings
from headwise.files import read_toml

Inputs = tuple[Any, Any, Any]  # queries, keys and values
Arrays = Mapping[str, Any]  # by their roles

# Every step of the layer, as it is right.
CORRECT: Settings = read_toml("checker/bugs.toml")["correct"]


@dataclass(frozen=True)
class Weights:
    """Matrices in the convention x @ matrix. A matrix that is None is not applied: its input is (B,h,T,d) already."""

    n_heads: int
    n_kv_heads: int
    matrices: Arrays  # q (C,h*d), k (C,g*d), v (C,g*e), o (h*e,C), or None
    # of the same names, where there is one
    biases: Arrays = field(default_factory=dict)
    # of a norm on queries and keys: q, k (d,)
    gains: Arrays = field(default_factory=dict)
    sink: Any = None  # (h,), one more logit of each head
    gate: Any = None  # bias and matrix, (C,h*e) or (C,h): what comes of the heads is multiplied by it before W_O


@dataclass(frozen=True)
class Masks:
    """Who may attend: `causal`, and the real keys (B,S) of padded documents, True for real."""

    causal: bool = False
    real: Any = None


@dataclass(frozen=True)
class Stages:
    """Scores and weights (B,h,T,S) of the layer, and what comes out (B,T,C)."""

    scores: Any
    weights: Any
    out: Any


def compute(
    weights: Weights, inputs: Inputs, masks: Masks, settings: Settings
) -> Stages:
    """The layer on inputs of queries (B,T,C), keys and values (B,S,C). `settings` are changes to CORRECT."""
    s = {**CORRECT, **settings, "input_width": inputs[0].shape[-1]}
    x = dict(zip("qkv", inputs, strict=True))
    # A place is what vectors are used as. A bug may make those of place k with W_Q, or of the input of queries.
    vectors = {
        place: project(weights, x[s[f"{place}_input"]], place, s) for place in "qkv"
    }
    if s["rope"]:
        # of (B,T,C), and of the heads (B,h,T,d) that come where there is no W_Q
        T = x["q"].shape[-2]
        start = {"tokens": T, "-tokens": -T}.get(s["start"], s["start"])
        turned = {"part": s["rope_part"], "sign": s["rope_sign"]}
        ropes = {"q": s["rope"], "k": s["rope_k"] or s["rope"], "v": s["rope"]}
        for place in s["rotated"]:
            first = start if place == "q" else 0
            vectors[place] = rotate(vectors[place], ropes[place], first, **turned)
    n_heads = weights.n_heads
    if s["split_q"] == "exchanged":
        n_heads = vectors["q"].shape[1]
    if s["queries"] != "apart":
        n_heads = weights.n_kv_heads
        vectors["q"] = _summed(vectors["q"], n_heads, s["queries"])
    if s["split_k"] != "tokens":  # there axis 1 is not heads
        for place in "kv":
            how = s["group"] if place in s["grouped"] else "repeat"
            vectors[place] = _spread(vectors[place], n_heads, how)
    q, k, v = vectors.values()
    scores, attention, heads = attend(q, k, v, masks, s, weights.sink)
    if weights.gate is not None and weights.gate[1] is not None:
        gate = x["q"] @ weights.gate[1] + weights.gate[0]
        opened = 1 / (1 + np.exp(-gate)) * (gate if s["gate"] == "silu" else 1.0)
        B, H, T = heads.shape[:3]
        heads = heads * opened.reshape(B, T, H, -1).swapaxes(1, 2)
    out = output(weights, heads, s)
    if s["residual"]:
        out = out + x["q"]
    return Stages(scores, attention, out)


def project(w: Weights, x: Any, place: str, s: Settings) -> Any:
    """(B,T,C) -> (B,h,T,d), to stand in the place of q, k or v. `s` has all of CORRECT."""
    role = s[f"{place}_from"]  # of the matrix
    matrix = w.matrices.get(role)
    if matrix is None:
        return x
    n = w.n_heads if role == "q" else w.n_kv_heads
    projected = x @ (matrix.T if role in s["turned"] else matrix)
    # head 0's part of the matrix for all; each head has its own bias
    if role in s["shared"]:
        d = projected.shape[-1] // n
        projected = np.concatenate([projected[..., :d]] * n, -1)
    bias = w.biases.get(place if s["bias_of"] == "place" else role)
    if bias is not None and role not in s["no_bias"]:
        projected = projected + bias
    projected = weighted(projected, s["act"])
    heads = _split(projected, n, s[f"split_{place}"])
    if role.upper() in s["shared"]:  # the finished head 0 for all, with its bias
        heads = np.concatenate([heads[:, :1]] * n, 1)
    if not s["qk_norm"] or (role == "v" and "v" not in w.gains):
        return heads
    return normed(heads, w.gains.get(role, 1.0), s["qk_norm"])


def normed(x: Any, gain: Any, kind: str) -> Any:
    """RMSNorm, or LayerNorm without bias, over the last axis. `kind` is "rms" or "layer"; 1e-6 is the usual guard."""
    if kind == "layer":
        x = x - x.mean(-1)[..., None]
    return x / ((x * x).mean(-1)[..., None] + 1e-6) ** 0.5 * gain


def _split(x: Any, n: int, how: str) -> Any:
    """Cut (B,T,n*d) into heads (B,n,T,d), rightly or in one of the wrong ways."""
    B, T, width = x.shape
    d = width // n
    if how == "blocks":  # head h is the h-th slice of the width
        return x.reshape(B, T, n, d).swapaxes(1, 2)
    if how == "interleaved":  # head h has every n-th feature, from feature h on
        return x.reshape(B, T, d, n).swapaxes(2, 3).swapaxes(1, 2)
    if how == "overlap":  # head h starts at feature h, in the place of h * d
        return np.stack([x[:, :, h : h + d] for h in range(n)], 1)
    if how == "exchanged":  # d heads of width n
        return x.reshape(B, T, d, n).swapaxes(1, 2)
    # the axes are named anew without moving them: tokens get into other heads
    if how == "raw":
        return x.reshape(B, n, T, d)
    return x.reshape(B, T, n, d)  # "tokens": each token's heads attend to one another


def _spread(x: Any, n_heads: int, how: Any) -> Any:
    """Key/value heads (B,g,S,d) for every query head: (B,n_heads,S,d).

    how  "repeat" is right and gives 0 0 0 1 1 1; "tile" gives 0 1 0 1 0 1. Or (axes, axis, way): repeated or tiled
         along that axis of (B,g,S,d), "bgsd", or of (B,S,g,d), and then cut into heads
    """
    B, G, S, d = x.shape
    if n_heads == G:
        return x
    r = n_heads // G
    axes, axis, way = ("bgsd", 1, how) if isinstance(how, str) else how
    x = x if axes == "bgsd" else x.swapaxes(1, 2)
    x = np.concatenate([x] * r, axis) if way == "tile" else np.stack([x] * r, axis + 1)
    if axes == "bgsd":
        return x.reshape(B, n_heads, S, d)
    return x.reshape(B, S, n_heads, d).swapaxes(1, 2)


def _summed(q: Any, n: int, how: str) -> Any:
    """Queries (B,h,T,d) of the heads that read one key/value head added up: (B,n,T,d)."""
    B, H, T, d = q.shape
    if how == "summed":
        return q.reshape(B, n, H // n, T, d).sum(2)
    return q.reshape(B, H // n, n, T, d).sum(1)


def attend(
    q: Any, k: Any, v: Any, masks: Masks, s: Settings, sink: Any = None
) -> tuple[Any, Any, Any]:
    """Scores and weights (B,h,T,S), heads (B,h,T,e). `s` has all of CORRECT."""
    (B, H, T, _), S = q.shape, k.shape[2]
    size = _divisor(q, s)
    scores = _scores(q, k, s, size)
    ok = allowed_by(masks, s, B, H, T, S)
    late = ok
    place = s["mask_at"]
    if place == "apart":  # padding before the softmax, the future after it
        ok = allowed_by(Masks(False, masks.real), s, B, H, T, S)
        late = allowed_by(Masks(masks.causal), s, B, H, T, S)
    if ok is not None and place in ("scores", "apart"):
        fill = s["fill"]
        # masked before the cap, which lifts -inf to its own lowest number
        if fill == "cap":
            fill = -s["softcap"]
        if s["fill_at"] == "raw":  # a raw one is divided like the scores
            fill = fill / size
        scores = np.where(
            ok, scores, fill if s["fill_by"] == "replace" else scores + fill
        )
    if ok is not None and place == "times":
        scores = scores * np.where(ok, 0.0, s["fill"])
    # A softmax of rows is not changed by it; "exp" is, and a softmax along another axis.
    if s["top"] == "row":
        scores = scores - np.amax(scores, -1)[..., None]
    if sink is not None:  # another key, which is forgotten after the softmax
        column = np.broadcast_to(
            np.reshape(sink, (1, -1, 1, 1)), (*scores.shape[:3], 1)
        )
        scores = np.concatenate([scores, column], -1)
    weights = (
        softmax(scores, s["axis"])
        if s["norm"] == "softmax"
        else weighted(scores, s["norm"])
    )
    if sink is not None:
        scores = scores[..., :-1]
        weights = weights[..., :-1]
    if ok is not None and s["empty"] != "nan":
        weights = np.where(
            ok.any(-1)[..., None], weights, 0.0 if s["empty"] == "zero" else 1 / S
        )
    if late is not None and place in ("weights", "apart"):
        weights = (
            weights * late
            if s["fill_by"] == "replace"
            else weights + np.where(late, 0.0, s["fill"])
        )
    if s["scale_at"] == "weights":
        weights = weights / size
    if s["first"] == "lost":
        weights = _without_first(weights)
    return scores, weights, _mixed(weights, v, s["mixes"])


def _mixed(weights: Any, v: Any, how: str) -> Any:
    """Values (B,h,S,e) under weights (B,h,T,S), rightly by "rows" or in one of the wrong ways: (B,h,T,e)."""
    match how:
        case "columns":
            return weights.swapaxes(-1, -2) @ v
        # letters of an einsum: 'bhts,bhue->bhte', 'bhts,bhte->bhte', 'bhtt,bhte->bhte'
        case "apart":
            return weights.sum(-1)[..., None] * v.sum(-2)[..., None, :]
        case "own":
            return weights.sum(-1)[..., None] * v
        case "diagonal":
            return np.diagonal(weights, 0, -2, -1)[..., None] * v
        case _:
            return weights @ v


def _divisor(q: Any, s: Settings) -> float:
    """What scores are divided by, under the name of each scale.

    "head" is the root of that width, "whole-head" the width itself, and so for the other widths. "times-head" and
    "times-whole-head" multiply by them: to divide by 1 / n is to multiply by n.
    """
    _, H, T, d = q.shape
    widths = {
        "head": d,
        "model": H * d,
        "input": s["input_width"],
        "heads": H,
        "tokens": T,
        "batch": len(q),
    }
    sizes: dict[Any, float] = {"none": 1}
    for name, width in widths.items():
        sizes |= {name: width**0.5, f"whole-{name}": width}
        sizes |= {f"times-{name}": width**-0.5, f"times-whole-{name}": 1 / width}
    # a number is a factor that stands beside the usual scale
    return float(sizes.get(s["scale"]) or sizes["head"] / s["scale"])


def _scores(q: Any, k: Any, s: Settings, size: float) -> Any:
    """Scores (B,h,T,S) before a mask."""
    T = q.shape[2]
    S = k.shape[2]
    scores = q @ k.swapaxes(-1, -2)
    # a dot product of the whole width is the sum of those of its heads
    if s["compared"] == "all":
        # the same for every head, in the shape (B,H,T,S)
        scores = scores * 0 + scores.sum(1)[:, None]
    if s["compared"] == "nothing":
        scores = scores * 0
    if s["first"] == "lost":
        scores = _without_first(scores)
    if s["scale_at"] == "scores":
        scores = scores / size
    if s["slopes"] is not False:
        distance = np.abs(np.arange(S)[None] - np.arange(T)[:, None] - (S - T))
        scores = scores + s["slope"] * np.reshape(s["slopes"], (-1, 1, 1)) * distance
    if s["softcap"]:
        scores = s["softcap"] * np.tanh(scores / s["softcap"])
    return scores


def _without_first(x: Any) -> Any:
    """Of (B,h,T,S) the first key's numbers as 0, but for the first query."""
    x = x.copy()
    x[:, :, 1:, 0] = 0.0
    return x


def weighted(x: Any, how: str) -> Any:
    """What is written in the place of softmax: "relu", or "relu-shared", which is divided by its sum over the keys.

    "relu-shared-guarded" adds 1e-9 to the sum, against a sum of 0.
    """
    # `guarded` is what comes after it: "" or "-guarded"
    kind, _, guarded = how.partition("-shared")
    # only what is asked for: a search computes this a hundred thousand times
    match kind:
        case "none":
            weights = x
        case "square":
            weights = x * x
        case "exp":
            weights = np.exp(x)
        case "sigmoid":
            weights = 1 / (1 + np.exp(-x))
        case "relu-square":
            weights = np.where(x > 0, x * x, 0.0)
        case _:
            weights = np.where(x > 0, x, 0.0)
    if "shared" in how:
        weights = weights / (weights.sum(-1)[..., None] + (1e-9 if guarded else 0.0))
    return weights


def softmax(x: Any, axis: Any) -> Any:
    """Let what stands along an axis of (B,h,T,S) add up to 1, or along several at once, which have a name."""
    shapes = {  # (B,h,T,S) with the axes that are summed over as the last one
        "rows": (*x.shape[:2], -1),  # all queries and keys of a head
        "document": (len(x), -1),  # and all heads of a document
        "all": (-1,),
    }
    if axis in shapes:
        return softmax(x.reshape(shapes[axis]), -1).reshape(x.shape)
    if axis == "folded":  # documents and heads on one axis, as (B*h,T,S) has them
        return softmax(x.reshape(-1, *x.shape[2:]), 0).reshape(x.shape)
    x = x.swapaxes(axis, -1)
    powers = np.exp(x - np.amax(x, -1)[..., None])
    return (powers / powers.sum(-1)[..., None]).swapaxes(axis, -1)


def allowed_by(masks: Masks, s: Settings, B: int, H: int, T: int, S: int) -> Any:
    """(B|1, H|1, T, S), True where a query may attend; None where nothing is masked."""
    if not masks.causal and masks.real is None and not s["window"]:
        return None
    allowed = np.ones((1, 1, T, S), bool)
    # (T,S): how many tokens a key stands after a query. The last of both are the same token, also where S > T.
    ahead = np.arange(S)[None] - np.arange(T)[:, None] - (S - T)
    if s["window"]:
        back = -ahead if s["see"] == "window" else np.abs(ahead)
        allowed = allowed & (back < s["window"])
    if masks.causal:
        # Whatever is no rule here, "past" and "inverse", sees the past and itself.
        rules = {
            "next": ahead <= 1,
            "others": ahead < 0,
            "future": ahead > 0,
            "later": ahead >= 0,
            "all": True,
            "window": True,
        }
        allowed = allowed & rules.get(s["see"], ahead <= 0)
    if masks.real is not None and s["padding"] != "nothing":
        document = np.arange(B)[:, None]
        head = np.arange(H)[None]
        # "cycle": the B masks are laid again and again on the B * H maps, so that head 1 of document 0 gets the mask
        # of document 1. "fold": each of the B masks is repeated H times, and the maps stand head by head. "next": the
        # mask of the next document.
        owners = {"cycle": (document * H + head) % B, "next": (document + 1) % B}
        owners["fold"] = (head * B + document) // H
        # (B,H|1,S), of whose mask a head gets
        real = counted(masks.real, s["real"])
        real = real[owners.get(s["mask_of"], document)]
        # Where T differs from S the mask, as long as the keys, cannot lie on queries.
        on_queries = s["padding"] == "queries" and T == S
        allowed = allowed & (real[:, :, :, None] if on_queries else real[:, :, None, :])
    return ~allowed if s["see"] == "inverse" else allowed


def counted(real: Any, how: str) -> Any:
    """Real tokens (B,S) as code counts them: "all", or "one-more" or "one-less" of each document."""
    real = np.asarray(real)
    if how == "one-more":
        return real | np.concatenate([real[:, :1], real[:, :-1]], 1)
    if how == "one-less":
        return real & np.concatenate([real[:, 1:], real[:, :1] & False], 1)
    return real


# Orders of the axes (B,h,T,e) before heads are joined; the right one is (0, 2, 1, 3).
JOINS = {
    "interleaved": (0, 2, 3, 1),  # the heads take turns, feature by feature
    "raw": (0, 1, 2, 3),
    "raw-columns": (0, 1, 3, 2),
    "heads-first": (1, 0, 2, 3),
    "heads-first-turned": (1, 2, 0, 3),
}


def output(w: Weights, heads: Any, s: Settings) -> Any:
    """Heads (B,h,T,e) joined, times W_O: (B,T,C). Without a W_Q the heads as they are."""
    matrix = w.matrices.get("o")
    how = s["join"]
    if w.matrices.get("q") is None:
        return heads
    if s["split_q"] == "tokens":  # (B,T,h,e) by then
        heads = heads.swapaxes(1, 2)
    B, H, T, e = heads.shape
    joined = heads[:, ::-1] if how == "reversed" else heads
    joined = joined.transpose(JOINS.get(how, (0, 2, 1, 3)))
    if how in ("mean", "sum"):
        joined = heads.sum(1) / (H if how == "mean" else 1)
        # what is multiplied must be as wide as W_O reads
        if matrix is not None and matrix.shape[0] == H * e:
            joined = np.concatenate([joined] * H, -1)
    # "overlap": head h is written at feature h, over what stood there; of all but the last 1 is left. "last": each
    # head over the one before it. "last-first": the same, in the place of the first
    if how in ("overlap", "last", "last-first"):
        kept = [heads[:, h, :, :1] for h in range(H - 1) if how == "overlap"]
        free = {"overlap": (H - 1) * (e - 1), "last": 0, "last-first": (H - 1) * e}
        joined = [*kept, heads[:, -1], np.zeros((B, T, free[how]))]
        joined = np.concatenate(joined, -1)
    joined = joined.reshape(B, T, -1) / (H if how == "divided" else 1)
    if matrix is None or not s["out_proj"]:
        return joined
    out = joined @ (matrix.T if "o" in s["turned"] else matrix)
    if "o" in w.biases and "o" not in s["no_bias"]:
        out = out + w.biases["o"]
    return weighted(out, s["act"])


def rotate(
    x: Any, rope: tuple[str, str, float], start: int, part: float = 1, sign: int = 1
) -> Any:
    """Rotary positions on (...,T,d), Su et al. 2021 (arXiv 2104.09864).

    rope   (turn, table, base), as follows
    turn   which features make a pair: "half" (i, i + d/2) or "interleaved" (2i, 2i + 1); "none" turns nothing; with
           "-plus" behind it the minus of the rotation is forgotten
    table  in which order the angles stand; another one than that of the turn is the bug. "cut-sin": sines and cosines
           take turns, and the table is cut into halves, of which one is taken for the sines; "cut-cos": cosines first
    base   of the angles: position * base**(-2i/d) for pair i; the paper has 10000
    start  position of the first token
    part   how much of the features is turned, 0 to 1: the first ones
    """
    if part != 1:
        width = round(x.shape[-1] * part)
        return np.concatenate(
            [rotate(x[..., :width], rope, start, 1, sign), x[..., width:]], -1
        )
    turn, table, base = rope
    minus = 1 if turn.endswith("-plus") else -1
    turn = turn.removesuffix("-plus")
    if turn == "none":
        return x
    T, d = x.shape[-2:]
    angles = sign * np.outer(np.arange(T) + start, base ** (-np.arange(0, d, 2) / d))
    cos = np.cos(angles)
    sin = np.sin(angles)
    if table == "cut-sin":
        sin, cos = np.split(np.stack([sin, cos], -1).reshape(T, d), 2, 1)
    elif table == "cut-cos":
        cos, sin = np.split(np.stack([cos, sin], -1).reshape(T, d), 2, 1)
    if (turn if "cut" in table else table) == "interleaved":
        cos, sin = (np.repeat(each, 2, 1) for each in (cos, sin))
    else:
        cos, sin = (np.concatenate([each, each], 1) for each in (cos, sin))
    cos = cos.astype(x.dtype)
    sin = sin.astype(x.dtype)
    # (a, b) -> (a cos - b sin, b cos + a sin) of each pair: `other` has -b in the place of a, and a in that of b.
    if turn == "interleaved":
        other = np.stack([minus * x[..., 1::2], x[..., 0::2]], -1).reshape(x.shape)
    else:
        other = np.concatenate([minus * x[..., d // 2 :], x[..., : d // 2]], -1)
    return x * cos + other * sin
