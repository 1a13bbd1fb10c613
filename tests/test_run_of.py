"""Which run a reshaped model comes from."""

import json
from pathlib import Path

from cases import refuses

from headwise.families import run_of


def folder(path: Path, run: str | None = None) -> Path:
    path.mkdir()
    if run is not None:
        (path / "headwise.json").write_text(json.dumps({"run": run}))
    return path


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    child = folder(tmp_path / "child", "../run")
    for text in ("{", "[]", '{"run": 3}', '"run"'):
        (child / "headwise.json").write_text(text)
        refuses(lambda: run_of(child), r"headwise\.json")
