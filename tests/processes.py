"""Several processes as torchrun starts them, forked from one that has torch already: a start takes no second."""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
# transformers among it, which takes longer to import than most of what is tested takes to run.
FORKS.set_forkserver_preload(["headwise.gpt.run", "headwise.heads.survey", "headwise.models.hf"])


@dataclass
class Ended:
    """What a process left behind."""

    code: int | None
    out: str
    err: str


class Started:
    """The ranks of one group, at work."""

    def __init__(self, folder: Path, world: int, target: Callable[..., None], *arguments: Any) -> None:
        folder.mkdir(exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.folder, self.began = folder, time.monotonic()
        shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        shared |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1}
        self.processes: list[BaseProcess] = []
        for rank in range(world):
            variables = {name: str(value) for name, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            process = FORKS.Process(target=_work, args=(folder, variables, target, arguments))
            process.start()
            self.processes.append(process)

    def wait(self, seconds: float = 300) -> list[Ended]:
        """The end of all; those that are still there after so many seconds are killed, and have no code."""
        end = time.monotonic() + seconds
        codes = []
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
            codes.append(process.exitcode)
            process.kill()
        said = [[(self.folder / f"{rank}.{name}").read_text() for name in ("out", "err")] for rank in range(len(codes))]
        return [Ended(code, *texts) for code, texts in zip(codes, said, strict=True)]


def together(folder: Path, world: int, target: Callable[..., None], *arguments: Any) -> list[Ended]:
    """Run `target(*arguments)` in so many processes, to their end."""
    return Started(folder, world, target, *arguments).wait()


def _work(folder: Path, variables: dict[str, str], target: Callable[..., None], arguments: Sequence[Any]) -> None:
    import torch

    os.environ.update(variables)
    torch.set_num_threads(1)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{variables['RANK']}.{name}", os.O_WRONLY | os.O_CREAT), number)
    target(*arguments)
