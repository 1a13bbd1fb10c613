"""Every head of a GPT-2-small body while it runs: all exact statistics, against the plain pass and the dense way.

The body of GPT-2 small (12 layers of 12 heads of 64, no vocabulary projection) with random weights, float32, one
document of T random tokens. Three ways, each in a process of its own so that its peak memory is its own:

    plain   the model's forward pass with torch's fused attention (sdpa)
    watch   the same under `headwise.watch`, with two marked sets of keys: every statistic of every head
    dense   `output_attentions=True`, and the same statistics from the T x T maps, a layer at a time
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.machine import peak_gib

LENGTHS = (1024, 4096, 16384)
DENSE_UP_TO = 4096  # the maps of 16384 tokens would take 155 GB
LAYERS, HEADS, WIDTH, VOCABULARY = 12, 12, 768, 50257


def run(runs: int) -> dict[str, Any]:
    rows = []
    for length in LENGTHS:
        ways = ("plain", "watch", "dense") if length <= DENSE_UP_TO else ("plain", "watch")
        repeats = runs if length <= DENSE_UP_TO else 1
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for round_ in range(repeats):  # in turn, so that a busy minute strikes all of them
            for way in ways:
                if round_ == 0 or way != "dense":  # the dense way takes minutes, and needs no third digit
                    found[way].append(_measured(way, length))
                    print(f"heads: {way} at {length} tokens, {found[way][-1]}", file=sys.stderr)
        plain = statistics.median(one["seconds"] for one in found["plain"])
        base = max(one["peak_gib"] for one in found["plain"])
        for way in ways:
            seconds = statistics.median(one["seconds"] for one in found[way])
            peak = max(one["peak_gib"] for one in found[way])
            rows.append(
                {
                    "tokens": length,
                    "way": way,
                    "seconds": seconds,
                    "ratio": seconds / plain,
                    "peak_gib": peak,
                    "above_plain_gib": peak - base,
                    "runs": len(found[way]),
                }
            )
    return {"rows": rows, "table": _table(rows)}


def _table(rows: list[dict[str, Any]]) -> str:
    lines = ["tokens  way     seconds  times plain  peak GiB  above plain  (all 144 heads, float32, batch 1)"]
    lines += [
        f"{row['tokens']:6}  {row['way']:6}  {row['seconds']:7.2f}  {row['ratio']:11.2f}  {row['peak_gib']:8.2f}  "
        f"{row['above_plain_gib']:11.2f}"
        for row in rows
    ]
    return "\n".join(lines)


def _measured(way: str, length: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.heads", way, str(length)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{way} at {length} tokens failed: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _child(way: str, length: int) -> None:
    """One way at one length: the median of two passes after a short warm-up, and the peak memory of the process."""
    import torch

    with torch.no_grad():
        model, ids = _body(way, length)
        go = {"plain": _plain, "watch": _watch, "dense": _dense}[way]
        go(model, ids[:, :128])
        times = []
        for _ in range(2 if length <= DENSE_UP_TO and way != "dense" else 1):
            began = time.perf_counter()
            go(model, ids)
            times.append(time.perf_counter() - began)
    print(json.dumps({"seconds": statistics.median(times), "peak_gib": peak_gib(), "threads": torch.get_num_threads()}))


def _body(way: str, length: int) -> tuple[Any, Any]:
    import torch
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=max(length, 1024),
        use_cache=False,
    )
    model = GPT2Model(config).eval()
    model.set_attn_implementation("eager" if way == "dense" else "sdpa")
    return model, torch.randint(VOCABULARY, (1, length))


def _plain(model: Any, ids: Any) -> None:
    model(input_ids=ids)


def _watch(model: Any, ids: Any) -> None:
    import headwise as hw

    marks = {"delimiter": range(0, VOCABULARY, 7), "rare": range(0, VOCABULARY, 11)}
    with hw.watch(model, marks=marks) as seen:
        model(input_ids=ids)
    assert len(seen) == LAYERS * HEADS


def _dense(model: Any, ids: Any) -> None:
    """The usual way: all maps, then each statistic from them."""
    for maps in model(input_ids=ids, output_attentions=True).attentions:
        dense_statistics(maps[0], ids[0])


def dense_statistics(p: Any, ids: Any) -> None:
    """What `watch` measures of a layer, from its maps (H,T,T) of the tokens (T,), but for what its heads add."""
    import torch

    T = len(ids)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    same = ids[:, None] == ids
    earlier = same & (j < i)
    after = torch.zeros_like(same)
    after[:, 1:] = same[:, :-1]
    after &= j <= i
    p[..., 0]
    p.diagonal(0, 1, 2)
    p.diagonal(-1, 1, 2)
    for marked in (earlier, after, ids % 7 == 0, ids % 11 == 0):
        (p * marked).sum(-1)
    p.amax(-1)
    p.sum(1)
    torch.xlogy(p, p).sum(-1)
    mean = (p * (i - j)).sum(-1)
    (p * (i - j - mean[..., None]).square()).sum(-1).sqrt()
    p.unflatten(2, (32, -1)).mean(-1).unflatten(1, (32, -1)).mean(2)  # a thumbnail


if __name__ == "__main__":
    _child(sys.argv[1], int(sys.argv[2]))
