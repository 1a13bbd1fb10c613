"""`hw.check`: what it says of right and of wrong code."""

import ast
import importlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from casebook import Version, changed_lines, correct_code, judge, line_of, versions
from cases import every, read_table
from invoking import Invoke

import headwise as hw
from headwise.checker.bugs import catalogue
from headwise.checker.source import Source
from headwise.courses import microgpt

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "attention_from_scratch.py"
ALL = list(versions())
WRONG = {version.bugs: [other for other in ALL if other.bugs == version.bugs] for version in ALL if version.bugs}
# Of the wrong ones each bug once, in another style than the one before; `python -m benchmarks check` takes all.
SOME = [version for version in ALL if not version.bugs]
SOME += [alike[number % len(alike)] for number, alike in enumerate(WRONG.values())]
TABLES = read_table("unusual")
UNUSUAL = [version for version in versions(folder="unusual") if version.number]
ONE_HEAD = correct_code("one_head", "unusual")


def test_weights_are_not_drawn_anew_between_the_steps_of_a_cache() -> None:
    redrawn = "    def reset_parameters(self):\n        for p in self.parameters():\n            nn.init.normal_(p)\n\n"
    text = correct_code("cached_concat").replace("    def forward", f"{redrawn}    def forward")
    verdict = judge(Version("redrawn", 0, (), text))
    assert verdict.right and "step by step" in " ".join(verdict.checked)


@pytest.mark.slow
@every("version", [(version,) for version in SOME], [version.label for version in SOME])
def test_every_version_is_named(version: tuple[Version]) -> None:
    pair = len(version[0].bugs) == 2
    verdict = judge(version[0], 300 if pair else 60)  # far more than a pair takes, on any machine
    assert verdict.right is not bool(version[0].bugs), verdict
    assert set(verdict.bugs) == set(version[0].bugs), verdict


SLIPS = [
    ("a @ v", "a * 2.0 @ v", 18),
    ("(0, 2, 3, 1)", "(2, 0, 3, 1)", 18),
    ("C / self.n_heads) **", "C * self.n_heads) **", 17),
]


@pytest.mark.slow
@every("right, slip, line", SLIPS)
def test_a_slip_without_a_name_is_found_by_the_change_that_mends_it(right: str, slip: str, line: int) -> None:
    code = correct_code("correct_interleaved")
    verdict = judge(Version("correct_interleaved", 1, (), code.replace(right, slip)))
    (finding,) = verdict.findings
    assert verdict.right is False and finding.line == line and slip in finding.quote
    assert finding.fix.split("`")[1] == ast.unparse(ast.parse(code.splitlines()[line - 1].strip()))


@pytest.mark.slow
def test_the_command_says_right_and_wrong(invoke: Invoke, tmp_path: Path) -> None:
    outcome = invoke("check", EXAMPLE, "--json")
    assert outcome.code == 0, outcome
    assert json.loads(outcome.out)["right"] is True
    wrong = tmp_path / "wrong.py"
    wrong.write_text(EXAMPLE.read_text().replace(" / np.sqrt(self.d_head)", ""))
    outcome = invoke("check", f"{wrong}:MultiHeadAttention", "--json")
    record = json.loads(outcome.out)
    assert set(record) == {"schema", "target", "kind", "right", "bugs", "checked", "not_checked"}
    assert (outcome.code, record["right"], [bug["bug"] for bug in record["bugs"]]) == (1, False, ["scale-missing"])
    assert set(record["bugs"][0]) == {"bug", "line", "evidence", "fix"}
    assert "scores = q @ k" in wrong.read_text().splitlines()[record["bugs"][0]["line"] - 1]
    assert wrong.read_text() == EXAMPLE.read_text().replace(" / np.sqrt(self.d_head)", "")


@pytest.mark.parametrize("name", ["numpy_layer.py", "from_scratch.py:MultiHeadAttn", "from_scratch.py:CausalAttention"])
def test_the_classes_of_the_courses_that_are_here_are_right(name: str, invoke: Invoke) -> None:
    """The first says what its mask adds, and in an error message what True would mean."""
    outcome = invoke("check", ROOT / "src" / "headwise" / "courses" / name)
    assert outcome.code == 0, outcome.out


