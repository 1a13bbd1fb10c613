"""Random layers: whole = in chunks = one by one through each kind of cache; what `watch` says, against whole maps."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headwise as hw

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "heads"))
import dense


def _same(*given: Any) -> None:
    from differential import same

    same(*given)


def _layer(rng: random.Random, **options: Any) -> hw.MultiHeadAttention:
    G = rng.choice((1, 2))
    H = G * rng.choice((1, 3))
    layer = hw.MultiHeadAttention(
        rng.choice((6, 12)),
        H,
        **{
            "n_kv_heads": G,
            "head_dim": rng.choice((2, 4)),
            "value_dim": rng.choice((None, 3)),
            "rope": rng.choice((None, hw.RoPE(), hw.RoPE(theta=53.0, interleaved=True))),
            "relative_bias": rng.choice((None, None, hw.RelativeBias(n_buckets=4, max_distance=7))),
            "scale": rng.choice((None, None, None, 0.7, -0.4)),
            "softcap": rng.choice((None, 5.0)),
            "sink": rng.random() < 0.3,
            "q_bias": rng.random() < 0.5,
            "kv_bias": rng.random() < 0.5,
            "out_proj": rng.random() < 0.8,
            "qk_norm": rng.random() < 0.5,
            **options,
        },
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer.double().eval()


def whole_or_not(rng: random.Random) -> None:
    """A causal layer reads a text whole, in chunks and one by one, with each kind of cache."""
    window = rng.choice((None, 3))
    mask = hw.Causal() if window is None else hw.Window(window - 1, 0)
    layer = _layer(rng, mask=mask & hw.Alibi() if rng.random() < 0.2 else mask)
    B, T = rng.choice((1, 2)), rng.choice((1, 5, 11))
    kinds = ["growing", "static", "plan"] + ["rolling"] * (window is not None)
    kind = rng.choice(kinds)
    if kind == "plan":
        _plan(rng, layer, B, T)
    else:
        _compare(rng, layer, B, T, {"growing": {}, "static": {"max_length": T}, "rolling": {"window": window}}[kind])


def latent(rng: random.Random) -> None:
    """The same for multi-head latent attention, whose two ways are chosen by the lengths."""
    rotary = rng.choice((0, 2))
    layer = _layer(
        rng,
        n_kv_heads=None,
        head_dim=4,
        qk_norm=False,
        latent_dim=rng.choice((3, 5)),
        rope_dim=rotary or None,
        q_latent_dim=rng.choice((None, 5)),
        rope=hw.RoPE() if rotary else None,
        relative_bias=None,
        kv_bias=False,
        mask=hw.Causal(),
    )
    T = rng.choice((1, 5, 11))
    _compare(rng, layer, rng.choice((1, 2)), T, rng.choice(({}, {"max_length": T})))


def _compare(rng: random.Random, layer: hw.MultiHeadAttention, B: int, T: int, kind: dict[str, Any]) -> None:
    learning, most = not kind and rng.random() < 0.5, rng.choice((1, 4))
    with torch.set_grad_enabled(learning):
        x = torch.randn(B, T, layer.spec.d_model, dtype=torch.float64, requires_grad=learning)
        whole = layer(x)
        parts = _read(rng, layer, x, hw.KVCache(**kind), most)
        what = f"a layer with the cache {kind} in chunks of at most {most}"
        _same(parts, whole, 1e-9, what, (B, T, layer))
        if learning:
            weight = torch.randn_like(whole)
            gradients = (torch.autograd.grad((out * weight).sum(), x)[0] for out in (parts, whole))
            _same(*gradients, 1e-8, f"the gradient of {what}", (B, T, layer))


def _read(rng: random.Random, layer: hw.MultiHeadAttention, x: Tensor, cache: hw.KVCache, most: int) -> Tensor:
    parts, start = [], 0
    while start < x.shape[1]:
        size = rng.randint(1, most)
        parts.append(layer(x[:, start : start + size], cache=cache))
        start += size
    return torch.cat(parts, 1)


@torch.no_grad()
def _plan(rng: random.Random, layer: hw.MultiHeadAttention, B: int, T: int) -> None:
    """A cache with a plan, against the mask of the plan."""
    keep = [rng.choice((None, hw.Keep(rng.randrange(3), rng.randrange(1, 6)))) for _ in range(layer.spec.n_kv_heads)]
    x = torch.randn(B, T, layer.spec.d_model, dtype=torch.float64)
    whole = layer(x, mask=hw.Plan((tuple(keep),)).mask(0, layer.spec.n_heads))
    most = rng.choice((1, 4))
    parts = _read(rng, layer, x, hw.KVCache(plan=keep), most)
    _same(parts, whole, 1e-9, f"a layer with the plan {keep} in chunks of at most {most}", (B, T, layer))


@torch.no_grad()
def watch(rng: random.Random) -> None:
    """What `watch` says of a layer, and what the layer gives, against its whole maps."""
    mask: hw.Mask = rng.choice((hw.Causal(), hw.Window(4, 0), hw.Causal() & hw.Alibi()))
    layer = _layer(rng, mask=mask, out_proj=True)
    T = rng.choice((2, 7, 23))
    x = torch.randn(1, T, layer.spec.d_model, dtype=torch.float64)
    kept: list[Any] = []
    layer.watchers.append(lambda call: kept.append(call))  # type: ignore[arg-type]
    with hw.watch(layer) as seen:
        out = layer(x)
    call = kept[0]
    trace = hw.trace(call.q, call.k, call.v, **call.options._asdict())
    _same(layer.o_proj(trace.out.transpose(1, 2).flatten(2)), out, 1e-9, "what a layer gives", (T, layer))
    expected = dense.row_statistics(trace.weights[0])
    for head in range(layer.spec.n_heads):
        wanted = {name: values[head] for name, values in expected.items()}
        what = f"head {head} of {layer} on {T} tokens".replace("\n", " ")
        dense.assert_rows(seen[f"L0.H{head}"].rows, wanted, T, what)
