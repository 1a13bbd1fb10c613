"""Units on the disk and side by side: each is kept as soon as it is done, and none is done twice.

A file is named by a digest of all that decides its scores: experiments that share an arm share its units, and a run
that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError
from headwise.files import read_json, write_whole
from headwise.lab.compare.experiment import Report, Scored, Unit, run_unit
from headwise.records import from_json


class Store:
    """A folder of finished units."""

    def __init__(self, folder: Path) -> None:
        if folder.exists() and not folder.is_dir():
            raise HeadwiseError(f"--out {folder} is a file; pass a folder")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        for path in folder.iterdir():  # what killed processes left half-written; others may be writing here just now
            unfinished = re.fullmatch(r"\.unit-[0-9a-f]{16}\.json\.(\d+)\.tmp", path.name)
            if unfinished and not _is_running(int(unfinished[1])):
                path.unlink(missing_ok=True)

    def path(self, key: dict[str, Any]) -> Path:
        return self.folder / f"unit-{_digest(key)[:16]}.json"

    def read(self, key: dict[str, Any]) -> Scored | None:
        path = self.path(key)
        if not path.exists():
            return None
        try:
            saved = from_json(dict[str, Any], read_json(path))
            if saved.get("key") != json.loads(json.dumps(key)):
                raise HeadwiseError("it is another unit")
            if saved.get("sha256", digest := _digest(saved.get("scored"))) != digest:
                raise HeadwiseError("its scores are not those that were written")
            scored: Scored = from_json(Scored, saved.get("scored"), "scored")
        except HeadwiseError as error:
            raise HeadwiseError(f"{path} is damaged ({error}); remove it or take another --out") from None
        return scored

    def write(self, key: dict[str, Any], label: str, scored: Scored) -> None:
        document = {"unit": label, "key": key, "scored": asdict(scored), "sha256": _digest(asdict(scored))}
        write_whole(self.path(key), json.dumps(document, indent=2) + "\n")


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _is_running(process: int) -> bool:
    try:
        if os.name == "posix":  # elsewhere signal 0 is no question, and every process counts as running
            os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it is somebody else's
    return True


def run_units(units: Sequence[Unit], store: Store, workers: int, report: Report) -> dict[Path, Scored]:
    """All units, from the store or done now in `workers` processes of one thread: the unit's file -> its scores."""
    keys = {store.path(key): (unit, key) for unit in units for key in [unit.key]}
    done = {path: scored for path, (_, key) in keys.items() if (scored := store.read(key)) is not None}
    missing = {path: pair for path, pair in keys.items() if path not in done}
    if done:
        report(f"{len(done)} units were finished before, in {store.folder}", len(done), len(keys))
    # Closed at once when this loop is left by Ctrl-C: the workers would otherwise be waited for.
    with closing(_results({path: unit for path, (unit, _) in missing.items()}, workers)) as results:
        for path, scored in results:
            unit, key = missing[path]
            store.write(key, unit.label, scored)
            done[path] = scored
            report(f"{unit.label}: {_words(unit, scored)}", len(done), len(keys))
    return done


def _words(unit: Unit, scored: Scored) -> str:
    if scored.failure is not None:
        return scored.failure
    metric = unit.experiment.metrics[0]
    return f"{metric.words} {scored.scores[metric.name]:.3f}, {scored.cpu_seconds:.1f} s of processor time"


def _results(units: dict[Path, Unit], workers: int) -> Generator[tuple[Path, Scored], None, None]:
    if workers == 1 or len(units) <= 1:
        yield from ((path, run_unit(unit)) for path, unit in units.items())
        return
    with _processes(min(workers, len(units))) as pool:
        with _deaf_to_interrupts():
            futures = {pool.submit(run_unit, unit): path for path, unit in units.items()}
        for future in as_completed(futures):
            try:
                scored = future.result()
            except BrokenProcessPool:
                raise HeadwiseError(
                    "a worker process died, perhaps for want of memory; finished units are kept: "
                    "run the same command again, with --workers 1"
                ) from None
            yield futures[future], scored


@contextmanager
def _processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes end with this block, in the middle of a unit where it is left by an error or Ctrl-C."""
    before = set(multiprocessing.active_children())
    # Not forked: a fork of a process whose torch has run threads may hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_end_with_parent)
    try:
        yield pool
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _end_with_parent() -> None:
    """In a worker: a thread that waits for the end of the process that started it, and ends the worker then."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)  # at once, in the middle of a unit: nobody is left to take its scores

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes that start in this block ignore Ctrl-C, which reaches all of a terminal's: the first one decides."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
