"""From a model folder to a reshaped one: read, change, measure, heal, measure again, write, verify."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from headwise.errors import HeadwiseError
from headwise.gpt.presets import check_seed
from headwise.gpt.train import Stopped
from headwise.gpt.verbs import WHOLE_LINES
from headwise.models.ask import check_class
from headwise.models.lineage import ancestors, digest
from headwise.models.open import Folder, open_folder
from headwise.models.weights import cast, family_of
from headwise.reshape.damage import HeadPairs, cache_bytes, measure
from headwise.reshape.export import export
from headwise.reshape.heal import Healed, heal
from headwise.reshape.prune import Gone, zero
from headwise.reshape.recipe import HealRecipe
from headwise.reshape.report import Damage, HealPoint, Reshaped
from headwise.reshape.text import Calibration, read_calibration
from headwise.reshape.workplace import Workplace


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is asked for, besides the change itself."""

    source: Path
    text: Path | None = None  # None: what a run of headwise was trained on
    out: Path | None = None  # None: measure and write nothing
    tokens: int | None = None  # of a document; None takes the model's context, within bounds
    recipe: HealRecipe | None = None
    force: bool = False
    resume: bool = False


@dataclass(frozen=True)
class Changed:
    """A child, and what is known about it."""

    model: nn.Module
    what: str
    details: dict[str, object]
    origins: Sequence[Sequence[int]]  # for each layer the parent's number of each head
    notes: tuple[str, ...] = ()
    silent: Gone = ()  # heads that are zero and must stay so while the child heals

    @property
    def pairs(self) -> HeadPairs:
        """The heads that both models have and hear."""
        silent = self.silent or ((),) * len(self.origins)
        rows = zip(self.origins, silent, strict=True)
        return [[(old, new) for new, old in enumerate(row) if new not in gone] for row, gone in rows]


@dataclass(frozen=True)
class Change:
    """A way to reshape: `check` refuses before a text is read, `apply` makes the child."""

    settings: dict[str, object]
    check: Callable[[nn.Module], None]
    apply: Callable[[Folder, Calibration], Changed]


@dataclass(frozen=True)
class Listener:
    """Whom to tell: lines for a reader, points of the recovery curve with the number of steps, and the first damage."""

    say: Callable[[str], None] = lambda line: None
    point: Callable[[HealPoint, int], None] = lambda point, steps: None
    damage: Callable[[str, tuple[str, ...], Damage], None] = lambda what, notes, damage: None


def run_job(job: Job, change: Change, listener: Listener) -> Reshaped:
    """Do a job. Raises HeadwiseError for bad input, Stopped after Ctrl-C in healing, whose state then waits."""
    if job.out is None and (job.recipe is not None or job.force or job.resume):
        raise HeadwiseError("--heal, --force and --resume are about the folder that is written; pass --out")
    if job.resume and job.recipe is None:
        raise HeadwiseError("--resume goes on with a healing; pass --heal with the steps it began with")
    if job.recipe is not None:
        check_seed(job.recipe.seed)
    with nullcontext() if job.out is None else Workplace(job.source, job.out, job.force) as workplace:
        folder = open_folder(job.source)
        _check_model(folder.model)
        change.check(folder.model)
        calibration = read_calibration(job.text, folder, job.tokens)
        if workplace is not None and (workplace.has_state or job.recipe is not None):
            workplace.claim(_settings(job, change, calibration), job.resume)
            if job.resume and not workplace.has_state:
                listener.say(f"nothing to resume in {workplace.path}; beginning")
        listener.say("reading the text to calibrate")
        return _reshaped(job, change, folder, calibration, workplace, listener)


def _check_model(model: nn.Module) -> None:
    """Refuse what cannot be measured before anything is."""
    family_of(model)
    check_class(model)
    cache_bytes(model)


def _settings(job: Job, change: Change, calibration: Calibration) -> dict[str, object]:
    """What a healing that goes on must have in common with the one that was stopped."""
    return {
        **change.settings,
        "source": digest(job.source),
        "text": calibration.digest,
        "tokens": calibration.length,
        **({} if job.recipe is None else asdict(job.recipe)),
    }


def _reshaped(
    job: Job,
    change: Change,
    folder: Folder,
    calibration: Calibration,
    workplace: Workplace | None,
    listener: Listener,
) -> Reshaped:
    folder.model.requires_grad_(False)
    changed = change.apply(folder, calibration)
    lineage = ancestors(job.source, changed.origins, job.out)
    damage = _damage(folder, changed.model, changed, calibration, listener)
    notes = changed.notes if calibration.path is not None or damage.loss is None else (*changed.notes, WHOLE_LINES)
    listener.damage(changed.what, notes, damage)
    model, healed, after = changed.model, None, None
    if job.recipe is not None and workplace is not None:
        workplace.claim({"origins": changed.origins, "silent": changed.silent}, job.resume)
        listener.say(f"healing for {job.recipe.steps} steps; the state goes to {workplace.path}")
        healed = _heal(job.recipe, folder, changed, calibration, workplace.path, listener)
        model = healed.model
        after = _damage(folder, model, changed, calibration, listener)
    report = Reshaped(
        source=str(job.source),
        out=None if job.out is None else str(job.out),
        what=changed.what,
        notes=notes,
        details={**change.settings, **changed.details, **_healing(job.recipe, healed)},
        ancestors=lineage,
        damage=damage,
        curve=() if healed is None else healed.curve,
        healed=after,
        verified=None,
    )
    if workplace is None:
        return report
    return replace(report, verified=_exported(model, folder, workplace, report, healed, listener))


def _exported(
    model: nn.Module, folder: Folder, workplace: Workplace, report: Reshaped, healed: Healed | None, listener: Listener
) -> str:
    """Write and verify; Ctrl-C says where a healing stands, for its state waits."""
    try:
        return export(model, folder, workplace, asdict(report), listener.say)
    except KeyboardInterrupt:
        if healed is None:
            raise
        raise Stopped(healed.steps) from None


def _damage(folder: Folder, child: nn.Module, changed: Changed, calibration: Calibration, listener: Listener) -> Damage:
    return measure(folder.model, child, calibration.evaluation, changed.pairs, folder.context, listener.say)


def _heal(
    recipe: HealRecipe, folder: Folder, changed: Changed, calibration: Calibration, path: Path, listener: Listener
) -> Healed:
    """In float32, whatever the number format of the weights; back in it afterwards."""
    dtype = next(changed.model.parameters()).dtype
    healed = heal(
        folder.model,
        cast(changed.model, torch.float32),
        calibration.train,
        calibration.glance,
        recipe,
        path,
        listener.point,
        lambda model: zero(model, changed.silent) if changed.silent else None,
    )
    cast(healed.model.requires_grad_(False), dtype)
    return healed


def _healing(recipe: HealRecipe | None, healed: Healed | None) -> dict[str, object]:
    if recipe is None or healed is None:
        return {}
    return {"healing": {**asdict(recipe), "steps_made": healed.steps, "best_step": healed.best_step}}
