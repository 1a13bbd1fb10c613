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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.corpus.documents import Relations, Text, batches
from headwise.corpus.tokens import Ids, TextTokens
from headwise.errors import HeadwiseError
from headwise.gpt.presets import check_seed
from headwise.heads.ablate import ablation, importance
from headwise.heads.documents import run_documents
from headwise.heads.relations import Scores, follow
from headwise.heads.relations import described as described_relations
from headwise.heads.statistics import all_statistics
from headwise.heads.table import (
    ROLES,
    TOKENS,
    Example,
    Followed,
    HeadProfile,
    Role,
    Survey,
    relation_role,
)
from headwise.heads.tally import CONTROLS, PASSAGE, Tally, read, vocabulary_product
from headwise.heads.texts import Texts, read_texts
from headwise.intervals import Interval
from headwise.models import ask
from headwise.models.open import Folder, folder_of, open_model
from headwise.models.sites import loaded, missing, sites_of
from headwise.models.weights import blocks, has_record
from headwise.records import parse_head
from headwise.words import Note

# Round choices, all of them. Of the first two larger ones take more time, and smaller ones make wider intervals.
# tokens that heads are ablated on, in whole documents; two of them at least, for an interval
EFFECTS = 4096
# texts of repeated random tokens, and the most tokens of one before it is repeated
PROBES, PROBE = 4, 64
# A model of more parameters than the first gets an untrained control of so many layers: a whole one takes its memory
# a second time.
WHOLE, SAMPLE = 200_000_000, 2
# parameters; a larger model is ablated when asked for: it takes a pass for each head
ABLATE_UP_TO = 10_000_000
# Of the loss of an even guess over the vocabulary. A note says of a loss above it that it is no better than the guess.
GUESS = 0.98
ABLATIONS = ("auto", "zero", "mean", "none")

