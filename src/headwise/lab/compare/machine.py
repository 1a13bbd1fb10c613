"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy
import torch

from headwise import __version__


def machine() -> dict[str, str | int]:
    """Processor, cores, threads and versions."""
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
