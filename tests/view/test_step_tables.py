"""The steps of one head on the screen: what is printed adds up, in both languages.

A line is right when what is recomputed from the shown numbers above it is the shown result, but for their rounding: to
SLACK units of the last decimal. That the numbers themselves are exact is held by heads/test_steps.py.
"""

import itertools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from cases import refuses
from rich.cells import cell_len
from terminals import printed as printed_on
from terminals import printed_in_ascii

import headwise as hw
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import PRESETS
from headwise.heads.steps import example_model, head_steps
from headwise.layer.layer import MultiHeadAttention
from headwise.records import HeadSteps
from headwise.table import Table
from headwise.view.terminal import Content, decimals_for, print_steps
from headwise.words import table as phrases

SLACK = 20
HOSTILE = ("<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "a b", "\n", "עברית", "日本", "{0} $title")


class Shown(NamedTuple):
    """A table as a reader sees it."""

    columns: list[str]
    rows: list[tuple[str, list[str]]]


# The builders of what is shown.


def preset_steps(preset: str, at: int = 5, length: int = 7, head: int = 1, **sizes: Any) -> HeadSteps:
    """Steps of a model of a preset with no weight, gain or bias at 0 or 1."""
    torch.manual_seed(3)
    shape = {**PRESETS[preset].shape, "init_std": 0.2, "context": 64, **sizes}
    model = GPT(GPTConfig(vocab_size=11, **shape))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    ids = [i * 7 % 11 for i in range(length)]
    return head_steps(model, ids, [f"t{i}" for i in range(length)], model.config.n_layers - 1, head, at, preset)


def option_steps(gate: bool = False, **options: Any) -> HeadSteps:
    torch.manual_seed(4)
    model = GPT(GPTConfig(vocab_size=11, **{**PRESETS["verbs"].shape, "n_heads": 3, "d_model": 18}))
    layer = MultiHeadAttention(**{"d_model": 18, "n_heads": 3, "mask": hw.Causal(), **options})
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-0.7, 0.9)
    model.blocks[1].attention = layer
    if gate:
        layer.register_forward_pre_hook(
            lambda module, given, named: (given, {**named, "gate": torch.tensor([1.0, -0.6, 1.0])}), with_kwargs=True
        )
    return head_steps(model, [3, 1, 4, 1, 5], list("abcde"), 1, 1, 3, "options")


def example_steps() -> HeadSteps:
    model, tokens, name = example_model()
    ids = tokens.prompt("emma")
    return head_steps(model, ids, tokens.shown(ids), 0, 2, 3, name)


CASES: dict[str, Callable[[], HeadSteps]] = {
    "example": example_steps,
    **{preset: (lambda preset=preset: preset_steps(preset)) for preset in PRESETS},  # type: ignore[misc]
    "biases": lambda: preset_steps("nanogpt", bias=True, n_heads=2, d_model=14),
    "wide with qk-norm": lambda: preset_steps("fast", n_heads=2, d_model=80),
    "many heads": lambda: preset_steps("llama", n_heads=20, n_kv_heads=4, d_model=40, d_ff=8, head=7),
    "many keys": lambda: preset_steps("verbs", at=43, length=47, n_heads=2, d_model=12),
    "first position": lambda: preset_steps("llama", at=0),
    "tiny weights": lambda: preset_steps("nanogpt", init_std=0.004, n_heads=2, d_model=14),
    "softcap": lambda: option_steps(softcap=0.7),
    "alibi": lambda: option_steps(mask=hw.Causal() & hw.Alibi()),
    "softcap and alibi": lambda: option_steps(mask=hw.Causal() & hw.Alibi(), softcap=1.5),
    "sink": lambda: option_steps(sink=True, value_dim=3, out_bias=True),
    "window": lambda: option_steps(mask=hw.Window(1, 0)),
    "gate": lambda: option_steps(gate=True),
    "turned before the norm": lambda: option_steps(qk_norm=True, rope=hw.RoPE(before_norm=True)),
    "interleaved": lambda: option_steps(rope=hw.RoPE(dim=4, interleaved=True)),
}
_made: dict[str, HeadSteps] = {}


def steps_of(name: str) -> HeadSteps:
    if name not in _made:
        _made[name] = CASES[name]()
    return _made[name]


def tables_of(steps: HeadSteps, lang: str = "en") -> dict[str, Shown]:
    """The tables that are drawn, by their names."""
    parts = [part for _, parts in Content(steps, lang).sections() for part in parts]
    return {
        part.title: Shown([*part.columns], [(label.rstrip(), cells) for label, *cells in part.rows])
        for part in parts
        if isinstance(part, Table)
    }


