"""The plan of a cache: what each key/value head keeps, as a file, as a mask, as a share of the bytes."""

import json
from pathlib import Path

import numpy as np
import pytest
from cases import refuses, refuses_table
from helpers import Sizes, mask_tables
from invoking import validator

import headwise as hw

PLAN = hw.Plan(((None, hw.Keep(2, 3), hw.Keep(0, 5)), (hw.Keep(2, 3), None, None)))


def test_a_plan_counts_and_is_read_back(tmp_path: Path) -> None:
    assert (PLAN.n_layers, PLAN.n_kv_heads, PLAN.layer(1)) == (2, 3, (hw.Keep(2, 3), None, None))
    for tokens in (0, 1, 4, 5, 7, 1009):
        rows = 3 * tokens + 3 * min(tokens, 5)
        assert PLAN.rows(tokens) == rows
        assert PLAN.share(tokens) == (rows / (6 * tokens) if tokens else 1)
    PLAN.write(tmp_path / "plan.json")
    assert hw.Plan.read(tmp_path / "plan.json") == PLAN
    document = json.loads((tmp_path / "plan.json").read_text())
    validator("plan").validate(document)
    assert document["keep"]["L0.KV1"] == {"sinks": 2, "window": 3}
    assert set(document["keep"]) == {"L0.KV1", "L0.KV2", "L1.KV0"}


GOOD = {"headwise_plan": 1, "n_layers": 2, "n_kv_heads": 3, "keep": {"L1.KV2": {"sinks": 0, "window": 1}}}


def test_a_damaged_plan_is_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refuses_table(
        "plans", {"hw": hw, "changed": lambda **change: hw.Plan.read(write(Path(), json.dumps({**GOOD, **change})))}
    )


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    assert hw.Plan.read(write(tmp_path, json.dumps(GOOD))).layer(1)[2] == hw.Keep(0, 1)
    assert hw.Plan([[None, (2, 3)]]) == hw.Plan(((None, hw.Keep(2, 3)),))
    for text, message in (
        ("{", "is no JSON"),
        ("[1]", "the plan is [1]"),
        ('{"keep": {}}', "it lacks ['headwise_plan', 'n_kv_heads', 'n_layers']"),
    ):
        with pytest.raises(hw.HeadwiseError) as refusal:
            hw.Plan.read(write(tmp_path, text))
        assert message in str(refusal.value) and str(refusal.value).count("plan.json") == 1
    for keep in ((), ((),), ((None,), (None, None))):
        with pytest.raises(hw.HeadwiseError, match="key/value heads; give all the same number"):
            hw.Plan(keep)
    refuses(lambda: PLAN.check(2, 5), "2 layers of 3 key/value heads, and the model has 2 of 5")
    PLAN.check(2, 3)


DUO = hw.Plan(((None, hw.Keep(2, 3), hw.Keep(2, 3)), (hw.Keep(2, 3), None, hw.Keep(2, 3)), (hw.Keep(2, 3),) * 3))


def test_plans_go_to_other_projects_and_come_back(tmp_path: Path) -> None:
    DUO.export(tmp_path / "new" / "duo", "duo")
    matrix = np.loadtxt(tmp_path / "new" / "duo" / "full_attention_heads.tsv", delimiter="\t")
    assert matrix.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert json.loads((tmp_path / "new" / "duo" / "config.json").read_text()) == {"sink_size": 2, "recent_size": 3}
    assert hw.Plan.read(tmp_path / "new" / "duo") == DUO
    DUO.export(tmp_path / "plan.json")
    assert hw.Plan.read(tmp_path / "plan.json") == DUO


def test_plans_of_duo(tmp_path: Path) -> None:
    keep = hw.Keep(2, 5)
    for plan, back in ((PLAN, ((None, keep, keep), (keep, None, None))), (hw.Plan(((None,),)), ((None,),))):
        plan.export(tmp_path / "duo", "duo")
        assert hw.Plan.read(tmp_path / "duo") == hw.Plan(back)
    # As DuoAttention's own optimisation writes it, with all of its settings beside the two sizes.
    (tmp_path / "full_attention_heads.tsv").write_text("1.000e+00\t4.9e-01\n-2e-3\t0.51\n\n")
    (tmp_path / "config.json").write_text('{"sink_size": 128, "recent_size": 256, "lr": 0.02, "rope_theta": null}')
    keep = hw.Keep(128, 256)
    assert hw.Plan.read(tmp_path) == hw.Plan(((None, keep), (keep, None)))


def test_what_a_format_cannot_say_is_refused(tmp_path: Path) -> None:
    refuses_table("formats", globals() | {"path": tmp_path / "none"})
    assert not (tmp_path / "none").exists()


def duo(path: Path, matrix: str, config: str) -> None:
    folder = path.with_name("duo")
    folder.mkdir(exist_ok=True)
    (folder / "full_attention_heads.tsv").write_text(matrix)
    (folder / "config.json").write_text(config)
    hw.Plan.read(folder)


def write(folder: Path, text: str) -> Path:
    (folder / "plan.json").write_text(text)
    return folder / "plan.json"


def test_the_mask_of_a_plan_is_what_each_head_keeps() -> None:
    T, S, H = 5, 11, 6
    allowed, _ = mask_tables(PLAN.mask(0, H), Sizes(1, H, 3, T, S, 1, 1))
    for h in range(H):
        keep = PLAN.layer(0)[h // 2]
        for i in range(T):
            last = i + S - T
            seen = {j for j in range(last + 1) if keep is None or j < keep.sinks or j > last - keep.window}
            assert set(np.flatnonzero(allowed[0, h, i])) == seen
    assert repr(hw.Plan(((None, None),)).mask(0)) == repr(hw.Causal())
