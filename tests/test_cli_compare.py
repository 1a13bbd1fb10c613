"""`headwise compare` as a user calls it."""

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from comparisons import all_comparisons
from invoking import Invoke, interrupted, start, validator

from headwise.lab import claims
from headwise.lab import compare as run
from headwise.lab.claims import split_heads
from headwise.lab.experiments import Scored, Unit

FAST = ("--seeds", 2, "--steps", 2, "--workers", 1)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that take no time: their loss is 1, but 0.5 for the models without W_O; a seed adds a tenth."""

    def fake(unit: Unit) -> Scored:
        return Scored(31, {"loss": (0.5 if unit.arm.name.startswith("without") else 1.0) + unit.seed / 10}, None, 0.1)

    monkeypatch.setattr(run, "run_unit", fake)


@pytest.mark.usefixtures("scored")
def test_a_table_with_its_verdict(invoke: Invoke) -> None:
    code, out, err = invoke("compare", "output-projection", *FAST)
    assert code == 0
    assert "without W_O against with W_O: held-out loss lower by 0.500 nats (95 % interval 0.500 to 0.500" in out
    assert (
        err.splitlines()[0]
        == "unit 1/4  output-projection: with W_O, seed 0: held-out loss 1.000, 0.1 s of processor time"
    )
    assert len(list(Path("runs/compare").iterdir())) == 4
    again = invoke("compare", "output-projection", *FAST)
    assert again.out == out and again.err == "unit 4/4  4 units were finished before, in runs/compare\n"


@pytest.mark.usefixtures("scored")
def test_json_is_one_document_beside_the_files_that_were_asked_for(invoke: Invoke) -> None:
    files = ("--html", "page.html", "--out", "kept")
    code, out, _ = invoke("compare", "output-projection", *FAST, *files, "--json")
    document = json.loads(out)
    units = list(Path("kept").glob("unit-*.json"))
    assert len(units) == 4 and Path("page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    for unit in units:
        validator("unit").validate(json.loads(unit.read_text()))
    assert "written: page.html" in invoke("compare", "output-projection", *FAST, *files).out
    assert code == 0 and document["seeds"] == [0, 1] and document["steps"] == 2
    assert [arm["scores"]["loss"]["values"] for arm in document["arms"]] == [[1.0, 1.1], [0.5, 0.6]]
    assert document["arms"][1]["scores"]["loss"]["difference"]["mean"] == pytest.approx(-0.5)


def test_claims_are_judged_and_told(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "compare", lambda *given: all_comparisons())
    monkeypatch.setattr(claims, "COUNTED", {"split heads": split_heads})  # the others take a minute
    code, out, _ = invoke("compare", "claims", "--workers", 1, "--html", "ledger.html")
    assert code == 0 and "DOES NOT HOLD: Four split heads" in out and "written: ledger.html" in out
    document = json.loads(invoke("compare", "claims", "--seeds", 3, "--steps", 9, "--json").out)
    assert document["command"] == "headwise compare claims --seeds 3 --steps 9" and document["claims"]


def test_ctrl_c_says_what_is_kept(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run_unit", interrupted)
    code, out, err = invoke("compare", "heads", *FAST)
    assert (code, out) == (130, "")
    assert "finished units are kept in runs/compare; the same command goes on from there" in err
    assert err.splitlines()[-1] == "headwise: interrupted"


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_the_workers_end_with_the_command_and_leave_what_is_done(end: signal.Signals, tmp_path: Path) -> None:
    long = ("--steps", 1_000_000)  # of the trained arm: the other is done at once
    words = ("compare", "roles", "--seeds", 2, "--workers", 2, *long, "--out", tmp_path / "kept")
    child = start(*words, start_new_session=True)
    assert child.stderr is not None
    try:
        first = next(line for line in child.stderr if not line.startswith("the first models"))  # a unit is done
        if end is signal.SIGINT:
            os.killpg(child.pid, end)  # as a terminal does: to all processes
        else:
            child.send_signal(end)  # to the command alone
        out, err = child.communicate(timeout=30)  # which ends when the last worker has closed the pipes
        alive = alive_in(child.pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    assert first.startswith("unit 1/4  roles: untrained"), first + err
    assert out == "" and alive == [] and "Traceback" not in err
    if end is signal.SIGINT:
        assert child.returncode == 130 and err.splitlines()[-2].startswith("finished units are kept in")
    assert 1 <= len(list((tmp_path / "kept").glob("unit-*.json"))) <= 2


def alive_in(group: int) -> list[str]:
    """What still runs of a group of processes, after a moment to end in."""
    for _ in range(50):
        rows = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout
        alive = [row for row in rows.splitlines() if row.split()[0] == str(group) and "Z" not in row.split()[1]]
        if not alive:
            break
        time.sleep(0.1)
    return alive
