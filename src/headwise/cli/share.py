"""`headwise share`."""

from __future__ import annotations

from typing import Any

from headwise.cli.app import command, needs_torch
from headwise.cli.reshape import with_options


@command()
@with_options
def share(
    kv_heads: int,
    method: str = "aligned+norm",
    groups: str = "adjacent",
    group: str | None = None,
) -> Any:
    """Let query heads share key/value heads: a smaller cache.

    MODEL is a run of headwise or a folder of Llama, Mistral, Qwen2 or Qwen3. The damage is measured before any
    training. With --heal the model then learns to answer as it did before. A fresh process verifies --out before it
    appears. The last tenth of TEXT is held out to measure on.
    """
    with needs_torch():
        from headwise.reshape.share import Sharing
    return Sharing(kv_heads, method, group or groups)
