"""What the report says below its first screen, in a real Chromium: table, roles, training run, two models."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser_types import Browser, Page
from browsing import Opener, opener
from report_browsing import drawn, open_head, plain, press, readout
from surveys import ROLES, SUMMARY, broken_survey, survey_of, survey_of_maps

from headwise.records import CurvePoint, HeadMap, HeadMaps, RunSummary, plain_data
from headwise.view.report import _run, write_report
from headwise.view.survey import KINDS

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The report of a survey of two layers of three heads, and of a run."""
    path = tmp_path_factory.mktemp("parts") / "report.html"
    write_report(path, survey_of(2, 3), summary=SUMMARY)
    with opener(browser) as opened:
        page = opened(path, inside=True)
        drawn(page)
        for details in page.locator(".last details").all():
            details.evaluate("e => { e.open = true; }")
        yield page


def told(page: Page, summary: RunSummary) -> None:
    """Makes the part on the training run anew from another one."""
    run = plain_data(_run(summary))
    page.evaluate("(run) => { data.run = run; makeRun(); }", run)


def cells(page: Page) -> list[list[str]]:
    """Every row of the table."""
    rows: list[list[str]] = page.evaluate(
        "[...document.querySelectorAll('#table tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    return rows


def headings(page: Page) -> list[str]:
    texts: list[str] = page.evaluate("sorted.map((heading) => heading.textContent)")
    return texts


def tip(page: Page, row: int, column: int) -> list[str]:
    """What the page says of one cell besides its value."""
    page.evaluate("([row, column]) => showTip(table.tBodies[0].rows[row].cells[column])", [row, column])
    return page.inner_text("#tip").splitlines()


def opened_report(open_page: Opener, path: Path, *arguments: Any, **options: Any) -> Page:
    write_report(path, *arguments, **options)
    page = open_page(path, inside=True)
    drawn(page)
    return page


def test_the_comparison_is_said_as_it_is(page: Page) -> None:
    for baseline, words in ((2.5, "0.200 nats per token better"), (2.0, "0.300 nats per token worse")):
        told(page, replace(SUMMARY, baseline_loss=baseline))
        assert words in page.inner_text("#losses"), baseline


def test_curves_bars_and_steps(page: Page) -> None:
    told(page, SUMMARY)
    widths = [page.locator(f"#losses rect.{kind}").get_attribute("width") for kind in ("ours", "theirs")]
    assert widths == ["92.00%", "100.00%"]
    told(page, SUMMARY)
    words = page.locator("svg.curve").get_attribute("aria-label") or ""
    assert "From step 0 to step 130 the training loss goes from 5.300 to 2.000" in words
    assert "The baseline is at 2.500." in words
    assert page.locator("#curve tr").last.locator("td").all_text_contents() == ["130", "2.000", "2.300"]
    assert page.locator("#facts dd").last.inner_text() == "<script>alert(2)</script>"
    assert page.locator(".samples pre").first.inner_text() == "</pre><script>alert(3)</script>"
    for losses in ((3.0,), (2.5, 2.5)):  # one point, and a flat line at the baseline
        curve = tuple(CurvePoint(index * 7, loss, loss) for index, loss in enumerate(losses))
        told(page, replace(SUMMARY, curve=curve))
        assert page.locator("svg.curve path").count() == 2
        assert not re.search(r"nan|inf", page.locator("#curve").inner_html(), re.IGNORECASE), losses
    for low, high in ((0.0, 1.0), (1.7, 6.4), (2.0, 2.0), (0.001, 0.0011), (0.0, 0.0), (3, 9000)):
        steps = page.evaluate("([low, high]) => roundSteps(low, high)", [low, high])
        assert steps[0] <= low and steps[-1] >= high and 2 <= len(steps) <= 7, (low, high)
        assert np.ptp(np.diff(steps)) < 1e-9, (low, high)


def test_tables_badges_and_dashes(page: Page, open_page: Opener, tmp_path: Path) -> None:
    survey, rows, names = survey_of(2, 3), cells(page), headings(page)
    assert len(rows) == 6 and names[:5] == ["head", "roles", "looks at", "ablation", "importance"]
    assert "previous" in names and names[5:7] == ["entropy", "confidence"]
    entropy = survey.profiles[1].scores["entropy"]
    assert rows[1][0] == "L0.H1" and rows[0][1].split() == ["previous", "token"]
    assert rows[1][5] == f"{entropy.mean:.3f}"
    interval = f"95 % interval: {entropy.low:.3f} to {entropy.high:.3f} over 7 documents".replace("-", "\u2212")
    assert tip(page, 1, 5) == ["L0.H1, entropy", interval, "even attention: 0.021"]
    ablation = names.index("ablation")
    assert re.fullmatch(r"[+\u2212]0\.\d{4,5}", rows[1][ablation])
    assert re.search(r"[+\u2212]0\.\d{4,5} to [+\u2212]0\.\d{4,5}", tip(page, 1, ablation)[1])
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_selector(".wide.goes-on")  # shaded where columns are out of sight
    page.set_viewport_size({"width": 2000, "height": 900})
    page.wait_for_selector(".wide:not(.goes-on)")
    page.set_viewport_size({"width": 1280, "height": 900})
    badges = page.locator("#grid .head").first.locator(".badge")
    assert badges.all_inner_texts() == ["previous token"]
    page.click("#languages [lang=es]")
    assert badges.all_inner_texts() == ["token anterior"] and "lang=es" in page.url
    page.click("#languages [lang=en]")
    page = opened_report(open_page, tmp_path / "broken.html", broken_survey())
    rows, names = cells(page), headings(page)
    distance, self_, ablation = (names.index(name) for name in ("distance", "self", "ablation"))
    assert rows[0][distance] == "\u2013" and tip(page, 0, distance)[1:] == ["not defined here"]
    assert rows[0][self_] == "0.500" and tip(page, 0, self_)[1] == "95 % interval: one document"
    assert rows[0][ablation] == rows[1][distance] == "\u2013"
    assert not re.search(r"\b(nan|inf|NaN|Infinity|undefined|null)\b", page.inner_text("body"))


def test_roles_are_told_with_rule_and_controls(page: Page, open_page: Opener, tmp_path: Path) -> None:
    card = page.locator(".role", has_text="previous token").first
    assert card.locator(".count").inner_text() in ("1 head", "2 heads")
    assert card.locator(".rule").inner_text() == (
        "previous of at least 0.4; even attention: 0.020 to 0.022; best untrained head: 0.090. Source: Voita et al. "
        "2019, 1905.09418."
    )
    assert card.locator(".strip").count() == 1 and page.locator(".role.unearned").count() > 0
    words = page.locator("#cards .badge").all_inner_texts()
    assert len(words) == len(set(words)) == len(ROLES)
    kinds = {re.findall(r"r\d", e.get_attribute("class") or "")[0] for e in page.locator("#cards .badge").all()}
    assert len(kinds) == min(len(ROLES), KINDS)
    bare = survey_of(3, 5, untrained=None, roles=())
    bare = replace(bare, profiles=tuple(replace(profile, roles=()) for profile in bare.profiles))
    other = opened_report(open_page, tmp_path / "bare.html", bare)
    assert other.locator("#roles").is_hidden() and other.locator("#run").is_hidden()
    assert "untrained" not in other.inner_text("main")


def test_two_heads_stand_side_by_side(open_page: Opener, tmp_path: Path) -> None:
    rows = np.tril(np.ones((5, 5))) / np.arange(1, 6)[:, None]
    both = (HeadMap(0, h, weights.astype(np.float32)) for h, weights in enumerate((np.eye(5), rows)))
    maps = HeadMaps("toy", tuple("abcde"), tuple(both))
    page = opened_report(open_page, tmp_path / "beside.html", survey_of_maps(maps), maps)
    open_head(page, "L0.H0")
    page.select_option("#beside", "L0.H1")
    assert page.locator(".pane-title:visible").all_inner_texts() == ["L0.H0", "L0.H1"]
    page.locator(".map").first.focus()
    press(page, "ArrowDown", "ArrowLeft")
    assert plain(readout(page)).splitlines() == [
        "L0.H0: token 4 'e' looks at token 2 'c': 0.000",
        "L0.H1: token 4 'e' looks at token 2 'c': 0.200",
    ]
    page.select_option("#beside", "")
    assert page.locator(".pane-title:visible").count() == 0
