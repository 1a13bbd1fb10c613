"""Random calls on the three rungs, values and gradients; and what the tests hold of any layer, with other seeds."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conftest  # noqa: F401  which settles how hypothesis draws, before the tests ask
import hypothesis
import numpy as np
import torch
from children import FailedError
from torch import Tensor

import headwise as hw
from headwise.masks import Streaming

sys.path.extend(str(Path(__file__).resolve().parents[1] / room) for room in ("layer", "heads"))
import test_cache
import test_planned_cache
import test_statistics

# Errors of float64 through a softmax of some 20 keys, of half precision in storage alone, and in between.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 8e-2, torch.float16: 2e-2}
PLAIN = 60  # scores that the plain rung computes, at most: it is the slowest
Masks = tuple[Any, Any, Any]  # the same one of tensors, of arrays and of lists
PROPERTIES: dict[str, Callable[[], object]] = {  # each of some dozen layers and calls
    "a cache": test_cache.test_whole_equals_chunks_equals_one_by_one,
    "gradients through a cache": test_cache.test_gradients_flow_through_the_cache,
    "a planned cache": test_planned_cache.test_it_gives_what_its_mask_gives,
    "statistics": test_statistics.test_any_call,
}


def prepare(base: Path) -> None:
    torch.set_num_threads(1)


def case(seed: int, place: Path, base: Path) -> tuple[str, int]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kind = rng.choices(["attend", *PROPERTIES], (30, *(1 for _ in PROPERTIES)))[0]
    if kind == "attend":
        _attend(rng)
    else:
        hypothesis.seed(seed)(PROPERTIES[kind])()
    return kind, 1


def _mask(rng: random.Random, B: int, H: int, T: int, S: int) -> tuple[Masks, list[Tensor]]:
    """A mask of 0 to 3 parts in its three forms; and the biases in it, which have gradients."""
    parts: list[Masks] = []
    biases: list[Tensor] = []
    kinds = ["causal", "window", "lengths", "segments", "allowed", "bias", "alibi", "streaming"]
    for name in rng.sample(kinds, rng.randrange(4)):
        offset = rng.choice([None, 0, rng.randrange(-3, 9)])
        if name == "causal":
            parts.append((hw.Causal(offset),) * 3)
        elif name == "window":
            parts.append((hw.Window(rng.choice([None, 0, 1, 5]), rng.choice([None, 0, 2]), offset),) * 3)
        elif name == "streaming":
            sizes = [(rng.randrange(3), rng.randrange(1, 6)) for _ in range(H)]
            parts.append((Streaming(*zip(*sizes, strict=True)),) * 3)
        elif name == "alibi":
            parts.append((hw.Alibi(),) * 3)
        elif name == "lengths":
            parts.append(_formed(hw.Lengths, torch.randint(0, S + 1, (B,))))
        elif name == "segments":
            parts.append(_formed(hw.Segments, torch.randint(0, 2, (B, T)), torch.randint(0, 2, (B, S))))
        elif name == "allowed":
            shape = rng.choice([(T, S), (B, 1, T, S), (1, H, 1, S), (B, H, T, S)])
            parts.append(_formed(hw.Allowed, torch.rand(shape) < 0.7))
        else:
            shape = rng.choice([(T, S), (B, H, T, S), (1, H, 1, 1)])
            biases.append(torch.randn(shape, dtype=torch.float64))
            parts.append(_formed(hw.Bias, biases[-1]))
            biases[-1].requires_grad_()
    if not parts:
        return (None, None, None), []
    both = list(parts[0])
    for part in parts[1:]:
        both = [a & b for a, b in zip(both, part, strict=True)]
    return (both[0], both[1], both[2]), biases


def _formed(kind: Any, *values: Tensor) -> Masks:
    return kind(*values), kind(*(x.numpy().copy() for x in values)), kind(*(x.tolist() for x in values))


def _attend(rng: random.Random) -> None:
    B, G, T, D, E = (rng.choice(sizes) for sizes in ((1, 2), (1, 2, 3), (1, 2, 5, 11), (1, 4, 7), (1, 3, 4, 8)))
    H, S = rng.choice((1, 2, 4, 5)), rng.choice((1, T, T + 3, 13))
    kv_index = None if H % G == 0 and rng.random() < 0.7 else [rng.randrange(G) for _ in range(H)]
    dtype = rng.choice((torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16))
    q, k, v = (
        torch.randn(shape, dtype=torch.float64).to(dtype) for shape in ((B, H, T, D), (B, G, S, D), (B, G, S, E))
    )
    if rng.random() < 0.1:
        q[0, rng.randrange(H), rng.randrange(T), rng.randrange(D)] = float("nan")
    (mask, array_mask, list_mask), biases = _mask(rng, B, H, T, S)
    options: dict[str, Any] = {
        "scale": rng.choice((None, None, 0.5, 0.0, -0.3, 1e-6)),
        "softcap": rng.choice((None, None, 3.0)),
        "kv_index": kv_index,
    }
    heads = {name: torch.randn(H, dtype=torch.float64) for name in ("sink", "gate") if rng.random() < 0.3}
    given = (B, G, H, T, S, D, E, dtype, list_mask, options, sorted(heads))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    for x in heads.values():
        x.requires_grad_()
    out = hw.attend(*exact, mask, **options, **heads)
    tensor = hw.attend(q, k, v, mask, **options, **{name: x.detach().to(dtype) for name, x in heads.items()})
    same(tensor, out, TOLERANCE[dtype], "tensor", given)
    trace = hw.trace(*exact, mask, **options, **heads)
    same(trace.out, out, 1e-10, "trace", given)
    arrays, of_heads = [x.detach().numpy() for x in exact], {name: x.detach().numpy() for name, x in heads.items()}
    same(hw.attend(*arrays, array_mask, **options, **of_heads), out, 1e-10, "array", given)
    steps = hw.trace(*arrays, array_mask, **options, **of_heads)
    same(steps.weights, trace.weights, 1e-10, "weights of the array rung", given)
    same(steps.lse, trace.lse, 1e-10, "lse of the array rung", given)
    if B * H * T * S <= PLAIN:
        lists = [x.tolist() for x in arrays]
        plain = hw.attend(*lists, list_mask, **options, **{name: x.tolist() for name, x in heads.items()})
        same(plain, out, 1e-10, "plain", given)
    if exact[0].isnan().any():
        return  # what a NaN reaches has no gradient worth comparing
    learning = [*exact, *heads.values(), *biases]
    weight = torch.randn_like(out)
    fused = torch.autograd.grad((out * weight).sum(), learning, allow_unused=True)
    explicit = torch.autograd.grad((trace.out * weight).sum(), learning, allow_unused=True)
    names = [*"qkv", *heads, *("bias" for _ in biases)]
    for name, x, a, b in zip(names, learning, fused, explicit, strict=True):
        zeros = torch.zeros_like(x)
        same(zeros if a is None else a, zeros if b is None else b, 1e-8, f"gradient of {name}", given)


def same(got: Any, wanted: Any, tolerance: float, name: str, given: object) -> None:
    got, wanted = (
        torch.as_tensor(x if isinstance(x, Tensor) else np.asarray(x, np.float64)).detach().double()
        for x in (got, wanted)
    )
    if got.shape != wanted.shape or not torch.allclose(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True):
        largest = "" if got.shape != wanted.shape else f", largest difference {(got - wanted).abs().max():.3g}"
        raise FailedError(f"{name} differs{largest}: {given}".replace("\n", " "))