every_case = pytest.mark.parametrize("name", CASES)


# The readers of what is shown.


def printed(steps: HeadSteps, lang: str = "en", width: int = 80, **options: Any) -> str:
    return printed_on(print_steps, steps, lang, width=width, **options)


def read_text(text: str) -> list[Shown]:
    """The tables of the terminal: indented lines. A line without label names columns; a band with the labels of the
    one above goes on with its rows."""
    tables: list[Shown] = []
    joined = False
    for indented, group in itertools.groupby(text.splitlines(), lambda line: line.startswith("  ")):
        joined = False
        for header, lines in itertools.groupby(group if indented else (), lambda line: line.startswith("   ")):
            if header:
                columns = next(iter(lines)).split()
                continue
            n = len(columns)
            rows = [(" ".join(line.split()[:-n]), line.split()[-n:]) for line in lines]
            if joined and [label for label, _ in rows] == [label for label, _ in tables[-1].rows]:
                tables[-1].columns.extend(columns)
                for (_, cells), (_, more) in zip(tables[-1].rows, rows, strict=True):
                    cells.extend(more)
            else:
                tables.append(Shown(columns, rows))
            joined = True
    return tables


# The reader with a calculator.


class Calculator:
    """Recomputes every derived number of the shown tables; `wrong` lists those that do not follow."""

    def __init__(self, tables: dict[str, Shown], steps: HeadSteps, lang: str = "en") -> None:
        self.tables, self.steps = tables, steps
        self.words = {key.removeprefix("trace."): phrase[lang] for key, phrase in phrases().items()}
        self.decimals = decimals_for(steps)
        self.unit = 10.0**-self.decimals
        self.wrong: list[str] = []
        self.checked = 0
        self.vectors()
        self.scores()
        self.softmax()
        self.values()
        self.output()

    def shown(self, cell: str) -> float:
        assert len(cell.split(".")[1]) == self.decimals
        return float(cell)

    def rows(self, table: str) -> list[tuple[str, dict[str, float]]]:
        """Each line as numbers by column, without the cells that hold none."""
        columns, rows = self.tables[table]
        return [
            (label, {name: self.shown(cell) for name, cell in zip(columns, cells, strict=True) if cell not in "…-"})
            for label, cells in rows
        ]

    def check(self, what: str, shown: float, recomputed: float) -> None:
        self.checked += 1
        if abs(shown - recomputed) > SLACK * self.unit:
            self.wrong.append(what)

    def features(self, row: dict[str, float]) -> dict[int, float]:
        return {int(name): value for name, value in row.items() if name.isdigit()}

    def vectors(self) -> None:
        kinds = [stage.kind for stage in self.steps.query]
        for before, kind in itertools.pairwise(kinds):
            old = [self.features(row) for _, row in self.rows(before)]
            for (label, row), line in zip(self.rows(kind), old, strict=True):
                if kind == "normed":
                    self.normed(label, row, line)
                else:
                    self.turned(label, self.features(row), line)
        lines = self.rows(kinds[-1])
        q = self.features(lines[0][1])
        for (label, row), (_, k), (_, score) in zip(self.rows("products"), lines[1:], self.rows("scores"), strict=True):
            for d, product in self.features(row).items():
                self.check(f"product {label} {d}", product, q[d] * self.features(k)[d])
            dot = row.pop("q·k")
            self.check(f"dot {label}", dot, math.fsum(row.values()))
            self.check(f"dot again {label}", score["q·k"], dot)

    def normed(self, label: str, row: dict[str, float], line: dict[int, float]) -> None:
        gains = [self.features(gain) for _, gain in self.rows("gains")][label.startswith("k")]
        squares = math.fsum(value**2 for value in line.values())
        if self.words["rest_squares"] in row:
            squares += row[self.words["rest_squares"]]
        mean = squares / len(self.steps.query[0].values) + self.steps.norm_eps
        self.check(f"r {label}", row["r"], math.sqrt(mean))
        for d, value in self.features(row).items():
            self.check(f"normed {label} {d}", value, line[d] / row["r"] * gains[d])

    def turned(self, label: str, row: dict[int, float], line: dict[int, float]) -> None:
        position = str(self.steps.at) if label.startswith("q ") else label.split()[0][1:]
        angles = {name.split()[0]: row for name, row in self.rows("angles")}[position]
        turned = set()
        for m, (a, b) in enumerate(self.steps.pairs):
            if a in row:
                cos, sin = angles[f"cos{m}"], angles[f"sin{m}"]
                self.check(f"turned {label} {a}", row[a], line[a] * cos - line[b] * sin)
                self.check(f"turned {label} {b}", row[b], line[b] * cos + line[a] * sin)
                turned |= {a, b}
        for d in set(row) - turned:
            self.check(f"not turned {label} {d}", row[d], line[d])

    def scores(self) -> None:
        width = len(self.steps.query[0].values)
        for label, row in self.rows("scores"):
            names = list(row)
            self.check(f"score {label}", row[names[1]], row["q·k"] / math.sqrt(width))
            if self.steps.softcap is not None:
                cap = self.steps.softcap
                self.check(f"capped {label}", row[names[2]], cap * math.tanh(row[names[1]] / cap))
            if self.words["bias"] in row:
                self.check(f"logit {label}", row[names[-1]], row[names[-3]] + row[names[-2]])
            assert names[-1] == self.words["logit"]

    def softmax(self) -> None:
        logit, shifted, weight = (self.words[name] for name in ("logit", "shifted", "weight"))
        *rows, (last, totals) = self.rows("softmax")
        assert last == self.words["total"]
        before = dict(self.rows("scores"))
        top = max(row[logit] for _, row in rows if logit in row)
        for label, row in rows:
            if logit in row:
                if label != self.words["sink"]:
                    self.check(f"logit again {label}", row[logit], before[label][logit])
                self.check(f"shifted {label}", row[shifted], row[logit] - top)
                self.check(f"exp {label}", row["exp"], math.exp(row[shifted]))
            self.check(f"weight {label}", row[weight], row["exp"] / totals["exp"])
        self.check("total", totals["exp"], math.fsum(row["exp"] for _, row in rows))
        self.check("weights", totals[weight], math.fsum(row[weight] for _, row in rows))
        self.check("weights are 1", totals[weight], 1.0)
        self.weights = {label: row[weight] for label, row in rows}

    def values(self) -> None:
        *rows, (_, summed) = self.rows("weighted")
        values = {label[1:]: row for label, row in self.rows("values")}
        weights = {label[1:]: row for label, row in self.weights.items()}
        for label, row in rows:
            place = label.split(" v")[-1]
            for e, value in row.items() if place in values else ():
                self.check(f"weighted {label} {e}", value, weights[place] * values[place][e])
        for e, value in summed.items():
            self.check(f"summed {e}", value, math.fsum(row[e] for _, row in rows))
        self.out = summed
        if self.steps.gate is not None:
            ((_, gated),) = self.rows("gated")
            for e, value in gated.items():
                self.check(f"gated {e}", value, summed[e] * self.steps.gate)
            self.out = gated

    def output(self) -> None:
        added, lines = self.words["added"], self.rows("added")
        mine = next(row for label, row in lines if label.startswith("→"))
        for label, row in self.rows("wo"):
            result = row.pop(added)
            rest = row.pop(self.words["rest"], 0.0)
            self.check(f"added {label}", result, math.fsum(row[e] * self.out[e] for e in row) + rest)
            self.check(f"added again {label}", mine[label[2:]], result)
        for label, row in lines:
            squares = math.fsum(value**2 for value in self.features(row).values())
            self.check(f"norm {label}", row["|·|"], math.sqrt(squares + row.get(self.words["rest_squares"], 0.0)))
        *heads, (_, layer) = lines
        x, again, new = (self.features(row) for _, row in self.rows("residual"))
        for c, value in self.features(layer).items():
            self.check(f"layer {c}", value, math.fsum(row[str(c)] for _, row in heads))
            self.check(f"layer again {c}", again[c], value)
            self.check(f"new x {c}", new[c], x[c] + again[c])


