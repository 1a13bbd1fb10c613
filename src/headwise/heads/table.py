"""Tables of heads: head x statistic x document. How they are read, drawn and written; and the story of a prediction.

    HeadTable   heads by name     to_frame(), text(), html(), which a notebook shows
      Seen      of some calls     of each head every row, as `watch` saw it (`headwise.heads.watch`)
      Survey    of a corpus       of each head means over documents with intervals, controls, roles, effects, examples
    HeadRow     one head of it    head.entropy, head["entropy"], head.means

In plain types and NumPy arrays: no torch here.

A head earns a role when its score reaches the threshold and the lower bound of its interval over documents lies above
both controls: attention spread evenly over what the mask allows, and the largest score that any head of the same model
reaches with untrained weights. A single document gives no interval: its lower bound is -inf, so that no role is earned
by what a text decides. Of a relation a third control is the head itself, at the same distances from other tokens: a
head that looks two tokens back wherever it stands has found nothing.
"""

from __future__ import annotations

import io
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from headwise.errors import HeadwiseError
from headwise.files import read_toml
from headwise.heads.statistics import Statistics, V, unknown_head, unknown_statistic
from headwise.intervals import Interval
from headwise.records import plain_data
from headwise.table import Cell, Table, head_figure, number, plural, say
from headwise.words import Note, key_of, phrase, said

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from rich.console import Console

# Of the first document that a survey keeps as text, at most: a round number, for the page that shows them.
TOKENS = 1024

PLACE = ("name", "part", "layer", "head")  # of a head, as tables and pages have it
Numbers = dict[str, float]  # by statistic, head or part
Texts = tuple[str, ...]
Row = dict[str, Any]  # column -> value, of a data frame
Array = NDArray[np.float32]


class HeadRow(Statistics[V]):
    """One head of a table; V is what it has of a statistic: an interval, or an array with a number a row."""

    @property
    @abstractmethod
    def means(self) -> Numbers:
        """The mean of each statistic."""


H = TypeVar("H", bound=HeadRow[Any])


class HeadTable(Mapping[str, H]):
    """Heads by name: `table["L3.H5"].entropy`."""

    @abstractmethod
    def records(self) -> list[Row]:
        """Names and numbers, a row a head. None: not measured."""

    def to_frame(self) -> DataFrame:
        """The records as a pandas DataFrame; NaN was not measured.

        Raises:
            HeadwiseError: where pandas is missing.
        """
        return frame(self.records())

    def columns(self) -> dict[str, Sequence[Cell]]:
        """What a shown table has beside the name and the means: heading -> a cell for each head."""
        return {}

    def table(self) -> Table:
        """A line for each head: `columns`, and the mean of each statistic."""
        columns = dict(self.columns())
        means = [head.means for head in self.values()]
        # the statistics that any head has, each once
        for name in dict.fromkeys(name for of_head in means for name in of_head):
            # with 3 decimals
            columns[name] = [number(of_head.get(name), 3) for of_head in means]
        # a mark may be called "head" as well
        rows = zip(self, *columns.values(), strict=True)
        return Table(["head", *columns], list(map(list, rows)))

    def text(self, width: int = 100) -> str:
        """The table as plain text, for a terminal of that width."""
        return self.table().text(width)

    def figure(self, statistic: str, n: int | None = None) -> Figure:
        """A figure of matplotlib: a statistic of all heads, a line a layer; with `n` the largest as bars."""
        return head_figure(
            {name: head[statistic] for name, head in self.items()}, statistic, n
        )

    def _repr_html_(self) -> str:
        return self.table().html()


def frame(records: Sequence[Row]) -> DataFrame:
    """Records as a pandas DataFrame; pandas is imported only here."""
    try:
        import pandas
    except ModuleNotFoundError:
        raise HeadwiseError(
            "a table in Python needs pandas: pip install 'headwise[tables]'"
        ) from None
    return pandas.DataFrame(list(records))


@dataclass(frozen=True)
class Role:
    """A job that a head can have, and the rule by which it earns it."""

    name: str  # "previous token"
    score: str  # the statistic that decides, a key of `HeadProfile.scores`
    threshold: float  # the least score
    meaning: str  # in a line
    source: str  # the paper that the role is from, or where the pairs of a relation come from

    def earned(
        self, scores: Mapping[str, Interval], *controls: Mapping[str, float]
    ) -> bool:
        """Does a head with these scores have the role? A control has the number of each statistic that it knows."""
        score = scores.get(self.score)
        limits = [control.get(self.score, -inf) for control in controls]
        return (
            score is not None
            and score.mean >= self.threshold
            and all(score.low > limit for limit in limits)
        )


