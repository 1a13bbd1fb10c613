"""Memory of training as the text grows: 5 MB, 500 MB and, with three runs, 5 GB.

A small GPT (2 layers of 2 heads, width 32, context 64) trains 30 steps on the little book, its words drawn anew. Each
size has a process of its own and an empty folder for the tokens. The peak is that of resident memory, with file pages.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIZES = (5, 500, 5_000)  # MB


def run(runs: int, sizes: tuple[int, ...] = SIZES) -> dict[str, Any]:
    rows = [_measured(size) for size in sizes[: max(2, runs)]]
    lines = ["   MB  seconds  peak MiB  above the first"]
    for row in rows:
        above = row["peak"] - rows[0]["peak"]
        lines.append(f"{row['megabytes']:5}  {row['seconds']:7.0f}  {row['peak']:8.0f}  {above:+8.0f}")
    return {"rows": rows, "table": "\n".join(lines)}


def _measured(megabytes: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "HEADWISE_CACHE": folder}
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.texts", str(megabytes), folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{megabytes} MB failed: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def write(path: Path, megabytes: int) -> None:
    from headwise.files import packaged, read_text

    draw, words = random.Random(0), read_text(packaged("tale")).split(" ")
    lines = [" ".join(draw.choices(words, k=200)) + "\n" for _ in range(1000)]
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < megabytes * 10**6:
            draw.shuffle(lines)
            file.writelines(lines)


def measure(megabytes: int, folder: Path) -> dict[str, float]:
    import resource

    from headwise.gpt.run import Settings, run_training

    write(folder / "text.txt", megabytes)
    began = time.monotonic()
    shape = {"n_layers": 2, "n_heads": 2, "d_model": 32, "context": 64}
    settings = Settings("nanogpt", str(folder / "text.txt"), steps=30, shape=shape)
    run_training(folder / "run", settings, lambda progress: None, resume=False)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"megabytes": megabytes, "seconds": time.monotonic() - began, "peak": peak}


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), Path(sys.argv[2]))))
