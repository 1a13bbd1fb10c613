"""nanoGPT's CPU recipe against the preset `fast`, on tinyshakespeare: time to the same held-out loss.

The recipe: 4 layers, 4 heads, width 128, context 64, batch 12, 2,000 steps, no dropout, learned positions, LayerNorm,
GELU, AdamW. It is the preset `nanogpt`, trained by the same loop. Both sides are scored on the same 100,000 held-out
characters, in pieces of 64, and run in turn, each in a process of its own. Precision float32.

`book`: the preset of that name on the same text, a run a seed, beside the best n-gram; `--steps` of a longer training
can be given by BOOK_STEPS in the environment.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TEXT = Path(__file__).resolve().parents[1] / ".." / "shared" / "data" / "tinyshakespeare.txt"
SIDES = ("nanogpt", "fast")


def run(runs: int) -> dict[str, Any]:
    if not TEXT.exists():
        return {"table": f"not run: {TEXT} is absent (the complete tinyshakespeare, 1,115,394 characters)"}
    measured: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for seed in range(runs):
        for side in SIDES:
            measured[side].append(_apart(side, seed))
    medians = {
        side: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for side, rows in measured.items()
    }
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(measured["nanogpt"], measured["fast"], strict=True)]
    return {
        "runs": measured,
        "medians": medians,
        "speedup": statistics.median(ratios),
        "table": _table(medians, ratios),
    }


def book(runs: int) -> dict[str, Any]:
    if not TEXT.exists():
        return {"table": f"not run: {TEXT} is absent (the complete tinyshakespeare, 1,115,394 characters)"}
    rows = [_apart("book", seed) for seed in range(runs)]
    lines = ["seed  held-out  best n-gram  seconds  processor"]
    for seed, row in enumerate(rows):
        lines.append(
            f"{seed:4}  {row['held_out_loss']:8.4f}  {row['ngram_loss']:11.4f}  {row['seconds']:7.1f}  "
            f"{row['processor_seconds']:9.1f}"
        )
    return {"runs": rows, "table": "\n".join(lines)}


def _apart(side: str, seed: int) -> dict[str, float]:
    """One training in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.training", side, str(seed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    measured: dict[str, float] = json.loads(done.stdout)
    print(f"training {side} seed {seed}: {measured}", file=sys.stderr)
    return measured


def _table(medians: dict[str, dict[str, float]], ratios: list[float]) -> str:
    rows = ["side      held-out  seconds  ms/step  tokens/s  peak MiB  parameters"]
    for side, row in medians.items():
        rows.append(
            f"{side:8}  {row['held_out_loss']:8.4f}  {row['seconds']:7.1f}  {row['ms_per_step']:7.1f}  "
            f"{row['tokens_per_second']:8,.0f}  {row['peak_mib']:8.0f}  {row['parameters']:10,.0f}"
        )
    spread = f"{min(ratios):.1f} to {max(ratios):.1f} in {len(ratios)} pairs"
    rows.append(f"fast takes 1/{statistics.median(ratios):.1f} of the time ({spread})")
    return "\n".join(rows)


def one(side: str, seed: int) -> dict[str, float]:
    """Train one side; the time includes building the model and its own evaluations, not reading the text."""
    from headwise.gpt.run import Settings
    from headwise.gpt.train import evaluate, train

    steps = int(os.environ["BOOK_STEPS"]) if side == "book" and "BOOK_STEPS" in os.environ else None
    corpus, config, recipe = Settings(preset=side, text=str(TEXT), seed=seed, steps=steps).resolve()
    with tempfile.TemporaryDirectory() as folder:
        began, worked = time.perf_counter(), time.process_time()
        model, _ = train(Path(folder), config, recipe, corpus.data, seed, lambda progress: None)
        seconds, processor = time.perf_counter() - began, time.process_time() - worked
    measured = {
        "held_out_loss": evaluate(model, corpus.data),
        "seconds": seconds,
        "processor_seconds": processor,
        "ms_per_step": seconds / recipe.steps * 1000,
        "tokens_per_second": recipe.steps * recipe.batch * config.context / seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "parameters": model.n_parameters,
    }
    if side == "book":
        _, measured["ngram_loss"] = corpus.data.ngram(len(corpus.tokens))
    return measured


if __name__ == "__main__":
    print(json.dumps(one(sys.argv[1], int(sys.argv[2]))))
