"""Heads as objects: hand one out, take some away."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.layer.projections import AttentionLayer
from headwise.table import amount, listed, plural
from headwise.words import unknown

LayerT = TypeVar("LayerT", bound=AttentionLayer)

# What a head hands out and takes: the parameter of the layer, the axis along which heads lie in it, and the field of
# the spec with the length of one head there.
PARTS = {
    "wq": ("q_proj.weight", 0, "head_dim"),
    "wk": ("k_proj.weight", 0, "head_dim"),
    "wv": ("v_proj.weight", 0, "value_dim"),
    "wo": ("o_proj.weight", 1, "value_dim"),
    "bq": ("q_proj.bias", 0, "head_dim"),
    "bk": ("k_proj.bias", 0, "head_dim"),
    "bv": ("v_proj.bias", 0, "value_dim"),
    "sink": ("sink", 0, None),
}
KV_PARTS = ("k_proj", "v_proj")  # these lie by key/value head


class Heads:
    """Heads of a layer, in order: `heads[3]`, `heads[-1]`, `heads["H3"]`, `len(heads)`, `for head in heads`.

    A slice, `heads[1:3]`, gives a list.
    """

    def __init__(self, layer: AttentionLayer) -> None:
        self._layer = layer

    def __len__(self) -> int:
        return self._layer.spec.n_heads

    @overload
    def __getitem__(self, key: int | str) -> Head: ...

    @overload
    def __getitem__(self, key: slice) -> list[Head]: ...

    def __getitem__(self, key: int | str | slice) -> Head | list[Head]:
        count = len(self)
        if isinstance(key, slice):
            return [*self][key]
        if isinstance(key, str):
            names = [head.name for head in self]
            if key not in names:
                offer = f"there are {names[0]} to {names[-1]}"
                raise unknown(f"there is no head {key!r}", key, names, offer=offer)
            key = names.index(key)
        place = operator.index(key)
        if not -count <= place < count:
            raise HeadwiseError(
                f"there is no head {place}; the layer has {count}, counted from 0"
            )
        return Head(self._layer, place % count)

    def __iter__(self) -> Iterator[Head]:
        return (Head(self._layer, index) for index in range(len(self)))


@dataclass(frozen=True)
class HeadCost:
    """What one head costs. The key/value head that it reads is counted whole; `shared_by` says how many read it.

    parameters     its rows of W_Q and columns of W_O, d_in * d + e * d_out, with bias and sink
    kv_parameters  rows of W_K and W_V of its key/value head, d_context * d + d_values * e, with biases
    cache_bytes    for each token that its key/value head keeps, (d + e) numbers
    shared_by      query heads that read this key/value head, itself included
    """

    parameters: int
    kv_parameters: int
    cache_bytes: int
    shared_by: int

    def __str__(self) -> str:
        others = "" if self.shared_by == 1 else f", shared by {self.shared_by} heads"
        return (
            f"{plural(self.parameters, 'parameter')} of its own; key/value head: "
            f"{plural(self.kv_parameters, 'parameter')} and {amount(self.cache_bytes)} of cache a token"
            f"{others}"
        )


class Head:
    """One head's own weights, as views of the layer's. Assigning to one writes into the layer.

    wq (d, d_in), wk (d, d_context), wv (e, d_values), wo (d_out, e): y = W x. bq (d,), bk (d,), bv (e,) and
    sink () are None where the layer has none, and so is wo without output projection. Query heads of one group share wk
    and wv, so writing one writes all of them; `shared_with` names them.
    """

    # Declared for the type checker; __getattr__ makes the weights when they are asked for.
    layer: AttentionLayer
    index: int
    wq: Tensor
    wk: Tensor
    wv: Tensor
    wo: Tensor | None
    bq: Tensor | None
    bk: Tensor | None
    bv: Tensor | None
    sink: Tensor | None

    def __init__(self, layer: AttentionLayer, index: int) -> None:
        # past __setattr__, which takes weights alone
        vars(self).update(layer=layer, index=index)

    @property
    def name(self) -> str:
        """`H3` is head 3, counted from 0."""
        return f"H{self.index}"

    @property
    def kv_index(self) -> int:
        """The key/value head that this head reads."""
        return self.layer.spec.kv_index[self.index]

    @property
    def shared_with(self) -> tuple[int, ...]:
        """The other query heads that read the same key/value head."""
        index = self.layer.spec.kv_index
        return tuple(
            h for h, g in enumerate(index) if g == self.kv_index and h != self.index
        )

    def __getattr__(self, name: str) -> Any:
        """The head's slice of one parameter; None where the layer has no such parameter."""
        if name not in PARTS:
            raise AttributeError(f"'Head' object has no attribute {name!r}")
        path, axis, size = PARTS[name]
        parameter = _parameter(self.layer, path)
        if parameter is None:
            return None
        index = self.kv_index if path.startswith(KV_PARTS) else self.index
        # one entry for each head along that axis, not a block of rows or columns
        if size is None:
            return parameter.select(axis, index)
        width = getattr(self.layer.spec, size)
        return parameter.narrow(axis, index * width, width)

    @property
    def qk(self) -> Tensor:
        """W_Q^T W_K (d_in, d_context), the bilinear form of the scores: q.k = x_i qk y_j, x_i of x and y_j of context.

        That is before the scale, and without biases, qk-norm and RoPE, where the layer has them. Elhage et al. 2021,
        "A Mathematical Framework for Transformer Circuits".
        """
        return self.wq.T @ self.wk

    @property
    def ov(self) -> Tensor | None:
        """W_O W_V (d_out, d_values): what the head writes for a token that it attends to, without biases.

        None without output projection. Elhage et al. 2021.
        """
        return None if self.wo is None else self.wo @ self.wv

    @property
    def cost(self) -> HeadCost:
        """Parameters and cache; see `HeadCost`."""
        spec = self.layer.spec
        parameters = spec.query_head_parameters
        kv_parameters = spec.kv_head_parameters
        cache_bytes = spec.cache_values_per_token * self.wq.element_size()
        return HeadCost(
            parameters,
            kv_parameters,
            cache_bytes // spec.n_kv_heads,
            1 + len(self.shared_with),
        )

    def __setattr__(self, name: str, value: Tensor) -> None:
        if name not in PARTS:
            raise HeadwiseError(
                f"a head has no {name!r} to write; it has {', '.join(PARTS)}"
            )
        view = getattr(self, name)
        if view is None:
            raise HeadwiseError(
                f"head {self.index} has no {name}: the layer was built without it"
            )
        value = torch.as_tensor(value)
        if value.shape != view.shape:
            raise HeadwiseError(
                f"{name} of head {self.index} has shape {tuple(view.shape)}, not {tuple(value.shape)}"
            )
        with torch.no_grad():
            view.copy_(value)

    def __repr__(self) -> str:
        others = listed([f"H{index}" for index in self.shared_with], 3)
        return f"Head({self.name}, reads key/value head {self.kv_index}{others and f' with {others}'}; {self.cost})"


