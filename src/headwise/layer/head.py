"""Heads as objects: hand one out, take some away, put them in another order."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, unknown
from headwise.layer.display import head_html, heads_html, kv_head_of
from headwise.markup import BINARY, plural, scaled

if TYPE_CHECKING:
    from headwise.layer.layer import MultiHeadAttention


WRITABLE = ("wq", "wk", "wv", "wo", "bq", "bk", "bv", "sink", "relative_bias")


class Heads:
    """Heads of a layer, in order: `heads[3]`, `heads[-1]`, `heads["H3"]`, `len(heads)`, `for head in heads`.

    A slice, `heads[1:3]`, gives heads again, which keep their names.
    """

    def __init__(self, layer: MultiHeadAttention, indices: Sequence[int] | None = None) -> None:
        self._layer = layer
        self._indices = range(layer.spec.n_heads) if indices is None else indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, key: int | str) -> Head: ...

    @overload
    def __getitem__(self, key: slice) -> Heads: ...

    def __getitem__(self, key: int | str | slice) -> Head | Heads:
        if isinstance(key, slice):
            return Heads(self._layer, self._indices[key])
        if isinstance(key, str):
            names = [head.name for head in self]
            if key not in names:
                raise unknown(f"there is no head {key!r}", key, names, offer=f"there are {self._named()}")
            return self[names.index(key)]
        try:
            place = operator.index(key)
        except TypeError:
            raise HeadwiseError(f"heads[{key!r}]: a head is one whole number, or a name such as 'H3'") from None
        if not -len(self) <= place < len(self):
            whole = len(self) == self._layer.spec.n_heads
            raise HeadwiseError(
                f"there is no head {place}; {'the layer has' if whole else 'there are'} {len(self)}, counted from 0"
            )
        return Head(self._layer, self._indices[place])

    def __iter__(self) -> Iterator[Head]:
        return (Head(self._layer, index) for index in self._indices)

    def _named(self) -> str:
        names = [f"H{index}" for index in self._indices]
        return f"{names[0]} to {names[-1]}" if len(names) == self._layer.spec.n_heads > 2 else ", ".join(names)

    def __repr__(self) -> str:
        spec = self._layer.spec
        return f"Heads({self._named()}; the layer has {spec.n_heads}, and {plural(spec.n_kv_heads, 'key/value head')})"

    def _repr_html_(self) -> str:
        return heads_html(self)


@dataclass(frozen=True)
class HeadCost:
    """What one head costs. The key/value head that it reads is counted whole; `shared_by` says how many read it.

    parameters     its rows of W_Q and columns of W_O, d_in * d + e * d_out, with bias, sink and relative bias
    kv_parameters  rows of W_K and W_V of its key/value head, d_context * d + d_values * e, with biases
    cache_bytes    for each token that its key/value head keeps, (d + e) numbers
    shared_by      query heads that read this key/value head, itself included
    """

    parameters: int
    kv_parameters: int
    cache_bytes: int
    shared_by: int

    @property
    def parameter_share(self) -> float:
        """Parameters when each reader of the key/value head bears the same part of it."""
        return self.parameters + self.kv_parameters / self.shared_by

    @property
    def cache_share(self) -> float:
        """Bytes a token, the same way. Without this head the cache is smaller only if nobody else reads it."""
        return self.cache_bytes / self.shared_by

    def __str__(self) -> str:
        others = "" if self.shared_by == 1 else f", shared by {self.shared_by} heads"
        return (
            f"{plural(self.parameters, 'parameter')} of its own; key/value head: "
            f"{plural(self.kv_parameters, 'parameter')} and {scaled(self.cache_bytes, 1024, BINARY)} of cache a token"
            f"{others}"
        )


class Head:
    """One head's own weights, as views of the layer's. Assigning to one writes into the layer.

    wq (d, d_in), wk (d, d_context), wv (e, d_values), wo (d_out, e): y = W x. bq (d,), bk (d,), bv (e,), sink () and
    relative_bias (n_buckets,) are None where the layer has none, and so is wo without output projection. Query heads
    of one group share wk and wv, so writing one writes all of them; `shared_with` names them.
    """

    layer: MultiHeadAttention
    index: int

    def __init__(self, layer: MultiHeadAttention, index: int) -> None:
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
        return tuple(h for h, g in enumerate(index) if g == self.kv_index and h != self.index)

    @property
    def wq(self) -> Tensor:
        return _weight(self.layer.q_proj)[self._rows(self.index, self.layer.spec.head_dim)]

    @property
    def wk(self) -> Tensor:
        return _weight(self.layer.k_proj)[self._rows(self.kv_index, self.layer.spec.head_dim)]

    @property
    def wv(self) -> Tensor:
        return _weight(self.layer.v_proj)[self._rows(self.kv_index, self.layer.spec.value_dim)]

    @property
    def wo(self) -> Tensor | None:
        if self.layer.o_proj is None:
            return None
        return _weight(self.layer.o_proj)[:, self._rows(self.index, self.layer.spec.value_dim)]

    @property
    def bq(self) -> Tensor | None:
        return self._bias(self.layer.q_proj, self.index, self.layer.spec.head_dim)

    @property
    def bk(self) -> Tensor | None:
        return self._bias(self.layer.k_proj, self.kv_index, self.layer.spec.head_dim)

    @property
    def bv(self) -> Tensor | None:
        return self._bias(self.layer.v_proj, self.kv_index, self.layer.spec.value_dim)

    @property
    def sink(self) -> Tensor | None:
        return None if self.layer.sink is None else self.layer.sink[self.index]

    @property
    def relative_bias(self) -> Tensor | None:
        return None if self.layer.relative_bias is None else self.layer.relative_bias[:, self.index]

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
        of_query_head = (self.wq, self.wo, self.bq, self.sink, self.relative_bias)
        of_kv_head = (self.wk, self.wv, self.bk, self.bv)
        spec = self.layer.spec
        return HeadCost(
            parameters=sum(tensor.numel() for tensor in of_query_head if tensor is not None),
            kv_parameters=sum(tensor.numel() for tensor in of_kv_head if tensor is not None),
            cache_bytes=(spec.head_dim + spec.value_dim) * self.wk.element_size(),
            shared_by=1 + len(self.shared_with),
        )

    def __setattr__(self, name: str, value: Tensor) -> None:
        if name not in WRITABLE:
            raise HeadwiseError(f"a head has no {name!r} to write; it has {', '.join(WRITABLE)}")
        view = getattr(self, name)
        if view is None:
            raise HeadwiseError(f"head {self.index} has no {name}: the layer was built without it")
        value = torch.as_tensor(value)
        if value.shape != view.shape:
            raise HeadwiseError(f"{name} of head {self.index} has shape {tuple(view.shape)}, not {tuple(value.shape)}")
        with torch.no_grad():
            view.copy_(value)

    def __repr__(self) -> str:
        return f"Head({self.name}, reads key/value head {kv_head_of(self)}; {self.cost})"

    def _repr_html_(self) -> str:
        return head_html(self)

    @staticmethod
    def _rows(index: int, width: int) -> slice:
        return slice(index * width, (index + 1) * width)

    def _bias(self, linear: nn.Module, index: int, width: int) -> Tensor | None:
        bias = getattr(linear, "bias", None)
        return None if bias is None else bias[self._rows(index, width)]


def without(layer: MultiHeadAttention, heads: Sequence[int]) -> MultiHeadAttention:
    """A layer without those query heads, and without the key/value heads that nobody reads any more.

    It computes what `layer` computes with gate 0 on them. Taking one query head of a group shrinks no cache: its
    keys and values are read by the others.
    """
    gone = {_checked(layer, head) for head in heads}
    kept = [h for h in range(layer.spec.n_heads) if h not in gone]
    if not kept:
        raise HeadwiseError(f"all {layer.spec.n_heads} heads are to go; a layer needs one")
    return _selected(layer, kept)


def permuted(layer: MultiHeadAttention, order: Sequence[int]) -> MultiHeadAttention:
    """A layer whose head i is head order[i] of `layer`; key/value heads follow in the order in which they are read."""
    wanted = [_checked(layer, head) for head in order]
    if sorted(wanted) != list(range(layer.spec.n_heads)):
        raise HeadwiseError(
            f"order={list(order)} is no permutation of the {layer.spec.n_heads} heads 0 to {layer.spec.n_heads - 1}"
        )
    return _selected(layer, wanted)


def _checked(layer: MultiHeadAttention, head: int) -> int:
    return layer.heads[head].index


@torch.no_grad()
def _selected(layer: MultiHeadAttention, heads: list[int]) -> MultiHeadAttention:
    """The layer of the given query heads, in that order, with copies of their weights."""
    old = layer.spec
    kv_heads = list(dict.fromkeys(old.kv_index[h] for h in heads))  # in the order of first use
    spec = old.replace(
        n_heads=len(heads),
        n_kv_heads=len(kv_heads),
        kv_index=tuple(kv_heads.index(old.kv_index[h]) for h in heads),
        mask=None if old.mask is None else old.mask.for_heads(heads, old.n_heads),
        d_out=old.d_out if old.out_proj else len(heads) * old.value_dim,
    )
    weight = _weight(layer.q_proj)
    new = type(layer).from_spec(spec, device=weight.device, dtype=weight.dtype).train(layer.training)
    for name, owners, width in (
        ("q_proj", heads, old.head_dim),
        ("k_proj", kv_heads, old.head_dim),
        ("v_proj", kv_heads, old.value_dim),
    ):
        rows, linear = _places(owners, width, weight.device), getattr(layer, name)
        copies = {"weight": _weight(linear)[rows]}
        if linear.bias is not None:
            copies["bias"] = linear.bias[rows]
        getattr(new, name).load_state_dict(copies)
    if layer.o_proj is not None and new.o_proj is not None:
        new.o_proj.weight.copy_(_weight(layer.o_proj)[:, _places(heads, old.value_dim, weight.device)])
        if layer.o_proj.bias is not None:
            new.o_proj.bias.copy_(layer.o_proj.bias)
    for norm, copy in ((layer.q_norm, new.q_norm), (layer.k_norm, new.k_norm)):
        if norm is not None and copy is not None:
            copy.load_state_dict(norm.state_dict())
    if layer.sink is not None and new.sink is not None:
        new.sink.copy_(layer.sink[heads])
    if layer.relative_bias is not None and new.relative_bias is not None:
        new.relative_bias.copy_(layer.relative_bias[:, heads])
    return new


def _places(owners: Sequence[int], width: int, device: torch.device) -> Tensor:
    """The rows of a stacked matrix that belong to these heads."""
    return (torch.tensor(owners, device=device)[:, None] * width + torch.arange(width, device=device)).flatten()


def _weight(linear: nn.Module) -> Tensor:
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor):
        raise HeadwiseError(f"{type(linear).__name__} stands for a projection and has no weight to hand out")
    return weight
