"""`headwise why`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from headwise.cli.app import Debug, Device, Json, Progress, check_outputs, command, needs_torch, out, print_json
from headwise.view.page.words import check_lang


@command()
def why(
    model: Path,
    prompt: str,
    answer: str | None = None,
    corrupt: str | None = None,
    html: Path | None = None,
    lang: str = "en",
    device: Device = "cpu",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say which heads wrote a prediction.

    Where they looked, too, and what happens without them.
    """
    check_outputs(html=html)
    check_lang(lang)
    with needs_torch():
        from headwise.heads.why import why as story_of
        from headwise.models.open import open_folder
    from headwise.view.why import print_story, story_page

    folder = open_folder(model, device=device)
    with Progress("adding up what each head writes") as progress:
        story = story_of(folder, prompt, answer, corrupt, progress)
    if html is not None:
        story_page(html, story, lang)
    if as_json:
        print_json({**asdict(story), "html": None if html is None else str(html)})
        return
    print_story(out, story, lang)
    if html is not None:
        out.print(f"\npage: {html}")
