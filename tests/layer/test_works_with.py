"""The layer beside the rest of torch: compile, export, autocast, meta tensors, adapters, and other company it keeps."""

import copy
import functools
import io
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_models import LAYER, LAYERS, floats, noisy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headwise as hw

B, T = 2, 7
Call = dict[str, Any]

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def cast(call: Call, dtype: torch.dtype) -> Call:
    """The same call with its tensors in another precision; masks are as they were."""
    return {name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in call.items()}


def on_meta(call: Call) -> Call:
    """The same call without the numbers; a mask keeps its own unless it has them in a tensor of lengths."""
    moved: Call = {}
    for name, value in call.items():
        if isinstance(value, Tensor):
            moved[name] = value.to("meta")
        elif isinstance(value, hw.Lengths):
            moved[name] = hw.Lengths(value.lengths.to("meta"))
        else:
            moved[name] = value
    return moved


def build(*cases: str, **changes: Any) -> hw.MultiHeadAttention:
    """A layer with the options of all cases, whose masks all count."""
    options = {name: value for case in cases for name, value in LAYERS[case][0].items()}
    if masks := [LAYERS[case][0]["mask"] for case in cases if "mask" in LAYERS[case][0]]:
        options["mask"] = functools.reduce(operator.and_, masks)
    return noisy(**{**LAYER, **options, **changes}).float().eval()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled by another test, so that recompilations are counted from 0."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def answers(layer: Callable[..., Tensor], module: nn.Module, x: Tensor, call: Call) -> list[Tensor]:
    """The output and the gradients of all parameters."""
    module.zero_grad()
    out = layer(x, **call)
    (out * floats(*out.shape, seed=9).to(out)).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def assert_same(actual: list[Tensor], expected: list[Tensor], **tolerance: float) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


# Compiling takes long: each option is compiled once, several at a time, those with steps of their own before the kernel
# with gradients.
@pytest.mark.parametrize("cases", [("value_dim", "qk_norm"), ("softcap",), ("values",)], ids=str)
def test_compiles_into_one_graph(cases: tuple[str, ...], fresh_compiler: None) -> None:
    """fullgraph=True makes a graph break an error. Values and gradients are those of the layer itself."""
    layer, call = build(*cases).double(), cast(LAYERS[cases[0]][1](T), torch.float64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = floats(B, T, 29).double()
    assert_same(answers(compiled, layer, x, call), answers(layer, layer, x, call), **EXACT)


@pytest.mark.parametrize(
    "cases", [["kv_index", "positions", "gate"], ["window", "alibi"], ["sink"], ["allowed", "segments"], []], ids=str
)
def test_compiles_once_for_all_lengths(cases: list[str], fresh_compiler: None) -> None:
    """Told nothing, the second length makes a graph for any length, which the third uses."""
    from torch._dynamo.testing import CompileCounter  # takes half a second

    layer, counter = build(*cases or ["rope"]), CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True if cases else None)
    for length in (7, 11, 13):
        calls = [LAYERS[case][1](length) for case in cases]
        call = {name: value for each in calls for name, value in each.items()}
        if both := [each["mask"] for each in calls if "mask" in each]:
            call["mask"] = functools.reduce(operator.and_, both)
        x = floats(B, length, 29)
        torch.testing.assert_close(compiled(x, **call), layer(x, **call))
    assert counter.frame_count <= (1 if cases else 2)


