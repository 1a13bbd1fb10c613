"""The check of rotations (RoPE), of caches, and of layers that take a text step by step through a cache."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
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
SIZES = {"dim": D, "d": D, "d_model": D, "embed_dim": D, "head_dim": D, "dim_head": D, "n": T}
SIZES |= dict.fromkeys(("batch", "batch_size", "max_batch_size", "max_batch", "bsz", "b"), B)
LENGTHS = dict.fromkeys(("end", "seq_len", "context_length", "max_len", "T", "n_positions", "length", "max_seq_len"), T)
POSITIONS = r"pos\w*|position\w*|m|t|p|idx|offset|start\w*|input_pos|token_positions"
# The axes of an input, as a learner's code may want them, and the way back to (B,H,T,d).
LAYOUTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bhtd": (lambda x: x, lambda y: y),
    "bthd": (lambda x: x.swapaxes(1, 2), lambda y: y.swapaxes(1, 2)),
    "btd": (lambda x: x[:, 0], lambda y: y[:, None]),
    "td": (lambda x: x[0, 0], lambda y: y[None, None]),
}


def examine_helper(target: Target, kind: str, options: Options) -> Verdict:
    """The verdict on a rotation of queries and keys, or on a cache."""
    say = words(options.lang)
    target.checked.append(say["rotation" if kind == "rotary" else "pieces"])
    if kind == "rotary":
        bug, evidence = _rotation(target, options, say)
    elif not isinstance(target.thing, type) and any(QUERY.match(n) for n in inspect.signature(target.thing).parameters):
        bug, evidence = _decoding(target, say)
    else:
        bug, evidence = _cache(target, options, say)
    findings = () if bug is None else (target.finding(bug, evidence, options.lang),)
    return Verdict(target.name, kind, bug is None, findings, tuple(target.checked), (), options.lang)


# Rotations.


def _rotation(target: Target, options: Options, say: Mapping[str, str]) -> tuple[str | None, str]:
    rng = np.random.default_rng(0)
    q, k = (np.repeat(rng.normal(size=(B, H, 1, D)), T, 2) for _ in range(2))  # one vector in all places
    v = rng.normal(size=(B, H, T, D))
    worst: tuple[str | None, str] | None = None
    failure: Exception | None = None
    for turn in _turns(target, options):
        try:
            turned = turn(q, k, v)
        except Exception as error:  # this way of calling it was a guess
            failure = failure or error
            continue
        if turned is None:
            continue
        product = (turned[0] @ turned[1].swapaxes(-1, -2))[0, 0]
        lengths = np.allclose(
            (turned[0] ** 2).sum(-1), (q[: len(turned[0])] ** 2)[:, : turned[0].shape[1]].sum(-1), rtol=1e-3
        )
        relative = np.allclose(product[1:, 1:], product[:-1, :-1], atol=1e-3)
        moves = not np.allclose(product, product[0, 0], atol=1e-3)
        if len(turned) > 2 and not np.allclose(turned[2], v[: len(turned[2]), : turned[2].shape[1]], atol=1e-4):
            return "rope-on-values", say["by_property"]
        if lengths and relative and moves and _same_turn(turned, q, k):
            return None, ""
        if moves:
            a, b = float(product[1, 0]), float(product[-1, -2])
            worst = worst or ("rope-mixed-layout", say["by_property_rope-mixed-layout"].format(a=a, b=b))
    if worst is None:
        raise HeadwiseError(f"{target.name} could not be called as a rotation{f': {failure}' if failure else ''}")
    return worst


def _same_turn(turned: tuple[Any, ...], q: Any, k: Any) -> bool:
    """Are pairs of one layout turned, in queries and keys alike? The first place may be turned by any angle."""
    for layout in ("half", "interleaved"):
        i = np.arange(D // 2) if layout == "half" else np.arange(0, D, 2)
        j = i + (D // 2 if layout == "half" else 1)
        pairs = [
            (y[0, 0][:, i] ** 2 + y[0, 0][:, j] ** 2, x[0, 0][:, i] ** 2 + x[0, 0][:, j] ** 2)
            for y, x in zip(turned, (q, k), strict=False)
        ]
        if all(np.allclose(after, before, rtol=1e-3) for after, before in pairs):
            return True
    return False


def _turns(target: Target, options: Options) -> Iterator[Callable[..., Any]]:
    """Ways of calling the learner's rotation on q, k and v (B,H,T,d); results come in the same axes."""
    sizes = {**SIZES, **options.sizes}
    thing = target.thing
    if isinstance(thing, type):
        instance = build(thing, sizes, target.namespace)
        thing = getattr(instance, "forward", None) or instance.__call__
        methods = [
            m
            for n, m in inspect.getmembers(instance, callable)
            if re.search("rotate|apply", n) and not n.startswith("_")
        ]
        calls = [thing, *methods]
    else:
        calls = [thing]
    kind = kind_of_arrays(None, target.source.code)
    for call in calls:
        names = [
            n for n, p in inspect.signature(call).parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        data = [
            n
            for n in names
            if re.fullmatch(r"_?x?_?(q|k|v|x|quer\w+|keys?|values?)\w?|vec\w*|t?ensor|inputs?|hidden\w*", n)
            and n not in ("pos",)
        ]
        data = data if len(data) > 1 else names[:1]
        for layout in LAYOUTS:
            for tables in _tables(target, names, sizes, kind, layout):
                yield _turn(call, data, layout, tables, kind)
        yield _each(call, names, kind)


def _turn(call: Any, data: list[str], layout: str, tables: Mapping[str, Any], kind: str) -> Callable[..., Any]:
    """One way of calling: an order of axes, and what is passed for angles and positions."""
    to, back = LAYOUTS[layout]

    def turn(q: Any, k: Any, v: Any) -> tuple[Any, ...] | None:
        inputs = [to(x) for x in (q, k, v)[: len(data)]]
        results: list[Any] = []
        for run in [inputs] if len(inputs) > 1 else [[to(q)], [to(k)]]:
            result = call(**{n: to_kind(x, kind) for n, x in zip(data, run, strict=True)}, **tables)
            for x in result if isinstance(result, tuple) else [result]:
                array = to_array(x)
                if array is None or array.shape != run[0].shape:
                    return None
                results.append(back(array))
        return tuple(results)

    return turn


def _each(call: Any, names: list[str], kind: str) -> Callable[..., Any]:
    """A rotation of one vector at one position: called for each."""

    def turn(q: Any, k: Any, v: Any) -> tuple[Any, ...] | None:
        position = next((n for n in names[1:] if re.fullmatch(POSITIONS, n)), None)
        if position is None:
            return None
        rows = [
            np.array([to_array(call(**{names[0]: to_kind(x[0, 0, t], kind), position: t})) for t in range(T)])
            for x in (q, k)
        ]
        return tuple(row[None, None] for row in rows) if rows[0].shape == (T, D) else None

    return turn


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
    made: list[Any] = []
    for name, maker in target.namespace.items():
        if (
            inspect.isfunction(maker)
            and name != target.name
            and re.search(r"freq|cos|sin|table|param|precomp|angle|build|cache|make", name)
        ):
            try:
                wanted = [n for n, p in inspect.signature(maker).parameters.items() if p.default is p.empty]
                made.append(maker(**{n: value_of(n, {**sizes, **LENGTHS}) for n in wanted}))
            except Exception:  # no builder, or one that wants something else
                continue
    angles = np.outer(np.arange(T), 10000.0 ** (-np.arange(0, D, 2) / D))
    if not made:
        tables = (np.concatenate([angles, angles], 1), np.repeat(angles, 2, 1), angles)
        made = [tuple(to_kind(f(table), kind) for f in (np.cos, np.sin)) for table in tables]
    for table in made:
        pair = table if isinstance(table, tuple) else (table,)
        if len(pair) == len(rest):
            for wide in (False, True):
                # With heads after the tokens a table (T,d) wants an axis for them.
                widen = wide and layout == "bthd"
                passed = {
                    n: x[:, None] if widen and getattr(x, "ndim", 0) == 2 else x
                    for n, x in zip(rest, pair, strict=True)
                }
                yield {**passed, **positions}


# Caches.


def _cache(target: Target, options: Options, say: Mapping[str, str]) -> tuple[str | None, str]:
    rng = np.random.default_rng(0)
    total = sum(PIECES)
    keys, values = (rng.normal(size=(B, H, total, D)) for _ in range(2))
    failure: Exception | None = None
    verdict: tuple[str | None, str] | None = None
    for layout in LAYOUTS:
        try:
            held = _fill(target, options, layout, keys, values)
        except Exception as error:  # this order of axes was a guess
            failure = failure or error
            continue
        if held is None:
            continue
        to = LAYOUTS[layout][0]
        axis = to(keys).shape.index(total)
        for array, whole in zip(held, (to(keys), to(values)), strict=True):
            bug = _misplaced(array, whole, axis)
            if bug is not None:
                order = np.abs(
                    np.take(array, 0, axis).ravel()[:D] - np.moveaxis(whole, axis, 0).reshape(total, -1)[:, :D]
                ).sum(-1)
                verdict = verdict or (bug, say["by_property_cache-order"].format(key=int(order.argmin())))
                break
        else:
            return None, ""
    if verdict is None:
        raise HeadwiseError(f"{target.name} could not be called as a cache{f': {failure}' if failure else ''}")
    return verdict


def _misplaced(array: Any, whole: Any, axis: int) -> str | None:
    """None where the cache holds the tokens in order; else which bug."""
    total = whole.shape[axis]
    if array.ndim != whole.ndim or array.shape[axis] < total:
        return "cache-order" if array.size == whole.size else "cache-offset"
    tokens = np.moveaxis(np.take(array, range(total), axis), axis, 0).reshape(total, -1)
    right = np.moveaxis(whole, axis, 0).reshape(total, -1)
    if tokens.shape == right.shape and close(tokens, right):
        return None
    same = tokens.shape == right.shape and close(tokens[np.lexsort(tokens.T)], right[np.lexsort(right.T)])
    return "cache-order" if same else "cache-offset"


UPDATES = r"update|append|add|extend|forward|put|push|write|store|step|__call__"
READERS = r"get|read|fetch|all|kv|stack|keys_values"


def _fill(target: Target, options: Options, layout: str, keys: Any, values: Any) -> tuple[Any, Any] | None:
    """Keys and values that the cache holds after all pieces."""
    kind = kind_of_arrays(None, target.source.code)
    to = LAYOUTS[layout][0]
    axis = to(keys).shape.index(sum(PIECES))
    state, call = None, target.thing
    if isinstance(target.thing, type):
        sizes = {**{n: x for n, x in SIZES.items() if x != T}, **options.sizes}
        state = build(target.thing, sizes, target.namespace)
        methods = [n for n, _ in inspect.getmembers(state, callable) if n in vars(target.thing)]
        call = getattr(state, next(n for n in sorted(methods, reverse=True) if re.match(UPDATES, n)))
    past: list[Any] = []
    start = 0
    for n in PIECES:
        new = [to_kind(np.take(to(x), range(start, start + n), axis), kind) for x in (keys, values)]
        result = call(**_cache_arguments(call, new, past, start))
        past = list(result) if isinstance(result, tuple) else [result]
        start += n
    reader = next((n for n in (methods if state else ()) if re.match(READERS, n)), None)
    if past == [None] and reader:
        past = list(getattr(state, reader)())
    for held in (past, vars(state).values() if state else ()):
        arrays = [a for x in held if (a := to_array(x)) is not None and a.ndim == to(keys).ndim]
        if len(arrays) >= 2:
            return arrays[0], arrays[1]
    return None


def _decoding(target: Target, say: Mapping[str, str]) -> tuple[str | None, str]:
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
    flat = [
        y for x in (result if isinstance(result, tuple) else (result,)) for y in (x if isinstance(x, tuple) else (x,))
    ]
    arrays = [a for x in flat if (a := to_array(x)) is not None]
    kept = [a for a in arrays if a.shape == k.shape]
    for array, whole in zip(kept, (k, v), strict=False):
        if (bug := _misplaced(array, whole, 2)) is not None:
            return bug, say["by_property_cache-order"].format(key=T - 1)
    right = attend(q[:, :, -1:], k, v, Masks(), CORRECT)[2]
    out = next((a for a in arrays if a.shape == right.shape), None)
    if out is None or not close(out, right):
        gap = float("nan") if out is None else float(np.abs(out - right).max())
        return "cache-offset", say["by_property_cache-offset"].format(gap=gap)
    return None, ""


def _cache_arguments(call: Any, new: list[Any], past: list[Any], start: int) -> dict[str, Any]:
    """Arguments of one update: what was held, what is new, and how much was held."""
    arguments: dict[str, Any] = {}
    olds, news = list(past), list(new)
    for name, parameter in inspect.signature(call).parameters.items():
        if re.search(r"layer|idx", name):
            arguments[name] = 0
        elif (
            re.fullmatch(r"(start|offset|pos|position|length|cur|input|cache)_?(pos|position|len|start|ition)?s?", name)
            and name != "cache"
        ):
            arguments[name] = start
        elif re.search(r"past|cache|old|prev", name):
            many = re.search(r"_?(k|v|keys?|values?)$", name) is not None
            arguments[name] = (olds.pop(0) if olds else None) if many else (tuple(past) if past else None)
        elif news:
            arguments[name] = news.pop(0)
        elif parameter.default is parameter.empty:
            raise HeadwiseError(f"the cache wants {name!r}; its name does not tell what it is")
    return arguments
