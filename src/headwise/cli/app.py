"""What all commands share: the application, the consoles, common options, errors and exit codes."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.exceptions import TyperException

from headwise.errors import HeadwiseError

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Multi-head attention in which a head is a thing you can hold.",
)
out = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, markup=False, emoji=False)
_show_traceback = False


def _set_debug(value: bool) -> None:
    global _show_traceback
    _show_traceback = _show_traceback or value


Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, all else on standard error.")]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error.", callback=_set_debug, is_eager=True)
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, written by `headwise train`.")]


def _print_version(value: bool) -> None:
    if value:
        from headwise import __version__

        out.print(f"headwise {__version__}")
        raise typer.Exit


@app.callback(
    invoke_without_command=True,
    epilog="Example: headwise train, then headwise heads runs/verbs",
    context_settings={"help_option_names": ["--help", "-h"]},
)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Multi-head attention in which a head is a thing you can hold."""
    if context.invoked_subcommand is None:
        out.print(context.get_help())


@contextmanager
def needs_torch() -> Iterator[None]:
    """Imports of rooms that need torch, with one clear line where it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "tokenizers"):
            raise
        raise HeadwiseError(f"this command needs {error.name}: pip install 'headwise[torch]'") from None


def print_json(document: dict[str, Any]) -> None:
    if sys.stdout is not None:
        sys.stdout.write(json.dumps(document, ensure_ascii=False, indent=2) + "\n")


def main() -> NoReturn:
    """Run the command line. Exit code 2 for bad input, 130 for Ctrl-C; one line each, a traceback with --debug."""
    code = 0
    try:
        # Not app(): that turns Ctrl-C and a closed pipe into exit codes before this can say what was saved.
        command = typer.main.get_command(app)
        with command.make_context("headwise", sys.argv[1:]) as context:
            command.invoke(context)
        if sys.stdout is not None:
            sys.stdout.flush()
    except typer.Exit as stop:
        code = stop.exit_code
    except TyperException as error:
        code = _failed(error, error.format_message())
    except HeadwiseError as error:
        code = _failed(error, str(error))
    except BrokenPipeError:
        _drop_output()  # nobody reads on
    except OSError as error:
        _drop_output()
        code = _failed(error, _os_message(error))
    except (KeyboardInterrupt, typer.Abort) as error:
        code = _failed(error, _interrupt_message(error), code=130)
    except Exception as error:
        code = _failed(error, f"{type(error).__name__}: {error}; this is a bug, and --debug shows where", code=1)
    sys.exit(code)


def _drop_output() -> None:
    """What still waits for standard output would fail again when Python exits, and be reported a second time."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(error: BaseException, message: str, code: int = 2) -> int:
    if _show_traceback:
        raise error
    err.print(f"headwise: {' '.join(message.split())}", soft_wrap=True)
    return code


def _os_message(error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    reason = error.strerror or str(error)
    where = f" {error.filename}" if error.filename else ""
    return f"cannot {'write' if full else 'use'}{where}: {reason}{'; earlier files are whole' if full else ''}"


def _interrupt_message(error: BaseException) -> str:
    step = getattr(error, "step", None)
    if step is None:
        return "interrupted"
    return f"stopped after step {step}, and saved; go on with --resume and the same --out"
