"""A learner's file in a process of its own, with limits on time and memory and a temporary folder to stand in.

It guards against accidents: a loop that never ends, an exit, too much memory, a file left behind. It is no sandbox
against malice, for the code has all the rights of the person who runs it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from headwise.errors import HeadwiseError

# In bytes, and round: 4 GiB that the process may hold, 1 GiB of a file that it writes. A check needs far less.
MEMORY = 4 << 30
LARGEST_FILE = 1 << 30
# What code says that wants torch. `nn.` alone: imports that are missing are lent.
TORCH = re.compile(r"\btorch\b|\bnn\.")


class Ended(NamedTuple):
    """What a process left."""

    answer: str  # JSON; empty where there is none
    # its exit code, -9 where signal 9 ended it; None where it ran out of time
    code: int | None
    trace: str  # what it wrote of where it stood; empty where it wrote nothing


def require_torch(name: str, code: str) -> None:
    """Refuse code that wants torch where it is not installed. `code` is without comments, which may name it."""
    if TORCH.search(code) and importlib.util.find_spec("torch") is None:
        raise HeadwiseError(f"{name} needs torch: pip install 'headwise[torch]'")


def run_apart(module: str, request: dict[str, Any], seconds: float) -> Ended:
    """Run a module in a process of its own, which ends after some seconds, with its children.

    The module finds the request as JSON in the file that its first argument names, and in it, under `answer` and
    `trace`, the files to write. It stands in an empty folder, which is removed at the end.
    """
    with tempfile.TemporaryDirectory(prefix="headwise-check-") as folder:
        answer, trace, asked = (
            Path(folder) / name for name in ("answer.json", "trace.txt", "request.json")
        )
        work = Path(folder) / "work"
        work.mkdir()
        asked.write_text(
            json.dumps({**request, "answer": str(answer), "trace": str(trace)}),
            encoding="utf-8",
        )
        # This package comes first, so that the process runs the same one. An empty entry would be its own folder.
        path = os.pathsep.join(
            [
                str(Path(__file__).parents[2]),
                *filter(None, [os.environ.get("PYTHONPATH")]),
            ]
        )
        # No graphics card, no window of a plot, one thread; caches and temporary files go into its folder.
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(work),
            "TMPDIR": str(work),
            "CUDA_VISIBLE_DEVICES": "",
            "MPLBACKEND": "agg",
            "OMP_NUM_THREADS": "1",
        }
        silent = subprocess.DEVNULL
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(asked)],
            # a session, and so a group, of its own: `killpg`
            cwd=work, env=environment, start_new_session=True,
            stdin=silent, stdout=silent, stderr=silent,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(OSError):  # of a group that has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        written = (
            answer.read_text(encoding="utf-8") if code == 0 and answer.exists() else ""
        )
        return Ended(
            written, code, trace.read_text(errors="replace") if trace.exists() else ""
        )


def alone(request: dict[str, Any], text: str, work: Callable[[], Any]) -> None:
    """In the process of its own: set its limits, write the answer of `work` as JSON, and end.

    request  as `run_apart` wrote it, with `answer`, the file to write
    text     of the code that `work` runs, which tells whether it wants torch
    """
    with contextlib.suppress(ImportError):  # Windows has no such limits
        import resource

        # The data alone, not all addresses: libraries such as torch map several times as much, and use little of it.
        # No core: no dump of the memory where it crashes.
        limits = {"DATA": MEMORY, "CORE": 0, "FSIZE": LARGEST_FILE}
        for name, most in limits.items():
            # one that is lower already stays
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    # without torch a comment named it: see `require_torch`
    if TORCH.search(text) and importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)
    Path(request["answer"]).write_text(json.dumps(work()), encoding="utf-8")
    os._exit(0)  # threads and handlers of the learner's code are not waited for
