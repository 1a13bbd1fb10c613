"""`headwise generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Annotated

from typer import Option

from headwise.cli.app import (
    Model,
    Seed,
    SomeCount,
    command,
    needs_torch,
    print_json,
    wants_json,
)
from headwise.families import check_model, check_next
from headwise.view import Progress, screen


@command()
def generate(
    model: Model,
    prompt: str = "",
    tokens: Annotated[int | None, Option(min=0)] = None,
    temperature: Annotated[float | None, Option(min=0.0)] = None,
    top_k: SomeCount = None,
    seed: Seed = 0,
    device: str = "cpu",
) -> None:
    """Continue a text with a model that predicts the next token.

    Args:
        model: A run folder, or a model folder in Hugging Face layout.
        prompt: The text to continue. ___ at its end is the place for one word.
        tokens: The largest number of tokens to add. Default: 100, and 1 for ___.
        temperature: 0: always the most likely token. 1: sample from the model's probabilities. Higher: more random.
            Default: 0.8, and 0 for ___.
        top_k: Sample from the k most likely tokens only.
        seed: Seed for sampling.

    Example: headwise generate runs/verbs --prompt "he will work =" --temperature 0
    """
    check_model(model)
    check_next(
        model,
        "pass a model with a causal language-model head, such as a GPT-2, a Llama or a Gemma",
    )
    with needs_torch():
        from headwise.corpus.tokens import BLANK, ELLIPSIS, require_tokens
        from headwise.models.open import generate, open_folder, prompt_ids
    folder = open_folder(model, device=device)
    decode = require_tokens(folder).decode
    ids = prompt_ids(folder.model, prompt)
    # ids leave out a ___ that is a place to fill, and keep one that is text
    dots = ELLIPSIS.search(prompt)
    blank = dots[1] if dots else BLANK
    fills = blank in prompt and blank not in decode(ids)
    if tokens is None:
        tokens = 1 if fills else 100
    if temperature is None:
        temperature = 0.0 if fills else 0.8
    stream = generate(folder.model, ids, tokens, temperature, top_k, seed, stream=True)
    if not wants_json():
        _print_text(ids, stream, decode)
        return
    n_prompt = len(ids)
    began = time.monotonic()
    with Progress("reading the prompt") as progress:
        for token in stream:
            ids.append(token)
            progress("token", len(ids) - n_prompt, tokens)
    n_new = len(ids) - n_prompt
    seconds = max(time.monotonic() - began, 1e-9)  # never 0: it divides
    document = {
        "prompt": prompt,
        "text": decode(ids),
        "ids": ids,
        "n_tokens": n_new,
        "tokens_per_second": round(n_new / seconds, 1),
    }
    print_json("generate", document)


def _print_text(
    ids: list[int], stream: Iterable[int], decode: Callable[[list[int]], str]
) -> None:
    """Print the prompt, then each token as it comes. `ids` holds the prompt; the new tokens are appended to it."""
    written = decode(ids)
    screen.print(written, end="")
    for token in stream:
        ids.append(token)
        # the whole text, as the text of a token may depend on the tokens before it
        text = decode(ids)
        # A character of several tokens decodes to U+FFFD until its last token arrives, so printing waits.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            screen.print(text[len(written) :], end="")
            written = text
    # the rest that waited, and the line end
    screen.print(decode(ids)[len(written) :])
