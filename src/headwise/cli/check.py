"""`headwise check`."""

from __future__ import annotations

import ast
from typing import Any

import typer

from headwise.cli.app import Debug, Json, command, out, print_json
from headwise.errors import HeadwiseError


@command()
def check(
    target: str,
    causal: bool | None = None,
    args: str = "",
    mapping: str = "",
    lang: str = "en",
    seconds: float = 20.0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Name the bugs in your own attention.

    It is a class or a function, in torch, NumPy or plain Python. The same weights go through a correct form, and every
    known bug is tried on it: the one that gives your numbers is yours. The file runs in a process of its own, with a
    limit of time and memory. Exit code 0: right, 1: wrong, 2: it could not be checked.
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
