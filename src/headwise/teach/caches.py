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
from functools import partial
from typing import Any

import numpy as np

from headwise.teach.bugs import UncheckedError, Verdict, in_one_line
from headwise.teach.form import CORRECT, Masks, attend
from headwise.teach.reading import arrays_of, kept_as
from headwise.teach.search import close
from headwise.teach.subject import (
    BATCH,
    HEAD_DIM,
    HEADS,
    QUERY,
    TOKENS,
    Subject,
    Target,
    angle_tables,
    arguments_of,
    arrays_in,
    build,
    kind_of_arrays,
    pick,
    required_of,
    to_array,
    to_kind,
    value_of,
)

# What is rotated, or kept in a cache, is the vectors of a head.
WIDTHS = {"WIDTH": HEAD_DIM, "n": TOKENS, "b": BATCH}
LENGTHS = {"CONTEXT": TOKENS, "end": TOKENS, "length": TOKENS}
POSITIONS = r"pos\w*|position\w*|m|t|p|idx|offset|start\w*|input_pos|token_positions"
VECTORS = r"_?x?_?(q|k|v|x|quer\w+|keys?|values?)\w?|vec\w*|t?ensor|inputs?|hidden\w*"
TABLES = r"cos|sin|freq|angle|table|cis|rot"
MAKERS = r"freq|cos|sin|table|param|precomp|angle|build|cache|make"
# The axes of an input, as a learner's code may want them, and the way back to (B,H,T,d).
LAYOUTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bhtd": (lambda x: x, lambda y: y),
    "bthd": (lambda x: x.swapaxes(1, 2), lambda y: y.swapaxes(1, 2)),
    "btd": (lambda x: x[:, 0], lambda y: y[:, None]),
    "td": (lambda x: x[0, 0], lambda y: y[None, None]),
}
Problem = tuple[str | None, str]  # a bug, None for none, and what shows it
Attempt = Callable[[], Problem | None]  # None where what came of it says nothing


def examine_rotation(target: Target) -> Verdict:
    """The verdict on a rotation of queries and keys."""
    target.did("rotation")
    return first_right(target, _attempts(target))


def first_right(target: Target, attempts: Iterator[Attempt]) -> Verdict:
    """Right where one way of calling the code shows no problem, else the first problem; each way is a guess."""
    worst = None
    failure = None
    for attempt in attempts:
        try:
            problem = attempt()
        except UncheckedError:
            raise
        except Exception as error:
            failure = failure or error
            continue
        if problem and problem[0] is None:
            return target.verdict(True)
        worst = worst or problem
    if worst is None or worst[0] is None:
        shown = "" if failure is None else f": {failure}"
        raise UncheckedError(f"no_{target.kind}", name=target.name, failure=shown)
    return target.verdict(False, (target.finding(worst[0], worst[1]),))


def _attempts(target: Target) -> Iterator[Attempt]:
    """Ways of calling the learner's rotation on queries, keys and values."""
    calls = [target.thing]
    if isinstance(target.thing, type):
        instance = build(target, {**WIDTHS, **target.options.args})
        methods = ["forward", "__call__"]
        methods += [name for name in vars(target.thing) if re.search(r"^(?!_).*(rotate|apply)", name)]
        calls = [getattr(instance, name) for name in methods if hasattr(instance, name)]
    kind = kind_of_arrays(None, target.source.code)
    for call in calls:
        names = list(arguments_of(call))
        data = [name for name in names if re.fullmatch(VECTORS, name)]
        if len(data) < 2:  # it takes one kind of vector at a time, whatever it calls it
            data = names[:1]
        for layout in LAYOUTS:
            for tables in _tables(target, names, kind, layout):
                yield partial(_problem, target, call, data, layout, tables, kind)


