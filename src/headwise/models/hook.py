"""The one hook point: a call of attention, and who may change it.

`attach` hands every call of a site to a function, its handler, and what that returns takes the place of what the heads
gave. An attention of ours hands its calls on itself; one of transformers, and any other, is caught by a `Tap` at two
places, marked *: where its attention function has given the heads, and before W_O reads them.

    ours                  transformers                   any module of torch

    q, k, v               q, k, v, mask                  q, k, v, mask
       |                     |                              |
    heads                 attention function of the      functions of torch: the fused call, or a softmax and a
       |                  library ("eager", "sdpa")      product; `softmax.Listener` reads them
       |                     |                              |
       |                   * `Tap.take`                   * `Tap.take`
       |                     out (B,H,T,E), held against what was read of the call (`reading.read_call`, `softmax`),
       |                     or refused; where W_O is not known: handler, which may change out
       |                     |                              |
       |                  norms and gates of the family     |
       |                     |                              |
     watchers: handler,    * `at_w_o`: handler, which     * `at_w_o`: the same, where W_O reads the heads side by side
     which may change out    may change what W_O reads      |
       |                     |                              |
      W_O                   W_O                            W_O

A block is a `with` statement in one thread. Blocks nest: a later handler gets what an earlier one has made of `out`.
Calls of other threads do not count. Attentions of the third column are called free.
"""

from __future__ import annotations

import sys
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from headwise.errors import HeadwiseError
from headwise.layer.layer import MultiHeadAttention
from headwise.masks import all_of
from headwise.models import softmax
from headwise.models.reading import Asked, read_call
from headwise.models.sites import Site, is_attention, is_watchable, remember
from headwise.records import Call, Watchable
from headwise.spec import Options

Handler = Callable[[Call], Tensor | None]
# a module's way to register one, and what it calls
Hook = tuple[Callable[..., Any], Callable[..., Any]]
NO_W_O = "its W_O is not known, so its heads are read where they leave the attention, no norm"

# The blocks that are open in this context, each by an object of its own.
_tokens: ContextVar[frozenset[object]] = ContextVar(
    "headwise_blocks", default=frozenset()
)
# of what all threads share: `watchers`, `_blocks`, the attention interface
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
        self.here = here
        self.act = act

    def __call__(self, *args: Any) -> Any:
        return self.act(*args) if self.here() else None

    def __reduce__(self) -> Any:
        # Pickle and deepcopy ask this. The copy's `here` is the type `bool`, which can be pickled and, called with
        # nothing, gives False: so its `act`, the second one, is never called and may be anything.
        return Within, (bool, bool)


@contextmanager
def hooked(hooks: Iterable[Hook], **options: Any) -> Iterator[None]:
    """The hooks act inside this block, in its thread alone.

    options  for each registration, as with_kwargs=True
    """
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
        # A shallow copy of the layer (copy.copy) has this function, too; its calls are not those of the layer.
        listen = Within(
            here, lambda call: watcher(call) if call.layer is layer else None
        )
        # a new list each time: another thread may be reading the one that is there
        with _lock:
            layer.watchers = [*layer.watchers, listen]
        try:
            yield
        finally:
            with _lock:
                layer.watchers = [
                    other for other in layer.watchers if other is not listen
                ]


@contextmanager
def attach(
    sites: Collection[Site],
    handler: Callable[[Site, Call], Tensor | None],
    early: bool = False,
) -> Iterator[None]:
    """Hand every call of these sites to the handler inside this block; what it returns replaces `out`.

    early  of transformers, `out` is what left the attention function: gates and norms before W_O are still to come

    Blocks nest: a later handler sees what an earlier one has made of the output. Calls of other threads do not count.
    Raises HeadwiseError at the end of a block in which none of the sites was reached.
    """
    reached = set()  # sites of which a call came
    refused = []  # why others came to none

    def handle(site: Site, call: Call) -> Tensor | None:
        if len(call.out):
            reached.add(site)
        else:  # a call of no documents: see `Tap.refuse`
            refused.append(
                call.note
                or f"{site.name} was given a batch without a text; pass at least one"
            )
        # a handler may compute attention itself, in the middle of the model's
        with softmax.unheard():
            return handler(site, call)

    with ExitStack() as stack:
        taps: dict[nn.Module, Tap] = {}
        for site in sites:
            module = site.module
            if is_watchable(module):
                stack.enter_context(observe(module, partial(handle, site)))
            else:
                taps[module] = tap = Tap(site, partial(handle, site), early)
                for number, member in enumerate(site.members):
                    head = Site(site.name, member, 1, site.cross, free=True)
                    taps[member] = Tap(head, partial(tap.gather, number))
        free = {module: tap for module, tap in taps.items() if tap.site.free}
        # The hooks at W_O, the attention interface, the functions of torch.
        if taps:
            stack.enter_context(
                hooked(hook for tap in taps.values() for hook in tap.hooks())
            )
            stack.enter_context(_tapped(taps))
        if free:
            stack.enter_context(_read(free))
        yield
        # Not where the block raises: what waits then is half of a call.
        for tap in taps.values():
            tap.close()
    if sites and not reached:
        names = [site.name for site in sites]
        refused.append(
            f"no head of {', '.join(names[:3])}{', ...' if names[3:] else ''} was reached inside this block; call the "
            f"model in it, in the thread that opened it, and not a form of it that was exported or traced before"
        )
        raise HeadwiseError(refused[0])


