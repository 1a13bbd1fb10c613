"""A survey of a corpus: its memory as the corpus grows, and its time over plain passes.

Memory: a small model (2 layers of 4 heads of 16), documents of 512 tokens, up to a million tokens of a file; each size
in a process of its own. Time: the body of GPT-2 small as in `benchmarks.heads`, 8 documents of 512 tokens; the survey
without controls and without effects, which read documents once more, against the plain passes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

SIZES = (10_000, 100_000, 1_000_000)
LENGTH, DOCUMENTS = 512, 8


def run(runs: int, sizes: tuple[int, ...] = SIZES) -> dict[str, Any]:
    rows = [_measured("memory", size) for size in sizes]
    times = sorted((_measured("time", DOCUMENTS) for _ in range(runs)), key=lambda found: found["ratio"])
    lines = ["tokens     seconds  peak MiB  above the first"]
    lines += [
        f"{r['tokens']:9,}  {r['seconds']:7.1f}  {r['peak']:8.0f}  {r['peak'] - rows[0]['peak']:+8.0f}" for r in rows
    ]
    middle = times[len(times) // 2]
    lines.append(f"survey over plain passes at {LENGTH} tokens, 144 heads: {middle['ratio']:.2f}")
    return {"memory": rows, "time": middle, "table": "\n".join(lines)}


def _measured(what: str, size: int) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.corpus", what, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{what} at {size} failed: {done.stderr[-2000:]}")
    print(f"corpus: {what} {size}: {done.stdout.splitlines()[-1]}", file=sys.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def memory(size: int) -> dict[str, float]:
    """Peak memory of a process that surveys a file of so many characters, each of which is a token."""
    import resource
    import tempfile
    from pathlib import Path

    import torch

    import headwise as hw
    from headwise.corpus.tokens import Tokens
    from headwise.gpt.gpt import GPT, GPTConfig

    letters = "abcdefghijklmnopqrstuvwxyz .,\n"
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=len(letters), context=LENGTH, n_layers=2, n_heads=4, d_model=64)).eval()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        with path.open("w") as file:
            for start in range(0, size, 10_000):  # in pieces, so that the peak is that of the survey
                count = min(10_000, size - start)
                file.write("".join(letters[i] for i in torch.randint(len(letters), (count,)).tolist()))
        began = time.perf_counter()
        tokens = Tokens.characters(letters, boundary=False)
        survey = hw.survey(model, path, tokenizer=tokens, tokens=LENGTH, controls=False, ablate="none")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {"tokens": survey.n_tokens, "seconds": time.perf_counter() - began, "peak": peak}


def ratio(documents: int) -> dict[str, float]:
    """Seconds of a survey and of plain passes over the same documents."""
    import torch

    import headwise as hw
    from benchmarks.heads import _body

    with torch.no_grad():
        model, _ = _body("plain", LENGTH)
        ids = torch.randint(model.config.vocab_size, (documents, LENGTH))
        model(input_ids=ids[:2])
        began = time.perf_counter()
        for each in ids:
            model(input_ids=each[None])
        plain = time.perf_counter() - began
    began = time.perf_counter()
    hw.survey(model, ids.tolist(), controls=False, ablate="none")
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "plain": plain, "ratio": seconds / plain}


if __name__ == "__main__":
    print(json.dumps({"memory": memory, "time": ratio}[sys.argv[1]](int(sys.argv[2]))))
