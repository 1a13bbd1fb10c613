"""Where a model computes: the processor, or a device that torch knows by name."""

from __future__ import annotations

from contextlib import suppress

import torch

from headwise.errors import HeadwiseError
from headwise.memory import Room, free_memory

CPU = torch.device("cpu")


def device_named(name: str | torch.device) -> torch.device:
    """The device of this name: "cpu", "cuda", "cuda:1", "mps". Raises HeadwiseError, with what is there, for others."""
    there = ["cpu"]
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        there += [f"{accelerator.type}:{n}" for n in range(torch.accelerator.device_count())]
    with suppress(RuntimeError, TypeError):  # a word that is no device to torch
        device = torch.device(name)
        if f"{device.type}:{device.index or 0}" in (*there, "cpu:0"):
            return device
    raise HeadwiseError(f"device {name} is not on this machine; there is {', '.join(there)}")


def free_on(device: torch.device) -> Room:
    """What a device may still take; one that shares the memory of the machine has what is free there."""
    with suppress(RuntimeError, AttributeError):  # not every kind of device keeps account
        if device.type != "cpu":
            return Room(torch.accelerator.get_memory_info(device)[0], f"memory of {device}")
    return free_memory()