@dataclass(frozen=True)
class Relation:
    """A relation between tokens, such as that of a verb to its subject, whose right answers the text brings along."""

    name: str
    meaning: str  # in a line
    source: str  # where its pairs come from
    n_pairs: int
    n_documents: int


@dataclass(frozen=True)
class Followed:
    """How well one head follows a relation; means over pairs, then over documents."""

    mass: Interval  # weight on the right tokens
    # share, of the tokens that look, of those whose largest weight is on a right one
    accuracy: Interval
    even: float  # control: the mass of attention that is spread evenly
    # control: the head's weight at the same distances from other tokens; NaN where there are none
    elsewhere: float
    # control: the largest mass of any head of the untrained model; NaN where it was not measured
    untrained: float
    # a good pair: the tokens that look, those looked at, the weight
    example: tuple[str, str, float]

    @property
    def lead(self) -> float:
        """How far the mass lies above the highest of the three controls."""
        # NaN is passed over: a first one would stay the largest, and `even` is always a number
        return self.mass.mean - max(self.even, self.elsewhere, self.untrained)


@dataclass(frozen=True)
class Example:
    """Where in the text a head looked hard, at another token than the first and the one that looks."""

    document: int  # its number, from 0
    row: int  # the token that looks, counted from the first of the document
    key: int  # the token looked at, counted likewise
    looks: str  # the token that looks, as text
    at: str  # the token looked at, as text
    weight: float


# The least mass for the role of a relation, the same as for most roles of data/roles.toml. A round choice: heads that
# papers name lie well above, even attention well below.
MASS = 0.4


def relation_role(relation: Relation) -> Role:
    """The role of following a relation: its mass, which stands among the scores by the relation's name, decides."""
    return Role(relation.name, relation.name, MASS, relation.meaning, relation.source)


# The roles that are looked for in every model. Their meanings, in two languages, stand in words.toml, by the name.
ROLES = tuple(
    Role(name, score, threshold, Note.of(key_of("job", name)), source)
    for name, score, threshold, source in read_toml("data/roles.toml")["roles"]
)


@dataclass(frozen=True, repr=False)
class HeadProfile(HeadRow[Interval]):
    """What one head does on many documents; numbers are means over rows, then over documents."""

    name: str  # "L3.H5"; in a model of several stacks "encoder.L3.H5", "cross.L3.H5"
    part: str  # the stack, a part of the name: "", "encoder", "decoder", "cross", ...
    layer: int
    head: int
    # statistic -> mean and interval over documents; see `Survey.statistics`
    scores: dict[str, Interval]
    # control: the means for attention spread evenly over what the mask allows
    uniform: Numbers
    # (b,b) what fraction of its attention each of b blocks of queries of the first document gives to each block of keys
    shares: Array
    # (b,) what of the first column of `shares` goes to the first key alone: a page can hide that key
    first_key: Array
    # (n,) mean weight that each token of the passage receives from a query; see `Survey.passage`
    received: Array
    # (n,k) for each token of the passage the keys with the largest weights ...
    top_keys: NDArray[np.int64]
    top_weights: Array  # (n,k) ... and those weights, largest first; 0 where there are fewer keys
    # those that it has earned, by name; see `Survey.roles`
    roles: Texts = ()
    importance: float | None = None  # Michel et al. 2019; None where there is no loss
    # change in loss, nats a token, without this head; None where it was not measured
    ablation: Interval | None = None
    # by name of `Survey.relations`
    relations: dict[str, Followed] = field(default_factory=dict)
    # of different documents, the largest weight first
    examples: tuple[Example, ...] = ()

    def __getitem__(self, name: str) -> Interval:
        """The mean of a statistic and its interval over documents."""
        if name not in self.scores:
            raise unknown_statistic(name, self.scores)
        return self.scores[name]

    @property
    def means(self) -> Numbers:
        """The mean of each statistic over the documents."""
        return {name: score.mean for name, score in self.scores.items()}

    def __repr__(self) -> str:
        facts = [f"roles: {', '.join(self.roles) or 'none'}"]
        # it is in every survey; a profile that is made by hand may have no scores
        if "entropy" in self.scores:
            facts.insert(0, f"entropy={self.entropy.mean:.4g}")
        if self.ablation is not None:
            facts.append(f"loss without it {self.ablation.mean:+.4g}")
        return f"{self.name}({'; '.join(facts)})"


