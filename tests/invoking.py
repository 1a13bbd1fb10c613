"""The command line, run within the process of a test, or in one of its own."""

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest

from headwise import cli


class Outcome(NamedTuple):
    """What a run of the command left behind."""

    code: int
    out: str
    err: str


Invoke = Callable[..., Outcome]
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def start(*arguments: object, before: Callable[[], object] = int, **options: Any) -> subprocess.Popen[str]:
    """The command in a process of its own, in which Ctrl-C works; `before` is called there first."""

    def listen() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        before()

    command = [sys.executable, "-m", "headwise", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", "COLUMNS": "100"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    return subprocess.Popen(command, env=environment, preexec_fn=listen, **pipes | options)


def process(*arguments: object, **options: Any) -> Outcome:
    """What such a process leaves behind."""
    child = start(*arguments, **options)
    out, err = child.communicate(timeout=200)
    if "--json" in arguments and out:
        check_document(out)
    return Outcome(child.returncode, out or "", err or "")


def interrupted(*_: object, **__: object) -> None:
    """Takes the place of a function: Ctrl-C comes when it is called."""
    raise KeyboardInterrupt


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_refused(outcome: Outcome, *words: str, code: int = 2) -> None:
    """One line that begins with the name of the command, the last on standard error, and none of Python's own."""
    lines = outcome.err.splitlines()
    assert (outcome.code, outcome.out) == (code, "") and "Traceback" not in outcome.err, outcome
    assert [line for line in lines if line.startswith("headwise: ")] == lines[-1:], outcome.err
    assert [word for word in words if word not in lines[-1]] == [], outcome.err


def check_document(printed: str) -> None:
    """What a command printed with --json is one document of the schema, and has no field besides."""
    document = json.loads(printed, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    validator(document["schema"].split("-")[1]).validate(document)


@functools.cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    """For one entry of the schema, in which no field may be added here."""
    sys.path.append(str(EXAMPLES))
    import schema_page

    schema = closed(json.loads(json.dumps(schema_page.schema())))
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{kind}", "$defs": schema["$defs"]})


def closed(schema: Any) -> Any:
    """The same schema for objects that have no fields but those that it names."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    more = {"additionalProperties": False} if isinstance(schema.get("required"), list) else {}
    return {name: closed(each) for name, each in schema.items()} | more


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Invoke:
    """Runs the command in this process, without lines of progress, which depend on how busy the machine is.

    What it prints with --json must be a document of the schema.
    """
    monkeypatch.setattr("headwise.view.Progress.FIRST_GAP", 3600.0)

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["headwise", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a command that Ctrl-C ended hears no second one
        printed = capsys.readouterr()
        if "--json" in arguments and printed.out:
            check_document(printed.out)
        return Outcome(int(stop.value.code or 0), printed.out, printed.err)

    return run
