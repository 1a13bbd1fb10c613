"""Heads as objects: hand one out, take some away, put them in another order."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError

if TYPE_CHECKING:
    from headwise.layer.layer import MultiHeadAttention


WRITABLE = ("wq", "wk", "wv", "wo", "bq", "bk", "bv", "sink", "relative_bias")


class Heads:
    """The heads of a layer: `heads[3]`, `len(heads)`, `for head in heads`."""

    def __init__(self, layer: MultiHeadAttention) -> None:
        self._layer = layer

    def __len__(self) -> int:
        return self._layer.spec.n_heads

    def __getitem__(self, index: int) -> Head:
        try:
            index = operator.index(index)
        except TypeError:
            raise HeadwiseError(f"heads[{index!r}]: a head is named by one whole number") from None
        if not -len(self) <= index < len(self):
            raise HeadwiseError(f"there is no head {index}; the layer has {len(self)}, counted from 0")
        return Head(self._layer, index % len(self))

    def __iter__(self) -> Iterator[Head]:
        return (self[index] for index in range(len(self)))


class Head:
    """One head's own weights, as views of the layer's. Assigning to one writes into the layer.

    wq (d, d_in), wk (d, d_context), wv (e, d_context), wo (d_out, e): y = W x. bq (d,), bk (d,), bv (e,), sink () and
    relative_bias (n_buckets,) are None where the layer has none, and so is wo without output projection. Query heads
    of one group share wk and wv, so writing one writes all of them; `shared_with` names them.
    """

    def __init__(self, layer: MultiHeadAttention, index: int) -> None:
        object.__setattr__(self, "layer", layer)
        object.__setattr__(self, "index", index)

    layer: MultiHeadAttention
    index: int

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

    def __setattr__(self, name: str, value: Tensor) -> None:
        if name not in WRITABLE:
            raise HeadwiseError(f"a head has no {name!r} to write; it has {', '.join(WRITABLE)}")
        mine = getattr(self, name)
        if mine is None:
            raise HeadwiseError(f"head {self.index} has no {name}: the layer was built without it")
        value = torch.as_tensor(value)
        if value.shape != mine.shape:
            raise HeadwiseError(f"{name} of head {self.index} has shape {tuple(mine.shape)}, not {tuple(value.shape)}")
        with torch.no_grad():
            mine.copy_(value)

    def __repr__(self) -> str:
        return f"Head({self.index}, reads key/value head {self.kv_index})"

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
    new = type(layer).from_spec(spec).to(device=weight.device, dtype=weight.dtype).train(layer.training)
    for name, owners, width in (
        ("q_proj", heads, old.head_dim),
        ("k_proj", kv_heads, old.head_dim),
        ("v_proj", kv_heads, old.value_dim),
    ):
        rows = _places(owners, width, weight.device)
        theirs, ours = getattr(layer, name), getattr(new, name)
        ours.weight.copy_(_weight(theirs)[rows])
        if ours.bias is not None:
            ours.bias.copy_(theirs.bias[rows])
    if layer.o_proj is not None and new.o_proj is not None:
        new.o_proj.weight.copy_(_weight(layer.o_proj)[:, _places(heads, old.value_dim, weight.device)])
        if layer.o_proj.bias is not None:
            new.o_proj.bias.copy_(layer.o_proj.bias)
    for name in ("q_norm", "k_norm"):
        if getattr(layer, name) is not None:
            getattr(new, name).load_state_dict(getattr(layer, name).state_dict())
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
