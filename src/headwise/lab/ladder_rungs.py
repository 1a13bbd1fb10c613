"""The rungs of the ladder: twelve ways to compute one causal attention layer from the same weights.

Each is prepared from sizes and leaves (W_Q, W_K, W_V, W_O, x) in its own kind of array, and then called with x. When it
is asked to keep its steps it writes those that it hands out; when it is timed it keeps nothing. In torch, weights are
handed to modules as plain tensors, so that gradients reach the leaves they were cut from.

Axis letters as in `headwise.spec`. A matrix is (out,in), as in torch's Linear: y = W x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.lab.courses.numpy_layer import attend_batched, attend_einsum, attend_loop
from headwise.lab.courses.stacked import CausalAttention, MultiHeadAttentionWrapper, MultiHeadAttn
from headwise.layer.layer import MultiHeadAttention
from headwise.masks import Causal
from headwise.records import LadderSizes
from headwise.rungs import trace
from headwise.rungs.autograd import dot
from headwise.rungs.cache import KVCache

Array = NDArray[Any]
Leaves = Mapping[str, Any]
Keep = dict[str, Any]  # stage -> q (B,H,T,D), k and v (B,G|H,T,D), scores, weights (B,H,T,T), heads (B,H,T,D), joined
Forward = Callable[[Any, Keep | None], Any]  # x (B,T,C) -> output (B,T,C); with None no step is kept


@dataclass(frozen=True)
class Rung:
    """A way to compute the layer. `prepare` gets the sizes and the leaves, and returns what is then called with x."""

    name: str
    how: str
    kind: str  # "plain" (nested lists), "array" (NumPy) or "tensor" (torch)
    prepare: Callable[[LadderSizes, Leaves], Forward]
    grouped: bool = True  # can it run fewer key/value heads than query heads?


def _keep(keep: Keep | None, **stages: Any) -> None:
    if keep is not None:
        keep.update(stages)


def _plain(shared: bool, n: LadderSizes, w: Leaves) -> Forward:
    """Loops over lists. Not shared: every query head is handed keys and values of its own, a copy of its group's."""

    def linear(matrix: Any, x_btc: Any) -> Any:
        return [[[dot(row, token) for row in matrix] for token in document] for document in x_btc]

    def split(x_btc: Any, count: int) -> Any:
        d = n.width // n.heads
        return [[[token[h * d : (h + 1) * d] for token in document] for h in range(count)] for document in x_btc]

    def forward(x: Any, keep: Keep | None) -> Any:
        q = split(linear(w["W_Q"], x), n.heads)
        k, v = (split(linear(w[name], x), n.kv_heads) for name in ("W_K", "W_V"))
        if not shared:
            group = n.heads // n.kv_heads
            k, v = ([[document[h // group] for h in range(n.heads)] for document in kv] for kv in (k, v))
        steps = trace(q, k, v, mask=Causal())
        joined = [[[y for head in document for y in head[t]] for t in range(n.tokens)] for document in steps.out]
        _keep(keep, q=q, k=k, v=v, scores=steps.scores, weights=steps.weights, heads=steps.out, joined=joined)
        return linear(w["W_O"], joined)

    return forward


def _split(x_btc: Any, count: int) -> Any:
    """(B,T,h*d) -> (B,h,T,d), in NumPy and in torch."""
    B, T, width = x_btc.shape
    return x_btc.reshape(B, T, count, width // count).swapaxes(1, 2)


def _arrays(attend: Callable[..., Any], n: LadderSizes, w: Leaves) -> Forward:
    """Products of whole arrays, NumPy or torch, around an attention that gives scores, weights and heads."""
    mask = None
    if isinstance(w["W_Q"], np.ndarray):
        mask = np.where(np.tri(n.tokens, dtype=bool), 0, -np.inf).astype(w["W_Q"].dtype)

    def forward(x: Any, keep: Keep | None) -> Any:
        q = _split(x @ w["W_Q"].T, n.heads)
        k, v = (_split(x @ w[name].T, n.kv_heads) for name in ("W_K", "W_V"))
        scores, weights, heads = attend(q, k, v, mask)
        joined = heads.swapaxes(1, 2).reshape(n.batch, n.tokens, n.width)
        _keep(keep, q=q, k=k, v=v, scores=scores, weights=weights, heads=heads, joined=joined)
        return joined @ w["W_O"].T

    return forward


def _loop(q: Array, k: Array, v: Array, mask: Array) -> tuple[Array, ...]:
    documents = [attend_loop(*one, mask) for one in zip(q, k, v, strict=True)]
    return tuple(np.stack(step) for step in zip(*documents, strict=True))


def _traced(q: Any, k: Any, v: Any, _: Any) -> tuple[Any, ...]:
    steps = trace(q, k, v, mask=Causal())
    return steps.scores, steps.weights, steps.out


def _give(module: Any, weight: Tensor, name: str = "weight") -> None:
    """A weight as a plain tensor instead of a Parameter, so that gradients flow on to where it was cut from."""
    delattr(module, name)
    object.__setattr__(module, name, weight)


@contextmanager
def _listening(keep: Keep | None, places: Mapping[str, tuple[nn.Module, str]]) -> Iterator[dict[str, list[Tensor]]]:
    """What goes in or comes out of modules while the block runs, one entry for each call; nothing without `keep`."""
    heard: dict[str, list[Tensor]] = {name: [] for name in places}

    def listen(name: str, side: str, _: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
        heard[name].append(given[0] if side == "in" else made)

    listed = places if keep is not None else {}
    hooks = [module.register_forward_hook(partial(listen, name, side)) for name, (module, side) in listed.items()]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def _stacked(n: LadderSizes, w: Leaves) -> Forward:
    """The wrapper of separate heads, each of width C/h, and a projection."""
    d, group = n.width // n.heads, n.heads // n.kv_heads
    wrapper = MultiHeadAttentionWrapper(n.width, d, n.tokens, 0.0, n.heads)
    places: dict[str, tuple[nn.Module, str]] = {}
    for h, head in enumerate(wrapper.heads):
        assert isinstance(head, CausalAttention)
        for module, name, own in (
            (head.W_query, "W_Q", h),
            (head.W_key, "W_K", h // group),
            (head.W_value, "W_V", h // group),
        ):
            _give(module, w[name][own * d : (own + 1) * d])
        places |= {f"q {h}": (head.W_query, "out"), f"k {h}": (head.W_key, "out"), f"v {h}": (head.W_value, "out")}
        places |= {f"scores {h}": (head.softmax, "in"), f"weights {h}": (head.softmax, "out")}
        places[f"heads {h}"] = (head, "out")

    def forward(x: Tensor, keep: Keep | None) -> Tensor:
        with _listening(keep, places) as heard:
            joined: Tensor = wrapper(x)
        if keep is not None:
            for name in ("q", "k", "v", "scores", "weights", "heads"):
                keep[name] = torch.stack([heard[f"{name} {h}"][0] for h in range(n.heads)], 1)
            keep["joined"] = joined
        output: Tensor = joined @ w["W_O"].T
        return output

    return forward


def _vectorised(n: LadderSizes, w: Leaves) -> Forward:
    """The course's class; keys and values that a group shares are repeated in its weights."""
    layer = MultiHeadAttn(n.width, n.width, n.tokens, 0.0, n.heads)
    d, group = n.width // n.heads, n.heads // n.kv_heads
    for module, name, times in ((layer.W_query, "W_Q", 1), (layer.W_key, "W_K", group), (layer.W_value, "W_V", group)):
        _give(module, w[name].reshape(-1, d, n.width).repeat_interleave(times, 0).reshape(n.width, n.width))
    _give(layer.out_proj, w["W_O"])
    layer.out_proj.register_parameter("bias", None)
    places: dict[str, tuple[nn.Module, str]] = {"scores": (layer.softmax, "in"), "weights": (layer.softmax, "out")}
    places |= {"q": (layer.W_query, "out"), "k": (layer.W_key, "out"), "v": (layer.W_value, "out")}
    places["joined"] = (layer.out_proj, "in")

    def forward(x: Tensor, keep: Keep | None) -> Tensor:
        with _listening(keep, places) as heard:
            out: Tensor = layer(x)
        if keep is not None:
            keep.update({name: parts[0] for name, parts in heard.items()})
            keep.update({name: _split(keep[name], n.heads) for name in ("q", "k", "v")})
            keep["heads"] = _split(keep["joined"], n.heads)
        return out

    return forward


def _layer(cached: bool, n: LadderSizes, w: Leaves) -> Forward:
    """headwise's layer, which takes the fused kernel; cached: a token at a time."""
    layer = MultiHeadAttention(n.width, n.heads, n.kv_heads, mask=Causal())
    assert layer.o_proj is not None
    for module, name in ((layer.q_proj, "W_Q"), (layer.k_proj, "W_K"), (layer.v_proj, "W_V"), (layer.o_proj, "W_O")):
        _give(module, w[name])
    places: dict[str, tuple[nn.Module, str]] = {"q": (layer.q_proj, "out"), "k": (layer.k_proj, "out")}
    places |= {"v": (layer.v_proj, "out"), "joined": (layer.o_proj, "in")}

    def forward(x: Tensor, keep: Keep | None) -> Tensor:
        with _listening(keep, places) as heard:
            if cached:
                cache = KVCache()
                out: Tensor = torch.cat([layer(token, cache=cache) for token in torch.split(x, 1, dim=1)], 1)
            else:
                out = layer(x)
        if keep is not None:
            keep.update({name: torch.cat(parts, 1) for name, parts in heard.items()})
            keep.update({name: _split(keep[name], n.kv_heads) for name in ("k", "v")})
            keep.update(q=_split(keep["q"], n.heads), heads=_split(keep["joined"], n.heads))
        return out

    return forward


def _torch_nn(n: LadderSizes, w: Leaves) -> Forward:
    layer = nn.MultiheadAttention(n.width, n.heads, bias=False, batch_first=True).eval()
    _give(layer, torch.cat([w["W_Q"], w["W_K"], w["W_V"]]), "in_proj_weight")
    _give(layer.out_proj, w["W_O"])
    later = torch.ones(n.tokens, n.tokens, dtype=torch.bool).triu(1)

    def forward(x: Tensor, keep: Keep | None) -> Tensor:
        out: Tensor
        if keep is None:
            out, _ = layer(x, x, x, attn_mask=later, is_causal=True, need_weights=False)
        else:
            out, keep["weights"] = layer(x, x, x, attn_mask=later, average_attn_weights=False)
        return out

    return forward


RUNGS = (
    Rung("plain", "loops over lists; the definition", "plain", partial(_plain, False)),
    Rung("plain GQA", "the same; heads of a group read one K and V", "plain", partial(_plain, True)),
    Rung("stacked heads", "a module for each head, then a projection", "tensor", _stacked),
    Rung("course class", "one module, scores and weights in full", "tensor", _vectorised),
    Rung("NumPy loop", "a matrix product for each head", "array", partial(_arrays, _loop)),
    Rung("NumPy batched", "all heads in one product", "array", partial(_arrays, attend_batched)),
    Rung("NumPy einsum", "the same by the names of axes", "array", partial(_arrays, attend_einsum)),
    Rung("NumPy attend", "headwise.attend on arrays", "array", partial(_arrays, _traced)),
    Rung("torch explicit", "headwise.trace on tensors, every step kept", "tensor", partial(_arrays, _traced)),
    Rung("torch fused", "headwise.MultiHeadAttention, one kernel", "tensor", partial(_layer, False)),
    Rung("torch.nn", "torch.nn.MultiheadAttention", "tensor", _torch_nn, grouped=False),
    Rung("cached decode", "torch fused, a token at a time, KVCache", "tensor", partial(_layer, True)),
)