def without(layer: LayerT, heads: Sequence[int]) -> LayerT:
    """A layer without those query heads, and without the key/value heads that nobody reads any more.

    It computes what `layer` computes with gate 0 on them. Taking one query head of a group shrinks no cache: its
    keys and values are read by the others.
    """
    gone = {Heads(layer)[head].index for head in heads}
    kept = [h for h in range(layer.spec.n_heads) if h not in gone]
    if not kept:
        raise HeadwiseError(
            f"all {layer.spec.n_heads} heads are to go; a layer needs one"
        )
    return _selected(layer, kept)


@torch.no_grad()
def _selected(layer: LayerT, heads: list[int]) -> LayerT:
    """The layer of the given query heads, in that order, with copies of their weights."""
    old = layer.spec
    # in the order of first use
    kv_heads = list(dict.fromkeys(old.kv_index[h] for h in heads))
    spec = old.replace(
        n_heads=len(heads),
        n_kv_heads=len(kv_heads),
        # Each query head reads the key/value head that it read, by that one's new number.
        kv_index=tuple(kv_heads.index(old.kv_index[h]) for h in heads),
        mask=old.mask and old.mask.for_heads(heads, old.n_heads),
        d_out=old.d_out if old.out_proj else len(heads) * old.value_dim,
    )
    like = Heads(layer)[0].wq  # it refuses an adapter, which has no weight to copy
    new = (
        type(layer)
        .from_spec(spec, device=like.device, dtype=like.dtype)
        .train(layer.training)
    )
    for head, copied in zip(heads, Heads(new), strict=True):
        for name in PARTS:
            part = getattr(Head(layer, head), name)
            if part is not None:
                setattr(copied, name, part)
    of_heads = {path for path, _, _ in PARTS.values()}
    for path, parameter in new.named_parameters():
        if path not in of_heads:  # gains, and the bias of W_O
            parameter.copy_(_parameter(layer, path))
    return new


def _parameter(layer: AttentionLayer, path: str) -> Any:
    """A parameter by its name, such as "q_proj.weight"; None where the layer was built without it."""
    owner, _, name = path.rpartition(".")  # "sink" has no owner: it is the layer's own
    module = getattr(layer, owner, None) if owner else layer
    parameter = getattr(module, name, None)
    if name == "weight" and module and not isinstance(parameter, Tensor):
        raise HeadwiseError(
            f"{type(module).__name__} stands for a projection and has no weight to hand out"
        )
    return parameter
