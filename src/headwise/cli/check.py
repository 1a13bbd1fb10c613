"""`headwise check`."""

from __future__ import annotations

import ast
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from headwise.cli.app import as_options, command, err, out, print_json, running_options, wants_json
from headwise.errors import HeadwiseError
from headwise.files import read_json
from headwise.teach.bugs import words
from headwise.words import LANGUAGES


@command()
def check(
    target: str,
    causal: bool | None = None,
    args: str = "",
    mapping: str = "",
    lang: str | None = None,
    seconds: float = 20.0,
) -> None:
    """Name the bugs in your own attention.

    It is a class or a function, in torch, NumPy or plain Python. The same weights go through a correct form, and every
    known bug is tried on it: the one that gives your numbers is yours. The file runs in a process of its own, with a
    limit of time and memory. Exit code 0: right, 1: wrong, 2: it could not be checked.
    """
    from headwise.teach.check import check as checked

    lang = language(lang)
    tell_unheld(lang)
    pairs = {name: _value(name, text, lang) for name, text in _pairs("--args", args, lang).items()}
    names = _pairs("--map", mapping, lang)
    verdict = checked(target, causal=causal, args=pairs, mapping=names, lang=lang, seconds=seconds)
    options = running_options()
    tried, untried = (tuple(as_options(x, options) for x in texts) for texts in (verdict.checked, verdict.not_checked))
    verdict = replace(verdict, checked=tried, not_checked=untried)
    if wants_json():
        print_json("check", verdict.to_json())
    else:
        out.print(str(verdict))
    raise typer.Exit(verdict.exit_code)


def language(lang: str | None) -> str:
    """The language that a command was given, else that of the course in this folder, which `learn --lang` keeps."""
    for path in (Path("learn") / "progress.json", Path("progress.json")):
        if lang is None and path.exists():
            with suppress(ValueError, TypeError):  # a damaged one is told of by `learn`
                kept = dict(read_json(path)).get("language")
                lang = kept if kept in LANGUAGES else None
    return lang or "en"


def tell_unheld(lang: str) -> None:
    """Say in one line what this system cannot hold back, before a learner's file runs."""
    from headwise.teach.sandbox import unheld

    if lack := unheld(lang):
        err.print(f"headwise: {lack}", soft_wrap=True)


def _pairs(option: str, text: str, lang: str) -> dict[str, str]:
    """'a=1,b=2' as a dictionary."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    for name, sign, value in pairs:
        if not (name.strip() and sign and value.strip()):
            raise HeadwiseError(words(lang)["no_pair"].format(option=option, text=text))
    return {name.strip(): value.strip() for name, _, value in pairs}


def _value(name: str, text: str, lang: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise HeadwiseError(words(lang)["no_value"].format(name=name, text=text)) from None
