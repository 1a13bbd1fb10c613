"""Tiny models of every family that can be reshaped, with weights that hide nothing, and texts to feed them."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

from headwise.corpus.tokens import Tokens
from headwise.gpt.checkpoint import save_model
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.models.ask import answers
from headwise.models.weights import grouped, read_layers, with_layers

V, B, T = 31, 3, 13  # vocabulary, documents, tokens
OWN: dict[str, Any] = {
    "vocab_size": V, "context": 17, "n_layers": 2, "n_heads": 6, "head_dim": 10, "d_model": 23, "d_ff": 29,
}  # fmt: skip
ROTARY: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 24,  # llama's config wants a multiple of the 6 heads
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 10,
    "intermediate_size": 29,
    "max_position_embeddings": 17,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {
    "vocab_size": V, "n_embd": 33, "n_layer": 2, "n_head": 3, "n_positions": 17, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BERT: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 33, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 37,
    "max_position_embeddings": 17,
}  # fmt: skip


def trained() -> GPT:
    """A model that has learned to count: what it knows lies in its heads, not in noise."""
    model = GPT(GPTConfig(**OWN))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        start, step = torch.randint(V, (2, 16, 1), generator=generator)
        ids = (start + step * torch.arange(T + 1)) % V
        model.loss(ids[:, :-1], ids[:, 1:]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return model


BUILD: dict[str, Callable[[], nn.Module]] = {
    "rope": lambda: GPT(GPTConfig(**OWN)),
    "trained": trained,
    "rope, biases": lambda: GPT(GPTConfig(**OWN, bias=True)),
    "rope, tied": lambda: GPT(GPTConfig(**OWN, tied=True)),
    "rope, GQA": lambda: GPT(GPTConfig(**{**OWN, "n_heads": 12, "n_kv_heads": 6})),
    "qk-norm": lambda: GPT(GPTConfig(**OWN, qk_norm=True)),
    "no RoPE": lambda: GPT(GPTConfig(**OWN, position="learned", norm="layer", bias=True)),
    "no RoPE, qk-norm": lambda: GPT(GPTConfig(**OWN, position="learned", qk_norm=True)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**ROTARY, attention_bias=True)),
    "llama, tied": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**ROTARY, tie_word_embeddings=True)),
    "llama, GQA": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**{**ROTARY, "num_attention_heads": 12})),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**{**ROTARY, "hidden_size": 23}, sliding_window=7)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(
        tf.Qwen2Config(**{name: x for name, x in ROTARY.items() if name != "head_dim"})
    ),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**{**ROTARY, "hidden_size": 23})),
    "granite": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**ROTARY, attention_multiplier=0.3)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**ROTARY)),
    "starcoder2": lambda: tf.Starcoder2ForCausalLM(tf.Starcoder2Config(**ROTARY)),
    "gemma3, tied": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**ROTARY, tie_word_embeddings=True)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**BERT)),
}
SHAREABLE = tuple(name for name in BUILD if name not in ("gpt2", "bert", "gemma3, tied"))


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model in eval mode with noise on every parameter: no gain is 1, no bias is 0."""
    return copy.deepcopy(_built(name, seed, dtype))


@cache
def _built(name: str, seed: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(seed)
    model = BUILD[name]().to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        if name == "trained":
            return model.eval()
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_((noise * 0.3).to(dtype))
    return model.eval()


def plain_mean(model: nn.Module, n_kv_heads: int) -> nn.Module:
    """A child whose heads are means of neighbours, without an alignment: much is lost, and nothing is rounded twice."""
    layers = []
    for w in read_layers(model):
        pooled = {}
        for name in ("wk", "bk", "wv", "bv"):
            if (heads := getattr(w, name)) is not None:
                pooled[name] = grouped(heads, n_kv_heads).mean(1)
        layers.append(replace(w, **pooled))
    return with_layers(model, layers, n_kv_heads=n_kv_heads)


def texts(seed: int = 0) -> Tensor:
    """Random ids (B,T)."""
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def far(model: nn.Module, other: nn.Module) -> float:
    """The largest difference of an answer, relative to the largest answer where that exceeds 1."""
    ids = texts(1)
    wanted = answers(model, ids)
    return float((answers(other, ids) - wanted).abs().max() / wanted.abs().max().clamp(min=1))


def saved(base: Path, name: str, **how: Any) -> Path:
    """The folder of a small random model, written once; "run" is one of our own."""
    path = base / name.replace(", ", "-")
    if not path.exists():
        model: Any = build("rope" if name == "run" else name, dtype=torch.float32)
        if name == "run":
            save_model(path, model, Tokens.characters("".join(map(chr, range(97, 97 + V - 1))), boundary=True))
        else:
            model.save_pretrained(path, **how)
    return path
