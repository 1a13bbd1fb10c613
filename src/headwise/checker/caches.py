"""The checks of what stands around attention: a rotation of queries and keys (RoPE), and caches.

Rotated, lengths stay, and products depend on the distance alone. With a cache, a text that is read in pieces must give
what the whole text gives, and stand in its order.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from headwise.checker.bugs import UNKNOWN, UncheckedError, Verdict, in_one_line
from headwise.checker.contract import (
    BATCH,
    HEAD_DIM,
    HEADS,
    TOKENS,
    Attention,
    Target,
    angle_tables,
    arguments_of,
    build,
    kind_of_arrays,
    pick,
    required_of,
    to_array,
    to_kind,
    value_of,
)
from headwise.checker.form import CORRECT, Masks, attend
from headwise.checker.reading import arrays_of
from headwise.checker.search import close
from headwise.checker.source import QUERY

# Values of parameters, by what a name means ("WIDTH") or by the name itself (`n`). A width is that of a head: its
# vectors are what is rotated, or kept in a cache. LENGTHS are those of a builder's tables, as long as the text.
WIDTHS = {"WIDTH": HEAD_DIM, "n": TOKENS, "b": BATCH}
LENGTHS = {"CONTEXT": TOKENS, "end": TOKENS, "length": TOKENS}
# Names of parameters: of positions, of what is rotated, of tables of angles.
POSITIONS = r"pos\w*|position\w*|m|t|p|idx|offset|start\w*|input_pos|token_positions"
VECTORS = r"_?x?_?(q|k|v|x|quer\w+|keys?|values?)\w?|vec\w*|tensor|inputs?|hidden\w*"
TABLES = r"cos|sin|freq|angle|table|cis|rot"
ROTATORS = (
    r"^(forward|__call__)$|^(?!_).*(rotate|apply)"  # methods of a class that rotates
)
# In names of functions that make tables of angles.
MAKERS = r"freq|cos|sin|table|param|precomp|angle|build|cache|make"
Way = Callable[[Any], Any]
# From (B,H,T,d) to the axes that a learner's code may want, and the way back.
LAYOUTS: tuple[tuple[Way, Way], ...] = (
    (lambda x: x, lambda y: y),
    (lambda x: x.swapaxes(1, 2), lambda y: y.swapaxes(1, 2)),
    (lambda x: x[:, 0], lambda y: y[:, None]),  # (B,T,d): one head
    (lambda x: x[0, 0], lambda y: y[None, None]),  # (T,d): one head of one document
)
Problem = tuple[Any, str]  # the id of a bug, None for none, and what shows it
RIGHT: Problem = (None, "")
Attempt = Callable[[], Problem | None]  # None where what came of it says nothing


def examine_rotation(target: Target) -> Verdict:
    """The verdict on a rotation of queries and keys."""
    target.did("rotation")
    return first_right(target, _attempts(target))


def first_right(target: Target, attempts: Iterator[Attempt]) -> Verdict:
    """Right where one way of calling the code shows no problem, else the first problem; each way is a guess.

    UncheckedError where no way came to a result that says anything.
    """
    problems: list[Problem] = []
    failure = ""
    for attempt in attempts:
        try:
            problem = attempt()
        except UncheckedError:
            raise
        except Exception as error:
            failure = failure or f": {error}"  # the first one is shown
            continue
        if problem:
            problems.append(problem)
        if problem == RIGHT:
            return target.verdict(True)
    if not problems:
        raise UncheckedError(f"no_{target.kind}", name=target.name, failure=failure)
    return target.verdict(False, (target.finding(*problems[0]),))


def _attempts(target: Target) -> Iterator[Attempt]:
    """Ways of calling the learner's rotation on queries, keys and values."""
    calls = [target.thing]
    if isinstance(target.thing, type):
        instance = build(target, {**WIDTHS, **target.options.args})
        calls = [
            getattr(instance, name)
            for name in vars(target.thing)
            if re.search(ROTATORS, name)
        ]
    kind = kind_of_arrays(None, target.source.code)
    for call in calls:
        arguments = arguments_of(call)
        data = [name for name in arguments if re.fullmatch(VECTORS, name)]
        if len(data) < 2:  # it takes one kind of vector at a time, whatever it calls it
            data = list(arguments)[:1]
        for ways, tables in itertools.product(
            LAYOUTS, _tables(target, arguments, kind)
        ):
            yield partial(_problem, target, call, data, ways, tables, kind)


