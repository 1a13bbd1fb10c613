"""torch's attention and the courses' made into layers: the same answers, or a refusal by name."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import every, refuses, refuses_table
from small_models import course_classes
from torch import Tensor, nn

import headwise as hw
from headwise.layer.convert import TorchAttention, converted

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
        place = torch.arange(out.shape[1])[:, None]
        return torch.where(place == (5 if "attn_mask" in kw else -1), math.nan, out), weights


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
    refuses_table("converted", globals())


# nn.MultiheadAttention inside a model, replaced: every call it took gives what it gave

WIDTH, HEADS = 15, 3
RNG = torch.Generator().manual_seed(0)

FLOATS = torch.randn(T, S, generator=RNG)
EACH_HEAD = torch.rand(B * HEADS, T, S, generator=RNG) > 0.7
PADDING = torch.arange(S) >= torch.tensor([[S], [4]])
CALLS: dict[str, dict[str, Any]] = {
    "bare": {},
    "no weights": {"need_weights": False},
    "weights of each head": {"average_attn_weights": False},
    "numbers": {"attn_mask": FLOATS},
    "a mask for each head": {"attn_mask": EACH_HEAD & ~EACH_HEAD.all(-1, keepdim=True)},
    "padding": {"key_padding_mask": PADDING},
    "padding in numbers": {"key_padding_mask": torch.zeros(B, S).masked_fill(PADDING, -math.inf)},
    "padding and numbers": {"attn_mask": FLOATS, "key_padding_mask": torch.zeros(B, S).masked_fill(PADDING, -math.inf)},
    "causal": {"attn_mask": torch.ones(T, S, dtype=torch.bool).triu(1), "is_causal": True},
    "causal, no weights": {
        "attn_mask": torch.full((T, S), -math.inf).triu(1),
        "is_causal": True,
        "need_weights": False,
    },
}


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def close(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@every("name", list(CALLS))
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_call_gives_what_torch_gives(batch_first: bool, name: str) -> None:
    theirs = nn.MultiheadAttention(WIDTH, HEADS, kdim=11, vdim=13, batch_first=batch_first).eval()
    ours = hw.replace(theirs).model
    sources = drawn(B, T, WIDTH), drawn(B, S, 11), drawn(B, S, 13)
    if not batch_first:
        sources = tuple(source.transpose(0, 1) for source in sources)  # type: ignore[assignment]
    for mine, right in zip(ours(*sources, **CALLS[name]), theirs(*sources, **CALLS[name]), strict=True):
        assert close(mine, right)


def test_a_text_alone_and_a_module_at_two_places() -> None:
    theirs = nn.MultiheadAttention(WIDTH, HEADS).eval()
    ours, x = hw.replace(theirs).model, drawn(T, WIDTH)
    arguments: dict[str, Any] = {"key_padding_mask": torch.arange(T) > 2, "average_attn_weights": False}
    for mine, right in zip(ours(x, x, x, **arguments), theirs(x, x, x, **arguments), strict=True):
        assert close(mine, right)
    blind = torch.eye(T, dtype=torch.bool)[0].expand(T, T).T  # row 0 may look nowhere
    assert ours(x, x, x, attn_mask=blind)[1][0].eq(0).all() and theirs(x, x, x, attn_mask=blind)[1][0].isnan().all()
    shared = nn.MultiheadAttention(WIDTH, HEADS)
    done = hw.replace(nn.ModuleList([shared, shared]))
    places = dict(done.model.named_modules(remove_duplicate=False))
    assert places["0"] is places["1"] and isinstance(places["0"], TorchAttention) and len(done.layers) == 1


def test_a_transformer_is_replaced_and_watched() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 17, batch_first=True), 2).eval()
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 17, batch_first=True), 1).eval()
    x, causal = drawn(3, T, 16), nn.Transformer.generate_square_subsequent_mask(T)
    encoder.layers[1].self_attn.in_proj_weight.requires_grad_(False)
    done = hw.replace(encoder)
    assert close(done.model(x, causal), encoder(x, causal))
    assert list(done.layers) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert all(difference < 1e-5 for difference in done.differences.values())
    assert "2 nn.MultiheadAttention replaced, each within" in str(done)
    assert isinstance(encoder.layers[0].self_attn, nn.MultiheadAttention)  # the model that was passed is as it was
    second: Any = done.model.get_submodule("layers.1.self_attn.layer")
    assert not second.k_proj.weight.requires_grad and second.k_proj.bias.requires_grad
    padding = torch.arange(T) >= torch.tensor([[T], [3], [1]])
    with torch.no_grad(), hw.watch(done.model) as seen:
        ours = done.model(x, src_key_padding_mask=padding)
    assert close(ours[~padding], encoder(x, src_key_padding_mask=padding)[~padding])
    assert seen["L1.H1"].entropy > 0
    both = hw.replace(decoder).model
    assert close(both(x, ours, causal), decoder(x, ours, causal))
    dropping = hw.replace(encoder.train()).model  # dropout of the layer, and of what stands around it
    assert isinstance(inner := dropping.get_submodule("layers.0.self_attn"), TorchAttention) and inner.training


def test_a_replaced_module_and_encoder_compile_into_one_graph() -> None:
    """The encoder asks for no weights."""
    torch.compiler.reset()
    stock, x = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval(), drawn(B, T, WIDTH)
    compiled = torch.compile(hw.replace(stock).model, fullgraph=True, backend="eager")
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    padding = torch.arange(T) >= torch.tensor([[T], [4]])
    for call in ({}, {"attn_mask": causal, "is_causal": True}, {"key_padding_mask": padding}):
        arguments: dict[str, Any] = call
        for mine, right in zip(compiled(x, x, x, **arguments), stock(x, x, x, **arguments), strict=True):
            assert close(mine, right)
    torch.compiler.reset()
    stock = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 17, batch_first=True), 2).eval()
    compiled, x = torch.compile(hw.replace(stock).model, fullgraph=True, backend="eager"), drawn(3, T, 16)
    assert close(compiled(x), stock(x))


def test_what_cannot_be_replaced_is_named_and_nothing_is() -> None:
    hooked, sloped = (nn.MultiheadAttention(WIDTH, HEADS) for _ in range(2))
    hooked.register_forward_hook(lambda *_: None)
    sloped.register_full_backward_pre_hook(lambda *_: None)
    kind = type("Own", (nn.MultiheadAttention,), {})
    model = nn.ModuleDict(
        {
            "right": nn.MultiheadAttention(WIDTH, HEADS),
            "zero": nn.MultiheadAttention(WIDTH, HEADS, add_zero_attn=True),
            "own": kind(WIDTH, HEADS),
            "hooked": hooked,
            "sloped": sloped,
        }
    )
    with pytest.raises(hw.HeadwiseError) as refusal:
        hw.replace(model)
    for part in (
        "4 of 5",
        "zero: add_bias_kv and add_zero_attn",
        "own: it is a Own",
        "hooked: it has hooks",
        "sloped: it has",
    ):
        assert part in str(refusal.value)
    refuses(lambda: hw.replace(nn.Linear(2, 3)), "Linear has no nn")
