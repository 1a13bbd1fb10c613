"""The contract: an attention takes q, k, v, or one text, perhaps a mask, and gives outputs; how code is brought to it.

An adapter is a way to build and to call a stranger's code: which parameter is which, in which order the axes stand,
what stands in for tables and flags. `adapters` yields those that names and text leave open, the likeliest first; each
is tried. To add a layout is a line of LAYOUTS, to know a name a line of `names.toml`.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import itertools
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from headwise.checker.bugs import (
    UNKNOWN,
    AskedError,
    Finding,
    Settings,
    UncheckedError,
    Verdict,
    bug_named,
    speaker,
)
from headwise.checker.form import Inputs
from headwise.checker.lent import stand_in, unchanged
from headwise.checker.source import CALLS, DATA, MASK, ROTARY, Source, methods_of
from headwise.files import read_toml

# No two of these sizes are equal, so that no axis can be taken for another.
BATCH, TOKENS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 5, 7, 6, 2, 8, 16
WIDTH = HEADS * HEAD_DIM
WINDOW = 3  # keys that a query sees, or as many before it
# Real tokens of the documents: of one all, as in a batch that was padded to its longest; of the others fewer.
LENGTHS = np.array([7, 4, 6, 3, 5])
# What is passed for a parameter, by what its name means in names.toml. Dropout is high, so that it shows.
VALUES: dict[str, Any] = {
    "KV_HEADS": KV_HEADS,
    "HEADS": HEADS,
    "HEAD_DIM": HEAD_DIM,
    "CONTEXT": CONTEXT,
    "TOKENS": TOKENS,
    "WIDTH": WIDTH,
    "BATCH": BATCH,
    "DROPOUT": 0.5,
    "ROOT": HEAD_DIM**0.5,
    "SCALE": HEAD_DIM**-0.5,
    "WINDOW": WINDOW,
    "none": None,
    "rng": np.random.default_rng(0),
}
NAMES = read_toml("checker/names.toml")
CALL = {name: re.compile(pattern, re.I) for name, pattern in NAMES["call"].items()}
COUNTS = ("HEADS", "KV_HEADS")  # what names mean that are no text
# a tensor of the file's own has one of these
COMPUTES = {"__matmul__", "__mul__", "matmul", "dot"}
Tables = Callable[[int, int], dict[str, Any]]  # from a position on, so many tokens
# stands for "nothing is known": None is a value that may be passed
UNFILLED: Any = object()
STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Options:
    """What the caller of a check says; see `headwise.check`.

    seconds  of the processor, for the search for bugs, and as many for the one change that mends the code
    """

    causal: bool | None = None
    args: Settings = field(default_factory=dict)
    mapping: Mapping[str, str] = field(default_factory=dict)
    lang: str = "en"
    seconds: float = 10.0


@dataclass
class Target:
    """One check: the object, its name, its kind (layer, function), its source, the names of its file."""

    thing: Any
    name: str
    kind: str
    source: Source
    options: Options
    # what the names of its file stand for
    namespace: dict[str, Any] = field(default_factory=dict)
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    # what stood in for parts that a file does not have
    lent: list[str] = field(default_factory=list)
    guesses: bool = False  # was it built with an argument whose value is a guess?
    # does the identity stand in for a function that may scale, mask or project?
    lacks: bool = False
    unnamed: str = ""  # a parameter of its call of which nothing is known
    # what it was built with, where not the usual ones
    sizes: Settings = field(default_factory=dict)

    def say(self, key: str, /, **facts: Any) -> str:
        return speaker(self.options.lang)(key, **facts)

    def did(self, key: str) -> None:
        self.checked.append(self.say(key))

    def left_out(self, key: str, /, **facts: Any) -> None:
        self.not_checked.append(self.say(key, **facts))

    @property
    def number(self) -> type | None:
        """The file's own class of numbers (`Value`) or of matrices (`Matrix`); None where arrays or lists will do."""
        for name, is_used in (("Value", r"\.data\b|\.exp\(\)"), ("Matrix", "")):
            value = self.namespace.get(name)
            if isinstance(value, type) and self.scope.says(is_used):
                return value
        return None

    @cached_property
    def scope(self) -> Source:
        """The text of the object and of what it uses."""
        source = self.source
        nodes = [source.definitions[name] for name in source.reach(self.name)]
        lines = [*source.lines]
        numbers: list[int] = []
        for node in nodes:
            first = node.lineno - 1
            while first and lines[first - 1].startswith("#"):  # it belongs to it
                first -= 1
            numbers += range(first, node.end_lineno or 0)
        whole = "\n".join(lines[n] for n in numbers)
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        for kind in classes * (self.kind == "layer"):
            for method in methods_of(kind):
                # what nothing calls, such as a helper for other callers, tells nothing
                is_called = (
                    re.search(rf"\.{method.name}\b", whole) or method.name in CALLS
                )
                if not is_called and not method.name.startswith("__"):
                    first = min(
                        [method.lineno, *(d.lineno for d in method.decorator_list)]
                    )
                    end = method.end_lineno or first
                    lines[first - 1 : end] = [""] * (end - first + 1)
                    lines[first - 1] = " " * method.col_offset + "pass"
        return Source("\n".join(lines[n] for n in numbers)) if nodes else source

    def finding(self, bug: str, evidence: str) -> Finding:
        """A bug of the catalogue with its likely line; one that it does not have stands nowhere."""
        if bug == UNKNOWN:
            return Finding(bug, None, "", evidence, self.say("unknown_fix"))
        entry = bug_named(bug)
        line, quote = self.source.line_of(
            entry.lines, self.source.reach(self.name)
        ) or (None, "")
        return Finding(bug, line, quote, evidence, entry.text("fix", self.options.lang))

    def verdict(
        self, right: bool | None, findings: tuple[Finding, ...] = (), reason: str = ""
    ) -> Verdict:
        left_out = [reason, *self.not_checked] if reason else self.not_checked
        checked = tuple(self.checked)
        lang = self.options.lang
        return Verdict(
            self.name, self.kind, right, findings, checked, tuple(left_out), lang
        )


