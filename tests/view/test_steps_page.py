"""The steps of one head on the screen: what is printed adds up, in the terminal and on the page, in both languages.

Every shown number stands for an interval, half a unit of its last decimal wide on either side. A line is right when
the interval recomputed from the shown numbers above it meets the interval of the shown result.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import string
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from browsing import Opener, unreadable, width_beyond
from rich.cells import cell_len
from rich.console import Console

import headwise as hw
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import PRESETS
from headwise.heads.steps import example_model, head_steps
from headwise.layer.layer import MultiHeadAttention
from headwise.records import HeadSteps
from headwise.view.phrases import WORDS
from headwise.view.step_tables import MOST_KEYS, decimals_for
from headwise.view.steps import print_steps, steps_html, write_steps

HOSTILE = ("<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "a b", "\n", "עברית", "日本", "{0} $title")


class Near(NamedTuple):
    """Every number from low to high."""

    low: float
    high: float

    def __add__(self, other: Any) -> Near:
        other = near(other)
        return Near(self.low + other.low, self.high + other.high)

    def __sub__(self, other: Any) -> Near:
        other = near(other)
        return Near(self.low - other.high, self.high - other.low)

    def __mul__(self, other: Any) -> Near:
        corners = [a * b for a in self for b in near(other)]
        return Near(min(corners), max(corners))

    def __truediv__(self, other: Any) -> Near:
        low, high = near(other)
        assert low > 0
        return self * Near(1 / high, 1 / low)

    def through(self, rising: Callable[[float], float]) -> Near:
        return Near(rising(self.low), rising(self.high))


def near(value: Any) -> Near:
    return value if isinstance(value, Near) else Near(value, value)


def total(values: Any) -> Near:
    return sum(values, Near(0.0, 0.0))


def root(value: Near) -> Near:
    return Near(math.sqrt(max(0.0, value.low)), math.sqrt(max(0.0, value.high)))


def square(value: Near) -> Near:
    corners = [value.low**2, value.high**2]
    return Near(0.0 if value.low < 0 < value.high else min(corners), max(corners))


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


def page_of(name: str, lang: str = "en") -> _Page:
    return read_page(steps_html(steps_of(name), lang))


every_case = pytest.mark.parametrize("name", CASES)


# The readers of what is shown.


def printed(steps: HeadSteps, lang: str = "en", width: int = 80, **options: Any) -> str:
    file = io.StringIO()
    print_steps(Console(file=file, width=width, **options), steps, lang)
    return file.getvalue()


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


class _Page(HTMLParser):
    """The tables of a page, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, Shown] = {}
        self.cell: str | None = None
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.tags.append(tag)
        if tag == "table":
            self.tables[str(given["data-name"])] = Shown([], [])
        elif tag in ("td", "th"):
            self.cell, self.kind = "", given.get("scope") or given.get("class") or ""

    def handle_data(self, data: str) -> None:
        if self.cell is not None:
            self.cell += data

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("td", "th") or self.cell is None:
            return
        table = list(self.tables.values())[-1]
        if self.kind == "col":
            table.columns.append(self.cell)
        elif self.kind == "row":
            table.rows.append((self.cell, []))
        elif self.kind != "bar" and table.rows:
            table.rows[-1][1].append(self.cell)
        self.cell = None


def read_page(page: str) -> _Page:
    reader = _Page()
    reader.feed(page)
    return reader


# The reader with a calculator.


