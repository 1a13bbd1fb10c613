"""What every head of a model does on many documents: means, intervals, controls, roles and effects.

Documents go through the model once. Of each the mean of a statistic over its rows goes into a running mean for each
head, so that many documents cost no more memory than one. Two controls go with every number: attention spread evenly
over what the mask allows, and the same model with untrained weights. Duplicate-token and induction heads are looked for
on random tokens that are repeated (Olsson et al. 2022, arXiv 2209.11895), where nothing but the repetition can be used.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.corpus.documents import (
    Relations,
    Text,
    batches,
    check_ids,
    read_documents,
    read_relations,
    text_of,
    verb_relations,
)
from headwise.corpus.tokens import Ids, TextTokens, require_tokens
from headwise.corpus.verbs import HALF_LINES
from headwise.errors import HeadwiseError
from headwise.families import require_run
from headwise.gpt.presets import check_seed
from headwise.gpt.run import held_out_documents, read_run
from headwise.gpt.train import one_thread
from headwise.heads.ablate import ablation, importance
from headwise.heads.blocks import (
    Measured,
    as_numpy,
    factors_of,
    measure,
    top_keys,
    uniform,
)
from headwise.heads.documents import Document, run_documents
from headwise.heads.relations import Scores, described, follow
from headwise.heads.statistics import all_statistics
from headwise.heads.table import (
    ROLES,
    TOKENS,
    Example,
    HeadProfile,
    Numbers,
    Role,
    Survey,
    relation_role,
)
from headwise.intervals import Interval, interval_from
from headwise.models import ask
from headwise.models.open import Folder, folder_of, open_model
from headwise.models.sites import Site, loaded, missing, sites_of
from headwise.records import Call, parse_head
from headwise.shapes import shape_of
from headwise.spec import resolve_kv_index
from headwise.words import Note

# ("passes", 3, 17): what is done, how much of it, of how much
Progress = Callable[[str, int, int], None]
# Round choices, all of them: larger ones take more time, or more room in the page; smaller ones make wider intervals.
HELD_OUT = 4096  # tokens of what a run held out
EFFECTS = 4096  # tokens that heads are ablated on, in whole documents; two of them at least, for an interval
CONTROLS = 32  # documents that the controls are measured on: they vary little
# texts of repeated random tokens, and the most tokens of one before it is repeated
PROBES = 4
PROBE = 64
# offsets that "positional" counts, up to 32 on either side; -1, 0 and 1 have statistics of their own
DISTANCES = torch.tensor([n for n in range(-32, 33) if abs(n) > 1])
# multiplications at most for the product of embeddings, so that all tokens of GPT-2 small count
PRODUCTS = 2**38
# tokens of the first document whose top keys are kept, and how many keys
PASSAGE = 128
TOP = 8
EXAMPLES = 5  # of each head
# A model of more parameters than the first gets an untrained control of so many layers: a whole one takes its memory
# a second time.
WHOLE = 200_000_000
SAMPLE = 2
ABLATE_UP_TO = 10_000_000  # parameters; a larger model is ablated when asked for: it takes a pass for each head
ABLATIONS = ("auto", "zero", "mean", "none")

Texts = str | Path | Sequence[str | Path] | Sequence[Sequence[int]]

Array = NDArray[np.float64]
NAMES = tuple(all_statistics())  # rows of a tally, in this order


def survey(
    model: nn.Module | str | Path,
    texts: Texts | Text | None = None,
    *,
    tokenizer: TextTokens | Any = None,
    controls: bool = True,
    ablate: str = "auto",
    tokens: int | None = None,
    documents: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    relations: Relations | str | Path | None = None,
) -> Survey:
    """Statistics, roles and effects of every head of a model: `survey["L3.H5"].entropy`.

    Args:
        model: a GPT of ours, a model of transformers that reads ids, or the folder of one
        texts: a text, a file, a folder of text files, a list of those, or a list of documents as ids; default:
            what the run held out that the model comes from
        tokenizer: of a model that was not read from a folder: one of ours, or one of transformers
        controls: also measure the same model with untrained weights
        ablate: "zero" or "mean" silences one head at a time and notes the change in loss; "none" leaves that out;
            "auto" is "zero" for models of up to 10 million parameters
        tokens: cut every text into documents of this many tokens; default: texts that are longer than the model
            takes are cut into documents of so many, and a note says so
        documents: stop after so many documents
        seed: of the untrained control and the repeated tokens
        progress: is called with what is being done, how much of it is done, and how much there is
        relations: what is known to belong together: the Path of a file that `read_relations` reads, "grammar" or
            "meaning" for sentences that come with headwise, or `Relations`, which also are a text; default: of
            the verb corpus

    Raises:
        HeadwiseError: when the model reads no tokens, its attention cannot be watched, or a text does not fit.
    """
    check_seed(seed)
    folder = folder_of(open_model(model), tokenizer)
    if ablate not in ABLATIONS:
        raise HeadwiseError(
            f"ablate {ablate!r} is not known; one of {', '.join(ABLATIONS)}"
        )
    if not ask.reads_tokens(folder.model):
        remedy = "watch it in Python on its own input, with headwise.watch(model)"
        raise HeadwiseError(f"{type(folder.model).__name__} reads no tokens; {remedy}")
    text = read_texts(folder, texts, tokens, documents, relations=relations)
    if ablate == "auto":
        ablate = "zero" if _size(folder.model) <= ABLATE_UP_TO else "none"
    step = progress or (lambda *counts: None)
    return _survey(folder, text, controls, ablate, seed, step)


def read_texts(
    folder: Folder,
    texts: Texts | Text | None,
    tokens: int | None = None,
    documents: int | None = None,
    relations: Relations | str | Path | None = None,
) -> Text:
    """The text of a survey, with its relations; the arguments are those of `survey`.

    Raises HeadwiseError where the arguments do not go together, or a text does not fit the model.
    """
    for name, value in (("tokens", tokens), ("documents", documents)):
        if value is not None and value < 1:
            raise HeadwiseError(f"{name} {value} must be at least 1")
    if isinstance(relations, str | Path):
        relations = read_relations(folder, relations)
    if texts is None and relations is not None:
        texts = [document.ids for document in relations.documents]
    sources: Any = [texts] if isinstance(texts, str | Path) else texts
    words = []
    if texts is not None and not isinstance(texts, Text):
        sources = list(sources)
        words = [str(each) for each in sources if isinstance(each, str | Path)]
    if tokens is not None and not words:
        raise HeadwiseError(
            f"tokens {tokens} cuts a text into documents; pass a text with it"
        )
    if isinstance(texts, Text):
        text = copy.copy(texts)  # the caller's keeps its relations
        text.documents = text.documents[:documents]
    elif texts is None:
        text = _held_out(folder, documents)
    elif words and len(words) < len(sources):
        raise HeadwiseError(
            f"{len(words)} of {len(sources)} documents are texts and the others ids; pass either"
        )
    elif words:
        text = read_documents(folder, words, tokens, documents)
    else:
        # numbers: the ids of a single document
        if len(sources) and shape_of(sources[0]) == ():
            sources = [sources]
        lists = [[int(i) for i in source] for source in sources[:documents]]
        for n, ids in enumerate(lists):
            check_ids(folder, f"document {n}", ids)
        text = text_of(folder, lists)
    text.relations = relations or text.relations
    return text


def _held_out(folder: Folder, documents: int | None) -> Text:
    """What the run that a model comes from held out; of a run of verbs with their relations."""
    origin = require_run(folder.path)
    record = read_run(origin)
    assert record is not None  # `require_run` has found it
    tokens = require_tokens(folder)
    ids = held_out_documents(origin, tokens, HELD_OUT)[:documents]
    text = text_of(folder, ids, [Note.of("source.held_out")])
    if record.example:
        before, after = tokens.frame
        text.example = [*before, *tokens.encode(record.example), *after]
    # the verb corpus, whose lines are like "he works = él trabaja"
    if not record.settings.text:
        text.note = HALF_LINES
        # the answer of a line stands behind it
        text.scored_after = tokens.encode("=")[0]
        text.end = tuple(tokens.frame[0])  # the boundary stands between lines
        # The line that the run's pages show comes first, for False is less than True: examples of relations are taken
        # from the first document. The others stay in their order.
        lines = sorted(map(tokens.decode, ids), key=lambda line: line != record.example)
        text.relations = verb_relations(tokens, lines)
    return text


# The documents, one after another.


class Running:
    """Mean and spread of arrays that come one after another, cell by cell, NaNs left out (Welford 1962)."""

    def __init__(self) -> None:
        # Of each cell: how many values, their mean, the sum of their squared distances from it. Until the first `add`
        # it is one 0, which broadcasts to any shape.
        self.n = self.mean = self.squares = np.zeros(())

    def add(self, values: Array) -> None:
        is_number = ~np.isnan(values)
        self.n = self.n + is_number
        off_old_mean = np.where(is_number, values - self.mean, 0.0)
        self.mean = self.mean + off_old_mean / np.maximum(self.n, 1)
        # times 0 where there is no number
        values = np.where(is_number, values, 0.0)
        self.squares = self.squares + off_old_mean * (values - self.mean)

    def interval(self, *cell: int) -> Interval:
        # `cell` is its index on each axis.
        return interval_from(
            int(self.n[cell]), float(self.mean[cell]), float(self.squares[cell])
        )


class OfSite:
    """What is summed up of the heads of one attention.

    means     (statistics, H+1) of each document; the last column is even attention, the control
    offsets   (H, offsets) of each document, as `_offset_shares` gives them; none in cross attention
    peaks     (H,) the largest scores of all documents
    examples  for each head -weight, document, row and key of the best ones: so they sort
    pictures  of the first document, (H,...)
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.means = Running()
        self.offsets = Running()
        self.peaks = np.full(site.n_heads, -math.inf)
        self.examples = [list[tuple[float, int, int, int]]() for _ in site.heads]
        self.pictures: dict[str, NDArray[Any]] = {}

    def add_examples(self, number: int, measured: Measured, start: int) -> None:
        """Of each head the row with the largest weight on another token than the first and itself."""
        rows = (measured.places + start).cpu()
        argmax = measured.argmax.cpu()
        is_trivial = (argmax == 0) | (argmax == rows)  # there most heads rest
        weights = measured.rows["confidence"].cpu().double()
        weights, at = weights.masked_fill(is_trivial, -1).max(1)
        of_heads = zip(
            self.examples, weights.tolist(), at.tolist(), argmax, strict=True
        )
        for examples, weight, place, keys in of_heads:
            if weight >= 0:
                best = -weight, number, int(rows[place]), int(keys[place])
                examples[:] = sorted([*examples, best])[:EXAMPLES]

    def scores(self, head: int) -> dict[str, Interval]:
        """Every score of a head with its interval over documents."""
        peak = float(self.peaks[head])
        scores = {}
        for i, name in enumerate(NAMES):
            if self.means.n[i, :-1].any():  # of any head
                scores[name] = self.means.interval(i, head)
            elif name == "score_peak" and peak > -math.inf:
                # One number, without an interval: it is of all documents.
                scores[name] = Interval(peak, peak, peak, 1)
        if self.offsets.n.any():
            best = int(self.offsets.mean[head].argmax())
            scores["positional"] = self.offsets.interval(head, best)
        return scores

    def even(self) -> Numbers:
        """The control: the same statistics of attention that is spread evenly."""
        n = self.means.n[:, -1]
        mean = self.means.mean[:, -1].tolist()
        even = {NAMES[i]: mean[i] for i in n.nonzero()[0]}
        # A key that is drawn evenly from n keys stands at a given offset with probability 1/n, its largest weight.
        if "confidence" in even:
            even["positional"] = even["confidence"]
        return even


