"""Tiny models of every family of transformers that goes through its attention interface, and what to feed them."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

V, T, B = 131, 29, 2
TARGET, IMAGE, SOUND = 11, 20, 23  # tokens of a decoder, pixels, frames after the encoder's stride
WINDOW = 7
IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ROTARY: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 30,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 37,
    "max_position_embeddings": 97,
    **IDS,
}


@dataclass(frozen=True)
class Family:
    model: str  # name of the class
    config: Callable[[], Any]
    w_o: str  # pattern of the names of the output projections, in the order of `seen`
    takes: str = "text"  # text, pair (encoder and decoder), sound or image
    eager: bool = False  # its only unwatched way


FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        lambda: tf.GPT2Config(vocab_size=V, n_embd=33, n_layer=2, n_head=3, n_positions=97, **IDS, **_off("pdrop")),
        r"attn\.c_proj$",
    ),
    "bert": Family(
        "BertModel",
        lambda: tf.BertConfig(
            vocab_size=V,
            hidden_size=33,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=37,
            max_position_embeddings=97,
            **_off("bert"),
        ),
        r"attention\.output\.dense$",
    ),
    "llama": Family("LlamaForCausalLM", lambda: tf.LlamaConfig(**ROTARY), r"o_proj$"),
    "mistral": Family("MistralForCausalLM", lambda: tf.MistralConfig(**ROTARY, sliding_window=WINDOW), r"o_proj$"),
    "qwen3": Family("Qwen3ForCausalLM", lambda: tf.Qwen3Config(**ROTARY), r"o_proj$"),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        lambda: tf.Gemma2Config(**ROTARY, sliding_window=WINDOW, query_pre_attn_scalar=10, attn_logit_softcapping=2.0),
        r"o_proj$",
        eager=True,
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        lambda: tf.Gemma3TextConfig(
            **ROTARY, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
        ),
        r"o_proj$",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        lambda: tf.GptOssConfig(
            **{**ROTARY, "hidden_size": 32, "intermediate_size": 32, "head_dim": 12},  # what its experts allow
            sliding_window=WINDOW,
            num_local_experts=3,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        ),
        r"o_proj$",
        eager=True,
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        lambda: tf.T5Config(
            vocab_size=V,
            d_model=30,
            d_kv=7,
            num_layers=2,
            num_heads=5,
            d_ff=37,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        r"Attention\.o$",
        takes="pair",
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        lambda: tf.WhisperConfig(
            vocab_size=V,
            d_model=30,
            encoder_layers=2,
            decoder_layers=3,
            encoder_attention_heads=5,
            decoder_attention_heads=3,
            encoder_ffn_dim=37,
            decoder_ffn_dim=37,
            max_source_positions=SOUND,
            max_target_positions=43,
            num_mel_bins=13,
            decoder_start_token_id=1,
            dropout=0.0,
            begin_suppress_tokens=None,
            **IDS,
        ),
        r"attn\.out_proj$",
        takes="sound",
    ),
    "vit": Family(
        "ViTModel",
        lambda: tf.ViTConfig(
            hidden_size=30,
            num_hidden_layers=2,
            num_attention_heads=5,
            intermediate_size=37,
            image_size=IMAGE,
            patch_size=5,
        ),
        r"attention\.(output\.dense|o_proj)$",
        takes="image",
    ),
}
TEXT = tuple(name for name, family in FAMILIES.items() if family.takes == "text")
DECODERS = tuple(name for name in TEXT if name != "bert")


def _off(kind: str) -> dict[str, float]:
    """No dropout, as the configurations spell it."""
    names = {
        "pdrop": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    }[kind]
    return dict.fromkeys(names, 0.0)


def build(name: str) -> Any:
    """A new model whose attention is not flat, and in which no bias, sink or gain is what it starts at."""
    family = FAMILIES[name]
    model = getattr(tf, family.model)(family.config()).eval()
    return shake(model)


def shake(model: nn.Module, std: float = 0.3, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=std, generator=generator)
            elif key.endswith("weight"):  # gains of norms
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(std=std, generator=generator)
    return model


@cache
def model_of(name: str) -> Any:
    """One model of a family for all tests; they must leave it as it was."""
    return build(name)


def padding_mask(padding: str, length: int = T) -> Tensor:
    """(B,T), 1 = real; the second document is the shorter one."""
    mask = torch.ones(B, length, dtype=torch.long)
    if padding == "left":
        mask[1, :5] = 0
    elif padding == "right":
        mask[1, -5:] = 0
    return mask


def inputs_of(name: str, padding: str = "none", seed: int = 1) -> dict[str, Tensor]:
    """What the model is called with. Few distinct tokens, so that some come again."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> Tensor:
        return torch.randint(3, 17, (B, length), generator=generator)

    takes = FAMILIES[name].takes
    if takes == "image":
        return {"pixel_values": torch.randn(B, 3, IMAGE, IMAGE, generator=generator)}
    if takes == "sound":
        return {
            "input_features": torch.randn(B, 13, 2 * SOUND, generator=generator),
            "decoder_input_ids": ids(TARGET),
        }
    if takes == "pair":
        return {
            "input_ids": ids(T),
            "attention_mask": padding_mask(padding),
            "decoder_input_ids": ids(TARGET),
            "decoder_attention_mask": padding_mask(padding, TARGET),
        }
    return {"input_ids": ids(T), "attention_mask": padding_mask(padding)}


