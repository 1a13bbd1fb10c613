"""From a model to a reshaped one: read, change, measure, heal, measure again; then a folder, and its proof.

The folder is filled beside its place and read back. What it answers is compared with what the model in memory answers;
then it gets its name in one rename.

The text is one part to align, choose heads and heal by, and another, held out, to measure on. A run of headwise that
was trained on lines gets a document a line. Any other text is one stream, cut into documents as long as the model
takes, each in the frame that the model expects, such as [CLS] and [SEP]. The last tenth is held out, as in training;
every second held-out document follows the healing, the others measure what came of it.
"""

from __future__ import annotations

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.corpus import verbs
from headwise.corpus.documents import BATCH, cut, encoded
from headwise.corpus.sources import Sources, exists
from headwise.corpus.tokens import require_tokens, unknown_note
from headwise.corpus.training import HELD_OUT_SHARE
from headwise.cost.config import check_sizes, shape_by_formula
from headwise.errors import HeadwiseError
from headwise.families import (
    RECORD,
    check_reshapable,
    read_config,
    require_run,
    run_of,
)
from headwise.files import read_text, sync_folder, text_path, write_whole
from headwise.gpt.checkpoint import load_model
from headwise.gpt.presets import find_preset
from headwise.gpt.run import read_run
from headwise.models import computed_in, located
from headwise.models.ask import (
    answers,
    context_of,
    evaluating,
    predicts,
    stands_for,
    vocabulary_of,
)
from headwise.models.open import (
    Folder,
    described,
    open_folder,
    write_folder,
)
from headwise.models.sites import require_held
from headwise.models.weights import (
    attentions,
    cast,
    family_of,
    head_counts,
    own_layers,
    reads_as_stock,
)
from headwise.records import plain_data
from headwise.reshape.heal import (
    Damage,
    Gone,
    Healing,
    HealPoint,
    HealRecipe,
    batches,
    cache_bytes,
    heal_child,
    measure,
)
from headwise.shapes import shape_of
from headwise.table import amount

# tokens of a document, at most: a round choice, more take more memory
LONGEST = 1024
# numbers, at most, in the logits of a batch that is only read: 256 MiB in float32
LOGITS = 2**26
# Round choices: with more tokens a number is surer, and the reading takes longer.
STATISTICS = 50_000  # tokens, at most, that alignment and importance read
GLANCE = 5_000  # tokens, at most, that an evaluation of a healing reads
EVALUATION = 20_000  # tokens, at most, that one measurement reads
TOLERANCE = 1e-4  # largest difference of a logit in float32 that rounding in another order may make
PROBE_TOKENS = 256  # ids that both models read, at most
# stands for the folder of a model that was not read from one
IN_MEMORY = Path("the model in memory")
# beside weights, config and tokenizer: what a child must be handed on with
BESIDE = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
OF_RUN = "the text of the run"  # what errors call it

# One stream (N,), documents (B,T), or documents one by one.
Ids = Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor]


class Options(TypedDict, total=False):
    """What `share` and `prune` have in common; `share` explains it."""

    text: Any  # a path, a text, or ids
    out: str | Path | None
    heal: int | None
    batch: int
    lr: float
    hidden: float
    seed: int
    force: bool
    device: str
    dtype: str | None


@dataclass(frozen=True)
class Changed:
    """A child, and what is known about it."""

    model: nn.Module
    what: str  # one line: what was done
    details: dict[str, object]  # by the names of JSON
    notes: tuple[str, ...] = ()
    silent: Gone = ()  # heads that are zero and must stay so while the child heals


class Change(ABC):
    """A way to reshape; its fields, with the text, determine the child."""

    @abstractmethod
    def check_family(self, folder: Path) -> None:
        """Refuse the family of a model that lies in a folder, by its config alone."""

    @abstractmethod
    def check_sizes(self, n_layers: int, n_heads: int, n_kv_heads: int) -> None:
        """Refuse what a model of these sizes cannot be asked, before its weights are read."""

    @abstractmethod
    def check(self, model: nn.Module) -> None:
        """Refuse what cannot be done with this model, before it reads a text."""

    @abstractmethod
    def apply(self, source: Folder, calibration: Calibration) -> Changed:
        """Make the child."""