Progress = Callable[[str, int, int], None]  # what is being done, done so far, in all


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
    distributed: bool = False,
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
        distributed: each rank of torch.distributed reads a part of the documents; all must call, with the same
            model and texts, and all get the same survey

    Raises:
        HeadwiseError: when the model reads no tokens, its attention cannot be watched, or a text does not fit.
    """
    check_seed(seed)
    folder = folder_of(open_model(model), tokenizer)
    if ablate not in ABLATIONS:
        raise HeadwiseError(f"ablate {ablate!r} is not known; one of {', '.join(ABLATIONS)}")
    if spread := next((site.name for site in sites_of(folder.model) if site.parts > 1), None):
        raise HeadwiseError(
            f"{spread}: this process holds a part of the heads; watch them in each with headwise.watch"
        )
    if not ask.reads_tokens(folder.model):
        remedy = "watch it in Python on its own input, with headwise.watch(model)"
        raise HeadwiseError(f"{type(folder.model).__name__} reads no tokens; {remedy}")
    text = read_texts(folder, texts, tokens, documents, relations=relations)
    if ablate == "auto":
        size = sum(parameter.numel() for parameter in folder.model.parameters())
        ablate = "zero" if size <= ABLATE_UP_TO else "none"
    return _survey(
        folder, text, controls, ablate, seed, progress or (lambda *counts: None), distributed
    )


def _survey(
    folder: Folder,
    text: Text,
    controls: bool,
    how: str,
    seed: int,
    progress: Progress,
    distributed: bool,
) -> Survey:
    model, documents = folder.model, text.documents
    relations = () if text.relations is None else described_relations(text.relations)
    roles = (*map(relation_role, relations), *ROLES)

    # 1. The documents, and random tokens that are repeated.
    probes, second_half = repeated_tokens(text, folder.context, seed)
    vocabulary = vocabulary_product(model)
    tally = Tally(model, CONTROLS, second_half, True, vocabulary)
    tally = read(tally, documents, text.marks, partial(progress, "running the model"), distributed)
    run_documents(model, probes, tally.take_repeated, None, partial(progress, "repeated tokens"))
    notes = [*text.about, *(f"{line}." for line in [*missing(model), *tally.notes])]
    # MLA: values come out of a latent, so no matrix of the head's own tells what it copies. Without W_O, as where heads
    # are spread over processes, or without embeddings no head has it, and there is nothing to say.
    latent = [
        site.name for site in tally.sites.values() if site.w_v is None and site.w_o is not None
    ]
    if latent and ask.embeddings(model) is not None:
        notes.append(Note.of("note.compressed", sites=", ".join(latent)))
    if not probes:
        notes.append(Note.of("note.few_tokens"))
    if len(documents) == 1:
        notes.append(Note.of("note.one_document"))

    # 2. What needs further passes: relations, the untrained control, effects.
    followed = _follow(model, text, partial(progress, "relations"))
    untrained = None
    # the record of a family says where its layers lie
    if controls and is_sampled(model) and not has_record(model):
        notes.append(Note.of("note.no_record", most=f"{WHOLE:,}", family=folder.family))
    elif controls:
        if is_sampled(model):
            notes.append(Note.of("note.sampled", layers=SAMPLE, most=f"{WHOLE:,}"))
        untrained = _untrained(model, text, probes, second_half, vocabulary, seed, progress)
    loss, weight, changes = _effects(folder, text, how, progress, notes)

    # 3. A profile of each head, with the roles that it earns.
    profiles = []
    for site in tally.sites.values():
        even = tally.even(site)
        for name, scores in zip(site.heads, tally.scores(site), strict=True):
            related = {
                relation: by_head[name] for relation, by_head in followed.items() if name in by_head
            }
            effects = {"importance": weight.get(name), "ablation": changes.get(name)}
            pictures = {
                key: of_site[parse_head(name)[2]].numpy()
                for key, of_site in tally.first[site.name].items()
            }
            examples = []
            for minus, document, row, key in tally.examples[name]:
                looks, at = text.shown([documents[document][place] for place in (row, key)])
                examples.append(Example(document, row, key, looks, at, -minus))
            more = {**effects, **pictures, "examples": tuple(examples)}
            profiles.append(_profile(name, scores, even, untrained or {}, related, roles, more))
    # Such as heads whose part of W_O `headwise prune` has set to 0: they add nothing to the residual stream.
    silent = [profile.name for profile in profiles if profile.means.get("norm") == 0]
    if silent:
        notes.append(Note.of("note.silent", heads=", ".join(silent)))
    if text.note and loss is not None:  # it is about the loss on this text
        notes.append(text.note)
    present: set[str] = set().union(*(profile.scores for profile in profiles))
    # A mask may hide all keys of a role from all heads: even attention has 0 there. Then the role is left out of those
    # that were looked for, and no reader takes it for missing. A statistic without a control counts as 1.
    possible = {
        key for key in present if any(profile.uniform.get(key, 1.0) > 0 for profile in profiles)
    }
    statistics = {key: item.meaning for key, item in all_statistics().items() if key in present}
    statistics |= {
        relation.name: f"mass on the right tokens: {relation.meaning}" for relation in relations
    }
    return Survey(
        model=folder.name,
        family=folder.family,
        texts=text.sources,
        n_documents=len(documents),
        n_tokens=sum(map(len, documents)),
        longest=max(map(len, documents)),
        statistics=statistics,
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


def _untrained(
    model: nn.Module,
    text: Text,
    probes: Sequence[Ids],
    second_half: int,
    vocabulary: Tensor | None,
    seed: int,
    progress: Progress,
) -> dict[str, float]:
    """Statistic -> the largest score of any head of the same model with fresh weights.

    vocabulary  `vocabulary_product` of the model, for a sample, which has the model's own embeddings
    """
    fresh, step = fresh_model(model, seed), partial(progress, "untrained control")
    # On 0 documents even attention is measured: that of the model itself is the same.
    tally = Tally(
        fresh,
        0,
        second_half,
        vocabulary=vocabulary if is_sampled(model) else vocabulary_product(fresh),
    )
    read(tally, text.documents[:CONTROLS], text.marks, step)
    run_documents(fresh, probes, tally.take_repeated, None, step)
    largest: dict[str, float] = {}
    for site in tally.sites.values():
        for scores in tally.scores(site):
            for key, score in scores.items():
                largest[key] = max(score.mean, largest.get(key, -math.inf))
    for relation, by_head in _follow(fresh, text, step).items():
        largest[relation] = max(score.mass.mean for score in by_head.values())
    return largest


def _follow(model: nn.Module, text: Text, progress: Callable[[int, int], None]) -> Scores:
    """How the heads follow what is known to belong together: relation -> head -> scores; {} where none is known."""
    return {} if text.relations is None else follow(model, text.relations, text.shown, progress)


def _effects(
    folder: Folder, text: Text, how: str, progress: Progress, notes: list[str]
) -> tuple[float | None, Mapping[str, float], Mapping[str, Interval]]:
    """The loss on the first documents, and by head its importance and what silencing it changes; `how` as `ablate`.

    A note says why, where there is no loss.
    """
    model, after, size = folder.model, text.scored_after, folder.vocab_size
    if ask.predicts(model) != "next":
        notes.append(Note.of("note.no_loss", kind=type(model).__name__))
        return None, {}, {}
    # documents that fit into EFFECTS tokens
    count = bisect_right(list(accumulate(map(len, text.documents))), EFFECTS)
    # With the token that ends a line, where the text has one: a model of lines predicts it, too.
    ended = [[*ids, *text.end] for ids in text.documents[: max(2, count)]]
    groups = list(batches([ids[: folder.context] for ids in ended]))
    progress("importance", 0, 1)
    weight = importance(model, groups, after)
    progress("importance", 1, 1)
    if how == "none":
        return None, weight, {}
    with torch.no_grad(), ask.evaluating(model):
        losses = [ask.next_token_losses(model, ids, after) for ids in groups]
    loss = float(torch.cat(losses).mean())  # the mean over documents
    if size is not None and loss > GUESS * math.log(size):  # log V is the loss of an even guess
        notes.append(
            Note.of(
                "note.guess", loss=f"{loss:.2f}", size=f"{size:,}", guess=f"{math.log(size):.2f}"
            )
        )
    return loss, weight, ablation(model, groups, how, partial(progress, "ablation"), after, losses)


def _profile(
    name: str,
    scores: dict[str, Interval],
    even: Mapping[str, float],
    untrained: Mapping[str, float],
    related: Mapping[str, Followed],
    roles: Sequence[Role],
    more: Mapping[str, Any],
) -> HeadProfile:
    """The row of a head: its numbers, what they are held against, and the roles that it earns by that.

    related  relation -> how the head follows it
    more   the other fields of the profile
    """
    relations = {
        key: replace(score, untrained=untrained.get(key, math.nan))
        for key, score in related.items()
    }
    scores = scores | {key: score.mass for key, score in relations.items()}
    even = {**even, **{key: score.even for key, score in relations.items()}}
    # Where no other token has a key at these distances there is no third control.
    elsewhere = {
        key: score.elsewhere for key, score in relations.items() if math.isfinite(score.elsewhere)
    }
    part, layer, head = parse_head(name)
    return HeadProfile(
        name=name,
        part=part,
        layer=layer,
        head=head,
        scores=scores,
        uniform={key: even[key] for key in scores if key in even},
        roles=tuple(role.name for role in roles if role.earned(scores, even, untrained, elsewhere)),
        relations=relations,
        **more,
    )


def repeated_tokens(text: Text, context: int | None, seed: int) -> tuple[list[list[int]], int]:
    """PROBES lists of random tokens of the text, no two alike, then the same again; and the row where that begins.

    None, and row 0, where the text or the model's context has too few tokens.
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
        drawn = [
            candidates[i] for i in torch.randperm(len(candidates), generator=generator)[:length]
        ]
        texts.append([*before, *drawn, *drawn, *after])
    return texts, len(before) + length


