"""What `headwise share` and `headwise prune` have in common: options, progress, output."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from headwise.cli.app import Debug, Json, Progress, err, out, print_json
from headwise.errors import HeadwiseError
from headwise.reshape.recipe import HealRecipe

if TYPE_CHECKING:
    from headwise.reshape.job import Listener
    from headwise.reshape.report import Damage, HealPoint, Reshaped


@dataclass(frozen=True, kw_only=True)
class Options:
    """What both commands take."""

    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run folder, or a model in Hugging Face layout.")]
    text: Annotated[
        Path | None,
        typer.Option(
            help="A UTF-8 text file to calibrate and heal on, and, its last tenth, to measure on; "
            "default: what a run of headwise was trained on."
        ),
    ] = None
    out: Annotated[
        Path | None, typer.Option(help="The new model folder; without it the damage is shown and nothing written.")
    ] = None
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of a document; default: the model's context, at most 1,024.")
    ] = None
    heal: Annotated[
        int | None, typer.Option(help="Steps of healing, with --out: the new model learns to answer as the old one.")
    ] = None
    batch: Annotated[int, typer.Option(help="Documents in a step of healing.")] = HealRecipe.batch
    lr: Annotated[
        float, typer.Option(help="Peak learning rate of healing (Muon, on the matrices of the attention).")
    ] = HealRecipe.lr
    hidden: Annotated[
        float, typer.Option(help="Weight of the hidden states' error in healing, beside the divergence.")
    ] = HealRecipe.hidden
    refit: Annotated[
        int,
        typer.Option(help="Tokens on which W_O is fitted first, without training steps; --heal 0 does that alone."),
    ] = HealRecipe.refit
    seed: Annotated[int, typer.Option(help="Seed of the order in which healing reads the documents.")] = HealRecipe.seed
    force: Annotated[bool, typer.Option("--force", help="Replace --out, if share or prune wrote it.")] = False
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a healing that was stopped.")] = False
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

    with Progress() as progress:
        yield Listener(say=lambda line: err.print(line, soft_wrap=True), point=point, damage=damage)
