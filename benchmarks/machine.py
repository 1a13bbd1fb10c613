"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy
import torch


def machine() -> dict[str, str | int]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }


def peak_gib() -> float:
    """The largest resident memory of this process; `ru_maxrss` would begin with that of the one that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(line for line in lines if line.startswith("VmHWM"))
    return int(peak.split()[1]) / 2**20  # of KiB
