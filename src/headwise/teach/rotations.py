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
    to_array,
    to_kind,
    value_of,
)

BATCHES = dict.fromkeys(("batch", "batch_size", "max_batch_size", "max_batch", "bsz", "b"), BATCH)
WIDTHS = dict.fromkeys(("dim", "d", "d_model", "embed_dim", "head_dim", "dim_head"), HEAD_DIM) | BATCHES
LENGTHS = dict.fromkeys(
    ("n", "end", "seq_len", "context_length", "max_len", "T", "n_positions", "length", "max_seq_len"), TOKENS
)
POSITIONS = r"pos\w*|position\w*|m|t|p|idx|offset|start\w*|input_pos|token_positions"
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
        raise UncheckedError(f"no_{target.kind}", name=target.name, failure=f": {failure}" * (failure is not None))
    return target.verdict(False, (target.finding(worst[0], worst[1]),))


def _attempts(target: Target) -> Iterator[Attempt]:
    """Ways of calling the learner's rotation on queries, keys and values."""
    sizes = {**WIDTHS, **LENGTHS, **target.options.args}
    calls = [target.thing]
    if isinstance(target.thing, type):
        instance = build(target, {**WIDTHS, "n": TOKENS, **target.options.args})
        methods = inspect.getmembers(instance, callable)
        calls = [getattr(instance, "forward", None) or instance.__call__]
        calls += [m for n, m in methods if re.search("rotate|apply", n) and not n.startswith("_")]
    kind = kind_of_arrays(None, target.source.code)
    for call in calls:
        names = list(arguments_of(call))
        data = [n for n in names if re.fullmatch(VECTORS, n)]
        data = data if len(data) > 1 else names[:1]
        for layout in LAYOUTS:
            for tables in _tables(target, names, sizes, kind, layout):
                yield partial(_problem, target, call, data, layout, tables, kind)


def _tables(
    target: Target, names: list[str], sizes: Mapping[str, Any], kind: str, layout: str
) -> Iterator[dict[str, Any]]:
    """What to pass besides the vectors: the tables of the learner's own builder, or the usual ones, and positions."""
    rest = [n for n in names if re.search(r"cos|sin|freq|angle|table|cis|rot", n)]
    positions = {n: to_kind(np.arange(TOKENS), kind) for n in names[1:] if re.fullmatch(POSITIONS, n)}
    if not rest:
        yield {}
        yield positions
        return
    made: list[Any] = []
    for name, maker in target.namespace.items():
        if inspect.isfunction(maker) and name != target.name and re.search(MAKERS, name):
            with contextlib.suppress(Exception):  # no builder, or one that wants something else
                wanted = [n for n, p in inspect.signature(maker).parameters.items() if p.default is p.empty]
                made.append(maker(**{n: value_of(n, sizes) for n in wanted}))
    for table in made or angle_tables(kind, {}):
        pair = table if isinstance(table, tuple) else (table,)
        if len(pair) == len(rest):
            passed = dict(zip(rest, pair, strict=True))
            yield {**passed, **positions}
            if layout == "bthd":  # with heads after the tokens a table (T,d) wants an axis for them
                wide = {n: x[:, None] if getattr(x, "ndim", 0) == 2 else x for n, x in passed.items()}
                yield {**wide, **positions}


def _problem(
    target: Target, call: Any, data: list[str], layout: str, tables: Mapping[str, Any], kind: str
) -> Problem | None:
    """What is wrong with rotated queries, keys and perhaps values, passed in one order of axes.

    None where what comes out has other axes, or where nothing has moved at all.
    """
    to, back = LAYOUTS[layout]
    rng = np.random.default_rng(0)
    shape = (BATCH, HEADS, TOKENS, HEAD_DIM)
    q, k = (np.broadcast_to(rng.normal(size=(BATCH, HEADS, 1, HEAD_DIM)), shape) for _ in range(2))
    vectors = [to(x) for x in (q, k, rng.normal(size=shape))]
    results: list[Any] = []
    for run in [vectors[: len(data)]] if len(data) > 1 else [vectors[:1], vectors[1:2]]:
        result = call(**{n: to_kind(x.copy(), kind) for n, x in zip(data, run, strict=True)}, **tables)
        results += [to_array(x) for x in (result if isinstance(result, tuple) else [result])]
    if any(getattr(array, "shape", None) != vectors[0].shape for array in results):
        return None
    rotated = [back(x) for x in results]
    product = (rotated[0] @ rotated[1].swapaxes(-1, -2))[0, 0]
    if len(rotated) > 2 and not np.allclose(rotated[2], back(vectors[2]), atol=1e-4):
        return "rope-on-values", target.say("by_property")
    if np.allclose(product, product[0, 0], atol=1e-3):
        return None
    relative = np.allclose(product[1:, 1:], product[:-1, :-1], atol=1e-3)
    if relative and _same_pairs(rotated, q, k):
        if left := [name for name in arguments_of(call) if name not in (*data, *tables)]:
            target.left_out("untried", names=", ".join(left))
        return None, ""
    a, b = float(product[1, 0]), float(product[-1, -2])
    return "rope-mixed-layout", target.say("by_property_rope-mixed-layout", a=a, b=b)


def _same_pairs(rotated: list[Any], q: Any, k: Any) -> bool:
    """Are pairs of one layout rotated, in queries and keys alike? The first place may be rotated by any angle."""
    half = np.arange(HEAD_DIM // 2)
    for i, j in ((half, half + HEAD_DIM // 2), (2 * half, 2 * half + 1)):
        sizes = [x[0, 0][:, i] ** 2 + x[0, 0][:, j] ** 2 for x in (*rotated[:2], q, k)]
        if np.allclose(sizes[:2], sizes[2:], rtol=1e-3):
            return True
    return False
