"""The texts that heads are measured on: of a survey, and of `align`, where a file says what belongs together.

A survey reads files, words or ids, else what the run that a model comes from held out; of a model of speech, sounds.
`align` reads JSON, a text a line:

{"audio": "a.wav", "language": "en", "words": [["the", 0.0], ["river", 0.142]]}        speech, and its words' seconds
{"source": "the old house", "target": "la casa vieja", "links": [[0, 0], [1, 2], [2, 1]]}    words: target, source
{"text": "he says that she sings", "links": [[1, 0], [4, 3]]}                          words that look, and at which

Beside `links`, `possible` may name further ones that are right where they are found, and not missed where they are not.
"""

from __future__ import annotations

import json
import re
import wave
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwise.corpus.documents import (
    Relations,
    Text,
    bench,
    check_ids,
    read_documents,
    read_relations,
    text_of,
    verb_relations,
)
from headwise.corpus.sources import Progress
from headwise.corpus.tokens import TextTokens, require_tokens
from headwise.corpus.verbs import HALF_LINES
from headwise.errors import HeadwiseError
from headwise.files import read_text
from headwise.gpt.run import held_out_documents, read_run
from headwise.heads.alignment import Known, Linked, Spoken
from headwise.models.ask import hear, sounds_of
from headwise.models.lineage import require_run
from headwise.models.open import Folder
from headwise.shapes import shape_of
from headwise.words import Note

HELD_OUT = 4096  # tokens of what a run held out, about: a round choice

Texts = str | Path | Sequence[str | Path] | Sequence[Sequence[int]]

# The three kinds of text that `align` reads: the field that tells the kind -> the fields that it must have beside it.
KINDS = {"audio": {"words"}, "source": {"target", "links"}, "text": {"links"}}
RATE = 16_000  # samples a second that models of speech read
WIDTHS = {2: (np.int16, 2**15), 4: (np.int32, 2**31)}  # bytes of a sample: its type, and the full scale


def read_texts(
    folder: Folder,
    texts: Texts | Text | None,
    tokens: int | None = None,
    documents: int | None = None,
    progress: Progress | None = None,
    relations: Relations | str | Path | None = None,
) -> Text:
    """The text of a survey, with its relations.

    texts, tokens, documents, relations  as in `headwise.survey`
    progress                             is called while large files are read

    Raises HeadwiseError where the arguments do not go together, or a text does not fit the model.
    """
    for name, value in (("tokens", tokens), ("documents", documents)):
        if value is not None and value < 1:
            raise HeadwiseError(f"{name} {value} must be at least 1")
    if isinstance(relations, Path):
        relations = read_relations(folder, relations)
    elif isinstance(relations, str):
        relations = bench(folder, relations)
    if texts is None and relations is not None:
        texts = [document.ids for document in relations.documents]
    sources: list[Any] = []
    if texts is not None and not isinstance(texts, Text):
        sources = [texts] if isinstance(texts, str | Path) else list(texts)
    words = [str(source) for source in sources if isinstance(source, str | Path)]  # names of files, and texts
    if sources and not words and shape_of(sources[0]) == ():  # numbers, not documents: the ids of a single one
        sources = [sources]
    if isinstance(texts, Text) and (tokens, documents) != (None, None):
        raise HeadwiseError("a Text has its documents already; leave tokens= and documents= out")
    if tokens is not None and not words:
        raise HeadwiseError(f"tokens {tokens} cuts a text into documents; pass a text with it")
    if isinstance(texts, Text):
        text = copy(texts)  # the caller's keeps its relations
    elif texts is None:
        text = held_out(folder, documents)
    elif words and len(words) < len(sources):
        raise HeadwiseError(f"{len(words)} of {len(sources)} documents are texts and the others ids; pass either")
    elif are_sounds(words):  # what the model writes of them is the text that its decoder reads
        spoken = transcripts(folder, [Path(word) for word in words[:documents]])
        text = text_of(folder, [each.ids for each in spoken], words[: len(spoken)])
        text.scored_after = text.frame[0][-1]  # the last token before the first word: `transcripts` has set the frame
        wrote = "; ".join(require_tokens(folder).decode(each.ids).strip() for each in spoken)
        text.about = (Note.of("note.heard", text=wrote),)
    elif words:
        text = read_documents(folder, words, tokens, documents, progress)
    else:
        lists = [[int(i) for i in source] for source in sources[:documents]]
        text = check_ids(folder, {f"document {n}": ids for n, ids in enumerate(lists)})
    text.relations = relations or text.relations
    return text


