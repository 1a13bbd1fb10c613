"""Why a model predicts what it predicts: the heads that bring the answer, those that work against it, and their paths.

The answer is the next token, that of a masked word, or the first that the decoder of an encoder-decoder writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from headwise.corpus.tokens import TextTokens
from headwise.errors import HeadwiseError
from headwise.heads.attribution import Attribution, attribute
from headwise.heads.blocks import row_weights
from headwise.heads.effect import ablate
from headwise.heads.patching import SHARED, Study, calls_of
from headwise.models.ask import answer_logits, answering, evaluating
from headwise.models.open import Folder, folder_of, ids_of, tokens_of
from headwise.models.sites import layers_of
from headwise.records import Call, head_name
from headwise.story import Story, StoryHead, StoryKeys, StoryPath
from headwise.words import Note, refusal

Progress = Callable[[str, int, int], None]

PLACES = 8  # positions at which a head is patched alone: those where it gave most otherwise


@torch.inference_mode(False)
@torch.no_grad()
def why(
    model: nn.Module,
    prompt: str | Sequence[int],
    corrupt: str | Sequence[int] | None = None,
    answer: str | int | None = None,
    other: str | int | None = None,
    *,
    progress: Progress = lambda what, done, total: None,
) -> Story:
    """The story of one prediction: what each head adds and carries, where it looks, and what happens without it.

    Args:
        model: what `hw.open` gave
        prompt: a text, of a model that `open` opened, or ids. What is explained is the next token; of an encoder
            the word at its mask, which stands in the text once; of an encoder-decoder, which reads the text, its
            first token
        corrupt: the same text with one thing changed, in as many tokens: heads are then ranked by what they carry
            of the difference, and the paths between them are followed
        answer: the token that is explained, default what the model predicts: a word, with or without the space
            before it, or an id
        other: the token that it is compared with; default what the model answers to `corrupt`. Where that is the
            same, the log-probability of the answer counts. Without `corrupt`: the likeliest other token
        progress: is called with the name of a stage, the steps done and of all
    """
    way, folder = answering(model), folder_of(model)
    question = _Question.of(folder, way, prompt)
    twin = None if corrupt is None else _twin(folder, question, corrupt)
    notes: list[str] = []
    with evaluating(model):
        layers = layers_of(model)
        calls, row = calls_of(model, layers, torch.tensor([question.ids]), question.position)
        row = row.double()
        token = int(row.argmax()) if answer is None else _token(folder, question, answer, row, notes)
        study = None
        second = None if other is None else _token(folder, question, other, row, notes)
        if twin is not None:
            if second is None:
                bad = int(answer_logits(model, torch.tensor([twin.ids]), twin.position)[0].argmax())
                second = None if bad == token else bad
            clean, corrupted = torch.tensor(question.ids), torch.tensor(twin.ids)
            study = Study(model, layers, clean, corrupted, (token, second), question.position)
        counts = "probability" if study is not None and second is None else "logits"
        if second is None:
            second = int(row.index_fill(0, torch.tensor([token], device=row.device), -torch.inf).argmax())
        parts = _attributed(model, question, (token, second), notes)
        told = _Telling(model, question, study, calls, parts, token, _specials(folder), progress)
        heads = told.heads()
        keys, paths = told.through(heads, notes)
    shown = _shown(folder)
    chances = row.softmax(-1)
    difference = float(row[token] - row[second])
    value = difference if study is None else study.clean
    return Story(
        model=folder.name,
        asks=way,
        prompt=_text(folder, prompt),
        tokens=shown(question.ids),
        corrupt=None if corrupt is None else _text(folder, corrupt),
        corrupted=None if twin is None else shown(twin.ids),
        answer=shown([token])[0],
        other=shown([second])[0],
        predicted=shown([int(row.argmax())])[0],
        predicted_probability=float(chances.max()),
        probability=float(chances[token]),
        counts=counts,
        clean_value=value,
        corrupted_value=None if study is None else study.corrupted,
        logit=difference if parts is None else parts.logit,
        embedding=None if parts is None else parts.embedding,
        bias=None if parts is None else parts.bias,
        feed_forwards={} if parts is None else parts.feed_forwards,
        layers=tuple(calls),
        heads=tuple(heads),
        keys=tuple(keys),
        paths=tuple(paths),
        notes=tuple(notes),
    )


# What is asked


@dataclass(frozen=True)
class _Question:
    """A text as ids, and where its answer stands."""

    way: str  # "next", "masked", "first"
    text: str | None
    ids: list[int]
    position: int  # of a masked word; -1: the answer comes at the end

    @classmethod
    def of(cls, folder: Folder, way: str, text: str | Sequence[int]) -> _Question:
        ids = torch.as_tensor(ids_of(folder.model, text)).flatten().tolist()
        if not ids:
            raise HeadwiseError("the prompt has no tokens; pass one")
        position = -1
        if way == "masked":
            sign = getattr(folder.tokens, "mask", None)
            if folder.tokens is None or sign is None:
                raise HeadwiseError(f"{folder.name} has no tokenizer that names a mask, so no word of a text is hidden")
            (mask,) = folder.tokens.encode(sign)
            places = [t for t, i in enumerate(ids) if i == mask]
            if len(places) != 1:
                raise HeadwiseError(
                    f"the text has {len(places)} masked words; write {sign} once, for the word to explain"
                )
            position = places[0]
        return cls(way, text if isinstance(text, str) else None, ids, position)


def _twin(folder: Folder, question: _Question, corrupt: str | Sequence[int]) -> _Question:
    """The corrupted text, which has as many tokens and its masked word at the same place."""
    twin = _Question.of(folder, question.way, corrupt)
    if len(twin.ids) != len(question.ids):
        first, second = (f"{len(each.ids)} tokens ({' '.join(_shown(folder)(each.ids))})" for each in (question, twin))
        raise refusal("lengths_differ", first=first, second=second)
    if twin.position != question.position:
        places = f"token {question.position} of the prompt and token {twin.position} of the corrupted one"
        raise HeadwiseError(
            f"the masked word is {places}; it must be the same, since heads are compared place by place"
        )
    if twin.ids == question.ids:
        raise refusal("same_text")
    return twin


def _token(folder: Folder, question: _Question, word: str | int, row: Tensor, notes: list[str]) -> int:
    """The token of an answer as it stands in its place, with a space before it or without: the likelier of the two."""
    if not isinstance(word, str):
        if not 0 <= word < len(row):
            raise HeadwiseError(f"the token {word} is outside the vocabulary of {len(row)} tokens")
        return word
    tokens = tokens_of(folder.model)
    choices = _pieces(tokens, question, word)
    single = [ids[0] for ids in choices if len(ids) == 1]
    if not single and question.way == "first":
        notes.append(Note.of("why.first_of", word=repr(word), count=len(choices[0])))
        single = [choices[0][0]]
    if not single:
        shown = tokens.shown(choices[0])
        raise HeadwiseError(
            f"the answer {word!r} is {len(shown)} tokens, {' '.join(map(repr, shown))}, and one is explained; pass "
            f"{shown[0]!r}, or put it at the end of the prompt and pass what comes next"
        )
    token = max(single, key=lambda i: float(row[i]))
    notes.append(Note.of("why.token", word=repr(word), token=repr(tokens.shown([token])[0]), id=token))
    return token


def _pieces(tokens: TextTokens, question: _Question, word: str) -> list[list[int]]:
    """The ids that a word becomes in the place of the answer, written in two ways."""
    ids, text = question.ids, question.text
    if text is None or question.way == "first":
        return [ids for written in (word, f" {word.strip()}") if (ids := tokens.encode(written))]
    if question.way == "next":
        texts, before, after = (f"{text.rstrip()} {word.strip()}", text + word), ids, list[int]()
    else:
        place = question.position
        sign, before, after = tokens.shown([ids[place]])[0], ids[:place], ids[place + 1 :]
        texts = (text.replace(sign, word.strip(), 1), text.replace(sign, f" {word.strip()}", 1))
    choices: list[list[int]] = []
    unknown = None
    for written in texts:
        try:
            whole = [*tokens.prompt(written), *(tokens.frame[1] if question.way == "masked" else [])]
        except HeadwiseError as error:  # a vocabulary of characters may have no space
            unknown = unknown or error
            continue
        piece = whole[len(before) : len(whole) - len(after)]
        if piece and [*before, *piece, *after] == whole:
            choices.append(piece)
    if not choices:
        raise unknown or HeadwiseError(
            f"the answer {word!r} is no token of its own in its place; end the prompt before it, or pass its id"
        )
    return choices


def _shown(folder: Folder) -> Callable[[Sequence[int]], tuple[str, ...]]:
    tokens = folder.tokens
    return tokens.shown if tokens is not None else lambda ids: tuple(map(str, ids))


def _specials(folder: Folder) -> frozenset[int]:
    return frozenset() if folder.tokens is None else folder.tokens.specials


def _text(folder: Folder, text: str | Sequence[int]) -> str:
    return text if isinstance(text, str) else " ".join(_shown(folder)(torch.as_tensor(text).flatten().tolist()))


# What the heads do


def _attributed(model: nn.Module, question: _Question, target: tuple[int, int], notes: list[str]) -> Attribution | None:
    """What each part adds to the difference of two logits; None, with a note, where that is not known."""
    if question.way != "next":
        reason = f"{type(model).__name__} turns the last hidden state into logits in more than one step"
        if question.way == "first":
            reason = "what an encoder adds reaches the logits through the decoder alone"
        notes.append(Note.of("why.no_parts", reason=reason))
        return None
    try:
        return attribute(model, torch.tensor(question.ids), target)
    except HeadwiseError as error:
        notes.append(Note.of("why.no_parts", reason=str(error)))
        return None


@dataclass(frozen=True)
class _Telling:
    """One prediction, and what is known of it."""

    model: nn.Module
    question: _Question
    study: Study | None  # None without a corrupted text
    calls: Mapping[str, Call]
    parts: Attribution | None
    token: int
    specials: frozenset[int]
    progress: Progress

    def heads(self) -> list[StoryHead]:
        """All heads, those first that carry most; or that add most, or without which most changes."""
        effects: dict[str, float] = {}
        if self.study is not None:
            self.progress("patching heads", 0, 0)
            effects = self.study.effects("out", list(self.study.names("out")), None)
        heads = []
        for site, call in self.calls.items():
            for h in range(call.q.shape[1]):
                name = head_name(site, h)
                adds = None if self.parts is None else self.parts.heads[name]
                heads.append(StoryHead(name, adds, None, (), None, effects.get(name)))
        if self.study is None and self.parts is None:
            return self._complete(sorted(self._silenced(heads), key=lambda part: -abs(part.without or 0.0)))
        key = "adds" if self.study is None else "brings"
        heads.sort(key=lambda part: -abs(getattr(part, key)))
        return self._complete([*self._silenced(heads[: Story.MOST]), *heads[Story.MOST :]])

    def _silenced(self, heads: Sequence[StoryHead]) -> list[StoryHead]:
        """With the change of the answer's log-probability without each of these heads, in nats."""
        ids = torch.tensor([self.question.ids])

        def chance() -> float:
            row = answer_logits(self.model, ids, self.question.position)[0]
            return float(row.double().log_softmax(-1)[self.token])

        plain, measured = chance(), []
        for done, part in enumerate(heads, 1):
            with ablate(self.model, [part.head]):
                measured.append(replace(part, without=chance() - plain))
            self.progress("silencing heads", done, len(heads))
        return measured

    def _complete(self, heads: Sequence[StoryHead]) -> list[StoryHead]:
        """With where each acts, and where it looks from there."""
        complete = []
        for place, part in enumerate(heads):
            site, h = part.head.rpartition(".H")[0], int(part.head.rpartition(".H")[2])
            call = self.calls[site]
            at = self._acts(part, site, h) if place < Story.MOST else self._end
            if at is not None or call.cross:
                weights = row_weights(call, 0, [call.q.shape[2] - 1 if at is None else at])[h, 0]
                part = replace(part, at=at, looks=self._strongest(weights))
            complete.append(part)
        return complete

    @property
    def _end(self) -> int | None:
        """The position in the text where the answer stands; None of an encoder-decoder, whose decoder has it."""
        return None if self.question.way == "first" else self.question.position % len(self.question.ids)

    def _acts(self, part: StoryHead, site: str, h: int) -> int | None:
        """Where the clean output of a head alone carries most; without a second text, where the answer stands."""
        if self.study is None or (self.question.way == "first" and not site.startswith("encoder.")):
            return self._end
        moved = (self.study.clean_calls[site].out[0, h] - self.study.calls[site].out[0, h]).float().norm(dim=-1)
        places = [t for t in moved.argsort(descending=True)[:PLACES].tolist() if moved[t] > 0]
        effects = self.study.at_each(part.head, places)
        return max(zip(places, effects, strict=True), key=lambda pair: abs(pair[1]), default=(self._end, 0.0))[0]

    def _strongest(self, weights: Tensor) -> tuple[tuple[int, float], ...]:
        """The three positions with the largest weights; special tokens, on which attention rests, have no place."""
        order = weights.argsort(descending=True, stable=True).tolist()
        words = [t for t in order if self.question.ids[t] not in self.specials]
        return tuple((t, float(weights[t])) for t in words[:3])

    def through(self, heads: Sequence[StoryHead], notes: list[str]) -> tuple[list[StoryKeys], list[StoryPath]]:
        """What keys and values carry, and the clear paths to the heads that carry something, the strongest first."""
        if self.study is None:
            return [], []
        carriers = [part.head for part in heads[: Story.MOST] if abs(part.brings or 0.0) >= Story.CLEAR]
        try:
            carried = self._read(carriers)
        except HeadwiseError as error:
            notes.append(Note.of("why.no_keys", reason=str(error)))
            return [], []
        keys = [StoryKeys(name, carried["k", name], carried["v", name]) for at, name in carried if at == "k"]
        # Where all that arrives there together changes little, no single path is followed.
        jobs = [job for job, effect in carried.items() if abs(effect) >= Story.CLEAR]
        paths = []
        for done, (at, receiver) in enumerate(jobs, 1):
            readers = self._readers(receiver, at)
            reader = next(name for name in carriers if name in readers)
            for sender, effect in self.study.paths(receiver, at, None).items():
                if abs(effect) >= Story.CLEAR:
                    paths.append(StoryPath(sender, receiver, reader, at, effect))
            self.progress("following paths", done, len(jobs))
        return keys, sorted(paths, key=lambda path: -abs(path.effect))

    def _read(self, carriers: Sequence[str]) -> dict[tuple[str, str], float]:
        """What the queries of these heads, and the keys and values that they read, carry each alone."""
        assert self.study is not None
        carried: dict[tuple[str, str], float] = {}
        for at in ("q", *SHARED):
            names = [name for name in self.study.names(at) if self._readers(name, at) & set(carriers)]
            for name, effect in self.study.effects(at, names, None).items():
                carried[at, name] = effect
        return carried

    def _readers(self, name: str, at: str) -> set[str]:
        """The heads that read what a key/value head has; of a head itself."""
        assert self.study is not None
        site, members = self.study.names(at)[name]
        return {head_name(site, h) for h in members}
