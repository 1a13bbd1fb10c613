"""Files that commands read, damaged: the same answer, another one, or one clear line; never a traceback or a hang."""

import random
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import damage

TEXT = "the cat sat on the mat and the dog sat on the log . " * 40
TRAIN = "train @text.txt --preset llama --layers 1 --width 16 --heads 2 --context 16 --steps 5 --out @run"
# What is run on a copy of its files, whose names follow an @.
COMMANDS = {
    "generate": "generate @run --prompt 'the c' --tokens 5 --temperature 0",
    "heads": "heads @run --text 'the cat sat' --ablate none --json",
    "held out": "heads @run --ablate none --json",
    "trace": "trace @run --text 'the cat' --json",
    "why": "why @run --prompt 'the cat' --json",
    "cost": "cost @run --json",
    "prune": "prune @run --keep 0.5 --text @text.txt --tokens 16 --json",
}
READ = ("run/config.json", "run/model.safetensors", "run/tokenizer.json", "run/run.json", "text.txt")
LIMIT = 300  # seconds after which a command counts as hanging
BUGS = ("Traceback", "this is a bug", "panicked")


def run(words: str, place: Path) -> tuple[int, str]:
    """Exit code, and what was said on standard error."""
    given = [str(place / word[1:]) if word.startswith("@") else word for word in shlex.split(words)]
    command = [sys.executable, "-W", "ignore", "-m", "headwise", *given]
    done = subprocess.run(command, cwd=place, capture_output=True, timeout=LIMIT, check=False)
    return done.returncode, done.stderr.decode(errors="replace")


def made(place: Path) -> Path:
    """The folder that commands read, built once."""
    whole = place.parent / "whole"
    if not whole.exists():
        whole.mkdir()
        (whole / "text.txt").write_text(TEXT)
        code, said = run(TRAIN, whole)
        assert code == 0, said
    return whole


def check_refusal(code: int, said: str) -> None:
    """One clear line and exit code 2."""
    lines = [line for line in said.splitlines() if line.startswith("headwise: ")]
    if code != 2 or len(lines) != 1 or any(bug in said for bug in BUGS):
        raise AssertionError(f"no clear refusal, exit code {code}: {said[-600:]}")


def case(seed: int, place: Path) -> str:
    """Damage one file that one command may read."""
    rng = random.Random(seed)
    name, file = rng.choice(sorted(COMMANDS)), rng.choice(READ)
    copy = place / "copy"
    shutil.copytree(made(place), copy)
    path = copy / file
    ways = {**damage.BYTES, **damage.ways(path)}
    how = rng.choice(list(ways))
    path.write_bytes(ways[how](path.read_bytes(), rng))
    code, said = run(COMMANDS[name], copy)
    if code != 0:
        try:
            check_refusal(code, said)
        except AssertionError as error:
            raise AssertionError(f"{name} after {how} in {file}: {error}") from None
    if left := [path.name for path in copy.rglob("*.tmp")]:
        raise AssertionError(f"{name} after {how} in {file} leaves {left}")
    return f"{name}: {'refused' if code else 'answered'}"
