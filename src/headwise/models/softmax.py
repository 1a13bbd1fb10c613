"""Attention read where it happens: in any torch module, from the functions of torch that it calls.

Inside a block of the hook, and in its thread, every call of torch passes here. Three of them are attention:

    scaled_dot_product_attention    q, k, v, mask and scale are its arguments; `reading` proves rows of them
    multi_head_attention_forward    runs as it is written, in Python: inside of it is one of the two others
    softmax, and a product          of two tensors a product makes scores, of these a softmax makes weights, and a
                                    product of these and other tensors makes what the heads give

    q @ k^T -> scores -> scale, mask, ... -> softmax -> dropout, cast, view, ... -> weights @ v -> heads
               `Trail`, not yet weights                 `Trail` of weights                         `Call`

A softmax of a linear layer's numbers (a router of experts, a gate, a classifier), one whose product is with a parameter
(a codebook), and one of a feature map (linear attention) leave no such trail. What leaves one and is no distribution
over keys, or whose axes cannot be told, is refused by name: a call of no documents says why in its `note`.
"""

from __future__ import annotations

import dis
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, reduce
from threading import local
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from headwise.masks import Allowed, Causal, Mask
from headwise.models.reading import check, numbers_added
from headwise.records import Call
from headwise.spec import Options

# Who takes a call: as it was read, what its heads give by now, and is the order of its heads sure?
Take = Callable[[Call, Tensor, bool], Tensor | None]

FUSED, PACKED = F.scaled_dot_product_attention, F.multi_head_attention_forward
# The second function as it is, but that it does not ask who listens: then what it calls comes here one by one.
SPELLED_OUT = types.FunctionType(
    PACKED.__code__, {**vars(F), "has_torch_function": lambda tensors: False}, argdefs=PACKED.__defaults__
)
SIGNATURE, DROPOUT = inspect.signature(PACKED), inspect.signature(F.dropout)
SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
PRODUCTS = {torch.matmul, Tensor.matmul, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm, torch.einsum}
ADDED = {torch.baddbmm, Tensor.baddbmm}  # the product is that of the second argument with the third
# Names of functions after which every row of weights is still one, and of those that make something new.
MOVES = {"to", "type", "type_as", "float", "half", "double", "bfloat16", "contiguous", "clone", "detach", "dropout"}
MOVES |= {
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "transpose",
    "permute",
    "squeeze",
    "unsqueeze",
    "expand",
    "__get__",
}
TURNS = {"transpose", "permute", "__get__", "movedim", "swapaxes", "t"}
JOINS = {"cat", "concat", "concatenate", "stack"}
NEW = {"linear", "addmm", "layer_norm", "rms_norm", "group_norm", "batch_norm", "conv1d", "conv2d", "embedding"}
HANDED = "it is handed queries and keys, perhaps of two texts: there are no distances"
LIBRARIES = {"torch", "numpy", "einops", "transformers"}  # whose functions are no part of a class
CONTEXT = {"key", "k", "context", "memory", "encoder_hidden_states", "key_value_states", "enc_output", "encoder_output"}


def attends(module: nn.Module) -> bool:
    """Does the code of this module's class read as one of the three? What it does is found out by running it."""
    fused, softmax, product = _reads(type(module))  # type: ignore[arg-type]
    return fused or (product and (softmax or any(isinstance(child, nn.Softmax) for child in module.children())))


@cache
def _reads(kind: type[nn.Module]) -> tuple[bool, bool, bool]:
    """Does the code of a class name a fused attention, a softmax, a product of matrices?"""
    names = _names(kind)
    fused = bool(names & {"scaled_dot_product_attention", "multi_head_attention_forward"})
    product = any("matmul" in name for name in names) or bool(names & {"@", "bmm", "mm", "einsum", "baddbmm"})
    return fused, any(name.lower().endswith("softmax") for name in names), product