@dataclass(frozen=True)
class Listener:
    """Whom to tell: lines for a reader, points of the healing's curve with the steps asked for, and the first damage.

    That comes with what was done and the notes, before a healing begins, which may take hours.
    """

    say: Callable[[str], None] = lambda line: None
    point: Callable[[HealPoint, int], None] = lambda point, steps: None
    damage: Callable[[str, tuple[str, ...], Damage], None] = (
        lambda what, notes, damage: None
    )


@dataclass(frozen=True, repr=False)
class Reshaped:
    """A model that was shared or pruned, and what that cost."""

    model: nn.Module = field(compare=False)  # the child, in eval mode
    source: str
    out: str | None  # None where nothing was written
    what: str  # one line: what was done
    notes: tuple[str, ...]  # what a reader must know besides
    # groups or heads, and the settings that determine the result
    details: dict[str, object]
    # the run of headwise that knows the text, seen from `out` where that is written
    run: str | None
    damage: Damage  # before any training
    curve: tuple[HealPoint, ...] = ()  # of healing; empty without
    healed: Damage | None = None
    verified: str | None = (
        None  # how the folder was read back; None where nothing was written
    )

    def __repr__(self) -> str:
        return f"Reshaped({self.what};\n         {self.won})"

    @property
    def won(self) -> str:
        """One line: cache and loss; each left out where there is nothing to tell."""
        last = self.healed or self.damage
        parts = []
        if last.cache_bytes.before:
            before, after = map(amount, vars(last.cache_bytes).values())
            change = f"cache {before} -> {after}"
            if after == before:
                change = f"cache as before, {after},"
            parts.append(f"{change} a token at {last.context:,} tokens")
        if last.loss is not None:
            parts.append(f"loss {last.loss.after - last.loss.before:+.3f} nats")
        return ", ".join(parts)

    def document(self) -> dict[str, Any]:
        """All but the model, as JSON has it."""
        fields = {**vars(self), "won": self.won}
        del fields["model"]
        return plain_data(fields)


def reshape(
    model: nn.Module | str | Path,
    change: Change,
    listener: Listener | None = None,
    *,
    text: Any = None,
    out: str | Path | None = None,
    heal: int | None = None,
    force: bool = False,
    device: str = "cpu",
    dtype: str | None = None,
    **healing: Any,
) -> Reshaped:
    """Change a model, or that of a folder, and do all that goes with it; `share` explains the options."""
    listener = listener or Listener()
    recipe = _recipe(heal, healing)
    # 1. What can be refused by names, files and config.json is refused before weights are read, which may take minutes.
    path = _path_of(model)
    out = None if out is None else Path(out)
    check_out(path, out, force)
    if not isinstance(model, nn.Module):
        check_config(path, change)
    name, text = read_user_text(text, path)
    source, stored = _opened(model, path, device)
    written = getattr(torch, computed_in(dtype)) if dtype else stored
    with _left_alone(source.model):
        _check_model(source, writes=out is not None)
        change.check_sizes(
            len(attentions(source.model)), *head_counts(source.model)[:2]
        )
        change.check(source.model)
        # 2. The text, the change, and what it costs.
        calibration = calibrate(name, text, source)
        held_out, n_read = calibration.evaluation, n_tokens(calibration.statistics)
        listener.say(
            f"making the change by {n_read:,} tokens, and measuring it on {n_tokens(held_out):,}"
        )
        changed = change.apply(source, calibration)
        child = changed.model
        stands_for(child, source.model)

        def measured() -> Damage:
            listener.say("measuring loss and divergence")
            return measure(source.model, child, held_out, source.context, written)

        damage = measured()
        notes = *changed.notes, *calibration.about
        listener.damage(changed.what, notes, damage)
        report = Reshaped(
            model=child,
            source=str(source.path),
            out=None if out is None else str(out),
            what=changed.what,
            notes=notes,
            details={**vars(change), **changed.details},
            run=_run(source.path, out),
            damage=damage,
        )
        # 3. Healing.
        if recipe is not None:
            course = _healed(recipe, source.model, changed, calibration, listener)
            steps = {"steps_made": course.curve[-1].step, "best_step": course.best_step}
            report.details["healing"] = asdict(recipe) | steps
            report = replace(report, curve=course.curve, healed=measured())
        cast(child, written).requires_grad_(True)
        # 4. The folder.
        if out is None:
            return report
        verified = export(report, source, out, force, listener.say)
        return replace(report, verified=verified)


