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
import itertools
import re
import sys
import time
import traceback
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import numpy as np

from headwise.checker import contract as size
from headwise.checker.bugs import (
    UNKNOWN,
    Finding,
    Settings,
    UncheckedError,
    Verdict,
    bug_named,
    in_one_line,
)
from headwise.checker.caches import cache_arguments
from headwise.checker.contract import (
    CALL,
    LAYOUTS,
    LENGTHS,
    Attention,
    Target,
    adapters,
    arguments_of,
    build,
    call_of,
    is_config,
    layouts_of,
    meaning_of,
    parameters_of,
    to_kind,
)
from headwise.checker.form import Inputs, Masks, Weights
from headwise.checker.handed import handed
from headwise.checker.properties import Trial, masks_handed, properties_of
from headwise.checker.reading import (
    Reading,
    are_all,
    arrays_of,
    parts_of,
    readings,
    renew,
    role_of,
    roles_of,
    scale_is_folded,
    still_parts,
    styles,
    to_eval,
    width_of,
)
from headwise.checker.repair import repaired
from headwise.checker.search import (
    Case,
    Explanation,
    Search,
    close,
    evidence_of,
    stage_of,
)
from headwise.checker.source import (
    ENCODINGS,
    FUTURE,
    Stub,
    attends,
    bound_by,
    laid_out,
    meanings_of,
    names_of,
    takes_all_three,
)
from headwise.table import listed

# words of the learner's code, as patterns, and what they tell
SAYS = size.NAMES["says"]
OWN_TRIANGLE = r"\btri[lu]?\(|is_causal"
# Values for what no name tells: a width first.
GUESSES = (size.WIDTH, size.HEADS, size.HEAD_DIM, size.TOKENS, 1, False, None)
TEXTS = (size.BATCH, size.TOKENS, size.WIDTH)
# Of the largest number. bfloat16 keeps 8 bits, so one rounding is off by 0.4 % at most; but several follow one
# another, and of a score of 5 that is an error of 2 % in its weight.
TOLERANCE_OF_16_BITS = 2e-2


@dataclass
class Built:
    """Something of a learner's that can be called: what holds its weights (None: nothing), the call, the object.

    sizes  of a function without weights that cuts heads: heads, groups, width of one
    """

    holder: Any
    call: Any
    module: Any = None
    sizes: tuple[int, int, int] | None = None


def examine(target: Target) -> Verdict:
    """The verdict on a layer or a function. UncheckedError where it cannot be built or called."""
    examiner = Examiner(target)
    try:
        verdict = examiner.verdict()
    except Exception as error:
        bug = "raises"
        evidence = in_one_line(error)
        if isinstance(error, UncheckedError):
            bug = UNKNOWN
            evidence = error.text(target.options.lang)
        # of what was not called at all no change tells anything
        is_called = getattr(error, "key", "returns_shape") == "returns_shape"
        mended = examiner.repaired(bug, evidence) if is_called else None
        if mended is None:
            raise
        return target.verdict(False, (mended,))
    # that documents meet a property shows, and no pattern tells its line
    bug = "batch-mixed" if "batch-mixed" in verdict.bugs else UNKNOWN
    if verdict.right or (verdict.bugs and bug == UNKNOWN):
        return verdict
    told = [each.evidence for each in verdict.findings if each.bug == bug]
    evidence = told[0] if told else target.say("repair_evidence")
    mended = examiner.repaired(bug, evidence)
    return target.verdict(False, (mended,)) if mended else verdict


def _misspelt(error: str) -> re.Match[str] | None:
    """A name that torch lacks, and has but for a letter: what is new in a later version is another one."""
    match = re.search(r"'(torch\S*|Tensor)'.* has no attribute '(\w+)'", error)
    torch = sys.modules.get("torch")
    names = [*dir(torch), *dir(getattr(torch, "Tensor", None))]
    return match if match and get_close_matches(match[2], names, 1, 0.88) else None


