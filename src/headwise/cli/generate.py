"""`headwise generate`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from headwise.cli.app import Debug, Json, Run, app, needs_torch, out, print_json


@app.command(epilog='Example: headwise generate runs/verbs --prompt "he will work =" --temperature 0')
def generate(
    run: Run,
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "",
    tokens: Annotated[int, typer.Option(min=0, help="How many tokens to add at most.")] = 100,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token, 1 samples as the model says.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens only.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    cache: Annotated[
        bool, typer.Option(help="Keep keys and values; the text is the same without, only slower.")
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
    written = tokenizer.decode(ids)
    if not as_json:
        out.print(written, end="")
    began, n_new = time.monotonic(), 0
    for token in continue_text(model, ids, tokens, temperature, top_k, seed, tokenizer.boundary, cache):
        ids.append(token)
        n_new += 1
        text = tokenizer.decode(ids)
        if not as_json and not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half of a character that takes two tokens
            out.print(text[len(written) :], end="")
            written = text
    if as_json:
        speed = n_new / max(time.monotonic() - began, 1e-9)
        whole = tokenizer.decode(ids)
        print_json({"prompt": prompt, "text": whole, "new_tokens": n_new, "tokens_per_second": round(speed, 1)})
    else:
        out.print(tokenizer.decode(ids)[len(written) :])
