"""From a model to a reshaped one: read, change, measure, heal, measure again, write, verify."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from timeit import timeit
from typing import Any

import torch
from torch import nn

from headwise.corpus.verbs import WHOLE_LINES
from headwise.errors import HeadwiseError
from headwise.families import check_reshapable, run_of
from headwise.models.ask import answers, context_of, evaluating, predicts, vocabulary_of
from headwise.models.locate import located
from headwise.models.open import Folder, described, open_folder
from headwise.models.sites import require_held
from headwise.models.weights import cast, family_of
from headwise.records import plain_data
from headwise.reshape.arguments import HealRecipe, Options, check_free, check_place, recipe_of
from headwise.reshape.export import export
from headwise.reshape.heal import (
    Damage,
    Gone,
    HeadPairs,
    Healing,
    HealPoint,
    Speed,
    cache_bytes,
    measure,
)
from headwise.reshape.text import Calibration, n_tokens, read_calibration

# tokens on which the speed of a model is tried: a round choice, short beside what is then read
GLIMPSE = 64
# stands for the folder of a model that was not read from one
IN_MEMORY = Path("the model in memory")


@dataclass(frozen=True)
class Changed:
    """A child, and what is known about it."""

    model: nn.Module
    what: str  # one line: what was done
    details: dict[str, object]  # by the names of JSON
    origins: Sequence[Sequence[int]]  # for each layer the parent's number of each head
    notes: tuple[str, ...] = ()
    silent: Gone = ()  # heads that are zero and must stay so while the child heals

    @property
    def pairs(self) -> HeadPairs:
        """For each layer the heads that give something in both models: (its number in the parent, in the child)."""
        silent = self.silent or ((),) * len(self.origins)  # () stands for none in any layer
        rows = zip(self.origins, silent, strict=True)
        return [
            [(old, new) for new, old in enumerate(row) if new not in zeros] for row, zeros in rows
        ]


class Change(ABC):
    """A way to reshape; its fields, with the text, determine the child."""

    @abstractmethod
    def check(self, model: nn.Module) -> None:
        """Refuse what cannot be done, before a text is read."""

    def tokens_run(self, model: nn.Module, calibration: Calibration) -> int:
        """About how many tokens the model reads until the child is there, for a forecast of the time."""
        return 0

    @abstractmethod
    def apply(self, job: Job) -> Changed:
        """Make the child of `job.source`."""


@dataclass(frozen=True)
class Listener:
    """Whom to tell: lines for a reader, points of the healing's curve with the steps asked for, and the first damage.

    That comes with what was done and the notes, before a healing begins, which may take hours.
    """

    say: Callable[[str], None] = lambda line: None
    point: Callable[[HealPoint, int], None] = lambda point, steps: None
    damage: Callable[[str, tuple[str, ...], Damage], None] = lambda what, notes, damage: None


@dataclass(frozen=True, repr=False)
class Reshaped:
    """A model that was shared or pruned, and what that cost."""

    model: nn.Module = field(compare=False)  # the child, in eval mode
    source: str
    out: str | None  # None where nothing was written
    what: str  # one line: what was done
    notes: tuple[str, ...]  # what a reader must know besides
    details: dict[str, object]  # groups or heads, and the settings that determine the result
    # the run of headwise that knows the text, seen from `out` where that is written
    run: str | None
    damage: Damage  # before any training
    curve: tuple[HealPoint, ...] = ()  # of healing; empty without
    healed: Damage | None = None
    verified: str | None = None  # how the folder was read back; None where nothing was written

    def __repr__(self) -> str:
        return f"Reshaped({self.what};\n         {self.won})"

    @property
    def won(self) -> str:
        """One line: cache, texts that fit, loss, speed."""
        return ", ".join(self.won_parts)

    @property
    def won_parts(self) -> list[str]:
        # The parts of `won`, each left out where there is nothing to tell.
        last = self.healed or self.damage
        cache, texts, speed = last.cache_bytes, last.texts, last.tokens_per_second
        parts = []
        if cache.before:
            unit, size = ("KiB", 1024) if min(cache.before, cache.after) >= 1024 else ("bytes", 1)
            before, after = (f"{n / size:,.4g}" for n in (cache.before, cache.after))
            change = (
                f"cache {before} -> {after} {unit}"
                if after != before
                else f"cache as before, {after} {unit},"
            )
            parts.append(f"{change} a token at {last.context:,} tokens")
        if texts.before and texts.after != texts.before:
            parts.append(f"{texts.after / texts.before:.2g} x as many texts in 24 GiB")
        if last.loss is not None:
            parts.append(f"loss {last.loss.after - last.loss.before:+.3f} nats")
        if speed is not None:
            # The widest span of the factor: the least of one over the most of the other.
            factor = f"{speed.after / speed.before:.2g}"
            low = f"{speed.after_range[0] / speed.before_range[1]:.2g}"
            high = f"{speed.after_range[1] / speed.before_range[0]:.2g}"
            parts.append(f"decode x {factor} ({low} to {high})")
        return parts

    def document(self) -> dict[str, Any]:
        """All but the model, as JSON has it."""
        fields = {name: value for name, value in vars(self).items() if name != "model"} | {
            "won": self.won
        }
        return plain_data(fields)


@dataclass
class Job:
    """A change to a model, and all that goes with it; `run` sets the fields without an argument.

    model     a model in memory, or the folder of one
    options   the keyword arguments of `share` and `prune`, which `share` explains
    source    the model that is changed, with its folder and tokenizer
    """

    model: nn.Module | str | Path
    change: Change
    options: Options
    listener: Listener = field(default_factory=Listener)
    source: Folder = field(init=False)
    calibration: Calibration = field(init=False)

    def run(self) -> Reshaped:
        """Do it. Raises HeadwiseError for bad input."""
        options = self.options
        recipe, out = (
            recipe_of(options),
            None if options.get("out") is None else Path(str(options["out"])),
        )
        path = self._path()
        if out is not None:  # before the model is read, which may take minutes
            check_place(path, out)
            check_free(out, options.get("force", False))
        self.source = self._opened(path)
        with _left_alone(self.source.model):
            self._check(writes=out is not None)
            read = options.get("text"), self.source, options.get("tokens"), options.get("documents")
            self.calibration = read_calibration(*read)
            return self._reshaped(recipe, out)

    def _path(self) -> Path:
        """Where the model lies; IN_MEMORY for one that was made there."""
        if isinstance(self.model, nn.Module):
            folder = described(self.model)
            return IN_MEMORY if folder is None else folder.path
        path = located(Path(self.model))
        check_reshapable(path)
        return path

    def _opened(self, path: Path) -> Folder:
        """The model with its folder and tokenizer, read where it is not in memory."""
        model, device = self.model, self.options.get("device", "cpu")
        if not isinstance(model, nn.Module):
            return open_folder(path, device=device)
        if device != "cpu":
            raise HeadwiseError(
                "device= is where a folder is opened; a model in memory stays where it is"
            )
        return described(model) or Folder(
            path, model, None, context_of(model), family_of(model).name, vocabulary_of(model)
        )

    def _check(self, writes: bool) -> None:
        """Refuse what cannot be done with this model, before a text is read."""
        model = self.source.model
        family_of(model)  # raises for a model whose family has no record
        require_held(model, "a change of heads")
        name = type(model).__name__
        # A class whose name ends so has no head: its hidden states are compared. Others without logits have a head
        # for something else, such as a classifier's.
        if not predicts(model) and not name.endswith("Model"):
            raise HeadwiseError(
                f"{name} answers with something other than tokens, and what sharing or pruning costs is measured on "
                f"those; save the model without that head, or with its language-model head"
            )
        cache_bytes(model)  # raises for a config without the sizes of the cache
        if writes and self.source.tokens is None and self.source.family == "headwise":
            raise HeadwiseError(
                "the model has no tokenizer, and a folder of headwise needs one; open the model from a folder "
                "with hw.open, or leave out= away and keep the model of the result"
            )
        self.change.check(model)

    def _reshaped(self, recipe: HealRecipe | None, out: Path | None) -> Reshaped:
        source, calibration, say = self.source, self.calibration, self.listener.say
        say(self._forecast())
        say("reading the text to calibrate")
        changed = self.change.apply(self)

        def damage_of(child: nn.Module, speed: Speed | None = None) -> Damage:
            return measure(
                source.model,
                child,
                calibration.evaluation,
                changed.pairs,
                source.context,
                say,
                speed,
            )

        # The speed is measured once: a healing changes numbers alone.
        model, damage = changed.model, damage_of(changed.model)
        notes: list[str] = [*changed.notes]
        if calibration.built_in and damage.loss is not None:
            notes.append(WHOLE_LINES)
        notes += calibration.about
        self.listener.damage(changed.what, tuple(notes), damage)
        details = {**vars(self.change), **changed.details}
        curve, healed = list[HealPoint](), None  # an empty list, with a type
        if recipe is not None:
            healing = self._healed(recipe, changed)
            model, curve = healing.model, healing.curve
            details["healing"] = {
                **asdict(recipe),
                "steps_made": healing.steps,
                "best_step": healing.best_step,
            }
            healed = damage_of(model, damage.tokens_per_second)
        model.requires_grad_(True)
        report = Reshaped(
            model=model,
            source=str(source.path),
            out=None if out is None else str(out),
            what=changed.what,
            notes=tuple(notes),
            details=details,
            run=_run(source.path, out),
            damage=damage,
            curve=tuple(curve),
            healed=healed,
        )
        if out is None:
            return report
        verified = export(
            model, source, out, self.options.get("force", False), report.document(), say
        )
        return replace(report, verified=verified)

    @torch.no_grad()
    def _forecast(self) -> str:
        """What is read, and how long that takes at the speed of the first tokens, in a line."""
        model, calibration = self.source.model, self.calibration
        ids = calibration.evaluation[0][:1, :GLIMPSE]
        answers(model, ids)  # the first run of all is slower
        seconds = timeit(partial(answers, model, ids), number=1)
        speed = ids.numel() / max(seconds, 1e-9)  # not by 0, where a clock is coarse
        to_measure = n_tokens(calibration.evaluation)
        to_change = self.change.tokens_run(model, calibration)
        seconds = (to_change + 2 * to_measure) / speed  # the parent and the child
        bounded = "" if calibration.most else "; documents= bounds that"
        return (
            f"about {seconds / 60:.1f} min: {to_change:,} tokens to make the change and 2 x {to_measure:,} to measure "
            f"it, at {speed:,.0f} tokens a second{bounded}"
        )

    def _healed(self, recipe: HealRecipe, changed: Changed) -> Healing:
        """Heal in float32, whatever the number format of the weights, and go back to that format afterwards."""
        self.listener.say(f"healing for {recipe.steps} steps")
        dtype = next(changed.model.parameters()).dtype
        healing = Healing(
            self.source.model,
            cast(changed.model, torch.float32),
            self.calibration.train,
            # other held-out texts than those on which the damage is measured
            self.calibration.glance,
            recipe,
            self.listener.point,
            changed.silent,
        ).run()
        if healing.stopped:
            self.listener.say(
                f"healing stopped after step {healing.steps}; the best weights so far are kept"
            )
        healing.model = cast(healing.model.requires_grad_(False), dtype)
        return healing


def _run(source: Path, out: Path | None) -> str | None:
    """The run that `source` is or comes from; seen from `out`, so that both folders may be moved together."""
    run = run_of(source)
    if run is None or out is None:
        return None if run is None else str(run)
    return os.path.relpath(run.resolve(), out.resolve())


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    # Inside this block a model is in eval mode and takes no gradients; afterwards it is as it was.
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with evaluating(model):
        model.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in learning:
                parameter.requires_grad_(True)
