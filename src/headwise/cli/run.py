"""One run of the command line: its words, the command that they name, and one line for what ends it."""

from __future__ import annotations

import errno
import inspect
import io
import os
import re
import signal
import sys
from contextlib import suppress
from itertools import pairwise
from typing import Annotated, Any, NoReturn

import typer
from typer import Option
from typer.exceptions import TyperException

# Each of these modules adds its own commands.
from headwise.cli import (  # noqa: F401
    heads,
    questions,
    reshape,
    teach,
    train,
)
from headwise.cli.app import Call, app, call, in_options
from headwise.errors import HeadwiseError
from headwise.view import err, screen
from headwise.words import check_lang

# the exit code after Ctrl-C, as shells have it: 128 + 2, the number of SIGINT
INTERRUPTED = 130
# Options that may stand anywhere in a command line, --lang with its value.
COMMON = ("--json", "--debug")
LANG = "--lang"
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
# the disk, the user's part of it, the file
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run() -> NoReturn:
    """Run the command that sys.argv names, say in one line what ended it, and exit."""
    for stream in (sys.stdout, sys.stderr):
        # None where the process has none; a test puts another kind there
        if isinstance(stream, io.TextIOWrapper):
            # a character that the terminal lacks is shown as its code
            stream.reconfigure(errors="backslashreplace")
    vars(call).update(vars(Call()))
    sys.exit(_exit_code())


def _print_version(value: bool) -> None:
    """For --version, which is heard before anything else in the command line."""
    if value:
        from headwise import __version__

        screen.print(f"headwise {__version__}")
        raise typer.Exit


