"""Attention read where it happens: in any torch module, from the functions of torch that it calls.

Inside a block of the hook, and in its thread, every call of torch passes here. Three of them are attention:

    scaled_dot_product_attention    q, k, v, mask and scale are its arguments; `reading` checks rows of its output
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
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from string import ascii_uppercase
from threading import local
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from headwise.masks import Causal, Mask, all_of
from headwise.models.reading import check, masks_of, probed_rows
from headwise.records import Call
from headwise.spec import Options

FUSED = F.scaled_dot_product_attention
PACKED = F.multi_head_attention_forward
# The second function with a `has_torch_function` that says no. So it does not hand itself to us as one call: what it
# calls comes here, one by one.
SPELLED_OUT = types.FunctionType(
    PACKED.__code__,
    {**vars(F), "has_torch_function": lambda tensors: False},
    argdefs=PACKED.__defaults__,
)
# gives its arguments their names, however they are passed
SIGNATURE = inspect.signature(PACKED)
# Functions are told by their names, which those of torch and of Tensor share.
SOFTMAX = {"softmax", "special_softmax"}
# The last one adds to its first argument the product of the others.
PRODUCTS = {"matmul", "bmm", "mm", "einsum", "baddbmm"}
# After these a row of weights still sums to 1, though it may lie along another axis. `x.T` and `x.mT` are `__get__`.
KEEPS_ROWS = {
    "to", "type", "type_as", "float", "half", "double", "bfloat16", "contiguous", "clone", "detach", "dropout", "view",
    "reshape", "flatten", "unflatten", "transpose", "permute", "squeeze", "unsqueeze", "expand", "__get__",
}  # fmt: skip
# these are given a list of tensors
JOINS = {"cat", "concat", "concatenate", "stack", "hstack"}
# What these give is no form of their input any more: its trail ends.
MAKES_NEW = {
    "linear", "addmm", "layer_norm", "rms_norm", "group_norm", "batch_norm", "conv1d", "conv2d", "embedding",
}  # fmt: skip
# The note of a call of a module that does not make its queries and keys itself.
HANDED = "it is handed queries and keys, perhaps of two texts: there are no distances"
# `@` and `@=` in bytecode, each as the byte of its operation and the byte of its argument. To let `dis` take every line
# of every class apart takes seven times as long as all else here.
PRODUCT_LINES = dis.get_instructions(compile("a @ b; a @= b", "", "exec"))
PRODUCT_CODES = {
    (step.opcode, step.arg) for step in PRODUCT_LINES if step.opname == "BINARY_OP"
}
# whose functions are no part of a class
LIBRARIES = {"torch", "numpy", "einops", "transformers"} | sys.stdlib_module_names
# Arguments that hold another sequence, of which keys are made.
CONTEXT = {
    "key", "k", "context", "memory", "encoder_hidden_states", "key_value_states", "enc_output", "encoder_output",
}  # fmt: skip


def attends(module: nn.Module) -> bool:
    """Does the code of this module's class read as one of the three? What it does is found out by running it.

    Its softmax may be a module, nn.Softmax, which the code of the class does not name.
    """
    names = names_in(type(module))  # type: ignore[arg-type]
    if names & {FUSED.__name__, PACKED.__name__}:
        return True
    if not any(name in PRODUCTS or "matmul" in name for name in names):
        return False
    has_softmax = any(name.lower().endswith("softmax") for name in names)
    return has_softmax or nn.Softmax in map(type, module.children())


def uses_interface(module: nn.Module) -> bool:
    """Does the code of this module's class ask the attention interface of transformers for a function?"""
    return "get_interface" in names_in(type(module))  # type: ignore[arg-type]