def _healed(
    recipe: HealRecipe,
    parent: nn.Module,
    changed: Changed,
    calibration: Calibration,
    listener: Listener,
) -> Healing:
    """Heal in float32, whatever the number format of the weights, and go back to that format afterwards."""
    listener.say(f"healing for {recipe.steps} steps")
    child, dtype = changed.model, next(changed.model.parameters()).dtype
    train, held_out = calibration.train, calibration.glance
    cast(child, torch.float32)
    healing = heal_child(
        parent, child, train, held_out, recipe, listener.point, changed.silent
    )
    cast(child.requires_grad_(False), dtype)
    if healing.stopped:
        step = healing.curve[-1].step
        listener.say(
            f"healing stopped after step {step}; the best weights so far are kept"
        )
    return healing


def _recipe(steps: int | None, options: dict[str, Any]) -> HealRecipe | None:
    """How the child is healed; None where it is not. Refuses options of healing without it."""
    recipe = HealRecipe(steps=1 if steps is None else steps, **options)
    if steps is not None:
        return recipe
    for name in options:
        # a default asks for nothing
        if getattr(recipe, name) != getattr(HealRecipe, name):
            raise HeadwiseError(f"{name}= is about healing; pass heal=STEPS with it")
    return None


def _path_of(model: nn.Module | str | Path) -> Path:
    """Where the model lies; IN_MEMORY for one that was made there."""
    if isinstance(model, nn.Module):
        # refuses a family without a record, before a text is asked for
        family_of(model)
        folder = described(model)
        return IN_MEMORY if folder is None else folder.path
    path = located(Path(model))
    check_reshapable(path)
    return path


def _opened(
    model: nn.Module | str | Path, path: Path, device: str
) -> tuple[Folder, torch.dtype]:
    """The model with its folder and tokenizer, read where it is not in memory; and the format to write weights in."""
    if not isinstance(model, nn.Module):
        folder = open_folder(path, device=device)
        # A processor without bfloat16 computes in float32; the config still says how the folder is stored.
        stored = getattr(folder.model.config, "dtype", None)
    else:
        if device != "cpu":
            raise HeadwiseError(
                "device= is where a folder is opened; a model in memory stays where it is"
            )
        sizes = context_of(model), family_of(model).name, vocabulary_of(model)
        folder, stored = described(model) or Folder(path, model, None, *sizes), None
    return folder, stored or next(folder.model.parameters()).dtype


def _check_model(source: Folder, writes: bool) -> None:
    """Refuse a model that cannot be measured, or whose child could not be written."""
    model, name = source.model, type(source.model).__name__
    family_of(model)  # raises for a model whose family has no record
    require_held(model, "a change of heads")
    # one without logits, or with a head for something else, such as a classifier's
    if not predicts(model):
        raise HeadwiseError(
            f"{name} answers with something other than tokens, and what sharing or pruning costs is measured on "
            f"those; load the model with its language-model head"
        )
    cache_bytes(model)  # raises for a config without the sizes of the cache
    if writes and own_layers(model):
        raise HeadwiseError(
            f"{name} is a model of your own, for which there is no folder; leave out= away, and keep "
            f"result.model.state_dict()"
        )
    if writes and source.tokens is None and source.family == "headwise":
        raise HeadwiseError(
            "the model has no tokenizer, and a folder of headwise needs one; open the model from a folder "
            "with hw.open, or leave out= away and keep the model of the result"
        )


def _run(source: Path, out: Path | None) -> str | None:
    """The run that `source` is or comes from; seen from `out`, so that both folders may be moved together."""
    run = run_of(source)
    if run is None or out is None:
        return None if run is None else str(run)
    return os.path.relpath(run.resolve(), out.resolve())


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    # Inside this block a model is in eval mode and takes no gradients; afterwards it is as it was.
    learning = [
        parameter for parameter in model.parameters() if parameter.requires_grad
    ]
    with evaluating(model):
        model.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in learning:
                parameter.requires_grad_(True)


# What is refused before weights are read


