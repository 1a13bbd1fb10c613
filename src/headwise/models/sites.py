"""The one hook point: where attention happens in a model, and how to stand there.

A site is one attention of a model: a `MultiHeadAttention` of ours, wherever it sits, or an attention module of
transformers that goes through its attention interface. `attach` hands every call of every site to a function, which
may look at it and may replace what the heads gave.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.layer.importing.family import Family, families
from headwise.layer.layer import MultiHeadAttention
from headwise.masks import Allowed, Bias, Causal, Mask
from headwise.models.weights import as_rows
from headwise.records import Call, Watchable, head_name
from headwise.rungs.tensor import attend
from headwise.spec import Options

Handler = Callable[[Call], Tensor | None]

# Names by which the modules and configs of transformers call the same thing, tried in this order: what a family without
# a record keeps under them is found all the same.
PROJECTIONS = {
    "q": ("q_proj", "query", "q_lin", "q", "q_attn"),
    "k": ("k_proj", "key", "k_lin", "k"),
    "v": ("v_proj", "value", "v_lin", "v"),
    "o": ("o_proj", "c_proj", "out_proj", "out_lin", "o", "output.dense", "dense"),  # or beside the attention
}
JOINED = ("c_attn",)  # queries, keys and values in one matrix
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "encoder_attention_heads")
CROSS = ("encdecattention", "encoder_attn", "crossattention", "cross_attn", "cross_attention")

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
    found = [_own_site(f"L{n}", module) for n, module in enumerate(_watchable(model))]
    if _has_hf(model):
        foreign = _hf_sites(model)
        clash = {site.name for site in found} & {site.name for site in foreign}
        if clash:
            raise HeadwiseError(
                f"the model mixes layers of headwise and of transformers, and both have a {min(clash)}; "
                f"watch its parts one by one"
            )
        found += foreign
    if not found:
        raise HeadwiseError(
            f"{type(model).__name__} has no attention that headwise knows: neither a headwise.MultiHeadAttention nor a "
            f"model of transformers"
        )
    return found


def attention_layers(model: nn.Module) -> list[MultiHeadAttention]:
    """Our own attention layers of a model, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, MultiHeadAttention)]


def _is_watchable(module: nn.Module) -> bool:
    """Does the module hand its calls to watchers itself: a layer of ours, or one that answers `records.Watchable`?"""
    return isinstance(module, MultiHeadAttention) or callable(getattr(module, "watched", None))


def _watchable(model: nn.Module) -> list[nn.Module]:
    """In the order of the modules; a watchable module inside another one is a part of it."""
    found: list[nn.Module] = []
    parts: set[nn.Module] = set()
    for module in model.modules():
        if module not in parts and _is_watchable(module):
            found.append(module)
            parts.update(module.modules())
    return found


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
            if _is_watchable(site.module):
                layer: Any = site.module
                stack.enter_context(observe(layer, handler))
            else:
                listeners = _listeners.setdefault(site.module, [])
                listeners.append(handler)
                stack.callback(listeners.remove, handler)
        if any(not _is_watchable(site.module) for site in handlers):
            from headwise.models.hf import routed

            # All of a model goes the same way, those that nobody listens to as well.
            foreign = [site for site in sites_of(model) if not _is_watchable(site.module)]
            stack.enter_context(routed(model, {site.module: partial(_hf_attention, site.cross) for site in foreign}))
        yield


_listeners: WeakKeyDictionary[nn.Module, list[Handler]] = WeakKeyDictionary()


def _has_hf(model: nn.Module) -> bool:
    """Is there a model of transformers inside? Without loading transformers for those who do not use it."""
    if "transformers" not in sys.modules:
        return False
    from headwise.models.hf import is_hf

    return any(is_hf(module) for module in model.modules())


def _hf_sites(model: nn.Module) -> list[Site]:
    from headwise.models.hf import is_hf, uses_interface

    modules = dict(model.named_modules())
    through = [path for path, module in modules.items() if uses_interface(module)]
    _check_family(model, modules, through)
    stacks: dict[str, int] = {}  # stack -> attentions found in it so far
    names = _stack_names(model, list(dict.fromkeys(map(_stack, through))))
    sites = []
    for path in through:
        stack, module = _stack(path), modules[path]
        order = stacks[stack] = stacks.get(stack, -1) + 1
        owner = next(modules[above] for above in _upwards(path) if is_hf(modules[above]))
        sites.append(
            Site(
                name=f"{names[stack]}L{_number(path, order)}",
                module=module,
                n_heads=_count(module, owner),
                **_weights(modules, path, _record(owner)),
                cross=_is_cross(path),
            )
        )
    return sites


def _check_family(model: nn.Module, modules: Mapping[str, nn.Module], through: Sequence[str]) -> None:
    """Refuse a model of whose attention some, or all, would be missed."""
    missed = {
        type(module).__name__
        for path, module in modules.items()
        if "attention" in type(module).__name__.lower()
        and not _is_watchable(module)
        and any(True for _ in module.parameters())
        and not any(other == path or other.startswith(path + ".") or path.startswith(other + ".") for other in through)
    }
    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if not through:
        raise HeadwiseError(
            f"{type(model).__name__} ({family}) does not go through the attention interface of transformers, so its "
            f"heads cannot be watched or ablated; families that do are, among others, GPT-2, BERT, Llama, Mistral, "
            f"Qwen3, Gemma, gpt-oss, T5, Whisper, ViT"
        )
    if missed:
        raise HeadwiseError(
            f"{type(model).__name__} ({family}): {', '.join(sorted(missed))} does not go through the attention "
            f"interface of transformers, and its heads would be missing"
        )