def _tables(
    target: Target, arguments: Mapping[str, Any], kind: str
) -> Iterator[dict[str, Any]]:
    """What to pass besides the vectors: the tables of the learner's own builder, or the usual ones, and positions."""
    # The first argument is a vector, even where its name is one of POSITIONS, as `t`.
    asked = {
        name: p for name, p in [*arguments.items()][1:] if re.fullmatch(POSITIONS, name)
    }
    # Two ways: a position for each token, or one number at which the text starts, left out where it has a default.
    places = [
        dict.fromkeys(asked, to_kind(np.arange(TOKENS), kind)),
        {
            name: 0
            for name, parameter in asked.items()
            if parameter.default is parameter.empty
        },
    ]
    wanted = [name for name in arguments if re.search(TABLES, name)]
    if not wanted:
        yield from ({}, *places)  # {}: at first the defaults, if every position has one
        return
    sizes = {**WIDTHS, **LENGTHS, **target.options.args}
    made = []
    for name, maker in target.namespace.items():
        if inspect.isfunction(maker) and re.search(MAKERS, name):
            with contextlib.suppress(
                Exception
            ):  # no builder, or one that wants something else
                made.append(
                    maker(
                        **{
                            argument: value_of(argument, sizes)
                            for argument in required_of(maker)
                        }
                    )
                )
    # {}: in our own sizes
    for table, place in itertools.product(made or angle_tables(kind, {}), places):
        tables = table if isinstance(table, tuple) else (table,)
        # a builder may make more tables than the call takes
        yield dict(zip(wanted, tables, strict=False)) | place


def _problem(
    target: Target,
    call: Any,
    data: list[str],
    ways: tuple[Way, Way],
    tables: Mapping[str, Any],
    kind: str,
) -> Problem | None:
    """What is wrong with rotated queries, keys and perhaps values, passed in one order of axes.

    None where what comes out has other axes, or where nothing has moved at all.
    """
    to_layout, from_layout = ways
    rng = np.random.default_rng(0)
    shape = (BATCH, HEADS, TOKENS, HEAD_DIM)
    # The same query, and the same key, at every place of every document: products differ by their places alone.
    q, k = np.broadcast_to(rng.normal(size=(2, 1, HEADS, 1, HEAD_DIM)), (2, *shape))
    v = rng.normal(size=shape)
    # A function of one kind of vector is called twice.
    calls = [(q, k, v)[: len(data)]] if len(data) > 1 else [(q,), (k,)]
    wanted = to_layout(v)
    rotated: list[Any] = []
    for vectors in calls:
        arrays = {
            name: to_kind(to_layout(x).copy(), kind)
            for name, x in zip(data, vectors, strict=True)
        }
        rotated += map(to_array, _parts(call(**arrays, **tables), wanted.ndim))
    if any(np.shape(array) != wanted.shape for array in rotated):
        return None
    # The tolerances: float32 rounds these products far less, a wrong rotation changes them far more.
    if len(rotated) > 2 and not np.allclose(rotated[2], wanted, atol=1e-4):
        return "rope-on-values", target.say("by_property")
    queries, keys = from_layout(rotated[0]), from_layout(rotated[1])
    product = queries @ keys.swapaxes(-1, -2)
    # the same at all places: nothing has moved
    if np.allclose(product, product[..., :1, :1], atol=1e-3):
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
    # Two rows, each with the length of every vector: those of the rotated queries and then keys, and those of the
    # same vectors as they were passed. A rotation changes no length.
    lengths, right = np.linalg.norm(
        [rotated[:2], [to_layout(q), to_layout(k)]], axis=-1
    ).reshape(2, -1)
    most = np.abs(lengths - right).argmax()
    if not np.isclose(lengths[most], right[most], rtol=1e-3):
        return UNKNOWN, target.say("lengthened", a=right[most], b=lengths[most])
    if not np.allclose(
        product, product[:1], atol=1e-3
    ):  # every document has the same vectors
        return UNKNOWN, target.say("by_property")
    if left := [name for name in arguments_of(call) if name not in (*data, *tables)]:
        target.left_out("untried", names=", ".join(left))
    return RIGHT


