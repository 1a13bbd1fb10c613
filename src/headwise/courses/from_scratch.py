"""From one causal head to many, in torch, with the names of "Build a Large Language Model (From Scratch)", section 3.6.

    CausalAttention                one head, d_in -> d_out
    MultiHeadedAttentionWrapper    h such heads side by side, joined: d_in -> h * d_out
    MultiHeadAttn                  h heads of d_out / h cut out of one projection, and W_O: d_in -> d_out
    MultiHeadAttentionWrapper, MultiHeadAttention    the last two by the names that the book has for them

The first three are the names in a course on that section; its are also the constructors, the attributes, the order of
the drawn weights and the assertions. The wrapper and the class are not the same function: the wrapper is h times as
wide and has no W_O. They become the same when its heads have width d_out / h and a projection follows:
`wrapper_from_class` and `class_from_wrapper` carry the weights over, exactly.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.spec import check_dropout, require_size

PROJECTIONS = ("W_query", "W_key", "W_value")


class _Projections(nn.Module):
    """What one head and many at once have in common; `d_out` is the width of all of them. See `CausalAttention`."""

    # (context_length, context_length), 1 where key j comes after query i and must not be seen
    mask: Tensor

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        qkv_bias: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"d_in": d_in, "d_out": d_out, "context_length": context_length}
        for name, size in sizes.items():
            require_size(name, size)
        check_dropout(dropout)
        self.d_out = d_out
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.dropout = nn.Dropout(dropout)
        # In float32, and a part of the state, as in the course; `triu(1)` leaves what is above the diagonal.
        self.register_buffer("mask", torch.ones(context_length, context_length).triu(1))

    def check_text(self, x: Tensor) -> None:
        """Raise HeadwiseError where x is not (B,T,d_in) with at most `context_length` tokens."""
        d_in = self.W_query.in_features
        context_length = len(self.mask)
        if x.ndim != 3 or x.shape[2] != d_in:
            raise HeadwiseError(
                f"x has shape {tuple(x.shape)}; the layer takes (batch, tokens, width) of width d_in={d_in}"
            )
        if x.shape[1] > context_length:
            raise HeadwiseError(
                f"x has {x.shape[1]} tokens, and context_length={context_length}; cut the text, or build a longer layer"
            )

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """(...,T,d) three times -> (...,T,d); the batch, and the heads if there is an axis of them, stand before."""
        n_tokens = queries.shape[-2]
        # Row i, column j: how well token j answers token i. Divided by sqrt(d), since a sum of d products grows with d.
        scores = queries @ keys.transpose(-1, -2) / math.sqrt(keys.shape[-1])
        # exp(-inf) is 0: the future gets no weight, and the rest of the row still adds up to 1.
        scores = scores.masked_fill(self.mask.bool()[:n_tokens, :n_tokens], -math.inf)
        weights = self.dropout(torch.softmax(scores, dim=-1))
        return weights @ values


class CausalAttention(_Projections):
    """One attention head that looks at itself and at what came before. (B,T,d_in) -> (B,T,d_out).

    d_in            width of the tokens
    d_out           width of queries, keys, values and of the result
    context_length  most tokens in a text; more are an error
    dropout         probability of dropping a weight while training
    qkv_bias        do the three projections have a bias?
    """

    def forward(self, x: Tensor) -> Tensor:
        self.check_text(x)
        queries = self.W_query(x)  # what each token looks for
        keys = self.W_key(x)  # what each token offers to be found by
        values = self.W_value(x)  # what each token passes on when it is found
        return self.attend(queries, keys, values)


class MultiHeadedAttentionWrapper(nn.Module):
    """`num_heads` separate heads, their results joined side by side. (B,T,d_in) -> (B,T, num_heads * d_out).

    Each head has the whole of d_out, and no projection follows. Arguments as in `CausalAttention`.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
    ) -> None:
        super().__init__()
        require_size("num_heads", num_heads)
        self.heads = nn.ModuleList(
            CausalAttention(d_in, d_out, context_length, dropout, qkv_bias)
            for _ in range(num_heads)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], dim=-1)


