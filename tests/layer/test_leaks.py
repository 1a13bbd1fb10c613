"""What a query may not see, it does not see: not the future, another document, padding, or what left its window.

For each query its world is the tokens that it may attend. All others are changed by much, and by NaN where nobody may
attend them; the query's output must not move by one bit. That gradients stay within it, too, is held by test_cache.py
and by backends/test_gradients.py.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from cases import every
from small_models import noisy, normal
from torch import Tensor

import headwise as hw

B, H, S = 2, 6, 7
BIG = 1e3  # its square times the head width stays finite in every dtype that is tried, and drowns everything else

ID = np.array([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2]])  # the document that each token belongs to
LENGTH = np.array([4, 7])  # real tokens at the beginning
FIRST = np.array([3, 0])  # the first real token, where padding stands at the left


# May token i look at token j in document b? And the mask that says so for tokens start to stop of S, over the keys
# `first` to `stop` that a cache still has.
def documents(first: int, start: int, stop: int) -> hw.Mask:
    return hw.Segments(ID[:, start:stop].tolist(), ID[:, first:stop].tolist())


def real(first: int, stop: int) -> hw.Mask:
    return hw.Allowed((np.arange(first, stop) >= FIRST[:, None])[:, None, None])


Build = Callable[[int, int, int], hw.Mask]
WORLDS: dict[str, tuple[Callable[[int, int, int], bool], Build]] = {
    "future": (lambda b, i, j: j <= i, lambda first, start, stop: hw.Causal()),
    "window": (lambda b, i, j: i - 2 <= j <= i, lambda first, start, stop: hw.Window(2, 0)),
    "document": (
        lambda b, i, j: j <= i and ID[b, i] == ID[b, j],
        lambda first, start, stop: hw.Causal() & documents(first, start, stop),
    ),
    "right padding": (
        lambda b, i, j: j <= i and j < LENGTH[b],
        lambda first, start, stop: hw.Causal() & hw.Lengths([min(int(n), stop) for n in LENGTH]),
    ),
    "left padding": (lambda b, i, j: FIRST[b] <= j <= i, lambda first, start, stop: hw.Causal() & real(first, stop)),
    "documents in a window": (
        lambda b, i, j: i - 2 <= j <= i and ID[b, i] == ID[b, j],
        lambda first, start, stop: hw.Window(2, 0) & documents(first, start, stop),
    ),
    "left padding in a window": (
        lambda b, i, j: max(FIRST[b], i - 2) <= j <= i,
        lambda first, start, stop: hw.Window(2, 0) & real(first, stop),
    ),
}


WIDTH = 29
CACHES: dict[str, dict[str, int] | None] = {
    "no cache": None,
    "growing": {},
    "static": {"max_length": S},
    "rolling": {"window": 3},
}
CUTS = {"whole": (0, 7), "chunks": (0, 3, 5, 7), "one by one": tuple(range(8))}
ROLLS = ("window", "documents in a window", "left padding in a window")  # what a rolling cache of 3 can serve
WAYS = [
    (name, cache, cuts)
    for name in WORLDS
    for cache in CACHES
    for cuts in CUTS
    if (cache != "no cache" or cuts == "whole") and (cache != "rolling" or name in ROLLS)
]


def make(**options: Any) -> hw.MultiHeadAttention:
    return noisy(d_model=WIDTH, n_kv_heads=2, head_dim=4, **options).float()


def tokens() -> Tensor:
    return normal(B, S, WIDTH, seed=7).float()


def run(layer: hw.MultiHeadAttention, x: Tensor, name: str, cache: str, cuts: str) -> Tensor:
    """The layer on all tokens, in pieces where there is a cache; each call brings its mask."""
    sizes, outs = CACHES[cache], []
    held = None if sizes is None else hw.KVCache(**sizes)
    for start, stop in pairwise(CUTS[cuts]):
        first = start - (0 if held is None else held.kept)
        outs.append(layer(x[:, start:stop], mask=WORLDS[name][1](first, start, stop), cache=held))
    return torch.cat(outs, 1)


def tables(name: str) -> Tensor:
    return torch.tensor([[[bool(WORLDS[name][0](b, i, j)) for j in range(S)] for i in range(S)] for b in range(B)])


@every("name, cache, cuts", WAYS)
def test_a_token_sees_its_world_and_no_more(name: str, cache: str, cuts: str) -> None:
    layer, x, may = make(rope=hw.RoPE()), tokens(), tables(name)
    with torch.no_grad():
        before = run(layer, x, name, cache, cuts)
        for i in range(S):
            hidden = ~may[:, i].clone()
            hidden[:, i] = False  # its own place brings its query
            after = run(layer, torch.where(hidden[..., None], BIG, x), name, cache, cuts)
            assert torch.equal(after[:, i], before[:, i]), f"token {i} saw what it may not"
        for j in range(S):
            other = x.clone()
            other[:, j] = -3 * x[:, j] + 1
            moved = (run(layer, other, name, cache, cuts) != before).any(-1)
            sees = may[:, :, j].clone()
            sees[:, j] = moved[:, j]  # the query that stands there moved itself
            assert torch.equal(moved, sees), f"token {j}"


@every("poison", [math.nan, math.inf])
@every("padding, cache, cuts", [way for way in WAYS if "padding" in way[0]])
def test_padding_may_be_no_number(padding: str, cache: str, cuts: str, poison: float) -> None:
    layer, x = make(rope=hw.RoPE(), qk_norm=True), tokens()
    real = torch.zeros(B, S, dtype=torch.bool)
    for b in range(B):
        real[b, slice(0, LENGTH[b]) if padding == "right padding" else slice(FIRST[b], S)] = True
    with torch.no_grad():
        clean = run(layer, x, padding, cache, cuts)
        poisoned = run(layer, torch.where(real[..., None], x, poison), padding, cache, cuts)
    assert torch.equal(poisoned[real], clean[real])
