"""Work that is killed and resumed ends with the same bytes, leaves no unreadable state and nothing behind."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from children import Child, FailedError, check_refusal, must, run

SIZE = ("--preset", "llama", "--layers", 1, "--width", 16, "--heads", 2, "--kv-heads", 2, "--context", 16)
TEXT = "the cat sat on the mat and the dog sat on the log . " * 60
RESULTS = ("model.safetensors", "config.json", "tokenizer.json", "report.html")


def arguments(name: str, base: Path, out: Path) -> tuple[object, ...]:
    text = base / "text.txt"
    if name == "train":
        return "train", text, *SIZE, "--steps", 120, "--samples", 0, "--out", out
    if name == "share":
        return "share", base / "parent", "--kv-heads", 1, "--text", text, "--heal", 12, "--batch", 2, "--out", out
    if name == "prune":
        return "prune", base / "parent", "--keep", 0.5, "--text", text, "--heal", 12, "--batch", 2, "--out", out
    return "compare", "scale", "--seeds", 2, "--steps", 4, "--workers", 1, "--out", out


def prepare(base: Path) -> None:
    base.mkdir()
    (base / "text.txt").write_text(TEXT)
    must(base, *arguments("train", base, base / "parent"))


def _left_alone(name: str, base: Path) -> float:
    """Seconds that the command takes when it is left alone; its result lies under its name from then on."""
    noted = base / f"{name}.seconds"
    if not noted.exists():
        began = time.monotonic()
        must(base, *arguments(name, base, base / name))
        noted.write_text(str(time.monotonic() - began))
    return float(noted.read_text())


NAMES = ("train", "share", "prune", "compare")


def case(seed: int, place: Path, base: Path) -> str:
    """One command, ended three times at most in one of these ways, and resumed."""
    rng = random.Random(seed)
    name = rng.choices(NAMES, (5, 2, 2, 1))[0]
    how = rng.choice(
        ("KILL", "KILL", "TERM", "INT", "INT INT", "STOP CONT KILL", "at a move", "full disk", "gone", "two")
    )
    out, seconds = place / "out", _left_alone(name, base)
    given = arguments(name, base, out)
    if how == "gone":
        return _gone(given, name, place, out, rng.random() * seconds)
    if how == "two" and name != "compare":
        return _two(given, name, place, base, out)
    for _ in range(rng.choice((1, 1, 2, 3))):
        more = ["--resume"] if name != "compare" and out.exists() else []
        if how in ("at a move", "full disk"):
            child = Child(place, *given, *more, before=_dying(rng) if how == "at a move" else _full(rng))
        else:
            child = Child(place, *given, *more)
            for word in how.replace("two", "KILL").split():
                time.sleep(rng.random() * seconds / len(how.split()))
                child.send(getattr(signal, f"SIG{word}"))
        code, _, said = child.wait()
        if code == 0 or "there is nothing to resume" in said:
            break
        if "Traceback" in said or "this is a bug" in said or (code > 0 and code not in (2, 130)):
            raise FailedError(f"{name} after {how}: exit code {code}: {said[-600:]}")
    _finish(given, name, place, base, out)
    return f"{name}: {how}"


def _finish(given: tuple[object, ...], name: str, place: Path, base: Path, out: Path) -> None:
    """Resume to the end, and compare with the one that was left alone."""
    code, _, said = run(place, *given, *(["--resume"] if name != "compare" else []))
    if code and not (code == 2 and ("nothing to resume" in said or "exists" in said)):
        raise FailedError(f"{name} does not resume: {code}: {said[-600:]}")
    left = [path.name for path in place.rglob("*") if path.suffix in (".tmp", ".partial") or path.name == "lock"]
    if left:
        raise FailedError(f"{name} leaves {left}")
    for file in RESULTS[:3]:
        if (base / name / file).exists() and (base / name / file).read_bytes() != (out / file).read_bytes():
            raise FailedError(f"{name}: {file} differs from that of the run that was left alone")


def _dying(rng: random.Random) -> Callable[[], None]:
    """Killed right before or after a file gets its name, or when its bytes go to the disk."""
    count, after = rng.randrange(30), rng.random() < 0.5

    def patch() -> None:
        left = [count]

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

        os.fsync = wrap(os.fsync)
        Path.replace = wrap(Path.replace)  # type: ignore[assignment, method-assign]
        Path.rename = wrap(Path.rename)  # type: ignore[assignment, method-assign]

    return patch


def _full(rng: random.Random) -> Callable[[], None]:
    """A disk that takes no more after some calls."""
    count = rng.randrange(20)

    def patch() -> None:
        left, sync = [count], os.fsync

        def full(number: int) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(28, "No space left on device")
            sync(number)

        os.fsync = full  # type: ignore[assignment]

    return patch


def _gone(given: tuple[object, ...], name: str, place: Path, out: Path, delay: float) -> str:
    """The folder vanishes: one clear line, or it was finished by then."""
    child = Child(place, *given)
    time.sleep(delay)
    shutil.rmtree(out, ignore_errors=True)
    code, _, said = child.wait()
    if code:
        check_refusal(code, said)
    return f"{name}: gone"


def _two(given: tuple[object, ...], name: str, place: Path, base: Path, out: Path) -> str:
    """Two at once on one folder: one works, the other is told; the result is that of one."""
    first, second = Child(place, *given), Child(place, *given)
    codes = []
    for child in (first, second):
        code, _, said = child.wait()
        codes.append(code)
        if code:
            check_refusal(code, said)
    if sorted(codes) != [0, 2]:
        raise FailedError(f"two {name} on one folder end with {codes}")
    _finish(given, name, place, base, out)
    return f"{name}: two"
