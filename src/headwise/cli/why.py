"""`headwise why`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from headwise.cli.app import Debug, Json, Progress, app, check_outputs, needs_torch, out, print_json
from headwise.view.page.words import check_lang


@app.command(epilog='Example: headwise why runs/verbs --prompt "he will work = él" --corrupt "he would work = él"')
def why(
    model: Annotated[Path, Argument(metavar="MODEL", help="A run, or a model folder in Hugging Face layout.")],
    prompt: Annotated[str, Option(help="The text whose next token is explained.")],
    answer: Annotated[str | None, Option(help="The token to explain. Default: what the model predicts.")] = None,
    corrupt: Annotated[
        str | None,
        Option(help="The same text with one thing changed, in as many tokens: heads are ranked by what they carry of "
                    "the difference, and the paths between them are followed."),
    ] = None,
    html: Annotated[Path | None, Option(help="Also write the story as one HTML page.")] = None,
    lang: Annotated[str, Option(help="Language: en or es.")] = "en",
    as_json: Json = False,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Say which heads wrote a prediction, where they looked, and what happens without them."""
    check_outputs(html=html)
    check_lang(lang)
    with needs_torch():
        from headwise.heads.why import why as story_of
        from headwise.models.open import open_folder
    from headwise.view.why import print_story, story_page

    folder = open_folder(model)
    with Progress() as progress:
        story = story_of(folder, prompt, answer, corrupt, progress)
    if html is not None:
        story_page(html, story, lang)
    if as_json:
        print_json({**asdict(story), "html": None if html is None else str(html)})
        return
    print_story(out, story, lang)
    if html is not None:
        out.print(f"\npage: {html}")
