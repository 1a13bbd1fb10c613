"""What the text of a learner's file tells: candidates for a check, numbers, lines to quote, the form of a mask."""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import json
import re
import symtable
import sys
import tokenize
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from headwise.checker.bugs import UncheckedError
from headwise.checker.lent import LIKE_NUMPY, stand_in, unchanged
from headwise.files import read_toml

# What names of classes and functions tell: att(ention), rotary positions, in English or Spanish.
ATTENTION = re.compile(r"att|mhs?a|mqa|gqa|head|sdpa|atenc|cabeza", re.I)
ROTARY = re.compile(r"rope|rotar|rotat", re.I)
# before a pattern in bugs.toml: it is looked for below a softmax; see `line_of`
AFTER = "after softmax: "
# an argument of such a name is a mask
MASK = re.compile(
    r"mask|m[aá]scara|maschera|masque|(?<=_)pad(ding)?$|^(is_)?pad(ding|ded)?$|^keep$",
    re.I,
)
# What a class around an attention has beside it.
AROUND = (
    r"relu\(|gelu\(|silu\(|gru\(|lstm\(|rnn\(|(?<!al)embedding\(|feed_?forward|ffn|mlp"
)
# Methods of a class that attend, the usual one first.
CALLS = ("forward", "__call__", "call", "attend", "attention", "step")
# What attends says so: a softmax by some name, and queries.
SOFTMAX = r"softmax|scaled_dot_product|exp\(|(?-i:MultiheadAttention)\("
# A function with such a name is a helper, even where its name says attention too: `attention_mask`.
HELPER = re.compile(
    r"mask|split|join|merge|combin|softmax|repeat|config|block|transformer|norm|test|main|demo",
    re.I,
)
# What a text that attends has a name for.
QUERIES = r"\b(w_?q\w*|q|q_\w+|to_q\w*|quer\w+|c_attn|consultas?)\b"
# what may follow: "k_new", "q_heads", "ks"
_END = r"(_?(new|in|input|states?|heads?|x|vec\w*|emb\w*|feat\w*|tensor))?\w?$"
# Names of what attention takes: q, k_new, x_v, values, consultas.
QUERY, KEY, VALUE = DATA = tuple(
    re.compile(
        rf"^(_|x_?|to_|enc(odings)?(_for)?_|input_?|in_|pre_?|src_?)*({words}){_END}",
        re.I,
    )
    for words in (
        "q|query|queries|consultas?|requ[eê]tes?",
        "k|keys?|claves?|chaves?|cl[eé]s?",
        "v|values?|val|valor(es|i|e)?",
    )
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
    def names(self) -> set[str]:
        """Names that the code reads or binds."""
        return set(names_of([self.tree], ast.expr_context))

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def code(self) -> str:
        """The text without comments and documentation, in small letters, with the spaces that Python would set."""
        return ast.unparse(self._undocumented()).lower()

    def _undocumented(self) -> ast.Module:
        tree = ast.parse(self.text)  # a tree of its own, which is changed here
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
                value = body[0].value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    body[0] = ast.Pass()
        return tree

    @cached_property
    def numbers(self) -> list[float]:
        """Numbers in the text, negative ones as such, and those in float("-1e20")."""
        literals = re.findall(
            r"(?<![\w.])-?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?(?![\w.])", self.code
        )
        # Each once, in the order of the text.
        return list(dict.fromkeys(map(float, literals)))

    def number_of(self, line: int) -> int:
        """The number in the file of a line of the text, both from 1."""
        return self.numbers_of_lines[line - 1] if self.numbers_of_lines else line

    def says(self, pattern: str) -> bool:
        """Does the code match, comments and documentation left out?"""
        return re.search(pattern, self.code) is not None

    def always_says(self, pattern: str) -> bool:
        """Does the code match outside of what stands below a choice? `if mask is None` is none: it gives a default."""
        tree = self._undocumented()
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "None" not in ast.unparse(node.test):
                node.body = [ast.Pass()]
                node.orelse = []
        return re.search(pattern, ast.unparse(tree).lower()) is not None

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
                if matches and not re.match(
                    r"\s*(def |class |import |assert |[\"@])", text
                ):
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
                methods_of(self.definitions[name]),
                key=lambda function: function.name not in CALLS,
            )
        # False comes first; the rest stays in order
        functions.sort(key=lambda function: function.name == "__init__")
        return [
            line
            for f in functions
            for line in range(_first(f).lineno, (f.end_lineno or f.lineno) + 1)
        ]

    @cached_property
    def definitions(self) -> dict[str, ast.ClassDef | ast.FunctionDef]:
        # Classes and functions of the file itself, by name; not those within others.
        return {
            n.name: n
            for n in self.tree.body
            if isinstance(n, ast.ClassDef | ast.FunctionDef)
        }

    def uses(self, name: str) -> set[str]:
        """Other definitions of the file that one names."""
        nodes = [*ast.walk(self.definitions[name])]
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        # `layers.attend(x)`, but not the section of a config in `config.transformer.width`
        calls = [node.func for node in nodes if isinstance(node, ast.Call)]
        names |= {call.attr for call in calls if isinstance(call, ast.Attribute)}
        return (names & set(self.definitions)) - {name}

    def is_blank(self, name: str) -> bool:
        """Is a function, or every method of a class but `__init__`, still to be written: `...`, `pass`, or a text?"""
        functions = methods_of(self.definitions.get(name))
        steps = [
            step
            for function in functions
            if function.name != "__init__"
            for step in function.body
        ]
        return bool(steps) and all(map(_is_empty, steps))

    def reach(self, name: str) -> list[str]:
        """A definition and all that it uses, it first."""
        reached = [name] if name in self.definitions else []
        for each in reached:  # the loop goes on over what is added within it
            reached += sorted(self.uses(each) - set(reached))
        return reached


