"""`headwise trace`."""

from __future__ import annotations

import os
from pathlib import Path

from headwise.cli.app import Progress, command, err, in_words, language, needs_torch, out, print_json, wants_json
from headwise.files import write_whole
from headwise.words import refusal, said


@command()
def trace(
    run: Path | None = None,
    text: str | None = None,
    layer: int = 0,
    head: int = 0,
    at: int | None = None,
    html: Path | None = None,
) -> None:
    """Show the arithmetic of one head at one position.

    Every number can be recomputed from the lines above it: the query, the keys, their products, the softmax, the
    values, what each head adds through the output projection, and the residual. The page of --html holds the model:
    text, token and head can be changed in it, and its last step runs the model without the head.
    """
    with needs_torch():
        from headwise.gpt.run import REPORT, example_of, load_run
        from headwise.heads.steps import example_model, head_steps
        from headwise.models.pack import pack_model
        from headwise.view.page import walk_html
        from headwise.view.terminal import print_steps
    lang = language()
    if text == "":
        raise refusal("empty_trace")
    if run is None:
        with Progress("training a small model on names") as progress:
            progress("training a small model on names", 0, 0)
            model, tokens, name = example_model()
            name = said(name, lang)
    else:
        (model, tokens), name = load_run(run), run.resolve().name
    shown_text = text or example_of(run)
    ids = tokens.prompt(shown_text)
    last = len(ids) - (2 if text is None and len(ids) > 1 else 1)  # of an example, from where its last token is guessed
    steps = head_steps(model, ids, tokens.shown(ids), layer, head, last if at is None else at, name)
    if html is not None:
        report = None if run is None or not (run / REPORT).exists() else os.path.relpath(run / REPORT, html.parent)
        packed = pack_model(model, tokens)
        write_whole(html, walk_html(packed, shown_text, layer, head, steps.at, name=name, lang=lang, report=report))
    if wants_json():
        print_json("trace", {**vars(steps), "html": None if html is None else str(html)})
        return
    print_steps(out, steps, lang)
    if html is not None:
        out.print("\n" + in_words("tell.page", path=html))
    if run is None:
        err.print("\n" + in_words("tell.just_now"))
