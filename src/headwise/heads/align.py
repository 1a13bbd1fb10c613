"""Heads that align: which cross-attention heads follow the words in time, or their partners in the source.

Each head, and each set of heads, is held to texts whose alignment is known; what is chosen on some is judged on others.
A set of heads aligns by the mean of their maps. In speech a monotone path is laid through the map (dynamic time
warping, Sakoe & Chiba 1978), its weights prepared as in Radford et al. 2022, arXiv 2212.04356, for the times of words.
In text the strongest key of a row counts, and the error is the alignment error rate (Och & Ney 2003).

Texts come from a file of JSON, a text a line:

{"audio": "a.wav", "language": "en", "words": [["the", 0.0], ["river", 0.142]]}        speech, and its words' seconds
{"source": "the old house", "target": "la casa vieja", "links": [[0, 0], [1, 2], [2, 1]]}    words: target, source
{"text": "he says that she sings", "links": [[1, 0], [4, 3]]}                          words that look, and at which
"""

from __future__ import annotations

import json
import math
import random
import re
import wave
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.corpus.tokens import Ids, TextTokens
from headwise.errors import HeadwiseError
from headwise.files import read_text
from headwise.heads.blocks import as_numpy, row_weights
from headwise.heads.documents import Progress, listening, no_progress
from headwise.heads.statistics import unknown_head
from headwise.intervals import Interval, interval_of
from headwise.models.ask import device_of, evaluating, run_body
from headwise.models.open import Folder
from headwise.models.sites import Site
from headwise.records import parse_head
from headwise.table import Table

SMOOTH = 7  # keys, the middle one among them, whose median is taken: as in Whisper
# Seconds within which a found beginning counts: two round limits. The headings in `Alignment.table` name them, too.
WITHIN = np.array([0.05, 0.1])
MOST = 8  # heads that are chosen together, at most: as many as OpenAI published for Whisper base
SHOWN = 12  # heads of the table: with the sets below them they fit on a screen

RATE = 16_000  # samples a second that models of speech read

Maps = NDArray[np.float32]  # (H,N,S): heads, rows that are aligned, keys
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Spoken:
    """A text that was spoken: when each of its words begins."""

    inputs: Mapping[str, Tensor]  # of the model's forward, one text
    # the positions whose maps are aligned, in ascending order: each predicts a token
    rows: Ids
    # for each word the row, counted among `rows`, that predicts its first token
    starts: Ids
    begins: Sequence[float]  # for each word, seconds from the beginning of the sound
    seconds_per_key: float
    # the first keys, which hold sound; the rest is silence that fills it up
    n_keys: int

    def figures(self, maps_knm: Maps) -> Numbers:
        """Of each map the mean seconds between known and found beginnings; the fractions within 50 and 100 ms: (K,3).

        A word is found to begin at the first key that the path visits in its row.
        """
        columns = path_starts(maps_knm)[:, list(self.starts)]  # (K,words)
        off = np.abs(columns * self.seconds_per_key - np.array(self.begins))
        # What rounding alone puts beyond a limit is within.
        within = (off[..., None] <= WITHIN + 1e-9).mean(1)
        return np.column_stack([off.mean(1), within])


@dataclass(frozen=True)
class Linked:
    """A text whose tokens have partners in another one, or in itself."""

    # of the model's forward, one text, or two of an encoder-decoder
    inputs: Mapping[str, Tensor]
    links: tuple[tuple[int, int], ...]  # (row, key) of partners
    n_keys: None = None  # all keys count

    @property
    def rows(self) -> list[int]:
        """Those that have a link."""
        return sorted({row for row, _ in self.links})

    def figures(self, maps_knm: Maps) -> Numbers:
        """Of each map the alignment error rate, and the fraction of the links that are found: (K,2).

        The rate is 1 - 2 |found and right| / (|found| + |right|).
        """
        right = set(self.links)
        rows = self.rows
        strongest_kn = maps_knm.argmax(-1).tolist()
        hits = [len(right & set(zip(rows, keys, strict=True))) for keys in strongest_kn]
        n_hit = np.array(hits)
        rates = 1 - 2 * n_hit / (len(right) + len(rows))
        return np.column_stack([rates, n_hit / len(self.links)])


