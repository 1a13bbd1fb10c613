"""The plan of a cache: what each key/value head keeps, as a file, as a mask, as a share of the bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cases import every

import headwise as hw
from headwise.masks import BroadcastGrid

PLAN = hw.Plan(((None, hw.Keep(2, 3), hw.Keep(0, 5)), (hw.Keep(2, 3), None, None)))


def test_a_plan_counts_its_rows() -> None:
    assert (PLAN.n_layers, PLAN.n_kv_heads, PLAN.layer(1)) == (2, 3, (hw.Keep(2, 3), None, None))
    for tokens in (0, 1, 4, 5, 7, 1009):
        rows = 3 * tokens + 3 * min(tokens, 5)
        assert PLAN.rows(tokens) == rows
        assert PLAN.share(tokens) == (rows / (6 * tokens) if tokens else 1)


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    PLAN.write(tmp_path / "plan.json")
    assert hw.Plan.read(tmp_path / "plan.json") == PLAN
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["keep"]["L0.KV1"] == {"sinks": 2, "window": 3}
    assert set(document["keep"]) == {"L0.KV1", "L0.KV2", "L1.KV0"}


GOOD = {"headwise_plan": 1, "n_layers": 2, "n_kv_heads": 3, "keep": {"L1.KV2": {"sinks": 0, "window": 1}}}


@every(
    "change, message",
    [
        ({"headwise_plan": 2}, "headwise_plan=2, 2 layers of 3 key/value heads; this headwise reads version 1"),
        ({"n_layers": 0}, "0 layers of 3 key/value heads; this headwise reads version 1, of 1 to 1,048,576 heads"),
        ({"n_layers": 10**9}, "1000000000 layers of 3 key/value heads"),
        ({"n_kv_heads": "3"}, "n_kv_heads is '3', where int belongs"),
        ({"more": 1}, "the plan has a field 'more', which is not known"),
        ({"keep": {"L0.H1": {"sinks": 0, "window": 1}}}, "'L0.H1' is no key/value head of the plan; "),
        ({"keep": {"L2.KV0": {"sinks": 0, "window": 1}}}, "'L2.KV0' is no key/value head of the plan; did you mean"),
        ({"keep": {"no head": {"sinks": 0, "window": 1}}}, "they go from L0.KV0 to L1.KV2"),
        ({"keep": {"L0.KV0": {"sinks": -1, "window": 1}}}, "sinks=-1 and window=1: a head keeps 0 or more"),
        ({"keep": {"L0.KV0": {"sinks": 0, "window": 0}}}, "sinks=0 and window=0: a head keeps 0 or more"),
        ({"keep": {"L0.KV0": {"sinks": 0, "window": 10**30}}}, "a head keeps 0 or more"),
        ({"keep": {"L0.KV0": {"sinks": 4}}}, "L0.KV0 is not whole"),
        ({"keep": None}, "keep is None"),
    ],
)
def test_a_damaged_plan_is_refused_in_a_line(change: dict, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(hw.HeadwiseError) as refusal:
        hw.Plan.read(path)
    assert str(refusal.value).startswith(f"{path}: ") and message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    assert hw.Plan.read(write(tmp_path, json.dumps(GOOD))).layer(1)[2] == hw.Keep(0, 1)
    for text, message in (("{", "is no JSON"), ("[1]", "the plan is [1]"), ('{"keep": {}}', "the plan is not whole")):
        with pytest.raises(hw.HeadwiseError) as refusal:
            hw.Plan.read(write(tmp_path, text))
        assert message in str(refusal.value) and str(refusal.value).count("plan.json") == 1
    for keep in ((), ((),), ((None,), (None, None))):
        with pytest.raises(hw.HeadwiseError, match="key/value heads; give all the same number"):
            hw.Plan(keep)
    with pytest.raises(hw.HeadwiseError, match="2 layers of 3 key/value heads, and the model has 2 of 5"):
        PLAN.check(2, 5)
    PLAN.check(2, 3)


def write(folder: Path, text: str) -> Path:
    (folder / "plan.json").write_text(text)
    return folder / "plan.json"


def test_the_mask_of_a_plan_is_what_each_head_keeps() -> None:
    T, S, H = 5, 11, 6
    grid = BroadcastGrid((1, H, T, S), np.asarray, np.arange)
    mask = PLAN.mask(0, H)
    mask.check(grid)
    allowed = np.broadcast_to(mask.allowed(grid), (1, H, T, S))[0]
    for h in range(H):
        keep = PLAN.layer(0)[h // 2]
        for i in range(T):
            last = i + S - T
            seen = {j for j in range(last + 1) if keep is None or j < keep.sinks or j > last - keep.window}
            assert set(np.flatnonzero(allowed[h, i])) == seen
    assert repr(hw.Plan(((None, None),)).mask(0)) == repr(hw.Causal())


def test_a_plan_needs_no_torch() -> None:
    code = "import sys, headwise as hw; hw.Plan(((hw.Keep(1, 2),),)).mask(0); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
