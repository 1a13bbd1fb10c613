"""`headwise check`."""

from __future__ import annotations

import ast
from typing import Annotated, Any

import typer

from headwise.cli.app import Debug, Json, app, out, print_json
from headwise.errors import HeadwiseError


@app.command(epilog="Example: headwise check attention.py:MultiHeadAttention --causal")
def check(
    target: Annotated[str, typer.Argument(metavar="FILE[:NAME]", help="A Python file, and what of it to check.")],
    causal: Annotated[
        bool | None, typer.Option("--causal/--no-causal", help="Ought it to be causal? Default: guessed, and said.")
    ] = None,
    args: Annotated[
        str, typer.Option(help="Values for parameters whose names do not tell: 'd_in=48,n_blocks=2'.")
    ] = "",
    mapping: Annotated[
        str, typer.Option("--map", help="Where weights are: 'q=W_query,k=W_key,v=W_value,o=proj'.")
    ] = "",
    lang: Annotated[str, typer.Option(help="Language of the words: en or es.")] = "en",
    seconds: Annotated[float, typer.Option(help="Stop the file after so many seconds.")] = 20.0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Name the bugs in your own attention: a class or a function, in torch, NumPy or plain Python.

    The same weights go through a correct form, and every known bug is tried on it: the one that gives your numbers is
    yours. The file runs in a process of its own, with a limit of time and memory. Exit code 0: right, 1: wrong, 2: it
    could not be checked.
    """
    from headwise.teach.check import check as checked

    if not seconds > 0:
        raise HeadwiseError(f"seconds={seconds} must be above 0")
    pairs = {name: _value(name, text) for name, text in _pairs("--args", args).items()}
    verdict = checked(target, causal=causal, args=pairs, mapping=_pairs("--map", mapping), lang=lang, seconds=seconds)
    if as_json:
        print_json(verdict.to_json())
    else:
        out.print(str(verdict))
    raise typer.Exit(verdict.exit_code)


def _pairs(option: str, text: str) -> dict[str, str]:
    """'a=1,b=2' as a dictionary."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    for name, sign, value in pairs:
        if not (name.strip() and sign and value.strip()):
            raise HeadwiseError(f"{option} {text!r}: each part is NAME=VALUE, such as {option} d_in=48")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _value(name: str, text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise HeadwiseError(
            f"--args {name}={text}: the value must be a number, a text in quotes, True or None"
        ) from None
