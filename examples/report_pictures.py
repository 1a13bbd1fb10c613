"""The report of the default run in three pictures: writes docs/report.md, docs/report-*.png.

    headwise train                                     # half a minute: runs/verbs
    python examples/report_pictures.py runs/verbs      # some seconds, with the package playwright and a Chromium

It does what a reader does: opens the page, looks for the head that reads the tense, silences it, types a sentence, and
puts two heads side by side. The numbers in docs/report.md are those that the page shows.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page

DOCS = Path(__file__).resolve().parents[1] / "docs"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
AUXILIARIES = ("will", "would", "am", "are", "is", "have", "has")


def within_reach(report: Path, folder: Path) -> Path:
    """A copy of the report whose script is a classic one: its names can be asked for from outside."""
    copy = folder / report.name
    html = report.read_text(encoding="utf-8")
    copy.write_text(html.replace('<script type="module">', "<script>"), encoding="utf-8")
    return copy


def looks(page: Page) -> list[dict[str, Any]]:
    """Every head: where it looks from the word that the page looks at, and how hard."""
    found: list[dict[str, Any]] = page.evaluate(
        """heads.map(({ name }, number) => {
          const { inside } = looksOf(number, view.at), key = inside.indexOf(Math.max(...inside));
          return { name, at: view.shown.tokens[key], weight: inside[key] };
        })"""
    )
    return found


def strongest(page: Page, words: tuple[str, ...]) -> dict[str, Any]:
    """The head that looks hardest at one of these words."""
    return max((look for look in looks(page) if look["at"] in words), key=lambda look: look["weight"])


def silence(page: Page, head: str) -> None:
    page.get_by_role("button", name=f"Silence {head}").first.click()


def after(page: Page) -> dict[str, str]:
    """What the page says of the next token, with and without the silenced heads."""
    told: dict[str, str] = page.evaluate(
        """(() => { const { after, rows, follow } = engine.next(view.at);
          const best = (column) => rows.reduce((most, row) => (row[column] > most[column] ? row : most));
          const chosen = rows.find(([id]) => id === follow), first = best(2), now = best(3);
          return { from: after, chosen: chosen[1], first: first[1], now: now[1],
            whole: percent(chosen[2]), less: percent(chosen[3]), then: percent(now[3]) }; })()"""
    )
    return told


def page_of(text: str, tense: dict[str, Any], verbs: list[dict[str, Any]], first: dict[str, str]) -> str:
    """The page; of `verbs`, the heads that look at the verb, the one that matters most comes first."""
    verb, *others = verbs
    idle = "".join(
        f" {look['name']} looks at `{look['at']}` as well ({look['weight']:.2f}), but without it the model still says"
        f" `{look['without']['now']}` ({look['without']['then']}): a large weight is not a cause."
        for look in others[-1:]
        if look["without"]["now"] == first["first"]
    )
    now = verb["without"]
    return f"""# The report

Written by `python examples/report_pictures.py`, which opens the report of the default run (seed 0) in a browser, does
these steps, and reads the numbers off the page. The numbers are of one machine.

`make run` ends with `runs/verbs/report.html`. The file needs no network, and the model itself is inside it.

![The report opens with a held-out line]({"report-sentence.png"})

**Point at a word.** The page opens with a line that the model has never seen, `{text}`, and looks at `{first["from"]}`:
the next word is predicted from there. The row of that word lights up in every head's picture, and the words it looks at
are coloured. With the pointer on the picture of {tense["name"]} the line is seen through that head: it looks at
`{tense["at"]}` ({tense["weight"]:.2f}), the word that decides the tense. {verb["name"]} looks at `{verb["at"]}`
({verb["weight"]:.2f}), the word that decides the verb.

![The head that reads the tense is silenced]({"report-silenced.png"})

**Silence it.** A click on the picture of {tense["name"]}: the model said `{first["first"]}` ({first["whole"]}), and now
it says `{first["now"]}` ({first["then"]}). `{first["chosen"]}` falls to {first["less"]}. Without {verb["name"]} instead
it says `{now["now"]}` ({now["then"]}).{idle} "Silence each in turn" ranks all heads for this word.

![Two heads side by side]({"report-heads.png"})

**Look closer.** The name below a picture enlarges it, and another head can stand beside it. Type under "Your own
sentence": maps, numbers and the expected words follow at each key, the page offers words that can stand next, and
marks a word that the model does not know, with the nearest that it knows.
`#{tense["name"]}/5` behind the address opens that head at that word, so that you can send a link. A slider there
multiplies what the head gives by -1 to 2, and the prediction follows; a link leads to the walk through the head, step
by step, and back. The page is in English or Spanish, as the browser or the reader chooses.

Which head reads the tense differs from seed to seed; [the picture book](heads.md) has three.
"""


def main() -> None:
    from playwright.sync_api import sync_playwright

    report = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/verbs").resolve() / "report.html"
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_playwright() as playwright, TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--headless", "--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        page.goto(within_reach(report, Path(folder)).as_uri())
        page.wait_for_function("() => document.getElementById('main').dataset.drawn > 0")
        text = page.input_value("#own-text")
        page.locator("#sentence .looking").click()
        tense = strongest(page, AUXILIARIES)
        decides = page.evaluate("view.shown.tokens[view.shown.tokens.indexOf('=') - 1]")
        verbs = [look for look in looks(page) if look["at"] == decides and look["weight"] > 0.5]
        for look in verbs:
            silence(page, look["name"])
            look |= {"without": after(page)}
            page.click("#wake")
        verbs.sort(key=lambda look: float(look["without"]["less"].split()[0]))
        page.locator(f".head .name[aria-label^='{tense['name']},']").hover()
        page.screenshot(path=DOCS / "report-sentence.png")
        page.click("#each")
        page.wait_for_selector("#ranking li")
        silence(page, tense["name"])
        page.mouse.move(640, 60)
        first = after(page)
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=DOCS / "report-silenced.png")
        page.click("#wake")
        page.locator(f".head .name[aria-label^='{tense['name']},']").click()
        page.select_option("#beside", verbs[0]["name"])
        page.screenshot(path=DOCS / "report-heads.png")
        browser.close()
    (DOCS / "report.md").write_text(page_of(text, tense, verbs, first), encoding="utf-8")
    print(f"wrote {DOCS / 'report.md'} and three pictures")


if __name__ == "__main__":
    main()
