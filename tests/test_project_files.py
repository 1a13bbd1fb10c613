"""What stands around the code for strangers: the hook and the workflow do what they say."""

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_hook_stops_at_bugs_and_passes_what_is_no_attention(tmp_path: Path) -> None:
    """With a `headwise` that answers by the names of files: 0 right, 1 a bug, 2 nothing to check."""
    (hook,) = read(ROOT / ".pre-commit-hooks.yaml")
    command = tmp_path / "headwise"
    command.write_text('#!/bin/sh\necho "$@" >> calls\ncase "$2" in *wrong*) exit 1;; *other*) exit 2;; esac\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}

    def code(*files: str) -> int:
        return subprocess.run([*shlex.split(hook["entry"]), *files], cwd=tmp_path, env=environment).returncode

    assert code("right.py", "other.py", "a name.py") == 0
    assert (tmp_path / "calls").read_text() == "check right.py\ncheck other.py\ncheck a name.py\n"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(hook["additional_dependencies"]) <= set(extras["torch"])
    assert hook["entry"] in (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    assert code("right.py", "wrong.py", "right.py") == 1 and code("other.py", "wrong.py") == 1 and code() == 0


def test_the_workflow_and_hooks_run_the_makefile() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    commands = []
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in read(path)["jobs"].values():
            assert job["runs-on"] and job["timeout-minutes"]
            commands += [step["run"] for step in job["steps"] if "run" in step]
    assert {"make test", "make package", "make docs"} == set(commands)
    assert all(command.removeprefix("make ") in targets for command in commands)
    hooks = [hook["entry"] for repo in read(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for entry in hooks:
        assert entry.replace(".venv/bin/", "$(BIN)/").replace(" --force-exclude", "") in makefile
