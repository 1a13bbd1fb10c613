"""Where a model computes, the processor or a device that torch knows by name; how much memory is free there.

And what a call costs: `in_turn` is the stop-watch of whatever is compared, `peak_of` the meter of its tensors.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch.autograd.profiler import profile

from headwise.errors import HeadwiseError

if sys.platform != "win32":
    import resource

CPU = torch.device("cpu")
Name = TypeVar("Name", bound=Hashable)


# How much memory may still be taken. Rooms compare by their size, so that `min` gives the tightest one.
class Room(NamedTuple):
    size: int  # bytes that are free
    limit: str  # what sets the bound: "memory", "ulimit -v", "ulimit -d" or "cgroup"


def free_memory() -> Room:
    """The smallest of what the machine has free and what the limits of the process leave it."""
    # Only Linux has these files: elsewhere the first read fails, before `resource` is asked for. ValueError: the name
    # of the process, with which its status begins, is no UTF-8. KeyError: the files lack these fields.
    with suppress(OSError, ValueError, KeyError):
        machine, process = _fields(Path("/proc/meminfo")), _fields(Path("/proc/self/status"))
        rooms = [Room(machine["MemAvailable"], "memory"), *_cgroups()]
        # Each limit of `ulimit`, with the field that says what the process has taken of it: -v bounds all addresses,
        # -d the data.
        for name, kind, taken in (("-v", resource.RLIMIT_AS, "VmSize"), ("-d", resource.RLIMIT_DATA, "VmData")):
            most = resource.getrlimit(kind)[0]  # the soft limit, which is the one that holds
            if most != resource.RLIM_INFINITY:
                rooms.append(Room(max(0, most - process[taken]), f"ulimit {name}"))
        return min(rooms)
    with suppress(AttributeError, OSError, ValueError):  # such as macOS: all that is built in, free or not
        return Room(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "memory")
    return Room(sys.maxsize, "memory")  # nobody knows (Windows): no bound


def peak_memory() -> int | None:
    """The most bytes that this process has held at a time, pages of files included; None where nobody counts."""
    if sys.platform == "win32":
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most  # Linux counts in KiB


def _fields(path: Path) -> dict[str, int]:
    """The sizes in a file of /proc, in bytes: "VmSize:  1024 kB" -> {"VmSize": 1048576}."""
    rows = (line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.endswith(" kB"))
    return {row[0].rstrip(":"): 1024 * int(row[1]) for row in rows}


def _cgroups() -> list[Room]:
    """What the control groups (version 2) that hold the process leave it, one room for each that has a limit."""
    rooms = []
    with suppress(OSError, ValueError, StopIteration):  # no such file, a name that is no UTF-8, or no version 2
        # The row of version 2 begins with "0::", and its path is seen from /sys/fs/cgroup: "0::/user.slice/app".
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        path = Path("/sys/fs/cgroup") / next(row for row in groups if row.startswith("0::")).removeprefix("0::/")
        for folder in (path, *path.parents):  # a limit holds for all groups below it
            # No such file: the root, the folders above it, and a group whose memory nobody controls.
            with suppress(OSError, ValueError, KeyError):
                most = (folder / "memory.max").read_text(encoding="utf-8").strip()
                used = dict(row.split() for row in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
                # What a group has taken and cannot give back: "anon" and "shmem", which /dev/shm holds. The pages of
                # files are freed by the system when it must.
                if most != "max":  # "max" is no limit
                    rooms.append(Room(max(0, int(most) - int(used["anon"]) - int(used["shmem"])), "cgroup"))
    return rooms


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


def free_on(device: torch.device) -> Room:
    """What a device may still take; one that shares the memory of the machine has what is free there."""
    with suppress(RuntimeError):  # not every kind of device keeps account
        if device.type != "cpu":
            # [0] is what is free of it, [1] what it has in all.
            return Room(torch.accelerator.get_memory_info(device)[0], f"memory of {device}")
    return free_memory()


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