def check_config(path: Path, change: Change) -> None:
    """Refuse the family and the sizes in a config.json that the change cannot have."""
    change.check_family(path)
    config = read_config(path)
    try:
        shape = shape_by_formula(config)
    except HeadwiseError:  # not every size is told; these may be
        check_sizes(config)
        names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        sizes = [config[name] for name in names if isinstance(config.get(name), int)]
        if len(sizes) == len(names):
            change.check_sizes(*sizes)
        return
    # the first layer has as many heads as any other
    attention = shape.layers[0].attention
    assert attention is not None
    change.check_sizes(len(shape.layers), attention.n_heads, attention.n_kv_heads)


def check_out(source: Path, out: Path | None, force: bool) -> None:
    """Refuse a folder that may not be written, and `force` without one."""
    if out is not None:
        check_place(source, out, force)
    elif force:
        raise HeadwiseError("force=True is about the folder that is written; pass out=")


def check_place(source: Path, out: Path, force: bool) -> None:
    """Raise HeadwiseError where no model may be written; a folder with a RECORD is one that `reshape` has written."""
    here, there = source.resolve(), out.resolve()
    holds_files = out.is_dir() and any(out.iterdir())
    problem = ""
    if here in (there, *there.parents) or there in here.parents:
        problem = f" and the source {source}, which is never changed, lie in one another; pass another folder"
    elif out.is_symlink() or (out.exists() and not out.is_dir()):
        problem = " is a link or a file; pass a folder"
    elif not there.parent.is_dir():
        problem = f": the folder {out.parent} does not exist"
    elif holds_files and not (out / RECORD).exists():
        problem = f" exists already and has no {RECORD}: share or prune did not write it; pass another folder"
    elif holds_files and not force:
        problem = " exists already; pass force=True to replace it, or another folder"
    if problem:
        raise HeadwiseError(f"out={str(out)!r}{problem}")


# The text