class Tally:
    """What is summed up of the documents of a corpus, attention by attention.

    second_half  of random tokens that are repeated: the row from which on each has a copy before it
    n_even       documents on which even attention is measured, too: the control
    """

    def __init__(self, model: nn.Module, second_half: int, n_even: int) -> None:
        self.model = model
        self.second_half = second_half
        self.n_even = n_even
        self.sites: dict[str, OfSite] = {}
        # what calls say of their numbers, each once: a set that keeps its order
        self.notes: dict[str, None] = {}
        self.followed: Scores = {}  # relations
        self.evens: dict[object, Array] = {}  # what `_even` has measured

    def run(
        self,
        text: Text,
        documents: Sequence[Ids],
        probes: Sequence[Ids],
        progress: Sequence[Callable[[int, int], None]],
    ) -> list[HeadProfile]:
        """Read everything of the model: documents of the text, repeated tokens, and how heads follow relations.

        A profile of each head has what was measured: no roles yet, and no effects.
        """
        first, second, third = progress
        run_documents(self.model, documents, self.take, text.marks, first)
        repeated = partial(self.take, repeated=True)
        run_documents(self.model, probes, repeated, None, second)
        if text.relations is not None:
            self.followed = follow(self.model, text.relations, text.shown, third)
        return self._profiles(text)

    def take(
        self,
        number: int,
        site: Site,
        call: Call,
        b: int,
        document: Document,
        repeated: bool = False,
    ) -> None:
        """Tally document `number`, which is document b of a call.

        repeated  it has random tokens twice, so that only the repetition can be used. What is measured there goes by
                  another name, since texts have it, too: "after_same" is "induction" of a survey
        """
        of_site = self.sites.setdefault(site.name, OfSite(site))
        if call.note:
            self.notes.setdefault(call.note)
        if repeated:
            is_second = torch.arange(call.n_queries) >= self.second_half
            document = replace(document, real_rows=is_second)
        w_o = None if repeated else factors_of(site, call)
        measured = measure(call, b, document, w_o)
        means = _means(measured, repeated)
        even = np.full((len(NAMES), 1), math.nan)
        if number < self.n_even:
            even = self._even((number, repeated), site, call, b, document)
        of_site.means.add(np.hstack([means, even]))
        if repeated:
            return
        if "score_max" in measured.rows:
            largest = as_numpy(measured.rows["score_max"])
            of_site.peaks = np.fmax(
                of_site.peaks, np.fmax.reduce(largest, 1, initial=-math.inf)
            )
        if document.start is not None and len(measured.places):
            of_site.add_examples(number, measured, document.start)
            shares = _offset_shares(measured, document.start, call.n_keys)
            of_site.offsets.add(shares)
        if number == 0:
            # what is drawn of the heads, by the fields of `HeadProfile`
            keys, weights = top_keys(call, b, range(min(PASSAGE, call.n_queries)), TOP)
            # cut to as many keys as `keys` has queries
            received = measured.received[:, : keys.shape[1]]
            of_site.pictures = {
                "shares": as_numpy(measured.shares),
                "first_key": as_numpy(measured.first_key),
                "received": as_numpy(received / max(1, len(measured.places))),
                "top_weights": as_numpy(weights),
                "top_keys": keys.cpu().numpy(),
            }

    def _even(
        self, text: tuple[int, bool], site: Site, call: Call, b: int, document: Document
    ) -> Array:
        """The statistics of even attention on a document, (statistics, 1).

        They hang on the mask and the document alone, so they are measured once for all layers whose masks are the same
        band.

        text  the number of the document, and whether it has repeated tokens
        """
        T = call.n_queries
        S = call.n_keys
        mask = call.options.mask
        key = None
        band = (None, None) if mask is None else mask.band(T, S)
        # what another layer may attend is not known where the model makes its weights itself
        if band is not None and call.weights is None:
            stack, _, _ = parse_head(site.head(0))
            key = text, stack, T, S, band, document.start
        if key is None or key not in self.evens:
            self.evens[key] = _means(measure(uniform(call), b, document), text[1])
        return self.evens[key]

    def _profiles(self, text: Text) -> list[HeadProfile]:
        profiles = []
        vocabulary = vocabulary_product(self.model)
        for of_site in self.sites.values():
            copied = copying(of_site.site, vocabulary)
            for name in of_site.site.heads:
                place = parse_head(name)
                head = place[-1]
                scores = of_site.scores(head)
                if copied:
                    scores["copying"] = copied[head]
                even = of_site.even()
                relations = {}
                for relation, by_head in self.followed.items():
                    if name in by_head:  # cross attention follows none
                        score = relations[relation] = by_head[name]
                        scores[relation] = score.mass
                        even[relation] = score.even
                examples = []
                for minus, document, row, key in of_site.examples[head]:
                    ids = text.documents[document]
                    looks, at = text.shown([ids[row], ids[key]])
                    examples.append(Example(document, row, key, looks, at, -minus))
                profile = HeadProfile(
                    name,
                    *place,
                    scores,
                    uniform={key: even[key] for key in scores if key in even},
                    relations=relations,
                    examples=tuple(examples),
                    **{key: drawn[head] for key, drawn in of_site.pictures.items()},
                )
                profiles.append(profile)
        return profiles