def _is_empty(step: ast.stmt) -> bool:
    """Is a statement what stands where code is still to be written? `...` is a constant, as a text is."""
    match step:
        case ast.Pass() | ast.Expr(value=ast.Constant()):
            return True
    return ast.unparse(step).startswith("raise NotImplementedError")


def _first(function: ast.FunctionDef) -> ast.stmt:
    """Its first statement behind the documentation."""
    has_words = isinstance(getattr(function.body[0], "value", None), ast.Constant)
    return function.body[int(has_words and len(function.body) > 1)]


def methods_of(node: ast.AST | None) -> list[ast.FunctionDef]:
    """A function, or those of a class."""
    parts = [node] if isinstance(node, ast.FunctionDef) else getattr(node, "body", [])
    return [part for part in parts if isinstance(part, ast.FunctionDef)]


def kind_of(node: ast.AST | None) -> str | None:
    """layer, function, or None for what is no candidate."""
    if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith(
        "__"
    ):
        return None
    named = ATTENTION.search(node.name)
    if isinstance(node, ast.ClassDef):
        # The last word counts: an AttentionBlock has attention in it, and GPTAttention is one.
        words = rf"(config|block|transformer|gpt)(?!.*({ATTENTION.pattern}))"
        is_around = re.search(words, node.name, re.I)
        return "layer" if _is_called(node) and named and not is_around else None
    # A function, told by its name and the names of its arguments.
    names = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
    # `show_heads(weights)` is given nothing to weigh
    is_told = named and not HELPER.search(node.name)
    takes_heads = is_told and (len(names) > 1 or attends(node))
    # what turns or keeps queries, keys and values is no attention
    is_part = not named and re.search("rope|rotar|rotat|cache", node.name, re.I)
    takes_them = takes_all_three(names) and not is_part
    return "function" if takes_them or takes_heads else None


def takes_all_three(names: Iterable[str]) -> bool:
    """Are there queries, keys and values among names of arguments?"""
    return all(any(map(pattern.match, names)) for pattern in DATA)


def _is_called(node: ast.AST) -> bool:
    """Is it a class that can be called?"""
    functions = methods_of(node) if isinstance(node, ast.ClassDef) else []
    return any(function.name in CALLS for function in functions)


def attends(node: ast.AST) -> bool:
    """Does it attend by itself: has it a softmax by some name, and queries?"""
    text = ast.unparse(node)
    return all(re.search(pattern, text, re.I) for pattern in (SOFTMAX, QUERIES))