def _parts(result: Any, rank: int) -> list[Any]:
    """What a call hands back, one by one; a list that has `rank` axes is a single array."""
    several = isinstance(result, list) and getattr(to_array(result), "ndim", 0) != rank
    return list(result) if several or isinstance(result, tuple) else [result]


# Caches: what both checks of them take.

# Tokens of each update of a cache: some when it is empty, one alone, and more after it. The axis of tokens is found
# by their sum, 11, which is no other size.
PIECES = (4, 1, 6)
# tokens of a text read step by step: more than heads or features of one, which may stand for its length
LONG = 13
# Values for a class of caches. A buffer of just so many places has the length by which its axis of tokens is found.
CACHED = {**WIDTHS, "n": LONG, "CONTEXT": LONG}
# What says that code takes a single token after a cache: such words, or a test of a length, `T == 1`. The test
# `n_rep == 1` is of groups of heads.
ONE_TOKEN = (
    r"(one|single)[- ](new[- ])?token|token by token|one at a time|un (solo |nuevo )?token|token (a|por) token|"
    r"(?<!rep )(==|>|!=) 1\b"
)
# START, HELD: names of parameters, for where a piece starts and for what is held of those before it. UPDATES,
# READERS: names of methods, which add to a cache or read it.
START = r"(start|offset|pos(ition)?s?|length|(start|cur|input|cache)_?(pos(ition)?s?|len|start))(_?idx)?"
HELD = r"past|cache|old|prev"
# Errors of shapes and names, that count as a bug of the code; of other ones a call of ours may be the cause.
FAILS = (RuntimeError, IndexError, NameError, KeyError)
UPDATES = r"update|append|add|extend|forward|put|push|write|store|step|__call__"
READERS = r"get|read|fetch|all|kv|stack|keys_values"


# A layer that has a cache.


def cache_bug(
    subject: Attention, x: Any, whole: Any, target: Target, mask: Any = None
) -> dict[str, str] | None:
    """The bug of a layer's cache and what shows it, nothing where there is none; None without a cache.

    UncheckedError where no call with it came to an end.

    x  (B,T,C); `whole` (B,T,C) is what the layer gives for it at once
    """
    names = cache_arguments(subject)
    code = target.scope.code
    # What stands in the code once alone is a parameter that nobody reads.
    used = {
        role
        for name, role in names.items()
        if len(re.findall(rf"\b{name}\b", code)) > 1
    }
    if not used or (used == {"start"} and "cache" not in code):
        return None  # there is none, or a parameter that the code leaves aside
    if target.scope.says(rf"(cache|past\w*)\.({UPDATES})\("):
        subject.new_cache = partial(_cache_object, target)
    text = np.random.default_rng(1).normal(size=(len(x), LONG, x.shape[2]))
    # its context may be shorter, or tables of another length were passed
    asked = {
        **{name: table(0, LONG) for name, table in subject.tables.items()},
        **(mask(0, LONG) if mask else {}),
        subject.inputs[0]: to_kind(text, subject.kind),
    }
    with contextlib.suppress(Exception):
        x, whole = text, pick(subject.result(asked, LONG), text.shape)
    if mask and x is not text:
        return None
    if not mask:  # what sees the future as a whole cannot be the same step by step
        changed = np.concatenate([x[:, :-1], -x[:, -1:]], 1)
        asked[subject.inputs[0]] = to_kind(changed, subject.kind)
        out = pick(subject.result(asked, x.shape[1]), x.shape)
        if x is text and not close(out[:, :-1], whole[:, :-1]):
            raise UncheckedError("sees_future")
    tokens = x.shape[1]
    worst: dict[str, str] = {}
    failures = []
    # Three ways to cut the text, the hardest first; code that is right in it is right.
    pieces, prompt_and_tokens = (3, 1, 2, tokens - 6), (3, *(1,) * (tokens - 3))
    for steps in (pieces, prompt_and_tokens, (1,) * tokens):
        try:
            out, held = _step_by_step(subject, x, steps, names, mask)
        except Exception as error:  # this way of cutting was a guess
            failures.append(error)
            continue
        gap = float(np.nan_to_num(np.abs(out - whole), nan=np.inf).max())
        bug = _out_of_order(held, x, subject, names, mask)
        # float32 rounds by less, and a token in another place changes more
        if gap < 1e-3 and bug != "cache-order":
            # A prompt and single tokens after it: so text is generated, and pieces alone are wrong. Code that is
            # right for single tokens alone was made for them.
            if (
                steps is prompt_and_tokens
                and worst
                and not target.scope.tells(ONE_TOKEN)
            ):
                return {
                    bug: f"{shown}; {target.say('by_pieces')}"
                    for bug, shown in worst.items()
                }
            if steps is not pieces:
                target.left_out("one_token")
            return {}
        if (
            not held and "cache" in used
        ):  # it comes from a class that the file does not have
            raise UncheckedError("no_cache_kept")
        # A small gap here: the output is right, and only the order of what is held is not.
        phrase = "by_property" if gap < 1e-3 else "by_property_cache-offset"
        shown = target.say("crossed" if bug == "values-from-keys" else phrase, gap=gap)
        # A gap of which nothing more is known: most often the piece was taken for the start of the text.
        worst = worst or {bug or "cache-offset": shown}
    if worst:
        return worst
    failure = in_one_line(failures[0])
    if not isinstance(failures[0], FAILS):
        raise UncheckedError("no_steps", failure=failure)
    return {"cache-raises": failure}


