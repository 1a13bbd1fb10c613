"""`headwise generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from headwise.cli.app import Debug, Json, Progress, command, needs_torch, out, print_json
from headwise.errors import HeadwiseError
from headwise.plan import Plan


@command()
def generate(
    model: Path,
    prompt: str | None = None,
    ids: Path | None = None,
    tokens: int = 100,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    cache: bool = True,
    plan: Path | None = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue a text with a model that predicts the next token."""
    if prompt is not None and ids is not None:
        raise HeadwiseError("--prompt and --ids: pass one of them")
    with needs_torch():
        from headwise.models.generate import generate as continue_text
        from headwise.models.generate import prompt_ids
        from headwise.models.open import open_folder
    folder = open_folder(model)
    start = prompt_ids(folder.model, prompt or "") if ids is None else _read_ids(ids)
    kept = None if plan is None else Plan.read(plan)
    stream = continue_text(folder.model, start, tokens, temperature, top_k, seed, cache=cache, plan=kept)
    decode = _numbers if folder.tokens is None else folder.tokens.decode
    if not as_json:
        _print_text(start, stream, decode)
        return
    began, new = time.monotonic(), list[int]()
    with Progress() as progress:
        for token in stream:
            new.append(token)
            progress("token", len(new), tokens)
    seconds = max(time.monotonic() - began, 1e-9)
    document = {"prompt": prompt or "", "text": decode(start + new), "ids": start + new, "n_tokens": len(new)}
    print_json({**document, "tokens_per_second": round(len(new) / seconds, 1)})


def _read_ids(path: Path) -> list[int]:
    """Token ids of a file, separated by spaces or commas."""
    from headwise.files import read_text

    try:
        return [int(word) for word in read_text(path).replace(",", " ").split()]
    except ValueError:
        raise HeadwiseError(f"{path}: token ids are whole numbers separated by spaces") from None


def _numbers(ids: list[int]) -> str:
    """Ids of a model without a tokenizer."""
    return " ".join(map(str, ids))


def _print_text(ids: list[int], stream: Iterator[int], decode: Callable[[list[int]], str]) -> None:
    """The prompt, then each token as it comes."""
    written = decode(ids)
    out.print(written, end="")
    for token in stream:
        ids.append(token)
        text = decode(ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half of a character that takes two tokens
            out.print(text[len(written) :], end="")
            written = text
    out.print(decode(ids)[len(written) :])
