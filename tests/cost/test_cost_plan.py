"""The price of a cache with a plan is what such a cache holds, and what its heads see."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from invoking import Invoke

import headwise as hw
from headwise.cost.formulas import longest_context
from headwise.cost.read import read_shape
from headwise.masks import BroadcastGrid

keeps = st.one_of(st.none(), st.builds(hw.Keep, st.integers(0, 7), st.integers(1, 23)))
plans = st.lists(st.tuples(keeps, keeps, keeps), min_size=2, max_size=2).map(lambda layers: hw.Plan(tuple(layers)))
CONFIG = hw.GPTConfig(vocab_size=11, context=53, n_layers=2, n_heads=6, n_kv_heads=3, head_dim=10, d_model=29, d_ff=7)


@given(plan=plans, tokens=st.integers(1, 53), values=st.integers(0, 9000))
def test_pairs_and_numbers_are_those_of_the_mask(plan: hw.Plan, tokens: int, values: int) -> None:
    bill = hw.price(CONFIG, plan=plan, context=tokens, dtype="fp32")
    seen = []
    for n in range(2):
        mask = plan.mask(n, 6)
        allowed = mask.allowed(BroadcastGrid((1, 6, tokens, tokens), np.asarray, np.arange))
        seen.append(np.broadcast_to(allowed, (1, 6, tokens, tokens)))
    assert bill.prefill.attention_flops == 4 * 10 * sum(int(layer.sum()) for layer in seen)
    assert bill.cache.total_bytes == 2 * 10 * 4 * plan.rows(tokens)
    assert bill.cache.total_bytes == 10 * 4 * sum(int(layer[:, :, -1].sum()) for layer in seen)  # 2 queries read a row
    full = hw.price(CONFIG, context=tokens, dtype="fp32")
    assert full.decode and bill.decode
    saved = 4 * 10 * 2 * (2 * 3 * tokens - plan.rows(tokens))
    assert bill.decode.flops == full.decode.flops - saved
    growing = 2 * 10 * sum(kept is None for layer in plan.keep for kept in layer)
    assert bill.cache.bytes_per_token_beyond_windows == 4 * growing
    longest = longest_context(read_shape(CONFIG)[1].with_plan(plan), values, 0)
    if longest is None:
        assert growing == 0 and 2 * 10 * plan.rows(10**6) <= values
    else:
        assert 2 * 10 * plan.rows(longest) <= values < 2 * 10 * plan.rows(longest + 1)


@pytest.mark.parametrize("windows", [None, (5, None)])
def test_the_caches_of_a_model_hold_what_is_priced(windows: tuple[int | None, ...] | None) -> None:
    config = hw.GPTConfig(**{**vars(CONFIG), "windows": windows})
    plan = hw.Plan(((None, hw.Keep(2, 3), hw.Keep(0, 11)), (hw.Keep(3, 5), hw.Keep(3, 5), None)))
    model, ids = hw.GPT(config).double().eval(), torch.randint(11, (2, 23))
    caches = model.new_caches(plan)
    with torch.no_grad():
        for start, stop in ((0, 7), (7, 22), (22, 23)):
            out = model(ids[:, start:stop], caches)
        bill = hw.price(config, plan=plan, context=23, batch=2, dtype="fp64")
        assert sum(cache.nbytes for cache in caches) == bill.cache.total_bytes
        for layer, block in enumerate(model.blocks):
            mask, attention = plan.mask(layer, 6), block.attention
            block.attention.forward = lambda x, cache, mask=mask, f=attention.forward: f(x, mask=mask)
        torch.testing.assert_close(out[:, -1], model(ids)[:, -1], rtol=1e-12, atol=1e-12)


def write(folder: Path, plan: hw.Plan) -> str:
    plan.write(folder / "plan.json")
    return str(folder / "plan.json")


def test_the_command_prices_a_plan(invoke: Invoke, tmp_path: Path) -> None:
    """Llama 3 8B at 32,768 tokens: 28 layers of 32 stream, the whole cache is 4 GiB."""
    streams, full = (hw.Keep(4, 1020),) * 8, (None,) * 8
    path = write(tmp_path, hw.Plan((full,) * 4 + (streams,) * 28))
    options = ("llama-3-8b", "--context", "32768", "--gpu-memory", "24GiB", "--plan", path)
    outcome = invoke("cost", *options)
    assert (outcome.code, outcome.err) == (0, "")
    assert "streaming key/value heads" in outcome.out and "8 of 8" in outcome.out
    assert "note: plan: 224 of 256 key/value heads keep only their first and latest tokens; without it" in outcome.out
    assert "the cache in all is 4,294,967,296 bytes" in " ".join(outcome.out.split())
    bill = json.loads(invoke("cost", *options, "--json").out)
    assert bill["cache"]["total_bytes"] == (4 * 32768 + 28 * 1024) * 8 * 2 * 128 * 2
    assert [layer["attention"]["streaming"] for layer in bill["layers"]] == [0] * 4 + [8] * 28
    whole = json.loads(invoke("cost", *options[:-2], "--json").out)
    assert bill["memory"]["largest_batch"] > 6 * whole["memory"]["largest_batch"]
    assert bill["parameters"] == whole["parameters"]


def test_what_has_no_such_heads_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    path = write(tmp_path, hw.Plan(((None,),)))
    (tmp_path / "deepseek.json").write_text(json.dumps({"headwise_plan": 1}))
    for options, message in (
        (("gpt2",), "the plan is for 1 layers of 1 key/value heads, and the model has 12 of 12"),
        (("bert-base",), "a plan is about cached keys and values of single heads, and bert has none"),
        (("gpt2", "--variants"), "--variants and --choose compare caches that keep all; leave --plan out"),
    ):
        outcome = invoke("cost", *options, "--plan", path)
        assert outcome.code == 2 and outcome.out == "" and outcome.err.count("\n") == 1
        assert message in outcome.err
    outcome = invoke("cost", "gpt2", "--plan", str(tmp_path / "deepseek.json"))
    assert outcome.code == 2 and "deepseek.json: the plan is not whole" in outcome.err