def held_out(folder: Folder, documents: int | None) -> Text:
    """What the run that a model comes from held out; of a run of verbs with their relations.

    Raises HeadwiseError for a folder that comes from no run.
    """
    origin = require_run(folder.path)
    record = read_run(origin)
    assert record is not None  # `require_run` has found it
    tokens, settings = require_tokens(folder), record.settings
    ids = held_out_documents(origin, HELD_OUT)[:documents]
    text = text_of(folder, ids, [Note.of("source.held_out")])
    if settings.text is None:  # the verb corpus, whose lines are like "he works = él trabaja"
        text.note = HALF_LINES
        text.scored_after = tokens.encode("=")[0]  # the answer of a line stands behind it
        text.end = tuple(tokens.frame[0])  # the boundary stands between lines
        # The line that the run's pages show comes first, for False is less than True: examples of relations are taken
        # from the first document. The others stay in their order.
        lines = sorted(map(tokens.decode, ids), key=lambda line: line != record.example)
        text.relations = verb_relations(tokens, lines)
    return text


def are_sounds(texts: object) -> bool:
    """Is each of these texts, or the only one, the name of a WAV file?"""
    names = texts if isinstance(texts, list | tuple) else [texts]
    return bool(names) and all(str(name).lower().endswith(".wav") for name in names)


@dataclass(frozen=True)
class Transcript:
    """What a model wrote of a sound."""

    ids: list[int]  # the first names the sound; see `ask.hear`
    n_keys: int  # keys of the encoder that hold sound: behind them is silence, as it always hears equally long


def transcripts(folder: Folder, paths: Sequence[Path]) -> list[Transcript]:
    """Let a model of speech hear sounds, WAV files, and write what they say.

    From then on its tokenizer begins each text with the first of the sounds, in the place of the token that begins a
    transcript.
    """
    from headwise.models.hf import FolderTokens, transcribed

    model: Any = folder.model
    sounds = [_features(folder, path) for path in paths]
    seconds_per_key = sounds[0][1]  # the same of all
    hear(model, torch.cat([features for features, _, _ in sounds]), seconds_per_key)
    texts = []
    for number, (_, _, n_keys) in enumerate(sounds):
        ids = transcribed(model, sounds_of(model).states[number, None])
        sound = model.config.vocab_size + number  # its id, behind those of the vocabulary
        texts.append(Transcript([sound, *ids[1:]], n_keys))  # instead of the first token, which begins a transcript
    if isinstance(folder.tokens, FolderTokens):
        folder.tokens.begin_with(texts[0].ids, model.generation_config.no_timestamps_token_id)
    return texts


