"""What all commands share: the application, screens, language, progress, kinds of options, errors and exit codes."""

from __future__ import annotations

import errno
import functools
import io
import json
import os
import re
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core
from rich import progress as rich_progress
from typer import Argument, Option
from typer.exceptions import TyperException

from headwise.cli.early import check_apart
from headwise.cli.interrupt import CODE, loading
from headwise.corpus.sources import exists
from headwise.errors import HeadwiseError
from headwise.files import check_link, read_json
from headwise.records import plain_data
from headwise.view import CONTROL, Screen, harmless
from headwise.words import LANGUAGES, Facts, check_lang, system_language

# Text goes out as it is: rich neither colours numbers, nor reads [brackets] or :names:, nor breaks lines.
# results, on standard output
screen = Screen(highlight=False, markup=False, emoji=False, soft_wrap=True)
err = Screen(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)  # messages
COURSE = Path("learn")  # the folder of a course, where none is named
_asked: str | None = None  # what --lang says
_spoken = "en"  # the language of pages, of `learn` and of verdicts


def speak(lang: str | None) -> None:
    """From here on `language` is this one; None for that of the course in this folder, or of the system.

    Raises HeadwiseError for one that the table of words lacks.
    """
    global _asked, _spoken
    if lang is not None:
        check_lang(lang)
    _asked, _spoken = lang, lang or _usual_language()


def language() -> str:
    """The language of pages, of `learn` and of verdicts: "en" or "es"."""
    return _spoken


def asked_language() -> str | None:
    """What --lang says, if anything."""
    return _asked


def _usual_language() -> str:
    """Where --lang says nothing: that of the course in this folder, or around it; else that of the system."""
    for folder in (COURSE, Path()):
        path = folder / "progress.json"  # PROGRESS of `teach.course`, which takes longer to load
        if path.exists():
            # damaged: `headwise learn` says so; HeadwiseError is a ValueError
            with suppress(ValueError, TypeError):
                kept = dict(read_json(path)).get("language")
                if kept in LANGUAGES:
                    return str(kept)
    return system_language()


# The three doors of the README, with their commands in the order of --help.
DOORS = {
    "Learn how attention works": ("learn", "check", "trace", "ladder"),
    "Inspect what each head does": ("train", "look", "heads", "why", "align", "generate"),
    "Shrink a model, and see what it costs": ("cost", "share", "prune"),
}


class _OneForm:
    """An option that is off by default has no second form: --json, but no --no-json."""

    def __init__(self: Any, **options: Any) -> None:
        super().__init__(**options)
        # typer makes --NAME/--no-NAME of every bool; the second is for what is on, or undecided.
        for parameter in self.params:
            if parameter.default is False:
                parameter.secondary_opts = []


class _Command(_OneForm, typer.core.TyperCommand):
    """One command."""


class _Doors(_OneForm, typer.core.TyperGroup):
    """The list of commands behind three doors, in the order of `DOORS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in DOORS.values() for name in names]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The commands and what each does in a few words, under the title of their door."""
        # Columns for the words behind the longest name. typer's own list, too, takes 6 off for indent and gaps.
        limit = formatter.width - 6 - max(map(len, self.commands))
        for door, names in DOORS.items():
            with formatter.section(door):
                formatter.write_dl(
                    [(name, self.commands[name].get_short_help_str(limit)) for name in names]
                )


