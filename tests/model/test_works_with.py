"""The layer beside the rest of torch: compile, export, autocast, meta tensors, adapters, and other company it keeps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import headwise as hw

B, T, S = 2, 7, 5
BASE: dict[str, Any] = {"d_model": 29, "n_heads": 6, "head_dim": 10}
Call = dict[str, Any]

# The layer's arguments, and those of a call on T tokens.
CASES: dict[str, tuple[dict[str, Any], Callable[[int], Call]]] = {
    "causal": ({"mask": hw.Causal()}, lambda T: {}),
    "gqa": ({"mask": hw.Causal(), "n_kv_heads": 2}, lambda T: {}),
    "value_dim": ({"mask": hw.Causal(), "n_kv_heads": 2, "value_dim": 3}, lambda T: {}),
    "kv_index": ({"n_kv_heads": 4, "kv_index": (0, 1, 1, 2, 3, 3)}, lambda T: {}),
    "window": ({"mask": hw.Window(2, 0)}, lambda T: {}),
    "rope": ({"mask": hw.Causal(), "rope": hw.RoPE()}, lambda T: {}),
    "positions": ({"mask": hw.Causal(), "rope": hw.RoPE()}, lambda T: {"positions": torch.arange(T) + 3}),
    "qk_norm": ({"mask": hw.Causal(), "n_kv_heads": 3, "qk_norm": True, "rope": hw.RoPE()}, lambda T: {}),
    "alibi": ({"mask": hw.Causal() & hw.Alibi()}, lambda T: {}),
    "relative bias": ({"mask": hw.Causal(), "relative_bias": hw.RelativeBias()}, lambda T: {}),
    "sink": ({"mask": hw.Causal(), "sink": True}, lambda T: {}),
    "softcap": ({"mask": hw.Causal(), "softcap": 0.7}, lambda T: {}),
    "gate": ({"mask": hw.Causal()}, lambda T: {"gate": torch.linspace(-1, 1, 6)}),
    "allowed": ({}, lambda T: {"mask": hw.Allowed(draw(B, 1, T, T, seed=5) > 0)}),
    "lengths": ({"mask": hw.Causal()}, lambda T: {"mask": hw.Lengths(torch.tensor([3, T]))}),
    "segments": ({"mask": hw.Causal()}, lambda T: {"mask": hw.Segments(*2 * [torch.arange(B * T).reshape(B, T) // 3])}),
    "bias": ({}, lambda T: {"mask": hw.Bias(draw(T, T, seed=7))}),
    "cross": ({"d_context": 13}, lambda T: {"context": draw(B, S, 13, seed=8)}),
    "cross lengths": (
        {"d_context": 13},
        lambda T: {"context": draw(B, S, 13), "mask": hw.Lengths(torch.tensor([S, 2]))},
    ),
}
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def doubled(call: Call) -> Call:
    """The same call in float64."""
    return {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in call.items()}


@pytest.fixture
def build(shaken: Any) -> Callable[[str], hw.MultiHeadAttention]:
    def make(case: str, **changes: Any) -> hw.MultiHeadAttention:
        torch.manual_seed(1)
        layer: hw.MultiHeadAttention = shaken(hw.MultiHeadAttention(**{**BASE, **CASES[case][0], **changes}))
        return layer

    return make


@pytest.fixture
def fresh_compiler() -> Any:
    """Nothing compiled by another test, so that recompilations are counted from 0."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def answers(layer: Callable[..., Tensor], module: nn.Module, x: Tensor, call: Call) -> list[Tensor]:
    """The output and the gradients of all parameters."""
    module.zero_grad()
    out = layer(x, **call)
    (out * draw(*out.shape, seed=9)).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def assert_same(actual: list[Tensor], expected: list[Tensor], **tolerance: float) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


# torch.compile and torch.export


@pytest.mark.parametrize("case", CASES)
def test_compiles_into_one_graph(case: str, build: Any, fresh_compiler: None) -> None:
    """fullgraph=True makes a graph break an error. Values and gradients are those of the layer itself."""
    layer, call = build(case).double(), doubled(CASES[case][1](T))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = draw(B, T, 29).double()
    assert_same(answers(compiled, layer, x, call), answers(layer, layer, x, call), **EXACT)


@pytest.mark.parametrize("case", CASES)
def test_compiles_once_more_for_other_lengths(case: str, build: Any, fresh_compiler: None) -> None:
    """The second length makes a graph for any length, and the others use that one."""
    counter = CompileCounter()
    layer = build(case)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for length in (7, 11, 13, 17, 19):
        x, call = draw(B, length, 29), CASES[case][1](length)
        torch.testing.assert_close(compiled(x, **call), layer(x, **call))
    assert counter.frame_count <= 2


def test_attend_compiles_into_one_graph(fresh_compiler: None) -> None:
    q, k, v = draw(B, 6, T, 10), draw(B, 2, T, 10, seed=4), draw(B, 2, T, 11, seed=5)
    compiled = torch.compile(lambda *qkv: hw.attend(*qkv, mask=hw.Causal()), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), hw.attend(q, k, v, mask=hw.Causal()))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qk_norm"])
def test_compiles_to_machine_code(case: str, build: Any, fresh_compiler: None) -> None:
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler, so torch.compile's own backend is not tried")
    layer, x = build(case), draw(B, T, 29)
    compiled = torch.compile(layer, fullgraph=True)
    assert_same(answers(compiled, layer, x, {}), answers(layer, layer, x, {}))


@pytest.mark.parametrize("case", CASES)
def test_exports(case: str, build: Any) -> None:
    """Every argument of the call is part of the program, and a mask is a constant in it."""
    layer, x, call = build(case), draw(B, T, 29), CASES[case][1](T)
    mask = call.pop("mask", None)

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, **call: Tensor) -> Tensor:
            return self.layer(x, mask=mask, **call)

    program = torch.export.export(Fixed(), (x,), call)
    torch.testing.assert_close(program.module()(x, **call), layer(x, mask=mask, **call))


def test_exports_for_any_batch_and_length(build: Any) -> None:
    layer = build("gqa")
    sizes = {"x": {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}}
    program = torch.export.export(layer, (draw(B, T, 29),), dynamic_shapes=sizes)
    x = draw(5, 13, 29)
    torch.testing.assert_close(program.module()(x), layer(x))
