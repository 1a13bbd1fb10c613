"""Times that can be compared: all ways in turn within each round, so that a slow moment of the machine is shared.

On one thread: with two, another process that keeps a core busy made a call of 5 ms take 16 or 400 here.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy
import torch

from headwise import __version__
from headwise.gpt.train import one_thread

FASTER = 1.1  # from this ratio of speeds on: smaller ones are lost among other differences
Times = dict[str, list[float]]  # seconds of each round


@torch.no_grad()
@one_thread()
def in_turn(ways: Mapping[str, Callable[[], object]], rounds: int) -> Times:
    """Seconds of each way in each round, after one that warms up; the order moves on by one each round."""
    names = deque(ways)
    times: Times = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(rounds):
        for name in names:
            began = time.perf_counter()
            ways[name]()
            times[name].append(time.perf_counter() - began)
        names.rotate(-1)
    return times


def median_ratio(times: Times, name: str, over: str) -> float:
    return statistics.median(a / b for a, b in zip(times[name], times[over], strict=True))


def milliseconds(times: Times, name: str) -> float:
    return 1000 * statistics.median(times[name])


def machine() -> dict[str, str | int]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "threads": "1 for each model in training, and in everything timed",
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "headwise": __version__,
    }
