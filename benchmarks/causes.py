"""Attribution and patching of all heads of GPT-2 small's size, random weights, against passes of the model itself.

attribution   what every head adds to one logit, over one pass; at most 1.5 times
patching      the output of each of 144 heads, of one pair of texts, over 144 passes; at most 0.6 times
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

LAYERS, HEADS, WIDTH, VOCABULARY, TOKENS = 12, 12, 768, 50257, 256


def run(runs: int) -> dict[str, Any]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import headwise as hw
    from headwise.models.ask import logits

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, use_cache=False)
    model = GPT2LMHeadModel(config).eval()
    clean, corrupted = torch.randint(VOCABULARY, (2, TOKENS))
    target = (7, 11)
    with torch.no_grad():
        passes, attributions = _in_turn(
            [
                lambda: logits(model, clean[None], last=True),
                lambda: hw.attribute(model, clean, target),
            ],
            max(5, runs),
        )
        (patching,) = _in_turn([lambda: hw.patch(model, clean, corrupted, target=target)], 1, warm=False)
    forward, n_heads = statistics.median(passes), LAYERS * HEADS
    result = {
        "forward_s": forward,
        "attribution": statistics.median(attributions) / forward,
        "patching_s": patching[0],
        "patching": patching[0] / (n_heads * forward),
        "threads": torch.get_num_threads(),
    }
    table = (
        f"{n_heads} heads, {TOKENS} tokens, float32, {result['threads']} threads: forward {forward:.3f} s, attribution "
        f"x {result['attribution']:.2f}; patching {patching[0]:.1f} s, x {result['patching']:.2f} of {n_heads} passes"
    )
    return {**result, "table": table}


def _in_turn(ways: list[Callable[[], Any]], runs: int, warm: bool = True) -> list[list[float]]:
    """Seconds of each way; in turn, so that a busy moment strikes all of them."""
    times: list[list[float]] = [[] for _ in ways]
    for round_ in range(runs + warm):
        for way, seconds in zip(ways, times, strict=True):
            began = time.perf_counter()
            way()
            if round_ or not warm:
                seconds.append(time.perf_counter() - began)
    return times