@pytest.mark.slow
@every_case
def test_what_the_page_shows_adds_up(name: str) -> None:
    calculator = Calculator(tables_of(steps_of(name)), steps_of(name))
    assert calculator.wrong == []
    assert calculator.checked > 60


@every_case
def test_spanish_shows_the_same_numbers(name: str) -> None:
    english, spanish = tables_of(steps_of(name)), tables_of(steps_of(name), "es")
    assert english.keys() == spanish.keys()
    for table, shown in english.items():
        assert [cells for _, cells in shown.rows] == [cells for _, cells in spanish[table].rows], table
    if name in ("sink", "softcap and alibi", "wide with qk-norm"):
        assert Calculator(spanish, steps_of(name), "es").wrong == []


@every_case
@pytest.mark.parametrize(("lang", "width"), [("en", 80), ("es", 100)])
def test_the_terminal_shows_what_the_page_shows_digit_for_digit(name: str, lang: str, width: int) -> None:
    page = tables_of(steps_of(name), lang)
    tables = read_text(printed(steps_of(name), lang, width))
    assert dict(zip(page, tables, strict=True)) == page


def test_steps_are_told() -> None:
    text = printed(steps_of("verbs"))
    titles = ["The text", "The query and the keys", "Query times key", "Scale", "Softmax", "Weighted values",
              "Through W_O", "The residual stream"]  # fmt: skip
    places = [text.index(f"{number}. {title}") for number, title in enumerate(titles, 1)]
    assert places == sorted(places)
    assert list(tables_of(steps_of("verbs"))) == [
        "projected", "gains", "normed", "angles", "turned", "products", "scores", "softmax", "values", "weighted",
        "wo", "added", "residual",
    ]  # fmt: skip
    flat = " ".join(text.split())
    assert "→5 t5" in flat and "(6 t6)" in flat and "6 of 7 positions" in flat
    assert "rounded to 4 decimals" in flat
    assert "1e-06" in flat and "(0, 8), (1, 9)" in flat
    flat = " ".join(printed(steps_of("many heads")).split())
    assert "Key/value head 1 is read by the query heads 5, 6, 7, 8, 9." in flat
    assert "Of 40 features 8 are shown" in flat
    labels = [label.split()[0] for label, _ in tables_of(steps_of("many keys"))["softmax"].rows]
    assert labels == [*(f"k{j}" for j in range(44)), "total"]
    assert [label for label, _ in tables_of(steps_of("many heads"))["added"].rows][7] == "→head 7"
    assert "Of " not in printed(steps_of("example"))
    steps = option_steps(mask=hw.Causal(offset=-9))
    assert "look at nothing" in printed(steps)
    assert "nada" in printed(steps, "es")
    assert "a learned logit" in printed(steps_of("sink")) and "its gate, -0.6000" in printed(steps_of("gate"))
    assert decimals_for(steps_of("example")) == 4
    assert 4 < decimals_for(steps_of("tiny weights")) <= 8
    wo = tables_of(steps_of("tiny weights"))["added"]
    assert all(max(abs(float(cell)) for cell in cells) >= 100 * 10.0 ** -decimals_for(steps_of("tiny weights"))
               for _, cells in wo.rows)  # fmt: skip
    assert not re.search(r"-0\.0+\b", printed(steps_of("llama")))


