"""The loop over heads of a learner's text, taken out as a function: from inside a `gpt()`, or pasted without a `def`.

What it reads and does not make comes in as arguments: q, keys and values; or, where it makes those itself, the vector
of a token, the weights, and the lists in which keys and values gather. Norms and residuals around it stay outside.
"""

from __future__ import annotations

import ast
import builtins
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from headwise.checker.contract import meaning_of
from headwise.checker.source import KEY, MODULES, VALUE, Source, bound_by, names_of

NAME = "head_loop"  # of the function that is written out below
# names of the layer's number: a loop is checked alone, so it is the first
LAYERS = r"li|layer|layer_idx"
# The name of a matrix of weights: "wq", "attn_wq", "W_key", "q_proj", "out_weight".
WEIGHT = re.compile(
    r"(^|_)w_?(q|k|v|o|query|key|value|out)$|(q|k|v|o|query|key|value|out)_?(proj|weight)",
    re.I,
)
# A plain value: names, numbers and operators, and no call.
PLAIN = re.compile(r"(?!.*\w\()[\w.,+*/%'\s()-]+")
# A loop that a page printed without indentation: its first line; its body, which ends where it last adds to a list.
UNINDENTED = re.compile(
    r"(?ms)^([ \t]*for [^\n]*:[ \t]*(?:#[^\n]*)?\n)(.*(?:\.(?:extend|append)\(|\+=)[^\n]*)"
)
# A statement that goes on with what x has: `x += ...`, also with another operator, `x[i] = ...`, `x.append(...)`, or
# `x = ...` of x itself: \1 is x again, as a name of its own, not behind a dot or in quotes, nor as an argument, `x=`.
GROWTH = re.compile(
    r"(?s)(\w+)(?:(?:\[.*\])? [-+*/@|]+= |\[.*\] = |(?:\[.*\])?\.(?:append|extend)\("
    r"| = .*(?<![\w.'\"])\1(?![\w'\"]|=[^=]))"
)


def dot(a: Any, b: Any) -> Any:
    # as courses write it: what is longer is cut off
    return sum(x * y for x, y in zip(a, b, strict=False))


def linear(x: Any, w: Any) -> Any:
    """Each row of W times x; in either order, as courses write it."""
    # The matrix is the one whose first part is a list, too.
    matrix, vector = (x, w) if hasattr(x[0], "__len__") else (w, x)
    return [dot(row, vector) for row in matrix]


def softmax(x: Any) -> Any:
    powers = [math.exp(a - max(x)) for a in x]
    return [power / sum(powers) for power in powers]


# What pages call without printing it.
CALLED: Mapping[str, Callable[..., Any]] = {
    "dot": dot,
    "linear": linear,
    "softmax": softmax,
}


def head_loop(text: str, path: str = "", within: str = "") -> Source | None:
    """A source in which the loop over heads is the function `head_loop`; None where the text has no such loop.

    First the function, then the definitions that it may use; its `numbers` say where each line stands in the text.

    path    of the file that the text is of, for errors
    within  the function in which it is looked for; all of the text where empty
    """
    text = textwrap.dedent(text)
    indented = UNINDENTED.sub(
        lambda match: match[1] + textwrap.indent(match[2], "    "), text, count=1
    )
    for version in (text, indented):  # the second only where the first is no Python
        try:
            tree = ast.parse(version)
        except SyntaxError:
            continue
        break
    else:
        return None
    lines = version.splitlines()
    places = [node for node in tree.body if getattr(node, "name", "") == within]
    blocks = [
        block for node in (places if within else [tree]) for block in _blocks(node)
        if any(map(_is_head_loop, block))
    ]  # fmt: skip
    if not blocks:
        return None
    block = blocks[-1]  # the innermost
    kept: list[ast.stmt] = []
    # names of what is kept, which the function need not be given
    defined: set[str] = set()
    # Definitions of the file, and functions beside the loop, as within a `gpt()`.
    for node in (*tree.body, *(n for n in block if isinstance(n, ast.FunctionDef))):
        is_around = any(inner is block for inner in _blocks(node))
        if node not in kept and not is_around and _is_kept(node, defined):
            kept.append(node)
            defined.update(bound_by(node))
    taken, result = _extent(block, defined)
    written: list[str] = []
    numbers: list[int] = []
    for node in [n for n in kept if n not in taken]:
        spanned = _span(node)
        inner = "\n".join(lines[line - 1] for line in spanned)
        written += textwrap.dedent(inner).splitlines()
        numbers += spanned
    spanned = range(taken[0].lineno, _span(taken[-1])[-1] + 1)
    body = textwrap.dedent("\n".join(lines[line - 1] for line in spanned))
    arguments = []
    before = []
    for name in _free(taken, defined):
        if re.fullmatch(LAYERS, name):
            before.append(f"{name} = 0")
            continue
        arguments.append(name)
        # read as keys[li], and given for one layer alone; a table is read as state_dict["attn_wq"]
        if re.search(rf"\b{name}\[({LAYERS})\]", body):
            before.append(f"{name} = [{name}]")
    # A bug may read one of them twice, and the other not at all: it is an argument all the same.
    for name, pattern in (("keys", KEY), ("values", VALUE)):
        if not any(map(pattern.match, arguments)) and not _projects_at_once(taken):
            arguments.append(name)
    inside = [*before, *body.splitlines(), f"return {result}"]
    function = [
        f"def {NAME}({', '.join(arguments)}):",
        *(f"    {line}" for line in inside),
    ]
    # Lines that the file does not have get the number of its first or last line.
    numbers = [spanned[0]] * (1 + len(before)) + [*spanned, spanned[-1]] + numbers
    return Source("\n".join([*function, *written]) + "\n", path, tuple(numbers))