def _means(measured: Measured, repeated: bool) -> Array:
    """The mean of each statistic over the rows, (statistics, H); NaN: not measured."""
    means = np.full((len(NAMES), len(measured.received)), math.nan)
    for n, item in enumerate(all_statistics().values()):
        rows = measured.rows.get(item.repeated if repeated else item.name)
        if rows is not None:
            means[n] = rows.cpu().double().nanmean(1)
    return means


def _offset_shares(measured: Measured, start: int, n_keys: int) -> Array:
    """For each of DISTANCES the share, of the rows that have a key there, that look hardest at it: (H, offsets).

    An offset that less than half of the rows have says too little, and counts as 0.
    """
    # (n,offsets) the key that each row has there
    keys = (measured.places.cpu() + start)[:, None] - DISTANCES
    able = ((keys >= 0) & (keys < n_keys)).sum(0)
    hits = (measured.argmax.cpu()[..., None] == keys).sum(1).double()
    return torch.where(2 * able >= len(keys), hits / able, 0).numpy()


# What is made of it.


def _survey(
    folder: Folder,
    text: Text,
    controls: bool,
    how: str,
    seed: int,
    progress: Progress,
) -> Survey:
    model = folder.model
    documents = text.documents
    relations = () if text.relations is None else described(text.relations)
    roles = (*map(relation_role, relations), *ROLES)
    probes, second_half = repeated_tokens(text, folder.context, seed)
    # 1. The model; and the same with fresh weights: statistic -> the largest score of any head.
    tally = Tally(model, second_half, CONTROLS)
    names = "running the model", "repeated tokens", "relations"
    stages = [partial(progress, name) for name in names]
    profiles = tally.run(text, documents, probes, stages)
    without = missing(model, sites_of(model))
    notes = [*text.about, *(f"{line}." for line in [*without, *tally.notes])]
    if not second_half:
        notes.append(Note.of("note.few_tokens"))
    if len(documents) == 1:
        notes.append(Note.of("note.one_document"))
    untrained: Numbers | None = None
    if controls:
        untrained = {}
        if is_sampled(model):
            notes.append(Note.of("note.sampled", layers=SAMPLE, most=f"{WHOLE:,}"))
        stages = 3 * [partial(progress, "untrained control")]
        control = Tally(fresh_model(model, seed), second_half, 0)
        for profile in control.run(text, documents[:CONTROLS], probes, stages):
            for key, mean in profile.means.items():
                untrained[key] = max(mean, untrained.get(key, -math.inf))

    # 2. What changes without a head, and the roles that each earns.
    loss, importances, changes = _effects(folder, text, how, progress, notes)
    for n, profile in enumerate(profiles):
        profiles[n] = replace(
            profile,
            importance=importances.get(profile.name),
            ablation=changes.get(profile.name),
            **_judged(profile, untrained or {}, roles),
        )
    # such as those whose part of W_O `headwise prune` has set to 0
    silent = [profile.name for profile in profiles if profile.means.get("norm") == 0]
    if silent:
        notes.append(Note.of("note.silent", heads=", ".join(silent)))
    if text.note and loss is not None:  # it is about the loss on this text
        notes.append(text.note)
    meanings = {key: item.meaning for key, item in all_statistics().items()}
    for relation in relations:
        meanings[relation.name] = f"mass on the right tokens: {relation.meaning}"
    measured = {key for profile in profiles for key in profile.scores}
    possible = set()
    for profile in profiles:
        # Even attention has 0 where a mask hides all keys of a role from all heads: nobody looked for that role.
        hidden = {key for key, mean in profile.uniform.items() if not mean > 0}
        possible |= profile.scores.keys() - hidden
    return Survey(
        model=folder.name,
        family=folder.family,
        texts=text.sources,
        n_documents=len(documents),
        n_tokens=sum(map(len, documents)),
        longest=max(map(len, documents)),
        statistics={
            key: meaning for key, meaning in meanings.items() if key in measured
        },
        roles=tuple(role for role in roles if role.score in possible),
        untrained=untrained,
        loss=loss,
        ablated=None if loss is None else how,
        tokens=text.shown(list(documents[0])[:TOKENS]),
        passage=min(PASSAGE, len(documents[0])),
        profiles=tuple(profiles),
        notes=tuple(notes),
        relations=relations,
    )