def test_compiles_for_any_length_in_training(fresh_compiler: None) -> None:
    """The rate of dropout is a symbol there."""
    layer = noisy(**LAYER, dropout=0.3).float().train()
    compiled, outs = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True), []
    for way in (compiled, layer):
        torch.manual_seed(5)
        outs.append(way(floats(B, 7, 29)))
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("cases", [("gqa", "qk_norm"), ("window", "alibi"), ("softcap",)], ids=str)
def test_exports_for_any_batch_and_length(cases: tuple[str, ...]) -> None:
    """Four tokens at least: fewer are all within the window, and need no mask."""
    layer = build(*cases)
    sizes = {"x": {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", min=4)}}
    program = torch.export.export(layer, (floats(B, T, 29),), dynamic_shapes=sizes)
    x = floats(5, 13, 29)
    torch.testing.assert_close(program.module()(x), layer(x))


@pytest.fixture
def warn_always() -> Iterator[None]:
    """torch gives some warnings once in a process; here each time, so that every test sees its own."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", LAYERS)
def test_autocast(case: str, device: str, dtype: torch.dtype, warn_always: None) -> None:
    """No further from float64 than twice a layer that is in low precision altogether; gradients stay in float32."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device, so the layer is not tried on one")
    layer, x, call = build(case), floats(B, T, 29), LAYERS[case][1](T)
    exact = copy.deepcopy(layer).double()(x.double(), **cast(call, torch.float64))
    low = copy.deepcopy(layer).to(dtype)(x.to(dtype), **cast(call, dtype))
    there = {name: value.to(device) if name == "context" else value for name, value in call.items()}
    with torch.autocast(device, dtype=dtype):
        out = layer.to(device)(x.to(device), **there)
    assert out.dtype == dtype
    assert (out.cpu() - exact).abs().max() <= 2 * (low - exact).abs().max()
    out.float().square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("case", LAYERS)
def test_weights_of_a_file_arrive_after_the_meta_device(case: str) -> None:
    """As large checkpoints are loaded: the state holds parameters alone, and nothing computed there is used later."""
    layer, x, call = build(case), floats(B, T, 29), LAYERS[case][1](T)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert set(state) == {name for name, _ in layer.named_parameters()}
    with torch.device("meta"):
        other = hw.MultiHeadAttention(**{**LAYER, **LAYERS[case][0]}).eval()
        out = other(torch.empty(B, T, 29), **on_meta(call))
    assert out.is_meta and out.shape == (B, T, 29) and all(parameter.is_meta for parameter in other.parameters())
    other.to_empty(device="cpu").load_state_dict(state)
    torch.testing.assert_close(other(x, **call), layer(x, **call), rtol=0, atol=0)


@pytest.mark.parametrize("case", LAYERS)
def test_gradient_checkpointing(case: str) -> None:
    """Computed twice, with the same dropout both times, and on a layer that has not been called before."""
    layer, call = build(case, dropout=0.3).double().train(), cast(LAYERS[case][1](T), torch.float64)
    x = floats(B, T, 29).double()

    def thrifty(x: Tensor, **call: Any) -> Tensor:
        out: Tensor = checkpoint(layer, x, use_reentrant=False, **call)
        return out

    torch.manual_seed(11)
    frugal = answers(thrifty, layer, x, call)
    torch.manual_seed(11)
    assert_same(frugal, answers(layer, layer, x, call), **EXACT)


@pytest.mark.parametrize("case", LAYERS)
def test_inference_mode_then_training(case: str) -> None:
    """What the first call leaves behind in inference mode may take part in a gradient later."""
    layer, x, call = build(case), floats(B, T, 29), LAYERS[case][1](T)
    with torch.inference_mode():
        out = layer(x, **call)
    assert out.is_inference()
    trained, *grads = answers(layer, layer, x, call)
    torch.testing.assert_close(out.clone(), trained)
    assert len(grads) == len(list(layer.parameters()))


class LowRank(nn.Module):
    """A frozen projection plus a product of two narrow matrices (Hu et al. 2021, LoRA, section 4.1)."""

    def __init__(self, base: nn.Linear, rank: int, seed: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(floats(rank, base.in_features, seed=seed).double())
        self.up = nn.Parameter(floats(base.out_features, rank, seed=seed + 1).double())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return out


@pytest.mark.parametrize("case", LAYERS)
def test_low_rank_adapters(case: str) -> None:
    """Projections can be replaced by other modules; the result is that of the merged weights."""
    layer, x, call = build(case).double(), floats(B, T, 29).double(), cast(LAYERS[case][1](T), torch.float64)
    merged = copy.deepcopy(layer)
    names = [name for name, part in layer.named_children() if isinstance(part, nn.Linear)]
    assert len(names) >= 4
    for seed, name in enumerate(names):
        adapter = LowRank(getattr(layer, name), rank=3, seed=20 + 2 * seed)
        setattr(layer, name, adapter)
        with torch.no_grad():
            getattr(merged, name).weight += adapter.up @ adapter.down
    out = layer(x, **call)
    torch.testing.assert_close(out, merged(x, **call), **EXACT)
    out.square().sum().backward()
    for name in names:
        adapter = getattr(layer, name)
        assert adapter.base.weight.grad is None
        assert adapter.down.grad.abs().sum() > 0 and adapter.up.grad.abs().sum() > 0, name


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, so the layer is not tried on one")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", LAYERS)
def test_cuda_gives_what_the_cpu_gives(case: str, cuda: torch.device) -> None:
    """Values and gradients in float64. Masks and gates may stay on the CPU."""
    layer, x, call = build(case).double(), floats(B, T, 29).double(), cast(LAYERS[case][1](T), torch.float64)
    expected = answers(layer, layer, x, call)
    there = {name: value.to(cuda) if name == "context" else value for name, value in call.items()}
    layer.to(cuda)
    assert_same([one.cpu() for one in answers(layer, layer, x.to(cuda), there)], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_cuda_compiles(cuda: torch.device, fresh_compiler: None) -> None:
    layer, x = build("qk_norm").to(cuda), floats(B, T, 29).to(cuda)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x), rtol=1e-4, atol=1e-4)
