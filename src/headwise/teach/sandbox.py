"""A learner's file in a process of its own: it may loop, exit, fork or write, and nothing of the caller's is harmed.

The process has a time, a memory limit and an empty folder to stand in; what the file prints goes nowhere. An audit hook
refuses to start processes, to open connections, to send signals, and to write or remove anything outside that folder.
It guards against accidents, not against malice.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from headwise.errors import HeadwiseError, unknown
from headwise.markup import listed
from headwise.teach.catalogue import words
from headwise.teach.source import Source, candidates, kind_of
from headwise.teach.verdict import Verdict

MEMORY = 4 << 30  # bytes that the process may hold


def check_file(spec: str, options: Any, seconds: float) -> Verdict:
    """The verdict on FILE or FILE:NAME; the arguments are those of `headwise.check`."""
    path, name = _path_and_name(spec)
    say = words(options.lang)

    def unchecked(reason: str, kind: str = "") -> Verdict:
        return Verdict(name or path.name, kind, None, (), (), (reason,), options.lang)

    try:
        with tokenize.open(path) as file:
            source = Source(file.read(), str(path))
        definitions = source.definitions
    except SyntaxError as error:
        place = f" ({say['line']} {error.lineno}: {(error.text or '').strip()})" if error.lineno else ""
        return unchecked(f"{type(error).__name__}: {error.msg}{place}")
    except ValueError as error:
        return unchecked(str(error))
    if name is None:
        name = _only_candidate(source, path)
    elif name not in definitions:
        raise unknown(f"{path} defines no {name!r}", name, definitions)
    node = definitions[name]
    kind = kind_of(node) or ("layer" if isinstance(node, ast.ClassDef) else "function")
    request = {"path": str(path), "name": name, "kind": kind, "seconds": seconds}
    ended = run_apart("headwise.teach.sandbox", {**request, "options": dataclasses.asdict(options)}, seconds + 2)
    if ended.answer is not None:
        return Verdict.from_record(json.loads(ended.answer))
    if ended.code is None:
        # The line of the learner's file in which the time ended, as faulthandler wrote it.
        match = re.search(rf'File "{re.escape(str(path))}", line (\d+)', ended.trace)
        place = f" ({say['line']} {match[1]})" if match else ""
        return unchecked(say["too_long"].format(seconds=seconds) + place, kind)
    if ended.code in (-signal.SIGKILL, -signal.SIGXCPU):
        return unchecked(say["killed"].format(memory=MEMORY >> 30), kind)
    return unchecked(f"{say['exits']} ({ended.code})", kind)


def _path_and_name(spec: str) -> tuple[Path, str | None]:
    path, name = Path(spec), None
    if not path.exists() and ":" in spec:
        text, name = spec.rsplit(":", 1)
        path = Path(text)
    if not path.exists():
        raise HeadwiseError(f"there is no file {path}; pass FILE.py or FILE.py:NAME")
    if path.is_dir():
        raise HeadwiseError(f"{path} is a folder; pass a file of Python, FILE.py or FILE.py:NAME")
    if path.suffix == ".ipynb":
        raise HeadwiseError(f"{path} is a notebook; call hw.check(NAME) in one of its cells")
    if path.suffix != ".py":
        raise HeadwiseError(f"{path} is no file of Python: its name does not end in .py")
    return path.resolve(), name


def _only_candidate(source: Source, path: Path) -> str:
    names = list(candidates(source))
    if not names:
        raise HeadwiseError(
            f"{path.name} has nothing that looks like attention: no class with forward or __call__, no function of "
            f"q, k and v; pass {path.name}:NAME"
        )
    if len(names) > 1:
        raise HeadwiseError(f"{path.name} has several candidates, {listed(names, 6)}; pass {path.name}:{names[0]}")
    return names[0]


class Ended(NamedTuple):
    """What a process left: its answer, None where there is none; its exit code, None where time ended it; a trace."""

    answer: str | None
    code: int | None
    trace: str


def run_apart(module: str, request: dict[str, Any], seconds: float) -> Ended:
    """Run a module in a process of its own, which ends after some seconds, with all that it has started.

    The module finds the request as JSON in the file that its first argument names, and in it, under `answer` and
    `trace`, the files to write. It stands in an empty folder, which it may fill.
    """
    with tempfile.TemporaryDirectory(prefix="headwise-check-") as folder:
        answer, trace, asked = (Path(folder) / name for name in ("answer.json", "trace.txt", "request.json"))
        work = Path(folder) / "work"
        work.mkdir()
        asked.write_text(json.dumps({**request, "answer": str(answer), "trace": str(trace)}), encoding="utf-8")
        path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(work)}
        environment |= {"TMPDIR": str(work), "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(asked)],
            cwd=work, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        written = answer.read_text(encoding="utf-8") if answer.exists() else None
        return Ended(written, code, trace.read_text(errors="replace") if trace.exists() else "")


def alone(request: dict[str, Any], text: str, work: Callable[[], Any]) -> None:
    """In the process of its own: limit what code of that text may do, write the answer of `work` as JSON, and end."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if re.search(r"^\s*(import|from) torch", text, re.M):
        import torch  # before the guard stands: it opens what it needs

        torch.set_num_threads(1)
    guard(Path.cwd(), request["answer"])
    Path(request["answer"]).write_text(json.dumps(work()), encoding="utf-8")
    os._exit(0)  # threads and handlers of the learner's code are not waited for


