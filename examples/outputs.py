"""Write the outputs that pages show anew: what the last command of a ```sh block prints goes into the ```text below it.

make run && .venv/bin/headwise train tale --preset llama --heads 8 --kv-heads 2 --steps 150 --out runs/tale
.venv/bin/python examples/outputs.py docs/command.md docs/index.md

A text that ends with a line "..." keeps its length; one that begins with it begins at the line that stands below. Long
lines are folded, as a terminal folds them. Commands run in the folder of the project; the runs must be there.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

WIDTH = 100
ROOT = Path(__file__).resolve().parents[1]
SHOWN = re.compile(r"^```sh\n(?P<commands>[^`]*?)```\n```text\n(?P<output>[^`]*?)```$", re.MULTILINE)


def printed(line: str) -> list[str]:
    """What a command line prints where there is no colour and a line has 100 characters."""
    words = shlex.split(line, comments=True)
    assert words[0] == "headwise", line
    environment = {**os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-m", *words]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode > 1:  # 1 is the verdict of `check` and `learn`
        raise SystemExit(f"{line}\n{result.stderr}")
    rows: list[str] = []
    for row in result.stdout.strip("\n").splitlines():
        indent = " " * (len(row) - len(row.lstrip()))
        rows += [row.rstrip()] if len(row) <= WIDTH else textwrap.wrap(row, WIDTH, subsequent_indent=indent)
    return rows


def renewed(match: re.Match[str]) -> str:
    command = match["commands"].strip().splitlines()[-1]
    rows, before = printed(command), match["output"].splitlines()
    if before[0].strip() == "...":  # it begins at the line that follows
        rows = ["...", *rows[rows.index(before[1]) :]]
    if before[-1].strip() == "...":
        rows = [*rows[: len(before) - 1], "..."]
    output = "".join(f"{row}\n" for row in rows)
    return f"```sh\n{match['commands']}```\n```text\n{output}```"


def main() -> None:
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(SHOWN.sub(renewed, page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
