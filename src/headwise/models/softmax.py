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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from string import ascii_uppercase
from threading import local
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from headwise.models.reading import check, for_documents, joined_mask, probed_rows
from headwise.records import Call
from headwise.spec import Options

# Who takes a call: as it was read, or why it was not; whether the order of its heads is sure; and W_O where it is told.
Take = Callable[[Call | str, bool, Tensor | None], Tensor | None]
Reading = tuple[Call, bool]  # a call as it was read, and is the order of its heads sure?

FUSED, PACKED = F.scaled_dot_product_attention, F.multi_head_attention_forward
# The second function with a `has_torch_function` that says no. So it does not hand itself to us as one call: what it
# calls comes here, one by one.
SPELLED_OUT = types.FunctionType(
    PACKED.__code__,
    {**vars(F), "has_torch_function": lambda tensors: False},
    argdefs=PACKED.__defaults__,
)
SIGNATURE = inspect.signature(PACKED)  # gives its arguments their names, however they are passed
SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
# `a @ b` calls Tensor.matmul.
PRODUCTS = {torch.matmul, Tensor.matmul, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm, torch.einsum}
# to the first argument: the product of the second with the third
PRODUCT_ADDED = {torch.baddbmm, Tensor.baddbmm}
# Functions are told by their names, which those of torch and of Tensor share; `x.T` and `x.mT` are called `__get__`.
# another order of axes
TRANSPOSES = {"transpose", "permute", "__get__", "movedim", "swapaxes", "t"}
# After these a row of weights still sums to 1, though it may lie along another axis.
KEEPS_ROWS = {
    "to", "type", "type_as", "float", "half", "double", "bfloat16", "contiguous", "clone", "detach", "dropout", "view",
    "reshape", "flatten", "unflatten", "transpose", "permute", "squeeze", "unsqueeze", "expand", "__get__",
}  # fmt: skip
JOINS = {"cat", "concat", "concatenate", "stack", "hstack"}  # these are given a list of tensors
# What these give is no form of their input any more: its trail ends.
MAKES_NEW = {
    "linear",
    "addmm",
    "layer_norm",
    "rms_norm",
    "group_norm",
    "batch_norm",
    "conv1d",
    "conv2d",
    "embedding",
}
# The note of a call of a module that does not make its queries and keys itself.
HANDED = "it is handed queries and keys, perhaps of two texts: there are no distances"
# `@` and `@=` in bytecode, each as the byte of its operation and the byte of its argument. To let `dis` take every line
# of every class apart takes far longer than to look for these two pairs.
PRODUCT_LINES = dis.get_instructions(compile("a @ b; a @= b", "", "exec"))
MATMULS = {(step.opcode, step.arg) for step in PRODUCT_LINES if step.opname == "BINARY_OP"}
LIBRARIES = {"torch", "numpy", "einops", "transformers"}  # whose functions are no part of a class
# Arguments that hold another sequence, of which keys are made.
CONTEXT = {
    "key",
    "k",
    "context",
    "memory",
    "encoder_hidden_states",
    "key_value_states",
    "enc_output",
    "encoder_output",
}


def attends(module: nn.Module) -> bool:
    """Does the code of this module's class read as one of the three? What it does is found out by running it.

    Its softmax may be a module, nn.Softmax, which the code of the class does not name.
    """
    fused, product, softmax = _names_in(type(module))  # type: ignore[arg-type]
    softmax = softmax or any(isinstance(child, nn.Softmax) for child in module.children())
    return fused or (product and softmax)


