"""Nothing is dropped: each argument on each path changes the answer to the right one, or is refused by name.

The rows are read off the signatures, so a new argument without a row here is a failure.
"""

import inspect
import zlib
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from cases import read_table, refuses, refuses_table
from helpers import TORCH_PATHS, Sizes, draw, output, to_numpy
from small_models import by_paper
from torch import Tensor

import headwise as hw
from headwise.records import Call

DISTINCT = 1e-3  # two values of an argument must give answers this far apart


def differ(one: Any, other: Any) -> bool:
    return one.shape != other.shape or bool(abs(one - other).max() > DISTINCT)


def assert_weights_dropped(dropped: np.ndarray, weights: np.ndarray, p: float) -> None:
    """Values are the unit vectors, so the output is the weights: each one gone, or scaled up."""
    gone = (dropped == 0) & (weights != 0)
    assert abs(gone.sum() / (weights != 0).sum() - p) < 0.2
    np.testing.assert_allclose(dropped, np.where(gone, 0, weights / (1 - p)), rtol=1e-12, atol=1e-12)


def test_every_argument_has_a_row() -> None:
    assert set(LAYER_ROWS) == set(CONSTRUCTOR) - {"device", "dtype"}  # these say where, not what: see test_layer
    assert set(CALL_ROWS) == set(FORWARD)


def test_dropout_of_the_function() -> None:
    """Values are unit vectors, so that the output is the weights."""
    problem = draw(Sizes(B=2, H=6, G=3, T=5, S=7, D=3, E=7), mask="window left")
    problem = replace(problem, v=np.broadcast_to(np.eye(7), problem.v.shape))
    dropping = problem.with_options(dropout=0.5)
    torch.manual_seed(0)
    for path in TORCH_PATHS:
        assert_weights_dropped(output(path, dropping), output(path, problem), 0.5)
    for path, kind in (("plain", "nested lists"), ("array", "NumPy arrays")):
        refuses(lambda path=path: output(path, dropping), f"^dropout=0.5 on {kind}: dropout needs the torch backend")


B, T, S = 2, 5, 7
CUTS = (0, 2, 3, 5)
LAYER_PATHS = ("direct", "growing", "static", "rolling", "watched", "compiled")
CACHES: dict[str, dict[str, int]] = {"growing": {}, "static": {"max_length": S}, "rolling": {"window": 3}}
BASE: dict[str, Any] = {"d_model": 29, "n_heads": 6, "head_dim": 4, "mask": hw.Window(2, 0)}
CONSTRUCTOR = tuple(inspect.signature(hw.MultiHeadAttention).parameters)
FORWARD = tuple(name for name in inspect.signature(hw.MultiHeadAttention.forward).parameters if name != "self")


