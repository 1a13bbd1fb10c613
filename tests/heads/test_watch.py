"""`watch` over our own layers and models: what each head did is what its call says, cached or not."""

import copy
import itertools
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
import torch
from cases import refuses_table
from dense import assert_rows, block_means, row_statistics, score_statistics
from families import gpt_of as small_gpt
from families import model_of
from helpers import watch_call
from small_models import LAYER, LAYERS, floats, shaken
from torch import Tensor, nn

import headwise as hw
from headwise.backends.torch_ import trace
from headwise.gpt.gpt import GPT
from headwise.gpt.presets import PRESETS
from headwise.heads.watch import Seen
from headwise.records import Call, Trace

pytestmark = pytest.mark.usefixtures("no_gradients")

B, T, V = 2, 13, 5


# The layer's arguments, and those of a call. Of what is padding, or packed, other tests tell.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: (options, call(T)) for name, (options, call) in LAYERS.items() if name not in ("lengths", "segments")},
    "no mask": ({}, {}),
    "mqa": ({"mask": hw.Causal(), "n_kv_heads": 1}, {}),
    "kv_index in any order": ({"n_kv_heads": 4, "kv_index": (3, 1, 1, 0, 2, 3)}, {}),
    "kv_index with a gap": ({"n_kv_heads": 4, "kv_index": (0, 0, 1, 1, 3, 3)}, {}),
    "alibi slopes": ({"mask": hw.Causal() & hw.Alibi([0.1, 0.3, 0.7, 0.2, 0.9, 0.0])}, {}),
    "allowed per head": ({"sink": True}, {"mask": hw.Allowed(floats(6, T, T, seed=5) > 1)}),
    "no projection": ({"mask": hw.Causal(), "out_proj": False}, {}),
}


def layer_of(case: str, **changes: Any) -> hw.MultiHeadAttention:
    torch.manual_seed(1)
    layer: hw.MultiHeadAttention = shaken(hw.MultiHeadAttention(**{**LAYER, **CASES[case][0], **changes}))
    return layer


def gpt_of(preset: str = "llama") -> GPT:
    return small_gpt(preset, vocab_size=V)


def dense_steps(call: Call) -> Trace[Tensor]:
    """The steps of a call in double precision, by the explicit path."""
    sink = call.options.sink
    options = call.options._replace(sink=None if sink is None else sink.detach().double(), dropout=0.0)
    q, k, v = (x.detach().double() for x in (call.q, call.k, call.v))
    return trace(q, k, v, options)


def observed(model: nn.Module) -> tuple[list[Call], list[Any]]:
    """Calls of all layers of ours, in order; and what takes the watchers away."""
    calls: list[Call] = []
    layers = [module for module in model.modules() if isinstance(module, hw.MultiHeadAttention)]
    for layer in layers:
        layer.watchers.append(calls.append)
    return calls, layers


def check_call(seen: Seen, site: str, call: Call, w_o: Tensor | None, cross: bool, ids: Tensor | None = None) -> None:
    """All heads of a call that ran once, against dense numbers."""
    steps = dense_steps(call)
    p, sink = steps.weights, call.options.sink
    H, n_keys = p.shape[1], p.shape[3]
    start = None if cross else n_keys - p.shape[2]
    for h in range(H):
        documents = []
        for b in range(p.shape[0]):
            some = (p[b] > 0).any(-1).any(0)
            tokens = None if ids is None else ids[b]
            found = row_statistics(p[b, h : h + 1], start=start, q_ids=tokens, k_ids=tokens)
            found |= score_statistics(steps.masked[b, h : h + 1], None if sink is None else sink[h : h + 1])
            if w_o is not None:
                block = w_o.detach().double().unflatten(1, (H, -1))[:, h]
                found["norm"] = (call.out[b, h].detach().double() @ block.T).norm(dim=-1)[None]
            documents.append({name: values[0, some] for name, values in found.items()})
        wanted = {name: torch.cat([document[name] for document in documents]) for name in documents[0]}
        head = seen[f"{site}.H{h}"]
        assert set(head.rows) - {"gate"} == set(wanted)
        assert_rows(head.rows, wanted, n_keys, f"{site}.H{h}")
        means, *_ = block_means(p[-1, h : h + 1], range(p.shape[2]), range(n_keys))
        np.testing.assert_allclose(head.thumbnail, means[0], rtol=0, atol=1e-5)
        np.testing.assert_allclose(head.received, p[-1, h].sum(0), rtol=0, atol=1e-4)
        for name in wanted:
            rows = np.asarray(head.rows[name], np.float64)
            assert head[name] == pytest.approx(np.mean(rows[~np.isnan(rows)]), abs=1e-12)
        assert head.score_peak == head.rows.score_max[~np.isnan(head.rows.score_max)].max()
        if call.options.gate is not None:
            np.testing.assert_allclose(head.rows.gate, float(call.options.gate[h]))


