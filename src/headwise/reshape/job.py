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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor, nn

from headwise.corpus import verbs
from headwise.corpus.documents import BATCH, check_ids, cut, encoded
from headwise.corpus.tokens import require_tokens, unknown_note
from headwise.corpus.training import HELD_OUT_SHARE
from headwise.cost.config import USUAL, check_sizes
from headwise.errors import HeadwiseError
from headwise.families import (
    OURS,
    RECORD,
    check_reshapable,
    read_config,
    require_run,
    run_of,
)
from headwise.files import (
    STDIN,
    Sources,
    contents,
    require_empty,
    sync_folder,
    write_whole,
)
from headwise.gpt.checkpoint import load_model
from headwise.gpt.presets import find_preset
from headwise.gpt.run import read_run
from headwise.models import computed_in, located
from headwise.models.ask import (
    answers,
    evaluating,
    predicts,
    stands_for,
)
from headwise.models.open import (
    Folder,
    described,
    folder_of,
    open_folder,
    texts_of,
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
    HealPoint,
    HealRecipe,
    batches,
    cache_bytes,
    heal_child,
    measure,
)

Documents = tuple[Tensor, ...]  # of ids, each (T,)
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


class Options(TypedDict, total=False):
    """What `share` and `prune` have in common; `share` explains it."""

    text: Any  # a path, a text, or ids
    out: str | Path | None
    heal: int | None
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


class Change(Protocol):
    """A way to reshape; its fields, with the text, determine the child."""

    def check_family(self, folder: Path) -> None:
        """Refuse the family of a model that lies in a folder, by its config alone."""

    def check_sizes(self, n_layers: int, n_heads: int, n_kv_heads: int) -> None:
        """Refuse what a model of these sizes cannot be asked, before its weights are read."""

    def check(self, model: nn.Module) -> None:
        """Refuse what cannot be done with this model, before it reads a text."""

    def apply(self, source: Folder, calibration: Calibration) -> Changed:
        """Make the child."""


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
    # how the folder was read back; None where nothing was written
    verified: str | None = None

    def __repr__(self) -> str:
        rows = (self.healed or self.damage).rows
        return "\n  ".join([f"Reshaped({self.what})", *map(" ".join, rows)])

    def document(self) -> dict[str, Any]:
        """All but the model, as JSON has it."""
        fields = {**vars(self)}
        del fields["model"]
        return plain_data(fields)


# hears a line for a reader, each evaluation of a healing, and, before that begins, which may take hours, the report
Listener = Callable[[str | HealPoint | Reshaped], None]


def reshape(
    model: nn.Module | str | Path,
    change: Change,
    listener: Listener = lambda event: None,
    *,
    text: Any = None,
    out: str | Path | None = None,
    heal: int | None = None,
    device: str = "cpu",
    dtype: str | None = None,
) -> Reshaped:
    """Change a model, or that of a folder, and do all that goes with it; `share` explains the options."""
    recipe = HealRecipe(steps=heal) if heal is not None else None
    out = None if out is None else Path(out)
    # 1. The model and the text, once what can be refused is refused.
    source, written, calibration = _opened(model, change, text, out, device)
    if dtype is not None:
        written = getattr(torch, computed_in(dtype))
    with evaluating(source.model):
        # 2. The change, and what it costs.
        held_out = calibration.evaluation
        n_read, n_held_out = (
            sum(map(torch.numel, some)) for some in (calibration.statistics, held_out)
        )
        listener(
            f"making the change by {n_read:,} tokens, and measuring it on {n_held_out:,}"
        )
        changed = change.apply(source, calibration)
        child = changed.model
        stands_for(child, source.model)

        def measured() -> Damage:
            listener("measuring loss and divergence")
            return measure(source.model, child, held_out, source.context, written)

        report = Reshaped(
            model=child,
            source=str(source.path),
            out=str(out) if out else None,
            what=changed.what,
            notes=(*changed.notes, *calibration.about),
            details={**vars(change), **changed.details},
            run=_run(source.path, out),
            damage=measured(),
        )
        listener(report)
        # 3. Healing.
        if recipe:
            listener(f"healing for {recipe.steps} steps")
            course = heal_child(
                source.model,
                child,
                calibration.train,
                calibration.glance,
                recipe,
                listener,
                changed.silent,
            )
            if course.stopped:
                listener(
                    f"healing stopped after step {course.curve[-1].step}; the best weights so far are kept"
                )
            steps = {"steps_made": course.curve[-1].step, "best_step": course.best_step}
            report.details["healing"] = vars(recipe) | steps
            report = replace(report, curve=course.curve, healed=measured())
        cast(child, written).requires_grad_(True)
        # 4. The folder.
        if not out:
            return report
        return export(report, source, out, listener)


