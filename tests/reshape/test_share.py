"""Sharing key/value heads: what must be kept, what must be lost by some ways and not by others, what is refused."""

import dataclasses
from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
import transformers as tf
from cases import refuses, refuses_table
from reshape_models import BUILD, ROTARY, SHAREABLE, build, far, plain_mean, texts
from torch import Tensor, nn

from headwise.models.weights import AttentionWeights, head_counts, read_layers, with_layers
from headwise.reshape.align import activations, fold, key_rule, moments
from headwise.reshape.share import Sharing, aligned, cheapest, share_heads


def roots_of(model: nn.Module) -> list[Tensor]:
    return [*moments(model, [texts(0), texts(2)])]


def alike(w: AttentionWeights, of: list[int]) -> AttentionWeights:
    """The layer with key/value head g replaced by head of[g]."""
    return dataclasses.replace(w.selected(range(w.n_heads), of), wq=w.wq, wo=w.wo, bq=w.bq)


def disguised(weights: AttentionWeights, seed: int) -> AttentionWeights:
    """The same function in other bases: a turn for each plane of RoPE or set of features, any turn for the values."""
    generator = torch.Generator().manual_seed(seed)
    G, D, _ = weights.wk.shape
    rule = key_rule(weights)
    k_maps = torch.eye(D, dtype=torch.float64).repeat(G, 1, 1)
    for a, b in rule.planes:
        angle = torch.rand(G, generator=generator, dtype=torch.float64) * 6
        k_maps[:, a, a] = k_maps[:, b, b] = angle.cos()
        k_maps[:, a, b], k_maps[:, b, a] = -angle.sin(), angle.sin()
    for features in rule.signs:
        signs = torch.randint(2, (G, 1), generator=generator) * 2.0 - 1
        k_maps[:, list(features), list(features)] = signs.double()
    if rule.free:
        turns = torch.linalg.qr(torch.randn(G, D, D, generator=generator, dtype=torch.float64))[0]
        free = torch.tensor(rule.free)
        k_maps[:, free[:, None], free] = turns
    v_maps = torch.linalg.qr(torch.randn(*weights.wv.shape[:2], weights.wv.shape[1], generator=generator).double())[0]
    return fold(weights, k_maps, v_maps)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAREABLE)
def test_heads_alike_up_to_their_bases_lose_nothing_where_they_are_aligned(name: str) -> None:
    model = build(name)
    twins = [0, 1, 2, 0, 1, 2]
    layers = [alike(weights.widened(), twins) for weights in read_layers(model)]
    model = with_layers(model, [disguised(weights, n) for n, weights in enumerate(layers)])
    roots = roots_of(model)
    child = share_heads(model, 3, roots, "best")
    assert child.details["shared"] == (((0, 3), (1, 4), (2, 5)),) * 2
    assert far(model, child.model) < (1e-6 if name == "qwen3" else 1e-9)
    assert far(model, plain_mean(model, 3)) > 1e-4


@pytest.mark.parametrize("name", SHAREABLE)
def test_aligned_norms_are_those_of_the_heads(name: str) -> None:
    """Heads that differ by a factor alone: the pool gives each its own size back."""
    model = build(name)
    layers = [alike(weights.widened(), [0, 0, 2, 2, 4, 4]) for weights in read_layers(model)]
    factors = torch.tensor([1.0, 0.4, 1.0, 3.0, 1.0, 0.7], dtype=torch.float64)

    def scaled(w: AttentionWeights) -> AttentionWeights:
        return dataclasses.replace(
            w,
            wk=w.wk * (factors if w.k_gain is None else factors**0)[:, None, None],
            bk=None if w.bk is None else w.bk * (factors if w.k_gain is None else factors**0)[:, None],
            wv=w.wv * factors[:, None, None],
            bv=None if w.bv is None else w.bv * factors[:, None],
        )

    model = with_layers(model, [scaled(w) for w in layers])
    roots = roots_of(model)
    assert far(model, share_heads(model, 3, roots).model) < {"qwen3": 1e-6}.get(name, 1e-10)


def test_what_does_not_count() -> None:
    # The norm divides it out, but for its eps.
    model = build("qk-norm")
    factors = torch.tensor([1.0, 0.5, 2.0, 1.0, 3.0, 0.7], dtype=torch.float64)[:, None, None]
    scaled = with_layers(model, [dataclasses.replace(w, wk=w.wk * factors) for w in read_layers(model)])
    assert far(model, scaled) < 1e-3
    shared, other = (share_heads(x, 3, roots_of(model)).model for x in (model, scaled))
    assert far(shared, other) < 1e-3 < far(model, shared)
    model = build("rope, GQA")
    shared = share_heads(model, 2, roots_of(model), "best")
    assert head_counts(shared.model) == (12, 2, 10)
    weights = read_layers(shared.model)[0]
    assert weights.wq.shape[0] == 12 and weights.group_size == 6


