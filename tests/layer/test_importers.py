"""Other people's attention made into layers: the figure on the certificate, and what it does not say."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    CamembertConfig,
    ElectraConfig,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    MistralModel,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3Model,
    Qwen3MoeConfig,
    RobertaConfig,
    Starcoder2Config,
    XLMRobertaConfig,
)
from transformers.models.axk1.modeling_axk1 import AXK1Attention
from transformers.models.bert import modeling_bert
from transformers.models.camembert.modeling_camembert import CamembertSelfAttention
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.electra import modeling_electra
from transformers.models.gemma.modeling_gemma import GemmaAttention
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.granite.modeling_granite import GraniteAttention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.minicpm3.modeling_minicpm3 import MiniCPM3Attention
from transformers.models.ministral.modeling_ministral import MinistralAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.mixtral.modeling_mixtral import MixtralAttention
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention
from transformers.models.phi3.modeling_phi3 import Phi3Attention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention
from transformers.models.roberta.modeling_roberta import RobertaSelfAttention
from transformers.models.starcoder2.modeling_starcoder2 import Starcoder2Attention
from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaSelfAttention
from transformers.models.youtu.modeling_youtu import YoutuAttention

import headwise as hw
from headwise.layer.importing import family, importers, packed
from headwise.layer.importing.importers import Imported, import_attention

B, T, S = 2, 7, 5


class CourseAttention(nn.Module):
    """A class as courses build it: the scores of every head at once, a buffer that hides the future."""

    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.W_query, self.W_key, self.W_value = (nn.Linear(d_in, d_out, bias=qkv_bias) for _ in range(3))
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.ones(context_length, context_length).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            w(x).view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
            for w in (self.W_query, self.W_key, self.W_value)
        )
        hidden = self.mask.bool()[: x.shape[1], : x.shape[1]]
        scores = (q @ k.transpose(2, 3)).masked_fill(hidden, -math.inf) / math.sqrt(k.shape[-1])
        weights = self.dropout(torch.softmax(scores, -1))
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


def random_weights(module: nn.Module, seed: int = 3) -> nn.Module:
    """Every parameter drawn anew: biases that are not zero, gains that are not one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            fan = parameter.shape[-1] if parameter.ndim > 1 else 4
            parameter.copy_(1 + drawn / 3 if "norm" in name else drawn / math.sqrt(fan))
    return module


def gpt2(**fields: Any) -> nn.Module:
    cross = fields.pop("cross", False)
    config = GPT2Config(n_embd=35, n_head=5, n_layer=1, attn_pdrop=0.2, **fields)
    return GPT2Attention(config, is_cross_attention=cross, layer_idx=2)


LLAMA: dict[str, Any] = {
    "hidden_size": 30,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "intermediate_size": 7,
    "num_hidden_layers": 1,
    "vocab_size": 31,
}
HALF = {"rope_type": "default", "partial_rotary_factor": 4 / 7}
YARN = {"rope_type": "yarn", "rope_theta": 53.0, "factor": 3.0, "original_max_position_embeddings": 64}


def llama(config: Any, attention: Any, **fields: Any) -> nn.Module:
    made: nn.Module = attention(config(**{**LLAMA, **fields}), 0)
    return made


MLA: dict[str, Any] = {
    "hidden_size": 34, "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 12, "q_lora_rank": 11,
    "qk_rope_head_dim": 6, "qk_nope_head_dim": 10, "v_head_dim": 7,
}  # fmt: skip
DEEP = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}  # as DeepSeek-V3 has it


def mla(attention: Any, **fields: Any) -> nn.Module:
    config: Any = get_type_hints(attention.__init__)["config"]
    made: nn.Module = attention(config(**{**MLA, **fields}), 0)
    return made


def bert(config: Any, attention: Any, is_causal: bool = False, **fields: Any) -> nn.Module:
    made: nn.Module = attention(config(hidden_size=33, num_attention_heads=3, **fields), is_causal)
    return made