@app.callback(
    invoke_without_command=True,
    context_settings={"help_option_names": ["--help", "-h"]},
)
def _root(
    context: typer.Context,
    as_json: Annotated[bool, Option("--json")] = False,
    debug: Annotated[bool, Option("--debug")] = False,
    lang: str | None = None,
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Build attention heads, look at them, price them, share them and remove them.

    Args:
        as_json: Print one JSON document; messages go to standard error.
        debug: Show the traceback of an error.
        lang: Language of pages, of learn and of verdicts, en or es. Default: as the system.
        version: Show the version.

    Example: headwise train, then headwise heads runs/verbs
    """
    if lang is not None:
        check_lang(lang)
    call.as_json = as_json
    call.debug = debug
    call.lang = lang
    name = context.invoked_subcommand
    if name is None:
        screen.print(context.get_help())
        return
    group: Any = context.command
    call.options = _options_of(group.commands[name])


def _options_of(command: Any) -> dict[str, str]:
    """What the library calls an argument -> the option of a command: "n_heads": "--heads"."""
    options = {"lang": LANG}
    for parameter in command.params:
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


def _hoisted(words: list[str]) -> list[str]:
    """The words of a command line, the options of all commands first: "learn --lang=es" -> "--lang es learn".

    They are options of `headwise` itself; behind the command typer would look for them among the command's own.
    """
    # behind `--` all words are names, and stay
    end = words.index("--") if "--" in words else len(words)
    asked = []
    for word in words[:end]:
        asked += word.split("=", 1) if word.startswith(f"{LANG}=") else [word]
    first = list[str]()
    rest = list[str]()
    for before, word in pairwise(["", *asked]):
        is_common = word in COMMON or LANG in (before, word)
        (first if is_common else rest).append(word)
    return [*first, *rest, *words[end:]]


# Texts of --help of options that several commands have; a command's own text comes before.
SHARED = {
    "model": "A run folder, or a model in Hugging Face layout.",
    "device": "Where the model computes: cpu, cuda, cuda:1 or mps; auto lets accelerate spread a model of transformers "
    "over what there is, disk included.",
    "text": "A UTF-8 text file to calibrate and heal on, and, its last tenth, to measure on; - for standard input; "
    "default: what a run of headwise was trained on.",
    "out": "The new model folder, absent or empty; without it the damage is shown and nothing written.",
    "heal": "Steps of healing, with --out: the new model learns to answer as the old one. Ctrl-C ends it early, with "
    "the best weights so far.",
    "dtype": "Number format of the weights that are written, such as bf16; default: that of MODEL.",
}


def worded() -> Any:
    """The command line, whose commands and parameters have the texts of their docstrings.

    A docstring says what the command does; under "Args:" stand its parameters, and behind "Example:" a command line.
    """
    root: Any = typer.main.get_command(app)
    for command in (root, *root.commands.values()):
        docstring = inspect.getdoc(command.callback) or ""
        about, _, rest = docstring.partition("\n\nArgs:\n")
        arguments, _, example = (rest or about).partition("\n\nExample: ")
        texts = dict(SHARED)
        for entry in re.split(r"\n(?= {4}\w)", arguments) if rest else ():
            name, _, text = entry.strip().partition(": ")
            texts[name] = " ".join(text.split())
        command.help = about.partition("\n\nExample: ")[0]
        common = (
            ""
            if command is root
            else "--json, --lang and --debug go with every command. "
        )
        command.epilog = f"{common}Example: {example}"
        for parameter in command.params:
            parameter.help = texts.get(parameter.name, parameter.help)
    return root


def _exit_code() -> int:
    try:
        command = worded()
        if COMPLETION in os.environ:
            command(prog_name="headwise")  # prints the completions and exits
        # Not command(): that turns Ctrl-C and a closed pipe into exit codes before this can say what was saved.
        with command.make_context("headwise", _hoisted(sys.argv[1:])) as context:
            command.invoke(context)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a full disk or a closed pipe is still told of
    except typer.Exit as stop:
        return stop.exit_code
    except TyperException as error:
        # the command whose line is wrong, where it came so far
        asked = getattr(error, "ctx", None)
        helped = (
            "" if asked is None else f"; {asked.command_path} --help has an example"
        )
        return _failed(error, _usage(error).rstrip(".?") + helped)
    except HeadwiseError as error:
        return _failed(error, in_options(str(error.args[0])))
    except BrokenPipeError:
        _drop_output()  # nobody reads on
    except OSError as error:
        _drop_output()  # it may be standard output itself that is full
        return _failed(error, _os_message(error))
    except (KeyboardInterrupt, typer.Abort) as error:
        # Abort: Ctrl-C where typer was asking
        # not the main thread; a second Ctrl-C would cut off what is said of the first
        with suppress(ValueError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return _failed(error, _interrupt_message(error), INTERRUPTED)
    except Exception as error:
        message = (
            f"{type(error).__name__}: {error}; this is a bug, and --debug shows where"
        )
        return _failed(error, message, code=1)
    return 0


def _usage(error: Any) -> str:
    """What is wrong with a command line: typer's own sentence, but for a value that pydantic or we refused."""
    # its subclass MissingParameter has no value
    if type(error).__name__ != "BadParameter":
        return str(error.format_message())
    name = getattr(error, "option_name", None)
    if not name and hasattr(error, "param"):
        name = error.param.get_error_hint()
    message = error.message  # of our own parser, such as `named_path`
    # typer checks values with pydantic, whose error is then the cause of typer's
    if error.__cause__ is not None:
        first = error.__cause__.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        inner = first.get("ctx", {}).get("error")
        # our own parser called the library, as `model_path`
        if isinstance(inner, HeadwiseError):
            message = inner.args[0]
    return f"Invalid value for {name}: {message}"


def _drop_output() -> None:
    """Throw away what cannot reach standard output: it would fail again, and be told of again, when Python exits."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        # what waits still goes to its file descriptor, which is now that of nothing
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(error: BaseException, message: str, code: int = 2) -> int:
    """Say in one line what went wrong; gives the exit code."""
    if call.debug:
        raise error  # --debug: Python shows where it came from
    err.print(f"headwise: {' '.join(message.split())}")
    return code


def _os_message(error: OSError) -> str:
    """What the system refused, and of which file; or that a disk is full."""
    reason = error.strerror or str(error)
    where = f" {error.filename}" if error.filename else ""
    if error.errno in FULL:
        return f"cannot write{where}: {reason}; earlier files are whole"
    return f"cannot use{where}: {reason}"


def _interrupt_message(error: BaseException) -> str:
    """What Ctrl-C left: what a training says that has stopped, or a note of the exception."""
    if error.args:  # of `Stopped`
        return in_options(str(error.args[0]))
    return "; ".join(
        ["interrupted", *getattr(error, "__notes__", ["no file was written"])]
    )
