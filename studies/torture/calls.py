"""Random calls in narrow numbers, and their gradients; and what the tests hold of any call, with other seeds."""

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[2] / "tests" / room) for room in (".", "layer", "heads", "backends"))

import conftest  # noqa: F401  which settles how hypothesis draws, before the tests ask
import hypothesis
import numpy as np
import test_cache
import test_equality
import test_statistics
import torch
from helpers import MASK_NAMES, NO_MASK, Problem, Sizes, as_tensor, draw, mask_cases
from torch import Tensor

import headwise as hw

# Errors of float64 through a softmax of some 20 keys, of half precision in storage alone, and in between.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 8e-2, torch.float16: 2e-2}
PROPERTIES: dict[str, Callable[[], object]] = {  # each of some dozen layers and calls
    "all backends": test_equality.test_any_problem,
    "a cache": test_cache.test_whole_equals_chunks_equals_one_by_one,
    "gradients through a cache": test_cache.test_gradients_flow_through_the_cache,
    "statistics": test_statistics.test_any_call,
}


def case(seed: int, place: Path) -> str:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kind = rng.choices(["attend", *PROPERTIES], (30, *(1 for _ in PROPERTIES)))[0]
    if kind == "attend":
        _attend(rng, seed)
    else:
        hypothesis.seed(seed)(PROPERTIES[kind])()
    return kind


def _problem(rng: random.Random, seed: int) -> Problem:
    """A call with 0 to 3 masks; now and then a query of NaN."""
    B, G, D, E = (rng.choice(sizes) for sizes in ((1, 2), (1, 2, 3), (1, 4, 7), (1, 3, 4, 8)))
    H, T = rng.choice((1, 2, 4, 5)), rng.choice((1, 2, 5, 11))
    n = Sizes(B, H, G, T, rng.choice((1, T, T + 3, 13)), D, E)
    masks, mask = mask_cases(n, seed), NO_MASK
    for name in rng.sample(MASK_NAMES, rng.randrange(4)):
        mask = masks[name] if mask is NO_MASK else mask & masks[name]
    even = H % G == 0 and rng.random() < 0.7
    options: dict[str, Any] = {
        "scale": rng.choice((None, None, 0.5, 0.0, -0.3, 1e-6)),
        "softcap": rng.choice((None, None, 3.0)),
        "kv_index": None if even else [rng.randrange(G) for _ in range(H)],
        "sink": rng.random() < 0.3 or None,
        "gate": rng.random() < 0.3 or None,
    }
    problem = draw(n, seed, mask, **options)
    if rng.random() < 0.1:
        problem.q[0, rng.randrange(H), rng.randrange(T), rng.randrange(D)] = np.nan
    return problem


def _attend(rng: random.Random, seed: int) -> None:
    problem, dtype = _problem(rng, seed), rng.choice((torch.float64, torch.float32, torch.bfloat16, torch.float16))
    given = problem.sizes, dtype, problem.mask.build(as_tensor), problem.options
    learning: dict[str, Tensor] = {}

    def leaf(array: np.ndarray) -> Tensor:
        """Rounded to the narrow format; every number of the call, its biases too, has a gradient."""
        tensor = torch.tensor(array)
        if tensor.is_floating_point():
            tensor = tensor.to(dtype).double().requires_grad_()
            learning[f"number {len(learning)}"] = tensor
        return tensor

    arguments = problem.arguments(leaf)
    out, trace = hw.attend(**arguments), hw.trace(**arguments)
    same(trace.out, out, 1e-10, "trace", given)
    narrow = {name: x.detach().to(dtype) for name, x in arguments.items() if isinstance(x, Tensor)}
    same(hw.attend(**arguments | narrow), out, TOLERANCE[dtype], "narrow", given)
    if arguments["q"].isnan().any():
        return  # what a NaN reaches has no gradient worth comparing
    weight = torch.randn_like(out)
    fused, explicit = (
        torch.autograd.grad((x * weight).sum(), list(learning.values()), allow_unused=True) for x in (out, trace.out)
    )
    for (name, x), a, b in zip(learning.items(), fused, explicit, strict=True):
        zeros = torch.zeros_like(x)
        same(zeros if a is None else a, zeros if b is None else b, 1e-8, f"gradient of {name}", given)


def same(got: Any, wanted: Any, tolerance: float, name: str, given: object) -> None:
    got, wanted = (
        torch.as_tensor(x if isinstance(x, Tensor) else np.asarray(x, np.float64)).detach().double()
        for x in (got, wanted)
    )
    if got.shape != wanted.shape or not torch.allclose(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True):
        largest = "" if got.shape != wanted.shape else f", largest difference {(got - wanted).abs().max():.3g}"
        raise AssertionError(f"{name} differs{largest}: {given}".replace("\n", " "))