MODULES: dict[str, Callable[[], nn.Module]] = {
    "torch": lambda: nn.MultiheadAttention(35, 5, dropout=0.1),
    "torch, batch first": lambda: nn.MultiheadAttention(35, 5, batch_first=True),
    "torch, no bias": lambda: nn.MultiheadAttention(35, 7, bias=False, batch_first=True),
    "torch, kdim": lambda: nn.MultiheadAttention(35, 5, kdim=11, vdim=11, batch_first=True),
    "torch, kdim and vdim": lambda: nn.MultiheadAttention(35, 5, kdim=11, vdim=13, bias=False),
    "gpt2": gpt2,
    "gpt2, unscaled": lambda: gpt2(scale_attn_weights=False),
    "gpt2, by layer": lambda: gpt2(scale_attn_by_inverse_layer_idx=True),
    "gpt2, upcast": lambda: gpt2(reorder_and_upcast_attn=True),
    "gpt2, cross": lambda: gpt2(cross=True),
    "llama": lambda: llama(LlamaConfig, LlamaAttention),
    "llama, biases": lambda: llama(LlamaConfig, LlamaAttention, attention_bias=True, attention_dropout=0.1),
    "llama, theta": lambda: llama(
        LlamaConfig, LlamaAttention, rope_parameters={"rope_type": "default", "rope_theta": 31.0}
    ),
    "llama, linear": lambda: llama(
        LlamaConfig, LlamaAttention, rope_parameters={"rope_type": "linear", "rope_theta": 31.0, "factor": 2.5}
    ),
    "llama, yarn": lambda: llama(LlamaConfig, LlamaAttention, rope_parameters=YARN),
    "llama, yarn, betas": lambda: llama(
        LlamaConfig, LlamaAttention, rope_parameters={**YARN, "beta_fast": 8.0, "beta_slow": 2.0}
    ),
    "mistral": lambda: llama(MistralConfig, MistralAttention, sliding_window=3),
    "mistral, no window": lambda: llama(MistralConfig, MistralAttention, sliding_window=None),
    "mixtral": lambda: llama(MixtralConfig, MixtralAttention, sliding_window=5),
    "gemma": lambda: llama(GemmaConfig, GemmaAttention),
    "gemma2": lambda: llama(
        Gemma2Config, Gemma2Attention, query_pre_attn_scalar=31, sliding_window=3, layer_types=["sliding_attention"]
    ),
    "granite": lambda: llama(GraniteConfig, GraniteAttention, attention_multiplier=0.37),
    "phi3": lambda: llama(
        Phi3Config, Phi3Attention, pad_token_id=0, sliding_window=3, rope_parameters={**HALF, "rope_theta": 31.0}
    ),
    "starcoder2": lambda: llama(Starcoder2Config, Starcoder2Attention, sliding_window=None),
    "qwen2-moe": lambda: llama(Qwen2MoeConfig, Qwen2MoeAttention),
    "qwen3-moe": lambda: llama(Qwen3MoeConfig, Qwen3MoeAttention, rms_norm_eps=1e-2),
    "ministral": lambda: llama(
        MinistralConfig, MinistralAttention, sliding_window=5, layer_types=["sliding_attention"]
    ),
    "qwen2": lambda: llama(Qwen2Config, Qwen2Attention),
    "qwen3": lambda: llama(Qwen3Config, Qwen3Attention, attention_bias=True),
    "qwen3, window": lambda: llama(
        Qwen3Config, Qwen3Attention, use_sliding_window=True, sliding_window=3, max_window_layers=0
    ),
    "mla, deepseek v3": lambda: mla(DeepseekV3Attention),
    "mla, deepseek v3, queries whole": lambda: mla(DeepseekV3Attention, q_lora_rank=None, attention_dropout=0.1),
    "mla, deepseek v3, pairs apart": lambda: mla(DeepseekV3Attention, rope_interleave=False, attention_bias=True),
    "mla, deepseek v3, yarn": lambda: mla(DeepseekV3Attention, rope_parameters=DEEP),
    "mla, deepseek v2": lambda: mla(DeepseekV2Attention),
    "mla, deepseek v2, yarn": lambda: mla(DeepseekV2Attention, q_lora_rank=None, rope_parameters=DEEP),
    "mla, glm4": lambda: mla(Glm4MoeLiteAttention),
    "mla, youtu": lambda: mla(YoutuAttention),
    "mla, axk1": lambda: mla(AXK1Attention),
    "mla, minicpm3": lambda: mla(MiniCPM3Attention),
    "llama, yarn, factor": lambda: llama(
        LlamaConfig, LlamaAttention, rope_parameters={**YARN, "attention_factor": 0.7}
    ),
    "bert": lambda: bert(BertConfig, modeling_bert.BertSelfAttention),
    "bert, decoder": lambda: bert(BertConfig, modeling_bert.BertSelfAttention, is_decoder=True),
    "bert, cross": lambda: bert(BertConfig, modeling_bert.BertCrossAttention),
    "bert, whole": lambda: bert(BertConfig, modeling_bert.BertAttention),
    "roberta": lambda: bert(RobertaConfig, RobertaSelfAttention),
    "xlm-roberta": lambda: bert(XLMRobertaConfig, XLMRobertaSelfAttention),
    "camembert": lambda: bert(CamembertConfig, CamembertSelfAttention),
    "electra, whole": lambda: bert(ElectraConfig, modeling_electra.ElectraAttention),
    "course": lambda: CourseAttention(11, 35, 17, 0.1, 5),
    "course, biases, short": lambda: CourseAttention(11, 35, 5, 0.0, 7, qkv_bias=True),
}
ROPES = (
    "llama",
    "ml",
    "mi",
    "qwen",
    "g",
    "phi3",
    "starcoder2",
)  # their angles are rounded to float32, whatever the dtype


