"""The loop over heads of a learner's text, taken out as a function: from inside a `gpt()`, or pasted without a `def`.

What it reads and does not make comes in as arguments: q, keys and values; or, where it makes those itself, the vectors
of the tokens, one after another, and the weights. Norms and residuals around it stay outside.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from headwise.teach.source import Source
from headwise.teach.subject import KEY, VALUE, meaning_of

NAME, OUTPUTS = "head_loop", "outputs_of_tokens"
LAYERS = ("li", "layer", "layer_idx")  # which layer: a loop is checked alone, so it is the first
MODULES = {
    "math": "math",
    "np": "numpy",
    "numpy": "numpy",
    "torch": "torch",
    "nn": "torch.nn",
    "F": "torch.nn.functional",
}  # of texts that are pasted without imports
WEIGHT = re.compile(r"(^|[_.])w_?(q|k|v|o|query|key|value|out)$|(q|k|v|o|query|key|value|out)_?(proj|weight)", re.I)


def dot(a: Any, b: Any) -> Any:
    return sum(x * y for x, y in zip(a, b, strict=False))  # as courses write it: what is longer is cut off


def linear(x: Any, w: Any) -> Any:
    """Each row of W times x; in either order, as courses write it."""
    matrix, vector = (x, w) if hasattr(x[0], "__len__") else (w, x)
    return [dot(row, vector) for row in matrix]


def softmax(x: Any) -> Any:
    powers = [math.exp(a - max(x)) for a in x]
    return [power / sum(powers) for power in powers]


HELPERS: Mapping[str, Callable[..., Any]] = {f.__name__: f for f in (dot, linear, softmax)}


def head_loop(text: str, path: str = "", within: str = "") -> Source | None:
    """A source in which the loop over heads is the function `head_loop`; None where the text has no such loop.

    within  the function in which it is looked for; all of the text where empty
    """
    lines = textwrap.dedent(text).splitlines()
    try:
        tree = ast.parse("\n".join(lines))
    except IndentationError:
        lines = _indented(lines)
    except SyntaxError:
        return None
    with contextlib.suppress(SyntaxError):
        tree = ast.parse("\n".join(lines))
        return _taken_out(tree, lines, path, within)
    return None


def _indented(lines: list[str]) -> list[str]:
    """The lines of a loop that a page printed without indentation: its body ends where it last adds to a list."""
    first = next((i for i, line in enumerate(lines) if re.match(r"\s*for .*:\s*(#.*)?$", line)), len(lines))
    last = max((i for i, line in enumerate(lines) if re.search(r"\.(extend|append)\(|\+=", line)), default=first)
    return [f"    {line}" if first < i <= last else line for i, line in enumerate(lines)]


def _taken_out(tree: ast.Module, lines: list[str], path: str, within: str) -> Source | None:
    """The loop over heads of a text, as `head_loop` has it."""
    places = [node for node in tree.body if within in ("", getattr(node, "name", ""))]
    blocks = [tree.body] * (not within) + [block for node in places for block in _blocks(node)]
    block = next((block for block in reversed(blocks) if any(map(_is_head_loop, block))), None)
    if block is None:
        return None
    kept: list[ast.stmt] = []
    for node in tree.body:
        if _is_kept(node, kept) and not any(inner is block for inner in _blocks(node)):
            kept.append(node)
    kept += [node for node in block if isinstance(node, ast.FunctionDef) and node not in kept]
    defined = {name for node in kept for name in _defined(node)}
    taken, result = _extent(block, defined)
    return _source(lines, path, taken, result, [node for node in kept if node not in taken], defined)


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements, the outer ones first."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            yield body


def _is_head_loop(node: ast.stmt) -> bool:
    """A `for` over the heads, or over a fixed number of them with slices in it."""
    if not (isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and node.iter.args):
        return False
    count = node.iter.args[-1]
    name = getattr(count, "id", getattr(count, "attr", ""))
    parts = ast.Subscript if meaning_of(name) == "HEADS" else ast.Slice
    return (meaning_of(name) == "HEADS" or not name) and any(isinstance(n, parts) for n in ast.walk(node))


def _is_kept(node: ast.stmt, kept: Sequence[ast.stmt]) -> bool:
    """Is it a definition, an import or a plain constant, of those before it? What else a file does is left alone."""
    if isinstance(node, ast.Assign):
        plain = (ast.Constant, ast.Name, ast.BinOp, ast.operator, ast.expr_context, ast.Tuple)
        known = {name for before in kept for name in _defined(before)}
        read = set(_names([node.value], ast.Load))
        return read <= known and all(isinstance(part, plain) for part in ast.walk(node.value))
    return isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    else:
        yield from _names([node], ast.Store)


def _names(nodes: Sequence[ast.AST], context: type[ast.expr_context]) -> list[str]:
    """Names that are read (ast.Load) or bound (ast.Store)."""
    names = [n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)]
    return list(dict.fromkeys(n.id for n in names if isinstance(n.ctx, context)))


def _grown(statement: ast.AST) -> str:
    """The name of the list to which a statement adds something; empty where it does not."""
    if isinstance(statement, ast.AugAssign):
        return next(iter(_names([statement.target], ast.Store)), "")
    if isinstance(statement, ast.Assign):  # to a part of it, or of itself with more
        target = statement.targets[0]
        read = _names([target if isinstance(target, ast.Subscript) else statement.value], ast.Load)
        return read[0] if isinstance(target, ast.Subscript) else next((n for n in read if n == ast.unparse(target)), "")
    call = getattr(statement, "value", None)
    if isinstance(call, ast.Call) and getattr(call.func, "attr", "") in ("append", "extend"):
        return next(iter(_names([call.func], ast.Load)), "")
    return ""


def _is_weighted(statement: ast.AST) -> bool:
    """Does it multiply by a matrix of weights?"""
    keys = [n.value for n in ast.walk(statement) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return any(WEIGHT.search(name) for name in (*keys, *_names([statement], ast.Load)))


def _extent(block: list[ast.stmt], defined: set[str]) -> tuple[list[ast.stmt], str]:
    """The statements that make what the loop reads, the loop, and those that read what it makes; and the result."""
    place = next(i for i, statement in enumerate(block) if _is_head_loop(statement))
    loop = block[place]
    assigned = [node for node in ast.walk(loop) if isinstance(node, ast.Assign) and not _grown(node)]
    bound_within = _names(assigned, ast.Store)
    grown = [name for node in ast.walk(loop) if (name := _grown(node)) and name not in bound_within]
    needed = {*_names([loop], ast.Load), *grown} - defined
    projections = [i for i in range(place) if _is_weighted(block[i])]
    start = place
    for i in range(place - 1, min(projections, default=0) - 1, -1):
        bound = {*_names([block[i]], ast.Store), _grown(block[i])}
        if bound & needed and isinstance(block[i], ast.Assign | ast.AugAssign | ast.Expr):
            start = i
            needed |= {*_names([block[i]], ast.Load)} if _grown(block[i]) else set()
    # Where no list grows, the last head is all that is left of what was begun before the loop.
    begun = [name for name in bound_within if name in _names(block[:place], ast.Store)]
    end, result = place + 1, [*begun, *grown, "None"][len(begun + grown) - 1]
    for i in range(place + 1, len(block)):
        statement, weighted = block[i], _is_weighted(block[i])
        if _grown(statement) in needed - {result}:
            end = i + 1
        elif result in _names([statement], ast.Load):
            outside = set(_free(block[start : i + 1], defined)) > set(_free(block[start:i], defined))
            if (weighted and not projections) or (outside and not weighted):  # W_O alone, or a residual
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
    within = {
        n for s in taken for c in ast.walk(s) if isinstance(c, ast.comprehension) for n in _names([c.target], ast.Store)
    }
    seen = {*within, *defined, *vars(builtins), *MODULES, *HELPERS}
    free: list[str] = []
    for statement in taken:
        nodes = [n for n in ast.walk(statement) if isinstance(n, ast.Name)]
        stored = {n.id for n in nodes if isinstance(n.ctx, ast.Store)} if isinstance(statement, ast.For) else set()
        free += [n.id for n in nodes if isinstance(n.ctx, ast.Load) and n.id not in {*seen, *stored, *free}]
        seen |= set(_names([statement], ast.Store))
    return list(dict.fromkeys(free))


def _source(
    lines: list[str], path: str, taken: list[ast.stmt], result: str, kept: list[ast.stmt], defined: set[str]
) -> Source:
    """The text of the function, with the definitions of the file after it, and where each of its lines stands there."""
    first, last = taken[0].lineno, taken[-1].end_lineno or taken[-1].lineno
    snippet = textwrap.dedent("\n".join(lines[first - 1 : last])).splitlines()
    text, free = "\n".join(snippet), _free(taken, defined)
    layers = [name for name in free if name in LAYERS]
    free = [name for name in free if name not in layers]
    layered = [n for n in free if any(re.search(rf"\b{n}\[{layer}\]", text) for layer in layers)]
    with_weights = any(_is_weighted(statement) for statement in taken if not _is_head_loop(statement))
    held = [n for n in free if (KEY.match(n) or VALUE.match(n)) and with_weights]
    data = [n for n in free if n not in held and meaning_of(n) is None and not WEIGHT.search(n)]
    tables = [n for n in data if re.search(rf"\b{n}\[f?['\"]", text)]
    if not held:  # one of them may be read twice, and the other not at all
        free += [n for n, p in (("keys", KEY), ("values", VALUE)) if not any(map(p.match, free))]
    before = [f"{name} = 0" for name in layers]
    before += [f"{name} = [[]]" if name in layered else f"{name} = []" for name in held]
    before += [f"{name} = [{name}]" for name in layered if name not in held and name not in tables]
    depth, after = 1, [f"return {result}"]
    if held and (x := next((n for n in data if n not in tables), "")):
        free = [f"{n}_of_tokens" if n == x else n for n in free if n not in held]
        before += [f"{OUTPUTS} = []", f"for {x} in {x}_of_tokens:"]
        depth, after = 2, [f"    {OUTPUTS}.append({result})", f"return {OUTPUTS}"]
    whole = [f"def {NAME}({', '.join(free)}):", *(f"    {line}" for line in before)]
    numbers = [first] * len(whole) + list(range(first, last + 1)) + [last] * len(after)
    whole += [*(" " * 4 * depth + line for line in snippet), *(f"    {line}" for line in after)]
    for node in kept:
        spanned = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        whole += textwrap.dedent("\n".join(lines[spanned[0] - 1 : spanned[-1]])).splitlines()
        numbers += spanned
    return Source("\n".join(whole) + "\n", path, tuple(numbers))


def unimported(source: Source) -> dict[str, Any]:
    """The usual modules that a text uses and does not import: a page prints a class without them."""
    imports = [node for node in ast.walk(source.tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    known = {name for node in imports for name in _defined(node)} | set(_names([source.tree], ast.Store))
    used = [name for name in _names([source.tree], ast.Load) if name in MODULES and name not in known]
    return {name: importlib.import_module(MODULES[name]) for name in used}