def _tables(target: Target, names: list[str], kind: str, layout: str) -> Iterator[dict[str, Any]]:
    """What to pass besides the vectors: the tables of the learner's own builder, or the usual ones, and positions."""
    wanted = [name for name in names if re.search(TABLES, name)]
    positions = {name: to_kind(np.arange(TOKENS), kind) for name in names[1:] if re.fullmatch(POSITIONS, name)}
    if not wanted:
        yield {}
        yield positions
        return
    sizes = {**WIDTHS, **LENGTHS, **target.options.args}
    made = []
    for name, maker in target.namespace.items():
        if inspect.isfunction(maker) and name != target.name and re.search(MAKERS, name):
            with contextlib.suppress(Exception):  # no builder, or one that wants something else
                made.append(maker(**{argument: value_of(argument, sizes) for argument in required_of(maker)}))
    for table in made or angle_tables(kind, {}):
        pair = table if isinstance(table, tuple) else (table,)
        if len(pair) != len(wanted):
            continue
        yield dict(zip(wanted, pair, strict=True)) | positions
        if layout == "bthd":  # with heads after the tokens a table (T,d) wants an axis for them
            wide = [x[:, None] if getattr(x, "ndim", 0) == 2 else x for x in pair]
            yield dict(zip(wanted, wide, strict=True)) | positions


def _problem(
    target: Target, call: Any, data: list[str], layout: str, tables: Mapping[str, Any], kind: str
) -> Problem | None:
    """What is wrong with rotated queries, keys and perhaps values, passed in one order of axes.

    None where what comes out has other axes, or where nothing has moved at all.
    """
    to_layout, from_layout = LAYOUTS[layout]
    rng = np.random.default_rng(0)
    shape = (BATCH, HEADS, TOKENS, HEAD_DIM)
    # The same query, and the same key, at every place: what differs among products is of the places.
    q, k = (np.broadcast_to(rng.normal(size=(BATCH, HEADS, 1, HEAD_DIM)), shape) for _ in range(2))
    v = rng.normal(size=shape)
    # A function of one kind of vector is called twice.
    calls = [(q, k, v)[: len(data)]] if len(data) > 1 else [(q,), (k,)]
    rotated = []
    for vectors in calls:
        arrays = {name: to_kind(to_layout(x).copy(), kind) for name, x in zip(data, vectors, strict=True)}
        result = call(**arrays, **tables)
        rotated += [to_array(x) for x in (result if isinstance(result, tuple) else [result])]
    wanted = to_layout(v)
    if any(getattr(array, "shape", None) != wanted.shape for array in rotated):
        return None
    # The tolerances: float32 rounds these products far less, a wrong rotation changes them far more.
    if len(rotated) > 2 and not np.allclose(rotated[2], wanted, atol=1e-4):
        return "rope-on-values", target.say("by_property")
    queries, keys = from_layout(rotated[0]), from_layout(rotated[1])
    product = (queries @ keys.swapaxes(-1, -2))[0, 0]
    if np.allclose(product, product[0, 0], atol=1e-3):
        return None
    # Along a diagonal the distance is the same, so the product is if it depends on nothing else.
    relative = np.allclose(product[1:, 1:], product[:-1, :-1], atol=1e-3)
    if relative and _same_pairs([queries, keys], [q, k]):
        if left := [name for name in arguments_of(call) if name not in (*data, *tables)]:
            target.left_out("untried", names=", ".join(left))
        return None, ""
    a, b = float(product[1, 0]), float(product[-1, -2])  # a query and the key before it, first and last
    return "rope-mixed-layout", target.say("by_property_rope-mixed-layout", a=a, b=b)


