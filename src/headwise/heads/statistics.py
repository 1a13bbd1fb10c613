"""Every statistic of a head: what it means, its formula, and what must be known to measure it.

To add one, write it into `Statistics`. It is then measured, is an attribute of what `watch` saw and of a survey's
heads, and stands in tables, files and reports. Its words for readers stand in `[column]` and `[meaning]` of
`words.toml`, its plain form in `tests/heads/dense.py`.

A formula reads the weights of H heads on one document, of which n rows are measured, and gives (H,n) numbers. Its
argument `b` is a finished `Pass` of `headwise.heads.blocks`. With p_ij the weight of key j for query i, `b.total(x)`
is the sum over the keys of p x, and `b.mass` that of p, which is 1 without a sink. This file imports no torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from headwise.errors import MissingError
from headwise.words import unknown

if TYPE_CHECKING:
    from torch import Tensor

V = TypeVar("V")  # what a holder has of each statistic: a float, an array, an interval
# of a finished `Pass`; it gives None where that is not known of the call. A name: what the pass has under it.
Formula = Callable[[Any], "Tensor | None"] | str


@dataclass(eq=False)  # each is itself alone
class Statistic:
    """What a number about a head means, and where it comes from.

    It is a descriptor: `Statistics.entropy` is the entry itself, and `head.entropy` is the number, `head["entropy"]`.
    """

    meaning: str  # and unit, for a reader
    # None: a survey takes it from all documents together, or from the weights
    formula: Formula | None = None
    # it is the statistic of this name, measured on random tokens that are repeated
    repeated: str = ""
    name: str = ""  # that of the attribute

    # Python calls it when the class is made
    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, holder: None, owner: type) -> Statistic: ...
    @overload
    def __get__(self, holder: Statistics[V], owner: type) -> V: ...
    def __get__(self, holder: Any, owner: type) -> Any:
        return self if holder is None else holder[self.name]


class Statistics(ABC, Generic[V]):
    """What is known of a head: a number for each statistic, an array of numbers, or an interval, by name.

    A statistic that was not measured, such as a distance in cross attention, raises MissingError, a HeadwiseError that
    is a KeyError and an AttributeError.
    """

    @abstractmethod
    def __getitem__(self, name: str) -> V:
        """The number of a statistic by its name."""

    # Clark et al. 2019 (arXiv 1906.04341), section 3: -sum p log p, where log2 p = shifted - log_sum
    entropy = Statistic(
        "nats; 0 looks at one key, log n at n keys alike",
        lambda b: math.log(2) * (b.mass * b.log_sum - b.total("shifted")),
    )
    # Voita et al. 2019 (arXiv 1905.09418), section 4
    confidence = Statistic("mean of the largest weight of a row", lambda b: b.share)
    # What grows where a training diverges: the report of Kimi K2 (arXiv 2507.20534) bounds it head by head.
    score_max = Statistic(
        "nats, the largest score of a row, as the softmax reads it; mean over rows",
        "score_max",
    )
    score_peak = Statistic("nats, the largest score of all rows")  # no mean: a maximum
    lse = Statistic(
        "nats, the logarithm of the softmax's denominator",
        "lse",
    )
    sink = Statistic(
        "weight that the sink logit takes",
        "sink_weight",
    )
    gate = Statistic(
        "what the head's output is multiplied with before W_O, mean over its width",
        "gate",
    )
    distance = Statistic(
        "tokens back, the mean over the attention",
        "distance",
    )
    spread = Statistic(
        "tokens, the standard deviation around that distance",
        "spread",
    )
    # Beside the first key, as a cache that keeps the first tokens and the latest ones does (Xiao et al. 2023).
    reach = Statistic(
        "tokens; so many of the latest keys hold 99 % of the weight, the first key beside them; of every 16th row",
        lambda b: b.by_name.get("reach"),
    )
    self = Statistic(
        "mass on the token itself",
        "self",
    )
    previous = Statistic(
        "mass on the token right before; the first row, which has none, counts as 0",
        "previous",
    )
    next = Statistic(
        "mass on the token right after",
        "next",
    )
    first = Statistic("mass on the first token", "first")
    same_token = Statistic(
        "mass on earlier copies of the token",
        "same",
    )
    after_same = Statistic(
        "mass on what came right after those copies",
        "after",
    )
    delimiter = Statistic(
        "mass on separators and punctuation, the first token left out",
        "on delimiter",
    )
    rare = Statistic(
        "mass on the rarest tenth of the document's tokens",
        "on rare",
    )
    # Measured by `headwise.heads.survey`, but for the norm.
    duplicate = Statistic(
        "mass on the earlier copy, in random tokens repeated", repeated="same_token"
    )
    induction = Statistic(
        "mass on what came after that copy, in random tokens repeated",
        repeated="after_same",
    )
    norm = Statistic(
        "length of what the head adds to the residual stream",
        "added",
    )
    # Voita et al. 2019, section 5.1; the offset is that at which all documents together look most
    positional = Statistic(
        "share of the rows with a key at one fixed offset that look hardest at it, -1 to 1 left out"
    )
    copying = Statistic(
        "from the weights: does it raise the logits of what it looks at? -1 to 1"
    )


def all_statistics() -> dict[str, Statistic]:
    """Every statistic by name, in the order in which they are shown: that of the class."""
    values = vars(Statistics).values()
    return {item.name: item for item in values if isinstance(item, Statistic)}


def formulas(marks: Iterable[str], only: Collection[str] = ()) -> dict[str, Formula]:
    """The formulas by name.

    marks  names of the marked sets of keys: "delimiter" and "rare" are statistics, any other is measured by its name
    only   names of what is asked for; of none it is everything
    """
    known = {name: item.formula for name, item in all_statistics().items()}
    known |= {name: f"on {name}" for name in marks}
    asked = only or known
    return {name: x for name, x in known.items() if x is not None and name in asked}


def unknown_statistic(name: str, known: Iterable[str]) -> MissingError:
    """What to raise for a statistic that was not measured."""
    item = all_statistics().get(name)
    if item is not None and item.repeated:
        return MissingError(
            f"{name!r} is measured on random tokens that are repeated, by hw.survey; of a text of one's own it is "
            f"{item.repeated!r}"
        )
    return MissingError(
        f"there is no statistic {name!r} of this head; there are {', '.join(known)}"
    )


def unknown_head(name: object, known: Sequence[str]) -> MissingError:
    """What to raise for a head that the model does not have."""
    # What `unknown` says where no name is like it.
    offer = f"there are {len(known)}, {known[0]} to {known[-1]}"
    return MissingError(str(unknown(f"no head {name!r}", name, known, offer)))