class MultiHeadAttn(_Projections):
    """All heads at once: three projections, cut into heads; then the heads joined, and W_O. (B,T,d_in) -> (B,T,d_out).

    Each head has width d_out / num_heads, so num_heads must divide d_out. `out_proj` has a bias. Other arguments as in
    `CausalAttention`.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
    ) -> None:
        super().__init__(d_in, d_out, context_length, dropout, qkv_bias)
        require_size("num_heads", num_heads)
        # an AssertionError, as in the course
        assert d_out % num_heads == 0, "d_out must be divisible by num_heads"
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads
        self.out_proj = nn.Linear(d_out, d_out)
        # behind out_proj, so that the module prints as in the course
        self._modules["dropout"] = self._modules.pop("dropout")

    def forward(self, x: Tensor) -> Tensor:
        self.check_text(x)
        # (B,T,h,d): head i owns the i-th slice of the width
        shape = (*x.shape[:2], self.num_heads, self.head_dim)
        queries, keys, values = (  # (B,h,T,d)
            projection(x).reshape(shape).transpose(1, 2)
            for projection in (self.W_query, self.W_key, self.W_value)
        )
        heads_out = self.attend(queries, keys, values)
        # (B,T,d_out): the heads side by side again
        concat = heads_out.transpose(1, 2).flatten(2)
        return self.out_proj(concat)  # W_O mixes what the heads found


MultiHeadAttentionWrapper = MultiHeadedAttentionWrapper
MultiHeadAttention = MultiHeadAttn


def wrapper_from_class(
    layer: nn.Module,
) -> tuple[MultiHeadedAttentionWrapper, nn.Linear]:
    """The heads of a `MultiHeadAttn`, taken apart: `projection(wrapper(x))` equals `layer(x)`.

    layer  a `MultiHeadAttn`, or the class as a notebook of the course defines it

    Head i gets rows i*d to (i+1)*d of each of W_query, W_key and W_value, with d = d_out / h; the projection is a copy
    of `out_proj`. With dropout the two agree outside of training only: inside they draw other weights to drop.
    """
    course = _require(layer, *PROJECTIONS, "out_proj", "num_heads", "mask", "dropout")
    d_out, d_in = course.W_query.weight.shape
    n_heads = course.num_heads
    bias = course.W_query.bias is not None
    wrapper = MultiHeadedAttentionWrapper(
        d_in,
        d_out // n_heads,
        course.mask.shape[0],
        course.dropout.p,
        n_heads,
        qkv_bias=bias,
    )
    projection = nn.Linear(d_out, d_out)
    # on the device, in the dtype and in the mode of the class
    for module in (wrapper, projection):
        module.to(course.out_proj.weight).train(layer.training)
    # "W_query.weight" -> the rows of each head.
    rows = {key: value.chunk(n_heads) for key, value in _projections_of(course).items()}
    # Not strict: the mask is not carried over, each head has made its own.
    for number, head in enumerate(wrapper.heads):
        head.load_state_dict(
            {key: chunks[number] for key, chunks in rows.items()}, strict=False
        )
    _fill(projection, course.out_proj)
    return wrapper, projection


def class_from_wrapper(
    wrapper: nn.Module, projection: nn.Linear | None = None
) -> MultiHeadAttn:
    """The `MultiHeadAttn` that computes `projection(wrapper(x))`; the inverse of `wrapper_from_class`.

    wrapper     a `MultiHeadedAttentionWrapper`, or the class as a notebook of the course defines it
    projection  square and as wide as the joined heads; without bias it becomes one with a bias of zeros. None, for the
                wrapper as the course prints it, is one that changes nothing: then the result computes `wrapper(x)`

    HeadwiseError with both widths where the projection has another one.
    """
    heads = _require(wrapper, "heads").heads
    for head in heads:
        _require(head, *PROJECTIONS, "mask", "dropout")
    first = heads[0]
    width, d_in = first.W_query.weight.shape
    joined = len(heads) * width
    has_bias = first.W_query.bias is not None
    if projection and projection.weight.shape != (joined, joined):
        raise HeadwiseError(
            f"the projection maps {projection.in_features} to {projection.out_features}, and {len(heads)} heads of "
            f"{width} join to {joined}; pass nn.Linear({joined}, {joined})"
        )
    sizes = d_in, joined, len(first.mask), first.dropout.p, len(heads)
    layer = MultiHeadAttn(*sizes, qkv_bias=has_bias)
    layer.to(first.W_query.weight).train(wrapper.training)
    parts = [_projections_of(head) for head in heads]
    # Not strict: the layer has made its mask, and out_proj is filled below.
    layer.load_state_dict(
        {key: torch.cat([part[key] for part in parts]) for key in parts[0]},
        strict=False,
    )
    _fill(layer.out_proj, projection)
    return layer


def _projections_of(module: nn.Module) -> dict[str, Tensor]:
    """Weights and biases of W_query, W_key and W_value, by their names in the state of the module."""
    state = module.state_dict().items()
    return {key: value for key, value in state if key.startswith(PROJECTIONS)}


def _fill(linear: nn.Linear, source: nn.Linear | None) -> None:
    """Copy a projection; None is the identity, and a bias that the source lacks is 0."""
    with torch.no_grad():
        linear.weight.copy_(
            torch.eye(linear.in_features) if source is None else source.weight
        )
        # A single 0 fills the whole bias.
        linear.bias.copy_(
            torch.zeros(()) if source is None or source.bias is None else source.bias
        )


def _require(module: nn.Module, *names: str) -> Any:
    """The module, if it has what a class of the course has, by name: a notebook's own class is none of ours."""
    absent = [name for name in names if not hasattr(module, name)]
    if absent:
        raise HeadwiseError(
            f"{type(module).__name__} has no {', '.join(absent)}; the course's class has all of them"
        )
    return module
