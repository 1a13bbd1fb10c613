"""The check of a layer or a bare attention function: build it, give it numbers, run it, explain what comes out."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import re
import time
import traceback
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from headwise.teach import subject as size
from headwise.teach.bugs import UNKNOWN, Finding, UncheckedError, Verdict, bug_named, words
from headwise.teach.caches import cache_arguments, cache_bug
from headwise.teach.form import Masks, Weights
from headwise.teach.loops import OUTPUTS
from headwise.teach.reading import (
    Parts,
    Reading,
    arrays_of,
    count_of,
    heads_of,
    parts_of,
    readings,
    renew,
    role_of,
    same_modules,
    scale_is_folded,
    styles,
    width_of,
)
from headwise.teach.search import Case, Explanation, Search, close, evidence_of, stage_of
from headwise.teach.source import CALLS, ENCODINGS, meanings_of
from headwise.teach.subject import (
    KEY,
    QUERY,
    VALUE,
    Subject,
    Target,
    arguments_of,
    build,
    kind_of_arrays,
    meaning_of,
    subject_of,
    to_kind,
)

LENGTHS = (7, 4, 6, 3, 5)  # real tokens of the five documents
CAUSAL = r"causal|tril|triu|context_?length|block_?size|autoregress|look_?ahead|no_?peek|subsequent"
CAUSAL_NAME = r"causal|masked|gpt|llama|mistral|decoder|autoregress|qwen|gemma"
# Rotary positions that are used; a parameter `cos` alone may be left aside.
TURNS = (
    r"(rope|rotary|rotat)\w*\(|\bcos\w*\(|\* ?\(?\w*(cos|freqs)|(cos|freqs)\w*(\[[^]]*\])? \*|"
    r"view_as_complex|1j|inv_freq"
)
RESIDUAL = r"residual|return [^\n]*\+|\+ ?(x|inputs?|queries|q|hidden_states)\b"
LENGTH = r"(valid|seq|key|x|src|input)?_?(lens?|lengths?)"
CONTEXTS = r"context|memory|enc\w*|key_value_states|kv|source|other|cond|cross\w*"
BEYOND = (
    r"tanh|temperature|logit_scale|normalize\(|alibi|softcap|soft_cap|sink|relative_|conv\d?d|sigmoid|window_size|"
    r"sliding|bucket|layernorm|layer_norm\("
)


TABLE = r"(all_?)?(params?|weights|state_dict|sd|p|w|theta|pesos|parametros)"


HELPERS = r"softmax|linear|mul|vec|dot|norm"  # functions of a file that are given what is wrong elsewhere
NARROW = 2e-2  # of the largest number: bfloat16 keeps 8 bits, and a softmax multiplies what scores have lost
STOPS = (NameError, AttributeError, TypeError, ValueError, IndexError, KeyError, RuntimeError, ZeroDivisionError)


class Table(dict[str, Any]):
    """Weights by their names; by their roles where code puts a layer's number before: `layer0.attn_wq`."""

    def __missing__(self, key: str) -> Any:
        return next(value for name, value in self.items() if role_of(name) == role_of(key))


def _of_class(value: Any, number: type) -> Any:
    if isinstance(value, Table):
        return Table({name: to_kind(matrix, number) for name, matrix in value.items()})
    return to_kind(value, number)


def examine(target: Target) -> Verdict:
    """The verdict on a layer or a function. UncheckedError where it cannot be built or called."""
    examiner = Examiner(target)
    return examiner.layer() if target.kind == "layer" else examiner.function()