def numbers(name: str, *shape: int) -> Tensor:
    """Random, and the same for the same name and shape."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """A layer, and a call of it."""

    build: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)

    def layer(self) -> hw.MultiHeadAttention:
        layer = hw.MultiHeadAttention(**{**BASE, **self.build}).double().eval()
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(numbers(name, *parameter.shape) * (1.0 if parameter.ndim == 1 else 0.3))
        return layer


TABLES = read_table("matrix")
CROSS: dict[str, Any] = {"mask": None}
LAYER_ROWS: dict[str, tuple[Case, Case]] = {
    **{
        name: (Case(eval(before)), Case(eval(after))) for name, (before, after) in TABLES["layer"].items()
    },  # our own table
    "d_context": (
        Case(CROSS, {"context": numbers("a", B, S, 29)}),
        Case({**CROSS, "d_context": 13}, {"context": numbers("b", B, S, 13)}),
    ),
    "d_values": (
        Case(CROSS, {"context": numbers("a", B, S, 29), "values": numbers("a", B, S, 29)}),
        Case({**CROSS, "d_values": 13}, {"context": numbers("a", B, S, 29), "values": numbers("b", B, S, 13)}),
    ),
}
CALL_ROWS: dict[str, tuple[Case, Case]] = {
    "x": (Case(), Case(call={"x": numbers("another x", B, T, 29)})),
    "context": (Case(CROSS, {"context": numbers("a", B, S, 29)}), Case(CROSS, {"context": numbers("b", B, S, 29)})),
    "mask": (Case(), Case(call={"mask": hw.Alibi()})),
    "cache": (Case(), Case()),
    "positions": (
        Case({"rope": hw.RoPE(dim=2)}),
        Case({"rope": hw.RoPE(dim=2)}, {"positions": torch.tensor([[3, 1, 4, 0, 5], [2, 7, 1, 8, 3]])}),
    ),
    "gate": (Case(), Case(call={"gate": torch.linspace(-1, 2, 6).double()})),
    "values": (
        Case(CROSS, {"context": numbers("a", B, S, 29)}),
        Case(CROSS, {"context": numbers("a", B, S, 29), "values": numbers("b", B, S, 29)}),
    ),
}
ALL: dict[str, Any] = {"d_in": 11, "d_out": 17, "n_kv_heads": 2, "value_dim": 7, "softcap": 1.3, "sink": True}
ALL |= {"q_bias": True, "kv_bias": True, "out_bias": True, "mask": hw.Window(2, 0) & hw.Alibi()}
ALL |= {"qk_norm": True, "rope": hw.RoPE(dim=2, theta=31.0, interleaved=True)}
WIDTHS: dict[str, Any] = {**CROSS, "d_in": 11, "d_context": 13, "d_out": 17, "n_kv_heads": 1, "qk_norm": True}
JOINED_ROWS: dict[str, tuple[Case, Case]] = {
    "all": (Case(ALL), Case(ALL, {"gate": torch.linspace(-1, 2, 6).double(), "mask": hw.Alibi()})),
    "between widths": (
        Case(WIDTHS, {"context": numbers("a", B, S, 13)}),
        Case(WIDTHS, {"context": numbers("a", B, S, 13), "mask": hw.Lengths([3, 6])}),
    ),
}
SPECIAL = {"dropout", "cache"}  # dropout has a law and a test of its own below; a cache is a path of all other cells
REFUSED_BY_CACHE = {
    (argument, "rolling"): r"^context= with a cache of window=3: a context stays whole"
    for argument in ("context", "d_context", "values", "d_values", "between widths")
}


def reference(case: Case, layer: hw.MultiHeadAttention, x: Tensor, turn: Any) -> np.ndarray:
    """The layer's promise, by the loop backend: no cache, no kernel, no compiler."""
    spec, call = layer.spec, case.call
    source = call.get("context", x)

    def heads(projection: torch.nn.Linear, of: Tensor, n: int, gain: Tensor | None) -> Tensor:
        y = of @ projection.weight.T + (0 if projection.bias is None else projection.bias)
        y = torch.stack(y.tensor_split(n, -1), 1)
        if gain is not None:
            y = y / torch.sqrt((y * y).mean(-1, keepdim=True) + spec.qk_norm_eps) * gain
        return y

    gains = (layer.q_norm.weight, layer.k_norm.weight) if spec.qk_norm else (None, None)
    q, k = heads(layer.q_proj, x, spec.n_heads, gains[0]), heads(layer.k_proj, source, spec.n_kv_heads, gains[1])
    v = heads(layer.v_proj, call.get("values", source), spec.n_kv_heads, None)
    if spec.rope:
        positions = call.get("positions", torch.arange(T)).expand(B, T)
        q, k = turn(q, spec.rope, positions), turn(k, spec.rope, positions)
    return joined_heads(case, layer, q, k, v)


def joined_heads(case: Case, layer: hw.MultiHeadAttention, q: Tensor, k: Tensor, v: Tensor) -> np.ndarray:
    """The loop backend's attention under the masks of layer and call, the heads joined and projected."""
    spec, call = layer.spec, case.call
    masks = [mask for mask in (spec.mask, call.get("mask")) if mask is not None]
    both = None
    for mask in masks:
        both = mask if both is None else both & mask
    out = hw.attend(
        q.tolist(), k.tolist(), v.tolist(), both, scale=spec.scale, softcap=spec.softcap, kv_index=spec.kv_index,
        sink=None if layer.sink is None else layer.sink.tolist(),
        gate=call["gate"].tolist() if "gate" in call else None,
    )  # fmt: skip
    joined = torch.cat([torch.tensor(out, dtype=torch.float64)[:, h] for h in range(spec.n_heads)], -1)
    if layer.o_proj is None:
        return to_numpy(joined)
    return to_numpy(joined @ layer.o_proj.weight.T + (0 if layer.o_proj.bias is None else layer.o_proj.bias))


def run(path: str, layer: hw.MultiHeadAttention, x: Tensor, call: dict[str, Any]) -> Tensor:
    """The layer's answer for the whole of x on a path."""
    if path in CACHES:
        cache, parts = hw.KVCache(**CACHES[path]), []
        for start, stop in pairwise(CUTS):
            positions = {"positions": call["positions"][:, start:stop]} if "positions" in call else {}
            parts.append(layer(x[:, start:stop], **{**call, **positions}, cache=cache))
        return torch.cat(parts, 1)
    if path == "compiled":
        torch._dynamo.reset()
        compiled: Tensor = torch.compile(layer, backend="eager", fullgraph=True)(x, **call)
        return compiled
    if path == "watched":
        seen: list[Call] = []
        layer.watchers.append(seen.append)
        out = layer(x, **call)
        layer.watchers.remove(seen.append)
        assert_recorded(seen, layer, out)
        return out
    result: Tensor = layer(x, **call)
    return result


