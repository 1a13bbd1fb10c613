"""`headwise narrow`."""

from __future__ import annotations

from headwise.cli.app import command, needs_torch
from headwise.cli.reshape import Options, reshape, with_options
from headwise.errors import HeadwiseError


@command()
@with_options
def narrow(
    options: Options, tolerance: float | None = None, cache: float | None = None, window: int | None = None
) -> None:
    """Give layers a window, so that they keep only the latest tokens: a smaller cache.

    Layers are chosen by the loss with the windows in place; one in which a head finds needles keeps all. --out is a
    folder that stock engines load: `layer_types` and `sliding_window` say which layers look how far, and a Llama is
    written as the Qwen2 of the same function. The rest is as in `headwise share`.
    """
    with needs_torch():
        from headwise.reshape.narrow import narrow as narrow_model
    if options.stream:
        raise HeadwiseError("narrow measures with the whole model in memory; leave out --stream")
    reshape(
        options,
        lambda stream, **common: narrow_model(options.model, tolerance=tolerance, cache=cache, window=window, **common),
    )
