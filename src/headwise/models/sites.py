"""The one hook point: where attention happens in a model, and how to stand there.

A site is one attention of a model: a `MultiHeadAttention` of ours, wherever it sits, or an attention module of
transformers that goes through its attention interface. `attach` hands every call of every site to a function, which
may look at it and may replace what the heads gave. What a call of transformers asks for is put into our words here.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.layer.layer import MultiHeadAttention
from headwise.masks import Allowed, Bias, Causal, Mask
from headwise.records import Call, Watchable, head_name
from headwise.rungs.tensor import attend
from headwise.spec import Options

Handler = Callable[[Call], Tensor | None]

# Keywords with which transformers calls its attention interface.
KNOWN = {"dropout", "scaling", "is_causal", "position_bias", "softcap", "s_aux"}
# Keywords of transformers that say nothing about the arithmetic of attention, or say it a second time: a window is in
# the mask already.
HARMLESS = {
    "sliding_window",
    "position_ids",
    "cache_position",
    "use_cache",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "num_items_in_batch",
    "logits_to_keep",
    "token_type_ids",
    "past_key_values",
    "mm_token_type_ids",
}
LARGEST = 2**24  # scores held at once where the kernel cannot do without them


@dataclass(frozen=True, eq=False)
class Site:
    """One attention of a model; its heads are `L3.H0`, `L3.H1`, ... with `name` L3."""

    name: str  # "L3"; in a model of several stacks with the stack before it: "encoder.L3", "cross.L3"
    module: nn.Module
    n_heads: int
    w_q: Tensor | None  # (H*D, C); these are y = W x, and None where they are not known
    w_k: Tensor | None  # (G*D, C)
    w_v: Tensor | None  # (G*E, C)
    w_o: Tensor | None  # (C, H*E); None, too, where the heads' output is not projected
    cross: bool  # as far as the module tells; a call of ours has the last word

    def head(self, number: int) -> str:
        return head_name(self.name, number)

    @property
    def heads(self) -> list[str]:
        return [self.head(number) for number in range(self.n_heads)]


def sites_of(model: nn.Module) -> list[Site]:
    """The attentions of a model, in the order of its modules.

    Raises HeadwiseError where there are none, and where some attention of the model does not go through the interface
    and would be missed.
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
        weights = {f"w_{x}": getattr(getattr(module, f"{x}_proj"), "weight", None) for x in "qkvo"}
        return Site(name, module, module.spec.n_heads, **weights, cross=False)
    n_heads, w_o, w_v = module.watched()
    return Site(name, module, n_heads, w_q=None, w_k=None, w_v=w_v, w_o=w_o, cross=False)


@contextmanager
def observe(layer: MultiHeadAttention | Watchable, watcher: Handler) -> Iterator[None]:
    """Hand every call of a layer's attention to `watcher` inside this block; what it returns replaces the output."""
    layer.watchers.append(watcher)
    try:
        yield
    finally:
        layer.watchers.remove(watcher)


@contextmanager
def attach(handlers: Mapping[Site, Handler], model: nn.Module) -> Iterator[None]:
    """Hand every call of these sites to their handlers inside this block; what a handler returns replaces `out`.

    Blocks nest: a later handler sees what an earlier one has made of the output.
    """
    with ExitStack() as stack:
        for site, handler in handlers.items():
            if is_watchable(site.module):
                layer: Any = site.module
                stack.enter_context(observe(layer, handler))
            else:
                listeners = _listeners.setdefault(site.module, [])
                listeners.append(handler)
                stack.callback(listeners.remove, handler)
        if any(not is_watchable(site.module) for site in handlers):
            from headwise.models.hf import routed

            # All of a model goes the same way, those that nobody listens to as well.
            foreign = [site for site in sites_of(model) if not is_watchable(site.module)]
            routes = {site.module: partial(_foreign_attention, site.cross) for site in foreign}
            stack.enter_context(routed(model, routes))
        yield


_listeners: WeakKeyDictionary[nn.Module, list[Handler]] = WeakKeyDictionary()


def _has_foreign(model: nn.Module) -> bool:
    """Is there a model of transformers inside? Without loading transformers for those who do not use it."""
    if "transformers" not in sys.modules:
        return False
    from headwise.models.hf import is_hf

    return any(is_hf(module) for module in model.modules())


def _foreign_attention(
    cross: bool,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    keywords: Mapping[str, Any],
) -> Tensor:
    """The attention of a transformers module by our tensor rung, then its listeners; (B,H,T,E)."""
    options = options_of(module, q, k, mask, keywords)
    call = Call(module, q, k, v, options, attend_by_rows(q, k, v, options), cross)
    for listener in _listeners.get(module, ()):
        changed = listener(call)
        call = call if changed is None else call._replace(out=changed)
    return call.out


def options_of(module: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, keywords: Mapping[str, Any]) -> Options:
    """What transformers asks for, in our words. A keyword that is not known is refused by name."""
    for name, value in keywords.items():
        if name not in KNOWN | HARMLESS and value is not None and value is not False:
            if name == "output_attentions":
                raise HeadwiseError("output_attentions=True: a watched model keeps no maps; drop it, and read `seen`")
            raise HeadwiseError(
                f"{type(module).__name__} passes {name}= to its attention, which headwise does not know; "
                f"watching it would give wrong numbers"
            )
    return Options(
        mask=_mask(module, q.shape[2], k.shape[2], mask, keywords),
        scale=keywords.get("scaling"),
        softcap=keywords.get("softcap"),
        sink=keywords.get("s_aux"),
        dropout=keywords.get("dropout") or 0.0,
    )


def _mask(module: nn.Module, T: int, S: int, mask: Tensor | None, keywords: Mapping[str, Any]) -> Mask | None:
    """The mask of a call of T queries and S keys: bool with True = may attend, or numbers to add; None means causal."""
    parts: list[Mask] = []
    if mask is None:
        causal = keywords.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if causal and T > 1:
            parts.append(Causal(offset=0))  # aligned at the first key
    elif mask.dtype == torch.bool:
        parts.append(Allowed(mask[..., :S]))
    else:
        allowed = mask[..., :S] > torch.finfo(mask.dtype).min / 2  # the most negative numbers stand for "may not"
        parts += [Allowed(allowed), Bias(torch.where(allowed, mask[..., :S], 0))]
    if keywords.get("position_bias") is not None:
        parts.append(Bias(keywords["position_bias"][..., :S]))
    return reduce(operator.and_, parts) if parts else None


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