@pytest.mark.parametrize("case", CASES)
def test_every_option_of_a_layer(case: str) -> None:
    """A layer inside some module of the caller's; the answer is bit for bit what it was."""
    layer, call = layer_of(case), CASES[case][1]
    module, x = nn.ModuleDict({"inside": layer}), floats(B, T, 29)
    expected = layer(x, **call)
    with hw.watch(module) as seen:
        assert torch.equal(layer(x, **call), expected)
    calls, layers = observed(module)
    layer(x, **call)
    layers[0].watchers.clear()
    w_o = None if layer.o_proj is None else layer.o_proj.weight
    check_call(seen, "L0", calls[0], w_o, "context" in call)


@pytest.mark.parametrize("preset", PRESETS)
def test_models_of_every_preset(preset: str) -> None:
    model = gpt_of(preset)
    ids = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(5))
    expected = model(ids)
    with hw.watch(model) as seen:
        assert torch.equal(model(ids), expected)
    calls, layers = observed(model)
    model(ids)
    assert list(seen) == [f"L{n}.H{h}" for n in range(2) for h in range(6)]
    for n, (call, layer) in enumerate(zip(calls, layers, strict=True)):
        layer.watchers.clear()
        check_call(seen, f"L{n}", call, layer.o_proj.weight, False, ids)


ENDS = 5, 6, T  # of three packed documents


def assert_each_is_as_alone(model: Any, inputs: Tensor, **named: Any) -> None:
    packed = watch_call(model, inputs, **named)
    single = [watch_call(model, row[None, a:e]) for row in inputs for a, e in itertools.pairwise((0, *ENDS))]
    for name, head in packed.items():
        assert head.documents == [5, 1, T - 6] * B
        for key in single[0][name].rows:
            alone = np.concatenate([seen[name].rows[key] for seen in single])
            np.testing.assert_allclose(head.rows[key], alone, rtol=0, atol=1e-5, err_msg=f"{key} of {name}")
        np.testing.assert_allclose(head.thumbnail, single[-1][name].thumbnail, rtol=0, atol=1e-6)


def test_packed_documents_count_as_alone() -> None:
    numbers = torch.bucketize(torch.arange(T), torch.tensor(ENDS), right=True).expand(B, T)
    layer, x = layer_of("causal"), floats(B, T, 29)
    assert_each_is_as_alone(layer, x, mask=hw.Segments(numbers, numbers))
    both_ways = layer_of("no mask")
    assert_each_is_as_alone(both_ways, x, mask=hw.Segments(numbers, numbers))
    assert watch_call(layer, x, mask=hw.Causal())["L0.H0"].documents == [T, T]


@pytest.mark.parametrize("way", ["eager", "sdpa"])
def test_documents_packed_by_their_positions_count_as_alone(way: str) -> None:
    model = model_of("llama")
    model.set_attn_implementation(way)
    ids = torch.randint(3, 17, (B, T), generator=torch.Generator().manual_seed(7))
    starts = torch.tensor([0, *ENDS[:-1]])
    places = (torch.arange(T) - starts.repeat_interleave(torch.tensor([5, 1, T - 6]))).expand(B, T)
    assert_each_is_as_alone(model, ids, position_ids=places, use_cache=False)
    # With a mask of the caller's transformers keeps nothing apart, and neither does what is counted.
    together = watch_call(model, ids, position_ids=places, attention_mask=torch.ones(B, T), use_cache=False)
    assert together["L0.H0"].documents == [T, T]


