"""A layer with a cache: a text that is read in pieces must give what the whole text gives, and stand in its order."""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from headwise.checker.bugs import UncheckedError, in_one_line
from headwise.checker.contract import (
    BATCH,
    CALL,
    HEAD_DIM,
    Attention,
    Target,
    arguments_of,
    build,
    pick,
    to_kind,
)
from headwise.checker.reading import arrays_of
from headwise.checker.search import close

# Tokens of a text that is read step by step; no other size, so that their axis can be told.
LONG = 13
# Values of parameters of a class of caches. A width is that of a head, whose vectors are kept.
SIZES = {"WIDTH": HEAD_DIM, "n": LONG, "b": BATCH, "CONTEXT": LONG}
# Errors of shapes and names, that count as a bug of the code; of other ones a call of ours may be the cause.
FAILS = (RuntimeError, IndexError, NameError, KeyError)


def cache_arguments(attention: Attention) -> dict[str, str]:
    """Which arguments of a call have to do with a cache: the `cache`, `use` of it, and where a piece `start`s."""
    names: dict[str, str] = {}
    for name in arguments_of(attention.call):
        if re.fullmatch(r"(use|return|output)_?(kv_?|new_?)?cache", name):
            names[name] = "use"
        # The first alone, to which all that is handed back goes; code with one for keys and one for values is not
        # checked step by step.
        elif (
            re.search(r"^(?!use).*(cache|past)", name) and "cache" not in names.values()
        ):
            names[name] = "cache"
        elif re.fullmatch(r"(start|offset)_?(pos)?|pos(ition)?_offset", name):
            names[name] = "start"
    return names


def cache_bug(
    attention: Attention, x: Any, whole: Any, target: Target, mask: Any = None
) -> dict[str, str] | None:
    """The bug of a layer's cache and what shows it, nothing where there is none; None without a cache.

    UncheckedError where no call with it came to an end.

    x  (B,T,C); `whole` (B,T,C) is what the layer gives for it at once
    """
    names = cache_arguments(attention)
    code = target.scope.code
    # What stands in the code once alone is a parameter that nobody reads.
    used = {role for n, role in names.items() if len(re.findall(rf"\b{n}\b", code)) > 1}
    writes = re.search(r"\[[^]\n]*\bstart\w*[^]\n]*\] = |cache", code)
    if not used or (used == {"start"} and not writes):
        return None  # there is none, or a parameter that the code leaves aside
    text = np.random.default_rng(1).normal(size=(len(x), LONG, x.shape[2]))
    # its context may be shorter, or tables of another length were passed
    asked = {**attention.tables(0, LONG), **(mask(0, LONG) if mask else {})}
    with contextlib.suppress(Exception):
        asked[attention.inputs[0]] = to_kind(text, attention.kind)
        whole = pick(attention.result(asked, LONG), text.shape)
        x = text
    if mask and x is not text:
        return None
    if not mask:  # what sees the future as a whole cannot be the same step by step
        changed = np.concatenate([x[:, :-1], -x[:, -1:]], 1)
        asked[attention.inputs[0]] = to_kind(changed, attention.kind)
        out = pick(attention.result(asked, x.shape[1]), x.shape)
        if x is text and not close(out[:, :-1], whole[:, :-1]):
            raise UncheckedError("sees_future")
    # What a cache is before the first token: an object of the file's class, None, or a dictionary.
    states: list[Callable[[], Any]] = [lambda: None]
    if target.scope.says(r"(cache|past\w*)\[['\"]"):
        states.append(dict)
    kinds = [
        (name, kind) for name, kind in target.namespace.items()
        if isinstance(kind, type) and re.search("[cC]ache$", name)
    ]  # fmt: skip
    if kinds and target.scope.says(rf"(cache|past\w*)\.({CALL['updates'].pattern})\("):
        other = replace(target, name=kinds[0][0], thing=kinds[0][1])
        sizes = {**SIZES, **target.options.args}
        states.insert(0, partial(build, other, sizes))
    for state in states:
        steps = _Steps(attention, x, whole, names, mask, state)
        if (verdict := steps.judged(target, "cache" in used)) is not None:
            return verdict
    # it comes from a class that the file does not have
    raise UncheckedError("no_cache_kept")


def _misplaced(array: Any, whole: Any, axis: int) -> str | None:
    """None where an array of a cache holds the tokens in order, as `whole` does along `axis`; else which bug.

    A cache that was made for more tokens has more places behind them, which are left aside.
    """
    total = whole.shape[axis]
    if array.shape[axis] < total:
        return "cache-offset"
    tokens, right = (
        np.moveaxis(x, axis, 0)[:total].reshape(total, -1) for x in (array, whole)
    )
    if close(tokens, right):
        return None
    # Feature by feature, as keys may stand in another order than the values beside them.
    is_order = close(np.sort(tokens, 0), np.sort(right, 0))
    return "cache-order" if is_order else "cache-offset"


def _read_alone(tree: ast.AST) -> set[str]:
    """The keys of a cache that are read there and never written."""
    keys = defaultdict[type, set[str]](set)
    parts = (node for node in ast.walk(tree) if isinstance(node, ast.Subscript))
    for part in parts:
        if re.search("cache|past", ast.unparse(part.value)):
            keys[type(part.ctx)].add(ast.unparse(part.slice))
    named = {key for key in keys[ast.Load] if key.startswith("'")}
    return named - keys[ast.Store]


