"""What is checked, and how it is built and called: arguments told by their names, inputs in its own kind of array.

Dropout is watched and held still.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from headwise.checker.bugs import (
    UNKNOWN,
    AskedError,
    Finding,
    Settings,
    UncheckedError,
    Verdict,
    bug_named,
    read_toml,
    speaker,
)
from headwise.checker.form import Inputs
from headwise.checker.source import CALLS, DATA, MASK, Source

# No two of these sizes are equal, so that no axis can be taken for another.
BATCH, TOKENS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 5, 7, 6, 2, 8, 16
WIDTH = HEADS * HEAD_DIM
# What is passed for a parameter, by what its name means in names.toml. Dropout is high, so that it shows.
VALUES: dict[str, Any] = {
    "KV_HEADS": KV_HEADS,
    "HEADS": HEADS,
    "HEAD_DIM": HEAD_DIM,
    "CONTEXT": CONTEXT,
    "WIDTH": WIDTH,
    "BATCH": BATCH,
    "DROPOUT": 0.5,
    "none": None,
    "rng": np.random.default_rng(0),
}
NAMES = read_toml("names.toml")
# Names of the learner's parameters. CONFIG: an object with all sizes. FREE: none of these is the input.
CONFIG = r"(config|cfg|args|conf|c|params|hparams|configuration|opts?|settings)"
CAUSAL = r"(is_?)?causal"
FREE = re.compile(
    r"cache|past|pos|start|offset|cos|sin|freq|training|train|need|return|output|causal|drop|scale|layer|use_",
    re.I,
)
# What keys and values are made of: `enc_out`, but not `sequence_length`; `y`, `src_y`, but not `density`.
SECOND = r"context|memory|enc(?!e_len)|kv|cross|(^|_)y(_|$)|other|source|key|x_?2"
UNFILLED: Any = object()  # stands for "nothing is known": None is a value that may be passed


@dataclass(frozen=True)
class Options:
    """What the caller of a check says; see `headwise.check`.

    causal   ought it to be causal? None: nothing was said
    args     values by the names of parameters; where a class is built, also by meanings such as "WIDTH"
    mapping  role, such as "q", -> name of the attribute that holds its weights
    seconds  of the search for bugs
    """

    causal: bool | None = None
    args: Settings = field(default_factory=dict)
    mapping: Mapping[str, str] = field(default_factory=dict)
    lang: str = "en"
    seconds: float = 10.0


@dataclass
class Target:
    """One check: the object, its name and kind, its source and the names of its file; what was tried, and what not.

    kind  layer, function, rotary or cache
    """

    thing: Any
    name: str
    kind: str
    source: Source
    options: Options
    namespace: dict[str, Any] = field(default_factory=dict)  # what the names of its file stand for
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    # what stood in for parts that a file does not have
    lent: list[str] = field(default_factory=list)

    def say(self, key: str, /, **facts: Any) -> str:
        """A phrase in the language of the check."""
        return speaker(self.options.lang)(key, **facts)

    def did(self, key: str) -> None:
        self.checked.append(self.say(key))

    def left_out(self, key: str, /, **facts: Any) -> None:
        self.not_checked.append(self.say(key, **facts))

    @property
    def number(self) -> type | None:
        """The file's own class of numbers, which remember how they were made; None where floats will do.

        Courses call it `Value`. The code wants such numbers where it reads their `.data`, or calls `.exp()` of one.
        """
        value = self.namespace.get("Value")
        return value if isinstance(value, type) and self.scope.says(r"\.data\b|\.exp\(\)") else None

    @cached_property
    def scope(self) -> Source:
        """The text of the object and of what it uses."""
        source = self.source
        nodes = [source.definitions[name] for name in source.reach(self.name)]
        texts = ["\n".join(source.lines[node.lineno - 1 : node.end_lineno]) for node in nodes]
        return Source("\n".join(texts)) if nodes else source

    def finding(self, bug: str, evidence: str) -> Finding:
        """A bug of the catalogue with its likely line; one that it does not have stands nowhere."""
        if bug == UNKNOWN:
            return Finding(bug, None, "", evidence, self.say("unknown_fix"))
        entry = bug_named(bug)
        line, quote = self.source.line_of(entry.lines, self.source.reach(self.name)) or (None, "")
        return Finding(bug, line, quote, evidence, entry.text("fix", self.options.lang))

    def verdict(
        self, right: bool | None, findings: tuple[Finding, ...] = (), reason: str = ""
    ) -> Verdict:
        """The verdict; `reason` says why there is none."""
        left_out = [reason, *self.not_checked] if reason else self.not_checked
        checked, lang = tuple(self.checked), self.options.lang
        return Verdict(self.name, self.kind, right, findings, checked, tuple(left_out), lang)


def value_of(name: str, sizes: Settings, default: Any = UNFILLED) -> Any:
    """What to pass for a parameter of that name; the default where the name says nothing.

    sizes  come first: values by the names of parameters, or by what names mean, as "WIDTH"
    """
    meaning = meaning_of(name)
    if name in sizes or meaning is None:
        return sizes.get(name, default)
    # A meaning that has no entry in VALUES is the value itself: True, 1e-6, "cpu".
    return sizes.get(meaning, VALUES.get(meaning, meaning))


def meaning_of(name: str) -> Any:
    """The `value` that names.toml has for such a name: "HEADS" for `num_heads`. None where the name says nothing."""
    plain = name.lower().strip("_")
    return next(
        (e["value"] for e in NAMES["arguments"] if re.fullmatch("|".join(e["names"]), plain)), None
    )


class Config:
    """A config object of any course: attributes and items, by what their names mean, else as the defaults say.

    sizes     come first, as for `value_of`
    defaults  an object with the learner's own fields, or None
    theirs    do the defaults come before everything else?
    """

    def __init__(self, sizes: Settings, defaults: Any = None, theirs: bool = False) -> None:
        self._sizes, self._defaults, self._theirs = sizes, defaults, theirs

    def get(self, name: str, default: Any = None) -> Any:
        # which is the default itself where they have no such field
        kept = getattr(self._defaults, name, default)
        return kept if self._theirs and kept is not default else value_of(name, self._sizes, kept)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks for such names itself, as for `__deepcopy__`
            raise AttributeError(name)
        if (value := self.get(name, UNFILLED)) is UNFILLED:
            raise AskedError("asks_config", name=name)
        return value

    __getitem__ = __getattr__

    def __contains__(self, name: str) -> bool:
        return True  # what is asked for is there, or an error says that it is not


def build(target: Target, sizes: Settings, theirs: bool = False) -> Any:
    """An instance of a learner's class, its arguments filled in by name. `sizes` come before what a name means.

    theirs  the learner's defaults stay, where there are any
    """
    arguments = {}  # what stands in none of the branches below is left at the learner's default
    for name, parameter in arguments_of(target.thing).items():
        plain, default = name.lower(), parameter.default
        if re.fullmatch(CONFIG, plain):
            arguments[name] = Config(sizes, _defaults(default, target), theirs)
        elif re.fullmatch(r"w_?(q|k|v|o|query|key|value|out)", plain):  # a matrix that is handed in
            arguments[name] = np.random.default_rng(1).normal(size=(WIDTH, WIDTH)) / WIDTH**0.5
        elif (
            default is parameter.empty or name in sizes or (not theirs and _is_ours(plain, default))
        ):
            value = value_of(name, sizes)
            if value is not UNFILLED:
                arguments[name] = value
            elif default is parameter.empty:
                raise UncheckedError("asks_parameter", name=name, call=target.name)
    return target.thing(**arguments)


def _is_ours(name: str, default: Any) -> bool:
    """Is an optional argument ours to set? Sizes and biases are, so that nothing hides; other choices stay theirs.

    Whether it is causal is what the check is told, or expects. At their defaults biases are often off and dropout 0,
    and None stands for as many key/value heads as heads.
    """
    if re.search("bias|drop|causal|^p$", name):
        return True
    if default is None:
        return re.search("kv|group", name) is not None
    # no bool, though Python counts it among the whole numbers
    return type(default) is int and "seed" not in name


def _defaults(default: Any, target: Target) -> Any:
    """What has the learner's own fields of a config: its default, a dictionary or a class of the file; or None."""
    if default not in (inspect.Parameter.empty, None):
        return default
    for value in target.namespace.values():
        if isinstance(value, dict) and any("head" in str(key) for key in value):
            return types.SimpleNamespace(**{str(key): field for key, field in value.items()})
        if isinstance(value, type) and re.search(r"config|args$|cfg", value.__name__, re.I):
            # a class of theirs may want arguments, or do anything at all
            with contextlib.suppress(Exception):
                return value()
    return None