def test_padding_stays_out() -> None:
    # In self attention they say which queries and keys are padding.
    layer, x, mask = layer_of("causal"), floats(B, T, 29), hw.Lengths(torch.tensor([T, 9]))
    seen = watch_call(layer, x, mask=mask)
    short = watch_call(layer, x[1:, :9])
    x[1, 9:] = torch.nan
    dirty = watch_call(layer, x, mask=mask)
    for h in range(6):
        name = f"L0.H{h}"
        assert len(seen[name].rows.entropy) == T + 9
        for key in short[name].rows:
            np.testing.assert_allclose(seen[name].rows[key][T:], short[name].rows[key], rtol=0, atol=1e-5)
        np.testing.assert_allclose(seen[name].thumbnail, short[name].thumbnail, rtol=0, atol=1e-5)
        np.testing.assert_allclose(seen[name].received[:9], short[name].received, rtol=0, atol=1e-4)
        assert not seen[name].received[9:].any()
        for key in seen[name].rows:
            np.testing.assert_array_equal(dirty[name].rows[key], seen[name].rows[key])
        for key in ("received", "thumbnail"):
            np.testing.assert_array_equal(getattr(dirty[name], key), getattr(seen[name], key))


CACHES: dict[str, dict[str, Any]] = {"growing": {}, "static": {"max_length": 20}, "rolling": {"window": 3}}


def assert_rows_of_chunks(seen: Seen, whole: Seen, chunks: tuple[int, ...]) -> None:
    bounds = np.cumsum([0, *chunks])
    n = int(bounds[-1])
    for name in whole:
        assert set(seen[name].rows) == set(whole[name].rows)
        for b in range(B):
            places = [2 * a + b * (e - a) + i for a, e in itertools.pairwise(bounds) for i in range(e - a)]
            mine = {key: seen[name].rows[key][places] for key in seen[name].rows}
            theirs = {k: torch.from_numpy(whole[name].rows[k][b * n : b * n + n]).double() for k in whole[name].rows}
            assert_rows(mine, theirs, n, name)


IDS = torch.tensor([[1, 2, 0, 3, 1, 4, 2, 0, 1, 3, 3, 1, 2], [4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 0, 0, 2]])


@pytest.mark.parametrize("chunks", [(1,) * T, (5, 1, 1, 4, 2)])
@pytest.mark.parametrize("kind", CACHES)
def test_a_model_with_a_cache(kind: str, chunks: tuple[int, ...]) -> None:
    """Its tokens are followed through the cache, also those that have rolled out of it: same_token and after_same."""
    model, options = gpt_of(), {"marks": {"delimiter": [1, 3]}}
    if kind != "growing":
        for block in model.blocks:
            block.attention.spec = block.attention.spec.replace(mask=hw.Window(3, 0))
    whole = watch_call(model, IDS, **options)
    caches = [hw.KVCache(**CACHES[kind]) for _ in model.blocks]
    with hw.watch(model, **options) as seen:
        for part in IDS.split(chunks, 1):
            model(part, caches)
    assert whole["L0.H0"].same_token > 0 and whole["L0.H0"].after_same > 0 and whole["L0.H0"].delimiter > 0
    assert_rows_of_chunks(seen, whole, chunks)