def cache_arguments(subject: Attention) -> dict[str, str]:
    """Which arguments of a call have to do with a cache: the `cache`, `use` of it, and where a piece `start`s."""
    names = {}
    for name in arguments_of(subject.call):
        if re.fullmatch(r"use_?(kv_?)?cache", name):
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


def _cache_object(target: Target) -> Any:
    """A new object of the file's class of caches; None where it has none. Such an object is filled in place."""
    for name, kind in target.namespace.items():
        if isinstance(kind, type) and re.search("[cC]ache$", name):
            return build(
                replace(target, thing=kind, name=name),
                {**CACHED, **target.options.args},
            )
    return None


def _step_by_step(
    subject: Attention, x: Any, steps: tuple[int, ...], names: dict[str, str], mask: Any
) -> tuple[Any, list[Any]]:
    """Output (B,T,C) of the pieces joined, and the arrays that the cache holds at the end.

    x      (B,T,C)
    steps  tokens of each piece; together T
    names  argument -> what it is of a cache, from `cache_arguments`
    """
    subject.restart()
    state = subject.new_cache()
    outs = []
    start = 0
    # A table is whole where the code cuts it by an argument that counts on, else that of the piece.
    whole = (0, LONG) if {"start", "cache"} <= {*names.values()} else None
    for n in steps:
        piece = x[:, start : start + n]
        of_cache = {"cache": state, "use": True, "start": start}
        arguments = {subject.inputs[0]: to_kind(piece, subject.kind)}
        arguments |= {name: of_cache[role] for name, role in names.items()}
        arguments |= {
            name: table(*(whole or (start, n)))
            for name, table in subject.tables.items()
        }
        arguments |= mask(start, n) if mask else {}
        result = subject.result(arguments, n)
        outs.append(pick(result, piece.shape))
        if isinstance(
            result, tuple
        ):  # the output, and then the cache for the next call
            later = [part for part in result[1:] if part is not None]
            # keys and values, one after the other
            if len(later) > 1 and hasattr(later[-1], "shape"):
                state = tuple(later)
            elif later:
                state = later[-1]
        start += n
    # A cache may also stand in attributes of the object; torch keeps buffers apart from the others.
    kept = {**vars(subject.module), **getattr(subject.module, "_buffers", {})}
    inside = [value for name, value in kept.items() if re.search("cache|past", name)]
    # Keys or values have axes for documents, tokens and features at least.
    held = [
        array.value for array in arrays_of([state, inside]) if array.value.ndim >= 3
    ]
    subject.restart()
    return np.concatenate(outs, 1), held


def _out_of_order(
    held: list[Any], x: Any, subject: Attention, names: dict[str, str], mask: Any
) -> str | None:
    """Which bug shows in what is held: other places than in a whole text held at once, or keys as values."""
    total = x.shape[1]
    try:
        _, whole = _step_by_step(subject, x, (total,), names, mask)
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


# A cache by itself, and a function that attends with one.


