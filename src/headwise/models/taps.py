"""A call of an attention of transformers, from the attention function to where the heads enter W_O.

Between the two some families gate, norm or rotate what the heads gave. What a head gives is what W_O reads of it: so a
call waits until the projection is called, and what a handler makes of the heads takes the place of that input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.models.ask import hooked
from headwise.models.hf import Asked
from headwise.models.reading import read_call
from headwise.models.sites import Handler, Site
from headwise.records import Call


class Tap:
    """One attention of a model inside one block, and who listens there."""

    def __init__(self, site: Site, handler: Handler) -> None:
        self.site, self.handler = site, handler
        self.waiting: list[Call] = []  # calls whose heads have not entered W_O yet
        self.mixed = ""  # the norm in between that reads several heads at once

    @contextmanager
    def hooked(self, here: Callable[[], bool]) -> Iterator[None]:
        """Listen at W_O inside this block."""
        projection = self.site.projection
        if projection is None:
            yield
            return

        def begin(module: nn.Module, args: Any) -> None:
            if here():
                self.end()

        def joined(module: nn.Module, args: Any) -> Any:
            return self.joined(args) if here() and self.waiting else None

        def normed(module: nn.Module, args: Any) -> None:
            if here() and self.waiting and args and args[0].shape[-1] > self.waiting[0].out.shape[-1]:
                self.mixed = type(module).__name__

        norms = [child for child in self.site.module.children() if "norm" in type(child).__name__.lower()]
        handles = [norm.register_forward_pre_hook(normed) for norm in norms]
        handles += [self.site.module.register_forward_pre_hook(begin), projection.register_forward_pre_hook(joined)]
        with hooked(handles):
            yield
            self.end()

    def attended(self, asked: Asked, out: Tensor) -> Tensor | None:
        """The attention function has given `out` (B,H,T,E)."""
        site, H = self.site, asked.q.shape[1]
        if site.n_heads != H:
            raise HeadwiseError(
                f"{site.name}: {type(site.module).__name__} says that it has {site.n_heads} heads, and its attention "
                f"was called with {H}; its heads cannot be told apart"
            )
        call = read_call(asked, site.cross)
        if site.projection is None:
            note = f"{site.name}: its W_O is not known, so its heads are read where they leave the attention, no norm"
            return self.handler(call._replace(out=out, note=note))
        if not self.waiting or self.waiting[-1].q is not call.q or self.waiting[-1].k is not call.k:
            self.waiting.append(call)  # else the same maps are laid over other values: the same heads (DiffLlama)
        return None

    def joined(self, args: Any) -> Any:
        """W_O is about to read the joined heads; what it shall read in their place."""
        calls, self.waiting = self.waiting, []
        joined: Tensor = args[0]
        width = 1 if self.site.w_o is None else self.site.w_o.shape[1]
        rows = [call.out.shape[0] * call.out.shape[2] for call in calls]
        if joined.numel() != sum(rows) * width or (len(calls) > 1 and any(len(call.out) > 1 for call in calls)):
            self.waiting = calls
            return self.end()
        note = ""
        if self.mixed:
            note = f"{self.site.name}: {self.mixed} norms several heads at once before W_O: what one gives hangs on all"
        parts, changed = [], False
        for call, part in zip(calls, torch.split(joined.reshape(-1, width), rows), strict=True):
            B, H, T, _ = call.out.shape
            out = part.view(B, T, H, -1).transpose(1, 2)
            result = self.handler(call._replace(out=out, note=note))
            changed = changed or result is not None
            parts.append(part if result is None else result.to(part.dtype).transpose(1, 2).reshape(-1, width))
        return (torch.cat(parts).reshape(joined.shape), *args[1:]) if changed else None

    def end(self) -> None:
        """Calls that never entered W_O in a form that is known are handed on as they left the attention."""
        calls, self.waiting = self.waiting, []
        for call in calls:
            note = f"{self.site.name}: what enters W_O is not its heads side by side; they are read before, no norm"
            if self.handler(call._replace(note=note, at_w_o=False)) is not None:
                raise HeadwiseError(
                    f"{self.site.name}: what enters W_O of {type(self.site.module).__name__} is not its heads side by "
                    f"side, so they cannot be replaced there"
                )