def _opened(
    model: nn.Module | str | Path,
    change: Change,
    text: Any,
    out: Path | None,
    device: str,
) -> tuple[Folder, torch.dtype, Calibration]:
    """The model with its folder, the format that its weights are stored in, and the text as documents.

    What can be refused by names, files and config.json is refused before weights are read, which may take minutes; then
    a model that cannot be measured, or whose child could not be written.
    """
    source = None
    if isinstance(model, nn.Module):
        # refuses a family without a record, before a text is asked for
        family_of(model)
        if device != "cpu":
            raise HeadwiseError(
                "device= is where a folder is opened; a model in memory stays where it is"
            )
        source = described(model) or replace(folder_of(model), path=IN_MEMORY)
        path = source.path
    else:
        path = located(Path(model))
        check_config(path, change)
    if out:
        check_place(path, out)
    name, content = read_user_text(text, path)
    stored = None
    if not source:
        source = open_folder(path, device=device)
        # A processor without bfloat16 computes in float32; the config still says how the folder is stored.
        stored = getattr(source.model.config, "dtype", None)
    model = source.model
    kind = type(source.model).__name__
    family_of(model)  # raises for a model whose family has no record
    require_held(model, "a change of heads")
    # one without logits, or with a head for something else, such as a classifier's
    if not predicts(model):
        raise HeadwiseError(
            f"{kind} answers with something other than tokens, and what sharing or pruning costs is measured on "
            f"those; load the model with its language-model head"
        )
    cache_bytes(model)  # raises for a config without the sizes of the cache
    if out and own_layers(model):
        raise HeadwiseError(
            f"{kind} is a model of your own, for which there is no folder; leave out= away, and keep "
            f"result.model.state_dict()"
        )
    if out and source.tokens is None and source.family == OURS:
        raise HeadwiseError(
            "the model has no tokenizer, and a folder of headwise needs one; open the model from a folder "
            "with hw.open, or leave out= away and keep the model of the result"
        )
    change.check_sizes(len(attentions(model)), *head_counts(model)[:2])
    change.check(model)
    dtype = stored or next(model.parameters()).dtype
    return source, dtype, calibrate(name, content, source)


def _run(source: Path, out: Path | None) -> str | None:
    """The run that `source` is or comes from; seen from `out`, so that both folders may be moved together."""
    run = run_of(source)
    if not (run and out):
        return str(run) if run else None
    return os.path.relpath(run.resolve(), out.resolve())


# What is refused before weights are read


def check_config(path: Path, change: Change) -> None:
    """Refuse the family and the sizes in a config.json that the change cannot have."""
    check_reshapable(path)
    change.check_family(path)
    config = read_config(path)
    check_sizes(config)
    fields = dict(config)
    for section in (config.get("text_config"), config.get(OURS)):
        fields |= section if isinstance(section, dict) else {}
    sizes = {USUAL.get(name, name): size for name, size in fields.items()}
    n_layers = sizes.get("num_hidden_layers")
    n_heads = sizes.get("num_attention_heads")
    if n_layers and n_heads:  # what is left to a class, the open model has
        n_kv_heads = sizes.get("num_key_value_heads") or n_heads
        change.check_sizes(n_layers, n_heads, n_kv_heads)