@cache
def names_in(kind: type[nn.Module]) -> set[str]:
    """The names in the code of a class, where a product by `@` is "matmul".

    That is its `forward` and its `__init__`, and the functions and methods that these call.
    """
    names: set[str] = set()
    read = set()
    # functions, and other things, None too, which the loop passes by
    waiting: list[Any] = []
    for base in kind.__mro__:
        waiting += [vars(base).get("forward"), vars(base).get("__init__")]
    # torch's own attentions (nn.TransformerEncoderLayer) are read like a user's
    homes = {base.__module__ for base in kind.__mro__}
    while waiting:
        function = waiting.pop()
        if not callable(function):  # `torch.classes` raises where it is unwrapped
            continue
        function = inspect.unwrap(function)
        if not isinstance(function, types.FunctionType) or function in read:
            continue
        read.add(function)
        # None of one that `exec` made, as torch.fx makes `forward`
        home = function.__module__ or ""
        # Of libraries, models of transformers are read. What other functions of theirs call is no part of the class.
        is_read = home in homes or home.startswith("transformers.models")
        if home.partition(".")[0] in LIBRARIES and not is_read:
            continue
        for code in _codes_of(function.__code__):
            names.update(code.co_names)
            # Bytecode is pairs of bytes, operation and argument: 0, 2, 4, ... are operations, 1, 3, 5, ... arguments.
            # What CPython keeps room for behind an instruction takes whole pairs, too, so none is read askew.
            pairs = zip(code.co_code[::2], code.co_code[1::2], strict=True)
            if not PRODUCT_CODES.isdisjoint(pairs):
                names.add("matmul")
            # What a name stands for: a global of the function's file, a method, or a function of a module named here.
            # Any name that the code mentions may be that of a method or of a module's function: all are tried.
            named = [function.__globals__.get(name) for name in code.co_names]
            waiting += named
            for place in (kind, *named):
                if place is kind or isinstance(place, types.ModuleType):
                    waiting += [getattr(place, name, None) for name in code.co_names]
    return names


def _codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and that of the functions and comprehensions inside of it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _codes_of(part)


# What tensors come from


class Trail(NamedTuple):
    """Where a tensor comes from: a product of two tensors, and perhaps a softmax of that."""

    weights: bool = False  # is it weights? Else it is scores
    whole: bool = True  # of weights: is every row still what a softmax gave?
    dropped: bool = False  # did dropout take some of the weights?
    # was it put together of several products, as the scores of chunks are?
    joined: bool = False


class Product(NamedTuple):
    """Weights times values, with the last axes as named here; the axes before them broadcast."""

    weights: Tensor  # (...,T,S)
    v: Tensor  # (...,S,E)
    out: Tensor  # (...,T,E)
    # a tensor like `out` in the form in which the model has it
    back: Callable[[Tensor], Tensor]


def _product(
    equation: Any, pair: Sequence[Tensor], result: Tensor, side: int
) -> Product | None:
    """The product of a pair whose number `side` is the weights; None where it has another form than attention.

    equation  of an einsum, such as "bhts,bshe->bthe"; else anything that is no string

    What the axes of an einsum are is told by the letters that its three parts share.
    """
    p = pair[side]
    v = pair[1 - side]
    if min(p.ndim, v.ndim) < 2:
        return None
    if not isinstance(equation, str):
        if side == 0:
            return Product(p, v, result, lambda gave: gave)
        return Product(p.mT, v.mT, result.mT, lambda gave: gave.mT)
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    parts = inputs.split(",")
    if not arrow or len(parts) != 2:
        return None
    weights = _letters(parts[side], p)
    values = _letters(parts[1 - side], v)
    out = _letters(out, result)
    w = set(weights)
    x = set(values)
    y = set(out)
    # Keys are summed over; queries stand in the weights and in the output, features in the values and in the output.
    keys = w & x - y
    queries = w & y - x
    features = x & y - w
    # heads that share values are such axes, too; queries are the one that is as long as the keys
    if len(queries) > 1:
        sizes = dict(zip(weights, p.shape, strict=True))
        lengths = {sizes[letter] for letter in keys}
        queries = {letter for letter in queries if sizes[letter] in lengths}
    # The last: an axis that the weights alone have, over which they would be summed before they meet the values.
    if not len(keys) == len(queries) == len(features) == 1 or w - x - y:
        return None
    (key,), (query,), (feature,) = keys, queries, features
    lead = weights.replace(key, "").replace(query, "")  # documents, heads, ...
    ours = f"{lead}{query}{feature}"
    # an axis that v alone has is summed up; it gets those that it lacks, of length 1
    held = "".join(letter for letter in lead if letter in x)
    v = _turned(v, values, f"{held}{key}{feature}")
    return Product(
        _turned(p, weights, f"{lead}{query}{key}"),
        v[tuple(slice(None) if letter in x else None for letter in lead)],
        _turned(result, out, ours),
        lambda gave: _turned(gave, ours, out),
    )