def _is_cross(path: str) -> bool:
    return any(part.lower() in CROSS for part in path.split("."))


def _stack(path: str) -> str:
    """Modules of one stack of layers share their path up to the number; self and cross attention are apart."""
    before = list(itertools.takewhile(lambda part: not part.isdigit(), path.split(".")))
    return ".".join(before) + ("/cross" if _is_cross(path) else "")


def _number(path: str, order: int) -> int:
    """The number of the layer in its path; the order where there is none."""
    return next((int(part) for part in path.split(".") if part.isdigit()), order)


def _stack_names(model: nn.Module, stacks: list[str]) -> dict[str, str]:
    """What stands before `L3`: nothing for the one stack of self attention, else what tells the stacks apart."""
    plain = [stack for stack in stacks if not stack.endswith("/cross")]
    names = {}
    for stack in stacks:
        parts = stack.removesuffix("/cross").split(".")
        if stack.endswith("/cross"):
            names[stack] = "cross."
        elif len(plain) == 1 and not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            names[stack] = ""
        else:
            others = [other.split(".") for other in plain if other != stack]
            telling = [part for part in parts if not any(part in other for other in others)]
            known = [part for part in parts if part in ("encoder", "decoder")]
            names[stack] = (telling or known or parts)[0] + "."
    return names


def _upwards(path: str) -> Iterator[str]:
    """A path and those of its parents, the model's own "" last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _count(module: nn.Module, owner: nn.Module) -> int:
    for holder in (module, getattr(module, "config", None), getattr(owner, "config", None)):
        for name in COUNTS:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    raise HeadwiseError(f"{type(module).__name__} does not say how many heads it has: none of {', '.join(COUNTS)}")


def _record(owner: nn.Module) -> Family | None:
    """The record of the family of a transformers model, where it has one."""
    kind = getattr(getattr(owner, "config", None), "model_type", None)
    return next((family for family in families() if family.name == kind), None)


def _weights(modules: Mapping[str, nn.Module], path: str, family: Family | None) -> dict[str, Tensor | None]:
    """W_Q, W_K, W_V and W_O of an attention as rows, y = W x; None where none of the known names is there.

    The record of the family names them first, seen from its attention module, which may lie around the one that calls
    the interface; then the names that transformers' modules have in common. W_O may stand beside the attention.
    """
    weights: dict[str, Tensor | None] = {}
    around = [path, path.rpartition(".")[0]]
    packed = family is not None and family.packed
    for x in "qkvo":
        names = (() if family is None or (packed and x != "o") else (getattr(family, x),)) + PROJECTIONS[x]
        weights[f"w_{x}"] = _first_matrix(modules, around if x == "o" or family is not None else around[:1], names)
    if weights["w_v"] is None:
        joined = _first_matrix(modules, around[:1], ((family.q,) if family is not None and packed else ()) + JOINED)
        if joined is not None and joined.shape[0] == 3 * joined.shape[1]:
            weights |= dict(zip(("w_q", "w_k", "w_v"), joined.chunk(3), strict=True))
    return weights


def _first_matrix(modules: Mapping[str, nn.Module], places: Sequence[str], names: Sequence[str]) -> Tensor | None:
    """The first matrix of these names in these places, as rows."""
    for place in places:
        for name in names:
            module = modules.get(f"{place}.{name}" if place else name)
            weight = getattr(module, "weight", None)
            if module is not None and isinstance(weight, Tensor) and weight.ndim == 2:
                return as_rows(module)
    return None


def _hf_attention(
    cross: bool,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: Tensor | None,
    keywords: Mapping[str, Any],
) -> Tensor:
    """The attention of a transformers module by our tensor rung, then its listeners; (B,H,T,E)."""
    options = _options(module, q, k, given, keywords)
    call = Call(module, q, k, v, options, _attend(q, k, v, options), cross)
    for listener in _listeners.get(module, ()):
        changed = listener(call)
        call = call if changed is None else call._replace(out=changed)
    return call.out


def _options(module: nn.Module, q: Tensor, k: Tensor, given: Tensor | None, keywords: Mapping[str, Any]) -> Options:
    """What transformers asks for, in our words. A keyword that is not known is refused by name."""
    known = {"dropout", "scaling", "is_causal", "position_bias", "softcap", "s_aux"}
    for name, value in keywords.items():
        if name not in known | HARMLESS and value is not None and value is not False:
            if name == "output_attentions":
                raise HeadwiseError("output_attentions=True: a watched model keeps no maps; drop it, and read `seen`")
            raise HeadwiseError(
                f"{type(module).__name__} passes {name}= to its attention, which headwise does not know; "
                f"watching it would give wrong numbers"
            )
    causal = keywords.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    parts: list[Mask] = []
    if given is None:
        if causal and q.shape[2] > 1:
            parts.append(Causal(offset=0))  # transformers' meaning of no mask: aligned at the first key
    elif given.dtype == torch.bool:
        parts.append(Allowed(given[..., : k.shape[2]]))
    else:
        given = given[..., : k.shape[2]]
        open_ = given > torch.finfo(given.dtype).min / 2  # the most negative numbers stand for "may not"
        parts += [Allowed(open_), Bias(torch.where(open_, given, 0))]
    bias = keywords.get("position_bias")
    if bias is not None:
        parts.append(Bias(bias[..., : k.shape[2]]))
    mask = parts[0] if parts else None
    for part in parts[1:]:
        assert mask is not None
        mask = mask & part
    return Options(
        mask=mask,
        scale=keywords.get("scaling"),
        softcap=keywords.get("softcap"),
        sink=keywords.get("s_aux"),
        dropout=keywords.get("dropout") or 0.0,
    )


def _attend(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
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
