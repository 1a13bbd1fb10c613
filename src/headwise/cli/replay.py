"""`headwise train NAMES --preset microgpt --rung ...`: microgpt, step for step."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headwise.cli.app import Progress, out, print_json
from headwise.errors import HeadwiseError
from headwise.files import read_text, write_whole

SHOWN = 5  # losses at either end


def replay_microgpt(
    given: dict[str, Any], rung: str, n_samples: int, resume: bool, folder: Path | None, as_json: bool
) -> None:
    """Train microgpt on the lines of a text and print losses and samples. With --out, keep weights and losses there."""
    from headwise.lab.microgpt import replay

    names = _names(given, resume, folder)
    steps = 1000 if given["steps"] is None else given["steps"]
    began = time.perf_counter()
    with Progress() as progress:
        every = max(1, steps // 200)  # a bar that moves at each step would take longer than the steps

        def report(step: int, loss: float) -> None:
            if step % every == 0 or step == steps:
                progress("step", step, steps, f"loss {loss:.4f}")

        seed = 42 if given["seed"] is None else given["seed"]
        result = replay(names, rung, steps, seed, n_samples, report)
    seconds = time.perf_counter() - began
    kept = None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / "microgpt.json"
        write_whole(kept, json.dumps(asdict(result), ensure_ascii=False))
    if as_json:
        document = {"rung": rung, "steps": steps, "seed": seed, "seconds": seconds, "losses": result.losses}
        print_json({**document, "samples": result.samples, "kept": None if kept is None else str(kept)})
        return
    ends = sorted({*range(min(SHOWN, steps)), *range(max(0, steps - SHOWN), steps)})
    for step in ends:
        out.print(f"step {step + 1:4}  loss {result.losses[step]:.4f}")
    out.print("\nsamples")
    for sample in result.samples:
        out.print(f"  {sample}")
    out.print(f"\n{steps} steps on the {rung} rung in {seconds:.2f} s")
    if kept is None:
        out.print("nothing is kept: microgpt has no Hugging Face form; --out FOLDER keeps weights and losses as JSON")
    else:
        out.print(f"weights and losses: {kept}; microgpt has no Hugging Face form")


def _names(given: dict[str, Any], resume: bool, folder: Path | None) -> list[str]:
    """The lines of the text; every option that an exact replay cannot honour is refused."""
    if given["preset"] not in (None, "microgpt"):
        raise HeadwiseError(f"--rung replays microgpt, and --preset {given['preset']} is asked for; leave one out")
    refused = {"--tokenizer": given["tokenizer"], "--lines/--stream": given["lines"], "--resume": resume or None}
    refused["the options of the model's shape"] = given["shape"]
    for option, value in refused.items():
        if value is not None:
            raise HeadwiseError(f"--rung replays microgpt exactly, so {option} cannot be honoured; leave it out")
    if given["text"] is None:
        raise HeadwiseError("--rung replays microgpt on a list of names; pass a text with one on each line")
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HeadwiseError(f"--out {folder} exists and is not empty; pass another folder")
    return read_text(Path(given["text"])).splitlines()
