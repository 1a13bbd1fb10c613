"""Heads as objects: hand one out, write to it, take some away, put them in another order."""

import copy
from typing import Any

import pytest
import torch
from cases import refuses_table
from small_models import call_inside, in_chunks, noisy, normal
from torch import Tensor

import headwise as hw

B, T, H, D, E = 2, 5, 6, 10, 7
KINDS: dict[str, dict[str, Any]] = {
    "MHA": {},
    "GQA": {"n_kv_heads": 3},
    "MQA": {"n_kv_heads": 1},
    "kv_index": {"n_kv_heads": 4, "kv_index": [2, 0, 0, 3, 2, 2]},  # nobody reads key/value head 1
    "biases": {"n_kv_heads": 3, "q_bias": True, "kv_bias": True, "out_bias": True},
    "no output projection": {"n_kv_heads": 3, "out_proj": False, "d_out": None},
    "sink": {"n_kv_heads": 3, "sink": True},
    "qk_norm": {"n_kv_heads": 3, "qk_norm": True},
    "rope": {"n_kv_heads": 3, "rope": hw.RoPE(dim=4)},
    "softcap": {"n_kv_heads": 2, "softcap": 0.9},
    "other widths": {"d_in": 11, "d_context": 13, "mask": None},
}
GONE = {"first": [0], "the last one": [-1], "a group of two": [2, 3], "half": [5, 1, 3], "most": [0, 1, 2, 4, 5]}
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def make(**options: Any) -> hw.MultiHeadAttention:
    usual = {"d_model": 29, "value_dim": E, "d_out": 17, "mask": hw.Causal()}
    return noisy(H, seed=3, **{**usual, **options})


@pytest.fixture(params=KINDS)
def layer(request: Any) -> hw.MultiHeadAttention:
    return make(**KINDS[request.param])


def inputs(layer: hw.MultiHeadAttention) -> dict[str, Tensor]:
    x = {"x": normal(B, T, layer.spec.d_in)}
    return x if layer.spec.d_context == layer.spec.d_in else x | {"context": normal(B, 3, layer.spec.d_context, seed=2)}


def heads_out(layer: hw.MultiHeadAttention) -> Tensor:
    return call_inside(layer, **inputs(layer)).out


def test_a_head_is_its_slices(layer: hw.MultiHeadAttention) -> None:
    assert len(layer.heads) == len(list(layer.heads)) == H
    for h, head in enumerate(layer.heads):
        g = layer.spec.kv_index[h]
        assert head.kv_index == g
        rows = {"q": range(h * D, h * D + D), "k": range(g * D, g * D + D), "v": range(g * E, g * E + E)}
        for letter, places in rows.items():
            linear = getattr(layer, f"{letter}_proj")
            assert torch.equal(getattr(head, f"w{letter}"), linear.weight[list(places)])
            bias = getattr(head, f"b{letter}")
            assert (bias is None) == (linear.bias is None)
            assert bias is None or torch.equal(bias, linear.bias[list(places)])
        assert (head.wo is None) == (layer.o_proj is None)
        assert head.wo is None or torch.equal(head.wo, layer.o_proj.weight[:, list(range(h * E, h * E + E))])
        assert (head.sink is None) == (layer.sink is None)
        assert head.sink is None or torch.equal(head.sink, layer.sink[h])
    out = heads_out(layer)
    if layer.o_proj is None:
        whole = torch.cat(list(out.unbind(1)), -1)
    else:
        whole = sum(out[:, head.index] @ head.wo.T for head in layer.heads)
        whole = whole if layer.o_proj.bias is None else whole + layer.o_proj.bias
    torch.testing.assert_close(layer(**inputs(layer)), whole, **CLOSE)


FULL = {"n_kv_heads": 3, "q_bias": True, "kv_bias": True, "sink": True}
OWNERS = {"wq": "q_proj.weight", "wk": "k_proj.weight", "wv": "v_proj.weight", "wo": "o_proj.weight",
          "bq": "q_proj.bias", "bk": "k_proj.bias", "bv": "v_proj.bias", "sink": "sink"}  # fmt: skip


