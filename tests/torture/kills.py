"""Work that is killed and resumed ends with the same bytes, leaves no unreadable state and nothing behind."""

import itertools
import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from children import TICKS, Child, FailedError, Patch, check_refusal, hurried, must, verified_in_a_fork

SIZE = ("--preset", "llama", "--layers", 1, "--width", 16, "--heads", 2, "--kv-heads", 2, "--context", 16)
TEXT = "the cat sat on the mat and the dog sat on the log . " * 60
FILES = ("model.safetensors", "config.json", "tokenizer.json", "film.jsonl")
NAMES = {"train": 6, "share": 3, "prune": 3, "heads": 3}  # how often each is chosen
NAMES |= {"standard input": 2, "replay": 2, "learn": 2}
WHOLE = "replay", "learn"  # of these all files are compared
RESUMED = "train", "standard input"  # the others go on, or begin again, by themselves
OVER = "nothing to resume", "exists", "not empty"  # is said of what was finished
WAYS = {"KILL": 6, "TERM": 3, "INT": 3, "INT INT": 2, "STOP CONT KILL": 2, "at a move": 4, "two": 2, "full disk": 2}
WAYS |= {"gone": 1, "left alone": 1}
MOMENTS = (1, 2, 3, 5, 8)  # at which one case is ended, at most
VERIFIED_OUTSIDE = 0.03  # cases in which a fresh process verifies, as it does for a user; that takes seconds
LEFT_AFTER, LOOK = 20.0, 0.02  # seconds that such processes have to end with their parent; and between two looks

seconds: dict[str, float] = {}  # of the processor that a command takes when it is left alone


def arguments(name: str, base: Path, out: Path) -> tuple[object, ...]:
    text = base / "text.txt"
    if name == "train":
        return "train", text, *SIZE, "--steps", 60, "--samples", 0, "--out", out
    if name == "standard input":
        return "train", "-", *SIZE, "--steps", 30, "--samples", 0, "--out", out
    if name == "replay":
        return "train", text, "--rung", "array", "--steps", 20, "--samples", 1, "--out", out, "--json"
    if name == "learn":
        return "learn", out, "--lang", "en"
    healed = "--text", text, "--heal", 12, "--out", out
    if name == "share":
        return "share", base / "train", "--kv-heads", 1, *healed
    if name == "prune":
        return "prune", base / "train", "--keep", 0.5, *healed
    corpus = "--text", text, "--tokens", 16, "--documents", 60
    return "heads", base / "train", *corpus, "--no-controls", "--ablate", "none", "--keep", out, "--json"


def prepare(base: Path) -> None:
    """Each command, left alone: what it makes lies under its name, and what it prints beside that."""
    base.mkdir()
    (base / "text.txt").write_text(TEXT)
    for name in NAMES:
        patches = hurried, verified_in_a_fork, typed(base / "text.txt")
        must(base, *arguments(name, base, base / f"{name}-first"), before=patches)  # imports what it needs
        printed, seconds[name] = must(base, *arguments(name, base, base / name), before=patches)
        (base / f"{name}.printed").write_text(printed)


def case(seed: int, place: Path, base: Path) -> tuple[str, int]:
    """One command, ended at random moments in one of these ways and resumed; and how often it was ended."""
    rng = random.Random(seed)
    name = rng.choices(list(NAMES), list(NAMES.values()))[0]
    how = rng.choices(list(WAYS), list(WAYS.values()))[0]
    outside = rng.random() < VERIFIED_OUTSIDE
    before: tuple[Patch, ...] = (hurried, typed(base / "text.txt"))
    before += () if outside else (verified_in_a_fork,)
    return f"{name}: {how}", Case(name, how, rng, place, base, before).run()