def test_the_best_groups_are_found() -> None:
    """Against all 105 ways to pair eight heads, and all 35 to make two groups of four."""
    table = torch.rand(8, 8, generator=torch.Generator().manual_seed(0))

    def price(group: Sequence[int]) -> float:
        return sum(float(table[i, j]) for i, j in combinations(group, 2))

    def all_ways(items: list[int], size: int) -> list[list[tuple[int, ...]]]:
        if not items:
            return [[]]
        first, rest = items[0], items[1:]
        return [
            [(first, *some), *others]
            for some in combinations(rest, size - 1)
            for others in all_ways([i for i in rest if i not in some], size)
        ]

    for n_groups in (4, 2):
        found = cheapest(8, n_groups, price)
        ways = sorted(sum(map(price, way)) for way in all_ways(list(range(8)), 8 // n_groups))
        assert sum(map(price, found)) <= ways[len(ways) // 20]  # the search is local: among the best twentieth
        assert sorted(h for group in found for h in group) == list(range(8))


def test_what_cannot_be_shared_says_why() -> None:
    def shared(name: str, n_kv_heads: int) -> None:
        model, sharing = build(name), Sharing(n_kv_heads)
        sharing.check_sizes(2, *head_counts(model)[:2])
        sharing.check(model)

    refuses_table("share", {"shared": shared})


def test_ways_and_families() -> None:
    said = "Linear is a family whose heads cannot be reshaped yet; there are headwise"
    refuses(lambda: Sharing(2, "near"), "groups='near' is not known; there are adjacent")
    refuses(lambda: share_heads(nn.Linear(2, 2), 1, []), said)
    # Neighbours and dealt heads cost the same, and the third way to pair four heads 4 % less.
    prices = {(0, 3): 0.95, (1, 2): 0.97}
    assert cheapest(4, 2, lambda group: prices.get(group, 1.0)) == ((0, 3), (1, 2))


CLOSE = {torch.float32: 1e-5, torch.float64: 1e-10}


def changed(model: nn.Module, change: dict[int, AttentionWeights]) -> nn.Module:
    layers = read_layers(model)
    return with_layers(model, [change.get(n, weights) for n, weights in enumerate(layers)])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float64) for name in BUILD] + [(name, torch.float32) for name in ("rope", "qwen3", "gpt2", "bert")],
)
def test_alignment_leaves_the_function_as_it_is(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype=dtype)
    roots = [*moments(model, [texts()])]
    layers = [weights.widened() for weights in read_layers(model)]
    turned = [aligned(w, root, 1 if w.n_kv_heads == 3 else 2)[0] for w, root in zip(layers, roots, strict=True)]
    assert far(model, with_layers(model, turned)) < CLOSE[dtype]
    for before, after in zip(layers, turned, strict=True):
        assert (before.wv - after.wv).abs().max() > 0.1  # it did turn something
        if before.k_gain is None:
            assert (before.wk - after.wk).abs().max() > 0.1


@pytest.mark.parametrize("name", BUILD)
def test_the_order_of_heads_is_free(name: str) -> None:
    model = build(name)
    weights = read_layers(model)[1]
    order = torch.randperm(weights.n_kv_heads, generator=torch.Generator().manual_seed(3)).tolist()
    assert order != sorted(order)
    assert far(model, changed(model, {1: weights.permuted(order)})) < 1e-10


def test_features_that_rope_leaves_alone_are_aligned_too() -> None:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.4}
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**ROTARY, rope_parameters=rope)).double().eval()
    turned = [aligned(w, root, 2)[0] for w, root in zip(read_layers(model), moments(model, [texts()]), strict=True)]
    assert far(model, with_layers(model, turned)) < 1e-10


def test_moments_are_those_of_what_the_attention_reads() -> None:
    model = build("llama")
    seen: list[Tensor] = []
    hook = model.model.layers[1].self_attn.register_forward_pre_hook(  # type: ignore[union-attr]
        lambda module, args, kwargs: seen.append(kwargs["hidden_states"]), with_kwargs=True
    )
    batches = [texts(0), texts(1)[:, :5]]
    roots = [*moments(model, batches)]
    hook.remove()
    x = torch.cat([x.flatten(0, 1) for x in seen])
    weights = read_layers(model)[1].widened()
    k, v = (x @ w.flatten(0, 1).T + b.flatten() for w, b in ((weights.wk, weights.bk), (weights.wv, weights.bv)))  # type: ignore[union-attr]
    by_moments = activations(weights, "k", roots[1]).flatten(0, 1)
    others = activations(weights, "v", roots[1]).flatten(0, 1)
    torch.testing.assert_close(by_moments @ others.T, k.T @ v / len(x))


@pytest.mark.parametrize("unequal", ["q_norm", "k_norm"])
def test_gains_of_queries_and_of_keys_both_hold_a_plane(unequal: str) -> None:
    """A turn of the keys is undone in the queries, so that it passes through both gains."""
    model = build("qk-norm")
    for change, planes in ((0.0, 1), (0.3, 0)):
        with torch.no_grad():
            for norm in ("q_norm", "k_norm"):
                gain = getattr(model.blocks[0].attention, norm).weight  # type: ignore[index, union-attr]
                gain[7] = gain[2] + (change if norm == unequal else 0.0)
        assert len(key_rule(read_layers(model)[0]).planes) == planes
