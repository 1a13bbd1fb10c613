"""The one hook point: where attention happens in a model, and how to stand there.

A site is one attention of a model: a `MultiHeadAttention` of ours, wherever it sits, or an attention module of
transformers that goes through its attention interface. `attach` hands every call of every site to a function, which
may look at it and may replace what the heads gave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.gpt.ranks import held
from headwise.layer.layer import MultiHeadAttention
from headwise.records import Call, Watchable, head_name
from headwise.rungs.tensor import attend
from headwise.spec import Options

Handler = Callable[[Call], Tensor | None]

LARGEST = 2**24  # scores held at once where the kernel cannot do without them


@dataclass(frozen=True, eq=False)
class Site:
    """One attention of a model; its heads are `L3.H0`, `L3.H1`, ... with `name` L3."""

    name: str  # "L3"; in a model of several stacks with the stack before it: "encoder.L3", "cross.L3"
    module: nn.Module
    n_heads: int
    weights: Callable[[str], Tensor | None]  # of "q" to "o", as they are now: a streamed layer has some for a while
    cross: bool  # as far as the module tells; a call of ours has the last word
    # Of transformers: the module of W_O, whose input is what the heads give; None where it is not known.
    projection: nn.Module | None = None
    # Of a model whose heads are spread over processes: weights and `n_heads` are those of this one's, the part-th.
    part: int = 0
    parts: int = 1

    # y = W x, None where they are not known; `w_o` is None, too, where the heads' output is not projected.
    w_q: ClassVar = property(lambda self: self.weights("q"))  # (H*D, C)
    w_k: ClassVar = property(lambda self: self.weights("k"))  # (G*D, C)
    w_v: ClassVar = property(lambda self: self.weights("v"))  # (G*E, C)
    w_o: ClassVar = property(lambda self: self.weights("o"))  # (C, H*E)

    def head(self, number: int) -> str:
        return head_name(self.name, self.part * self.n_heads + number)

    @property
    def heads(self) -> list[str]:
        return [self.head(number) for number in range(self.n_heads)]


def sites_of(model: nn.Module) -> list[Site]:
    """The attentions of a model, in the order of its modules.

    Raises HeadwiseError where there are none. What stays without a map is said by `missing`.
    """
    sites = [_own_site(f"L{n}", module) for n, module in enumerate(_watchable(model))]
    if _has_foreign(model):
        from headwise.models.stacks import foreign_sites

        foreign = foreign_sites(model)
        clash = {site.name for site in sites} & {site.name for site in foreign}
        if clash:
            raise HeadwiseError(
                f"the model mixes layers of headwise and of transformers, and both have a {min(clash)}; "
                f"watch its parts one by one"
            )
        sites += foreign
    if not sites:
        raise HeadwiseError(
            f"{type(model).__name__} has no attention that headwise knows: neither a headwise.MultiHeadAttention nor a "
            f"model of transformers"
        )
    return sites


def held_here(site: Site) -> Site:
    """The site with the part of its weights that this process holds."""
    if site.w_o is None:
        return site
    _, part, parts = held(site.w_o)

    def local(name: str) -> Tensor | None:
        return None if (weights := site.weights(name)) is None else held(weights)[0]

    return site if parts == 1 else replace(site, weights=local, part=part, parts=parts)


def missing(model: nn.Module) -> list[str]:
    """What of a model of transformers has no heads to be watched, in lines: "L0 to L2: gated delta net, no map"."""
    if not _has_foreign(model):
        return []
    from headwise.models.stacks import without_maps

    return without_maps(model)


def attention_layers(model: nn.Module) -> list[MultiHeadAttention]:
    """Our own attention layers of a model, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, MultiHeadAttention)]


def is_watchable(module: nn.Module) -> bool:
    """Does the module hand its calls to watchers itself: a layer of ours, or one that answers `records.Watchable`?"""
    return isinstance(module, MultiHeadAttention) or callable(getattr(module, "watched", None))


