"""From a model to a reshaped one: read, change, measure, heal, measure again, write, verify."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from shutil import disk_usage

import torch
from torch import nn

from headwise.errors import HeadwiseError
from headwise.gpt.train import Stopped
from headwise.gpt.verbs import WHOLE_LINES
from headwise.markup import amount
from headwise.memory import free_memory
from headwise.models.ask import context_of, evaluating, predicts, vocabulary_of
from headwise.models.lineage import ancestors, digest, digest_of
from headwise.models.open import Folder, described, open_folder
from headwise.models.stream import stream_of
from headwise.models.weights import AttentionWeights, cast, family_of, read_layers, write_layer
from headwise.reshape.damage import HeadPairs, cache_bytes, measure
from headwise.reshape.export import export
from headwise.reshape.heal import Healing
from headwise.reshape.report import Damage, HealPoint, HealRecipe, Options, Reshaped, Speed
from headwise.reshape.text import Calibration, read_calibration
from headwise.reshape.workplace import Workplace

STREAMED = "the model was run layer by layer, so decoding was not timed: it would read all weights for each token"
IN_MEMORY = Path("the model in memory")  # stands for the folder of a model that was not read from one
Gone = tuple[tuple[int, ...], ...]  # for each layer the numbers of the query heads that go


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
        """The heads that give something in both models."""
        silent = self.silent or ((),) * len(self.origins)
        rows = zip(self.origins, silent, strict=True)
        return [[(old, new) for new, old in enumerate(row) if new not in zeros] for row, zeros in rows]


class Change(ABC):
    """A way to reshape; its fields, with the text, determine the child."""

    @abstractmethod
    def check(self, model: nn.Module) -> None:
        """Refuse what cannot be done, before a text is read."""

    @abstractmethod
    def apply(self, job: Job) -> Changed:
        """Make the child of `job.source`."""


@dataclass(frozen=True)
class Listener:
    """Whom to tell: lines for a reader, points of the recovery curve with the number of steps, and the first damage."""

    say: Callable[[str], None] = lambda line: None
    point: Callable[[HealPoint, int], None] = lambda point, steps: None
    damage: Callable[[str, tuple[str, ...], Damage], None] = lambda what, notes, damage: None


@dataclass
class Job:
    """A change to a model, and all that goes with it."""

    model: nn.Module | str | Path
    change: Change
    options: Options
    listener: Listener = field(default_factory=Listener)
    source: Folder = field(init=False)
    calibration: Calibration = field(init=False)
    workplace: Workplace | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.recipe, self.out = self.options.recipe, None if self.options.out is None else Path(self.options.out)
        self.settings = vars(self.change)

    def run(self) -> Reshaped:
        """Do it. Raises HeadwiseError for bad input, Stopped after Ctrl-C in healing, whose state then waits."""
        model, options = self.model, self.options
        if isinstance(model, nn.Module):
            if options.device != "cpu":
                raise HeadwiseError("device= is where a folder is opened; a model in memory stays where it is")
            self.source = described(model) or Folder(
                IN_MEMORY, model, None, context_of(model), family_of(model).name, vocabulary_of(model)
            )
        path = self.source.path if isinstance(model, nn.Module) else Path(model)
        with nullcontext() if self.out is None else Workplace(path, self.out, options.force) as self.workplace:
            if not isinstance(model, nn.Module):
                self.source = open_folder(path, stream=options.stream, device=options.device)
            with _left_alone(self.source.model):
                _check_model(self.source.model)
                self._check_stream()
                if self.out is not None and self.source.tokens is None and self.source.family == "headwise":
                    raise HeadwiseError(
                        "the model has no tokenizer, and a folder of headwise needs one; open the model from a folder "
                        "with hw.open, or leave out= away and keep the model of the result"
                    )
                self.change.check(self.source.model)
                self.calibration = read_calibration(options.text, self.source, options.tokens)
                stream = stream_of(self.source.model)
                if stream is not None:
                    parts = self.calibration.statistics, self.calibration.evaluation, self.calibration.evaluation
                    tokens = sum(ids.numel() for part in parts for ids in part)
                    self.listener.say(stream.forecast(tokens, self.calibration.length))
                return self._reshaped()

    def _check_stream(self) -> None:
        """What is other for a model that is streamed."""
        stream = stream_of(self.source.model)
        if stream is None:
            return
        if self.recipe is not None:
            raise HeadwiseError(
                f"healing holds the whole model, {amount(stream.size)} of weights, and {amount(free_memory().size)} "
                f"of memory are free; leave --heal away: aligned+norm and principal need no training"
            )
        folder = stream.scratch = Path(tempfile.gettempdir()) if self.workplace is None else self.workplace.path
        needed, free = stream.size * (self.workplace is not None) + stream.attention_size, disk_usage(folder).free
        if needed > free:
            raise HeadwiseError(f"{amount(needed)} are written to {folder}, where {amount(free)} are free")

    def _reshaped(self) -> Reshaped:
        folder, out = self._weights_folder(), self.out
        self._claim(lambda: {**self.settings, **self._settings(folder)})
        self.listener.say("reading the text to calibrate")
        changed = self.change.apply(self)
        damage = self._damage(changed.model, changed)
        streamed = (STREAMED,) if stream_of(changed.model) is not None else ()
        unread = streamed and out is None  # a digest of all weights takes as long as reading them
        whole_lines = (WHOLE_LINES,) if self.calibration.built_in and damage.loss is not None else ()
        report = Reshaped(
            model=changed.model,
            source=str(self.source.path),
            out=None if out is None else str(out),
            what=changed.what,
            notes=(*changed.notes, *whole_lines, *streamed, *filter(None, [self.calibration.about])),
            details={**self.settings, **changed.details},
            ancestors=() if folder is None or unread else ancestors(folder, changed.origins, out),
            damage=damage,
        )
        self.listener.damage(report.what, report.notes, damage)
        if self.recipe is not None:
            report = self._healed(self.recipe, changed, report)
        report.model.requires_grad_(stream_of(report.model) is None)
        return report if self.workplace is None else self._exported(self.workplace, report)

    def _weights_folder(self) -> Path | None:
        """None where the model was made, or changed, in memory."""
        if not isinstance(self.model, nn.Module) or stream_of(self.model) is not None:
            return self.source.path
        if self.source.path == IN_MEMORY:
            return None
        saved, weights = open_folder(self.source.path).model.state_dict(), self.source.model.state_dict()
        same = saved.keys() == weights.keys() and all(torch.equal(saved[name], weights[name].cpu()) for name in saved)
        return self.source.path if same else None

    def _settings(self, folder: Path | None) -> dict[str, object]:
        """What a healing that goes on must share with the one that was stopped, besides the change."""
        return {
            "source": digest_of(self.source.model) if folder is None else digest(folder),
            "text": self.calibration.digest,
            "tokens": self.calibration.length,
            **({} if self.recipe is None else asdict(self.recipe)),
        }

    def _claim(self, settings: Callable[[], Mapping[str, object]]) -> None:
        workplace = self.workplace
        if workplace is not None and (workplace.has_state or self.recipe is not None):
            if self.options.resume and not workplace.has_state:
                self.listener.say(f"nothing to resume in {workplace.path}; beginning")
            workplace.claim(settings(), self.options.resume)

    def _damage(self, child: nn.Module, changed: Changed, speed: Speed | None = None) -> Damage:
        held_out, context = self.calibration.evaluation, self.source.context
        return measure(self.source.model, child, held_out, changed.pairs, context, self.listener.say, speed)

    def _healed(self, recipe: HealRecipe, changed: Changed, report: Reshaped) -> Reshaped:
        """Heal in float32, whatever the number format of the weights, and go back to it afterwards."""
        path = None if self.workplace is None else self.workplace.path
        self._claim(lambda: {"origins": changed.origins, "silent": changed.silent})
        self.listener.say(f"healing for {recipe.steps} steps" + (f"; the state goes to {path}" if path else ""))
        dtype = next(changed.model.parameters()).dtype
        healed = Healing(
            self.source.model,
            cast(changed.model, torch.float32),
            self.calibration.train,
            self.calibration.glance,
            recipe,
            path,
            self.listener.point,
            lambda model: silence(model, changed.silent) if changed.silent else None,
        ).run()
        child = cast(healed.model.requires_grad_(False), dtype)
        healing = {**asdict(recipe), "steps_made": healed.steps, "best_step": healed.best_step}
        return replace(
            report,
            details={**report.details, "healing": healing},
            curve=tuple(healed.curve),
            healed=self._damage(child, changed, report.damage.tokens_per_second),
        )

    def _exported(self, workplace: Workplace, report: Reshaped) -> Reshaped:
        """Write and verify; Ctrl-C says where a healing stands, for its state waits."""
        try:
            verified = export(report.model, self.source, workplace, report.document(), self.listener.say)
        except KeyboardInterrupt:
            if not report.curve:
                raise
            raise Stopped(report.curve[-1].step) from None
        if stream_of(report.model) is not None and self.out is not None:  # its files have moved
            report = replace(report, model=open_folder(self.out, stream=True, device=self.options.device).model)
        return replace(report, verified=verified)


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with evaluating(model):
        model.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in learning:
                parameter.requires_grad_(True)


def _check_model(model: nn.Module) -> None:
    family_of(model)
    if next(model.parameters()).is_meta:
        raise HeadwiseError("the model is on the meta device and has no numbers; load its weights first")
    name = type(model).__name__
    if not predicts(model) and not name.endswith("Model"):
        raise HeadwiseError(
            f"{name} answers with something other than tokens, and what sharing or pruning costs is measured on "
            f"those; save the model without that head, or with its language-model head"
        )
    cache_bytes(model)


@torch.no_grad()
def silence(model: nn.Module, heads: Gone) -> None:
    """Make heads zero in place: their rows of W_Q, with the bias, and their columns of W_O."""
    for layer, (weights, gone) in enumerate(zip(read_layers(model), heads, strict=True)):
        write_layer(model, layer, silenced(weights, gone))


def silenced(weights: AttentionWeights, heads: Sequence[int]) -> AttentionWeights:
    """A copy of a layer in which these heads are zero."""
    wq, bq, wo = (None if x is None else x.detach().clone() for x in (weights.wq, weights.bq, weights.wo))
    assert wq is not None and wo is not None
    for rows in (wq, bq, wo.transpose(0, 1)):
        if rows is not None and heads:
            rows[list(heads)] = 0
    return replace(weights, wq=wq, bq=bq, wo=wo)