@pytest.fixture(params=MODULES)
def name(request: Any) -> str:
    return str(request.param)


def made(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return random_weights(MODULES[name]()).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_certificate(name: str, dtype: torch.dtype) -> None:
    done = import_attention(made(name, dtype))
    bound = 1e-5 if dtype == torch.float32 or name.startswith(ROPES) or name == "gpt2, upcast" else 1e-12
    assert 0 <= done.difference < bound
    assert {p.dtype for p in done.layer.parameters()} == {dtype}
    assert "no further mask" in done.compared and str(dtype).removeprefix("torch.") in done.compared
    assert done.path.startswith("from_")


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

    draw = torch.Generator().manual_seed(0)
    x = torch.randn(B, T, layer.spec.d_in, generator=draw)
    context = torch.randn(B, S, layer.spec.d_context, generator=draw)
    cross = layer.spec.mask is None and layer.spec.rope is None
    call = {"context": context} if cross else {}
    if layer.spec.d_values != layer.spec.d_context:
        call["values"] = torch.randn(B, S, layer.spec.d_values, generator=draw)
    layer(x, **call).square().sum().backward()
    for parameter in layer.parameters():
        assert parameter.is_contiguous() and parameter.grad is not None
        assert parameter.grad.abs().max() > 0
        with torch.no_grad():
            parameter.fill_(math.nan)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_with_a_cache_it_is_the_same_function(name: str) -> None:
    layer = import_attention(made(name, torch.float64).eval()).layer
    x = torch.randn(B, T, layer.spec.d_in, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    cache = hw.KVCache()
    if layer.spec.mask is None:
        context = torch.randn(B, S, layer.spec.d_context, generator=torch.Generator().manual_seed(2)).double()
        call = {"context": context}
        if layer.spec.d_values != layer.spec.d_context:
            call["values"] = torch.randn(B, S, layer.spec.d_values, generator=torch.Generator().manual_seed(3)).double()
        whole, steps = layer(x, **call), [layer(x[:, i : i + 1], **call, cache=cache) for i in range(T)]
    else:
        whole, steps = layer(x), [layer(x[:, i : i + 1], cache=cache) for i in range(T)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-10, atol=1e-10)


def test_the_spec_says_what_was_found() -> None:
    def spec(name: str) -> hw.AttentionSpec:
        return import_attention(made(name)).layer.spec

    assert (spec("torch").q_bias, spec("torch").kv_bias, spec("torch").out_bias) == (True, True, True)
    assert (spec("torch, no bias").q_bias, spec("torch, no bias").out_bias) == (False, False)
    assert (spec("torch").mask, spec("torch").dropout, spec("torch, kdim").d_context) == (None, 0.1, 11)
    assert (spec("gpt2").mask, spec("gpt2").dropout, spec("gpt2, cross").mask) == (hw.Causal(), 0.2, None)
    grouped = spec("llama, biases")
    assert (grouped.n_heads, grouped.n_kv_heads, grouped.head_dim, grouped.dropout) == (6, 2, 14, 0.1)
    assert grouped.rope == hw.RoPE() and grouped.out_bias
    assert spec("llama, yarn, betas").rope == hw.RoPE(
        theta=53.0, scaling="yarn", factor=3.0, original_context=64, beta_fast=8.0, beta_slow=2.0
    )
    assert spec("llama, yarn, factor").rope.attention_factor == 0.7
    deep = spec("mla, deepseek v3, yarn")
    assert (deep.latent_dim, deep.rope_dim, deep.q_latent_dim, deep.head_dim, deep.value_dim) == (12, 6, 11, 16, 7)
    assert deep.rope.interleaved and deep.rope.attention_factor == 1.0
    assert deep.scale == pytest.approx((0.1 * math.log(3) + 1) ** 2 / 4, rel=1e-12)
    assert spec("mla, deepseek v3, pairs apart").q_bias and spec("mla, deepseek v3, pairs apart").kv_bias
    assert spec("llama, linear").rope == hw.RoPE(theta=31.0, scaling="linear", factor=2.5)
    assert spec("mistral").mask == hw.Window(2, 0) and spec("mistral, no window").mask == hw.Causal()
    assert spec("qwen3, window").mask == hw.Window(2, 0) and spec("qwen2").mask == hw.Causal()
    assert spec("qwen3").qk_norm and not spec("qwen2").qk_norm
    assert (spec("qwen2").q_bias, spec("qwen2").kv_bias, spec("qwen2").out_bias) == (True, True, False)
    assert spec("bert").out_proj is False and spec("bert, whole").out_bias is True
    assert spec("bert").mask is None and spec("bert, decoder").mask == hw.Causal()
    assert (spec("course").mask, spec("course").d_in, spec("course").d_out) == (hw.Causal(), 11, 35)


def test_a_certificate_is_one_line() -> None:
    line = repr(import_attention(made("gpt2")))
    assert line.startswith("Imported(from_transformers, gpt2, self attention: AttentionSpec(d_model=35, n_heads=5, ")
    assert line.endswith(" of GPT2Attention)") and "within " in line and "\n" not in line


def test_path_and_comparison_are_written_out() -> None:
    done = import_attention(made("torch"))
    assert done.path == "from_torch, packed in_proj_weight"
    assert done.compared == (
        "nn.MultiheadAttention against the layer: "
        "self attention (no further mask, Causal(offset=None), Lengths(lengths=[13, 7, 1])), "
        "cross attention (no further mask, Lengths(lengths=[11, 6, 1])); 3 texts of 13 tokens, float32 on cpu, eval"
    )
    assert import_attention(made("torch, kdim")).path == "from_torch, separate q, k, v_proj_weight"
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays(name: str, dtype: torch.dtype) -> None:
    done = import_attention(made(name, dtype))
    assert {p.dtype for p in done.layer.parameters()} == {dtype}
    assert done.difference < 8 * torch.finfo(dtype).eps  # the outputs reach 3: a few roundings of their last place


def test_under_inference_mode_and_autocast_and_another_default_device() -> None:
    module = made("gpt2")
    with torch.inference_mode(), torch.autocast("cpu"), torch.device("meta"):
        done = import_attention(module)
    assert done.difference < 1e-5
    done.layer(torch.ones(1, 2, 35)).sum().backward()


# Bare weights


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)
    return (drawn / math.sqrt(shape[-1])).to(dtype)


def heads_rows(layer: hw.MultiHeadAttention) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Each query, key and value head's rows with its bias as a last column."""
    n = layer.spec
    full = [torch.cat([p.weight, p.bias[:, None]], 1) for p in (layer.q_proj, layer.k_proj, layer.v_proj)]
    q, k, v = (list(p.split(w)) for p, w in zip(full, (n.head_dim, n.head_dim, n.value_dim), strict=True))
    return q, k, v


PACKED = {
    ("qkv", 6, 6): lambda q, k, v: [*q, *k, *v],
    ("qkv", 6, 2): lambda q, k, v: [*q, *k, *v],
    ("qkv", 6, 1): lambda q, k, v: [*q, *k, *v],
    ("per_head", 5, 5): lambda q, k, v: [part for trio in zip(q, k, v, strict=True) for part in trio],
    ("per_group", 6, 2): lambda q, k, v: [*q[:3], k[0], v[0], *q[3:], k[1], v[1]],
    ("per_group", 6, 3): lambda q, k, v: [*q[:2], k[0], v[0], *q[2:4], k[1], v[1], *q[4:], k[2], v[2]],
}
WHERE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "alibi": {"mask": hw.Causal() & hw.Alibi()},
    "rope in part": {"mask": hw.Causal(), "rope": hw.RoPE(dim=6)},
    "rope interleaved": {"mask": hw.Window(3, 0), "rope": hw.RoPE(theta=31.0, interleaved=True)},
    "yarn": {"rope": hw.RoPE(scaling="yarn", factor=2.0, original_context=32), "dropout": 0.1, "scale": 0.4},
}