def _watchable(model: nn.Module) -> list[nn.Module]:
    """In the order of the modules; a watchable module inside another one is a part of it."""
    watchable: list[nn.Module] = []
    parts: set[nn.Module] = set()
    for module in model.modules():
        if module not in parts and is_watchable(module):
            watchable.append(module)
            parts.update(module.modules())
    return watchable


def _own_site(name: str, module: Any) -> Site:
    """The site of a layer of ours, or of a module that answers `records.Watchable`."""
    if isinstance(module, MultiHeadAttention):
        return held_here(Site(name, module, module.spec.n_heads, partial(_own_weights, module), cross=False))
    n_heads, w_o, w_v = module.watched()
    return held_here(Site(name, module, n_heads, {"v": w_v, "o": w_o}.get, cross=False))


def _own_weights(module: MultiHeadAttention, name: str) -> Tensor | None:
    if module.spec.latent_dim is None or name == "o":
        weights: Tensor | None = getattr(getattr(module, f"{name}_proj", None), "weight", None)
        return weights
    if any("norm" not in part and not isinstance(x, nn.Linear) for part, x in module.named_children()):  # adapters
        return None
    return torch.cat([getattr(head, f"w{name}").detach() for head in module.heads])  # without what norms divide by


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


_tokens: ContextVar[frozenset[object]] = ContextVar("headwise_blocks", default=frozenset())
_lock = Lock()


@contextmanager
def observe(layer: MultiHeadAttention | Watchable, watcher: Handler) -> Iterator[None]:
    """Hand every call of a layer's attention to `watcher` inside this block; what it returns replaces the output.

    Calls of other threads do not count. Blocks may end in any order.
    """
    with inside() as here:

        def listen(call: Call) -> Tensor | None:
            # A copy of the layer, made inside the block, has this function, too, and is nobody's business.
            return watcher(call) if here() and call.layer is layer else None

        with _lock:  # a new list each time: another thread may be reading the one that is there
            layer.watchers = [*layer.watchers, listen]
        try:
            yield
        finally:
            with _lock:
                layer.watchers = [each for each in layer.watchers if each is not listen]


@contextmanager
def attach(handlers: Mapping[Site, Handler], model: nn.Module) -> Iterator[None]:
    """Hand every call of these sites to their handlers inside this block; what a handler returns replaces `out`.

    Blocks nest: a later handler sees what an earlier one has made of the output. Calls of other threads do not count.
    """
    with ExitStack() as stack:
        here = stack.enter_context(inside())
        taps = {}
        for site, handler in handlers.items():
            if is_watchable(site.module):
                layer: Any = site.module
                stack.enter_context(observe(layer, handler))
            else:
                from headwise.models.taps import Tap

                tap = taps[site.module] = Tap(site, handler)
                stack.enter_context(tap.hooked(here))
        if taps:
            from headwise.models.hf import routed

            stack.enter_context(routed({module: tap.attended for module, tap in taps.items()}))
        yield


def _has_foreign(model: nn.Module) -> bool:
    """Is there a model of transformers inside? It is told by its classes: only who uses transformers loads it."""
    kinds = {(kind.__module__, kind.__name__) for module in model.modules() for kind in type(module).__mro__}
    return ("transformers.modeling_utils", "PreTrainedModel") in kinds


def attend_by_rows(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    """`attend`; where it has to hold scores, a softcap's, a block of queries at a time."""
    B, H, T, _ = q.shape
    S = k.shape[2]
    if options.softcap is None or B * H * T * S <= LARGEST:
        return attend(q, k, v, options)
    count = max(1, LARGEST // (B * H * S))
    blocks = []
    for start in range(0, T, count):
        rows = slice(start, min(start + count, T))
        mask = None if options.mask is None else options.mask.for_queries(rows, T)
        blocks.append(attend(q[:, :, rows], k, v, options._replace(mask=mask)))
    return torch.cat(blocks, 2)
