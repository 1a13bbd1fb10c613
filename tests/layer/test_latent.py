"""Multi-head latent attention: two ways of one answer, its cache, its watchers."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from cases import refuses_table
from small_models import by_paper, call_inside, normal
from torch import Tensor

import headwise as hw
from headwise.spec import LatentSpec

pytestmark = pytest.mark.usefixtures("no_gradients")

B, WIDTH, H = 2, 31, 6
SIZES: dict[str, Any] = {"head_dim": 10, "value_dim": 7, "latent_dim": 13, "rope_dim": 4}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no positions": {"rope_dim": 0},
    "narrow": {"latent_dim": 3},  # even the whole text is absorbed
    "queries, too": {"q_latent_dim": 11, "q_bias": True, "kv_bias": True, "out_bias": True},
    "no norm": {"latent_norm": False, "scale": 0.3},
    "interleaved": {"rope": hw.RoPE(theta=53.0, interleaved=True), "norm_eps": 0.1},
    "softcap, alibi": {"softcap": 1.3, "mask": hw.Causal() & hw.Alibi()},
    "window": {"mask": hw.Window(3, 0)},
}


def make(**options: Any) -> hw.MultiHeadLatentAttention:
    torch.manual_seed(0)
    fields = {"mask": hw.Causal(), **SIZES, **options}
    layer = hw.MultiHeadLatentAttention(WIDTH, H, **fields).double().eval()
    for name, parameter in layer.named_parameters():
        parameter.data = torch.randn(parameter.shape).double() / (2 if "norm" in name else parameter.shape[-1] ** 0.5)
    return layer


def draw(n: int) -> Tensor:
    return normal(B, n, WIDTH)


def reference(layer: hw.MultiHeadLatentAttention, x: Tensor, **call: Any) -> Tensor:
    """Equations 9 to 19 of the DeepSeek-V2 paper in the order of their symbols, with the norms of its section 3.1.2."""
    spec, weights = layer.spec, dict(layer.named_parameters())

    def compressed(name: str, y: Tensor, width: int | None) -> Tensor:
        z = y @ weights[f"{name}_down.weight"].T + weights.get(f"{name}_down.bias", 0)
        if not spec.latent_norm:
            return z
        head = z[..., :width]
        head = head / torch.sqrt((head * head).mean(-1, keepdim=True) + spec.qk_norm_eps)
        return torch.cat([head * weights[f"{name}_latent_norm.weight"], z[..., head.shape[-1] :]], -1)

    c_q = x if spec.q_latent_dim is None else compressed("q", x, None)
    q = c_q @ weights["q_proj.weight"].T + weights.get("q_proj.bias", 0)
    c_kv, k_r = compressed("kv", x, spec.latent_dim).tensor_split([spec.latent_dim], -1)
    ups = [rows.tensor_split([spec.head_dim - spec.rope_dim]) for rows in weights["kv_up.weight"].chunk(H)]
    q = torch.stack(q.tensor_split(H, -1), 1)
    k = torch.stack([torch.cat([c_kv @ up_k.T, k_r], -1) for up_k, _ in ups], 1)
    v = torch.stack([c_kv @ up_v.T for _, up_v in ups], 1)
    if spec.rope_dim:
        rope = hw.RoPE(theta=spec.rope.theta, interleaved=spec.rope.interleaved, dim=spec.rope_dim)
        positions = call.get("positions", torch.arange(x.shape[1])).expand(B, -1)
        q, k = (by_paper(y.roll(spec.rope_dim, -1), rope, positions) for y in (q, k))
    mask, gate = spec.mask, call.get("gate")
    mask = mask & call["mask"] if "mask" in call else mask
    out = hw.attend(
        *(y.tolist() for y in (q, k, v)), mask, scale=spec.scale, softcap=spec.softcap,
        gate=None if gate is None else gate.tolist(),
    )  # fmt: skip
    joined = torch.tensor(out, dtype=torch.float64).transpose(1, 2).flatten(2)
    return joined @ weights["o_proj.weight"].T + weights.get("o_proj.bias", 0)


@pytest.mark.parametrize("name", LAYERS)
def test_whole_in_pieces_and_one_by_one_are_the_paper_s(name: str) -> None:
    layer, x = make(**LAYERS[name]), draw(9)
    expected = reference(layer, x)
    close = {"rtol": 1e-6, "atol": 1e-6}  # cosines and sines are kept in float32
    torch.testing.assert_close(layer(x), expected, **close)
    torch.testing.assert_close(layer(x[0]), expected[0], **close)
    for cuts in ((0, 4, 5, 9), range(10)):
        cache = hw.KVCache(window=3) if name == "window" else hw.KVCache()
        parts = [layer(x[:, start:stop], cache=cache) for start, stop in pairwise(cuts)]
        torch.testing.assert_close(torch.cat(parts, 1), expected, **close)
        kept = 3 if name == "window" else 9
        assert cache.nbytes == B * kept * layer.spec.cache_values_per_token * 8
    assert layer.spec.n_parameters == sum(p.numel() for p in layer.parameters())


def test_every_argument_of_a_call_counts() -> None:
    layer, x = make(), draw(9)
    gate = torch.linspace(-1, 2, H).double()
    for call in ({"gate": gate}, {"mask": hw.Lengths([9, 4])}, {"positions": torch.arange(9) * 3 + 2}):
        given = layer(x, **call)
        torch.testing.assert_close(given, reference(layer, x, **call), rtol=1e-6, atol=1e-6)
        assert (given - layer(x)).abs().max() > 1e-3
    dropping = make(dropout=0.5).train()
    assert (dropping(x) - layer(x)).abs().max() > 1e-3


class Adapted(torch.nn.Module):
    """Stands for a projection, and adds a tenth of it."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return 1.1 * self.base(x)


