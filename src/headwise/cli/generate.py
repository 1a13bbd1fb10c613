"""`headwise generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from typer import Option

from headwise.cli.app import (
    File,
    Model,
    Progress,
    Seed,
    SomeCount,
    command,
    err,
    needs_torch,
    print_json,
    screen,
    wants_json,
)
from headwise.cli.early import check_model
from headwise.families import check_next
from headwise.plan import Plan
from headwise.words import Facts, refusal

Number = Annotated[int, Option(min=0)]


@command()
def generate(
    model: Model,
    prompt: str | None = None,
    ids: File = None,
    tokens: Number = 100,
    temperature: Annotated[float, Option(min=0.0)] = 0.8,
    top_k: SomeCount = None,
    seed: Seed = 0,
    samples: Annotated[int, Option(min=1, max=10000)] = 1,  # side by side, each with a cache; the bound is a round one
    int8: bool = False,
    lookup: Number = 0,
    plan: File = None,
    device: str = "cpu",
) -> None:
    """Continue a text with a model that predicts the next token."""  # its options: [generate] in commands.toml
    if prompt is not None and ids is not None:
        raise refusal("prompt_and_ids")
    if samples > 1 and (temperature == 0 or lookup):  # at 0 all samples would be the same; --lookup serves one text
        raise refusal("samples_sampled", samples=samples)
    check_model(model)
    check_next(model, "next_causal")  # the key of what to do instead, of [refused] in words.toml
    typed = None if ids is None else _read_ids(ids)
    kept = None if plan is None else Plan.read(plan)
    with needs_torch():
        from headwise.models.generate import decode_form, decode_loss, prompt_ids, steps
        from headwise.models.open import open_folder
    folder = open_folder(model, device=device)
    start = prompt_ids(folder.model, prompt or "") if typed is None else typed
    # In 8 bits a form of the model decodes; it is laid out for so many tokens a step. Else the model does, as it is.
    form = decode_form(folder.model, int8, samples + lookup) if int8 else folder.model
    options: Facts = {"temperature": temperature, "top_k": top_k, "seed": seed}
    stream = steps(form, [start] * samples, tokens, plan=kept, lookup=lookup, **options)
    decode = _numbers if folder.tokens is None else folder.tokens.decode
    texts, began = [list(start) for _ in range(samples)], time.monotonic()
    # `stream` gives at each step a token for each text; None for a text that has ended.
    if samples == 1 and not wants_json():
        _print_text(texts[0], (token for (token,) in stream if token is not None), decode)
    else:
        with Progress("reading the prompt") as progress:
            for n, step in enumerate(stream):
                for text, token in zip(texts, step, strict=True):
                    text += [] if token is None else [token]
                progress("token", n + 1, tokens)
    n_new = sum(map(len, texts)) - samples * len(start)
    seconds = max(time.monotonic() - began, 1e-9)  # never 0, by which is divided
    # With int8 `form` is a decode form, which the type checker cannot see. Its loss is measured on the first text.
    loss = decode_loss(form, texts[0]) if int8 else None  # type: ignore[arg-type]
    if wants_json():
        document = {"prompt": prompt or "", "text": decode(texts[0]), "ids": texts[0], "n_tokens": n_new}
        more = {"samples": [decode(text) for text in texts], "int8_loss": loss}
        print_json("generate", {**document, "tokens_per_second": round(n_new / seconds, 1), **more})
        return
    for text in texts if samples > 1 else ():  # one alone has been printed as it came
        screen.print(decode(text))
    if loss is not None:
        err.say(screen.phrase("tell.int8", loss=f"{loss:.4f}"))


def _read_ids(path: Path) -> list[int]:
    """Token ids of a file, separated by spaces or commas."""
    from headwise.files import read_text

    text = read_text(path)
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise refusal("no_ids", path=path) from None


def _numbers(ids: list[int]) -> str:
    """Ids as text, of a model without a tokenizer."""
    return " ".join(map(str, ids))


def _print_text(ids: list[int], stream: Iterator[int], decode: Callable[[list[int]], str]) -> None:
    """Print the prompt, then each token as it comes; `ids` are those of the prompt, to which the new ones are added."""
    written = decode(ids)
    screen.print(written, end="")
    for token in stream:
        ids.append(token)
        text = decode(ids)  # all of it: what a token reads as may depend on those before
        # A character may take several tokens; until the last of them comes, its half decodes to this sign, and waits.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            screen.print(text[len(written) :], end="")
            written = text
    screen.print(decode(ids)[len(written) :])  # what still waits, and the end of the line