@dataclass(frozen=True)
class Calibration:
    """Documents as ids, each (T,), in the order of the text.

    The child is made and healed on `train`; `held_out` follows the healing and measures.
    """

    train: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]
    vocab_size: int
    about: tuple[str, ...] = ()  # what a reader of any number on it must know
    name: str = ""  # as `read_user_text` gives it

    @property
    def statistics(self) -> list[Tensor]:
        """Batches (B,T) for alignment and importance."""
        return self._batches(self.train, STATISTICS)

    @property
    def glance(self) -> list[Tensor]:
        """Held-out batches that follow a healing: others than `evaluation`, for the best weights are chosen on them."""
        # a single document has to serve both
        return self._batches(self.held_out[1::2] or self.held_out, GLANCE)

    @property
    def evaluation(self) -> list[Tensor]:
        """Held-out batches (B,T) to measure on."""
        return self._batches(self.held_out[::2], EVALUATION)

    def _batches(self, documents: Sequence[Tensor], limit: int) -> list[Tensor]:
        # Each batch has logits over the whole vocabulary.
        most = min(BATCH, LOGITS // self.vocab_size)
        return batches(spread(documents, limit), most)


def read_user_text(text: Any, path: Path) -> tuple[str, Any]:
    """What an error calls the text, and the text itself: a string, ids, or the verb corpus.

    text  a path, a text, or ids, which are handed back; None takes what the run in `path` was trained on
    """
    is_path = isinstance(text, Path)
    if isinstance(text, str):
        # One without a space that names no file is taken for a misspelled path: `read_text` refuses it by that name.
        is_path = exists(Path(text)) or len(text.split()) == 1
    if is_path:
        path = text_path(text)
        return str(path), read_text(path)
    if text is not None:
        return "the text", text
    run = read_run(require_run(path))
    assert run is not None
    settings = run.settings
    if settings.paths:
        return OF_RUN, Sources(settings.paths).text()
    # a run without files learned from the verb corpus, drawn by its seed
    return OF_RUN, verbs.corpus(settings.seed, find_preset(settings.preset).core)


def calibrate(name: str, text: Any, folder: Folder) -> Calibration:
    """The documents of a text, or of what stands for it; `name` and `text` as `read_user_text` gives them.

    A document has as many tokens as the model takes, at most LONGEST. Raises HeadwiseError for a text that is too short
    for its parts, and for ids that the model does not know.
    """
    length = min(folder.context or LONGEST, LONGEST)
    facts = Counter[str]()  # `encoded` counts the characters, and those without a token
    # documents as ids in two parts, the last tenth apart
    parts: Sequence[Sequence[Any]]
    if isinstance(text, verbs.VerbCorpus):
        lines = text.train_lines, text.held_out_lines
        parts = [_of_lines(folder, part, length, facts) for part in lines]
    elif not isinstance(text, str):
        parts = _id_parts(text, length, folder.context)
    # a run of lines has a boundary before a text
    elif folder.family == "headwise" and require_tokens(folder).frame[0]:
        filled = [line.strip() for line in text.splitlines() if line.strip()]
        parts = [_of_lines(folder, part, length, facts) for part in _split(filled)]
    else:
        before, after = require_tokens(folder).frame
        body, parts = length - len(before) - len(after), []
        for part in _split(encoded(folder, text, facts)):
            parts.append([[*before, *ids, *after] for ids in cut([part], body)])
    # Documents of a single token are left out: it predicts nothing.
    train, held_out = (
        tuple(_whole(ids, 1) for ids in part if len(ids) > 1) for part in parts
    )
    if not train or not held_out:
        raise HeadwiseError(
            f"{name} is too short: of documents of 2 to {length} tokens it makes {len(train)} to calibrate on and "
            f"{len(held_out)} to measure on; each part needs one"
        )
    # Ids may come from another tokenizer.
    smallest, largest = map(int, torch.cat([*train, *held_out]).aminmax())
    vocab_size = folder.vocab_size or largest + 1
    if smallest < 0 or largest >= vocab_size:
        raise HeadwiseError(
            f"{name} has the token id {min(smallest, 0) or largest} and the model knows "
            f"{folder.vocab_size or 'no negative'} tokens: they do not belong together"
        )
    about = unknown_note(folder.tokens, facts)
    if isinstance(text, verbs.VerbCorpus):
        about = verbs.WHOLE_LINES, *about
    return Calibration(train, held_out, vocab_size, about, name)


def _of_lines(
    folder: Folder, lines: Sequence[str], length: int, facts: Counter[str]
) -> list[list[int]]:
    """A document a line, between boundaries; a longer one loses its end, as in training."""
    before = require_tokens(folder).frame[0]
    documents = []
    for line in lines:
        ids = [*before, *encoded(folder, line, facts), *before]
        documents.append(ids[:length])
    return documents


def _split(items: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Documents or ids, the last tenth apart."""
    end = int(len(items) * (1 - HELD_OUT_SHARE))  # the same cut as in training
    return items[:end], items[end:]


def _whole(ids: Any, axes: int) -> Tensor:
    """Ids as int64 on the processor. HeadwiseError for what holds none, or has more axes."""
    # torch raises each of them for what it cannot read
    with suppress(TypeError, ValueError, RuntimeError):
        read = torch.as_tensor(ids)
        if 1 <= read.ndim <= axes and not read.is_floating_point():
            return read.long().cpu()
    shown = " ".join(repr(ids).split())  # an array's has several lines
    raise HeadwiseError(
        f"{shown:.60} is neither a text nor its ids, whole numbers (N,), or documents of them"
    )


def _id_parts(ids: Ids, length: int, context: int | None) -> Sequence[Sequence[Any]]:
    """One stream of ids (N,) is cut into documents; documents (B,T), or one by one, stay what they are."""
    # an array, or a list of ids
    if not isinstance(ids, Sequence) or (ids and shape_of(ids[0]) == ()):
        ids = _whole(ids, 2)
        if ids.ndim == 1:
            return [torch.split(part, length) for part in _split(ids)]  # type: ignore[arg-type]
    longest = max(map(len, ids), default=0)
    if longest > (context or longest):
        raise HeadwiseError(
            f"a document of {longest} ids exceeds the {context} that the model takes at a time"
        )
    return _split(ids)  # type: ignore[arg-type]


def spread(documents: Sequence[Tensor], limit: int) -> list[Tensor]:
    """Documents of about `limit` tokens together, spread evenly over the text; or all of them."""
    total, n = sum(map(len, documents)), len(documents)
    # as many of mean length as the limit holds
    wanted = n if total <= limit else max(1, n * limit // total)
    return [documents[i * n // wanted] for i in range(wanted)]


def n_tokens(batches: Iterable[Tensor]) -> int:
    return sum(ids.numel() for ids in batches)


# The folder, and its proof


def export(
    report: Reshaped, source: Folder, out: Path, force: bool, say: Callable[[str], None]
) -> str:
    """Write the child to `out` with the tokenizer of `source`, and the report as headwise.json; returns the proof.

    Raises HeadwiseError where what the folder answers differs, or where `out` may not be replaced; nothing is written
    then.
    """
    with replaced(source.path, out, force) as fresh:
        say(f"writing {out}")
        _write_child(fresh, report, source)
        say("reading it back")
        verified = verify(report.model, fresh, source.context)
        report = replace(report, verified=verified)
        document = json.dumps(report.document(), indent=2, ensure_ascii=False)
        write_whole(fresh / RECORD, document + "\n")
        write_whole(fresh / "README.md", model_card(report))
    return verified


def _write_child(fresh: Path, report: Reshaped, source: Folder) -> None:
    """The weights, in files as large as those of the parent, and what belongs to the model besides: its licence."""
    shards = [path.stat().st_size for path in source.path.glob("*.safetensors")]
    sizes = {"max_shard_size": max(shards)} if len(shards) > 1 else {}
    write_folder(fresh, report.model, source, **sizes)
    for pattern in BESIDE:
        for path in source.path.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, fresh / path.name)


def model_card(report: Reshaped) -> str:
    """What the folder holds, what was done and what that cost, as the README.md that a hub shows."""
    last = report.healed or report.damage
    name = Path(report.source).resolve().name
    steps = (
        f"healed for {report.curve[-1].step:,} steps" if report.curve else "no training"
    )
    # what has read the folder back
    library = str(report.verified).split()[0].strip(",")
    lines = [
        f"---\nbase_model: {name}\nlibrary_name: {library}\ntags: [headwise]\n---",
        f"# {Path(report.out or name).name}",
        f"Made of {name} by headwise: {report.what}; {steps}. {report.won}.",
        "| on held-out text | before | after | change |\n| --- | --- | --- | --- |",
    ]
    for row in last.rows:
        lines[-1] += f"\n| {' | '.join(row)} |"
    lines += [f"- {note}" for note in report.notes]
    lines.append(
        f"Read back and compared with the model in memory: {report.verified}. All figures: {RECORD}."
    )
    return "\n\n".join(lines) + "\n"


@contextmanager
def replaced(source: Path, out: Path, force: bool) -> Iterator[Path]:
    """A new folder to fill, which takes the place of `out` when the block ends; what `out` held stays until then.

    A kill between the two renames leaves it in a hidden folder beside `out`.
    """
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        fresh, before = Path(temporary) / "new", Path(temporary) / "before"
        fresh.mkdir()
        yield fresh
        check_place(source, out, force)  # hours may have passed since the first check
        try:
            if out.exists():
                out.rename(before)
            fresh.rename(out)
        except BaseException:  # Ctrl-C, too
            if before.exists():
                before.rename(out)
            raise
    sync_folder(out.parent)


@torch.no_grad()
def verify(model: nn.Module, folder: Path, context: int | None) -> str:
    """Read the folder and compare its answers with those of the model in memory, in float32; returns that in words.

    `context` is the longest text that the model reads, None: of any length. Raises HeadwiseError where a logit differs
    by more than TOLERANCE.
    """
    config: Any = model.config
    count = min(PROBE_TOKENS, context or PROBE_TOKENS)
    # Ids from all over the vocabulary. A prime as stride repeats none before all have been, unless it divides the
    # size of the vocabulary. The 1 keeps id 0, often that of padding, from being the first.
    ids = (torch.arange(count)[None] * 7919 + 1) % int(config.vocab_size)
    dtype = next(model.parameters()).dtype
    wanted = answers(cast(model.eval(), torch.float32), ids).double().cpu()
    cast(model, dtype)
    if reads_as_stock(model) and find_spec("transformers") is not None:
        from headwise.models.hf import load_folder  # imports transformers

        reader = f"transformers {version('transformers')}"
        read = load_folder(folder)
    else:
        reader, read = "headwise", load_model(folder)[0]
    answered = answers(cast(read, torch.float32), ids).double().cpu()
    difference = (answered - wanted).abs().max().item()
    if not difference <= TOLERANCE:  # true of NaN, too
        raise HeadwiseError(
            f"the exported model, read by {reader}, differs from the one in memory by {difference:.2g} in a logit, "
            f"more than {TOLERANCE:.2g}; nothing was written"
        )
    return f"{reader}, largest difference of a logit {difference:.1e}"
