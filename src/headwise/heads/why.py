"""Why a model predicts what it predicts: the heads that bring the answer, those that work against it, and their paths.

The answer is the next token, that of a masked word, or the first that the decoder of an encoder-decoder writes. Three
numbers say what a head does: what it adds to the answer's logit, what it carries of the difference to a corrupted
text (its effect when it is patched), and how the answer's log-probability changes without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.corpus.tokens import TextTokens
from headwise.errors import HeadwiseError
from headwise.families import read_config
from headwise.heads.attribution import Attribution, Parts, Recorder
from headwise.heads.blocks import row_weights
from headwise.heads.patching import READ, Choice, Passes, Reading, Receiver, Study, Variant, alone, place_of
from headwise.models.ask import answering, device_of, evaluating
from headwise.models.open import folder_of, row_of, tokens_of
from headwise.models.sites import layers_of
from headwise.records import Call, head_name
from headwise.story import Story, StoryHead, StoryKeys, StoryPath
from headwise.words import Note

Progress = Callable[[str, int, int], None]  # the name of a stage, the steps done, and of all

# Positions at which a head is patched alone, at most: those where what it gives differs most between the two texts.
# A round choice: each one more costs a variant of the text for each of the first heads.
PLACES = 8
# Ends of the names of classes that predict the next token: Gemma3ForConditionalGeneration does. T5's has the same end,
# but its config says that it is an encoder-decoder.
PREDICTING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


# As `patch`, it leaves a caller's inference mode: what the model made in it and kept could take part in no later
# backward pass.
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
    if isinstance(answer, str) or isinstance(other, str):
        tokens_of(model)  # raises where words cannot become ids

    def asked(text: str | Sequence[int]) -> _Question:
        return _Question(way, folder.tokens, text, row_of(model, text)[0].tolist())

    question, notes = asked(prompt), list[str]()
    twin = None if corrupt is None else _twin(question, asked(corrupt))  # the corrupted text

    def choose(good: Tensor, bad: Tensor | None) -> tuple[int, int | None]:
        # The logits (V,) of both texts -> the token that is explained, and what it is compared with or None.
        token = int(good.argmax()) if answer is None else _token(question, answer, good, notes)
        if other is not None:
            second = _token(question, other, good, notes)
            if second == token:
                raise HeadwiseError(
                    f"{other!r} is the answer and what it is compared with, so there is no difference to "
                    "explain; pass another token"
                )
            return token, second
        second = _likeliest(good, token) if bad is None else int(bad.argmax())
        return token, None if second == token else second  # both texts may be answered alike

    with evaluating(model):
        telling = _Telling(Passes(model, layers_of(model), question.position), question, twin, choose, progress)
        token, second = telling.read()
        # `row`: logits (V,), on the processor, for some devices have no float64.
        study, row = telling.study, telling.text.answer.cpu().double()
        compared = second is not None  # else the probability of the one token counts
        second = _likeliest(row, token) if second is None else second  # for what parts add, which needs two
        heads, keys, paths = telling.tell((token, second), notes)
    shown, parts, chances = question.shown, telling.parts, row.softmax(-1)  # `parts`: None where not known
    difference = float(row[token] - row[second])
    return Story(
        model=folder.name,
        asks=way,
        prompt=question.written,
        tokens=shown(question.ids),
        corrupt=None if twin is None else twin.written,
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


def check_question(
    folder: Path, prompt: str, corrupt: str | None, words: Iterable[str | None], tokens: TextTokens | None
) -> None:
    """Refuse before weights are read what the tokenizer tells: texts of other lengths, an answer of several tokens."""
    if tokens is None or not prompt.strip():  # `why` refuses these itself, when the model is open
        return
    config = read_config(folder)
    kind = str((config.get("architectures") or [""])[0])  # the name of the model's class; "" where none is given
    # What is not sure to go on with the next token is taken for an encoder-decoder, whose answer may be of any length.
    is_sure = kind.endswith(PREDICTING) and not config.get("is_encoder_decoder")
    way, end = ("next", []) if is_sure else ("first", tokens.frame[1])  # a text that is read whole is closed

    def asked(text: str) -> _Question:
        return _Question(way, tokens, text, [*tokens.prompt(text), *end])

    question = asked(prompt)
    if corrupt is not None:
        _twin(question, asked(corrupt))
    for word in filter(None, words):
        _single(question, word, [])  # raises for a word of several tokens; the notes are those of `why`


def _likeliest(row: Tensor, token: int) -> int:
    """The likeliest other token."""
    return int(row.index_fill(0, torch.tensor([token], device=row.device), -torch.inf).argmax())


# What is asked


@dataclass(frozen=True)
class _Question:
    """A text as ids, and where its answer stands."""

    way: str  # which token answers it: "next", "masked", or "first" of what a decoder writes
    tokens: TextTokens | None  # of the model, where they are known
    source: str | Sequence[int]  # the text as it was passed
    ids: list[int]

    @cached_property
    def position(self) -> int:
        """Where the answer is read: the position of the masked word, or -1, the end."""
        if self.way != "masked":
            return -1
        sign = getattr(self.tokens, "mask", None)
        if self.tokens is None or sign is None:
            raise HeadwiseError("no tokenizer that names a mask is known of the model, so no word of a text is hidden")
        (mask,) = self.tokens.encode(sign)  # a mask is a single token
        count = self.ids.count(mask)
        if count != 1:
            raise HeadwiseError(f"the text has {count} masked words; write {sign} once, for the word to explain")
        return self.ids.index(mask)

    def shown(self, ids: Sequence[int]) -> tuple[str, ...]:
        return tuple(map(str, ids)) if self.tokens is None else self.tokens.shown(ids)

    @property
    def written(self) -> str:  # the text for a reader, also where ids were passed
        return self.source if isinstance(self.source, str) else " ".join(self.shown(self.ids))


def _twin(question: _Question, twin: _Question) -> _Question:
    """The corrupted text `twin`; refused unless it has as many tokens and its masked word at the same place."""
    if len(twin.ids) != len(question.ids):
        first, second = (f"{len(each.ids)} tokens ({' '.join(each.shown(each.ids))})" for each in (question, twin))
        raise HeadwiseError(
            f"the prompt is {first} and the corrupted one {second}; both need as many, each in its place: "
            "exchange a word for one of as many tokens"
        )
    if twin.position != question.position:
        places = f"token {question.position} of the prompt and token {twin.position} of the corrupted one"
        raise HeadwiseError(
            f"the masked word is {places}; it must be the same, since heads are compared place by place"
        )
    if twin.ids == question.ids:
        raise HeadwiseError(
            "the corrupted text is the prompt itself, so there is no difference to explain; change a word"
        )
    return twin


def _token(question: _Question, word: str | int, row: Tensor, notes: list[str]) -> int:
    """The id of an answer, which is an id or a word; `row` are the logits (V,) of the prompt.

    A word may be one token with a space before it and another without: the likelier one is taken, and a note says so.
    """
    if not isinstance(word, str):
        if not 0 <= word < len(row):
            raise HeadwiseError(f"the token {word} is outside the vocabulary of {len(row)} tokens")
        return word
    token = max(_single(question, word, notes), key=lambda i: float(row[i]))
    notes.append(Note.of("why.token", word=repr(word), token=repr(question.shown([token])[0]), id=token))
    return token


def _single(question: _Question, word: str, notes: list[str]) -> list[int]:
    """The single tokens that a word can be in the place of the answer; a word that takes several is refused."""
    choices = _pieces(question, word)  # each a list of ids, one or more
    single = [ids[0] for ids in choices if len(ids) == 1]
    if single:
        return single
    first = choices[0]  # as it is written in the first way of `_pieces`
    if question.way == "first":  # a decoder that begins the word begins with its first token
        notes.append(Note.of("why.first_of", word=repr(word), count=len(first)))
        return [first[0]]
    shown = list(map(repr, question.shown(first)))
    raise HeadwiseError(
        f"the answer {word!r} is {len(shown)} tokens, {' '.join(shown)}, and one is explained; pass {shown[0]}, or put "
        "it at the end of the prompt and pass what comes next"
    )


def _pieces(question: _Question, word: str) -> list[list[int]]:
    """The ids that a word becomes in the place of the answer, written with a space before it and without.

    A tokenizer may join a word with its neighbours. So the text is encoded with the word in it, and the ids of the
    text around it are taken off on both sides.
    """
    tokens, ids, text, place = question.tokens, question.ids, question.source, question.position
    assert tokens is not None  # `why` refuses a word where there is no tokenizer
    bare = word.strip()
    # How a text becomes ids, and the ids that stand before the answer and behind it in the question.
    encode, before, after = tokens.prompt, ids, list[int]()
    # The answer continues no text that is known as one: ids were passed, or a decoder begins with it.
    if not isinstance(text, str) or question.way == "first":
        # The way in which it was passed comes first: a word of several tokens is shown, or begun, as it stands there.
        texts = word, f" {bare}"
        encode, before = tokens.encode, []  # the word alone
    elif question.way == "next":
        texts = f"{text.rstrip()} {bare}", text + word  # with one space, and as both were passed
    else:
        sign = tokens.shown([ids[place]])[0]  # how the mask is written in the text, such as [MASK]
        texts = text.replace(sign, bare, 1), text.replace(sign, f" {bare}", 1)
        before, after = ids[:place], ids[place + 1 :]
    choices = []
    unknown = None  # why the first way of writing it cannot be encoded
    for written in texts:
        try:
            # A text with a mask is closed, by [SEP] for instance, which `prompt` leaves out.
            ids_with_word = encode(written) + (tokens.frame[1] if after else [])
        except HeadwiseError as error:  # a vocabulary of characters may have no space
            unknown = unknown or error
            continue
        piece = ids_with_word[len(before) : len(ids_with_word) - len(after)]  # what stands between the two
        if piece and [*before, *piece, *after] == ids_with_word:  # the word has changed no token of the text around it
            choices.append(piece)
    if not choices:
        raise unknown or HeadwiseError(
            f"the answer {word!r} is no token of its own in its place; end the prompt before it, or pass its id"
        )
    return choices


# What the heads do


class _Telling:
    """One prediction, and what is known of it."""

    def __init__(
        self, passes: Passes, question: _Question, twin: _Question | None, choose: Choice, progress: Progress
    ) -> None:
        self.passes, self.question, self.choose, self.progress = passes, question, choose, progress
        ids = torch.tensor(question.ids)  # (T,)
        self.study = None if twin is None else Study(passes, ids, torch.tensor(twin.ids), choose)
        self.text = Reading(ids[None].to(device_of(passes.model))) if self.study is None else self.study.clean_text
        self.recorder = Recorder(passes.layers)  # what the modules read and gave, which `Parts` adds up
        self.parts: Attribution | None = None  # the outcome: what each part adds to the logit
        self.refused = ""  # why it is not known
        self.effects: dict[str, float] = {}  # what each head carries of the difference to the corrupted text
        # (H,S) The weights of all heads of a site at a position. Kept: many heads are asked for at the same one.
        self.weights = cache(lambda site, t: row_weights(self.text.calls[site], 0, [t])[:, 0])

    def read(self) -> tuple[int, int | None]:
        """Read the texts; the token that is explained, and what it is compared with, as `choose` gives them."""
        # Of other answers it is not known what parts add: `_add_up` refuses them, and nothing has to be recorded.
        listening = self.recorder.listening if self.question.way == "next" else nullcontext
        if self.study is not None:
            progress = partial(self.progress, "patching heads")
            self.study.read(listening)
            self.effects = self.study.effects("out", alone(self.study.names("out")), progress=progress)
            return self.study.target
        self.passes.read(self.text, listening)
        return self.choose(self.text.answer, None)

    def tell(
        self, target: tuple[int, int], notes: list[str]
    ) -> tuple[list[StoryHead], list[StoryKeys], list[StoryPath]]:
        """All heads, those first that carry most, or that add most, or without which most changes; keys; paths."""
        try:
            self.parts = self._add_up(target)
        except HeadwiseError as error:  # the story goes on without it
            self.refused = str(error)
        names = []  # of all heads that ran, from the first layer to the last
        for site, call in self.text.calls.items():
            names += [head_name(site, h) for h in range(call.q.shape[1])]
        # What ranks the heads: what they carry, or else what they add. Where that is not known either, all heads are
        # silenced, and the change ranks them.
        size = self.effects
        if not size and self.parts is not None:
            size = self.parts.heads
        ranked = sorted(names, key=lambda name: -abs(size.get(name, 0.0)))
        first = ranked[: Story.MOST] if size else names  # the heads that are asked about
        # The keys of `variants` are ("without", head), (head, position), and a receiver such as ("k", "L3.KV1").
        variants = self._silenced(first, target[0])
        places: dict[str, list[int]] = {}  # of the first heads, the positions at which they are patched alone
        readers: dict[Receiver, str] = {}  # as `_readers` gives them
        refused = ""  # why what queries, keys and values carry is not known
        if self.study is not None:
            places = {name: self._places(self.study, name) for name in first}
            for name, positions in places.items():
                for t in positions:
                    variants |= self.study.variants("out", {(name, t): [name]}, [t])
            readers = self._readers(self.study, first)
            read: dict[Any, Variant] = {}  # variants in which a query, key or value is the clean one
            try:  # refused where heads have a gate or a norm before W_O, or a module makes its weights itself
                for at in READ:  # q, k and v
                    sets = {(at, name): [name] for of, name in readers if of == at}  # key of a variant -> what changes
                    read |= self.study.variants(at, sets)
            except HeadwiseError as error:
                refused, readers, read = str(error), {}, {}
            variants |= read
        values = self.passes.asked(variants, partial(self.progress, "silencing heads"))
        if self.refused:  # of the parts
            notes.append(Note.of("why.no_parts", reason=self.refused))
        if refused:  # of queries, keys and values
            notes.append(Note.of("why.no_keys", reason=refused))
        if not size:  # `first` has all heads then
            ranked.sort(key=lambda name: -abs(values["without", name]))
        heads = []
        for name in ranked:
            there = {t: values[name, t] for t in places.get(name, ())}  # what it carries at each position alone
            heads.append(self._head(name, values.get(("without", name)), there))
        return heads, *self._through(readers, values)

    def _add_up(self, target: tuple[int, int]) -> Attribution:
        """What each part adds to the logit."""
        model = self.passes.model
        if self.question.way == "masked":
            raise HeadwiseError(f"{type(model).__name__} turns the last hidden state into logits in more than one step")
        if self.question.way == "first":
            raise HeadwiseError("what an encoder adds reaches the logits through the decoder alone")
        last = len(self.question.ids) - 1
        parts = Parts(model, self.recorder, self.text.calls, self.text.answer, target, last)
        for layer in range(len(self.passes.layers)):
            parts.add(layer)
        return parts.summed()

    # What is asked of the first heads

    def _silenced(self, names: Iterable[str], token: int) -> dict[Any, Variant]:
        """A variant of the text without each of these heads, asked for the change of log p of the token, in nats."""

        def chance(logits_v: Tensor) -> Tensor:
            return logits_v.cpu().double().log_softmax(-1)[token]

        before = chance(self.text.answer)

        def change(logits_v: Tensor) -> float:
            return float(chance(logits_v) - before)

        def nothing(site: str, call: Call) -> Tensor:
            return torch.zeros_like(call.out)

        order = list(self.text.calls)
        variants = {}
        # From the first layer to the last: neighbours run as one batch, and should begin at nearly the same block.
        for name in sorted(names, key=lambda name: order.index(place_of(name)[0])):
            site, h = place_of(name)
            variants["without", name] = self.passes.variant(self.text, {site: [h]}, nothing, change)
        return variants

    def _places(self, study: Study, name: str) -> list[int]:
        """The positions, PLACES of them at most, where what a head gives differs most between the two texts."""
        site, h = place_of(name)
        if self.question.way == "first" and not site.startswith("encoder."):
            return []  # of a head of the decoder, which has its own text
        clean, corrupted = self.text.calls[site].out, study.text.calls[site].out
        distance = (clean[0, h] - corrupted[0, h]).float().norm(dim=-1)  # (T,)
        return [t for t in distance.argsort(descending=True)[:PLACES].tolist() if distance[t] > 0]

    def _readers(self, study: Study, names: Sequence[str]) -> dict[Receiver, str]:
        """The queries, keys and values of heads that carry something -> the strongest of the heads that use them.

        A key or a value belongs to all heads of its group: ("k", "L3.KV1") -> "L3.H5".
        """
        carriers = [name for name in names if abs(self.effects[name]) >= Story.CLEAR]
        readers = {}
        for at in READ:
            for name, (site, members) in study.names(at).items():
                heads = [head_name(site, h) for h in members]
                reading = [carrier for carrier in carriers if carrier in heads]  # the strongest first, as in `names`
                if reading:
                    readers[at, name] = reading[0]
        return readers

    def _head(self, name: str, without: float | None, places: Mapping[int, float]) -> StoryHead:
        """A head with where it acts, and the three places that it looks at most from there.

        It acts where it carries most alone, or else where the answer stands. `without` is the change of the answer
        without it, None where that was not asked; `places` are positions with what it carries at each alone.
        """
        # An answer that a decoder begins with stands nowhere in the text. Else % makes of -1 the last token's position.
        end = None if self.question.way == "first" else self.question.position % len(self.question.ids)
        at = max(places, key=lambda t: abs(places[t]), default=end)
        site, h = place_of(name)
        call = self.text.calls[site]
        looks: tuple[tuple[int, float], ...] = ()
        # Without a place only a cross attention is shown: its last query looks at the text from the decoder.
        if at is not None or call.cross:
            row = call.n_queries - 1 if at is None else at
            weights = self.weights(site, row)[h]
            order = weights.argsort(descending=True, stable=True).tolist()
            # Special tokens, on which attention rests, have no place.
            specials = frozenset() if self.question.tokens is None else self.question.tokens.specials
            words = [t for t in order if self.question.ids[t] not in specials]
            looks = tuple((t, float(weights[t])) for t in words[:3])
        adds = None if self.parts is None else self.parts.heads[name]
        return StoryHead(name, adds, at, looks, without, self.effects.get(name))

    # What they read

    def _through(
        self, readers: Mapping[Receiver, str], values: Mapping[Any, float]
    ) -> tuple[list[StoryKeys], list[StoryPath]]:
        """What keys and values carry, and the clear paths to the heads that carry something, the strongest first.

        `values` are the answers to all variants, by the keys that `tell` names.
        """
        keys = [StoryKeys(name, values["k", name], values["v", name]) for at, name in readers if at == "k"]
        # Where all that arrives there together changes little, no single path is followed.
        receivers = [receiver for receiver in readers if abs(values[receiver]) >= Story.CLEAR]
        if self.study is None or not receivers:
            return keys, []
        paths = []
        brought = self.study.paths(receivers, progress=partial(self.progress, "following paths"))
        for (at, receiver), senders in brought.items():
            for sender, effect in senders.items():
                if abs(effect) >= Story.CLEAR:
                    paths.append(StoryPath(sender, receiver, readers[at, receiver], at, effect))
        return keys, sorted(paths, key=lambda path: -abs(path.effect))