# None of rich's boxes and tracebacks: help is plain text, and `_run` says what went wrong.
app = typer.Typer(cls=_Doors, pretty_exceptions_enable=False, rich_markup_mode=None)
# `@command()` above a function makes it a command
command = functools.partial(app.command, cls=_Command)
_show_traceback = False  # --debug
_wants_json = False  # --json
# options that stand anywhere in a command line, as --lang does with its value
COMMON = ("--json", "--debug")
LANG = "--lang"
# variables that torchrun sets; `heads` alone takes several processes
TORCHRUN = {"RANK", "MASTER_ADDR"}
# An argument in a message of the library: `out=`, `keep=0.75`, `by='role'`; not a comparison (`==`), and no part of a
# path (`runs/out=1`). A value ends in a letter, digit or _: the full stop of a sentence is not of it.
ARGUMENT = re.compile(r"(?<![\w./-])(?P<name>[a-z_]+)=(?!=)(?P<value>'[^']*'|[\w./+-]*\w|)")
# An argument of the library -> the parameter of a command, where they differ (table of names in CONTRIBUTING.md).
FIELDS = {
    "n_heads": "heads",
    "n_kv_heads": "kv_heads",
    "n_layers": "layers",
    "d_model": "width",
    "n_tokens": "tokens",
    "folder": "out",
}
COMPLETION = "_HEADWISE_COMPLETE"  # set by the shell that asks for completions


def named_path(name: str) -> Path:
    """A path that has a name: an empty one, as of a variable of the shell without a value, is no folder "."."""
    if not name:
        raise typer.BadParameter(
            "the name is empty; pass a file or a folder, or . for the folder that you are in"
        )
    return Path(name)


def model_path(name: str) -> Path:
    """The folder of a model, which may also be a GGUF file or a name on the hub."""
    from headwise.models.locate import located

    return located(named_path(name))


# Kinds of options and arguments, where the type alone does not say what is taken. `None` stands for "not given".
Model = Annotated[Path, Argument(parser=model_path, metavar="MODEL")]
File = Annotated[Path | None, Option(parser=named_path, metavar="<path>")]
Files = Annotated[list[Path] | None, Option(parser=named_path, metavar="<path>")]
Count = Annotated[int, Option(min=1)]
SomeCount = Annotated[int | None, Option(min=1)]
Seed = Annotated[int, Option(min=0, max=2**63 - 1)]  # what a signed number of 64 bits holds
Port = Annotated[int | None, Option(min=0, max=2**16 - 1)]  # all that TCP has


class Progress:
    """How far long work is, on standard error: a bar for each stage on a terminal, plain lines elsewhere.

    A plain line comes after 2 seconds without one, then after 4, 8, 16 and every 30, also while one step takes long;
    `begins` is what it says before the first stage.
    """

    # seconds between plain lines, at first and at last: a log of hours stays short
    FIRST, LONGEST = 2.0, 30.0

    def __init__(self, begins: str) -> None:
        columns = (
            rich_progress.TextColumn("{task.description}"),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TextColumn("{task.fields[numbers]}"),
            rich_progress.BarColumn(bar_width=24),
            rich_progress.TimeRemainingColumn(elapsed_when_finished=True),
        )
        # transient: gone at the end
        self._bar = rich_progress.Progress(*columns, console=err, transient=True)
        self._tasks: dict[str, rich_progress.TaskID] = {}  # the bar of each stage
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._print_now_and_then, daemon=True)
        # What the next plain line says; when the work began, and when the latest plain line came.
        self._state, self._began, self._printed = begins, time.monotonic(), time.monotonic()

    def __enter__(self) -> Progress:
        if not err.is_terminal:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._tasks:  # else the bar was never started
            self._bar.stop()

    def __call__(
        self, stage: str, done: int, total: int, numbers: str = "", milestone: bool = False
    ) -> None:
        """The stage has done so many of `total` steps (0: unknown); `numbers` are words behind them, such as a loss.

        A milestone has a plain line of its own.
        """
        if err.is_terminal:
            # Only now, not in __enter__: a running bar takes standard output over. A second start does nothing.
            self._bar.start()
            if stage not in self._tasks:
                self._tasks[stage] = self._bar.add_task(harmless(stage), numbers="")
            self._bar.update(
                self._tasks[stage], total=total or None, completed=done, numbers=harmless(numbers)
            )
            return
        self._state = f"{stage} {done}/{total}  {numbers}".strip() if total else stage
        if milestone:
            self._printed = time.monotonic()
            err.print(self._state)

    def _print_now_and_then(self) -> None:  # in the thread, until the work is done
        gap = self.FIRST
        # `wait` is true at once when the work is done. A time that is past (below zero) is not waited for.
        while not self._done.wait(self._printed + gap - time.monotonic()):
            # else a milestone was printed while this waited
            if time.monotonic() >= self._printed + gap:
                self._printed, gap = time.monotonic(), min(2 * gap, self.LONGEST)
                err.print(f"{self._state}  ({time.monotonic() - self._began:.0f} s)")


