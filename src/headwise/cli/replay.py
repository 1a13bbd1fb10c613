"""`headwise train NAMES --preset microgpt --rung ...`: microgpt, step for step."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headwise.cli.app import Progress, out, print_json
from headwise.errors import HeadwiseError
from headwise.files import packaged, read_text

SHOWN = 5  # losses at either end
FIXED = {"n_kv_heads": "--kv-heads", "head_dim": "--head-dim", "d_model": "--width", "context": "--context"}


def replay_microgpt(
    options: dict[str, Any], rung: str, n_samples: int, resume: bool, folder: Path, as_json: bool
) -> None:
    """Train microgpt on the lines of a text, print losses and samples, and write a run folder.

    options  those of `headwise train`, by name; what an exact replay cannot honour is refused
    """
    from headwise.lab.microgpt import replay

    _check_options(options, resume, folder)
    text = Path(options["text"] or packaged("names"))
    seed = 42 if options["seed"] is None else options["seed"]
    steps = 1000 if options["steps"] is None else options["steps"]
    shape = options["shape"] or {}
    began = time.perf_counter()
    with Progress("reading the names") as progress:
        every = max(1, steps // 200)  # a bar that moves at each step would take longer than the steps

        def report(step: int, loss: float) -> None:
            if step % every == 0 or step == steps:
                progress("step", step, steps, f"loss {loss:.4f}")

        result = replay(read_text(text).splitlines(), rung, steps, seed, n_samples, report, **shape)
    seconds = time.perf_counter() - began
    written = find_spec("torch") is not None  # the rungs plain and array replay without it
    if written:
        from headwise.gpt.run import Settings
        from headwise.lab.microgpt.tensor import write_folder

        settings = Settings("microgpt", str(text), seed=seed, steps=steps, shape=shape, replay=rung)
        write_folder(folder, result, settings)
    if as_json:
        document = {"rung": rung, "steps": steps, "seed": seed, "seconds": seconds, "losses": result.losses}
        print_json({**document, "samples": result.samples, "run": str(folder) if written else None})
        return
    for step, loss in enumerate(result.losses, 1):
        if step <= SHOWN or step > steps - SHOWN:
            out.print(f"step {step:4}  loss {loss:.4f}")
    out.print("\n".join(["\nsamples", *(f"  {sample}" for sample in result.samples)]))
    out.print(f"\n{steps} steps on the {rung} rung in {seconds:.2f} s")
    no_folder = "no run folder is written: that needs torch, pip install 'headwise[torch]'"
    out.print(f"run folder: {folder}, for headwise heads, trace and generate" if written else no_folder)


def _check_options(options: dict[str, Any], resume: bool, folder: Path) -> None:
    """Refuse what an exact replay cannot honour."""
    if options["preset"] not in (None, "microgpt"):
        raise HeadwiseError(f"--rung replays microgpt, and --preset {options['preset']} is asked for; leave one out")
    shape = options["shape"] or {}
    refused = {"--tokenizer": options["tokenizer"], "--lines/--stream": options["lines"], "--resume": resume or None}
    refused |= {"--field": options["field"], "a second text": isinstance(options["text"], tuple) or None}
    for option, value in (refused | {flag: shape.get(name) for name, flag in FIXED.items()}).items():
        if value is not None:
            raise HeadwiseError(f"--rung replays microgpt exactly, so {option} cannot be honoured; leave it out")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HeadwiseError(f"--out {folder} exists and is not empty; pass another folder")