def _judged(
    profile: HeadProfile, untrained: Numbers, roles: Sequence[Role]
) -> dict[str, Any]:
    """What changes of a head by its controls: the roles that it earns, and its relations."""
    elsewhere = {}
    relations = {}
    for name, score in profile.relations.items():
        relations[name] = replace(score, untrained=untrained.get(name, math.nan))
        # Where no other token has a key at these distances there is no third control.
        if math.isfinite(score.elsewhere):
            elsewhere[name] = score.elsewhere
    controls = profile.uniform, untrained, elsewhere
    earned = [role.name for role in roles if role.earned(profile.scores, *controls)]
    return {"relations": relations, "roles": tuple(earned)}


def _effects(
    folder: Folder, text: Text, how: str, progress: Progress, notes: list[str]
) -> tuple[float | None, Numbers, dict[str, Interval]]:
    """The loss on the first documents, and by head its importance and what silencing it changes; `how` as `ablate`.

    A note says why, where there is no loss.
    """
    model = folder.model
    after = text.scored_after
    if ask.predicts(model) != "next":
        notes.append(Note.of("note.no_loss", kind=type(model).__name__))
        return None, {}, {}
    # documents that fit into EFFECTS tokens
    count = bisect_right(list(accumulate(map(len, text.documents))), EFFECTS)
    chosen = text.documents[: max(2, count)]
    # With the token that ends a line, where the text has one: a model of lines predicts it, too.
    groups = list(batches([*ids, *text.end][: folder.context] for ids in chosen))
    progress("importance", 0, 1)
    weight = importance(model, groups, after)
    progress("importance", 1, 1)
    if how == "none":
        return None, weight, {}
    with torch.no_grad(), ask.evaluating(model):
        losses = [ask.next_token_losses(model, ids, after) for ids in groups]
    stage = partial(progress, "ablation")
    changes = ablation(model, groups, how, stage, after, losses)
    return float(torch.cat(losses).mean()), weight, changes