ATTENTION = """import numpy as np
class Attention:
    def __init__(self, d_model):
        self.W_q, self.W_k, self.W_v = np.eye(48), np.eye(48), np.eye(48)
        pass
    def forward(self, x): return x
"""


@every("old, new, reason", TABLES["cannot"])
def test_what_cannot_be_checked_says_why(old: str, new: str, reason: str, tmp_path: Path) -> None:
    path, text = tmp_path / "learner.py", new if old == "ATTENTION" else ATTENTION.replace(old, new)
    path.write_text(text)
    verdict = hw.check(path, seconds=2 if "while" in new else 60)
    assert (verdict.right, verdict.exit_code) == (None, 2) and reason in verdict.not_checked[0], verdict
    assert text != ATTENTION and path.read_text() == text
    assert [entry.name for entry in tmp_path.iterdir()] == ["learner.py"]


@pytest.mark.slow
@every("old, new, reason", TABLES["apart"])
def test_what_cannot_be_ended_ends(old: str, new: str, reason: str, tmp_path: Path) -> None:
    test_what_cannot_be_checked_says_why.__wrapped__(old, new, reason, tmp_path)  # type: ignore[attr-defined]


@every("old, new, names", TABLES["gradients"])
def test_a_projection_that_no_gradient_reaches_is_named(old: str, new: str, names: str) -> None:
    text = correct_code("nano")
    assert "that gradients reach the projections" in judge(Version("gradient", 0, (), text)).checked
    verdict = judge(Version("gradient", 1, (), text.replace(old, new)))
    assert verdict.bugs == ("no-gradient",), verdict
    assert names in verdict.findings[0].evidence and new in verdict.findings[0].quote, verdict
    unasked = judge(Version("grad", 2, (), text.replace("    def forward", "    @torch.no_grad()\n    def forward")))
    assert unasked.right and "does not require grad" in unasked.not_checked[0], unasked


def test_a_mask_may_have_a_spanish_name() -> None:
    text = correct_code("padded_torch").replace("padding_mask", "máscara_padding")
    right, wrong = (judge(Version("es", n, (), text.replace("~" * n, ""))) for n in range(2))
    assert right.right and any("padding" in part for part in right.checked), right
    assert wrong.bugs == ("mask-inverted",), wrong


@pytest.mark.slow
def test_what_the_check_has_no_form_of_is_not_called_wrong() -> None:
    cooled = correct_code("nano").replace("att = F.softmax(att", "att = F.softmax(torch.asinh(att)")
    verdict = judge(Version("strange", 0, (), cooled), 10)  # all of it goes by
    assert (verdict.right, verdict.exit_code) == (None, 2), verdict
    assert any("differ from the correct form" in reason for reason in verdict.not_checked)


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


def head_of_two(q, keys, values):  # type: ignore[no-untyped-def]
    """A loop over heads whose number and width are constants of the file."""
    joined: list[float] = []
    for h in range(n_head):
        part = slice(h * head_dim, (h + 1) * head_dim)
        scores = np.array([np.dot(q[part], key[part]) for key in keys]) / head_dim**0.5
        weights = np.exp(scores) / np.exp(scores).sum()
        joined += [float(weights @ column) for column in np.array(values).T[part]]
    return joined


n_head, head_dim = 2, 5


def test_a_loop_over_heads_is_given_joined_heads() -> None:
    for loop in (microgpt.attention, head_of_two):
        verdict = hw.check(loop)
        assert (verdict.right, verdict.exit_code) == (True, 0), verdict
        assert any("one query at a time" in text for text in verdict.checked)
    for sizes in ({"n_head": 1}, {"n_head": 2}):
        assert hw.check(microgpt.attention, args=sizes).right


@pytest.mark.slow
def test_a_loop_is_checked_as_it_is_pasted_and_inside_its_function(invoke: Invoke, tmp_path: Path) -> None:
    pasted, whole = tmp_path / "pasted.py", tmp_path / "gpt.py"
    pasted.write_text(correct_code("loop_pasted").replace("h * head_dim", "h"))
    whole.write_text(correct_code("loop_whole_gpt"))  # as a whole it opens a connection, and trains
    outcome = invoke("check", pasted, "--json")
    record = json.loads(outcome.out)
    assert (outcome.code, record["bugs"][0]["bug"], record["bugs"][0]["line"]) == (1, "heads-overlap", 3), outcome
    assert record["not_checked"] == ["what stands around the loop over heads"]
    assert "IndentationError" in invoke("check", f"{pasted}:gpt").out  # it has no such function
    for target in (whole, f"{whole}:gpt"):
        assert invoke("check", target).code == 0
    pasted.write_text(correct_code("side_by_side", "unusual"))
    outcome = invoke("check", pasted)
    assert outcome.code == 0 and "CausalAttention, taken as usual" in outcome.out, outcome
    own = "class CausalAttention:\n    def __init__(self, *sizes): 1 / 0\n"
    (tmp_path / "casual_attention.py").write_text(own)  # the reader's own file comes first
    assert "ZeroDivisionError" in invoke("check", pasted).out


