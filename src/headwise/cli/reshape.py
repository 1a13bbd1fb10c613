"""What `headwise share`, `prune` and `narrow` have in common: options, progress, output."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from headwise.cli.app import Debug, Device, Json, Progress, err, out, print_json
from headwise.cli.interrupt import leaving
from headwise.errors import HeadwiseError
from headwise.reshape import report

if TYPE_CHECKING:
    from headwise.reshape.job import Change, Listener


@dataclass(frozen=True, kw_only=True)
class Options(report.Options):
    """What the commands take."""

    text: Path | None = None
    out: Path | None = None
    device: Device = "cpu"
    model: Path
    as_json: Json = False
    debug: Debug = False


def with_options(command: Callable[..., Change], without: str = "") -> Callable[..., None]:
    """The command with `Options`, but for one, after its own options. It answers with a change, which is made."""
    hints = get_type_hints(Options, include_extras=True)
    common = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(Options)
        if field.name != without
    ]
    specific = inspect.signature(command, eval_str=True).parameters.values()
    shown = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in specific] + common

    @functools.wraps(command)
    def whole(**values: Any) -> None:
        options = Options(**{parameter.name: values.pop(parameter.name) for parameter in common})
        with leaving(_ending(options.out)):
            reshape(options, command(**values))

    whole.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    whole.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return whole


def _ending(folder: Path | None) -> Callable[[], str]:
    """What Ctrl-C leaves of a job: a folder that is whole, a healing that waits, or nothing."""

    def written() -> int | None:
        path = None if folder is None else folder / "config.json"
        return path.stat().st_mtime_ns if path is not None and path.exists() else None

    before = written()

    def tell() -> str:
        if folder is not None and written() != before:
            return f"{folder} is written"
        waiting = folder is not None and (folder.parent / f"{folder.name}.partial" / report.STATE).exists()
        return "a healing waits: the same command goes on with --resume" if waiting else "nothing was written"

    return tell


def reshape(options: Options, change: Change) -> None:
    """Make the change; show the damage as soon as it is known, then the rest."""
    from headwise.reshape.job import Job
    from headwise.view.reshape import print_reshaped

    if options.heal is not None and options.out is None:
        raise HeadwiseError("--heal makes a model to keep; pass --out, the folder to write it to")
    with _listening(options.as_json) as listener:
        reshaped = Job(options.model, change, options, listener).run()
    if options.as_json:
        print_json(reshaped.document())
    else:
        print_reshaped(out, reshaped)


@contextmanager
def _listening(as_json: bool) -> Iterator[Listener]:
    """Progress on standard error; the damage, as soon as it is known, on standard output."""
    from headwise.reshape.job import Listener
    from headwise.view.reshape import print_changed, print_damage

    def point(evaluation: report.HealPoint, steps: int) -> None:
        loss = "" if evaluation.held_out_loss is None else f"held-out {evaluation.held_out_loss:.3f}  "
        progress("step", evaluation.step, steps, f"{loss}distance {evaluation.distance:.4f}", milestone=True)

    def damage(what: str, notes: tuple[str, ...], first: report.Damage) -> None:
        if not as_json:
            print_changed(out, what, notes)
            print_damage(out, "Before any training, on held-out text", first)

    with Progress("measuring the model as it is, and changed") as progress:
        yield Listener(say=lambda line: err.print(line, soft_wrap=True), point=point, damage=damage)