def test_caches_are_cropped_and_reordered() -> None:
    # As after a rejected draft.
    model = gpt_of()
    ids = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(6))
    whole = watch_call(model, ids)
    caches = model.new_caches()
    with hw.watch(model) as seen:
        model(ids[:, :5], caches)
        with hw.ablate(model, ["L0.H0"]):
            model(torch.zeros(B, 3, dtype=torch.long), caches)
        for cache in caches:
            cache.crop(5)
        model(ids[:, 5:], caches)
    for name in whole:
        for key in ("same_token", "after_same"):
            rows = seen[name].rows[key][B * 8 :]
            for b in range(B):
                np.testing.assert_allclose(
                    rows[b * 8 : b * 8 + 8], whole[name].rows[key][b * T + 5 : b * T + T], rtol=0, atol=1e-5
                )
    # As in beam search: row b becomes what row index[b] was.
    model = gpt_of()
    ids = torch.tensor([[1, 2, 0, 3, 1, 4], [4, 4, 2, 3, 0, 1]])
    order, rest = torch.tensor([1, 0]), torch.tensor([[1, 2, 4], [4, 0, 3]])
    whole = watch_call(model, torch.cat([ids[order], rest], 1))
    caches = model.new_caches()
    with hw.watch(model) as seen:
        model(ids, caches)
        for cache in caches:
            cache.reorder(order)
        model(rest, caches)
    for name in whole:
        rows = seen[name].rows
        if "same_token" in rows:  # or it is not claimed
            for b in range(B):
                expected = whole[name].rows.same_token[b * 9 + 6 : b * 9 + 9]
                np.testing.assert_allclose(rows.same_token[12 + 3 * b : 15 + 3 * b], expected, rtol=0, atol=1e-5)


def test_a_layer_that_is_trained_inside_the_block() -> None:
    """Each call counts with the W_O of its time, in this block and in a later one."""
    layer, x = layer_of("causal"), floats(B, T, 29)
    with hw.watch(layer) as seen:
        layer(x)
        layer.o_proj.weight.mul_(3)
        layer(x)
    rows = seen["L0.H2"].rows.norm
    np.testing.assert_allclose(rows[B * T :], 3 * rows[: B * T], rtol=1e-5)
    layer.o_proj.weight.data.mul_(2)  # no count of torch's tells of it
    with hw.watch(layer) as later:
        layer(x)
    np.testing.assert_allclose(later["L0.H2"].rows.norm, 2 * rows[B * T :], rtol=1e-5)
    whole = layer.o_proj.weight.data.mul_(100).round_()
    for _ in range(2):  # the sums of columns stay, exactly
        with hw.watch(layer) as seen, hw.watch(twin := copy.deepcopy(layer)) as fresh:
            twin(x), layer(x)
        np.testing.assert_allclose(seen["L0.H2"].rows.norm, fresh["L0.H2"].rows.norm, rtol=1e-5)
        whole[0] += 7
        whole[1] -= 7


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mode", ["inference", "autocast"])
def test_modes_of_torch(mode: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """inference_mode, and autocast: the statistics are of the q and k that the layer used."""
    monkeypatch.setattr("headwise.heads.blocks.BLOCK", 300)
    monkeypatch.setattr("headwise.heads.blocks.THREADED", 1)
    torch.set_num_threads(threads)
    layer, x = layer_of("gqa"), floats(B, T, 29)
    calls, _ = observed(layer)
    block = torch.inference_mode() if mode == "inference" else torch.autocast("cpu", dtype=torch.bfloat16)
    with block, hw.watch(layer) as seen:
        layer(x)
    assert torch.get_num_threads() == threads
    call = calls[0]._replace(**{name: getattr(calls[0], name).clone() for name in ("q", "k", "v", "out")})
    check_call(seen, "L0", call, layer.o_proj.weight, False)


def test_what_is_seen() -> None:
    """Means over rows, rows by name, and a table for notebooks."""
    model = gpt_of()
    ids = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(5))
    with hw.watch(model) as seen:
        model(ids)
        model(ids[:1])
    head = seen["L1.H5"]
    assert isinstance(head.entropy, float) and head.previous == head["previous"]
    np.testing.assert_array_equal(head.rows.previous, head.rows["previous"])
    assert len(head.rows.entropy) == 3 * T and head.rows.entropy.dtype == np.float32
    assert len(seen) == 12 and f"rows={3 * T}" in repr(head)
    table = seen._repr_html_()
    assert table.count("<tr>") == 13 and f"{head.entropy:.3f}" in table
    assert not hasattr(head, "fame") and not hasattr(head.rows, "delimiter")  # known, but no such keys were marked


def test_marks_are_read_once_and_may_be_called_head() -> None:
    model, ids, tables = gpt_of(), torch.tensor([[1, 2, 3, 0]]), []
    for marks in (iter([2, 3]), [2, 3]):
        with hw.watch(model, marks={"head": marks}) as seen, torch.no_grad():
            model(ids)
            model(ids)
        tables.append(seen.table())
    assert tables[0].rows == tables[1].rows and [row[0] for row in tables[0].rows] == list(seen)