def assert_recorded(seen: list[Call], layer: hw.MultiHeadAttention, out: Tensor) -> None:
    """One call, with all that went into the attention and what came out of it."""
    (call,) = seen
    assert call.layer is layer
    joined = torch.cat([call.out[:, h] for h in range(layer.spec.n_heads)], -1)
    assert torch.equal(joined if layer.o_proj is None else layer.o_proj(joined), out)
    if not call.options.dropout:
        spelled = hw.attend(call.q, call.k, call.v, **call.options._asdict())
        assert torch.equal(spelled, call.out)


def width_of_x(case: Case) -> int:
    changed = {**BASE, **case.build}
    return changed.get("d_in", changed["d_model"])


COMPILED = ("out_proj", "kv_index", "gate")  # test_works_with compiles the rest, for several lengths


ROWS = (("layer's", LAYER_ROWS), ("call's", CALL_ROWS), ("joined", JOINED_ROWS))
CELLS = [
    pytest.param(rows[argument], argument, path, id=f"{kind} {argument}, {path}")
    for kind, rows in ROWS
    for argument in rows
    if argument not in SPECIAL
    for path in LAYER_PATHS
    if path != "compiled" or argument in COMPILED
]


@pytest.mark.parametrize(("row", "argument", "path"), CELLS)
@torch.no_grad()  # with gradients a cache keeps its keys otherwise: test_cache.py
def test_the_layer(row: tuple[Case, Case], argument: str, path: str) -> None:
    answers = []
    for case in row:
        layer, call = case.layer(), dict(case.call)
        assert layer.spec.n_parameters == sum(p.numel() for p in layer.parameters())
        x = call.pop("x", numbers("x", B, T, width_of_x(case)))
        # Compiling takes long, and the first of the two answers is known from the direct path.
        path_now = "direct" if path == "compiled" and case is row[0] else path
        if (argument, path) in REFUSED_BY_CACHE:
            with pytest.raises(hw.HeadwiseError, match=REFUSED_BY_CACHE[argument, path]):
                run(path, layer, x, call)
            return
        out = run(path_now, layer, x, call)
        if path == "watched":
            assert torch.equal(out, layer(x, **call)), "watching changed the answer"
        answers.append(to_numpy(out))
        close = 1e-6 if layer.spec.rope else 1e-12  # cosines and sines are kept in float32
        np.testing.assert_allclose(answers[-1], reference(case, layer, x, by_paper), rtol=close, atol=close)
    assert differ(*answers)


@pytest.mark.slow
@pytest.mark.parametrize("path", LAYER_PATHS)
def test_dropout_of_the_layer(path: str) -> None:
    """Each token's value is its own unit vector, so that the layer without output projection shows its weights."""
    sizes = {"value_dim": T, "out_proj": False}
    before, after = Case(sizes), Case({**sizes, "dropout": 0.5})
    x = numbers("x", B, T, 29)
    x[..., :T] = torch.eye(T)
    layers = []
    for case in (before, after):
        layer = case.layer()
        with torch.no_grad():
            layer.v_proj.weight.copy_(torch.eye(T, 29).repeat(6, 1))
        layers.append(layer)
    weights = reference(before, layers[0], x, by_paper)
    np.testing.assert_allclose(to_numpy(run(path, layers[1], x, {})), weights, rtol=1e-12, atol=1e-12)  # eval
    torch.manual_seed(0)
    dropped = run(path, layers[1].train(), x, {})
    assert_weights_dropped(to_numpy(dropped), weights, 0.5)
    if path == "watched":
        torch.manual_seed(0)
        assert torch.equal(dropped, layers[1](x)), "watching changed what is dropped"


@pytest.mark.slow
def test_compiled_with_a_cache() -> None:
    case, x = Case({"sink": True, "n_kv_heads": 2}), numbers("x", B, T, 29)
    layer = case.layer()
    torch._dynamo.reset()
    with torch.no_grad():
        out = run("rolling", torch.compile(layer, backend="eager", fullgraph=True), x, {})
    np.testing.assert_allclose(to_numpy(out), reference(case, layer, x, by_paper), rtol=1e-12, atol=1e-12)


X = numbers("x", B, T, 29)


def test_a_refusal_names_both() -> None:
    refuses_table("both", globals())
