"""Every file that a command reads, damaged: one clear line or the same result; never a traceback, a hang, gigabytes."""

import gzip
import json
import os
import random
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import damage
from children import BUGS, FailedError, Patch, check_refusal, interrupted_at, must, run, verified_in_a_fork
from small_models import COURSES_FILE

import headwise.corpus.documents
import headwise.corpus.training
from headwise.models.hf import load_folder

TEXT = "the cat sat on the mat and the dog sat on the log . " * 40
SIZE = "--preset llama --layers 1 --width 16 --heads 2 --kv-heads 2 --context 16 --samples 0"
QUICK = "--no-controls --ablate none --json"
HEAL = "share @run --kv-heads 1 --text @text.txt --heal 6 --out @healing"
# What is run on a copy of its files, whose names follow an @; slow ones are chosen less often.
COMMANDS = {
    "generate": "generate @run --prompt 'the c' --tokens 5 --temperature 0",
    "look": "look @run --json",
    "heads": "heads @run --text 'the cat sat' --json --html @page.html",
    "held out": "heads @run --json",
    "kept": f"heads @run --text @text.txt --tokens 16 --documents 20 {QUICK} --keep @kept",
    "relations": f"heads @run --relations @relations.json {QUICK}",
    "ids": f"heads @run --ids @ids {QUICK}",
    "cached": f"heads @run --text @text.txt --tokens 16 {QUICK}",
    "texts": f"heads @run --text @texts --tokens 16 --documents 4 {QUICK}",
    "trace": "trace @run --text 'the cat' --json",
    "why": "why @run --prompt 'the cat' --json",
    "cost": "cost @foreign --json",
    "resume": "train --resume --out @stopped --json",
    "vocabulary": f"train @text.txt --tokenizer @vocabulary.json {SIZE} --steps 1 --out @new --json",
    "records": f"train @texts {SIZE} --steps 1 --out @new --json",
    "replay": "train @names.txt --rung array --steps 2 --samples 1 --out @new --json",
    "healing": f"{HEAL} --json",
    "prune": "prune @foreign --keep 0.5 --text @text.txt --tokens 16 --json",
    "foreign": "generate @foreign --ids @ids --tokens 3 --temperature 0",
    "prompt": "generate @foreign --prompt 'the c' --tokens 3 --temperature 0",
    "streamed": f"heads @foreign --stream --text 'the cat sat' {QUICK}",
    "check": "check @attention.py:MultiHeadAttn --json",
    "learn": "learn @learn",
}
WRITES = {"heads": "--out", "why": "--html", "trace": "--html"}  # an option of each
SLOW = {"check": 0.3, "learn": 0.3, "healing": 0.5}
# Read by libraries, or only where another file says so.
BESIDE = {"foreign": ["generation_config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]}
BESIDE |= {"prompt": ["tokenizer.json", "tokenizer_config.json"]}
SEALED = re.compile(
    r"(run|child)/(config\.json|tokenizer\.json|model\.safetensors)|(stopped|kept|healing)\S*safetensors"
)
TIMES = re.compile(r'"[a-z_]*(seconds|html|report|model|run|address|source|out|training time)": [^\n]*')

reads: dict[str, list[str]] = {}  # of each command the files


def prepare(base: Path) -> None:
    """Folders of all kinds, and what the commands say of them when all is whole."""
    base.mkdir()
    (base / "texts").mkdir()
    (base / "text.txt").write_text(TEXT)
    (base / "texts" / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"{line}."}) + "\n" for line in TEXT.split("."))
    )
    (base / "texts" / "b.txt.gz").write_bytes(gzip.compress(TEXT.encode(), mtime=0))
    (base / "texts" / "c.md").write_text(TEXT)
    _parquet(base / "texts" / "d.parquet")
    (base / "names.txt").write_text("emma\nolivia\nava\nmia\n" * 9)
    (base / "ids").write_text("1 2 3 4\n5 6 7\n")
    shutil.copy(COURSES_FILE, base / "attention.py")
    pair = {"name": "sits", "from": "sat", "to": [4, 7]}
    relations = {"documents": [{"text": "the cat sat", "pairs": [pair]}], "relations": {"sits": "who sits"}}
    (base / "relations.json").write_text(json.dumps(relations))

    def made(words: str, *before: Patch, code: int = 0) -> None:
        must(base, *_words(words, base), before=(*before, *_patches(base)), code=code)

    made(f"train @text.txt {SIZE} --steps 5 --out @run")
    made(f"train @text.txt {SIZE} --steps 40 --out @stopped", interrupted_at(21), code=130)
    made("share @run --kv-heads 1 --text @text.txt --out @child")
    made(HEAL, interrupted_at(4), code=130)
    made(COMMANDS["kept"])
    made("learn @learn --lang en")
    (base / "run" / "report.html").unlink()
    shutil.copy(base / "run" / "tokenizer.json", base / "vocabulary.json")
    _foreign(base)
    for name, words in COMMANDS.items():
        copy = _copied(base, base / "copy", words)
        opened = base / "opened"
        before = (*_patches(copy), lambda: _noted(opened, copy))  # noqa: B023  called at once
        must(base, *_words(words, copy), before=before, code=int(name == "learn"))
        there = {path for path in opened.read_text().splitlines() if (base / path).is_file()}
        reads[name] = sorted(there | {f"foreign/{file}" for file in BESIDE.get(name, ())})
        shutil.rmtree(copy)
        (base / f"{name}.expected").write_text(_result(base, _copied(base, copy, words), name)[1])
        shutil.rmtree(copy)


def _parquet(path: Path) -> None:
    try:
        from pyarrow import parquet, table
    except ModuleNotFoundError:
        return
    parquet.write_table(table({"text": TEXT.split(".")}), path)


