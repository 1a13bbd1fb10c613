"""Other people's attention made into layers: the figure on the certificate, and what it does not say."""

import math
import tomllib
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import every, refuses, refuses_table
from small_models import course_classes
from torch import Tensor, nn
from transformers import AutoConfig, MistralConfig, MistralModel, Qwen3Config, Qwen3Model

import headwise as hw
from headwise import families
from headwise.layer.importers import import_attention

B, T, S = 2, 7, 5
CourseAttention: Any = course_classes()["MultiHeadAttn"]


def random_weights(module: nn.Module, seed: int = 3) -> nn.Module:
    """Every parameter drawn anew: biases that are not zero, gains that are not one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            fan = parameter.shape[-1] if parameter.ndim > 1 else 4
            parameter.copy_(1 + drawn / 3 if "norm" in name else drawn / math.sqrt(fan))
    return module


TABLES = tomllib.loads(Path(__file__).with_name("importers.toml").read_text(encoding="utf-8"))
KINDS = {"gemma3": "gemma3_text", "xlm_roberta": "xlm-roberta"}  # where a model type is not called as its module


def of_transformers(attention: str, like: str, cross: bool = False, **fields: Any) -> nn.Module:
    """An attention of transformers, alone."""
    family, name = attention.split(".")
    values = {key: None if value == "none" else value for key, value in {**TABLES["like"][like], **fields}.items()}
    made: Any = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)
    config = AutoConfig.for_model(KINDS.get(family, family), **values)
    if like == "gpt2":
        return made(config, is_cross_attention=cross, layer_idx=2)
    return made(config, False if like == "bert" else 0)


def llama(**fields: Any) -> nn.Module:
    return of_transformers("llama.LlamaAttention", "llama", **fields)


LLAMA, YARN = TABLES["like"]["llama"], TABLES["modules"]["llama, yarn"]["rope_parameters"]
MODULES: dict[str, Callable[[], nn.Module]] = {
    "torch": lambda: nn.MultiheadAttention(35, 5, dropout=0.1),
    "torch, batch first": lambda: nn.MultiheadAttention(35, 5, batch_first=True),
    "torch, no bias": lambda: nn.MultiheadAttention(35, 7, bias=False, batch_first=True),
    "torch, kdim": lambda: nn.MultiheadAttention(35, 5, kdim=11, vdim=11, batch_first=True),
    "torch, kdim and vdim": lambda: nn.MultiheadAttention(35, 5, kdim=11, vdim=13, bias=False),
    "course": lambda: CourseAttention(11, 35, 17, 0.1, 5),
    "course, biases, short": lambda: CourseAttention(11, 35, 5, 0.0, 7, qkv_bias=True),
    **{name: partial(of_transformers, **fields) for name, fields in TABLES["modules"].items()},
}
ROPES = ("llama", "ml", "mi", "qwen", "g", "phi3", "starcoder2")  # whose angles are rounded to float32


@pytest.fixture(params=MODULES)
def name(request: Any) -> str:
    return str(request.param)


def made(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return random_weights(MODULES[name]()).to(dtype)


HALF = 8  # roundings of the last place: the outputs reach 3


@every("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_the_certificate(name: str, dtype: torch.dtype) -> None:
    done = import_attention(made(name, dtype))
    bound = 1e-5 if dtype == torch.float32 or name.startswith(ROPES) or name == "gpt2, upcast" else 1e-12
    if dtype.itemsize == 2:
        bound = HALF * torch.finfo(dtype).eps
    assert 0 <= done.difference < bound
    assert {p.dtype for p in done.layer.parameters()} == {dtype}
    assert "no further mask" in done.compared and str(dtype).removeprefix("torch.") in done.compared
    assert done.path.startswith("from_")


def call_of(layer: hw.MultiHeadAttention, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Arguments for a layer: itself where it has a mask or rotates, else a context, and values of another width."""
    spec, generator = layer.spec, torch.Generator().manual_seed(0)
    call = {"x": torch.randn(B, T, spec.d_in, generator=generator, dtype=dtype)}
    if spec.mask is None and spec.rope is None:
        call["context"] = torch.randn(B, S, spec.d_context, generator=generator, dtype=dtype)
        if spec.d_values != spec.d_context:
            call["values"] = torch.randn(B, S, spec.d_values, generator=generator, dtype=dtype)
    return call


