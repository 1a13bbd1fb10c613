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
from headwise.cli.early import check_model
from headwise.families import check_next
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
        from headwise.corpus.tokens import BLANK, require_tokens
        from headwise.models.open import generate, open_folder, prompt_ids
    folder = open_folder(model, device=device)
    decode = require_tokens(folder).decode
    ids = prompt_ids(folder.model, prompt)
    fills = BLANK in prompt and BLANK not in decode(ids)
    if tokens is None:
        tokens = 1 if fills else 100
    if temperature is None:
        temperature = 0.0 if fills else 0.8
    stream = generate(folder.model, ids, tokens, temperature, top_k, seed, stream=True)
    began, n_prompt = time.monotonic(), len(ids)
    if not wants_json():
        _print_text(ids, stream, decode)
        return
    with Progress("reading the prompt") as progress:
        for token in stream:
            ids.append(token)
            progress("token", len(ids) - n_prompt, tokens)
    # never 0: it is a divisor
    n_new, seconds = len(ids) - n_prompt, max(time.monotonic() - began, 1e-9)
    document = {"prompt": prompt, "text": decode(ids), "ids": ids, "n_tokens": n_new}
    print_json("generate", {**document, "tokens_per_second": round(n_new / seconds, 1)})


def _print_text(
    ids: list[int], stream: Iterable[int], decode: Callable[[list[int]], str]
) -> None:
    """Print the prompt, then each token as it comes; `ids` are those of the prompt, to which the new ones are added."""
    written = decode(ids)
    screen.print(written, end="")
    for token in stream:
        ids.append(token)
        # all of it: what a token reads as may depend on those before
        text = decode(ids)
        # A character may take several tokens; until the last arrives it decodes to U+FFFD, so printing waits.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            screen.print(text[len(written) :], end="")
            written = text
    # what still waits, and the end of the line
    screen.print(decode(ids)[len(written) :])