@dataclass
class _Steps:
    """A text that a layer with a cache reads in pieces. `state` makes the cache before the first token."""

    attention: Attention
    x: Any
    whole: Any
    names: dict[str, str]
    mask: Any
    state: Any

    def judged(self, target: Target, is_held: bool) -> dict[str, str] | None:
        """The bug and what shows it; None where no cache is kept from call to call."""
        tokens = self.x.shape[1]
        worst: dict[str, str] = {}
        failures = []
        is_filled_wrong = False
        # Three ways to cut the text, the hardest first; code that is right in it is right.
        pieces = (3, 1, 2, tokens - 6)
        singles = (1,) * tokens
        for steps in (pieces, (3, *singles[3:]), singles):
            try:
                out, held = self.read(steps)
            except Exception as error:  # this way of cutting was a guess
                failures.append(error)
                continue
            gaps = np.nan_to_num(np.abs(out - self.whole), nan=np.inf)
            gap = float(gaps.max())
            bug = self._out_of_order(held)
            # float32 rounds by less, and a token in another place changes more
            if gap < 1e-3 and bug != "cache-order":
                # Code that says so takes one token at a time after its cache is filled.
                is_single = CALL["one_token"].search(target.scope.text)
                if worst and (is_filled_wrong or not is_single):
                    told = target.say("by_pieces")
                    return {bug: f"{shown}; {told}" for bug, shown in worst.items()}
                if steps is not pieces:
                    target.left_out("one_token")
                return {}
            if not held and is_held:
                return None
            is_filled_wrong |= steps[0] > 1 and gaps[:, : steps[0]].max() > 1e-3
            # A small gap here: the output is right, and only the order of what is held is not.
            phrase = "by_property" if gap < 1e-3 else "by_property_cache-offset"
            phrase = "crossed" if bug == "values-from-keys" else phrase
            # A gap of which nothing more is known: most often the piece was taken for the start of the text.
            worst = worst or {bug or "cache-offset": target.say(phrase, gap=gap)}
        if worst:
            return worst
        failure = in_one_line(failures[0])
        # a part of the cache that the code reads and another place writes
        is_ours = _read_alone(target.scope.tree)
        if is_ours or not isinstance(failures[0], FAILS):
            raise UncheckedError("no_steps", failure=failure)
        return {"cache-raises": failure}

    def read(self, steps: tuple[int, ...]) -> tuple[Any, list[Any]]:
        """Output (B,T,C) of the pieces joined, and the arrays that the cache holds at the end."""
        attention = self.attention
        state = self.state()
        attention.restart()
        outs = []
        start = 0
        # A table is whole where the code cuts it by an argument that counts on, else that of the piece.
        is_cut = {"start", "cache"} <= {*self.names.values()}
        for n in steps:
            piece = self.x[:, start : start + n]
            of_cache = {"cache": state, "use": True, "start": start}
            arguments = {attention.inputs[0]: to_kind(piece, attention.kind)}
            arguments |= {name: of_cache[role] for name, role in self.names.items()}
            arguments |= (
                attention.tables(0, LONG) if is_cut else attention.tables(start, n)
            )
            arguments |= self.mask(start, n) if self.mask else {}
            try:
                result = attention.result(arguments, n)
            except FAILS as error:
                if start:
                    raise
                # before anything is held: how the cache is passed is a guess
                failure = in_one_line(error)
                raise UncheckedError("no_steps", failure=failure) from error
            outs.append(pick(result, piece.shape))
            # the output, and then the cache for the next call
            later = (
                [x for x in result[1:] if x is not None]
                if isinstance(result, tuple)
                else []
            )
            if later:  # keys and values, one after the other, or both in one
                records = [x for x in later if not hasattr(x, "shape")]
                # beside weights, a record or a pair holds them
                several = len(later) > 1 and not records
                state = tuple(later) if several else (records or later)[-1]
            start += n
        # A cache may also stand in attributes of the object; torch keeps buffers apart from the others.
        kept = {**vars(attention.module), **getattr(attention.module, "_buffers", {})}
        inside = [
            value for name, value in kept.items() if re.search("cache|past", name)
        ]
        # Keys or values have axes for documents, tokens and features at least.
        held = [a.value for a in arrays_of([state, inside]) if a.value.ndim >= 3]
        attention.restart()
        return np.concatenate(outs, 1), held

    def _out_of_order(self, held: list[Any]) -> str | None:
        """Which bug shows in what is held: other places than in a whole text held at once, or keys as values."""
        total = self.x.shape[1]
        try:
            _, whole = self.read((total,))
        except Exception:  # a cache that takes single tokens alone
            return None
        firsts = []  # the first token that is held after the pieces, and after the whole text
        for array, right in zip(held, whole, strict=False):
            if total in right.shape:
                axis = right.shape.index(total)
                if _misplaced(array, right, axis) == "cache-order":
                    return "cache-order"
                firsts.append([x.take(0, axis) for x in (array, right)])
        # Is one of them that of another one of the right ones, as a key in the place of a value?
        for (array, _), (_, other) in itertools.permutations(firsts, 2):
            if close(array, other):
                return "values-from-keys"
        return None
