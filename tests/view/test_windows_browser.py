"""The page of `headwise windows` in Chromium: a map that one touches."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from browser_types import Browser
from browsing import faults, opener

from headwise.intervals import Interval
from headwise.plan import SHARES, SINKS, KVReach, Windows
from headwise.view.page import windows_html
from headwise.words import Note


def reach() -> Windows:
    def head(n: int) -> KVReach:
        outside = tuple(
            tuple(Interval(x, x / 2, min(1.0, 2 * x), 3) for x in (0.9 / (n + s + 1), 0.3 / (n + 1), 0.0))
            for s in SINKS
        )
        reached = tuple(Interval(10.0 * n + k, 1.0, 90.0, 3) for k in range(len(SHARES)))
        needle = Interval(0.4, 0.3, 0.5, 8) if n else Interval(math.nan, math.nan, math.nan, 0)
        lift = replace(needle, mean=3 * needle.mean, low=0.9, high=1.5) if n else needle
        return KVReach(f"L{n}.KV0", n, 0, outside, reached, needle, lift)

    return Windows(
        "<b>m</b>",
        ("t",),
        3,
        290,
        101,
        (16, 64, 101),
        (head(0), head(1)),
        0.5,
        ("A note.", Note.of("note.needles", share="50%")),
    )


@pytest.mark.browser
def test_a_cell_is_told_in_both_languages(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(windows_html(reach()), encoding="utf-8")
    with opener(browser) as opened:
        page = opened(tmp_path / "page.html")
        assert page.inner_text("h1") == "How far the heads of <b>m</b> look"
        assert page.locator("tr.retrieves th").all_inner_texts() == ["L1.KV0"]
        assert page.locator("tr td:last-child").all_inner_texts() == ["\N{EN DASH}", "0.40 \N{MULTIPLICATION SIGN} 3.3"]
        page.get_by_role("button", name="0", exact=True).click()
        page.get_by_role("button", name="0.900").focus()
        page.keyboard.press("Enter")
        assert "with 0 first and 16 latest tokens, 90.00 %" in page.inner_text("#told")
        assert "45.00 to 100.00" in page.inner_text("#told")
        page.get_by_role("button", name="Español").click()
        assert page.inner_text("#notes") == "A note.\nEl modelo completa el 50% de las agujas escondidas."
        assert "con 0 primeros y 16 últimos tokens, el 90.00 %" in page.inner_text("#told")
        assert faults(page) == []
        page.emulate_media(color_scheme="dark")
        assert faults(page) == []
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == 390