# Attentions of others


class Tap:
    """One attention that is not ours inside one block, and its handler.

    Between the attention function and W_O some families gate, norm or rotate what the heads gave. What a head gives is
    what W_O reads of it: so a call waits until W_O is called, and is handed to the handler then. That the projection of
    a free attention is its W_O is only a guess by its name: it is, if what it reads are the heads, number by number.

    Heads that are modules of a list (`site.members`) make a call together once the last has run. What they give is
    changed where the module around the list has joined it: before its W_O, or where it leaves that module.
    """

    def __init__(self, site: Site, handler: Handler, early: bool = False) -> None:
        self.site = site
        self.handler = handler
        self.kind = type(site.module).__name__
        # W_O; None: not known
        is_left = early and not site.free
        self.projection = None if is_left else site.projection
        self.waiting: list[Call] = []  # calls whose heads have not entered W_O yet
        self.of_members: dict[int, Call] = {}  # of a list, by their numbers
        self.normed = False  # did a norm read what the heads of these calls gave?
        # is it known in which order the heads of the calls that wait lie?
        self.sure = True
        self.ran = False
        self.heard = False  # did its functions give a call, or a reason against one?

    def hooks(self) -> list[Hook]:
        """What listens from where the module is called to W_O."""
        module = self.site.module
        # A call of the module ends the one before, if that never came to W_O.
        hooks: list[Hook] = [(module.register_forward_pre_hook, self.end)]
        for child in module.children():
            if "norm" in type(child).__name__.lower():
                hooks.append((child.register_forward_pre_hook, self.at_norm))
        if self.projection:
            hooks.append((self.projection.register_forward_pre_hook, self.at_w_o))
        elif self.site.members:
            hooks.append((module.register_forward_hook, self.at_output))
        return hooks

    def take(
        self, call: Call | str, sure: bool = True, w_o: Tensor | None = None
    ) -> Tensor | None:
        """The attention has given `call.out`; give what takes its place, None: nothing.

        A call is kept until W_O is called. Where W_O is not known, the handler gets it at once.

        call  a call; or a text, why it was not read
        sure  is the order of its heads known?
        w_o   the matrix that the function itself multiplies the heads with, where it does (torch's own module)
        """
        self.heard = True
        if isinstance(call, str):
            return self.refuse(call)
        site = self.site
        n_heads = call.out.shape[1]
        # 0: the module does not say how many it has
        if site.n_heads not in (0, n_heads):
            return self.refuse(
                f"{self.kind} says that it has {site.n_heads} heads, and its attention gives {n_heads}: chunks or "
                f"windows, heads that cannot be told apart, or those of one process of several"
            )
        if not (self.projection or sure):
            return self.refuse(
                f"{self.kind} has heads and texts in one axis, and its W_O is not known"
            )
        call = call._replace(cross=call.cross or site.cross)
        self.site = replace(site, n_heads=n_heads)
        self.sure = self.sure and sure
        if w_o is None and (self.projection or site.members):
            # DiffLlama lays the same maps over other values in a second call: these are the same heads.
            last = self.waiting[-1] if self.waiting else None
            self.normed = bool(last)  # a second call is mixed with the first
            if not (last and last.q.is_set_to(call.q) and last.k.is_set_to(call.k)):
                self.waiting.append(call)
            return None
        # Are the matrices the same?
        places = [x.data_ptr() for x in (w_o, site.w_o) if x is not None]
        at_w_o = len(places) == 2 and places[0] == places[1]
        return self.hand(call, "" if at_w_o else NO_W_O, at_w_o=at_w_o)

    def gather(self, number: int, call: Call) -> Tensor | None:
        """The head of this number in a list has given its call; with that of the last one they are a call."""
        if not len(call.out):  # it was not read: see `refuse`
            return self.handler(call)
        self.of_members[number] = call._replace(note="")
        if len(self.of_members) < len(self.site.members):
            return None
        calls = self.of_members
        self.of_members = {}
        module = self.site.module
        return self.take(_side_by_side(module, [calls[n] for n in sorted(calls)]))

    def at_norm(self, module: nn.Module, args: Any) -> None:
        """A norm of the attention is called. Those of queries and keys run before a call waits, and do not count."""
        self.normed = bool(self.waiting)

    def at_w_o(self, module: nn.Module, args: Any) -> Any:
        """W_O is about to read the joined heads, `args[0]`; give what it shall read in their place, None: no other.

        A forward pre-hook of the module of W_O.
        """
        if not self.waiting:
            return None
        joined = args[0]
        rows = self.rows_in(joined)
        if rows is None:  # what W_O reads are not the heads of the calls that wait
            return self.end()
        calls = self.waiting
        self.waiting = []
        counts = [_n_rows(call) for call in calls]
        parts = [*torch.split(rows.reshape(-1, rows.shape[-1]), counts)]
        changed = False
        for place, (call, part) in enumerate(zip(calls, parts, strict=True)):
            B, H, T, _ = call.out.shape
            out = part.view(B, T, H, -1).transpose(1, 2)
            before = None if self.normed or self.site.free else call.out
            note = "" if self.projection else NO_W_O
            result = self.hand(call, note, out=out, before_gate=before, at_w_o=not note)
            if result is not None:
                changed = True
                parts[place] = result.to(part.dtype).transpose(1, 2).reshape(part.shape)
        if not changed:
            return None
        replaced = torch.cat(parts).reshape(rows.shape)
        if rows is not joined:  # `rows_in` has transposed it
            replaced = replaced.transpose(0, 1)
        # The next block's `at_w_o` gets `replaced`, and must still find the heads in it: see `rows_in`. Where an
        # earlier block has changed `joined` itself, what stood there first is handed on.
        _before[replaced] = _before.get(joined, joined)
        return (replaced, *args[1:])

    def at_output(self, module: nn.Module, args: Any, out: Any) -> Any:
        """A forward hook of the module around a list whose W_O is not known."""
        replaced = self.at_w_o(module, (out,)) if isinstance(out, Tensor) else None
        return None if replaced is None else replaced[0]

    def rows_in(self, joined: Tensor) -> Tensor | None:
        """What W_O reads, documents first, where these are the heads of the calls that wait; else None.

        There are as many rows. Calls of one document each stand below one another, as chunks of a text; of several the
        order is not known. In a free attention they are what the heads gave, and may also lie as (T,B,C). An earlier
        block may have changed them since: then what was there before is compared.
        """
        before = _before.get(joined, joined)
        out = self.waiting[0].out
        is_one_call = len(self.waiting) == 1
        n_rows = sum(map(_n_rows, self.waiting))
        of_one_document = all(len(call.out) == 1 for call in self.waiting)
        if joined.shape[:-1].numel() != n_rows or not (is_one_call or of_one_document):
            return None
        if not self.site.free:
            return joined
        # Heads of several calls could be joined in many orders, and none of those is tried.
        if not is_one_call or before.numel() != out.numel():
            return None
        B, H, T, E = out.shape
        gave = out.detach().to(before.dtype)
        for _ in range(2 if joined.ndim == 3 else 1):
            heads = before.detach().reshape(B, T, H, E).transpose(1, 2)
            # The very bits; torch.equal takes NaN for another number than NaN.
            if torch.allclose(heads, gave, rtol=0, atol=0, equal_nan=True):
                return joined
            joined = joined.transpose(0, 1)
            before = before.transpose(0, 1)
        return None

    def end(self, *args: Any) -> None:
        """Calls that never entered W_O in a form that is known are handed on as they left the attention.

        Also a forward pre-hook of the attention, whose arguments (`args`) are not needed.
        """
        calls, self.waiting, self.ran = self.waiting, [], self.ran or bool(args)
        self.of_members = {}
        sure = self.sure
        self.sure = True
        if calls and not sure:
            self.refuse(
                f"{self.kind} has heads and texts in one axis, and its W_O does not read them side by side"
            )
            return
        note = "what enters W_O is not its heads side by side"
        for call in calls:
            told = f"{note}; they are read before, no norm"
            if self.hand(call, told, at_w_o=False) is not None:
                raise HeadwiseError(
                    f"{self.site.name}: {note}, so they cannot be replaced there"
                )

    def close(self) -> None:
        """The block ends. An attention that ran, and of which nothing was heard, is refused."""
        self.end()
        # one around other attentions may leave it to those
        _, *inner = self.site.module.modules()
        if self.ran and not self.heard and not any(map(is_attention, inner)):
            self.refuse(
                f"{self.kind} ran, and no softmax over keys was seen that it multiplies with values"
            )

    def hand(self, call: Call, note: str = "", **changes: Any) -> Tensor | None:
        """Give the handler a call with these fields changed, and a further note behind the one that it has."""
        # the module may not say how many heads it has: kept for the next block
        remember(self.site.module, call.out.shape[1])
        notes = [f"{self.site.name}: {line}" for line in (call.note, note) if line]
        return self.handler(call._replace(note="; ".join(notes), **changes))

    def refuse(self, why: str) -> Tensor | None:
        """Tell the handler, by a call of no documents (B = 0), that what the module does is not read.

        A handler that wants to replace something nevertheless cannot: then the reason is raised. All that the interface
        of transformers calls is attention, and its reason is raised at once.
        """
        # calls that wait are parts of what is refused
        note = f"{self.site.name}: {why}, no map"
        self.waiting = []
        none = torch.empty(0, 1, 0, 0)
        call = Call(self.site.module, none, none, none, Options(), none, note=note)
        if not self.site.free or self.handler(call) is not None:
            raise HeadwiseError(note)
        return None


