"""From a model folder to a reshaped one: read, change, measure, heal, measure again, write, verify."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from headwise.errors import HeadwiseError
from headwise.files import write_whole
from headwise.model.folder import Folder, open_folder
from headwise.model.presets import check_seed
from headwise.reshape.damage import HeadPairs, measure
from headwise.reshape.export import check_out, export, work_folder
from headwise.reshape.heal import STATE, Healed, HealRecipe, heal
from headwise.reshape.lineage import ancestors
from headwise.reshape.prune import Heads, zero
from headwise.reshape.report import Damage, HealPoint, Reshaped
from headwise.reshape.text import Calibration, document_length, read_calibration, text_of_run

JOB = "heal.json"  # in OUT.partial: the settings of the healing whose state lies there
OURS = (JOB, STATE, "export", "replaced", "probe.safetensors")  # all that this module puts there


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
    silent: Heads = ()  # heads that are zero and must stay so while the child heals

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
    damage: Callable[[Changed, Damage], None] = lambda changed, damage: None


def run_job(job: Job, change: Change, listener: Listener) -> Reshaped:
    """Do a job. Raises HeadwiseError for bad input, Stopped after Ctrl-C in healing, whose state then waits."""
    if job.out is None and (job.recipe is not None or job.force or job.resume):
        raise HeadwiseError("--heal, --force and --resume are about the folder that is written; pass --out")
    if job.resume and job.recipe is None:
        raise HeadwiseError("--resume goes on with a healing; pass --heal with the steps it began with")
    if job.recipe is not None:
        check_seed(job.recipe.seed)
    if job.out is not None:
        check_out(job.source, job.out, job.force)
    folder = open_folder(job.source)
    change.check(folder.model)
    calibration = read_calibration(job.text, folder, job.tokens)
    for parameter in folder.model.parameters():
        parameter.requires_grad_(False)
    with _Workplace(job, change, folder) as workplace:
        if job.resume and not (workplace.path / STATE).exists():
            listener.say(f"nothing to resume in {workplace.path}; beginning")
        listener.say("reading the text to calibrate")
        changed = change.apply(folder, calibration)
        lineage = ancestors(job.source, changed.origins)
        damage = _damage(folder, changed.model, changed, calibration, listener)
        listener.damage(changed, damage)
        model, healed, after = changed.model, None, None
        if job.recipe is not None:
            healed = _heal(job.recipe, folder, changed, calibration, workplace, listener)
            model = healed.model
            after = _damage(folder, model, changed, calibration, listener)
        report = Reshaped(
            source=str(job.source),
            out=None if job.out is None else str(job.out),
            what=changed.what,
            notes=changed.notes,
            details={**change.settings, **changed.details, **_healing(job.recipe, healed)},
            ancestors=lineage,
            damage=damage,
            curve=() if healed is None else healed.curve,
            healed=after,
            verified=None,
        )
        if job.out is None:
            return report
        said = export(model, folder, job.out, asdict(report), listener.say)
        workplace.done = True
        return Reshaped(**{**vars(report), "verified": said})


def _damage(folder: Folder, child: nn.Module, changed: Changed, calibration: Calibration, listener: Listener) -> Damage:
    return measure(folder.model, child, calibration.evaluation, changed.pairs, folder.context, listener.say)


def _heal(
    recipe: HealRecipe,
    folder: Folder,
    changed: Changed,
    calibration: Calibration,
    workplace: _Workplace,
    listener: Listener,
) -> Healed:
    """In float32, whatever the number format of the weights; back in it afterwards."""
    dtype = next(changed.model.parameters()).dtype
    listener.say(f"healing for {recipe.steps} steps; the state goes to {workplace.path}")
    child = changed.model.float()
    healed = heal(
        folder.model,
        child,
        calibration.train,
        calibration.glance,
        recipe,
        workplace.path,
        listener.point,
        lambda model: zero(model, changed.silent) if changed.silent else None,
    )
    healed.model.requires_grad_(False).to(dtype)
    return healed


def _healing(recipe: HealRecipe | None, healed: Healed | None) -> dict[str, object]:
    if recipe is None or healed is None:
        return {}
    return {"healing": {**asdict(recipe), "steps_made": healed.steps, "best_step": healed.best_step}}


class _Workplace:
    """OUT.partial while a job runs: claimed on entry, cleared on exit unless a healing's state waits in it."""

    def __init__(self, job: Job, change: Change, folder: Folder) -> None:
        self.path = Path() if job.out is None else work_folder(job.out)
        self.job, self.done = job, False
        length, text = document_length(folder, job.tokens), job.text or text_of_run(folder.path)
        self.settings: dict[str, Any] = {
            **change.settings,
            "source": str(job.source.resolve()),
            "text": None if text is None else str(text.resolve()),
            "digest": None if text is None else hashlib.sha256(text.read_bytes()).hexdigest(),
            "tokens": length,
            "heal": None if job.recipe is None else asdict(job.recipe),
        }

    def __enter__(self) -> _Workplace:
        if self.job.out is None:
            return self
        self._check()
        self.path.mkdir(exist_ok=True)
        if self.job.recipe is not None:
            write_whole(self.path / JOB, json.dumps(self.settings, indent=2) + "\n")
        return self

    def _check(self) -> None:
        """Refuse a folder that is not ours, or holds another healing."""
        if not self.path.exists():
            return
        foreign = (
            [x.name for x in self.path.iterdir() if x.name not in OURS and not x.name.endswith(".tmp")]
            if self.path.is_dir()
            else [""]
        )
        if foreign:
            raise HeadwiseError(f"{self.path} is in the way: the work goes on there; move it, or take another --out")
        if not (self.path / STATE).exists():
            return
        if not self.job.resume:
            raise HeadwiseError(
                f"{self.path} holds a healing that was stopped; pass --resume to go on with it, or remove that folder"
            )
        try:
            before = json.loads((self.path / JOB).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise HeadwiseError(f"{self.path / JOB} is damaged; remove that folder to begin anew") from None
        differing = [name for name, value in self.settings.items() if before.get(name) != json.loads(json.dumps(value))]
        if differing:
            raise HeadwiseError(
                f"the healing in {self.path} has other settings ({', '.join(differing)}); resume it with its own"
            )

    def __exit__(self, *_: object) -> None:
        if self.job.out is not None and (self.done or not (self.path / STATE).exists()):
            shutil.rmtree(self.path, ignore_errors=True)
