"""The rule of evidence: code is wrong where it makes sense in one reading, and a property fails in every such reading.

Each adapter of `contract.py` that fits is a trial. A trial under which the correct form gives the learner's numbers
makes the code right. Else the bugs of the catalogue are put into the form, under the likeliest trials. A difference
that no bug explains is the learner's only where nothing was guessed; an error only where it comes with every call.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import re
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headwise.checker import contract as size
from headwise.checker.bugs import (
    UNKNOWN,
    UncheckedError,
    Verdict,
    bug_named,
    in_one_line,
)
from headwise.checker.caches import cache_arguments, cache_bug
from headwise.checker.contract import (
    LAYOUTS,
    LENGTHS,
    Attention,
    Target,
    adapters,
    arguments_of,
    build,
    call_of,
    kind_of_arrays,
    layouts_of,
    meaning_of,
    pick,
    to_kind,
)
from headwise.checker.form import Inputs, Masks, Weights
from headwise.checker.loops import OUTPUTS
from headwise.checker.reading import (
    Parts,
    Reading,
    arrays_of,
    parts_of,
    readings,
    renew,
    role_of,
    scale_is_folded,
    still_norms,
    styles,
    width_of,
)
from headwise.checker.search import (
    Case,
    Search,
    close,
    evidence_of,
    stage_of,
    stages_of,
)
from headwise.checker.source import (
    ENCODINGS,
    Stub,
    meanings_of,
    names_of,
    takes_all_three,
)

SAYS = size.NAMES[
    "says"
]  # words of the learner's code, as patterns, and what they tell
# Of the largest number. bfloat16 keeps 8 bits, so one rounding is off by 0.4 % at most; but several follow one
# another, and of a score of 5 that is an error of 2 % in its weight.
TOLERANCE_OF_16_BITS = 2e-2
# Errors that wrong code raises; others, such as of memory or of the system, say nothing of it.
STOPS = (
    NameError, AttributeError, TypeError, ValueError, IndexError, KeyError, RuntimeError,
    ZeroDivisionError,
)  # fmt: skip

# In the learner's code: a mask that is added as it is passed, what makes a fill, and keys or values that are kept
# without their gradient, as code that only writes texts may do.
ADDED = r"\+=? *\w*mask"
FILLS = r"fill|where\(|tril|triu|inf|mask\w* *\*|\* *\w*mask|1(\.0)? - |== 0"
DETACHED_CACHE = r"self\.\w*(cache|past)\w*.*=.*detach"


class Table(dict[str, Any]):
    """Weights by their names, as `attn_wq`. Any other key, as `layer0.attn_wq`, gets that of its role."""

    def __missing__(self, key: str) -> Any:
        role = role_of(key)
        for name, value in self.items():
            if role is not None and role_of(name) == role:
                return value
        raise KeyError(key)  # code may ask for what is not there, and go on without it


@dataclass
class Built:
    """Something of a learner's that can be called: what holds its weights, the call, the object (None: a function)."""

    holder: Any
    call: Any
    module: Any
    sizes: tuple[int, int, int] | None = (
        None  # of a function without weights that cuts heads: heads, groups, width
    )


@dataclass
class Trial:
    """One adapter that fits: what it was given, how its weights may be read, and what came out."""

    attention: Attention
    readings: list[Reading]
    inputs: Inputs
    parts: Parts = field(default_factory=Parts)
    mask: Any = None  # of the first call, where one is required
    cases: list[Case] = field(default_factory=list)
    causal: bool | None = None
    explanation: Any = None  # an Explanation, once there is one
    shown: dict[str, str] = field(
        default_factory=dict
    )  # bug -> what shows it, of bugs seen by a property
    checked: list[str] = field(default_factory=list)
    left: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


def examine(target: Target) -> Verdict:
    """The verdict on a layer or a function. UncheckedError where it cannot be built or called."""
    examiner = Examiner(target)
    doubtful: list[Verdict] = []
    for built in examiner.builds():
        trials = examiner.trials(built)
        if not trials:
            continue
        verdict = examiner.judged(trials)
        if verdict.right or (verdict.right is False and UNKNOWN not in verdict.bugs):
            return verdict
        doubtful.append(verdict)
        if verdict.right is False and built.sizes is None:
            break
    if doubtful:
        return min(
            doubtful, key=lambda verdict: (verdict.right is False, len(verdict.bugs))
        )
    return examiner.stopped()