@pytest.mark.slow
def test_languages_and_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CASES:
        text = printed(steps_of(name), "es")
        assert not re.findall(r"\b(the|of|head|keys?|weight|layer|sum|are|at|is|and)\b", text, re.IGNORECASE)
    refuses(lambda: printed(steps_of("example"), "fr"), r"^lang='fr' is not known; one of en, es$")
    text = printed_in_ascii(print_steps, hostile_steps(), "es")
    assert r"\u05e2" in text and "sqrt 6" in text and "posicion" in text
    monkeypatch.setenv("TERM", "xterm-256color")
    text = printed(steps_of("example"), force_terminal=True, no_color=False)
    assert re.search(r"\x1b\[1m  total", text)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize("options", [{}, {"soft_wrap": True}])
def test_no_line_is_wider_than_the_terminal_or_100(width: int, options: dict[str, Any]) -> None:
    for name in ("example", "verbs", "llama", "many heads"):
        text = printed(steps_of(name), "es", width, **options)
        assert max(map(cell_len, text.splitlines())) <= min(width, 100)
        assert "\x1b" not in text


def hostile_steps() -> HeadSteps:
    model = GPT(GPTConfig(vocab_size=11, **{**PRESETS["verbs"].shape, "n_heads": 3, "d_model": 18}))
    return head_steps(model, list(range(len(HOSTILE))), HOSTILE, 1, 1, 6, "<script>alert(3)</script> [bold] {x} $y")


def test_tokens_are_text_and_nothing_else() -> None:
    steps = hostile_steps()
    text = printed(steps, force_terminal=False)
    assert "{0}␣$title" in text and "[bold] {x} $y" in text and "a␣b" in text and "⏎" in text
    tables = tables_of(steps)
    labels = [label for label, _ in tables["softmax"].rows]
    assert labels[0] == "k0 <script>alert(1)</script>" and labels[4] == "k4 עברית"
