"""`hw.check`: what it says of right and of wrong code."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from casebook import FOLDER, Version, judge, versions
from cases import every
from invoking import Invoke

import headwise as hw
from headwise.teach import check
from headwise.teach.catalogue import LANGUAGES, catalogue, words
from headwise.teach.form import Masks, Weights, compute
from headwise.teach.reading import Reading
from headwise.teach.search import Case, Search, close
from headwise.teach.source import Source
from headwise.teach.switches import SWITCHES, changes

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "attention_from_scratch.py"
ALL = list(versions())
# Of the wrong ones every third; `examples/check_table.py` takes all.
SOME = [version for number, version in enumerate(ALL) if not version.bugs or number % 3 == 0]
OF_THE_ISSUE = set(catalogue()) - {
    "scale-no-root",
    "scale-other-size",
    "layout-mixed",
    "keys-from-queries",
    "rope-positions",
}


def test_the_catalogue_is_whole() -> None:
    assert len(OF_THE_ISSUE) == 31
    assert set(catalogue()) == set(SWITCHES)
    for bug in catalogue().values():
        for lang in LANGUAGES:
            assert all(bug.text(what, lang) for what in ("name", "wrong", "symptom", "how", "fix")), bug.id


@pytest.mark.slow
@every("version", [(version,) for version in SOME], [version.label for version in SOME])
def test_every_version_is_named(version: tuple[Version]) -> None:
    verdict = judge(version[0])
    assert verdict.right is not bool(version[0].bugs), verdict
    assert set(verdict.bugs) == set(version[0].bugs), verdict


def test_every_bug_is_written_in_three_styles() -> None:
    styles = {bug: {version.style for version in ALL if bug in version.bugs} for bug in OF_THE_ISSUE}
    few = {bug: sorted(names) for bug, names in styles.items() if len(names) < 3}
    assert few == {}
    assert sum(not version.bugs for version in ALL) >= 20


RNG = np.random.default_rng(5)
DRAWN = {role: RNG.normal(size=(30, 30)) * 0.25 for role in "qkvo"}
BIASES = {role: RNG.normal(size=30) * 0.4 for role in "qkvo"}
LAYER = Weights(5, 5, DRAWN, BIASES)
INPUTS = tuple(RNG.normal(size=(3, 7, 30)) for _ in range(3))
PAIRED = [
    (bug, change)
    for bug in SWITCHES
    for change in itertools.islice(changes(bug, {}), 1)
    if not bug.startswith(("group", "padding", "mask-head", "rope"))
]


def pairs_of_bugs() -> Iterator[tuple[tuple[str, str], Case]]:
    """Two bugs at once in the switchboard's own style, where neither hides the other."""
    masks = Masks(causal=True)
    with np.errstate(all="ignore"):
        for (a, first), (b, second) in itertools.combinations(PAIRED, 2):
            both, *alone = (compute(LAYER, INPUTS, masks, s).out for s in ({**first, **second}, first, second))
            hidden = any(out.shape == both.shape and close(both, out) for out in alone)
            if "norm-missing" in (a, b) and (a + b).count("mask"):  # without a softmax, 0 is what forbids
                continue
            if not set(first) & set(second) and np.isfinite(both).any() and not hidden:
                yield (a, b), Case("plain", INPUTS, masks, {"": both})


def explained(case: Case) -> set[str]:
    return set(Search([0.0, 1e-9, -1.0], 60, frozenset()).explain([Reading(LAYER)], [case]).bugs)


@pytest.mark.slow
def test_pairs_of_bugs_are_explained() -> None:
    """Some of them; `examples/check_table.py` takes all."""
    for pair, case in itertools.islice(pairs_of_bugs(), 0, None, 29):
        assert explained(case) == set(pair)


@pytest.mark.slow
def test_the_command_says_right_and_wrong(invoke: Invoke, tmp_path: Path) -> None:
    outcome = invoke("check", EXAMPLE, "--json")
    assert outcome.code == 0, outcome
    assert json.loads(outcome.out)["right"] is True
    wrong = tmp_path / "wrong.py"
    wrong.write_text(EXAMPLE.read_text().replace(" / np.sqrt(self.d_head)", ""))
    outcome = invoke("check", f"{wrong}:MultiHeadAttention", "--json")
    record = json.loads(outcome.out)
    assert set(record) == {"target", "kind", "right", "bugs", "checked", "not_checked"}
    assert (outcome.code, record["right"], [bug["bug"] for bug in record["bugs"]]) == (1, False, ["scale-missing"])
    assert set(record["bugs"][0]) == {"bug", "line", "evidence", "fix"}
    assert "scores = q @ k" in wrong.read_text().splitlines()[record["bugs"][0]["line"] - 1]
    assert wrong.read_text() == EXAMPLE.read_text().replace(" / np.sqrt(self.d_head)", "")


