"""Where a training stands, in one file that is replaced in one move; and Ctrl-C that waits for the end of a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.gpt.checkpoint import read_metadata, read_tensors, write_tensors


def save_state(
    path: Path,
    weights: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    step: int,
    kept: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Weights, moments, step and `kept`, whatever else must survive."""
    tensors = {f"model.{name}": parameter.detach() for name, parameter in weights.items()}
    for n, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{n}.{index}.{name}": value for name, value in state.items()}
    tensors |= {f"kept.{name}": tensor for name, tensor in kept.items()}
    write_tensors(path, tensors, {"step": str(step)})


def restore_state(
    path: Path, weights: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[int, dict[str, Tensor]]:
    """Load what `save_state` wrote; returns the steps done and what was kept; 0 and nothing without a file."""
    if not path.exists():
        return 0, {}
    tensors = read_tensors(path)
    saved = {name: tensor.shape for name, tensor in tensors.items() if name.startswith("model.")}
    if saved != {f"model.{name}": parameter.shape for name, parameter in weights.items()}:
        raise HeadwiseError(f"{path} is the state of another model; resume with the settings it began with")
    with torch.no_grad():
        for name, parameter in weights.items():
            parameter.copy_(tensors[f"model.{name}"])
    for n, optimizer in enumerate(optimizers):
        states: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            kind, *rest = name.split(".")
            if kind == "optimizer" and int(rest[0]) == n:
                states.setdefault(int(rest[1]), {})[rest[2]] = tensor
        optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    kept = {name.removeprefix("kept."): tensor for name, tensor in tensors.items() if name.startswith("kept.")}
    return int(read_metadata(path)["step"]), kept


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C within this block is noted, not raised, so that no step is cut in half; a second one is raised."""
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noted.is_set  # only the main thread may handle signals
        return

    def note(signum: int, frame: Any) -> None:
        if noted.is_set():
            raise KeyboardInterrupt
        noted.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted.is_set
    finally:
        signal.signal(signal.SIGINT, before)