def test_copies_train_and_the_original_stays(name: str) -> None:
    module = made(name).eval().requires_grad_(False)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    random_state = torch.get_rng_state()
    numpy_state = np.random.get_state()[1].copy()

    layer = import_attention(module).layer
    assert torch.equal(torch.get_rng_state(), random_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    assert not layer.training and not any(m.training for m in module.modules())
    assert import_attention(module.train()).layer.training and all(m.training for m in module.modules())
    assert getattr(getattr(module, "config", None), "_attn_implementation", None) == implementation

    layer(**call_of(layer)).square().sum().backward()
    for parameter in layer.parameters():
        assert parameter.is_contiguous() and parameter.grad is not None
        assert parameter.grad.abs().max() > 0
        with torch.no_grad():
            parameter.fill_(math.nan)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize("module", TABLES["specs"])
def test_the_spec_says_what_was_found(module: str) -> None:
    spec = import_attention(made(module)).layer.spec
    found = {name: getattr(spec, name) for name in TABLES["specs"][module]}
    expected = {
        name: eval(value, {"hw": hw, "math": math}) if isinstance(value, str) else value  # our own table
        for name, value in TABLES["specs"][module].items()
    }
    assert found == expected
    if module.startswith("mla, deepseek v3, yarn"):
        assert spec.rope.interleaved and spec.rope.attention_factor == 1.0
        assert spec.scale == pytest.approx((0.1 * math.log(3) + 1) ** 2 / 4, rel=1e-12)


def test_a_certificate_says_what_was_compared() -> None:
    done = import_attention(made("torch"))
    assert done.path == "from_torch, packed in_proj_weight"
    assert done.compared == (
        "nn.MultiheadAttention against the layer: "
        "self attention (no further mask, Causal(offset=None), Lengths(lengths=[13, 7, 1])), "
        "cross attention (no further mask, Lengths(lengths=[11, 6, 1])); 3 texts of 13 tokens, float32 on cpu, eval"
    )
    assert import_attention(made("llama, yarn")).path == "from_transformers, llama, self attention, yarn rope"


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (MistralConfig(**LLAMA, sliding_window=3), MistralModel),
        (Qwen3Config(**LLAMA, use_sliding_window=True, sliding_window=3, max_window_layers=0), Qwen3Model),
        (Qwen3Config(**LLAMA, rope_parameters=YARN), Qwen3Model),
    ],
)
def test_inside_a_whole_model(config: Any, model: Any) -> None:
    """Masks and angles as the model itself makes them, seen from within: the certificate draws its masks itself."""
    whole = random_weights(model(config)).eval()
    seen: list[Any] = []
    attention = whole.layers[0].self_attn
    attention.register_forward_hook(lambda _m, a, kw, out: seen.append((*a, kw, out[0])), with_kwargs=True)
    with torch.no_grad():
        whole(torch.randint(31, (B, 23), generator=torch.Generator().manual_seed(0)))
    [(given, said)] = seen
    layer = import_attention(attention).layer
    torch.testing.assert_close(layer(given["hidden_states"]), said, rtol=1e-4, atol=1e-5)


def test_under_inference_mode_and_autocast_and_another_default_device() -> None:
    module = made("gpt2")
    with torch.inference_mode(), torch.autocast("cpu"), torch.device("meta"):
        done = import_attention(module)
    assert done.difference < 1e-5
    done.layer(torch.ones(1, 2, 35)).sum().backward()


class Doubled(nn.MultiheadAttention):
    def forward(self, *args: Any, **kw: Any) -> Any:
        out, weights = super().forward(*args, **kw)
        return out * 1.01, weights


