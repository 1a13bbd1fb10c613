"""The one hook point: a call of attention, and who may change it.

`attach` hands every call of a site to a function, its handler, and what that returns takes the place of what the heads
gave. An attention of ours hands its calls on itself; one of transformers, and any other, is caught at two places,
marked *:

    ours                  transformers                   any module of torch

    q, k, v               q, k, v, mask                  q, k, v, mask
       |                     |                              |
    heads                 attention function of the      functions of torch: the fused call, or a softmax and a
       |                  library ("eager", "sdpa")      product; `softmax.Listener` reads them
       |                     |                              |
       |                   * `LibraryTap.at_interface`    * `FreeTap.attended`
       |                     out (B,H,T,E), held against what was read of the call (`reading.read_call`, `softmax`),
       |                     or refused; where W_O is not known: handler, which may change out
       |                     |                              |
       |                  norms and gates of the family     |
       |                     |                              |
     watchers: handler,    * `at_w_o`: handler, which     * `at_w_o`: the same, where W_O reads the heads side by side
     which may change out    may change what W_O reads      |
       |                     |                              |
      W_O                   W_O                            W_O

Blocks nest: a later handler gets what an earlier one has made of `out`. Calls of other threads do not count.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from threading import Lock
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from headwise.errors import HeadwiseError
from headwise.layer.layer import MultiHeadAttention
from headwise.models import softmax
from headwise.models.reading import Asked, read_call
from headwise.models.sites import Site, is_attention, is_watchable, remember
from headwise.records import Call, Watchable
from headwise.rungs.tensor import attend
from headwise.spec import Options

Handler = Callable[[Call], Tensor | None]
Hook = tuple[Callable[..., RemovableHandle], Callable[..., Any]]  # a module's way to register one, and what it calls

LARGEST = 2**24  # scores held at once where the kernel cannot do without them

_tokens: ContextVar[frozenset[object]] = ContextVar("headwise_blocks", default=frozenset())
_lock = Lock()


# Blocks of one thread


@contextmanager
def inside() -> Iterator[Callable[[], bool]]:
    """A block of one thread, and a function that says whether it is called inside: other threads are left alone.

    The thread is told by a context variable, so that what copies its context (asyncio.to_thread) is inside, too.
    """
    token = object()
    _tokens.set(_tokens.get() | {token})
    try:
        yield lambda: token in _tokens.get()
    finally:
        _tokens.set(_tokens.get() - {token})


class Within:
    """A function that acts where `here` says so; a copy of it, made with the model that holds it, never does."""

    def __init__(self, here: Callable[[], bool], act: Callable[..., Any]) -> None:
        self.here, self.act = here, act

    def __call__(self, *args: Any) -> Any:
        return self.act(*args) if self.here() else None

    def __reduce__(self) -> Any:
        return Within, (bool, bool)  # functions that can be pickled: `here` is bool, and bool() is False


@contextmanager
def hooked(hooks: Iterable[Hook], **options: Any) -> Iterator[None]:
    """The hooks act inside this block, in its thread alone."""
    with inside() as here, ExitStack() as stack:
        for register, hook in hooks:
            stack.callback(register(Within(here, hook), **options).remove)
        yield


# Attentions of any kind


@contextmanager
def observe(layer: MultiHeadAttention | Watchable, watcher: Handler) -> Iterator[None]:
    """Hand every call of a layer of ours to `watcher` inside this block; what it returns replaces the output.

    Calls of other threads do not count. Blocks may end in any order.
    """
    with inside() as here:
        # A shallow copy of the layer has this function, too, and is nobody's business.
        listen = Within(here, lambda call: watcher(call) if call.layer is layer else None)
        with _lock:  # a new list each time: another thread may be reading the one that is there
            layer.watchers = [*layer.watchers, listen]
        try:
            yield
        finally:
            with _lock:
                layer.watchers = [other for other in layer.watchers if other is not listen]


@contextmanager
def attach(handlers: Mapping[Site, Handler]) -> Iterator[None]:
    """Hand every call of these sites to their handlers inside this block; what a handler returns replaces `out`.

    Blocks nest: a later handler sees what an earlier one has made of the output. Calls of other threads do not count.
    Raises HeadwiseError at the end of a block in which none of the sites was reached.
    """
    reached = set()
    refused = []

    def handler_of(site: Site) -> Handler:
        def handle(call: Call) -> Tensor | None:
            if len(call.out):
                reached.add(site)
            else:
                refused.append(call.note or f"{site.name} was given a batch without a text; pass at least one")
            with softmax.unheard():
                return handlers[site](call)

        return handle

    with ExitStack() as stack:
        taps: dict[nn.Module, Tap] = {}
        for site in handlers:
            module: Any = site.module
            if is_watchable(module):
                stack.enter_context(observe(module, handler_of(site)))
            else:
                taps[module] = (FreeTap if site.free else LibraryTap)(site, handler_of(site))
        if taps:
            stack.enter_context(hooked(hook for tap in taps.values() for hook in tap.hooks()))
            stack.enter_context(_tapped(taps))
            stack.enter_context(_read(taps))
        yield
        for tap in taps.values():
            tap.end()
    if handlers and not reached:
        if refused:
            raise HeadwiseError(refused[0])
        names = [site.name for site in handlers]
        raise HeadwiseError(
            f"no head of {', '.join(names[:3])}{', ...' if names[3:] else ''} was reached inside this block; call the "
            f"model in it, in the thread that opened it, and not a form of it that was exported or traced before"
        )


def attend_by_rows(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    """What a handler gives where it changes q, k, v or options of a call: `attend`.

    Where that has to hold scores, a softcap's, a block of queries is computed at a time.
    """
    B, H, T, _ = q.shape
    S = k.shape[2]
    if options.softcap is None or B * H * T * S <= LARGEST:
        return attend(q, k, v, options)
    n_rows = max(1, LARGEST // (B * H * S))
    blocks = []
    for start in range(0, T, n_rows):
        rows = slice(start, start + n_rows)
        mask = None if options.mask is None else options.mask.for_queries(rows, T)
        blocks.append(attend(q[:, :, rows], k, v, options._replace(mask=mask)))
    return torch.cat(blocks, 2)


# Attentions of others


class Tap(ABC):
    """One attention that is not ours inside one block, and its handler.

    Between the attention function and W_O some families gate, norm or rotate what the heads gave. What a head gives is
    what W_O reads of it: so a call waits until W_O is called.
    """

    def __init__(self, site: Site, handler: Handler) -> None:
        self.site, self.handler = site, handler
        self.projection = site.projection
        self.waiting: list[Call] = []  # calls whose heads have not entered W_O yet

    def hooks(self) -> list[Hook]:
        """What listens from where the module is called to W_O."""
        if self.projection is None:
            return []
        # A call of the module ends the one before, which never came to W_O.
        acts = [(self.site.module, self.end), (self.projection, self.at_w_o)]
        return [(module.register_forward_pre_hook, act) for module, act in acts]

    @abstractmethod
    def at_w_o(self, module: nn.Module, args: Any) -> Any:
        """W_O is about to read the joined heads; what it shall read in their place."""

    def wait(self, call: Call) -> None:
        """Keep a call until W_O is called."""
        # DiffLlama lays the same maps over other values in a second call: these are the same heads.
        for last in self.waiting[-1:]:
            if call.weights is None and last.q is call.q and last.k is call.k:
                return
        self.waiting.append(call)

    def end(self, *args: Any) -> None:
        """Calls that never entered W_O in a form that is known are handed on as they left the attention."""
        calls, self.waiting = self.waiting, []
        for call in calls:
            self.hand_on(call)

    def hand_on(self, call: Call, again: str = "") -> None:
        """Hand a call on as it left the attention; `again` says what a second try would win."""
        note = f"{self.site.name}: what enters W_O is not its heads side by side; they are read before, no norm"
        if self.handler(call._replace(note=note, at_w_o=False)) is not None:
            raise HeadwiseError(
                f"{self.site.name}: what enters W_O of {type(self.site.module).__name__} is not its heads side by "
                f"side, so they cannot be replaced there{again}"
            )

    def without_w_o(self, call: Call, known: bool = False) -> Tensor | None:
        """Hand on a call whose W_O cannot be listened at; `known`: is it that of the site all the same?"""
        note = f"{self.site.name}: its W_O is not known, so its heads are read where they leave the attention, no norm"
        notes = [call.note, "" if known else note]
        return self.handler(call._replace(note="; ".join(filter(None, notes)), at_w_o=known))


class LibraryTap(Tap):
    """An attention of transformers, whose calls go through the interface of the library."""

    def __init__(self, site: Site, handler: Handler) -> None:
        super().__init__(site, handler)
        self.mixed = ""  # the norm in between that reads several heads at once

    def hooks(self) -> list[Hook]:
        norms = []
        if self.projection is not None:
            norms = [child for child in self.site.module.children() if "norm" in type(child).__name__.lower()]
        return super().hooks() + [(norm.register_forward_pre_hook, self.at_norm) for norm in norms]

    def at_interface(self, asked: Asked, out: Tensor) -> Tensor | None:
        """The attention function has given `out` (B,H,T,E); what takes its place."""
        site, n_heads = self.site, asked.q.shape[1]
        if site.n_heads != n_heads:
            raise HeadwiseError(
                f"{site.name}: {type(site.module).__name__} says that it has {site.n_heads} heads, and its attention "
                f"was called with {n_heads}; its heads cannot be told apart"
            )
        call = read_call(asked, site.cross)._replace(out=out)
        if self.projection is None:
            return self.without_w_o(call)
        self.wait(call)
        return None

    def at_norm(self, module: nn.Module, args: Any) -> None:
        """A norm of the attention is called."""
        if self.waiting and args and args[0].shape[-1] > self.waiting[0].out.shape[-1]:
            self.mixed = type(module).__name__

    def at_w_o(self, module: nn.Module, args: Any) -> Any:
        if not self.waiting:
            return None
        joined: Tensor = args[0]
        width = 1 if self.site.w_o is None else self.site.w_o.shape[1]  # no weight to read: 1, and no length fits
        rows = [call.out.shape[0] * call.out.shape[2] for call in self.waiting]
        # Calls of one document each stand below one another, as chunks of a text; of several the order is not known.
        unordered = len(rows) > 1 and any(len(call.out) > 1 for call in self.waiting)
        if unordered or joined.numel() != sum(rows) * width:
            return self.end()
        calls, self.waiting = self.waiting, []
        note = ""
        if self.mixed:
            note = f"{self.site.name}: {self.mixed} norms several heads at once before W_O: what one gives hangs on all"
        parts, changed = [], False
        for call, part in zip(calls, torch.split(joined.reshape(-1, width), rows), strict=True):
            B, H, T, _ = call.out.shape
            result = self.handler(call._replace(out=part.view(B, T, H, -1).transpose(1, 2), note=note))
            changed = changed or result is not None
            parts.append(part if result is None else result.to(part.dtype).transpose(1, 2).reshape(-1, width))
        return (torch.cat(parts).reshape(joined.shape), *args[1:]) if changed else None


class FreeTap(Tap):
    """An attention that calls functions of torch itself, which `softmax` reads.

    It is not known before that its projection is W_O: its input must be the heads side by side, number by number.
    """

    def __init__(self, site: Site, handler: Handler) -> None:
        super().__init__(site, handler)
        if site.module in _elsewhere:
            self.projection = None
        self.sure = True  # is it known in which order the heads of the calls that wait lie?

    def attended(self, call: Call, out: Tensor, sure: bool) -> Tensor | None:
        """The functions of torch have given `out` (B,H,T,E); what takes its place. `sure`: is the order of heads?"""
        site, kind = self.site, type(self.site.module).__name__
        if not len(call.out) and call.note:
            return self.refuse(call.note)
        if not site.n_heads:
            self.site = site = replace(site, n_heads=call.out.shape[1])
        if site.n_heads != call.out.shape[1]:
            return self.refuse(
                f"{kind} says that it has {site.n_heads} heads, and its attention gives {call.out.shape[1]}: chunks or "
                f"windows, or heads that cannot be told apart"
            )
        if self.projection is None and not sure:
            return self.refuse(f"{kind} has heads and texts in one axis, and its W_O is not known")
        call = call._replace(out=out, note=f"{site.name}: {call.note}" if call.note else "")
        w_o = softmax.packed_w_o()
        if self.projection is None or w_o is not None:
            self.learn(call)
            known = w_o is not None and site.w_o is not None and w_o.data_ptr() == site.w_o.data_ptr()
            return self.without_w_o(call, known)
        self.sure = self.sure and sure
        self.wait(call)
        return None

    def at_w_o(self, module: nn.Module, args: Any) -> Any:
        """The heads may lie documents first or (T,B,C); only the numbers tell."""
        if not self.waiting:
            return None
        joined: Tensor = args[0]
        call = self.waiting[0]
        B, H, T, E = call.out.shape
        before = _before.get(joined, joined)
        if self.waiting[1:] or joined.numel() != call.out.numel():
            return self.end()
        for tokens_first in (False, True):
            if tokens_first and joined.ndim != 3:
                break
            rows, rows_before = (x.transpose(0, 1) if tokens_first else x for x in (joined, before))
            heads = rows_before.reshape(B, T, H, E).transpose(1, 2)
            with torch.no_grad():  # a comparison would leave its numbers for a backward pass
                # The very bits; torch.equal takes NaN for another number than NaN.
                is_same = torch.allclose(heads, call.out.to(heads.dtype), rtol=0, atol=0, equal_nan=True)
            if not is_same:
                continue
            self.waiting = []
            self.learn(call)
            changed = self.handler(call._replace(out=rows.reshape(B, T, H, E).transpose(1, 2)))
            if changed is None:
                return None
            replaced = changed.to(joined.dtype).transpose(1, 2).reshape(rows.shape)
            replaced = replaced.transpose(0, 1) if tokens_first else replaced
            _before[replaced] = before
            return (replaced, *args[1:])
        return self.end()

    def learn(self, call: Call) -> None:
        """Keep what has been found out about the module for the next block."""
        remember(self.site.module, call.out.shape[1])

    def refuse(self, why: str) -> Tensor | None:
        """Tell the handler, by a call of no documents, that what the module does is not read."""
        note, self.waiting = f"{self.site.name}: {why}, no map", []  # calls that wait are parts of what is refused
        if self.handler(softmax.refusal(self.site.module, note)) is not None:
            raise HeadwiseError(note)
        return None

    def end(self, *args: Any) -> None:
        calls = self.waiting
        sure, self.sure = self.sure, True
        if calls:
            _elsewhere.add(self.site.module)
        if sure:
            super().end()
            return
        kind = type(self.site.module).__name__
        for _ in calls:
            self.refuse(f"{kind} has heads and texts in one axis, and its W_O does not read them side by side")

    def hand_on(self, call: Call, again: str = "") -> None:
        self.learn(call)
        super().hand_on(call, again or "; that is known now: do the same again, and they are replaced before")


_before: Any = WeakIdKeyDictionary()  # what W_O was to read before a block changed it
_elsewhere: WeakSet[nn.Module] = WeakSet()  # attentions whose W_O has been seen to read something else


@contextmanager
def _read(taps: Mapping[nn.Module, Tap]) -> Iterator[None]:
    """Inside this block, and in its thread, what attentions make by functions of torch goes to their taps."""
    free = {module: tap for module, tap in taps.items() if isinstance(tap, FreeTap)}
    if not free:
        yield
        return
    parts = {part: None for module in free for part in module.modules() if part in free or is_attention(part)}
    with inside() as here, ExitStack() as stack:
        listeners = {module: (tap.attended, tap.site.n_heads) for module, tap in free.items()}
        block = softmax.Block(listeners, here)
        for module in parts:
            enter, leave = Within(here, block.enter), Within(here, block.leave)
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        stack.enter_context(softmax.opened(block))
        yield
    for module in block.idle:
        if any(part is not module and is_attention(part) for part in module.modules()):
            continue  # those inside attend
        kind = type(module).__name__
        free[module].refuse(f"{kind} ran, and no softmax over keys was seen that it multiplies with values")


# The blocks that are open, in any thread: is the caller inside, and which taps has it?
_blocks: list[tuple[Callable[[], bool], Mapping[nn.Module, Tap]]] = []
_library = ExitStack()  # what puts the library back as it was, after the last block


@contextmanager
def _tapped(taps: Mapping[nn.Module, Tap]) -> Iterator[None]:
    """Inside this block, and in its thread, what attention functions of transformers give goes to the taps.

    The functions run as they do without us, with their own masks.
    """
    with inside() as here:
        block = here, taps
        with _lock:
            if not _blocks:  # compiled code would go on without us; other threads get the same numbers, more slowly
                _library.enter_context(torch.compiler.set_stance("force_eager"))
            if any(isinstance(tap, LibraryTap) for tap in taps.values()):
                _replace_interface()
            _blocks.append(block)
        try:
            yield
        finally:
            with _lock:
                _blocks.remove(block)
                if not _blocks:
                    _library.close()


def _replace_interface() -> None:
    """What the attention interface of transformers hands out is ours until the last block of all threads ends."""
    from headwise.models.hf import AttentionInterface  # here: other models need no transformers

    interface: Any = AttentionInterface
    if "__getitem__" in vars(interface):  # of itself it inherits that: so it is ours already
        return
    get, item = interface.get_interface, interface.__getitem__
    _library.callback(setattr, interface, "get_interface", get)
    _library.callback(delattr, interface, "__getitem__")
    interface.get_interface = lambda self, attn_implementation, default: _listened(
        get(self, attn_implementation, default), attn_implementation
    )
    interface.__getitem__ = lambda self, key: _listened(item(self, key), key)


def _listened(function: Any, name: str) -> Any:
    """An attention function of transformers whose output goes to the taps of the module that calls it."""
    if hasattr(function, "headwise") or not any(here() for here, _ in [*_blocks]):
        return function

    def listening(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **keywords: Any
    ) -> Any:
        tapped = [taps.get(module) for here, taps in [*_blocks] if here()]
        of_library = [tap for tap in tapped if isinstance(tap, LibraryTap)]
        result = function(module, query, key, value, attention_mask, **keywords)
        if not of_library:
            return result
        asked = Asked(module, query, key, value, attention_mask, keywords, name, function, result[0].transpose(1, 2))
        out, replaced = asked.out, False
        for tap in of_library:
            changed = tap.at_interface(asked, out)
            if changed is not None:  # it may be `asked.out` itself, by which a gradient is to pass
                out, replaced = changed, True
        return (out.transpose(1, 2).contiguous(), *result[1:]) if replaced else result

    listening.headwise = True  # type: ignore[attr-defined]
    return listening
