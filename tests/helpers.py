"""Attention problems written once in NumPy, and the four paths that must answer them alike.

Each mask comes with `may` and `adds`, which say in the plainest words what it means for query i, key j, head h and
document b. They share no line with the package, so that a mask which is wrong on all backends at once is still seen.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.backends import torch_
from headwise.heads.watch import Seen
from headwise.masks import BroadcastGrid
from headwise.spec import Sizes

RECORDS = tuple(f.name for f in fields(hw.Trace))
PATHS = ("plain", "array", "fused", "explicit")  # the last two are the torch backend: attend, and trace
TORCH_PATHS = ("fused", "explicit")

Wrap = Callable[[np.ndarray], Any]


def as_list(array: np.ndarray) -> Any:
    return array.tolist()


def as_numpy(array: np.ndarray) -> Any:
    return array.copy()


def as_tensor(array: np.ndarray) -> Any:
    return torch.tensor(array)


NATIVE: dict[str, Wrap] = {"plain": as_list, "array": as_numpy, "fused": as_tensor, "explicit": as_tensor}


@dataclass(frozen=True)
class MaskCase:
    """A mask, and what it means."""

    build: Callable[[Wrap], hw.Mask | None]  # makes the mask out of lists, arrays or tensors
    may: Callable[[int, int, int, int], bool] = lambda b, h, i, j: True
    adds: Callable[[int, int, int, int], float] = lambda b, h, i, j: 0.0

    def __and__(self, other: MaskCase) -> MaskCase:
        return MaskCase(
            lambda wrap: self.build(wrap) & other.build(wrap),
            lambda b, h, i, j: self.may(b, h, i, j) and other.may(b, h, i, j),
            lambda b, h, i, j: self.adds(b, h, i, j) + other.adds(b, h, i, j),
        )

    def allowed(self, n: Sizes) -> np.ndarray:
        return self._table(self.may, n).copy()

    def bias(self, n: Sizes) -> np.ndarray:
        return self._table(self.adds, n).copy()

    @staticmethod
    @functools.lru_cache(maxsize=99)  # a test asks for the same one again and again
    def _table(say: Callable[[int, int, int, int], Any], n: Sizes) -> np.ndarray:
        shape = (n.B, n.H, n.T, n.S)
        return np.array([say(*place) for place in np.ndindex(shape)]).reshape(shape)


NO_MASK = MaskCase(lambda wrap: None)


def mask_cases(n: Sizes, seed: int = 0) -> dict[str, MaskCase]:
    """Every mask of the public face, in the forms a caller may give it, for these sizes."""
    rng = np.random.default_rng(seed)
    end = n.S - n.T
    shifts = rng.integers(-2, n.S, n.B)
    lengths = rng.integers(0, n.S + 1, n.B)
    q_ids, kv_ids = np.sort(rng.integers(0, 3, (n.B, n.T))), np.sort(rng.integers(0, 3, (n.B, n.S)))
    full = rng.random((n.B, n.H, n.T, n.S)) < 0.6
    per_head, per_row, per_key = rng.random((n.H, 1, n.S)) < 0.6, rng.random((n.T, 1)) < 0.7, rng.random(n.S) < 0.6
    bias = rng.normal(size=(n.B, n.H, n.T, n.S))
    head_bias = rng.normal(size=(n.H, 1, 1))
    forbidding = np.where(rng.random((n.T, n.S)) < 0.6, rng.normal(size=(n.T, n.S)), -np.inf)
    slopes = rng.random(n.H)
    return {
        "causal": MaskCase(lambda w: hw.Causal(), lambda b, h, i, j: j <= i + end),
        "causal offset 0": MaskCase(lambda w: hw.Causal(offset=0), lambda b, h, i, j: j <= i),
        "causal offset -2": MaskCase(lambda w: hw.Causal(offset=-2), lambda b, h, i, j: j <= i - 2),
        "causal offset 1": MaskCase(lambda w: hw.Causal(offset=1), lambda b, h, i, j: j <= i + 1),
        "causal offsets": MaskCase(lambda w: hw.Causal(offset=w(shifts)), lambda b, h, i, j: j <= i + shifts[b]),
        "window left": MaskCase(lambda w: hw.Window(2, None), lambda b, h, i, j: i + end - 2 <= j),
        "window right": MaskCase(lambda w: hw.Window(None, 1), lambda b, h, i, j: j <= i + end + 1),
        "window both": MaskCase(lambda w: hw.Window(1, 2), lambda b, h, i, j: i + end - 1 <= j <= i + end + 2),
        "window offset": MaskCase(lambda w: hw.Window(1, 0, offset=3), lambda b, h, i, j: i + 2 <= j <= i + 3),
        "window open": MaskCase(lambda w: hw.Window(None, None)),
        "window offsets": MaskCase(
            lambda w: hw.Window(1, 1, offset=w(shifts)), lambda b, h, i, j: i + shifts[b] - 1 <= j <= i + shifts[b] + 1
        ),
        "lengths": MaskCase(lambda w: hw.Lengths(w(lengths)), lambda b, h, i, j: j < lengths[b]),
        "segments": MaskCase(
            lambda w: hw.Segments(w(q_ids), w(kv_ids)), lambda b, h, i, j: q_ids[b, i] == kv_ids[b, j]
        ),
        "allowed": MaskCase(lambda w: hw.Allowed(w(full)), lambda b, h, i, j: full[b, h, i, j]),
        "allowed per head": MaskCase(lambda w: hw.Allowed(w(per_head[None])), lambda b, h, i, j: per_head[h, 0, j]),
        "allowed per row": MaskCase(lambda w: hw.Allowed(w(per_row)), lambda b, h, i, j: per_row[i, 0]),
        "allowed per key": MaskCase(lambda w: hw.Allowed(w(per_key)), lambda b, h, i, j: per_key[j]),
        "bias": MaskCase(lambda w: hw.Bias(w(bias)), adds=lambda b, h, i, j: bias[b, h, i, j]),
        "bias per head": MaskCase(lambda w: hw.Bias(w(head_bias[None])), adds=lambda b, h, i, j: head_bias[h, 0, 0]),
        "bias that forbids": MaskCase(
            lambda w: hw.Bias(w(forbidding)),
            lambda b, h, i, j: forbidding[i, j] > -math.inf,
            lambda b, h, i, j: max(forbidding[i, j], -1e300),  # finite, so that two of them can be added up
        ),
        "alibi": MaskCase(lambda w: hw.Alibi(), adds=lambda b, h, i, j: -paper_slope(h, n.H) * abs(i + end - j)),
        "alibi slopes": MaskCase(
            lambda w: hw.Alibi(w(slopes), offset=2), adds=lambda b, h, i, j: -slopes[h] * abs(i + 2 - j)
        ),
        "alibi offsets": MaskCase(
            lambda w: hw.Alibi(w(slopes), offset=w(shifts)), adds=lambda b, h, i, j: -slopes[h] * abs(i + shifts[b] - j)
        ),
    }


MASK_NAMES = tuple(mask_cases(Sizes(1, 1, 1, 1, 1, 1, 1)))


def paper_slope(h: int, n_heads: int) -> float:
    """ALiBi's slope of head h: for n = 2^a heads 2^(-8(h+1)/n); beyond the last power of two, every other one of 2n."""
    power = 1
    while power * 2 <= n_heads:
        power *= 2
    return 2.0 ** (-8 * (h + 1) / power) if h < power else 2.0 ** (-8 * (2 * (h - power) + 1) / (2 * power))


