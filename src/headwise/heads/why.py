"""Why a model predicts what it predicts: the heads that bring the answer, those that work against it, and their paths.

The answer is the next token, that of a masked word, or the first that the decoder of an encoder-decoder writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn

from headwise.corpus.tokens import TextTokens
from headwise.errors import HeadwiseError
from headwise.heads.attribution import Attribution, Parts, Recorder
from headwise.heads.blocks import row_weights
from headwise.heads.patching import SHARED, Heads, Passes, Reading, Receiver, Study, Variants, always, place_of
from headwise.models.ask import answering, device_of, evaluating
from headwise.models.open import Folder, folder_of, row_of, tokens_of
from headwise.models.sites import layers_of, sites_of
from headwise.models.stream import loaded, stream_of
from headwise.records import head_name
from headwise.story import Story, StoryHead, StoryKeys, StoryPath
from headwise.words import Note, refusal

Progress = Callable[[str, int, int], None]

PLACES = 8  # positions at which a head is patched alone: those where it gave most else in the other text


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

    def choose(good: Tensor, bad: Tensor | None) -> tuple[int, int | None]:
        """The token that is explained, and what it is compared with; None: with nothing."""
        row = good.double()
        token = int(row.argmax()) if answer is None else _token(folder, question, answer, row, notes)
        if other is not None:
            return token, _token(folder, question, other, row, notes)
        if bad is not None:
            second = int(bad.argmax())
            return token, None if second == token else second
        return token, _likeliest(row, token)

    with evaluating(model):
        specials = frozenset[int]() if folder.tokens is None else folder.tokens.specials
        passes = Passes(model, layers_of(model), question.position)
        telling = _Telling(passes, question, twin, specials, progress)
        token, second = telling.read(choose)
        if second == token:
            raise refusal("same_answer", token=repr(other))
        compared = second is not None  # else the probability of the one token counts
        study, row = telling.study, telling.text.answer.double()
        second = _likeliest(row, token) if second is None else second  # for what parts add, which needs two
        heads, keys, paths = telling.tell((token, second), notes)
    parts = telling.parts
    shown = _shown(folder)
    chances = row.softmax(-1)
    difference = float(row[token] - row[second])
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
        counts="logits" if compared else "probability",
        clean_value=difference if study is None else study.clean,
        corrupted_value=None if study is None else study.corrupted,
        logit=difference if parts is None else parts.logit,
        embedding=None if parts is None else parts.embedding,
        bias=None if parts is None else parts.bias,
        feed_forwards={} if parts is None else parts.feed_forwards,
        layers=tuple(telling.text.calls),
        heads=tuple(heads),
        keys=tuple(keys),
        paths=tuple(paths),
        notes=tuple(notes),
    )


def forecast(model: nn.Module, prompt: str | Sequence[int], corrupt: str | Sequence[int] | None) -> str:
    """What the story of a streamed model takes, in a line; "" for a model in memory."""
    stream = stream_of(model)
    if stream is None:
        return ""
    n_tokens = row_of(model, prompt).numel()
    heads = sum(site.n_heads for site in sites_of(model))
    # Variants: of the first heads each is silenced; with a second text every head is patched, through half of the
    # layers as a mean, and the first heads at each of their places.
    passes = 1 + Story.MOST if corrupt is None else 2 + heads // 2 + Story.MOST * PLACES
    return stream.forecast(n_tokens * passes, n_tokens, 2)  # the weights are read twice


def _likeliest(row: Tensor, token: int) -> int:
    """The likeliest other token."""
    return int(row.index_fill(0, torch.tensor([token], device=row.device), -torch.inf).argmax())


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
        ids = row_of(folder.model, text)[0].tolist()
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
        shown = _shown(folder)
        first, second = (f"{len(text.ids)} tokens ({' '.join(shown(text.ids))})" for text in (question, twin))
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
    if not single and question.way == "first":  # a decoder that begins the word begins with its first token
        notes.append(Note.of("why.first_of", word=repr(word), count=len(choices[0])))
        single = [choices[0][0]]
    if not single:
        shown = tokens.shown(choices[0])
        facts = {"word": repr(word), "count": len(shown), "tokens": " ".join(map(repr, shown)), "first": repr(shown[0])}
        raise refusal("long_answer", **facts)
    token = max(single, key=lambda i: float(row[i]))
    notes.append(Note.of("why.token", word=repr(word), token=repr(tokens.shown([token])[0]), id=token))
    return token


def _pieces(tokens: TextTokens, question: _Question, word: str) -> list[list[int]]:
    """The ids that a word becomes in the place of the answer, written in two ways."""
    ids, text = question.ids, question.text
    if text is None or question.way == "first":
        return [ids for written in (word, f" {word.strip()}") if (ids := tokens.encode(written))]
    if question.way == "next":
        texts = f"{text.rstrip()} {word.strip()}", text + word
        before, after = ids, list[int]()
    else:
        place = question.position
        before, after = ids[:place], ids[place + 1 :]
        sign = tokens.shown([ids[place]])[0]
        texts = text.replace(sign, word.strip(), 1), text.replace(sign, f" {word.strip()}", 1)
    choices = []
    unknown = None  # why the first way of writing it cannot be encoded
    for written in texts:
        try:
            ids_with_word = [*tokens.prompt(written), *(tokens.frame[1] if question.way == "masked" else [])]
        except HeadwiseError as error:  # a vocabulary of characters may have no space
            unknown = unknown or error
            continue
        piece = ids_with_word[len(before) : len(ids_with_word) - len(after)]
        if piece and [*before, *piece, *after] == ids_with_word:  # the word has changed no token of the text around it
            choices.append(piece)
    if not choices:
        raise unknown or HeadwiseError(
            f"the answer {word!r} is no token of its own in its place; end the prompt before it, or pass its id"
        )
    return choices


def _shown(folder: Folder) -> Callable[[Sequence[int]], tuple[str, ...]]:
    tokens = folder.tokens
    return tokens.shown if tokens is not None else lambda ids: tuple(map(str, ids))


def _text(folder: Folder, text: str | Sequence[int]) -> str:
    return text if isinstance(text, str) else " ".join(_shown(folder)(torch.as_tensor(text).flatten().tolist()))


# What the heads do


class _Telling:
    """One prediction, and what is known of it.

    A streamed model reads its weights twice: both texts pass with a variant for each head, then what is asked of the
    heads that carry most; and a third time where paths are followed.
    """

    def __init__(
        self, passes: Passes, question: _Question, twin: _Question | None, specials: frozenset[int], progress: Progress
    ) -> None:
        self.passes, self.question, self.specials, self.progress = passes, question, specials, progress
        ids = torch.tensor(question.ids)  # (T,)
        self.study = None if twin is None else Study(passes, ids, torch.tensor(twin.ids))  # None: no corrupted text
        self.text = Reading(ids[None].to(device_of(passes.model))) if self.study is None else self.study.clean_text
        self.recorder = Recorder(passes.layers)
        self.adding: Parts | None = None  # as long as layers are added up, and nothing was refused
        self.parts: Attribution | None = None  # the outcome
        self.effects: dict[str, float] = {}
        self.refused = ""  # why what parts add is not known
        # (H,S) Where the heads of a site look from a position; many of them look from the same one.
        self.weights = cache(lambda site, t: row_weights(self.text.calls[site], 0, [t])[:, 0])

    def read(self, choose: Callable[[Tensor, Tensor | None], tuple[int, int | None]]) -> tuple[int, int | None]:
        """Read the texts; the token that is explained, and what it is compared with."""
        listening = self.recorder.listening if self.question.way == "next" else nullcontext
        if self.study is not None:
            progress = partial(self.progress, "patching heads")
            self.effects = self.study.read(choose, listening, effects=True, progress=progress)
            return self.study.target
        list(self.passes.asked([self.passes.text(self.text, listening)]))
        return choose(self.text.answer, None)

    def tell(
        self, target: tuple[int, int], notes: list[str]
    ) -> tuple[list[StoryHead], list[StoryKeys], list[StoryPath]]:
        """All heads, those first that carry most, or that add most, or without which most changes; keys; paths."""
        self._attribute(target)
        names = []
        for site, call in self.text.calls.items():
            names += [head_name(site, h) for h in range(call.q.shape[1])]
        if self.study is None:  # what the heads add ranks them, so it comes first
            for number in range(len(self.passes.layers)):
                with loaded(self.passes.model, number):
                    self._add(number)
            self._sum()
        size = self.effects  # what ranks the heads: what they carry, or else what they add
        if not size and self.parts is not None:
            size = self.parts.heads
        names.sort(key=lambda name: -abs(size.get(name, 0.0)))
        first = names[: Story.MOST] if size else names
        silenced = self._silenced(first, target[0])
        moved: dict[Heads, list[Variants]] = {}  # variants in which a head is clean at one place after another
        if self.study is not None:
            moved = {("at", name): self.study.at_each(name, self._places(name)) for name in first}
        carried: dict[Heads, list[Variants]] = {}
        refused = ""  # why what keys and values carry is not known
        try:
            carried = self._carried(first)
        except HeadwiseError as error:
            refused = str(error)
        groups = {**silenced, **moved, **carried}
        # A streamed model has the weights of a layer while variants pass it: there its parts are added, too.
        values = self.passes.measured(groups, partial(self.progress, "silencing heads"), self._add)
        self._sum()
        if self.refused:
            notes.append(Note.of("why.no_parts", reason=self.refused))
        if refused:
            notes.append(Note.of("why.no_keys", reason=refused))
        without = Study.by_head({key: values[key] for key in silenced})
        if not size:
            names.sort(key=lambda name: -abs(without[name]))
        places = {}  # head -> position -> what it carries there alone
        for at, name in moved:
            places[name] = dict(zip(self._places(name), values[at, name], strict=True))
        heads = [self._head(name, without.get(name), places.get(name)) for name in names]
        keys, paths = self._through(first, {key: values[key] for key in carried})
        return heads, keys, paths

    # What each part adds

    def _attribute(self, target: tuple[int, int]) -> None:
        """Get ready to add up what each part adds to the difference of two logits."""
        model = self.passes.model
        if self.question.way != "next":
            self.refused = f"{type(model).__name__} turns the last hidden state into logits in more than one step"
            if self.question.way == "first":
                self.refused = "what an encoder adds reaches the logits through the decoder alone"
            return
        with self._refusing():
            run = self.recorder.run(self.text.calls, self.text.answer)
            self.adding = Parts(model, run, target, len(self.question.ids) - 1)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """What is refused inside this block ends the adding up, and nothing else."""
        try:
            yield
        except HeadwiseError as error:
            self.adding, self.refused = None, str(error)

    def _add(self, layer: int) -> None:
        with self._refusing():
            if self.adding is not None:
                self.adding.add(layer)

    def _sum(self) -> None:
        with self._refusing():
            if self.adding is not None:
                self.parts, self.adding = self.adding.summed(), None

    # What is asked of the first heads

    def _silenced(self, names: Sequence[str], token: int) -> dict[Heads, list[Variants]]:
        """The change of the answer's log-probability without each of these heads, in nats."""

        def chance(logits_nv: Tensor) -> Tensor:
            return logits_nv.cpu().double().log_softmax(-1)[..., token]

        def changes(logits_nv: Tensor) -> list[float]:
            return [float(value) for value in chance(logits_nv) - chance(self.text.answer)]

        groups = {}
        for site, call in self.text.calls.items():
            in_site = [name for name in names if place_of(name)[0] == site]
            if in_site:
                heads = [[place_of(name)[1]] for name in in_site]
                silence = always(torch.zeros_like(call.out))
                groups["without", *in_site] = self.passes.giving(self.text, site, heads, silence, changes)
        return groups

    def _places(self, name: str) -> list[int]:
        """Where what a head gives differs most between the two texts."""
        site, h = place_of(name)
        if self.study is None or (self.question.way == "first" and not site.startswith("encoder.")):
            return []
        clean, corrupted = self.text.calls[site].out, self.study.text.calls[site].out
        distance = (clean[0, h] - corrupted[0, h]).float().norm(dim=-1)  # (T,)
        return [t for t in distance.argsort(descending=True)[:PLACES].tolist() if distance[t] > 0]

    def _carried(self, names: Sequence[str]) -> dict[Heads, list[Variants]]:
        """What the queries of heads that carry something, and the keys and values that they read, carry each alone."""
        groups: dict[Heads, list[Variants]] = {}
        if self.study is not None:
            carriers = self._carriers(names)
            for at in ("q", *SHARED):
                read = [name for name in self.study.names(at) if self._readers(name, at) & carriers]
                groups |= self.study.variants(at, read)
        return groups

    def _carriers(self, names: Sequence[str]) -> set[str]:
        return {name for name in names if abs(self.effects[name]) >= Story.CLEAR}

    def _readers(self, name: str, at: str) -> set[str]:
        """The heads that read what a key/value head has; of a head itself."""
        assert self.study is not None
        site, members = self.study.names(at)[name]
        return {head_name(site, h) for h in members}

    def _head(self, name: str, without: float | None, places: Mapping[int, float] | None) -> StoryHead:
        """A head with where it acts: where it carries most alone, or where the answer stands; and the three places that
        it looks at most from there."""
        # An answer that a decoder begins with stands nowhere in the text.
        end = None if self.question.way == "first" else self.question.position % len(self.question.ids)
        at = max(places, key=lambda t: abs(places[t])) if places else end
        site, h = place_of(name)
        call = self.text.calls[site]
        looks: tuple[tuple[int, float], ...] = ()
        if at is not None or call.cross:
            row = call.n_queries - 1 if at is None else at
            weights = self.weights(site, row)[h]
            order = weights.argsort(descending=True, stable=True).tolist()
            # Special tokens, on which attention rests, have no place.
            words = [t for t in order if self.question.ids[t] not in self.specials]
            looks = tuple((t, float(weights[t])) for t in words[:3])
        adds = None if self.parts is None else self.parts.heads[name]
        return StoryHead(name, adds, at, looks, without, self.effects.get(name))

    # What they read

    def _through(
        self, names: Sequence[str], values: Mapping[Heads, Sequence[float]]
    ) -> tuple[list[StoryKeys], list[StoryPath]]:
        """What keys and values carry, and the clear paths to the heads that carry something, the strongest first."""
        if self.study is None:
            return [], []
        effects: dict[Receiver, float] = {}
        for (at, *heads), of_variants in values.items():
            effects |= zip(((at, name) for name in heads), of_variants, strict=True)
        keys = []
        for at, name in effects:
            if at == "k":
                keys.append(StoryKeys(name, effects["k", name], effects["v", name]))
        # Where all that arrives there together changes little, no single path is followed.
        receivers = [receiver for receiver, effect in effects.items() if abs(effect) >= Story.CLEAR]
        if not receivers:
            return keys, []
        carriers = self._carriers(names)
        paths = []
        brought = self.study.paths(receivers, progress=partial(self.progress, "following paths"))
        for (at, receiver), senders in brought.items():
            readers = self._readers(receiver, at) & carriers
            reader = next(name for name in names if name in readers)  # the strongest that reads this key/value head
            for sender, effect in senders.items():
                if abs(effect) >= Story.CLEAR:
                    paths.append(StoryPath(sender, receiver, reader, at, effect))
        return keys, sorted(paths, key=lambda path: -abs(path.effect))