class Examiner:
    """One check: the object, what is known of it, and every error on the way."""

    def __init__(self, target: Target) -> None:
        self.target, self.options, self.scope = target, target.options, target.scope
        # so that every check of the same code gives the same verdict
        self.rng = np.random.default_rng(0)
        self.errors: list[Exception] = []
        self.certain = (
            True  # is every argument that a call got one whose name is known?
        )
        self.takes_weights = False
        self.left = len(target.not_checked)

    # Building.

    def builds(self) -> Iterator[Built]:
        """What may be called, the likeliest first: a later one counts where an earlier one does not fit."""
        thing, args = self.target.thing, self.options.args
        if self.target.kind == "function":
            yield from self._functions()
            return
        if not isinstance(thing, type):
            thing = copy.deepcopy(thing)  # it gets other weights, and gradients
            yield Built(thing, call_of(thing), thing)
            return
        names = set(arguments_of(thing))
        attempts = [(args, False), (args, True)]
        if {"d_in", "d_out"} <= names and "HEADS" not in map(meaning_of, names):
            # A single head comes out narrower than its input first, so that a scale by the wrong width shows.
            attempts.insert(0, ({"d_out": size.HEAD_DIM, **args}, False))
        for sizes, theirs in attempts:
            try:
                instance = build(self.target, sizes, theirs)
                yield Built(instance, call_of(instance), instance)
            except Exception as error:
                self.errors.append(error)

    def _functions(self) -> Iterator[Built]:
        thing, number = self.target.thing, self.target.number
        tried = False
        for weights, n_heads in self._weights_as_arguments():
            tried = self.takes_weights = True
            # for what reads weights of an object
            holder = types.SimpleNamespace(**weights, n_heads=n_heads)
            passed = {}
            for name, value in weights.items():
                passed[name] = to_kind(value, number) if number else value
            yield Built(holder, functools.partial(thing, **passed), None)
        if tried:
            return
        first = next(adapters(self.target, thing, None, ["bhtd"]))
        if len(first.inputs) != 3:
            if built := self._adapted():
                yield built
                return
            raise UncheckedError("no_qkv", name=self.target.name)
        split = self._sizes_of_split(first)
        yield Built(None, thing, None, split)

    def _adapted(self) -> Built | None:
        """An adapter by hand: a function of one text that builds a class of its file; here one object for all calls."""
        thing, made = self.target.thing, list[Any]()
        names = dict(thing.__globals__)
        for name in self.target.source.uses(self.target.name):
            kind = names.get(name)
            if isinstance(kind, type):

                def same(*args: Any, kind: type = kind, **kwargs: Any) -> Any:
                    if not made:
                        made.append(kind(*args, **kwargs))
                    return made[0]

                names[name] = same
        call = types.FunctionType(
            thing.__code__, names, thing.__name__, thing.__defaults__
        )
        with contextlib.suppress(Exception):  # the width of the text is not known yet
            call(to_kind(np.zeros((size.BATCH, size.TOKENS, size.WIDTH)), "torch"))
        return Built(made[0], call, made[0]) if made else None

    def _sizes_of_split(self, attention: Attention) -> tuple[int, int, int] | None:
        """Query heads, key/value heads and their width, where the code works with a number of heads; else None.

        Arguments, defaults and constants of the file are the learner's; what is left is ours, and is made to fit them.
        """
        used = set(names_of([self.scope.tree], ast.expr_context))
        variables = names_of([self.scope.tree], ast.Store)
        defaults = {name: p.default for name, p in arguments_of(attention.call).items()}
        theirs = {}  # by meaning; a later place overrides an earlier one
        for place in (self.target.namespace, defaults, self.options.args):
            for name, value in place.items():
                # A name that the code binds itself does not mean the constant of the file.
                is_local = place is self.target.namespace and name in variables
                if name in used and not is_local and type(value) is int:
                    theirs[meaning_of(name)] = value
        ours = set()
        for name in attention.fixed:
            if name in used and name not in self.options.args:
                ours.add(meaning_of(name))
        if "HEADS" not in ours.union(theirs):
            return None
        heads = theirs.get("HEADS", size.HEADS)
        groups = theirs.get("KV_HEADS", size.KV_HEADS if "KV_HEADS" in ours else heads)
        d = theirs.get("HEAD_DIM") or theirs.get("WIDTH", 0) // heads or size.HEAD_DIM
        return heads, groups, d

    def _weights_as_arguments(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Matrices and biases by the arguments of a function that takes them, and its heads: narrow first, then wide.

        Narrow matrices (C,d) fit one head without W_O; they show a scale by the wrong width.
        """
        names = list(arguments_of(self.target.thing))
        table = next(
            (name for name in names if re.fullmatch(SAYS["table"], name)), None
        )
        pattern = r"(attn_)?(w|b|omega|beta)|.*_(weight|proj|bias)s?$"
        wanted = [name for name in names if re.match(pattern, name, re.I)]
        if table:  # a dictionary, whose keys stand in the code as texts
            nodes = [
                node
                for node in ast.walk(self.scope.tree)
                if isinstance(node, ast.Constant)
            ]
            wanted = [node.value for node in nodes if isinstance(node.value, str)]
        # Of those, only names that tell a role (q, k, v, o, ...) are given a matrix or a bias.
        roles = {name: role for name in wanted if (role := role_of(name))}
        if table and {"q", "k", "v"} & set(roles.values()):
            # Code that wrongly takes K for values, too, never names W_V: the table has it all the same.
            roles |= {f"w{role}": role for role in "qkv" if role not in roles.values()}
        if not {"q", "k", "v"} <= set(roles.values()):
            return
        kind = kind_of_arrays(None, self.scope.code)
        kind = (
            "lists" if self.target.number else kind
        )  # of numbers or matrices of its own
        fixed = dict.fromkeys(names)
        heads, groups, d = self._sizes_of_split(
            Attention(self.target.thing, kind, (), fixed=fixed)
        ) or (1, 1, size.WIDTH)
        three = [name for name in wanted if roles.get(name) in ("q", "k", "v")]
        listed = any(
            self.scope.says(rf"\b{name.lower()}\[[a-z]\w*\]") for name in three
        )
        if listed and heads == 1:
            heads, d = size.HEADS, size.HEAD_DIM
            groups = heads
        shapes = functools.partial(self._shape_of, listed, heads, groups, d)
        for narrow, columns in (
            (True, False),
            (False, False),
            (True, True),
            (False, True),
        ):
            if narrow and ("o" in roles.values() or d != size.WIDTH):
                continue
            arrays: dict[str, Any] = {}
            for name, role in roles.items():
                shape = shapes(name, role, size.HEAD_DIM if narrow else 0)
                # 1.2 as in `renew`, which tells why.
                array = self.rng.normal(size=shape) * 1.2 / (heads * d) ** 0.5
                if columns or re.search("_proj_weight|_weight$", name):
                    array = array.T if array.ndim == 2 else array  # (out, in)
                if columns and array.ndim == 1:
                    array = array[:, None]  # a column, where tokens are columns
                arrays[name] = to_kind(np.ascontiguousarray(array), kind)
            yield ({table: Table(arrays)} if table else arrays), heads

    def _shape_of(
        self,
        listed: bool,
        heads: int,
        groups: int,
        d: int,
        name: str,
        role: str,
        narrow: int,
    ) -> tuple[int, ...]:
        """The shape of a matrix (in, out), or a bias (out,), that a function takes.

        listed  has each head a matrix of its own?
        """
        width = heads * d
        inner = narrow or (groups if role in ("k", "v") else heads) * d
        if re.match("b", name.lower().removeprefix("attn_")) or "bias" in name.lower():
            return (width,) if role == "o" else (inner,)
        if listed and role in ("q", "k", "v"):
            return (heads, width, d)
        return (inner, width) if role == "o" else (width, inner)

    # Calling.

    def trials(self, built: Built) -> list[Trial]:
        """Every adapter under which the call comes to an end with an output of the right axes."""
        if built.holder is None:
            return self._trials_of_heads(built)
        target, module = self.target, built.module
        shown: dict[str, str] = {}
        if hasattr(module, "named_parameters"):
            module.eval()
            # torch finds no module in a plain list, so that an optimizer never gets its weights.
            for kept in vars(module).values():
                items = kept if isinstance(kept, list) else []
                if any(hasattr(item, "named_parameters") for item in items):
                    shown["modules-in-list"] = ""
            if still_norms(module):
                shown["norm"] = ""
        try:
            layouts = layouts_of(target)
            self._filled(built, layouts)
            parts = parts_of(built.holder, self.options.mapping)
            if (
                module is not None
                and not parts.weights
                and takes_all_three(arguments_of(built.call))
            ):
                return self._trials_of_heads(Built(None, built.call, module))
            folded = scale_is_folded(
                parts
            )  # as the learner drew the weights: `renew` overwrites them
            renew(arrays_of(built.holder), self.rng)
            choices = readings(target, built.holder, folded)
            width = width_of(parts, self.options.args)
            ways = list(adapters(target, built.call, module, layouts))
            gathers = _gathers(module, ways[0].kind)
            if gathers:
                ways += adapters(target, built.call, module, ["c"])
        except Exception as error:
            self.errors.append(error)
            return []
        trials: list[Trial] = []
        for attention in ways:
            if trials and attention.rank < trials[0].attention.rank:
                break  # code that takes a batch is not judged by a document alone
            self._remember(attention, gathers)
            inputs = self._inputs(attention, (size.BATCH, size.TOKENS, width))
            trial = Trial(attention, choices, inputs, parts, shown=dict(shown))
            if self._runs(trial):
                target.kind = (
                    "layer"  # a function that takes its weights is judged as one
                )
                trials.append(trial)
        return trials

    def _filled(self, built: Built, layouts: list[str]) -> None:
        """Call a module of torch whose weights take their shapes at the first call."""
        parameters: Any = getattr(built.module, "parameters", tuple)()
        if not any("Uninitialized" in type(weight).__name__ for weight in parameters):
            return
        for attention in adapters(self.target, built.call, built.module, layouts):
            inputs = self._inputs(attention, (size.BATCH, size.TOKENS, size.WIDTH))
            if self._runs(Trial(attention, [], inputs)):
                return

    def _remember(self, attention: Attention, gathers: bool) -> None:
        """Keep what the object was before any call, where it keeps tokens."""
        module = attention.module
        if module is None:
            return
        attention.gathers = gathers
        if gathers or cache_arguments(attention) or self.scope.says("cache"):
            # what refers to the module itself is not copied, but goes on to refer to it
            attention.fresh = copy.deepcopy(vars(module), {id(module): module})
        # An object that the learner passed may have been used, and hold tokens; one that was built here does not.
        if not isinstance(self.target.thing, type):
            for name, kept in attention.fresh.items():
                if "cache" in name and (
                    isinstance(kept, tuple) or hasattr(kept, "shape")
                ):
                    attention.fresh[name] = None

    def _trials_of_heads(self, built: Built) -> list[Trial]:
        """Trials of a function of vectors that are projected already: heads cut, or joined where the code cuts them."""
        split = built.sizes
        trials: list[Trial] = []
        self.target.kind = "function"
        ranks = self._ranks()
        names = {4: ["bhtd", "bthd"], 3: ["htd"], 2: ["td"], 1: ["d"]}
        of_joined = {3: "btc", 2: "tc", 1: "c"}
        cut = dict.fromkeys([*ranks, 3, 2]) if split else ()
        forms = [(of_joined[rank], True) for rank in cut if rank < 4]
        forms += [(name, False) for rank in ranks for name in names[rank]]
        for name, joined in forms:
            if trials and split and not joined:
                break  # it splits joined heads itself: what it makes of one head's vectors says nothing
            heads = size.HEADS if name in ("bhtd", "bthd") else 1
            sizes = split or (heads, heads, size.HEAD_DIM)
            for attention in adapters(self.target, built.call, built.module, [name]):
                self._fit_sizes(attention, sizes)
                if joined and trials and attention.rank < trials[0].attention.rank:
                    break
                inputs, choices = self._heads(attention, sizes, joined)
                trial = Trial(attention, choices, inputs)
                if self._runs(trial):
                    trials.append(trial)
                    break
        return trials

    def _fit_sizes(self, attention: Attention, sizes: tuple[int, int, int]) -> None:
        """Arguments that name a size get that of what is passed."""
        heads, groups, d = sizes
        fitting = {
            "HEADS": heads,
            "KV_HEADS": groups,
            "HEAD_DIM": d,
            "WIDTH": heads * d,
        }
        used = names_of([self.scope.tree], ast.expr_context)
        for name in arguments_of(attention.call):
            is_data = name in (*attention.inputs, attention.mask, attention.output)
            is_ours = name in used and not is_data and name not in self.options.args
            if is_ours and meaning_of(name) in fitting:
                attention.fixed[name] = fitting[meaning_of(name)]

    def _heads(
        self, attention: Attention, sizes: tuple[int, int, int], joined: bool
    ) -> tuple[Inputs, list[Reading]]:
        """Queries, keys and values: (B,h,T,d), or (B,T,h*d) where `joined`; and how they may be read."""
        heads, groups, d = sizes
        if not joined:
            shapes = [(size.BATCH, n, size.TOKENS, d) for n in (heads, groups)]
            # nothing is projected
            plain = Reading(Weights(heads, groups, dict.fromkeys("qkvo")))
            return self._inputs(attention, *shapes), [plain]
        joined_shapes = [(size.BATCH, size.TOKENS, n * d) for n in (heads, groups)]
        # Identities as projections, which leave the inputs as they are, so that every layout of heads can be tried.
        identity = {
            "q": np.eye(heads * d),
            "k": np.eye(groups * d),
            "v": np.eye(groups * d),
        }
        choices = list(styles(Reading(Weights(heads, groups, identity)), []))
        return self._inputs(attention, *joined_shapes), choices

    def _ranks(self) -> list[int]:
        """How many axes an input has: as an unpacked shape says, or the documentation; else all are tried."""
        text = self.scope.text
        docs = "\n".join(re.findall(r'#.*$|"""(?:.|\n)*?"""', text, re.M))
        # `B, T, C = x.shape` in the code; `(B, T, C)` in a comment, before the end of a line, a colon, `array`, `->`.
        unpacked = r"^\s*([\w]+(?:\s*,\s*\w+)+)\s*=\s*\w+\.(?:shape|size\(\))\s*$"
        written = r"\(([A-Za-z_]+(?:\s*,\s*[A-Za-z_]+){1,3})\)\s*(?:$|[,.;:#-]|array|list|tensor|->)"
        for match in (re.search(unpacked, text, re.M), re.search(written, docs, re.M)):
            axes = 0 if match is None else match[1].count(",") + 1
            if 2 <= axes <= 4:
                # of 2 axes may be the keys alone, and the query a vector
                return [2, 1] if axes == 2 else [axes]
        # Code that exchanges the last two axes by their numbers from behind has others before them.
        is_batched = self.scope.says(r"(transpose|swapaxes)\([^)]*-2|\.mt\b")
        return [4, 3] if is_batched else [4, 3, 2, 1]

    def _inputs(
        self,
        attention: Attention,
        shape: tuple[int, ...],
        of_keys: tuple[int, ...] = (),
    ) -> Inputs:
        """Queries, keys and values: different as far as the code takes them apart."""
        shapes = (shape, of_keys or shape, of_keys or shape)
        x, y, z = (self.rng.normal(size=each) for each in shapes)
        count = len(attention.inputs)
        if count == 1:
            return x, x, x
        return x, y, y if count == 2 else z

    def _runs(self, trial: Trial) -> bool:
        """Does a call come to an end? Where a mask is required, None or some form of one is passed."""
        attention = trial.attention
        masks = self._first_masks(trial) if attention.mask_required else [None]
        for mask in masks:
            try:
                if mask is None and attention.mask_required:
                    attention.fixed[str(attention.mask)] = None
                out = attention(trial.inputs, mask)
                if np.ptp(out) == 0:
                    raise UncheckedError("returns_nothing", name=self.target.name)
            except Exception as error:
                self.errors.append(error)
                self.certain &= not attention.guessed and not attention.mask_required
                attention.fixed.pop(str(attention.mask), None)
                if attention.fresh:
                    attention.restart()
                continue
            trial.mask = mask
            if mask is None:
                attention.mask_required = False
            if attention.fresh:
                attention.restart()
            return True
        return False

    def _first_masks(self, trial: Trial) -> list[Any]:
        """None, and masks of every form that forbid nothing but the future, or what is padded."""
        B, T, S = (
            len(trial.inputs[0]),
            trial.inputs[0].shape[-2],
            trial.inputs[1].shape[-2],
        )
        name = str(trial.attention.mask)
        past = np.tril(np.ones((1, 1, T, S), bool))
        real = np.arange(S)[None] < LENGTHS[:B, None]
        shapes = [*{**_laid_out(past, None, B), **_laid_out(past, real, B)}.values()]
        if re.search(SAYS["padding"], name, re.I):
            shapes.reverse()
        meanings = meanings_of(self.scope, self.target.source, name)
        if trial.attention.is_lengths:
            return [None, LENGTHS[:B]]
        masks = [None, *(ENCODINGS[meanings[0]](shape) for shape in shapes)]
        return [*masks, *(ENCODINGS[meanings[-1]](shape) for shape in shapes)]

    # Judging.

    def judged(self, trials: list[Trial]) -> Verdict:
        """Right under one trial; else the bugs that explain the likeliest one; else what differs."""
        self.target.not_checked[self.left :] = []
        self.target.checked.clear()
        ready = []
        for trial in trials:
            with contextlib.suppress(UncheckedError):
                trial.causal = self._causal(trial.attention)
                trial.cases = list(self._cases(trial))
                if trial.cases:
                    ready.append(trial)
        if not ready:
            raise UncheckedError("no_form_of_mask", name=self.target.name)
        for trial in ready:
            search = self._search(trial, 1)
            for guess, cases in self._guesses(trial).items():
                if explanation := search.right(trial.readings, cases):
                    trial.cases, trial.causal, trial.explanation = (
                        cases,
                        guess,
                        explanation,
                    )
                    return self._verdict(trial)
        return self._with_bugs(ready)

    def _guesses(self, trial: Trial) -> dict[bool, list[Case]]:
        """The cases by whether the code is taken to be causal; what is not told is tried both ways."""
        if trial.causal is not None:
            return {trial.causal: trial.cases}
        ahead = [
            replace(case, masks=replace(case.masks, causal=True))
            for case in trial.cases
        ]
        return {False: trial.cases, True: ahead}

    def _search(self, trial: Trial, share: float, pairs: bool = False) -> Search:
        fills = [
            x for x in self.scope.numbers if x < 1e-3
        ]  # may stand for a forbidden score
        return Search(fills, self.options.seconds * share, self._has(trial), pairs)

    def _with_bugs(self, trials: list[Trial]) -> Verdict:
        """Single bugs under every trial, then pairs under the likeliest; roundings of 16 bits last."""
        first = trials[0]
        is_narrow = self.scope.says(r"half\(|float16|autocast")
        self._properties(first)
        rounds = [(trial, False) for trial in trials[:3]]
        may_accuse = self._may_accuse(first)
        if "batch-mixed" not in first.shown and not is_narrow and may_accuse:
            rounds.append((first, True))
        for trial, pairs in rounds:
            for guess, cases in self._guesses(trial).items():
                share = 1 / (len(rounds) * len(self._guesses(trial)))
                search = self._search(trial, share, pairs)
                explanation = search.explain(trial.readings, cases)
                # the first case is explained, so the guess is right
                if cases[0].name not in explanation.unexplained:
                    trial.cases, trial.causal, trial.explanation = (
                        cases,
                        guess,
                        explanation,
                    )
                    break
                trial.explanation = trial.explanation or explanation
            if trial.cases[0].name not in trial.explanation.unexplained:
                return self._verdict(trial, trial is not first)
        if is_narrow:
            search = self._search(first, 1)
            search.tolerance = TOLERANCE_OF_16_BITS
            close_by = search.explain(first.readings, first.cases)
            if not close_by.unexplained:
                first.explanation = close_by
                first.checked.append("rounded")
                if not self.scope.says(SAYS["wide"]):
                    first.shown["softmax-narrow"] = ""
        first.causal = bool(first.causal)
        return self._verdict(first, False)

    def _causal(self, attention: Attention) -> bool | None:
        """Ought it to be causal? None where nothing tells."""
        if attention.rank == 1 and attention.mask is None and not attention.gathers:
            return False  # one query: it may see whatever keys it is given
        if self.options.causal is not None:
            return self.options.causal
        told = (
            attention.rank == 1  # token by token
            or attention.is_told_causal
            or re.search(SAYS["causal_name"], self.target.name, re.I)
            # what `loops` writes around a loop: token by token
            or self.scope.says(rf"{SAYS['causal']}|{OUTPUTS}")
            or self.scope.tells(
                r"(?<!not )(?<!non-)(?<!non)(?<!no )(?<!sin )(causal|future)"
            )
        )
        return True if told else None

    def _has(self, trial: Trial) -> set[str]:
        """What this code has, of that which bugs need."""
        reading = trial.readings[0]
        w = reading.weights
        has = {
            "heads": w.matrices.get("q") is not None and w.n_heads > 1,
            "weights": self.target.kind == "layer",
            "groups": w.n_heads != w.n_kv_heads,
            "biases": w.biases,
            "output": w.matrices.get("o") is not None,
            "rope": "rope" in reading.settings,
            "context": len(trial.attention.inputs) == 2,
        }
        return {what for what, so in has.items() if so}

    def _cases(self, trial: Trial) -> Iterator[Case]:
        """Plain; and, where a mask can be passed, a causal one and one for each document."""
        attention, inputs, causal = trial.attention, trial.inputs, bool(trial.causal)
        B, T = inputs[0].shape[0], inputs[0].shape[-2]
        # Causal without its argument: the code makes a mask of its own.
        alone = (
            attention.mask is None or attention.is_lengths or attention.is_told_causal
        )
        says = self.scope.says(r"tril|triu|is_causal|arange|\.tri\(")
        if self.scope.says(rf"is_causal\s*=\s*[^,)]*\b{attention.mask}\b"):
            says = self.scope.says("tril|triu")  # causal only where a mask is passed
        by_itself = alone or self.options.causal or says
        masks_itself = bool(causal and by_itself)
        if not attention.mask_required:
            yield Case("plain", inputs, Masks(masks_itself), {"": attention(inputs)})
            trial.checked.append("plain")
        yield from self._further(trial, masks_itself)
        if attention.mask is None:
            return
        past = np.tril(np.ones((T, T), bool))
        real = np.arange(T)[None] < LENGTHS[:B, None]  # (B,S)
        of_documents = real[:, None, None] & (
            past if masks_itself else np.ones((T, T), bool)
        )
        cases = [
            ("mask", past[None, None], Masks(True)),
            ("padding", of_documents, Masks(masks_itself, real)),
        ]
        if re.search(SAYS["padding"], attention.mask, re.I) or attention.is_lengths:
            cases = cases[1:]  # by its name it is for padding alone
        before: list[Any] = []
        for name, allowed, masks in cases:
            outputs = self._masked(trial, allowed, masks.real)
            # Where it gives the same as before, any mask makes it causal, whatever it says.
            new = [x for x in outputs.values() if not any(close(x, y) for y in before)]
            before += outputs.values()
            if new:
                yield Case(name, inputs, masks, outputs)
                trial.checked.append(name)
            else:
                trial.left.append((f"no_{name}", {}))

    def _further(self, trial: Trial, masks_itself: bool) -> Iterator[Case]:
        """What the code takes by choice: lengths of the documents; another text to make keys and values of.

        Where the call fails the argument stays among those that were not tried.
        """
        attention, inputs = trial.attention, trial.inputs
        read = names_of([self.scope.tree], ast.Load)
        for name, parameter in arguments_of(attention.call).items():
            if (
                parameter.default is not None or name not in read
            ):  # by choice: its default is None
                continue
            case, call = "", attention
            if (
                size.CALL["lengths"].fullmatch(name)
                and attention.rank == 3
                and name != attention.mask
            ):
                lengths = to_kind(LENGTHS, attention.kind)
                call = replace(attention, fixed={**attention.fixed, name: lengths})
                real = np.arange(inputs[0].shape[-2])[None] < LENGTHS[:, None]
                case, passed, masks = "padding", inputs, Masks(masks_itself, real)
            elif (
                re.fullmatch(SAYS["contexts"], name)
                and len(attention.inputs) == 1
                and not masks_itself
            ):
                other = self.rng.normal(size=inputs[0].shape)
                call = replace(attention, inputs=(*attention.inputs, name))
                case, passed, masks = "context", (inputs[0], other, other), Masks()
            if case:
                # of the call, which comes before the case is handed out
                with contextlib.suppress(Exception):
                    yield Case(case, passed, masks, {"": call(passed)})
                    trial.checked.append(case)

    def _masked(self, trial: Trial, allowed: Any, real: Any) -> dict[str, Any]:
        """Outputs with a mask, by the form in which it was passed; forms that the code refuses are left out."""
        attention, inputs = trial.attention, trial.inputs
        if attention.is_lengths:
            return {"lengths": attention(inputs, LENGTHS[: len(inputs[0])])}
        outputs = {}
        for meaning in meanings_of(self.scope, self.target.source, str(attention.mask)):
            for shape, mask in _laid_out(allowed, real, len(inputs[0])).items():
                # a form of the mask that this code does not take
                with contextlib.suppress(Exception):
                    outputs[f"{shape} {meaning}"] = attention(
                        inputs, ENCODINGS[meaning](mask)
                    )
        return outputs

    # Properties.

    def _properties(self, trial: Trial) -> None:
        """Does dropout rest in eval, and fall on weights; do gradients arrive, do documents meet, does a cache hold?"""
        attention, case, mask = trial.attention, trial.cases[0], trial.mask
        base, again = attention(case.inputs, mask), attention(case.inputs, mask)
        same = np.array_equal(base, again, equal_nan=True)
        drops = self.scope.says(r"drop|bernoulli|binomial|rand")
        if attention.seen.in_eval or (drops and not same):
            trial.shown["dropout-in-eval"] = ""
        # one key alone weighs 1, whatever the query
        if (
            trial.parts.weights
            and hasattr(attention.module, "train")
            and attention.rank > 1
        ):
            self._gradients(trial, drops)
        if callable(getattr(attention.module, "backward", None)) and same:
            try:
                if wrong := _wrong_slopes(attention, case.inputs[0]):
                    trial.shown["backward-wrong"] = self.target.say(
                        "slope", names=", ".join(wrong)
                    )
                trial.checked.append("gradients_by_hand")
            except Exception as error:  # it may want other things than we pass
                trial.left.append(("no_gradients", {"failure": in_one_line(error)}))
        # Another first document: what comes out for the rest of the batch must stay.
        if attention.rank == case.inputs[0].ndim and same:
            drawn = [self.rng.normal(size=x[:1].shape) for x in case.inputs]
            others = [
                np.concatenate([y, x[1:]])
                for x, y in zip(case.inputs, drawn, strict=True)
            ]
            q, k, v = others[:1] * 3 if len(attention.inputs) == 1 else others
            if not close(attention((q, k, v), mask)[1:], base[1:]):
                trial.shown["batch-mixed"] = ""
            trial.checked.append("batch")
        if (
            attention.module is not None
            and len(attention.inputs) == 1
            and attention.rank == 3
        ):
            try:
                steps = cache_bug(
                    attention,
                    case.inputs[0],
                    base,
                    self.target,
                    self._causal_mask(trial),
                )
            except UncheckedError as error:
                trial.left.append((error.key, error.facts))
                return
            if steps is not None:
                trial.checked.append("steps")
                attention.passed.update(cache_arguments(attention))
                trial.shown.update(steps)

    def _causal_mask(self, trial: Trial) -> Any:
        """What makes a causal mask for some queries, from `start` on: of a layer that is causal by its mask alone."""
        explanation, name = trial.explanation, str(trial.attention.mask)
        case = next((case for case in trial.cases if case.name == "mask"), None)
        if trial.causal or not explanation or not case or trial.attention.is_lengths:
            return None
        stages = stages_of(
            explanation.reading, explanation.by_case.get("mask", {}), case
        )
        if stages is None:
            return None
        fitting = [form for form, out in case.outputs.items() if close(out, stages.out)]
        if not fitting:
            return None
        shape, _, meaning = fitting[0].partition(" ")

        def mask(start: int, n: int) -> Any:
            past = np.tril(np.ones((1, 1, n, start + n), bool), start)
            form = _laid_out(past, None, len(case.inputs[0]))[shape]
            return {name: to_kind(ENCODINGS[meaning](form), trial.attention.kind)}

        return mask

    def _gradients(self, trial: Trial, drops: bool) -> None:
        """In training, does a gradient reach every projection, and does dropout fall on weights?"""
        attention = trial.attention
        attention.module.train()
        attention.learns = True
        try:
            attention(trial.cases[0].inputs, trial.mask)
            for role, arrays in parts_of(
                attention.module, self.options.mapping
            ).weights.items():
                for weight in (array.holder for array in arrays):
                    missing = weight.grad is None or (weight.grad == 0).all(-1).any()
                    if (
                        weight.requires_grad
                        and missing
                        and self.scope.says(DETACHED_CACHE)
                    ):
                        if ("cached_gradients", {}) not in trial.left:
                            trial.left.append(("cached_gradients", {}))
                    elif weight.requires_grad and missing:
                        name = f"W_{role.upper()}"
                        trial.shown["no-gradient"] = self.target.say(
                            "unreached", name=name
                        )
            trial.checked.append("gradients")
            if drops:
                trial.checked.append("dropout")
        except Exception as error:  # only these two checks are lost
            trial.left.append(("no_gradients", {"failure": in_one_line(error)}))
            if drops:
                trial.left.append(("no_dropout", {}))
        attention.learns = False
        attention.module.eval()
        if attention.seen.on_scores:
            trial.shown["dropout-on-scores"] = ""

    # Words.

    def _verdict(self, trial: Trial, again: bool = True) -> Verdict:
        """Put into words what explains the numbers, what properties show, and what nothing explains."""
        if again:
            self._properties(trial)
        explanation, target = trial.explanation, self.target
        self._notes(trial)
        had_norm = trial.shown.pop("norm", None) is not None
        bugs = [self._renamed(bug) for bug in explanation.bugs]
        # Where documents meet, no form here computes the same numbers: that bug alone explains them.
        explained = not explanation.unexplained or "batch-mixed" in trial.shown
        for bug in map(self._renamed, trial.shown):
            # a pattern of bugs beside which this property says nothing
            hidden_by = bug_named(bug).hidden_by
            if (
                bug == "no-gradient" and not explained
            ):  # then the output is not right either
                continue
            if not any(re.fullmatch(hidden_by, other) for other in bugs):
                bugs.append(bug)
        if self._lacks_output(trial):
            bugs.append("output-projection-missing")
        if explanation.unexplained and "dropout-in-eval" in bugs:
            explained = True  # no numbers are alike while it draws
            target.left_out("not_still")
        # Who only adds what is passed has no fill of their own: what it must be is not known here.
        added = (
            "mask-weak-fill" in bugs
            and self.scope.says(ADDED)
            and not self.scope.says(FILLS)
        )
        if added:
            bugs.remove("mask-weak-fill")
            target.left_out("added_mask")
        # None: neither right nor wrong can be said.
        right: bool | None = not bugs and explained
        if added and not bugs:
            right = None
        if not explained and not self._may_accuse(trial):
            right = False if bugs else None
            target.left_out("beyond")
        if had_norm:
            target.left_out("norm")
        # A window gets our CONTEXT for its size, which is longer than our text: it hides nothing.
        if explained and self.scope.says("window_size|sliding_window"):
            target.left_out("window")
        if explanation.settings.get("residual"):
            target.did("residual")
        if self.scope.says(r"fill|mask|where"):
            for fill in self.scope.numbers:
                # too large to be anything else than a fill; float16 ends at -65504
                if fill <= -1e3:
                    target.left_out(
                        "not_16_bits" if fill < -65504 else "weak_16_bits", fill=fill
                    )
        findings = [self._finding(trial, bug) for bug in dict.fromkeys(bugs)]
        if not explained and right is False:
            cases = trial.cases
            case = next(
                (case for case in cases if case.name in explanation.unexplained),
                cases[0],
            )
            clues = [
                stage_of(explanation, case, target.say),
                trial.shown.get("no-gradient"),
            ]
            findings.append(target.finding(UNKNOWN, "; ".join(filter(None, clues))))
        return target.verdict(right, tuple(findings))

    def _notes(self, trial: Trial) -> None:
        """What was checked and what not, as phrases."""
        attention, target = trial.attention, self.target
        if attention.layout is LAYOUTS["tbc"]:
            target.did("tokens_first")
        for key in dict.fromkeys(trial.checked):
            target.did(key)
        for key, facts in trial.left:
            target.left_out(key, **facts)
        names = [
            name for name in arguments_of(attention.call) if name != attention.mask
        ]
        if untried := [name for name in names if name not in attention.passed]:
            target.left_out("untried", names=", ".join(untried))
        one_query = (
            attention.rank == 1 and attention.mask is None and not attention.gathers
        )
        target.did(
            "one_query" if one_query else "causal" if trial.causal else "not_causal"
        )

    def _finding(self, trial: Trial, bug: str) -> Any:
        explanation, say = trial.explanation, self.target.say
        shown = trial.shown.get(bug)
        evidence = shown or evidence_of(bug_named(bug), explanation, trial.cases, say)
        finding = self.target.finding(bug, evidence)
        fixes = [finding.fix]  # and what the remedy means in this code
        if "einsum" in finding.quote:
            fixes.append(say("einsum_fix"))
        if bug == "bias-dropped" and (roles := explanation.settings.get("no_bias")):
            names = ", ".join(f"W_{role.upper()}" for role in roles)
            fixes.append(say("bias_fix", roles=names))
        return replace(finding, fix=" ".join(fixes))

    def _lacks_output(self, trial: Trial) -> bool:
        """Has it several heads, no matrix W_O, and no other class that may hold it?"""
        weights = trial.explanation.reading.weights
        # A list of heads, and a function that loops over them, may join them without W_O, as courses do.
        loop = r"modulelist|for \w+ in self\.\w*heads?"
        if inspect.isfunction(self.target.thing):
            loop += r"|range\("
        n_listed = len(trial.parts.weights.get("q", ()))
        source, name = self.target.source, self.target.name
        outside = any(
            name in source.uses(other) for other in source.definitions if other != name
        )
        may_stand_outside = (
            outside or re.search("bert", name, re.I) or self.scope.says("all_head_size")
        )
        is_multi_head = weights.n_heads > 1 and self.target.kind == "layer"
        return bool(
            is_multi_head and n_listed <= 1 and not self.scope.says(loop)
            and weights.matrices.get("o") is None and not may_stand_outside
        )  # fmt: skip

    def _may_accuse(self, trial: Trial) -> bool:
        """Is everything known, so that a difference which no bug explains is the learner's?"""
        if (
            trial.attention.guessed
            or trial.parts.unread
            or self.scope.says(SAYS["not_modelled"])
        ):
            return False
        # Does the code call functions of which the form may know nothing?
        names, local = set(), {*self.target.source.definitions}
        local.update(names_of([self.scope.tree], ast.Store))
        for node in ast.walk(self.scope.tree):
            if isinstance(node, ast.Call):
                names.add(getattr(node.func, "attr", getattr(node.func, "id", "")))
            elif isinstance(node, ast.FunctionDef):
                local.add(node.name)
        module = trial.attention.module
        kept = {**getattr(module, "__dict__", {}), **getattr(module, "_modules", {})}
        known = {name for name in kept if hasattr(kept[name], "forward")}
        return all(
            re.fullmatch(SAYS["calls"], name) or role_of(name)
            for name in names - local - known
        )

    def _renamed(self, bug: str) -> str:
        """The bug that gives the numbers of this one in code such as the learner's."""
        rules = bug_named(bug).renamed
        return next(
            (rule["to"] for rule in rules if self.scope.says(rule["code"])), bug
        )

    # Errors.

    def stopped(self) -> Verdict:
        """The verdict on code that stops whatever it is given: wrong at its line, unless we may be the cause."""
        if not self.errors:
            raise UncheckedError("no_qkv", name=self.target.name)
        error = max(self.errors, key=self._reached)
        frames = self._frames(error)
        is_bare = inspect.isfunction(self.target.thing) and not self.takes_weights
        if is_bare and not isinstance(error, UncheckedError):
            reason = in_one_line(error)
            raise UncheckedError("call_fails", name=self.target.name, error=reason)
        # a base or a decorator that is not installed may have what is missing
        is_code = isinstance(error, STOPS) and not isinstance(error, UncheckedError)
        if not is_code or not frames or self._has_stubs():
            raise error
        # A name that their own class or file lacks is theirs, whatever we passed.
        owners = "|".join(map(re.escape, self.target.source.definitions))
        missing = re.search(r"name '(\w+)' is not", str(error))
        elsewhere = missing and missing[1] in names_of(
            [self.target.source.tree], ast.Store
        )
        is_name = (isinstance(error, NameError) and not elsewhere) or bool(
            isinstance(error, AttributeError)
            and re.search(rf"'({owners})' object", str(error))
        )
        # A size that its __init__ refuses, and axes that cannot be unpacked, are ours; a graphics card the machine's.
        is_of_sizes = frames[-1].name == "__init__" and not isinstance(
            error, AttributeError
        )
        is_of_axes = re.search(
            r"unpack|cuda|NVIDIA|subscriptable|NoneType|keyword|positional", str(error)
        )
        is_of_shapes = self.takes_weights and not isinstance(
            error, IndexError | KeyError
        )
        if not is_name and (
            is_of_sizes or is_of_axes or is_of_shapes or not self.certain
        ):
            raise error
        # A helper is right most often, and what it is given is not.
        callers = [
            f for f in reversed(frames) if not re.search(SAYS["helpers"], f.name)
        ]
        line = (callers or frames)[0].lineno or 1
        evidence, bug = in_one_line(error), "raises"
        # Code that stops at our shorter text, and not at one that fills the context, is fixed to that length. Where
        # it stops there as well, the suppressed error skips the rest of this block.
        with contextlib.suppress(Exception):
            instance = build(self.target, self.options.args)
            whole_context = np.ones((size.BATCH, size.CONTEXT, size.WIDTH))
            attention = next(
                adapters(self.target, call_of(instance), instance, ["btc"])
            )
            attention((whole_context,) * 3)
            facts = {"context": size.CONTEXT, "tokens": size.TOKENS, "error": evidence}
            evidence, bug = self.target.say("fits_whole", **facts), "length-fixed"
        finding, source = self.target.finding(bug, evidence), self.target.source
        quote = source.lines[line - 1].strip()
        return self.target.verdict(
            False, (replace(finding, line=source.number_of(line), quote=quote),)
        )

    def _has_stubs(self) -> bool:
        """Does a class that is used here build on what is not there?"""
        source = self.target.source
        for name in source.reach(self.target.name):
            node = source.definitions[name]
            outer = [*getattr(node, "bases", ()), *node.decorator_list]
            for each in names_of(outer, ast.Load):
                if isinstance(self.target.namespace.get(each), Stub):
                    return True
        return False

    def _frames(self, error: Exception) -> list[traceback.FrameSummary]:
        """Where in the learner's file an error arose, the outermost call first."""
        frames = traceback.extract_tb(error.__traceback__)
        return [frame for frame in frames if frame.filename == self.target.source.path]

    def _reached(self, error: Exception) -> tuple[bool, int]:
        """Did the call come to its end, and else in which line did it stop?"""
        frames = self._frames(error)
        # An UncheckedError is raised by what reads the result, after the call.
        return isinstance(error, UncheckedError), (
            frames[0].lineno or 0
        ) if frames else 0


def _laid_out(allowed: Any, real: Any, B: int) -> dict[str, Any]:
    """The forms in which code may take a mask (1,1,T,S) or (B,1,T,S); `real` (B,S) where it is one of padding."""
    whole = np.repeat(allowed, B // len(allowed), 0)
    forms = {"(B,1,T,S)": whole, "(B,T,S)": whole[:, 0]}
    if real is None:
        return {"(T,S)": allowed[0, 0], **forms}
    return {**forms, "(B,1,1,S)": real[:, None, None], "(B,S)": real}


def _gathers(module: Any, kind: Any) -> bool:
    """Does the object gather tokens? A list, or a list for each head, is empty until the first token is there.

    Not of torch: each of its modules has empty dictionaries, such as those of its hooks.
    """
    if module is None or kind == "torch":
        return False
    kept = vars(module).values()
    return any(isinstance(value, list | dict) and not any(value) for value in kept)


def _wrong_slopes(attention: Attention, x: Any) -> list[str]:
    """Of what a `backward` written by hand gives a wrong gradient: x, or names of weights; empty where all are right.

    That of the input is what it returns; that of a weight W is what the object then keeps as dW, d_W, grad_W or W_grad,
    or as W in a dictionary. Each is held against the difference that a small step makes.
    """
    module = attention.module
    x = np.array(x if attention.rank == x.ndim else x[0])

    def output() -> Any:
        arguments = dict.fromkeys(attention.inputs, to_kind(x, attention.kind))
        return pick(attention.result(arguments, x.shape[-2]), x.shape)

    # it may be narrower than the input
    slope = np.random.default_rng(2).normal(size=output().shape)
    pairs = {"x": (x, pick(module.backward(to_kind(slope, attention.kind)), x.shape))}
    kept = dict(vars(module))
    # `grads["W_q"]` of a dictionary is looked for as `dW_q`.
    for holder in vars(module).values():
        items = holder.items() if isinstance(holder, dict) else ()
        kept.update({f"d{key}": value for key, value in items})
    for name, weight in vars(module).items():
        for other in {f"d{name}", f"d_{name}", f"grad_{name}", f"{name}_grad"} & set(
            kept
        ):
            pairs[name] = weight, kept[other]
    # Of the step in each number. Roundings of float32, and the bend of the function, come to less than the 2 % below.
    length = 1e-3
    wrong = []
    for name, (place, gradient) in pairs.items():
        step = length * np.random.default_rng(3).normal(size=place.shape)
        # in place, so that the learner's object itself computes with it; put back below
        place += step
        change = output()
        place -= 2 * step
        change = change - output()
        place += step
        difference = float((change * slope).sum())
        # A random step changes the sum by about |gradient| * length, on either side; that is the measure.
        most = 0.02 * float(np.linalg.norm(gradient) * length)
        if abs(difference - 2 * float((gradient * step).sum())) > most:
            wrong.append(name)
    return wrong
