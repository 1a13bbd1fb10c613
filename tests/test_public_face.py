"""The names of `import headwise as hw`: all there, typed, and honest where a library is missing."""

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headwise as hw
from headwise.reshape.job import Options

WITHOUT_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "tokenizers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
sys.meta_path.insert(0, Block())
import headwise as hw
from headwise.errors import HeadwiseError
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_name_has_a_type() -> None:
    """What loads late is imported for type checkers, too, from the same module."""
    tree = ast.parse(Path(hw.__file__).read_text(encoding="utf-8"))
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    imports = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imports == hw._LAZY


@pytest.mark.slow
def test_names_without_torch() -> None:
    code = """
for name in ("watch", "GPT", "look", "attention", "attend", "price"):
    print(hasattr(hw, name))
try:
    hw.watch
except HeadwiseError as error:
    print(isinstance(error, AttributeError), error)
print(hw.price("gpt2").parameters.total)
from headwise.courses.microgpt import replay
print(len(replay(["ada"], 2, n_samples=0)[0]))
"""
    assert run(code).splitlines() == [
        *["False"] * 4,
        *("True", "True"),
        "True headwise.watch needs torch, which is not installed: pip install 'headwise[torch]'",
        *("124439808", "2"),
    ]
    assert len(hw.__all__) == len(set(hw.__all__)) and {*hw.__all__, "open"} == set(dir(hw))
    assert all(getattr(hw, name) is not None for name in hw.__all__)
    with pytest.raises(AttributeError, match="no attribute 'attentions'"):
        hw.attentions  # noqa: B018


def public_functions() -> dict[str, Callable[..., object]]:
    """Functions of the public face, and the public methods of its classes."""
    functions: dict[str, Callable[..., object]] = {}
    for name in hw.__all__:
        value = getattr(hw, name)
        if not inspect.isclass(value):
            functions[name] = inspect.unwrap(value)
            continue
        for kind in value.__mro__:
            for method in vars(kind):
                function = inspect.unwrap(getattr(value, method))
                if inspect.isfunction(function) and not method.startswith("_") and "headwise" in function.__module__:
                    functions[f"{name}.{method}"] = function
    return functions


def public_classes() -> list[type[Any]]:
    return [value for value in (getattr(hw, name) for name in hw.__all__) if inspect.isclass(value)]


def arguments(function: Callable[..., object]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def documented(function: Callable[..., object], section: str = "Args") -> list[str]:
    """The names that a section of a docstring in Google's form explains."""
    lines = re.search(rf"^{section}:\n((?:    .*\n?|\n)+)", inspect.getdoc(function) or "", re.MULTILINE)
    return [] if lines is None else re.findall(r"^    \*{0,2}(\w+): \S", lines[1], re.MULTILINE)


def test_docstrings() -> None:
    # All of them, in their order; where a docstring says that others are those of another function, the rest.
    functions = public_functions()
    wrong = []
    for name, function in functions.items():
        text = " ".join((inspect.getdoc(function) or "").split())
        told, there = documented(function), arguments(function)
        others = re.search(r"arguments are those of `([\w.]+)`", text)
        if others is not None:
            elsewhere = documented(functions[others[1]])
            there = [each for each in there if each in told or each not in elsewhere]
        if told != there and (told or "." not in name):  # a line is enough for a method
            wrong.append(f"{name}: explains {told}, has {there}")
    for kind in public_classes():
        if (told := documented(kind)) and told != arguments(kind.__init__):
            wrong.append(f"{kind.__name__}: explains {told}")
        if (fields := documented(kind, "Attributes")) and fields != [each.name for each in dataclasses.fields(kind)]:
            wrong.append(f"{kind.__name__}: explains {fields}")
    assert wrong == []
    assert documented(hw.share, "Keyword Args") == list(Options.__annotations__)
    # No table of names and gaps, which editors and the reference run into one paragraph, and no loose sentence.
    for value in [*public_functions().values(), *public_classes()]:
        text = inspect.getdoc(value) or ""
        assert not re.search(r"^\w+(, \w+)*   +\S|^(Returns|Raises) \w", text, re.MULTILINE), (value, text)
