"""Weights under fused attention: headwise's statistics of every head beside attnread 0.1.2's map of a single one.

A Llama of 2 layers, 4 heads of 64, width 256, random weights, sdpa, float32, one text of T random tokens. Three ways,
each in a process of its own so that its peak memory is its own:

    plain     the model's forward pass
    watch     the same under `headwise.watch`: all statistics of all 8 heads
    attnread  the map (T,T) of one head of the first layer, by identity matrices as values: T/64 further passes

attnread brings nnsight, so it has a virtual environment of its own, with transformers in it; ATTNREAD names its Python:

    python -m venv peer && peer/bin/pip install attnread==0.1.2 transformers torch
    ATTNREAD=peer/bin/python python -m benchmarks peer
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.machine import peak_gib

LENGTHS = (1024, 4096, 16384)
VOCABULARY = 997


def run(runs: int) -> dict[str, Any]:
    ways = {"plain": sys.executable, "watch": sys.executable}
    if "ATTNREAD" in os.environ:
        ways["attnread"] = os.environ["ATTNREAD"]
    rows = []
    for length in LENGTHS:
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(runs if length < max(LENGTHS) else 1):  # in turn, so that a busy minute strikes all of them
            for way, python in ways.items():
                line = [python, "-W", "ignore", __file__, way, str(length)]
                done = subprocess.run(line, capture_output=True, text=True, check=True)
                found[way].append(json.loads(done.stdout.splitlines()[-1]))
                print(f"peer: {way} at {length} tokens, {found[way][-1]}", file=sys.stderr)
        plain = statistics.median(one["seconds"] for one in found["plain"])
        base = min(one["peak_gib"] for one in found["plain"])
        for way in ways:
            seconds = statistics.median(one["seconds"] for one in found[way])
            above = max(one["peak_gib"] for one in found[way]) - base
            rows.append(
                {"tokens": length, "way": way, "seconds": seconds, "ratio": seconds / plain, "above_plain_gib": above}
            )
    lines = ["tokens  way       seconds  times plain  GiB above plain"]
    for row in rows:
        lines.append(
            f"{row['tokens']:6}  {row['way']:8}  {row['seconds']:7.2f}  {row['ratio']:11.2f}  "
            f"{row['above_plain_gib']:15.2f}"
        )
    if "attnread" not in ways:
        lines.append("attnread was left out: ATTNREAD must name the Python of its environment")
    return {"rows": rows, "table": "\n".join(lines)}


def child(way: str, length: int) -> None:
    """One way at one length: the processor time of a pass after a short warm-up, and the peak memory of the process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=max(LENGTHS),
    )
    model: Any = LlamaForCausalLM(config).eval()
    model.set_attn_implementation("sdpa")
    ids = torch.randint(VOCABULARY, (1, length))
    if way == "watch":
        import headwise as hw
    if way == "attnread":
        from attnread import extract_attention

    def go(ids: Any) -> None:
        if way == "attnread":
            extract_attention(model, {"input_ids": ids}, [(0, 0)])
        elif way == "watch":
            with hw.watch(model):
                model(ids, use_cache=False, logits_to_keep=1)
        else:
            model(ids, use_cache=False, logits_to_keep=1)

    with torch.no_grad():
        go(ids[:, :128])
        began = time.process_time()
        go(ids)
    seconds = time.process_time() - began
    print(json.dumps({"seconds": seconds, "peak_gib": peak_gib()}))


if __name__ == "__main__":
    child(sys.argv[1], int(sys.argv[2]))