class Calculator:
    """Recomputes every derived number of the shown tables; `wrong` lists those that do not follow."""

    def __init__(self, tables: dict[str, Shown], steps: HeadSteps, lang: str = "en") -> None:
        self.tables, self.steps, self.words = tables, steps, WORDS[lang]
        self.decimals = decimals_for(steps)
        self.unit = 10.0**-self.decimals
        self.wrong: list[str] = []
        self.checked = 0
        self.vectors()
        self.scores()
        self.softmax()
        self.values()
        self.output()

    def shown(self, cell: str) -> Near:
        assert len(cell.split(".")[1]) == self.decimals
        return Near(float(cell) - self.unit / 2, float(cell) + self.unit / 2)

    def rows(self, table: str) -> list[tuple[str, dict[str, Near]]]:
        """Each line as numbers by column, without the cells that hold none."""
        columns, rows = self.tables[table]
        return [
            (label, {name: self.shown(cell) for name, cell in zip(columns, cells, strict=True) if cell not in "…-"})
            for label, cells in rows
        ]

    def check(self, what: str, shown: Near, recomputed: Near) -> None:
        self.checked += 1
        slack = 1e-9 * self.unit
        if shown.low > recomputed.high + slack or recomputed.low > shown.high + slack:
            self.wrong.append(what)

    def features(self, row: dict[str, Near]) -> dict[int, Near]:
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
            self.check(f"dot {label}", dot, total(row.values()))
            self.check(f"dot again {label}", score["q·k"], dot)

    def normed(self, label: str, row: dict[str, Near], line: dict[int, Near]) -> None:
        gains = [self.features(gain) for _, gain in self.rows("gains")][label.startswith("k")]
        squares = total(square(value) for value in line.values())
        if self.words["rest_squares"] in row:
            squares += row[self.words["rest_squares"]]
        mean = squares / len(self.steps.query[0].values) + self.steps.norm_eps
        self.check(f"r {label}", row["r"], root(mean))
        for d, value in self.features(row).items():
            self.check(f"normed {label} {d}", value, line[d] / row["r"] * gains[d])

    def turned(self, label: str, row: dict[int, Near], line: dict[int, Near]) -> None:
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
                capped = row[names[1]].through(lambda s: cap * math.tanh(s / cap))  # noqa: B023
                self.check(f"capped {label}", row[names[2]], capped)
            if self.words["bias"] in row:
                self.check(f"logit {label}", row[names[-1]], row[names[-3]] + row[names[-2]])
            assert names[-1] == self.words["logit"]

    def softmax(self) -> None:
        logit, shifted, weight = (self.words[name] for name in ("logit", "shifted", "weight"))
        *rows, (last, totals) = self.rows("softmax")
        assert last == self.words["total"]
        before = dict(self.rows("scores"))
        top = max((row[logit] for _, row in rows if logit in row), key=lambda value: value.high)
        for label, row in rows:
            if logit in row:
                if label != self.words["sink"]:
                    self.check(f"logit again {label}", row[logit], before[label][logit])
                self.check(f"shifted {label}", row[shifted], row[logit] - top)
                self.check(f"exp {label}", row["exp"], row[shifted].through(math.exp))
            self.check(f"weight {label}", row[weight], row["exp"] / totals["exp"])
        self.check("total", totals["exp"], total(row["exp"] for _, row in rows))
        self.check("weights", totals[weight], total(row[weight] for _, row in rows))
        self.check("weights are 1", totals[weight], near(1.0))
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
            self.check(f"summed {e}", value, total(row[e] for _, row in rows))
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
            rest = row.pop(self.words["rest"], near(0.0))
            self.check(f"added {label}", result, total(row[e] * self.out[e] for e in row) + rest)
            self.check(f"added again {label}", mine[label[2:]], result)
        for label, row in lines:
            squares = total(square(value) for value in self.features(row).values())
            self.check(f"norm {label}", row["|·|"], root(squares + row.get(self.words["rest_squares"], near(0.0))))
        *heads, (_, layer) = lines
        x, again, new = (self.features(row) for _, row in self.rows("residual"))
        for c, value in self.features(layer).items():
            self.check(f"layer {c}", value, total(row[str(c)] for _, row in heads))
            self.check(f"layer again {c}", again[c], value)
            self.check(f"new x {c}", new[c], x[c] + again[c])


@pytest.mark.slow
@every_case
def test_what_the_page_shows_adds_up(name: str) -> None:
    calculator = Calculator(page_of(name).tables, steps_of(name))
    assert calculator.wrong == []
    assert calculator.checked > 60


@every_case
def test_spanish_shows_the_same_numbers(name: str) -> None:
    english, spanish = page_of(name).tables, page_of(name, "es").tables
    assert english.keys() == spanish.keys()
    for table, shown in english.items():
        assert [cells for _, cells in shown.rows] == [cells for _, cells in spanish[table].rows], table
    if name in ("sink", "softcap and alibi", "wide with qk-norm"):
        assert Calculator(spanish, steps_of(name), "es").wrong == []


