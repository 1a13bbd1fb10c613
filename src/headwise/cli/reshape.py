"""What `headwise share` and `headwise prune` have in common: options, progress, output."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from headwise.cli.app import Debug, Json, Progress, err, needs_torch, out, print_json
from headwise.errors import HeadwiseError
from headwise.reshape.recipe import HealRecipe

if TYPE_CHECKING:
    from headwise.reshape.job import Change, Listener
    from headwise.reshape.report import Damage, HealPoint


@dataclass(frozen=True, kw_only=True)
class Options:
    """What both commands take."""

    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run folder, or a model in Hugging Face layout.")]
    text: Annotated[
        Path | None,
        typer.Option(
            help="A UTF-8 text to calibrate on, to heal on, and, its last tenth, to measure on; "
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
        int | None, typer.Option(help="Steps of healing, with --out: the child learns from its parent.")
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
        typer.Option(help="Tokens on which W_O is fitted before healing, in closed form; with --heal 0 that alone."),
    ] = HealRecipe.refit
    seed: Annotated[int, typer.Option(help="Seed of the order of documents in healing.")] = HealRecipe.seed
    force: Annotated[bool, typer.Option("--force", help="Replace --out, if share or prune wrote it.")] = False
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a healing that was stopped.")] = False
    as_json: Json = False
    debug: Debug = False


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with `Options` behind its own ones; it gets them as one argument, its first."""
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
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    shown = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own] + common

    @functools.wraps(command)
    def given(**values: Any) -> None:
        command(Options(**{field.name: values.pop(field.name) for field in fields(Options)}), **values)

    given.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    given.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return given


def reshape(change: Change, options: Options) -> None:
    """Run the job, show its damage as soon as it is known, then the rest."""
    with needs_torch():
        from headwise.reshape.job import Job, run_job
        from headwise.view.reshape import print_reshaped
    healing = ("batch", "lr", "hidden", "refit", "seed")
    given = [name for name in healing if getattr(options, name) != getattr(HealRecipe, name)]
    if options.heal is None and given:
        raise HeadwiseError(f"--{given[0]} is about healing; pass --heal STEPS with it, or --heal 0 --refit TOKENS")
    recipe = None
    if options.heal is not None:
        recipe = HealRecipe(
            steps=options.heal,
            batch=options.batch,
            lr=options.lr,
            hidden=options.hidden,
            refit=options.refit,
            seed=options.seed,
        )
    job = Job(
        source=options.model,
        text=options.text,
        out=options.out,
        tokens=options.tokens,
        recipe=recipe,
        force=options.force,
        resume=options.resume,
    )
    with _progress(options.as_json) as listener:
        report = run_job(job, change, listener)
    if options.as_json:
        print_json(asdict(report))
    else:
        print_reshaped(out, report)


@contextmanager
def _progress(as_json: bool) -> Iterator[Listener]:
    """Where there is no terminal, each evaluation has a line; the damage goes to standard output."""
    from headwise.reshape.job import Listener
    from headwise.view.reshape import print_changed, print_damage

    def point(found: HealPoint, steps: int) -> None:
        loss = "" if found.held_out_loss is None else f"held-out {found.held_out_loss:.3f}  "
        progress("step", found.step, steps, f"{loss}distance {found.distance:.4f}", milestone=True)

    def damage(what: str, notes: tuple[str, ...], found: Damage) -> None:
        if not as_json:
            print_changed(out, what, notes)
            print_damage(out, "Before any training, on held-out text", found)

    with Progress() as progress:
        yield Listener(say=lambda line: err.print(line, soft_wrap=True), point=point, damage=damage)