def check_place(source: Path, out: Path) -> None:
    """Raise HeadwiseError where no new folder can be written: `out` may be absent or empty."""
    require_empty(out)
    if source.resolve() in out.resolve().parents:
        raise HeadwiseError(
            f"out={str(out)!r} lies in {source}, which is never changed; pass another folder"
        )
    if not out.resolve().parent.is_dir():
        raise HeadwiseError(f"out={str(out)!r}: the folder {out.parent} does not exist")


# The text


@dataclass(frozen=True)
class Calibration:
    """Documents as ids, each (T,), in the order of the text, and what is read of them in batches (B,T).

    The child is made and healed on `train`; `held_out` follows the healing and measures.
    """

    train: Documents
    held_out: Documents
    statistics: list[Tensor]  # of `train`, for alignment and importance
    # Held out: these follow a healing, and the best weights are chosen on them,
    glance: list[Tensor]
    evaluation: list[Tensor]  # and on these others is measured.
    about: tuple[str, ...]  # what a reader of any number on it must know


def read_user_text(text: Any, path: Path) -> tuple[str, Any]:
    """What an error calls the text, and the text itself: a string, ids, or the verb corpus.

    text  a path, a text, or ids, which are handed back; None takes what the run in `path` was trained on
    """
    if isinstance(text, str | Path):
        name = str(text)
        paths, typed = contents([name])
        if paths:
            return name, Sources(paths).text()
        # a word by itself is a name that is misspelled
        if name != STDIN and (isinstance(text, Path) or len(name.split()) == 1):
            raise HeadwiseError(f"there is no file {name}")
        return "the text", typed[0]
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
    is_text = isinstance(text, verbs.VerbCorpus | str)
    before, after = require_tokens(folder).frame if is_text else ([], [])
    lines: Sequence[str] = ()
    if isinstance(text, verbs.VerbCorpus):
        lines = [*text.train_lines, *text.held_out_lines]
    # a run of lines has a boundary before a text
    elif isinstance(text, str) and folder.family == OURS and before:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines:
        # between boundaries; a longer line loses its end, as in training
        rows = [[*before, *encoded(folder, x), *before][:length] for x in lines]
    elif isinstance(text, str):
        rows = [encoded(folder, text)]
    else:
        rows = [ids.tolist() for ids in texts_of(folder.model, text)]
    end = _end(rows)
    about: tuple[str, ...] = ()
    if isinstance(text, verbs.VerbCorpus):
        end = len(text.train_lines)
        about = (verbs.WHOLE_LINES,)
    parts: Sequence[Iterable[list[int]]] = rows[:end], rows[end:]
    if not lines and len(rows) == 1:  # one stream
        stream = rows[0]
        size = length - len(before) - len(after)
        halves = stream[: _end(stream)], stream[_end(stream) :]
        cuts = (cut([half], size) for half in halves)
        parts = [[[*before, *ids, *after] for ids in pieces] for pieces in cuts]
    documents: list[Documents] = []
    for part in parts:
        # Documents of a single token are left out: it predicts nothing.
        kept = [ids for ids in part if len(ids) > 1]
        for ids in kept:
            check_ids(folder, name, ids)
        documents.append(tuple(map(torch.tensor, kept)))
    train, held_out = documents
    if not train or not held_out:
        raise HeadwiseError(
            f"{name} is too short: of documents of 2 to {length} tokens it makes {len(train)} to calibrate on and "
            f"{len(held_out)} to measure on; each part needs one"
        )
    about += unknown_note(folder.tokens, rows)
    # each batch has logits over the whole vocabulary
    vocab_size = folder.vocab_size or int(torch.cat([*train, *held_out]).max()) + 1
    most = min(BATCH, LOGITS // vocab_size)
    statistics = batches(spread(train, STATISTICS), most)
    # a single document has to serve both
    glance = batches(spread(held_out[1::2] or held_out, GLANCE), most)
    evaluation = batches(spread(held_out[::2], EVALUATION), most)
    return Calibration(train, held_out, statistics, glance, evaluation, about)


def _end(items: Sequence[Any]) -> int:
    """Where the last tenth of lines, documents or ids begins: the same cut as in training."""
    return int(len(items) * (1 - HELD_OUT_SHARE))


def spread(documents: Sequence[Tensor], limit: int) -> list[Tensor]:
    """Documents of about `limit` tokens together, spread evenly over the text; or all of them."""
    total = sum(map(len, documents))
    n = len(documents)
    # as many of mean length as the limit holds
    wanted = n if total <= limit else max(1, n * limit // total)
    return [documents[i * n // wanted] for i in range(wanted)]


# The folder, and its proof


def export(report: Reshaped, source: Folder, out: Path, say: Listener) -> Reshaped:
    """Write the child to `out` with what belongs to `source`, and the report as headwise.json, with the proof in it.

    Raises HeadwiseError where what the folder answers differs, or where `out` is there by now; nothing is written
    then.
    """
    # in files as large as those of the parent
    shards = [path.stat().st_size for path in source.path.glob("*.safetensors")]
    sizes = {"max_shard_size": max(shards)} if len(shards) > 1 else {}
    with new_folder(out) as fresh:
        say(f"writing {out}")
        write_folder(fresh, report.model, source, **sizes)
        for pattern in BESIDE:
            for path in filter(Path.is_file, source.path.glob(pattern)):
                shutil.copyfile(path, fresh / path.name)
        say("reading it back")
        report = replace(report, verified=verify(report.model, fresh, source.context))
        document = json.dumps(report.document(), indent=2, ensure_ascii=False)
        write_whole(fresh / RECORD, document + "\n")
        write_whole(fresh / "README.md", model_card(report))
    return report


def model_card(report: Reshaped) -> str:
    """What the folder holds, what was done and what that cost, as the README.md that a hub shows."""
    last = report.healed or report.damage
    name = Path(report.source).resolve().name
    steps = "no training"
    if report.curve:
        steps = f"healed for {report.curve[-1].step:,} steps"
    # what has read the folder back
    library = str(report.verified).split()[0].strip(",")
    rows = "".join(f"\n| {' | '.join(row)} |" for row in last.rows)
    lines = [
        f"---\nbase_model: {name}\nlibrary_name: {library}\ntags: [headwise]\n---",
        f"# {Path(report.out or name).name}",
        f"Made of {name} by headwise: {report.what}; {steps}.",
        f"| on held-out text | before | after | change |\n| --- | --- | --- | --- |{rows}",
        *(f"- {note}" for note in report.notes),
        f"Read back and compared with the model in memory: {report.verified}. All figures: {RECORD}.",
    ]
    return "\n\n".join(lines) + "\n"


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which gets the name `out` when the block ends; where the block fails, nothing is left."""
    place = out.resolve()
    with TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as temporary:
        fresh = Path(temporary) / "new"
        fresh.mkdir()
        yield fresh
        require_empty(out)  # hours may have passed since the first check
        fresh.rename(place)
    sync_folder(place.parent)


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

    def in_float32(model: nn.Module) -> Tensor:
        dtype = next(model.parameters()).dtype
        logits = answers(cast(model.eval(), torch.float32), ids).double().cpu()
        cast(model, dtype)
        return logits

    if reads_as_stock(model) and find_spec("transformers") is not None:
        from headwise.models.hf import load_folder  # imports transformers

        reader = f"transformers {version('transformers')}"
        read = load_folder(folder)
    else:
        reader = "headwise"
        read = load_model(folder)[0]
    difference = (in_float32(read) - in_float32(model)).abs().max().item()
    if not difference <= TOLERANCE:  # true of NaN, too
        raise HeadwiseError(
            f"the exported model, read by {reader}, differs from the one in memory by {difference:.2g} in a logit, "
            f"more than {TOLERANCE:.2g}; nothing was written"
        )
    return f"{reader}, largest difference of a logit {difference:.1e}"