Known = Spoken | Linked


@dataclass(frozen=True)
class Scored:
    """How well a head, or a set of heads, aligns: means over texts, with their intervals."""

    heads: tuple[str, ...]  # none of a straight line
    # spoken: mean seconds between known and found beginnings; linked: the alignment error rate
    error: Interval
    # Spoken: the fractions of the beginnings found within 50 and 100 ms. Linked: the fraction of the links found.
    within: tuple[Interval, ...] = ()


@dataclass(frozen=True)
class Alignment:
    """What `align` found: each head alone, a few that do best together, and how these do on texts never seen."""

    # each head alone, the best first, on the texts that heads were chosen by
    ranking: tuple[Scored, ...]
    chosen: Scored  # the heads that do best together, on the texts that they were not chosen by
    # on the same texts: a straight line, the best head alone, heads that were named
    controls: dict[str, Scored]
    kind: str  # "spoken" or "linked"
    n_texts: tuple[int, int]  # chosen by, judged on

    @property
    def alignment_heads(self) -> list[list[int]]:
        """[layer, head] of each, for the field of that name in generation_config.json and CTranslate2's config.json.

        The field is of the cross attention, or of the only stack: heads of others (`encoder.L3.H5`) are left out.
        """
        places = sorted(map(parse_head, self.chosen.heads))
        # The stack is "" in L3.H5 and "cross" in cross.L3.H2.
        stacks = "", "cross"
        return [[n, head] for stack, n, head in places if stack.split(".")[0] in stacks]

    def table(self) -> Table:
        """The best heads alone, and below them the sets, a row each."""
        columns = ["heads", "alignment error rate", "links found"]
        if self.kind == "spoken":
            columns = ["heads", "mean error, s", "within 50 ms", "within 100 ms"]
        named = {scored.heads[0]: scored for scored in self.ranking[:SHOWN]}
        named[f"chosen: {' '.join(self.chosen.heads)}"] = self.chosen
        rows: list[list[Any]] = []
        for name, scored in (named | self.controls).items():
            shares = [f"{share.mean:.0%}" for share in scored.within]
            rows.append([name, round(scored.error.mean, 3), *shares])
        chosen_by, judged_on = self.n_texts
        note = f"single heads on the {chosen_by} texts that heads were chosen by, all below on {judged_on} others"
        return Table(columns, rows, note=note)

    def __repr__(self) -> str:
        return f"Alignment({' '.join(self.chosen.heads)}: error {self.chosen.error.mean:.3f})"


@torch.no_grad()
def align(
    model: nn.Module,
    texts: Sequence[Known],
    judged: Sequence[Known],
    *,
    named: Sequence[str] = (),
    progress: Progress = no_progress,
) -> Alignment:
    """Rank the heads of a model by how well they align, and choose a few that do best together.

    texts     by which heads are chosen, greedily: the best alone, then whichever lowers the error of the mean map
              most, until none does; all spoken, or all linked
    judged    of the same kind, on which what was chosen is judged; nothing is chosen by them
    named     heads that somebody else has chosen, such as a model's published ones, to compare with
    progress  is called with the texts read, and all

    Where the model has cross attention its heads are ranked, else those of self attention. Raises HeadwiseError where a
    text has no words or no links.
    """
    if not texts or not judged:
        raise HeadwiseError(
            f"{len(texts)} texts to choose by and {len(judged)} to judge on; pass at least one of each"
        )
    every = [*texts, *judged]
    is_spoken = isinstance(every[0], Spoken)
    if any(isinstance(text, Spoken) != is_spoken for text in every):
        raise HeadwiseError(
            "some texts are spoken and some linked; align each kind in a call of its own"
        )
    known = []  # the texts with their maps
    names = []  # from here on a head is its number in this list
    with evaluating(model):
        for number, text in enumerate(every, 1):
            maps_of = _maps(model, text)
            names = [head for site in maps_of for head in site.heads]
            maps = np.concatenate(list(maps_of.values()))
            known.append((text, prepared(maps) if is_spoken else maps))
            progress(number, len(every))
    for name in named:
        if name not in names:
            raise unknown_head(name, names)
    to_choose = known[: len(texts)]
    to_judge = known[len(texts) :]
    alone = _figures(to_choose, [[h] for h in range(len(names))])
    order = np.argsort(alone[:, 0].mean(1), kind="stable").tolist()
    chosen = order[:1]
    error = alone[order[0], 0].mean()
    while len(chosen) < min(MOST, len(names)):
        wider = [[*chosen, h] for h in range(len(names)) if h not in chosen]
        errors = _figures(to_choose, wider)[:, 0].mean(1)
        if errors.min() >= error:
            break
        chosen = wider[errors.argmin()]
        error = errors.min()
    # By the name that a reader sees; of a straight line no head.
    best = names[chosen[0]]
    sets = {"chosen": chosen, "straight line": [], f"best alone: {best}": chosen[:1]}
    if named:
        sets[f"named: {' '.join(named)}"] = [names.index(name) for name in named]

    def scored(heads: Iterable[int], figures: Numbers) -> Scored:
        # Of one set, from its (1 + fractions, texts). The error may be seconds, so its bounds are left as they come.
        error, *within = map(interval_of, figures.tolist())
        fractions = tuple(share.of_fraction() for share in within)
        return Scored(tuple(names[h] for h in heads), error, fractions)

    judgements = map(scored, sets.values(), _figures(to_judge, list(sets.values())))
    controls = dict(zip(sets, judgements, strict=True))
    return Alignment(
        tuple(scored([h], alone[h]) for h in order),
        controls.pop("chosen"),
        controls,
        "spoken" if is_spoken else "linked",
        (len(texts), len(judged)),
    )


