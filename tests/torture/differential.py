"""Random calls, plain against array against tensor, values and gradients; layers whole, chunked and one by one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from children import FailedError
from torch import Tensor

import headwise as hw

# Errors of float64 through a softmax of some 20 keys, of half precision in storage alone, and in between.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 8e-2, torch.float16: 2e-2}


def prepare(base: Path) -> None:
    torch.set_num_threads(1)


def case(seed: int, place: Path, base: Path) -> str:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kind = rng.choices(("attend", "layer", "watch"), (8, 2, 1))[0]
    {"attend": _attend, "layer": _layer, "watch": _watch}[kind](rng)
    return kind


def _mask(rng: random.Random, B: int, H: int, T: int, S: int) -> tuple[Any, Any]:
    """A mask of 0 to 3 parts, in torch and in NumPy."""
    torch_parts: list[Any] = []
    array_parts: list[Any] = []
    for name in rng.sample(["causal", "window", "lengths", "segments", "allowed", "bias", "alibi"], rng.randrange(4)):
        offset = rng.choice([None, 0, rng.randrange(-3, 9)])
        made: tuple[Any, Any]
        if name == "causal":
            made = (hw.Causal(offset),) * 2
        elif name == "window":
            made = (hw.Window(rng.choice([None, 0, 1, 5]), rng.choice([None, 0, 2]), offset),) * 2
        elif name == "lengths":
            lengths = torch.randint(0, S + 1, (B,))
            made = hw.Lengths(lengths), hw.Lengths(lengths.numpy())
        elif name == "segments":
            q_ids, k_ids = torch.randint(0, 2, (B, T)), torch.randint(0, 2, (B, S))
            made = hw.Segments(q_ids, k_ids), hw.Segments(q_ids.numpy(), k_ids.numpy())
        elif name == "allowed":
            allowed = torch.rand(rng.choice([(T, S), (B, 1, T, S), (1, H, 1, S), (B, H, T, S)])) < 0.7
            made = hw.Allowed(allowed), hw.Allowed(allowed.numpy())
        elif name == "bias":
            bias = torch.randn(rng.choice([(T, S), (B, H, T, S), (1, H, 1, 1)]), dtype=torch.float64)
            made = hw.Bias(bias), hw.Bias(bias.numpy())
        else:
            made = (hw.Alibi(),) * 2
        torch_parts.append(made[0])
        array_parts.append(made[1])
    if not torch_parts:
        return None, None
    both = []
    for parts in (torch_parts, array_parts):
        mask = parts[0]
        for part in parts[1:]:
            mask = mask & part
        both.append(mask)
    return both[0], both[1]


def _attend(rng: random.Random) -> None:
    B, G, T, D, E = (rng.choice(sizes) for sizes in ((1, 2), (1, 2, 3), (1, 2, 5, 11), (1, 4, 7), (1, 3, 4, 8)))
    H, S = rng.choice((1, 2, 4, 5)), rng.choice((1, T, T + 3, 13))
    kv_index = None if H % G == 0 and rng.random() < 0.7 else [rng.randrange(G) for _ in range(H)]
    dtype = rng.choice((torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16))
    q, k, v = (
        torch.randn(shape, dtype=torch.float64).to(dtype) for shape in ((B, H, T, D), (B, G, S, D), (B, G, S, E))
    )
    if rng.random() < 0.1:
        q[0, 0, 0, 0] = float("nan")
    mask, array_mask = _mask(rng, B, H, T, S)
    options: dict[str, Any] = {
        "scale": rng.choice((None, None, 0.5, 0.0, -0.3)),
        "softcap": rng.choice((None, None, 3.0)),
        "kv_index": kv_index,
    }
    heads = {name: torch.randn(H, dtype=torch.float64) for name in ("sink", "gate") if rng.random() < 0.3}
    given = (B, G, H, T, S, D, E, dtype, mask, options, sorted(heads))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    out = hw.attend(*exact, mask, **options, **heads)
    tensor = hw.attend(q, k, v, mask, **options, **{name: x.to(dtype) for name, x in heads.items()})
    _same(tensor, out, TOLERANCE[dtype], "tensor", given)
    arrays = [x.detach().numpy() for x in exact]
    array = hw.attend(*arrays, array_mask, **options, **{name: x.numpy() for name, x in heads.items()})
    _same(torch.from_numpy(np.asarray(array)), out, 1e-10, "array", given)
    if B * H * T * S <= 60 and mask is None:
        lists = [x.tolist() for x in arrays]
        plain = hw.attend(*lists, **options, **{name: x.tolist() for name, x in heads.items()})
        _same(torch.tensor(plain, dtype=torch.float64), out, 1e-10, "plain", given)
    trace = hw.trace(*exact, mask, **options, **heads)
    _same(trace.out, out, 1e-10, "trace", given)
    if exact[0].isnan().any():
        return  # what a NaN reaches has no gradient worth comparing
    weight = torch.randn_like(out)
    fused = torch.autograd.grad((out * weight).sum(), exact)
    explicit = torch.autograd.grad((trace.out * weight).sum(), exact)
    for name, a, b in zip("qkv", fused, explicit, strict=True):
        _same(a, b, 1e-8, f"gradient of {name}", given)


def _same(got: Tensor, wanted: Tensor, tolerance: float, name: str, given: object) -> None:
    got, wanted = got.detach().double(), wanted.detach().double()
    if got.shape != wanted.shape or not torch.allclose(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True):
        largest = "" if got.shape != wanted.shape else f", largest difference {(got - wanted).abs().max():.3g}"
        raise FailedError(f"{name} differs{largest}: {given}".replace("\n", " "))


def _layer(rng: random.Random) -> None:
    """A causal layer reads a text whole, in chunks and one by one."""
    G = rng.choice((1, 2))
    H, D = G * rng.choice((1, 3)), rng.choice((2, 4))
    window = rng.choice((None, 3))
    layer = (
        hw.MultiHeadAttention(
            rng.choice((6, 12)),
            H,
            G,
            head_dim=D,
            mask=hw.Causal() if window is None else hw.Window(window, 0),
            rope=rng.choice((None, hw.RoPE())),
            qk_norm=rng.random() < 0.5,
            softcap=rng.choice((None, 5.0)),
            sink=rng.random() < 0.3,
            q_bias=rng.random() < 0.5,
        )
        .double()
        .eval()
    )
    B, T = rng.choice((1, 2)), rng.choice((1, 5, 11))
    x = torch.randn(B, T, layer.spec.d_model, dtype=torch.float64)
    whole = layer(x)
    for most in (1, 4):
        cache, parts, start = hw.KVCache(), [], 0
        while start < T:
            size = rng.randint(1, most)
            parts.append(layer(x[:, start : start + size], cache=cache))
            start += size
        _same(torch.cat(parts, 1), whole, 1e-9, f"a layer in chunks of at most {most}", layer)


def _watch(rng: random.Random) -> None:
    """What `watch` says of a layer, against its whole maps."""
    layer = hw.MultiHeadAttention(12, 3, mask=hw.Causal(), rope=rng.choice((None, hw.RoPE()))).double().eval()
    x = torch.randn(1, rng.choice((2, 7, 23)), 12, dtype=torch.float64)
    kept: list[Any] = []
    layer.watchers.append(lambda call: kept.append(call))  # type: ignore[arg-type]
    with hw.watch(layer) as seen:
        layer(x)
    call = kept[0]
    weights = hw.trace(call.q, call.k, call.v, **call.options._asdict()).weights[0]
    for head in range(3):
        rows = torch.as_tensor(np.asarray(seen[f"L0.H{head}"].rows.entropy))
        _same(rows, torch.special.entr(weights[head]).sum(-1), 1e-4, "entropy of a watched head", (x.shape, layer))
