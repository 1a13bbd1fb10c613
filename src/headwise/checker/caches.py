"""The checks of what stands around attention: a rotation of queries and keys (RoPE), and caches.

Rotated, lengths stay, and products depend on the distance alone. With a cache, a text that is read in pieces must give
what the whole text gives, and stand in its order.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from headwise.checker.bugs import UNKNOWN, UncheckedError, Verdict, in_one_line
from headwise.checker.contract import (
    BATCH,
    CALL,
    HEAD_DIM,
    HEADS,
    TOKENS,
    Attention,
    Target,
    arguments_of,
    build,
    kind_of_arrays,
    pick,
    tables_of,
    to_array,
    to_kind,
)
from headwise.checker.form import CORRECT, Masks, attend
from headwise.checker.reading import arrays_of
from headwise.checker.search import close
from headwise.checker.source import QUERY

# Tokens of each update of a cache: some when it is empty, one alone, and more after it. The axis of tokens is found
# by their sum, 11, which is no other size; as is LONG, of a text read step by step.
PIECES, LONG = (4, 1, 6), 13
# Values of parameters. A width is that of a head, whose vectors are rotated or kept.
SIZES = {"WIDTH": HEAD_DIM, "n": LONG, "b": BATCH, "CONTEXT": LONG}
# Errors of shapes and names, that count as a bug of the code; of other ones a call of ours may be the cause.
FAILS = (RuntimeError, IndexError, NameError, KeyError)
# From (B,H,T,d) to the axes that code may want, and the way back.
WAYS: tuple[tuple[Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    (lambda x: x, lambda y: y),
    (lambda x: x.swapaxes(1, 2), lambda y: y.swapaxes(1, 2)),
    (lambda x: x[:, 0], lambda y: y[:, None]),  # (B,T,d): one head
    (lambda x: x[0, 0], lambda y: y[None, None]),  # (T,d): one head of one document
)
Problem = tuple[Any, str]  # the id of a bug, None for none, and what shows it
RIGHT: Problem = (None, "")


def examine_part(target: Target) -> Verdict:
    """The verdict on a rotation or a cache: right where one way of calling it shows no problem, else the first problem.

    UncheckedError where no way came to a result that says anything.
    """
    is_rotation = target.kind == "rotary"
    target.did("rotation" if is_rotation else "pieces")
    problems: list[Problem] = []
    failure = ""
    for attempt in (_rotations if is_rotation else _fillings)(target):
        try:
            problem = attempt()
        except UncheckedError:
            raise
        except Exception as error:
            failure = failure or f": {error}"  # the first one is shown
            continue
        if problem == RIGHT:
            return target.verdict(True)
        problems += [problem] if problem else []
    if not problems:
        raise UncheckedError(f"no_{target.kind}", name=target.name, failure=failure)
    return target.verdict(False, (target.finding(*problems[0]),))


def _parts(result: Any, rank: int) -> list[Any]:
    """What a call hands back, one by one; a list that has `rank` axes is a single array."""
    several = isinstance(result, list) and getattr(to_array(result), "ndim", 0) != rank
    return list(result) if several or isinstance(result, tuple) else [result]


def _rotations(target: Target) -> Iterator[Callable[[], Problem | None]]:
    """Ways of calling the learner's rotation on queries, keys and values."""
    calls = [target.thing]
    if isinstance(target.thing, type):
        instance = build(target, {**SIZES, **target.options.args})
        names = [name for name in vars(target.thing) if CALL["rotators"].search(name)]
        calls = [getattr(instance, name) for name in names]
    kind = kind_of_arrays(target)
    for call in calls:
        arguments = arguments_of(call)
        data = [name for name in arguments if CALL["vectors"].fullmatch(name)]
        if len(data) < 2:  # it takes one kind of vector at a time, whatever it calls it
            data = list(arguments)[:1]
        rest = [name for name in arguments if name not in data]
        fixed = {name: None for name in rest if CALL["tables"].search(name)}
        places = [name for name in rest if CALL["places"].fullmatch(name)]
        # the defaults, if there are any; a position for each token; one number at which the text starts
        required = [n for n in places if arguments[n].default is arguments[n].empty]
        starts = [{}] * (not required) + [
            dict.fromkeys(places, to_kind(np.arange(TOKENS), kind)), dict.fromkeys(required, 0),
        ]  # fmt: skip
        tables = tables_of(target, Attention(call, kind, tuple(data), fixed=fixed))
        for way, table, start in itertools.product(WAYS, tables, starts):
            yield partial(_turned, target, call, data, way, table, start, kind)