def _maps(model: nn.Module, text: Known) -> dict[Site, Maps]:
    """The maps (H,N,S) over the rows of a text that count, of all heads whose keys are another text than their queries.

    Of a model without such heads those of all that run.
    """
    rows = list(text.rows)
    if not rows or (isinstance(text, Spoken) and not text.starts):
        raise HeadwiseError(
            "a text without a word, or without a link, aligns with nothing"
        )
    calls = {}
    with listening(model, lambda site, call, _: calls.update({site: call})):
        if set(text.inputs) == {"input_ids"}:
            # also for a model of ours, whose argument has another name
            run_body(model, text.inputs["input_ids"])
        else:
            model(**{name: x.to(device_of(model)) for name, x in text.inputs.items()})
    # a layer of ours does either, and its call says which
    crossing = [site for site, call in calls.items() if site.cross or call.cross]
    maps = {}
    for site in crossing or calls:
        # Of a linked text `n_keys` is None, and [:None] takes all keys.
        maps[site] = as_numpy(row_weights(calls[site], 0, rows)[..., : text.n_keys])
    return maps


def _figures(
    texts: Sequence[tuple[Known, Maps]], sets: Sequence[Sequence[int]]
) -> Numbers:
    """Of each set of heads its error in each text, then what `Scored.within` has: (sets, 1 + fractions, texts)."""
    of_texts = []
    for text, maps_hns in texts:
        _, n, n_keys = maps_hns.shape
        # The map of a straight line: each row looks at one key, the first row at the first key, evenly from there on.
        line = np.zeros((n, n_keys), np.float32)
        line[np.arange(n), np.arange(n) * n_keys // n] = 1
        maps = [maps_hns[heads].mean(0) if heads else line for heads in sets]
        of_texts.append(text.figures(np.stack(maps)))
    return np.stack(of_texts, -1)


# Speech


def prepared(maps_hns: Maps) -> Maps:
    """Maps ready for a path: each key's weights over the rows, mean 0 and deviation 1; then the median of neighbours.

    So a key that all rows look at alike says nothing, and a single strong key does not draw the path.
    """
    # From the first row on: where all rows weigh a key alike, 0 stands there exactly, and tiny keeps it from 0 / 0.
    maps_hns = maps_hns - maps_hns[:, :1]
    scores = maps_hns - maps_hns.mean(1, keepdims=True)
    scores /= np.maximum(scores.std(1, keepdims=True), np.finfo(np.float32).tiny)
    # Keys on either side of the middle one: the window, 2 * half + 1, is odd and no longer than the keys.
    half = min(SMOOTH, scores.shape[2] - 1) // 2
    # so that each key has neighbours
    wide = np.pad(scores, ((0, 0), (0, 0), (half, half)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(wide, 2 * half + 1, axis=2)
    return np.asarray(np.median(windows, axis=-1), np.float32)


def path_starts(scores_knm: Maps) -> NDArray[np.int64]:
    """The best monotone path through each map (K,N,M), from its first cell to its last: the first column of each row.

    A step goes one row down, one column on, or both; the sum of scores on the way is the largest.
    """
    K, N, M = scores_knm.shape
    # best[i, k, j]: the largest sum of a path through the first i rows and j columns; a row and a column lie before all
    best = np.full((N + 1, K, M + 1), -np.inf)
    best[0, :, 0] = 0
    for i in range(N):
        scores = scores_knm[:, i].astype(np.float64)
        # A path enters the row at some column from above, straight or at a slant; then it has the scores from there on.
        entered = np.maximum(best[i, :, :-1], best[i, :, 1:])
        sums = scores.cumsum(1)
        best[i + 1, :, 1:] = sums + np.maximum.accumulate(entered - sums + scores, 1)
    starts = np.zeros((K, N), np.int64)
    for k in range(K):  # back from the last cell
        i = N
        j = M
        while i:
            starts[k, i - 1] = j - 1  # the last to be written is the first of the row
            steps = (i - 1, j - 1), (i - 1, j), (i, j - 1)
            i, j = max(steps, key=lambda cell: best[cell[0], k, cell[1]])
    return starts


# The texts of a file


def halves(texts: Sequence[Known]) -> tuple[list[Known], list[Known]]:
    """Texts to choose by, and as many or one fewer to judge on, drawn at random."""
    drawn = list(texts)
    random.Random(0).shuffle(drawn)
    middle = -(-len(drawn) // 2)
    return drawn[:middle], drawn[middle:]


def read_aligned(folder: Folder, path: Path) -> list[Known]:
    """The texts of a file for `align`; sounds lie beside it.

    Raises HeadwiseError with the number of the line that is not as it must be.
    """
    if folder.tokens is None:
        raise HeadwiseError(
            f"{folder.name} has no tokenizer, so its rows have no words"
        )
    texts = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            texts.append(_text(folder, folder.tokens, json.loads(line), path.parent))
        # A line may be no JSON, or have other types and indices than a text has.
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise HeadwiseError(f"line {number} of {path}: {error}") from None
    if not texts:
        raise HeadwiseError(
            f"{path} has no text; a line is {json.dumps({'audio': 'a.wav', 'words': [['the', 0.0]]})}"
        )
    return texts


def _text(
    folder: Folder, tokens: TextTokens, record: dict[str, Any], near: Path
) -> Known:
    """The text of a line; `near` is the folder of the file."""
    if "possible" in record:
        raise HeadwiseError(
            "possible links are not told from sure ones; leave them out, or name them in links"
        )
    if {"audio", "words"} <= record.keys():
        return _spoken(folder, tokens, record, near)
    if {"source", "target", "links"} <= record.keys():
        start = getattr(folder.model.config, "decoder_start_token_id", None)
        if start is None:
            raise HeadwiseError(
                f"{folder.name} ({folder.family}) has no decoder beside an encoder; pass a text with links"
            )
        # The decoder reads the target one token later: row i predicts its token i.
        inputs = {"decoder_input_ids": [int(start), *tokens.encode(record["target"])]}
        rows = _first_tokens(tokens, record["target"], 0)
        source = record["source"]
    elif {"text", "links"} <= record.keys():
        inputs = {}
        rows = None
        source = record["text"]
    else:
        raise HeadwiseError(
            f"it has {', '.join(record)}, and a text needs audio, words; source, target, links; text, links"
        )
    inputs["input_ids"] = list(tokens.prompt(source))
    # behind the tokens that begin any text
    keys = _first_tokens(tokens, source, len(tokens.frame[0]))
    rows = keys if rows is None else rows
    links = tuple((rows[i], keys[j]) for i, j in record["links"])
    return Linked({name: torch.tensor([ids]) for name, ids in inputs.items()}, links)


def _spoken(
    folder: Folder, tokens: TextTokens, record: dict[str, Any], near: Path
) -> Spoken:
    """A spoken text with its words, which stand behind the tokens that begin a transcript.

    A row is a token of the decoder's input, and predicts the one after it.
    """
    from headwise.models.hf import feature_extractor

    model: Any = folder.model
    options: Any = getattr(model, "generation_config", None)
    n_frames = getattr(model.config, "max_source_positions", None)
    if getattr(options, "no_timestamps_token_id", None) is None or n_frames is None:
        raise HeadwiseError(
            f"{folder.name} ({folder.family}) hears no speech as Whisper does; pass other texts"
        )
    path = near / record["audio"]
    samples = read_wav(path)
    extractor = feature_extractor(folder.path)
    seconds = float(extractor.chunk_length)  # what is shorter is filled with silence
    if len(samples) > seconds * RATE:  # the rest would be cut off without a word
        raise HeadwiseError(
            f"{path.name} has {len(samples) / RATE:.1f} s, and the model hears {seconds:g}"
        )
    # Without a rate the extractor warns. Its own is that of our samples: Whisper knows no other than 16,000.
    rate = extractor.sampling_rate
    sound = extractor(samples, sampling_rate=rate, return_tensors="pt")
    # A key of the encoder stands for several frames of what is heard, (1,M,F), M frequency bands.
    features = sound.input_features.to(model.dtype)
    seconds_per_key = seconds / n_frames
    # The first keys hold the sound, the last of them in part.
    n_keys = min(n_frames, math.ceil(len(samples) / round(seconds_per_key * RATE)))
    ids = [model.config.decoder_start_token_id]
    # then a transcript begins with its language and the task
    if getattr(options, "is_multilingual", False):
        language = record.get("language", "en")
        sign = options.lang_to_id.get(f"<|{language}|>")
        if sign is None:
            raise HeadwiseError(f"the model knows no language {language!r}")
        ids += [sign, options.task_to_id["transcribe"]]
    first = len(ids)  # the row that predicts the first token of the first word
    ids.append(options.no_timestamps_token_id)
    starts = []
    begins = []
    for word, time in record["words"]:
        # the last row so far predicts the word's first token
        starts.append(len(ids) - 1 - first)
        begins.append(float(time))
        ids += tokens.encode(f" {word}")
    rows = range(first, len(ids))  # the last one predicts the end
    inputs = {"input_features": features, "decoder_input_ids": torch.tensor([ids])}
    return Spoken(inputs, rows, starts, begins, seconds_per_key, n_keys)


def _first_tokens(tokens: TextTokens, text: str, before: int) -> Ids:
    """For each word between spaces the number of its first token, where `before` tokens stand before the text."""
    # the characters of each token, [start, end)
    places = list(enumerate(tokens.places(text), before))
    numbers = []
    for word in re.finditer(r"\S+", text):
        begin, stop = word.span()
        inside = [n for n, (start, end) in places if start < stop and end > begin]
        if not inside:
            raise HeadwiseError(f"the tokenizer has nothing for the word {word[0]!r}")
        numbers.append(inside[0])
    return numbers


def read_wav(path: Path) -> NDArray[np.float32]:
    """The samples of a WAV file (PCM of 16 bits), from -1 to 1, its channels averaged.

    Raises HeadwiseError for another file, or another rate than RATE.
    """
    try:
        with wave.open(str(path)) as file:
            channels, width, rate, n_frames, *_ = file.getparams()
            content = file.readframes(n_frames)
    except (OSError, EOFError, wave.Error) as error:
        raise HeadwiseError(
            f"{path} is no WAV file that can be read: {error}"
        ) from None
    if (width, rate) != (2, RATE):
        raise HeadwiseError(
            f"{path} has {rate:,} samples of {8 * width} bits a second; write it with {RATE:,} of 16 bits, such as by "
            f"ffmpeg -i {path.name} -ar {RATE} -c:a pcm_s16le 16k.wav"
        )
    # The channels of a sample lie side by side.
    samples = np.frombuffer(content, np.int16).reshape(-1, channels).mean(1)
    return (samples / 2**15).astype(np.float32)