@cache
def _names_in(kind: type[nn.Module]) -> tuple[bool, bool, bool]:
    """Does the code of a class name a fused attention, a product, a softmax?

    That is its `forward` and its `__init__`, and the functions and methods that these call.
    """
    names: set[str] = set()
    read = set()
    waiting: list[Any] = []  # functions, and other things, None too, which the loop passes by
    for base in kind.__mro__:
        waiting += [vars(base).get("forward"), vars(base).get("__init__")]
    # torch's own attentions (nn.TransformerEncoderLayer) are read like a user's, as are models of transformers. Other
    # functions of libraries are not: what they call is no part of the class.
    homes = {base.__module__ for base in kind.__mro__ if base.__module__.startswith("torch.nn")}
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if not isinstance(function, types.FunctionType) or function in read:
            continue
        read.add(function)
        # None of one that `exec` made, as torch.fx makes `forward`
        home = function.__module__ or ""
        package = home.partition(".")[0]
        of_library = (
            package in LIBRARIES
            and home not in homes
            and not home.startswith("transformers.models")
        )
        if of_library or package in sys.stdlib_module_names:
            continue
        codes = [function.__code__]
        for code in codes:  # the list grows in the loop, by functions inside of functions
            codes += [
                constant for constant in code.co_consts if isinstance(constant, types.CodeType)
            ]
            names.update(code.co_names)
            # Bytecode is pairs of bytes, operation and argument: 0, 2, 4, ... are operations, 1, 3, 5, ... arguments.
            # What CPython keeps room for behind an instruction takes whole pairs, too, so none is read askew.
            operations, arguments = code.co_code[::2], code.co_code[1::2]
            if MATMULS & set(zip(operations, arguments, strict=True)):
                names.add("@")
            # What a name stands for: a global of the function's file, a method, or a function of a module named here.
            named = [function.__globals__.get(name) for name in code.co_names]
            places = [kind, *(place for place in named if isinstance(place, types.ModuleType))]
            waiting += named
            # Any name that the code mentions may be that of a method or of a module's function: all are tried.
            waiting += [getattr(place, name, None) for place in places for name in code.co_names]
    fused = not names.isdisjoint({"scaled_dot_product_attention", "multi_head_attention_forward"})
    product = "@" in names or any(
        "matmul" in name or name in ("bmm", "mm", "einsum", "baddbmm") for name in names
    )
    return fused, product, any(name.lower().endswith("softmax") for name in names)


# What tensors come from


class Trail(NamedTuple):
    """Where a tensor comes from: a product of two tensors, and perhaps a softmax of that."""

    weights: bool = False  # is it weights? Else it is scores
    # of weights: the one of the softmax, counted from the end; None where it was lost
    axis: int | None = None
    whole: bool = True  # of weights: is every row still what a softmax gave?
    undropped: Tensor | None = None  # the same tensor without dropout, where there was some
    joined: bool = False  # was it put together of several products, as the scores of chunks are?


class Product(NamedTuple):
    """Weights times values, with the last axes as named here; the axes before them are equal in all three, or 1."""

    weights: Tensor  # (...,T,S)
    v: Tensor  # (...,S,E)
    out: Tensor  # (...,T,E)
    axis: int  # of the keys, in the weights as the model has them
    back: Callable[[Tensor], Tensor]  # a tensor like `out` in the form in which the model has it


def _product(
    func: Any, args: Sequence[Any], operands: Sequence[Tensor], result: Tensor, side: int
) -> Product | None:
    """The product of which operand number `side` is the weights; None where it has another form than attention.

    func  the function, `args` and `operands` its arguments and the two tensors among them, `result` what it gave
    """
    weights, v = operands[side], operands[1 - side]
    if func is torch.einsum:
        return _einsum(args[0], operands, result, side)
    if v.ndim < 2 or weights.ndim < 2:
        return None
    if side == 0:
        return Product(weights, v, result, -1, lambda out: out)
    # v times weights, so the transpose
    return Product(weights.mT, v.mT, result.mT, -2, lambda out: out.mT)