def call_of(thing: Any) -> Any:
    """What attends of an object or of a class: the usual one of its methods. A function is its own."""
    kind = thing if isinstance(thing, type) else type(thing)
    # a partial is a function with weights bound
    if kind in (types.FunctionType, functools.partial):
        return thing
    call = next((getattr(thing, name) for name in CALLS if name in dir(kind)), None)
    if call is None:
        raise UncheckedError("no_call", name=kind.__name__)
    return call


@dataclass
class Seen:
    """What the calls of dropout got."""

    in_eval: bool = False  # one would have dropped something, though the module was not training
    on_scores: bool = False  # one got scores, in the place of weights


@contextlib.contextmanager
def still_dropout(seen: Seen, trains: bool, tokens: int) -> Iterator[None]:
    """Within this block torch's dropout changes nothing, and `seen` learns where it was called.

    trains  is the module training?
    tokens  of the text, by which a map (T,T) is told
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    # its import takes a tenth of a second, which code without torch is spared
    from unittest.mock import patch

    functional = torch.nn.functional  # where nn.Dropout finds its function, too
    attend = functional.scaled_dot_product_attention

    def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if training and p > 0:
            seen.in_eval |= not trains
            is_map = x.ndim >= 2 and x.shape[-1] == x.shape[-2] == tokens
            seen.on_scores |= is_map and bool((x < -1e-6).any())  # weights are never negative
        return x

    def fused(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **more: Any,
    ) -> Any:
        seen.in_eval |= dropout_p > 0 and not trains
        return attend(query, key, value, attn_mask, 0.0, *args, **more)

    with patch.multiple(functional, dropout=dropout, scaled_dot_product_attention=fused):
        yield


def kind_of_arrays(module: Any, code: str) -> str:
    """torch, numpy or lists: what an object, or code of that text (in small letters), computes with."""
    if hasattr(module, "named_parameters") or re.search(r"\btorch\b|\bf\.softmax", code):
        return "torch"
    arrays = any(
        isinstance(value, np.ndarray) for value in getattr(module, "__dict__", {}).values()
    )
    # Of code whose text is not known, NumPy arrays are the best guess.
    return "numpy" if arrays or not code or re.search(r"\bnp\b|\bnumpy\b", code) else "lists"


def to_kind(x: Any, kind: Any) -> Any:
    """An array, or a dictionary of them, as torch, numpy, or lists: of floats, or of what the class `kind` makes."""
    if isinstance(x, dict):
        return type(x)({name: to_kind(array, kind) for name, array in x.items()})
    if isinstance(kind, type):
        return [to_kind(row, kind) for row in x] if np.ndim(x) else kind(float(x))
    if kind == "torch":
        import torch

        x = np.ascontiguousarray(x)
        return torch.from_numpy(x.astype(np.float32) if x.dtype.kind == "f" else x)
    return x if kind == "numpy" else x.tolist()


def to_array(value: Any) -> Any:
    """A result as a NumPy array of float64; None for what is none."""
    if hasattr(value, "detach"):
        return value.detach().cpu().double().numpy()
    try:
        return np.array(value, dtype=float)
    except (ValueError, TypeError):
        if isinstance(value, list) and value:  # of tensors, or of the file's own numbers
            parts = [to_array(part) for part in value]
            return None if any(part is None for part in parts) else np.array(parts)
        number = getattr(value, "data", None)  # of a class that remembers how its numbers were made
        return np.array(float(number)) if isinstance(number, int | float) else None


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


def pick(result: Any, shape: tuple[int, ...]) -> Any:
    """That array of a result which has the axes of an output, `shape`; its width may differ. None where none has."""
    fitting = [x for x in arrays_in(result) if x.ndim == len(shape) and x.shape[:-1] == shape[:-1]]
    # the first of the same width, if one has it
    return min(fitting, key=lambda x: x.shape != shape, default=None)


def angle_tables(kind: str, sizes: Settings) -> list[Any]:
    """The usual tables (cos, sin) of rotary positions: (T,d) for halves, (T,d) for pairs, (T,d/2), one angle a pair.

    sizes  come before ours
    """
    tokens, width = sizes.get("TOKENS", TOKENS), sizes.get("HEAD_DIM", HEAD_DIM)
    angles = np.outer(np.arange(tokens), 10000.0 ** (-np.arange(0, width, 2) / width))
    tables = np.concatenate([angles, angles], 1), np.repeat(angles, 2, 1), angles
    return [(to_kind(np.cos(table), kind), to_kind(np.sin(table), kind)) for table in tables]


@dataclass
class Subject:
    """Something of a learner's that attends, ready to be called.

    kind     of arrays: "torch", "numpy" or "lists"; or the file's own class of numbers
    inputs   names of the parameters that take data: one (x), two (x, context) or three (q, k, v), in our order
    mask     name of the parameter that takes a mask; None where there is none
    rank     axes of an input: 4 (B,H,T,d), 3 (B,T,C), 2 (T,C) or 1 (C); below 3 the documents go in one by one
    fixed    what every call gets besides, by the names of parameters
    module   the learner's object; None for a function
    """

    call: Callable[..., Any]
    kind: Any
    inputs: tuple[str, ...]
    mask: str | None = None
    mask_required: bool = False
    rank: int = 3
    fixed: dict[str, Any] = field(default_factory=dict)
    seen: Seen = field(default_factory=Seen)
    # names of the arguments that some call was given, and took
    passed: set[str] = field(default_factory=set)
    module: Any = None
    learns: bool = False  # does a call find the gradients of the weights, too?
    gathers: bool = False  # does the object gather the keys and values of one token after another?
    tokens_first: bool = False  # does the code take (T,B,C)?
    # of one that keeps tokens: its attributes before any call
    fresh: dict[str, Any] = field(default_factory=dict)
    # what the code wants in its argument of a cache before the first token
    new_cache: Callable[[], Any] = lambda: None

    @property
    def is_told_causal(self) -> bool:
        """Has it a parameter of that name?"""
        return any("causal" in name.lower() for name in self.fixed)

    def __call__(self, inputs: Inputs, mask: Any = None) -> Any:
        """Output (B,T,C) or (B,H,T,e) as float64, whatever the rank that the learner's code takes."""
        lead = inputs[0].ndim - self.rank  # axes that the code does not take: they are looped over
        if lead <= 0:
            return self._output(inputs, mask)
        axes = inputs[0].shape[:lead]
        rows = []
        for index in np.ndindex(*axes):
            # a text begins: the code takes it whole, or here
            if self.gathers and (self.rank > 1 or index[-1] == 0):
                self.restart()
            q, k, v = inputs
            # a single query, and all keys of its document
            document = index if self.rank > 1 else index[:-1]
            row_mask = mask
            if mask is not None and mask.ndim > 2:  # (B,...,T,S) -> (T,S) of this document
                row_mask = mask[index[0]].reshape(mask.shape[-2:])
            if mask is not None and self.rank == 1:  # (S,) of this query
                row_mask = row_mask[index[-1]]
            rows.append(self._output((q[index], k[document], v[document]), row_mask))
        stacked = np.array(rows)
        return stacked.reshape(*axes, *stacked.shape[1:])

    def restart(self) -> None:
        """Let the object forget what it keeps of a text: it is what it was before any call."""
        attributes = vars(self.module)
        # what refers to the object goes on to do so
        fresh = copy.deepcopy(self.fresh, {id(self.module): self.module})
        attributes.clear()
        attributes.update(fresh)

    def result(self, arguments: dict[str, Any], tokens: int) -> Any:
        """What the code hands back; `seen` learns of its dropout, which changes nothing."""
        grad = (
            sys.modules["torch"].set_grad_enabled(self.learns)
            if self.kind == "torch"
            else contextlib.nullcontext()
        )
        training = bool(getattr(self.module, "training", False))
        with still_dropout(self.seen, training, tokens), np.errstate(all="ignore"), grad:
            result = self.call(**{**self.fixed, **arguments})
            if self.learns:
                outputs = result if isinstance(result, tuple) else (result,)
                # Cubes: neither the sum that a LayerNorm gives nor that of squares depends on a weight before it.
                sum(part.pow(3).sum() for part in outputs if hasattr(part, "pow")).backward()
        self.passed.update(arguments, self.fixed)
        return result

    def _output(self, inputs: Inputs, mask: Any) -> Any:
        if self.tokens_first:
            inputs = tuple(x.swapaxes(0, 1) for x in inputs)
        arguments = {
            name: to_kind(x, self.kind) for name, x in zip(self.inputs, inputs, strict=False)
        }
        if mask is not None and self.mask:
            arguments[self.mask] = to_kind(mask, self.kind)
        result = self.result(arguments, inputs[1].shape[0 if self.tokens_first else -2])
        if result is None:
            raise UncheckedError("no_return", name=getattr(self.call, "__name__", "forward"))
        out = pick(result, inputs[0].shape)
        if out is None:
            first = result[0] if isinstance(result, tuple) and result else result
            shape = getattr(to_array(first), "shape", type(first).__name__)
            raise UncheckedError("returns_shape", shape=shape, input=inputs[0].shape)
        return out.swapaxes(0, 1) if self.tokens_first else out