def _names(kind: type[nn.Module]) -> frozenset[str]:
    """What is named in the code of a class: in its `forward`, and in the functions and methods that this calls."""
    names: set[str] = set()
    known: set[Any] = set()
    waiting: list[Any] = [vars(base).get(name) for base in kind.__mro__ for name in ("forward", "__init__")]
    homes = {base.__module__ for base in kind.__mro__ if base.__module__.startswith("torch.nn")}
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if not isinstance(function, types.FunctionType) or function in known:
            continue
        known.add(function)
        package = function.__module__.partition(".")[0]
        known_well = package in LIBRARIES and not function.__module__.startswith("transformers.models")
        if package in sys.stdlib_module_names or (known_well and function.__module__ not in homes):
            continue
        codes = [function.__code__]
        for code in codes:
            codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
            names.update(code.co_names)
            names.update("@" for step in dis.get_instructions(code) if step.argrepr in ("@", "@="))
            there = [function.__globals__.get(name) for name in code.co_names]
            places = [kind, *(place for place in there if isinstance(place, types.ModuleType))]
            waiting += there
            waiting += [getattr(place, name, None) for place in places for name in code.co_names if name != "forward"]
    return frozenset(names)


# What tensors come from


class Trail(NamedTuple):
    """Where a tensor comes from: a product of two tensors, and perhaps a softmax of that."""

    weights: bool = False  # else scores
    axis: int | None = None  # of weights: the one of the softmax, counted from the end; None where it was lost
    whole: bool = True  # of weights: is every row still what a softmax gave?
    kept: Tensor | None = None  # the same without dropout, where there was some
    joined: bool = False  # was it put together of several?


class Product(NamedTuple):
    """Weights times values, with the last axes as named here and those before them alike, or of length 1."""

    weights: Tensor  # (...,T,S)
    v: Tensor  # (...,S,E)
    out: Tensor  # (...,T,E)
    axis: int  # of the keys, in the weights as the model has them
    back: Callable[[Tensor], Tensor]  # a tensor like `out` in the form in which the model has it


def _product(func: Any, args: Sequence[Any], operands: Sequence[Tensor], result: Tensor, side: int) -> Product | None:
    """The product whose operand number `side` are weights; None where it has another form than attention."""
    weights, v = operands[side], operands[1 - side]
    if func is torch.einsum:
        return _einsum(args[0], operands, result, side)
    if v.ndim < 2 or weights.ndim < 2:
        return None
    if side == 0:
        return Product(weights, v, result, -1, lambda out: out)
    return Product(weights.mT, v.mT, result.mT, -2, lambda out: out.mT)


def _heads_last(product: Product | None, told: int) -> Product | None:
    """The same with windows before the heads, where a module that has so many puts them behind, (B,H,W,T,E)."""
    if product is None or product.out.ndim != 5 or product.weights.ndim != 5 or product.v.ndim != 5:
        return product
    heads, windows = product.out.shape[1:3]
    if heads != told or windows == told:
        return product
    weights, v, out = (x.transpose(1, 2) for x in (product.weights, product.v, product.out))
    return Product(weights, v, out, product.axis, lambda gave: product.back(gave.transpose(1, 2)))


def _einsum(equation: str, operands: Sequence[Tensor], result: Tensor, side: int) -> Product | None:
    read, arrow, gave = equation.replace(" ", "").partition("->")
    parts = read.split(",")
    if not arrow or len(parts) != 2:
        return None
    free = "".join(letter for letter in map(chr, range(65, 91)) if letter not in equation)
    for n, (part, operand) in enumerate(zip(parts, operands, strict=True)):  # letters for "...", the last axis first
        parts[n] = part.replace("...", free[: operand.ndim - len(part) + 3][::-1])
    gave = gave.replace("...", free[: result.ndim - len(gave) + 3][::-1])
    ours, theirs, weights = parts[side], parts[1 - side], operands[side]
    keys = [x for x in ours if x in theirs and x not in gave]
    alone = [x for x in ours if x in gave and x not in theirs]
    features = [x for x in theirs if x in gave and x not in ours]
    if len(alone) > 1 and keys:  # values that heads share: the queries are those of which there are as many as keys
        sizes = dict(zip(ours, weights.shape, strict=True))
        alone = [x for x in alone if sizes[x] == sizes[keys[0]]]
    if len(keys) != 1 or len(alone) != 1 or len(features) != 1 or any(x not in gave + theirs for x in ours):
        return None
    key, query, feature = keys[0], alone[0], features[0]
    lead = "".join(x for x in ours if x not in (key, query))
    inside = f"{lead}{query}{feature}"
    # Axes in our order; one that the values alone have is summed up, and one that they lack has length 1.
    v = torch.einsum(f"{theirs}->{''.join(x for x in lead if x in theirs)}{key}{feature}", operands[1 - side])
    for place, x in enumerate(lead):
        if x not in theirs:
            v = v.unsqueeze(place)
    return Product(
        torch.einsum(f"{ours}->{lead}{query}{key}", weights),
        v,
        torch.einsum(f"{gave}->{inside}", result),
        ours.index(key) - len(ours),
        lambda out: torch.einsum(f"{inside}->{gave}", out),
    )


