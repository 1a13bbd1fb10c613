"""The learned bias by distance, against T5's own buckets."""

from typing import Any

import pytest
import torch
from cases import refuses_table
from small_models import call_inside, normal
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

import headwise as hw

B, T, H = 2, 7, 3
RULES = [
    hw.RelativeBias(),
    hw.RelativeBias(two_sided=True),
    hw.RelativeBias(2, 3),
    hw.RelativeBias(4, 3, two_sided=True),
    hw.RelativeBias(10, 53),
    hw.RelativeBias(12, 53, two_sided=True),
    hw.RelativeBias(32, 17),
    hw.RelativeBias(64, 1009, two_sided=True),
]
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
every_rule = pytest.mark.parametrize("rule", RULES, ids=repr)


def make(rule: hw.RelativeBias | None, **options: Any) -> hw.MultiHeadAttention:
    torch.manual_seed(0)
    layer = hw.MultiHeadAttention(19, H, head_dim=5, relative_bias=rule, **options).double()
    if layer.relative_bias is not None:
        torch.nn.init.normal_(layer.relative_bias)
    return layer


def draw(n: int = T) -> Tensor:
    return normal(B, n, 19)


def buckets_of_t5(rule: hw.RelativeBias, n_queries: int, n_keys: int) -> Tensor:
    """(T,S); the queries stand at the end of the keys."""
    queries = torch.arange(n_keys - n_queries, n_keys)[:, None]
    ahead = torch.arange(n_keys) - queries
    buckets: Tensor = T5Attention._relative_position_bucket(ahead, rule.two_sided, rule.n_buckets, rule.max_distance)
    return buckets


def added(layer: hw.MultiHeadAttention, x: Tensor, cache: hw.KVCache | None = None) -> Tensor:
    """What the attention inside is given as bias, (H,T,S)."""
    mask = call_inside(layer, x, cache=cache).options.mask
    assert isinstance(mask, hw.Bias)
    bias: Tensor = mask.array[0]
    return bias.detach()


@every_rule
@pytest.mark.parametrize(("before", "n"), [(0, 1), (0, 7), (5, 2), (199, 12), (1100, 1), (0, 211)])
def test_the_buckets_are_t5_s(rule: hw.RelativeBias, before: int, n: int) -> None:
    """Each entry of the table says its own bucket and head, so that the bias tells where it came from."""
    layer, cache, x = make(rule), hw.KVCache(), draw(before + n)
    with torch.no_grad():
        layer.relative_bias.copy_(torch.arange(rule.n_buckets)[:, None] + 1000.0 * torch.arange(H))
        if before:
            layer(x[:, :before], cache=cache)
        bias = added(layer, x[:, before:], cache)
    expected = buckets_of_t5(rule, n, before + n)
    for h in range(H):
        assert torch.equal(bias[h].long(), expected + 1000 * h)


@every_rule
def test_values_and_gradients_are_those_of_the_bias_in_the_scores(rule: hw.RelativeBias) -> None:
    layer, x = make(rule, mask=None if rule.two_sided else hw.Causal()), draw(211)
    table = layer.relative_bias.detach().clone().requires_grad_()
    heads = [projection(x).unflatten(-1, (H, 5)).transpose(1, 2) for projection in
             (layer.q_proj, layer.k_proj, layer.v_proj)]  # fmt: skip
    scores = heads[0] @ heads[1].transpose(-1, -2) * 5**-0.5 + table[buckets_of_t5(rule, 211, 211)].permute(2, 0, 1)
    if not rule.two_sided:
        scores = scores.masked_fill(torch.ones(211, 211, dtype=torch.bool).triu(1), -torch.inf)
    expected = layer.o_proj((scores.softmax(-1) @ heads[2]).transpose(1, 2).flatten(2))
    out = layer(x)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    gradients = (torch.autograd.grad((y * y).sum(), at)[0] for y, at in ((out, layer.relative_bias), (expected, table)))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


@every_rule
def test_it_begins_at_zero_and_changes_nothing_then(rule: hw.RelativeBias) -> None:
    torch.manual_seed(0)
    layer = hw.MultiHeadAttention(19, H, head_dim=5, relative_bias=rule).double()
    assert layer.relative_bias.shape == (rule.n_buckets, H)
    assert not layer.relative_bias.any()
    assert layer.relative_bias.requires_grad
    torch.testing.assert_close(layer(draw()), make(None)(draw()), **CLOSE)
    assert (make(rule)(draw()) - make(None)(draw())).abs().max() > 1e-3


def test_a_wrong_rule_is_refused() -> None:
    refuses_table("relative_bias", globals())
