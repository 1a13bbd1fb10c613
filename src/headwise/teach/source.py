"""What the text of a learner's file tells: candidates for a check, words, numbers, and lines to quote."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ATTENTION = re.compile(r"att|mha|mqa|gqa|head|sdpa|atenc|cabeza", re.I)
ROTARY = re.compile(r"rope|rotar|rotat", re.I)
CACHE = re.compile(r"cache", re.I)
HELPER = re.compile(r"mask|split|join|merge|combin|softmax|repeat|config|block|transformer|norm|test|main|demo", re.I)
QKV = re.compile(r"^_*(q|k|v|quer(y|ies)|keys?|values?)(_?(new|in|input|states?|heads?))?_?\w?$", re.I)


@dataclass(frozen=True)
class Source:
    """A file, or the text of one object. `kinds` are the candidates by name: layer, function, rotary or cache."""

    text: str
    path: str = ""
    offset: int = 0  # lines before the text in its file

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def code(self) -> str:
        """The text without comments and documentation, in small letters."""
        tree = ast.parse(self.text)
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
                value = body[0].value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    body[0] = ast.Pass()
        return ast.unparse(tree).lower()

    @cached_property
    def numbers(self) -> list[float]:
        """Numbers in the text, negative ones as such, and those in float("-1e20")."""
        literals = re.findall(r"(?<![\w.])-?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?(?![\w.])", self.code)
        return list(dict.fromkeys(map(float, literals)))

    def says(self, pattern: str) -> bool:
        """Does the code match, comments and documentation left out?"""
        return re.search(pattern, self.code) is not None

    def tells(self, pattern: str) -> bool:
        """Does the text match, with its comments?"""
        return re.search(pattern, self.text, re.I) is not None

    def line_of(self, patterns: Sequence[str], within: Sequence[str] = ()) -> tuple[int, str] | None:
        """Number and text of the first line that matches the first pattern that matches any."""
        spans = [span for name in within for span in self._spans(name)] or [(1, len(self.lines))]
        for pattern in patterns:
            for first, last in spans:
                for number in range(first, last + 1):
                    text = self.lines[number - 1].split("#")[0]
                    if re.search(pattern, text) and not text.lstrip().startswith(
                        ("def ", "class ", "import ", '"', "@")
                    ):
                        return number + self.offset, self.lines[number - 1].strip()
        return None

    def _spans(self, name: str) -> list[tuple[int, int]]:
        """Lines of the definitions of that name; of a class, what runs in a call first."""
        spans: list[tuple[int, int]] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                methods = [m for m in getattr(node, "body", []) if isinstance(m, ast.FunctionDef)]
                if isinstance(node, ast.ClassDef):
                    called = ("forward", "__call__")
                    methods.sort(key=lambda m: (m.name not in called, m.name == "__init__", m.lineno))
                    spans += [(m.body[0].lineno, m.end_lineno or m.lineno) for m in methods]
                else:
                    spans.append((node.body[0].lineno, node.end_lineno or node.lineno))
        return spans

    @cached_property
    def definitions(self) -> dict[str, ast.ClassDef | ast.FunctionDef]:
        return {n.name: n for n in self.tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}

    def uses(self, name: str) -> set[str]:
        """Other definitions of the file that one names."""
        names = {n.id for n in ast.walk(self.definitions[name]) if isinstance(n, ast.Name)}
        names |= {n.attr for n in ast.walk(self.definitions[name]) if isinstance(n, ast.Attribute)}
        return (names & set(self.definitions)) - {name}

    def reach(self, name: str) -> list[str]:
        """A definition and all that it uses, it first."""
        reached = [name] if name in self.definitions else []
        for each in reached:
            reached += sorted(self.uses(each) - set(reached))
        return reached


def kind_of(node: ast.AST) -> str | None:
    """layer, function, rotary, cache, or None for what is no candidate."""
    if isinstance(node, ast.ClassDef):
        methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
        calls = {"forward", "__call__", "call", "attend", "attention"} & set(methods)
        if ROTARY.search(node.name) and not ATTENTION.search(node.name):
            return "rotary"
        if CACHE.search(node.name) and not (ATTENTION.search(node.name) and calls):
            return "cache"
        named = ATTENTION.search(node.name) and not re.search("config|block|transformer|gpt", node.name, re.I)
        return "layer" if calls and named else None
    if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
        return None
    names = [a.arg for a in node.args.args]
    roles = {re.sub(r"[^qkv]", "", n.lower()[:1]) for n in names if QKV.match(n)}
    if CACHE.search(node.name) and len(names) >= 2:
        return "cache"
    if (
        ROTARY.search(node.name)
        and names
        and not re.search(r"half|freq|table|param|precomp|angles|build|cos", node.name)
    ):
        return "rotary"
    if roles >= {"q", "k", "v"} or (ATTENTION.search(node.name) and len(names) >= 2 and not HELPER.search(node.name)):
        return "function"
    return None


def candidates(source: Source) -> dict[str, str]:
    """Names with their kinds: the candidates that no other one uses, of the kind that is most of a layer."""
    kinds = {name: kind for name, node in source.definitions.items() if (kind := kind_of(node))}
    if not kinds:  # a class of any name that can be called
        calls = ("forward", "__call__")
        kinds = {
            name: "layer"
            for name, node in source.definitions.items()
            if isinstance(node, ast.ClassDef) and any(getattr(m, "name", "") in calls for m in node.body)
        }
    used = {name for candidate in kinds for name in source.reach(candidate)[1:]}
    top = {name: kind for name, kind in kinds.items() if name not in used} or kinds
    for kind in ("layer", "function", "rotary", "cache"):
        chosen = {name: k for name, k in top.items() if k == kind}
        if chosen:
            return chosen
    return {}
