"""What an experiment is, how one unit of it, an arm with a seed, becomes scores; and the experiments.

All arms with the same seed learn from the same batches and are scored on the same held-out tokens.

Most experiments vary one model: the shape of the preset `verbs` without qk-norm. That norm has gains as wide as a
head, so arms with heads of another width would have other numbers of parameters. It also divides out most of what
another scale changes.

Another scale of attention multiplies the scores in every step. To multiply the first W_Q instead would be the same
function at the first step only: optimizers move every weight by about the learning rate, whatever its size.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwise import __version__
from headwise.corpus import verbs
from headwise.corpus.sources import Sources
from headwise.corpus.tokens import Tokens
from headwise.corpus.training import IGNORED, Batch, Corpus, Documents, text_corpus, verb_corpus
from headwise.errors import HeadwiseError
from headwise.files import read_bytes
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import PRESETS, Recipe
from headwise.gpt.train import DivergedError, evaluate, fit, one_thread
from headwise.heads.effect import ablate
from headwise.heads.watch import head_maps
from headwise.lab.results import Metric
from headwise.layer.layer import MultiHeadAttention
from headwise.layer.projections import shapes_alone
from headwise.words import Note, labelled, refusal

LOSS = Metric("loss", Note.of("comparison.loss"), "nats", lower_is_better=True)

Measure = Callable[[GPT, Corpus], dict[str, float]]  # what a model, trained or not, is scored by: name -> number
Report = Callable[[str, int, int], None]  # is told what happened, how many tasks are done, how many there are


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the models of an experiment learn, and how."""

    data: str  # what the built-in data is called
    corpus: Callable[[Path | None, int], Corpus]  # is given a text, or None for the built-in data; and a seed
    recipe: Recipe
    text_recipe: Recipe | None = None  # the recipe on a text; None: this task takes no text


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A variant of the model: fields of GPTConfig, and what they cannot say as a function that builds it."""

    name: str
    shape: Mapping[str, Any]  # fields of GPTConfig, without the vocabulary, whose size the corpus gives
    about: str = ""  # what is unusual about it, for its row in the table
    build: Callable[[GPTConfig], GPT] = GPT
    widened: bool = False  # take the feed-forward width that comes nearest to the parameters of the first arm
    trained: bool = True  # False: it is scored with the weights that were drawn


def held_out_loss(model: GPT, corpus: Corpus) -> dict[str, float]:
    return {"loss": evaluate(model, corpus.data)}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A question, and the arms that answer it: all but the first are compared with the first."""

    name: str
    question: str
    task: Task
    arms: tuple[Arm, ...]
    metrics: tuple[Metric, ...] = (LOSS,)  # those of the numbers of `measure` that get a verdict
    measure: Measure = held_out_loss
    notes: tuple[str, ...] = ()
    text: Path | None = None  # what its models learn from; None: the built-in data

    def as_asked(self, steps: int | None, text: Path | None) -> Experiment:
        """The same with other steps, or on a text; None leaves what stands here. HeadwiseError where it cannot be."""
        recipe, data, notes = self.task.recipe, self.task.data, self.notes
        if text is not None:
            if self.task.text_recipe is None:
                raise refusal("built_in_alone", name=self.name, data=data)
            # A file's name may hold bytes that are no UTF-8; each becomes "?", which can be printed and written.
            recipe, data = self.task.text_recipe, text.name.encode("utf-8", "replace").decode()
        if steps is not None:
            if steps < 1:
                raise HeadwiseError(f"steps={steps} must be at least 1")
            if steps < recipe.steps:
                cut_short = Note.of("comparison.cut_short", steps=f"{steps:,}", whole=f"{recipe.steps:,}")
                notes = (*notes, cut_short)
            recipe = replace(recipe, steps=steps)
        return replace(self, task=replace(self.task, recipe=recipe, data=data), text=text, notes=notes)

    def config(self, arm: Arm, vocab_size: int) -> GPTConfig:
        """The shape of an arm's model. A widened arm has as many parameters as the first arm, or nearly."""
        config = GPTConfig(vocab_size=vocab_size, **arm.shape)
        if not arm.widened:
            return config
        first = self.arms[0]
        wanted = count_parameters(self.config(first, vocab_size), first.build)
        # With each feature of the feed-forward width parameters grow by the same number, more - have. `wanted - have`
        # is what W_O or the missing key/value heads had.
        width = config.feed_forward_width
        have, more = (count_parameters(replace(config, d_ff=w), arm.build) for w in (width, width + 1))
        return replace(config, d_ff=width + round((wanted - have) / (more - have)))