def answer(output: Any) -> Tensor:
    result: Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return result


@dataclass(frozen=True)
class Attention:
    """What one attention of a model did by transformers' own eager way, on all documents."""

    weights: Tensor  # (B,H,T,S)
    joined: Tensor  # (B,T,H*E), what W_O reads
    w_o: Tensor  # (C,H*E)
    rows: Tensor  # (B,T) bool, queries that are real
    keys: Tensor  # (B,S) bool
    q_ids: Tensor | None
    cross: bool


STACKS = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}


def eager(name: str, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Attention]]:
    """The answer and every attention, by site name, of an unwatched run that keeps its maps."""
    joined: list[tuple[str, Tensor, Tensor]] = []

    def note(path: str, module: nn.Module) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            weight = module.weight.T if type(module).__name__ == "Conv1D" else module.weight
            joined.append((path, args[0].detach(), weight.detach()))

        return hook

    implementation = model.config._attn_implementation
    with ExitStack() as stack, torch.no_grad():
        for path, module in model.named_modules():
            if re.search(FAMILIES[name].w_o, path):
                stack.callback(module.register_forward_pre_hook(note(path, module)).remove)
        stack.callback(model.set_attn_implementation, implementation)
        model.set_attn_implementation("eager")
        output = model(**inputs, output_attentions=True)
    found = {}
    for path, out, w_o in joined:
        numbers = [int(part) for part in path.split(".") if part.isdigit()]
        cross = "EncDecAttention" in path or "encoder_attn" in path
        side = "cross" if cross else "decoder" if "decoder" in path else "encoder"
        two = FAMILIES[name].takes in ("pair", "sound")
        weights = getattr(output, STACKS[side] if two else "attentions")[numbers[0]]
        target = two and side != "encoder"
        q_mask = inputs.get("decoder_attention_mask" if target else "attention_mask")
        k_mask = inputs.get("attention_mask" if side in ("encoder", "cross") or not two else "decoder_attention_mask")
        found[f"{side}.L{numbers[0]}" if two else f"L{numbers[0]}"] = Attention(
            weights.double(),
            out.double().flatten(2) if out.ndim == 3 else out.double(),
            w_o.double(),
            torch.ones(weights.shape[0], weights.shape[2], dtype=torch.bool) if q_mask is None else q_mask.bool(),
            torch.ones(weights.shape[0], weights.shape[3], dtype=torch.bool) if k_mask is None else k_mask.bool(),
            inputs.get("decoder_input_ids" if target else "input_ids"),
            cross,
        )
    return answer(output), found


def real(name: str, inputs: dict[str, Tensor], output: Tensor) -> Tensor:
    """(B,T,1) bool: the rows of the answer that stand for a token."""
    mask = inputs.get("decoder_attention_mask" if FAMILIES[name].takes == "pair" else "attention_mask")
    return torch.ones(*output.shape[:2], 1, dtype=torch.bool) if mask is None else mask.bool()[..., None]
