"""The rungs of the ladder: twelve ways to compute one causal attention layer.

Each is prepared from sizes and leaves (W_Q, W_K, W_V, W_O, x) in its own kind of array, and called with x; asked to, it
keeps its steps. Weights are handed to torch's modules as plain tensors: gradients reach the leaves. Axis letters as in
`headwise.spec`. A matrix is (out,in): y = W x.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise.lab.courses.numpy_layer import attend_batched, attend_einsum, attend_loop, causal_mask
from headwise.lab.courses.stacked import MultiHeadAttn, MultiHeadedAttentionWrapper
from headwise.layer.layer import MultiHeadAttention
from headwise.masks import Causal
from headwise.models.hook import observe
from headwise.records import Call, LadderSizes, Watchable
from headwise.rungs import trace
from headwise.rungs.autograd import dot
from headwise.rungs.cache import KVCache
from headwise.words import Note, key_of

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
    parameters: Callable[[LadderSizes], int] = lambda n: 2 * n.d_model * (n.d_model + n.kv_width)


def _plain(shared: bool, n: LadderSizes, w: Leaves) -> Forward:
    """Loops over lists. Not shared: every query head is handed keys and values of its own, a copy of its group's."""

    def linear(matrix: Any, x_btc: Any) -> Any:
        return [[[dot(row, token) for row in matrix] for token in document] for document in x_btc]

    def split(x_btc: Any, count: int) -> Any:
        d = n.d_model // n.n_heads
        return [[[token[h * d : (h + 1) * d] for token in document] for h in range(count)] for document in x_btc]

    def forward(x: Any, keep: Keep | None) -> Any:
        q = split(linear(w["W_Q"], x), n.n_heads)
        k, v = (split(linear(w[name], x), n.n_kv_heads) for name in ("W_K", "W_V"))
        if not shared:
            group = n.n_heads // n.n_kv_heads
            k, v = ([[document[h // group] for h in range(n.n_heads)] for document in kv] for kv in (k, v))
        steps = trace(q, k, v, mask=Causal())
        joined = [[[y for head in document for y in head[t]] for t in range(n.tokens)] for document in steps.out]
        if keep is not None:
            keep.update(q=q, k=k, v=v, scores=steps.scores, weights=steps.weights, heads=steps.out, joined=joined)
        return linear(w["W_O"], joined)

    return forward


def _split(x_btc: Any, count: int) -> Any:
    """(B,T,h*d) -> (B,h,T,d), in NumPy and in torch."""
    B, T, width = x_btc.shape
    return x_btc.reshape(B, T, count, width // count).swapaxes(1, 2)


def _arrays(attend: Callable[..., Any], n: LadderSizes, w: Leaves) -> Forward:
    """Products of whole arrays, NumPy or torch, around an attention that gives scores, weights and heads."""
    mask = causal_mask(n.tokens) if isinstance(w["W_Q"], np.ndarray) else None

    def forward(x: Any, keep: Keep | None) -> Any:
        q = _split(x @ w["W_Q"].T, n.n_heads)
        k, v = (_split(x @ w[name].T, n.n_kv_heads) for name in ("W_K", "W_V"))
        scores, weights, heads = attend(q, k, v, mask)
        joined = heads.swapaxes(1, 2).reshape(n.batch, n.tokens, n.d_model)
        if keep is not None:
            keep.update(q=q, k=k, v=v, scores=scores, weights=weights, heads=heads, joined=joined)
        return joined @ w["W_O"].T

    return forward


def _loop(q: Array, k: Array, v: Array, mask: Array) -> tuple[Array, ...]:
    documents = [attend_loop(*qkv, mask) for qkv in zip(q, k, v, strict=True)]
    return tuple(np.stack(step) for step in zip(*documents, strict=True))


def _traced(q: Any, k: Any, v: Any, _: Any) -> tuple[Any, ...]:
    steps = trace(q, k, v, mask=Causal())
    return steps.scores, steps.weights, steps.out


def _give(module: Any, weight: Tensor, name: str = "weight") -> None:
    """A weight as a plain tensor instead of a Parameter, so that gradients flow on to where it was cut from."""
    delattr(module, name)
    object.__setattr__(module, name, weight)


class _Softmaxes(TorchFunctionMode):
    """What `torch.softmax` is given and gives while the block runs: the maps of a class that spells attention out."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[Tensor] = []
        self.weights: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.softmax:
            self.scores.append(args[0])
            self.weights.append(result)
        return result


def _module(layer: MultiHeadAttention | Watchable, projection: nn.Linear, run: Callable[[Tensor], Tensor]) -> Forward:
    """Watchers are told q, k, v and heads; `joined` is what W_O is given."""

    def forward(x: Tensor, keep: Keep | None) -> Tensor:
        if keep is None:
            return run(x)
        calls: list[Call] = []
        joined: list[Tensor] = []
        hook = projection.register_forward_pre_hook(lambda _, inputs: joined.append(inputs[0]))
        with observe(layer, calls.append), _Softmaxes() as maps:
            output = run(x)
        hook.remove()
        q, heads = (torch.cat([getattr(call, name) for call in calls], 2) for name in ("q", "out"))
        k, v = calls[-1].k, calls[-1].v  # of all tokens: a cache holds those of the calls before
        keep.update(q=q, k=k, v=v, heads=heads, joined=torch.cat(joined, 1))
        if maps.scores:
            keep.update(scores=_all_heads(maps.scores), weights=_all_heads(maps.weights))
        return output

    return forward


def _all_heads(maps: list[Tensor]) -> Tensor:
    return maps[0] if maps[0].ndim == 4 else torch.stack(maps, 1)


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    _give(linear, weight)
    return linear


def _stacked(n: LadderSizes, w: Leaves) -> Forward:
    d, group = n.d_model // n.n_heads, n.n_heads // n.n_kv_heads
    wrapper = MultiHeadedAttentionWrapper(n.d_model, d, n.tokens, 0.0, n.n_heads)
    for h, head in enumerate(wrapper.heads):
        for name, leaf, place in (("W_query", "W_Q", h), ("W_key", "W_K", h // group), ("W_value", "W_V", h // group)):
            setattr(head, name, _linear(w[leaf][place * d : (place + 1) * d]))
    projection = _linear(w["W_O"])
    return _module(wrapper, projection, nn.Sequential(wrapper, projection))


def _vectorised(n: LadderSizes, w: Leaves) -> Forward:
    """Keys and values that a group shares are repeated in its weights."""
    layer = MultiHeadAttn(n.d_model, n.d_model, n.tokens, 0.0, n.n_heads)
    d, group = n.d_model // n.n_heads, n.n_heads // n.n_kv_heads
    for name, leaf, times in (("W_query", "W_Q", 1), ("W_key", "W_K", group), ("W_value", "W_V", group)):
        repeated = w[leaf].reshape(-1, d, n.d_model).repeat_interleave(times, 0)
        setattr(layer, name, _linear(repeated.reshape(n.d_model, n.d_model)))
    layer.out_proj = _linear(w["W_O"])
    return _module(layer, layer.out_proj, layer)


def _layer(cached: bool, n: LadderSizes, w: Leaves) -> Forward:
    layer = MultiHeadAttention(n.d_model, n.n_heads, n.n_kv_heads, mask=Causal())
    for name, leaf in (("q_proj", "W_Q"), ("k_proj", "W_K"), ("v_proj", "W_V"), ("o_proj", "W_O")):
        setattr(layer, name, _linear(w[leaf]))
    assert layer.o_proj is not None

    def decode(x: Tensor) -> Tensor:
        cache = KVCache()
        return torch.cat([layer(token, cache=cache) for token in torch.split(x, 1, dim=1)], 1)

    return _module(layer, layer.o_proj, decode if cached else layer)


def _torch_nn(n: LadderSizes, w: Leaves) -> Forward:
    layer = nn.MultiheadAttention(n.d_model, n.n_heads, bias=False, batch_first=True).eval()
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


def _for_each_head(n: LadderSizes) -> int:
    return 4 * n.d_model**2


def _rung(name: str, kind: str, prepare: Callable[[LadderSizes, Leaves], Forward], **more: Any) -> Rung:
    return Rung(name, Note.of(key_of("ladder", f"how {name}")), kind, prepare, **more)


RUNGS = (
    _rung("plain", "plain", partial(_plain, False)),
    _rung("plain GQA", "plain", partial(_plain, True)),
    _rung("stacked heads", "tensor", _stacked, parameters=_for_each_head),
    _rung("course class", "tensor", _vectorised, parameters=_for_each_head),
    _rung("NumPy loop", "array", partial(_arrays, _loop)),
    _rung("NumPy batched", "array", partial(_arrays, attend_batched)),
    _rung("NumPy einsum", "array", partial(_arrays, attend_einsum)),
    _rung("NumPy attend", "array", partial(_arrays, _traced)),
    _rung("torch explicit", "tensor", partial(_arrays, _traced)),
    _rung("torch fused", "tensor", partial(_layer, False)),
    _rung("torch.nn", "tensor", _torch_nn, grouped=False),
    _rung("cached decode", "tensor", partial(_layer, True)),
)
