"""The catalogue of bugs in the terminal, as a page of maps, and as the Markdown page of what training hides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headwise.markup import Markup, escaped, picture
from headwise.table import Table
from headwise.view.page.assemble import page
from headwise.words import phrase

INTRODUCTION = """\
Each bug of the catalogue in the verb model: trained with it and without, with the same seeds, batches and arithmetic.
The figure after ± is half the width of the 95 % interval (Student) of the differences seed by seed. The rule: **the
loss betrays** a bug if training fails, or if the loss of every seed is more than twice or less than half that of the
correct model. Whatever is less, nobody sees in a loss curve without the correct one beside it."""


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
