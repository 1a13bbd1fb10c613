"""What a command refuses at once: by the names of files and what config.json says, before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.corpus.sources import Sources, contents
from headwise.errors import HeadwiseError
from headwise.families import (
    check_folder,
    is_own,
    read_config,
    require_run,
    require_transformers,
)
from headwise.files import STDIN

if TYPE_CHECKING:
    from headwise.cost.shape import ModelShape

# bytes of texts, at most, that are read through at first: some hundredths of a second
AT_ONCE = 2**24


def check_model(folder: Path) -> None:
    """Refuse what is no model folder.

    A folder of ours is not looked into: what is wrong in it is said by what reads it, which is quick, too.
    """
    if not is_own(folder):
        check_folder(folder)
        require_transformers(folder)


def check_texts(folder: Path, texts: Sequence[str | Path] | None) -> None:
    """Refuse texts that cannot be read; and no text at all, where no run says what the model was trained on."""
    if not texts:
        require_run(folder)
        return
    # A text that is given in full (`_`) needs no check. Standard input can be read only once, and is read later.
    paths, _ = contents([str(text) for text in texts if str(text) != STDIN])
    sources = Sources(paths)  # raises HeadwiseError for what is not there
    if sources.size <= AT_ONCE:
        # reads them all, and raises HeadwiseError for what is blank, damaged or no UTF-8
        list(sources)


def shape_of(folder: Path) -> ModelShape | None:
    """The sizes in a folder's config.json; None where they cannot be told exactly: the model itself is then asked."""
    # here: at the top it would slow --help
    from headwise.cost.config import shape_by_formula

    try:
        return shape_by_formula(read_config(folder))
    except HeadwiseError:
        return None


def context_in(shape: ModelShape | None) -> int | None:
    """The longest text of a decoder, in tokens. None for others: their config alone does not say what they read."""
    return shape.positions if shape is not None and shape.generates else None
