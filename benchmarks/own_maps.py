"""A model that writes its softmax out, as a blog post would, watched beside its own pass: 6 layers, 6 heads, width 384.

At most 1.6 times its own pass at 1,024 tokens. One thread, processor time.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

LAYERS, HEADS, WIDTH, TOKENS = 6, 6, 384, 1024


def run(runs: int) -> dict[str, Any]:
    import torch
    from torch import Tensor, nn

    import headwise as hw

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n_head, self.c_attn, self.c_proj = HEADS, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            B, T, C = x.shape
            q, k, v = (y.view(B, T, HEADS, C // HEADS).transpose(1, 2) for y in self.c_attn(x).split(C, 2))
            scores = q @ k.transpose(-2, -1) / (C // HEADS) ** 0.5
            future = torch.ones(T, T, dtype=torch.bool).triu(1)
            weights = scores.masked_fill(future, -torch.inf).softmax(-1)
            joined: Tensor = self.c_proj((weights @ v).transpose(1, 2).reshape(B, T, C))
            return joined

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
            self.mlp = nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
            )

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.norm(x))
            result: Tensor = x + self.mlp(x)
            return result

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(LAYERS))).eval(), torch.randn(1, TOKENS, WIDTH)
    plain: list[float] = []
    watched: list[float] = []
    with torch.no_grad():
        for round_ in range(max(5, runs) + 1):
            began = time.process_time()
            model(x)
            middle = time.process_time()
            with hw.watch(model):
                model(x)
            if round_:  # the first one warms up
                plain.append(middle - began)
                watched.append(time.process_time() - middle)
    torch.set_num_threads(threads)
    ratio = statistics.median(w / p for w, p in zip(watched, plain, strict=True))  # of neighbours in time
    table = f"{LAYERS} layers, {TOKENS} tokens, one thread: {statistics.median(plain):.3f} s, watched x {ratio:.2f}"
    return {"plain_s": statistics.median(plain), "ratio": ratio, "table": table}
