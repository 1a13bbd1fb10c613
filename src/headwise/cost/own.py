"""Models that headwise trained: the `headwise` section of their config.json, the fields of `model.gpt.GPTConfig`."""

from __future__ import annotations

from typing import Any

from headwise.cost.fields import Family, Fields
from headwise.cost.parts import decoder, norm, table
from headwise.cost.shape import MAIN, Attention, FeedForward, Layer, ModelShape
from headwise.errors import HeadwiseError

# What both the section and the Hugging Face fields around it say; a file in which they differ is not one model.
SAME = {
    "d_model": ("hidden_size", "n_embd"),
    "n_layers": ("num_hidden_layers", "n_layer"),
    "n_heads": ("num_attention_heads", "n_head"),
    "n_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
}


def _build(f: Fields) -> ModelShape:
    d, heads, bias = f.size("d_model"), f.size("n_heads"), f.flag("bias")
    width = f.head_dim("d_model", "n_heads")
    gain = f.flag("norm_gain") * d * (2 if _one_of(f, "norm", "rms", "layer") == "layer" and bias else 1)
    attention = Attention(
        d_model=d,
        n_heads=heads,
        n_kv_heads=f.kv_heads("n_kv_heads", "n_heads"),
        head_dim=width,
        value_dim=width,
        q_bias=bias,
        k_bias=bias,
        v_bias=bias,
        out_bias=bias,
        qk_norm=f.flag("qk_norm"),
    )
    forward = FeedForward(d_model=d, width=f.optional_size("d_ff") or 4 * d, gated=f.flag("gated"), bias=bias)
    layers = tuple(
        Layer(name=f"L{n}", stack=MAIN, attention=attention, cross=None, feed_forward=forward, norm_parameters=2 * gain)
        for n in f.layers("n_layers")
    )
    learned = _one_of(f, "position", "rope", "learned") == "learned"
    pieces = [table("position embedding", f.size("context"), d)] if learned else []
    pieces += [norm("embedding norm", gain)] if f.flag("embedding_norm") else []
    return decoder(f, layers, gain * f.flag("final_norm"), *pieces, positions="context", tied="tied")


def _one_of(f: Fields, name: str, *known: str) -> str:
    value = f.get(name)
    if value not in known:
        raise HeadwiseError(f"{name}={value!r} is not known; one of {', '.join(known)}")
    return str(value)


OWN = Family(
    name="headwise",
    required=("vocab_size", "context", "n_layers", "n_heads", "d_model"),
    # GPTConfig in model/gpt.py
    defaults={
        "n_kv_heads": None,
        "head_dim": None,
        "d_ff": None,
        "norm": "rms",
        "norm_gain": True,
        "embedding_norm": False,
        "final_norm": True,
        "position": "rope",
        "gated": True,
        "bias": False,
        "tied": False,
        "qk_norm": False,
    },
    derived=("scale_residual_init",),
    build=_build,
    heads={"GPT": "lm"},
)


def own_section(config: dict[str, Any]) -> dict[str, Any] | None:
    """The section of a config.json, after a check that the fields around it say the same; None where there is none."""
    section = config.get("headwise")
    if section is None and config.get("model_type") != "headwise":
        return None
    if not isinstance(section, dict):
        raise HeadwiseError("the section `headwise` is missing or no table; a run folder's config.json has one")
    for name, others in SAME.items():
        for other in others:
            if None not in (section.get(name), config.get(other)) and section[name] != config[other]:
                raise HeadwiseError(
                    f"headwise.{name}={section[name]} and {other}={config[other]} name one size; "
                    f"keep the right one, or take the section `headwise` out"
                )
    return section
