"""`headwise trace`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from headwise.cli.app import Debug, Json, Progress, app, check_outputs, needs_torch, out, print_json
from headwise.errors import HeadwiseError

Text = Annotated[
    str | None, Option(help="The text to read. Default: a text that the run held out; without a run, emma.")
]
At = Annotated[
    int | None,
    Option(help="The position of the query, counted from 0. Default: the last; of an example, the last but one."),
]


@app.command(epilog="Example: headwise trace --text emma --layer 0 --head 2 --at 3 --html emma.html")
def trace(
    run: Annotated[
        Path | None, Argument(metavar="[RUN]", help="A run folder. Without it, a small model is trained on names.")
    ] = None,
    text: Text = None,
    layer: Annotated[int, Option(help="The layer, counted from 0.")] = 0,
    head: Annotated[int, Option(help="The head, counted from 0.")] = 0,
    at: At = None,
    lang: Annotated[str, Option(help="Language of the explanations: en or es.")] = "en",
    html: Annotated[Path | None, Option(help="Also write a page that walks through the steps.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the arithmetic of one head at one position.

    Every number can be recomputed from the lines above it: the query, the keys, their products, the softmax, the
    values, what each head adds through the output projection, and the residual. The page of --html holds the model:
    text, token and head can be changed in it, and its last step runs the model without the head.
    """
    check_outputs(html=html)
    with needs_torch():
        from headwise.gpt.run import example_of, load_run
        from headwise.heads.steps import example_model, head_steps
        from headwise.models.pack import pack_model
        from headwise.view.page.walk import write_walk
        from headwise.view.steps import print_steps
    if text == "":
        raise HeadwiseError("the text is empty; pass one with --text")
    if run is None:
        with Progress() as progress:
            progress("training a small model on names", 0, 0)
            model, tokens, name = example_model()
    else:
        (model, tokens), name = load_run(run), run.resolve().name
    shown_text = text or example_of(run)
    ids = tokens.prompt(shown_text)
    last = len(ids) - (2 if text is None and len(ids) > 1 else 1)  # of an example, from where its last token is guessed
    steps = head_steps(model, ids, tokens.shown(ids), layer, head, last if at is None else at, name)
    if html is not None:
        write_walk(html, pack_model(model, tokens), shown_text, layer, head, steps.at, name=name, lang=lang)
    if as_json:
        print_json({**asdict(steps), "html": None if html is None else str(html)})
        return
    print_steps(out, steps, lang)
    if html is not None:
        out.print(f"\npage: {html}")