def examine_cache(target: Target) -> Verdict:
    """The verdict on a cache, or on a function that attends with new tokens to those held."""
    target.did("pieces")
    # The way back from a layout is not needed: what should be held is brought into the layout instead.
    return first_right(target, (partial(_fill, target, to) for to, _ in LAYOUTS))


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
    return (
        "cache-order"
        if close(np.sort(tokens, 0), np.sort(right, 0))
        else "cache-offset"
    )


def _fill(target: Target, to: Way) -> Problem | None:
    """What is wrong with keys and values that are held after all pieces, or with what a function attends to in them.

    to  brings (B,H,T,d) into the layout in which the code is given keys and values

    None where nothing comes out.
    """
    thing, kind = target.thing, kind_of_arrays(None, target.source.code)
    state, call, reader = None, thing, None
    if isinstance(thing, type):
        state = build(target, {**CACHED, **target.options.args})
        methods = sorted(vars(thing))
        # Of several the last in the alphabet: `update` rather than `append`, `forward` or `__call__`.
        call = getattr(state, [name for name in methods if re.match(UPDATES, name)][-1])
        reader = next(
            (getattr(state, name) for name in methods if re.match(READERS, name)), None
        )
    total = sum(PIECES)
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, BATCH, HEADS, total, HEAD_DIM))
    whole = [to(k), to(v)]
    axis = whole[0].shape.index(total)
    inputs, past = whole, []
    pieces: tuple[int, ...] = PIECES
    attends = any(map(QUERY.match, arguments_of(call)))
    if attends:  # it is given the last token alone, and what is held of those before it
        q = rng.normal(size=k.shape)
        inputs, pieces = [to(q), *whole], (1,)
        past = [to_kind(np.take(x, range(total - 1), axis), kind) for x in whole]
    start = total - sum(pieces)
    for n in pieces:
        new = [to_kind(np.take(x, range(start, start + n), axis), kind) for x in inputs]
        past = _parts(
            call(**_arguments_of_update(call, new, past, start)), whole[0].ndim
        )
        start += n
    if reader and past[0] is None:  # an update hands nothing back
        past = list(reader())
    # What the last update handed back is looked at first, then the attributes of the object and its buffers.
    inside = {**vars(state), **getattr(state, "_buffers", {})} if state else {}
    for kept in (past, inside.values()):
        arrays = [
            array for array in map(to_array, kept) if np.ndim(array) == whole[0].ndim
        ]
        held = [
            array for array in arrays if not attends or array.shape == whole[0].shape
        ]
        for array, right in zip(held, whole, strict=False):
            if bug := _misplaced(array, right, axis):
                # Which token stands in the first place? The nearest one, by one head of one document.
                tokens = np.moveaxis(right, axis, 0).reshape(total, -1)[:, :HEAD_DIM]
                first = np.take(array, 0, axis).ravel()[:HEAD_DIM]
                key = int(np.abs(first - tokens).sum(-1).argmin())
                return bug, target.say("by_property_cache-order", key=key)
        if attends and arrays:
            right = to(attend(q[:, :, -1:], k, v, Masks(), CORRECT)[2])
            if any(close(array, right) for array in arrays):
                return RIGHT
            gaps = [
                np.abs(array - right).max()
                for array in arrays
                if array.shape == right.shape
            ]
            gap = max(
                gaps, default=np.nan
            )  # none where the output has not even the shape
            return "cache-offset", target.say("by_property_cache-offset", gap=gap)
        if len(held) > 1:  # keys and values, and neither is misplaced
            return RIGHT
    return None


def _arguments_of_update(
    call: Any, new: list[Any], past: list[Any], start: int
) -> dict[str, Any]:
    """Arguments of one update: what was held, what is new, and how much was held (`start`, in tokens)."""
    arguments: dict[str, Any] = {}
    names = list(arguments_of(call))
    held = [name for name in names if re.search(HELD, name)]
    # An argument for each of keys and values; or one for the pair, None as long as there is none.
    olds, news = iter(past if len(held) > 1 else [tuple(past) or None]), iter(new)
    for name in names:
        if re.fullmatch(START, name):
            arguments[name] = start
        elif re.search(r"layer|idx", name):  # of several layers the first
            arguments[name] = 0
        elif name in held:
            arguments[name] = next(olds, None)
        elif (value := next(news, None)) is not None:
            arguments[name] = value
    return arguments