def _print_version(value: bool) -> None:
    """For --version, which is heard before anything else in the command line."""
    if value:
        from headwise import __version__

        screen.print(f"headwise {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True, context_settings={"help_option_names": ["--help", "-h"]})
def _root(
    context: typer.Context,
    as_json: Annotated[bool, Option("--json")] = False,
    debug: bool = False,
    lang: str | None = None,
    version: Annotated[bool, Option(callback=_print_version, is_eager=True)] = False,
) -> None:
    """Build attention heads, look at them, price them, share them and remove them."""
    global _wants_json, _show_traceback
    _wants_json, _show_traceback = as_json, debug
    if context.invoked_subcommand is None:
        screen.print(context.get_help())


def wants_json() -> bool:
    """Is one JSON document asked for, and nothing else on standard output?"""
    return _wants_json


def _hoisted(words: list[str]) -> list[str]:
    """The words of a command line, the options of all commands first: "learn --lang=es" -> "--lang es learn".

    They are options of `headwise` itself; behind the command typer would look for them among the command's own.
    """
    # behind `--` all words are names, and stay
    end = words.index("--") if "--" in words else len(words)
    asked = []
    for word in words[:end]:
        asked += word.split("=", 1) if word.startswith(f"{LANG}=") else [word]
    # Each word is seen with the one before it ("" before the first): the value of --lang goes first, too.
    first, rest = list[str](), list[str]()
    for word, before in zip(asked, ["", *asked], strict=False):
        (first if word in COMMON or LANG in (word, before) else rest).append(word)
    return [*first, *rest, *words[end:]]


def worded() -> Any:
    """The command line, whose parameters have their texts of --help.

    They stand in the section of a command in commands.toml; that of the command itself is its docstring.
    """
    root: Any = typer.main.get_command(app)
    texts = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))
    for name, command in {"headwise": root, **root.commands}.items():
        told = texts["common"] | texts[name]  # a command's own text comes before that of several
        example = f"Example: {told['example']}"
        command.epilog = example if command is root else f"{told['epilog']} {example}"
        for parameter in command.params:
            parameter.help = told.get(parameter.name, parameter.help)
    return root


@contextmanager
def needs_torch() -> Iterator[None]:
    """Imports of rooms that need torch, and nothing else, with one clear line where it is missing.

    They stand here, and not at the top of a file, so that a refusal and --help come before torch is loaded.
    """
    try:
        with loading():
            yield
    except ModuleNotFoundError as error:
        # these two come with headwise[torch]; another is a bug
        if error.name not in ("torch", "tokenizers"):
            raise
        raise HeadwiseError(
            f"this command needs {error.name}: pip install 'headwise[torch]'"
        ) from None


def check_outputs(
    inputs: Iterable[Path | str | None],
    /,  # by its place alone: every name is one of `paths`
    **paths: Path | list[Path] | None,
) -> None:
    """Refuse, before the work begins, a file that cannot be written, or would take the place of something else.

    inputs  files and folders that the command reads; a text itself may be among them, None is passed over
    paths   files that are written, each under the name of its option: `html=path` is of --html
    """
    files = []
    # an option with several files, with one, or one that was not given
    for name, value in paths.items():
        for path in value if isinstance(value, list) else [value] if value else []:
            check_link(path)
            if path.is_dir():
                raise HeadwiseError(
                    f"--{name} {path} is a folder that is there already; pass another name"
                )
            if not path.parent.is_dir():
                raise HeadwiseError(
                    f"--{name} {path}: the folder {path.parent} does not exist; make it, or pass another --{name}"
                )
            files.append((f"--{name}", path))
    # a text itself is no file
    check_apart(files, filter(exists, [Path(name) for name in inputs if name]))