def test_the_catalogue_as_a_table_and_one_bug_in_full(invoke: Invoke) -> None:
    listed = invoke("check", "--list").out.splitlines()
    assert [line.split()[0] for line in listed[3 : 3 + len(catalogue())]] == list(catalogue())
    record = json.loads(invoke("check", "--list", "--json").out)
    assert [bug["id"] for bug in record["bugs"]] == list(catalogue())
    bug = catalogue()["group-tile"]
    for lang in ("en", "es"):
        told = invoke("check", "--explain", "group-tile", "--lang", lang).out
        assert all(bug.text(what, lang) in told for what in ("name", "wrong", "fix"))
    (record,) = json.loads(invoke("check", "--explain", "group-tile", "--json").out)["bugs"]
    assert record == {"id": "group-tile", **bug.texts["en"]}


@pytest.mark.slow
def test_what_a_verdict_points_at() -> None:
    """The line of the helper that splits, of the call that stops; and no word of row 0 where nothing is causal."""
    lines = {(bug,): [] for bug in ("split-no-transpose", "scale-missing", "length-fixed", "raises")}
    for version in (v for v in ALL if v.style in ("clues", "course_cut_mask") and v.bugs in lines):
        lines[version.bugs].append(judge(version).findings[0].quote)
    assert lines["split-no-transpose",] == ["return x.view(B, self.n_heads, T, self.d_head)"]
    assert lines["scale-missing",] == ["s = q @ k.transpose(-2, -1)"]
    fixed = correct_code("course_cut_mask").replace("[:T, :T]", "").replace("Causal", "")
    fixed = fixed.replace(
        "torch.triu(torch.ones(context_length, context_length), diagonal=1)", "torch.eye(context_length)"
    )
    # a table for one length is a choice where nothing is causal
    assert judge(Version("fixed", 0, (), fixed)).right is None
    assert lines["length-fixed",] == ["s.masked_fill_(self.mask.bool(), -torch.inf)"]
    (misspelt,) = lines["raises",]
    assert "haeds" in misspelt
    wide = correct_code("clues").replace("reshape(B, T, C)", "reshape(B, T)")
    stops = judge(Version("clues", 0, (), wide))  # a shape that does not fit may be our argument's
    assert stops.right is None and "(line 18: return" in stops.not_checked[0], stops
    odd = hw.check(oddly_scaled, seconds=60)
    assert odd.right is None and "sees only itself" not in odd.not_checked[-1]


def oddly_scaled(q, k, v):  # type: ignore[no-untyped-def]
    e = np.exp(q @ k.swapaxes(-1, -2) / 1.234)
    return e / e.sum(-1, keepdims=True) @ v


@pytest.mark.slow
def test_the_line_that_is_named_is_one_that_was_changed() -> None:
    """Where something is left out no line holds it, so not all can be."""
    named = [(version, bug) for version in ALL for bug in version.bugs if bug not in ("raises", "length-fixed")]
    hits = [line_of(version, bug) in changed_lines(version) for version, bug in named]
    assert len(named) > 480 and np.mean(hits) > 0.9


@every("bug, lines, quote", TABLES["lines"])
def test_the_line_of_a_bug_by_its_text(bug: str, lines: str, quote: str) -> None:
    body = lines.replace("|", "\n        ")
    source = Source(f"class Attention:\n    def forward(self, x):\n        {body}\n")
    place = source.line_of(catalogue()[bug].lines, ["Attention"])
    assert place is not None and place[1].startswith(quote), place


@every("version", [(version,) for version in UNUSUAL], [version.label for version in UNUSUAL])
def test_unusual_code_is_judged(version: tuple[Version]) -> None:
    verdict = judge(version[0])
    assert verdict.bugs == version[0].bugs and verdict.right is not bool(version[0].bugs), verdict
    assert version[0].words in str(verdict)


