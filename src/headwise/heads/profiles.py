"""The result of a survey, in plain types and NumPy arrays, and the roles that heads can have. No torch here.

A head earns a role when its score reaches the threshold and the lower bound of its interval over documents lies above
both controls: attention spread evenly over what the mask allows, and the largest score that any head of the same model
reaches with untrained weights. A single document gives no interval, so no role that a text decides. Of a relation a
third control is the head itself, at the same distances from other tokens: a head that looks two tokens back wherever
it stands has found nothing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf, isnan
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headwise.files import packaged, read_text
from headwise.heads.frame import frame, survey_rows
from headwise.heads.notebook import head_card, heads_table
from headwise.heads.statistics import Statistics, unknown_head, unknown_statistic
from headwise.intervals import Interval
from headwise.markup import escaped, number, plural

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Role:
    """A job that a head can have, and the rule by which it earns it."""

    name: str  # "previous token"
    score: str  # the statistic that decides, a key of `HeadProfile.scores`
    threshold: float  # the least score
    meaning: str  # in a line
    source: str

    def earned(self, scores: Mapping[str, Interval], *controls: Mapping[str, float]) -> bool:
        """Does a head with these scores have the role?"""
        if self.score not in scores:
            return False
        score = scores[self.score]
        return score.mean >= self.threshold and all(score.low > control.get(self.score, -inf) for control in controls)


@dataclass(frozen=True)
class Relation:
    """A relation between tokens, such as that of a verb to its subject, whose right answers the text brings along."""

    name: str
    meaning: str  # in a line
    source: str  # where its pairs come from
    n_pairs: int
    n_documents: int
    offset: int  # the fixed distance, query - key, that is right most often
    offset_accuracy: float  # and how often it is: a head of that distance could have this accuracy


@dataclass(frozen=True)
class Followed:
    """How well one head follows a relation; means over pairs, then over documents."""

    mass: Interval  # weight on the right tokens
    accuracy: Interval  # share of the tokens that look whose largest weight is on a right one
    even: float  # control: the mass of attention that is spread evenly
    elsewhere: float  # control: the head's weight at the same distances from other tokens; nan where there are none
    untrained: float  # control: the largest mass of any head of the untrained model; nan where it was not measured
    example: tuple[str, str, float]  # a good pair: the tokens that look, those looked at, the weight

    @property
    def lead(self) -> float:
        """How far the mass lies above the highest of the three controls."""
        return self.mass.mean - max(x for x in (self.even, self.elsewhere, self.untrained) if not isnan(x))


# Lower edges of the bins of `HeadProfile.distances`: 0, 1, 2 to 3, 4 to 7, ...
DISTANCES = (0, *(2**n for n in range(24)))


@dataclass(frozen=True)
class Example:
    """Where in the text a head looked hard, at another token than the first and the one that looks."""

    document: int
    row: int  # the token that looks, counted from the first of the document
    key: int
    looks: str
    at: str
    weight: float


MASS = 0.4  # of the attention; heads that are named in papers lie well above, even attention well below


def relation_role(relation: Relation) -> Role:
    """The role of following a relation."""
    return Role(relation.name, relation.name, MASS, relation.meaning, relation.source)


ROLES = tuple(Role(*fields) for fields in tomllib.loads(read_text(packaged("roles", "toml")))["roles"])


@dataclass(frozen=True, repr=False)
class HeadProfile(Statistics[Interval]):
    """What one head does on many documents; numbers are means over rows, then over documents."""

    name: str  # "L3.H5"; in a model of several stacks "encoder.L3.H5", "cross.L3.H5"
    part: str  # the stack: "", "encoder", "decoder", "cross", ...
    layer: int
    head: int
    scores: dict[str, Interval]  # statistic -> mean and interval over documents; see `Survey.statistics`
    uniform: dict[str, float]  # the same for attention spread evenly over what the mask allows
    roles: tuple[str, ...]  # names of `Survey.roles`
    importance: float | None  # Michel et al. 2019; None where the model has no loss
    ablation: Interval | None  # change in loss, nats a token, without this head; None where it was not measured
    thumbnail: NDArray[np.float32]  # (b,b) exact means of the weights over blocks of the first document
    first_key: NDArray[np.float32]  # (b,) what of the thumbnail's first column the first key alone accounts for
    received: NDArray[np.float32]  # (n,) mean weight that each token of the passage receives from a query
    top_keys: NDArray[np.int64]  # (n,k) for each token of the passage the keys with the largest weights ...
    top_weights: NDArray[np.float32]  # (n,k) ... and those weights, largest first; 0 where there are fewer keys
    was: str = ""  # its name in its own model, where it has got that of the head that it is compared with
    relations: dict[str, Followed] = field(default_factory=dict)  # by name of `Survey.relations`
    distances: tuple[int, ...] = ()  # rows by how far away their largest weight is, in bins from `DISTANCES` on
    attended: tuple[tuple[str, float], ...] = ()  # the tokens that receive most of its attention, and their shares
    examples: tuple[Example, ...] = ()  # of different documents, the largest weight first
    by_document: dict[str, NDArray[np.float64]] = field(default_factory=dict)  # where asked for: (documents,) means

    def __getitem__(self, name: str) -> Interval:
        """The mean of a statistic and its interval over documents."""
        if name not in self.scores:
            raise unknown_statistic(name, self.scores)
        return self.scores[name]

    @property
    def means(self) -> dict[str, float]:
        """The mean of each statistic over the documents."""
        return {name: score.mean for name, score in self.scores.items()}

    def __repr__(self) -> str:
        facts = [f"{name}={self.means[name]:.4g}" for name in ("entropy",) if name in self.scores]
        facts += [f"roles: {', '.join(self.roles) or 'none'}"]
        facts += [] if self.ablation is None else [f"loss without it {self.ablation.mean:+.4g}"]
        return f"{self.name}({'; '.join(facts)})"

    def _repr_html_(self) -> str:
        return head_card(self, ", ".join(self.roles))


@dataclass(frozen=True)
class Survey(Mapping[str, HeadProfile]):
    """What every head of a model does on a text: `survey["L3.H5"].entropy` is its mean and interval over documents."""

    model: str  # how the reader knows the model
    family: str  # "headwise", or the model type in transformers
    texts: tuple[str, ...]  # where the text came from
    n_documents: int
    n_tokens: int
    longest: int  # tokens of the longest document
    statistics: dict[str, str]  # name -> meaning and unit, in the order to be shown
    roles: tuple[Role, ...]  # those that were looked for
    untrained: dict[str, float] | None  # the largest score of any head of the same model with untrained weights
    loss: float | None  # mean next-token loss of the documents that were ablated, nats a token
    ablated: str | None  # "zero" or "mean"; None where heads were not silenced
    tokens: tuple[str, ...]  # the first document as text, at most 1,024 tokens; its first n are the passage
    passage: int  # n
    profiles: tuple[HeadProfile, ...]  # in the order of the model
    notes: tuple[str, ...]  # what was left out and why, in full sentences
    relations: tuple[Relation, ...] = ()  # those whose pairs are known; their masses are among the scores of a head

    def __getitem__(self, name: str) -> HeadProfile:
        for profile in self.profiles:
            if profile.name == name:
                return profile
        raise unknown_head(name, [profile.name for profile in self.profiles])

    def __iter__(self) -> Iterator[str]:
        return (profile.name for profile in self.profiles)

    def __len__(self) -> int:
        return len(self.profiles)

    def to_frame(self, by: str = "head") -> DataFrame:
        """A pandas DataFrame with a row a head: names, roles, statistics with their intervals, effects.

        by="document" has a row a head and document; the survey must have been taken with by_document=True. Raises
        HeadwiseError where it was not, and where pandas is missing. Columns: `headwise.heads.frame.survey_rows`.
        """
        return frame(survey_rows(self, by))

    def renamed(self, pairs: Mapping[str, str]) -> Survey:
        """The survey whose heads have the names of their counterparts in another model: `pairs` has theirs, then these.

        A head without a counterpart is `L0.H1 (gone)`.
        """
        known = {here: there for there, here in pairs.items()}
        names = ((profile, known.get(profile.name, f"{profile.name} (gone)")) for profile in self.profiles)
        return replace(self, profiles=tuple(replace(each, name=name, was=each.name) for each, name in names))

    def __repr__(self) -> str:
        return f"Survey({self.model}: {plural(len(self), 'head')}, {plural(self.n_documents, 'document')})"

    def _repr_html_(self) -> str:
        losses = [None if profile.ablation is None else profile.ablation.mean for profile in self.profiles]
        columns = {
            "roles": [escaped(", ".join(profile.roles)) for profile in self.profiles],
            "loss without it": [number(loss, 3, signed=True) for loss in losses],
        }
        return heads_table(self.profiles, self.statistics, columns)