def test_what_stands_for_a_projection_is_called() -> None:
    layer, cache, x = make(), hw.KVCache(), draw(9)
    layer.kv_up = Adapted(layer.kv_up)
    parts = [layer(x[:, n : n + 1], cache=cache) for n in range(9)]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x), rtol=1e-12, atol=1e-12)
    with hw.watch(layer) as seen:
        layer(x)
    assert seen["L0.H3"].entropy > 0


def test_it_is_watched_and_silenced_like_any_layer() -> None:
    layer, x, cache = make(), draw(9), hw.KVCache()
    call = call_inside(layer, x)
    assert call.k.shape == (B, H, 9, 10) and call.v.shape == (B, H, 9, 7)
    weights = hw.trace(call.q, call.k, call.v, mask=hw.Causal()).weights
    with hw.watch(layer) as seen:
        answer = layer(x)
    assert torch.equal(answer, layer(x))
    for head in range(H):
        found = seen[f"L0.H{head}"]
        assert found.entropy == pytest.approx(float(torch.special.entr(weights[:, head]).sum(-1).mean()), abs=1e-5)
    with hw.ablate(layer, ["L0.H4"], how="zero"):
        silenced = layer(x)
        steps = torch.cat([layer(x[:, :8], cache=cache), layer(x[:, 8:], cache=cache)], 1)  # the last one is absorbed
    gate = torch.ones(H).double().index_fill(0, torch.tensor([4]), 0)
    torch.testing.assert_close(silenced, layer(x, gate=gate))
    torch.testing.assert_close(steps, silenced)
    # W_V as the product through the latent: of a token alone, but for what the norm divides by.
    _, w_o, w_v = layer.watched()
    size = (layer.kv_down(x)[..., :13].square().mean(-1) + 1e-6).sqrt()
    made = (x @ w_v.T).unflatten(-1, (H, 7)).transpose(1, 2) / size[:, None, :, None]
    torch.testing.assert_close(made, call.v)
    assert w_o is layer.o_proj.weight


def test_the_spec_is_priced_and_read_back() -> None:
    spec = make(q_latent_dim=11).spec
    assert eval(repr(spec), {**vars(hw), "LatentSpec": LatentSpec}) == spec
    assert hw.MultiHeadLatentAttention.__init__.__doc__ is None and spec.rope == hw.RoPE()
    price = hw.price(spec, context=11, batch=B, dtype="fp32")
    assert price.parameters.total == spec.n_parameters and price.cache.total_bytes == B * 11 * 17 * 4


def test_what_does_not_go_together_is_refused() -> None:
    refuses_table("latent", globals())