def test_a_bug_that_shows_under_a_mask_alone_is_told_with_numbers_of_that_case() -> None:
    verdict = hw.check(scaled_only_without_a_mask)
    assert verdict.bugs == ("scale-missing",)
    theirs, correct = re.findall(r"\d+\.\d+", verdict.findings[0].evidence)
    assert float(theirs) > 1.5 * float(correct)


def scaled_only_without_a_mask(q, k, v, mask=None):  # type: ignore[no-untyped-def]
    scores = q @ k.swapaxes(-1, -2)
    scores = scores / np.sqrt(q.shape[-1]) if mask is None else np.where(mask, scores, -1e9)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def test_fills_and_residuals_are_named() -> None:
    text = correct_code("clues")
    for fill, word in (("-1e9", "float16: a score of -1e+09"), ("-1e4", "scores below -10000")):
        verdict = judge(Version("fill", 0, (), text.replace("float('-inf')", fill)))
        assert verdict.right and any(word in reason for reason in verdict.not_checked), verdict
    residual = judge(next(v for v in ALL if v.style == "correct_residual"))
    assert any("residual inside the layer" in part for part in residual.checked), residual


class Weightless:
    def forward(self, x):  # type: ignore[no-untyped-def]
        return x + x.mean(1, keepdims=True)


@every("name, width", itertools.product(("attention", "OneHead"), "qX"))
def test_a_single_head_gets_another_width_than_the_model(tmp_path: Path, name: str, width: str) -> None:
    file = tmp_path / "one.py"
    file.write_text(ONE_HEAD.replace("WIDTH", width))
    verdict = hw.check(f"{file}:{name}")
    assert verdict.bugs == (("scale-model-width",) if width == "X" else ()), verdict


def test_every_attention_of_a_file_is_checked_or_named(tmp_path: Path, invoke: Invoke) -> None:
    function, _, layer = ONE_HEAD.partition("class OneHead")
    right, wrong = (layer.replace("WIDTH", width) for width in "qX")
    block = f"class GPTBlock{wrong}\n"
    file = tmp_path / "many.py"
    file.write_text(f"{function}class CrossAttention{right}\nclass GPTAttention{wrong}\n{block}")
    outcome = invoke("check", file, "--json")
    record = json.loads(outcome.out)
    other = record["others"][-1]
    assert (outcome.code, record["target"], record["bugs"][0]["bug"]) == (1, "GPTAttention", "scale-model-width")
    assert (other["target"], other["right"], len(record["others"])) == ("CrossAttention", True, 2)
    assert "attention, in the same file" in other["not_checked"][0], other
    verdict = hw.check(file, lang="es")
    assert "\nCrossAttention: correcto\n" in str(verdict) and "en el mismo archivo" in str(verdict)
    assert (verdict.exit_code, [other.target for other in verdict.others]) == (1, ["GPTBlock", "CrossAttention"])


def test_an_object_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, Any] = {}
    exec(ONE_HEAD.replace("WIDTH", "q"), namespace)
    head = namespace["OneHead"](29, 11)
    head(torch.ones(2, 5, 29)).sum().backward()
    before = [(p.detach().clone(), p.grad.clone()) for p in head.parameters()]
    assert hw.check(head).right
    assert all(p.equal(w) and p.grad.equal(g) for p, (w, g) in zip(head.parameters(), before, strict=True))
    assert head.training
    text = correct_code("cache_kept", "unusual")
    (tmp_path / "used_cache.py").write_text(f"import torch\nfrom torch import nn\n{text}")
    monkeypatch.syspath_prepend(tmp_path)
    layer = importlib.import_module("used_cache").Attention(24, 3)
    with torch.no_grad():
        layer(torch.ones(5, 5, 24), use_cache=True)  # what it holds now is no part of a new text
    assert hw.check(layer).right


def test_names_that_are_not_there_are_not_passed_over() -> None:
    mapped = hw.check(Weightless, mapping={"q": "u"})
    assert mapped.not_checked[0].startswith("mapping=q=u: there is no weight u")
    absent = "z" * 9  # which this file does not write out
    assert hw.check(Weightless, args={absent: 3}).not_checked[0] == f"args={absent}: the file has no such name"
    with pytest.raises(hw.HeadwiseError, match="no role banana"):
        hw.check(Weightless, mapping={"banana": "q"})