class Case:
    def __init__(self, name: str, how: str, rng: random.Random, place: Path, base: Path, before: tuple[Patch, ...]):
        self.name, self.how, self.rng, self.place, self.base, self.before = name, how, rng, place, base, before
        self.out = place / "out"
        self.given = list(arguments(name, base, self.out))

    def run(self) -> int:
        kills = 0
        if self.how == "gone":
            self.gone()
        elif self.how == "two" and self.rng.random() < 0.5:
            self.two()
        else:
            for _ in range(self.rng.choice(MOMENTS) if self.how != "left alone" else 0):
                killed = self.ended()
                kills += killed
                if not killed:
                    break
        if self.how != "gone":
            self.finish()
        return kills

    def start(self, *more: Patch) -> Child:
        resume = ["--resume"] if self.name in RESUMED else []
        return Child(self.place, *self.given, *resume, before=(*self.before, *more))

    def wait_a_while(self, child: Child, last: float = 0.0) -> float:
        """Until it has done some share of the work after `last`; returns that share."""
        share = last + self.rng.random() * (1 - last)
        child.work(share * seconds[self.name])
        time.sleep(self.rng.random() / TICKS)
        return share

    def ended(self) -> bool:
        """Begin, or go on, and end it somehow. Was it at work then?"""
        more = {"at a move": _dying, "full disk": _full}.get(self.how)
        child = self.start(*([] if more is None else [more(self.rng)]))
        if self.how == "two":
            other = self.start()
            self.wait_a_while(child)
            child.send(signal.SIGKILL)
            code, _, said = other.wait()
            if code:
                check_refusal(code, said)
        elif more is None:
            share = 0.0
            for word in self.how.split():
                share = share if word == "CONT" else self.wait_a_while(child, share)
                child.send(getattr(signal, f"SIG{word}"), group=word == "INT")
        code, _, said = child.wait()
        self.check_gone(child)
        if "INT" in self.how:  # Python drops one that comes while it forks, or is on its way out, and says so
            said = said.partition("Exception ignored in")[0]
        if "Traceback" in said or "this is a bug" in said or (code > 0 and code not in (2, 130)):
            raise FailedError(f"{self.name} after {self.how}: exit code {code}: {said[-600:]}")
        if self.how == "full disk" and code:
            check_refusal(code, said)
        return code < 0 or code == 130

    def check_gone(self, child: Child) -> None:
        """No process of it stays."""
        for waited in itertools.count():  # counted, for this process may be stopped meanwhile
            if not (others := child.others()):
                break
            if waited > LEFT_AFTER / LOOK:
                for pid in others:
                    os.kill(pid, signal.SIGKILL)
                raise FailedError(f"{self.name} after {self.how} leaves {len(others)} processes at work")
            time.sleep(LOOK)

    def finish(self) -> None:
        """Resume to the end, and compare with the one that was left alone."""
        child = self.start()
        code, printed, said = child.wait()
        if self.how == "left alone":
            seconds[self.name] = child.worked  # with as much other work as the machine has now
        marked = self.name == "learn" and code == 1  # its first file, which is not right yet
        if code and not marked and not (code == 2 and any(word in said for word in OVER)):
            raise FailedError(f"{self.name} does not resume: {code}: {said[-600:]}")
        left = [path.name for path in self.place.rglob("*") if _is_left(path)]
        if left:
            raise FailedError(f"{self.name} leaves {left}")
        alone = self.base / self.name
        if self.name == "heads":
            _same_numbers(printed, (self.base / "heads.printed").read_text())
        for file in compared(self.name, alone):
            if _bytes(alone / file) != _bytes(self.out / file):
                raise FailedError(f"{self.name}: {file} differs from that of the run that was left alone")
        if self.name in ("train", "standard input") and not (self.out / "report.html").exists():
            raise FailedError("train is finished, and has no report")

    def gone(self) -> None:
        """The folder vanishes: one clear line, or it was finished by then."""
        child = self.start()
        self.wait_a_while(child)
        for folder in (self.out, self.out.with_name("out.partial")):
            shutil.rmtree(folder, ignore_errors=True)
        code, _, said = child.wait()
        if code:
            check_refusal(code, said)

    def two(self) -> None:
        """Two at once on one folder: one works, the other is told."""
        codes = []
        for child in (self.start(), self.start()):
            code, _, said = child.wait()
            codes.append(code)
            if code:
                check_refusal(code, said)
        if 0 not in codes:
            raise FailedError(f"two {self.name} on one folder end with {codes}")


def compared(name: str, folder: Path) -> list[Path]:
    """The files of a result that are the same however often its work was killed, as paths within its folder."""
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    if name in WHOLE:
        return [path for path in files if path.name not in ("run.json", "progress.json")]  # a path, a number of tries
    return [path for path in files if str(path) in FILES]


def typed(text: Path) -> Patch:
    """Standard input is this text."""

    def patch() -> None:
        opened = os.open(text, os.O_RDONLY)
        os.dup2(opened, 0)
        os.close(opened)

    return patch


def _is_left(path: Path) -> bool:
    # The survey's lock stays: whoever removed it could remove that of another one.
    return path.suffix in (".tmp", ".partial") or (path.name == "lock" and not list(path.parent.glob("tally-*")))


def _bytes(path: Path) -> bytes:
    if not path.exists():
        raise FailedError(f"{path.name} is missing")
    return path.read_bytes()


def _same_numbers(printed: str, expected: str) -> None:
    """Means that were joined from parts are the same to the rounding of float64."""
    todo = [(json.loads(printed), json.loads(expected))]
    while todo:
        a, b = todo.pop()
        if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
            todo += [(a[key], b[key]) for key in a]
        elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            todo += zip(a, b, strict=True)
        elif isinstance(a, float) and isinstance(b, float):
            if not (a == b or abs(a - b) <= 1e-9 * max(1.0, abs(b))):
                raise FailedError(f"heads: {a} is {b} in the one that was left alone")
        elif a != b:
            raise FailedError(f"heads: {a!r:.200} is {b!r:.200} in the one that was left alone")


def _dying(rng: random.Random) -> Patch:
    """Killed right before or after a file gets its name, or when its bytes go to the disk."""
    left, after = [rng.randrange(30)], rng.random() < 0.5

    def wrap(call: Callable[..., object]) -> Callable[..., object]:
        def dying(*given: object, **named: object) -> object:
            left[0] -= 1
            if left[0] < 0 and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*given, **named)
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return dying

    def patch() -> None:
        os.fsync, os.unlink = wrap(os.fsync), wrap(os.unlink)
        for move in ("replace", "rename", "unlink"):
            setattr(Path, move, wrap(getattr(Path, move)))

    return patch


def _full(rng: random.Random) -> Patch:
    """A disk that takes no more after some calls, or no more than some bytes of a file."""
    left, most, by_calls = [rng.randrange(20)], rng.randrange(200, 40_000), rng.random() < 0.5
    sync = os.fsync

    def full(number: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        sync(number)

    def patch() -> None:
        if by_calls:
            os.fsync = full  # type: ignore[assignment]
        else:
            with suppress(ValueError):
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    return patch