@pytest.mark.parametrize("options", WHERE.values(), ids=WHERE)
@pytest.mark.parametrize("form", PACKED, ids=str)
def test_packed(form: tuple[str, int, int], options: dict[str, Any]) -> None:
    """A layer's own heads, packed by hand, come back as that layer."""
    layout, n_heads, kv_heads = form
    source = hw.MultiHeadAttention(
        29, n_heads, kv_heads, head_dim=10, d_out=17, q_bias=True, kv_bias=True, out_bias=True, **options
    )
    random_weights(source.double())
    assert source.o_proj is not None
    rows = torch.cat(PACKED[form](*heads_rows(source)))
    out = source.o_proj
    done = importers.from_packed(rows[:, :-1], n_heads, kv_heads, rows[:, -1], out.weight, out.bias, layout, **options)
    assert done.layer.spec == source.spec.replace(d_model=29)
    assert done.difference < (1e-6 if "rope" in options else 1e-12)
    for key, value in source.state_dict().items():
        assert torch.equal(done.layer.state_dict()[key], value), key


def test_packed_without_bias_and_output() -> None:
    done = importers.from_packed(draw(21, 11, dtype=torch.float32), 5, 1)
    assert (done.layer.o_proj, done.layer.q_proj.bias, done.layer.spec.head_dim) == (None, None, 3)
    assert done.difference < 1e-5 and done.path == 'from_packed, layout "qkv"'


