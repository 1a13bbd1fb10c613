"""The check of rotations (RoPE), of caches, and of layers that take a text step by step through a cache."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from headwise.errors import HeadwiseError
from headwise.teach import arguments as size
from headwise.teach.arguments import build, value_of
from headwise.teach.catalogue import words
from headwise.teach.examine import Options, Target
from headwise.teach.form import CORRECT, Masks, attend
from headwise.teach.probe import QUERY, kind_of_arrays, to_array, to_kind
from headwise.teach.search import close
from headwise.teach.verdict import Verdict

B, H, T, D = size.BATCH, size.HEADS, size.TOKENS, size.HEAD_DIM
PIECES = (4, 1, 6)
BATCHES = dict.fromkeys(("batch", "batch_size", "max_batch_size", "max_batch", "bsz", "b"), B)
WIDTHS = dict.fromkeys(("dim", "d", "d_model", "embed_dim", "head_dim", "dim_head"), D) | BATCHES
LENGTHS = dict.fromkeys(
    ("n", "end", "seq_len", "context_length", "max_len", "T", "n_positions", "length", "max_seq_len"), T
)
POSITIONS = r"pos\w*|position\w*|m|t|p|idx|offset|start\w*|input_pos|token_positions"
START = r"(start|offset|pos|position|length|cur|input|cache)_?(pos|position|len|start|ition)?s?"
VECTORS = r"_?x?_?(q|k|v|x|quer\w+|keys?|values?)\w?|vec\w*|t?ensor|inputs?|hidden\w*"
MAKERS = r"freq|cos|sin|table|param|precomp|angle|build|cache|make"
# The axes of an input, as a learner's code may want them, and the way back to (B,H,T,d).
LAYOUTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bhtd": (lambda x: x, lambda y: y),
    "bthd": (lambda x: x.swapaxes(1, 2), lambda y: y.swapaxes(1, 2)),
    "btd": (lambda x: x[:, 0], lambda y: y[:, None]),
    "td": (lambda x: x[0, 0], lambda y: y[None, None]),
}
Problem = tuple[str | None, str]  # a bug, None for none, and what shows it


def examine_helper(target: Target, kind: str, options: Options) -> Verdict:
    """The verdict on a rotation of queries and keys, or on a cache."""
    say = words(options.lang)
    target.checked.append(say["rotation" if kind == "rotary" else "pieces"])
    if kind == "rotary":
        bug, evidence = _first_right(target, "rotation", _turns(target, options), partial(_turn_problem, say))
    elif not isinstance(target.thing, type) and any(QUERY.match(n) for n in inspect.signature(target.thing).parameters):
        bug, evidence = _decoding(target, say)
    else:
        tries = (partial(_fill, target, options, *layout) for layout in LAYOUTS.values())
        bug, evidence = _first_right(target, "cache", tries, partial(_cache_problem, say))
    findings = () if bug is None else (target.finding(bug, evidence, options.lang),)
    return Verdict(target.name, kind, bug is None, findings, tuple(target.checked), (), options.lang)


def _first_right(
    target: Target, role: str, tries: Iterator[Callable[[], Any]], problem_of: Callable[[Any], Problem | None]
) -> Problem:
    """No problem where one way of calling the code shows none, else the first; each way of calling it is a guess."""
    worst: Problem | None = None
    failure: Exception | None = None
    for attempt in tries:
        try:
            result = attempt()
        except Exception as error:
            failure = failure or error
            continue
        problem = None if result is None else problem_of(result)
        if problem and problem[0] is None:
            return problem
        worst = worst or problem
    if worst is None:
        raise HeadwiseError(f"{target.name} could not be called as a {role}{f': {failure}' if failure else ''}")
    return worst


# Rotations.


def _vectors() -> tuple[Any, Any, Any]:
    """Queries and keys, one vector in all places, and values; (B,H,T,d)."""
    rng = np.random.default_rng(0)
    q, k = (np.repeat(rng.normal(size=(B, H, 1, D)), T, 2) for _ in range(2))
    return q, k, rng.normal(size=(B, H, T, D))


def _turn_problem(say: Mapping[str, str], turned: tuple[Any, ...]) -> Problem | None:
    """What is wrong with turned queries, keys and perhaps values; None where they have not moved at all."""
    q, k, v = (x[: len(turned[0]), : turned[0].shape[1]] for x in _vectors())
    product = (turned[0] @ turned[1].swapaxes(-1, -2))[0, 0]
    if len(turned) > 2 and not np.allclose(turned[2], v, atol=1e-4):
        return "rope-on-values", say["by_property"]
    if np.allclose(product, product[0, 0], atol=1e-3):
        return None
    lengths = np.allclose((turned[0] ** 2).sum(-1), (q**2).sum(-1), rtol=1e-3)
    relative = np.allclose(product[1:, 1:], product[:-1, :-1], atol=1e-3)
    if lengths and relative and _same_turn(turned, q, k):
        return None, ""
    a, b = float(product[1, 0]), float(product[-1, -2])
    return "rope-mixed-layout", say["by_property_rope-mixed-layout"].format(a=a, b=b)


def _same_turn(turned: tuple[Any, ...], q: Any, k: Any) -> bool:
    """Are pairs of one layout turned, in queries and keys alike? The first place may be turned by any angle."""
    half = np.arange(D // 2)
    for i, j in ((half, half + D // 2), (2 * half, 2 * half + 1)):
        sizes = [x[0, 0][:, i] ** 2 + x[0, 0][:, j] ** 2 for x in (*turned[:2], q, k)]
        if np.allclose(sizes[0], sizes[2], rtol=1e-3) and np.allclose(sizes[1], sizes[3], rtol=1e-3):
            return True
    return False


def _turns(target: Target, options: Options) -> Iterator[Callable[[], Any]]:
    """Ways of calling the learner's rotation on queries, keys and values; results (B,H,T,d)."""
    sizes = {**WIDTHS, **LENGTHS, **options.sizes}
    calls = [target.thing]
    if isinstance(target.thing, type):
        instance = build(target.thing, {**WIDTHS, "n": T, **options.sizes}, target.namespace)
        methods = inspect.getmembers(instance, callable)
        calls = [getattr(instance, "forward", None) or instance.__call__]
        calls += [m for n, m in methods if re.search("rotate|apply", n) and not n.startswith("_")]
    kind = kind_of_arrays(None, target.source.code)
    for call in calls:
        parameters = inspect.signature(call).parameters
        names = [n for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        data = [n for n in names if re.fullmatch(VECTORS, n)]
        data = data if len(data) > 1 else names[:1]
        for layout in LAYOUTS:
            for tables in _tables(target, names, sizes, kind, layout):
                yield partial(_turned, call, data, layout, tables, kind)
        yield partial(_turned_singly, call, names, kind)


def _turned(call: Any, data: list[str], layout: str, tables: Mapping[str, Any], kind: str) -> tuple[Any, ...] | None:
    """What comes of one order of axes, with what is passed for angles and positions."""
    to, back = LAYOUTS[layout]
    inputs = [to(x) for x in _vectors()]
    results: list[Any] = []
    for run in [inputs[: len(data)]] if len(data) > 1 else [inputs[:1], inputs[1:2]]:
        result = call(**{n: to_kind(x, kind) for n, x in zip(data, run, strict=True)}, **tables)
        results += [to_array(x) for x in (result if isinstance(result, tuple) else [result])]
    if any(array is None or array.shape != inputs[0].shape for array in results):
        return None
    return tuple(map(back, results))


def _turned_singly(call: Any, names: list[str], kind: str) -> tuple[Any, ...] | None:
    """What comes of a rotation of one vector at one position, called for each."""
    position = next((n for n in names[1:] if re.fullmatch(POSITIONS, n)), None)
    if position is None:
        return None
    rows = [
        np.array([to_array(call(**{names[0]: to_kind(x[0, 0, t], kind), position: t})) for t in range(T)])
        for x in _vectors()[:2]
    ]
    return tuple(row[None, None] for row in rows) if rows[0].shape == (T, D) else None


def _tables(
    target: Target, names: list[str], sizes: Mapping[str, Any], kind: str, layout: str
) -> Iterator[dict[str, Any]]:
    """What to pass besides the vectors: the tables of the learner's own builder, or the usual ones, and positions."""
    rest = [n for n in names if re.search(r"cos|sin|freq|angle|table|cis|rot", n)]
    positions = {n: to_kind(np.arange(T), kind) for n in names[1:] if re.fullmatch(POSITIONS, n)}
    if not rest:
        yield {}
        if positions:
            yield positions
        return
    for table in _made(target, sizes) or _usual(kind):
        pair = table if isinstance(table, tuple) else (table,)
        if len(pair) == len(rest):
            passed = dict(zip(rest, pair, strict=True))
            yield {**passed, **positions}
            if layout == "bthd":  # with heads after the tokens a table (T,d) wants an axis for them
                wide = {n: x[:, None] if getattr(x, "ndim", 0) == 2 else x for n, x in passed.items()}
                yield {**wide, **positions}


def _made(target: Target, sizes: Mapping[str, Any]) -> list[Any]:
    """Tables of angles made by the functions of the learner's file."""
    made: list[Any] = []
    for name, maker in target.namespace.items():
        if inspect.isfunction(maker) and name != target.name and re.search(MAKERS, name):
            try:
                wanted = [n for n, p in inspect.signature(maker).parameters.items() if p.default is p.empty]
                made.append(maker(**{n: value_of(n, sizes) for n in wanted}))
            except Exception:  # no builder, or one that wants something else
                continue
    return made


def _usual(kind: str) -> list[Any]:
    angles = np.outer(np.arange(T), 10000.0 ** (-np.arange(0, D, 2) / D))
    tables = (np.concatenate([angles, angles], 1), np.repeat(angles, 2, 1), angles)
    return [tuple(to_kind(f(table), kind) for f in (np.cos, np.sin)) for table in tables]


# Caches.

UPDATES = r"update|append|add|extend|forward|put|push|write|store|step|__call__"
READERS = r"get|read|fetch|all|kv|stack|keys_values"


def _cache_problem(say: Mapping[str, str], result: tuple[tuple[Any, Any], tuple[Any, Any], int]) -> Problem:
    """Which bug shows in what a cache holds, beside the whole keys and values; `axis` is that of the tokens."""
    held, whole, axis = result
    for array, right in zip(held, whole, strict=True):
        bug = _misplaced(array, right, axis)
        if bug is not None:
            tokens = np.moveaxis(right, axis, 0).reshape(right.shape[axis], -1)[:, :D]
            key = int(np.abs(np.take(array, 0, axis).ravel()[:D] - tokens).sum(-1).argmin())
            return bug, say["by_property_cache-order"].format(key=key)
    return None, ""


def _misplaced(array: Any, whole: Any, axis: int) -> str | None:
    """None where the cache holds the tokens in order; else which bug."""
    total = whole.shape[axis]
    if array.ndim != whole.ndim or array.shape[axis] < total:
        return "cache-order" if array.size == whole.size else "cache-offset"
    tokens, right = (np.moveaxis(np.take(x, range(total), axis), axis, 0).reshape(total, -1) for x in (array, whole))
    if tokens.shape != right.shape:
        return "cache-offset"
    if close(tokens, right):
        return None
    return "cache-order" if close(tokens[np.lexsort(tokens.T)], right[np.lexsort(right.T)]) else "cache-offset"


def _fill(target: Target, options: Options, to: Callable[[Any], Any], _: Any) -> Any:
    """Keys and values that the cache holds after all pieces, the right ones, and their axis of tokens."""
    rng = np.random.default_rng(0)
    whole = tuple(to(rng.normal(size=(B, H, sum(PIECES), D))) for _ in range(2))
    axis = whole[0].shape.index(sum(PIECES))
    kind = kind_of_arrays(None, target.source.code)
    state, call, methods = None, target.thing, []
    if isinstance(target.thing, type):
        state = build(target.thing, {**WIDTHS, **options.sizes}, target.namespace)
        methods = [n for n, _ in inspect.getmembers(state, callable) if n in vars(target.thing)]
        call = getattr(state, next(n for n in sorted(methods, reverse=True) if re.match(UPDATES, n)))
    past: list[Any] = []
    for start, end in itertools.pairwise(itertools.accumulate(PIECES, initial=0)):
        new = [to_kind(np.take(x, range(start, end), axis), kind) for x in whole]
        result = call(**_cache_arguments(call, new, past, start))
        past = list(result) if isinstance(result, tuple) else [result]
    reader = next((n for n in methods if re.match(READERS, n)), None)
    if past == [None] and reader:
        past = list(getattr(state, reader)())
    for held in (past, vars(state).values() if state else ()):
        arrays = [a for x in held if (a := to_array(x)) is not None and a.ndim == whole[0].ndim]
        if len(arrays) >= 2:
            return arrays[:2], whole, axis
    return None


def _decoding(target: Target, say: Mapping[str, str]) -> Problem:
    """A function that attends with new tokens to those held: f(q, k, v, past_k, past_v)."""
    rng = np.random.default_rng(0)
    kind = kind_of_arrays(None, target.source.code)
    q, k, v = (rng.normal(size=(B, H, T, D)) for _ in range(3))
    names = list(inspect.signature(target.thing).parameters)
    old = [n for n in names if re.search(r"past|cache|old|prev", n)]
    fresh = [n for n in names if n not in old][:3]
    if len(old) not in (1, 2) or len(fresh) != 3:
        raise HeadwiseError(f"{target.name} wants {', '.join(names)}; name them q, k, v, past_k and past_v")
    new = {n: to_kind(x[:, :, -1:], kind) for n, x in zip(fresh, (q, k, v), strict=True)}
    held = [to_kind(x[:, :, :-1], kind) for x in (k, v)]
    past = dict(zip(old, held, strict=True)) if len(old) == 2 else {old[0]: tuple(held)}
    result = target.thing(**new, **past)
    parts = result if isinstance(result, tuple) else (result,)
    flat = [y for x in parts for y in (x if isinstance(x, tuple) else (x,))]
    arrays = [a for x in flat if (a := to_array(x)) is not None]
    for array, whole in zip([a for a in arrays if a.shape == k.shape], (k, v), strict=False):
        if (bug := _misplaced(array, whole, 2)) is not None:
            return bug, say["by_property_cache-order"].format(key=T - 1)
    right = attend(q[:, :, -1:], k, v, Masks(), CORRECT)[2]
    out = next((a for a in arrays if a.shape == right.shape), None)
    if out is not None and close(out, right):
        return None, ""
    gap = float("nan") if out is None else float(np.abs(out - right).max())
    return "cache-offset", say["by_property_cache-offset"].format(gap=gap)


def _cache_arguments(call: Any, new: list[Any], past: list[Any], start: int) -> dict[str, Any]:
    """Arguments of one update: what was held, what is new, and how much was held."""
    arguments: dict[str, Any] = {}
    olds, news = list(past), list(new)
    for name, parameter in inspect.signature(call).parameters.items():
        if re.search(r"layer|idx", name):
            arguments[name] = 0
        elif re.fullmatch(START, name) and name != "cache":
            arguments[name] = start
        elif re.search(r"past|cache|old|prev", name):
            many = re.search(r"_?(k|v|keys?|values?)$", name) is not None
            arguments[name] = (olds.pop(0) if olds else None) if many else (tuple(past) if past else None)
        elif news:
            arguments[name] = news.pop(0)
        elif parameter.default is parameter.empty:
            raise HeadwiseError(f"the cache wants {name!r}; its name does not tell what it is")
    return arguments