def _same_pairs(rotated: list[Any], before: list[Any]) -> bool:
    """Are pairs of one layout rotated, in queries and keys alike? The first place may be rotated by any angle.

    A rotation keeps the length of each pair of features: the two halves of the vector, or each two neighbours.
    """
    old, new = (np.stack(vectors)[:, 0, 0] ** 2 for vectors in (before, rotated))  # (2,T,d)
    half = np.arange(HEAD_DIM // 2)
    for i, j in ((half, half + HEAD_DIM // 2), (2 * half, 2 * half + 1)):
        if np.allclose(new[..., i] + new[..., j], old[..., i] + old[..., j], rtol=1e-3):
            return True
    return False


# Caches: what both checks of them take.

PIECES = (4, 1, 6)  # of a text that a cache gets
LONG = 13  # tokens of a text read step by step: more than heads or features of one, which may stand for its length
ONE_TOKEN = (  # what says that code takes a single token after a cache
    r"(one|single)[- ](new[- ])?token|token by token|one at a time|un (solo |nuevo )?token|token (a|por) token|"
    r"(?<!rep )(==|>|!=) 1\b"
)
START = r"(start|offset|pos|position|length|cur|input|cache)_?(pos|position|len|start|ition)?s?"
HELD = r"past|cache|old|prev"
# Of shapes and names; of other errors a call of ours may be the cause.
FAILS = (RuntimeError, IndexError, NameError, KeyError)
UPDATES = r"update|append|add|extend|forward|put|push|write|store|step|__call__"
RESETS = r"(reset|clear|empty)(_(?!param|weight)\w*)?"  # of a cache; `reset_parameters` draws new weights
READERS = r"get|read|fetch|all|kv|stack|keys_values"


# A layer that has a cache.


def cache_bug(subject: Subject, x: Any, whole: Any, target: Target) -> dict[str, str] | None:
    """The bug of a layer's cache and what shows it, nothing where there is none; None without a cache.

    UncheckedError where no call with it came to an end.

    x  (B,T,C); `whole` (B,T,C) is what the layer gives for it at once
    """
    names = cache_arguments(subject)
    code = target.scope.code
    # What stands in the code once alone is a parameter that nobody reads.
    used = {role for name, role in names.items() if len(re.findall(rf"\b{name}\b", code)) > 1}
    if not used or (used == {"start"} and "cache" not in code):
        return None  # there is none, or a parameter that the code leaves aside
    most = kept_as("CONTEXT", subject.module, target.options.args) or LONG
    text = np.random.default_rng(1).normal(size=(len(x), max(min(LONG, most), x.shape[1]), x.shape[2]))
    with contextlib.suppress(Exception):  # tables of another length were passed
        x, whole = text, subject((text,) * 3)
    rest = x.shape[1] - 3
    worst: dict[str, str] = {}
    failures = []
    for way, steps in enumerate(((3, 1, 2, rest - 3), (3, *(1,) * rest), (1,) * (3 + rest))):
        try:
            out, held = _step_by_step(subject, x, steps, names)
        except Exception as error:  # this way of cutting was a guess
            failures.append(error)
            continue
        gap = float(np.nan_to_num(np.abs(out - whole), nan=np.inf).max())
        mixed = _out_of_order(held, x, subject, names)
        if gap < 1e-3 and not mixed:  # float32 rounds by less, and a token in another place changes more
            if way == 1 and worst and not target.scope.tells(ONE_TOKEN):
                return {name: f"{text}; {target.say('by_pieces')}" for name, text in worst.items()}
            if way:
                target.left_out("one_token")
            return {}
        bug = "cache-order" if mixed else "cache-offset"
        worst = worst or {bug: target.say("by_property_cache-offset", gap=gap)}
    if worst:
        return worst
    failure = in_one_line(failures[0])
    if not isinstance(failures[0], FAILS):
        raise UncheckedError("no_steps", failure=failure)
    return {"cache-raises": failure}


def cache_arguments(subject: Subject) -> dict[str, str]:
    """Which arguments of a call have to do with a cache: the `cache`, `use` of it, and where a piece `start`s."""
    names = {}
    for name in inspect.signature(subject.call).parameters:
        if re.fullmatch(r"use_?(kv_?)?cache", name):
            names[name] = "use"
        elif re.search(r"^(?!use).*(cache|past)", name) and "cache" not in names.values():
            names[name] = "cache"
        elif re.fullmatch(r"(start|offset)_?(pos)?|pos(ition)?_offset", name):
            names[name] = "start"
    return names


def _step_by_step(subject: Subject, x: Any, steps: tuple[int, ...], names: dict[str, str]) -> tuple[Any, list[Any]]:
    """Output (B,T,C) of the pieces joined, and the arrays that the cache holds at the end."""
    _reset(subject.module)
    state = None
    outs = []
    start = 0
    for n in steps:
        piece = x[:, start : start + n]
        of_cache = {"cache": state, "use": True, "start": start}
        arguments = {subject.inputs[0]: to_kind(piece, subject.kind)}
        result = subject.result(arguments | {name: of_cache[role] for name, role in names.items()}, n)
        outs.append(pick(result, piece.shape))
        if isinstance(result, tuple):
            later = [part for part in result[1:] if part is not None]
            if len(later) > 1 and hasattr(later[-1], "shape"):
                state = tuple(later)
            elif later:
                state = later[-1]
        start += n
    kept = {**vars(subject.module), **getattr(subject.module, "_buffers", {})}
    inside = {name: value for name, value in kept.items() if re.search("cache|past", name)}
    held = [array.value for array in (*arrays_of(state), *arrays_of(inside)) if array.value.ndim >= 3]
    _reset(subject.module)
    return np.concatenate(outs, 1), held


def _out_of_order(held: list[Any], x: Any, subject: Subject, names: dict[str, str]) -> bool:
    """Do the held keys stand in another order than those of the whole text, held at once?"""
    total = x.shape[1]
    try:
        _, whole = _step_by_step(subject, x, (total,), names)
    except Exception:  # a cache that takes single tokens alone
        return False
    for array, right in zip(held, whole, strict=False):
        fits = array.shape == right.shape and total in array.shape
        if fits and _misplaced(array, right, array.shape.index(total)) == "cache-order":
            return True
    return False


def _reset(module: Any) -> None:
    for name in dir(module):
        if re.fullmatch(RESETS, name) and callable(getattr(module, name)):
            getattr(module, name)()
            return
    for name, value in list(vars(module).items()):
        if re.search("cache|past", name) and hasattr(value, "shape"):
            setattr(module, name, None)


# A cache by itself, and a function that attends with one.


def examine_cache(target: Target) -> Verdict:
    """The verdict on a cache, or on a function that attends with new tokens to those held."""
    target.did("pieces")
    if any(map(QUERY.match, inspect.signature(target.thing).parameters)):
        return first_right(target, iter([partial(_decoding, target)]))
    return first_right(target, (partial(_fill, target, to) for to, _ in LAYOUTS.values()))


def _misplaced(array: Any, whole: Any, axis: int) -> str | None:
    """None where the cache holds the tokens in order; else which bug."""
    total = whole.shape[axis]
    if array.shape[axis] < total:
        return "cache-order" if array.size == whole.size else "cache-offset"
    tokens, right = (np.moveaxis(x, axis, 0)[:total].reshape(total, -1) for x in (array, whole))
    if close(tokens, right):
        return None
    same = close(tokens[np.lexsort(tokens.T)], right[np.lexsort(right.T)])
    return "cache-order" if same else "cache-offset"


def _out_of_place(target: Target, arrays: list[Any], whole: list[Any], axis: int) -> Problem | None:
    """What is wrong with the order of keys, or of values, and which token stands first; None where it is right."""
    for array, right in zip(arrays, whole, strict=False):
        bug = _misplaced(array, right, axis)
        if bug is not None:
            tokens = np.moveaxis(right, axis, 0).reshape(right.shape[axis], -1)[:, :HEAD_DIM]
            first = np.take(array, 0, axis).ravel()[:HEAD_DIM]
            key = int(np.abs(first - tokens).sum(-1).argmin())
            return bug, target.say("by_property_cache-order", key=key)
    return None


def _fill(target: Target, to: Callable[[Any], Any]) -> Problem | None:
    """What is wrong with keys and values that the cache holds after all pieces; None where it holds none."""
    rng = np.random.default_rng(0)
    total = sum(PIECES)
    whole = [to(rng.normal(size=(BATCH, HEADS, total, HEAD_DIM))) for _ in range(2)]
    axis = whole[0].shape.index(total)
    kind = kind_of_arrays(None, target.source.code)
    state, call, reader = None, target.thing, None
    if isinstance(target.thing, type):
        state = build(target, {**WIDTHS, **target.options.args})
        methods = [name for name in sorted(vars(target.thing)) if callable(getattr(state, name))]
        call = getattr(state, [name for name in methods if re.match(UPDATES, name)][-1])
        reader = next((getattr(state, name) for name in methods if re.match(READERS, name)), None)
    past: list[Any] = []
    for start, end in itertools.pairwise(itertools.accumulate(PIECES, initial=0)):
        new = [to_kind(np.take(x, range(start, end), axis), kind) for x in whole]
        result = call(**_arguments_of_update(call, new, past, start))
        past = list(result) if isinstance(result, tuple) else [result]
    if past == [None] and reader:
        past = list(reader())
    for held in (past, vars(state).values() if state else ()):
        arrays = [array for array in map(to_array, held) if array is not None and array.ndim == whole[0].ndim]
        if len(arrays) > 1:
            return _out_of_place(target, arrays, whole, axis) or (None, "")
    return None


def _arguments_of_update(call: Any, new: list[Any], past: list[Any], start: int) -> dict[str, Any]:
    """Arguments of one update: what was held, what is new, and how much was held."""
    arguments: dict[str, Any] = {}
    olds, news = iter(past), iter(new)
    for name in inspect.signature(call).parameters:
        if re.search(r"layer|idx", name):
            arguments[name] = 0
        elif re.fullmatch(START, name) and name != "cache":
            arguments[name] = start
        elif re.search(HELD, name):
            part_alone = re.search(r"_?(k|v|keys?|values?)$", name)
            arguments[name] = next(olds, None) if part_alone else tuple(past) or None
        elif (value := next(news, None)) is not None:
            arguments[name] = value
    return arguments


def _decoding(target: Target) -> Problem:
    """What is wrong with a function that attends with new tokens to those held: f(q, k, v, past_k, past_v)."""
    rng = np.random.default_rng(0)
    kind = kind_of_arrays(None, target.source.code)
    q, k, v = (rng.normal(size=(BATCH, HEADS, TOKENS, HEAD_DIM)) for _ in range(3))
    names = list(inspect.signature(target.thing).parameters)
    old = [name for name in names if re.search(HELD, name)]
    fresh = [name for name in names if name not in old][:3]
    if len(old) not in (1, 2) or len(fresh) != 3:
        raise UncheckedError("asks_past", name=target.name, names=", ".join(names))
    past = [to_kind(x[:, :, :-1], kind) for x in (k, v)]
    arguments = dict(zip(old, past if len(old) == 2 else [tuple(past)], strict=True))
    for name, x in zip(fresh, (q, k, v), strict=True):
        arguments[name] = to_kind(x[:, :, -1:], kind)
    arrays = list(arrays_in(target.thing(**arguments)))
    held = [array for array in arrays if array.shape == k.shape]
    problem = _out_of_place(target, held, [k, v], 2)
    if problem is not None:
        return problem
    right = attend(q[:, :, -1:], k, v, Masks(), CORRECT)[2]
    outputs = [array for array in arrays if array.shape == right.shape]
    if outputs and close(outputs[0], right):
        return None, ""
    gap = float(np.abs(outputs[0] - right).max()) if outputs else float("nan")
    return "cache-offset", target.say("by_property_cache-offset", gap=gap)