# Building: arguments by what their names mean.


def value_of(name: str, sizes: Settings, default: Any = UNFILLED) -> Any:
    """What to pass for a parameter of that name; the default where the name says nothing.

    sizes  come first: values by the names of parameters, or by what names mean, as "WIDTH"
    """
    meaning = meaning_of(name)
    if name in sizes or meaning is None:
        return sizes.get(name, default)
    # A meaning that has no entry in VALUES is the value itself: True, 1e-6, "cpu".
    return sizes.get(meaning, VALUES.get(meaning, meaning))


@functools.cache
def meaning_of(name: str) -> Any:
    """The `value` that names.toml has for such a name: "HEADS" for `num_heads`. None where the name says nothing."""
    plain = name.lower().strip("_")
    if CALL["causal"].fullmatch(plain):
        return True
    for entry in NAMES["arguments"]:
        if re.fullmatch("|".join(entry["names"]), plain):
            return entry["value"]
    # `vit_n_heads` is the `n_heads` of one of several parts
    _, _, rest = plain.partition("_")
    return meaning_of(rest) if len(rest) > 4 else None


def is_config(name: str) -> bool:
    """Is it that of a config among the arguments of a call, where `c` is most often a context?"""
    return len(name) > 1 and CALL["config"].fullmatch(name) is not None


class Config:
    """A config object of any course: attributes and items, by what their names mean, else as the defaults say.

    defaults  an object with the learner's own fields, or None
    theirs    do the defaults come before everything else?
    code      in which what follows a name, as in `config.MODEL.n_heads`, tells that it is a section
    """

    def __init__(
        self,
        sizes: Settings,
        defaults: Any = None,
        theirs: bool = False,
        code: str = "",
    ) -> None:
        if isinstance(defaults, dict):
            defaults = types.SimpleNamespace(**{str(k): defaults[k] for k in defaults})
        self._sizes = sizes
        self._defaults = defaults
        self._theirs = theirs
        # `self.dropout.p` is of a module
        section = r"(?:(?<!\bself)\.|\[')(\w+)(?=\.[a-z]|(?:'\])?\[')"
        self._sections = set(re.findall(section, code))

    def get(self, name: str, default: Any = None) -> Any:
        kept = default
        with contextlib.suppress(KeyError):  # of a dictionary with attributes
            kept = getattr(self._defaults, name, default)
        if isinstance(kept, dict):  # a section
            return Config(self._sizes, kept, self._theirs)
        is_choice = isinstance(kept, bool | str) and name not in self._sizes
        if kept is not default and (self._theirs or is_choice):
            return kept
        return value_of(name, self._sizes, kept)

    def __getattr__(self, name: str) -> Any:
        # Python asks for such names itself, as for `__deepcopy__`
        if name.startswith("__"):
            raise AttributeError(name)
        value = self.get(name, UNFILLED)
        is_section = name.lower() in self._sections or is_config(name)
        if is_section and not isinstance(value, Config):
            return self
        if value is UNFILLED:
            raise AskedError("asks_config", name=name)
        return value

    __getitem__ = __getattr__

    def __contains__(self, name: str) -> bool:
        return True  # what is asked for is there, or an error says that it is not