LAYER_TEXT = "class Attention:\n    def __init__(self, d_model): {init}\n    def forward(self, x): {forward}\n{end}\n"
BAD = {
    "syntax": ("class A:\n    def f(self)\n", "SyntaxError: expected ':' (line 2"),
    "loop": (
        LAYER_TEXT.format(init="pass", forward="return x", end="while True: pass"),
        "it takes longer than 2 seconds",
    ),
    "exits": (LAYER_TEXT.format(init="pass", forward="return x", end="raise SystemExit(3)"), "it ends the process"),
    "dies": (
        LAYER_TEXT.format(init="pass", forward="return x", end="import os; os._exit(3)"),
        "it ends the process (3)",
    ),
    "forks": (LAYER_TEXT.format(init="pass", forward="return x", end="import os; os.fork()"), "must not call os.fork"),
    "writes": (LAYER_TEXT.format(init="pass", forward="return x", end="open(__file__, 'w')"), "must not write"),
    "gpu": (LAYER_TEXT.format(init="raise AssertionError('no CUDA')", forward="return x", end=""), "it needs a GPU"),
    "asks": (
        LAYER_TEXT.replace("d_model", "zork").format(init="pass", forward="return x", end=""),
        "--args zork=VALUE",
    ),
    "memory": (LAYER_TEXT.format(init="self.x = bytearray(10**11)", forward="return x", end=""), "MemoryError"),
}


@pytest.mark.slow
@every("name", BAD)
def test_what_cannot_be_checked_says_why(name: str, tmp_path: Path) -> None:
    text, reason = BAD[name]
    path = tmp_path / "learner.py"
    path.write_text(text)
    verdict = hw.check(path, seconds=2 if name == "loop" else 20)
    assert (verdict.right, verdict.exit_code) == (None, 2)
    assert reason in verdict.not_checked[0]
    assert path.read_text() == text
    assert [entry.name for entry in tmp_path.iterdir()] == ["learner.py"]


def test_what_is_no_target_is_refused(tmp_path: Path, invoke: Invoke) -> None:
    two = tmp_path / "two.py"
    two.write_text(
        "class FirstAttention:\n    def forward(self, x): return x\n" * 1
        + "class NextAttention:\n    def forward(self, x): return x\n"
    )
    none = tmp_path / "none.py"
    none.write_text("x = 1\n")
    for target, said in (
        (two, "several candidates, FirstAttention, NextAttention; pass two.py:FirstAttention"),
        (none, "nothing that looks like attention"),
        (f"{two}:NextAtention", "did you mean NextAttention"),
        (tmp_path / "absent.py", "there is no file"),
        (tmp_path, "is a folder"),
    ):
        outcome = invoke("check", target)
        assert outcome.code == 2
        assert said in outcome.err, outcome.err
    for options, said in (
        (("--args", "x"), "NAME=VALUE"),
        (("--lang", "fr"), "lang='fr'"),
        (("--seconds", "0"), "above 0"),
    ):
        outcome = invoke("check", EXAMPLE, *options)
        assert outcome.code == 2
        assert said in outcome.err


@pytest.mark.slow
def test_what_the_check_has_no_form_of_is_not_called_wrong() -> None:
    capped = (
        (FOLDER / "nano.py").read_text().replace("att = F.softmax(att", "att = F.softmax(30 * torch.tanh(att / 30)")
    )
    verdict = judge(Version("softcap", 0, (), capped), seconds=5)  # the search for an explanation takes all it gets
    assert (verdict.right, verdict.exit_code) == (None, 2), verdict
    assert any("no correct form" in reason for reason in verdict.not_checked)


def attention(q, k, v, mask=None):  # type: ignore[no-untyped-def]
    scores = q @ k.swapaxes(-1, -2)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def test_an_object_is_checked_in_place() -> None:
    state = np.random.get_state()[1].copy()  # type: ignore[union-attr]
    verdict = hw.check(attention, lang="es")
    assert (verdict.right, set(verdict.bugs)) == (False, {"scale-missing", "mask-missing"})
    assert "Las puntuaciones no se escalan" in str(verdict)
    assert "<script" not in verdict._repr_html_()
    assert np.array_equal(state, np.random.get_state()[1])  # type: ignore[arg-type]


def test_the_cases_are_learners_files() -> None:
    assert all(path.with_suffix(".py").exists() for path in FOLDER.glob("*.bugs"))


def test_an_error_that_arises_in_headwise_is_said_to_be_ours() -> None:
    def reason(fail: Callable[[], object], lang: str = "en") -> str:
        with pytest.raises(Exception) as caught:
            fail()
        return check.explained(caught.value, Source("", "learner.py"), words(lang))

    def lacks() -> object:
        return next(iter(catalogue().values())).text("no-such-text", "en")

    said = {lang: reason(lacks, lang) for lang in LANGUAGES}
    assert said["en"].startswith("a bug of headwise, not of your code; please report it (")
    assert said["es"].startswith("un error de headwise, no de tu código; por favor, repórtalo (")
    assert reason(lambda: {}["key"]) == "KeyError: 'key'"  # arises in no file of ours
    assert reason(lambda: words("fr")).startswith("HeadwiseError: lang='fr'")  # says itself whose it is
