"""make torture: four campaigns against the package, for as long as one likes.

    python tests/torture --minutes 60                     # each campaign to its count, or for its share of the time
    python tests/torture --until kills=50,files=500       # with other counts
    python tests/torture --only files --seed 17 --cases 1 # one case again, as a failure names it

Every case is drawn from its seed. What fails is kept with its files under build/torture; summary.json and summary.txt
lie there, too, and are written anew every few seconds. Ctrl-C ends all, and leaves them as they stand.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # a fork of a process whose torch has run threads may hang
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import differential
import files
import kills
import leaks
import torch

import headwise.cli
import headwise.models.hf
import headwise.reshape.share
import headwise.view.report  # noqa: F401  imported once, here: its children start in milliseconds

# In their order: module, share of the time that is left with those that follow, what is counted and how many of it.
CAMPAIGNS: dict[str, tuple[Any, float, str, int]] = {
    "cycles": (leaks, 0.05, "watch cycles", 1_000),
    "calls": (differential, 0.25, "random calls", 100_000),
    "files": (files, 0.5, "damaged files", 10_000),
    "kills": (kills, 1.0, "kills", 1_000),
}
KEPT = 20  # failures of a campaign and worker whose files are kept
OFTEN = 5.0  # seconds between two summaries


class Worker:
    """A process that takes every so manieth seed of each campaign, and notes in a file what it met."""

    def __init__(self, number: int, given: argparse.Namespace, aims: dict[str, int], place: Path) -> None:
        self.number, self.given, self.aims, self.place = number, given, aims, place
        self.results: dict[str, dict[str, Any]] = {}
        self.parent, self.noted = os.getpid(), 0.0

    def work(self) -> None:
        until = time.monotonic() + 60 * self.given.minutes
        for name in self.aims:
            self.campaign(name, time.monotonic() + CAMPAIGNS[name][1] * (until - time.monotonic()))
        for name in self.aims:  # what its share was too short for
            self.campaign(name, until)
        self.note(now=True)

    def campaign(self, name: str, until: float) -> None:
        """Cases one after the other until this worker has made its part of the count, or time is up."""
        module, aim = CAMPAIGNS[name][0], -(-self.aims[name] // self.given.workers)
        nothing: dict[str, Any] = {"count": 0, "cases": 0, "seconds": 0.0, "met": Counter(), "failures": []}
        result = self.results.setdefault(name, nothing)
        before, began, case = result["seconds"], time.monotonic(), self.place / f"case-{self.number}"
        while self.goes_on(result, aim, until):
            seed = self.given.seed + self.number + self.given.workers * result["cases"]
            result["now"], result["cases"] = seed, result["cases"] + 1
            case.mkdir()
            try:
                met, count = module.case(seed, case, self.place / name)
                result["met"][met] += 1
                result["count"] += count
            except Exception as error:
                self.failed(name, seed, error, case)
            shutil.rmtree(case, ignore_errors=True)
            result["seconds"] = round(before + time.monotonic() - began, 1)
            self.note()
        result.pop("now", None)

    def goes_on(self, result: dict[str, Any], aim: int, until: float) -> bool:
        if os.getppid() != self.parent:
            sys.exit("the process that started this one has ended")
        if self.given.cases is not None:
            return bool(result["cases"] < self.given.cases)
        return bool(result["count"] < aim and time.monotonic() < until)

    def failed(self, name: str, seed: int, error: Exception, case: Path) -> None:
        again = f"python tests/torture --only {name} --seed {seed} --cases 1"
        failures = self.results[name]["failures"]
        failures.append({"seed": seed, "what": str(error) or repr(error), "again": again})
        print(f"  {again}: {failures[-1]['what'][:300]}", flush=True)
        if len(failures) <= KEPT:
            kept = self.given.out / "failures" / f"{name}-{seed}"
            with contextlib.suppress(shutil.Error):  # of what cannot be copied, such as pipes
                shutil.copytree(case, kept, dirs_exist_ok=True, symlinks=True, ignore=_no_files)
            kept.mkdir(parents=True, exist_ok=True)
            (kept / "failure.txt").write_text(f"{again}\n{traceback.format_exc()}")

    def note(self, now: bool = False) -> None:
        if now or time.monotonic() - self.noted > OFTEN / 2:
            path = self.place / f"worker-{self.number}.json"
            path.with_suffix(".new").write_text(json.dumps(self.results))
            path.with_suffix(".new").replace(path)
            self.noted = time.monotonic()


def _no_files(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if (path := Path(folder) / name).is_fifo() or path.is_symlink()]


def start(worker: Worker) -> int:
    """Fork it, out of the reach of Ctrl-C, which is for the first process."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    code = 1
    try:
        worker.work()
        code = 0
    except SystemExit as stop:
        code = 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            worker.note(now=True)
        os._exit(code)