@dataclass(frozen=True)
class Unit:
    """One arm of an experiment with one seed."""

    experiment: Experiment
    arm: Arm
    seed: int

    @property
    def label(self) -> Note:
        return Note.of("comparison.unit", experiment=self.experiment.name, arm=self.arm.name, seed=self.seed)

    @cached_property
    def key(self) -> dict[str, Any]:
        """All that its scores hang on. Units with one key are one unit, whatever their arms are called.

        Functions stand here by their names, without their modules, so that one may move to another file. A widened
        arm hangs on the shape of the first arm as well, whose parameters it meets.
        """
        experiment, arm = self.experiment, self.arm
        return {
            "model": _shape_of(arm) | {"trained": arm.trained},
            "parameters_of": _shape_of(experiment.arms[0]) if arm.widened else None,
            "data": experiment.task.corpus.__qualname__,
            "text": None if experiment.text is None else hashlib.sha256(read_bytes(experiment.text)).hexdigest(),
            "recipe": asdict(experiment.task.recipe),
            "measure": experiment.measure.__qualname__,
            "seed": self.seed,
            "versions": {"headwise": __version__, "torch": torch.__version__},
        }


def _shape_of(arm: Arm) -> dict[str, Any]:
    return {"shape": dict(arm.shape), "build": arm.build.__qualname__}


@dataclass(frozen=True)
class Scored:
    """What one unit gave."""

    parameters: int
    scores: dict[str, float]  # empty where training diverged
    failure: str | None  # why there are no scores: at which step training diverged
    cpu_seconds: float


def run_unit(unit: Unit) -> Scored:
    """Build, train and measure one model. The same unit gives the same scores in any process, beside any others."""
    experiment, arm, seed = unit.experiment, unit.arm, unit.seed
    began = time.process_time()
    # On one thread sums are always added up in the same order. torch's random state is left as it was, on the
    # processor: nothing here runs on a device.
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        corpus = experiment.task.corpus(experiment.text, seed)
        model = arm.build(experiment.config(arm, len(corpus.tokens)))
        try:
            if arm.trained:
                fit(model, experiment.task.recipe, corpus.data, seed)
            scores, failure = experiment.measure(model.eval(), corpus), None
        except DivergedError as error:
            scores, failure = {}, f"diverged with seed {seed}: {error}"
    return Scored(model.n_parameters, scores, failure, time.process_time() - began)


def count_parameters(config: GPTConfig, build: Callable[[GPTConfig], GPT] = GPT) -> int:
    with shapes_alone():
        return build(config).n_parameters


def with_attention(config: GPTConfig, **changes: Any) -> GPT:
    """A GPT whose attention layers have these fields of their spec changed, such as scale=1.0.

    The GPT without changes is drawn first, and the new layers get its weights: all arms of a seed begin alike.
    """
    model = GPT(config)
    for block in model.blocks:
        layer = MultiHeadAttention.from_spec(config.attention.replace(**changes))
        # Not strict: a layer without W_O has no place for the block's.
        layer.load_state_dict(block.attention.state_dict(), strict=False)  # type: ignore[union-attr]
        block.attention = layer
    return model


# The experiments.

# What the preset `verbs` had at first, 200 steps shorter; the preset has changed since, but these figures should stay
# comparable. The 800 steps took 12 seconds on one thread.
RECIPE = Recipe(steps=800, batch=64, lr=0.003, muon_lr=0.02, weight_decay=1.0, warmup=50)
SHAPE: dict[str, Any] = {**PRESETS["verbs"].shape, "qk_norm": False}