def arguments_of(call: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a call that have a name and no value yet."""
    # What a functools.partial passes itself; and self, which a method has that is taken from its class.
    bound = {"self", *getattr(call, "keywords", ())}
    parameters = inspect.signature(call).parameters.items()
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: p for name, p in parameters if name not in bound and p.kind not in starred}


def required_of(call: Callable[..., Any]) -> list[str]:
    """The names of those without a default."""
    return [
        name
        for name, parameter in arguments_of(call).items()
        if parameter.default is parameter.empty
    ]


def subject_of(target: Target, call: Callable[..., Any], module: Any) -> Subject:
    """A call with its inputs and its mask told apart, and with values for whatever else it wants.

    module  the object that `call` is a method of; None for a function
    """
    names, required = list(arguments_of(call)), required_of(call)
    mask = next(filter(MASK.search, names), None)
    rest = [name for name in names if name != mask]
    # The first name like a query's, the first like a key's, the first like a value's.
    inputs = [name for pattern in DATA for name in [*filter(pattern.match, rest)][:1]]
    if len(inputs) < 3:  # then one input of whatever name, and perhaps another text
        data = [name for name in rest if name in required and not FREE.search(name)]
        inputs = data[:1] or rest[:1]
        inputs += [name for name in data[1:] if re.search(SECOND, name)][:1]
    kind: Any = kind_of_arrays(module, target.source.code)
    if module is None:  # of a function its own text tells: a file may have code of several kinds
        kind = kind_of_arrays(None, f"{target.scope.code} {inspect.signature(call)}".lower())
        if kind == "lists" and target.scope.says(
            r"\.(shape|size|view|reshape|transpose|swapaxes)\b"
        ):
            # methods alone: the imports say whose
            kind = "torch" if "torch" in target.source.code else "numpy"
        kind = target.number or kind
    cos, sin = angle_tables(kind, target.options.args)[0]  # for halves, as Llama's code has them
    real, imaginary = angle_tables("numpy", target.options.args)[2]
    # (T,d/2) complex numbers of length 1, as in Llama's first code
    turns = to_kind(real + 1j * imaginary, kind)
    tables = {"cos": cos, "sin": sin, "position_embeddings": (cos, sin), "freqs_cis": turns}
    fixed = {}
    for name in names:
        if re.fullmatch(r"(is_)?train(ing)?", name):
            fixed[name] = False
        elif re.fullmatch(CAUSAL, name.lower()):
            # On where nothing was said: what can be causal is checked as such. `check` lets `args` have no such name.
            fixed[name] = target.options.causal is not False
        elif name in target.options.args:
            fixed[name] = target.options.args[name]
        elif name in required and name not in (*inputs, mask):
            fixed[name] = value_of(name, tables)
            if fixed[name] is UNFILLED:
                raise UncheckedError("asks_call", name=name)
    rank = 4 if module is None else 3  # to begin with: the examination tries others
    return Subject(call, kind, tuple(inputs), mask, mask in required, rank, fixed, module=module)