def repeated_tokens(
    text: Text, context: int | None, seed: int
) -> tuple[list[list[int]], int]:
    """PROBES lists of random tokens of the text, no two alike, then the same again; and the row where that begins.

    No lists, and row 0, where the text or the model's context has too few tokens.
    """
    # the special tokens with which the model's tokenizer surrounds a text
    before, after = text.frame
    candidates = sorted(set(text.counts) - text.specials)
    # for each of the two halves
    room = PROBE if context is None else (context - len(before) - len(after)) // 2
    length = min(PROBE, room, len(candidates))
    # a repetition of so few tells nothing, as attention is on the copy by chance; a round choice
    if length < 4:
        return [], 0
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for _ in range(PROBES):
        places = torch.randperm(len(candidates), generator=generator)[:length]
        drawn = [candidates[place] for place in places]
        texts.append([*before, *drawn, *drawn, *after])
    return texts, len(before) + length


# What weights alone tell, and fresh ones.


@torch.no_grad()
def vocabulary_product(model: nn.Module) -> Tensor | None:
    """W_E' W_U (C,C), the sum over tokens of embedding times unembedding, in float32; `copying` needs it.

    Of at most PRODUCTS / C^2 tokens, spread evenly over the vocabulary. None where the model has no two such matrices
    of one shape (V,C).
    """
    pair = ask.embeddings(model)
    if pair is None or pair[0].shape != pair[1].shape:
        return None
    V, C = pair[0].shape
    step = math.ceil(V * C * C / PRODUCTS)  # every step-th token
    embed = pair[0][::step].float()
    return embed.T @ pair[1][::step].to(embed)


