"""Why a model predicts what it predicts: the heads that bring the answer, those that work against it, and their paths.

The answer is the next token, that of a masked word, or the first that the decoder of an encoder-decoder writes. Three
numbers say what a head does: what it adds to the answer's logit, what it carries of the difference to a corrupted
text (its effect when it is patched), and how the answer's log-probability changes without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from headwise.corpus.tokens import TextTokens
from headwise.errors import HeadwiseError
from headwise.families import read_config
from headwise.heads.attribute import Attribution, Recorder, added
from headwise.heads.blocks import row_weights
from headwise.heads.patch import READ, Passes, Reading, Receiver, Study, Variant, alone, place_of
from headwise.heads.table import Story, StoryHead, StoryKeys, StoryPath
from headwise.models.ask import answering, evaluating
from headwise.models.open import folder_of, row_of, tokens_of
from headwise.models.sites import layers_of
from headwise.records import Call, head_name
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
    way, tokens = answering(model), folder_of(model).tokens
    if isinstance(answer, str) or isinstance(other, str):
        tokens_of(model)  # raises where words cannot become ids
    texts = [prompt] if corrupt is None else [prompt, corrupt]
    question, *twins = [
        _Question(way, tokens, text, row_of(model, text)[0].tolist()) for text in texts
    ]
    if twins:
        _check_twin(question, twins[0])
    with evaluating(model):
        passes = Passes(model, layers_of(model), question.position)
        # of what the modules read and gave, which `Parts` adds up
        recorder = Recorder(passes.layers)
        with recorder.listening():
            text = passes.read(torch.tensor(question.ids))
        corrupted = [passes.read(torch.tensor(twin.ids)) for twin in twins]
        notes: list[str] = []
        token, second = _compared(
            question, answer, other, text.answer, [each.answer for each in corrupted], notes
        )
        study = Study(passes, text, corrupted[0], (token, second)) if corrupted else None
        # for what parts add, which needs two
        rival = _likeliest(text.answer, token) if second is None else second
        parts = _parts(question, recorder, text, (token, rival), passes, notes)
        about = _Heads(passes, question, text, study, parts, progress)
        heads = about.told(token)
        keys, paths = about.read_by([head.head for head in heads[: Story.MOST]], notes)
    row = text.answer.cpu().double()  # some devices have no float64
    chances, shown, difference = row.softmax(-1), question.shown, float(row[token] - row[rival])
    predicted = int(row.argmax())
    return Story(
        model=folder_of(model).name,
        asks=way,
        prompt=question.written,
        tokens=shown(question.ids),
        corrupt=twins[0].written if twins else None,
        corrupted=shown(twins[0].ids) if twins else None,
        answer=shown([token])[0],
        other=shown([rival])[0],
        predicted=shown([predicted])[0],
        predicted_probability=float(chances[predicted]),
        probability=float(chances[token]),
        counts="probability" if second is None else "logits",
        clean_value=study.clean if study else difference,
        corrupted_value=study.corrupted if study else None,
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
    folder: Path,
    prompt: str,
    corrupt: str | None,
    words: Iterable[str | None],
    tokens: TextTokens | None,
) -> None:
    """Refuse before weights are read what the tokenizer tells: texts of other lengths, an answer of several tokens."""
    if tokens is None or not prompt.strip():  # `why` refuses these itself, when the model is open
        return
    config = read_config(folder)
    # the name of the model's class; "" where none is given
    kind = str((config.get("architectures") or [""])[0])
    # What is not sure to go on with the next token is taken for an encoder-decoder, whose answer may be of any length.
    is_sure = kind.endswith(PREDICTING) and not config.get("is_encoder_decoder")
    # a text that is read whole is closed
    way, end = ("next", []) if is_sure else ("first", tokens.frame[1])
    question = _Question(way, tokens, prompt, [*tokens.prompt(prompt), *end])
    if corrupt is not None:
        _check_twin(question, _Question(way, tokens, corrupt, [*tokens.prompt(corrupt), *end]))
    for word in filter(None, words):
        # raises for a word of several tokens; the notes are those of `why`
        _single(question, word, [])


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
            raise HeadwiseError(
                "no tokenizer that names a mask is known of the model, so no word of a text is hidden"
            )
        (mask,) = self.tokens.encode(sign)  # a mask is a single token
        count = self.ids.count(mask)
        if count != 1:
            raise HeadwiseError(
                f"the text has {count} masked words; write {sign} once, for the word to explain"
            )
        return self.ids.index(mask)

    def shown(self, ids: Sequence[int]) -> tuple[str, ...]:
        return tuple(map(str, ids)) if self.tokens is None else self.tokens.shown(ids)

    @property
    def written(self) -> str:  # the text for a reader, also where ids were passed
        return self.source if isinstance(self.source, str) else " ".join(self.shown(self.ids))


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
        places = f"token {question.position} of the prompt and token {twin.position} of the corrupted one"
        raise HeadwiseError(
            f"the masked word is {places}; it must be the same, since heads are compared place by place"
        )
    if twin.ids == question.ids:
        raise HeadwiseError(
            "the corrupted text is the prompt itself, so there is no difference to explain; change a word"
        )


def _compared(
    question: _Question,
    answer: str | int | None,
    other: str | int | None,
    row: Tensor,
    corrupted: Sequence[Tensor],
    notes: list[str],
) -> tuple[int, int | None]:
    """The token that is explained, and what it is compared with: None where both texts are answered with it.

    `row` are the logits (V,) of the prompt, and `corrupted` those of the corrupted text, or nothing.
    """
    token = int(row.argmax()) if answer is None else _token(question, answer, row, notes)
    if other is not None:
        second = _token(question, other, row, notes)
        if second == token:
            raise HeadwiseError(
                f"{other!r} is the answer and what it is compared with, so there is no difference to "
                "explain; pass another token"
            )
        return token, second
    if not corrupted:
        return token, _likeliest(row, token)
    second = int(corrupted[0].argmax())
    return token, None if second == token else second


def _likeliest(row: Tensor, token: int) -> int:
    """The likeliest other token."""
    return int(row.index_fill(0, torch.tensor([token], device=row.device), -torch.inf).argmax())


def _token(question: _Question, word: str | int, row: Tensor, notes: list[str]) -> int:
    """The id of an answer, which is an id or a word; `row` are the logits (V,) of the prompt.

    A word may be one token with a space before it and another without: the likelier one is taken, and a note says so.
    """
    if not isinstance(word, str):
        if not 0 <= word < len(row):
            raise HeadwiseError(f"the token {word} is outside the vocabulary of {len(row)} tokens")
        return word
    token = max(_single(question, word, notes), key=lambda i: float(row[i]))
    notes.append(
        Note.of("why.token", word=repr(word), token=repr(question.shown([token])[0]), id=token)
    )
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
        # what stands between the two
        piece = ids_with_word[len(before) : len(ids_with_word) - len(after)]
        # the word has changed no token of the text around it
        if piece and [*before, *piece, *after] == ids_with_word:
            choices.append(piece)
    if not choices:
        raise unknown or HeadwiseError(
            f"the answer {word!r} is no token of its own in its place; end the prompt before it, or pass its id"
        )
    return choices


# What the heads do


def _parts(
    question: _Question,
    recorder: Recorder,
    text: Reading,
    target: tuple[int, int],
    passes: Passes,
    notes: list[str],
) -> Attribution | None:
    """What each part adds to the logit; None, and a note, where it is not known."""
    name = type(passes.model).__name__
    try:
        if question.way == "masked":
            raise HeadwiseError(
                f"{name} turns the last hidden state into logits in more than one step"
            )
        if question.way == "first":
            raise HeadwiseError("what an encoder adds reaches the logits through the decoder alone")
        return added(passes.model, recorder, text, target, len(question.ids) - 1)
    except HeadwiseError as error:
        notes.append(Note.of("why.no_parts", reason=str(error)))
        return None


@dataclass
class _Heads:
    """The heads of one prediction. Effects are shares of the difference to the corrupted text."""

    passes: Passes
    question: _Question
    text: Reading
    study: Study | None  # with the corrupted text
    parts: Attribution | None  # what each part adds to the logit
    progress: Progress
    # what each head carries; `told` fills it
    effects: dict[str, float] = field(default_factory=dict)

    def told(self, token: int) -> list[StoryHead]:
        """All heads, those first that carry most, or that add most, or without which most changes."""
        names = []  # of all heads that ran, from the first layer to the last
        for site, call in self.text.calls.items():
            names += [head_name(site, h) for h in range(call.q.shape[1])]
        size: dict[str, float] = {}  # what ranks them
        if self.study is not None:
            progress = partial(self.progress, "patching heads")
            size = self.effects = self.study.effects("out", alone(names), progress=progress)
        elif self.parts is not None:
            size = self.parts.heads
        ranked = sorted(names, key=lambda name: -abs(size.get(name, 0.0)))
        # The heads that are asked about: all of them, where nothing else ranks them.
        first = ranked[: Story.MOST] if size else names
        without = self._without(first, token)
        if not size:
            ranked.sort(key=lambda name: -abs(without[name]))
        there = self._at_places(first)
        return [self._head(name, without.get(name), there.get(name, {})) for name in ranked]

    def _without(self, names: Iterable[str], token: int) -> dict[str, float]:
        """The change of log p of the token, in nats, without each of these heads."""
        before = self.text.answer.cpu().double().log_softmax(-1)[token]

        def change(logits_v: Tensor) -> float:
            return float(logits_v.cpu().double().log_softmax(-1)[token] - before)

        def silence(h: int, call: Call) -> Tensor:
            out = call.out.clone()
            out[:, h] = 0
            return out

        variants = {}
        for name in names:
            site, h = place_of(name)
            variants[name] = {site: partial(silence, h)}
        return self.passes.asked(
            self.text, variants, change, partial(self.progress, "silencing heads")
        )

    def _at_places(self, names: Iterable[str]) -> dict[str, dict[int, float]]:
        """What each head carries alone at those PLACES positions where what it gives differs most."""
        if self.study is None:
            return {}
        variants: dict[tuple[str, int], Variant] = {}
        for name in names:
            site, h = place_of(name)
            if self.question.way == "first" and not site.startswith("encoder."):
                continue  # a head of the decoder, which has its own text
            clean, corrupted = (text.calls[site].out[0, h] for text in (self.text, self.study.text))
            distance = (clean - corrupted).float().norm(dim=-1)  # (T,)
            for t in distance.argsort(descending=True)[:PLACES].tolist():
                if distance[t] > 0:
                    variants |= self.study.variants("out", {(name, t): [name]}, [t])
        effects = self.study.asked(variants, partial(self.progress, "patching positions"))
        there: dict[str, dict[int, float]] = defaultdict(dict)
        for (name, t), effect in effects.items():
            there[name][t] = effect
        return there

    def _head(self, name: str, without: float | None, places: Mapping[int, float]) -> StoryHead:
        """A head with where it acts, and the three places that it looks at most from there.

        It acts where it carries most alone, or else where the answer stands. `without` is the change of the answer
        without it, None where that was not asked; `places` are positions with what it carries at each alone.
        """
        # An answer that a decoder begins with stands nowhere in the text. Else % makes of -1 the last token's position.
        end = (
            None
            if self.question.way == "first"
            else self.question.position % len(self.question.ids)
        )
        at = max(places, key=lambda t: abs(places[t]), default=end)
        site, h = place_of(name)
        call = self.text.calls[site]
        looks: tuple[tuple[int, float], ...] = ()
        # Without a place only a cross attention is shown: its last query looks at the text from the decoder.
        if at is not None or call.cross:
            weights = self._weights(site, call.n_queries - 1 if at is None else at)[h]
            order = weights.argsort(descending=True, stable=True).tolist()
            # Special tokens, on which attention rests, have no place.
            specials = (
                frozenset() if self.question.tokens is None else self.question.tokens.specials
            )
            words = [t for t in order if self.question.ids[t] not in specials]
            looks = tuple((t, float(weights[t])) for t in words[:3])
        adds = None if self.parts is None else self.parts.heads[name]
        return StoryHead(name, adds, at, looks, without, self.effects.get(name))

    @cached_property
    def _weights(self) -> Callable[[str, int], Tensor]:
        """Gives the weights (H,S) of a site at a position; kept, since many heads are asked for at the same one."""
        return cache(lambda site, t: row_weights(self.text.calls[site], 0, [t])[:, 0])

    def read_by(
        self, names: Sequence[str], notes: list[str]
    ) -> tuple[list[StoryKeys], list[StoryPath]]:
        """What the keys and values of these heads carry, and the clear paths to them, the strongest first."""
        study = self.study
        if study is None:
            return [], []
        # The queries, keys and values of heads that carry something -> the strongest of the heads that use them. A key
        # or a value belongs to all heads of its group: ("k", "L3.KV1") -> "L3.H5".
        carriers = [name for name in names if abs(self.effects[name]) >= Story.CLEAR]
        readers: dict[Receiver, str] = {}
        variants: dict[Receiver, Variant] = {}
        # refused where heads have a gate or a norm before W_O, or a module makes its weights itself
        try:
            for at in READ:
                for name, (site, members) in study.names(at).items():
                    using = [
                        carrier
                        for carrier in carriers
                        if carrier in {head_name(site, h) for h in members}
                    ]
                    if using:
                        readers[at, name] = using[0]
                        variants |= study.variants(at, {(at, name): [name]})
        except HeadwiseError as error:
            notes.append(Note.of("why.no_keys", reason=str(error)))
            return [], []
        effects = study.asked(variants, partial(self.progress, "patching keys"), early=True)
        keys = [
            StoryKeys(name, effects["k", name], effects["v", name])
            for at, name in readers
            if at == "k"
        ]
        # Where all that arrives there together changes little, no single path is followed.
        receivers = [receiver for receiver in readers if abs(effects[receiver]) >= Story.CLEAR]
        if not receivers:
            return keys, []
        paths = []
        for (at, receiver), senders in study.paths(
            receivers, None, partial(self.progress, "following paths")
        ).items():
            for sender, effect in senders.items():
                if abs(effect) >= Story.CLEAR:
                    paths.append(StoryPath(sender, receiver, readers[at, receiver], at, effect))
        return keys, sorted(paths, key=lambda path: -abs(path.effect))
