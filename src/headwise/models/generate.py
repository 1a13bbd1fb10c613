"""Continue a text by any model that predicts the next token: our GPT, or one of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from torch import nn

from headwise.corpus.tokens import Tokens
from headwise.errors import HeadwiseError
from headwise.gpt.generate import continued
from headwise.models.ask import context_of, predicts, reader, vocabulary_of
from headwise.models.open import described, open_model, row_of


def generate(
    model: nn.Module | str | Path,
    prompt: str | Sequence[int],
    n_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """Yield ids that continue a prompt, as they come.

    The model keeps its keys and values between tokens. When the text reaches the model's context, its older half is
    forgotten and the rest is read again from the start.

    Args:
        model: a GPT of ours, a model of transformers, or the folder of one
        prompt: token ids, or a text where the model was read from a folder with a tokenizer
        n_tokens: so many at most
        temperature: 0 takes the likeliest token; 1 samples from the model as it is
        top_k: sample among the k likeliest only
        seed: the same seed gives the same text
        stop: the id that ends the text and is not yielded; None takes those that the model's folder names

    Raises:
        HeadwiseError: for a model that does not predict the next token, and ids that it does not know.
    """
    module = open_model(model)
    if predicts(module) != "next":
        raise HeadwiseError(
            f"{type(module).__name__} does not predict the next token, so it cannot continue a text; "
            f"pass a model with a causal language-model head"
        )
    if isinstance(prompt, str):
        ids = prompt_ids(module, prompt)
    else:  # no ids at all are refused in `continued`
        is_empty = isinstance(prompt, Sequence) and not prompt
        ids = [] if is_empty else row_of(module, prompt)[0].tolist()
    stops = end_ids(module) if stop is None else {stop}
    sizes = context_of(module), vocabulary_of(module)
    return continued(
        partial(reader, module), ids, n_tokens, temperature, top_k, seed, stops, *sizes
    )


def prompt_ids(model: nn.Module, text: str) -> list[int]:
    """Ids of a text that the model is to continue; of an empty one, what a text begins with."""
    folder = described(model)
    if folder is None or folder.tokens is None:
        where = (
            "the model was not read from a folder"
            if folder is None
            else f"{folder.path} has no tokenizer"
        )
        raise HeadwiseError(
            f"{where}, so its words are not known; in Python, hw.generate takes token ids"
        )
    if isinstance(folder.tokens, Tokens):
        return folder.tokens.prompt(text) or folder.tokens.opening()
    # Of a model of transformers, the token that begins a text (bos), the lowest id where it names several.
    return folder.tokens.prompt(text) or sorted(_special(model, "bos_token_id"))[:1]


def end_ids(model: nn.Module) -> set[int]:
    """The tokens that end a text, as far as the model's folder names them."""
    folder = described(model)
    if folder is not None and isinstance(folder.tokens, Tokens):
        return set(folder.tokens.specials)  # of ours the boundary alone, where there is one
    return _special(model, "eos_token_id")


def _special(model: nn.Module, name: str) -> set[int]:
    """Ids that a model of transformers names, one or a list, where its own `generate` looks for them."""
    value = getattr(getattr(model, "generation_config", None), name, None)
    if value is None:
        return set()
    return set(value) if isinstance(value, list) else {value}
