"""A survey in a real Chromium: filter, sort, switches, the large view with its text, comparison, and hostile input."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browser_types import Page
from browsing import Opener, faults, width_beyond
from report_browsing import classes, drawn, open_head, pixel, plain, press, ramp, readout, title
from surveys import broken_survey, survey_of

from headwise.heads.table import Survey
from headwise.records import HeadMap, HeadMaps
from headwise.view.report import write_report

pytestmark = pytest.mark.browser

LAYERS, HEADS, LENGTH, PASSAGE = 3, 5, 211, 37


def surveyed() -> Survey:
    """L0.H1 has weights of its own: token 7 looks at 3, then at 5, then beyond the passage at 100, which has a name."""
    words = tuple(f"w{i}" for i in range(LENGTH))
    survey = survey_of(LAYERS, HEADS, words, passage=PASSAGE, k=3)
    head = survey.profiles[1]
    keys, weights = np.zeros((PASSAGE, 3), np.int64), np.zeros((PASSAGE, 3), np.float32)
    keys[7], weights[7] = (3, 5, 100), (0.5, 0.25, 0.125)
    received = np.full(PASSAGE, 0.01, np.float32)
    received[11] = 0.4
    changed = replace(head, top_keys=keys, top_weights=weights, received=received)
    return replace(survey, profiles=(survey.profiles[0], changed, *survey.profiles[2:]))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("survey") / "report.html"
    write_report(path, surveyed())
    return path


def rows(page: Page) -> list[str]:
    """Names of the heads in the table, as shown, from top to bottom."""
    return page.evaluate(  # type: ignore[no-any-return]
        "[...document.querySelectorAll('#table tbody tr')].filter((r) => !r.hidden).map((r) => r.cells[0].textContent)"
    )


def column(page: Page, number: int) -> list[float]:
    texts = page.evaluate(
        "(n) => [...document.querySelectorAll('#table tbody tr')].map((r) => r.cells[n].firstChild.textContent)", number
    )
    return [float(text.replace("\u2212", "-")) for text in texts]


def heading(page: Page, name: str, place: int = 0) -> str:
    """Sorts by a column; the state it is in then."""
    button = page.locator("#table th[data-sort] button").get_by_text(name, exact=True).nth(place)
    button.click()
    return button.evaluate("e => e.closest('th').getAttribute('aria-sort')")  # type: ignore[no-any-return]


def test_the_table_sorts_by_any_column_both_ways(open_report: Opener) -> None:
    page = open_report()
    order = [profile.name for profile in surveyed().profiles]
    assert rows(page) == order
    for name, place in (("entropy", 5), ("ablation", 3)):
        assert heading(page, name) == "descending"
        assert column(page, place) == sorted(column(page, place), reverse=True)
        assert heading(page, name) == "ascending"
        assert column(page, place) == sorted(column(page, place))
    assert page.locator("th[aria-sort='ascending'], th[aria-sort='descending']").count() == 1
    assert heading(page, "head") == "ascending" and rows(page) == order
    assert heading(page, "head") == "descending" and rows(page) == order[::-1]
    heading(page, "roles")
    assert page.locator("#table tbody tr").first.locator(".badge").count() == 1
    page.locator("#table th button").first.focus()
    page.keyboard.press("Enter")
    assert rows(page) == order


def test_sorting_and_filters(open_report: Opener, tmp_path: Path) -> None:
    write_report(tmp_path / "broken.html", broken_survey())
    page = open_report(path=tmp_path / "broken.html")
    for _ in range(2):
        heading(page, "distance")
        assert set(rows(page)[-2:]) == {"encoder.L0.H0", "encoder.L0.H1"}
    page = open_report()
    page.fill("#find", "L1.")
    assert rows(page) == [f"L1.H{head}" for head in range(HEADS)]
    page.fill("#find", "delim l0")
    assert rows(page) == ["L0.H3"]
    page.check("#all-columns")
    assert heading(page, "norm") == "descending"
    page.fill("#find", "H3")
    open_head(page, "L0.H3")
    page.keyboard.press("ArrowRight")  # to the next that the filter leaves
    assert title(page) == "L1.H3"
    press(page, "ArrowLeft", "ArrowLeft", "Escape")
    assert title(page) == "L2.H3"
    page.fill("#find", "nothing like it")
    assert rows(page) == [] and page.locator(".matches").first.inner_text().startswith("0 of")
    page.fill("#find", "")
    assert len(rows(page)) == LAYERS * HEADS and page.locator(".matches").first.inner_text() == ""


def test_a_role_filters_the_table_and_fades_the_pictures(open_report: Opener) -> None:
    page = open_report()
    with_role = [profile.name for profile in surveyed().profiles if "previous token" in profile.roles]
    assert with_role == ["L0.H0"]
    page.locator("#roles > summary").click()
    button = page.locator("#cards").get_by_role("button", name="previous token")
    button.first.click()
    assert button.first.get_attribute("aria-pressed") == "true"
    assert rows(page) == with_role and page.locator(".head.faded").count() == LAYERS * HEADS - 1
    assert page.locator(".matches").first.inner_text() == f"1 of {LAYERS * HEADS} heads"
    page.locator("#cards").get_by_role("button", name="delimiter").click()
    assert rows(page) == ["L0.H0", "L0.H3"]  # either role
    page.get_by_role("button", name="Show all heads").click()
    assert len(rows(page)) == LAYERS * HEADS and page.locator(".head.faded").count() == 0
    assert page.evaluate("document.activeElement.id") == "find"


def test_the_arrow_keys_walk_over_the_table(open_report: Opener) -> None:
    page = open_report()
    page.locator("#table tbody th").first.focus()
    press(page, "ArrowDown", *5 * ["ArrowRight"], "ArrowUp", "ArrowUp")
    assert page.evaluate("document.activeElement.parentElement.cells[0].textContent") == "L0.H0"
    assert page.evaluate("document.activeElement.cellIndex") == 5
    tip = page.inner_text("#tip").splitlines()
    scores = surveyed().profiles[0].scores["entropy"]
    assert tip[0] == "L0.H0, entropy" and "even attention: 0.020" in tip
    assert f"{scores.high:.3f} over 7 documents" in tip[1]
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")
    page.keyboard.press("Enter")
    assert title(page) == "L0.H0"
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog:not([open])", state="attached")
    assert page.evaluate("document.activeElement.cellIndex") == 5
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.cellIndex") > 10
    stops = page.locator("#table tbody [tabindex='0']").count()
    assert stops == 1


def test_switches_change_the_pixels(open_report: Opener) -> None:
    page = open_report()

    def pixels() -> list[list[int]]:
        drawn(page)
        return [pixel(page, 1, row, column) for row in range(4, 32, 3) for column in (0, 2)]

    plain = pixels()
    page.check("main .log-scale")
    log = pixels()
    assert log != plain and sum(map(sum, log)) < sum(map(sum, plain))  # lower weights are darker now
    assert page.inner_text("main .ramp-low") == "a thousandth"
    page.check("main .hide-first")
    assert pixels() != log
    page.uncheck("main .hide-first")
    page.uncheck("main .log-scale")
    assert pixels() == plain


def test_the_enlarged_picture_reads_blocks(open_report: Opener) -> None:
    page = open_report()
    open_head(page, "L0.H1")
    cell = page.evaluate("panes[0].cell")
    page.locator(".map").first.hover(position={"x": 0.5 * cell, "y": 31.5 * cell})
    survey = surveyed()
    assert readout(page).startswith("tokens 205 to 210 look at tokens 0 to 6: ")
    share = float(readout(page).rsplit(" ", 1)[1])
    assert share == pytest.approx(float(survey.profiles[1].shares[31, 0]), abs=6e-4)


def test_a_token_marks_what_it_looks_at(open_report: Opener) -> None:
    page = open_report()
    open_head(page, "L0.H1")
    words = page.locator("#row-text .word")
    assert words.count() == PASSAGE and page.inner_text("#row-title") == "What each token receives"
    shade = "e => getComputedStyle(e).backgroundColor"
    received = [words.nth(at).evaluate(shade) for at in (10, 11, 12)]
    assert received[0] == received[2] != received[1]
    assert "\u2018\u2068w11\u2069\u2019 0.400" in page.inner_text("#row-most")

    words.nth(7).click()
    assert "w7" in page.inner_text("#row-title")
    assert classes(page, 7) == {"looking"} and words.nth(7).get_attribute("aria-pressed") == "true"
    assert [at for at in range(PASSAGE) if "marked" in classes(page, at)] == [3, 5]
    assert plain(page.inner_text("#row-most")) == (
        "At 'w7', L0.H1 looks at 'w3' (0.500), 'w5' (0.250). Beyond the passage shown: token 100 'w100' (0.125). "
        "The file keeps only the 3 strongest looks of each token."
    )
    assert words.nth(3).evaluate("e => getComputedStyle(e.firstChild).textDecorationLine") == "underline"

    words.nth(7).click()
    assert page.inner_text("#row-title") == "What each token receives"


def test_the_large_view_has_every_number_beside_its_controls(open_report: Opener) -> None:
    page = open_report()
    open_head(page, "L0.H0")
    cells = (
        "[...document.querySelectorAll('#numbers tr')].map((r) => [...r.cells].map((c) => c.firstChild?.textContent))"
    )
    lines = {name or "": rest for name, *rest in page.evaluate(cells)}
    assert "length of what the head adds" in page.inner_text("#numbers")
    assert lines[""] == ["value", "95 % interval", "even", "untrained"]
    assert lines["previous"] == ["0.950", "0.940 to 0.960", "0.020", "0.090"]
    assert lines["norm"][2] == "\u2013" and lines["entropy"][3] == "\u2013"
    assert len(lines) == 1 + len(surveyed().statistics) + 2
    assert "previous token" in page.inner_text("#large-roles")


def test_a_short_text_and_the_first_document_take_turns(open_report: Opener, tmp_path: Path) -> None:
    weights = np.tril(np.ones((5, 5), np.float32)) / np.arange(1, 6, dtype=np.float32)[:, None]
    maps = HeadMaps("toy", tuple("abcde"), (HeadMap(0, 1, weights),))
    write_report(tmp_path / "both.html", surveyed(), maps)
    page = open_report(path=tmp_path / "both.html")
    words = page.locator("#sentence .word")
    assert words.count() == 5
    open_head(page, "L0.H1")
    assert "token 3 'd' looks at token 0 'a': 0.250" in readout(page)
    page.locator("#row-text .word").nth(1).click()
    assert "token 1 'b' looks at token 0 'a': 0.500" in readout(page)
    press(page, "ArrowRight", "Escape")
    page.get_by_label("the first document").check()
    assert words.count() == PASSAGE
    drawn(page)
    open_head(page, "L0.H1")
    assert readout(page).startswith("tokens ")
    page.keyboard.press("Escape")
    page.get_by_label("the sentence", exact=True).check()
    assert words.count() == 5


def test_what_lies_beyond_the_passage_is_said_and_rescales_nothing(open_report: Opener, tmp_path: Path) -> None:
    """The strongest look of token 7 goes beyond the passage: the words in sight keep their share of it."""
    survey = surveyed()
    head = survey.profiles[1]
    far = head.top_weights.copy()
    far[7] = (0.05, 0.025, 0.9)
    changed = replace(head, top_weights=far)
    survey = replace(survey, profiles=(survey.profiles[0], changed, *survey.profiles[2:]))
    write_report(tmp_path / "far.html", survey)
    page = open_report(path=tmp_path / "far.html")
    page.locator("#sentence .word").nth(7).click()
    page.locator(".head[data-number='1'] .name").hover()
    assert "Beyond the passage shown: token 100 'w100' (0.900)." in plain(page.inner_text("#saying"))
    shades = [
        page.locator("#sentence .word").nth(at).evaluate("e => getComputedStyle(e).backgroundColor") for at in (3, 4)
    ]
    light, none = ([int(part) for part in shade[4:-1].split(",")] for shade in shades)
    assert none == ramp(page, 0) and 0 < sum(none) - sum(light) < 80  # a twentieth, not the darkest
    assert page.locator("#table tbody tr").nth(1).locator(".now").inner_text() == "w100 0.900 ↗"
    open_head(page, "L0.H1")
    assert "Beyond the passage shown" in page.inner_text("#row-most")


def test_text_is_readable_in_light_and_dark(open_report: Opener) -> None:
    page = open_report()
    drawn(page)
    assert faults(page) == []
    page.emulate_media(color_scheme="dark")
    open_head(page, "L0.H1")
    page.locator("#row-text .word").nth(7).click()
    assert faults(page) == []


def test_a_phone_has_no_sideways_scroll(open_report: Opener) -> None:
    page = open_report(390, 800, has_touch=True, is_mobile=True)
    page.check("#all-columns")
    page.click("text=What the columns mean")
    assert width_beyond(page) == 0 and page.evaluate("window.innerWidth") == 390
    page.locator("#table tbody td:nth-child(3)").nth(2).tap()
    assert title(page) == "L0.H2"
    assert page.evaluate("document.getElementById('large').scrollWidth") <= 390
    page.locator("#row-text .word").nth(3).tap()
    assert "w3" in page.inner_text("#row-title")
    assert width_beyond(page) == 0


def test_everything_hostile_is_shown_as_text(open_report: Opener, tmp_path: Path) -> None:
    write_report(tmp_path / "hostile.html", broken_survey())
    page = open_report(path=tmp_path / "hostile.html")
    assert page.inner_text("h1").startswith("</title><script>alert(4)</script>")
    assert "A note <img src=x onerror=alert(5)> & more." in page.inner_text(".notes")
    for name in ("encoder.L0.H0", "encoder.L0.H1", "cross.L0.H0"):
        open_head(page, name)
        press(page, "ArrowRight", "ArrowLeft")
        assert title(page) == name
        page.keyboard.press("Escape")
    assert page.locator("script").count() == 4 and page.locator("img").count() == 0


def test_cross_attention_looks_at_another_text(open_report: Opener, tmp_path: Path) -> None:
    survey = survey_of(1, 2, tokens=13, parts=("decoder", "cross"), k=2)
    write_report(tmp_path / "cross.html", survey)
    page = open_report(path=tmp_path / "cross.html")
    assert page.locator("#grid h3").all_inner_texts() == ["Decoder", "Cross"]
    open_head(page, "cross.L0.H1")
    assert "of the other text" in readout(page)
    page.locator("#row-text .word").nth(5).click()
    assert page.inner_text("#row-most").startswith("In the other text: key 5 (")
    assert not any("marked" in classes(page, at) for at in range(13))
    page.keyboard.press("Escape")
    page.locator("#grid .picture").nth(1).focus()
    page.keyboard.press("ArrowDown")
    assert "cross" in (page.evaluate("document.activeElement.getAttribute('aria-label')"))
