"""`headwise bugs`: the catalogue in the terminal, maps with a bug and without, the page of what training hides."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.cli.app import (
    UNITS,
    check_outputs,
    command,
    err,
    needs_torch,
    out,
    print_json,
    units_kept_in,
    wants_json,
)
from headwise.cli.early import in_words, language
from headwise.files import write_whole
from headwise.markup import Markup, escaped, picture
from headwise.table import Table
from headwise.words import phrase

if TYPE_CHECKING:
    from headwise.teach.bugs import Bug
    from headwise.teach.study import Shown

FOLDER = Path("runs") / "bugs"
PAGE = Path("docs") / "bugs.md"
INTRODUCTION = """\
Each bug of the catalogue in the verb model: trained with it and without, with the same seeds, batches and arithmetic.
The figure after ± is half the width of the 95 % interval (Student) of the differences seed by seed. The rule: **the
loss betrays** a bug if training fails, or if the loss of every seed is more than twice or less than half that of the
correct model. Whatever is less, nobody sees in a loss curve without the correct one beside it."""


@command()
def bugs(
    bug: str | None = None,
    seeds: int = 3,
    steps: int = 400,
    folder: Path = FOLDER,
    html: Path | None = None,
    page: Path | None = None,
    workers: int | None = None,
    train: bool = False,
) -> None:
    """List the bugs that learners write, and what training hides.

    Without an ID the catalogue; with one, what that bug is and does. With --train or --html the verb model is trained
    with it and without; after Ctrl-C the same command goes on where it was. `all` trains all and writes docs/bugs.md.
    """
    from headwise.teach.bugs import bug_named, catalogue, words

    lang = language()
    words(lang)
    if bug is None:
        _list(catalogue().values(), lang)
        return
    names = list(catalogue()) if bug == "all" else [bug_named(bug).id]
    page = page or PAGE if bug == "all" else None
    check_outputs((), {"--out": (folder, UNITS)}, html=html, page=page)
    if not (train or html or bug == "all"):
        _tell(bug_named(bug), lang)
        return
    with needs_torch():
        from headwise.teach.study import study
    with units_kept_in(folder) as report:
        comparison, shown = study(names, folder, seeds, steps, workers or os.cpu_count() or 1, report, lang)
    _write(html, page, shown, seeds, steps, lang)
    if wants_json():
        print_json("hidden", {"bugs": shown, "comparison": comparison})
        return
    if len(shown) == 1:
        out.print(bug_text(bug_named(shown[0].bug), lang))
    out.print("\n".join(f"{entry.bug}: {entry.sentence}" for entry in shown))
    for path in (html, page):
        if path is not None and path.exists():
            out.print(in_words("tell.written", path=path))


def _list(entries: Iterable[Bug], lang: str) -> None:
    from headwise.teach.bugs import words

    if wants_json():
        print_json("bugs", {"bugs": [{"id": entry.id, **entry.texts[lang]} for entry in entries]})
    else:
        out.print("\n".join(f"{entry.id:<26} {entry.name(lang)}" for entry in entries))
        err.print("\n" + words(lang)["of_the_list"])


def _tell(entry: Bug, lang: str) -> None:
    from headwise.teach.bugs import words

    if wants_json():
        print_json("bugs", {"bugs": [{"id": entry.id, **entry.texts[lang]}]})
        return
    out.print(bug_text(entry, lang))
    lack = words(lang)["untrained"].format(why=words(lang)[f"lacks_{entry.untrained}"]) if entry.untrained else ""
    err.print("\n" + (lack or words(lang)["to_train"].format(bug=entry.id)))


def _write(html: Path | None, page: Path | None, shown: Sequence[Shown], seeds: int, steps: int, lang: str) -> None:
    """The page of maps of one bug, and the page of all."""
    from headwise.lab.compare.experiments import SHAPE
    from headwise.teach.bugs import bug_named, catalogue
    from headwise.teach.study import STEPS, trained_maps

    if html is not None and len(shown) == 1 and shown[0].loss is not None:
        right, tokens = trained_maps(None, steps)
        wrong, _ = trained_maps(shown[0].bug, steps)
        text = maps_page(bug_named(shown[0].bug), shown[0], (right, wrong), tokens, SHAPE["n_heads"], lang)
        write_whole(html, text)
    if page is not None:
        command = "headwise bugs all" + (f" --steps {steps}" if steps != STEPS else "")
        setting = f"Seeds 0 to {seeds - 1}, {steps} steps each, the verb model without qk-norm."
        write_whole(page, bugs_page(shown, catalogue(), command, setting))


def bugs_page(shown: Sequence[Any], bugs: Mapping[str, Any], command: str, setting: str) -> str:
    """Markdown: each bug, its effect on the loss, whether a curve betrays it, and what does."""
    rows = []
    for entry in shown:
        loss = "" if entry.loss is None else f"{entry.loss.mean:.3f}"
        difference = "" if (far := entry.difference) is None else f"{far.mean:+.3f} ± {far.half_width:.3f}"
        verdict = {True: "**yes**", False: "no", None: "not trained"}[entry.betrayed]
        about = bugs[entry.bug]
        name = f"`{entry.bug}` {about.text('wrong')}"
        rows.append(list(map(Markup, (name, loss, difference, verdict, about.text("how")))))
    table = Table(("bug", "loss", "difference", "does the loss betray it?", "what does"), rows).markdown((0, 3, 4))
    hidden = sum(entry.betrayed is False for entry in shown)
    trained = sum(entry.betrayed is not None for entry in shown)
    sentences = "\n".join(f"- `{entry.bug}`: {entry.sentence}." for entry in shown)
    summary = f"Of {trained} bugs that were trained, the loss hides {hidden}."
    head = (
        f"# What training hides\n\nWritten by `{command}`; change it by running that, never by hand.\n\n{INTRODUCTION}"
    )
    return "\n\n".join([head, f"{setting} {summary}", table, "## Bug by bug", sentences]) + "\n"


def bug_text(bug: Any, lang: str) -> str:
    """What the catalogue says of one bug."""
    parts = [f"{bug.name(lang)} ({bug.id})", *(bug.text(what, lang) for what in ("wrong", "symptom", "how", "fix"))]
    return "\n  ".join(parts)


def maps_page(bug: Any, shown: Any, maps: tuple[Any, Any], tokens: Sequence[str], n_heads: int, lang: str) -> str:
    """The maps of every head, without the bug and with it, side by side."""
    from headwise.view.page.assemble import page

    rows = []
    for index, pair in enumerate(zip(*maps, strict=True)):
        name = f"L{index // n_heads}.H{index % n_heads}"
        # The page's policy allows no style in an element; the sheet has it.
        drawn = (picture(weights.tolist(), f"{name}: {' '.join(tokens)}", 132) for weights in pair)
        pictures = [Markup(re.sub(' style="[^"]*"', "", image)) for image in drawn]
        rows.append((name, *pictures))
    words = "".join(f"<p>{escaped(bug.text(what, lang))}</p>" for what in ("wrong", "symptom", "fix"))
    body = f"<main><h1>{escaped(bug.name(lang))}</h1>{words}<p><b>{escaped(shown.sentence)}.</b></p>"
    heads = (phrase("bugs.head", lang), phrase("bugs.correct", lang), bug.id)
    body += f"<p>{escaped(' '.join(tokens))}</p>{Table(heads, rows).html()}</main>"
    return page("bugs", body, title=bug.name(lang), styles=("bugs.css",), lang=lang)
