"""The loop over heads of a learner's text, taken out as a function: from inside a `gpt()`, or pasted without a `def`.

What it reads and does not make comes in as arguments: q, keys and values; or, where it makes those itself, the vectors
of the tokens, one after another, and the weights. Norms and residuals around it stay outside.
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

NAME, OUTPUTS = (
    "head_loop",
    "outputs_of_tokens",
)  # names in the function that is written out below
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
        return _taken_out(tree, version.splitlines(), path, within)
    return None


def _taken_out(
    tree: ast.Module, lines: list[str], path: str, within: str
) -> Source | None:
    """The source that `head_loop` gives: first the function, then the definitions that it may use.

    Its `numbers` say of each line where it stands in the text.
    """
    places: list[ast.AST] = [tree]
    if within:
        places = [node for node in tree.body if getattr(node, "name", "") == within]
    blocks = [
        block
        for node in places
        for block in _blocks(node)
        if any(map(_is_head_loop, block))
    ]
    if not blocks:
        return None
    block = blocks[-1]  # the innermost
    kept = []
    defined: set[str] = (
        set()
    )  # names of what is kept, which the function need not be given
    # Definitions of the file, and functions beside the loop, as within a `gpt()`.
    for node in (
        *tree.body,
        *(node for node in block if isinstance(node, ast.FunctionDef)),
    ):
        is_around = any(
            inner is block for inner in _blocks(node)
        )  # it has the loop in it
        if node not in kept and not is_around and _is_kept(node, defined):
            kept.append(node)
            defined.update(bound_by(node))
    taken, result = _extent(block, defined)
    text, numbers = _written_out(lines, taken, result, defined)
    for node in kept:
        if node not in taken:
            spanned = range(
                node.lineno, (node.end_lineno or node.lineno) + 1
            )  # its lines, from 1
            text += textwrap.dedent(
                "\n".join(lines[spanned[0] - 1 : spanned[-1]])
            ).splitlines()
            numbers += spanned
    return Source("\n".join(text) + "\n", path, tuple(numbers))


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
    if not (
        isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and node.iter.args
    ):
        return False
    # n_head of `range(n_head)` and of `range(self.n_head)`; a number has no name
    count = node.iter.args[-1]
    name = getattr(count, "id", getattr(count, "attr", ""))
    is_of_heads = meaning_of(name) == "HEADS"
    # x[h], or, where 4 may be a number of anything, x[a:b]
    wanted = ast.Subscript if is_of_heads else ast.Slice
    return (is_of_heads or not name) and any(
        isinstance(part, wanted) for part in ast.walk(node)
    )


def _is_kept(node: ast.stmt, defined: set[str]) -> bool:
    """Is it a definition, an import or a plain constant, of those before it? What else a file does is left alone."""
    if isinstance(node, ast.Assign):
        return defined.issuperset(names_of([node.value], ast.Load)) and bool(
            PLAIN.fullmatch(ast.unparse(node.value))
        )
    return isinstance(
        node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
    )


def _grown(statement: ast.AST) -> str:
    """The name of the list to which a statement adds something; empty where it does not."""
    simple = isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr)
    match = GROWTH.match(ast.unparse(statement)) if simple else None
    return match[1] if match else ""


def _is_weighted(statement: ast.AST) -> bool:
    """Does it multiply by a matrix of weights? It does where it names one."""
    return any(map(WEIGHT.search, re.findall(r"\w+", ast.unparse(statement))))


def _extent(block: list[ast.stmt], defined: set[str]) -> tuple[list[ast.stmt], str]:
    """The statements that make what the loop reads, the loop, and those that read what it makes; and the result.

    The result is a piece of code, most often a name: what the function is to return.
    """
    place = next(i for i, statement in enumerate(block) if _is_head_loop(statement))
    loop = block[place]
    inside = [node for node in ast.walk(loop) if isinstance(node, ast.stmt)]
    # Names that the loop makes anew in each round, lists to which it adds, and what it reads from before it.
    bound = names_of(
        [node for node in inside if isinstance(node, ast.Assign) and not _grown(node)],
        ast.Store,
    )
    grown = [name for name in map(_grown, inside) if name and name not in bound]
    read = {*names_of([loop], ast.Load), *grown} - defined
    # It begins at the first projection; where nothing is projected, at the first statement that makes what is read.
    projections = [i for i in range(place) if _is_weighted(block[i])]
    makers = [
        i
        for i in range(place)
        if read & {*names_of([block[i]], ast.Store), _grown(block[i])}
    ]
    start = min(projections or makers, default=place)
    # The result is the list that grows last. Where none grows, it is a name from before the loop that the loop writes
    # over: the last head is all that is left. Where that is missing, too, the function returns None.
    before = names_of(block[:place], ast.Store)
    result = ["None", *(name for name in bound if name in before), *grown][-1]
    # Forwards from the loop to W_O: what reads the result makes a new one. `end` is behind the last statement taken.
    end = place + 1
    for i, statement in enumerate(block[end:], end):
        weighted = _is_weighted(statement)
        if result in names_of([statement], ast.Load):
            # Would the function need more arguments with this statement?
            reads_more = set(_free(block[start : i + 1], defined)) > set(
                _free(block[start:i], defined)
            )
            # Not taken: W_O where q, k and v are given without a projection; and a residual, which reads the input.
            if (weighted and not projections) or (reads_more and not weighted):
                break
            if isinstance(statement, ast.Assign):
                end, result = i + 1, ast.unparse(statement.targets[0])
            elif isinstance(statement, ast.Return) and statement.value:
                result = ast.unparse(statement.value)
            if weighted:  # W_O: what comes after it is no longer attention
                break
    return block[start:end], result


def _free(taken: Sequence[ast.stmt], defined: set[str]) -> list[str]:
    """Names that are read before they are bound, and that neither Python nor the file defines."""
    bound = {*defined, *vars(builtins), *MODULES, *CALLED}
    parts = [node for statement in taken for node in ast.walk(statement)]
    # Variables of comprehensions are no names from outside, wherever they stand.
    bound.update(
        names_of(
            [node.target for node in parts if isinstance(node, ast.comprehension)],
            ast.Store,
        )
    )
    free = []
    for statement in taken:
        stored = names_of([statement], ast.Store)
        # its body reads what it binds itself; other statements read first
        if isinstance(statement, ast.For):
            bound.update(stored)
        free += [name for name in names_of([statement], ast.Load) if name not in bound]
        bound.update(stored)
    return list(dict.fromkeys(free))  # each once, in the order of the code


def _written_out(
    lines: list[str], taken: list[ast.stmt], result: str, defined: set[str]
) -> tuple[list[str], list[int]]:
    """The lines of the function, and the line of the file for each of them.

    taken, result, defined  as `_extent` gives them, and names that need not be arguments

    With projections in it, the text is one step, for one token. Then the function makes a step for each:

        def head_loop(x_of_tokens, state_dict, n_head, head_dim):
            li = 0
            keys = [[]]
            values = [[]]
            outputs_of_tokens = []
            for x in x_of_tokens:
                (the lines of the file, from that of q to that of W_O)
                outputs_of_tokens.append(x)
            return outputs_of_tokens
    """
    first, last = taken[0].lineno, taken[-1].end_lineno or taken[-1].lineno
    text = textwrap.dedent("\n".join(lines[first - 1 : last]))
    # Projections in front of the loop over heads make query, key and value of one token. Weights inside the loop are a
    # head's own, and say nothing of how many tokens there are.
    projects = any(
        _is_weighted(statement) for statement in taken if not _is_head_loop(statement)
    )
    arguments = []
    # arguments of no known meaning: the first has the vectors of tokens, others are passed on as they are
    data = []
    gathers = False  # does it make keys and values itself?
    before = []  # lines before those of the file
    for name in _free(taken, defined):
        per_layer = re.search(rf"\b{name}\[({LAYERS})\]", text)  # keys[li]
        is_table = re.search(rf"\b{name}\[f?['\"]", text)  # state_dict["attn_wq"]
        if re.fullmatch(LAYERS, name):
            before.append(f"{name} = 0")
        elif projects and (KEY.match(name) or VALUE.match(name)):
            gathers = True
            # for the one layer that there is
            before.append(f"{name} = [[]]" if per_layer else f"{name} = []")
        else:
            arguments.append(name)
            if per_layer and not is_table:
                # read as keys[li], and given for one layer alone
                before.append(f"{name} = [{name}]")
            if not is_table and meaning_of(name) is None and not WEIGHT.search(name):
                data.append(name)
    after = [f"return {result}"]
    # a bug may read one of them twice, and the other not at all: it is an argument all the same
    if not gathers:
        for name, pattern in (("keys", KEY), ("values", VALUE)):
            if not any(map(pattern.match, arguments)):
                arguments.append(name)
    elif data:
        x = data[0]
        arguments[arguments.index(x)] = f"{x}_of_tokens"
        before += [f"{OUTPUTS} = []", f"for {x} in {x}_of_tokens:"]
        text = textwrap.indent(text, "    ")
        after = [f"    {OUTPUTS}.append({result})", f"return {OUTPUTS}"]
    body = [*before, *text.splitlines(), *after]
    whole = [f"def {NAME}({', '.join(arguments)}):", *(f"    {line}" for line in body)]
    # Lines that the file does not have get the number of its first or last line.
    numbers = (
        [first] * (1 + len(before)) + list(range(first, last + 1)) + [last] * len(after)
    )
    return whole, numbers