def _n_rows(call: Call) -> int:
    """Rows of what W_O reads of a call, B*T."""
    return len(call.out) * call.n_queries


def _side_by_side(module: nn.Module, calls: Sequence[Call]) -> Call | str:
    """The calls of one head each as a call of all of them; or why they are none."""
    first = calls[0]
    kinds = set()
    masks = []
    for call in calls:
        mask = call.options.mask
        parts: Any = mask.parts() if mask else ()
        masks.append(parts)
        tensors = [call.q, call.v, *(p.array for p in parts if hasattr(p, "array"))]
        shapes = [x.shape for x in tensors]
        kinds.add((call.cross, call.options.scale, *map(type, parts), *shapes))
    if len(kinds) > 1:
        return f"the modules of its list, {type(first.layer).__name__}, have lengths, scales or masks of their own"
    merged = []
    for parts in zip(*masks, strict=True):
        part = parts[0]
        if hasattr(part, "array"):  # others hold nothing of their own
            part = type(part)(torch.cat([each.array for each in parts], 1))
        merged.append(part)
    joined: dict[str, Any] = {
        name: torch.cat([getattr(call, name) for call in calls], 1)
        for name in ("q", "k", "v", "out", "weights")
        if getattr(first, name) is not None
    }
    options = first.options._replace(mask=all_of(merged))
    return first._replace(layer=module, options=options, **joined)


