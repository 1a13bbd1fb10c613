"""What `headwise share` and `headwise prune` have in common: options, progress, output."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from headwise.cli.app import Debug, Json, Progress, err, out, print_json
from headwise.errors import HeadwiseError
from headwise.files import STDIN, read_text
from headwise.reshape.report import HealRecipe

if TYPE_CHECKING:
    from headwise.reshape.job import Listener
    from headwise.reshape.report import Damage, HealPoint, Reshaped


@dataclass(frozen=True, kw_only=True)
class Options:
    """What both commands take."""

    model: Path
    text: Path | None = None
    out: Path | None = None
    tokens: int | None = None
    heal: int | None = None
    batch: int = HealRecipe.batch
    lr: float = HealRecipe.lr
    hidden: float = HealRecipe.hidden
    refit: int = HealRecipe.refit
    seed: int = HealRecipe.seed
    force: bool = False
    resume: bool = False
    stream: bool | None = None
    as_json: Json = False
    debug: Debug = False


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with `Options` after its own options; it gets them as one argument, its first."""
    hints = get_type_hints(Options, include_extras=True)
    common = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(Options)
    ]
    _, *specific = inspect.signature(command, eval_str=True).parameters.values()
    shown = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in specific] + common

    @functools.wraps(command)
    def whole(**values: Any) -> None:
        command(Options(**{field.name: values.pop(field.name) for field in fields(Options)}), **values)

    whole.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    whole.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return whole


def reshape(options: Options, verb: Callable[..., Reshaped]) -> None:
    """Call `hw.share` or `hw.prune` with the common options; show the damage as soon as it is known, then the rest."""
    from headwise.view.reshape import print_reshaped

    arguments = {name: value for name, value in vars(options).items() if name not in ("model", "as_json", "debug")}
    if options.text == Path(STDIN):
        arguments["text"] = read_text(STDIN)
    if options.heal is None:
        for name in ("batch", "lr", "hidden", "refit", "seed"):
            if arguments[name] != getattr(HealRecipe, name):
                raise HeadwiseError(f"--{name} is about healing; pass --heal STEPS with it, or --heal 0 --refit TOKENS")
    elif options.out is None:
        raise HeadwiseError("--heal makes a model to keep; pass --out, the folder to write it to")
    with _listening(options.as_json) as listener:
        reshaped = verb(**arguments, listener=listener)
    if options.as_json:
        print_json(reshaped.document())
    else:
        print_reshaped(out, reshaped)


@contextmanager
def _listening(as_json: bool) -> Iterator[Listener]:
    """Progress on standard error; the damage, as soon as it is known, on standard output."""
    from headwise.reshape.job import Listener
    from headwise.view.reshape import print_changed, print_damage

    def point(evaluation: HealPoint, steps: int) -> None:
        loss = "" if evaluation.held_out_loss is None else f"held-out {evaluation.held_out_loss:.3f}  "
        progress("step", evaluation.step, steps, f"{loss}distance {evaluation.distance:.4f}", milestone=True)

    def damage(what: str, notes: tuple[str, ...], first: Damage) -> None:
        if not as_json:
            print_changed(out, what, notes)
            print_damage(out, "Before any training, on held-out text", first)

    with Progress("measuring the model as it is, and changed") as progress:
        yield Listener(say=lambda line: err.print(line, soft_wrap=True), point=point, damage=damage)
