"""What a model costs to run, counted from its sizes. One multiply-add is two FLOPs.

Counted are matrix products: linear layers, scores, weights times values, convolutions; not softmax, norms, activations,
rotations, biases and look-ups, a per cent or so. T causal queries have T(T+1)/2 pairs; a window w caps the keys of one
at w. The dense count is that of a kernel which computes every pair, and logits at every position
(`torch.utils.flop_counter`). A cache keeps min(T, window) tokens, all that the query at T may see; between two steps
transformers keeps one fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwise.cost.shape import MAIN, VISION, Attention, FeedForward, ModelShape
from headwise.spec import AttentionSpec

LONGEST = 2**62  # tokens: more than any window has, and than any plan keeps


@dataclass(frozen=True)
class ForwardPrice:
    """FLOPs to read the batch once; `dense_flops` where a kernel computes every pair and every logit."""

    layer_flops: int
    attention_flops: int
    outside_flops: int
    total_flops: int
    dense_flops: int


def score_pairs(attention: Attention, tokens: int) -> int:
    """Pairs of a query and a key that it sees, summed up over the key/value heads."""
    if not attention.spec.causal:
        return tokens * tokens * attention.spec.n_kv_heads
    total = 0
    for most, heads in attention.kept(tokens).items():  # the first queries see 1, 2, ... keys, all later ones `most`
        total += heads * (most * (most + 1) // 2 + (tokens - most) * most)
    return total


def pair_flops(spec: AttentionSpec, pairs: int) -> int:
    """FLOPs of scores and weighted values, of pairs summed up over the key/value heads, each of H / G query heads."""
    return 2 * spec.n_heads * (spec.head_dim + spec.value_dim) * pairs // spec.n_kv_heads


def forward_price(shape: ModelShape, batch: int, tokens: int, source: int) -> ForwardPrice:
    linear = attention = dense = 0
    for layer in shape.layers:
        if layer.stack == VISION:
            continue
        spec, length, across = layer.attention.spec, tokens if layer.stack == MAIN else source, 0
        linear += 2 * length * (_token_weights(spec) + layer.feed_forward.active_weights)
        if layer.cross:  # its keys and values are made once, of the source
            cross = layer.cross.spec
            linear += 2 * ((cross.q_weights + cross.o_weights) * length + cross.kv_weights * source)
            across = pair_flops(cross, length * source * cross.n_kv_heads)
        attention += pair_flops(spec, score_pairs(layer.attention, length)) + across
        dense += pair_flops(spec, length * length * spec.n_kv_heads) + across
    pieces = [piece for piece in shape.pieces if piece.stack != VISION]
    head, once = 2 * sum(piece.weights for piece in pieces), 2 * sum(piece.once for piece in pieces)
    outside = once + head * (1 if shape.generates else tokens)  # what follows a prompt needs the last logits alone
    return ForwardPrice(
        layer_flops=batch * linear,
        attention_flops=batch * attention,
        outside_flops=batch * outside,
        total_flops=batch * (linear + attention + outside),
        dense_flops=batch * (linear + dense + once + head * tokens),
    )


def _token_weights(spec: AttentionSpec) -> int:
    """Matrix entries of an attention that a token meets which becomes queries, keys and values."""
    return spec.q_weights + spec.kv_weights + spec.expanding_weights + spec.o_weights


def decode_flops(shape: ModelShape, tokens: int, source: int, expand: bool = False) -> int:
    """One new token of one text, the last of `tokens`, beside the cache of the others.

    A latent cache is read as it is, its expanding matrix folded into query and output; with `expand` it all is turned
    into keys and values at every step, as transformers does.
    """
    total = 2 * sum(piece.weights for piece in shape.pieces)
    for layer in shape.main_layers:
        spec, rows = layer.attention.spec, layer.attention.rows(tokens)
        total += 2 * (_token_weights(spec) + layer.feed_forward.active_weights)
        if spec.latent_dim and not expand:
            features = spec.cache_values_per_token + spec.latent_dim  # of a key, and of a value
            total += 2 * spec.n_heads * features * rows // spec.n_kv_heads
        else:
            total += pair_flops(spec, rows)
            earlier = rows // spec.n_kv_heads - 1  # the new token's own latent is expanded with its other products
            total += 2 * spec.expanding_weights * earlier
        if layer.cross:
            cross = layer.cross.spec
            total += 2 * (cross.q_weights + cross.o_weights) + pair_flops(cross, source * cross.n_kv_heads)
    return total


def decode_parameters(shape: ModelShape, batch: int) -> float:
    """Parameters read for one step, which serves every text of the batch; cross keys and values are cached."""
    total: float = 0
    for layer in shape.main_layers:
        total += layer.attention.parameters + layer.norm_parameters + experts_read(layer.feed_forward, batch)
        if layer.cross:
            total += layer.cross.parameters - layer.cross.spec.n_kv_heads * layer.cross.kv_head_parameters
    for piece in shape.pieces:
        if piece.stack == MAIN:
            total += piece.row * batch if piece.row is not None else piece.parameters + piece.borrowed
    return total


def experts_read(forward: FeedForward, batch: int) -> float:
    """Parameters of the experts that some text of the batch is sent to, a mean if every choice is as likely."""
    if batch == 1 or not forward.n_experts:
        return forward.active_parameters
    distinct = forward.n_experts * (1 - (1 - forward.n_active / forward.n_experts) ** batch)
    return float(distinct * forward.expert_parameters + forward.common_parameters)


def cache_values(shape: ModelShape, tokens: int, source: int) -> int:
    """Numbers that one text keeps."""
    total = 0
    for attention in shape.cached:
        spec = attention.spec
        total += spec.cache_values_per_token * attention.rows(tokens) // spec.n_kv_heads
    return total + sum(attention.spec.cache_values_per_token for attention in shape.crossed) * source


def longest_context(shape: ModelShape, values: int, source: int) -> int | None:
    """The longest text whose cache holds at most `values` numbers; None where the cache stops growing before."""
    growing = sum(attention.growing_values for attention in shape.cached)
    most = values // growing if growing else LONGEST
    if not growing and cache_values(shape, most, source) <= values:
        return None
    low, high = 0, most  # the cache only ever grows with the text: bisect
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cache_values(shape, middle, source) <= values else (low, middle - 1)
    return low