@pytest.mark.parametrize("biased", [True, False])
def test_conv1d(biased: bool) -> None:
    module: Any = made("gpt2", torch.float64)
    b_attn, b_proj = (module.c_attn.bias, module.c_proj.bias) if biased else (None, None)
    done = importers.from_conv1d(module.c_attn.weight, b_attn, module.c_proj.weight, b_proj, 5)
    assert done.difference < 1e-12 and done.path == "from_conv1d" and done.layer.spec.mask == hw.Causal()
    if biased:
        theirs = import_attention(module).layer.state_dict()
        assert all(torch.equal(theirs[key], value) for key, value in done.layer.state_dict().items())


def test_separate_linears_and_matrices() -> None:
    source = random_weights(
        hw.MultiHeadAttention(
            13, 6, 3, head_dim=10, value_dim=7, d_context=11, d_values=5, d_out=17, q_bias=True, scale=0.4
        )
    )
    source = source.double()
    q, k, v, o = source.q_proj, source.k_proj, source.v_proj, source.o_proj
    assert o is not None
    linears = importers.from_separate(q, k, v, o, 6, 3, scale=0.4)
    bare = importers.from_separate(q.weight, k.weight, v.weight, o.weight, 6, 3, q_bias=q.bias, scale=0.4)
    for done in (linears, bare):
        assert done.difference < 1e-12 and "cross attention" in done.compared
        assert done.layer.spec == source.spec
        assert all(torch.equal(done.layer.state_dict()[key], value) for key, value in source.state_dict().items())


def test_one_bias_of_keys_and_values_leaves_zeros_for_the_other() -> None:
    done = importers.from_separate(
        draw(30, 11), draw(30, 11, seed=1), draw(30, 11, seed=2), draw(11, 30), 3, v_bias=draw(30), mask=hw.Causal()
    )
    assert done.difference < 1e-12
    assert torch.equal(done.layer.k_proj.bias, torch.zeros(30, dtype=torch.float64))
    assert torch.equal(done.layer.v_proj.bias, draw(30))


def keras_arrays(g: int = 6, biased: bool = True, d_context: int = 11, dtype: Any = np.float64) -> list[np.ndarray]:
    h, d, e, d_out = 6, 10, 7, 17
    shapes = [(11, h, d), (h, d), (d_context, g, d), (g, d), (d_context, g, e), (g, e), (h, e, d_out), (d_out,)]
    rng = np.random.default_rng(0)
    drawn = [(rng.normal(size=shape) / 3).astype(dtype) for shape in shapes]
    return drawn if biased else drawn[::2]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("g", "biased", "d_context", "mask"), [(6, True, 11, None), (2, False, 11, hw.Causal()), (3, True, 5, None)]
)
def test_keras(g: int, biased: bool, d_context: int, mask: hw.Mask | None, dtype: Any) -> None:
    arrays = keras_arrays(g, biased, d_context, dtype)
    done = importers.from_keras(arrays, mask=mask)
    assert done.difference < (1e-5 if dtype == np.float32 else 1e-12)
    assert "Keras was not run" in done.compared
    spec = done.layer.spec
    assert (spec.n_heads, spec.n_kv_heads, spec.head_dim, spec.value_dim, spec.d_context) == (6, g, 10, 7, d_context)
    assert (spec.q_bias, spec.kv_bias, spec.out_bias, spec.d_out) == (biased, biased, biased, 17)
    kernel = torch.from_numpy(arrays[0])
    assert torch.equal(done.layer.heads[4].wq, kernel[:, 4].t())
    arrays[0][:] = math.nan
    assert not done.layer.q_proj.weight.isnan().any()


