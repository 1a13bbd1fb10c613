"""`headwise why`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from headwise.cli.app import Progress, command, err, in_words, language, needs_torch, out, print_json, wants_json
from headwise.cli.early import check_model
from headwise.families import check_answers, check_reads_tokens
from headwise.words import said


@command()
def why(
    model: Path,
    prompt: str,
    answer: str | None = None,
    other: str | None = None,
    corrupt: str | None = None,
    html: Path | None = None,
    dtype: str = "auto",
    device: str = "cpu",
) -> None:
    """Say which heads bring a prediction, and which work against it.

    Where they looked, too, and what happens without them.
    """
    lang = language()
    check_model(model)
    check_answers(model)
    check_reads_tokens(model)
    with needs_torch():
        from headwise.heads.why import forecast
        from headwise.heads.why import why as story_of
        from headwise.models.open import open_folder
    from headwise.view.page import story_page

    folder = open_folder(model, dtype=dtype, device=device)
    if line := forecast(folder.model, prompt, corrupt):
        err.print(said(line, lang), soft_wrap=True)
    with Progress("adding up what each head writes") as progress:
        story = story_of(folder.model, prompt, corrupt, answer, other, progress=progress)
    if html is not None:
        story_page(html, story, lang)
    if wants_json():
        print_json("why", {**asdict(story), "html": None if html is None else str(html)})
        return
    story.print(out, lang)
    if html is not None:
        out.print("\n" + in_words("tell.page", path=html))
