"""A few cases of the torture command, so that it keeps working; `make torture` runs it in earnest."""

import json
import random
import shlex
import sys
from pathlib import Path

import pytest
import typer

sys.path.insert(0, str(Path(__file__).with_name("torture")))
import damage
import differential
import files
import kills
from children import FailedError, check_refusal
from safetensors.numpy import save

from headwise.cli.app import app


def test_random_calls(tmp_path: Path) -> None:
    met = {differential.case(seed, tmp_path, tmp_path)[0] for seed in (0, 1, 3, 4, 23)}
    assert met == {"attend", "gradients through a cache"}


def test_damage_is_done_and_repeats() -> None:
    from numpy import arange

    contents = {"a.safetensors": save({"x": arange(9.0), "y": arange(3.0)}), "b.txt": b"the cat\nthe dog\n"}
    contents |= {"c.index.json": json.dumps({"weight_map": {"x": "a.safetensors"}}).encode()}
    for name, content in contents.items():
        for how, way in (damage.BYTES | damage.ways(Path(name))).items():
            made = [way(content, random.Random(seed)) for seed in range(9)]
            assert made == [way(content, random.Random(seed)) for seed in range(9)], how
            assert any(after != content for after in made), how


def test_what_counts_as_a_refusal() -> None:
    check_refusal(2, "reading\nheadwise: there is no such file; pass another\n")
    for code, said in (
        (1, "headwise: x"),
        (2, "nothing"),
        (2, "headwise: x\nheadwise: y"),
        (2, "headwise: this is a bug"),
    ):
        with pytest.raises(FailedError, match="no clear refusal"):
            check_refusal(code, said)


def test_its_command_lines_have_options_that_exist() -> None:
    group = typer.main.get_command(app)
    lines = [shlex.split(line) for line in (*files.COMMANDS.values(), files.HEAL)]
    lines += [[str(word) for word in kills.arguments(name, Path("base"), Path("out"))] for name in kills.NAMES]
    for name, *words in lines:
        command = group.commands[name]  # type: ignore[attr-defined]
        shown = command.get_params(command.make_context(name, [], resilient_parsing=True))
        known = {option for parameter in shown for option in (*parameter.opts, *parameter.secondary_opts)}
        asked = {word for word in words if word.startswith("--")}
        assert asked - {"--json", "--lang"} <= known, name