def test_keras_by_variable_path() -> None:
    arrays = keras_arrays()
    paths = [f"model/mha/{role}/{kind}:0" for role in packed.KERAS_ROLES for kind in ("kernel", "bias")]
    shuffled = dict(sorted(zip(paths, arrays, strict=True)))
    one, other = importers.from_keras(shuffled).layer, importers.from_keras(arrays).layer
    assert all(torch.equal(other.state_dict()[key], value) for key, value in one.state_dict().items())


# The certificate catches, and refusals


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


def with_extra(module: nn.Module) -> nn.Module:
    module.register_parameter("sinks", nn.Parameter(torch.ones(6)))
    return module


def without_mask() -> nn.Module:
    module = CourseAttention(11, 35, 17, 0.0, 5)
    del module.mask
    return module


def quantised() -> nn.Module:
    module: Any = made("llama")
    module.k_proj = nn.Identity()
    return module


def uneven() -> nn.Module:
    module = CourseAttention(11, 35, 17, 0.0, 5)
    module.num_heads = 4
    return module


def llama_rope(**given: Any) -> nn.Module:
    return llama(LlamaConfig, LlamaAttention, rope_parameters={"rope_theta": 31.0, **given})


LLAMA3 = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
HAS = "rope_type='{}' cannot be represented; headwise.RoPE has default, linear and yarn"
REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (
        lambda: nn.MultiheadAttention(35, 5, add_bias_kv=True),
        "add_bias_kv=True appends a learned key and value to each text, and a headwise layer has none; "
        "build the module with add_bias_kv=False",
    ),
    (
        lambda: nn.MultiheadAttention(35, 5, add_zero_attn=True),
        "add_zero_attn=True appends a key and value of zeros to each text; that is a sink logit of 0: "
        "copy the weights into MultiHeadAttention(sink=True) yourself",
    ),
    (
        lambda: nn.MultiheadAttention(35, 5).to("meta"),
        "q is on the meta device and holds no numbers; load the weights first",
    ),
    (lambda: llama_rope(rope_type="llama3", **LLAMA3), HAS.format("llama3")),
    (lambda: llama_rope(rope_type="dynamic", factor=2.0), HAS.format("dynamic")),
    (
        lambda: with_extra(made("llama")),
        "LlamaAttention has parameters that would be lost: sinks; merge adapters into the weights first, or use "
        "from_separate",
    ),
    (
        quantised,
        "LlamaAttention.k_proj is Identity, not nn.Linear; dequantise or unfuse it, or pass the tensors to "
        "from_separate",
    ),
    (
        lambda: llama(Olmo2Config, Olmo2Attention),
        "q_norm norms 84 features at once, and a headwise layer each head's 14 apart; it can be "
        "neither imported nor reshaped",
    ),
    (uneven, "q has 35 rows; n_heads=4 does not divide them"),
    (
        lambda: hw.MultiHeadAttention(35, 5),
        "this is a headwise layer already; use copy.deepcopy for another one",
    ),
]


