"""Train a small GPT from Python."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import nn

from headwise.files import text_path
from headwise.gpt.film import Film
from headwise.gpt.gpt import GPT
from headwise.gpt.own import register
from headwise.gpt.run import Settings, kept_text, load_run, run_training
from headwise.models.open import remember


def train(
    text: str | Path | Sequence[str | Path] | None = None,
    preset: str = "verbs",
    out: str | Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    *,
    lines: bool | None = None,
    tokenizer: str | Path | None = None,
    attention: type[nn.Module] | None = None,
    **shape: int,
) -> GPT:
    """Train a small GPT and return it in eval mode, with its tokenizer known to `generate`, `survey` and the others.

    Args:
        text: the path of a UTF-8 text, of a folder of them, or several; "tale", a little book; a string with a line
            break is the text itself; None: the built-in verb corpus
        preset: verbs, microgpt, nanogpt, fast, book, llama or course
        out: a new folder for the run, as `headwise train --out` writes it; None keeps nothing on the disk
        steps: updates of the weights; None takes the preset's
        seed: of weights, batches and the held-out choice: the same seed gives the same weights on the same
            machine
        lines: each line is a document of its own; None takes the preset's way
        tokenizer: the path of a tokenizer.json; None: characters, or words for the verb corpus
        attention: a class in place of headwise's attention, built with the width and the number of heads, by the
            names of its parameters, and called with (B,T,width)
        **shape: fields of `GPTConfig` that differ from the preset, such as n_heads=8

    Raises:
        HeadwiseError: for settings that do not fit, a text that is too short, and a folder that is not empty.
    """
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = temporary / "run" if out is None else Path(out)
        if isinstance(text, str) and "\n" in text:
            text = stack.enter_context(kept_text(folder, text))
        paths = (text,) if isinstance(text, str | Path) else text or ()
        texts = tuple(str(text_path(path).absolute()) for path in paths)
        tokenizer_file = None if tokenizer is None else str(tokenizer)
        name = None if attention is None else register(attention)
        settings = Settings(preset, texts, tokenizer_file, lines, seed, steps, shape, name)
        run_training(folder, settings, n_samples=0, film=None if out is None else Film)
        model, tokens = load_run(folder)
    # So that `survey(model)` and others find its tokenizer; where nothing is kept, the path is of no use any more.
    remember(model, folder, tokens, "headwise")
    return model