@dataclass(frozen=True)
class Problem:
    """The arguments of one call, in NumPy; `sink` and `gate` live among the options as arrays."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: MaskCase = NO_MASK
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> Sizes:
        (B, H, T, D), (_, G, S, E) = self.q.shape, self.v.shape
        return Sizes(B, H, G, T, S, D, E)

    @property
    def kv_index(self) -> list[int]:
        n = self.sizes
        kv_index = self.options.get("kv_index")
        return [h * n.G // n.H for h in range(n.H)] if kv_index is None else list(kv_index)

    def with_options(self, **options: Any) -> Problem:
        return replace(self, options={**self.options, **options})

    def arguments(self, wrap: Wrap, mask_wrap: Wrap | None = None) -> dict[str, Any]:
        options = {name: wrap(x) if isinstance(x, np.ndarray) else x for name, x in self.options.items()}
        mask = self.mask.build(mask_wrap or wrap)
        return {"q": wrap(self.q), "k": wrap(self.k), "v": wrap(self.v), "mask": mask, **options}


def draw(n: Sizes, seed: int = 0, mask: str | MaskCase = NO_MASK, **options: Any) -> Problem:
    """A problem of these sizes. `sink=True` and `gate=True` draw one number a head."""
    rng = np.random.default_rng(seed)
    shapes = (n.B, n.H, n.T, n.D), (n.B, n.G, n.S, n.D), (n.B, n.G, n.S, n.E)
    q, k, v = (rng.normal(size=shape) for shape in shapes)
    for name in ("sink", "gate"):
        if options.get(name) is True:
            options[name] = rng.normal(size=n.H)
    case = mask_cases(n, seed)[mask] if isinstance(mask, str) else mask
    return Problem(q, k, v, case, options)


def to_numpy(values: Any) -> np.ndarray:
    """Lists, arrays and tensors as a float64 array."""
    return values.detach().double().numpy() if isinstance(values, torch.Tensor) else np.array(values, np.float64)


def steps(path: str, problem: Problem, mask_wrap: Wrap | None = None) -> dict[str, np.ndarray]:
    """What a path records, as float64 arrays; the fused path records its output alone."""
    arguments = problem.arguments(NATIVE[path], mask_wrap)
    if path == "fused":
        return {"out": to_numpy(hw.attend(**arguments))}
    trace = hw.trace(**arguments)
    return {name: to_numpy(getattr(trace, name)) for name in RECORDS}


def output(path: str, problem: Problem) -> np.ndarray:
    return steps(path, problem)["out"]


def assert_same(actual: Any, expected: Any, what: str, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=False, err_msg=what)


def assert_paths_agree(problem: Problem) -> None:
    """The loop backend is the definition; every record of every other path equals it."""
    definition = steps("plain", problem)
    for path in PATHS[1:]:
        for name, record in steps(path, problem).items():
            assert_same(record, definition[name], f"{name} on {path}")


def dead_keys(problem: Problem) -> np.ndarray:
    """(B,G,S): True where no query of the heads that read this key/value head may attend."""
    n, may = problem.sizes, problem.mask.allowed(problem.sizes)
    dead = np.ones((n.B, n.G, n.S), bool)
    for h, g in enumerate(problem.kv_index):
        dead[:, g] &= ~may[:, h].any(axis=1)
    return dead


def poisoned(problem: Problem, poison: float = math.nan) -> Problem:
    """The same problem with this number wherever a key or a value is read by nobody."""
    dead = dead_keys(problem)[..., None]
    assert dead.any(), "this problem has no dead key and shows nothing"
    return replace(problem, k=np.where(dead, poison, problem.k), v=np.where(dead, poison, problem.v))


# Masks under which nobody may attend anything, for two documents.
NOBODY: dict[str, Callable[[], hw.Mask]] = {
    "lengths of zero": lambda: hw.Lengths([0, 0]),
    "nothing allowed": lambda: hw.Allowed([False]),
    "a bias of -inf": lambda: hw.Bias([-math.inf]),
    "beyond the last key": lambda: hw.Window(0, 0, offset=99),
    "before the first key": lambda: hw.Causal(offset=-99),
    "windows that contradict": lambda: hw.Window(0, 0, offset=0) & hw.Window(0, 0, offset=2),
}


def mask_tables(mask: hw.Mask, n: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """What a mask allows and adds, on the whole of (B,H,T,S)."""
    full = (n.B, n.H, n.T, n.S)
    grid = BroadcastGrid(full, np.asarray, np.arange)
    mask.check(grid)
    allowed, bias = mask.allowed(grid), mask.bias(grid)
    allowed = np.broadcast_to(True if allowed is None else allowed, full)
    return allowed, np.broadcast_to(0.0 if bias is None else bias, full)


KERNEL = "scaled_dot_product_attention"
KERNEL_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
KERNEL_ARGUMENTS = ("query", "key", "value", *KERNEL_DEFAULTS)


@contextmanager
def spied_kernel() -> Iterator[list[dict[str, Any]]]:
    """What each call of torch's fused kernel gets inside this block, by the names of its arguments."""
    calls: list[dict[str, Any]] = []
    kernel = getattr(torch_.F, KERNEL)

    def spy(*args: Any, **named: Any) -> torch.Tensor:
        calls.append(KERNEL_DEFAULTS | dict(zip(KERNEL_ARGUMENTS, args, strict=False)) | named)
        return kernel(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_.F, KERNEL, spy)
        yield calls


WATCHING = {"only", "maps", "marks"}


def watch_call(model: Any, *inputs: Any, **named: Any) -> Seen:
    """What one call of a model shows without gradients; the options of `hw.watch` go beside the model's inputs."""
    options = {name: named.pop(name) for name in WATCHING & named.keys()}
    with torch.no_grad(), hw.watch(model, **options) as seen:
        model(*inputs, **named)
    return seen
