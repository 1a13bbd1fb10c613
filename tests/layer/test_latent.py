"""Multi-head latent attention: two ways of one answer, its cache, its heads, and what `explain` says of it."""

from typing import Any

import pytest
import torch
from cases import refuses, refuses_table
from small_models import call_inside, in_chunks, noisy, normal
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise.layer import latent
from headwise.rungs.tensor import attend
from headwise.spec import Options

pytestmark = pytest.mark.usefixtures("no_gradients")

B, WIDTH, H = 2, 31, 6
SIZES: dict[str, Any] = {"head_dim": 10, "value_dim": 7, "latent_dim": 13, "rope_dim": 4}


def make(**options: Any) -> hw.MultiHeadAttention:
    return noisy(**{**SIZES, **options})


def draw(n: int) -> Tensor:
    return normal(B, n, WIDTH)


def both_ways(layer: hw.MultiHeadAttention, q: Tensor, kept: Tensor) -> dict[str, Tensor]:
    options = Options(mask=hw.Causal())
    return {
        "expanded": attend(q, *latent.expanded(layer, kept), options),
        "absorbed": latent.absorbed(layer, q, kept, options),
    }


def test_absorbed_is_expanded() -> None:
    """In float64 to its last digits; in float32 neither is further from that than twice the other, widths reordered."""
    layer = make()
    kept, q = torch.randn(B, 1, 23, 17).double(), torch.randn(B, H, 5, 10).double()
    exact = both_ways(layer, q, kept)
    torch.testing.assert_close(exact["absorbed"], exact["expanded"], rtol=1e-13, atol=1e-13)
    rounded = both_ways(layer.float(), q.float(), kept.float())
    off = {way: float((rounded[way] - exact["expanded"]).abs().max()) for way in rounded}
    assert 0 < off["absorbed"] <= 2 * off["expanded"] <= 4 * off["absorbed"]


def test_the_way_with_fewer_multiplications_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, ways = make(mask=hw.Causal()), []
    for way in ("expanded", "absorbed"):
        real = getattr(latent, way)
        monkeypatch.setattr(latent, way, lambda *x, way=way, real=real: ways.append(way) or real(*x))
    cache = hw.KVCache()
    told = [hw.explain(layer, draw(23), cache=cache).form]
    layer(draw(23), cache=cache)
    told.append(hw.explain(layer, draw(1), cache=cache).form)
    layer(draw(1), cache=cache)
    assert ways == told == ["expanded", "absorbed"]


