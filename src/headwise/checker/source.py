"""What the text of a learner's file tells: candidates for a check, numbers, lines to quote, the form of a mask."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from headwise.checker.bugs import read_toml

# What names of classes and functions tell: att(ention), rotary positions, a cache, in English or Spanish.
ATTENTION = re.compile(r"att|mha|mqa|gqa|head|sdpa|atenc|cabeza", re.I)
ROTARY = re.compile(r"rope|rotar|rotat", re.I)
CACHE = re.compile(r"cache", re.I)
# before a pattern in bugs.toml: it is looked for below a softmax; see `line_of`
AFTER = "after softmax: "
MASK = re.compile(r"mask|m[aá]scara", re.I)  # an argument of such a name is a mask
# Methods of a class that attend, the usual one first.
CALLS = ("forward", "__call__", "call", "attend", "attention", "step")
# A function with such a name is a helper, even where its name says attention too: `attention_mask`.
HELPER = re.compile(
    r"mask|split|join|merge|combin|softmax|repeat|config|block|transformer|norm|test|main|demo",
    re.I,
)
# What a text that attends has a name for.
QUERIES = r"\b(w_?q\w*|q|q_\w+|to_q\w*|quer\w+|c_attn|consultas?)\b"
_END = r"(_?(new|in|input|states?|heads?|x))?\w?$"  # what may follow: "k_new", "q_heads", "ks"
# Names of what attention takes: q, k_new, x_v, values, consultas.
QUERY, KEY, VALUE = DATA = tuple(
    re.compile(rf"^_*(x_?)?({words}){_END}", re.I)
    for words in ("q|query|queries|consultas?", "k|keys?|claves?", "v|values?|val|valor(es)?")
)


@dataclass(frozen=True)
class Source:
    """A file, or the text of one object."""

    text: str
    path: str = ""
    # Where the text is taken out of a file: the number that each of its lines has there. Empty: it is the whole file.
    numbers_of_lines: tuple[int, ...] = ()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def code(self) -> str:
        """The text without comments and documentation, in small letters, with the spaces that Python would set."""
        tree = ast.parse(self.text)  # a tree of its own, which is changed here
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
        # Each once, in the order of the text.
        return list(dict.fromkeys(map(float, literals)))

    def number_of(self, line: int) -> int:
        """The number in the file of a line of the text, both from 1."""
        return self.numbers_of_lines[line - 1] if self.numbers_of_lines else line

    def says(self, pattern: str) -> bool:
        """Does the code match, comments and documentation left out?"""
        return re.search(pattern, self.code) is not None

    def tells(self, pattern: str) -> bool:
        """Does the text match, with its comments?"""
        return re.search(pattern, self.text, re.I) is not None

    def line_of(
        self, patterns: Sequence[str], within: Sequence[str] = ()
    ) -> tuple[int, str] | None:
        """Number and text of the first line that matches the first pattern that matches any; None where none does.

        A pattern that begins with AFTER matches only below the first line with a softmax.

        within  names of definitions, outside of which no line counts; all of the text where empty
        """
        numbers = self._lines_of(within) or range(1, len(self.lines) + 1)
        for pattern in patterns:
            is_below = not pattern.startswith(AFTER)
            for number in numbers:
                text = self.lines[number - 1].split("#")[0]
                matches = is_below and re.search(pattern.removeprefix(AFTER), text)
                # In none of these lines does code compute: definitions, imports, texts and decorators.
                if matches and not re.match(r"\s*(def |class |import |assert |[\"@])", text):
                    return self.number_of(number), self.lines[number - 1].strip()
                is_below = is_below or "softmax" in text
        return None

    def _lines_of(self, names: Sequence[str]) -> list[int]:
        """Lines of the functions of these definitions: of a class those that attend first, and what builds it last.

        Each from its body on: arguments in lines of their own, as `mask=None,`, would match like code.
        """
        functions = []
        for name in names:
            functions += sorted(
                _functions(self.definitions[name]), key=lambda function: function.name not in CALLS
            )
        # False comes first; the rest stays in order
        functions.sort(key=lambda function: function.name == "__init__")
        return [
            line
            for f in functions
            for line in range(f.body[0].lineno, (f.end_lineno or f.lineno) + 1)
        ]

    @cached_property
    def definitions(self) -> dict[str, ast.ClassDef | ast.FunctionDef]:
        # Classes and functions of the file itself, by name; not those within others.
        return {n.name: n for n in self.tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}

    def uses(self, name: str) -> set[str]:
        """Other definitions of the file that one names."""
        nodes = ast.walk(self.definitions[name])
        names = {
            node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            for node in nodes
        }
        return (names & set(self.definitions)) - {name}

    def is_blank(self, name: str) -> bool:
        """Is a function, or every method of a class but `__init__`, still to be written: `...`, `pass`, or a text?"""
        empty = r"pass|\.\.\.|raise NotImplementedError.*|['\"].*"
        functions = _functions(self.definitions.get(name))
        steps = [
            step for function in functions if function.name != "__init__" for step in function.body
        ]
        return bool(steps) and all(re.fullmatch(empty, ast.unparse(step), re.S) for step in steps)

    def reach(self, name: str) -> list[str]:
        """A definition and all that it uses, it first."""
        reached = [name] if name in self.definitions else []
        for each in reached:  # the loop goes on over what is added within it
            reached += sorted(self.uses(each) - set(reached))
        return reached


def _functions(node: ast.AST | None) -> list[ast.FunctionDef]:
    """A function, or those of a class."""
    parts = [node] if isinstance(node, ast.FunctionDef) else getattr(node, "body", [])
    return [part for part in parts if isinstance(part, ast.FunctionDef)]


def kind_of(node: ast.AST | None) -> str | None:
    """layer, function, rotary, cache, or None for what is no candidate."""
    if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("__"):
        return None
    attends, turns, keeps = (pattern.search(node.name) for pattern in (ATTENTION, ROTARY, CACHE))
    if isinstance(node, ast.ClassDef):
        is_called = any(function.name in CALLS for function in _functions(node))
        if turns and not attends:
            return "rotary"
        if keeps and not (attends and is_called):
            return "cache"
        # The last word counts: an AttentionBlock has attention in it, and GPTAttention is one.
        is_around = re.search(
            rf"(config|block|transformer|gpt)(?!.*({ATTENTION.pattern}))", node.name, re.I
        )
        return "layer" if is_called and attends and not is_around else None
    # A function, told by its name and the names of its arguments.
    names = [argument.arg for argument in node.args.args]
    # One argument is too few: `reset_cache(cache)` is given nothing to keep, `show_heads(weights)` nothing to weigh.
    if keeps and len(names) > 1:
        return "cache"
    # Functions with such names make tables of angles, or turn half of a vector: no rotation by itself.
    if (
        turns
        and names
        and not re.search(r"half|freq|table|param|precomp|angles|build|cos", node.name)
    ):
        return "rotary"
    takes_all_three = all(any(map(pattern.match, names)) for pattern in DATA)
    takes_heads = attends and len(names) > 1 and not HELPER.search(node.name)
    return "function" if takes_all_three or takes_heads else None


def candidates(source: Source) -> dict[str, str]:
    """Names with their kinds: the candidates that no other one uses, of the kind that is most of a layer."""
    kinds = {name: kind for name, node in source.definitions.items() if (kind := kind_of(node))}
    if not kinds:  # a class of any name that can be called
        for name, node in source.definitions.items():
            if isinstance(node, ast.ClassDef) and any(
                function.name in CALLS for function in _functions(node)
            ):
                kinds[name] = "layer"
    used = {name for candidate in kinds for name in source.reach(candidate)[1:]}
    # all, where they use one another
    top = {name: kind for name, kind in kinds.items() if name not in used} or kinds
    first = min(top.values(), key=("layer", "function", "rotary", "cache").index, default="")
    return {name: kind for name, kind in top.items() if kind == first}


def passed_over(source: Source) -> list[str]:
    """Names of what attends, rotates or caches in a file, and is neither a candidate nor used by one."""
    reached = {name for candidate in candidates(source) for name in source.reach(candidate)}
    names = []
    for name, node in source.definitions.items():
        text = ast.unparse(node)
        # A softmax by some name, and queries.
        attends = re.search(r"softmax|scaled_dot_product|exp\(", text) and re.search(
            QUERIES, text, re.I
        )
        if name not in reached and (attends or kind_of(node) in ("rotary", "cache")):
            names.append(name)
    return names


# The forms in which code takes a mask, and what tells which of them a learner means.

# By what a mask says: how to write it, from an array that is True where a query may attend.
ENCODINGS: dict[str, Any] = {
    "True = may attend": lambda allowed: allowed,
    "1 = may attend": lambda allowed: allowed.astype(float),
    "0 or -inf, added": lambda allowed: np.where(allowed, 0.0, -np.inf),
    "0 or -1e9, added": lambda allowed: np.where(allowed, 0.0, -1e9),
    "True = forbidden": lambda allowed: ~allowed,
    "1 = forbidden": lambda allowed: (~allowed).astype(float),
}

# Words beside a 1 or a 0 in a comment, in English and Spanish, some of them beginnings ("allow", "ignor").
_MAY = r"\b(may|can|keep|kept|attend|visible|allow|valid|real|see|seen|look|puede|permit|ver|se ve)"
_NOT = r"\b(masked|mask out|forbid|hid|block|ignor|pad|not|cannot|never|prohib|tapa|ocult|future|futuro)"


def meanings_of(scope: Source, whole: Source, name: str) -> list[str]:
    """The keys of ENCODINGS that a mask argument of that name may have, by comments, names or the rest of the file.

    All of them where nothing tells.

    scope, whole  the text of what is checked, with what it uses; that of the file
    """
    texts = {"text": scope.text, "code": scope.code, "file": whole.code}
    texts = {key: MASK.sub("mask", text) for key, text in texts.items()}  # "máscara" -> "mask"
    name = MASK.sub("mask", name.lower())
    rules = [rule for rule in read_toml("names.toml")["masks"] if _fits(rule, texts, name)]
    told = _told(scope.text) or _told(whole.text)
    # Ends of the keys: "may attend", "forbidden", "added"; "" is the end of every one.
    conventions = [told or next((rule["means"] for rule in rules), "")]
    # A text may say what is added, and in an error message what True would mean: then either is right.
    conventions += [rule["means"] for rule in rules[:1] if told and "text" in rule]
    return [meaning for meaning in ENCODINGS if meaning.endswith(tuple(conventions))]


def _fits(rule: Mapping[str, str], texts: Mapping[str, str], name: str) -> bool:
    """Does each text match, or with `no_` not match, what a rule of names.toml says of it?"""
    for key, text in texts.items():
        for wanted, place in ((True, key), (False, f"no_{key}")):
            # Is the search without a match, though a match is wanted; or the other way round?
            if place in rule and wanted is (
                re.search(rule[place].replace("NAME", name), text, re.I) is None
            ):
                return False
    return True


def _told(text: str) -> str | None:
    """What a one, or True, means in a mask, where a text says it in so many words, such as "1 = may attend".

    "may attend" or "forbidden"; None where no text says it.
    """
    # `other` is what a one means where the text says of `number` that it may attend: of 0, a one is forbidden then.
    for number, other in (("1s?|true|ones?", "may attend"), ("0s?|false|zeros?", "forbidden")):
        # The number, a sign or a space, and what stands behind it, as far as the next number.
        # After it, 3 to 60 characters are read, none past a full stop, a comma, a semicolon or the end of the line.
        # The shortest words of _MAY and _NOT have 3; 60 is a round choice: a longer text may speak of something else.
        for match in re.finditer(
            rf"\b(?:{number})\b(?:['\"`:=)]|\s)([^.;,\n]{{3,60}})", text, re.I
        ):
            # Not at each "ones" or "zero", which may be no number: "True for the ones to see", "1 = zero out".
            window = re.split(r"\b([01]s?|true|false|and zeros)\b", match[1], flags=re.I)[0]
            # First what forbids: "not allowed" has a word of _MAY in it too.
            if re.search(_NOT, window, re.I):
                return "forbidden" if other == "may attend" else "may attend"
            if re.search(_MAY, window, re.I):
                return other
    return None