@pytest.mark.parametrize("name", OWNERS)
@pytest.mark.parametrize("index", [0, 3, -1])
def test_writing_to_a_head_writes_its_place_and_no_other(name: str, index: int) -> None:
    layer = make(**FULL)
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    head = layer.heads[index]
    new = normal(*getattr(head, name).shape, seed=9)
    setattr(head, name, new)
    assert torch.equal(getattr(layer.heads[index], name), new)
    changed = {key: int((value != before[key]).sum()) for key, value in layer.state_dict().items()}
    assert {key: n for key, n in changed.items() if n} == {OWNERS[name]: new.numel()}
    assert all(parameter.requires_grad for parameter in layer.parameters())


def test_a_head_takes_numbers_and_hands_out_gradients() -> None:
    layer = make(**FULL)
    layer.heads[1].bq = [float(n) for n in range(D)]
    layer.heads[1].wq = torch.full((D, 29), 0.5, dtype=torch.bfloat16)
    layer.heads[1].sink = 3
    assert layer.heads[1].bq.tolist() == list(range(D))
    assert (layer.q_proj.weight[D : 2 * D] == 0.5).all()
    assert layer.sink[1] == 3
    assert layer.q_proj.weight.dtype == torch.float64
    layer = make()
    layer.heads[2].wq.sum().backward()
    assert layer.q_proj.weight.grad.sum(1).tolist() == [29.0 * (2 * D <= row < 3 * D) for row in range(H * D)]


def test_what_is_no_head_or_no_part_of_one_is_refused_and_changes_nothing() -> None:
    full, bare, grouped = make(**FULL), make(out_proj=False, d_out=None), make(**KINDS["GQA"]).heads
    before = copy.deepcopy(full.state_dict())
    names = {
        "layer": make(),
        "full": full.heads[-1],
        "bare": bare.heads[-2],
        "heads": grouped,
        "ones": torch.ones(1, 1),
    }
    refuses_table("head", names | {"ones": torch.ones(1, 1)})
    assert all(torch.equal(value, before[key]) for key, value in full.state_dict().items())


def test_heads_by_name_and_by_slice() -> None:
    heads = make(**KINDS["GQA"]).heads
    assert heads["H1"].index == heads[1].index == heads[-5].index == 1
    assert [head.name for head in heads[1:3]] == ["H1", "H2"]
    assert [head.name for head in heads[::-2]] == ["H5", "H3", "H1"] and heads[6:] == []


def test_what_a_head_adds_and_costs(layer: hw.MultiHeadAttention) -> None:
    # With one token to look at each weight is 1, so the layer's answer is the sum of ov over its heads.
    cross = make(n_kv_heads=3, d_in=11, d_context=13, d_values=19, mask=None)
    values = normal(B, 1, 19, seed=3)
    out = cross(normal(B, T, 11), context=normal(B, 1, 13), values=values)
    assert cross.heads[0].ov.shape == (17, 19)
    expected = sum(values @ head.ov.T for head in cross.heads).expand_as(out)
    torch.testing.assert_close(out, expected, **CLOSE)
    assert make(out_proj=False, d_out=None).heads[0].ov is None
    # Without biases, norms and positions a score is scale * x_i qk y_j.
    cross = make(n_kv_heads=3, d_in=11, d_context=13, mask=None, scale=0.7)
    x, context = normal(B, T, 11), normal(B, 3, 13, seed=2)
    call = call_inside(cross, x, context=context)
    scores = hw.trace(call.q, call.k, call.v, **call.options._asdict()).scores
    for head in cross.heads:
        assert head.qk.shape == (11, 13)
        torch.testing.assert_close(scores[:, head.index], 0.7 * x @ head.qk @ context.transpose(1, 2), **CLOSE)
    spec, costs = layer.spec, [head.cost for head in layer.heads]
    read = {head.kv_index for head in layer.heads}
    unread = (spec.n_kv_heads - len(read)) * costs[0].kv_parameters
    elsewhere = unread + 2 * D * spec.qk_norm + spec.d_out * spec.out_bias
    of_heads = [cost.parameters + cost.kv_parameters / cost.shared_by for cost in costs]
    assert sum(of_heads) == pytest.approx(spec.n_parameters - elsewhere)
    assert sum(cost.cache_bytes / cost.shared_by for cost in costs) == pytest.approx(len(read) * (D + E) * 8)
    assert all(cost.cache_bytes == (D + E) * 8 for cost in costs)
    assert repr(make(**KINDS["GQA"]).heads[-1]) == (
        "Head(H5, reads key/value head 2 with H4; 409 parameters of its own; key/value head: 493 parameters and 136 B "
        "of cache a token, shared by 2 heads)"
    )