@torch.no_grad()
def copying(site: Site, vocabulary: Tensor | None) -> list[Interval]:
    """For each head the sum of the eigenvalues of W_U W_O W_V W_E over the sum of their moduli, -1 to 1.

    Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", section on copying: 1 raises the logit of
    every token that the head looks at. The product is V x V. With its first factors moved to the end, W_V W_E W_U W_O,
    it is E x E and has the same non-zero eigenvalues; W_E W_U is `vocabulary`, of `vocabulary_product`. Norms between
    the matrices are left out. No document has a part in it, so each bound is the number. Empty where heads write no
    logits, or no matrices of whole heads are known.
    """
    with loaded(*filter(None, [site.module, site.projection])):
        w_o = site.w_o
        w_v = site.weights("v")
        H = site.n_heads
    # beside a decoder
    writes_logits = not site.cross and not site.name.startswith("encoder.")
    if vocabulary is None or w_o is None or w_v is None or not writes_logits:
        return []
    C = len(vocabulary)
    E = w_o.shape[1] // H
    G = len(w_v) // E
    if w_o.shape != (C, H * E) or w_v.shape != (G * E, C) or H % G:
        return []
    # layers of ours may share key/value heads in any way
    kv_index = getattr(getattr(site.module, "spec", None), "kv_index", None)
    index = list(resolve_kv_index(H, G, kv_index))
    read = (w_v.to(vocabulary) @ vocabulary).reshape(G, E, C)[index]
    through = read @ w_o.to(vocabulary).reshape(C, H, E).transpose(0, 1)  # (H,E,E)
    # in matrices as small as these threads wait for each other: two take ten times as long
    with one_thread():
        values = torch.linalg.eigvals(through)
    # 0 / 0 is that of a silent head: 0
    ratios = (values.sum(-1).real / values.abs().sum(-1)).nan_to_num()
    return [Interval(ratio, ratio, ratio, 1) for ratio in ratios.tolist()]


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def is_sampled(model: nn.Module) -> bool:
    """Are a few untrained layers the control of this model, for the sake of memory?

    Only models of transformers, whose configs have `num_hidden_layers`, can be built with fewer layers.
    """
    config = getattr(model, "config", None)
    return _size(model) > WHOLE and hasattr(config, "num_hidden_layers")


def fresh_model(model: Any, seed: int) -> nn.Module:
    """The same architecture with newly drawn weights; torch's own random state is left as it was.

    A model of over WHOLE parameters has SAMPLE layers.
    """
    # without devices it keeps the state of the CPU's generator alone
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if ask.is_own(model):  # how it is built is not known
            drawn = copy.deepcopy(model)
            ask.stands_for(drawn, model)
            for module in drawn.modules():
                getattr(module, "reset_parameters", int)()
        elif is_sampled(model):
            config = copy.deepcopy(model.config)
            config.num_hidden_layers = SAMPLE
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:SAMPLE]
            drawn = type(model)._from_config(config, dtype=model.dtype)
            drawn.to(ask.device_of(model))
        else:
            drawn = type(model)(model.config).to(next(model.parameters()))
    return drawn.eval()
