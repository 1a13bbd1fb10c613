"""Multi-head latent attention: a step absorbed and expanded, and what turning a grouped RoPE model into it would cost.

Decoding: one layer of 16 heads, 4,096 tokens cached, float32. Conversion: parents of RMSNorm, RoPE, SwiGLU, 2 layers of
4 heads on 2, trained on the characters of tinyshakespeare, one for each seed; nothing is trained afterwards. Losses are
on held-out text, in nats above the parent's. Values and keys are cut to their first singular vectors on what the parent
reads. RoPE turns a pair of features as one complex number, so the keys of all heads can be mixed, pair by pair, with
complex factors, and the first principal component of them becomes the rotary key that all heads share; what is left of
the keys is dropped, or goes through the latent without positions.
"""

from __future__ import annotations

import copy
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from benchmarks.reshape import TEXT, parent_of
from headwise.gpt.presets import Recipe
from headwise.gpt.train import evaluate
from headwise.layer import latent
from headwise.memory import in_turn
from headwise.reshape.align import moments
from headwise.reshape.share import share_heads
from headwise.rungs.tensor import attend

PARENTS = Path(__file__).resolve().parents[1] / "build" / "latent"
SHAPE: dict[str, Any] = {
    "context": 128, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "d_model": 64, "d_ff": 176,
}  # fmt: skip
RECIPE = Recipe(steps=600, batch=16, lr=5e-3, muon_lr=0.015, weight_decay=0.1, warmup=50, final_lr=0.02)


@torch.no_grad()
def decoding(runs: int) -> dict[str, float]:
    """Milliseconds of one step of a layer."""
    torch.manual_seed(0)
    mla = hw.MultiHeadAttention(1024, 16, latent_dim=256, rope_dim=32, mask=hw.Causal()).eval()
    kept, q = torch.randn(1, 1, 4096, 288), torch.randn(1, 16, 1, 64)
    options = mla.options(None, None)
    k, v = latent.expanded(mla, kept)
    sides = {
        "absorbed": partial(latent.absorbed, mla, q, kept, options),
        "expanded": lambda: attend(q, *latent.expanded(mla, kept), options),
        "keys and values kept": partial(attend, q, k, v, options),
    }
    return {name: 1000 * statistics.median(times) for name, times in in_turn(sides, runs).items()}


def converted(layer: hw.MultiHeadAttention, root: Tensor, n: int, rest: bool) -> hw.MultiHeadAttention:
    """The layer with a latent of n for its values and, with `rest`, for what its one rotary key leaves of the keys."""
    spec = layer.spec
    H, G, d, e = spec.n_heads, spec.n_kv_heads, spec.head_dim, spec.value_dim
    wq, wk, wv = (
        x.weight.double().unflatten(0, (m, -1)) for x, m in ((layer.q_proj, H), (layer.k_proj, G), (layer.v_proj, G))
    )
    pairs = torch.complex(*wk.chunk(2, 1)).transpose(0, 1)  # (d/2,G,C)
    first = torch.linalg.svd(pairs @ root.to(pairs.dtype), full_matrices=False).U[..., :1]  # (d/2,G,1)
    rotary = first.mH @ pairs  # (d/2,1,C)
    left = (pairs - first @ rotary).transpose(0, 1) * rest
    rows = torch.cat([left.real, left.imag, wv], 1)  # (G,d+e,C)
    into = torch.linalg.svd(rows.flatten(0, 1) @ root, full_matrices=False).U[:, :n]
    queries = torch.complex(*wq.chunk(2, 1)) * first[:, list(spec.kv_index), 0].T.conj()[..., None]
    new = hw.MultiHeadAttention(
        spec.d_model, H, head_dim=2 * d, value_dim=e, latent_dim=n, rope_dim=d, latent_norm=False, mask=spec.mask,
        rope=spec.rope, scale=d**-0.5,
    )  # fmt: skip
    new.q_proj.weight.copy_(torch.cat([wq, queries.real, queries.imag], 1).flatten(0, 1))
    new.kv_down.weight.copy_(torch.cat([into.T @ rows.flatten(0, 1), rotary[:, 0].real, rotary[:, 0].imag]))
    new.kv_up.weight.copy_(into.unflatten(0, (G, d + e))[list(spec.kv_index)].flatten(0, 1))
    new.o_proj.load_state_dict(layer.o_proj.state_dict())
    return new


def narrowed(layer: hw.MultiHeadAttention, root: Tensor, n: int, name: str) -> hw.MultiHeadAttention:
    """The layer whose values, or keys before RoPE, are of rank n."""
    new = copy.deepcopy(layer)
    weight = getattr(new, name).weight
    left = torch.linalg.svd(weight.double() @ root, full_matrices=False).U[:, :n]
    weight.copy_(left @ (left.T @ weight.double()))
    return new


@torch.no_grad()
def damages(seed: int) -> dict[str, float]:
    """The parent's loss, and nats above it."""
    corpus, parent = parent_of(seed, PARENTS, SHAPE, RECIPE)
    loss, batch = evaluate(parent, corpus.data), corpus.data.batch(torch.Generator().manual_seed(0), 64)
    roots = [*moments(parent, [batch[0]])]
    damage = {"parent": loss}
    changes: dict[str, Any] = {}
    for n in (32, 16, 8):
        changes[f"values of rank {n}"] = partial(narrowed, n=n, name="v_proj")
    for n in (32, 16, 8):
        changes[f"keys of rank {n}, before RoPE"] = partial(narrowed, n=n, name="k_proj")
    for n in (32, 16):
        changes[f"MLA, {n} + 16, rest of keys dropped"] = partial(converted, n=n, rest=False)
    for n in (48, 32, 16):
        changes[f"MLA, {n} + 16, rest without positions"] = partial(converted, n=n, rest=True)
    for name, change in changes.items():
        child = copy.deepcopy(parent)
        for block, root in zip(child.blocks, roots, strict=True):
            block.attention = change(block.attention, root[:-1])  # without the row of biases
        damage[name] = evaluate(child, corpus.data) - loss
    shared: Any = share_heads(parent, 1, "principal", "adjacent", roots).model
    damage["shared by one key/value head, 32"] = evaluate(shared, corpus.data) - loss
    return damage


def run(runs: int) -> dict[str, Any]:
    times = decoding(runs)
    lines = [
        "one step, 16 heads of 64, latent 256 + 32, 4,096 cached: "
        + ", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items())
    ]
    seeds = []
    if TEXT.exists():
        for seed in range(runs):
            seeds.append(damages(seed))
            print(f"latent seed {seed}: {seeds[-1]}", file=sys.stderr)
        lines.append("of 64 numbers a token and layer; nats above the parent, each seed")
        lines += [f"  {name:40}" + "  ".join(f"{row[name]:.4f}" for row in seeds) for name in seeds[0]]
    return {"step_ms": times, "seeds": seeds, "table": "\n".join(lines)}
