"""`headwise check`."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from headwise.cli.app import (
    as_options,
    command,
    err,
    language,
    needs_torch,
    out,
    print_json,
    running_options,
    wants_json,
)
from headwise.cli.heads import write_report_of
from headwise.cli.train import free_folder, leaving_run, result_json, training_progress
from headwise.errors import HeadwiseError
from headwise.teach.bugs import Verdict, words
from headwise.words import refusal

if TYPE_CHECKING:
    from headwise.teach.subject import Target


@command()
def check(
    target: str,
    causal: bool | None = None,
    args: str = "",
    mapping: str = "",
    seconds: float = 20.0,
    watch: bool = False,
    steps: int | None = None,
    folder: Path | None = None,
) -> None:
    """Name the bugs in your own attention, and watch its heads.

    It is a class or a function, in torch, NumPy or plain Python. The same weights go through a correct form, and every
    known bug is tried on it: the one that gives your numbers is yours. The file runs in a process of its own, with a
    limit of time and memory. Exit code 0: right, 1: wrong, 2: it could not be checked. With --watch a small GPT learns
    the verbs with your class as its attention, and a page shows its heads.
    """
    from headwise.teach.check import check as checked
    from headwise.teach.check import read_target
    from headwise.teach.subject import Options

    if not watch and (steps is not None or folder is not None):
        option = "--steps" if folder is None else "--out"
        raise refusal("with_watch", option=option)
    lang = language()
    pairs = {name: _value(name, text, lang) for name, text in _pairs("--args", args, lang).items()}
    names = _pairs("--map", mapping, lang)
    chosen = None
    try:
        chosen = read_target(target, Options(causal, pairs, names, lang)) if watch else None
    except HeadwiseError:  # which is a ValueError, too
        raise
    except (SyntaxError, ValueError):  # of which the verdict tells
        pass
    if chosen is not None and not chosen.source.is_module(chosen.name):
        raise HeadwiseError(chosen.say("no_module", name=chosen.name))
    tell_unheld(lang)
    verdict = checked(target, causal=causal, args=pairs, mapping=names, lang=lang, seconds=seconds)
    open_ahead = words(lang)["not_causal"] in verdict.checked
    verdict = replace(_in_options(verdict), others=tuple(map(_in_options, verdict.others)))
    if not wants_json():
        out.print(str(verdict))
    seen = None
    if chosen is not None and verdict.right:
        if not wants_json():
            out.print("")
        if open_ahead and "mask" not in chosen.source.code:  # refused here, it need not be loaded once more
            raise HeadwiseError(chosen.say("sees_later", name=chosen.name))
        seen = show_heads(folder or free_folder(Path("runs") / chosen.name.lower()), chosen, steps)
    elif watch:
        err.print(words(lang)["first_right"], soft_wrap=True)
    if wants_json():
        print_json("check", verdict.to_json() | ({"watched": seen} if watch else {}))
    raise typer.Exit(verdict.exit_code)


def _in_options(verdict: Verdict) -> Verdict:
    """A verdict that speaks of options in the place of arguments."""
    options = running_options()
    tried, untried = (tuple(as_options(x, options) for x in texts) for texts in (verdict.checked, verdict.not_checked))
    return replace(verdict, checked=tried, not_checked=untried)


def show_heads(folder: Path, target: Target, steps: int | None) -> dict[str, Any]:
    """Let a class learn the verbs into a run folder, and write the page of its heads; what a program should know."""
    with needs_torch():
        from headwise.teach.own import train_apart
    with leaving_run(folder), training_progress() as (report, _):
        err.print(target.say("training", name=target.name), soft_wrap=True)
        learned = train_apart(folder, target, steps, report)
        page = write_report_of(folder)
    result = learned.run
    assert result.cells is not None and result.summary is not None
    if not wants_json():
        right, _, count = result.cells
        losses = {"loss": result.summary.held_out_loss, "baseline": result.summary.baseline_loss}
        out.print(target.say("trained", **losses, right=right, all=count))
        out.print(target.say("certified", difference=learned.logits))
        key = "unwatched" if learned.maps is None else "watched"
        out.print(target.say(key, difference=learned.maps, why=learned.unwatched))
        out.print(target.say("report", path=page, folder=folder))
    differences = {"difference": learned.logits, "maps_difference": learned.maps, "unwatched": learned.unwatched}
    return {**result_json(folder, result, page), **differences}


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