def gate_without(gone: list[int]) -> Tensor:
    gate = torch.ones(H, dtype=torch.float64)
    gate[gone] = 0
    return gate


def kept_heads(gone: list[int]) -> list[int]:
    return [h for h in range(H) if h not in {h % H for h in gone}]


@pytest.mark.parametrize("gone", GONE.values(), ids=GONE)
def test_without_is_gate_0(layer: hw.MultiHeadAttention, gone: list[int]) -> None:
    expected = layer(**inputs(layer), gate=gate_without(gone))
    if layer.o_proj is None:  # the silent heads' places are zeros, and go
        silent = torch.stack(expected.split(E, -1))
        assert not silent[gone].any()
        expected = torch.cat([silent[h] for h in kept_heads(gone)], -1)
    torch.testing.assert_close(layer.without(gone)(**inputs(layer)), expected, **CLOSE)


def test_without_some_heads(layer: hw.MultiHeadAttention) -> None:
    cuts = (0, T) if "context" in inputs(layer) else (0, 2, 3, 5)
    smaller, given = layer.without([1, 4]), inputs(layer)
    x = given.pop("x")
    with torch.no_grad():
        torch.testing.assert_close(in_chunks(smaller, x, cuts, **given), smaller(x, **given), **CLOSE)
    once, twice = layer.without([1, 3]), layer.without([1]).without([2])
    assert once.spec == twice.spec
    assert all(torch.equal(twice.state_dict()[name], value) for name, value in once.state_dict().items())
    layer = make(n_kv_heads=3)
    assert layer.without([]).spec == layer.spec
    assert torch.equal(layer.without([])(normal(B, T, 29)), layer(normal(B, T, 29)))
    assert layer.without([1, 1, -5]).spec == layer.without([1]).spec


MASKS_BY_HEAD = {
    "alibi": hw.Causal() & hw.Alibi(),
    "alibi slopes": hw.Alibi([0.1, 0.2, 0.3, 0.5, 0.7, 1.1]) & hw.Causal(),
    "bias": hw.Bias(normal(H, 1, T, seed=4)),
    "allowed": hw.Allowed((normal(1, H, T, T, seed=4) > -0.5) | torch.eye(T, dtype=torch.bool)),
}


@pytest.mark.parametrize("mask", MASKS_BY_HEAD)
def test_masks_that_tell_heads_apart_follow_them(mask: str) -> None:
    layer = make(mask=MASKS_BY_HEAD[mask])
    expected = layer(normal(B, T, 29), gate=gate_without([1]))
    torch.testing.assert_close(layer.without([1])(normal(B, T, 29)), expected, **CLOSE)


def test_copies_share_nothing(layer: hw.MultiHeadAttention) -> None:
    before = copy.deepcopy(layer.state_dict())
    with torch.no_grad():
        for parameter in layer.without([1]).parameters():
            parameter.mul_(2)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_dtype_device_and_mode_stay(dtype: torch.dtype, training: bool) -> None:
    layer = make(**FULL, qk_norm=True, out_bias=True, dropout=0.5)
    layer = layer.to(dtype).train(training)
    other = layer.without([1])
    assert {p.dtype for p in other.parameters()} == {dtype}
    assert {p.device for p in other.parameters()} == {torch.device("cpu")}
    assert {module.training for module in other.modules()} == {training}
    assert all(p.requires_grad for p in other.parameters())
    on_meta = layer.to("meta").without([1])
    assert {p.device.type for p in on_meta.parameters()} == {"meta"}
