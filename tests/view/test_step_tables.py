"""The steps of one head on the screen: every number is that of the record, rounded, in both languages.

That each line of the record follows from those above it is held by heads/test_steps.py; so what a reader recomputes
from shown numbers is the shown result, but for their rounding.
"""

import itertools
import math
import re
from collections.abc import Callable, Sequence
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
    return printed_on(print_steps, steps, lang=lang, width=width, **options)


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


# What they must show.


class Row(NamedTuple):
    """The numbers of a line."""

    by_feature: Sequence[float] = ()
    behind: Sequence[float | None] = ()  # those in the columns behind the features; None where a cell holds none
    terms: Sequence[float] = ()  # of the features that are left out, these are summed up in a column of their own


def recorded(steps: HeadSteps, tables: dict[str, Shown]) -> dict[str, list[Row]]:
    """The lines of each table, from the record."""
    keys, rows = steps.keys, dict[str, list[Row]]()
    vectors = [steps.query, *(key.stages for key in keys)]
    for n, stage in enumerate(steps.query):
        if stage.kind == "normed":
            rows["normed"] = [Row(v[n].values, [v[n].rms], squares(v[n - 1].values)) for v in vectors]
            rows["gains"] = [Row(gain or ()) for gain in (steps.q_gain, steps.k_gain)]
            continue
        rows[stage.kind] = [Row(vector[n].values) for vector in vectors]
        if stage.kind == "turned":
            pairs = len(tables["angles"].columns) // 2
            angles = {steps.at: stage} | {key.position: key.stages[n] for key in keys}
            rows["angles"] = [Row((), [*a.cos[:pairs], *a.sin[:pairs]]) for _, a in sorted(angles.items())]
    rows["products"] = [Row(key.products, [key.dot], key.products) for key in keys]
    fields = ["dot", "score"] + ["capped"] * (steps.softcap is not None)
    fields = [*fields, "bias", "logit"] if any(key.bias for key in keys) else [*fields[:-1], "logit"]
    rows["scores"] = [Row((), [getattr(key, field) for field in fields]) for key in keys]
    rows["softmax"] = [Row((), [key.logit, key.shifted, key.exp, key.weight]) for key in keys]
    if steps.sink is not None:
        rows["softmax"] += [Row((), [steps.sink, steps.sink - steps.top, steps.sink_exp, steps.sink_weight])]
    rows["softmax"] += [Row((), [None, None, steps.total, 1.0])]
    rows["values"] = [Row(key.value) for key in keys]
    rows["weighted"] = [Row(values) for values in (*(key.weighted for key in keys), steps.summed)]
    if steps.gate is not None:
        rows["gated"] = [Row(steps.out)]
    rows["wo"] = []
    for label, _ in tables["wo"].rows:
        c = int(label.removeprefix("c="))
        products = [weight * out for weight, out in zip(steps.wo[c], steps.out, strict=True)]
        rows["wo"].append(Row(steps.wo[c], [steps.added[steps.head][c]], products))
    lines = [*steps.added, *([] if steps.out_bias is None else [steps.out_bias]), steps.layer_out]
    rows["added"] = [Row(line, [math.hypot(*line)], squares(line)) for line in lines]
    rows["residual"] = [Row(steps.x), Row(steps.layer_out), Row(steps.x_new)]
    return rows


def squares(values: Sequence[float]) -> list[float]:
    return [value * value for value in values]


def numbers_of(columns: list[str], row: Row) -> list[float | None]:
    """The number of each column; None where features are left out, too."""
    hidden = [term for place, term in enumerate(row.terms) if str(place) not in columns]
    behind = iter([math.fsum(hidden), *row.behind] if hidden else row.behind)
    numbers = []
    for column in columns:
        if column.isdigit():
            numbers.append(row.by_feature[int(column)])
        else:
            numbers.append(None if column == "…" else next(behind))
    return numbers


@every_case
@pytest.mark.parametrize("lang", ["en", "es"])
def test_every_cell_is_its_number_of_the_record(name: str, lang: str) -> None:
    steps = steps_of(name)
    tables, decimals = tables_of(steps, lang), decimals_for(steps)
    expected = recorded(steps, tables)
    assert tables.keys() == expected.keys()
    for table, (columns, rows) in tables.items():
        for (label, cells), row in zip(rows, expected[table], strict=True):
            for cell, number in zip(cells, numbers_of(columns, row), strict=True):
                if number is None:
                    assert cell in "…-"
                    continue
                assert len(cell.split(".")[1]) == decimals
                assert abs(float(cell) - number) <= 0.5001 * 10.0**-decimals, (table, label, cell, number)


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
    text = printed_in_ascii(print_steps, hostile_steps(), lang="es")
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
