"""What every head of a model does on many documents: means, intervals, controls, roles and effects.

Documents go through the model once; of each, one mean a head and statistic is kept, so that many documents cost no more
memory than one. Two controls go with every number: attention spread evenly over what the mask allows, and the same
model with untrained weights. Duplicate-token and induction heads are looked for on random tokens that are repeated
(Olsson et al. 2022, arXiv 2209.11895), where nothing but the repetition can be used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from headwise.errors import HeadwiseError
from headwise.heads.effect import ablation, importance
from headwise.heads.profiles import ROLES, HeadProfile, Survey
from headwise.heads.seen import as_numpy
from headwise.heads.statistics import all_statistics
from headwise.heads.tally import CONTROLS, PASSAGE, Tally, batches, collect
from headwise.heads.texts import Text, Texts, read_texts
from headwise.intervals import Interval
from headwise.models.ask import context_of, has_loss, next_token_losses, reads_tokens, vocabulary_of
from headwise.models.open import Folder, TextTokens, described, open_model
from headwise.models.sites import Site
from headwise.records import parse_head

EFFECTS = 4096  # tokens that heads are ablated on, in whole documents, two at least
TOKENS = 1024  # of the first document that are kept as text
PROBES, PROBE = 4, 64  # random sequences, and the most tokens of one before it is repeated
ABLATE_UP_TO = 10_000_000  # parameters; a larger model is ablated when asked for: it takes a pass for each head
ABLATIONS = ("auto", "zero", "mean", "none")

Progress = Callable[[str, int, int], None]  # what is being done, done so far, in all


def survey(
    model: nn.Module | str | Path,
    texts: Texts | Text | None = None,
    *,
    tokenizer: TextTokens | Any = None,
    controls: bool = True,
    ablate: Literal["auto", "zero", "mean", "none"] | str = "auto",
    tokens: int | None = None,
    documents: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Survey:
    """Statistics, roles and effects of every head of a model: `survey["L3.H5"].entropy`.

    model      a GPT of ours, a model of transformers that reads ids, or the folder of one
    texts      a text, a file, a folder of text files, a list of those, or a list of documents as ids; default: what
               the run held out that the model comes from
    tokenizer  of a model that was not read from a folder: one of ours, or one of transformers
    controls   also measure the same model with untrained weights
    ablate     "zero" or "mean" silences one head at a time and notes the change in loss; "none" leaves that out;
               "auto" is "zero" for models of up to 10 million parameters
    tokens     cut every text into documents of this many tokens
    documents  stop after this many documents
    seed       of the untrained control and the repeated tokens
    progress   is called with what is being done, how much of it is done, and how much there is

    Raises HeadwiseError when the model reads no tokens, its attention cannot be watched, or a text does not fit.
    """
    if ablate not in ABLATIONS:
        raise HeadwiseError(f"ablate {ablate!r} is not known; one of {', '.join(ABLATIONS)}")
    folder = _folder(open_model(model), tokenizer)
    if not reads_tokens(folder.model):
        raise HeadwiseError(
            f"{type(folder.model).__name__} reads no tokens; watch it in Python on its own input, with "
            f"headwise.watch(model)"
        )
    text = texts if isinstance(texts, Text) else read_texts(folder, texts, tokens, documents)
    if ablate == "auto":
        size = sum(parameter.numel() for parameter in folder.model.parameters())
        ablate = "zero" if size <= ABLATE_UP_TO else "none"
    return _Study(folder, text, seed, progress or (lambda stage, done, total: None)).survey(controls, ablate)


def _folder(model: nn.Module, tokenizer: Any) -> Folder:
    """What is known of a model; one that was made in memory has the name of its class."""
    family = getattr(getattr(model, "config", None), "model_type", "headwise")
    made = Folder(Path(type(model).__name__), model, None, context_of(model), family, vocabulary_of(model))
    folder = described(model) or made
    if tokenizer is None:
        return folder
    if not hasattr(tokenizer, "shown"):
        from headwise.models.hf import FolderTokens

        tokenizer = FolderTokens(tokenizer)
    return replace(folder, tokens=tokenizer)


@dataclass
class _Effects:
    importance: Mapping[str, float]
    ablation: Mapping[str, Interval]
    loss: float | None
    ablated: str | None


class _Study:
    """One survey on its way."""

    def __init__(self, folder: Folder, text: Text, seed: int, progress: Progress) -> None:
        self.folder, self.model, self.text, self.seed, self.progress = folder, folder.model, text, seed, progress
        self.probes = _probes(text, folder.context, seed)
        self.notes: list[str] = []

    def survey(self, controls: bool, ablate: str) -> Survey:
        tally = self._tally(self.model, self.text.documents, "reading", "repeated tokens")
        if not self.probes:
            self.notes.append("The text has too few different tokens for a sequence of them to be repeated, so "
                              "duplicate-token and induction heads were not looked for.")  # fmt: skip
        if len(self.text.documents) == 1:
            self.notes.append("One document gives no interval, so no role that a text decides is awarded; pass more "
                              "text, or cut it into documents with --tokens.")  # fmt: skip
        untrained = self._untrained() if controls else None
        effects = self._effects(ablate)
        profiles = tuple(
            _profile(site, h, tally, untrained, effects) for site in tally.sites for h in range(site.n_heads)
        )
        silent = [profile.name for profile in profiles if _adds_nothing(profile.scores)]
        if silent:
            self.notes.append(f"Silent heads, whose output is zero whatever they look at: {', '.join(silent)}.")
        if self.text.note and effects.loss is not None:
            self.notes.append(self.text.note)
        return self._record(profiles, untrained, effects)

    def _record(
        self, profiles: tuple[HeadProfile, ...], untrained: dict[str, float] | None, effects: _Effects
    ) -> Survey:
        documents = self.text.documents
        first = list(documents[0])
        present = {key for profile in profiles for key in profile.scores}
        return Survey(
            model=self.folder.name,
            family=self.folder.family,
            texts=self.text.sources,
            n_documents=len(documents),
            n_tokens=sum(map(len, documents)),
            longest=max(map(len, documents)),
            statistics={key: item.meaning for key, item in all_statistics().items() if key in present},
            roles=tuple(role for role in ROLES if role.score in present and _possible(role.score, profiles)),
            untrained=untrained,
            loss=effects.loss,
            ablated=effects.ablated,
            tokens=self.text.shown(first[:TOKENS]),
            passage=min(PASSAGE, len(first)),
            profiles=profiles,
            notes=tuple(self.notes),
        )

    def _tally(
        self, model: nn.Module, documents: Sequence[Sequence[int]], stage: str, probe_stage: str, control: bool = False
    ) -> Tally:
        """What the heads do on the documents, on the repeated tokens, and by their weights."""
        tally = Tally(self.text, uniform_on=0, keep=False) if control else Tally(self.text)
        collect(model, documents, tally, lambda done, total: self.progress(stage, done, total))
        tally.probe.probe_from = _second_half(self.probes, self.text)
        collect(model, self.probes, tally.probe, lambda done, total: self.progress(probe_stage, done, total))
        tally.read_weights(model)
        return tally

    def _untrained(self) -> dict[str, float]:
        """The largest score that any head reaches in the same model with fresh weights."""
        stage = "untrained control"
        fresh = fresh_model(self.model, self.seed)
        tally = self._tally(fresh, self.text.documents[:CONTROLS], stage, stage, control=True)
        heads = [tally.of_head(site, h) for site in tally.sites for h in range(site.n_heads)]
        largest: dict[str, float] = {}
        for key in all_statistics():
            means = [scores[key].mean for scores in heads if key in scores]
            if means:
                largest[key] = max(means)
        return largest

    def _effects(self, how: str) -> _Effects:
        """Importance and the change in loss, on the first documents."""
        if not has_loss(self.model):
            self.notes.append(f"{type(self.model).__name__} does not predict the next token, so there is no loss "
                              "whose change could tell what a head is worth: importance and ablation are left "
                              "out.")  # fmt: skip
            return _Effects({}, {}, None, None)
        documents = self.text.documents
        ends = np.cumsum([len(document) for document in documents])
        groups = list(batches(documents[: max(2, int(np.searchsorted(ends, EFFECTS, side="right")))]))
        self.progress("importance", 0, 1)
        important = importance(self.model, groups)
        self.progress("importance", 1, 1)
        if how == "none":
            return _Effects(important, {}, None, None)
        with torch.no_grad():
            losses = torch.cat([next_token_losses(self.model, ids) for ids in groups])
        changes = ablation(self.model, groups, how, progress=lambda done, total: self.progress("ablation", done, total))
        return _Effects(important, changes, float(losses.mean()), how)


def _possible(score: str, profiles: Sequence[HeadProfile]) -> bool:
    """Could any head have this score? Not if the mask hides all of those keys from all of them."""
    return any(profile.uniform.get(score, 1.0) > 0 for profile in profiles)


def _probes(text: Text, context: int | None, seed: int) -> list[list[int]]:
    """Random tokens of the text, no two alike, then the same again."""
    before, after = text.frame
    known = sorted(set(text.counts) - text.specials)
    room = PROBE if context is None else (context - len(before) - len(after)) // 2
    length = min(PROBE, room, len(known))
    if length < 4:
        return []
    generator = torch.Generator().manual_seed(seed)
    drawn = [[known[i] for i in torch.randperm(len(known), generator=generator)[:length]] for _ in range(PROBES)]
    return [[*before, *tokens, *tokens, *after] for tokens in drawn]


def _second_half(probes: Sequence[Sequence[int]], text: Text) -> int:
    """The row from which on every token of a probe has been seen before."""
    before, after = text.frame
    return len(before) + (len(probes[0]) - len(before) - len(after)) // 2 if probes else 0


def fresh_model(model: nn.Module, seed: int) -> nn.Module:
    """The same architecture with newly drawn weights; torch's own random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config: Any = model.config
        build: Any = type(model)
        fresh: nn.Module = build(config)
    return fresh.to(next(model.parameters()).dtype).eval()


def _profile(site: Site, h: int, tally: Tally, untrained: Mapping[str, float] | None, effects: _Effects) -> HeadProfile:
    name = site.head(h)
    scores, even = tally.of_head(site, h), tally.even(site)
    measured, keys, weights = tally.first[site.name]
    n = keys.shape[1]
    part, layer, _ = parse_head(name)
    return HeadProfile(
        name=name,
        part=part,
        layer=layer,
        head=h,
        scores=scores,
        uniform={key: even[key] for key in scores if key in even},
        roles=tuple(role.name for role in ROLES if role.earned(scores, even, untrained or {})),
        importance=effects.importance.get(name),
        ablation=effects.ablation.get(name),
        thumbnail=as_numpy(measured.thumbnail[h]),
        first_key=as_numpy(measured.first_key[h]),
        received=as_numpy(measured.received[h, :n] / max(1, len(measured.places))),
        top_keys=keys[h].cpu().numpy(),
        top_weights=as_numpy(weights[h]),
    )


def _adds_nothing(scores: Mapping[str, Interval]) -> bool:
    """Is the head silent, as one is that `headwise prune` has zeroed?"""
    return "norm" in scores and scores["norm"].mean == 0
