"""What somebody asks of a model while touching it: a sentence's maps, what comes next, what changes without a head.

A `Desk` answers one question after another, each a JSON object with the name of what it asks under `do`; `view/look.py`
puts a page before it. It keeps the latest reading of two texts that stand side by side, and nothing else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.blocks import row_weights
from headwise.heads.statistics import unknown_head
from headwise.heads.texts import transcripts
from headwise.heads.watch import LONGEST
from headwise.models.ask import (
    encoded,
    evaluating,
    last_states,
    logits,
    predicts,
    reads_tokens,
    run_body,
    sounds_of,
)
from headwise.models.hook import attach
from headwise.models.open import Folder
from headwise.models.sites import Site, sites_of
from headwise.records import Call, head_name, parse_head
from headwise.words import Note

Array = NDArray[np.float32]
CELLS = 2**26  # weights of all maps of a text, at most: 256 MiB
CHARACTERS = 20_000  # of a text, before its tokens are counted
LISTED, HARDEST = 6, 8  # likeliest tokens of each column; heads that are named for a token
CLEAR = 0.3  # of a head's weight on copies of the token, or behind them: from there on that names its kind
SLOTS = ("a", "b")  # the text, and the other one beside it
LARGEST = 10.0  # size of a factor on a head
# The fields of each question and their types: the arguments of `Desk._read` and so on.
QUESTIONS: dict[str, dict[str, type]] = {
    "read": {"slot": str, "text": str, "changes": dict, "at": int, "follow": int},
    "maps": {"slot": str, "heads": list},
    "each": {"layer": int, "follow": int},
}


@dataclass(frozen=True)
class Layer:
    """One call of an attention; where a model runs the same weights again and again (ALBERT), each run is a layer."""

    site: Site
    run: int
    heads: list[str]


@dataclass
class Reading:
    """What a model made of a text, with some heads scaled."""

    text: str
    ids: list[int]
    changes: dict[str, float]
    at: int  # the position whose prediction is shown
    plain: Tensor  # chances (V,) there, or the mean last state (C,), with all heads as they are
    now: Tensor  # the same with the changes
    maps: list[Array] = field(default_factory=list)  # (T,S) of each head, those that did not run are empty


class Desk:
    """A model that answers a page, a question at a time."""

    def __init__(self, folder: Folder, sound: Path | None = None) -> None:
        self.spoken = None if sound is None else transcripts(folder, [sound])[0]
        if folder.tokens is None:
            raise HeadwiseError(f"{folder.name} has no tokenizer, so it reads no text; put tokenizer.json beside it")
        if not reads_tokens(folder.model):
            raise HeadwiseError(
                f"{folder.name} reads no text but what its encoder hears or sees; "
                f"hw.look(model, *inputs) shows the heads on inputs of your own"
            )
        self.folder, self.tokens, self.kind = folder, folder.tokens, predicts(folder.model)
        self.layers = self._called()
        self.heads = [name for layer in self.layers for name in layer.heads]
        self.signs = self.tokens.specials - {self.tokens.unknown}  # ids that stand for no text, such as [SEP]
        most = int((CELLS / len(self.heads)) ** 0.5)  # tokens whose maps (T,T) of all heads have so many cells
        self.longest = min(folder.context or LONGEST, LONGEST, most)
        self.readings: dict[str, Reading] = {}

    @torch.no_grad()
    def _called(self) -> list[Layer]:
        """The attentions that read a text, in the order of their calls: a tower of images is none of them."""
        model = self.folder.model
        order = []  # of the calls
        sites = sites_of(model)
        word = next(i for i in range(len(self.tokens)) if i not in self.tokens.specials)  # any will do
        before, after = self.tokens.frame

        def note(site: Site, call: Call) -> None:
            order.append(site)

        with attach({site: partial(note, site) for site in sites}), evaluating(model), encoded():
            run_body(model, torch.tensor([[*before, word, *after]]))
        if len(set(order)) == len(order):  # nothing ran twice: every layer keeps its own name
            return [Layer(site, 0, site.heads) for site in sites if site in order]
        layers = []
        numbers, runs = Counter[str](), Counter[Site]()  # of each stack, and of each site, the calls so far
        for site in order:  # ALBERT: a layer is numbered by its place among the calls of its stack
            part = parse_head(site.head(0))[0]
            name = f"{part}.L{numbers[part]}" if part else f"L{numbers[part]}"
            layers.append(Layer(site, runs[site], [head_name(name, h) for h in range(site.n_heads)]))
            numbers[part] += 1
            runs[site] += 1
        return layers

    def about(self) -> dict[str, Any]:
        """What a page knows before anything is asked."""
        heads = []
        for name in self.heads:
            part, layer, head = parse_head(name)
            heads.append({"name": name, "part": part, "layer": layer, "head": head})
        return {
            "model": self.folder.name,
            "family": self.folder.family,
            "heads": heads,
            "predicts": self.kind,
            "mask": self.mask_text,
            "longest": self.longest,
            "seconds": sounds_of(self.folder.model).seconds_per_key if self.spoken else None,
        }

    @property
    def example(self) -> str | None:
        """What the model wrote of the sound that it hears."""
        return None if self.spoken is None else self.tokens.decode(self.spoken.ids).strip()

    @property
    def mask_text(self) -> str | None:
        """What is typed where a word is to be hidden; None for a model that fills in none."""
        mask = getattr(self.tokens, "mask", None)
        return mask if self.kind == "masked" else None

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a question of the page's; HeadwiseError says, as a note where it can, why a text is not read."""
        name = str(asked.get("do"))
        kinds = QUESTIONS.get(name, {})
        values = {key: asked.get(key) for key in kinds}
        # The very type: to isinstance True is a number, too.
        if not kinds or any(type(values[key]) is not kind for key, kind in kinds.items()):
            raise HeadwiseError("this is no question of the page's")
        with encoded():  # the encoder has heard the sound once; its states are used again
            return getattr(self, f"_{name}")(**values)

    # A text

    def _read(self, slot: str, text: str, changes: dict[str, Any], at: int, follow: int) -> dict[str, Any]:
        """Read a text with some heads scaled; the numbers of its heads, and what comes next.

        An empty text takes away the one beside.
        """
        if slot not in SLOTS:
            raise HeadwiseError(f"slot={slot!r} is none of {', '.join(SLOTS)}")
        if slot == "b" and not text.strip():
            self.readings.pop("b", None)
            return self._next(follow)
        for name, factor in changes.items():
            if name not in self.heads:
                raise unknown_head(name, self.heads)
            if not isinstance(factor, int | float) or not abs(factor) <= LARGEST:
                raise HeadwiseError(f"a head is scaled by at most {LARGEST:g}, and not by {factor!r}")
        ids = self._ids(text)
        words = self._words(text, ids)
        at = self._place(ids, at)
        maps: dict[str, Array] = {}
        plain = now = self._run(ids, at, changes, maps)
        before = self.readings.get(slot)
        # `plain` is with all heads as they are: known already if only factors have changed, else one more run.
        if before is not None and (before.ids, before.at) == (ids, at):
            plain = before.plain
        elif changes:
            plain = self._run(ids, at, {})
        nothing = np.zeros((0, 0), np.float32)
        reading = Reading(text, ids, changes, at, plain, now, [maps.get(name, nothing) for name in self.heads])
        self.readings[slot] = reading
        answer = {"words": words, "at": at, **self._next(follow)}
        # What each head does in this text, and for each token the heads that look hardest from there.
        answer |= {"kinds": [self._kind(ids, weights) for weights in reading.maps], "hardest": self._hardest(reading)}
        first, other = map(self.readings.get, SLOTS)
        if first is not None and other is not None and len(first.ids) == len(other.ids):
            answer["differ"] = self._hardest(first, other)
        return answer

    def _ids(self, text: str) -> list[int]:
        if len(text) > CHARACTERS:
            raise HeadwiseError(Note.of("look.too_many", characters=len(text), most=CHARACTERS))
        if not text.strip():
            raise HeadwiseError(Note.of("look.empty"))
        before, after = self.tokens.frame
        if self.kind == "next":  # the text goes on: nothing closes it
            after = []
        ids = [*before, *self.tokens.encode(text), *after]
        if len(ids) > self.longest:
            key = "look.beyond_context" if self.longest == self.folder.context else "look.too_long"
            raise HeadwiseError(Note.of(key, tokens=len(ids), longest=self.longest))
        return ids

    def _words(self, text: str, ids: Sequence[int]) -> list[tuple[str, bool, int, bool]]:
        """Of each token its text, whether a gap is before it, line ends that it holds, and whether it is a sign."""
        n_before = len(self.tokens.frame[0])
        shown = self.tokens.shown(ids)
        try:
            places = self.tokens.places(text)
        except HeadwiseError:  # a tokenizer that does not say: what it shows of each token is all there is
            places = []
        words = []
        done = 0  # characters of the text that are shown already
        place_of = dict(enumerate(places, n_before))  # number among `ids` -> characters [start, end) of the text
        for n, (i, piece) in enumerate(zip(ids, shown, strict=True)):
            if n not in place_of:  # it frames the text, or its place is not known
                is_sign = i in self.signs
                has_gap = is_sign or piece[:1].isspace()
                words.append((piece.strip() or piece, has_gap, piece.count("\n"), is_sign))
                continue
            start, end = place_of[n]
            between, written = text[done:start], text[start:end]  # what no token stands for, and what this one does
            has_gap = bool(re.match(r"\s", between + written)) or done == 0
            is_shown = end <= done or not written  # one more token of a character that is shown already
            label = "\u00b7" if is_shown else written.strip()
            words.append((label, has_gap, (between + written).count("\n"), i in self.signs))
            done = max(done, end)
        return words

    def _place(self, ids: Sequence[int], at: int) -> int:
        """Where something is predicted: where the page points, behind the text, or at the first hidden word; or -1."""
        if self.kind != "masked":
            return at if 0 <= at < len(ids) else len(ids) - 1
        hidden = self.tokens.encode(self.mask_text) if self.mask_text else []
        places = [n for n, i in enumerate(ids) if i in hidden and i in self.signs]
        if at in places:
            return at
        return places[0] if places else -1

    @torch.no_grad()
    def _run(
        self, ids: list[int], at: int, changes: Mapping[str, float], maps: dict[str, Array] | None = None
    ) -> Tensor:
        """What comes of the text at a place, the named heads scaled; `maps` gets the maps of all heads."""
        listened = [each for each in self.layers if maps is not None or not changes.keys().isdisjoint(each.heads)]
        # Site, and how often it has run before -> the layer. No others, since listening costs time.
        layers = {(layer.site, layer.run): layer for layer in listened}
        runs = Counter[Site]()

        def take(site: Site, call: Call) -> Tensor | None:
            layer = layers.get((site, runs[site]))
            runs[site] += 1
            if layer is None:
                return None
            if maps is not None:
                weights = row_weights(call, 0, range(call.n_queries)).float().cpu().numpy()
                if self.spoken and call.cross:  # behind the sound there is silence
                    weights = weights[..., : self.spoken.n_keys]
                maps.update(zip(layer.heads, weights, strict=True))
            if changes.keys().isdisjoint(layer.heads):
                return None
            factors = torch.tensor([changes.get(name, 1.0) for name in layer.heads])
            return call.out * factors[:, None, None].to(call.out)

        with attach({site: partial(take, site) for site, _ in layers}), evaluating(self.folder.model):
            return self._outcome(torch.tensor([ids]), at)[0]

    def _outcome(self, ids: Tensor, at: int) -> Tensor:
        """Chances (B,V) of the token at a place, or the mean (B,C) of the last states where none is predicted."""
        model = self.folder.model
        if self.kind is not None and at >= 0:
            last = self.kind == "next" and at == ids.shape[1] - 1
            return logits(model, ids, last=last)[:, -1 if last else at].float().softmax(-1).cpu()
        return last_states(model, ids).float().mean(1).cpu()

    # What its heads do

    def _kind(self, ids: Sequence[int], weights: Array) -> tuple[str, float]:
        """Where a head looks in this text, and with what part of its weight."""
        T = len(ids)
        numbers = np.array(ids)
        if weights.shape != (T, T):  # it did not run, or looks at another text, or at a sound
            return ("sound", float(weights.max(1).mean())) if self.spoken and weights.size else ("elsewhere", 0.0)
        is_causal = T > 1 and not weights[0, 1:].any()  # the first token sees nothing behind it
        first = 1 if is_causal else 0  # the first row of a causal map has no choice
        rows = weights[first:]
        # Below, of each kind which cells of these rows are of it.
        t, s = np.arange(first, T)[:, None], np.arange(T)[None]  # queries and keys
        same_token = (numbers[first:, None] == numbers) & (t != s)
        after_same = np.zeros_like(same_token)  # the token before this key is the same as the one that looks
        after_same[:, 1:] = same_token[:, :-1] & (t != s)[:, 1:]
        # Rare and telling kinds first: they count in those rows alone that have such a key.
        for name, places in (("induction", after_same), ("duplicate_token", same_token)):
            able = (places & (rows > 0)).any(1)
            mass = float((rows * places)[able].sum(1).mean()) if able.any() else 0.0
            if mass >= CLEAR:
                return name, mass
        places_of = {
            "first_token": s == 0,
            "delimiter": np.isin(numbers, list(self.signs))[None],
            "self": t == s,
            "previous_token": s == t - 1,
            "next_token": s == t + 1,
            "elsewhere": s >= 0,
        }
        uncounted = np.ones_like(same_token)  # each key counts once, for the first kind that it is of
        masses = {}
        for name, places in places_of.items():
            masses[name] = float((rows * (places & uncounted)).sum(1).mean())
            uncounted = uncounted & ~places
        name = max(masses, key=masses.__getitem__)
        return name, masses[name]

    def _hardest(self, reading: Reading, other: Reading | None = None) -> list[list[tuple[int, int, float]]]:
        """For each token heads, the key and the weight of their hardest look from there, the hardest first.

        The first token, signs and the token itself do not count: there most heads rest. With `other`, a text of as many
        tokens: the heads whose look differs most, and by how much.
        """
        T = len(reading.ids)
        skipped = np.isin(np.array(reading.ids), list(self.signs))
        skipped[0] = True
        best = np.zeros((len(self.heads), T), np.float32)
        keys = np.zeros((len(self.heads), T), int)
        for n, weights in enumerate(reading.maps):
            if len(weights) != T or (other is not None and other.maps[n].shape != weights.shape):
                continue
            looks = weights.copy() if other is None else np.abs(weights - other.maps[n])
            if looks.shape[1] == T:  # the keys are the same text, and not a sound
                looks[:, skipped] = 0
                np.fill_diagonal(looks, 0)
            keys[n] = looks.argmax(1)
            best[n] = looks.max(1)
        hardest = []
        for t in range(T):
            order = np.argsort(-best[:, t], kind="stable")[:HARDEST].tolist()
            hardest.append([(n, int(keys[n, t]), round(float(best[n, t]), 4)) for n in order])
        return hardest

    def _maps(self, slot: str, heads: list[Any]) -> dict[str, Any]:
        """The maps of some heads by their numbers, as arrays; `view/look.py` packs them."""
        reading = self.readings.get(slot)
        maps = {} if reading is None else dict(enumerate(reading.maps))
        return {"maps": {n: maps[n] for n in heads if type(n) is int and n in maps}}

    # What comes next

    def _next(self, follow: int) -> dict[str, Any]:
        """The likeliest tokens of both texts, with their chances as the model is and with its heads scaled."""
        reading, other = self.readings.get("a"), self.readings.get("b")
        if reading is None:
            return {}
        if not self._predicts(reading):
            state: dict[str, Any] = {"kept": _cosine(reading.plain, reading.now)}
            if other is not None and not self._predicts(other):
                state["alike"] = _cosine(reading.plain, other.plain), _cosine(reading.now, other.now)
            return {"state": state}
        columns = [reading.plain, reading.now]
        if other is not None and other.at >= 0:
            columns.append(other.now)
        chances = torch.stack(columns)
        if not 0 <= follow < chances.shape[1]:
            follow = int(reading.plain.argmax())
        likeliest = chances.topk(min(LISTED, chances.shape[1])).indices.flatten().tolist()
        ids = sorted({*likeliest, follow}, key=lambda i: -float(chances[:, i].max()))
        rows = [(i, self._token(i), *chances[:, i].tolist()) for i in ids]  # a chance for each of the columns
        # What a token adds to a text shows only behind it: its space, its part of a character.
        longer = self.tokens.decode([*reading.ids, int(reading.now.argmax())])
        return {"next": rows, "follow": follow, "goes_on": longer[len(self.tokens.decode(reading.ids)) :]}

    def _predicts(self, reading: Reading) -> bool:
        """Is a token predicted in this text? Else what counts is the direction of the mean last state."""
        return self.kind is not None and reading.at >= 0

    def _token(self, i: int) -> str:
        """A token as its text, without the gap before it; a line end as its sign."""
        text = self.tokens.shown([i])[0]
        return text.strip() or "\u23ce" * text.count("\n") or "\u00b7"

    def _each(self, layer: int, follow: int) -> dict[str, Any]:
        """What becomes of the answer without each head of one layer alone, all of them in one batch."""
        reading = self.readings.get("a")
        if reading is None or not 0 <= layer < len(self.layers):
            raise HeadwiseError(f"layer={layer}: there are {len(self.layers)}, and a text has to be read first")
        silenced, runs = self.layers[layer], count()
        n_heads = len(silenced.heads)

        def silence(call: Call) -> Tensor | None:
            if next(runs) != silenced.run:  # of weights that run several times, another layer
                return None
            out = call.out.clone()
            out[range(n_heads), range(n_heads)] = 0  # of text n head n
            return out

        with torch.no_grad(), attach({silenced.site: silence}), evaluating(self.folder.model):
            outcomes = self._outcome(torch.tensor([reading.ids] * n_heads), reading.at)
        # Of each head its name, and what comes without it: the chance of the followed token, and the likeliest token;
        # or how alike the mean state stays.
        rows = []
        for name, outcome in zip(silenced.heads, outcomes, strict=True):
            if not self._predicts(reading):
                rows.append((name, _cosine(reading.plain, outcome), ""))
            else:
                rows.append((name, float(outcome[follow]), self._token(int(outcome.argmax()))))
        return {"each": rows, "left": len(self.layers) - 1 - layer}


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))