class Examiner:
    """One check: the object, what is known of it, and what comes out."""

    def __init__(self, target: Target) -> None:
        self.target, self.options, self.scope = target, target.options, target.scope
        self.rng = np.random.default_rng(0)
        self.failure = ""  # of the steps through a cache
        self.gap = 0.0  # between step by step and the whole text
        self.context = False  # are keys and values made of another text?
        self.bugs: list[str] = []  # those that a property shows, beside the numbers

    # A layer: weights inside, (B,T,C) in and out.

    def layer(self) -> Verdict:
        thing = self.target.thing
        if not isinstance(thing, type):
            return self._instance(thing)
        try:
            return self._instance(build(self.target, self.options.args))
        except Exception as error:  # sizes of ours that do not fit theirs, or a bug
            with contextlib.suppress(Exception):
                self._clear()
                return self._instance(build(self.target, self.options.args, theirs=True))
            self._clear()
            call = next(getattr(thing, name) for name in CALLS if hasattr(thing, name))
            if not self._is_theirs(error, call):
                raise
            return self._stopped(error)

    def _clear(self) -> None:
        """Nothing has been tried yet."""
        self.bugs, self.target.checked, self.target.not_checked = [], [], []

    def _instance(self, instance: Any) -> Verdict:
        if hasattr(instance, "eval") and hasattr(instance, "train"):
            instance.eval()
        call = next((getattr(instance, name) for name in CALLS if name in dir(type(instance))), None)
        if call is None:
            raise UncheckedError("no_call", name=type(instance).__name__)
        return self._with_weights(instance, call, instance)

    def _frames(self, error: Exception) -> list[traceback.FrameSummary]:
        """Where in the learner's file an error arose, the outermost call first."""
        return [f for f in traceback.extract_tb(error.__traceback__) if f.filename == self.target.source.path]

    def _is_theirs(self, error: Exception, call: Any) -> bool:
        """Does the learner's code stop while it attends, whatever it is given?"""
        frames = self._frames(error)
        if isinstance(error, UncheckedError) or not frames:
            return False
        if frames[-1].name == "__init__" and not isinstance(error, NameError | AttributeError):
            return False  # sizes of ours may be the cause
        parameters = arguments_of(call).items()
        required = [n for n, p in parameters if p.default is p.empty and not meaning_of(n) and "mask" not in n.lower()]
        if len(required) > 3 or (
            len(required) > 1 and not all(p.match(n) for n, p in zip(required, (QUERY, KEY, VALUE), strict=False))
        ):
            return False  # what a call was given beside the data was a guess
        return isinstance(error, STOPS) and not re.search(r"unpack|cuda|NVIDIA", str(error))

    def _stopped(self, error: Exception) -> Verdict:
        """The verdict on code that stops: wrong, at the line at which it does, and for which lengths."""
        source = self.target.source
        frames = self._frames(error)
        # A helper is right most often, and what it is given is not.
        line = next((f for f in reversed(frames) if not re.search(HELPERS, f.name)), frames[-1]).lineno or 1
        evidence, bug = f"{type(error).__name__}: {' '.join(str(error).split())}", "raises"
        with contextlib.suppress(Exception):
            instance = build(self.target, self.options.args)
            call = next(getattr(instance, name) for name in CALLS if name in dir(type(instance)))
            subject = subject_of(self.target, call, instance)
            subject((np.ones((size.BATCH, size.CONTEXT, size.WIDTH)),) * 3)
            facts = {"context": size.CONTEXT, "tokens": size.TOKENS, "error": evidence}
            evidence, bug = self.target.say("fits_whole", **facts), "length-fixed"
        finding = replace(self.target.finding(bug, evidence), line=source.number_of(line))
        return self.target.verdict(False, (replace(finding, quote=source.lines[line - 1].strip()),))

    def _with_weights(self, instance: Any, call: Any, module: Any) -> Verdict:
        """The verdict on what has weights, called by `call`."""
        lists = [v for v in vars(module).values() if isinstance(v, list)] if hasattr(module, "named_parameters") else []
        if any(hasattr(each, "named_parameters") for each in itertools.chain(*lists)):
            self.bugs.append("modules-in-list")
        folded = scale_is_folded(parts_of(instance, self.options.mapping))
        renew(arrays_of(instance), self.rng)
        parts = self._parts(instance)
        if not {"q", "qkv"} & set(parts.weights) and self._is_apart(call, module):
            raise UncheckedError("is_mlp", name=self.target.name)
        width = width_of(parts, self.options.args)
        choices = self.readings(instance, folded)
        subject = subject_of(self.target, call, module)
        longest = count_of(instance, ("context_length", "block_size", "max_len", "max_seq_len"), {})
        shape = (size.BATCH, min(size.TOKENS, longest or size.TOKENS), width)
        inputs = self._inputs(subject, shape)
        held = {} if subject.kind == "torch" or module is None else vars(module)
        subject.held = {
            name: value for name, value in held.items() if isinstance(value, list | dict) and not any(value)
        }
        # A batch, a document or, where it gathers what came before, a token at a time. Where all fail, the error of
        # the call that got furthest is shown.
        errors: list[Exception] = []
        for rank in (3, 2, 1)[: 2 + bool(subject.held)]:
            if (error := self._failure(subject, inputs, rank)) is None:
                break
            errors.append(error)
        else:
            raise max(errors, key=self._reached)
        self.target.kind = "layer"
        return self._judge(subject, choices, inputs)

    def _reached(self, error: Exception) -> tuple[bool, int]:
        """Did the call come to its end, and else in which line did it stop?"""
        frames = self._frames(error)
        return isinstance(error, UncheckedError), (frames[0].lineno or 0) if frames else 0

    def _parts(self, instance: Any) -> Parts:
        return replace(parts_of(instance, self.options.mapping), same_head=same_modules(instance))

    def readings(self, instance: Any, folded: bool = False) -> list[Reading]:
        """How correct code may use the weights of an object, the usual readings first; `folded`: a scale is in them."""
        parts = self._parts(instance)
        width = width_of(parts, self.options.args)
        heads, groups = heads_of(instance, self.target)
        kept = {x for x in getattr(instance, "__dict__", {}).values() if type(x) is int and 1 < x < width}
        # Where no name tells, any number that the object keeps may be theirs.
        others = [] if heads in kept else [n for n in sorted(kept) if width % n == 0]
        choices: list[Reading] = []
        for n, n_groups in ((heads, groups), *((n, None) for n in others)):
            with contextlib.suppress(UncheckedError):
                choices += readings(parts, n, n_groups, width)
        if not choices:
            list(readings(parts, heads, groups, width))  # which says why none fits
        if folded:
            choices += [replace(r, settings={**r.settings, "scale": "none"}) for r in choices]
        bases = [10000.0, *[n for n in self.target.source.numbers if 100 <= n < 1e7 and n != 10000.0][:3]]
        if not self.scope.says(TURNS):
            bases = []
        choices = [style for reading in choices for style in styles(reading, bases)]
        if self.scope.says(RESIDUAL):
            choices += [replace(r, settings={**r.settings, "residual": True}) for r in choices]
        return choices

    def _is_apart(self, call: Any, module: Any) -> bool:
        """Does no token change what comes out for another?"""
        x = self.rng.normal(size=(size.BATCH, size.TOKENS, size.WIDTH))
        other = np.concatenate([x[:, :1] + 1, x[:, 1:]], 1)
        with contextlib.suppress(Exception):  # what cannot be called so is judged elsewhere
            subject = subject_of(self.target, call, module)
            a, b = (subject((each,) * 3) for each in (x, other))
            return not close(a[:, 0], b[:, 0]) and close(a[:, 1:], b[:, 1:])
        return False

    def _failure(self, subject: Subject, inputs: tuple[Any, ...], rank: int) -> Exception | None:
        """The error of a call with inputs of that many axes, where there is one."""
        subject.rank = rank
        try:
            subject(inputs, _first_mask(subject, inputs))
        except Exception as error:
            return error
        return None

    # A bare function: attention(q, k, v, mask=None).

    def function(self) -> Verdict:
        holder = self._weights_as_arguments()
        if holder is not None:
            weights = {name: value for name, value in vars(holder).items() if name != "n_heads"}
            if number := self.target.number:
                weights = {name: _of_class(value, number) for name, value in weights.items()}
            call = functools.partial(self.target.thing, **weights)
            try:
                return self._with_weights(holder, call, None)
            except Exception as stop:
                if not self._is_theirs(stop, call):
                    raise
                return self._stopped(stop)
        subject = subject_of(self.target, self.target.thing, None)
        if len(subject.inputs) != 3:
            raise UncheckedError("no_qkv", name=self.target.name)
        verdicts: list[Verdict] = []
        failures: list[Exception] = []
        splits = self._sizes_of_split(subject)
        ranks = self._ranks()
        # Code that works with a number of heads is tried first with inputs whose last axis holds all of them.
        joined_forms = [(rank, True) for rank in ranks if splits and rank < 4]
        for rank, joined in (*joined_forms, *((rank, False) for rank in ranks)):
            if verdicts and splits and not joined:
                break  # it splits joined heads itself: what it makes of one head's vectors says nothing
            self.bugs, self.target.checked, self.target.not_checked = [], [], []
            alone = size.HEADS if rank == 4 else 1
            inputs, choices = self._heads_of_function(subject, splits or (alone, alone, size.HEAD_DIM), joined)
            if (error := self._failure(subject, inputs, rank)) is not None:
                failures.append(error)
                continue
            verdicts.append(self._judge(subject, choices, inputs))
            if verdicts[-1].right:
                return verdicts[-1]
        if not verdicts:
            failure = next((error for error in failures if isinstance(error, UncheckedError)), failures[0])
            if isinstance(failure, UncheckedError):
                raise failure
            raise UncheckedError("call_fails", name=self.target.name, error=f"{type(failure).__name__}: {failure}")
        return min(verdicts, key=lambda verdict: (UNKNOWN in verdict.bugs, len(verdict.bugs)))

    def _sizes_of_split(self, subject: Subject) -> tuple[int, int, int] | None:
        """Query heads, key/value heads and their width, where the code works with a number of heads; else None.

        Arguments, defaults and constants of the file are the learner's; what is left is ours, and is made to fit them.
        """
        args = self.options.args
        names = [n for n in ast.walk(self.scope.tree) if isinstance(n, ast.Name)]
        used, variables = {n.id for n in names}, {n.id for n in names if isinstance(n.ctx, ast.Store)}
        constants = {n: x for n, x in self.target.namespace.items() if n not in variables}
        defaults = {n: p.default for n, p in inspect.signature(subject.call).parameters.items()}
        theirs = {
            meaning_of(n): x for n, x in {**constants, **defaults, **args}.items() if n in used and type(x) is int
        }
        ours = {n: meaning_of(n) for n in subject.fixed if n in used and n not in args}
        if "HEADS" not in {*theirs, *ours.values()}:
            return None
        heads = theirs.get("HEADS", size.HEADS)
        groups = theirs.get("KV_HEADS", size.KV_HEADS if "KV_HEADS" in ours.values() else heads)
        d = theirs.get("HEAD_DIM") or theirs.get("WIDTH", 0) // heads or size.HEAD_DIM
        fitting = {"HEADS": heads, "KV_HEADS": groups, "HEAD_DIM": d, "WIDTH": heads * d}
        others = [n for n in defaults if n in used and n not in (*subject.inputs, subject.mask)]
        subject.fixed |= {n: fitting[meaning] for n in others if (meaning := meaning_of(n)) in fitting}
        return heads, groups, d

    def _heads_of_function(
        self, subject: Subject, sizes: tuple[int, int, int], joined: bool
    ) -> tuple[tuple[Any, Any, Any], list[Reading]]:
        """Queries, keys and values: (B,h,T,d), or (B,T,h*d) where `joined`; and how they may be read."""
        heads, groups, d = sizes
        if not joined:
            inputs = self._inputs(subject, *((size.BATCH, n, size.TOKENS, d) for n in (heads, groups)))
            return inputs, [Reading(Weights(heads, groups, dict.fromkeys("qkvo")))]
        inputs = self._inputs(subject, *((size.BATCH, size.TOKENS, n * d) for n in (heads, groups)))
        identity = {role: np.eye(n * d) for role, n in (("q", heads), ("k", groups), ("v", groups))}
        return inputs, list(styles(Reading(Weights(heads, groups, identity)), []))

    def _weights_as_arguments(self) -> Any:
        """Matrices and biases for a function that takes them; None where it takes none."""
        names = list(inspect.signature(self.target.thing).parameters)
        # One of these is a dictionary, with the keys that the code uses.
        table = next((n for n in names if re.fullmatch(TABLE, n)), None)
        wanted = [name for name in names if re.match(r"(attn_)?(w|b)", name, re.I)]
        if table:
            constants = [node.value for node in ast.walk(self.scope.tree) if isinstance(node, ast.Constant)]
            wanted = [key for key in constants if isinstance(key, str)]
        roles = {name: role_of(name) for name in wanted}
        if table and {"q", "k", "v"} & set(roles.values()):
            roles |= {f"w{role}": role for role in "qkv" if role not in roles.values()}  # which the code forgets
        if not {"q", "k", "v"} <= set(roles.values()):
            return None
        kind = kind_of_arrays(None, self.scope.code)
        whole = Subject(self.target.thing, kind, (), fixed=dict.fromkeys(names))
        heads, _, d = self._sizes_of_split(whole) or (1, 1, size.WIDTH)
        shapes = {n: (heads * d,) * (1 if n.lower().startswith("b") else 2) for n, role in roles.items() if role}
        three = [name for name in wanted if roles[name] in ("q", "k", "v")]
        if any(self.scope.says(rf"\b{name.lower()}\[[a-z]\w*\]") for name in three):  # a matrix for each head
            heads, d = (heads, d) if heads > 1 else (size.HEADS, size.HEAD_DIM)
            shapes |= dict.fromkeys(three, (heads, heads * d, d))
        spread = 1.2 / (heads * d) ** 0.5
        arrays = {n: to_kind(self.rng.normal(size=shape) * spread, kind) for n, shape in shapes.items()}
        return types.SimpleNamespace(**({table: Table(arrays)} if table else arrays), n_heads=heads)

    def _ranks(self) -> list[int]:
        """How many axes an input has: as an unpacked shape says, or the documentation; else all are tried."""
        text = self.scope.text
        docs = "\n".join(re.findall(r'#.*$|"""(?:.|\n)*?"""', text, re.M))
        unpacked = re.search(r"^\s*([\w]+(?:\s*,\s*\w+)+)\s*=\s*\w+\.(?:shape|size\(\))\s*$", text, re.M)
        written = re.search(
            r"\(([A-Za-z_]+(?:\s*,\s*[A-Za-z_]+){1,3})\)\s*(?:$|[,.;:#-]|array|list|tensor|->)", docs, re.M
        )
        for match in (unpacked, written):
            if match and 2 <= len(names := match[1].split(",")) <= 4:
                return [2, 1] if len(names) == 2 else [len(names)]
        batches = self.scope.says(r"(transpose|swapaxes)\([^)]*-2|\.mt\b")  # the last two axes, of any number
        return [4, 3] if batches else [4, 3, 2, 1]

    # Both.

    def _inputs(self, subject: Subject, shape: tuple[int, ...], of_keys: tuple[int, ...] = ()) -> tuple[Any, Any, Any]:
        """Queries, keys and values: different as far as the code takes them apart. `of_keys`: where not as queries."""
        x, y, z = (self.rng.normal(size=each) for each in (shape, of_keys or shape, of_keys or shape))
        self.context = len(subject.inputs) == 2
        return {1: (x, x, x), 2: (x, y, y)}.get(len(subject.inputs), (x, y, z))

    def _causal(self, subject: Subject) -> bool | None:
        """Ought it to be causal? None where nothing tells."""
        if self.options.causal is not None:
            return self.options.causal
        told = (
            subject.rank == 1  # token by token
            or any("causal" in name.lower() for name in subject.fixed)
            or re.search(CAUSAL_NAME, self.target.name, re.I)
            or self.scope.says(rf"{CAUSAL}|{OUTPUTS}")  # of a loop: token by token
            or self.scope.tells(r"(?<!not )(?<!non-)(?<!non)(?<!no )(?<!sin )(causal|future)")
        )
        return True if told else None

    def _judge(self, subject: Subject, choices: list[Reading], inputs: tuple[Any, ...]) -> Verdict:
        one_query = subject.rank == 1 and subject.mask is None and not subject.held
        causal = False if one_query else self._causal(subject)
        cases = list(self._cases(subject, inputs, bool(causal)))
        if not cases:
            raise UncheckedError("no_form_of_mask", name=self.target.name)
        self._properties(subject, cases[0])
        fills = [x for x in self.scope.numbers if x < 1e-3]
        apart = "batch-mixed" not in self.bugs
        guesses = [False, True] if causal is None else [causal]
        # What is not told is tried both ways: single bugs first, since the pairs take all the time there is.
        rounds = list(itertools.product((False, True)[: 1 + apart], guesses))
        for pairs, guess in rounds:
            if guess is True and causal is None:
                tried = [replace(case, masks=replace(case.masks, causal=True)) for case in cases]
            else:
                tried = cases
            search = Search(fills, self.options.seconds / len(rounds), self._has(choices[0]), pairs)
            explanation = search.explain(choices, tried)
            if cases[0].name not in explanation.unexplained:
                break
        if explanation.unexplained and self.scope.says(r"half\(|float16"):
            search.tolerance, search.until = NARROW, time.process_time() + 1
            close_by = search.explain(choices, cases)
            if not close_by.unexplained and not close_by.bugs:
                explanation, self.bugs = close_by, [*self.bugs, "softmax-narrow"]
        if causal is None and guess and cases[0].name not in explanation.unexplained:
            cases, causal = tried, True
        if untried := [name for name in arguments_of(subject.call) if name not in {subject.mask, *subject.passed}]:
            self.target.left_out("untried", names=", ".join(untried))
        self.target.did("one_query" if one_query else "causal" if causal else "not_causal")
        return self._verdict(explanation, cases)

    def _has(self, reading: Reading) -> set[str]:
        """What this code has, of that which bugs need."""
        w = reading.weights
        has = {
            "heads": w.matrices.get("q") is not None and w.n_heads > 1,
            "weights": self.target.kind == "layer",
            "groups": w.n_heads != w.n_kv_heads,
            "biases": bool(w.biases),
            "output": w.matrices.get("o") is not None,
            "rope": "rope" in reading.settings,
            "context": self.context,
        }
        return {what for what, so in has.items() if so}

    def _cases(self, subject: Subject, inputs: tuple[Any, ...], causal: bool) -> Iterator[Case]:
        """Plain; and, where a mask can be passed, a causal one and one for each document."""
        B, T = inputs[0].shape[0], inputs[0].shape[-2]
        has_mask = subject.mask is not None
        by_itself = any("causal" in name.lower() for name in subject.fixed) or self.options.causal is True
        # Causal without its argument: the code makes a mask of its own.
        inner = causal and (not has_mask or by_itself or self.scope.says(r"tril|triu|is_causal|arange"))
        if not subject.mask_required:
            yield Case("plain", inputs, Masks(inner), {"": subject(inputs)})
            self.target.did("plain")
        yield from self._further(subject, inputs, inner)
        if subject.mask is None:
            return
        past = np.tril(np.ones((T, T), bool))
        real = np.arange(T)[None] < np.array(LENGTHS)[:B, None]
        each = real[:, None, None] & (past if inner else np.ones((T, T), bool))
        cases = [("mask", past[None, None], None, Masks(True)), ("padding", each, real, Masks(inner, real))]
        for name, allowed, of_keys, masks in cases[1:] if re.search("pad|key", subject.mask, re.I) else cases:
            outputs = dict(self._masked(subject, inputs, allowed, of_keys))
            if outputs:
                yield Case(name, inputs, masks, outputs)
                self.target.did(name)
            else:
                self.target.left_out(f"no_{name}")

    def _further(self, subject: Subject, inputs: tuple[Any, ...], inner: bool) -> Iterator[Case]:
        """What the code takes by choice: lengths of the documents; another text to make keys and values of."""
        read = [n.id for n in ast.walk(self.scope.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        optional = [n for n, p in arguments_of(subject.call).items() if p.default is None and n in read]
        lengths = next((n for n in optional if re.fullmatch(LENGTH, n)), None)
        if lengths and subject.rank == 3:
            counts = to_kind(np.array(LENGTHS), subject.kind)
            call = replace(subject, fixed={**subject.fixed, lengths: counts})
            real = np.arange(inputs[0].shape[-2])[None] < np.array(LENGTHS)[:, None]
            yield from self._tried("padding", call, inputs, Masks(inner, real))
        context = next((n for n in optional if re.fullmatch(CONTEXTS, n)), None)
        if context and len(subject.inputs) == 1 and not inner:
            other = self.rng.normal(size=inputs[0].shape)
            call = replace(subject, inputs=(*subject.inputs, context))
            yield from self._tried("context", call, (inputs[0], other, other), Masks())

    def _tried(self, name: str, call: Subject, inputs: tuple[Any, ...], masks: Masks) -> Iterator[Case]:
        """The case of one more call; where it fails the argument stays among those that were not tried."""
        with contextlib.suppress(Exception):
            yield Case(name, inputs, masks, {"": call(inputs)})
            self.target.did(name)

    def _masked(self, subject: Subject, inputs: tuple[Any, ...], allowed: Any, real: Any) -> Iterator[tuple[str, Any]]:
        """Outputs with a mask, by the form in which it was passed; forms that the code refuses are left out."""
        whole = np.repeat(allowed, len(inputs[0]) // len(allowed), 0)
        if real is None:
            shapes = {"(T,S)": allowed[0, 0], "(B,1,T,S)": whole, "(B,T,S)": whole[:, 0]}
        elif subject.rank < inputs[0].ndim:  # one document at a time
            shapes = {"(T,S)": whole, "(1,S)": real[:, None, None]}
        else:
            shapes = {"(B,1,T,S)": whole, "(B,T,S)": whole[:, 0], "(B,1,1,S)": real[:, None, None], "(B,S)": real}
        for meaning in meanings_of(self.scope, self.target.source, str(subject.mask)):
            for shape, mask in shapes.items():
                try:
                    out = subject(inputs, ENCODINGS[meaning](mask))
                except Exception:  # a form of the mask that this code does not take
                    continue
                yield f"{shape} {meaning}", out

    def _properties(self, subject: Subject, case: Case) -> None:
        """Does dropout rest in eval, and fall on weights; do documents meet; does a cache change anything?"""
        mask = _first_mask(subject, case.inputs)
        base, again = (subject(case.inputs, mask) for _ in range(2))
        same = np.array_equal(base, again, equal_nan=True)
        drops = self.scope.says(r"drop|bernoulli|binomial|rand")
        if subject.seen.in_eval or (drops and not same):
            self.bugs.append("dropout-in-eval")
        if drops and hasattr(subject.module, "train"):
            subject.module.train()
            try:
                subject(case.inputs, mask)
                self.target.did("dropout")
            except Exception:  # only the check of dropout is lost
                self.target.left_out("no_dropout")
            subject.module.eval()
            if subject.seen.on_scores:
                self.bugs.append("dropout-on-scores")
        if subject.rank == case.inputs[0].ndim and same:
            other = tuple(np.concatenate([self.rng.normal(size=x[:1].shape), x[1:]]) for x in case.inputs)
            other = (other[0],) * 3 if len(subject.inputs) == 1 else other
            if not close(subject(other, mask)[1:], base[1:]):
                self.bugs.append("batch-mixed")
            self.target.did("batch")
        if subject.module is not None and len(subject.inputs) == 1 and subject.rank == 3:
            try:
                steps = cache_bug(subject, case.inputs[0], base, self.target)
            except UncheckedError as error:
                self.target.left_out(error.key, **error.facts)
                return
            if steps is not None:
                self.target.did("steps")
                (bug, _, self.failure), self.gap = steps[0].partition(" "), steps[1]
                self.bugs += [bug] * bool(bug)
                subject.passed |= set(cache_arguments(subject))

    def _verdict(self, explanation: Explanation, cases: list[Case]) -> Verdict:
        bugs = [self._renamed(bug) for bug in explanation.bugs]
        for bug in map(self._renamed, self.bugs):
            hidden_by = bug_named(bug).hidden_by
            if not any(re.fullmatch(hidden_by, other) for other in bugs):
                bugs.append(bug)
        weights = explanation.reading.weights
        joined = self.scope.says(r"modulelist|for \w+ in self\.\w*heads?|range\(")  # a list of heads: a form of its own
        several = weights.n_heads > 1 and self.target.kind == "layer"
        if several and not joined and weights.matrices.get("o") is None:
            bugs.append("output-projection-missing")
        explained = not explanation.unexplained or "batch-mixed" in self.bugs
        if explanation.unexplained and "dropout-in-eval" in bugs:
            explained = True
            self.target.left_out("not_still")
        right: bool | None = not bugs and explained
        if not explained and self.scope.says(BEYOND):
            right = False if bugs else None
            self.target.left_out("beyond")
        if explanation.settings.get("residual"):
            self.target.did("residual")
        for fill in (x for x in self.scope.numbers if x <= -1e3 and self.scope.says(r"fill|mask|where")):
            self.target.left_out("not_16_bits" if fill < -65504 else "weak_16_bits", fill=fill)
        say = words(self.options.lang)
        findings = []
        for bug in dict.fromkeys(bugs):
            evidence = say["by_property_cache-offset"].format(gap=self.gap)
            if bug == "cache-raises":
                evidence = self.failure
            elif not bug.startswith("cache"):
                evidence = evidence_of(bug_named(bug), explanation, cases, say)
            findings.append(self._with_remedy(self.target.finding(bug, evidence), explanation))
        if not explained and right is False:
            case = next((case for case in cases if case.name in explanation.unexplained), cases[0])
            findings.append(Finding(UNKNOWN, None, "", stage_of(explanation, case, say), say["unknown_fix"]))
        return self.target.verdict(right, tuple(findings))

    def _with_remedy(self, finding: Finding, explanation: Explanation) -> Finding:
        """The finding, with what its remedy means in this code: the letters of an einsum, which bias."""
        facts = {"roles": ", ".join(f"W_{role.upper()}" for role in explanation.settings.get("no_bias", ""))}
        keys = {"einsum_fix": "einsum" in finding.quote, "bias_fix": finding.bug == "bias-dropped" and facts["roles"]}
        more = [self.target.say(key, **facts) for key, so in keys.items() if so]
        return replace(finding, fix=" ".join([finding.fix, *more]))

    def _renamed(self, bug: str) -> str:
        """The bug that gives the numbers of this one in code such as the learner's."""
        return next((rule["to"] for rule in bug_named(bug).renamed if self.scope.says(rule["code"])), bug)


def _first_mask(subject: Subject, inputs: tuple[Any, ...]) -> Any:
    """A mask for the first call, where the code will not be called without."""
    return np.tril(np.ones((inputs[0].shape[-2], inputs[1].shape[-2]), bool)) if subject.mask_required else None