def build(target: Target, sizes: Settings, theirs: bool = False) -> Any:
    """An instance of a learner's class, its arguments filled in by name. `sizes` come before what a name means.

    theirs  the learner's defaults stay, where there are any
    """
    # what stands in none of the branches below is left at the learner's default
    arguments: dict[str, Any] = {}
    for name, parameter in arguments_of(target.thing).items():
        plain = name.lower()
        default = parameter.default
        # some write `n_heads=int`
        required = default is parameter.empty or default in (int, float, bool)
        is_record = CALL["config"].fullmatch(plain) or (
            (required or isinstance(default, type))
            and meaning_of(name) is None
            and target.scope.says(rf"\b{plain}(\.[a-z_]\w*\b(?!\()|\[')")
        )
        is_module = required and "Module" in str(parameter.annotation)
        if is_module and re.fullmatch(NAMES["call"]["projection"], plain):
            target.guesses = True  # its sizes are a guess
            arguments[name] = stand_in("Linear")(WIDTH, WIDTH)
        elif is_record and name not in sizes:
            defaults = _defaults(parameter, target)
            arguments[name] = Config(sizes, defaults, theirs, target.scope.code)
        elif re.fullmatch("(use_?)?scaled?", plain) and default is False:
            arguments[name] = True  # a switch
        elif required and (part := _part(plain, parameter, target)):
            width = {"WIDTH": HEAD_DIM} if ROTARY.search(part.__name__) else {}
            owner = replace(target, thing=part, name=part.__name__)
            arguments[name] = build(owner, {**width, **sizes}, theirs)
        elif required and name not in sizes and _is_called(plain, target):
            arguments[name] = unchanged
            target.lent.append(target.say("unchanged", name=name))
            target.lacks |= not re.search(
                r"rope|rotar|rotat|drop|^pos\w*(emb|enc|bias)", plain
            )
        elif required or name in sizes or _is_ours(plain, default, theirs):
            value = value_of(name, sizes)
            unpacked = rf"(?m)^ *(.+,.+) = {plain}$"
            if value is UNFILLED and (told := re.search(unpacked, target.scope.code)):
                names = re.findall(r"\w+(?=,|$)", told[1])
                value = tuple(value_of(each, sizes) for each in names)
            if value is UNFILLED:
                kind = _annotated(parameter, target.namespace)
                members = getattr(kind, "__members__", {})  # of an enumeration
                value = next(iter(members.values()), UNFILLED)
                target.guesses = True
            # a window may be a square of tokens
            target.guesses |= meaning_of(name) == "WINDOW"
            if value is not UNFILLED:
                arguments[name] = value
            elif required:
                raise UncheckedError("asks_parameter", name=name, call=target.name)
    return target.thing(**arguments)


def _is_ours(name: str, default: Any, theirs: bool) -> bool:
    """Is an optional argument ours to set? Sizes and biases are, so that nothing hides; other choices stay theirs.

    At their defaults biases are often off and dropout 0, and None stands for as many key/value heads as heads.
    """
    if theirs:  # a single head would hide how heads are cut
        return default == 1 and meaning_of(name) == "HEADS"
    if re.search(
        "bias(?!_mask)|drop|causal|^p$|soft_?cap|logit_?cap|^mask(ed)?$", name
    ):
        return True
    if default is None:
        return re.search("kv|group|theta|max_seq", name) is not None
    # A default of 0 or 1 is an axis or a switch where the name speaks of a width; no bool, though it counts as one.
    is_axis = meaning_of(name) == "WIDTH" and default in (-2, -1, 0, 1)
    # and a default of 0 switches something off
    return type(default) is int and default != 0 and "seed" not in name and not is_axis


def _part(name: str, parameter: inspect.Parameter, target: Target) -> Any:
    """The class that a parameter takes an object of: by its annotation, or of its name, as RoPE is of `rope`."""
    annotation = getattr(parameter.annotation, "__name__", parameter.annotation)
    for kind in target.namespace.values():
        if not isinstance(kind, type) or not hasattr(kind, "forward"):
            continue
        is_own = kind.__module__.partition(".")[0] != "torch"
        # `dropout` is a number, whatever classes a file has
        is_free = meaning_of(name) in (None, False)
        is_named = is_free and kind.__name__.lower() == name.replace("_", "")
        if is_own and (is_named or kind.__name__ == annotation):
            return kind
    return None


def _is_called(name: str, target: Target) -> bool:
    """Does an object keep that parameter as it is, and call it, as a rotation that is made elsewhere?"""
    says = target.scope.says
    kept = re.findall(rf"self\.(\w+) = {name}\n", target.scope.code)
    return any(says(rf"self\.{attribute}\(") for attribute in kept)


def _annotated(parameter: inspect.Parameter, namespace: dict[str, Any]) -> Any:
    """The class that a parameter is said to be of; None where that cannot be told."""
    with contextlib.suppress(Exception):
        return eval(parameter.annotation, namespace)
    return None


def _defaults(parameter: inspect.Parameter, target: Target) -> Any:
    """What has the learner's own fields of a config: its default, a dictionary or a class of the file; or None."""
    if parameter.default not in (parameter.empty, None):
        return parameter.default
    kinds = [_annotated(parameter, target.namespace), *target.namespace.values()]
    for value in kinds:
        if isinstance(value, dict) and any("head" in str(key) for key in value):
            return value
        if isinstance(value, type) and re.search(
            r"config|args$|cfg", value.__name__, re.I
        ):
            # a class of theirs may want arguments, or do anything at all
            with contextlib.suppress(Exception):
                return value()
    return None


