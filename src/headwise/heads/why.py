"""Why a model predicts what it predicts: the heads that bring the answer, those that work against it, and their paths.

The answer is the next token, that of a masked word, or the first that the decoder of an encoder-decoder writes. Three
numbers say what a head does: what it adds to the answer's logit, what it carries of the difference to a corrupted
text (its effect when it is patched), and how the answer's log-probability changes without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn

from headwise.corpus.tokens import TextTokens
from headwise.errors import HeadwiseError
from headwise.heads.ablate import READ, Edit
from headwise.heads.attribute import attribute
from headwise.heads.patch import (
    Compared,
    Reading,
    Receiver,
    Study,
    place_of,
)
from headwise.heads.table import Numbers, Story, StoryHead, StoryKeys, StoryPath
from headwise.models.ask import answering, evaluating
from headwise.models.open import folder_of, row_of, tokens_of
from headwise.records import head_name
from headwise.words import Note

# the name of a stage, the steps done, and of all
Progress = Callable[[str, int, int], None]

# Positions at which a head is patched alone, at most: those where what it gives differs most between the two texts.
# A round choice: each one more costs a variant of the text for each of the first heads.
PLACES = 8
# The least weight of a head that looks at a token, a round choice.
HARD = 0.3
CLEAR = Story.CLEAR
# why it is not known what each part adds to the logit
UNKNOWN = {
    "masked": "the last hidden state becomes logits in more than one step",
    "first": "what an encoder adds reaches the logits through the decoder alone",
}


# As `patch`, it leaves a caller's inference mode: what the model made in it and kept could take part in no later
# backward pass.
@torch.inference_mode(False)
@torch.no_grad()
def why(
    model: nn.Module,
    prompt: Any,
    corrupt: Any = None,
    answer: str | int | None = None,
    other: str | int | None = None,
    *,
    progress: Progress = lambda what, done, total: None,
) -> Story:
    """The story of one prediction: what each head adds and carries, where it looks, and what happens without it.

    Args:
        model: what `hw.open` gave
        prompt: ids, or, where the tokenizer is known, a text. What is explained is the next
            token; of an encoder the word at its mask, which stands in the text once; of an encoder-decoder, which
            reads the text, its first token
        corrupt: the same text with one thing changed, in as many tokens: heads are then ranked by what they carry
            of the difference, and the paths between them are followed
        answer: the token that is explained, default what the model predicts: a word, with or without the space
            before it, or an id
        other: the token that it is compared with; default what the model answers to `corrupt`. Where that is the
            same, the log-probability of the answer counts. Without `corrupt`: the likeliest other token
        progress: is called with the name of a stage, the steps done and of all
    """
    way, tokens = answering(model), folder_of(model).tokens
    words = [_meant(model, word) for word in (answer, other)]
    question = _Question(way, tokens, row_of(model, prompt)[0].tolist())
    twin = None
    if corrupt is not None:
        twin = _Question(way, tokens, row_of(model, corrupt)[0].tolist())
        _check_twin(question, twin)
    notes: list[str] = []
    with evaluating(model):
        text, study, parts = question.read(model), None, None
        corrupted = None if twin is None else twin.read(model)
        metric, rival = _compared(words, text, corrupted)
        (token,) = metric.answer
        if corrupted is not None:
            study = Study(text, corrupted, metric)
        try:
            if way in UNKNOWN:
                raise HeadwiseError(UNKNOWN[way])
            parts = attribute(model, question.ids, (token, rival))
        except HeadwiseError as error:
            notes.append(Note.of("why.no_parts", reason=str(error)))
        adds = parts.heads if parts else {}
        asked = _Asked(question, text, study, adds, progress)
        heads = asked.heads(token)
        keys, paths = asked.read_by(heads, notes)
    row = text.answer.cpu().double()  # some devices have no float64
    chances, shown, predicted = row.softmax(-1), question.shown, int(row.argmax())
    difference = float(row[token] - row[rival])
    return Story(
        model=folder_of(model).name,
        asks=way,
        prompt=question.written(prompt),
        tokens=shown(question.ids),
        corrupt=None if twin is None else twin.written(corrupt),
        corrupted=None if twin is None else shown(twin.ids),
        answer=shown([token])[0],
        other=shown([rival])[0],
        predicted=shown([predicted])[0],
        predicted_probability=float(chances[predicted]),
        probability=float(chances[token]),
        counts="logits" if study is None or metric.other else "probability",
        clean_value=study.ends[0] if study else difference,
        corrupted_value=study.ends[1] if study else None,
        logit=parts.logit if parts else difference,
        embedding=parts.embedding if parts else None,
        bias=parts.bias if parts else None,
        feed_forwards=parts.feed_forwards if parts else {},
        layers=tuple(text.calls),
        heads=tuple(heads),
        keys=tuple(keys),
        paths=tuple(paths),
        notes=tuple(notes),
    )


def check_question(
    prompt: str,
    corrupt: str | None,
    words: Iterable[str | None],
    tokens: TextTokens | None,
) -> None:
    """Refuse before weights are read what the tokenizer tells: texts of other lengths, an answer of several tokens."""
    # `why` refuses these itself, when the model is open
    if tokens is None or not prompt.strip():
        return
    if corrupt is not None:
        texts = [list(tokens.prompt(text)) for text in (prompt, corrupt)]
        _check_twin(*(_Question("next", tokens, ids) for ids in texts))
    for word in filter(None, words):
        _choices(tokens, word)


# What is asked


@dataclass(frozen=True)
class _Question:
    """A text as ids, and where its answer stands."""

    way: str  # which token answers it: "next", "masked", or "first" of what a decoder writes
    tokens: TextTokens | None  # of the model, where they are known
    ids: list[int]

    @property
    def position(self) -> int:
        """Where the answer is read: the position of the masked word, or -1, the end."""
        if self.way != "masked":
            return -1
        tokens: Any = self.tokens
        sign = getattr(tokens, "mask", None)
        if sign is None:
            raise HeadwiseError(
                "no tokenizer that names a mask is known of the model, so no word of a text is hidden"
            )
        (mask,) = tokens.encode(sign)  # a mask is a single token
        count = self.ids.count(mask)
        if count != 1:
            raise HeadwiseError(
                f"the text has {count} masked words; write {sign} once, for the word to explain"
            )
        return self.ids.index(mask)

    @property
    def end(self) -> int | None:
        """Where the answer stands; None of one that a decoder begins with, which stands nowhere in the text."""
        # % makes of -1 the last token's position
        return None if self.way == "first" else self.position % len(self.ids)

    def read(self, model: nn.Module) -> Reading:
        return Reading(model, torch.tensor(self.ids), self.position)

    def is_word(self, t: int) -> bool:
        """Is a token none of the special ones, on which attention rests?"""
        return self.tokens is None or self.ids[t] not in self.tokens.specials

    def shown(self, ids: Sequence[int]) -> tuple[str, ...]:
        return tuple(map(str, ids)) if self.tokens is None else self.tokens.shown(ids)

    def written(self, source: object) -> str:
        """The text for a reader, also where ids were passed."""
        return source if isinstance(source, str) else " ".join(self.shown(self.ids))


def _check_twin(question: _Question, twin: _Question) -> None:
    """Refuse a corrupted text unless it has as many tokens, others, and its masked word at the same place."""
    if len(twin.ids) != len(question.ids):
        first, second = (
            f"{len(each.ids)} tokens ({' '.join(each.shown(each.ids))})"
            for each in (question, twin)
        )
        raise HeadwiseError(
            f"the prompt is {first} and the corrupted one {second}; both need as many, each in its place: "
            "exchange a word for one of as many tokens"
        )
    if twin.position != question.position:
        raise HeadwiseError(
            f"the masked word is token {question.position} of the prompt and token {twin.position} of the corrupted "
            f"one; it must be the same, since heads are compared place by place"
        )
    if twin.ids == question.ids:
        raise HeadwiseError(
            "the corrupted text is the prompt itself, so there is no difference to explain; change a word"
        )


def _compared(
    words: Iterable[Any], text: Reading, corrupted: Reading | None
) -> tuple[Compared, int]:
    """The token that is explained with what it is compared with, none where both texts are answered with it; its rival.

    words  of both an id, ids of which the likeliest is meant, or None
    """
    best = text.answer.topk(2).indices.tolist()
    row = text.answer.tolist()
    token, second = (
        max(word, key=row.__getitem__) if isinstance(word, list) else word
        for word in words
    )
    token = best[0] if token is None else token
    Compared((token,), () if second is None else (second,)).check(len(row))
    if second is None and corrupted is not None:
        second = int(corrupted.answer.argmax())
    if second in (None, token):  # then the likeliest other token
        return Compared((token,)), next(i for i in best if i != token)
    return Compared((token,), (second,)), second


def _meant(model: nn.Module, word: str | int | None) -> Any:
    """Of a word the ids that it can be; an id, or None, as it is."""
    return _choices(tokens_of(model), word) if isinstance(word, str) else word


def _choices(tokens: TextTokens, word: str) -> list[int]:
    """The single tokens that a word can be, as it is written and with a space before it."""
    written = [tokens.encode(word)]
    with suppress(HeadwiseError):  # a vocabulary of characters may have no space
        written.append(tokens.encode(f" {word.strip()}"))
    single = [ids[0] for ids in written if len(ids) == 1]
    if not single:
        shown = list(map(repr, tokens.shown(written[0])))
        raise HeadwiseError(
            f"the answer {word!r} is {len(shown)} tokens, {' '.join(shown)}, and one is explained; pass one of them, "
            "or put the first at the end of the prompt and pass what comes next"
        )
    return single


# What the heads do


@dataclass(frozen=True)
class _Asked:
    """What is known of one prediction before its heads are changed, and what comes of changing them."""

    question: _Question
    text: Reading
    study: Study | None  # with the corrupted text
    adds: Numbers  # what each head adds to the logit; empty where it is not known
    progress: Progress

    def heads(self, token: int) -> list[StoryHead]:
        """All heads, those first that carry most, or that add most, or without which most changes."""
        text = self.text
        study = self.study
        names = self.text.names("out")
        brings = {}
        if study is not None:
            variants = {name: study.variant("out", name) for name in names}
            brings = study.ask(variants, partial(self.progress, "patching heads"))
        size = brings or self.adds
        ranked = sorted(names, key=lambda name: -abs(size.get(name, 0.0)))
        # The heads that are asked about: all of them, where nothing else ranks them.
        first = ranked[: Story.MOST] if size else names
        silent = {}
        for name in first:
            site, h = place_of(name)
            none = torch.zeros_like(text.calls[site].out[0, h])
            silent[name] = [Edit(site, "out", h, none)]
        chance = Compared((token,))
        stage = partial(self.progress, "silencing heads")
        silenced = text.ask(silent, chance, stage)
        # The change of log p of the token, in nats, without each of these heads.
        before = float(chance(text.answer))
        without = {name: silenced[name] - before for name in silenced}
        if not size:
            ranked.sort(key=lambda name: -abs(without[name]))
        places = self.places(first)
        heads = []
        for name in ranked:
            at = places.get(name, self.question.end)
            facts = at, self.looks(name, at), without.get(name), brings.get(name)
            heads.append(StoryHead(name, self.adds.get(name), *facts))
        return heads

    def places(self, names: Iterable[str]) -> dict[str, int]:
        """Where each head carries most alone, of those PLACES positions where what it gives differs most."""
        study = self.study
        variants = {}
        if study is None:
            return {}
        for name in names:
            site, h = place_of(name)
            if self.question.way == "first" and not site.startswith("encoder."):
                continue  # a head of the decoder, which has its own text
            clean, other = (x.calls[site].out[0, h] for x in (self.text, study.text))
            distance = (clean - other).float().norm(dim=-1)  # (T,)
            for t in distance.argsort(descending=True)[:PLACES].tolist():
                if distance[t] > 0:
                    variants[name, t] = study.variant("out", name, [t])
        effects = study.ask(variants, partial(self.progress, "patching positions"))
        ranked = sorted(effects, key=lambda place: -abs(effects[place]))
        places: dict[str, int] = {}
        for name, t in ranked:
            places.setdefault(name, t)  # the first, which does most
        return places

    def looks(self, name: str, at: int | None) -> tuple[tuple[int, float], ...]:
        """The three places that a head looks at most from where it acts, with their weights; None: in another text."""
        site, h = place_of(name)
        # Without a place only a cross attention is shown: its last query looks at the text from the decoder.
        if at is None and not self.text.calls[site].cross:
            return ()
        looks = self.text.maps(site)[h, -1 if at is None else at]
        order = looks.argsort(descending=True, stable=True).tolist()
        words = [t for t in order if self.question.is_word(t)]
        return tuple((t, float(looks[t])) for t in words[:3])

    def read_by(
        self, heads: Sequence[StoryHead], notes: list[str]
    ) -> tuple[list[StoryKeys], list[StoryPath]]:
        """What the keys and values of heads carry, and the clear paths to them, the strongest first."""
        study = self.study
        if study is None:
            return [], []
        # The queries, keys and values of heads that carry something -> the strongest of the heads that use them. A key
        # or a value belongs to all heads of its group: ("k", "L3.KV1") -> "L3.H5".
        readers: dict[Receiver, str] = {}
        sets = [[x.head] for x in heads[: Story.MOST] if abs(x.brings or 0) >= CLEAR]
        # Heads that look at the same token can do each other's work: their keys and values are tried as one, too.
        groups = self.looking_alike(self.question.end)
        for at in READ:
            for names in [*sets, *groups.values()] if at != "q" else sets:
                read = dict.fromkeys(study.text.read_by(name, at) for name in names)
                if len(read) > 1 or len(names) == 1:
                    readers.setdefault((at, "+".join(read)), names[0])
        variants = {receiver: study.variant(*receiver) for receiver in readers}
        try:
            effects = study.ask(variants, partial(self.progress, "patching keys"))
        except HeadwiseError as error:  # a module makes its weights itself
            notes.append(Note.of("why.no_keys", reason=str(error)))
            return [], []
        keys = [
            StoryKeys(name, effects["k", name], effects["v", name])
            for at, name in readers
            if at == "k"
        ]
        # Where all that arrives there together changes little, no single path is followed.
        receivers = [each for each in readers if abs(effects[each]) >= CLEAR]
        if not receivers:
            return keys, []
        # heads of one layer that bring to one token what these find it by
        joined = set()
        for t in groups:
            for names in self.looking_alike(t).values():
                for _, of_layer in groupby(sorted(names), lambda x: place_of(x)[0]):
                    joined.add("+".join(of_layer))
        several = sorted(each for each in joined if "+" in each)
        stage = partial(self.progress, "following paths")
        paths = []
        followed = study.paths(receivers, stage, several)
        for (receiver, sender), effect in followed.items():
            if abs(effect) >= CLEAR:
                at, name = receiver
                paths.append(StoryPath(sender, name, readers[receiver], at, effect))
        return keys, sorted(paths, key=lambda path: -abs(path.effect))

    def looking_alike(self, at: int | None) -> dict[int, list[str]]:
        """By token the heads that look hardest at it from a position, two or more, the hardest first.

        The first token, special ones and the token itself do not count: there heads rest.
        """
        looking = defaultdict(list)
        for site, call in self.text.calls.items():
            # None: a decoder has written nothing yet
            if at is None or call.cross:
                continue
            for h, row in enumerate(self.text.maps(site)[:, at]):
                weight = float(row.max())
                t = int(row.argmax())
                rests = t in (0, at) or not self.question.is_word(t)
                if weight >= HARD and not rests:
                    looking[t].append((weight, head_name(site, h)))
        return {
            t: [name for _, name in sorted(heads, reverse=True)]
            for t, heads in looking.items()
            if len(heads) > 1
        }