@every_case
@pytest.mark.parametrize(("lang", "width"), [("en", 80), ("es", 100)])
def test_the_terminal_shows_what_the_page_shows_digit_for_digit(name: str, lang: str, width: int) -> None:
    page = page_of(name, lang).tables
    tables = read_text(printed(steps_of(name), lang, width))
    assert dict(zip(page, tables, strict=True)) == page


def derived(table: str, shown: Shown) -> Iterator[tuple[int, int]]:
    """The places of the numbers that follow from others above them."""
    for row, (label, cells) in enumerate(shown.rows):
        if table in ("projected", "gains", "angles", "values") or (table, label) in (
            ("added", "b_O"),
            ("residual", "x"),
        ):
            continue
        for column, cell in enumerate(cells):
            given = shown.columns[column] in ("rest", "rest²") or (table == "wo" and column < len(cells) - 1)
            if cell not in "…-" and not given:
                yield row, column


@pytest.mark.parametrize("name", ["example", "verbs", "sink"])
def test_the_calculator_sees_a_wrong_number(name: str) -> None:
    """The check itself: with one shown number off by 0.02, wherever it is derived, some line does not follow."""
    steps, page = steps_of(name), page_of(name).tables
    places = [(table, *place) for table, shown in page.items() for place in derived(table, shown)]
    for table, row, column in places[:: 1 + len(places) // 60]:
        cells = page[table].rows[row][1]
        before = cells[column]
        cells[column] = f"{float(before) + 0.02:.{decimals_for(steps)}f}"
        assert Calculator(page, steps).wrong, (table, row, column)
        cells[column] = before
    assert Calculator(page, steps).wrong == []


@every_case
def test_sums_and_products_keep_the_stated_rule(name: str) -> None:
    """The rule in the words of the page: (n + 1)/2 units for a sum, about (|a| + |b| + 1)/2 for a product."""
    steps = steps_of(name)
    tables = page_of(name).tables
    unit = 10.0 ** -decimals_for(steps)
    for _, cells in tables["products"].rows:
        *terms, shown = map(float, cells)
        assert abs(math.fsum(terms) - shown) <= ((len(terms) + 1) / 2 + 1e-6) * unit
    values = tables["values"].rows
    weights = [float(cells[-1]) for _, cells in tables["softmax"].rows]
    for weight, (_, row), (_, shown_row) in zip(weights, values, tables["weighted"].rows, strict=False):
        for value, shown in zip(row, shown_row, strict=True):
            if value != "…":
                a, b = weight, float(value)
                assert abs(a * b - float(shown)) <= ((abs(a) + abs(b) + 1) / 2 + unit) * unit


def test_small_numbers_get_more_decimals() -> None:
    assert decimals_for(steps_of("example")) == 4
    assert 4 < decimals_for(steps_of("tiny weights")) <= 8
    wo = page_of("tiny weights").tables["added"]
    assert all(max(abs(float(cell)) for cell in cells) >= 100 * 10.0 ** -decimals_for(steps_of("tiny weights"))
               for _, cells in wo.rows)  # fmt: skip
    assert not re.search(r"-0\.0+\b", printed(steps_of("llama")))


def test_the_steps_come_in_order_and_say_what_was_done() -> None:
    text = printed(steps_of("verbs"))
    titles = ["The text", "The query and the keys", "Query times key", "Scale", "Softmax", "Weighted values",
              "Through W_O", "The residual stream"]  # fmt: skip
    places = [text.index(f"{number}. {title}") for number, title in enumerate(titles, 1)]
    assert places == sorted(places)
    assert list(page_of("verbs").tables) == [
        "projected", "gains", "normed", "angles", "turned", "products", "scores", "softmax", "values", "weighted",
        "wo", "added", "residual",
    ]  # fmt: skip
    flat = " ".join(text.split())
    assert "→5 t5" in flat and "(6 t6)" in flat and "6 of 7 positions" in flat
    assert "rounded to 4 decimals" in flat
    assert "1e-06" in flat and "(0, 8), (1, 9)" in flat


def test_shared_keys_wide_heads_many_heads_and_many_keys_are_said() -> None:
    flat = " ".join(printed(steps_of("many heads")).split())
    assert "Key/value head 1 is read by the query heads 5, 6, 7, 8, 9." in flat
    assert "Of 20 heads 16 are shown" in flat and "Of 40 features 8 are shown" in flat
    flat = " ".join(printed(steps_of("many keys")).split())
    assert f"Of 44 keys the {MOST_KEYS} with the largest weights are shown" in flat
    labels = [label.split()[0] for label, _ in page_of("many keys").tables["softmax"].rows]
    keys = sorted(steps_of("many keys").keys, key=lambda key: -key.weight)
    assert labels == [f"k{j}" for j in sorted(key.position for key in keys[:MOST_KEYS])] + ["others", "total"]
    norms = steps_of("many heads").norms
    weakest = norms.index(min(norms))  # is shown, too, when it is the one asked about
    steps = preset_steps("llama", n_heads=20, n_kv_heads=4, d_model=40, d_ff=8, head=weakest)
    added = read_page(steps_html(steps)).tables["added"]
    assert f"→head {weakest}" in [label for label, _ in added.rows] and len(added.rows) == 18
    assert "Of " not in printed(steps_of("example"))


def test_a_position_that_sees_nothing_says_so() -> None:
    steps = option_steps(mask=hw.Causal(offset=-9))
    assert "look at nothing" in printed(steps) and "look at nothing" in steps_html(steps)
    assert "nada" in printed(steps, "es")


def test_the_sink_and_the_gate_are_said() -> None:
    assert "a learned logit" in printed(steps_of("sink")) and "its gate, -0.6000" in printed(steps_of("gate"))


def placeholders(phrase: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(phrase) if name}


def test_both_languages_have_every_phrase_with_the_same_facts() -> None:
    english, spanish = WORDS["en"], WORDS["es"]
    assert english.keys() == spanish.keys()
    for key, phrase in english.items():
        assert placeholders(phrase) == placeholders(spanish[key]), key
        assert phrase and spanish[key]
        assert " " not in phrase or phrase != spanish[key] or key in ("scaled", "scaled_by"), f"{key} is not translated"
    columns = ("rest", "rest_squares", "score", "capped", "bias", "logit", "shifted", "weight", "added")
    assert all(" " not in words[key] for words in WORDS.values() for key in columns)


def test_every_phrase_is_used() -> None:
    view = Path(hw.__file__).with_name("view")
    code = "".join(view.joinpath(name).read_text("utf-8") for name in ("steps.py", "step_tables.py", "step_page.py"))
    optional = {"projected", "normed", "turned"}
    assert [key for key in WORDS["en"] if f'"{key}"' not in code and key not in optional] == []


@pytest.mark.slow
def test_spanish_has_no_english_left() -> None:
    for name in CASES:
        page = steps_html(steps_of(name), "es")
        text = printed(steps_of(name), "es") + re.sub(r"<(style|script).*?</\1>", "", page, flags=re.DOTALL)
        visible_text = re.sub(r"<[^>]*>", " ", text)
        assert not re.findall(r"\b(the|of|head|keys?|weight|layer|sum|are|at|is|and)\b", visible_text, re.IGNORECASE)
    assert '<html lang="es">' in steps_html(steps_of("example"), "es")


@pytest.mark.parametrize(
    "draw", [steps_html, lambda steps, lang: print_steps(Console(file=io.StringIO()), steps, lang)]
)
def test_an_unknown_language_is_refused(draw: Callable[[HeadSteps, str], Any]) -> None:
    with pytest.raises(hw.HeadwiseError, match=r"^lang='fr' is not known; one of en, es$"):
        draw(steps_of("example"), "fr")


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
    page = read_page(steps_html(steps))
    assert page.tags.count("script") == 2 and "img" not in page.tags
    labels = [label for label, _ in page.tables["softmax"].rows]
    assert labels[0] == "k0 <script>alert(1)</script>" and labels[4] == "k4 עברית"
    assert Calculator(page.tables, steps).wrong == []


def test_a_terminal_without_unicode_gets_ascii() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_steps(Console(file=file, width=80), hostile_steps(), "es")
    file.seek(0)
    text = file.read()
    assert r"\u05e2" in text and "sqrt 6" in text and "posicion" in text


def test_a_terminal_marks_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    text = printed(steps_of("example"), force_terminal=True, no_color=False)
    assert re.search(r"\x1b\[1m  total", text)


def test_the_page_is_complete_and_locked(tmp_path: Path) -> None:
    write_steps(tmp_path / "steps.html", steps_of("example"))
    page = (tmp_path / "steps.html").read_text("utf-8")
    assert page == steps_html(steps_of("example"))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and policy[1].startswith("default-src 'none'; style-src 'sha256-")
    assert not re.search(r"https?:|@import|style=", page)
    assert [p.name for p in tmp_path.iterdir()] == ["steps.html"]


# In a real browser.


@pytest.fixture
def opened(open_page: Opener, tmp_path: Path) -> Callable[..., Any]:
    """Opens the page of some steps."""

    def open_steps(steps: HeadSteps, lang: str = "en", width: int = 1280, height: int = 900, **options: Any) -> Any:
        write_steps(tmp_path / "steps.html", steps, lang)
        return open_page(tmp_path / "steps.html", width, height, **options)

    return open_steps


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_readable_in_light_and_dark(opened: Callable[..., Any], scheme: str) -> None:
    page = opened(steps_of("example"), color_scheme=scheme)
    assert page.inner_text("h1") == "L0.H2 at position 3: m"
    assert unreadable(page) == []
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 120) == (scheme == "dark")
    bars = page.locator("table[data-name=softmax] rect").evaluate_all(
        "all => all.map(e => e.getBoundingClientRect().width)"
    )
    weights = [key.weight for key in steps_of("example").keys]
    assert bars == pytest.approx([96 * weight for weight in weights], abs=1)


