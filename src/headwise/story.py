"""The story of one prediction: which heads bring the answer, which work against it, and by which paths.

`heads/why.py` measures it; here it is put into words and tables, for the terminal and the page.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from headwise.table import Table, number, say
from headwise.words import phrase, said

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = ("head", "adds", "carries", "looks at", "without it")


@dataclass(frozen=True)
class StoryHead:
    """A head in the story of a prediction."""

    head: str
    # to the logit of the answer, minus that of the other, nats; None: not known of this model
    adds: float | None
    at: int | None  # the position where it acts; None where it reads another text than `tokens`
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

    sender: str
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
    MOST: ClassVar[int] = 12  # heads that are silenced, followed, and shown in the table

    model: str
    asks: str  # which token the model answers with: "next", "masked" or "first"
    prompt: str
    tokens: tuple[str, ...]
    corrupt: str | None
    corrupted: tuple[str, ...] | None
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
    feed_forwards: dict[str, float]
    layers: tuple[str, ...]  # of the model, from the first to the last: L0, or encoder.L0
    # all heads: those that carry most first, or, without a corrupted text, that add most
    heads: tuple[StoryHead, ...]
    keys: tuple[StoryKeys, ...]  # of the key/value heads that the first of these read
    paths: tuple[StoryPath, ...]
    notes: tuple[str, ...]  # which token an answer was taken for, and what was left out

    def moves(self, part: StoryHead) -> float:
        """How many nats of what counts (see `counts`) come with a head: above 0 towards the answer."""
        # Measured against the corrupted text where there is one, else read off the logit, else off the silencing.
        if part.brings is not None and self.corrupted_value is not None:
            return part.brings * (self.clean_value - self.corrupted_value)
        # Without the head the answer's log-probability changes by `without`, so the head brings the opposite.
        return part.adds if part.adds is not None else -(part.without or 0.0)

    @property
    def told(self) -> list[StoryHead]:
        """The heads that have a place in the story: those with a clear share, or else the three that move most."""
        clear = [part for part in self.heads[: self.MOST] if abs(part.brings or 0.0) >= self.CLEAR]
        return clear or list(self.heads[:3])

    def opening(self, lang: str = "en") -> list[str]:
        """What is predicted, what it is compared with, and which heads bring it and which work against it."""
        values = self._words() | {"text": _plain(self.prompt), "chance": f"{self.probability:.3f}"}
        lines = [phrase(f"why.predicts_{self.asks}", lang, **values)]
        if self.predicted != self.answer:
            chance = f"{self.predicted_probability:.3f}"
            lines.append(phrase("why.rather", lang, predicted=_bare(self.predicted), chance=chance))
        if self.corrupted_value is None:
            lines.append(phrase("why.compared", lang, **values))
        else:
            clean, corrupted = (
                number(value, 2) for value in (self.clean_value, self.corrupted_value)
            )
            values |= {"text": _plain(self.corrupt or ""), "clean": clean, "corrupted": corrupted}
            lines.append(phrase(f"why.corrupted_{self.counts}", lang, **values))
        return [*lines, *self._sides(lang)]

    def _sides(self, lang: str) -> list[str]:
        """The heads on either side, the strongest first, in a line each."""
        lines = []
        for key, sign in (("why.bring", 1), ("why.against", -1)):  # moves above 0, and below
            heads = [part for part in self.told if sign * self.moves(part) > 0]
            names = ", ".join(f"*{part.head}* ({self._amount(part)})" for part in heads)
            if heads:
                lines.append(phrase(key, lang, heads=names, count=len(heads), **self._words()))
        return lines

    def _amount(self, part: StoryHead) -> str:
        return (
            number(self.moves(part), 2, signed=True)
            if part.brings is None
            else _percent(part.brings)
        )

    def sentence(self, part: StoryHead, lang: str = "en") -> str:
        """A head in words: what it carries or adds, where it looks, and what happens without it."""
        values = self._words() | {"head": part.head}
        words = []
        if part.brings is not None:
            key = "why.carries" if part.brings >= 0 else "why.opposes"
            words.append(phrase(key, lang, share=_percent(abs(part.brings)), **values))
        elif part.adds is not None:
            key = "why.adds" if part.adds >= 0 else "why.takes"
            words.append(phrase(key, lang, adds=f"{abs(part.adds):.2f}", **values))
        if part.looks:
            t, weight = part.looks[0]  # the strongest
            # Without a place it is a cross attention: its query is what the decoder writes, its keys are these tokens.
            key, here = (
                ("why.looks", "") if part.at is None else ("why.looks_from", self.word(part.at))
            )
            words.append(phrase(key, lang, here=here, at=self.word(t), weight=f"{weight:.2f}"))
        if part.without is not None:
            # `without` is a change of the logarithm, so it multiplies the chance.
            chances = (self.probability, self.probability * math.exp(part.without))
            before, after = (f"{chance:.3f}" for chance in chances)
            words.append(phrase("why.without", lang, before=before, after=after, **values))
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
        return Table(COLUMNS, rows)

    def closing(self, lang: str = "en") -> list[str]:
        """What the numbers mean, key/value heads and paths, and what a reader must know."""
        lines = []
        if self.embedding is not None and self.bias is not None:
            adds = math.fsum(part.adds or 0.0 for part in self.heads)  # all heads together
            values = {
                "logit": f"{self.logit:.2f}",
                "heads": f"{adds:+.2f}",
                "embedding": f"{self.embedding:+.2f}",
            }
            values |= {
                "bias": f"{self.bias:+.2f}",
                "feed": f"{math.fsum(self.feed_forwards.values()):+.2f}",
            }
            lines.append(phrase("why.sum", lang, **values))
        lines.append(phrase("why.columns", lang))
        for carried in self.keys:
            if max(abs(carried.k), abs(carried.v)) >= self.CLEAR:
                k, v = _percent(carried.k), _percent(carried.v)
                lines.append(phrase("why.keys", lang, head=carried.head, k=k, v=v))
        for path in self.paths:  # only clear ones were kept
            values = {
                "sender": path.sender,
                "receiver": path.receiver,
                "share": _percent(path.effect),
            }
            lines.append(phrase(f"why.path_{path.at}", lang, **values))
        return [*lines, *(said(note, lang) for note in self.notes)]

    def print(self, console: Console) -> None:
        """One screen: the prediction, the heads that matter in words, then in a table, and the paths."""
        for line in (*self.opening(), *(f"  {self.sentence(part)}" for part in self.told)):
            # stars are for HTML, which shows what they enclose in bold
            say(console, line.replace("*", ""))
        self.table().print(console, left=(0, 3))  # heads, and where they look
        for line in self.closing():
            say(console, line.replace("*", ""))

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

    # Facts that most phrases here have.
    def _words(self) -> dict[str, str]:
        return {"answer": _bare(self.answer), "other": _bare(self.other)}


def _bare(token: str) -> str:
    """A token without the space before it; one of spaces alone as it is."""
    return _plain(token.strip() or token)


def _plain(text: str) -> str:
    """A text of others, whose stars are no marks of ours."""
    return text.replace("*", "\u2217")  # the star of formulas looks alike


def _percent(share: float) -> str:
    return f"{number(100 * share, 0)} %"
