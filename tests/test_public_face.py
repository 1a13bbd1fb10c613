"""The names of `import headwise as hw`: all there, typed, and honest where a library is missing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import headwise as hw

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
        [sys.executable, "-c", WITHOUT_TORCH + code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_name_is_there() -> None:
    assert len(hw.__all__) == len(set(hw.__all__)) and set(hw.__all__) == set(dir(hw))
    for name in hw.__all__:
        assert getattr(hw, name) is not None
    assert not hasattr(hw, "attentions")


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


def test_without_torch_a_name_is_missing_and_says_what_to_install() -> None:
    assert run("print(hasattr(hw, 'watch'), hasattr(hw, 'GPT'), hasattr(hw, 'attend'), hasattr(hw, 'price'))") == (
        "False False True True"
    )
    code = "try:\n    hw.watch\nexcept HeadwiseError as error:\n    print(isinstance(error, AttributeError), error)"
    assert run(code) == ("True headwise.watch needs torch, which is not installed: pip install 'headwise[torch]'")


def test_without_torch_a_model_is_priced() -> None:
    assert run("print(hw.price('gpt2').parameters.total)") == "124439808"