def print_json(kind: str, document: Facts) -> None:
    """One document on standard output; `kind` is its entry in the schema (examples/schema_page.py)."""
    # None: the process has no standard output, as after `>&-` in a shell. Quiet: it is not the first of many.
    if sys.stdout is not None and not screen.quiet:
        # what is no file, such as io.StringIO, has none and takes all text
        encoding = sys.stdout.encoding or "utf-8"
        whole = {"schema": f"headwise-{kind}-1", **document}
        # Where the encoding lacks letters, \u codes stand for them; so they do for what a terminal would obey.
        text = json.dumps(plain_data(whole), ensure_ascii="utf" not in encoding.lower(), indent=2)
        sys.stdout.write(CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")


def main() -> NoReturn:
    """Run the command line. Exit code 2 for bad input, 130 for Ctrl-C; one line each, a traceback with --debug."""
    for stream in (sys.stdout, sys.stderr):
        # None where the process has none; a test puts another kind there
        if isinstance(stream, io.TextIOWrapper):
            # a character that the terminal lacks is shown as its code
            stream.reconfigure(errors="backslashreplace")
    # of many processes the first prints
    screen.quiet = err.quiet = is_one_of_many() and os.environ["RANK"] != "0"
    sys.exit(_run())


def is_one_of_many() -> bool:
    """Has torchrun started this process?"""
    return os.environ.keys() >= TORCHRUN


def _command_in(words: list[str]) -> str:
    """The name of the command in a command line: the first word that is no option, nor the value of --lang."""
    return next(
        (
            word
            for before, word in pairwise(["", *words])
            if not word.startswith("-") and before != LANG
        ),
        "",
    )


def _run() -> int:
    """Run the command that sys.argv names, and say in one line what ended it; gives the exit code."""
    code = 0
    try:
        words = _hoisted(sys.argv[1:])
        speak(next((word for before, word in pairwise(words) if before == LANG), None))
        name = _command_in(words)
        if is_one_of_many() and name != "heads":
            raise HeadwiseError(
                f"headwise {name} works in one process; torchrun is for headwise heads"
            )
        command = worded()
        if COMPLETION in os.environ:
            command(prog_name="headwise")  # prints the completions and exits
        # Not command(): that turns Ctrl-C and a closed pipe into exit codes before this can say what was saved.
        context = command.make_context("headwise", words)
        with context:
            command.invoke(context)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a full disk or a closed pipe is still told of
    except typer.Exit as stop:
        code = stop.exit_code
    except TyperException as error:
        asked = getattr(error, "ctx", None)  # the command whose line is wrong, where it came so far
        helped = "" if asked is None else f"; {asked.command_path} --help has an example"
        code = _failed(error, _usage(error).rstrip(".?") + helped)
    except HeadwiseError as error:
        code = _failed(error, in_options(error.args[0] if error.args else ""))
    except BrokenPipeError:
        _drop_output()  # nobody reads on
    except OSError as error:
        _drop_output()  # it may be standard output itself that is full
        code = _failed(error, _os_message(error))
    except (KeyboardInterrupt, typer.Abort) as error:  # Abort: Ctrl-C where typer was asking
        # not the main thread; a second Ctrl-C would cut off what is said of the first
        with suppress(ValueError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = _failed(error, _interrupt_message(error), CODE)
    except Exception as error:
        code = _failed(
            error,
            f"{type(error).__name__}: {error}; this is a bug, and --debug shows where",
            code=1,
        )
    return code


def in_options(text: str) -> str:
    """What the library says, with options where the library has arguments."""
    return as_options(text, running_options())


def _usage(error: Any) -> str:
    """What is wrong with a command line: typer's own sentence, but for a value that pydantic or we refused."""
    if type(error).__name__ != "BadParameter":  # its subclass MissingParameter has no value
        return str(error.format_message())
    name = getattr(error, "option_name", None) or (
        error.param.get_error_hint() if hasattr(error, "param") else ""
    )
    return f"Invalid value for {name}: {_value_message(error)}"


def _value_message(error: Any) -> str:
    """What is wrong with a value: typer checks values with pydantic, whose error is then the cause of typer's."""
    if error.__cause__ is None:  # our own parser raised BadParameter, as `named_path`
        return str(error.message)
    first = error.__cause__.errors()[0]
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, HeadwiseError):  # our own parser called the library, as `model_path`
        return in_options(inner.args[0])
    return str(first["msg"].removeprefix("Value error, "))


def _drop_output() -> None:
    """Throw away what cannot reach standard output: it would fail again, and be told of again, when Python exits."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:  # what waits still goes to its file descriptor, which is now that of nothing
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def as_options(message: str, options: Mapping[str, str]) -> str:
    """The library speaks of arguments (`out=`, `n_kv_heads=2`), the command of options (`--out`, `--kv-heads 2`).

    options  the running command's parameters -> their options, such as "n_kv_heads": "--kv-heads"
    """

    def translated(match: re.Match[str]) -> str:
        option, value = options.get(match["name"]), match["value"]
        if option is None:
            return match[0]
        if value in ("", "True"):
            return option
        if value in ("False", "None"):
            # "controls=False" -> "--no-controls"; "out=None" -> "no --out"
            return options.get(match[0], f"no {option}")
        # 'role' -> role, as a shell needs quotation marks around spaces alone
        unquoted = value.strip("'")
        return f"{option} {value if ' ' in value else unquoted}"

    return ARGUMENT.sub(translated, message)


def running_options() -> dict[str, str]:
    """What the library calls an argument -> the option of the command in sys.argv: "n_heads": "--heads"."""
    commands = getattr(typer.main.get_command(app), "commands", {})
    command = next((commands[word] for word in sys.argv[1:] if word in commands), None)
    options = {"lang": LANG}
    for parameter in command.params if command is not None else ():
        if parameter.param_type_name == "option":
            option = max(parameter.opts, key=len)  # the long form, as of -h and --help
            # Under both its names, where they differ: `mapping` is --map.
            options[parameter.name] = options[option[2:].replace("-", "_")] = option
            if parameter.secondary_opts:  # "controls=False": "--no-controls"
                options[f"{parameter.name}=False"] = parameter.secondary_opts[0]
    for argument, name in FIELDS.items():
        if name in options:
            options[argument] = options[name]
    return options


def _failed(error: BaseException, message: str, code: int = 2) -> int:
    """Say in one line what went wrong; gives the exit code."""
    if _show_traceback:
        raise error  # --debug: Python shows where it came from

    prefix = ""
    # one of many processes, which otherwise leaves printing to the first
    if err.quiet and code != CODE:
        err.quiet, prefix = False, f"rank {os.environ['RANK']}: "
    err.print(f"headwise: {prefix}{' '.join(message.split())}")
    return code


def _os_message(error: OSError) -> str:
    """What the system refused, and of which file; or that a disk is full."""
    # the disk, the user's part of it, the file
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    reason = error.strerror or str(error)
    where = f" {error.filename}" if error.filename else ""
    return (
        f"cannot write{where}: {reason}; earlier files are whole"
        if full
        else f"cannot use{where}: {reason}"
    )


def _interrupt_message(error: BaseException) -> str:
    """What Ctrl-C left: what a training says that has stopped, or a note of the exception."""
    if error.args:  # of `Stopped`
        return in_options(str(error.args[0]))
    return "; ".join(["interrupted", *getattr(error, "__notes__", ["no file was written"])])
