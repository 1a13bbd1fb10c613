"""`explain` says which way a call goes: held to what the kernel really gets, and to what a counter counts."""

from typing import Any

import pytest
import torch
from cases import read_table, refuses
from helpers import spied_kernel
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import call_inside, normal
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise.records import Call

B, WIDTH, H, D = 2, 29, 6, 10
PATHS = {"explicit", "fused", "fused causal", "fused masked", "fused blocks", "fused apart"}


def make(**options: Any) -> hw.MultiHeadAttention:
    torch.manual_seed(0)
    return hw.MultiHeadAttention(WIDTH, H, **{"head_dim": D, **options}).eval()


def draw(n: int, width: int = WIDTH) -> Tensor:
    return normal(B, n, width, dtype=torch.float32)


def run(layer: hw.MultiHeadAttention, x: Tensor, **arguments: Any) -> tuple[list[dict[str, Any]], Call]:
    """What the kernel got, and what the attention inside the layer was given."""
    with spied_kernel() as calls, torch.no_grad():
        call = call_inside(layer, x, **arguments)
    return calls, call


def assert_true(told: Any, calls: list[dict[str, Any]], call: Call) -> None:
    """The path that was named is the one that was taken."""
    sink = call.layer.sink is not None
    assert told.path in PATHS
    assert set(told.refused) == PATHS - {told.path}
    assert all(isinstance(reason, str) and reason.strip() for reason in told.refused.values())
    n, (_, G, S, _) = call.q.shape[2], call.k.shape
    assert told.sizes == (B, H, G, n, S, call.q.shape[-1], call.v.shape[-1])
    if told.path == "explicit":
        assert calls == []
        assert told.keys == S
        return
    (got,) = calls
    assert got["is_causal"] == (told.path == "fused causal")
    if told.path in ("fused", "fused causal"):
        assert got["attn_mask"] is None
    if told.path == "fused masked":
        assert got["attn_mask"] is not None
    index = call.options.kv_index
    folded = n == 1 and G < H and index in (None, tuple(h // (H // G) for h in range(H)))
    assert tuple(got["query"].shape[:3]) == ((B, G, H // G) if folded else (B, H, n))
    assert got["key"].shape[2] == told.keys + sink


MASKS = (
    None, hw.Causal(), hw.Window(2, 0), hw.Window(3, 0), hw.Window(1, 1), hw.Window(0, 0), hw.Window(None, None),
    hw.Causal(offset=0), hw.Causal(offset=-99), hw.Causal(offset=[0, 1]), hw.Window(0, 0, offset=99), hw.Alibi(),
    hw.Causal() & hw.Alibi(), hw.Causal() & hw.Window(2, None), hw.Allowed([[True]]), hw.Bias([[0.5]]),
)  # fmt: skip
layers = st.fixed_dictionaries(
    {
        "n_kv_heads": st.sampled_from([1, 2, 3, 6]),
        "value_dim": st.sampled_from([None, 7, 13]),
        "mask": st.sampled_from(MASKS),
        "sink": st.booleans(),
        "softcap": st.sampled_from([None, None, None, 0.9]),
        "rope": st.sampled_from([None, hw.RoPE()]),
    }
)
kv_indices = st.one_of(
    st.none(), st.lists(st.integers(0, 1), min_size=H, max_size=H), st.just([0, 0, 0, 1, 1, 1]), st.just([0] * H)
)
pasts = st.sampled_from([None, ({}, 0), ({}, 3), ({"max_length": 11}, 3), ({"window": 3}, 2), ({"window": 3}, 5)])
call_masks = st.sampled_from([None, None, hw.Causal(), hw.Alibi(), hw.Window(1, 0), hw.Lengths([1, 2])])


def state(cache: hw.KVCache) -> tuple[Any, ...]:
    room = cache._begin, cache._end, cache._offered, [buffer.data_ptr() for buffer in cache._buffers]
    views = [view.tolist() for view in cache._views()]
    return cache.length, cache.kept, cache.nbytes, cache.holds_context, room, views


@pytest.mark.slow
@settings(max_examples=200)
@given(layers, kv_indices, pasts, call_masks, st.sampled_from([1, 1, 2, 5]), st.booleans())
def test_the_path_named_is_the_path_taken(
    options: dict[str, Any], kv_index: list[int] | None, past: Any, mask: hw.Mask | None, n: int, gated: bool
) -> None:
    if kv_index is not None:
        options = {**options, "n_kv_heads": 2, "kv_index": kv_index}
    if past is not None and past[0].get("window"):
        options = {**options, "mask": hw.Window(2, 0)}
        mask = None if isinstance(mask, hw.Lengths) else mask
    if isinstance(mask, hw.Lengths) and n + (past[1] if past else 0) < 2:
        mask = None
    layer, arguments = make(**options), {"mask": mask, "gate": torch.linspace(-1, 1, H) if gated else None}
    if past is not None:
        arguments["cache"] = cache = hw.KVCache(**past[0])
        with torch.no_grad():
            if past[1]:
                layer(draw(past[1]), cache=cache)
        before = state(cache)
    told = hw.explain(layer, draw(n), **arguments)
    if past is not None:
        assert state(cache) == before, "explaining changed the cache"
    assert hw.explain(layer, draw(n), **arguments) == told
    assert_true(told, *run(layer, draw(n), **arguments))


REASONS = read_table("explained")["reasons"]


@pytest.mark.parametrize(("options", "n", "path", "reason"), REASONS)
def test_the_reason_is_the_reason(options: str, n: int, path: str, reason: str) -> None:
    assert hw.explain(make(**eval(options)), draw(n)).refused[path].startswith(reason)


PRICED: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "bare": ({}, 5, {}),
    "GQA": ({"n_kv_heads": 2, "q_bias": True, "kv_bias": True, "out_bias": True}, 5, {}),
    "window": ({"mask": hw.Window(2, 0)}, 5, {}),
    "window, decode": ({"mask": hw.Window(2, 0), "n_kv_heads": 3}, 1, {"past": 7}),
    "causal chunk": ({"mask": hw.Causal(), "n_kv_heads": 1}, 3, {"past": 7}),
    "cross": ({"d_context": 13, "d_in": 11, "d_out": 17}, 5, {"context": 7}),
    "no output projection": ({"out_proj": False}, 5, {}),
    "softcap": ({"softcap": 0.9, "n_kv_heads": 2, "mask": hw.Window(1, 0)}, 5, {}),
    "unequal widths, softcap": ({"softcap": 0.9, "value_dim": 7}, 5, {}),
    "all options": ({"rope": hw.RoPE(), "qk_norm": True}, 5, {"past": 3}),
}


def prepared(name: str, dtype: torch.dtype = torch.float32) -> tuple[hw.MultiHeadAttention, Tensor, dict[str, Any]]:
    options, n, extra = PRICED[name]
    layer, arguments = make(**options).to(dtype), {}
    if "context" in extra:
        arguments["context"] = draw(extra["context"], 13).to(dtype)
    if "past" in extra:
        arguments["cache"] = hw.KVCache()
        with torch.no_grad():
            layer(draw(extra["past"]).to(dtype), **arguments)
    return layer, draw(n, layer.spec.d_in).to(dtype), arguments


def counted(layer: hw.MultiHeadAttention, x: Tensor, arguments: dict[str, Any]) -> tuple[int, int]:
    """Floating point operations of the Linears, and of the rest, by torch's counter.

    On the CPU it knows no fused kernel, so the kernel is made to take its steps one by one: two matrix products.
    """
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        layer(x, **arguments)
    by_module = {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}
    linears = sum(n for name, n in by_module.items() if name.endswith("_proj"))
    return linears, counter.get_total_flops() - linears


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", PRICED)
def test_flops_are_those_that_torch_counts(name: str, dtype: torch.dtype) -> None:
    layer, x, arguments = prepared(name, dtype)
    told = hw.explain(layer, x, **arguments)
    s = told.sizes
    assert (told.flops["projections"], told.flops["attention"]) == counted(layer, x, arguments)
    assert told.flops["attention"] == 2 * s.B * s.H * s.T * told.keys * (s.D + s.E)


@pytest.mark.parametrize(("mask", "path", "calls"), [
    (hw.Window(19, 0), "fused blocks", 1),
    (hw.Lengths([331, 163]) & hw.Causal(), "fused apart", 3),
    (hw.Segments(*[[[i // 67 for i in range(331)]] * B] * 2) & hw.Window(19, 0), "fused apart", 5),
])  # fmt: skip
def test_blocks_and_documents_apart(mask: hw.Mask, path: str, calls: int) -> None:
    """Pairs that are multiplied are those of the tensors that the kernel gets."""
    layer, x = make(n_kv_heads=2), draw(331)
    told, (got, call) = hw.explain(layer, x, mask=mask), run(layer, x, mask=mask)
    assert (told.path, len(got)) == (path, calls) and set(told.refused) == PATHS - {path}
    pairs = 0
    for each in got:
        (b, h, t, _), s = each["query"].shape, each["key"].shape[2]
        pairs += b * h * (t * (t + 1) // 2 if each["is_causal"] else t * s)
    assert told.flops["attention"] == 2 * pairs * 2 * D
    reference = hw.trace(call.q, call.k, call.v, mask).out
    torch.testing.assert_close(call.out, reference)


def test_nothing_changes_by_an_explanation() -> None:
    layer, x = make(mask=hw.Causal(), rope=hw.RoPE(), n_kv_heads=2), draw(5)
    ran: list[Any] = []
    for module in (layer, layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
        module.register_forward_hook(lambda *_: ran.append(1))
    layer.watchers.append(ran.append)
    with spied_kernel() as calls:
        hw.explain(layer, x)
    assert ran == calls == []
    layer, x = make(mask=hw.Causal(), dropout=0.5), draw(5)
    told = hw.explain(layer, x)
    assert hw.explain(layer.train(), x.requires_grad_()) == told
    assert_true(told, *run(layer, x))


@pytest.mark.parametrize("touch", ["explained", "refused"])
def test_a_cache_that_was_not_filled_is_free(touch: str) -> None:
    one, other, cache, x = make(mask=hw.Causal()), make(mask=hw.Causal()), hw.KVCache(), draw(5)
    if touch == "explained":
        hw.explain(one, x, cache=cache)
    else:
        refuses(lambda: one(x, cache=cache, mask=hw.Lengths([99, 1])), "Lengths has 99")
    other(x, cache=cache)


def test_it_reads_well_and_without_exponents() -> None:
    layer, cache = make(mask=hw.Causal(), n_kv_heads=2), hw.KVCache()
    with torch.no_grad():
        layer(draw(6), cache=cache)
    assert str(hw.explain(layer, draw(1), cache=cache)) == (
        "fused: 1 query of 6 heads read 7 of 7 keys of 2 heads, batch 2\n"
        "  flops  21.9 k = 18.6 k projections + 3.36 k attention\n"
        "  not explicit: the fused kernel gives the same answer without holding (B,H,T,S) numbers\n"
        "  not fused causal: its flag is for a triangle of a square: a causal mask alone, as many queries as keys, "
        "no sink, a scale above 0\n"
        "  not fused masked: nothing is masked, or another way leaves out what is\n"
        "  not fused blocks: it is for a window alone, at most two fifths as wide as the keys\n"
        "  not fused apart: it is for one mask that tells documents or padding apart, beside causal bounds, where that "
        "leaves out enough to pay for a call each"
    )
    assert str(hw.explain(make(softcap=0.9), draw(5))).startswith("explicit: 5 queries of 6 heads read ")
    layer = make(d_in=63, d_out=63)
    assert "1.01e+03" not in str(hw.explain(layer, draw(1, 63)))
