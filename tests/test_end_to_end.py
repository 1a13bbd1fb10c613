"""A hostile text from the command to the page: trained on and looked at as a user would."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browsing import Opener
from invoking import process

SCRIPT = "<script>alert(1)</script>"
HOSTILE = "".join(f'{n} {SCRIPT}\n"><img src=x onerror=alert(2)>\n' for n in range(24))
NAME = "<img src=x onerror=alert(3)>"


def done(folder: Path, *arguments: object) -> str:
    """What the command prints on standard output, run in `folder`; it must succeed."""
    outcome = process(*arguments, cwd=folder)
    assert outcome.code == 0, outcome.err
    return outcome.out


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a run on a text of tags, in a file whose name is one; the run is called after it.

    Beside it what `headwise heads` printed as it put such a text into the report.
    """
    folder = tmp_path_factory.mktemp("hostile")
    (folder / f"{NAME}.txt").write_text(HOSTILE, encoding="utf-8")
    done(folder, "train", f"{NAME}.txt", "--steps", 5, "--layers", 2, "--width", 12, "--heads", 3, "--head-dim", 4)
    report = f"runs/{NAME}/report.html"
    return folder, done(folder, "heads", f"runs/{NAME}", "--text", SCRIPT, "--html", report)


def test_heads_on_a_hostile_text_prints_the_map(hostile: tuple[Path, str]) -> None:
    folder, printed = hostile
    assert all(f"L{layer}.H{head}" in printed for layer in range(2) for head in range(3))
    labels = re.findall(r"^ *(\S) ", printed, re.MULTILINE)
    assert "".join(labels[: len(SCRIPT)]) == SCRIPT
    assert "\x1b" not in printed
    assert printed.splitlines()[-1] == f"report: runs/{NAME}/report.html"
    page = (folder / "runs" / NAME / "report.html").read_text("utf-8")
    assert SCRIPT not in page and "<img" not in page


@pytest.mark.browser
def test_the_report_in_a_browser(hostile: tuple[Path, str], open_page: Opener) -> None:
    page = open_page(hostile[0] / "runs" / NAME / "report.html")
    page.wait_for_selector("main[data-drawn='6']", timeout=10_000)
    assert page.locator("#grid canvas").count() == 6 and page.locator("img").count() == 0
    assert page.inner_text("h1") == NAME
    assert "".join(page.locator("#sentence .word bdi").all_inner_texts()) == SCRIPT
    assert page.locator("script[type=module]").count() == 1  # the page's own, and nothing that got in
    assert page.locator("script:not([type])").count() == 0
    assert page.locator("#samples li").count() == 5