def _main() -> None:
    """In the process of its own: load the file and check it."""
    import faulthandler

    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    trace = Path(request["trace"]).open("w")  # noqa: SIM115  # faulthandler writes into it until the end
    faulthandler.dump_traceback_later(request["seconds"] + 1, file=trace)
    from headwise.teach import check, examine

    source = Source(Path(request["path"]).read_text(encoding="utf-8", errors="replace"), request["path"])
    options = examine.Options(**request["options"])
    target = examine.Target(None, request["name"], source)

    def load(target: Any, kind: str, options: Any) -> Verdict:
        namespace = _loaded(request["path"])
        target.thing, target.namespace = namespace[request["name"]], namespace
        return check.engine(kind)(target, kind, options)

    def verdict() -> dict[str, Any]:
        return dataclasses.asdict(check.judged(target, request["kind"], options, request["seconds"], load))

    alone(request, source.text, verdict)


def _loaded(path: str) -> dict[str, Any]:
    import importlib.util

    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location("learner", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["learner"] = module
    spec.loader.exec_module(module)
    return vars(module)


FORBIDDEN = ("os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "os.killpg",
             "subprocess.Popen", "socket.connect", "socket.bind", "pty.spawn")  # fmt: skip
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown", "os.link",
           "os.symlink", "shutil.rmtree", "shutil.move", "shutil.copyfile", "os.utime")  # fmt: skip


class RefusedError(PermissionError):
    """Something that the guard does not allow."""


def guard(work: Path, answer: str) -> None:
    """From now on this process cannot touch anything outside its folder."""

    def inside(path: Any) -> bool:
        if isinstance(path, int):
            return True
        name = os.path.realpath(os.fsdecode(path))
        return name in (answer, os.devnull) or name.startswith(str(work.resolve()) + os.sep)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in FORBIDDEN:
            raise RefusedError(f"the file must not call {event} while it is checked")
        if event in CHANGES and not all(inside(p) for p in arguments if isinstance(p, str | bytes | os.PathLike)):
            raise RefusedError(f"the file must not change anything while it is checked: {event} {arguments[0]}")
        if event == "open" and arguments[0] is not None and not isinstance(arguments[0], int):
            mode, flags = arguments[1], arguments[2]
            writes = (isinstance(mode, str) and set(mode) & set("wax+")) or (
                mode is None and isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
            if writes and not inside(arguments[0]):
                raise RefusedError(f"the file must not write {os.fsdecode(arguments[0])} while it is checked")

    sys.addaudithook(hook)


if __name__ == "__main__":
    _main()
