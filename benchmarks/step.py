"""One training step of the GPT-2 form beside its own products and fused calls, and beside other implementations.

    limit         the step's matrix products, one fused attention call a layer, the loss and fused AdamW, forward and
                  backward: no norm, activation, residual, embedding or clipping
    headwise      `GPT` with the fields of GPT-2, and `take_step`, which clips gradients and looks for what is no number
    plain torch   the usual class of a course: joined q, k and v, LayerNorm, GELU, the fused call, clipping, fused AdamW
    transformers  GPT2LMHeadModel on sdpa, clipping, fused AdamW; its activation is GELU by tanh

Float32, no dropout, all sides in turn within each round; the ratio to the limit is taken round by round.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import Recipe
from headwise.gpt.train import make_optimizers, take_step

SHAPES = ((12, 64, 4, 4, 128, 65), (4, 256, 6, 6, 384, 65))  # B, T, layers, heads, width, vocabulary
Step = Callable[[Tensor, Tensor], object]


def run(runs: int) -> dict[str, Any]:
    rows = [_row(shape, max(3, runs)) for shape in SHAPES]
    return {"rows": rows, "table": "\n".join(map(_line, rows))}


def _row(shape: tuple[int, ...], runs: int) -> dict[str, Any]:
    B, T, layers, heads, width, words = shape
    torch.manual_seed(0)
    ids, targets = torch.randint(words, (2, B, T))
    config = GPTConfig(
        vocab_size=words, context=T, n_layers=layers, n_heads=heads, d_model=width, norm="layer", position="learned",
        activation="gelu", gated=False, bias=True, tied=True,
    )  # fmt: skip
    sides = {
        "limit": _stock(Products(layers, heads, width, words, T), clip=False),
        "headwise": _ours(config),
        "plain torch": _stock(PlainGPT(layers, heads, width, words, T)),
        "transformers": _stock(Transformers(layers, heads, width, words, T)),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range((8 if T < 100 else 3) * runs + 2):
        for name, step in sides.items():
            began = time.perf_counter()
            step(ids, targets)
            if round_ >= 2:
                times[name].append((time.perf_counter() - began) * 1000)
    over = {
        name: statistics.median(a / b for a, b in zip(each, times["limit"], strict=True))
        for name, each in times.items()
    }
    ms = {name: statistics.median(each) for name, each in times.items()}
    row = {"shape": list(shape), "ms": ms, "over_limit": over}
    print(_line(row), file=sys.stderr)
    return row


def _line(row: dict[str, Any]) -> str:
    sides = ", ".join(f"{name} {ratio:.2f}" for name, ratio in row["over_limit"].items() if name != "limit")
    shape, limit = tuple(row["shape"]), row["ms"]["limit"]
    return f"a step of (B, T, layers, heads, width, words) = {shape}: limit {limit:.1f} ms; x limit: {sides}"


def _ours(config: GPTConfig) -> Step:
    model = GPT(config).train()
    optimizers = make_optimizers(model, Recipe(steps=1, batch=1, lr=1e-4, muon_lr=None))
    return lambda ids, targets: take_step(model.loss(ids, targets), model.parameters(), optimizers, 0, 1.0, 1.0)


def _stock(model: nn.Module, clip: bool = True) -> Step:
    """The step as a training script writes it; `model(ids, targets)` gives the loss."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(ids: Tensor, targets: Tensor) -> None:
        model(ids, targets).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


class Layer(nn.Module):
    """The matrices of one block of GPT-2."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        result: Tensor = self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return result

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        result: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return result


class PlainGPT(nn.Module):
    """GPT-2 as a course writes it."""

    def __init__(self, layers: int, heads: int, width: int, words: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(heads, width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Products(PlainGPT):
    """Only the products, the fused calls and the loss."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.positions.weight.expand(len(ids), -1, -1)
        for layer in self.layers:
            x = layer.down(layer.up(layer.attention(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Transformers(nn.Module):
    def __init__(self, layers: int, heads: int, width: int, words: int, context: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=words,
                n_positions=context,
                n_layer=layers,
                n_head=heads,
                n_embd=width,
                resid_pdrop=0.0,
                bos_token_id=0,
                eos_token_id=0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                use_cache=False,
                attn_implementation="sdpa",
            )
        )

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(input_ids=ids).logits.flatten(0, 1), targets.flatten())