def _einsum(equation: str, operands: Sequence[Tensor], result: Tensor, side: int) -> Product | None:
    """The product of an equation such as "bhts,bshe->bthe", told by which letters its three parts share."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    parts = inputs.split(",")
    if not arrow or len(parts) != 2:
        return None
    free = "".join(letter for letter in ascii_uppercase if letter not in equation)

    def spelled_out(letters: str, x: Tensor) -> str:
        """With letters for "...", the same in all tensors: its axes broadcast, so they are counted from the last.

        With free letters A, B, ...: "...ts" is "BAts" of a tensor of 4 axes, and "Ats" of one of 3.
        """
        n_hidden = x.ndim - len(letters.replace("...", ""))  # axes that "..." stands for
        return letters.replace("...", free[:n_hidden][::-1])

    v = operands[1 - side]
    weights, values = spelled_out(parts[side], operands[side]), spelled_out(parts[1 - side], v)
    out = spelled_out(out, result)
    in_weights, in_values, in_out = set(weights), set(values), set(out)
    # Keys are summed over; queries stand in the weights and in the output, features in the values and in the output.
    keys = (in_weights & in_values) - in_out
    queries, features = (in_weights & in_out) - in_values, (in_values & in_out) - in_weights
    # The second: an axis that the weights alone have, over which they would be summed before they meet the values.
    if len(keys) != 1 or in_weights - in_out - in_values:
        return None
    key = keys.pop()
    # heads that share values are such axes, too; queries are the one that is as long as the keys
    if len(queries) > 1:
        sizes = dict(zip(weights, operands[side].shape, strict=True))
        queries = {letter for letter in queries if sizes[letter] == sizes[key]}
    if not len(queries) == len(features) == 1:
        return None
    query, feature = queries.pop(), features.pop()
    lead = weights.replace(key, "").replace(query, "")  # documents, heads, ...
    ours = f"{lead}{query}{feature}"
    # v times a single 1 of as many axes as `lead`: so v gets those that it lacks, of length 1. An axis that v alone has
    # is summed up.
    single = v.new_ones([1] * len(lead))
    return Product(
        torch.einsum(f"{weights}->{lead}{query}{key}", operands[side]),
        torch.einsum(f"{values},{lead}->{lead}{key}{feature}", v, single),
        torch.einsum(f"{out}->{ours}", result),
        weights.index(key) - len(weights),
        lambda gave: torch.einsum(f"{ours}->{out}", gave),
    )


# The blocks of a thread


class UnreadError(Exception):
    """What a module does is no attention that is read; the message says why."""


@dataclass
class Running:
    """An attention that runs."""

    module: nn.Module
    # who takes its calls; None where it is a part of an attention, which hands its calls on itself
    take: Take | None
    n_heads: int  # as the module says; 0 where it does not
    cross: bool = False  # is it given another sequence for its keys?
    # what it is given beside the sequence of its queries, and looks like one
    others: Sequence[Tensor] = ()
    # lengths, of which one is the number of its documents: see `Block.enter`
    sizes: tuple[int, ...] = ()
    gets_heads: bool = False  # is it handed queries and keys that another module has made?
    # the arguments of PACKED, while it runs
    packed: Mapping[str, Any] = field(default_factory=dict)
    made: list[Tensor] = field(default_factory=list)  # what linear layers have given in it so far
    refused: bool = False  # was a call of it refused? Then its others are not handed on


class Block:
    """The attentions that one block of the hook listens to, and which of its modules runs."""

    def __init__(self, takes: Mapping[nn.Module, tuple[Take, int]]) -> None:
        self.takes = takes  # module -> who takes its calls, and how many heads it says it has, or 0
        self.running: list[Running] = []  # the outermost first
        self.ran: set[nn.Module] = set()

    # A forward pre-hook of each attention: it is about to run.
    def enter(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        running = Running(module, *self.takes.get(module, (None, 0)))
        self.running.append(running)
        self.ran.add(module)
        names = inspect.signature(module.forward).parameters
        inputs = dict(zip(names, args, strict=False)) | keywords
        tensors = {
            name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()
        }
        if not tensors:
            return
        # by custom the sequence of the queries, or the queries
        first = next(iter(tensors.values()))
        others = {name: x for name, x in tensors.items() if x is not first}
        running.cross = not CONTEXT.isdisjoint(others)
        # An argument called `key` alone tells it: DETR passes x + positions as query and key, and x as value, which is
        # another tensor and no other sequence.
        if "key" not in inputs:
            running.others = [x for x in others.values() if x.ndim == first.ndim == 3]
        # (B,T,C) or (T,B,C), or one document (T,C); with more axes they are heads, or height and width of an image.
        running.sizes = (1, *first.shape[:2]) if first.ndim < 4 else tuple(first.shape[:1])
        running.gets_heads = first.ndim > 3 and not {"k", "key"}.isdisjoint(others)

    # A forward hook of each attention: it has run. What began inside of it and did not come here, ends with it.
    def leave(self, module: nn.Module, *more: Any) -> None:
        while self.running and self.running.pop().module is not module:
            pass


class Listener(TorchFunctionMode):
    """What every call of torch in a thread passes while a block is open: `__torch_function__` runs in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[Block] = []
        self.quiet = False  # while those who listen compute
        self.packed: Mapping[str, Any] = {}  # the arguments of PACKED, while it runs
        self.trails: Any = WeakIdKeyDictionary()  # tensor -> its Trail

    @property
    def running(self) -> list[Running]:
        """The innermost module that runs of each block in which one does."""
        return [block.running[-1] for block in self.blocks if block.running]

    def __torch_function__(
        self, func: Any, kinds: Any, args: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        if self.quiet or not any(block.running for block in self.blocks):
            return func(*args, **keywords)
        if func is PACKED:
            self.packed = SIGNATURE.bind(*args, **keywords).arguments
            try:
                # torch turns a mode off while it handles a call, and what this one calls is to come here
                with self:
                    return SPELLED_OUT(*args, **keywords)
            finally:
                self.packed = {}
        undropped = None  # weights that a dropout is about to change
        if func is F.dropout and args and self._is_weights(args[0]):
            undropped = _before_dropout(self._undropped(args[0]), *args[1:], **keywords)
        result = func(*args, **keywords)
        if func is FUSED:
            return self._hand(lambda running: _fused(running, result, *args, **keywords), result)
        inputs = [*args, *keywords.values()]
        if func in PRODUCTS or func in PRODUCT_ADDED:
            return self._multiplied(func, inputs, result)
        if func is F.linear:
            for running in self.running:
                # Who multiplies another sequence makes keys of it.
                running.cross |= any(x is y for y in inputs for x in running.others)
                running.made.append(result)
        # chunk and split give several
        for part in result if isinstance(result, tuple | list) else [result]:
            if isinstance(part, Tensor) and part.is_floating_point():
                self._follow(func, args, keywords, part, undropped)
        return result

    def _trail(self, x: Any) -> Trail | None:
        return self.trails.get(x) if isinstance(x, Tensor) else None

    def _is_weights(self, x: Any) -> bool:
        trail = self._trail(x)
        return trail is not None and trail.weights

    def _undropped(self, x: Any) -> Any:
        """Weights without dropout; anything else as it is."""
        trail = self._trail(x)
        return x if trail is None or trail.undropped is None else trail.undropped

    def _follow(
        self, func: Any, args: Any, keywords: Any, result: Tensor, undropped: Tensor | None
    ) -> None:
        """What is made of a tensor with a trail has one, too."""
        name = getattr(func, "__name__", "")
        operands = [*args, *keywords.values()]
        if name in JOINS:
            operands = args[0] if args else keywords["tensors"]
        # the first operand that has a trail
        source = next((x for x in operands if self._trail(x) is not None), None)
        trail = self._trail(source)
        if source is None or trail is None or name in MAKES_NEW:
            return
        if func in SOFTMAX:
            # nn.Softmax may leave it None: then it is unknown
            axis = keywords.get("dim", *args[1:2])
            if axis is not None and axis >= 0:
                axis -= result.ndim  # from the end, where views leave it as it is
            trail = Trail(True, axis, joined=trail.joined)
        elif name in JOINS:
            # One more column of scores, of a sink, leaves them those of one product.
            is_sink = len(operands) == 2 and source.shape[-1] + 1 == result.shape[-1]
            trail = trail._replace(joined=trail.joined or not is_sink)
        elif undropped is not None:  # this call is the dropout itself
            trail = trail._replace(undropped=undropped)
        elif trail.weights:
            # After a dropout there are two forms of the weights. What is done to the dropped one (a view, a cast) is
            # done to the other one, too, so that both keep the same shape.
            if trail.undropped is not None:
                again = func(*map(self._undropped, args), **keywords)
                undropped = again if isinstance(again, Tensor) else None
            # Heads may be folded into documents, or taken out: the last axis is the last one all the same.
            last_stays = trail.axis == -1 and source.shape[-1:] == result.shape[-1:]
            same_axes = source.shape == result.shape or last_stays
            axis = trail.axis if same_axes and name not in TRANSPOSES else None
            # Once a function came that may change the sum of a row (a product with a gate), `whole` stays False.
            trail = Trail(True, axis, trail.whole and name in KEEPS_ROWS, undropped, trail.joined)
        self.trails[result] = trail

    def _multiplied(self, func: Any, args: Any, result: Tensor) -> Tensor:
        """A product: of scores, or of weights with values."""
        # an einsum may have them in a list
        operands = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        if func in PRODUCT_ADDED:
            del operands[0]  # what the product is added to
        if len(operands) != 2:
            return result
        trails = [self._trail(x) for x in operands]
        # 0: the left operand, 1: the right
        sides = [side for side, x in enumerate(operands) if self._is_weights(x)]
        has_parameter = any(isinstance(x, nn.Parameter) for x in operands)
        # Two tensors that were computed make scores; and scores times a matrix are still some.
        if not sides and (not has_parameter or trails != [None, None]):
            self.trails[result] = Trail()
        if not sides or has_parameter:  # with a parameter, weights of a codebook
            return result
        if len(sides) == 2:
            why = "multiplies the weights of one softmax with those of another, as attention through landmarks does"
            return self._refuse(why, result)
        side = sides[0]
        trail = trails[side]
        assert trail is not None
        if trail.joined:
            why = "joins the scores of several products before its softmax: its map lies in pieces, as of chunks"
            return self._refuse(why, result)
        product = _product(func, args, operands, result, side)
        if product is None:
            return result
        # Weights by distance, shifted after the softmax, times embeddings of distances (Shaw et al. 2018): no attention
        # to tokens. These are told by this, that all documents and heads share them.
        same_values = all(n == 1 for n in product.v.shape[:-2])
        if same_values and any(n > 1 for n in product.out.shape[:-2]) and not trail.whole:
            return result
        if trail.axis not in (None, product.axis):
            why = "its softmax is over another axis than the one along which it is multiplied with values"
            return self._refuse(why, result)
        shown = product  # what a watcher sees: the weights before dropout
        if trail.undropped is not None:
            # `or` is for the type checker: the axes are those of `product`, which is there.
            shown = _product(func, args, [*map(self._undropped, operands)], result, side) or product
        return self._hand(
            lambda running: _mapped(running, product, shown.weights, trail.whole), result, product
        )

    # Hand on, in the place of a call, why it is not read.
    def _refuse(self, why: str, result: Tensor) -> Tensor:
        def read(running: Running) -> Reading:
            raise UnreadError(why)

        return self._hand(read, result)

    def _hand(
        self, read: Callable[[Running], Reading], result: Tensor, product: Product | None = None
    ) -> Tensor:
        """Hand a call to every block whose attention runs, and give what the model goes on with.

        read     makes the call of one of them, or raises UnreadError
        result   what torch has given
        product  how the heads lie in it; None: as they are
        """
        gave: Tensor | None = None  # what the blocks so far have put in the place of the heads
        for running in self.running:
            if running.take is None or running.refused:
                continue
            running.packed = self.packed
            with self.silence():
                try:
                    call, sure = read(running)
                except UnreadError as why:
                    running.refused = True
                    running.take(str(why), True, None)
                    continue
                if gave is not None:
                    call = call._replace(out=gave)
                changed = running.take(call, sure, self.packed.get("out_proj_weight"))
            gave = gave if changed is None else changed
        if gave is None:
            return result
        with self.silence():
            if product is None:
                return gave.reshape(result.shape).to(result.dtype)
            # A plain product is contiguous, so that the model may call `.view` on it; what `back` turned is not.
            return product.back(gave.reshape(product.out.shape)).to(result.dtype).contiguous()

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Inside this block nobody listens: those who do compute."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before


def _before_dropout(
    weights: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | None:
    """Weights as they are before such a call of `F.dropout`, whose arguments these are; None where it drops nothing."""
    if not training or not p:
        return None
    return weights.clone() if inplace else weights


class Thread(local):
    """What each thread has of its own."""

    def __init__(self) -> None:
        self.listener = Listener()


_thread = Thread()


@contextmanager
def opened(block: Block) -> Iterator[None]:
    """Calls of this thread go to the block. One listener serves all blocks of a thread: they may end in any order."""
    listener = _thread.listener
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


def unheard() -> AbstractContextManager[None]:
    """What is computed in this block is no attention of a model."""
    return _thread.listener.silence()


# Calls


def _heads(x: Tensor, n_heads: int) -> Tensor:
    """(B,H,T,X) of a tensor (T,X), (H,T,X), (B*H,T,X), or with more axes before those of the heads."""
    if x.ndim == 2:
        return x[None, None]
    if x.ndim == 3:
        return x.reshape(-1, n_heads, *x.shape[1:])
    if x.ndim == 5 and n_heads == x.shape[1] * x.shape[2]:  # by the key/value head that they read
        return x.flatten(1, 2)
    return x.flatten(0, -4)  # windows of a document are documents


def _n_heads(running: Running, shape: Sequence[int]) -> tuple[int, bool]:
    """How many heads a call of weights of this shape has, and is their order sure? Raises UnreadError where unknown."""
    name, n_stated = type(running.module).__name__, running.n_heads
    # (B,G,r,T,S): query heads by the key/value head they read
    if len(shape) == 5 and n_stated == shape[1] * shape[2]:
        return n_stated, True
    if len(shape) > 4:
        raise UnreadError(
            f"{name} makes maps of {tuple(shape)}: which axis has the heads cannot be told; put windows or chunks "
            f"among the documents"
        )
    if len(shape) != 3:  # (T,S) is one head; (B,H,T,S)
        return (1 if len(shape) == 2 else shape[-3]), True
    N = shape[0]  # documents, heads, or both in one axis
    if running.packed:  # torch's own: (B*H,T,S), the heads of a document side by side
        return running.packed["num_heads"], True
    # What is left is (N,T,S) of a module that is not torch's own.
    if n_stated <= 1:  # (B,T,S), if one of the axes of its input is as long
        if N in running.sizes:
            return 1, True
        raise UnreadError(
            f"{name} makes maps of {tuple(shape)} and does not say how many heads are in the first axis; set the "
            f"attribute n_heads of the module"
        )
    # An N that is no size does not count documents alone: heads are in it, and windows perhaps, as in (B*W*H,T,S).
    is_documents_times_heads = any(size * n_stated == N for size in running.sizes)
    if N % n_stated == 0 and (is_documents_times_heads or N not in running.sizes):
        # the heads of a document may lie side by side, or the documents of a head
        return n_stated, False
    raise UnreadError(
        f"{name} says that it has {n_stated} heads, and makes maps of {tuple(shape)}: their heads cannot be told apart"
    )


def _mapped(running: Running, product: Product, weights: Tensor, whole: bool) -> Reading:
    """A softmax over keys times values. Raises UnreadError where that is no attention, or is not what the model did.

    It is tried on a few rows: are they distributions over keys, and do they times the values give the output?

    weights  before dropout, which are shown; those of the product are what the model multiplied
    whole    is each row still what a softmax gave?
    """
    # all axes but (T,E): documents, heads, windows, ...
    out, lead = product.out, product.out.shape[:-2]
    H, sure = _n_heads(running, (*lead, *weights.shape[-2:]))
    p, used = (x.detach().expand(*lead, *x.shape[-2:]) for x in (weights, product.weights))
    v = product.v[(None,) * (out.ndim - product.v.ndim)]  # axes of length 1 in front
    # With documents and heads apart, values that all heads share stay one.
    v = v.expand(lead[0], -1, -1, -1) if len(lead) == 2 else v.expand(*lead, -1, -1)
    p, used, v, out = (_heads(x, H) for x in (p, used, v, out))
    B, _, T, S = p.shape
    sure = sure or any(_side_by_side(v, made) for made in running.made)
    rows = probed_rows(T)
    wide = torch.promote_types(out.dtype, torch.float32)
    probed = p[:, :, rows].to(wide)
    # By rounding alone, weights of float32 miss a sum of 1 by less than 1e-3, those of 8 or 11 bits by some roundings,
    # for which 8 are allowed.
    sums, close = probed.sum(-1), max(1e-3, 8 * torch.finfo(weights.dtype).eps)
    # A row that may attend nothing sums to 0, or is NaN; weights changed after the softmax may sum to less than 1.
    as_weights = ((sums - 1).abs() <= close) | (sums.abs() <= close) | ~sums.isfinite()
    if not whole:
        as_weights |= sums <= 1 + close
    as_weights &= ~(probed < -close).any(-1)
    name = type(running.module).__name__
    if not as_weights.all():
        raise UnreadError(
            f"what {name} multiplies with values is no distribution over keys: a row of {S} weights sums to "
            f"{float(sums[~as_weights][0]):.5g}, and the least weight is {float(probed.min()):.5g}"
        )
    values = v.detach()
    difference = (
        used[:, :, rows].to(wide) @ values.to(wide) - out.detach()[:, :, rows].to(wide)
    ).abs()
    most = float(difference.nan_to_num().max()) if difference.numel() else 0.0
    # A wrong reading is off by about the size of the values. Sums in another order are off by some roundings of it; 64
    # of them, a round number, lie far from either. A rounding counts as 1e-6 at least, in float32 and float64, too.
    rounding = max(torch.finfo(out.dtype).eps, 1e-6)
    if most > 64 * rounding * max(1.0, float(values.abs().max())):
        raise UnreadError(
            f"in {name} weights times values differ from what it goes on with by {most:.3g}"
        )
    # not known; the weights stand for them
    q, k = p.new_empty(B, H, T, 0), p.new_empty(B, v.shape[1], S, 0)
    sees_ahead = bool(p.triu(1).any()) if running.gets_heads else False
    return _call(running, q, k, v, Options(), out, not sees_ahead)._replace(weights=p), sure


def _side_by_side(v: Tensor, made: Tensor) -> bool:
    """Are values (B,H,S,E) the heads, side by side, of what a linear layer gave, documents first or (S,B,H*E)?"""
    if made.numel() != v.numel() or made.ndim != 3:
        return False
    B, H, S, E = v.shape
    layouts = (made, made.transpose(0, 1))
    return any(torch.equal(v, rows.reshape(B, S, H, E).transpose(1, 2)) for rows in layouts)


def _fused(
    running: Running,
    result: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **more: Any,
) -> Reading:
    """A call of the fused function, by its own arguments. Raises UnreadError where its axes cannot be told.

    more  arguments that change no number here, as enable_gqa, which lets q have more heads than k
    """
    if query.is_nested or key.is_nested:
        raise UnreadError(
            f"{type(running.module).__name__} gives its attention nested tensors; pad them"
        )
    lead, T, S = query.shape[:-2], query.shape[-2], key.shape[-2]
    H, sure = _n_heads(running, (*lead, T, S))
    q, k, v, mask = query, key, value, attn_mask
    if len(lead) != 2:  # documents and heads are not two axes
        q, k, v = (_heads(x.expand(*lead, *x.shape[-2:]), H) for x in (q, k, v))
        if mask is not None and mask.ndim > 2:
            mask = _heads(mask.expand(*lead, T, S), H)
    out = _heads(result, H)
    q, k, v = for_documents(len(out), q, k, v)
    options = Options(mask=joined_mask(is_causal, mask), scale=scale, dropout=dropout_p)
    call = _call(running, q, k, v, options, out, is_causal)
    if not dropout_p:  # what it has dropped is not known
        check(call, eager=False)
    return call, sure


def _call(
    running: Running, q: Tensor, k: Tensor, v: Tensor, options: Options, out: Tensor, causal: bool
) -> Call:
    """A call, and whether it is cross attention: of queries and keys that are handed in it is not known whose they are.

    Where as many queries as keys look at none behind themselves (`causal`), they are taken for one text's. A single
    query and key cannot look behind themselves, so these tell nothing.
    """
    T, S = q.shape[2], k.shape[2]
    cross = running.cross and not (running.gets_heads and T == S > 1 and causal)
    return Call(
        running.module,
        q,
        k,
        v,
        options,
        out,
        cross,
        note=HANDED if running.gets_heads and cross else "",
    )