def call_of(thing: Any) -> Any:
    """What attends of an object or of a class: the usual one of its methods. A function is its own."""
    kind = thing if isinstance(thing, type) else type(thing)
    if kind is functools.partial:  # a function with weights bound
        return thing
    calls = [getattr(thing, name) for name in CALLS if name in dir(kind)]
    if not calls:
        raise UncheckedError("no_call", name=kind.__name__)
    # one of a base may hand all on, as `__call__(*args)`
    return next(filter(arguments_of, calls), calls[0])


def arguments_of(call: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a call that have a name and no value yet."""
    # What a functools.partial passes itself; and self, which a method has that is taken from its class.
    bound = {"self", *getattr(call, "keywords", ())}
    parameters = inspect.signature(call).parameters.items()
    return {
        name: p for name, p in parameters if name not in bound and p.kind not in STARRED
    }


def parameters_of(module: Any) -> list[Any]:
    """The parameters of a module of torch; none of anything else."""
    is_torch = hasattr(module, "named_parameters")
    return list(module.parameters()) if is_torch else []


def required_of(call: Callable[..., Any]) -> list[str]:
    parameters = arguments_of(call).items()
    return [
        name for name, parameter in parameters if parameter.default is parameter.empty
    ]


# Arrays of any kind.


def kind_of_arrays(target: Target, module: Any = None) -> Any:
    """What a function, or an object, computes with: "torch", "numpy", "lists", or the file's own class of numbers.

    Of a function its own text tells, for a file may have code of several kinds.
    """
    if module is None and target.number:
        return target.number
    if hasattr(module, "named_parameters"):
        return "torch"
    held: list[Any] = [module]
    arrays = False
    for _ in range(4):  # as far as a layer in a list of an object
        for value in held:
            # what only holds an array, such as a Parameter, is no number to compute with
            if unwrapped(value) is not value and COMPUTES & {*dir(value)}:
                return type(value)
        arrays |= any(isinstance(value, np.ndarray) for value in held)
        parts = [
            x if isinstance(x, list) else getattr(x, "__dict__", {}).values()
            for x in held
        ]
        held = [value for part in parts for value in part]
    codes = (
        [target.scope.code]
        if module is None
        else [target.scope.code, target.source.code]
    )
    for code in codes:
        if re.search(r"\btorch\b|\bf\.softmax", code):
            return "torch"
        # Of code whose text is not known, NumPy arrays are the best guess.
        is_numpy = re.search(r"\b(j?np|numpy|tensorflow|keras|mlx)\b", code)
        if arrays or not code or is_numpy:
            return "numpy"
    methods = r"\.(shape|size|view|reshape|transpose|swapaxes)\b"
    if module is None and target.scope.says(methods):
        # methods alone: the imports say whose
        return "torch" if "torch" in target.source.code else "numpy"
    return target.number or "lists"


def to_kind(x: Any, kind: Any) -> Any:
    """An array, or a dictionary of them, as torch, numpy, lists, or as the class `kind` makes of numbers or rows."""
    if isinstance(x, dict):
        return type(x)({name: to_kind(array, kind) for name, array in x.items()})
    if isinstance(kind, type):
        if kind.__name__ == "Matrix":
            rows = np.asarray(x).tolist()
            return kind(rows) if np.ndim(x) == 2 else rows
        if kind.__name__ != "Value":  # a tensor of the file's own
            return kind(np.asarray(x))
        return [to_kind(row, kind) for row in x] if np.ndim(x) else kind(float(x))
    if kind == "torch":
        import torch

        x = np.ascontiguousarray(x)
        return torch.from_numpy(x.astype(np.float32) if x.dtype.kind == "f" else x)
    return x if kind == "numpy" else x.tolist()


def unwrapped(value: Any) -> Any:
    """The array that a tensor of the file's own class keeps; anything else as it is."""
    data = getattr(value, "data", None)
    return data if isinstance(data, np.ndarray) else value


def to_array(value: Any) -> Any:
    """A result as a NumPy array of float64; None for what is none."""
    value = unwrapped(value)
    if hasattr(value, "detach"):
        return value.detach().cpu().double().numpy()
    try:
        return np.array(value, dtype=float)
    except (ValueError, TypeError):
        pass
    if isinstance(value, list) and value:  # of tensors, or of the file's own numbers
        parts = [to_array(part) for part in value]
        return None if any(part is None for part in parts) else np.array(parts)
    # a number or a matrix of the file's own, which keeps the number or the rows
    for kept in (
        getattr(value, "data", None),
        *getattr(value, "__dict__", {}).values(),
    ):
        if isinstance(kept, int | float) or (isinstance(kept, list) and kept):
            return to_array(kept)
    return None


def arrays_in(result: Any) -> Iterator[Any]:
    """The arrays of a result, in its tuples, dictionaries and records too."""
    values = vars(result) if hasattr(result, "__dataclass_fields__") else result
    if isinstance(values, dict):
        values = tuple(values.values())
    if isinstance(values, tuple):
        for value in values:
            yield from arrays_in(value)
    elif (array := to_array(values)) is not None:
        yield array


def pick(result: Any, shape: tuple[int, ...], width: int = -1) -> Any:
    """That array of a result which has the axes of an output, `shape`; None where none has.

    width  the axis of features, whose size may differ
    """
    fitting = []
    for x in arrays_in(result):
        if (
            x.ndim == len(shape)
            and not np.delete(np.subtract(x.shape, shape), width).any()
        ):
            fitting.append(x)
    # the first of the same width, if one has it
    return min(fitting, key=lambda x: x.shape != shape, default=None)


# Dropout is watched and held still.


@dataclass
class Seen:
    """What the calls of dropout got."""

    dropped: bool = False  # one would have dropped something
    in_eval: bool = False  # one would have, though the module was not training
    on_scores: bool = False  # one got scores, in the place of weights


@contextlib.contextmanager
def still_dropout(seen: Seen, trains: bool, tokens: int) -> Iterator[None]:
    """Within this block torch's dropout changes nothing, and `seen` learns where it was called.

    tokens  of the text, by which a map (T,T) is told
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    # a tenth of a second, which code without torch is spared
    from unittest.mock import patch

    functional = torch.nn.functional  # where nn.Dropout finds its function, too
    attend = functional.scaled_dot_product_attention

    def dropout(
        x: Any, p: float = 0.5, training: bool = True, *_: Any, **__: Any
    ) -> Any:
        if training and p > 0:
            seen.dropped = True
            seen.in_eval |= not trains
            is_map = x.ndim >= 2 and x.shape[-1] == x.shape[-2] == tokens
            # weights are never negative
            seen.on_scores |= is_map and bool((x < -1e-6).any())
        return x.clone()  # code may write into what comes out

    def fused(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *rest: Any,
        **more: Any,
    ) -> Any:
        dropout(query[:0], dropout_p)
        return attend(query, key, value, attn_mask, 0.0, *rest, **more)

    functions: dict[str, Any] = {
        "dropout": dropout,
        "scaled_dot_product_attention": fused,
    }
    with patch.multiple(functional, **functions):
        yield


# Calling.


class Layout(NamedTuple):
    """An order of axes: how many the code takes (what it does not take is looped over), and the way there and back.

    The axes are those of our (B,T,C) and (B,H,T,d), from the left cut to `rank`.
    """

    rank: int
    to: Callable[[Any], Any] = lambda x: x
    back: Callable[[Any], Any] = lambda y: y
    width: int = -1  # the axis of features in the code's own order


def _swapped(rank: int, a: int, b: int) -> Layout:
    width = {a: b, b: a}.get(rank - 1, rank - 1)
    return Layout(rank, lambda x: x.swapaxes(a, b), lambda y: y.swapaxes(a, b), width)


LAYOUTS = {
    # one text: batch, tokens, width
    "btc": Layout(3),
    "tbc": _swapped(3, 0, 1),
    "bct": _swapped(3, 1, 2),
    "image": Layout(
        3, lambda x: x.swapaxes(1, 2)[..., None], lambda y: y[..., 0].swapaxes(1, 2), 1
    ),
    "grid": Layout(3, lambda x: x[:, :, None], lambda y: y[:, :, 0]),
    "tc": Layout(2),
    "ct": _swapped(2, 0, 1),
    "c": Layout(1),
    # heads: batch, heads, tokens, features
    "bhtd": Layout(4),
    "bthd": _swapped(4, 1, 2),
    "htd": Layout(3),
    "td": Layout(2),
    "d": Layout(1),
}


@dataclass
class Attention:
    """A stranger's code under the contract: inputs of ours in, an output (B,T,C) or (B,H,T,e) of float64 out.

    kind     of arrays: "torch", "numpy" or "lists"; or the file's own class of numbers
    inputs   names of the parameters that take data: one (x), two (x, context) or three (q, k, v), in our order
    mask     name of the parameter that takes a mask; None where there is none
    fixed    what every call gets besides, by the names of parameters
    gathers  parameters that are lists in which the code gathers keys and values, one token after another
    module   the learner's object; None for a function
    """

    call: Callable[..., Any]
    kind: Any
    inputs: tuple[str, ...]
    mask: str | None = None
    mask_required: bool = False
    layout: Layout = LAYOUTS["btc"]
    fixed: dict[str, Any] = field(default_factory=dict)
    guessed: tuple[str, ...] = ()  # parameters whose value is a guess
    output: str = ""  # the parameter that the code writes its output into
    gathers: tuple[str, ...] = ()
    module: Any = None
    seen: Seen = field(default_factory=Seen)
    # arguments that some call was given, and took
    passed: set[str] = field(default_factory=set)
    learns: bool = False  # does a call find the gradients of the weights, too?
    # of an object that keeps tokens: its attributes before any call
    fresh: dict[str, Any] = field(default_factory=dict)
    # positions and rotary tables for so many tokens from a position on, by the names of parameters
    tables: Tables = lambda start, tokens: {}

    @property
    def rank(self) -> int:
        return self.layout.rank

    @property
    def keeps(self) -> bool:
        """Does the code gather the keys and values of one token after another?"""
        return bool(self.gathers or self.fresh)

    @property
    def takes_one_query(self) -> bool:
        return self.rank == 1 and self.mask is None and not self.keeps

    @property
    def is_lengths(self) -> bool:
        """Are the lengths of the documents what it takes for a mask?"""
        return self.mask is not None and bool(CALL["lengths"].fullmatch(self.mask))

    @property
    def is_double(self) -> bool:
        """Does a module of torch keep weights of 64 bits?"""
        kinds = {str(weight.dtype) for weight in parameters_of(self.module)}
        return "torch.float64" in kinds

    @property
    def is_told_causal(self) -> bool:
        return any(map(CALL["causal"].fullmatch, self.fixed))

    def __call__(self, inputs: Inputs, mask: Any = None) -> Any:
        # axes that the code does not take are looped over
        lead = inputs[0].ndim - self.rank
        if lead <= 0:
            return self._output(inputs, mask)
        axes = inputs[0].shape[:lead]
        rows = []
        for index in np.ndindex(*axes):
            # a text begins: the code takes it whole, or here
            if self.rank > 1 or index[-1] == 0:
                self.restart()
            # a single query, and all keys of its document
            document = index if self.rank > 1 else index[:-1]
            row_mask = mask
            if mask is not None and mask.ndim > 2:
                # (B,...,T,S) -> (T,S) of this document
                row_mask = mask[index[0]].reshape(mask.shape[-2:])
            if mask is not None and self.rank == 1:  # (S,) of this query
                row_mask = row_mask[index[-1]]
            places = (index, document, document)
            of_row = [x[place] for x, place in zip(inputs, places, strict=True)]
            rows.append(self._output(of_row, row_mask))
        return np.array(rows).reshape(*axes, *rows[0].shape)

    def restart(self) -> None:
        """Let the code forget what it keeps of a text: all is what it was before any call."""
        self.fixed |= {name: [] for name in self.gathers}
        if self.fresh:
            attributes = vars(self.module)
            fresh = copy.deepcopy(self.fresh, {id(self.module): self.module})
            attributes.clear()
            attributes.update(fresh)

    def result(self, arguments: dict[str, Any], tokens: int) -> Any:
        """What the code hands back; `seen` learns of its dropout, which changes nothing."""
        grad: Any = contextlib.nullcontext()
        if self.kind == "torch":
            grad = sys.modules["torch"].set_grad_enabled(self.learns)
        training = bool(getattr(self.module, "training", False))
        dropout = still_dropout(self.seen, training, tokens)
        with dropout, np.errstate(all="ignore"), grad:
            result = self.call(**{**self.fixed, **arguments})
            if self.learns:
                # Cubes: neither the sum that a LayerNorm gives nor that of squares depends on a weight before it.
                outputs = result if isinstance(result, tuple) else (result,)
                sum(
                    part.pow(3).sum() for part in outputs if hasattr(part, "pow")
                ).backward()
        self.passed.update(arguments, self.fixed)
        return result

    def _output(self, inputs: Sequence[Any], mask: Any) -> Any:
        tokens = inputs[1].shape[-2]
        if self.rank > 1:
            inputs = tuple(map(self.layout.to, inputs))
        arguments = {}
        # one array for one text: code may ask whether q is k
        shared: dict[int, Any] = {}
        for name, x in zip(self.inputs, inputs, strict=False):
            arguments[name] = shared.setdefault(id(x), to_kind(x, self.kind))
        if self.is_double:
            arguments = {name: x.double() for name, x in arguments.items()}
        if mask is not None and self.mask:
            arguments[self.mask] = to_kind(mask, self.kind)
        if self.output:
            arguments[self.output] = to_kind(np.zeros(inputs[0].shape), self.kind)
        result = self.result(arguments, tokens)
        if self.output:
            result = arguments[self.output]
            if not np.any(to_array(result)):
                raise UncheckedError("not_written", name=self.output)
        if result is None:
            name = getattr(self.call, "__name__", "forward")
            raise UncheckedError("no_return", name=name)
        out = pick(result, inputs[0].shape, self.layout.width)
        if out is None:
            first = result[0] if isinstance(result, tuple) and result else result
            shape = getattr(to_array(first), "shape", type(first).__name__)
            raise UncheckedError("returns_shape", shape=shape, input=inputs[0].shape)
        return self.layout.back(out)


def adapters(
    target: Target, call: Callable[..., Any], module: Any, layouts: list[str]
) -> Iterator[Attention]:
    """Every way to make a call that its names leave open, the likeliest first."""
    first = _bound(target, call, module)
    layouts = ["c"] if first.gathers else layouts
    # which of two texts asks is a guess
    orders = [first.inputs, first.inputs[::-1]][: len(first.inputs) % 2 or 2]
    if len(first.inputs) == 1:  # and whether it takes another one
        others = filter(CALL["second"].search, arguments_of(call))
        orders += [
            (*first.inputs, name)
            for name in others
            if name != first.mask and meaning_of(name) not in COUNTS
        ]
    kinds = itertools.product(layouts, tables_of(target, first))
    ways = sorted(itertools.product(kinds, orders), key=lambda way: len(way[1]))
    for (name, tables), inputs in ways:
        fixed = {**first.fixed, **tables(0, TOKENS)}
        fixed = {name: fixed[name] for name in fixed if name not in inputs}
        yield replace(
            first, inputs=inputs, layout=LAYOUTS[name], tables=tables, seen=Seen(), passed=set(),
            fixed=fixed,
        )  # fmt: skip


def _positions_of(
    target: Target, attention: Attention, start: int, tokens: int
) -> dict[str, Any]:
    """Positions by the names of parameters: of all documents at once, or of each where the code says so."""
    made = {}
    for name in attention.fixed:
        if CALL["positions"].fullmatch(name) and name not in target.options.args:
            places = np.arange(start, start + tokens)
            if f"{name.lower()}[:, none" in target.scope.code:
                places = np.tile(places, (BATCH, 1))
            made[name] = to_kind(places, attention.kind)
    return made


def tables_of(target: Target, attention: Attention) -> Iterator[Tables]:
    """What makes the positions and rotary tables that a call wants: functions of the file, or the usual ones."""
    names = [name for name in attention.fixed if CALL["tables"].search(name)]
    positions = functools.partial(_positions_of, target, attention)
    if not names:
        yield positions
        return
    asked = target.options.args
    width = asked.get("HEAD_DIM", HEAD_DIM)

    def usual(start: int, tokens: int, which: int, axes: int) -> dict[str, Any]:
        places = np.arange(start, start + tokens)
        angles = np.outer(places, 1e4 ** (-np.arange(0, width, 2) / width))
        halves = np.concatenate([angles, angles], 1)
        table = (angles, halves, np.repeat(angles, 2, 1))[which]
        table = table.reshape(
            {2: (tokens, -1), 3: (1, tokens, -1)}.get(axes, (1, tokens, 1, -1))
        )
        both = np.cos(table), np.sin(table)
        forms = {
            "cis|complex": np.exp(1j * angles),
            "^(?!.*sin).*cos": both[0],
            "^(?!.*cos).*sin": both[1],
            "": both,
        }
        made = positions(start, tokens)
        for name in names:
            form = next(forms[part] for part in forms if re.search(part, name))
            parts = [
                to_kind(x, attention.kind) for x in (form if form is both else [form])
            ]
            made[name] = tuple(parts) if form is both else parts[0]
        return made

    def own(start: int, tokens: int, maker: Any) -> dict[str, Any]:
        end = start + tokens
        sizes = {"WIDTH": width, "CONTEXT": end, "end": end, "length": end, **asked}
        made = maker(**{name: value_of(name, sizes) for name in required_of(maker)})
        parts = [
            part[start:] for part in (made if isinstance(made, tuple) else (made,))
        ]
        parts = [tuple(parts)] if len(names) == 1 and len(parts) > 1 else parts
        return positions(start, tokens) | dict(zip(names, parts, strict=False))

    made = []
    for name, maker in target.namespace.items():
        if inspect.isfunction(maker) and CALL["makers"].search(name):
            # no builder, or one that wants something else
            with contextlib.suppress(Exception):
                own(0, TOKENS, maker)
                made.append(functools.partial(own, maker=maker))
    yield from made
    for which, axes in itertools.product((1, 0, 2), (2, 4, 3)):
        yield functools.partial(usual, which=which, axes=axes)


def _mask_of(call: Callable[..., Any], code: str) -> str | None:
    """The parameter of a call that takes a mask, or the lengths of the documents."""
    lengths = [name for name in required_of(call) if CALL["lengths"].fullmatch(name)]
    parameters = arguments_of(call)
    # `causal_mask=False` is a switch, whatever its name says.
    masks = [
        name
        for name in filter(MASK.search, parameters)
        # `head_mask` silences heads
        if not isinstance(parameters[name].default, bool)
        and not CALL["nothing"].fullmatch(name)
    ]
    if not masks:  # of another name, told by what the code does with it
        use = r"~{0}\b|fill_?\({0}\b|where\({0}\b"
        masks = [x for x in required_of(call) if re.search(use.format(x.lower()), code)]
    # of several the one that the code reads
    masks.sort(key=lambda name: len(re.findall(rf"\b{name.lower()}\b", code)) < 2)
    return next(iter([*masks, *lengths]), None)


def _bound(target: Target, call: Callable[..., Any], module: Any) -> Attention:
    """A call with its inputs and its mask told apart, and with values for whatever else it wants."""
    names, required = list(arguments_of(call)), required_of(call)
    code = target.scope.code
    mask = _mask_of(call, code)
    output = next((name for name in required if CALL["output"].fullmatch(name)), "")
    rest = [name for name in names if name not in (mask, output)]
    if target.source.says(r"\bjax\b") and not any(map(DATA[2].match, rest)):
        rest = [name for name in rest if meaning_of(name) != "rng"]  # `key` draws
    # The first name like a query's, the first like a key's, the first like a value's.
    inputs = [name for pattern in DATA for name in [*filter(pattern.match, rest)][:1]]
    gathers: tuple[str, ...] = ()
    if len(inputs) < 3:  # then one input of whatever name, and perhaps another text
        data = [
            name for name in rest
            if name in required and not (CALL["free"].search(name) or is_config(name))
            and meaning_of(name) not in COUNTS
        ]  # fmt: skip
        told = [name for name in data if any(p.match(name) for p in DATA[1:])]
        if len(told) == 2 and len(data) > 2:
            gathers = tuple(told)
            data = [name for name in data if name not in told and not meaning_of(name)]
        if len(inputs) != 2 or len(data) != 2:  # a text that asks, and another one
            inputs = data[:1] or rest[:1]
            says = target.scope.says
            others = [
                name
                for name in data[1:]
                # by its name, or because it is projected
                if CALL["second"].search(name)
                or says(rf"self\.\w+\({name}\)|\b{name} @")
            ]
            inputs += others[:1]
    sizes = {"CONTEXT": TOKENS, **target.options.args}
    fixed: dict[str, Any] = {}
    # which of two texts asks
    guessed = list(inputs[1:]) if len(inputs) == 2 else []
    kind = kind_of_arrays(target, module)
    for name in names:
        if name in (*inputs, *gathers, mask, output):
            continue
        if re.fullmatch(r"(is_)?train(ing)?", name):
            fixed[name] = False
        elif CALL["causal"].fullmatch(name):
            # On where nothing was said: what can be causal is checked as such. `check` lets `args` have no such name.
            fixed[name] = target.options.causal is not False
        elif name in target.options.args:
            fixed[name] = target.options.args[name]
        elif CALL["positions"].fullmatch(name) and (
            name in required or not re.search(rf"\b{name.lower()} is (not )?none", code)
        ):
            fixed[name] = None  # see `_positions_of`
        elif name in required:
            if CALL["segments"].fullmatch(name):
                fixed[name] = to_kind(np.zeros((BATCH, TOKENS), int), kind)
                continue
            is_table = CALL["tables"].search(name) or CALL["nothing"].fullmatch(name)
            fixed[name] = None if is_table else value_of(name, sizes)
            if meaning_of(name) == "WINDOW" and f"{name.lower()}[0]" in code:
                fixed[name] = WINDOW, 0  # to the left and to the right
            if fixed[name] is UNFILLED and is_config(name):
                fixed[name] = Config(sizes, code=code)
            elif fixed[name] is UNFILLED:
                target.unnamed, fixed[name] = name, None
            if is_table or meaning_of(name) is None:
                guessed.append(name)
    is_asked = mask in required or f"assert {str(mask).lower()} is not none" in code
    return Attention(
        call, kind, tuple(inputs), mask, is_asked, fixed=fixed, guessed=tuple(guessed),
        output=output, gathers=gathers, module=module,
    )  # fmt: skip


def adapter_of(target: Target) -> str:
    """The lines of a function in the file that brings an object to the contract: `...` where no name tells a value."""
    thing = target.thing
    name = target.name

    def filled(call: Any, texts: int) -> str:
        parts = []
        for number, each in enumerate(required_of(call)):
            told = [
                pattern for pattern in (*DATA, CALL["second"]) if pattern.search(each)
            ]
            value = value_of(each, target.options.args, "...")
            is_plain = isinstance(value, int | float | str) and not CALL[
                "tables"
            ].search(each)
            text = texts and (told or number == 0)
            parts.append(f"{each}={'x' if text else value if is_plain else '...'}")
        return ", ".join(parts)

    if not isinstance(thing, type):  # a function; or what could not be read
        return (
            f"def mine(x):\n    return {name}({filled(thing, 1) if thing else '...'})"
        )
    lines = (
        f"layer = {name}({filled(thing, 0)})",
        f"return layer({filled(call_of(thing), 1)})",
    )
    return "\n    ".join(["def mine(x):  # (batch, tokens, width)", *lines])


def layouts_of(target: Target) -> list[str]:
    """The orders of axes that the text of the code leaves open, the likeliest first."""
    layouts = ["btc", "tc", "ct", "bct", "image"]
    if target.scope.says(NAMES["layouts"]["grid"]):
        layouts.insert(1, "grid")
    text = f"{target.scope.code}\n{target.scope.text.lower()}"
    if re.search(NAMES["layouts"]["tbc"], text):
        return ["tbc", *layouts]
    # torch's own layer takes tokens first, which who forgets `batch_first` does not want
    is_torch = target.scope.says(r"(?<!class )multiheadattention\((?!.*batch_first)")
    return layouts if is_torch else [layouts[0], "tbc", *layouts[1:]]