def test_arguments_reach_a_file_as_they_are_written(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        correct_code("nano")
        .replace("__init__(self", "__init__(self, shape", 1)
        .replace("super().__init__()", "super().__init__(); assert shape == (3, 'a, b')", 1)
    )
    assert hw.check(path, args={"shape": (3, "a, b")}).right
    assert invoke("check", path, "--args", "shape=(3, 'a, b')").code == 0
    with pytest.raises(hw.HeadwiseError, match="numbers, texts"):
        hw.check(path, args={"shape": object()})
    text = correct_code("cache_object", "unusual")
    path.write_text("import torch\nfrom torch import nn\n" + text.replace("__init__(self):", "__init__(self, zork):"))
    assert "step by step" in str(hw.check(f"{path}:Attention", args={"zork": 3}).checked)


def test_what_was_to_be_done_before_a_call_is_no_bug(tmp_path: Path) -> None:
    """A name of a file that is not here, a method to be called first, axes or a part that we do not have."""
    right = correct_code("nano")
    inner = "B, T, self.n_head"
    with_part = right.replace("(self, config", "(self, config, rope").replace(
        "__init__()", "__init__(); self.rope = rope"
    )
    for code in (
        "from constants import *\n" + right.replace(inner, "B, T, ZORK"),
        right.replace("    def forward", "    def begin(self):\n        self.began = 1\n\n    def forward", 1).replace(
            "B, T, C =", "self.began + 1; B, T, C =", 1
        ),
        right.replace("B, T, C =", "x = x.permute(2, 1, 0); B, T, C =", 1),
    ):
        (tmp_path / "mine.py").write_text(code)
        verdict = hw.check(tmp_path / "mine.py", seconds=10)
        assert verdict.right is None and "Error" in str(verdict.not_checked), verdict
    # what is made elsewhere and called is the identity
    (tmp_path / "mine.py").write_text(with_part.replace("B, T, C =", "x = self.rope(x); B, T, C =", 1))
    verdict = hw.check(tmp_path / "mine.py")
    assert verdict.right and "rope, which is made elsewhere" in str(verdict)
    # a size whose name tells what it is
    (tmp_path / "mine.py").write_text("from constants import *\n" + right.replace(inner, "B, T, N_HEAD"))
    assert hw.check(tmp_path / "mine.py").right
    # without a reason to be elsewhere, the same name is the learner's
    (tmp_path / "mine.py").write_text(right.replace(inner, "B, T, ZORK"))
    assert [finding.bug for finding in hw.check(tmp_path / "mine.py").findings] == ["raises"]
    assert hw.check(SwitchedMask).right and hw.check(SwitchedMask, causal=True).right


class SwitchedMask(torch.nn.Module):
    def __init__(self, vit_n_heads: int, vit_hidden_dim: int) -> None:
        super().__init__()
        self.n_heads = vit_n_heads
        self.qkv = torch.nn.Linear(vit_hidden_dim, 3 * vit_hidden_dim)
        self.out = torch.nn.Linear(vit_hidden_dim, vit_hidden_dim)

    def forward(self, x: torch.Tensor, causal_mask: bool = False) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.n_heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        weights = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if causal_mask:
            weights = weights.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
        return self.out((weights.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))


OPTIONAL = correct_code("cached_layer")


@every("old, new, reason", TABLES["tried"])
def test_what_was_never_tried_is_said(old: str, new: str, reason: str) -> None:
    assert OPTIONAL.count(old) == 1
    verdict = judge(Version("optional", 0, (), OPTIONAL.replace(old, new)))
    assert verdict.right is True, verdict
    assert any(reason in text for text in verdict.not_checked), verdict


@every(
    "last",
    (
        "(S if cache is None else T + cache[0].shape[1])",  # the number of heads: as good as right in a short text
        "(S if cache is None else 9 * S)",  # all may be seen after the cache: right for one token at a time
    ),
)
def test_the_cache_is_read_in_pieces_and_further_than_its_sizes(last: str) -> None:
    text = correct_code("cached_concat").replace("S - T + 1)", f"{last} - T + 1)")
    assert judge(Version("pieces", 0, (), text)).bugs == ("cache-offset",)
