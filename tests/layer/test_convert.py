"""torch's attention and the courses' made into layers: the same answers, or a refusal by name."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import every, refuses_table
from small_models import course_classes
from torch import nn

import headwise as hw
from headwise.layer.convert import converted

B, T, S = 2, 7, 5
CourseAttention: Any = course_classes()["MultiHeadAttn"]
MODULES: dict[str, Callable[[], nn.Module]] = {
    "torch": lambda: nn.MultiheadAttention(35, 5, dropout=0.1),
    "torch, batch first": lambda: nn.MultiheadAttention(35, 5, batch_first=True),
    "torch, no bias": lambda: nn.MultiheadAttention(35, 7, bias=False, batch_first=True),
    "torch, kdim": lambda: nn.MultiheadAttention(35, 5, kdim=11, vdim=11, batch_first=True),
    "torch, kdim and vdim": lambda: nn.MultiheadAttention(35, 5, kdim=11, vdim=13, bias=False),
    "course": lambda: CourseAttention(11, 35, 17, 0.1, 5),
    "course, biases, short": lambda: CourseAttention(11, 35, 5, 0.0, 7, qkv_bias=True),
}
HALF = 8  # roundings of the last place: the outputs reach 3


def random_weights(module: nn.Module, seed: int = 3) -> nn.Module:
    """Every parameter drawn anew: biases that are not zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn / math.sqrt(parameter.shape[-1] if parameter.ndim > 1 else 4))
    return module


@pytest.fixture(params=MODULES)
def name(request: Any) -> str:
    return str(request.param)


def made(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return random_weights(MODULES[name]()).to(dtype)


@every("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_the_difference_is_rounding(name: str, dtype: torch.dtype) -> None:
    layer, difference = converted(made(name, dtype))
    bounds = {torch.float32: 1e-5, torch.float64: 1e-12}
    assert 0 <= difference < bounds.get(dtype, HALF * torch.finfo(dtype).eps)
    assert {p.dtype for p in layer.parameters()} == {dtype}


def test_one_call_gives_what_the_module_gives() -> None:
    module, x, memory = made("torch, batch first").eval(), torch.randn(B, T, 35), torch.randn(B, S, 35)
    layer = hw.from_torch(module)
    padding = torch.arange(S) >= torch.tensor([[S], [3]])
    expected = module(x, memory, memory, key_padding_mask=padding)[0]
    torch.testing.assert_close(layer(x, memory, mask=hw.Lengths([S, 3])), expected)
    causal = nn.Transformer.generate_square_subsequent_mask(T)
    torch.testing.assert_close(layer(x, mask=hw.Causal()), module(x, x, x, attn_mask=causal)[0])


def test_copies_train_and_the_original_stays(name: str) -> None:
    module = made(name).eval().requires_grad_(False)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    random_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    layer = hw.from_torch(module)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    assert not layer.training and not any(m.training for m in module.modules())
    assert hw.from_torch(module.train()).training and all(m.training for m in module.modules())
    spec = layer.spec
    call = {"x": torch.randn(B, T, spec.d_in)}
    if spec.mask is None:
        call |= {"context": torch.randn(B, S, spec.d_context), "values": torch.randn(B, S, spec.d_values)}
    layer(**call).square().sum().backward()
    for parameter in layer.parameters():
        assert parameter.is_contiguous() and parameter.grad is not None
        assert parameter.grad.abs().max() > 0
        with torch.no_grad():
            parameter.fill_(math.nan)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_the_spec_says_what_was_found() -> None:
    spec = hw.from_torch(made("torch")).spec
    assert (spec.q_bias, spec.kv_bias, spec.out_bias, spec.mask, spec.dropout) == (True, True, True, None, 0.1)
    spec = hw.from_torch(made("torch, kdim and vdim")).spec
    assert (spec.d_in, spec.d_context, spec.d_values, spec.q_bias) == (35, 11, 13, False)
    spec = hw.from_torch(made("course")).spec
    assert (spec.d_in, spec.n_heads, spec.mask, spec.out_bias, spec.dropout) == (11, 5, hw.Causal(), True, 0.1)


def test_under_inference_mode_and_autocast_and_another_default_device() -> None:
    module = made("torch")
    with torch.inference_mode(), torch.autocast("cpu"), torch.device("meta"):
        layer, difference = converted(module)
    assert difference < 1e-5
    layer(torch.ones(1, 2, 35)).sum().backward()


class Doubled(nn.MultiheadAttention):
    def forward(self, *args: Any, **kw: Any) -> Any:
        out, weights = super().forward(*args, **kw)
        return out * 1.01, weights


class Leaky(CourseAttention):
    def __init__(self) -> None:
        super().__init__(11, 35, 17, 0.0, 5)
        self.mask.zero_()


class Broken(nn.MultiheadAttention):
    """NaN in one place of one of the runs, which a careless maximum would lose."""

    def forward(self, *args: Any, **kw: Any) -> Any:
        out, weights = super().forward(*args, **kw)
        return torch.where(
            torch.arange(out.shape[1])[:, None] == (5 if "attn_mask" in kw else -1), math.nan, out
        ), weights


@pytest.mark.parametrize("module", [lambda: Doubled(35, 5), Leaky, lambda: Broken(35, 5)], ids=["1 %", "mask", "nan"])
def test_another_forward_is_not_converted(module: Callable[[], nn.Module]) -> None:
    with pytest.raises(hw.HeadwiseError, match="beyond rounding; its forward is not what its weights and name say"):
        hw.from_torch(random_weights(module()))


def changed(**parts: Callable[[Any], Any]) -> nn.Module:
    """A course's attention with some of its parts made anew, or taken away."""
    module = CourseAttention(11, 35, 17, 0.0, 5)
    for name, change in parts.items():
        setattr(module, name, change(getattr(module, name)))
    return module


def with_extra(module: nn.Module) -> nn.Module:
    module.register_parameter("sinks", nn.Parameter(torch.ones(6)))
    return module


def int8(linear: nn.Linear) -> nn.Linear:
    linear.weight = nn.Parameter(linear.weight.to(torch.int8), requires_grad=False)
    return linear


def test_what_a_layer_cannot_be_is_refused_by_name() -> None:
    refuses_table("converted", globals(), exact=True)