class Adapted(torch.nn.Module):
    """Stands for a projection, and adds a tenth of it."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return 1.1 * self.base(x)


def test_what_stands_for_a_projection_is_called() -> None:
    """Nothing is absorbed around it, and its heads say that they have no weight to hand out."""
    layer, cache, x = make(mask=hw.Causal()), hw.KVCache(), draw(9)
    layer.kv_up = Adapted(layer.kv_up)
    torch.testing.assert_close(in_chunks(layer, x, range(10), cache), layer(x), rtol=1e-12, atol=1e-12)
    reason = hw.explain(layer, draw(1), cache=cache).refused["absorbed"]
    assert reason == "Adapted stands for kv_up, and has no weight to absorb"
    with hw.watch(layer) as seen:
        layer(x)
    assert seen["L0.H3"].entropy > 0
    refuses(lambda: layer.heads[3].wk, "Adapted stands for a projection and has no weight to hand out")


@pytest.mark.parametrize("options", [{}, {"q_latent_dim": 11, "q_bias": True, "kv_bias": True, "sink": True}], ids=str)
def test_the_price_is_what_is_counted(options: dict[str, Any]) -> None:
    layer = make(mask=hw.Causal(), latent_norm=not options, **options)
    counted = sum(parameter.numel() for parameter in layer.parameters())
    price = hw.price(layer, context=11, batch=B, dtype="fp32")
    assert layer.spec.n_parameters == counted == price.parameters.total
    cache = hw.KVCache()
    layer.float()(draw(11).float(), cache=cache)
    assert price.cache.total_bytes == cache.nbytes == B * 11 * (13 + 4) * 4  # of a token a latent and a rotary key
    of_heads = sum(head.cost.parameters + head.cost.kv_parameters / head.cost.shared_by for head in layer.heads)
    assert of_heads == pytest.approx(counted, abs=1e-9)


def test_heads_are_those_of_an_ordinary_layer() -> None:
    """Without norm a latent is a factorisation: the products make a layer of 6 heads, rotary features put first."""
    layer = make(mask=hw.Causal(), latent_norm=False, q_latent_dim=11)
    plain = hw.MultiHeadAttention(
        WIDTH, H, head_dim=10, value_dim=7, mask=hw.Causal(), rope=hw.RoPE(dim=4)
    ).double()  # fmt: skip
    for head, of_plain in zip(layer.heads, plain.heads, strict=True):
        for name in ("wq", "wk"):
            setattr(of_plain, name, getattr(head, name).roll(4, 0))
        of_plain.wv, of_plain.wo = head.wv, head.wo
        torch.testing.assert_close(head.qk, of_plain.qk)
        torch.testing.assert_close(head.ov, of_plain.ov)
    torch.testing.assert_close(layer(draw(9)), plain(draw(9)), rtol=1e-12, atol=1e-12)
    head = make().heads[2]  # with a norm: one token through the product and divided by the size of its latent
    x = draw(1)
    size = (head.layer.kv_down(x)[..., :13].square().mean(-1) + 1e-6).sqrt()
    torch.testing.assert_close(call_inside(head.layer, x).v[:, 2], (x @ head.wv.T) / size[..., None])


def test_heads_of_a_latent_go_and_are_not_written() -> None:
    head = make(q_latent_dim=11).heads[1]
    for name in ("wq", "wk", "wv"):
        with pytest.raises(hw.HeadwiseError, match=f"^{name} of head 1 is a product through the latent .* `up`"):
            setattr(head, name, getattr(head, name))
    head.up = 2 * head.up.detach()
    assert head.up.data_ptr() == head.layer.kv_up.weight[13:].data_ptr()
    assert head.bk is None
    assert "496 parameters of its own; latent: 892 parameters and 136 B of cache a token, shared by 6" in str(head.cost)
    layer, x = make(mask=hw.Causal() & hw.Alibi(), sink=True, q_latent_dim=11), draw(9)
    gate = torch.ones(H).double().index_fill(0, torch.tensor([1, 4]), 0)
    smaller = layer.without([1, 4])
    torch.testing.assert_close(smaller(x), layer(x, gate=gate), rtol=1e-12, atol=1e-12)
    assert smaller.spec.cache_values_per_token == 17
    torch.testing.assert_close(layer.permuted([5, 0, 3, 1, 2, 4])(x), layer(x), rtol=1e-12, atol=1e-12)
    assert hw.MultiHeadAttention(48, 4, latent_dim=8).spec.rope_dim == 0
    rotary = hw.MultiHeadAttention(192, 1, latent_dim=8, rope=hw.RoPE()).spec
    assert (rotary.rope_dim, rotary.value_dim) == (64, 192)
    assert rotary.replace(latent_dim=None).rope_dim == 0
    assert hw.MultiHeadAttention(48, 4, latent_dim=8, rope_dim=4).spec.rope == hw.RoPE()
    assert hw.MultiHeadAttention(48, 4, latent_dim=8, rope=hw.RoPE(dim=6)).spec.rope_dim == 6
    assert eval(repr(rotary), {**vars(hw)}) == rotary


@pytest.mark.parametrize("n", [1, 23])
def test_explain_counts_what_torch_counts(n: int) -> None:
    layer, cache, x = make(q_latent_dim=11, value_dim=10).float(), hw.KVCache(), draw(n).float()
    layer(draw(22).float(), cache=cache)
    told = hw.explain(layer, x, cache=cache)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        layer(x, cache=cache)
    assert told.form == ("absorbed" if n == 1 else "expanded")
    assert sum(told.flops.values()) == counter.get_total_flops()
    assert told.sizes == ((B, H, 1, 1, 23, 17, 17) if n == 1 else (B, H, H, 23, 45, 10, 10))
    other = "expanded" if n == 1 else "absorbed"
    assert "multiplications for each document" in told.refused[other]
    assert str(told).startswith(f"{told.form}, {told.path}: ")


def test_what_does_not_go_together_is_refused() -> None:
    refuses_table("latent", globals())
