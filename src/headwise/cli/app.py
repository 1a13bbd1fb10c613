"""What commands share: the application, screens, language, progress, kinds of options, outputs."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from typer import Argument, Option

from headwise.errors import HeadwiseError
from headwise.families import RUN
from headwise.files import exists, is_stream
from headwise.records import plain_data
from headwise.view import CONTROL
from headwise.words import Facts, system_language

COURSE = Path("learn")  # the folder of a course, where none is named


@dataclass
class Call:
    """What the options of every command say."""

    # one JSON document is asked for, and nothing else on standard output
    as_json: bool = False
    debug: bool = False
    lang: str | None = None  # what --lang says, if anything
    # argument of the library -> option
    options: Mapping[str, str] = field(default_factory=lambda: {"lang": "--lang"})


call = Call()  # of this process, filled in by `headwise.cli.run`


def wants_json() -> bool:
    """Is one JSON document asked for, and nothing else on standard output?"""
    return call.as_json


def language() -> str:
    """That of pages, of `learn` and of verdicts: as --lang says, else as the system."""
    return call.lang or system_language()


# The three doors of the README, with their commands in the order of --help.
DOORS = {
    "Learn how attention works": ("learn", "check", "trace", "ladder"),
    "Inspect what each head does": (
        "train",
        "look",
        "heads",
        "why",
        "align",
        "generate",
        "verify",
    ),
    "Shrink a model, and see what it costs": ("cost", "share", "prune"),
}


class _Doors(typer.core.TyperGroup):
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
                    [
                        (name, self.commands[name].get_short_help_str(limit))
                        for name in names
                    ]
                )


# None of rich's boxes and tracebacks: help is plain text, and `run` says what went wrong.
app = typer.Typer(cls=_Doors, pretty_exceptions_enable=False, rich_markup_mode=None)
command = app.command  # `@command()` above a function makes it a command
# An argument in a message of the library: `out=`, `keep=0.75`, `by='role'`; not a comparison (`==`), and no part of a
# path (`runs/out=1`). A value ends in a letter, digit or _: the full stop of a sentence is not of it.
ARGUMENT = re.compile(
    r"(?<![\w./-])(?P<name>[a-z_]+)=(?!=)(?P<value>'[^']*'|[\w./+-]*\w|)"
)


def in_options(message: str) -> str:
    """The library speaks of arguments (`out=`, `n_kv_heads=2`), the command of options (`--out`, `--kv-heads 2`)."""

    def translated(match: re.Match[str]) -> str:
        option = call.options.get(match["name"])
        value = match["value"]
        if option is None:
            return match[0]
        if value in ("", "True"):
            return option
        if value in ("False", "None"):
            # "controls=False": "--no-controls"
            return call.options.get(match[0], f"no {option}")
        unquoted = value.strip("'")  # a shell needs quotation marks around spaces alone
        return f"{option} {value if ' ' in value else unquoted}"

    # lines of code, such as those of an adapter, stay as Python reads them
    words, mark, code = message.partition("\ndef ")
    return ARGUMENT.sub(translated, words) + mark + code


def named_path(name: str) -> Path:
    """A path that has a name: an empty one, as of a variable of the shell without a value, is no folder "."."""
    if not name:
        raise typer.BadParameter(
            "the name is empty; pass a file or a folder, or . for the folder that you are in"
        )
    return Path(name)


def model_path(name: str) -> Path:
    """The folder of a model, which may also be a name on the hub."""
    from headwise.models import located

    return located(named_path(name))


# Kinds of options and arguments, where the type alone does not say what is taken. `None` stands for "not given".
Model = Annotated[Path, Argument(parser=model_path, metavar="MODEL")]
File = Annotated[Path | None, Option(parser=named_path, metavar="<path>")]
Files = Annotated[list[Path] | None, Option(parser=named_path, metavar="<path>")]
Count = Annotated[int, Option(min=1)]
SomeCount = Annotated[int | None, Option(min=1)]
# what a signed number of 64 bits holds
Seed = Annotated[int, Option(min=0, max=2**63 - 1)]
Port = Annotated[int | None, Option(min=0, max=2**16 - 1)]  # all that TCP has


@contextmanager
def needs_torch() -> Iterator[None]:
    """Imports of packages that need torch, and nothing else, with one clear line where it is missing.

    They stand here, and not at the top of a file, so that a refusal and --help come before torch is loaded.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "tokenizers"):  # another one is a bug
            raise
        remedy = "pip install 'headwise[torch]'"
        raise HeadwiseError(f"this command needs {error.name}: {remedy}") from None


WRITTEN = (".html", ".csv", ".json")


def check_outputs(
    inputs: Iterable[Path | str | None], /, **paths: Path | list[Path] | None
) -> None:
    """Refuse, before the work begins, a file that cannot be written, or would take the place of something else.

    inputs  files and folders that the command reads; a text itself may be among them, None is passed over
    paths   files that are written, each under the name of its option: `html=path` is of --html
    """
    taken = [_identity(Path(name)) for name in inputs if name and exists(Path(name))]
    for name, value in paths.items():
        for path in filter(None, value if isinstance(value, list) else [value]):
            words = f"--{name} {path}"
            if path.is_dir():
                raise HeadwiseError(
                    f"{words} is a folder that is there already; pass another name"
                )
            if not path.parent.is_dir():
                raise HeadwiseError(
                    f"{words}: the folder {path.parent} does not exist; make it, or pass another name"
                )
            # a pipe or a device: what is written there replaces nothing
            if is_stream(path):
                continue
            suffix = path.suffix.lower()
            parent = Path(os.path.realpath(path)).parent
            if suffix not in WRITTEN:
                raise HeadwiseError(f"{words}: end the name in {', '.join(WRITTEN)}")
            holds_model = exists(parent / "config.json") or exists(parent / RUN)
            if holds_model and suffix == ".json":
                raise HeadwiseError(
                    f"{words} lies among the files of {parent}; pass a file elsewhere"
                )
            if _identity(path) in taken:
                raise HeadwiseError(
                    f"{words} is read, or written, by another option, too; pass another name"
                )
            taken.append(_identity(path))


def _identity(path: Path) -> Any:
    """The same for two names of one file, also where one is a link."""
    return path.stat()[1:3] if exists(path) else os.path.realpath(path)


def print_json(kind: str, document: Facts) -> None:
    """One document on standard output; `kind` is its entry in the schema (examples/schema_page.py)."""
    # None: the process has no standard output, as after `>&-` in a shell.
    if sys.stdout is not None:
        # what is no file, such as io.StringIO, has none and takes all text
        encoding = sys.stdout.encoding or "utf-8"
        whole = {"schema": f"headwise-{kind}-1", **document}
        # Where the encoding lacks letters, \u codes stand for them; so they do for what a terminal would obey.
        text = json.dumps(
            plain_data(whole), ensure_ascii="utf" not in encoding.lower(), indent=2
        )
        sys.stdout.write(
            CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"
        )
