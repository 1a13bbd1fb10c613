"""Where a difference without a name stands: the one small change of a line after which the numbers are right.

Each change is tried in a copy of the file. It is the reverse of a slip: a sign, an operator, an axis, an order of
arguments, a comparison, q for k. To try another kind is an entry of OPPOSITE or a branch of `changes_of_node`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from headwise.checker.contract import Target
from headwise.checker.reading import role_of
from headwise.checker.source import Source, methods_of, run_definitions

# Words, numbers and operators of a line.
WORDS = re.compile(r"(\d+\.\d*|\w+|[-+*/<>=@!~]+)")
OPPOSITE = {
    "+": "-", "-": "+", "*": "/", "/": "*", "<": "<=", "<=": "<", ">": ">=", ">=": ">",
    "==": "!=", "!=": "==", "//": "/", "=-": "=", "**-": "**", "~": "", "not": "",
}  # fmt: skip
SMALL = 4  # constants below it are most often axes


def repaired(
    target: Target, is_right: Callable[[Target], bool], seconds: float
) -> tuple[int, str, str] | None:
    """The line that one change makes right, as it is, and as it is right then; None where none does in that time."""
    source = target.source
    until = time.process_time() + seconds
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
                quote = source.lines[number - 1].strip()
                text = text.strip()
                with contextlib.suppress(SyntaxError):  # half of a statement
                    text = ast.unparse(ast.parse(text))
                return source.number_of(number), quote, text
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
        roles = {
            word: role_of(word)
            for word in sorted({*WORDS.findall(ast.unparse(function))})
        }
        meant = functools.partial(_meant, roles=roles)
        for statement in function.body:
            if isinstance(getattr(statement, "value", None), ast.Constant):
                continue  # documentation
            for number in range(statement.lineno, (statement.end_lineno or 0) + 1):
                if "is not None" in source.lines[number - 1]:
                    continue  # a part that is left out explains nothing
                for text in edits(source.lines[number - 1], meant):
                    yield number, text
            node: Any
            for node in ast.walk(statement):
                if getattr(node, "lineno", 0) != getattr(node, "end_lineno", None):
                    continue
                line = source.lines[node.lineno - 1].encode()
                before = line[: node.col_offset]
                after = line[node.end_col_offset :]
                for inner in map(ast.unparse, changes_of_node(node)):
                    yield node.lineno, f"{before.decode()}({inner}){after.decode()}"


def edits(
    line: str, meant: Callable[[str], Iterable[str]], first: int = 0
) -> Iterator[str]:
    """The line with one of its words and operators, the `first` or a later one, as another one that was meant."""
    parts = WORDS.split(line)
    for place in range(2 * first + 1, len(parts), 2):
        if "#" in "".join(parts[:place]):
            return
        for other in meant(parts[place]):
            yield "".join([*parts[:place], other, *parts[place + 1 :]])


def _meant(word: str, roles: dict[str, str | None]) -> list[str]:
    """The operator that is near, a number beside it, or two names, the most alike, of what has another role."""
    if word in OPPOSITE:
        return [OPPOSITE[word]]
    if word.isdigit() and int(word) < SMALL:
        return [f"-{word}", str(int(word) - 1), str(int(word) + 1)]
    if roles.get(word) not in ("q", "k", "v"):
        return []
    others = [x for x in roles if roles[x] in {*"qkv"} - {roles[word]}]
    return get_close_matches(word, others, 2, 0.0)


def changes_of_node(node: Any) -> Iterator[ast.AST]:
    """What may have been meant for more than a word: no number, a mask turned round, arguments exchanged."""
    match node:
        case ast.BinOp(left=left, op=ast.MatMult(), right=right):
            axes: list[ast.expr] = [ast.Constant(-1), ast.Constant(-2)]
            turned = ast.Call(ast.Attribute(right, "swapaxes"), axes, [])
            yield ast.BinOp(left, ast.MatMult(), turned)
        case ast.BinOp(left=left, right=right):
            if isinstance(left, ast.Constant):
                yield right
            if isinstance(right, ast.Constant):
                yield left
        case ast.Call(func=function, args=[first, second, *rest], keywords=keywords):
            yield ast.Call(function, [second, first, *rest], keywords)
            if "mask" in ast.unparse(first):
                inverse = ast.UnaryOp(ast.Invert(), first)
                yield ast.Call(function, [inverse, second, *rest], keywords)
