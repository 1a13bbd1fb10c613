"""`headwise narrow`."""

from __future__ import annotations

from functools import partial
from typing import Any

from headwise.cli.app import command, needs_torch
from headwise.cli.reshape import with_options


@command()
@partial(with_options, without="stream")
def narrow(tolerance: float | None = None, cache: float | None = None, window: int | None = None) -> Any:
    """Give layers a window: a smaller cache.

    A layer with a window keeps only the latest tokens. Layers are chosen by the loss with the windows in place; one in
    which a head finds needles keeps all. --out is a folder that stock engines load: `layer_types` and `sliding_window`
    say which layers look how far, and a Llama is written as the Qwen2 of the same function. The rest is as in
    `headwise share`.
    """
    with needs_torch():
        from headwise.reshape.narrow import Narrowing
    return Narrowing(tolerance, cache, window)