@dataclass(frozen=True)
class Survey(HeadTable[HeadProfile]):
    """What every head of a model does on a text: `survey["L3.H5"].entropy` is its mean and interval over documents."""

    model: str  # how the reader knows the model
    family: str  # "headwise", or the model type in transformers
    texts: Texts  # where the text came from
    n_documents: int
    n_tokens: int
    longest: int  # tokens of the longest document
    statistics: dict[str, str]  # name -> meaning and unit, in the order to be shown
    roles: tuple[Role, ...]  # those that were looked for
    # Control: statistic -> the largest score of any head of the same model with untrained weights. None: not measured.
    untrained: Numbers | None
    # mean next-token loss of the documents that were ablated, nats a token
    loss: float | None
    ablated: str | None  # "zero" or "mean"; None where heads were not silenced
    # the first document as text, at most 1,024 tokens; its first n are the passage
    tokens: Texts
    passage: int  # n: of so many tokens each head has `received` and `top_keys`
    profiles: tuple[HeadProfile, ...]  # in the order of the model
    notes: Texts  # what was left out and why, in full sentences
    # those whose pairs are known; their masses are among the scores of a head
    relations: tuple[Relation, ...] = ()

    def __getitem__(self, name: str) -> HeadProfile:
        for profile in self.profiles:
            if profile.name == name:
                return profile
        raise unknown_head(name, list(self))

    def __iter__(self) -> Iterator[str]:
        return (profile.name for profile in self.profiles)

    def __len__(self) -> int:
        return len(self.profiles)

    def records(self) -> list[Row]:
        """Columns: name, part, layer, head, roles (joined by `;`); of each statistic its mean, low, high and uniform,
        the last being that of even attention; of each relation accuracy and elsewhere; importance; ablation, low and
        high."""
        rows = []
        for profile in self.profiles:
            row = {key: getattr(profile, key) for key in PLACE}
            row["roles"] = "; ".join(profile.roles)
            for key in self.statistics:
                row |= _bounds(key, profile.scores.get(key))
                row[f"{key}_uniform"] = profile.uniform.get(key)
            for key in (relation.name for relation in self.relations):
                score = profile.relations.get(key)
                row[f"{key}_accuracy"] = None if score is None else score.accuracy.mean
                row[f"{key}_elsewhere"] = None if score is None else score.elsewhere
            row["importance"] = profile.importance
            row |= _bounds("ablation", profile.ablation)
            # The bounds of a single document are infinite, for which JSON has no number.
            rows.append(plain_data(row))
        return rows

    def __repr__(self) -> str:
        return f"Survey({self.model}: {plural(len(self), 'head')}, {plural(self.n_documents, 'document')})"

    def columns(self) -> dict[str, Sequence[Cell]]:
        losses = [getattr(profile.ablation, "mean", None) for profile in self.profiles]
        return {
            "roles": [", ".join(profile.roles) for profile in self.profiles],
            "loss without it": [number(loss, 3, signed=True) for loss in losses],
        }


def _bounds(key: str, value: Interval | None) -> Row:
    names = {"mean": key, "low": f"{key}_low", "high": f"{key}_high"}
    return {name: getattr(value, bound, None) for bound, name in names.items()}


# The story of one prediction: which heads bring the answer, which work against it, and by which paths. `why`
# of `headwise.heads.why` measures it.


@dataclass(frozen=True)
class StoryHead:
    """A head in the story of a prediction."""

    head: str
    # to the logit of the answer, minus that of the other, nats; None: not known of this model
    adds: float | None
    # the position where it acts; None where it reads another text than `tokens`
    at: int | None
    # from there: positions and weights, the three strongest that are no specials
    looks: tuple[tuple[int, float], ...]
    # change of the answer's log-probability when the head is silenced, nats; None: not measured
    without: float | None
    # share of the difference to the corrupted text that it carries; below 0 it works against it
    brings: float | None


@dataclass(frozen=True)
class StoryKeys:
    """What the keys and the values of a key/value head carry, apart."""

    head: str  # L3.KV1
    k: float  # share of the difference
    v: float