# The blocks of a thread


@dataclass
class Running:
    """An attention that runs."""

    module: nn.Module
    cross: bool  # is it given another sequence for its keys?
    others: list[Tensor]  # what it is given beside the sequence of its queries, and looks like one
    sizes: tuple[int, ...]  # the first two axes of what it is given: documents are one of them
    refused: bool = False
    handed: bool = False  # is it handed queries and keys that another module has made?
    made: list[Tensor] = field(default_factory=list)  # what linear layers have given in it so far


class Block:
    """The attentions that one block of the hook listens to, and which of its modules runs."""

    def __init__(self, takes: Mapping[nn.Module, tuple[Take, int]], here: Callable[[], bool]) -> None:
        self.takes, self.here = takes, here  # module -> who takes its calls, and how many heads it says it has, or 0
        self.running: list[Running] = []
        self.idle: set[nn.Module] = set()  # attentions that ran, and of which nothing was handed on
        self.handed: set[nn.Module] = set()

    def enter(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        inputs = {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **keywords}
        tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
        first = next(iter(tensors.values()), None)
        sizes = () if first is None else (1, *first.shape[:2]) if first.ndim < 4 else tuple(first.shape[:1])
        others = {name: x for name, x in tensors.items() if x is not first}
        alike = [x for x in others.values() if first is not None and x.ndim == first.ndim == 3]
        if module in self.takes and module not in self.handed:
            self.idle.add(module)
        running = Running(module, bool(CONTEXT & others.keys()), [] if "key" in inputs else alike, sizes)
        running.handed = first is not None and first.ndim > 3 and bool({"k", "key"} & others.keys())
        self.running.append(running)

    def leave(self, module: nn.Module, *more: Any) -> None:
        while self.running and self.running.pop().module is not module:
            pass

    @property
    def attention(self) -> Running | None:
        """The attention that runs; None where none does, or one that nobody here listens to."""
        running = self.running[-1] if self.running and self.here() else None
        return running if running is not None and running.module in self.takes else None


class Listener(TorchFunctionMode):
    """What every call of torch in a thread passes while a block of it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[Block] = []
        self.quiet = False  # while those who listen compute
        self.n_heads, self.w_o = 0, None  # as PACKED was told, while it runs
        self.trails: Any = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        if self.quiet or not any(block.running for block in self.blocks):
            return func(*args, **keywords)
        if func is PACKED:
            before = self.n_heads, self.w_o
            asked = SIGNATURE.bind(*args, **keywords).arguments
            self.n_heads, self.w_o = asked["num_heads"], asked["out_proj_weight"]
            try:
                with self:
                    return SPELLED_OUT(*args, **keywords)
            finally:
                self.n_heads, self.w_o = before
        kept = self._before_dropout(func, args, keywords)
        result = func(*args, **keywords)
        if func is FUSED:
            return self._hand(lambda running, n_heads: _fused(running, n_heads, args, keywords, result), result)
        if func in PRODUCTS or func in ADDED:
            return self._multiplied(func, [*args, *keywords.values()], result)
        if func is F.linear:  # keys and values are made of it
            for running in (block.running[-1] for block in self.blocks if block.running):
                running.cross |= any(args[0] is x for x in running.others)
                running.made.append(result)
        for part in result if isinstance(result, tuple | list) else [result]:
            if isinstance(part, Tensor) and part.is_floating_point():
                self._follow(func, args, keywords, part, kept)
        return result

    def _trail(self, x: Any) -> Trail | None:
        return self.trails.get(x) if isinstance(x, Tensor) else None

    def _before_dropout(self, func: Any, args: Any, keywords: Any) -> Tensor | None:
        """Weights that dropout is about to change."""
        trail = self._trail(args[0]) if func is F.dropout and args else None
        if trail is None or not trail.weights:
            return None
        kept: Tensor = args[0] if trail.kept is None else trail.kept
        asked = DROPOUT.bind(*args, **keywords)
        asked.apply_defaults()
        _, p, training, inplace = asked.args
        if not training or not p:
            return None
        return kept.clone() if inplace else kept

    def _follow(self, func: Any, args: Any, keywords: Any, result: Tensor, kept: Tensor | None) -> None:
        """What is made of a tensor with a trail has one, too."""
        name = getattr(func, "__name__", "")
        operands = args[0] if name in JOINS else [*args, *keywords.values()]
        source = next((x for x in operands if self._trail(x) is not None), None)
        trail = self._trail(source)
        if source is None or trail is None or name in NEW:
            return
        if func in SOFTMAX:
            dim = keywords.get("dim", args[1] if len(args) > 1 else -1)
            trail = Trail(True, dim if dim is None or dim < 0 else dim - result.ndim, joined=trail.joined)
        elif name in JOINS:
            sink = len(operands) == 2 and source.shape[-1] + 1 == result.shape[-1]  # one more column of scores
            trail = trail._replace(joined=trail.joined or not sink)
        elif kept is not None:
            trail = trail._replace(kept=kept)
        elif trail.weights:
            if trail.kept is not None:  # the same is done to what dropout has not changed
                trails = [self._trail(x) for x in args]
                swapped = [x if t is None or t.kept is None else t.kept for x, t in zip(args, trails, strict=True)]
                again = func(*swapped, **keywords)
                kept = again if isinstance(again, Tensor) else None
            alike = source.shape == result.shape or (trail.axis == -1 and source.shape[-1:] == result.shape[-1:])
            axis = trail.axis if alike and name not in TURNS else None
            trail = Trail(True, axis, trail.whole and name in MOVES, kept, trail.joined)
        self.trails[result] = trail

    def _multiplied(self, func: Any, args: Any, result: Tensor) -> Tensor:
        """A product: of scores, or of weights with values."""
        operands = [x for y in args for x in (y if isinstance(y, list | tuple) else [y]) if isinstance(x, Tensor)]
        operands = operands[1:3] if func in ADDED else operands
        if len(operands) != 2:
            return result
        trails = [self._trail(x) for x in operands]
        sides = [side for side, trail in enumerate(trails) if trail is not None and trail.weights]
        parameter = any(isinstance(x, nn.Parameter) for x in operands)
        if not sides and (not parameter or any(trails)):
            self.trails[result] = Trail()
        if not sides or parameter:
            return result
        if len(sides) == 2:
            why = "multiplies the weights of one softmax with those of another, as attention through landmarks does"
            return self._hand(lambda running, n_heads: why, result)
        trail = trails[sides[0]]
        assert trail is not None
        if trail.joined:
            why = "joins the scores of several products before its softmax: its map lies in pieces, as of chunks"
            return self._hand(lambda running, n_heads: why, result)
        told = next((block.takes[r.module][1] for block in self.blocks if (r := block.attention) is not None), 0)
        product = _heads_last(_product(func, args, operands, result, sides[0]), told)
        if product is None:
            return result
        alone = all(size == 1 for size in product.v.shape[:-2]) and any(size > 1 for size in product.out.shape[:-2])
        if alone and not trail.whole:  # embeddings of distances, which no document has made, times shifted weights
            return result
        if trail.axis not in (None, product.axis):
            why = "its softmax is over another axis than the one along which it is multiplied with values"
            return self._hand(lambda running, n_heads: why, result)
        kept = product
        if trail.kept is not None:
            undropped = [trail.kept if side == sides[0] else y for side, y in enumerate(operands)]
            kept = _heads_last(_product(func, args, undropped, result, sides[0]), told) or product
        weights = kept.weights
        return self._hand(
            lambda running, n_heads: _mapped(running, self.n_heads, n_heads, product, weights, trail.whole),
            result,
            product,
        )

    def _hand(
        self, read: Callable[[Running, int], tuple[Call, bool] | str], result: Tensor, product: Product | None = None
    ) -> Tensor:
        """Hand a call to every block whose attention runs; what the model goes on with."""
        gave: Tensor | None = None
        for block in [*self.blocks]:
            running = block.attention
            if running is None or running.refused:
                continue
            take, n_heads = block.takes[running.module]
            with self.silence():
                told = read(running, self.n_heads or n_heads)
                block.idle.discard(running.module)
                block.handed.add(running.module)
                running.refused |= isinstance(told, str)
                call, sure = (refusal(running.module, told), True) if isinstance(told, str) else told
                changed = take(call, call.out if gave is None else gave, sure)
            gave = gave if changed is None else changed
        if gave is None:
            return result
        with self.silence():
            if product is None:
                return gave.reshape(result.shape).to(result.dtype)
            return product.back(gave.reshape(product.out.shape)).to(result.dtype).contiguous()

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Inside this block nobody listens: those who do compute."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before


_threads = local()  # the listener of each


@contextmanager
def opened(block: Block) -> Iterator[None]:
    """Calls of this thread go to the block. One listener serves all blocks of a thread: they may end in any order."""
    listener: Listener = _threads.__dict__.setdefault("listener", Listener())
    if not listener.blocks:
        listener.__enter__()  # type: ignore[no-untyped-call]
    listener.blocks.append(block)
    try:
        yield
    finally:
        listener.blocks.remove(block)
        if not listener.blocks:
            listener.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            listener.trails = WeakIdKeyDictionary()


@contextmanager
def unheard() -> Iterator[None]:
    """What is computed in this block is no attention of a model."""
    listener: Listener | None = _threads.__dict__.get("listener")
    if listener is None:
        yield
        return
    with listener.silence():
        yield


def packed_w_o() -> Tensor | None:
    """The W_O that `multi_head_attention_forward` was given, while it runs in this thread."""
    listener: Listener | None = _threads.__dict__.get("listener")
    return None if listener is None else listener.w_o


# Calls


def refusal(module: nn.Module, why: str) -> Call:
    """A call of no documents, whose note says why it was not read."""
    nothing = torch.empty(0, 1, 0, 0)
    return Call(module, nothing, nothing, nothing, Options(), nothing, note=why)


def _heads(x: Tensor, n_heads: int) -> Tensor:
    """(B,H,...) of tensors (H,...) or (B*H,...), or with more axes before those of the heads."""
    if x.ndim == 2:
        return x[None, None]
    if x.ndim == 5 and n_heads == x.shape[1] * x.shape[2]:
        return x.flatten(1, 2)
    return x.reshape(-1, n_heads, *x.shape[1:]) if x.ndim == 3 else x.flatten(0, -4)


def _n_heads(running: Running, packed: int, told: int, shape: Sequence[int]) -> tuple[int, bool] | str:
    """How many heads a call of weights of this shape has, and is their order sure? Or why that cannot be told."""
    if len(shape) == 5 and told == shape[1] * shape[2]:  # query heads by the key/value head that they read
        return told, True
    name = type(running.module).__name__
    if len(shape) > 4 and (shape[-3] != told or (told in shape[1:-3] and told > 1)):  # windows may be there, too
        return (
            f"{name} makes maps of {tuple(shape)} and says that it has {told} heads: which of the first axes they are "
            f"cannot be told"
        )
    if len(shape) != 3:
        return (1 if len(shape) == 2 else shape[-3]), True
    N = shape[0]
    if packed:
        return packed, True
    if told > 1 and N % told == 0 and (N not in running.sizes or any(size * told == N for size in running.sizes)):
        return told, False
    if N in running.sizes and told <= 1:
        return 1, True
    if told > 1:
        return (
            f"{name} says that it has {told} heads, and makes maps of {tuple(shape)}: their heads cannot be told apart"
        )
    return (
        f"{name} makes maps of {tuple(shape)} and does not say how many heads are in the first axis; set the attribute "
        f"n_heads of the module"
    )


def _mapped(
    running: Running, packed: int, told: int, product: Product, weights: Tensor, whole: bool
) -> tuple[Call, bool] | str:
    """A softmax over keys times values."""
    counted = _n_heads(running, packed, told, (*product.out.shape[:-2], *weights.shape[-2:]))
    if isinstance(counted, str):
        return counted
    H, sure = counted
    out, lead = product.out, product.out.shape[:-2]
    p, used = (x.detach().expand(*lead, *x.shape[-2:]) for x in (weights, product.weights))
    v = product.v[(None,) * (out.ndim - product.v.ndim)]
    if lead:  # values that all heads share stay one
        v = v.expand(*lead[:-1], v.shape[-3] if len(lead) == 2 else lead[-1], -1, -1)
    p, used, v, out = (_heads(x, H) for x in (p, used, v, out))
    sure = sure or any(_side_by_side(v, made) for made in running.made)
    B, _, T, S = p.shape
    rows = sorted({0, T // 3, 2 * T // 3, T - 1})
    wide = torch.promote_types(out.dtype, torch.float32)
    some = p[:, :, rows].to(wide)
    sums, close = some.sum(-1), max(1e-3, 8 * torch.finfo(weights.dtype).eps)
    even = ((sums - 1).abs() <= close) | (sums.abs() <= close) | ~sums.isfinite()
    if not whole:
        even |= sums <= 1 + close
    name = type(running.module).__name__
    if not even.all() or (some < -close).any():
        total = float(sums[~even][0] if not even.all() else sums.flatten()[0])
        return (
            f"what {name} multiplies with values is no distribution over keys: a row of {S} weights sums to "
            f"{total:.5g}, and the least weight is {float(some.min()):.5g}"
        )
    difference = (used[:, :, rows].to(wide) @ v.detach().to(wide) - out.detach()[:, :, rows].to(wide)).abs()
    most = float(difference.nan_to_num().max()) if difference.numel() else 0.0
    if most > 64 * max(torch.finfo(out.dtype).eps, 1e-6) * max(1.0, float(v.detach().abs().max())):
        return f"in {name} weights times values differ from what it goes on with by {most:.3g}"
    q, k = p.new_empty(B, H, T, 0), p.new_empty(B, v.shape[1], S, 0)
    causal = running.handed and T == S > 1 and not p.triu(1).any()
    cross = running.cross and not causal
    note = HANDED if running.handed and cross else ""
    return Call(running.module, q, k, v, Options(), out, cross, note=note, weights=p), sure


def _side_by_side(v: Tensor, made: Tensor) -> bool:
    """Are values (B,H,S,E) the heads, side by side, of what a linear layer gave, documents first or (S,B,H*E)?"""
    if made.numel() != v.numel() or made.ndim != 3:
        return False
    B, H, S, E = v.shape
    rows = [part.reshape(B, S, H, E).transpose(1, 2) for part in (made, made.transpose(0, 1))]
    return any(torch.equal(v, part) for part in rows)


def _fused(
    running: Running, n_heads: int, args: Sequence[Any], keywords: Mapping[str, Any], result: Tensor
) -> tuple[Call, bool] | str:
    """A call of the fused function."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    asked = {**dict(zip(names, args, strict=False)), **keywords}
    q, k, v = (asked[name] for name in names[:3])
    if q.is_nested or k.is_nested:
        return f"{type(running.module).__name__} gives its attention nested tensors; pad them"
    lead, T, S = q.shape[:-2], q.shape[-2], k.shape[-2]
    whole = len(lead) == 2  # documents and heads
    counted = _n_heads(running, 0, n_heads, (*lead, T, S))
    if isinstance(counted, str):
        return counted
    H, sure = counted
    mask: Tensor | None = asked.get("attn_mask")
    if mask is not None and not whole and mask.ndim > 2:
        mask = _heads(mask.expand(*lead, T, S), H)
    parts: list[Mask] = []
    if asked.get("is_causal"):
        parts.append(Causal(offset=0))
    if mask is not None and mask.dtype == torch.bool:
        parts.append(Allowed(mask[(None,) * (4 - mask.ndim)]))
    elif mask is not None:
        parts += numbers_added(mask)
    if not whole:
        q, k, v = (_heads(x.expand(*lead, *x.shape[-2:]), H) for x in (q, k, v))
    options = Options(
        mask=reduce(operator.and_, parts) if parts else None,
        scale=asked.get("scale"),
        dropout=asked.get("dropout_p") or 0.0,
    )
    out = result if whole else _heads(result, H)
    B = len(out)
    q, k, v = (x if len(x) == B else x.expand(B, -1, -1, -1) for x in (q, k, v))
    causal = running.handed and T == S > 1 and bool(asked.get("is_causal"))
    cross = running.cross and not causal
    call = Call(running.module, q, k, v, options, out, cross, note=HANDED if running.handed and cross else "")
    if not options.dropout:
        check(call, False)
    return call, sure
