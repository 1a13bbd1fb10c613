"""The check of a rotation of queries and keys (RoPE): lengths stay, and products depend on the distance alone."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from headwise.teach.bugs import UncheckedError, Verdict
from headwise.teach.subject import (
    BATCH,
    HEAD_DIM,
    HEADS,
    TOKENS,
    Target,
    angle_tables,
    arguments_of,
    build,
    kind_of_arrays,
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
    worst: Problem | None = None
    failure: Exception | None = None
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
    made: list[Any] = []
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
    rotated: list[Any] = []
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