@dataclass(frozen=True)
class StoryPath:
    """What one head brings through what another reads."""

    sender: str  # a head, or those that look at the same token: L0.H1+L0.H2
    receiver: str  # a head, or for at k and v a key/value head
    # the head itself, or of those that read the key/value head the one that carries most
    reader: str
    at: str  # q, k or v
    effect: float  # share of the difference


@dataclass(frozen=True)
class Story:
    """Why a model predicts what it predicts; also the JSON of `headwise why`. `text()` shows it."""

    # Round choices. A lower CLEAR or a higher MOST makes a longer story, which takes longer to measure.
    # share of the difference that a head must carry to have a place in the story
    CLEAR: ClassVar[float] = 0.1
    MOST: ClassVar[int] = (
        12  # heads that are silenced, followed, and shown in the table
    )
    # nats; shares of a smaller difference are large whatever the heads do
    FAINT: ClassVar[float] = 1.0

    model: str
    asks: str  # which token the model answers with: "next", "masked" or "first"
    prompt: str
    tokens: Texts
    corrupt: str | None
    corrupted: Texts | None
    answer: str
    other: str  # what the answer is compared with
    predicted: str
    predicted_probability: float
    probability: float  # of the answer
    # "logits": the answer's minus the other's, or "probability": the answer's log-probability
    counts: str
    clean_value: float  # what counts, of the prompt, nats
    corrupted_value: float | None  # and of the corrupted text
    # of the answer minus that of the other, nats: the sum of all parts where these are known
    logit: float
    embedding: float | None
    bias: float | None
    feed_forwards: Numbers
    # of the model, from the first to the last: L0, or encoder.L0
    layers: Texts
    # all heads: those that carry most first, or, without a corrupted text, that add most
    heads: tuple[StoryHead, ...]
    keys: tuple[StoryKeys, ...]  # of the key/value heads that the first of these read
    paths: tuple[StoryPath, ...]
    notes: Texts  # which token an answer was taken for, and what was left out

    @property
    def _moved(self) -> float:
        # the difference to the corrupted text, nats
        return self.clean_value - (self.corrupted_value or 0.0)

    def moves(self, part: StoryHead) -> float:
        """How many nats of what counts (see `counts`) come with a head: above 0 towards the answer."""
        # Measured against the corrupted text where there is one, else read off the logit, else off the silencing.
        if part.brings is not None:
            return part.brings * self._moved
        # Without the head the answer's log-probability changes by `without`, so the head brings the opposite.
        return part.adds if part.adds is not None else -(part.without or 0.0)

    @property
    def told(self) -> list[StoryHead]:
        """The heads that have a place in the story: those with a clear share, or else the three that move most."""
        first = self.heads[: self.MOST]
        clear = [part for part in first if abs(part.brings or 0.0) >= self.CLEAR]
        return clear or list(self.heads[:3])

    def opening(self, lang: str = "en") -> list[str]:
        """What is predicted, what it is compared with, and which heads bring it and which work against it."""
        keys = [f"predicts_{self.asks}"]
        if self.predicted != self.answer:
            keys.append("rather")
        if self.corrupted_value is None:
            keys.append("compared")
        else:
            keys.append(f"corrupted_{self.counts}")
            if abs(self._moved) < self.FAINT:
                keys.append("faint")
        lines = [self._line(f"why.{key}", lang) for key in keys]
        # the heads on either side, the strongest first, in a line each: moves above 0, and below
        for key, sign in (("why.bring", 1), ("why.against", -1)):
            heads = [part for part in self.told if sign * self.moves(part) > 0]
            names = ", ".join(f"*{part.head}* ({self._amount(part)})" for part in heads)
            if heads:
                lines.append(self._line(key, lang, heads=names, count=len(heads)))
        return lines

    def _amount(self, part: StoryHead) -> str:
        # Where the prompt favours the answer less than the corrupted text does, a share has the other sign.
        if part.brings is None or self._moved < 0:
            return number(self.moves(part), 2, signed=True)
        return _percent(part.brings)

    def sentence(self, part: StoryHead, lang: str = "en") -> str:
        """A head in words: what it carries or adds, where it looks, and what happens without it."""
        words = []

        def add(key: str, **facts: Any) -> None:
            words.append(self._line(f"why.{key}", lang, head=part.head, **facts))

        if part.brings is not None:
            key = "carries" if part.brings >= 0 else "opposes"
            add(key, share=_percent(abs(part.brings)))
        elif part.adds is not None:
            add("adds" if part.adds >= 0 else "takes", adds=f"{abs(part.adds):.2f}")
        if part.looks:
            t, weight = part.looks[0]  # the strongest
            # Without a place it is a cross attention: its query is what the decoder writes, its keys are these tokens.
            facts = {} if part.at is None else {"here": self.word(part.at)}
            key = "looks_from" if facts else "looks"
            add(key, at=self.word(t), weight=f"{weight:.2f}", **facts)
        if part.without is not None:
            # `without` is a change of the logarithm, so it multiplies the chance.
            add("without", after=f"{self.probability * math.exp(part.without):.3f}")
        return " ".join(words)

    def word(self, t: int) -> str:
        """A token of the text; with its place where the text has it several times: "John (11)", counted from 1."""
        bare = _bare(self.tokens[t])
        several = [_bare(token) for token in self.tokens].count(bare) > 1
        return f"{bare} ({t + 1})" if several else bare

    def table(self) -> Table:
        """The heads of the story in numbers."""
        rows = [
            (
                part.head,
                number(part.adds, 2, signed=True),
                number(part.brings, 2, signed=True),
                ", ".join(f"{self.word(t)} {weight:.2f}" for t, weight in part.looks),
                number(part.without, 2, signed=True),
            )
            for part in self.heads[: self.MOST]
        ]
        return Table(("head", "adds", "carries", "looks at", "without it"), rows)

    def closing(self, lang: str = "en") -> list[str]:
        """What the numbers mean, key/value heads and paths, and what a reader must know."""
        lines = []
        if self.embedding is not None:
            parts = {
                "heads": math.fsum(part.adds or 0.0 for part in self.heads),
                "feed": math.fsum(self.feed_forwards.values()),
                "embedding": self.embedding,
                "bias": self.bias,
            }
            facts = {name: number(x, 2, signed=True) for name, x in parts.items()}
            lines.append(self._line("why.sum", lang, **facts))
        lines.append(phrase("why.columns", lang))
        for carried in self.keys:
            if max(abs(carried.k), abs(carried.v)) >= self.CLEAR:
                k = _percent(carried.k)
                v = _percent(carried.v)
                lines.append(phrase("why.keys", lang, head=carried.head, k=k, v=v))
        for path in self.paths:  # only clear ones were kept
            facts = {**vars(path), "share": _percent(path.effect)}
            lines.append(phrase(f"why.path_{path.at}", lang, **facts))
        return [*lines, *(said(note, lang) for note in self.notes)]

    def print(self, console: Console) -> None:
        """One screen: the prediction, the heads that matter in words, then in a table, and the paths."""

        sentences = [f"  {self.sentence(part)}" for part in self.told]
        # stars are for HTML, which shows what they enclose in bold
        say(console, "\n".join([*self.opening(), *sentences]).replace("*", ""))
        self.table().print(console, left=(0, 3))  # heads, and where they look
        say(console, "\n".join(self.closing()).replace("*", ""))

    def text(self, width: int = 100) -> str:
        """What `headwise why` prints on a console of that width."""
        from rich.console import Console

        file = io.StringIO()
        self.print(Console(file=file, width=width))
        return file.getvalue()

    def __repr__(self) -> str:
        # Four heads fit into a line beside a short prompt: a round choice.
        parts = ", ".join(f"{part.head} {self._amount(part)}" for part in self.told[:4])
        return f"Story({self.prompt!r} -> {self.answer!r}: {parts})"

    def _line(self, key: str, lang: str, **facts: Any) -> str:
        """A phrase with the facts of the story, and others."""
        values = {
            "answer": _bare(self.answer),
            "other": _bare(self.other),
            "predicted": _bare(self.predicted),
            "text": _plain(self.prompt),
            "corrupt": _plain(self.corrupt or ""),
            "chance": f"{self.probability:.3f}",
            "likelier": f"{self.predicted_probability:.3f}",
            "clean": number(self.clean_value, 2),
            "corrupted": number(self.corrupted_value, 2),
            "moved": number(self._moved, 2),
            "logit": number(self.logit, 2),
        }
        return phrase(key, lang, **values | facts)


def _bare(token: str) -> str:
    """A token without the space before it; one of spaces alone as it is."""
    return _plain(token.strip() or token)


def _plain(text: str) -> str:
    """A text of others, whose stars are no marks of ours."""
    return text.replace("*", "\u2217")  # the star of formulas looks alike


def _percent(share: float) -> str:
    return f"{number(100 * share, 0)} %"
