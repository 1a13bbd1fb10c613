"""Watch every family of the installed transformers under `flex_attention` and under flash attention, beside `sdpa`.

    nice python studies/backends.py                  # every family, some ten minutes on one core
    nice python studies/backends.py --only llama,t5 --backend flash

A line for each family: the largest difference of any statistic of any head from what it is under `sdpa`, as a share of
the statistic's largest value, or why there is none. Flex runs without its compiler. Flash attention has no kernel for a
processor: transformers' own code calls a plain one in its place (`tests/heads/flash.py`).
"""

from __future__ import annotations

import argparse
import runpy
import signal
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

import headwise as hw

# by their paths: tests have modules of these names
HERE = Path(__file__).resolve().parent
families = runpy.run_path(str(HERE / "families.py"))
stand_ins = runpy.run_path(str(HERE.parent / "tests" / "heads" / "flash.py"))
BACKENDS = {"flex": "flex_attention", "flash": "flash_attention_2"}
MOST = 1e-5  # difference of a statistic, as a share of its largest value
Numbers = Mapping[str, np.ndarray]  # "L3.H5 entropy" -> its rows


def watched(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Numbers, list[Any], list[str]]:
    """Statistics of every head of a run, what the model answered, and what `watch` notes."""
    with torch.no_grad(), hw.watch(model) as seen:
        answers = families["run"](model, inputs)
    numbers = {f"{head.name} {name}": head.rows[name] for head in seen.values() for name in head.rows}
    return numbers, answers, list(seen.notes)


def apart(some: Numbers, others: Numbers) -> float:
    """The largest difference, as a share; infinite where one has what the other lacks."""
    if some.keys() != others.keys() or any(some[name].shape != others[name].shape for name in some):
        return float("inf")
    largest = 0.0
    for name, values in others.items():
        scale = max(1.0, float(np.nanmax(np.abs(values), initial=0)))
        gap = np.where(np.isnan(some[name]) & np.isnan(values), 0, np.abs(some[name] - values))
        largest = max(largest, float(np.nan_to_num(gap, nan=np.inf).max(initial=0)) / scale)
    return largest


def line(family: str, backend: str, padding: str) -> tuple[str, str]:
    """What becomes of a family under a backend, in a word, and what to print of it."""
    try:
        model = families["build"](family)
        inputs, _ = families["runnable_inputs"](model, family, padding)
        numbers, before, _ = watched(model, inputs)
    except Exception as error:  # other people's code, which may raise anything
        return "not watched under sdpa", families["first_line"](error)
    if not numbers:
        return "not watched under sdpa", "no head"
    try:
        if backend == "flex":
            model.set_attn_implementation(BACKENDS[backend])
        elif not getattr(model, "_supports_flash_attn", False):
            raise ValueError(f"{type(model).__name__} does not support Flash Attention")
        stand_ins["use_backend"](model, BACKENDS[backend])
        with torch.no_grad():
            plain = families["run"](model, inputs)
    except Exception as error:
        return "not offered by transformers", f"{type(error).__name__}: {families['first_line'](error)}"
    try:
        ours, answers, _ = watched(model, inputs)
    except hw.HeadwiseError as error:
        return "refused", families["first_line"](error)
    if any(not torch.equal(x, y) for x, y in zip(plain, answers, strict=True)):
        return "wrong", "the watched model answers differently"
    most = apart(ours, numbers)
    if most <= MOST:
        return "equal", f"{most:.1g}"
    model_itself = max((families["furthest"]([x], [y]) for x, y in zip(plain, before, strict=False)), default=0.0)
    return ("the model differs" if model_itself > 1e-3 else "wrong"), f"{most:.1g}, its answers by {model_itself:.1g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="families, with commas between; default: all")
    parser.add_argument("--without", default="", help="families to leave out, with commas between")
    parser.add_argument("--backend", choices=BACKENDS, default="flex")
    parser.add_argument("--padding", choices=("none", "left", "right"), default="none")
    arguments = parser.parse_args()
    logging.set_verbosity(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = arguments.only.split(",") if arguments.only else list(CONFIG_MAPPING)
    counts: Counter[str] = Counter()

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {families['SECONDS']} s of a processor")

    signal.signal(signal.SIGPROF, late)
    with stand_ins["uncompiled_flex"](), stand_ins["flash_stand_in"]():
        for family in chosen:
            if family in arguments.without.split(","):
                continue
            signal.setitimer(signal.ITIMER_PROF, families["SECONDS"])
            status, told = line(family, arguments.backend, arguments.padding)
            counts[status] += 1
            print(f"{family:<28}{status:<28}{told}", flush=True)
    print(", ".join(f"{count} {status}" for status, count in counts.most_common()))


if __name__ == "__main__":
    main()