def test_rows_of_what_is_real() -> None:
    layer, x = layer_of("causal"), floats(B, T, 29)
    with hw.watch(layer) as seen:
        layer(x)
        layer(x[:1, :3])
        layer(x[:1, :0])  # no row
    assert seen["L0.H4"].documents == [T, T, 3, 0]


def test_names_that_are_not_there() -> None:
    """As of any mapping: a head that did not run is not in it."""
    model = gpt_of()
    with hw.watch(model) as seen:
        model.blocks[0].attention(floats(1, 3, 24))
    assert "L0.H0" in seen and "L1.H0" not in seen and "L9.H9" not in seen and seen.get("L1.H0") is None
    with pytest.raises(KeyError, match=r"L1\.H0 did not run"):
        _ = seen["L1.H0"]
    with pytest.raises(hw.HeadwiseError, match=r"^L0 was given a batch without a text"), hw.watch(model):
        model(torch.zeros(0, 3, dtype=torch.long))


def test_what_cannot_be_watched_or_ablated_is_refused_before_anything_changes() -> None:
    model = gpt_of()
    with hw.watch(model) as seen:
        model(torch.zeros(1, 3, dtype=torch.long))
        model.blocks[0].attention(floats(1, 4, 24))  # whose tokens are not known
    assert seen.notes == ["Some texts have no after_same, same_token: left out of the statistics of all."]

    def watched(module: nn.Module = model, **options: Any) -> None:
        hw.watch(module, **options).__enter__()

    def silenced(heads: Any, module: nn.Module = model, **options: Any) -> None:
        hw.ablate(module, heads, **options).__enter__()

    refuses_table("watching", globals() | {"seen": seen, "watched": watched, "silenced": silenced})
    assert all(not block.attention.watchers for block in model.blocks)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_parts_may_be_scripted_or_have_a_forward_of_their_own() -> None:
    scripted, own = torch.jit.script(nn.Linear(29, 29)), nn.Identity()
    vars(own)["forward"] = lambda x: x
    seen = watch_call(nn.Sequential(layer_of("causal"), scripted, own), floats(B, T, 29))
    assert seen["L0.H0"].n_rows == B * T


def test_watchers_are_gone_afterwards() -> None:
    model = gpt_of()
    with pytest.raises(hw.HeadwiseError, match="99"), hw.watch(model):
        model(torch.zeros(1, 99, dtype=torch.long))
    assert all(not m.watchers for m in model.modules() if isinstance(m, hw.MultiHeadAttention))
    assert not model._forward_pre_hooks
    copy.deepcopy(model)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status tells the peak")
def test_memory_does_not_grow_with_the_square() -> None:
    """T=8192: one byte for each pair of tokens is 64 MiB, all of watching takes less than half of that."""
    code = """
        import torch
        from pathlib import Path
        import headwise as hw
        torch.set_num_threads(1)
        layer = hw.MultiHeadAttention(24, 3, mask=hw.Causal())
        x = torch.randn(1, 8192, 24)
        def peak():
            # MiB; `ru_maxrss` would begin with the peak of the process that started this one
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
        with torch.no_grad():
            with hw.watch(layer):
                layer(x[:, :64])
            layer(x)
            before = peak()
            with hw.watch(layer) as seen:
                layer(x)
        assert len(seen["L0.H0"].rows.entropy) == 8192
        print(peak() - before)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 32


on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, so nothing is watched on one")


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("case", CASES)
def test_cuda_gives_what_the_cpu_gives(case: str) -> None:
    """The same numbers, and masks, gates and marks may stay on the CPU."""
    layer, call = layer_of(case), CASES[case][1]
    x = floats(B, T, 29)
    seen = watch_call(layer, x, **call)
    there = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in call.items()}
    with hw.watch(layer.cuda()) as found:
        layer(x.cuda(), **there)
    for name in seen:
        for key in seen[name].rows:
            np.testing.assert_allclose(found[name].rows[key], seen[name].rows[key], rtol=1e-3, atol=1e-3, err_msg=key)
