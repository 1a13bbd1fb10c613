"""The check of a layer or a bare attention function: build it, give it numbers, run it, explain what comes out."""

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
from dataclasses import replace
from typing import Any

import numpy as np

# `size.HEADS`: the sizes of what is built and passed here
from headwise.checker import subject as size
from headwise.checker.bugs import UNKNOWN, UncheckedError, Verdict, bug_named, in_one_line
from headwise.checker.caches import cache_arguments, cache_bug
from headwise.checker.form import Inputs, Masks, Weights
from headwise.checker.loops import OUTPUTS
from headwise.checker.reading import (
    Reading,
    arrays_of,
    parts_of,
    readings,
    renew,
    role_of,
    scale_is_folded,
    styles,
    width_of,
)
from headwise.checker.search import Case, Explanation, Search, close, evidence_of, stage_of
from headwise.checker.source import DATA, ENCODINGS, MASK, meanings_of
from headwise.checker.subject import (
    Subject,
    Target,
    arguments_of,
    build,
    call_of,
    kind_of_arrays,
    meaning_of,
    pick,
    required_of,
    subject_of,
    to_kind,
)

# Real tokens of the five documents: of one all, as in a batch that was padded to its longest; of the others fewer.
LENGTHS = np.array([7, 4, 6, 3, 5])
# Words of the learner's code, as regular expressions, and what they tell; some are Spanish, which `check` speaks too.
# CAUSAL is looked for in the code, CAUSAL_NAME in the name of the class or function: either says that it is causal. A
# `context_length` or `block_size` does, for it is the size of the causal mask that such code makes.
CAUSAL = r"causal|tril|triu|context_?length|block_?size|autoregress|look_?ahead|no_?peek|subsequent"
CAUSAL_NAME = r"causal|masked|gpt|llama|mistral|decoder|autoregress|qwen|gemma"
# WIDE finds a softmax that is computed in 32 bits, in one of two cases: something before it is turned to 32 bits
# (WIDENED), or nothing between the start of the text and it is turned to 16 (NEVER_NARROWED; `float16` is a part of
# `bfloat16` too). What makes 16 bits after its call rounds the result alone, and is allowed.
WIDENED = r"(\.float\(\)|float32).*"
NEVER_NARROWED = r"\A((?!half\(|float16|autocast).)*"
# Not `softmax(x.half(), -1)` and not `softmax(x, -1, dtype=torch.float16)`. What stands past `dim`, `axis` or `-1` is
# let be: `softmax(x, -1).half()` rounds the result alone.
NOT_OF_16_BITS = r"(?!\(((?!dim|axis|-1)[^\n])*(half|16)|\([^\n]*dtype=\w+\.b?float16)"
# `(?<!def )`: the line that defines a softmax is no call of it. `(?s)`: `.` goes on over the ends of lines.
WIDE = rf"(?s)({WIDENED}|{NEVER_NARROWED})(?<!def )softmax{NOT_OF_16_BITS}"
# Axes in which tokens come before the documents of a batch, as an unpacked shape or a comment has them: `T, B, C`.
TOKENS_FIRST = (
    r"(?m)(^\s*|\()(s|t|l|(n_)?tokens|seq\w*|\w*len\w*), ?(b|n|bs|bsz|(n_)?batch\w*), ?\w+"
)
# an argument with the lengths of documents
LENGTH = r"(valid|seq|key|x|src|input)?_?(lens?|lengths?)"
# an argument with another text
CONTEXTS = r"context|memory|enc\w*|key_value_states|kv|source|other|cond|cross\w*"
# what the correct form here cannot compute: code with it is not called wrong for it
NOT_MODELLED = (
    r"tanh|temperature|logit_scale|normalize\(|alibi|softcap|soft_cap|sink|relative_|conv\d?d|sigmoid|window_size|"
    r"sliding|bucket|layernorm|layer_norm\("
)
# an argument with all weights by name
TABLE = r"(all_?)?(params?|weights|state_dict|sd|p|w|theta|pesos|parametros)"
# in the name of a function that is given what is wrong elsewhere
HELPERS = r"softmax|linear|mul|vec|dot|norm"
# Of the largest number. bfloat16 keeps 8 bits, so one rounding is off by 0.4 % at most; but several follow one
# another, and of a score of 5 that is an error of 2 % in its weight.
TOLERANCE_OF_16_BITS = 2e-2
# Errors that wrong code raises; others, such as of memory or of the system, say nothing of it.
STOPS = (
    NameError,
    AttributeError,
    TypeError,
    ValueError,
    IndexError,
    KeyError,
    RuntimeError,
    ZeroDivisionError,
)


