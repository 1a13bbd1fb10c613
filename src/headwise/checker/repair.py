"""Where a difference without a name stands: the one small change of a line after which the numbers are right.

Each change is tried in a copy of the file. It is the reverse of a slip: a sign, an operator, an axis, an order of
arguments, a comparison, q for k. To try another kind of change is a branch of `changes_of_node`.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from headwise.checker.contract import Target
from headwise.checker.reading import role_of
from headwise.checker.source import Source, methods_of, run_definitions

OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip
SMALL = 4  # constants below it are most often axes


class Repair(NamedTuple):
    line: int  # of the file, from 1
    quote: str  # as it is
    text: str  # as it gives the right numbers


def repaired(
    target: Target, is_right: Callable[[Target], bool], seconds: float
) -> Repair | None:
    """The first change of one line of the learner's code that makes it right; None where none does in that time."""
    source, until = target.source, time.process_time() + seconds
    if target.name not in source.definitions:
        return None
    for number, text in _versions(source, target.name):
        if time.process_time() > until:
            return None
        lines = [*source.lines]
        lines[number - 1] = text
        other = Source("\n".join(lines) + "\n", source.path, source.numbers_of_lines)
        namespace = dict(target.namespace)
        try:
            run_definitions(other, target.name, namespace)
            thing = namespace[target.name]
            version = replace(
                target, thing=thing, source=other, namespace=namespace, checked=[], not_checked=[],
            )  # fmt: skip
            if is_right(version):
                quote, text = source.lines[number - 1].strip(), text.strip()
                with contextlib.suppress(SyntaxError):  # half of a statement
                    text = ast.unparse(ast.parse(text))
                return Repair(source.number_of(number), quote, text)
        except Exception:  # such a change may raise anything
            continue
    return None


def _versions(source: Source, name: str) -> Iterator[tuple[int, str]]:
    """Lines, from 1, as one change makes them; what builds an object comes last."""
    functions = [
        f for n in source.reach(name) for f in methods_of(source.definitions[n])
    ]
    functions.sort(key=lambda function: function.name == "__init__")
    for function in functions:
        names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        kept = {x.attr for x in ast.walk(function) if isinstance(x, ast.Attribute)}
        for statement in function.body:
            node: Any
            for node in ast.walk(statement):
                if getattr(node, "lineno", 0) != getattr(node, "end_lineno", None):
                    continue
                line = source.lines[node.lineno - 1].encode()
                for changed in changes_of_node(node, names, kept):
                    inner = ast.unparse(changed)
                    before, after = line[: node.col_offset], line[node.end_col_offset :]
                    yield node.lineno, f"{before.decode()}({inner}){after.decode()}"


def changes_of_node(node: Any, names: set[str], kept: set[str]) -> Iterator[ast.AST]:
    """What may have been meant; `names` and `kept` are those of variables and of attributes in the function."""

    def with_field(**fields: Any) -> ast.AST:
        changed = copy.copy(node)
        for field, value in fields.items():
            setattr(changed, field, value)
        return changed

    match node:
        case ast.BinOp():
            if other := OPERATORS.get(type(node.op)):
                yield with_field(op=other())
            if isinstance(node.left, ast.Constant):
                yield node.right
            if isinstance(node.right, ast.Constant):
                yield node.left
        case ast.Compare(ops=[op]) if type(op) in OPERATORS:
            yield with_field(ops=[OPERATORS[type(op)]()])
        case ast.Constant(value=int(n)) if n < SMALL and not isinstance(n, bool):
            for value in (-n, n - 1, n + 1):
                yield ast.Constant(value)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Invert() | ast.Not()):
            yield node.operand
            if isinstance(node.op, ast.UAdd):
                yield with_field(op=ast.USub())
        case ast.Call(args=[first, second, *rest]):
            yield with_field(args=[second, first, *rest])
            if "mask" in ast.unparse(first):
                inverse = ast.UnaryOp(ast.Invert(), first)
                yield with_field(args=[inverse, second, *rest])
        case ast.Name(ctx=ast.Load()):
            for name in _siblings(node.id, names):
                yield with_field(id=name)
        case ast.Attribute(ctx=ast.Load()):
            for name in _siblings(node.attr, kept):
                yield with_field(attr=name)


def _siblings(name: str, names: set[str]) -> list[str]:
    """Two names, the most alike, of others of queries, keys and values than this one is of."""
    roles = {each: role_of(each) for each in (name, *sorted(names))}
    if roles[name] not in ("q", "k", "v"):
        return []
    others = [
        x for x in roles if roles[x] in ("q", "k", "v") and roles[x] != roles[name]
    ]
    return get_close_matches(name, others, 2, 0.0)
