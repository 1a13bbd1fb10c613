"""Comparisons and the ledger in the terminal, as a page and as a picture."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from browser_types import Page
from browsing import Opener, faults, width_beyond
from comparisons import LOSS, all_comparisons, comparison, ledger
from terminals import printed as printed_on

from headwise.intervals import interval_of
from headwise.lab.results import ArmResult, Claim, Comparison, Ledger, Score
from headwise.table import shown
from headwise.view.lab import metric_table, page_html, print_comparison, print_ledger

HOSTILE = '<script>alert(1)</script> & "x" [bold]y[/bold] \ud800'


def plain() -> Comparison:
    return comparison("scale", {"a": {"loss": 0.5}, "b": {"loss": 0.7}, "c": {"loss": 0.5}})


def hostile() -> Comparison:
    record = comparison(HOSTILE, {HOSTILE: {"loss": 0.5}, "b" * 60: {"loss": 0.7}})
    return replace(record, data=HOSTILE, notes=(HOSTILE,))


def with_failure() -> Comparison:
    record = plain()
    return replace(record, arms=(*record.arms, ArmResult("bad", "", 31, {}, "diverged at step 3")))


def book() -> Ledger:
    return ledger((Claim(HOSTILE, "m", "depends", "r"), Claim("c", "m", "holds", "r")), all_comparisons())


def printed(record: Comparison | Ledger, width: int = 100) -> str:
    draw = print_ledger if isinstance(record, Ledger) else print_comparison
    return printed_on(draw, record, width=width)


def test_tables_and_terminal() -> None:
    cells = (7, 12345, 0.012345, 99.96, 100.04, 1234.5, -0.5, "word")
    assert [shown(cell) for cell in cells] == ["7", "12,345", "0.0123", "100", "100", "1,234", "-0.5", "word"]
    first, worse, same = metric_table(plain(), LOSS).rows
    assert first == ("a", 31, "0.500", "0.025", "the first", "-")
    assert worse == ("b", 31, "0.700", "0.050", "+0.200", "+0.175 to +0.225")
    assert same[4:] == ("+0.000", "-0.025 to +0.025")
    text = printed(with_failure())
    assert "scale: What about scale?" in text and "On made-up data, 7 steps, seeds 0 to 2." in text
    assert re.search(r"b +31 +0\.700 +0\.050 +\+0\.200 +\+0\.175 to \+0\.225", text)
    assert "diverged" in text and "a note" in text
    assert all(" ".join(verdict.split()) in " ".join(text.split()) for verdict in plain().verdicts)
    told = printed(book())
    assert "HOLDS: c" in told and "DEPENDS: <script>" in told and "Took 1.5 minutes" in told
    record = comparison("[red]x[/red]", {"[bold]a[/bold]": {"loss": 0.5}, "b": {"loss": 0.6}})
    assert "[bold]a[/bold]" in printed(record) and "[red]x[/red]" in printed(record)


@pytest.fixture
def opened(open_page: Opener, tmp_path: Path) -> Callable[..., Page]:
    """Opens the page of a record."""

    def opened(record: Comparison | Ledger, **options: Any) -> Page:
        (tmp_path / "page.html").write_text(page_html(record), encoding="utf-8")
        return open_page(tmp_path / "page.html", inside=True, **options)

    return opened


@pytest.mark.browser
def test_names_cannot_become_markup(opened: Callable[..., Page]) -> None:
    content = page_html(hostile())
    assert (
        content.count('<script type="module">') == 1
        and content.count("<script>") == 0
        and "default-src 'none'; style-src 'sha256-" in content
    )
    page = opened(hostile())
    for place in ("h1", "tbody th", "main p"):
        assert any(HOSTILE[:-1] in text for text in page.locator(place).all_text_contents()), place
    assert page.locator("main script").count() == 0


@pytest.mark.browser
def test_every_metric_has_its_plots_and_a_dot_stands_where_its_value_is(opened: Callable[..., Page]) -> None:
    page = opened(with_failure())
    assert [page.locator(name).count() for name in ("svg.plot", ".seed", ".reach")] == [2, 9, 2]
    values = page.locator("svg.plot").first
    assert values.get_attribute("aria-label") == "held-out loss: a 0.500; b 0.700; c 0.500"
    ticks = {
        float(tick.text_content() or ""): float(tick.get_attribute("x") or "") for tick in values.locator(".tick").all()
    }
    (low, left), (high, right) = min(ticks.items()), max(ticks.items())
    dots = [float(dot.get_attribute("cx") or "") for dot in values.locator(".seed").all()]
    expected = [value for arm in plain().arms for value in arm.scores["loss"].values]
    assert dots == pytest.approx([left + (v - low) / (high - low) * (right - left) for v in expected])
    for low, high in ((0.0, 1.0), (-0.3, 0.02), (5.0, 5.0), (0.0, 0.0), (0.413, 0.4131), (-7, 9e5)):
        round_ones = page.evaluate("([low, high]) => roundTicks(low, high)", [low, high])
        assert 2 <= len(round_ones) <= 7 and round_ones[0] <= low + 1e-12 and high <= round_ones[-1] + 1e-12
        gaps = [b - a for a, b in pairwise(round_ones)]
        assert gaps == pytest.approx([gaps[0]] * len(gaps))


@pytest.mark.browser
def test_what_cannot_be_drawn_is_left_out(opened: Callable[..., Page]) -> None:
    bad = ArmResult("bad", "", 31, {}, "diverged")
    odd = ArmResult("odd", "", 31, {"loss": Score((math.nan,) * 2, interval_of((math.nan,) * 2), None, None)}, None)
    flat = ArmResult("flat", "", 31, {"loss": Score((0.0, 0.0), interval_of([0.0, 0.0]), None, None)}, None)
    for arm, plots in ((bad, 0), (odd, 0), (flat, 1)):
        page = opened(replace(plain(), arms=(arm,), verdicts=()))
        assert page.locator("svg.plot").count() == plots
    assert "diverged" in page_html(replace(plain(), arms=(bad,)))


@pytest.mark.browser
def test_the_page_fits_a_phone_and_says_nothing_on_the_console(opened: Callable[..., Page]) -> None:
    record = replace(book(), comparisons=(hostile(), with_failure()))
    for scheme in ("light", "dark"):
        page = opened(record, width=390, color_scheme=scheme)
        assert width_beyond(page) == 0
        assert faults(page) == []
        colours = page.evaluate(
            "['.seed', '.arm'].map(name => getComputedStyle(document.querySelector(name)).fill)"
            ".concat(getComputedStyle(document.body).backgroundColor)"
        )
        assert len(set(colours)) == 3
    assert page.locator(".claim").count() == 2
    assert page.locator("#links a").all_text_contents()[2:] == [
        f"What about {HOSTILE}?",
        "What about scale?",
        "The machine",
    ]
    page.locator("#languages [lang=es]").click()
    assert page.locator("h2").first.inner_text().endswith("Las afirmaciones")
    assert "se cumple" in page.locator(".badge").all_inner_texts()