def is_sampled(model: nn.Module) -> bool:
    """Are a few untrained layers the control of this model, for the sake of memory?

    Only models of transformers, whose configs have `num_hidden_layers`, can be built with fewer layers.
    """
    size = sum(parameter.numel() for parameter in model.parameters())
    return size > WHOLE and hasattr(getattr(model, "config", None), "num_hidden_layers")


def fresh_model(model: nn.Module, seed: int) -> nn.Module:
    """The same architecture with newly drawn weights; torch's own random state is left as it was.

    A model of over WHOLE parameters has SAMPLE layers drawn, one at a time, between its own embeddings and head.
    """
    if is_sampled(model):
        return _shallow(model, seed)
    # without devices it keeps the state of the CPU's generator alone
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        build: Any = type(model)
        fresh: nn.Module = build(model.config)
    return fresh.to(next(model.parameters())).eval()


def _shallow(model: Any, seed: int) -> nn.Module:
    """The first SAMPLE layers untrained, between the model's own embeddings and output matrix."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = SAMPLE
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:SAMPLE]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        fresh: nn.Module = type(model)._from_config(config, dtype=model.dtype)
    inside = {part for block in blocks(fresh) for part in block.modules()}
    for path, module in model.named_modules(remove_duplicate=False):
        with suppress(AttributeError), loaded(module):  # it has layers that the control has not
            part = fresh.get_submodule(path)
            if part not in inside:
                for name, weights in module.named_parameters(recurse=False):
                    setattr(part, name, nn.Parameter(weights.detach(), requires_grad=False))
    return fresh.to(ask.device_of(model)).eval()
