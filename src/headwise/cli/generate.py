"""`headwise generate`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.app import Debug, Json, Progress, Run, app, needs_torch, out, print_json

if TYPE_CHECKING:
    from headwise.gpt.tokens import Tokens


@app.command(epilog='Example: headwise generate runs/verbs --prompt "he will work =" --temperature 0')
def generate(
    run: Run,
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "",
    tokens: Annotated[int, typer.Option(min=0, help="The largest number of tokens to add.")] = 100,
    temperature: Annotated[
        float,
        typer.Option(
            help="0: always the most likely token. 1: sample from the model's probabilities. Higher: more random."
        ),
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens only.")] = None,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    cache: Annotated[
        bool, typer.Option(help="Keep keys and values. Without it the text is the same, but slower.")
    ] = True,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue a text with a trained model."""
    with needs_torch():
        from headwise.gpt.generate import generate as continue_text
        from headwise.gpt.run import load_run
    model, tokenizer = load_run(run)
    ids = tokenizer.prompt(prompt) or tokenizer.opening()
    stream = continue_text(model, ids, tokens, temperature, top_k, seed, tokenizer.boundary, cache)
    if not as_json:
        _print_text(ids, stream, tokenizer)
        return
    began, n_prompt = time.monotonic(), len(ids)
    with Progress() as progress:
        for token in stream:
            ids.append(token)
            progress("token", len(ids) - n_prompt, tokens)
    n_new, seconds = len(ids) - n_prompt, max(time.monotonic() - began, 1e-9)
    document = {"prompt": prompt, "text": tokenizer.decode(ids), "n_tokens": n_new}
    print_json({**document, "tokens_per_second": round(n_new / seconds, 1)})


def _print_text(ids: list[int], stream: Iterator[int], tokenizer: Tokens) -> None:
    """The prompt, then each token as it comes."""
    written = tokenizer.decode(ids)
    out.print(written, end="")
    for token in stream:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half of a character that takes two tokens
            out.print(text[len(written) :], end="")
            written = text
    out.print(tokenizer.decode(ids)[len(written) :])