def _turned(
    target: Target,
    call: Any,
    data: list[str],
    way: Any,
    table: Any,
    start: Any,
    kind: str,
) -> Problem | None:
    """What is wrong with rotated queries, keys and perhaps values, passed in one order of axes.

    None where what comes out has other axes, or where nothing has moved at all.
    """
    (to, back), fixed = way, {**table(0, TOKENS), **start}
    rng = np.random.default_rng(0)
    shape = (BATCH, HEADS, TOKENS, HEAD_DIM)
    # The same query, and the same key, at every place of every document: products differ by their places alone.
    vectors = rng.normal(size=(2, 1, HEADS, 1, HEAD_DIM))
    q, k = np.broadcast_to(vectors, (2, *shape))
    v = rng.normal(size=shape)
    wanted = to(v)
    rotated: list[Any] = []
    # a function of one kind of vector is called twice
    for passed in [(q, k, v)[: len(data)]] if len(data) > 1 else [(q,), (k,)]:
        arrays = [to_kind(to(x).copy(), kind) for x in passed]
        result = call(**dict(zip(data, arrays, strict=True)), **fixed)
        rotated += map(to_array, _parts(result, wanted.ndim))
    if any(np.shape(array) != wanted.shape for array in rotated):
        return None
    # The tolerances: float32 rounds these products far less, a wrong rotation changes them far more.
    if len(rotated) > 2 and not np.allclose(rotated[2], wanted, atol=1e-4):
        return "rope-on-values", target.say("by_property")
    queries, keys = map(back, rotated[:2])
    product = queries @ keys.swapaxes(-1, -2)
    if np.ptp(product, (-2, -1)).max() < 1e-3:  # nothing has moved
        return None
    # Along a diagonal the distance is the same, so the product is if it depends on nothing else. Where a table in one
    # layout meets a turn in the other, it depends on the places themselves.
    before, after = product[..., :-1, :-1], product[..., 1:, 1:]
    changes = np.abs(after - before)
    if changes.max() > 1e-3:
        a, b = (x.flat[changes.argmax()] for x in (before, after))
        return "rope-mixed-layout", target.say(
            "by_property_rope-mixed-layout", a=a, b=b
        )
    lengths, right = (np.linalg.norm(x, axis=-1).max() for x in (queries, back(to(q))))
    if not np.isclose(lengths, right, rtol=1e-3):
        return UNKNOWN, target.say("lengthened", a=right, b=lengths)
    if left := [name for name in arguments_of(call) if name not in (*data, *fixed)]:
        target.left_out("untried", names=", ".join(left))
    return RIGHT


# A cache by itself, and a function that attends with one.


def _fillings(target: Target) -> Iterator[Callable[[], Problem | None]]:
    # The way back is not needed: what should be held is brought into the layout instead.
    yield from (partial(_filled, target, to) for to, _ in WAYS)


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