class Examiner:
    """One check: the object, what is known of it, and every error on the way."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.options = target.options
        self.scope = target.scope
        # so that every check of the same code gives the same verdict
        self.rng = np.random.default_rng(0)
        self.errors: list[Exception] = []
        # is every argument that a call got one whose name is known?
        self.certain = True
        self.takes_weights = False
        # are its own defaults kept, of which one may switch a mask off?
        self.keeps_defaults = False
        self.left = len(target.not_checked)
        # Were two bugs at once, and a small change, looked for? Of what was built first alone.
        self.was_paired = self.was_repaired = False
        # `seconds` for the bugs of what is built first, as many for a small change, half for what is built later
        self.until = time.process_time() + 2.5 * target.options.seconds
        self.names = set[str]()  # of the cases that came to an end
        self.rests = False  # are matrices whose role nothing tells 0?
        self.guessed = set[str]()  # names that no pattern knows, and got a value
        # is nothing of what was called a guess?
        self.is_sure = not target.guesses
        # do the caller, its name or its text say that it is causal?
        is_named = re.search("(?<!non)(?<!non_)causal", target.name, re.I)
        told = is_named or self.scope.tells(SAYS["causal_text"])
        self.is_told = bool(target.options.causal or told)

    def verdict(self) -> Verdict:
        """Right under one way to build and to call it; else the bugs of the first; else what stopped every call."""
        doubtful: list[Verdict] = []
        for trials, searches in itertools.chain.from_iterable(
            map(self._tries, self.builds())
        ):
            verdict = self.judged(trials, searches)
            if verdict and (self.target.lacks or verdict.right is not None):
                return verdict
            doubtful += [verdict] if verdict else []
        return doubtful[0] if doubtful else self.stopped()

    def _tries(self, built: Built) -> Iterator[tuple[list[Trial], bool]]:
        """The trials of what was built, and whether bugs are looked for in them.

        What no name tells rests at 0 the second time, as a table of relative positions may.
        """
        trials = self.trials(built)
        if not trials:
            return
        unread = trials[0].parts.unread
        yield trials, not unread
        for self.rests in (True, False) if unread else ():
            if trials := self.trials(built):
                yield trials, True

    # Building.

    def builds(self) -> Iterator[Built]:
        """What may be called, the likeliest first: a later one counts where an earlier one does not fit."""
        thing = self.target.thing
        args = self.options.args
        if self.target.kind == "function":
            for weights, sizes in handed(self.target, self._sizes_of_split, self.rng):
                self.takes_weights = True
                # for what reads weights of an object
                holder = types.SimpleNamespace(**weights, n_heads=sizes["HEADS"])
                if kind := self.target.number:
                    weights = to_kind(weights, kind)
                yield Built(holder, functools.partial(thing, **weights))
            if self.takes_weights:
                return
            first = next(adapters(self.target, thing, None, ["bhtd"]))
            if len(first.inputs) == 3:
                yield Built(None, thing, None, self._sizes_of_split(first.fixed))
                return
            if made := self._beside() or self._hoisted() or self._adapted():
                yield made
                return
            raise UncheckedError("no_qkv", name=self.target.name)
        self.target.sizes = args
        if not isinstance(thing, type):
            thing = copy.deepcopy(thing)  # it gets other weights, and gradients
            yield Built(thing, call_of(thing), thing)
            return
        # some are handed their weights
        ways = handed(self.target, self._sizes_of_split, self.rng)
        drawn = [{**sizes, **weights} for weights, sizes in ways]
        known = {*args, *size.VALUES, *itertools.chain.from_iterable(drawn)}
        attempts = [
            ({**sizes, **weights}, theirs)
            for weights in (*drawn, {})
            for sizes, theirs in self._sizes()
        ]
        for sizes, theirs in attempts:  # the list grows in the loop
            guessed = {x for x in sizes.keys() - known if meaning_of(x) != "WIDTH"}
            self.guessed = guessed
            self.target.guesses |= bool(guessed)
            self.target.sizes = sizes
            try:
                instance = build(self.target, sizes, theirs)
                self.keeps_defaults = theirs
                yield Built(instance, call_of(instance), instance)
            except Exception as error:
                if not guessed or "unexpected keyword" in str(error):
                    self.errors.append(error)
                # a parameter, or a field of a config, of which nothing is known
                is_asked = getattr(error, "key", "") in (
                    "asks_parameter",
                    "asks_config",
                )
                if is_asked and not theirs and len(guessed) < 2:
                    name = vars(error)["facts"]["name"]
                    # a text that the code compares it with
                    code = ast.unparse(self.scope.tree)
                    texts = re.findall(rf"\b{name} == '(\w+)'", code)
                    for value in (*texts, *GUESSES):
                        attempts.append(({**sizes, name: value}, theirs))

    def _sizes(self) -> list[tuple[Settings, bool]]:
        """What a class may be built with, the likeliest first, and whether its own defaults come before ours."""
        thing = self.target.thing
        known = dict(self.options.args)
        names = arguments_of(thing)
        meanings = [*map(meaning_of, names)]
        if self.scope.says(r"/ (\w+\.)*(\w+_)?scal(e|ing)\b"):
            known.setdefault("SCALE", size.VALUES["ROOT"])
        if self.target.number:  # each number is an object, and each product another one
            known = {"HEADS": 3, "HEAD_DIM": 4, "WIDTH": 12, **known}
        # of an image
        if self.scope.says(r"window\w*\[0\]|, \w+ = (self\.)?window"):
            known.setdefault("WINDOW", (size.TOKENS, 1))
        # what is tried before the usual sizes, and after them
        first: list[Settings] = []
        later: list[Settings] = []
        if "HEADS" in meanings:  # `dim_K` may be the width of keys
            later.append({"HEAD_DIM": size.WIDTH})
        elif "HEAD_DIM" not in meanings and takes_all_three(
            arguments_of(call_of(thing))
        ):
            # it is given heads, whose width is all that it knows
            first.append({"WIDTH": size.HEAD_DIM})
        of_keys = [x for x in names if re.fullmatch("(key|value|kv|[kv])_?dim", x)]
        if of_keys and {"head_dim", "d_head", "dim_head"} & names.keys():
            later.append(dict.fromkeys(of_keys, size.WIDTH))  # of the text of keys
        widths = [name for name in names if meaning_of(name) == "WIDTH"]
        if len(widths) == 2:
            # Narrower than its input first, so that a scale by the wrong width shows, and a matrix on the wrong side.
            first.insert(0, {widths[1]: size.WIDTH // 2})
        kept = dict(self.target.namespace)
        for name, value in self.target.namespace.items():
            if CALL["config"].fullmatch(name):
                kept |= vars(value) if hasattr(value, "__dict__") else {}
        for name, value in kept.items():
            is_read = type(value) is int and self.scope.says(rf"\b{name.lower()}\b")
            if is_read and meaning_of(name) == "WIDTH":
                # a constant of the file, of which a head is a part
                heads = size.HEADS if value % size.HEADS == 0 else 4
                each = {"WIDTH": value, "HEAD_DIM": value // heads}
                later.append({"HEADS": heads, **each})
        for name, number in re.findall(r"(\w+) = (\d+)\n", self.scope.code):
            if meaning_of(name) == "HEAD_DIM":  # a width that stands in the code
                later.append({"WIDTH": 2 * int(number)})
        if "HEADS" not in known:  # a power of two may be wanted
            later.append({"HEADS": 4, "WIDTH": 4 * size.HEAD_DIM})
        before, after = (
            [({**x, **known}, False) for x in part] for part in (first, later)
        )
        return [*before, (known, False), (known, True), *after]

    def _beside(self) -> Built | None:
        """A function that reads its weights from names of its file, or from a dictionary of such a name."""
        weights = {
            name: value
            for name, value in self.target.namespace.items()
            if name in self.scope.names
            and type(value).__name__ in ("ndarray", "Tensor", "list", "dict")
        }
        holder = types.SimpleNamespace(**weights)
        if not are_all(parts_of(holder, self.options.mapping).weights):
            return None
        return Built(holder, self.target.thing)

    def _hoisted(self) -> Built | None:
        """A function that draws its weights in each call, as one that is handed those of a first call."""
        target = self.target
        definition: Any = target.source.definitions[target.name]
        drawn: dict[str, int] = {}
        for place, step in enumerate(definition.body):
            name, _, value = ast.unparse(step).partition(" = ")
            if isinstance(step, ast.Assign) and role_of(name) and "rand" in value:
                drawn[name] = place
        if not are_all(roles_of(drawn).values()):
            return None
        maker, call = self._parted(definition, drawn)
        first = next(adapters(target, target.thing, None, ["btc"]))
        heads = self._sizes_of_split(first.fixed)
        for shape in (TEXTS, TEXTS[1:]):
            text = to_kind(np.ones(shape), first.kind)
            with contextlib.suppress(Exception):  # of another number of axes
                weights = maker(**{**first.fixed, **dict.fromkeys(first.inputs, text)})
                holder = types.SimpleNamespace(**weights, n_heads=(heads or [1])[0])
                target.lent.append(target.say("drawn_once"))
                return Built(holder, functools.partial(call, **weights))
        return None

    def _parted(self, definition: Any, drawn: dict[str, int]) -> Iterator[Any]:
        """A function up to the last of the weights that it draws, which it hands back; and one that is handed them.

        drawn  the names of the weights, with the places of their statements
        """
        maker = copy.deepcopy(definition)
        call = copy.deepcopy(definition)
        weights = ", ".join(f"{name}={name}" for name in drawn)
        maker.body[max(drawn.values()) + 1 :] = ast.parse(
            f"return dict({weights})"
        ).body
        call.body = [x for i, x in enumerate(call.body) if i not in drawn.values()]
        call.args.kwonlyargs += map(ast.arg, drawn)
        call.args.kw_defaults += [None] * len(drawn)
        for function in (maker, call):
            namespace = dict(self.target.thing.__globals__)
            tree = ast.fix_missing_locations(ast.Module([function], []))
            path = self.target.source.path
            exec(compile(tree, path, "exec", FUTURE, True), namespace)
            yield namespace[self.target.name]

    def _adapted(self) -> Built | None:
        """An adapter by hand: a function of one text that builds a class of its file; here one object for all calls."""
        thing = self.target.thing
        names = dict(thing.__globals__)
        made: list[Any] = []

        def same(kind: type, *args: Any, **kwargs: Any) -> Any:
            made.extend([] if made else [kind(*args, **kwargs)])
            return made[0]

        for name in self.target.source.uses(self.target.name):
            if isinstance(kind := names.get(name), type):
                names[name] = functools.partial(same, kind)
        call = types.FunctionType(
            thing.__code__, names, thing.__name__, thing.__defaults__
        )
        with contextlib.suppress(Exception):  # the width of the text is not known yet
            call(to_kind(np.zeros(TEXTS), "torch"))
        return Built(made[0], call, made[0]) if made else None

    def _sizes_of_split(self, fixed: Any) -> tuple[int, int, int] | None:
        """Query heads, key/value heads and their width, where the code works with a number of heads; else None.

        Arguments, defaults and constants of the file are the learner's; what is left is ours, and is made to fit them.

        fixed  names of the arguments that get a value of ours
        """
        parameters = arguments_of(self.target.thing).items()
        # A name that the code binds itself does not mean the constant of the file.
        bound = {*names_of([self.scope.tree], ast.Store), *dict(parameters)}
        values = {
            name: x for name, x in self.target.namespace.items() if name not in bound
        }
        theirs = {}  # by meaning; a later place overrides an earlier one
        for place in (values, {n: p.default for n, p in parameters}, self.options.args):
            for name, value in place.items():
                if name in self.scope.names and type(value) is int:
                    theirs[meaning_of(name)] = value
        named = self.scope.names.intersection(fixed).difference(self.options.args)
        for name in filter(is_config, fixed):  # and what is read of a config
            named |= {*re.findall(rf"\b{name}(?:\.|\[')(\w+)", self.scope.code)}
        ours = set(map(meaning_of, named))
        if "HEADS" not in ours.union(theirs):
            return None
        heads = theirs.get("HEADS", size.HEADS)
        groups = theirs.get("KV_HEADS", size.KV_HEADS if "KV_HEADS" in ours else heads)
        d = theirs.get("HEAD_DIM") or theirs.get("WIDTH", 0) // heads or size.HEAD_DIM
        return heads, groups, d

    # Calling.

    def trials(self, built: Built) -> list[Trial]:
        """Every adapter under which the call comes to an end with an output of the right axes."""
        trials: list[Trial] = []
        try:
            for trial in self._ways(built):
                first = trials[0] if trials else trial
                # code that takes a batch is not judged by a document alone
                is_less = trial.attention.rank < first.attention.rank
                more = len(trial.attention.inputs) > len(first.attention.inputs)
                if is_less or more or trial.is_joined != first.is_joined:
                    break
                if self._runs(trial):
                    trials.append(trial)
        except Exception as error:
            self.errors.append(error)
        return trials

    def _ways(self, built: Built) -> Iterator[Trial]:
        if built.holder is None:
            yield from self._ways_of_heads(built)
            return
        target = self.target
        module = built.module
        shown: dict[str, str] = {}
        is_stilled = module is not None and still_parts(module)
        to_eval(module)
        if hasattr(module, "named_parameters"):
            # torch finds no module in a plain list, so that an optimizer never gets its weights.
            known = {*map(id, parameters_of(module))}
            lists = [kept for kept in vars(module).values() if isinstance(kept, list)]
            weights = [
                w for kept in lists for item in kept for w in parameters_of(item)
            ]
            if any(id(weight) not in known for weight in weights):
                shown["modules-in-list"] = ""
        layouts = layouts_of(target)
        kinds = {type(weight).__name__ for weight in parameters_of(module)}
        is_lazy = "UninitializedParameter" in kinds
        if module is not None and (is_lazy or not parts_of(module, {}).weights):
            # weights that take their shapes at the first call
            width = target.sizes.get("WIDTH", size.WIDTH)
            texts = (size.BATCH, size.TOKENS, width)
            for attention in adapters(target, built.call, module, layouts):
                if self._runs(Trial(attention, [], self._inputs(attention, texts))):
                    break
        parts = parts_of(built.holder, self.options.mapping)
        is_bare = module is not None and not parts.weights
        if is_bare and takes_all_three(arguments_of(built.call)):
            yield from self._ways_of_heads(Built(None, built.call, module))
            return
        # as the learner drew the weights: `renew` overwrites them
        folded = scale_is_folded(parts)
        renew(arrays_of(built.holder), self.rng)
        if self.rests:
            renew(parts.unread, self.rng, 0.0)
        choices = readings(target, built.holder, folded)
        shape = (size.BATCH, size.TOKENS, width_of(parts, target.sizes))
        ways = list(adapters(target, built.call, module, layouts))
        # Does the object gather tokens? A list, or a list for each head, is empty until the first token is there.
        # Not of torch: each of its modules has empty dictionaries, such as those of its hooks.
        kept = {} if module is None or ways[0].kind == "torch" else vars(module)
        places = [x for x in kept.values() if isinstance(x, list | dict)]
        gathers = any(not any(np.size(y) for y in x if y is not None) for x in places)
        if gathers:
            ways += adapters(target, built.call, module, ["c"])
        for attention in ways:
            if module is not None and (
                gathers or cache_arguments(attention) or self.scope.says("cache")
            ):
                self._remember(attention)
            inputs = self._inputs(attention, shape)
            yield Trial(
                attention,
                choices,
                inputs,
                parts,
                shown=dict(shown),
                is_stilled=is_stilled,
            )

    def _remember(self, attention: Attention) -> None:
        """Keep what the object was before any call, where it keeps tokens."""
        module = attention.module
        # what refers to the module itself is not copied, but goes on to refer to it
        attention.fresh = copy.deepcopy(vars(module), {id(module): module})
        # An object that the learner passed may have been used, and hold tokens; one that was built here does not.
        if not isinstance(self.target.thing, type):
            for name, kept in attention.fresh.items():
                is_held = isinstance(kept, tuple) or hasattr(kept, "shape")
                if "cache" in name and is_held:
                    attention.fresh[name] = None

    def _ways_of_heads(self, built: Built) -> Iterator[Trial]:
        """Of a function of vectors that are projected already: heads joined where the code cuts them, or cut."""
        split = built.sizes
        forms = [(name, False) for name in ("bhtd", "bthd", "htd", "td", "d")]
        if split:
            forms = [(name, True) for name in ("btc", "tc", "c")] + forms
        for name, is_joined in forms:
            several = size.HEADS if name in ("bhtd", "bthd") else 1
            heads, groups, d = split or (several, several, size.HEAD_DIM)
            # arguments that name a size get that of what is passed
            fitting = {
                "HEADS": heads,
                "KV_HEADS": groups,
                "HEAD_DIM": d,
                "WIDTH": heads * d,
            }
            shapes: list[tuple[int, ...]] = [
                (size.BATCH, n, size.TOKENS, d) for n in (heads, groups)
            ]
            # nothing is projected
            choices = [Reading(Weights(heads, groups, dict.fromkeys("qkvo")))]
            if is_joined:
                shapes = [(size.BATCH, size.TOKENS, n * d) for n in (heads, groups)]
                # Identities as projections, which leave the inputs as they are, so that every layout is tried.
                identity = {role: np.eye(shapes[role != "q"][-1]) for role in "qkv"}
                choices = list(styles(Reading(Weights(heads, groups, identity)), []))
            for attention in adapters(self.target, built.call, built.module, [name]):
                data = (*attention.inputs, attention.mask, attention.output)
                for part in arguments_of(built.call):
                    is_ours = part in self.scope.names and part not in (
                        *data,
                        *self.options.args,
                    )
                    if is_ours and meaning_of(part) in fitting:
                        attention.fixed[part] = fitting[meaning_of(part)]
                inputs = self._inputs(attention, *shapes)
                yield Trial(attention, choices, inputs, is_joined=is_joined)

    def _inputs(
        self,
        attention: Attention,
        shape: tuple[int, ...],
        of_keys: tuple[int, ...] = (),
    ) -> Inputs:
        """Queries, keys and values: different as far as the code takes them apart."""
        of_keys = of_keys or shape
        x, y, z = (self.rng.normal(size=each) for each in (shape, of_keys, of_keys))
        count = len(attention.inputs)
        return (x, x, x) if count == 1 else (x, y, y) if count == 2 else (x, y, z)

    def _runs(self, trial: Trial) -> bool:
        """Does a call come to an end? Where a mask is required, None or some form of one is passed."""
        attention = trial.attention
        name = str(attention.mask)
        for form, mask in self._masks(trial):
            try:
                if mask is None and attention.mask_required:
                    attention.fixed[name] = None
                out = attention(trial.inputs, mask)
                if np.ptp(out) == 0 or (form and np.isnan(out).all()):
                    raise UncheckedError("returns_nothing", name=self.target.name)
            except Exception as error:
                self.errors.append(error)
                self.certain &= not attention.guessed and not attention.mask_required
                attention.fixed.pop(name, None)
                attention.restart()
                continue
            if mask is not None and not attention.mask_required:
                trial.left.append(("default_mask", {"name": name}))
            trial.mask = mask
            attention.mask_required = mask is not None
            attention.restart()
            if trial.readings:
                # a function that takes its weights is judged as a layer
                of_heads = trial.is_joined or trial.inputs[0].ndim > 3
                self.target.kind = "function" if of_heads else "layer"
            return True
        return False

    def _masks(self, trial: Trial) -> Iterator[tuple[str, Any]]:
        """None; and where a mask is required, or its default stops the call, some that forbid the future or padding."""
        attention = trial.attention
        before = len(self.errors)
        yield "", None
        stopped = " ".join(map(str, self.errors[before:]))
        asks = "NoneType|bool|(?i:mask.*none|none.*mask)"
        is_needed = attention.mask and re.search(asks, stopped)
        if not (attention.mask_required or is_needed):
            return
        B, T, S = len(trial.inputs[0]), *(x.shape[-2] for x in trial.inputs[:2])
        past = np.tril(np.ones((1, 1, T, S), bool))
        kinds = [None, np.arange(S)[None] < LENGTHS[:B, None]]
        is_padding = re.search(SAYS["padding"], str(attention.mask), re.I)
        for real in kinds[::-1] if is_padding else kinds:
            yield from self._forms(trial, past, real)

    def _forms(
        self, trial: Trial, allowed: Any, real: Any
    ) -> Iterator[tuple[str, Any]]:
        """The forms in which the code may take a mask (B|1,1,T,S); `real` (B,S) where it is one of padding."""
        attention = trial.attention
        B = len(trial.inputs[0])
        if attention.is_lengths:
            yield "lengths", LENGTHS[:B]
            return
        for meaning in meanings_of(self.scope, self.target.source, str(attention.mask)):
            for shape, mask in laid_out(allowed, real, B, size.HEADS).items():
                yield f"{shape} {meaning}", ENCODINGS[meaning](mask)

    # Judging.

    def judged(self, trials: list[Trial], searches: bool) -> Verdict | None:
        """Right under one trial; else the bugs that explain the likeliest one; else what differs.

        searches  are bugs looked for? If not, None is what is not right
        """
        self.target.not_checked[self.left :] = []
        self.target.checked.clear()
        ready = self._ready(trials)
        self.names.update(case.name for trial in ready for case in trial.cases)
        if not ready:
            raise UncheckedError("no_form_of_mask", name=self.target.name)
        if right := self._right(ready):
            return self._taken(*right)
        if not searches:
            return None
        # Single bugs under every trial, then pairs under the likeliest; roundings of 16 bits last.
        # Which of the layouts? The one under which most properties hold.
        for layout in dict.fromkeys(trial.attention.layout for trial in ready):
            same = [t for t in ready if t.attention.layout is layout]
            properties_of(same[0], self.target)
            if not same[0].shown:
                break
        asked = [trial for trial in ready if trial.is_asked]
        first = min(asked, key=lambda trial: len(trial.shown))
        ready.sort(
            key=lambda trial: trial.attention.layout is not first.attention.layout
        )
        is_narrow = self.scope.says(r"half\(|float16|autocast")
        may_mix = "batch-mixed" in first.shown or is_narrow
        self.is_sure = not (first.attention.guessed or first.parts.unread)
        # By how many forms of each of two bugs: those of the usual forms come first, which takes seconds.
        rounds: list[tuple[Trial, Sequence[int | None]]]
        rounds = [(trial, ()) for trial in ready[:3]]
        if not may_mix and self.is_sure and not self.was_paired:
            self.was_paired = True
            rounds += [(first, (2,)), (first, (None,))]
        for trial, pairs in rounds:
            if pairs == (None,):
                told = (self._clue(first), self.target.say("repair_evidence"))
                if mended := self.repaired(UNKNOWN, "; ".join(told)):
                    self._notes(first)
                    return self.target.verdict(False, (mended,))
            for guess, cases in trial.guesses:
                share = 1 / len(rounds) / len(trial.guesses)
                search = self._search(trial, share, pairs)
                explanation = search.explain(trial.readings, cases)
                # the first case is explained, so the guess is right
                if cases[0].name not in explanation.unexplained:
                    return self._taken(trial, guess, cases, explanation)
                trial.explanation = trial.explanation or explanation
        if is_narrow:
            search = self._search(first, 1)
            search.tolerance = TOLERANCE_OF_16_BITS
            near = search.explain(first.readings, first.cases)
            if not near.unexplained:
                first.explanation = near
                first.checked.append("rounded")
                if not self.scope.says(SAYS["wide"]):
                    first.shown["softmax-narrow"] = ""
        first.causal = bool(first.causal)
        return self._verdict(first)

    def _ready(self, trials: list[Trial]) -> list[Trial]:
        """Those whose cases came to an end, with whether they are taken to be causal."""
        ready = []
        for trial in trials:
            with contextlib.suppress(UncheckedError):
                trial.causal = self._causal(trial.attention)
                trial.is_told = bool(trial.causal) and self.is_told
                for itself in self._alone(trial):
                    trial.guesses += self._guesses(trial, itself)
                ready += [trial] if trial.guesses else []
        return ready

    def _right(
        self, ready: list[Trial]
    ) -> tuple[Trial, bool, list[Case], Explanation] | None:
        """The first trial under which the correct form gives the numbers."""
        for trial in ready:
            for guess, cases in trial.guesses:
                search = self._search(trial, 1)
                if explanation := search.right(trial.readings, cases):
                    return trial, guess, cases, explanation
        return None

    def repaired(self, bug: str, evidence: str) -> Finding | None:
        """The line that one small change makes right; None where there is no such line, or it was sought before."""

        def is_right(version: Target) -> bool:
            other = Examiner(version)
            # as it is built first where it runs at all
            runs = filter(None, map(other.trials, other.builds()))
            right = other._right(other._ready(next(runs, [])))
            # in as many cases as before: a change may stop the code where it is given a mask
            return right is not None and self.names <= {case.name for case in right[2]}

        target = self.target
        is_sure = self.certain and self.is_sure
        if self.was_repaired or target.guesses or target.lacks or not is_sure:
            return None
        self.was_repaired = True
        repair = repaired(target, is_right, self.options.seconds)
        if repair is None:
            return None
        line, quote, text = repair
        return Finding(bug, line, quote, evidence, target.say("repair", right=text))

    def _taken(
        self, trial: Trial, causal: bool, cases: list[Case], explanation: Any
    ) -> Verdict:
        trial.causal = causal
        trial.cases = cases
        trial.explanation = explanation
        if not trial.is_asked:
            properties_of(trial, self.target)
        return self._verdict(trial)

    def _alone(self, trial: Trial) -> list[bool]:
        """Is it causal without a mask of ours? What is not told is tried both ways."""
        attention = trial.attention
        if not trial.causal:
            return [False]
        is_own = attention.mask is None or attention.is_lengths
        is_beside = self.scope.says(OWN_TRIANGLE) and self._is_for_padding(attention)
        if is_own or is_beside or attention.is_told_causal:
            return [True]  # the code makes a mask of its own
        if self.options.causal or self.scope.says(SAYS["kept_mask"]):
            return [True]
        makes = self.scope.says(r"is_causal|arange|tril|triu|\.tri\(")
        return [True, False] if makes else [False]

    def _guesses(self, trial: Trial, itself: bool) -> list[tuple[bool, list[Case]]]:
        """The cases with whether the code is taken to be causal; what is not told is tried both ways."""
        cases = [Case(*parts) for parts in self.cases(trial, itself)]
        trial.checked += [case.name for case in cases]
        trial.cases = trial.cases or cases
        if trial.causal is not None or not cases:
            return [(bool(trial.causal), cases)] * bool(cases)
        ahead = [replace(c, masks=replace(c.masks, causal=True)) for c in cases]
        return [(False, cases), (True, ahead)]

    def _search(
        self, trial: Trial, share: float, pairs: Sequence[int | None] = ()
    ) -> Search:
        """The search among the bugs for which this code has what they need."""
        # may stand for a forbidden score
        fills = [number for number in self.scope.numbers if number < 1e-3]
        w = trial.readings[0].weights
        words = {*re.findall(r"\w{2,}", self.scope.code)}
        words.update(arguments_of(self.target.thing))
        has = {
            # `head_size` may be the number of heads
            "number-of-heads": "HEADS" in map(meaning_of, words),
            "heads": w.matrices.get("q") is not None and w.n_heads > 1,
            "weights": self.target.kind == "layer",
            "groups": w.n_heads != w.n_kv_heads,
            "biases": w.biases,
            "output": w.matrices.get("o") is not None,
            "rope": "rope" in trial.readings[0].settings,
            "context": len(trial.attention.inputs) == 2,
            "slopes": "slopes" in trial.readings[0].settings,
            # a config may say what scores are divided by, as Gemma's does
            "usual-scale": not self.scope.says("scalar"),
        }
        had = {what for what, is_so in has.items() if is_so}
        left = self.until - time.process_time()
        return Search(fills, min(self.options.seconds * share, left), had, pairs)

    def _causal(self, attention: Attention) -> bool | None:
        """Ought it to be causal? None where nothing tells."""
        if attention.takes_one_query:
            return False  # it may see whatever keys it is given
        if self.options.causal is not None:
            return self.options.causal
        if inspect.isfunction(self.target.thing) and attention.module is not None:
            return None  # what was adapted by hand gets no mask of ours
        if self.scope.says(r"causal = false|non_?causal"):
            return None
        told = (
            attention.rank == 1  # token by token
            or attention.is_told_causal
            or re.search(SAYS["causal_name"], self.target.name, re.I)
            or self.scope.always_says(SAYS["causal"])
            # a word of a comment, but for code in which it is a choice
            or (self.is_told and not self.scope.says(SAYS["causal"]))
        )
        return True if told and not self.keeps_defaults else None

    def cases(
        self, trial: Trial, itself: bool
    ) -> Iterator[tuple[str, Inputs, Masks, Any]]:
        """Plain; what the code takes by choice; where a mask can be passed, a causal one, one for documents, its own.

        itself  is it causal without a mask of ours?
        """
        attention = trial.attention
        inputs = trial.inputs
        B = inputs[0].shape[0]
        T = inputs[0].shape[-2]
        real = np.arange(T)[None] < LENGTHS[:B, None]  # (B,S)
        before: list[Any] = []
        plain: Any = np.nan
        asks = rf"{attention.mask}\.(n?dim\b|shape\))".lower()
        if not attention.mask_required:
            plain = attention(inputs)
            yield "plain", inputs, Masks(itself), {"": plain}
        yield from self._chosen(trial, itself, real)
        if attention.mask is None:
            return
        past = np.tril(np.ones((T, T), bool))
        is_for_padding = self._is_for_padding(attention)
        # one mask for both may take the place of the code's own triangle
        of_documents = real[:, None, None] & (past | (not itself) | is_for_padding)
        cases = [
            ("mask", past[None, None], Masks(True)),
            ("padding", of_documents, Masks(itself, real)),
        ]
        if is_for_padding:
            cases = cases[1:]
        for name, allowed, masks in cases:
            outputs = {}
            stopped = 0
            errors: list[Exception] = []
            for form, mask in self._forms(trial, allowed, masks.real):
                try:
                    outputs[form] = attention(inputs, mask)
                except Exception as error:  # it does not take this form of the mask
                    errors += [error] * ("True" in form)
                    stopped += 1
            # An error of a call's arguments that no mask of truths changes is the learner's.
            texts = {str(error).partition("\n")[0] for error in errors}
            is_same = not outputs and len(errors) > 2 and len(texts) == 1
            is_theirs = is_same and re.search(SAYS["misused"], texts.pop())
            if is_theirs and self._frames(errors[0]):
                trial.raised = errors[0]
                trial.shown["raises"] = in_one_line(errors[0])
            outputs = self._effective(trial, outputs, allowed, masks.real)
            # Where it gives the same as before, any mask makes it causal, whatever it says.
            # Code that asks how many axes a mask has may leave aside those that it does not stop at.
            aside = [plain] if stopped and self.scope.says(asks) else []
            new = {
                form: out
                for form, out in outputs.items()
                if not any(close(out, other) for other in (*before, *aside))
            }
            before += outputs.values()
            if new:
                yield name, inputs, masks, new
            else:
                trial.left.append((f"no_{name}", {}))
        is_whole = attention.module is not None and attention.rank == 3
        for mask in masks_handed(attention, self.target)[:1] if is_whole else ():
            # of another order of axes than the model's
            with contextlib.suppress(Exception):
                yield "handed", inputs, Masks(True), {"": attention(inputs, mask)}

    def _is_for_padding(self, attention: Attention) -> bool:
        """Is a mask for padding alone, by its name, or by the text of code that makes a triangle itself?"""
        if attention.is_lengths or re.search(
            SAYS["padding"], str(attention.mask), re.I
        ):
            return True
        about = rf"\b{attention.mask}\W[^\n]*(padding|\b1, ?1, ?(s|t|seq|len)\w*)"
        told = rf"(?m)^(?!.*(causal|future|ahead|subsequent))[^\n]*{about}"
        return self.scope.says(OWN_TRIANGLE) and self.scope.tells(told)

    def _chosen(
        self, trial: Trial, itself: bool, real: Any
    ) -> Iterator[tuple[str, Inputs, Masks, Any]]:
        """What the code takes by choice: lengths of the documents; another text to make keys and values of."""
        attention = trial.attention
        inputs = trial.inputs
        for name, parameter in arguments_of(attention.call).items():
            is_free = parameter.default is None and name != attention.mask
            if not is_free or name not in self.scope.names:
                continue
            with contextlib.suppress(Exception):
                if CALL["lengths"].fullmatch(name) and attention.rank == 3:
                    out = replace(attention, mask=name)(inputs, LENGTHS)
                    yield "padding", inputs, Masks(itself, real), {"": out}
                # what is unpacked is no text, but keys and values
                is_text = not self.scope.says(rf", \w+ = {name.lower()}\b")
                is_context = len(attention.inputs) == 1 and not itself and is_text
                if is_context and re.fullmatch(SAYS["contexts"], name):
                    other = self.rng.normal(size=inputs[0].shape)
                    passed = inputs[0], other, other
                    both = replace(attention, inputs=(*attention.inputs, name))
                    yield "context", passed, Masks(), {"": both(passed)}

    def _effective(
        self, trial: Trial, outputs: dict[str, Any], allowed: Any, real: Any
    ) -> dict[str, Any]:
        """Of a required mask the forms that hide something, where one does: the others are not what the code takes."""
        if not trial.attention.mask_required:
            return outputs
        idle = self._unmasked(trial, allowed, real)
        kept = {f: out for f, out in outputs.items() if not close(out, idle.get(f))}
        return kept or outputs

    def _unmasked(self, trial: Trial, allowed: Any, real: Any) -> dict[str, Any]:
        """What comes out by the form of a mask that forbids nothing, as far as the code takes it."""
        outputs = {}
        real = None if real is None else np.ones_like(real)
        for form, mask in self._forms(trial, np.ones_like(allowed), real):
            with contextlib.suppress(Exception):
                outputs[form] = trial.attention(trial.inputs, mask)
        return outputs

    # Words.

    def _verdict(self, trial: Trial) -> Verdict:
        """Put into words what explains the numbers, what properties show, and what nothing explains."""
        explanation = trial.explanation
        target = self.target
        self._notes(trial)
        shown = trial.shown
        bugs = [self._renamed(bug) for bug in explanation.bugs]
        # Where documents meet, no form here computes the same numbers: that bug alone explains them.
        explained = not explanation.unexplained or "batch-mixed" in shown
        for bug in map(self._renamed, shown):
            # a pattern of bugs beside which this property says nothing
            is_hidden = any(
                re.fullmatch(bug_named(bug).hidden_by, other) for other in bugs
            )
            # where the output is not right either, a gradient says nothing
            stops = self.rests or trial.explanation.settings.get("act") == "relu"
            if stops and bug == "no-gradient":
                is_hidden = True  # what is 0 stops some itself
            if not is_hidden and (explained or bug != "no-gradient"):
                bugs.append(bug)
        drawn = {"dropout-in-eval", "projection-drawn-anew"}.intersection(bugs)
        if explanation.unexplained and drawn:
            explained = True  # no numbers are alike while it draws
            target.left_out("not_still")
        # None: neither right nor wrong can be said.
        right: bool | None = not bugs and explained
        if not explained:
            # Beside a case that nothing explains, what a guess on masks explains is no evidence.
            sure = [x for x in explanation.bugs if "mask" not in bug_named(x).needs]
            bugs = [bug for bug in bugs if bug in shown or bug in sure]
            right = False if bugs else None
            target.left_out("unexplained", evidence=self._clue(trial))
        # A weight at rest may have been a factor, and a number that is a guess; T5 has none beside its positions.
        scales = {bug for bug in bugs if bug.startswith("scale")}
        is_doubtful = scales and (
            self.guessed or (self.rests and "scale-missing" in scales)
        )
        if right is False and (target.lacks or is_doubtful):
            right = None
            bugs = []
        findings = [self._finding(trial, bug) for bug in dict.fromkeys(bugs)]
        return target.verdict(right, tuple(findings))

    def _clue(self, trial: Trial) -> str:
        """What can be said of the first case that nothing explains."""
        explanation = trial.explanation
        cases = [c for c in trial.cases if c.name in explanation.unexplained]
        return stage_of(explanation, (cases or trial.cases)[0], self.target.say)

    def _notes(self, trial: Trial) -> None:
        """What was checked and what not, as phrases."""
        attention = trial.attention
        target = self.target
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
        one_query = "one_query" if attention.takes_one_query else None
        target.did(one_query or ("causal" if trial.causal else "not_causal"))
        if trial.is_stilled:
            target.left_out("norm")
        if self.rests:
            paths = [array.path.strip(".") for array in trial.parts.unread]
            target.left_out("at_rest", names=listed(paths, 6))
        if trial.explanation.settings.get("residual"):
            target.did("residual")
        w = trial.explanation.reading.weights
        is_layer = (
            target.kind == "layer" and trial.explanation.settings.get("join") != "sum"
        )
        if is_layer and w.n_heads > 1 and w.matrices.get("o") is None:
            target.left_out("no_output")
        for fill in self.scope.numbers if self.scope.says("fill|mask|where") else ():
            # too large to be anything else than a fill; float16 ends at -65504
            if fill <= -1e3:
                key = "not_16_bits" if fill < -65504 else "weak_16_bits"
                target.left_out(key, fill=fill)

    def _finding(self, trial: Trial, bug: str) -> Any:
        explanation = trial.explanation
        say = self.target.say
        told = trial.shown.get(bug)
        evidence = told or evidence_of(bug_named(bug), explanation, trial.cases, say)
        finding = self.target.finding(bug, evidence)
        if bug == "raises" and trial.raised:
            finding = self._placed(finding, trial.raised)
        fixes = [finding.fix]  # and what the remedy means in this code
        if "einsum" in finding.quote:
            fixes.append(say("einsum_fix"))
        if bug == "bias-dropped" and (roles := explanation.settings.get("no_bias")):
            names = ", ".join(f"W_{role.upper()}" for role in roles)
            fixes.append(say("bias_fix", roles=names))
        return replace(finding, fix=" ".join(fixes))

    def _renamed(self, bug: str) -> str:
        """The bug that gives the numbers of this one in code such as the learner's."""
        rules = bug_named(bug).renamed
        return next(
            (rule["to"] for rule in rules if self.scope.says(rule["code"])), bug
        )

    # Errors.

    def stopped(self) -> Verdict:
        """The verdict on code that stops whatever it is given: wrong at its line where no argument could change that.

        A shape that does not fit is no evidence: of 20 verdicts by one, on files that were new to this check, 12 were
        on right code.
        """
        target = self.target
        if not self.errors:
            raise UncheckedError("no_qkv", name=target.name)
        if target.unnamed:
            raise UncheckedError("asks_call", name=target.unnamed)
        is_function = inspect.isfunction(target.thing) and not self.takes_weights
        error = max(self.errors, key=self._reached)
        theirs = [] if is_function else [e for e in self.errors if self._is_theirs(e)]
        if theirs:
            error = max(theirs, key=self._reached)
            finding = target.finding("raises", in_one_line(error))
        elif getattr(error, "key", "") in ("no_return", "not_written"):
            node = target.source.definitions.get(target.name)
            if node is None or not attends(node):  # it may be half written
                raise error
            evidence = error.text(target.options.lang)  # type: ignore[attr-defined]
            return target.verdict(False, (target.finding("returns-nothing", evidence),))
        elif is_function and not isinstance(error, UncheckedError):
            reason = in_one_line(error)
            raise UncheckedError("call_fails", name=target.name, error=reason)
        elif self.is_told and not self.target.guesses and self._is_fixed():
            facts: dict[str, Any] = {"context": size.CONTEXT, "tokens": size.TOKENS}
            facts["error"] = in_one_line(error)
            finding = target.finding("length-fixed", target.say("fits_whole", **facts))
        else:
            raise error
        return target.verdict(False, (self._placed(finding, error),))

    def _is_theirs(self, error: Exception) -> bool:
        """Is it a name that their file, their class or torch does not have, or an argument that nothing takes?"""
        source = self.target.source
        text = str(error)
        # what is passed lies in one piece, so that a view of it fits
        told = (
            "before Module.__init__\\(\\) call|view size is not compatible|to buffer '"
        )
        if re.search(told, text):
            return bool(self._frames(error))
        # a base or a decorator that is not installed may have what is missing
        stubs = [
            name
            for name in self.scope.names
            if isinstance(self.target.namespace.get(name), Stub)
        ]
        if stubs or not self._frames(error):
            return False
        if isinstance(error, UnboundLocalError):
            name = text.split("'")[1]
            stop = self._frames(error)[-1].lineno or 0
            stored = [n for n in ast.walk(source.tree) if isinstance(n, ast.Name)]
            binds = [
                n.lineno
                for n in stored
                if isinstance(n.ctx, ast.Store) and n.id == name
            ]
            return min(binds, default=0) >= stop  # it is bound later, if at all
        if type(error) is NameError:
            missing = re.search(r"name '(\w+)' is not", text)
            bound = {name for node in source.tree.body for name in bound_by(node)}
            # a statement that did not run, or a file that is not here
            is_elsewhere = missing and missing[1] in bound
            return not (is_elsewhere or source.says(r"import \*"))
        owners = "|".join(map(re.escape, source.definitions))
        owned = rf"'({owners}|super)' object has no attribute '(\w+)'"
        if attribute := re.search(owned, text) or _misspelt(text):
            # else another method sets it, which was to be called first
            return not source.says(rf"self\.{attribute[2].lower()} = ")
        if "unexpected keyword" in text:
            return not self.target.lent
        if re.match(rf"({owners})(\.\w+)?\(\) (missing|takes) ", text):
            return True  # a call of a function of theirs, by their own line
        line = str(self._frames(error)[-1].line)
        is_size = re.search(r"\.(size|shape)\b", line) is not None
        return "must be Tensor, not int" in text and is_size

    def _is_fixed(self) -> bool:
        """Does it take a text that fills the context, and stop at a shorter one?"""
        if any(map(CALL["positions"].fullmatch, arguments_of(self.target.thing))):
            return False  # whoever builds it sets the positions of each text
        x = np.ones((size.BATCH, size.CONTEXT, size.WIDTH))
        try:
            module = build(self.target, self.options.args)
            attention = next(adapters(self.target, call_of(module), module, ["btc"]))
            attention((x,) * 3)
        except Exception:  # the error is of any text
            return False
        try:
            attention((x[:, : size.TOKENS],) * 3)
        except Exception:
            return True
        return False

    def _placed(self, finding: Finding, error: Exception) -> Finding:
        """The finding at the line of the error. A helper is right most often, and what it is given is not."""
        frames = self._frames(error)
        source = self.target.source
        callers = [f for f in frames if not re.search(SAYS["helpers"], f.name)]
        line = (callers or frames[:1])[-1].lineno or 1
        quote = source.lines[line - 1].strip()
        return replace(finding, line=source.number_of(line), quote=quote)

    def _frames(self, error: Exception) -> list[traceback.FrameSummary]:
        """Where in the learner's file an error arose, the outermost call first."""
        frames = traceback.extract_tb(error.__traceback__)
        return [frame for frame in frames if frame.filename == self.target.source.path]

    def _reached(self, error: Exception) -> tuple[bool, int]:
        """Did the call come to its end, after which only UncheckedErrors are raised; else in which line did it stop?"""
        frames = self._frames(error)
        line = frames[0].lineno if frames else 0
        return isinstance(error, UncheckedError), line or 0