def candidates(source: Source) -> dict[str, str]:
    """Names with their kinds: the candidates that no other one uses, of the kind that is most of a layer."""
    kinds = {
        name: kind
        for name, node in source.definitions.items()
        if (kind := kind_of(node))
    }
    called = [name for name, node in source.definitions.items() if _is_called(node)]
    attending = {name for name in called if attends(source.definitions[name])}
    for name in called:  # classes of other names, which attend by themselves
        if name in attending and not set(source.reach(name)) & set(kinds):
            kinds[name] = "layer"
    for name in called:  # a block that has weights, and calls a function that attends
        text = ast.unparse(source.definitions[name])
        functions = [n for n in source.reach(name)[1:] if kinds.get(n) == "function"]
        is_layer = re.search(QUERIES, text, re.I) and not re.search(AROUND, text, re.I)
        if functions and is_layer:
            kinds[name] = "layer"
    # A head that classifies attends nowhere; a block of a model uses what attends.
    for name in [*kinds]:
        text = ast.unparse(source.definitions[name])
        parts = attending.intersection(source.reach(name)) - {name}
        is_block = parts and name not in attending and re.search(AROUND, text, re.I)
        told = ATTENTION.search(name) and re.search(QUERIES, text, re.I)
        is_elsewhere = attending and not (parts or told or name in attending)
        if kinds[name] == "layer" and (is_block or is_elsewhere):
            kinds.pop(name)
            kinds |= dict.fromkeys(parts, "layer")
    # a class of any name that can be called
    kinds = kinds or dict.fromkeys(called, "layer")
    used = {name for candidate in kinds for name in source.reach(candidate)[1:]}
    # all, where they use one another
    top = {name: kind for name, kind in kinds.items() if name not in used} or kinds
    first = min(top.values(), key=("layer", "function").index, default="")
    return {name: kind for name, kind in top.items() if kind == first}


def passed_over(source: Source) -> list[str]:
    """Names of what attends in a file, and is neither a candidate nor used by one."""
    reached = {
        name for candidate in candidates(source) for name in source.reach(candidate)
    }
    return [
        name
        for name, node in source.definitions.items()
        if name not in reached and attends(node)
    ]


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