def _filled(target: Target, to: Any) -> Problem | None:
    """What is wrong with keys and values that are held after all pieces, or with what a function attends to in them.

    None where nothing comes out.

    to  brings (B,H,T,d) into the layout in which the code is given keys and values
    """
    kind, total = kind_of_arrays(target), sum(PIECES)
    state, call, reader = None, target.thing, None
    if isinstance(call, type):
        state = build(target, {**SIZES, **target.options.args})
        methods = [
            [
                getattr(state, name)
                for name in sorted(vars(call))
                if CALL[part].match(name)
            ]
            for part in ("updates", "readers")
        ]
        # Of several the last in the alphabet: `update` rather than `append`, `forward` or `__call__`.
        call, reader = methods[0][-1], next(iter(methods[1]), None)
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, BATCH, HEADS, total, HEAD_DIM))
    whole = [to(k), to(v)]
    axis = whole[0].shape.index(total)

    def cut(x: Any, start: int, end: int) -> Any:
        return to_kind(np.take(x, range(start, end), axis), kind)

    names = list(arguments_of(call))
    attends = any(map(QUERY.match, names))
    # it is given the last token alone, and what is held of those before it
    start, pieces = (total - 1, (1,)) if attends else (0, PIECES)
    past = [cut(x, 0, start) for x in whole] if attends else []
    olds = [name for name in names if CALL["held"].search(name)]
    for n in pieces:
        new = iter([cut(x, start, start + n) for x in [to(q), *whole][not attends :]])
        # An argument for each of keys and values; or one for the pair, None as long as there is none.
        held = iter(past if len(olds) > 1 else [tuple(past) or None])
        arguments: dict[str, Any] = {}
        for name in names:
            if CALL["places"].fullmatch(name):
                arguments[name] = start
            elif re.search("layer|idx", name):  # of several layers the first
                arguments[name] = 0
            elif name in olds:
                arguments[name] = next(held, None)
            elif (value := next(new, None)) is not None:
                arguments[name] = value
        past = _parts(call(**arguments), whole[0].ndim)
        start += n
    if reader and past[0] is None:  # an update hands nothing back
        past = list(reader())
    # What the last update handed back is looked at first, then the attributes of the object and its buffers.
    inside = {**vars(state), **getattr(state, "_buffers", {})} if state else {}
    for kept in (past, inside.values()):
        arrays = [x for x in map(to_array, kept) if np.ndim(x) == whole[0].ndim]
        held_ = [x for x in arrays if not attends or x.shape == whole[0].shape]
        for array, right in zip(held_, whole, strict=False):
            if bug := _misplaced(array, right, axis):
                # Which token stands in the first place? The nearest one, by one head of one document.
                tokens = np.moveaxis(right, axis, 0).reshape(total, -1)[:, :HEAD_DIM]
                first = np.take(array, 0, axis).ravel()[:HEAD_DIM]
                key = int(np.abs(first - tokens).sum(-1).argmin())
                return bug, target.say("by_property_cache-order", key=key)
        if attends and arrays:
            right = to(attend(q[:, :, -1:], k, v, Masks(), CORRECT)[2])
            gaps = [np.abs(x - right).max() for x in arrays if x.shape == right.shape]
            gap = min(gaps, default=np.nan)
            if gap < 1e-4:
                return RIGHT
            return "cache-offset", target.say("by_property_cache-offset", gap=gap)
        if len(held_) > 1:  # keys and values, and neither is misplaced
            return RIGHT
    return None


# A layer that has a cache.


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
    names, code = cache_arguments(attention), target.scope.code
    # What stands in the code once alone is a parameter that nobody reads.
    used = {role for n, role in names.items() if len(re.findall(rf"\b{n}\b", code)) > 1}
    if not used or (used == {"start"} and "cache" not in code):
        return None  # there is none, or a parameter that the code leaves aside
    text = np.random.default_rng(1).normal(size=(len(x), LONG, x.shape[2]))
    # its context may be shorter, or tables of another length were passed
    asked = {**attention.tables(0, LONG), **(mask(0, LONG) if mask else {})}
    with contextlib.suppress(Exception):
        asked[attention.inputs[0]] = to_kind(text, attention.kind)
        x, whole = text, pick(attention.result(asked, LONG), text.shape)
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
        failures, is_filled_wrong = [], False
        # Three ways to cut the text, the hardest first; code that is right in it is right.
        pieces, singles = (3, 1, 2, tokens - 6), (1,) * tokens
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
        attention, state = self.attention, self.state()
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