def _span(node: ast.stmt) -> range:
    """The lines of a statement, from 1."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements, the outer ones first."""
    for node in ast.walk(tree):
        # `body` last: of an `if` with a loop in both branches it counts
        for name in ("finalbody", "orelse", "body"):
            block = getattr(node, name, None)
            if isinstance(block, list):  # that of a lambda is an expression
                yield block


def _is_head_loop(node: ast.stmt) -> bool:
    """A `for` over the heads, or over a fixed number of them with slices in it."""
    if not (isinstance(node, ast.For) and isinstance(node.iter, ast.Call)):
        return False
    # n_head of `range(n_head)` and of `range(self.n_head)`; a number has no name
    count = [None, *node.iter.args][-1]
    name = getattr(count, "id", getattr(count, "attr", ""))
    is_of_heads = meaning_of(name) == "HEADS"
    # x[h], or, where 4 may be a number of anything, x[a:b]
    wanted = ast.Subscript if is_of_heads else ast.Slice
    has = any(isinstance(part, wanted) for part in ast.walk(node))
    return has and bool(count) and (is_of_heads or not name)


def _is_kept(node: ast.stmt, defined: set[str]) -> bool:
    """Is it a definition, an import or a plain constant, of those before it? What else a file does is left alone."""
    if isinstance(node, ast.Assign):
        is_known = defined.issuperset(names_of([node.value], ast.Load))
        return is_known and bool(PLAIN.fullmatch(ast.unparse(node.value)))
    kinds = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
    return isinstance(node, kinds)


def _grown(statement: ast.AST) -> str:
    """The name of the list to which a statement adds something; empty where it does not."""
    simple = isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr)
    match = GROWTH.match(ast.unparse(statement)) if simple else None
    return match[1] if match else ""


def _is_weighted(statement: ast.AST) -> bool:
    """Does it multiply by a matrix of weights? It does where it names one."""
    return any(map(WEIGHT.search, re.findall(r"\w+", ast.unparse(statement))))


def _projects_at_once(taken: list[ast.stmt]) -> bool:
    """Are keys made of all tokens before the loop, which need not be gathered?"""
    bound = names_of([s for s in taken if not isinstance(s, ast.For)], ast.Store)
    return any(map(KEY.match, bound)) and not any(
        _grown(s) and _is_weighted(s) for s in taken
    )


def _extent(block: list[ast.stmt], defined: set[str]) -> tuple[list[ast.stmt], str]:
    """The statements that make what the loop reads, the loop, and those that read what it makes; and the result.

    The result is a piece of code, most often a name: what the function is to return.
    """
    place = next(i for i, statement in enumerate(block) if _is_head_loop(statement))
    inside = [node for node in ast.walk(block[place]) if isinstance(node, ast.stmt)]
    # Names that the loop makes anew in each round, lists to which it adds, and what it reads from before it.
    plain = [
        node for node in inside if isinstance(node, ast.Assign) and not _grown(node)
    ]
    bound = names_of(plain, ast.Store)
    grown = [name for name in map(_grown, inside) if name and name not in bound]
    read = {*names_of([block[place]], ast.Load), *grown} - defined
    # It begins at the first projection; where nothing is projected, at the first statement that makes what is read.
    before = range(place)
    projections = [i for i in before if _is_weighted(block[i])]
    makers = [
        i for i in before if read & {*names_of([block[i]], ast.Store), _grown(block[i])}
    ]
    start = min(projections or makers, default=place)
    # The result is the list that grows last. Where none grows, it is a name from before the loop that the loop writes
    # over: the last head is all that is left. Where that is missing, too, the function returns None.
    earlier = names_of(block[:place], ast.Store)
    result = ["None", *(name for name in bound if name in earlier), *grown][-1]
    # Forwards from the loop to W_O: what reads the result makes a new one. `end` is behind the last statement taken.
    end = place + 1
    for i, statement in enumerate(block[end:], end):
        if result not in names_of([statement], ast.Load):
            continue
        weighted = _is_weighted(statement)
        # Would the function need more arguments with this statement?
        needed = (set(_free(block[start:last], defined)) for last in (i + 1, i))
        reads_more = next(needed) > next(needed)
        # Not taken: W_O where q, k and v are given without a projection; and a residual, which reads the input.
        if (weighted and not projections) or (reads_more and not weighted):
            break
        if isinstance(statement, ast.Assign):
            end = i + 1
            result = ast.unparse(statement.targets[0])
        elif isinstance(statement, ast.Return) and statement.value:
            result = ast.unparse(statement.value)
        if weighted:  # W_O: what comes after it is no longer attention
            break
    return block[start:end], result


def _free(taken: Sequence[ast.stmt], defined: set[str]) -> list[str]:
    """Names that are read before they are bound, and that neither Python nor the file defines."""
    bound = {*defined, *vars(builtins), *MODULES, *CALLED}
    # Variables of comprehensions are no names from outside, wherever they stand.
    for statement in taken:
        for node in ast.walk(statement):
            if isinstance(node, ast.comprehension):
                bound.update(names_of([node.target], ast.Store))
    free = []
    for statement in taken:
        stored = names_of([statement], ast.Store)
        # its body reads what it binds itself; other statements read first
        if isinstance(statement, ast.For):
            bound.update(stored)
        free += [name for name in names_of([statement], ast.Load) if name not in bound]
        bound.update(stored)
    return list(dict.fromkeys(free))  # each once, in the order of the code