def _foreign(base: Path) -> None:
    """The model in the layout of others: two shards and an index, and no word of headwise."""
    ours = ("run.json", "film*", "report*", "metrics*")
    shutil.copytree(base / "run", base / "foreign", ignore=shutil.ignore_patterns(*ours))
    path = base / "foreign" / "config.json"
    config = json.loads(path.read_text())
    del config["headwise"]
    path.write_text(json.dumps(config))
    model = load_folder(base / "foreign")
    size = sum(weights.nbytes for weights in model.state_dict().values())
    (base / "foreign" / "model.safetensors").unlink()
    model.save_pretrained(base / "foreign", max_shard_size=size * 2 // 3)


def _noted(path: Path, folder: Path) -> None:
    """From now on the files of a folder that this process opens are named in a file."""
    names = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def hook(event: str, given: tuple[object, ...]) -> None:
        if event == "open" and str(given[0]).startswith(f"{folder}/"):
            os.write(names, f"{Path(str(given[0])).relative_to(folder)}\n".encode())

    sys.addaudithook(hook)


def _words(words: str, place: Path) -> list[str]:
    return [str(place / word[1:]) if word.startswith("@") else word for word in shlex.split(words)]


def _copied(base: Path, copy: Path, words: str) -> Path:
    """A folder with what a command reads; paths inside of the files lead there, too."""
    copy.mkdir()
    wanted = {"text.txt", "cache", *re.findall(r"@([\w.]+)", words)} | (
        {"healing.partial"} if "@healing" in words else set()
    )
    for name in wanted:
        if (base / name).is_dir():
            shutil.copytree(base / name, copy / name)
        elif (base / name).exists():
            shutil.copy(base / name, copy / name)
    for path in (*copy.glob("*/run.json"), *copy.glob("*/headwise.json")):
        path.write_text(path.read_text().replace(f"{base}/", f"{copy}/"))
    return copy


def _patches(copy: Path) -> tuple[Patch, ...]:
    def patch() -> None:
        # Tokens of every text are kept, and read again.
        headwise.corpus.training.LARGE = headwise.corpus.documents.LARGE = 0
        os.environ["HEADWISE_CACHE"] = str(copy / "cache")
        for name in ("DISPLAY", "WAYLAND_DISPLAY"):
            os.environ.pop(name, None)

    return patch, verified_in_a_fork


def _result(scratch: Path, copy: Path, name: str) -> tuple[int, str, str]:
    """Exit code, what was printed and what was written; and what was said."""
    code, printed, said = run(scratch, *_words(COMMANDS[name], copy), before=_patches(copy))
    if name == "healing":  # what it prints has speeds in it
        weights = copy / "healing" / "model.safetensors"
        printed = sha256(weights.read_bytes()).hexdigest() if weights.exists() else ""
    return code, TIMES.sub("", printed.replace(str(copy), "")), said


def case(seed: int, place: Path, base: Path) -> tuple[str, int]:
    """Damage one file that one command reads, or name it as the one to write."""
    rng = random.Random(seed)
    names = sorted(COMMANDS)
    name = rng.choices(names, [SLOW.get(name, 1) * len(reads[name]) ** 0.5 for name in names])[0]
    file = rng.choice(reads[name])
    copy = _copied(base, place / "copy", COMMANDS[name])
    if (option := WRITES.get(COMMANDS[name].split()[0])) and not file.startswith("cache/") and rng.random() < 0.1:
        _aim(copy, name, option, file, rng)
        return f"{name}: not replaced", 1
    how, changed = _damage(copy / file, rng)
    code, printed, said = _result(place, copy, name)
    try:
        judged = name in ("check", "learn") and printed and not any(bug in said for bug in BUGS)
        if code == 0 or judged:  # those two end with other codes where the learner's code is not right
            same = printed == (base / f"{name}.expected").read_text()
            if changed and not same and SEALED.fullmatch(file):
                raise FailedError("another result, unsaid")
            met = "the same" if same else "another"
        else:
            check_refusal(code, said)
            met = "refused"
        left = [path.name for path in copy.rglob("*.tmp")]
        if left:
            raise FailedError(f"it leaves {left}")
    except FailedError as error:
        raise FailedError(f"{name} after {how} in {file}: {error}") from None
    return f"{name}: {met}", 1


def _aim(copy: Path, name: str, option: str, file: str, rng: random.Random) -> None:
    """A command writes to a file that it reads, under some name of it: that is refused, and the file stays."""
    path, other = copy / file, copy / "another.html"
    make = rng.choice([None, other.symlink_to, other.hardlink_to])
    target = copy / "." / "run" / ".." / file if make is None else other
    if make is not None:
        make(path)
    before = path.read_bytes()
    code, _, said = run(copy.parent, *_words(COMMANDS[name], copy), option, target, before=_patches(copy))
    check_refusal(code, said)
    if path.read_bytes() != before or list(copy.rglob("*.tmp")):
        raise FailedError(f"{name} {option} {target.name} writes over {file}, which it reads")


KINDS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a link to itself": lambda path: path.symlink_to(path),
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "its absence": lambda path: None,
}


def _damage(path: Path, rng: random.Random) -> tuple[str, bool]:
    """What was done to the file, and did that change it?"""
    if rng.random() < 0.05:
        how = rng.choice(list(KINDS))
        path.unlink()
        KINDS[how](path)
        return how, True
    before = path.read_bytes()
    particular = damage.ways(path)
    ways = particular if particular and rng.random() < 0.5 else damage.BYTES
    how = rng.choice(list(ways))
    after = ways[how](before, rng)
    path.write_bytes(after)
    return how, after != before
