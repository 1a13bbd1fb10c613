"""Where a model computes, the processor or a device that torch knows by name; how much memory is free there.

And what a call costs: `in_turn` is the stop-watch of whatever is compared, `peak_of` the meter of its tensors.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.profiler import profile

from headwise.errors import HeadwiseError

CPU = torch.device("cpu")
Name = TypeVar("Name", bound=Hashable)


def free_memory() -> int:
    """Bytes that may still be taken: what the machine has free, or less where a control group has a limit."""
    with suppress(OSError, ValueError, KeyError):  # only Linux has this file
        rows = (line.split() for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        free = {row[0]: 1024 * int(row[1]) for row in rows}["MemAvailable:"]
        group = Path("/sys/fs/cgroup")
        with suppress(OSError, ValueError):  # no group, or one without a limit, whose `memory.max` is "max"
            most, used = (int((group / name).read_text(encoding="utf-8")) for name in ("memory.max", "memory.current"))
            free = min(free, max(0, most - used))
        return free
    return sys.maxsize  # nobody knows: no bound


def device_named(name: str | torch.device) -> torch.device:
    """The device of this name: "cpu", "cuda", "cuda:1", "mps". Raises HeadwiseError, with what is there, for others."""
    names = ["cpu"]  # then "cuda:0", "cuda:1", ...
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        names += [f"{accelerator.type}:{n}" for n in range(torch.accelerator.device_count())]
    with suppress(RuntimeError, TypeError):  # a word that is no device to torch
        device = torch.device(name)
        # A name without a number, such as "cuda", is the first device of its kind; "cpu" may be called "cpu:0", too.
        if f"{device.type}:{device.index or 0}" in ("cpu:0", *names):
            return device
    raise HeadwiseError(f"device {name} is not on this machine; there is {', '.join(names)}")


def free_on(device: torch.device) -> int:
    """What a device may still take; one that shares the memory of the machine has what is free there."""
    with suppress(RuntimeError):  # not every kind of device keeps account
        if device.type != "cpu":
            return torch.accelerator.get_memory_info(device)[0]
    return free_memory()


@contextmanager
def loaded(*modules: nn.Module) -> Iterator[None]:
    """A block in which modules have their weights, where accelerate brings them from the disk for each call alone."""
    parts: list[tuple[nn.Module, Any]] = []
    for part in chain(*(module.modules() for module in modules)):
        if hasattr(part, "_hf_hook") and any(weights.is_meta for weights in part.parameters(recurse=False)):
            parts.append((part, part._hf_hook))
    for part, hook in parts:
        hook.pre_forward(part)
    try:
        yield
    finally:
        for part, hook in parts:
            hook.post_forward(part, None)


def require_held(model: nn.Module, what: str) -> None:
    """Refuse, for the sake of `what`, a model some of whose weights are not in memory."""
    if any(weights.is_meta for weights in model.parameters()):
        raise HeadwiseError(
            f"{what} of {type(model).__name__} needs all its weights in memory, and some are on the meta device, as "
            f"where device_map= leaves them on the disk; open it without device_map=, where memory holds it"
        )


def has_bfloat16() -> bool:
    """Has this processor instructions for products in bfloat16?"""
    mkldnn: Any = torch.backends.mkldnn
    return mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def seconds_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@torch.no_grad()
def in_turn(
    calls: Mapping[Name, Callable[[], object]], rounds: int, longest: float = math.inf
) -> dict[Name, list[float]]:
    """Seconds of each call in each round, after one round that warms up and does not count.

    Every round runs all calls, so that a slow moment of the machine is shared. Each round begins with another call, so
    that none is always the first. Calls on a device must wait for it themselves. Forward passes are compared: no call
    keeps what slopes would need.

    longest  seconds for one call in all rounds. A slow call runs in fewer rounds; where not even one fits, its only
             time is that of the round that warms up
    """
    first = {name: seconds_of(call) for name, call in calls.items()}
    times: dict[Name, list[float]] = {name: [] for name in calls}
    names = deque(calls)
    for n in range(1, rounds + 1):
        for name in names:
            if n * first[name] <= longest:  # would n rounds fit, each as long as the one that warmed up?
                times[name].append(seconds_of(calls[name]))
        names.rotate(-1)  # a b c -> b c a
    return {name: taken or [first[name]] for name, taken in times.items()}


@torch.no_grad()
def peak_of(call: Callable[[], object]) -> int:
    """The most bytes that a call has of torch's allocator at a time, beyond what was taken before it."""
    # Above every level of the log of Kineto, torch's profiler, which else writes lines to standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(profile_memory=True) as profiled:
        call()
    held = peak = 0
    # The raw events, in the order of time: `profiled.events()` has one sum for all that an operator takes and frees.
    for event in profiled.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()  # below 0 where a tensor is freed
            peak = max(peak, held)
    return peak
