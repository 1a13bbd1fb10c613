"""From one causal head to many, in torch: a head, h heads side by side, and the same h heads in one matrix product.

    CausalAttention             one head, d_in -> d_out
    MultiHeadAttentionWrapper   h heads that know nothing of one another, joined: d_in -> h * d_out
    MultiHeadAttn               h heads of d_out / h cut out of one projection, and W_O: d_in -> d_out

The last two are often shown as the slow and the fast form of one thing. They are not the same function: the wrapper is
h times as wide and has no W_O. They become the same when the wrapper's heads have width d_out / h and a projection
follows; `wrapper_from_class` and `class_from_wrapper` carry the weights over, exactly.

The names and arguments are those of the course "Build an LLM", section 3.6. Axis letters as in `headwise.spec`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.spec import check_dropout, require_size


class CausalAttention(nn.Module):
    """One attention head that looks at itself and at what came before. (B,T,d_in) -> (B,T,d_out).

    d_in            width of the tokens
    d_out           width of queries, keys, values and of the result
    context_length  most tokens in a text; more are an error
    dropout         probability of dropping a weight while training
    qkv_bias        do the three projections have a bias?
    """

    mask: Tensor

    def __init__(self, d_in: int, d_out: int, context_length: int, dropout: float, qkv_bias: bool = False) -> None:
        super().__init__()
        _check_sizes(dropout, d_in=d_in, d_out=d_out, context_length=context_length)
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.softmax = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", _later(context_length))

    def forward(self, x: Tensor) -> Tensor:
        _check_text(x, self.W_query.in_features, self.mask.shape[0])
        n_tokens = x.shape[1]
        q = self.W_query(x)  # (B,T,d): what each token looks for
        k = self.W_key(x)  # (B,T,d): what each token offers to be found by
        v = self.W_value(x)  # (B,T,d): what it says when it is found

        # Row i, column j: how much token i wants token j. Divided by sqrt(d), since a sum of d products grows with it.
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        # exp(-inf) is 0: the future gets no weight, and the rest of the row still adds up to 1.
        scores = scores.masked_fill(self.mask[:n_tokens, :n_tokens], -math.inf)
        weights = self.dropout(self.softmax(scores))
        heard: Tensor = weights @ v
        return heard


class MultiHeadAttentionWrapper(nn.Module):
    """`num_heads` separate heads, their results joined side by side. (B,T,d_in) -> (B,T, num_heads * d_out).

    Each head has the whole of d_out, and no projection follows. Arguments as in `CausalAttention`.
    """

    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        require_size("num_heads", num_heads)
        self.heads = nn.ModuleList(
            CausalAttention(d_in, d_out, context_length, dropout, qkv_bias) for _ in range(num_heads)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], dim=-1)


class MultiHeadAttn(nn.Module):
    """All heads at once: three projections, cut into heads; then the heads joined, and W_O. (B,T,d_in) -> (B,T,d_out).

    Each head has width d_out / num_heads, so num_heads must divide d_out. `out_proj` has a bias. Other arguments as in
    `CausalAttention`.
    """

    mask: Tensor

    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        _check_sizes(dropout, d_in=d_in, d_out=d_out, context_length=context_length, num_heads=num_heads)
        if d_out % num_heads:
            raise HeadwiseError(
                f"num_heads={num_heads} does not divide d_out={d_out}; pass a width that {num_heads} divides"
            )
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.softmax = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", _later(context_length))

    def forward(self, x: Tensor) -> Tensor:
        _check_text(x, self.W_query.in_features, self.mask.shape[0])
        n_tokens = x.shape[1]
        q = self._split(self.W_query(x))  # (B,h,T,d)
        k = self._split(self.W_key(x))
        v = self._split(self.W_value(x))

        # From here on as in one head: the batch and the heads are two axes that the products go along.
        scores = q @ k.transpose(2, 3) / math.sqrt(self.head_dim)  # (B,h,T,T)
        scores = scores.masked_fill(self.mask[:n_tokens, :n_tokens], -math.inf)
        weights = self.dropout(self.softmax(scores))
        heard = weights @ v  # (B,h,T,d)

        joined = heard.transpose(1, 2).flatten(2)  # (B,T,d_out): the heads side by side again
        result: Tensor = self.out_proj(joined)  # W_O lets what different heads heard mix
        return result

    def _split(self, x_btc: Tensor) -> Tensor:
        """(B,T,h*d) -> (B,h,T,d): head i owns the i-th slice of the width."""
        B, T, _ = x_btc.shape
        return x_btc.reshape(B, T, self.num_heads, self.head_dim).transpose(1, 2)


def wrapper_from_class(layer: MultiHeadAttn) -> tuple[MultiHeadAttentionWrapper, nn.Linear]:
    """The heads of a `MultiHeadAttn`, taken apart: `projection(wrapper(x))` equals `layer(x)`.

    Head i gets rows i*d to (i+1)*d of each of W_query, W_key and W_value, with d = d_out / h; the projection is a copy
    of `out_proj`. With dropout the two agree outside of training only: inside they draw other weights to drop.
    """
    d_out, d_in = layer.W_query.weight.shape
    context_length, bias = layer.mask.shape[0], layer.W_query.bias is not None
    wrapper = MultiHeadAttentionWrapper(
        d_in, layer.head_dim, context_length, layer.dropout.p, layer.num_heads, qkv_bias=bias
    )
    projection = nn.Linear(d_out, d_out)
    for module in (wrapper, projection):
        module.to(layer.out_proj.weight).train(layer.training)
    with torch.no_grad():
        for head, one in enumerate(wrapper.heads):
            own = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
            for name in ("W_query", "W_key", "W_value"):
                ours, theirs = getattr(one, name), getattr(layer, name)
                ours.weight.copy_(theirs.weight[own])
                if bias:
                    ours.bias.copy_(theirs.bias[own])
        projection.load_state_dict(layer.out_proj.state_dict())
    return wrapper, projection


def class_from_wrapper(wrapper: MultiHeadAttentionWrapper, projection: nn.Linear) -> MultiHeadAttn:
    """The `MultiHeadAttn` that computes `projection(wrapper(x))`; the inverse of `wrapper_from_class`.

    The projection must be square and as wide as the joined heads; HeadwiseError with both widths where it is not. One
    without bias becomes one with a bias of zeros.
    """
    heads = [head for head in wrapper.heads if isinstance(head, CausalAttention)]
    first, joined = heads[0], sum(head.W_query.out_features for head in heads)
    if (projection.in_features, projection.out_features) != (joined, joined):
        raise HeadwiseError(
            f"the projection maps {projection.in_features} to {projection.out_features}, and {len(heads)} heads of "
            f"{first.W_query.out_features} join to {joined}; pass nn.Linear({joined}, {joined})"
        )
    bias = first.W_query.bias is not None
    layer = MultiHeadAttn(
        first.W_query.in_features, joined, first.mask.shape[0], first.dropout.p, len(heads), qkv_bias=bias
    )
    layer.to(projection.weight).train(wrapper.training)
    with torch.no_grad():
        for name in ("W_query", "W_key", "W_value"):
            ours, theirs = getattr(layer, name), [getattr(head, name) for head in heads]
            ours.weight.copy_(torch.cat([linear.weight for linear in theirs]))
            if bias:
                ours.bias.copy_(torch.cat([linear.bias for linear in theirs]))
        layer.out_proj.weight.copy_(projection.weight)
        layer.out_proj.bias.copy_(torch.zeros(joined) if projection.bias is None else projection.bias)
    return layer


def _later(context_length: int) -> Tensor:
    """(L,L) bool: True where key j comes after query i, and must not be seen."""
    return torch.ones(context_length, context_length, dtype=torch.bool).triu(1)


def _check_sizes(dropout: float, **sizes: int) -> None:
    for name, value in sizes.items():
        require_size(name, value)
    check_dropout(dropout)


def _check_text(x: Tensor, d_in: int, context_length: int) -> None:
    if x.ndim != 3:
        raise HeadwiseError(f"x has shape {tuple(x.shape)}, {x.ndim} axes; the layer takes (batch, tokens, width)")
    if x.shape[2] != d_in:
        raise HeadwiseError(f"x has width {x.shape[2]}; this layer has d_in={d_in}")
    if x.shape[1] > context_length:
        raise HeadwiseError(
            f"x has {x.shape[1]} tokens, and context_length={context_length}; cut the text, or build a longer layer"
        )