# What a block made W_O read -> what W_O was to read before any block changed it.
_before: Any = WeakIdKeyDictionary()


@contextmanager
def _read(taps: Mapping[nn.Module, Tap]) -> Iterator[None]:
    """Inside this block, and in its thread, what attentions make by functions of torch goes to their taps."""
    # Attentions inside of one another, too: which is the innermost that runs? A dict, for its order.
    within = dict.fromkeys(part for module in taps for part in module.modules())
    parts = [part for part in within if part in taps or is_attention(part)]
    before = [(part.register_forward_pre_hook, softmax.enter) for part in parts]
    behind = [(part.register_forward_hook, softmax.leave) for part in parts]
    with (
        hooked(before, with_kwargs=True),
        hooked(behind, always_call=True),
        softmax.opened(taps),
    ):
        yield


# The blocks that are open, in any thread: of each a function, is the caller inside of it? And its taps.
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
            # compiled code would go on without us; other threads get the same numbers, more slowly
            if not _blocks:
                _library.enter_context(torch.compiler.set_stance("force_eager"))
            if not all(tap.site.free for tap in taps.values()):
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
    # It is loaded, since a model of it is watched.
    interface = sys.modules["transformers"].AttentionInterface
    get = interface.get_interface
    if get.__module__ == __name__:  # another block has put ours there
        return

    def get_ours(self: Any, attn_implementation: str | None, default: Any) -> Any:
        function = get(self, attn_implementation, default)
        # A module that is used alone may name none: then it is given its own default, which is eager code.
        return partial(_listened, function, attn_implementation or "eager")

    _library.callback(setattr, interface, "get_interface", get)
    interface.get_interface = get_ours


def _listened(
    function: Any,
    name: str,
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    **keywords: Any,
) -> Any:
    """Call an attention function of transformers; what it gives goes to the taps of the module that calls it.

    name  by which it was looked up: "eager", "sdpa", ...; what follows are its arguments, some of them by these names
    """
    # A copy of the list, for another thread may open or close a block meanwhile.
    tapped = [taps[module] for here, taps in [*_blocks] if module in taps and here()]
    arguments = module, query, key, value, attention_mask
    if not tapped:
        return function(*arguments, **keywords)
    # What the function compiles by itself, as flex attention, runs as it does without us.
    way = "force_eager" if name in ("eager", "sdpa") else "default"
    with torch.compiler.set_stance(way):
        result = function(*arguments, **keywords)
    # result[0] is (B,T,H,E); what follows it, as weights, stays as it is.
    gave = result[0].transpose(1, 2)
    call = read_call(Asked(*arguments, keywords, name, function, gave))
    out = softmax.handed(call, [tap.take for tap in tapped])
    if out is None:
        return result
    return (out.transpose(1, 2).contiguous(), *result[1:])