class Leaky(CourseAttention):
    def __init__(self) -> None:
        super().__init__(11, 35, 17, 0.0, 5)
        self.mask.zero_()


class Broken(nn.MultiheadAttention):
    """NaN in one place of the last of the runs, which a careless maximum would lose."""

    def forward(self, *args: Any, **kw: Any) -> Any:
        out, weights = super().forward(*args, **kw)
        last = kw["attn_mask"] is not None and args[0].shape[0] != args[1].shape[0]
        return torch.where(torch.arange(out.shape[0])[:, None, None] == (5 if last else -1), math.nan, out), weights


@pytest.mark.parametrize("module", [lambda: Doubled(35, 5), Leaky, lambda: Broken(35, 5)], ids=["1 %", "mask", "nan"])
def test_another_forward_is_not_imported(module: Callable[[], nn.Module]) -> None:
    with pytest.raises(hw.HeadwiseError, match="beyond rounding; its forward is not what its weights and name say"):
        import_attention(random_weights(module()))


def test_nan_reaches_the_certificate_where_the_figure_is_all_there_is() -> None:
    assert math.isnan(import_attention(random_weights(Broken(35, 5)).bfloat16()).difference)


def with_extra(module: nn.Module, path: str = "", name: str = "sinks") -> nn.Module:
    module.get_submodule(path).register_parameter(name, nn.Parameter(torch.ones(6)))
    return module


def without_mask() -> nn.Module:
    module = CourseAttention(11, 35, 17, 0.0, 5)
    del module.mask
    return module


def changed(**parts: Callable[[Any], Any]) -> nn.Module:
    """A Llama attention with some of its parts made anew; one named with dots inside another."""
    module: Any = made("llama")
    for path, change in parts.items():
        *above, name = path.split("__")
        place = module.get_submodule(".".join(above)) if above != ["config"] else module.config
        setattr(place, name, change(getattr(place, name)))
    return module


def int8(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.to(torch.int8), requires_grad=False)


def uneven() -> nn.Module:
    module = CourseAttention(11, 35, 17, 0.0, 5)
    module.num_heads = 4
    return module


def llama_rope(**given: Any) -> nn.Module:
    return llama(rope_parameters={"rope_theta": 31.0, **given})


LLAMA3 = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def test_one_bias_of_keys_and_values_leaves_zeros_for_the_other() -> None:
    module = random_weights(CourseAttention(11, 35, 17, 0.0, 5, qkv_bias=True))
    module.W_key.bias = None  # type: ignore[union-attr]
    done = import_attention(module)
    assert done.difference < 1e-5 and not done.layer.k_proj.bias.any()
    assert torch.equal(done.layer.v_proj.bias, module.W_value.bias)  # type: ignore[union-attr]


def test_what_a_layer_cannot_be_is_refused_by_name() -> None:
    refuses_table("imported", globals(), exact=True)


def test_an_unknown_module_hears_what_is_known() -> None:
    with pytest.raises(hw.HeadwiseError) as refusal:
        import_attention(nn.Linear(3, 5))
    known = ", ".join(family.whole for family in families.families("import").values())
    assert str(refusal.value) == (
        f"Linear is not known; import_attention knows nn.MultiheadAttention, transformers' "
        f"{known}, and modules with W_query, W_key, W_value, out_proj, "
        f"num_heads and a mask. Of others copy the weights into a MultiHeadAttention"
    )


def test_what_the_spec_takes_from_the_module() -> None:
    module: Any = made("llama")
    module.is_causal = False
    done = import_attention(module)
    assert done.layer.spec.mask is None and done.difference < 1e-5
    windowed: Any = made("mistral")
    windowed.is_causal = False
    refuses(lambda: import_attention(windowed), "MistralAttention is not causal and has a window of 3")
    assert import_attention(made("llama, yarn, factor")).layer.spec.rope.attention_factor == 0.7
    assert import_attention(made("gpt2, by layer")).layer.spec.scale == pytest.approx(7**-0.5 / 3)