def summary(given: argparse.Namespace, aims: dict[str, int], place: Path, began: float, ended: dict[int, int]) -> Any:
    """What all workers have noted so far."""
    now = datetime.now(UTC)
    whole: dict[str, Any] = {"date": now.date().isoformat(), "minutes": round((time.monotonic() - began) / 60, 1)}
    whole |= {"seed": given.seed, "workers": given.workers, "campaigns": {}}
    noted = [json.loads(path.read_text()) for path in sorted(place.glob("worker-*.json"))]
    for name, aim in aims.items():
        parts = [results[name] for results in noted if name in results]
        met = sum((Counter(part["met"]) for part in parts), Counter[str]())
        whole["campaigns"][name] = {
            "counted": CAMPAIGNS[name][2],
            "count": sum(part["count"] for part in parts),
            "aim": aim,
            "cases": sum(part["cases"] for part in parts),
            "seconds": round(sum(part["seconds"] for part in parts), 1),
            "failures": [failure for part in parts for failure in part["failures"]],
            "met": dict(sorted(met.items())),
        }
    for number, code in ended.items():
        if code:
            at = {name: part["now"] for name, part in noted[number].items() if "now" in part}
            whole.setdefault("died", []).append(f"worker {number} ended with {code} near seed {at}")
    return whole


def write(whole: dict[str, Any], out: Path) -> str:
    """summary.json, and as text; the latter is returned."""
    lines = [f"{whole['date']}, {whole['minutes']:g} minutes, {whole['workers']} workers, seed {whole['seed']}"]
    for name, result in whole["campaigns"].items():
        lines.append(
            f"{name}: {result['count']:,} {result['counted']} of {result['aim']:,} in {result['cases']:,} cases and "
            f"{result['seconds']:,.0f} s of the workers, {len(result['failures'])} failed"
        )
        lines += [f"  {count:6,}  {label}" for label, count in result["met"].items()]
        lines += [f"  FAILED  {failure['again']}: {failure['what'][:300]}" for failure in result["failures"]]
    lines += whole.get("died", [])
    for name, text in (("summary.json", json.dumps(whole, indent=2)), ("summary.txt", "\n".join(lines))):
        (out / f"{name}.new").write_text(text + "\n")
        (out / f"{name}.new").replace(out / name)
    return "\n".join(lines)


def follow(pids: dict[int, int], tell: Any) -> dict[int, int]:
    """Until all workers have ended, or Ctrl-C; their exit codes by number."""
    ended: dict[int, int] = {}
    try:
        while pids:
            time.sleep(OFTEN if os.isatty(2) else OFTEN * 2)
            for pid in list(pids):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended[pids.pop(pid)] = os.waitstatus_to_exitcode(status)
            tell(ended)
    except KeyboardInterrupt:
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        for pid in pids:
            os.waitpid(pid, 0)
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=75.0, help="at most")
    parser.add_argument("--seed", type=int, default=time.time_ns() // 10**9 % 10**9)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", choices=CAMPAIGNS)
    parser.add_argument("--cases", type=int, help="as many of each campaign, by one worker")
    parser.add_argument("--until", default="", help="other counts, as kills=50,files=500")
    parser.add_argument("--out", type=Path, default=Path("build") / "torture")
    given = parser.parse_args()
    given.workers = 1 if given.cases is not None else given.workers
    aims = {name: aim for name, (*_, aim) in CAMPAIGNS.items()}
    aims |= {name: int(count) for name, _, count in (part.partition("=") for part in given.until.split(",") if part)}
    aims = {name: aims[name] for name in ([given.only] if given.only else CAMPAIGNS)}
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    began, memory = time.monotonic(), Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, ignore_cleanup_errors=True) as temporary:
        place = Path(temporary)
        for name in aims:
            print(f"{name}: preparing", flush=True)
            CAMPAIGNS[name][0].prepare(place / name)
        print(f"seed {given.seed}, {given.workers} workers; {given.out / 'summary.txt'} has the figures", flush=True)
        pids = {start(Worker(number, given, aims, place)): number for number in range(given.workers)}

        def tell(ended: dict[int, int]) -> str:
            return write(summary(given, aims, place, began, ended), given.out)

        text = tell(follow(pids, tell))
    print(text)
    sys.exit(any(word in text for word in ("  FAILED  ", " near seed ")))


if __name__ == "__main__":
    main()