def _letters(axes: str, x: Tensor) -> str:
    """With capitals for "...", the same in all tensors: its axes broadcast, so they are counted from the last.

    "...ts" is "BAts" of a tensor of 4 axes, and "Ats" of one of 3.
    """
    n_hidden = x.ndim - len(axes.replace("...", ""))
    return axes.replace("...", ascii_uppercase[:n_hidden][::-1])


def _turned(x: Tensor, axes: str, wanted: str) -> Tensor:
    """The tensor with its axes in another order: a view, of which a checkpoint keeps nothing."""
    return torch.einsum(f"{axes}->{wanted}", x)


# The blocks of a thread


class UnreadError(Exception):
    """What a module does is no attention that is read; the message says why."""


@dataclass
class Running:
    """An attention that runs, or a part of one, which hands its calls on itself."""

    module: nn.Module
    n_heads: int = 0  # as the module says; 0 where it does not
    cross: bool = False  # is it given another sequence for its keys?
    # what it is given beside the sequence of its queries, and looks like one
    others: Sequence[Tensor] = ()
    # lengths, of which one is the number of its documents: see `enter`
    sizes: tuple[int, ...] = ()
    note: str = ""  # of its calls
    # the arguments of PACKED, while it runs
    packed: Mapping[str, Any] = field(default_factory=dict)
    refused: bool = False  # was a call of it refused? Then its others are not handed on

    @property
    def kind(self) -> str:
        return type(self.module).__name__

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, out: Tensor
    ) -> Call:
        return Call(self.module, q, k, v, options, out, self.cross, note=self.note)