class Table(dict[str, Any]):
    """Weights by their names, as `attn_wq`. Any other key, as `layer0.attn_wq`, gets that of its role."""

    def __missing__(self, key: str) -> Any:
        role = role_of(key)
        for name, value in self.items():
            if role is not None and role_of(name) == role:
                return value
        raise KeyError(key)  # code may ask for what is not there, and go on without it


def examine(target: Target) -> Verdict:
    """The verdict on a layer or a function. UncheckedError where it cannot be built or called."""
    examiner = Examiner(target)
    return examiner.layer() if target.kind == "layer" else examiner.function()


class Examiner:
    """One check: the object, what is known of it, and what comes out."""

    def __init__(self, target: Target) -> None:
        self.target, self.options, self.scope = target, target.options, target.scope
        # so that every check of the same code gives the same verdict
        self.rng = np.random.default_rng(0)
        self.context = False  # are keys and values made of another text?
        self.n_listed = 1  # matrices of queries: more where each head has its own
        # Bug -> the sentence that shows it, of bugs seen by a property and not by the numbers that come out. An empty
        # sentence: `evidence_of` has one for this bug.
        self.shown: dict[str, str] = {}

    # A layer: weights inside, (B,T,C) in and out.

    def layer(self) -> Verdict:
        thing = self.target.thing
        if not isinstance(thing, type):
            thing = copy.deepcopy(thing)  # it gets other weights, and gradients
            return self._with_weights(thing, call_of(thing), thing)
        args, names = self.options.args, set(arguments_of(thing))
        # The sizes given by the caller, and whether the learner's own defaults stay: they do where ours do not fit.
        attempts = [(args, False), (args, True)]
        if {"d_in", "d_out"} <= names and "HEADS" not in map(meaning_of, names):
            # A single head comes out narrower than its input first, so that a scale by the wrong width shows.
            attempts.insert(0, ({"d_out": size.HEAD_DIM, **args}, False))
        errors = []
        for sizes, theirs in attempts:
            self._clear()
            try:
                instance = build(self.target, sizes, theirs)
                return self._with_weights(instance, call_of(instance), instance)
            except Exception as error:
                errors.append(error)
        self._clear()
        # The attempts go from the preferred one down: a later error may come of sizes that do not fit together.
        return self._stopped(errors[0], thing)

    def _clear(self) -> None:
        """Nothing has been tried yet."""
        self.shown, self.target.checked, self.target.not_checked = {}, [], []

    def _frames(self, error: Exception) -> list[traceback.FrameSummary]:
        """Where in the learner's file an error arose, the outermost call first."""
        return [
            f
            for f in traceback.extract_tb(error.__traceback__)
            if f.filename == self.target.source.path
        ]

    def _stopped(self, error: Exception, thing: Any) -> Verdict:
        """The verdict on code that stops while it attends, whatever it is given: wrong, at the line at which it does.

        The error itself where something of ours may be the cause.
        """
        source, frames = self.target.source, self._frames(error)
        if isinstance(error, UncheckedError) or not frames:
            raise error  # it arose in no line of the file
        # A size that its __init__ refuses, and axes that cannot be unpacked, are ours; a graphics card the machine's.
        is_of_sizes = frames[-1].name == "__init__" and not isinstance(
            error, NameError | AttributeError
        )
        is_of_axes_or_machine = re.search(r"unpack|cuda|NVIDIA", str(error))
        if is_of_sizes or is_of_axes_or_machine or not isinstance(error, STOPS):
            raise error
        call = call_of(thing)
        asked = [
            name for name in required_of(call) if meaning_of(name) is None and not MASK.search(name)
        ]
        are_data = [any(pattern.match(name) for pattern in DATA) for name in asked]
        if len(asked) > 1 and not all(are_data):
            # one is the data, whatever its name; what a call was given beside the data was a guess
            raise error
        # A helper is right most often, and what it is given is not.
        line = (
            next((f for f in reversed(frames) if not re.search(HELPERS, f.name)), frames[-1]).lineno
            or 1
        )
        evidence, bug = in_one_line(error), "raises"
        # Code that stops at our shorter text, and not at one that fills the context, is fixed to that length. Where
        # it stops there as well, the suppressed error skips the rest of this block.
        with contextlib.suppress(Exception):
            instance = build(self.target, self.options.args)
            whole_context = np.ones((size.BATCH, size.CONTEXT, size.WIDTH))
            subject_of(self.target, call_of(instance), instance)((whole_context,) * 3)
            facts = {"context": size.CONTEXT, "tokens": size.TOKENS, "error": evidence}
            evidence, bug = self.target.say("fits_whole", **facts), "length-fixed"
        finding, quote = self.target.finding(bug, evidence), source.lines[line - 1].strip()
        return self.target.verdict(
            False, (replace(finding, line=source.number_of(line), quote=quote),)
        )

    def _with_weights(self, instance: Any, call: Any, module: Any) -> Verdict:
        """The verdict on what has weights.

        instance  holds the weights
        call      what attends: a method of the instance, or a function to which weights have been bound
        module    the instance again, where it is a learner's object; None for a function
        """
        if hasattr(module, "named_parameters"):
            module.eval()
            # torch finds no module in a plain list, so that an optimizer never gets its weights.
            for kept in vars(module).values():
                if isinstance(kept, list) and any(
                    hasattr(part, "named_parameters") for part in kept
                ):
                    self.shown["modules-in-list"] = ""
        parts = parts_of(instance, self.options.mapping)
        self.n_listed = len(parts.weights.get("q", ()))
        folded = scale_is_folded(parts)  # as the learner drew the weights: `renew` overwrites them
        renew(arrays_of(instance), self.rng)
        choices = readings(self.target, instance, folded)
        subject = subject_of(self.target, call, module)
        inputs = self._inputs(
            subject, (size.BATCH, size.TOKENS, width_of(parts, self.options.args))
        )
        if module is not None:
            if re.search(TOKENS_FIRST, f"{self.scope.code}\n{self.scope.text.lower()}"):
                subject.tokens_first = True
                self.target.did("tokens_first")
            # A list, or a list for each head, is empty until the first token is there. Not of torch: each of its
            # modules has empty dictionaries, such as those of its hooks.
            if subject.kind != "torch":
                subject.gathers = any(
                    isinstance(kept, list | dict) and not any(kept)
                    for kept in vars(module).values()
                )
            if subject.gathers or cache_arguments(subject):
                # The second argument: what refers to the module itself is not copied, but goes on to refer to it.
                subject.fresh = copy.deepcopy(vars(module), {id(module): module})
            # An object that the learner passed may have been used, and hold tokens; one that was built here does not.
            if not isinstance(self.target.thing, type):
                for name, kept in subject.fresh.items():
                    if "cache" in name and (isinstance(kept, tuple) or hasattr(kept, "shape")):
                        subject.fresh[name] = None
        # A batch, a document or, where it gathers what came before, a token at a time. Where all fail, the error of
        # the call that got furthest is shown.
        ranks = (3, 2, 1) if subject.gathers else (3, 2)
        errors = []
        for rank in ranks:
            if (error := self._failure(subject, inputs, rank)) is None:
                break
            errors.append(error)
        else:
            raise max(errors, key=self._reached)
        self.target.kind = "layer"  # a function that takes its weights is judged as one
        return self._judge(subject, choices, inputs)

    def _reached(self, error: Exception) -> tuple[bool, int]:
        """Did the call come to its end, and else in which line did it stop?"""
        frames = self._frames(error)
        # An UncheckedError is raised by what reads the result, after the call.
        return isinstance(error, UncheckedError), (frames[0].lineno or 0) if frames else 0

    def _failure(self, subject: Subject, inputs: Inputs, rank: int) -> Exception | None:
        """The error of a call with inputs of that many axes, where there is one."""
        subject.rank = rank
        try:
            subject(inputs, _first_mask(subject, inputs))
        except Exception as error:
            return error
        return None

    # A bare function: attention(q, k, v, mask=None).

    def function(self) -> Verdict:
        thing, number = self.target.thing, self.target.number
        # as in `layer`: a head that comes out narrower than its input shows its scale
        for narrow in (True, False):
            self._clear()
            weights, n_heads = self._weights_as_arguments(narrow)
            if not weights:
                continue
            # for what reads weights of an object
            holder = types.SimpleNamespace(**weights, n_heads=n_heads)
            # Where the file has its own class of numbers, the code is given such; the holder keeps arrays.
            passed = (
                {name: to_kind(value, number) for name, value in weights.items()}
                if number
                else weights
            )
            call = functools.partial(thing, **passed)
            try:
                return self._with_weights(holder, call, None)
            except Exception as error:
                if not narrow:
                    return self._stopped(error, call)
        subject = subject_of(self.target, thing, None)
        if len(subject.inputs) != 3:
            raise UncheckedError("no_qkv", name=self.target.name)
        verdicts: list[Verdict] = []
        failures = []
        split = self._sizes_of_split(subject)
        ranks = self._ranks()
        # Code that works with a number of heads may cut them itself: it gets (B,T,h*d) or (T,h*d), `joined`, before
        # it gets one head's vectors. Inputs of 4 axes, (B,h,T,d), are cut already.
        forms = [(rank, True) for rank in ranks if split and rank < 4] + [
            (rank, False) for rank in ranks
        ]
        for rank, joined in forms:
            if verdicts and split and not joined:
                # it splits joined heads itself: what it makes of one head's vectors says nothing
                break
            self._clear()
            heads = size.HEADS if rank == 4 else 1
            inputs, choices = self._heads_of_function(
                subject, split or (heads, heads, size.HEAD_DIM), joined
            )
            failure = self._failure(subject, inputs, rank)
            if failure is not None:
                failures.append(failure)
                continue
            verdict = self._judge(subject, choices, inputs)
            if verdict.right:
                return verdict
            verdicts.append(verdict)
        if verdicts:
            # The mildest: the way of calling was a guess, and a wrong guess makes right code look wrong.
            return min(verdicts, key=lambda verdict: (UNKNOWN in verdict.bugs, len(verdict.bugs)))
        for failure in failures:
            if isinstance(failure, UncheckedError):
                raise failure
        raise UncheckedError("call_fails", name=self.target.name, error=in_one_line(failures[0]))

    def _sizes_of_split(self, subject: Subject) -> tuple[int, int, int] | None:
        """Query heads, key/value heads and their width, where the code works with a number of heads; else None.

        Arguments, defaults and constants of the file are the learner's; what is left is ours, and is made to fit them.
        """
        names = [node for node in ast.walk(self.scope.tree) if isinstance(node, ast.Name)]
        used = {node.id for node in names}
        variables = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        defaults = {name: p.default for name, p in arguments_of(subject.call).items()}
        theirs = {}  # by meaning; a later place overrides an earlier one
        for place in (self.target.namespace, defaults, self.options.args):
            for name, value in place.items():
                # A name that the code binds itself does not mean the constant of the file.
                is_local = place is self.target.namespace and name in variables
                if name in used and not is_local and type(value) is int:
                    theirs[meaning_of(name)] = value
        ours = {
            meaning_of(name)
            for name in subject.fixed
            if name in used and name not in self.options.args
        }
        if "HEADS" not in ours.union(theirs):
            return None
        heads = theirs.get("HEADS", size.HEADS)
        groups = theirs.get("KV_HEADS", size.KV_HEADS if "KV_HEADS" in ours else heads)
        d = theirs.get("HEAD_DIM") or theirs.get("WIDTH", 0) // heads or size.HEAD_DIM
        fitting = {"HEADS": heads, "KV_HEADS": groups, "HEAD_DIM": d, "WIDTH": heads * d}
        for name in defaults:
            if (
                name in used
                and name not in (*subject.inputs, subject.mask)
                and meaning_of(name) in fitting
            ):
                subject.fixed[name] = fitting[meaning_of(name)]
        return heads, groups, d

    def _heads_of_function(
        self, subject: Subject, sizes: tuple[int, int, int], joined: bool
    ) -> tuple[Inputs, list[Reading]]:
        """Queries, keys and values: (B,h,T,d), or (B,T,h*d) where `joined`; and how they may be read."""
        heads, groups, d = sizes
        if not joined:
            inputs = self._inputs(
                subject, *((size.BATCH, n, size.TOKENS, d) for n in (heads, groups))
            )
            # nothing is projected
            return inputs, [Reading(Weights(heads, groups, dict.fromkeys("qkvo")))]
        inputs = self._inputs(subject, *((size.BATCH, size.TOKENS, n * d) for n in (heads, groups)))
        # Identities as projections, which leave the inputs as they are, so that every layout of heads can be tried.
        identity = {"q": np.eye(heads * d), "k": np.eye(groups * d), "v": np.eye(groups * d)}
        return inputs, list(styles(Reading(Weights(heads, groups, identity)), []))

    def _weights_as_arguments(self, narrow: bool) -> tuple[dict[str, Any], int]:
        """Matrices and biases by the arguments of a function that takes them, and its number of heads; {} for others.

        narrow  are matrices (C,d), with d other than C? That fits one head without W_O; other code gets {}
        """
        names = list(arguments_of(self.target.thing))
        table = next((name for name in names if re.fullmatch(TABLE, name)), None)
        wanted = [name for name in names if re.match(r"(attn_)?(w|b)", name, re.I)]
        if table:  # a dictionary, whose keys stand in the code as texts
            constants = [
                node.value for node in ast.walk(self.scope.tree) if isinstance(node, ast.Constant)
            ]
            wanted = [key for key in constants if isinstance(key, str)]
        # Of those, only names that tell a role (q, k, v, o, ...) are given a matrix or a bias.
        roles = {name: role for name in wanted if (role := role_of(name))}
        if table and {"q", "k", "v"} & set(roles.values()):
            # Code that wrongly takes K for values, too, never names W_V: the table has it all the same.
            roles |= {f"w{role}": role for role in "qkv" if role not in roles.values()}
        if not {"q", "k", "v"} <= set(roles.values()):
            return {}, 1
        kind = kind_of_arrays(None, self.scope.code)
        # any parameter may be a size
        without_data = Subject(self.target.thing, kind, (), fixed=dict.fromkeys(names))
        # `_` are the key/value heads: k and v get as many as q. Where the code works with no number of heads, d is
        # the whole WIDTH.
        heads, _, d = self._sizes_of_split(without_data) or (1, 1, size.WIDTH)
        three = [name for name in wanted if roles.get(name) in ("q", "k", "v")]
        # Of `W_q[h]` there is a matrix for each head.
        listed = any(self.scope.says(rf"\b{name.lower()}\[[a-z]\w*\]") for name in three)
        if listed and heads == 1:
            heads, d = size.HEADS, size.HEAD_DIM
        if narrow and ("o" in roles.values() or d != size.WIDTH):
            return {}, 1
        width = heads * d
        # A matrix is (width, inner): as wide as one head where `narrow`, else as wide as all of them.
        inner = size.HEAD_DIM if narrow else width
        arrays: dict[str, Any] = {}
        for name in roles:
            shape: tuple[int, ...] = (width, inner)
            if listed and name in three:
                shape = (heads, width, d)
            elif name.lower().startswith("b"):
                shape = (inner,)
            # 1.2 as in `renew`, which tells why.
            arrays[name] = to_kind(self.rng.normal(size=shape) * 1.2 / width**0.5, kind)
        return {table: Table(arrays)} if table else arrays, heads

    def _ranks(self) -> list[int]:
        """How many axes an input has: as an unpacked shape says, or the documentation; else all are tried."""
        text = self.scope.text
        docs = "\n".join(re.findall(r'#.*$|"""(?:.|\n)*?"""', text, re.M))
        # `B, T, C = x.shape` in the code; `(B, T, C)` in a comment, before the end of a line, a colon, `array`, `->`.
        unpacked = r"^\s*([\w]+(?:\s*,\s*\w+)+)\s*=\s*\w+\.(?:shape|size\(\))\s*$"
        written = (
            r"\(([A-Za-z_]+(?:\s*,\s*[A-Za-z_]+){1,3})\)\s*(?:$|[,.;:#-]|array|list|tensor|->)"
        )
        for match in (re.search(unpacked, text, re.M), re.search(written, docs, re.M)):
            axes = 0 if match is None else match[1].count(",") + 1
            if 2 <= axes <= 4:
                # of 2 axes may be the keys alone, and the query a vector
                return [2, 1] if axes == 2 else [axes]
        # Code that exchanges the last two axes by their numbers from behind has others before them.
        is_batched = self.scope.says(r"(transpose|swapaxes)\([^)]*-2|\.mt\b")
        return [4, 3] if is_batched else [4, 3, 2, 1]

    # Both.

    def _inputs(
        self, subject: Subject, shape: tuple[int, ...], of_keys: tuple[int, ...] = ()
    ) -> Inputs:
        """Queries, keys and values: different as far as the code takes them apart.

        shape, of_keys  of queries; of keys and values, where that is another one
        """
        x, y, z = (
            self.rng.normal(size=each) for each in (shape, of_keys or shape, of_keys or shape)
        )
        count = len(subject.inputs)
        self.context = count == 2
        if count == 1:
            return x, x, x
        return x, y, y if self.context else z

    def _causal(self, subject: Subject) -> bool | None:
        """Ought it to be causal? None where nothing tells."""
        if self.options.causal is not None:
            return self.options.causal
        told = (
            subject.rank == 1  # token by token
            or subject.is_told_causal
            or re.search(CAUSAL_NAME, self.target.name, re.I)
            # what `loops` writes around a loop: token by token
            or self.scope.says(rf"{CAUSAL}|{OUTPUTS}")
            or self.scope.tells(r"(?<!not )(?<!non-)(?<!non)(?<!no )(?<!sin )(causal|future)")
        )
        return True if told else None

    def _judge(self, subject: Subject, choices: list[Reading], inputs: Inputs) -> Verdict:
        """Run the cases and look for the bugs that explain their numbers, read in one of these ways."""
        one_query = subject.rank == 1 and subject.mask is None and not subject.gathers
        causal = False if one_query else self._causal(subject)
        cases = list(self._cases(subject, inputs, bool(causal)))
        if not cases:
            raise UncheckedError("no_form_of_mask", name=self.target.name)
        self._properties(subject, cases[0])
        # The cases by whether the code is taken to be causal: True, False.
        versions = {causal: cases}
        if causal is None:  # what is not told is tried both ways
            ahead = [replace(case, masks=replace(case.masks, causal=True)) for case in cases]
            versions = {False: cases, True: ahead}
        # A round is one search: with pairs of bugs or single ones, for one guess at whether the code is causal.
        # Single bugs first, since the pairs take all the time there is.
        rounds = [(pairs, guess) for pairs in (False, True) for guess in versions]
        is_narrow = self.scope.says(r"half\(|float16|autocast")
        # No pair of bugs gives the numbers of documents that meet, and roundings are looked at below: only the first
        # rounds are gone through, those of single bugs.
        if "batch-mixed" in self.shown or is_narrow:
            rounds = rounds[: len(versions)]
        # may stand for a forbidden score: negative, 0 or nearly
        fills = [x for x in self.scope.numbers if x < 1e-3]
        for pairs, guess in rounds:
            search = Search(fills, self.options.seconds / len(rounds), self._has(choices[0]), pairs)
            explanation = search.explain(choices, versions[guess])
            # the first case is explained, so the guess is right
            if cases[0].name not in explanation.unexplained:
                cases, causal = versions[guess], guess
                break
        # Where no guess explains the first case, the explanation names no bug, and the cases stay as they were.
        # Code in 16 bits rounds more: what comes near its correct form is right, and so is one bug that does.
        if explanation.unexplained and is_narrow:
            search.tolerance, search.pairs = TOLERANCE_OF_16_BITS, False
            close_by = search.explain(choices, cases)
            if not close_by.unexplained:
                explanation = close_by
                self.target.did("rounded")
                if not self.scope.says(WIDE):
                    self.shown["softmax-narrow"] = ""
        if untried := [
            name
            for name in arguments_of(subject.call)
            if name not in {subject.mask, *subject.passed}
        ]:
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
            "biases": w.biases,
            "output": w.matrices.get("o") is not None,
            "rope": "rope" in reading.settings,
            "context": self.context,
        }
        return {what for what, so in has.items() if so}

    def _cases(self, subject: Subject, inputs: Inputs, causal: bool) -> Iterator[Case]:
        """Plain; and, where a mask can be passed, a causal one and one for each document."""
        B, T = inputs[0].shape[0], inputs[0].shape[-2]
        # Causal without its argument: the code makes a mask of its own.
        needs_no_argument = subject.mask is None or subject.is_told_causal or self.options.causal
        masks_itself = causal and bool(
            needs_no_argument or self.scope.says(r"tril|triu|is_causal|arange")
        )
        if not subject.mask_required:
            yield Case("plain", inputs, Masks(masks_itself), {"": subject(inputs)})
            self.target.did("plain")
        yield from self._further(subject, inputs, masks_itself)
        if subject.mask is None:
            return
        past = np.tril(np.ones((T, T), bool))
        real = np.arange(T)[None] < LENGTHS[:B, None]  # (B,S)
        of_documents = real[:, None, None] & (past if masks_itself else np.ones((T, T), bool))
        cases = [
            ("mask", past[None, None], Masks(True)),
            ("padding", of_documents, Masks(masks_itself, real)),
        ]
        if re.search("pad|key|relleno|clave", subject.mask, re.I):
            cases = cases[1:]  # by its name it is for padding alone
        for name, allowed, masks in cases:
            outputs = self._masked(subject, inputs, allowed, masks.real)
            if outputs:
                yield Case(name, inputs, masks, outputs)
                self.target.did(name)
            else:
                self.target.left_out(f"no_{name}")

    def _further(self, subject: Subject, inputs: Inputs, masks_itself: bool) -> Iterator[Case]:
        """What the code takes by choice: lengths of the documents; another text to make keys and values of.

        Where the call fails the argument stays among those that were not tried.
        """
        read = [
            n.id
            for n in ast.walk(self.scope.tree)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        ]
        for name, parameter in arguments_of(subject.call).items():
            if parameter.default is not None or name not in read:  # by choice: its default is None
                continue
            case, call = "", subject
            if re.fullmatch(LENGTH, name) and subject.rank == 3:
                call = replace(
                    subject, fixed={**subject.fixed, name: to_kind(LENGTHS, subject.kind)}
                )
                case, passed = "padding", inputs
                masks = Masks(masks_itself, np.arange(inputs[0].shape[-2])[None] < LENGTHS[:, None])
            elif re.fullmatch(CONTEXTS, name) and len(subject.inputs) == 1 and not masks_itself:
                other = self.rng.normal(size=inputs[0].shape)
                call = replace(subject, inputs=(*subject.inputs, name))
                case, passed, masks = "context", (inputs[0], other, other), Masks()
            if case:
                # of the call, which comes before the case is handed out
                with contextlib.suppress(Exception):
                    yield Case(case, passed, masks, {"": call(passed)})
                    self.target.did(case)

    def _masked(self, subject: Subject, inputs: Inputs, allowed: Any, real: Any) -> dict[str, Any]:
        """Outputs with a mask, by the form in which it was passed; forms that the code refuses are left out."""
        # (1,1,T,S) or (B,1,T,S) -> (B,1,T,S)
        whole = np.repeat(allowed, len(inputs[0]) // len(allowed), 0)
        if real is None:
            shapes = {"(T,S)": allowed[0, 0], "(B,1,T,S)": whole, "(B,T,S)": whole[:, 0]}
        else:
            shapes = {
                "(B,1,T,S)": whole,
                "(B,T,S)": whole[:, 0],
                "(B,1,1,S)": real[:, None, None],
                "(B,S)": real,
            }
        outputs = {}
        for meaning in meanings_of(self.scope, self.target.source, str(subject.mask)):
            for shape, mask in shapes.items():
                # a form of the mask that this code does not take
                with contextlib.suppress(Exception):
                    outputs[f"{shape} {meaning}"] = subject(inputs, ENCODINGS[meaning](mask))
        return outputs

    def _properties(self, subject: Subject, case: Case) -> None:
        """Does dropout rest in eval, and fall on weights; do gradients arrive, do documents meet, does a cache hold?"""
        mask = _first_mask(subject, case.inputs)
        base, again = subject(case.inputs, mask), subject(case.inputs, mask)
        same = np.array_equal(base, again, equal_nan=True)
        drops = self.scope.says(r"drop|bernoulli|binomial|rand")
        if subject.seen.in_eval or (drops and not same):
            self.shown["dropout-in-eval"] = ""
        # one key alone weighs 1, whatever the query
        if hasattr(subject.module, "train") and subject.rank > 1:
            subject.module.train()
            subject.learns = True
            try:
                subject(case.inputs, mask)
                for role, arrays in parts_of(subject.module, self.options.mapping).weights.items():
                    for weight in (array.holder for array in arrays):
                        # Nothing arrives at all, or not in some row.
                        if weight.requires_grad and (
                            weight.grad is None or (weight.grad == 0).all(-1).any()
                        ):
                            self.shown["no-gradient"] = self.target.say(
                                "unreached", name=f"W_{role.upper()}"
                            )
                self.target.did("gradients")
                if drops:
                    self.target.did("dropout")
            except Exception as error:  # only these two checks are lost
                self.target.left_out("no_gradients", failure=in_one_line(error))
                if drops:
                    self.target.left_out("no_dropout")
            subject.learns = False
            subject.module.eval()
            if subject.seen.on_scores:
                self.shown["dropout-on-scores"] = ""
        if (
            callable(getattr(subject.module, "backward", None))
            and "dropout-in-eval" not in self.shown
        ):
            try:
                if wrong := _wrong_slopes(subject, case.inputs[0]):
                    self.shown["backward-wrong"] = self.target.say("slope", names=", ".join(wrong))
                self.target.did("gradients_by_hand")
            except Exception as error:  # it may want other things than we pass
                self.target.left_out("no_gradients", failure=in_one_line(error))
        # Another first document: what comes out for the rest of the batch must stay.
        if subject.rank == case.inputs[0].ndim and same:
            others = [
                np.concatenate([self.rng.normal(size=x[:1].shape), x[1:]]) for x in case.inputs
            ]
            q, k, v = others[:1] * 3 if len(subject.inputs) == 1 else others
            if not close(subject((q, k, v), mask)[1:], base[1:]):
                self.shown["batch-mixed"] = ""
            self.target.did("batch")
        if subject.module is not None and len(subject.inputs) == 1 and subject.rank == 3:
            try:
                steps = cache_bug(subject, case.inputs[0], base, self.target)
            except UncheckedError as error:
                self.target.left_out(error.key, **error.facts)
                return
            if steps is not None:
                self.target.did("steps")
                subject.passed.update(cache_arguments(subject))
                self.shown.update(steps)

    def _verdict(self, explanation: Explanation, cases: list[Case]) -> Verdict:
        """Put into words what explains the numbers, what properties show, and what nothing explains."""
        bugs = [self._renamed(bug) for bug in explanation.bugs]
        # Where documents meet, no form here computes the same numbers: that bug alone explains them.
        explained = not explanation.unexplained or "batch-mixed" in self.shown
        for bug in map(self._renamed, self.shown):
            # a pattern of bugs beside which this property says nothing
            hidden_by = bug_named(bug).hidden_by
            if bug == "no-gradient" and not explained:  # then the output is not right either
                continue
            if not any(re.fullmatch(hidden_by, other) for other in bugs):
                bugs.append(bug)
        weights = explanation.reading.weights
        # A list of heads, and a function that loops over them, may join them without W_O, as courses do.
        loop = r"modulelist|for \w+ in self\.\w*heads?"
        if inspect.isfunction(self.target.thing):
            loop += r"|range\("
        lists_heads = self.n_listed > 1 or self.scope.says(loop)
        is_multi_head = weights.n_heads > 1 and self.target.kind == "layer"
        if is_multi_head and not lists_heads and weights.matrices.get("o") is None:
            bugs.append("output-projection-missing")
        if explanation.unexplained and "dropout-in-eval" in bugs:
            explained = True  # no numbers are alike while it draws
            self.target.left_out("not_still")
        # None: neither right nor wrong can be said.
        right: bool | None = not bugs and explained
        if not explained and self.scope.says(NOT_MODELLED):
            right = False if bugs else None
            self.target.left_out("beyond")
        # A window gets our CONTEXT for its size, which is longer than our text: it hides nothing.
        if explained and self.scope.says("window_size|sliding_window"):
            self.target.left_out("window")
        if explanation.settings.get("residual"):
            self.target.did("residual")
        if self.scope.says(r"fill|mask|where"):
            for fill in self.scope.numbers:
                # too large to be anything else than a fill; float16 ends at -65504
                if fill <= -1e3:
                    self.target.left_out(
                        "not_16_bits" if fill < -65504 else "weak_16_bits", fill=fill
                    )
        say = self.target.say
        findings = []
        for bug in dict.fromkeys(bugs):
            evidence = self.shown.get(bug) or evidence_of(bug_named(bug), explanation, cases, say)
            finding = self.target.finding(bug, evidence)
            fixes = [finding.fix]  # and what the remedy means in this code
            if "einsum" in finding.quote:
                fixes.append(say("einsum_fix"))
            if bug == "bias-dropped" and (roles := explanation.settings.get("no_bias")):
                fixes.append(
                    say("bias_fix", roles=", ".join(f"W_{role.upper()}" for role in roles))
                )
            findings.append(replace(finding, fix=" ".join(fixes)))
        if not explained and right is False:
            case = next((case for case in cases if case.name in explanation.unexplained), cases[0])
            clues = [
                stage_of(explanation, case, say),
                *filter(None, [self.shown.get("no-gradient")]),
            ]
            findings.append(self.target.finding(UNKNOWN, "; ".join(clues)))
        return self.target.verdict(right, tuple(findings))

    def _renamed(self, bug: str) -> str:
        """The bug that gives the numbers of this one in code such as the learner's."""
        return next(
            (rule["to"] for rule in bug_named(bug).renamed if self.scope.says(rule["code"])), bug
        )


def _wrong_slopes(subject: Subject, x: Any) -> list[str]:
    """Of what a `backward` written by hand gives a wrong gradient: x, or names of weights; empty where all are right.

    That of the input is what it returns; that of a weight W is what the object then keeps as dW, d_W, grad_W or W_grad,
    or as W in a dictionary. Each is held against the difference that a small step makes.
    """
    module = subject.module
    x = np.array(x if subject.rank == x.ndim else x[0])

    def output() -> Any:
        result = subject.result(
            dict.fromkeys(subject.inputs, to_kind(x, subject.kind)), x.shape[-2]
        )
        return pick(result, x.shape)

    # it may be narrower than the input
    slope = np.random.default_rng(2).normal(size=output().shape)
    pairs = {"x": (x, pick(module.backward(to_kind(slope, subject.kind)), x.shape))}
    kept = dict(vars(module))
    # `grads["W_q"]` of a dictionary is looked for as `dW_q`.
    for holder in vars(module).values():
        kept.update(
            {f"d{key}": value for key, value in holder.items()} if isinstance(holder, dict) else {}
        )
    for name, weight in vars(module).items():
        for other in {f"d{name}", f"d_{name}", f"grad_{name}", f"{name}_grad"} & set(kept):
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
        if abs(difference - 2 * float((gradient * step).sum())) > 0.02 * float(
            np.linalg.norm(gradient) * length
        ):
            wrong.append(name)
    return wrong


def _first_mask(subject: Subject, inputs: Inputs) -> Any:
    """A mask for the first call, where the code will not be called without."""
    return (
        np.tril(np.ones((inputs[0].shape[-2], inputs[1].shape[-2]), bool))
        if subject.mask_required
        else None
    )