@lru_cache(maxsize=1)  # units run seed by seed, so the next arm asks for the same data
def verbs_or_text(text: Path | None, seed: int) -> Corpus:
    """The core of the verb corpus, split by the seed; or a text as a stream of characters, its last tenth held out."""
    if text is None:
        # With the persons of a conjugation line in one order the task is harder, so that arms have room to differ.
        return verb_corpus(seed, SHAPE["context"], any_order=False, core=True)
    return text_corpus(Sources([text]), lines=False, context=SHAPE["context"], seed=seed)


# The strong weight decay is for the verb corpus, which is small enough to be learned by heart.
VERBS_OR_TEXT = Task(
    data=Note.of("comparison.verbs"),
    corpus=verbs_or_text,
    recipe=RECIPE,
    text_recipe=replace(RECIPE, weight_decay=0.1),
)


# The heads of an arm share the width of the model, so that all arms have as many parameters.
def heads_arm(count: int, shape: dict[str, Any]) -> Arm:
    about = Note.of("comparison.of_width", width=shape["d_model"] // count)
    return Arm(name=Note.of("comparison.heads", count=count), about=about, shape={**shape, "n_heads": count})


HEADS = Experiment(
    name="heads",
    question=Note.of("comparison.which_heads"),
    task=VERBS_OR_TEXT,
    arms=tuple(heads_arm(count, SHAPE) for count in (1, 2, 4, 8, 16)),
)


# Builders are functions with names, here and below, since the key of a unit has the name.
def without_output(config: GPTConfig) -> GPT:
    return with_attention(config, out_proj=False)


OUTPUT_PROJECTION = Experiment(
    name="output-projection",
    question=Note.of("comparison.which_output"),
    task=VERBS_OR_TEXT,
    arms=(
        Arm(name=Note.of("comparison.with_output"), shape=SHAPE),
        Arm(
            name=Note.of("comparison.without_output"),
            about=Note.of("comparison.widened"),
            shape=SHAPE,
            build=without_output,
            widened=True,
        ),
    ),
)


def by_model_width(config: GPTConfig) -> GPT:
    return with_attention(config, scale=1 / math.sqrt(config.d_model))


def unscaled(config: GPTConfig) -> GPT:
    return with_attention(config, scale=1.0)


SCALE = Experiment(
    name="scale",
    question=Note.of("comparison.which_scale"),
    task=VERBS_OR_TEXT,
    arms=(  # heads are 16 wide and the model 64: the scale is 1/4, 1/8 or 1
        Arm(name="1/sqrt(head_dim)", about="0.25", shape=SHAPE),
        Arm(name="1/sqrt(d_model)", about="0.125", shape=SHAPE, build=by_model_width),
        Arm(name=Note.of("comparison.unscaled"), about="1", shape=SHAPE, build=unscaled),
    ),
)


# Sharing: what it costs in quality that several query heads read one key/value head.
N_HEADS = 8


def shared(name: str, n_kv_heads: int) -> Arm:
    shape = {**SHAPE, "n_heads": N_HEADS, "n_kv_heads": n_kv_heads}
    return Arm(name=name, about=Note.of("comparison.kv_heads", count=n_kv_heads), shape=shape, widened=True)


# It does not name n_kv_heads, which are as many by default. So its shape, and with it the key of its units, is that
# of the arm with 8 heads in HEADS, and it is trained once for both.
MHA = Arm(name="MHA", about=Note.of("comparison.kv_heads", count=N_HEADS), shape={**SHAPE, "n_heads": N_HEADS})

SHARING = Experiment(
    name="sharing",
    question=Note.of("comparison.which_sharing"),
    task=VERBS_OR_TEXT,
    arms=(MHA, shared("GQA", 2), shared("MQA", 1)),
)


# Two lookups: a task that needs two keys at one place, one number of one fact and another number of another.
#
#     b25 d03 a40 c12 f33 e01 ca? 10
#
# Each fact is one word: a name and two numbers. The question `ca?` asks for the first number of c and the second of a.
# One head of any width brings a mixture of both facts, with all four numbers; two heads can bring one fact each. A
# wide feed-forward, which knows the question, can sort out a mixture: so it has one neuron here, and more in the last
# arm. Even so one head gets about 0.75 of the answers: its weights may depend on the numbers of a fact as well.
NAMES = "abcdef"
NUMBERS = 6  # each number of a fact is 0 to 5
TRAIN_LINES, HELD_OUT_LINES = 16_000, 1_000  # 500 steps of 128 lines see each about 4 times
LOOKUP_CONTEXT = len(NAMES) + 3  # facts, question, answer, and the boundary before them

ACCURACY = Metric("accuracy", Note.of("comparison.accuracy"), "")
LOOKUP_SHAPE = {"context": LOOKUP_CONTEXT, "n_layers": 1, "d_model": 32, "d_ff": 1}


# Each line has all names in a random order, and asks for two different ones.
def lines(count: int, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(count):
        numbers = {name: f"{rng.randrange(NUMBERS)}{rng.randrange(NUMBERS)}" for name in NAMES}
        facts = [name + numbers[name] for name in rng.sample(NAMES, len(NAMES))]
        first, second = rng.sample(NAMES, 2)
        yield " ".join([*facts, f"{first}{second}?", numbers[first][0] + numbers[second][1]])


class Answers(Documents):
    """Lines of which the answer alone is learned and scored: the facts and questions are random."""

    def _padded(self, numbers: Any) -> Batch:
        """The lines of these numbers, to train on or held out, as (inputs, targets), each (lines,tokens)."""
        inputs, targets = super()._padded(numbers)
        answers = torch.full_like(targets, IGNORED)
        answers[:, -2] = targets[:, -2]  # all lines have one length; the last target is the boundary after the answer
        return inputs, answers


@lru_cache(maxsize=1)
def lookups(text: Path | None, seed: int) -> Corpus:
    """The lines of a seed. `text` is None, since the task has no recipe for a text; a `Task.corpus` is given it."""
    drawn = list(lines(TRAIN_LINES + HELD_OUT_LINES, seed))
    train, held_out = drawn[:TRAIN_LINES], drawn[TRAIN_LINES:]
    tokens = Tokens.words(drawn)
    return Corpus("two lookups", tokens, Answers.of_lines(tokens, train, held_out, LOOKUP_CONTEXT), held_out[0])


@torch.no_grad()
def answers_right(model: GPT, corpus: Corpus) -> dict[str, float]:
    """The fraction of held-out lines whose likeliest answer is the right one, and the held-out loss."""
    right = count = 0
    for inputs, targets in corpus.data.held_out_batches(256):  # lines at a time, which only bounds the memory
        scored = targets != IGNORED
        right += int((model(inputs).argmax(-1)[scored] == targets[scored]).sum())
        count += int(scored.sum())
    return {"accuracy": right / count, **held_out_loss(model, corpus)}


TWO_LOOKUPS = Experiment(
    name="two-lookups",
    question=Note.of("comparison.which_lookups"),
    task=Task(
        data=Note.of("comparison.two_lookups"),
        corpus=lookups,
        # With lr=3e-3 one head gets 0.42 of the answers instead of 0.75 (seed 0), with a weight decay of 0.1 0.69.
        # Two heads get all of them each time.
        recipe=Recipe(steps=500, batch=128, lr=1e-2, muon_lr=0.02, weight_decay=0.0, warmup=50),
    ),
    arms=(
        *(heads_arm(count, LOOKUP_SHAPE) for count in (1, 2, 4)),
        Arm(
            name=Note.of("comparison.more_neurons"),
            about=Note.of("comparison.thirty_two"),
            shape={**LOOKUP_SHAPE, "n_heads": 1, "d_ff": 32},
        ),
    ),
    metrics=(ACCURACY, LOSS),
    measure=answers_right,
    notes=(  # how often a guess is right that knows neither number, and one; the loss where one is known
        Note.of(
            "comparison.chance",
            pair=f"{1 / NUMBERS**2:.3f}",
            single=f"{1 / NUMBERS:.3f}",
            numbers=NUMBERS,
            loss=f"{math.log(NUMBERS):.3f}",
        ),
    ),
)


# Roles: jobs of heads that the verb corpus tells right from wrong, before and after training. A role says where a
# position that predicts has to look. For each role the head that plays it most is taken, among the untrained heads as
# well. The control "even" is a head whose weights are the same for all that it may see.
LINES = 60  # of the 240 conjugation lines the first ones, besides all held-out cells; more lines take longer
ROLES = ("previous token", "same token", "person", "translation")


Looks = list[tuple[int, list[int]]]  # (5, [2]): position 5 would look at position 2


def places(line: str, words: Sequence[str]) -> dict[str, Looks]:
    """For each role the positions of a line that look, and those that each would look at.

    line   as the corpus has it, "he works = él trabaja"
    words  its tokens one by one, with the boundary that stands before it

    "person" and "translation" are relations of the corpus: from "=" to the English pronoun, and from the Spanish
    pronoun to the English verb. A line without "=" has neither.
    """
    # Of each token the positions of the same word before it.
    earlier = [[j for j in range(i) if words[j] == word] for i, word in enumerate(words)]
    looks: dict[str, Looks] = {
        "previous token": [(i, [i - 1]) for i in range(1, len(words))],
        "same token": [(i, same) for i, same in enumerate(earlier) if same],
    }
    start = len(words) - len(line.split())  # what stands before the line
    related = verbs.related(line)
    for role in ("person", "translation"):
        looks[role] = [(start + i, [start + j]) for i, j in related.get(role, ())]
    return looks


def role_scores(model: GPT, corpus: Corpus) -> dict[str, float]:
    """For each role its mass in the best head, that of even weights, and what silencing the head adds to the loss.

    The mass of a role is the mean weight that a head puts on the right positions, over all looks of all lines.
    """
    masses: dict[str, list[np.ndarray]] = {role: [] for role in ROLES}  # of each look the masses (layers * heads,)
    even: dict[str, list[float]] = {role: [] for role in ROLES}
    for line in [*verbs.conjugation_lines(core=True)[:LINES], *(cell.line for cell in corpus.cells)]:
        ids = corpus.tokens.prompt(line)
        words = corpus.tokens.shown(ids)
        # (layers * heads, T, T). "" is a name for the model in messages, and there are none here.
        weights = np.stack([head.weights for head in head_maps(model, ids, words, "").maps])
        for role, looks in places(line, words).items():
            for i, targets in looks:
                masses[role].append(weights[:, i, targets].sum(-1))
                even[role].append(len(targets) / (i + 1))  # position i sees 0 to i
    whole = evaluate(model, corpus.data)
    scores: dict[str, float] = {}
    for role in ROLES:
        mass_of_heads = np.mean(masses[role], axis=0)
        # Heads lie layer after layer: of 4 heads a layer, number 6 is L1.H2.
        layer, head = divmod(int(mass_of_heads.argmax()), model.config.n_heads)
        with ablate(model, [f"L{layer}.H{head}"]):
            cost = evaluate(model, corpus.data) - whole
        even_mass = float(np.mean(even[role]))
        scores |= {role: float(mass_of_heads.max()), f"even {role}": even_mass, f"silenced {role}": cost}
    return scores


ROLES_OF_HEADS = Experiment(
    name="roles",
    question=Note.of("comparison.which_roles"),
    task=replace(VERBS_OR_TEXT, text_recipe=None),  # a text has no such roles
    arms=(
        Arm(name=Note.of("comparison.untrained"), shape=SHAPE, trained=False),
        Arm(name=Note.of("comparison.trained"), shape=SHAPE),
    ),
    metrics=(
        *(Metric(role, Note.of("comparison.mass", role=labelled("role", role)), "") for role in ROLES),
        *(
            Metric(f"silenced {role}", Note.of("comparison.silenced", role=labelled("role", role)), "nats")
            for role in ROLES
        ),
    ),
    measure=role_scores,
    notes=(Note.of("comparison.best_head"),),
)