def enter(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """A forward pre-hook of each attention: it is about to run."""
    running = Running(module)
    _thread.listener.running.append(running)
    names = inspect.signature(module.forward).parameters
    inputs = dict(zip(names, args, strict=False)) | keywords
    tensors = {
        name: x
        for name, x in inputs.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    if not tensors:
        return
    # by custom the sequence of the queries, or the queries
    first = next(iter(tensors.values()))
    others = {name: x for name, x in tensors.items() if x is not first}
    # An argument called `key` alone tells it: DETR passes x + positions as query and key, and x as value, which is
    # another tensor and no other sequence.
    running.cross = not CONTEXT.isdisjoint(others)
    if "key" not in inputs:
        running.others = [x for x in others.values() if x.ndim == first.ndim == 3]
    # (B,T,C) or (T,B,C), or one document (T,C); with more axes they are heads, or height and width of an image.
    running.sizes = (1, *first.shape[:2]) if first.ndim < 4 else tuple(first.shape[:1])
    if first.ndim > 3 and not {"k", "key"}.isdisjoint(others):
        running.note = HANDED


def leave(module: nn.Module, *more: Any) -> None:
    """A forward hook of each attention: it has run. What began inside of it and did not come here, ends with it."""
    running = _thread.listener.running
    while running and running.pop().module is not module:
        pass


class Listener(TorchFunctionMode):
    """What every call of torch in a thread passes while a block is open: `__torch_function__` runs in its place."""

    def __init__(self) -> None:
        super().__init__()
        # of each block the taps of its modules: see `hook.Tap`
        self.blocks: list[Mapping[nn.Module, Any]] = []
        self.running: list[Running] = []  # the outermost first; once for each block
        self.quiet = False  # while those who listen compute
        self.trails: Any = WeakIdKeyDictionary()  # tensor -> its Trail

    def __torch_function__(
        self, func: Any, kinds: Any, args: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        if self.quiet or not self.running:
            return func(*args, **keywords)
        running = self.running[-1]
        if func is PACKED:
            running.packed = SIGNATURE.bind(*args, **keywords).arguments
            try:
                # torch turns a mode off while it handles a call, and what this one calls is to come here
                with self:
                    return SPELLED_OUT(*args, **keywords)
            finally:
                running.packed = {}
        result = func(*args, **keywords)
        if func is FUSED:
            return self._hand(partial(_fused, result, args, keywords), result)
        name = getattr(func, "__name__", "")
        inputs = [*args, *keywords.values()]
        if name in PRODUCTS:
            return self._multiplied(name, inputs, result)
        if func is F.linear:
            # Who multiplies another sequence makes keys of it.
            running.cross |= any(x is y for y in inputs for x in running.others)
        if name not in MAKES_NEW:
            # chunk and split give several
            for part in result if isinstance(result, tuple | list) else [result]:
                if isinstance(part, Tensor) and part.is_floating_point():
                    self._follow(func, inputs, part)
        return result

    def _trail(self, x: Any) -> Trail | None:
        return self.trails.get(x) if isinstance(x, Tensor) else None

    def _follow(self, func: Any, inputs: Any, result: Tensor) -> None:
        """What is made of a tensor with a trail has one, too."""
        name = getattr(func, "__name__", "")
        operands = tree_leaves(inputs)
        # the first operand that has a trail
        source = next((x for x in operands if self._trail(x)), None)
        trail = self._trail(source)
        if source is None or trail is None:
            return
        if name in SOFTMAX:
            trail = Trail(True, joined=trail.joined)
        elif name in JOINS:
            # One more column of scores, of a sink, leaves them those of one product.
            n_tensors = sum(isinstance(x, Tensor) for x in operands)
            is_sink = n_tensors == 2 and source.shape[-1] + 1 == result.shape[-1]
            trail = trail._replace(joined=trail.joined or not is_sink)
        elif trail.weights:
            # All forms of dropout are given a tensor, a share and whether this is training.
            dropped = trail.dropped or ("dropout" in name and all(inputs[1:3]))
            # Once a function came that may change the sum of a row (a product with a gate), `whole` stays False.
            whole = trail.whole and name in KEEPS_ROWS
            trail = trail._replace(whole=whole, dropped=dropped)
        self.trails[result] = trail

    def _multiplied(self, name: str, inputs: Any, result: Tensor) -> Tensor:
        """A product: of scores, or of weights with values."""
        # an einsum may have them in a list
        operands = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        if name == "baddbmm":
            del operands[0]  # what the product is added to
        if len(operands) != 2:
            return result
        trails = [self._trail(x) for x in operands]
        # 0: the left operand, 1: the right
        sides = [side for side, trail in enumerate(trails) if trail and trail.weights]
        has_parameter = any(isinstance(x, nn.Parameter) for x in operands)
        # Two tensors that were computed make scores; and scores times a matrix are still some.
        if not sides and (not has_parameter or trails != [None, None]):
            self.trails[result] = Trail()
        if not sides or has_parameter:  # with a parameter, weights of a codebook
            return result
        trail = trails[sides[0]] or Trail()
        why = ""
        if len(sides) == 2:
            why = "multiplies the weights of one softmax with those of another, as attention through landmarks does"
        elif trail.joined:
            why = "joins the scores of several products before its softmax: its map lies in pieces, as of chunks"
        elif trail.dropped:
            why = "drops weights of its map, as in training; call model.eval(), or set that dropout to 0"
        if why:
            return self._hand(partial(_refused, why), result)
        product = _product(inputs[0], operands, result, *sides)
        if not product:
            return result
        # Weights by distance, shifted after the softmax, times embeddings of distances (Shaw et al. 2018): no attention
        # to tokens. These are told by this, that all documents and heads share them.
        n_values, n_maps = (x.shape[:-2].numel() for x in (product.v, product.out))
        if n_values == 1 < n_maps and not trail.whole:
            return result
        return self._hand(partial(_mapped, product, trail.whole), result, product)

    def _hand(
        self, read: Any, result: Tensor, product: Product | None = None
    ) -> Tensor:
        """Hand a call to every block that takes those of the attention that runs; give what the model goes on with.

        read     makes the call of what runs, and says whether the order of its heads is sure; or raises UnreadError
        result   what torch has given
        product  how the heads lie in it; None: as they are
        """
        running = self.running[-1]
        w_o = self.running[-1].packed.get("out_proj_weight")
        taps = [
            block[running.module] for block in self.blocks if running.module in block
        ]
        if not taps or running.refused:
            return result
        running.n_heads = max(tap.site.n_heads for tap in taps)
        with self.silence():
            call: Call | str
            try:
                call, sure = read(running)
            except UnreadError as why:
                running.refused = True
                call = str(why)
                sure = True
            takes = [partial(tap.take, sure=sure, w_o=w_o) for tap in taps]
            gave = handed(call, takes)
            if gave is None:
                return result
            if not product:
                return gave.reshape(result.shape).to(result.dtype)
            # A plain product is contiguous, so that the model may call `.view` on it; what `back` turned is not.
            back = product.back(gave.reshape(product.out.shape))
            return back.to(result.dtype).contiguous()

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Inside this block nobody listens: those who do compute."""
        before = self.quiet
        self.quiet = True
        try:
            yield
        finally:
            self.quiet = before


class Thread(local):
    """What each thread has of its own."""

    def __init__(self) -> None:
        self.listener = Listener()


_thread = Thread()


@contextmanager
def opened(taps: Mapping[nn.Module, Any]) -> Iterator[None]:
    """Calls of this thread go to a block. One listener serves all blocks of a thread: they may end in any order."""
    listener = _thread.listener
    if not listener.blocks:
        listener.__enter__()  # type: ignore[no-untyped-call]
    listener.blocks.append(taps)
    try:
        yield
    finally:
        listener.blocks.remove(taps)
        if not listener.blocks:
            listener.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            listener.trails = WeakIdKeyDictionary()


def handed(call: Any, takes: Iterable[Callable[[Any], Tensor | None]]) -> Tensor | None:
    """What takes the place of `call.out` after all have had the call, each with what the last has made of it."""
    out = None
    for take in takes:
        changed = take(call)
        if changed is not None:
            out = changed
            call = call._replace(out=changed)
    return out


def unheard() -> AbstractContextManager[None]:
    """What is computed in this block is no attention of a model."""
    return _thread.listener.silence()


# Calls


def _laid(x: Tensor, lead: Sequence[int], n_heads: int) -> Tensor:
    """(B,h,n,d) of a tensor (...,n,d) whose other axes broadcast to `lead`: documents, heads."""
    x = x[(None,) * (len(lead) + 2 - x.ndim)]
    if len(lead) == 2:  # what all heads share stays one
        return x.expand(lead[0], -1, -1, -1)
    x = x.expand(*lead, *x.shape[-2:])
    # of three axes, (B,G,r): query heads by the key/value head that they read
    return x.reshape(-1, n_heads, *x.shape[-2:])


def _n_heads(running: Running, shape: Sequence[int]) -> tuple[int, bool]:
    """How many heads a call of weights of this shape has, and is their order sure? Raises UnreadError where unknown."""
    stated = running.n_heads
    *lead, _, _ = shape
    # (B,G,r,T,S): query heads by the key/value head they read
    if len(lead) == 3 and stated == lead[1] * lead[2]:
        return stated, True
    if len(lead) in (0, 2):  # (T,S) is one head; (B,H,T,S)
        return (lead[1] if lead else 1), True
    if len(lead) == 1:
        N = lead[0]  # documents, heads, or both in one axis
        # torch's own: (B*H,T,S), the heads of a document side by side
        if running.packed:
            return running.packed["num_heads"], True
        # (B,T,S): one of the axes of its input is as long
        if stated <= 1 and N in running.sizes:
            return 1, True
        # An N that is no size does not count documents alone: heads are in it, and windows perhaps, as in (B*W*H,T,S).
        has_heads = N not in running.sizes or N in [
            size * stated for size in running.sizes
        ]
        if stated > 1 and N % stated == 0 and has_heads:
            # the heads of a document may lie side by side, or the documents of a head
            return stated, False
    raise UnreadError(
        f"{running.kind} makes maps of {tuple(shape)}, and says that it has {stated or 'no number of'} heads: which "
        f"axis has the heads cannot be told; set its attribute n_heads, and put windows among the documents"
    )


def _refused(why: str, running: Running) -> Any:
    raise UnreadError(why)


def _mapped(product: Product, whole: bool, running: Running) -> tuple[Call, bool]:
    """A softmax over keys times values. Raises UnreadError where that is no attention, or is not what the model did.

    It is tried on a few rows: are they distributions over keys, and do they times the values give the output?

    whole  is each row still what a softmax gave?
    """
    lead = product.out.shape[:-2]
    weights = product.weights.detach()
    shape = *lead, *weights.shape[-2:]
    H, sure = _n_heads(running, shape)
    tensors = weights.expand(shape), product.v, product.out
    p, v, out = (_laid(x, lead, H) for x in tensors)
    B, _, T, S = p.shape
    rows = probed_rows(T)
    wide = torch.promote_types(out.dtype, torch.float32)
    probed = p[:, :, rows].to(wide)
    # By rounding alone, weights of float32 miss a sum of 1 by less than 1e-3, those of 8 or 11 bits by some roundings,
    # for which 8 are allowed.
    sums = probed.sum(-1)
    close = max(1e-3, 8 * torch.finfo(weights.dtype).eps)
    # A row that may attend nothing sums to 0, or is NaN; weights changed after the softmax may sum to less than 1.
    odd = (sums > 1 + close) | (probed < -close).any(-1)
    if whole:
        odd |= (sums > close) & (sums < 1 - close)
    odd &= sums.isfinite()
    if odd.any():
        raise UnreadError(
            f"what {running.kind} multiplies with values is no distribution over keys: a row of {S} weights sums to "
            f"{float(sums[odd][0]):.5g}, and the least weight is {float(probed.min()):.5g}"
        )
    values = v.detach().to(wide)
    theirs = out.detach()[:, :, rows].to(wide)
    # A wrong reading is off by about the size of the values. Sums in another order are off by some roundings of it; 64
    # of them, a round number, lie far from either. A rounding counts as 1e-6 at least, in float32 and float64, too.
    rounding = max(torch.finfo(out.dtype).eps, 1e-6)
    most = values.nan_to_num(0, 0, 0).abs().amax().clamp(min=1) if S else values.sum()
    difference = (probed @ values - theirs).nan_to_num()
    if (difference.abs() > 64 * rounding * most).any():
        raise UnreadError(
            f"in {running.kind} weights times values differ from what it goes on with"
        )
    # not known; the weights stand for them
    q = p.new_empty(B, H, T, 0)
    k = p.new_empty(B, v.shape[1], S, 0)
    return running.call(q, k, v, Options(), out)._replace(weights=p), sure


FUSED_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _fused(
    result: Tensor, args: Any, keywords: Any, running: Running
) -> tuple[Call, bool]:
    """A call of the fused function, by its arguments. Raises UnreadError where its axes cannot be told.

    enable_gqa, which lets q have more heads than k, changes no number here.
    """
    asked = dict(zip(FUSED_NAMES, args, strict=False)) | keywords
    q, k, v, mask = (asked.get(name) for name in FUSED_NAMES[:4])
    dropout = asked.get("dropout_p", 0.0)
    causal = asked.get("is_causal", False)
    if q.is_nested or k.is_nested:
        raise UnreadError(
            f"{running.kind} gives its attention nested tensors; pad them"
        )
    lead = q.shape[:-2]
    T = q.shape[-2]
    S = k.shape[-2]
    H, sure = _n_heads(running, (*lead, T, S))
    q, k, v, out = (_laid(x, lead, H) for x in (q, k, v, result))
    # documents and heads are not two axes
    if len(lead) != 2 and mask is not None and mask.ndim > 2:
        mask = _laid(mask.expand(*lead, T, S), lead, H)
    # aligned at the first key: query t sees keys 0 to t, however many keys there are
    parts: list[Mask] = [Causal(offset=0)] if causal else []
    parts += [] if mask is None else masks_of(mask)
    options = Options(mask=all_of(parts), scale=asked.get("scale"), dropout=dropout)
    call = running.call(q, k, v, options, out)
    # What dropout has dropped is not known: the function runs once more, without it.
    whole = FUSED(**asked | {"dropout_p": 0.0}) if dropout else result
    check(call._replace(out=_laid(whole, lead, H)), eager=False)
    return call, sure