def laid_out(allowed: Any, real: Any, B: int, H: int) -> dict[str, Any]:
    """The forms in which code may take a mask (1,1,T,S) or (B,1,T,S); `real` (B,S) where it is one of padding."""
    whole = np.repeat(allowed, B // len(allowed), 0)
    forms = {"(B,1,T,S)": whole, "(B,T,S)": whole[:, 0]}
    forms["(B,H,T,S)"] = np.repeat(whole, H, 1)
    if real is None:
        return {"(T,S)": allowed[0, 0], **forms}
    return {"(B,S)": real, "(B,1,1,S)": real[:, None, None], **forms}


# Words beside a 1 or a 0 in a comment, in English and Spanish, some of them beginnings ("allow", "ignor").
_MAY = r"\b(may|can|keep|kept|attend|visible|allow|valid|real|see|seen|look|puede|permit|ver|se ve)"
_NOT = r"\b(masked|mask out|forbid|hid|block|ignor|pad|not|cannot|never|prohib|tapa|ocult|future|futuro)"


def meanings_of(scope: Source, whole: Source, name: str) -> list[str]:
    """The keys of ENCODINGS that a mask argument of that name may have, by comments, names or the rest of the file.

    All of them where nothing tells.

    scope, whole  the text of what is checked, with what it uses; that of the file
    """
    texts = {"text": scope.text, "code": scope.code, "file": whole.code}
    # "máscara" -> "mask"
    texts = {key: MASK.sub("mask", text) for key, text in texts.items()}
    texts["name"] = name.lower()
    name = MASK.sub("mask", name.lower())
    rules = [
        rule
        for rule in read_toml("checker/names.toml")["masks"]
        if _fits(rule, texts, name)
    ]
    own_text = _told(scope.text)
    told = own_text or _told(whole.text)
    # Ends of the keys: "may attend", "forbidden", "added"; "" is the end of every one.
    conventions = [told or next((rule["means"] for rule in rules), "")]
    # A text may say what is added, and in an error message what True would mean; and
    # the rest of a file may speak of another mask. Then what the code does is right too.
    if told:
        is_open = [rule for rule in rules[:1] if "text" in rule or not own_text]
        conventions += [rule["means"] for rule in is_open]
    if not own_text and scope.says(rf"masked_fill_?\((mask=)?{name}\b(?! *[=!]=)"):
        conventions.append("forbidden")
    return [meaning for meaning in ENCODINGS if meaning.endswith(tuple(conventions))]


def _fits(rule: Mapping[str, str], texts: Mapping[str, str], name: str) -> bool:
    """Does each text match, or with `no_` not match, what a rule of names.toml says of it?"""
    for key, text in texts.items():
        for place in (key, f"no_{key}"):
            pattern = rule.get(place, "").replace("NAME", name)
            if pattern and bool(re.search(pattern, text, re.I)) is not (place == key):
                return False
    return True


def _told(text: str) -> str | None:
    """What a one, or True, means in a mask, where a text says it in so many words, such as "1 = may attend".

    "may attend" or "forbidden"; None where no text says it.
    """
    docs = re.findall(r"#.*$|\"\"\"(?:.|\n)*?\"\"\"|'''(?:.|\\n)*?'''", text, re.M)
    lines = "\n".join(docs).splitlines()
    text = "\n".join(
        line
        for line in lines
        if (re.search(r"mask|m[aá]scara|pad|tril|triu", line, re.I) or len(lines) < 4)
        # what another implementation, or another argument, does
        and not re.search(
            r"0 for.*negative|is_causal|(?i:pytorch|future mask|\bnan\b)", line
        )
        # "0 for tokens and -10000 for padding" speaks of what is added
        and not re.search(
            r"\b0 (for|at|where|on|and|or|o|y|en|para)\b[^.;:]{0,40}-\s?(inf|1e\d|\d{3})",
            line,
        )
    )
    # `other` is what a one means where the text says of `number` that it may attend: of 0, a one is forbidden then.
    for number, other in (
        ("1s?|true|ones?", "may attend"),
        ("0s?|false|zeros?", "forbidden"),
    ):
        # The number, but not that of `mask = 1 - padding`; a sign or a space, and what stands behind it, as far as the
        # next number.
        # After it, 3 to 60 characters are read, none past a full stop, a comma, a semicolon or the end of the line.
        # The shortest words of _MAY and _NOT have 3; 60 is a round choice: a longer text may speak of something else.
        for match in re.finditer(
            rf"(?!(?<== )1 -)\b(?:{number})\b(?:['\"`:=)]|[ \t])([^.;,\n]{{3,60}})",
            text,
            re.I,
        ):
            # Not at each "ones" or "zero", which may be no number: "True for the ones to see", "1 = zero out".
            window = re.split(
                r"\b([01]s?|true|false|and zeros)\b", match[1], flags=re.I
            )[0]
            window = re.sub(r"non?t?[- ]pad\w*", "real", window, flags=re.I)
            # First what forbids: "not allowed" has a word of _MAY in it too.
            if re.search(_NOT, window, re.I):
                return "forbidden" if other == "may attend" else "may attend"
            if re.search(_MAY, window, re.I):
                return other
    return None


# Reading a file: its definitions, and of its statements those alone that a name of them needs.

# Calls that make records, such as a config, and do nothing else.
RECORDS = ("dict", "SimpleNamespace")
# Imports that stand at the head of a text which a page prints without them.
MODULES = {
    "math": "math",
    "np": "numpy",
    "numpy": "numpy",
    "torch": "torch",
    "nn": "torch.nn",
    "F": "torch.nn.functional",
}


class Stub:
    """What stands in for an import that is not there. Reading it is no harm; a call of it cannot be checked."""

    loading = False  # while a file is read its calls are those of decorators and of values nobody may need

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        name = f"{self._name}.{name}"
        return None if name.endswith("newaxis") else stand_in(name) or Stub(name)

    def __getitem__(self, key: Any) -> Stub:
        return self

    __or__ = __ror__ = __getitem__

    def __iter__(self, *_: Any, **__: Any) -> Any:
        raise UncheckedError("needs", name=self._name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        """As the base of a class: a module of torch where its name says so, else what fails when it is built."""
        if self._name.endswith(("Module", "Layer", "Model")):
            module = importlib.import_module("torch.nn").Module
            # of Lightning
            return (type("Module", (module,), {"save_hyperparameters": unchanged}),)
        if self._name.endswith(("Config", "Mixin", "ABC", "Protocol", "Enum")):
            return ()
        return (type("Missing", (), {"__init__": self.__iter__}),)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_plain = re.search(r"\.(initializ|regulariz)ers\b", self._name)
        if not (Stub.loading or is_plain):
            raise UncheckedError("needs", name=self._name)
        return args[0] if len(args) == 1 and callable(args[0]) else self


class _Silent(ast.NodeTransformer):
    """Leaves out the calls of stubs, by their names, whose result nobody uses, such as those of a logger."""

    def __init__(self, stubs: set[str]) -> None:
        self.stubs = stubs

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        root: Any = node.value.func if isinstance(node.value, ast.Call) else None
        if isinstance(root, ast.Name):
            # a function by itself may change what it is given
            return node
        while isinstance(root, ast.Attribute):
            root = root.value
        if getattr(root, "id", "") in self.stubs:
            return ast.copy_location(ast.Pass(), node)
        return node


def read_text(path: Path) -> str:
    """The text of a file of Python, or of the cells of a notebook, one behind the other; magics are left out."""
    if path.suffix != ".ipynb":
        with tokenize.open(path) as file:
            return file.read()
    cells = []
    for cell in json.loads(path.read_text(encoding="utf-8")).get("cells", []):
        if cell.get("cell_type") != "code":
            continue
        text = "".join(cell.get("source", ""))
        text = re.sub(r"(?m)^([ \t]*)[%!?].*", r"\1pass", text)
        # a cell of another language, or half of one
        with contextlib.suppress(SyntaxError):
            ast.parse(text)
            cells.append(text)
    return "\n".join(cells) + "\n"


def names_of(nodes: Sequence[ast.AST], context: type[ast.expr_context]) -> list[str]:
    """Names that are read (ast.Load) or bound (ast.Store)."""
    parts = [part for node in nodes for part in ast.walk(node)]
    return [
        part.id
        for part in parts
        if isinstance(part, ast.Name) and isinstance(part.ctx, context)
    ]


def bound_by(node: ast.AST) -> list[str]:
    """The names that a statement of a file binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    aliases = [part for part in ast.walk(node) if isinstance(part, ast.alias)]
    imported = [each.asname or each.name.split(".")[0] for each in aliases]
    return names_of([node], ast.Store) + imported


def free_names(node: ast.AST) -> set[str]:
    """Names that a statement reads of its file, whatever other functions in it call their own."""
    tables = [symtable.symtable(ast.unparse(node), "<learner>", "exec")]
    names = set[str]()
    for table in tables:  # the list grows in the loop
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_referenced() and symbol.is_global():
                names.add(symbol.get_name())
    return names


def needed_statements(source: Source, name: str) -> list[ast.stmt]:
    """The statements that `name`, or all of a file, needs: imports, definitions, plain values, what makes a name."""
    body: list[ast.stmt] = []
    for node in source.tree.body:
        is_main = isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
        body += node.body if is_main else [node]  # type: ignore[attr-defined]
    wanted = {
        each
        for part in (source.reach(name) if name else source.definitions)
        for each in free_names(source.definitions[part])
    }
    kept = []
    for node in reversed(body):
        if isinstance(node, ast.Expr | ast.For | ast.While):
            continue
        definitions = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
        plain = isinstance(node, definitions)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            calls = [x.func for x in ast.walk(node.value) if isinstance(x, ast.Call)]
            plain = all(ast.unparse(x).endswith(RECORDS) for x in calls)
        makes = bool(wanted & set(bound_by(node)))
        if plain or makes:
            kept.append(node)
        if makes:
            wanted |= free_names(node)
    return kept[::-1]


def run_definitions(
    source: Source,
    name: str,
    namespace: dict[str, Any],
    known: Mapping[str, Any] = types.MappingProxyType({}),
) -> list[str]:
    """Run what `name` needs of a file. What fails beside it becomes a stub; returns the names of imports lent.

    known  what files that are not here would have
    """
    imports = Imports(Path(source.path), known)
    namespace["__builtins__"] = {**vars(builtins), "__import__": imports}
    bound = bound_by(source.tree)
    for word in [word for word in names_of([source.tree], ast.Load) if word in MODULES]:
        namespace.setdefault(word, importlib.import_module(MODULES[word]))
        imports.lent += [] if word in bound else [word]
    Stub.loading = True
    try:
        for node in needed_statements(source, name):
            # what tries an import has another way
            imports.are_tried = isinstance(node, ast.Try)
            # of a name that a function binds itself the file knows nothing
            stubs = {x for x in free_names(node) if isinstance(namespace.get(x), Stub)}
            module = ast.Module([_Silent(stubs).visit(node)], [])
            code = compile(module, source.path or "<learner>", "exec", FUTURE, True)
            try:
                exec(code, namespace)
            except Exception:
                if name in bound_by(node):
                    raise
                namespace.update({each: Stub(each) for each in bound_by(node)})
    finally:
        Stub.loading = False
        imports.are_tried = True  # a call may have another way, too
    return imports.lent


FUTURE = __import__("__future__").annotations.compiler_flag


class Imports:
    """What `import` calls in a learner's file: for what is installed, a file beside this one, a stand-in, or a stub.

    known  what a file that is not here would have
    lent   names of stand-ins that were imported
    """

    def __init__(self, path: Path, known: Mapping[str, Any]) -> None:
        self.path = path
        self.known = known
        self.lent: list[str] = []
        self.are_tried = False  # is one that fails to raise?

    def __call__(
        self,
        name: str,
        _: Any = None,
        __: Any = None,
        wanted: Any = (),
        level: int = 0,
    ) -> Any:
        module = self._module(name, level)
        if "*" in (wanted or ()):
            return module
        if wanted:
            parts = {each: self._part(module, name, each) for each in wanted}
            return types.SimpleNamespace(**parts)
        # `import a.b` binds a
        first, *rest = name.split(".")
        if first in sys.modules or isinstance(module, Stub):
            return sys.modules.get(first) or Stub(first)
        for part in reversed(rest):
            module = types.SimpleNamespace(**{part: module})
        return module

    def _module(self, name: str, level: int) -> Any:
        near = _sibling(name, self.path, 1)
        if not near and not level:
            try:
                return importlib.import_module(name)
            except (Exception, SystemExit):
                if self.are_tried:
                    raise
        if near := near or _sibling(name, self.path):
            return _module_of(near)
        if (module := stand_in(name)) or LIKE_NUMPY.match(name):
            self.lent.append(name)
        return module or Stub(name)

    def _part(self, module: Any, origin: str, name: str) -> Any:
        """What `from origin import name` binds."""
        whole = f"{origin}.{name}".strip(".")
        if not isinstance(module, Stub):
            with contextlib.suppress(Exception):
                return getattr(module, name, None) or importlib.import_module(whole)
        if near := _sibling(whole, self.path):
            return _module_of(near)
        if (part := stand_in(whole)) is not None:
            self.lent.append(name)
            return part
        return self.known.get(name) or Stub(whole)


def _sibling(name: str, path: Path, folders: int = 4) -> Path | None:
    """The file of a module beside another file, or in the folders above it."""
    parts = name.split(".")
    for folder in list(path.parents)[:folders]:
        for tail in (parts, parts[-1:])[:folders]:
            near = folder.joinpath(*tail)
            for file in (near.with_suffix(".py"), near / "__init__.py"):
                if name and file.is_file() and file != path:
                    return file
    return None


def _module_of(path: Path) -> types.ModuleType:
    """The definitions of a file beside the learner's, as a module."""
    name = str(path)
    if name not in sys.modules:
        module = sys.modules[name] = types.ModuleType(name)
        module.__file__ = name
        run_definitions(Source(read_text(path), name), "", vars(module))
        Stub.loading = True
    return sys.modules[name]