@pytest.mark.browser
@pytest.mark.parametrize("lang", ["en", "es"])
def test_on_a_phone_wide_tables_scroll_and_the_page_does_not(opened: Callable[..., Any], lang: str) -> None:
    for name in ("example", "many heads"):
        page = opened(steps_of(name), lang, 360, 740, has_touch=True, is_mobile=True)
        assert width_beyond(page) == 0
        assert page.evaluate("window.innerWidth") == 360
        frame = page.locator(".scroll:has(table[data-name=added])")
        label = frame.locator("tbody th").first
        before = label.bounding_box()["x"]
        assert frame.evaluate("e => { e.scrollLeft = 9999; return e.scrollLeft; }") > 100
        assert label.bounding_box()["x"] == before  # the labels stand still
        for box in (link.bounding_box() for link in page.locator("nav a").all()):
            assert box["height"] >= 24


@pytest.mark.browser
def test_hostile_tokens_are_shown_as_text(opened: Callable[..., Any]) -> None:
    page = opened(hostile_steps(), width=360)
    assert width_beyond(page) == 0
    assert page.locator("script:not([type]), img").count() == 1
    assert page.locator(".tokens bdi").first.inner_text() == HOSTILE[0]


@pytest.mark.browser
def test_keys_reach_every_link_and_every_wide_table(opened: Callable[..., Any]) -> None:
    page = opened(steps_of("example"), width=500)
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        kind, outline = page.evaluate(
            "(() => { const e = document.activeElement;"
            " return [e.className || e.tagName, getComputedStyle(e).outlineStyle]; })()"
        )
        if kind == "steps":  # the body, after the last
            break
        assert outline == "solid", kind
        reached.append(kind)
    assert reached.count("A") == 8 and reached.count("scroll") == page.locator("table").count()
    page.locator(".scroll:has(table[data-name=added])").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(300)  # the policy forbids scripts that would wait in the page
    assert page.evaluate("document.activeElement.scrollLeft") > 0
    page.click("nav a[href='#softmax']")
    assert 0 <= page.locator("#softmax").bounding_box()["y"] < 100


@pytest.mark.browser
def test_paper_shows_whole_tables(opened: Callable[..., Any]) -> None:
    page = opened(steps_of("example"), width=1010, color_scheme="dark")  # A4, turned, less its margins
    page.emulate_media(media="print")
    assert page.evaluate("[...document.querySelectorAll('table')].every(t => t.getBoundingClientRect().right <= 1010)")
    assert not page.locator("nav a").first.is_visible()
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", background))) > 600
