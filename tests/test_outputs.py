"""No output takes the place of an input, of a file of a model, or of another output: refused before any work."""

import json
import os
from pathlib import Path

import pytest
from cases import every, read_table
from invoking import Invoke

from headwise.cli.app import check_outputs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without weights, a model that comes of it, and texts: no command may get as far as to read them."""
    place = tmp_path_factory.mktemp("place")
    for name in ("run", "child", "units", "texts", "links"):
        (place / name).mkdir()
    (place / "t.csv").write_text("the cat sat\n")
    (place / "t.txt").write_text("the cat sat\n")
    (place / "book.txt").write_text("the dog sat\n")
    (place / "texts" / "a.md").write_text("")
    for name in ("config.json", "model.safetensors", "report.html", "table.csv"):
        (place / "run" / name).write_text("{}")
    (place / "run" / "run.json").write_text(json.dumps({"settings": {"text": [str(place / "book.txt")]}}))
    (place / "child" / "config.json").symlink_to("../links/blob")  # as the cache of a hub has it
    (place / "links" / "blob").write_text("{}")
    (place / "child" / "headwise.json").write_text(json.dumps({"run": "../run"}))
    (place / "links" / "soft.csv").symlink_to("../t.csv")
    (place / "links" / "hard.csv").hardlink_to(place / "t.csv")
    (place / "links" / "run").symlink_to("../run")
    (place / "units" / "unit-1.json").write_text("{}")
    return place


REFUSED = read_table("refusals")["outputs"]


@every("words,said", REFUSED.items())
def test_what_would_be_lost_is_refused(words: str, said: str, place: Path, invoke: Invoke) -> None:
    before = {path: (path.lstat().st_ino, path.lstat().st_mtime_ns) for path in place.rglob("*")}
    code, printed, message = invoke(*(word.replace("@", f"{place}/") for word in words.split()))
    assert (code, printed) == (2, "") and message.count("\n") == 1, (printed, message)
    assert said.replace("@", f"{place}/") in message.replace(os.path.realpath(place), str(place)), message
    assert {path: (path.lstat().st_ino, path.lstat().st_mtime_ns) for path in place.rglob("*")} == before


def test_what_harms_nobody_is_allowed(place: Path) -> None:
    run = place / "run"
    check_outputs([run, place / "t.txt", place / "texts"], html=run / "report.html", out=[run / "table.csv"])
    check_outputs(["/dev/stdin"], out=[Path("/dev/stdout")], html=Path("/dev/stdout"))