def _features(folder: Folder, path: Path) -> tuple[Tensor, float, int]:
    """What a model hears of a sound, (1,M,F); the seconds of a key, and how many keys hold sound.

    M are frequency bands, F moments. A key of the encoder stands for several of these.
    """
    from headwise.models.hf import sound_features

    model: Any = folder.model
    options = getattr(model, "generation_config", None)
    if getattr(options, "no_timestamps_token_id", None) is None or not hasattr(model.config, "max_source_positions"):
        raise HeadwiseError(f"{folder.name} ({folder.family}) hears no speech as Whisper does; pass other texts")
    samples = read_wav(path)
    features, seconds = sound_features(folder.path, samples)  # what is shorter than `seconds` is filled with silence
    if len(samples) > seconds * RATE:  # the rest would be cut off without a word
        raise HeadwiseError(f"{path.name} has {len(samples) / RATE:.1f} s, and the model hears {seconds:g}")
    seconds_per_key = seconds / model.config.max_source_positions
    # Rounded up: the last key may be full in part.
    n_keys = min(model.config.max_source_positions, -(-len(samples) // round(seconds_per_key * RATE)))
    return features.to(model.dtype), seconds_per_key, n_keys


def read_aligned(folder: Folder, path: Path) -> list[Known]:
    """The texts of a file for `align`; sounds lie beside it.

    Raises HeadwiseError with the number of the line that is not as it must be.
    """
    if folder.tokens is None:
        raise HeadwiseError(f"{folder.name} has no tokenizer, so its rows have no words")
    texts = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            texts.append(_text(folder, folder.tokens, json.loads(line), path.parent))
        # A line may be no JSON, or have other types and indices than a text has.
        except (HeadwiseError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise HeadwiseError(f"line {number} of {path}: {error}") from None
    if not texts:
        raise HeadwiseError(f"{path} has no text; a line is {json.dumps({'audio': 'a.wav', 'words': [['the', 0.0]]})}")
    return texts


def _text(folder: Folder, tokens: TextTokens, record: dict[str, Any], near: Path) -> Known:
    # The text of a line, by its kind; `near` is the folder of the file.
    kind = next((kind for kind in KINDS if kind in record), None)
    if kind is None or KINDS[kind] - set(record):
        wanted = "; ".join(", ".join([kind, *sorted(fields)]) for kind, fields in KINDS.items())
        raise HeadwiseError(f"it has {', '.join(record) or 'nothing'}, and a text needs {wanted}")
    if kind == "audio":
        return _spoken(folder, tokens, record, near)
    if kind == "text":
        ids = list(tokens.prompt(record["text"]))
        places = _first_tokens(tokens, record["text"], len(tokens.frame[0]))  # behind the tokens that begin any text
        return Linked({"input_ids": torch.tensor([ids])}, *_links(record, places, places))
    return _translated(folder, tokens, record)


def _spoken(folder: Folder, tokens: TextTokens, record: dict[str, Any], near: Path) -> Spoken:
    """A spoken text with its words, which stand behind the tokens that begin a transcript.

    A row is a token of the decoder's input, and predicts the one after it.
    """
    model: Any = folder.model
    features, seconds_per_key, n_keys = _features(folder, near / record["audio"])
    options, begin = model.generation_config, [model.config.decoder_start_token_id]
    if getattr(options, "is_multilingual", False):  # then a transcript begins with its language and the task
        language = record.get("language", "en")
        if f"<|{language}|>" not in options.lang_to_id:
            raise HeadwiseError(f"the model knows no language {language!r}")
        begin += [options.lang_to_id[f"<|{language}|>"], options.task_to_id["transcribe"]]
    ids = [*begin, options.no_timestamps_token_id]
    first = len(ids) - 1  # the row that predicts the first token of the first word
    starts = []
    for word, _ in record["words"]:
        starts.append(len(ids) - 1 - first)  # the last row so far predicts the word's first token
        ids += tokens.encode(f" {word}")
    rows = tuple(range(first, len(ids)))  # the last one predicts the end
    inputs = {"input_features": features, "decoder_input_ids": torch.tensor([ids])}
    begins = tuple(float(time) for _, time in record["words"])
    return Spoken(inputs, rows, tuple(starts), begins, seconds_per_key, n_keys)


def _translated(folder: Folder, tokens: TextTokens, record: dict[str, Any]) -> Linked:
    """A source for the encoder, and a target that the decoder reads one token later."""
    config = folder.model.config
    start = getattr(config, "decoder_start_token_id", None)
    if start is None:
        raise HeadwiseError(f"{folder.name} ({folder.family}) has no decoder beside an encoder; pass a text with links")
    source = list(tokens.prompt(record["source"]))
    target = [int(start), *tokens.encode(record["target"])]
    rows = _first_tokens(tokens, record["target"], 0)  # row i predicts token i of the target
    keys = _first_tokens(tokens, record["source"], len(tokens.frame[0]))  # as a key a token stands in its own place
    inputs = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([target])}
    return Linked(inputs, *_links(record, rows, keys))


def _links(record: dict[str, Any], rows: Sequence[int], keys: Sequence[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """The links of a text, from words to their first tokens, and then those that are possible: two fields of `Linked`.

    rows, keys  for each word on either side of a link its row, its key
    """
    for name in ("links", "possible"):
        yield tuple((rows[row], keys[key]) for row, key in record.get(name, ()))


def _first_tokens(tokens: TextTokens, text: str, before: int) -> Sequence[int]:
    """For each word between spaces the number of its first token, where `before` tokens stand before the text."""
    places = tokens.places(text)  # the characters of each token, [start, end)
    numbers = []
    for word in re.finditer(r"\S+", text):
        overlapping = [n for n, (start, end) in enumerate(places) if start < word.end() and end > word.start()]
        if not overlapping:
            raise HeadwiseError(f"the tokenizer has nothing for the word {word.group()!r}")
        numbers.append(before + overlapping[0])
    return numbers


# Sound as samples, from -1 to 1, RATE of them a second, which models of speech read.


def read_wav(path: Path) -> NDArray[np.float32]:
    """The samples of a WAV file (PCM of 16 or 32 bits), its channels averaged, at RATE.

    Raises HeadwiseError for another file.
    """
    if not path.is_file():
        raise HeadwiseError(f"{path} is no file")
    try:
        with wave.open(str(path)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            content = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise HeadwiseError(f"{path} is no WAV file that can be read: {error}") from None
    if width not in WIDTHS:
        raise HeadwiseError(f"{path} has samples of {8 * width} bits; write it with 16")
    kind, full_scale = WIDTHS[width]
    # The channels of a sample lie side by side.
    samples = np.frombuffer(content, kind).reshape(-1, channels).mean(1) / full_scale
    return resampled(samples.astype(np.float32), rate)


def resampled(samples: NDArray[np.float32], rate: int) -> NDArray[np.float32]:
    """The same sound, of `rate` samples a second, at RATE.

    Its spectrum is cut off above the highest frequency that RATE has room for, or filled with zeros up to that.
    """
    if rate == RATE:
        return samples
    # Whole seconds have a whole number of samples at both rates. To a transform the end is followed by the beginning: a
    # second of silence keeps them apart.
    seconds = -(-len(samples) // rate) + 1
    spectrum = np.fft.rfft(np.pad(samples, (0, seconds * rate - len(samples))))
    kept = np.zeros(seconds * RATE // 2 + 1, complex)
    size = min(len(kept), len(spectrum))
    kept[:size] = spectrum[:size]
    sound = np.fft.irfft(kept, seconds * RATE) * (RATE / rate)  # `irfft` divides by the new number of samples
    return sound[: round(len(samples) * RATE / rate)].astype(np.float32)
