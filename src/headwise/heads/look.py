"""What somebody asks of a model while touching it: a sentence's maps, what comes next, what changes without a head.

A `Desk` answers one question after another. Each is a JSON object that names what it asks under `do`: "read" a text,
give the "maps" of heads, or silence "each" head of a layer. `view/look.py` puts a page before it. A page may show two
texts side by side: the desk keeps the latest reading of each, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwise.corpus.tokens import Ids
from headwise.errors import HeadwiseError
from headwise.heads.ablate import calls_of
from headwise.heads.blocks import as_numpy, row_weights
from headwise.heads.table import PLACE
from headwise.heads.watch import LONGEST
from headwise.models.ask import evaluating, last_states, logits, predicts, reads_tokens
from headwise.models.hook import attach
from headwise.models.open import Folder
from headwise.models.sites import Site
from headwise.records import Call, parse_head
from headwise.words import Facts, Note

Array = NDArray[np.float32]
# Round choices.
CELLS = 2**26  # weights of all maps of a text, at most: 256 MiB in float32
LISTED = 6  # likeliest tokens that are listed of each column, as in `_next`
HARDEST = 8  # heads that are named for a token
# A head that gives this fraction of its weight to copies of the token, or to what stands behind them, is named for
# that, even if it gives more to another kind of key: these two are rare and telling.
CLEAR = 0.3
SLOTS = ("a", "b")  # the text, and the other one beside it
# by the name under `do` the fields of each question, in the order of the arguments of `Desk._read` and so on
QUESTIONS = {
    "read": ("slot", "text", "changes", "at", "follow"),
    "maps": ("slot", "heads"),
    "each": ("layer", "follow"),
}


@dataclass
class Reading:
    """What a model made of a text, with some heads scaled."""

    text: str
    ids: Ids
    at: int  # the position whose prediction is shown
    # What comes of the text with all heads as they are: the probabilities (V,) of the token predicted at `at`. Where
    # the model predicts none, the mean (C,) of its last hidden states.
    plain: Tensor
    now: Tensor  # the same with the changes
    maps: list[Array]  # (T,S) of each head; of those that did not run (0,0)


class Desk:
    """A model that answers a page, a question at a time."""

    def __init__(self, folder: Folder) -> None:
        if folder.tokens is None:
            raise HeadwiseError(
                f"{folder.name} has no tokenizer, so it reads no text; put tokenizer.json beside it"
            )
        if not reads_tokens(folder.model):
            raise HeadwiseError(
                f"{folder.name} reads no text but what its encoder hears or sees; "
                f"hw.watch(model, maps=True) has the maps of inputs of your own"
            )
        self.folder = folder
        self.tokens = folder.tokens
        # what the model predicts: the "next" token, "masked" ones, or None
        self.kind = predicts(folder.model)
        # what is typed where a word is to be hidden; only tokenizers of transformers have it
        mask = getattr(self.tokens, "mask", None)
        self.mask_text = mask if self.kind == "masked" else None
        self.heads: list[str] = []
        # of each head: are its keys those of another text?
        self.crosses = []
        # The attentions that run when the model reads a text, in their order, and which of the heads each has. A tower
        # of images does not run.
        self.layers: dict[Site, slice] = {}
        before, after = self.tokens.frame  # around every text, such as [CLS] and [SEP]
        words = range(folder.vocab_size or len(self.tokens))
        word = next(i for i in words if i not in self.tokens.specials)  # any will do
        for site in calls_of(folder.model, torch.tensor([[*before, word, *after]])):
            if site not in self.layers:
                end = len(self.heads) + site.n_heads
                self.layers[site] = slice(len(self.heads), end)
                self.heads += site.heads
                self.crosses += [site.cross] * site.n_heads
        # Ids that stand for no text, such as [SEP]. [UNK] is special, too, but stands for a word.
        self.signs = self.tokens.specials - {self.tokens.unknown}
        # tokens whose maps (T,T) of all heads have CELLS weights
        most = int((CELLS / len(self.heads)) ** 0.5)
        self.longest = min(folder.context or LONGEST, LONGEST, most)
        self.readings: dict[str, Reading] = {}  # by slot

    def about(self) -> Facts:
        """What a page knows before anything is asked."""
        heads = [
            dict(zip(PLACE, (name, *parse_head(name)), strict=True))
            for name in self.heads
        ]
        return {
            "model": self.folder.name,
            "family": self.folder.family,
            "heads": heads,
            "predicts": self.kind,
            "mask": self.mask_text,
        }

    def answer(self, asked: Facts) -> Facts:
        """Answer a question of the page's.

        Raises HeadwiseError for a question that is none, and for a text that is not read; then the message is a note,
        which the page shows in the reader's language.
        """
        if asked["do"] not in QUESTIONS:
            raise HeadwiseError("this is no question of the page's")
        values = [asked[key] for key in QUESTIONS[asked["do"]]]
        return getattr(self, f"_{asked['do']}")(*values)

    # A text

    def _read(
        self, slot: str, text: str, changes: Facts, at: int, follow: int
    ) -> Facts:
        """Read a text with some heads scaled; what its heads do, and what comes next.

        slot     "a", or "b" for the text beside it; an empty text takes "b" away
        changes  name of a head -> the factor that what it gives is multiplied with; 0 silences it
        at       the position whose prediction is shown; -1 leaves it to `_place`
        follow   the id of the token whose probability the page follows; -1 takes the likeliest
        """
        if slot == "b" and not text.strip():
            self.readings.pop("b", None)
            return self._next(follow)
        ids = self._ids(text)
        words = self._words(text, ids)
        at = self._place(ids, at)
        factors = torch.ones(2, len(self.heads))
        factors[1] = torch.tensor([changes.get(name, 1.0) for name in self.heads])
        # empty of what does not run
        maps = [np.zeros((0, 0), np.float32) for _ in self.heads]
        plain, now = self._run(ids, at, factors, maps)
        reading = self.readings[slot] = Reading(text, ids, at, plain, now, maps)
        answer = {
            "words": words,
            "at": at,
            **self._next(follow),
            # what each head does in this text, and for each token the heads that look hardest from there
            "kinds": list(map(partial(self._kind, ids), maps, self.crosses)),
            "hardest": self._hardest(reading),
        }
        # Only maps of one size can be subtracted: for each token the heads that look most differently in both texts.
        first, other = map(self.readings.get, SLOTS)
        if first and other and len(first.ids) == len(other.ids):
            answer["differ"] = self._hardest(first, other)
        return answer

    def _ids(self, text: str) -> list[int]:
        # The tokens of a text in its frame. A `Note` is a message that a page shows in the reader's language.
        if not text.strip():
            raise HeadwiseError(Note.of("look.empty"))
        before, after = self.tokens.frame
        ids = [*before, *self.tokens.encode(text)]
        if self.kind != "next":  # else the text goes on: nothing closes it
            ids += after
        if len(ids) > self.longest:
            is_context = self.longest == self.folder.context
            key = "look.beyond_context" if is_context else "look.too_long"
            raise HeadwiseError(Note.of(key, tokens=len(ids), longest=self.longest))
        return ids

    def _words(self, text: str, ids: Ids) -> list[tuple[str, bool, int, bool]]:
        """What the page writes for each token: (label, has a gap before it, number of line ends in it, is a sign).

        Two words, "he works", give ("he", True, 0, False) and ("works", True, 0, False). The label of a token of
        spaces or line ends alone is "": the page writes a sign for it.
        """
        try:
            places = self.tokens.places(text)
        # a tokenizer that does not say: what it shows of each token is all there is
        except HeadwiseError:
            places = []
        # number among `ids` -> the character behind its token; what frames the text has no place in it
        ends = dict(enumerate((end for _, end in places), len(self.tokens.frame[0])))
        words, done = [], 0  # characters of the text that are shown already
        for n, (i, piece) in enumerate(zip(ids, self.tokens.shown(ids), strict=True)):
            is_sign = i in self.signs
            is_placed = n in ends
            end = ends.get(n, done)
            written = text[done:end] if is_placed else piece
            # signs stand apart from words, and the first word from signs
            is_apart = done == 0 if is_placed else is_sign
            # A character such as an emoji may take several tokens, all at its place: the first one shows it, the
            # others are dots.
            label = written.strip() if written else "\u00b7"
            has_gap = is_apart or written[:1].isspace()
            words.append((label, has_gap, written.count("\n"), is_sign))
            done = max(done, end)
        return words

    def _place(self, ids: Ids, at: int) -> int:
        """The position whose prediction is shown: `at`, where the page points, if something is predicted there.

        Else the last token, behind which the text goes on; in a model that fills in hidden words the first of these,
        or -1 where none is hidden.
        """
        if self.kind != "masked":
            return at if 0 <= at < len(ids) else len(ids) - 1
        hidden = self.tokens.encode(self.mask_text) if self.mask_text else []
        # What `encode` makes of the mask may hold more, such as a space: only the special id among them hides a word.
        places = [n for n, i in enumerate(ids) if i in hidden and i in self.signs]
        if at in places:
            return at
        return places[0] if places else -1

    @torch.no_grad()
    def _run(
        self,
        ids: Ids,
        at: int,
        factors: Tensor,
        maps: list[Array] | None = None,
    ) -> Tensor:
        """What comes of n copies of a text; what each head gives in each is multiplied with `factors` (n,heads).

        Probabilities (n,V) of the token that is predicted at position `at`; the mean (n,C) of the last hidden states
        where none is. `maps` gets the maps of all heads in the last copy.
        """
        model = self.folder.model

        def take(site: Site, call: Call) -> Tensor:
            columns = self.layers[site]
            if maps is not None:
                rows = row_weights(call, len(factors) - 1, range(call.n_queries))
                maps[columns] = as_numpy(rows)  # (H,T,S)
            # (n,H,T,E), before W_O
            return call.out * factors[:, columns, None, None].to(call.out)

        # Layers whose maps are wanted or one of whose heads is scaled. No others, since listening costs time.
        listened = [
            site
            for site, columns in self.layers.items()
            if maps is not None or (factors[:, columns] != 1).any()
        ]
        with attach(listened, take), evaluating(model):
            rows = torch.tensor(ids).repeat(len(factors), 1)
            if self.kind is None or at < 0:
                return last_states(model, rows).float().mean(1).cpu()
            # then logits of other positions are not computed
            last = self.kind == "next" and at == len(ids) - 1
            row = logits(model, rows, last=last)[:, -1 if last else at]
            return row.float().softmax(-1).cpu()

    # What its heads do

    def _kind(self, ids: Ids, weights: Array, crosses: bool) -> tuple[str, float]:
        """The kind of key that a head looks at most, such as "previous_token", and the part of its weight there."""
        T = len(ids)
        # it looks at another text; or it did not run
        if crosses or weights.shape != (T, T):
            return "elsewhere", 0.0
        # The first token of a causal map sees nothing behind it: that row has no choice.
        first = 1 if T > 1 and not weights[0, 1:].any() else 0
        rows = weights[first:]
        numbers = np.array(ids)
        # Below, of each kind which cells of these rows are of it; they broadcast to (rows,T).
        t, s = np.arange(first, T)[:, None], np.arange(T)[None]  # queries and keys
        same_token = (numbers[first:, None] == numbers) & (t != s)
        # Keys right after a copy of the token that looks: shifted by one; the token itself is left out again.
        after_same = np.zeros_like(same_token)
        after_same[:, 1:] = same_token[:, :-1] & (t != s)[:, 1:]
        # Rare and telling kinds first: they count in those rows alone that see such a key.
        telling = {"induction": after_same, "duplicate_token": same_token}
        for name, cells in telling.items():
            able = (cells & (rows > 0)).any(1)
            mass = float((rows * cells).sum() / max(1, able.sum()))
            if mass >= CLEAR:
                return name, mass
        usual = {
            "first_token": s == 0,
            "delimiter": np.isin(numbers, list(self.signs))[None],
            "self": t == s,
            "previous_token": s == t - 1,
            "next_token": s == t + 1,
        }
        # each key counts once, for the first kind that it is of
        kinds = np.select(list(usual.values()), range(len(usual)), len(usual))
        masses = np.bincount(kinds.ravel(), rows.ravel()) / len(rows)
        best = int(masses.argmax())
        return [*usual, "elsewhere"][best], float(masses[best])

    def _hardest(
        self, reading: Reading, other: Reading | None = None
    ) -> list[list[tuple[int, int, float]]]:
        """For each token the HARDEST heads that look hardest from there: (number of the head, key, weight).

        The first token, signs and the token itself do not count as keys: there most heads rest. With `other`, a text
        of as many tokens: the heads whose weights differ most between the texts, at which key, and by how much.
        """
        T = len(reading.ids)
        skipped = [t == 0 or i in self.signs for t, i in enumerate(reading.ids)]
        # of each row the largest weight, or difference, and its key
        best = np.zeros((len(self.heads), T), np.float32)
        keys = np.zeros((len(self.heads), T), int)
        for n, weights in enumerate(reading.maps):
            beside = np.zeros_like(weights) if other is None else other.maps[n]
            # It did not run, looks from another text, or has nothing to be compared with: its 0 puts it last.
            if len(weights) != T or beside.shape != weights.shape:
                continue
            looks = np.abs(weights - beside)
            # the keys are the same text
            if not self.crosses[n] and looks.shape[1] == T:
                looks[:, skipped] = 0
                np.fill_diagonal(looks, 0)
            keys[n] = looks.argmax(1)
            best[n] = looks.max(1)
        # Of equal ones the earlier head first. Four digits are more than the page shows, and keep the answer short.
        orders = np.argsort(-best, axis=0, kind="stable")[:HARDEST].T.tolist()
        return [
            [(n, int(keys[n, t]), round(float(best[n, t]), 4)) for n in order]
            for t, order in enumerate(orders)
        ]

    def _maps(self, slot: str, heads: list[Any]) -> Facts:
        """The maps of some heads by their numbers, as arrays; `view/look.py` packs them."""
        reading = self.readings.get(slot)
        return {"maps": {} if reading is None else {n: reading.maps[n] for n in heads}}

    # What comes next

    def _next(self, follow: int) -> Facts:
        """The likeliest tokens, with their probabilities as the model is, with heads scaled, and the latter in "b".

        Where no token is predicted: how alike the mean last state stays under the changes, as a cosine ("kept"), and
        how alike those of the two texts are, without and with the changes ("alike").
        """
        reading = self.readings.get("a")
        other = self.readings.get("b")
        if reading is None:
            return {}
        if not self._predicts(reading):
            state: Facts = {"kept": _cosine(reading.plain, reading.now)}
            if other is not None and not self._predicts(other):
                alike = _cosine(reading.plain, other.plain)
                state["alike"] = alike, _cosine(reading.now, other.now)
            return {"state": state}
        columns = [reading.plain, reading.now]
        # -1: no word is hidden in the text beside
        if other is not None and other.at >= 0:
            columns.append(other.now)
        chances = torch.stack(columns)  # (2 or 3, V)
        if not 0 <= follow < chances.shape[1]:
            follow = int(reading.plain.argmax())
        most = chances.topk(min(LISTED, chances.shape[1])).indices  # of each column
        # a chance for each of the columns
        rows = [
            (i, self._token(i), *chances[:, i].tolist())
            for i in {*most.flatten().tolist(), follow}
        ]
        rows.sort(key=lambda row: -max(row[2:]))
        # What the likeliest token adds to the text, which the page appends: a token decoded alone may lose its space,
        # or be one byte of a character. So the text is decoded with and without it, and its beginning is cut off.
        longer = self.tokens.decode([*reading.ids, int(reading.now.argmax())])
        return {
            "next": rows,
            "follow": follow,
            "goes_on": longer[len(self.tokens.decode(reading.ids)) :],
        }

    def _predicts(self, reading: Reading) -> bool:
        """Is a token predicted in this text? Else what counts is the direction of the mean last state."""
        return self.kind is not None and reading.at >= 0

    def _token(self, i: int) -> str:
        """A token as its text, without the gap before it; a line end as its sign, other gaps as a dot."""
        text = self.tokens.shown([i])[0]
        return text.strip() or "\u23ce" * text.count("\n") or "\u00b7"

    def _each(self, layer: int, follow: int) -> Facts:
        """What becomes of the prediction without each head of one layer alone, all of them in one batch.

        All other heads are as the model has them, also where the page has scaled some. "left" is the number of layers
        that the page has still to ask for.
        """
        reading = self.readings.get("a")
        if reading is None:
            raise HeadwiseError(Note.of("look.empty"))
        columns = list(self.layers.values())[layer]
        names = self.heads[columns]
        # a copy of the text for each head
        factors = torch.ones(len(names), len(self.heads))
        factors[:, columns] -= torch.eye(len(names))
        # Of each head its name, and what comes without it: the probability of the followed token, and the likeliest
        # token; or how alike the mean last state stays.
        rows = []
        outcomes = self._run(reading.ids, reading.at, factors)
        for name, outcome in zip(names, outcomes, strict=True):
            value = _cosine(reading.plain, outcome)
            best = ""
            if self._predicts(reading):
                value = float(outcome[follow])
                best = self._token(int(outcome.argmax()))
            rows.append((name, value, best))
        return {"each": rows, "left": len(self.layers) - 1 - layer}


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))