@pytest.mark.parametrize(("module", "message"), REFUSED)
def test_what_a_layer_cannot_be_is_refused_by_name(module: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(hw.HeadwiseError) as refusal:
        import_attention(module())
    assert str(refusal.value) == message


def test_fields_of_yarn_without_counterpart_are_refused() -> None:
    with pytest.raises(hw.HeadwiseError, match="make other frequencies than RoPE"):
        import_attention(llama_rope(**YARN, truncate=False))


def test_without_a_mask_it_is_not_the_course_class() -> None:
    with pytest.raises(hw.HeadwiseError) as refusal:
        import_attention(without_mask())
    assert str(refusal.value) == (
        "CourseAttention has no mask; the course's class has W_query, W_key, W_value, out_proj, num_heads and a mask. "
        "Pass the weights of others to from_separate(..., mask=Causal())"
    )


def test_an_unknown_module_hears_what_is_known() -> None:
    with pytest.raises(hw.HeadwiseError) as refusal:
        import_attention(nn.Linear(3, 5))
    assert str(refusal.value) == (
        f"Linear is not known; import_attention knows nn.MultiheadAttention, transformers' "
        f"{', '.join(known.whole for known in family.families())}, and modules with W_query, W_key, W_value, out_proj, "
        f"num_heads and a mask. Pass the weights of others to from_separate, from_packed (one matrix such as "
        f"query_key_value or Wqkv), from_conv1d or from_keras of headwise.layer.importing.importers"
    )
    with pytest.raises(hw.HeadwiseError, match="Linear is none of LlamaAttention, "):
        importers.from_transformers(nn.Linear(3, 5))


def test_what_is_not_causal_gets_no_mask() -> None:
    module: Any = made("llama")
    module.is_causal = False
    done = import_attention(module)
    assert done.layer.spec.mask is None and done.difference < 1e-5
    windowed: Any = made("mistral")
    windowed.is_causal = False
    with pytest.raises(hw.HeadwiseError, match="MistralAttention is not causal and has a window of 3"):
        import_attention(windowed)


def test_scales_and_the_eps_of_norms_are_taken() -> None:
    specs = {name: import_attention(made(name)).layer.spec for name in ("granite", "gemma2", "qwen3-moe", "llama")}
    assert (specs["granite"].scale, specs["gemma2"].scale, specs["llama"].scale) == (0.37, 31**-0.5, None)
    assert (specs["qwen3-moe"].qk_norm_eps, specs["gemma2"].softcap) == (1e-2, 50.0)
    assert import_attention(made("gpt2, by layer")).layer.spec.scale == pytest.approx(7**-0.5 / 3)
    assert import_attention(made("gpt2, unscaled")).layer.spec.scale == 1
    assert import_attention(made("phi3")).layer.spec.rope == hw.RoPE(31.0, dim=8)


MarsRotaryEmbedding = LlamaRotaryEmbedding


def test_a_new_family_is_one_record(monkeypatch: Any) -> None:
    class MarsAttention(LlamaAttention):
        """Llama's, but that its values go by another name."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.wv = self.v_proj
            del self.v_proj

        def forward(self, *args: Any, **kw: Any) -> Any:
            twin = LlamaAttention(self.config, 0).to(self.wv.weight.dtype)
            twin.load_state_dict({key.replace("wv", "v_proj"): value for key, value in self.state_dict().items()})
            return twin(*args, **kw)

    module = random_weights(llama(LlamaConfig, MarsAttention))
    with pytest.raises(hw.HeadwiseError, match=r"MarsAttention has parameters that would be lost: wv\.weight"):
        import_attention(module)
    monkeypatch.setattr(family, "_families", dict(family._families))
    family.register(replace(family._families["llama"], name="mars", prefix="Mars", v="wv"))
    done = import_attention(module)
    assert done.difference < 1e-5 and done.path == "from_transformers, mars, self attention, default rope"


BARE: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: importers.from_packed(draw(35, 11), 4, 2),
        "weight has 35 rows; n_heads=4 and n_kv_heads=2 need a multiple of 4 + 2 * 2 = 8",
    ),
    (lambda: importers.from_packed(draw(35, 11), 5, 2), "n_kv_heads=2 does not divide n_heads=5"),
    (
        lambda: importers.from_packed(draw(40, 11), 4, 2, layout="per_head"),
        'layout "per_head" gives each of 4 heads its own key and value, and n_kv_heads=2; '
        'pass layout="per_group" or "qkv"',
    ),
    (
        lambda: importers.from_packed(draw(40, 11), 4, layout="kqv"),
        "layout='kqv' is not known; one of qkv, per_head, per_group",
    ),
    (lambda: importers.from_packed(draw(36, 11), 4, bias=draw(35)), "bias has shape (35,); weight has 36 rows"),
    (lambda: importers.from_packed(draw(36, 11), 0), "n_heads=0 must be a positive whole number"),
    (
        lambda: importers.from_packed(draw(36, 11), 4, out_weight=draw(11, 13)),
        "o reads width 13; 4 heads of value width 3 join to 12",
    ),
    (
        lambda: importers.from_packed(draw(36, 11), 4, out_bias=draw(11)),
        "out_bias=True needs out_proj=True: there is no projection to carry the bias",
    ),
    (
        lambda: importers.from_packed(torch.ones(36, 11, dtype=torch.int8), 4),
        "weight is torch.int8: quantised weights have no layer; dequantise them first",
    ),
    (
        lambda: importers.from_packed(torch.ones(36, 11).to(torch.float8_e4m3fn), 4),
        "weight is torch.float8_e4m3fn: quantised weights have no layer; dequantise them first",
    ),
    (lambda: importers.from_packed(draw(2, 36, 11), 4), "weight has shape (2, 36, 11), 3 axes; a matrix has 2"),
    (lambda: importers.from_packed(np.ones((36, 11)), 4), "weight is ndarray; pass a torch.Tensor"),  # type: ignore[arg-type]
    (
        lambda: importers.from_conv1d(draw(11, 40), None, draw(13, 11), None, 4),
        "c_attn_weight has 40 columns; n_heads=4 needs a multiple of 12",
    ),
    (
        lambda: importers.from_separate(draw(30, 11), draw(12, 11), draw(12, 11), None, 3, 2),
        "n_heads=3 makes queries of width 10 of 30 rows, n_kv_heads=2 keys of width 6 of 12 rows; they must be equal: "
        "check the numbers of heads",
    ),
    (
        lambda: importers.from_separate(draw(30, 11), draw(20, 11), draw(20, 11), None, 6, 4),
        "n_kv_heads=4 does not divide n_heads=6; pass one of 1, 2, 3, 6",
    ),
    (
        lambda: importers.from_separate(draw(30, 11), draw(30, 11), draw(30, 11).float(), None, 6),
        "q is torch.float64 on cpu, v is torch.float32 on cpu; bring them to one dtype and device",
    ),
    (
        lambda: importers.from_separate(draw(30, 11), draw(30, 11), draw(30, 11), None, 6, k_bias=draw(31)),
        "k_bias has shape (31,); k has 30 rows",
    ),
    (
        lambda: importers.from_separate(nn.Linear(11, 30), draw(30, 11), draw(30, 11), None, 6, q_bias=draw(30)),
        "q is a Linear with a bias of its own, and q_bias= is given too; pass one",
    ),
    (
        lambda: importers.from_separate(nn.Conv1d(11, 30, 1), draw(30, 11), draw(30, 11), None, 6),  # type: ignore[arg-type]
        "q is Conv1d; pass an nn.Linear, or its weight as (out, in)",
    ),
    (
        lambda: importers.from_keras(keras_arrays()[:6]),
        "Keras MultiHeadAttention has 8 weights, or 4 with use_bias=False, and these are 6; pass get_weights() of one "
        "attention layer",
    ),
    (
        lambda: importers.from_keras({"query/kernel": keras_arrays()[0], "gate/kernel": keras_arrays()[0]}),
        "Keras weights: 2 paths, unknown ['gate/kernel'], missing ['key/kernel', 'value/kernel', "
        "'attention_output/kernel']; one layer has query, key, value, attention_output, each with a kernel and perhaps "
        "a bias",
    ),
    (
        lambda: importers.from_keras([a.astype(np.int64) for a in keras_arrays()]),
        "Keras query kernel is int64; pass float16, float32 or float64",
    ),
    (
        lambda: importers.from_keras([a.reshape(len(a), -1) for a in keras_arrays(biased=False)]),
        "Keras query kernel has shape (11, 60); 3 axes are needed, one of them heads",
    ),
]


@pytest.mark.parametrize(("call", "message"), BARE)
def test_bare_weights_that_do_not_fit_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(hw.HeadwiseError) as refusal:
        call()
    assert str(refusal.value) == message


def test_the_layer_goes_where_other_layers_go() -> None:
    """It is an ordinary layer: copied, pruned, saved as such."""
    done: Imported = import_attention(made("qwen3", torch.float64).eval())
    layer = done.layer
    x = torch.randn(B, T, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    gate = torch.tensor([1.0, 0, 1, 1, 1, 1], dtype=torch.float64)
    torch.testing.assert_close(layer.without([1])(x), layer(x, gate=gate), rtol=1e-10, atol=1e-10)
    again = hw.MultiHeadAttention.from_spec(layer.spec).double()
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer(x))


def test_the_certificate_of_bare_weights_runs_their_module() -> None:
    """A module that tiles its groups has the weights of one that repeats them; only a run of it tells."""

    class Tiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(33, 44), nn.Linear(33, 22), nn.Linear(33, 22)
            self.tiled = True

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (y.unflatten(-1, (-1, 11)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
            index = [0, 1, 0, 1] if self.tiled else [0, 0, 1, 1]
            out = torch.nn.functional.scaled_dot_product_attention(q, k[:, index], v[:, index])
            return out.transpose(1, 2).flatten(2)

    module = Tiled()
    weights = (module.q, module.k, module.v, None, 4, 2)
    assert "the formula written out" in importers.from_separate(*weights).compared
    with pytest.raises(hw.HeadwiseError, match=r"the layer differs from Tiled by .*, so it is not imported"):
        importers.from_separate(*weights, module=module)
    module.tiled = False
    done = importers.from_separate(*weights, module=module)
    assert done.difference < 1e-6 and done.compared.startswith("Tiled against the layer")
