"""What every head of a model does on many documents: means, intervals, controls, roles and effects.

Documents go through the model once; of each, one mean a head and statistic is kept, so that many documents cost no more
memory than one. Two controls go with every number: attention spread evenly over what the mask allows, and the same
model with untrained weights. Duplicate-token and induction heads are looked for on random tokens that are repeated
(Olsson et al. 2022, arXiv 2209.11895), where nothing but the repetition can be used.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads.copying import copying
from headwise.heads.documents import Document
from headwise.heads.effect import ablation, importance
from headwise.heads.hooks import listening
from headwise.heads.measure import Measured, measure, top_keys, uniform
from headwise.heads.profiles import HeadProfile, Survey
from headwise.heads.roles import ROLES, roles_of
from headwise.heads.statistics import all_statistics
from headwise.heads.watch import Factors
from headwise.intervals import Interval, interval_of
from headwise.models.ask import evaluating, has_loss, next_token_losses, reads_tokens, run_body
from headwise.models.sites import Site
from headwise.records import Call

REACH = 32  # offsets that are counted for "positional"
CONTROLS = 32  # documents that the controls are measured on: they vary little
EFFECTS = 4096  # tokens that heads are ablated on, in whole documents, two at least
PASSAGE, TOP, TOKENS = 128, 8, 1024  # of the first document: tokens whose top keys are kept, keys, tokens shown
PROBES, PROBE = 4, 64  # random sequences, and the most tokens of one before it is repeated
BATCH = 4096  # tokens of documents that run together

Progress = Callable[[str, int, int], None]  # what is being done, done so far, in all


@dataclass
class Text:
    """Documents as ids, and what is known about their tokens."""

    documents: Sequence[Sequence[int]]
    shown: Callable[[Sequence[int]], tuple[str, ...]]  # ids as a reader should see them
    specials: frozenset[int] = frozenset()  # ids that stand for no text
    frame: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.documents = [list(document) for document in self.documents if len(document) > 1]
        if not self.documents:
            raise HeadwiseError("the text has no document of two tokens or more; pass a longer one with --text")
        self.counts = Counter(itertools.chain.from_iterable(self.documents))
        ids = sorted(self.counts)
        texts = dict(zip(ids, self.shown(ids), strict=True))
        self.delimiters = torch.tensor(
            sorted(self.specials | {i for i in ids if not any(c.isalnum() for c in texts[i])}), dtype=torch.long
        )

    def marks(self, ids: Tensor) -> dict[str, Tensor]:
        """The delimiters and the rare tokens among the keys (S,) of a document."""
        ids = ids.cpu()
        delimiter = torch.isin(ids, self.delimiters)
        delimiter[:1] = False  # it is the resting place of heads that look at nothing; "first" counts it
        often = torch.tensor([self.counts[i] for i in ids.tolist()])
        plain = torch.tensor([i not in self.specials for i in ids.tolist()])
        limit = often[plain].float().quantile(0.1) if plain.any() else torch.tensor(0.0)
        return {"delimiter": delimiter, "rare": plain & (often <= limit)}


def survey(
    model: nn.Module,
    text: Text,
    name: str,
    family: str = "headwise",
    *,
    context: int | None = None,
    controls: bool = True,
    ablate: str | None = "zero",
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> Survey:
    """Statistics, roles and effects of every head of `model`, a GPT of ours or a transformers model that reads ids.

    context   most tokens of a document, for the probe of repeated tokens; None where the model sets no bound
    controls  also measure the same model with untrained weights
    ablate    "zero" or "mean" silences one head at a time and notes the change in loss; None leaves that out

    Raises HeadwiseError when the model reads no tokens, or its attention cannot be watched.
    """
    _require_reader(model)
    tally = _Tally(text)
    _collect(model, text.documents, tally, lambda done, total: progress("reading", done, total))
    probes = _probes(text, context, seed)
    tally.probe.probe_from = _second_half(probes, text)
    _collect(model, probes, tally.probe, lambda done, total: progress("repeated tokens", done, total))
    untrained, notes = None, []
    if not probes:
        notes.append("The text has too few different tokens for a sequence of them to be repeated, so duplicate-token "
                     "and induction heads were not looked for.")  # fmt: skip
    if len(text.documents) == 1:
        notes.append("One document gives no interval, so no role that a text decides is awarded; pass more text, or "
                     "cut it into documents with --tokens.")  # fmt: skip
    if controls:
        untrained = _untrained(model, text, probes, seed, progress)
    effects = _effects(model, text, ablate, progress, notes)
    tally.read_weights(model)
    profiles = tuple(_profile(site, h, tally, untrained, effects) for site in tally.sites for h in range(site.n_heads))
    silent = [profile.name for profile in profiles if _adds_nothing(profile.scores)]
    if silent:
        notes.append(f"Silent heads, whose output is zero whatever they look at: {', '.join(silent)}.")
    first = list(text.documents[0])
    present = {key for profile in profiles for key in profile.scores}
    return Survey(
        model=name,
        family=family,
        texts=text.sources,
        n_documents=len(text.documents),
        n_tokens=sum(map(len, text.documents)),
        longest=max(map(len, text.documents)),
        statistics={key: item.meaning for key, item in all_statistics().items() if key in present},
        roles=tuple(role for role in ROLES if role.score in present and _possible(role.score, profiles)),
        untrained=untrained,
        loss=effects.loss,
        ablated=ablate if effects.ablation else None,
        tokens=text.shown(first[:TOKENS]),
        passage=min(PASSAGE, len(first)),
        profiles=profiles,
        notes=tuple(notes),
    )


def _possible(score: str, profiles: Sequence[HeadProfile]) -> bool:
    """Could any head have this score? Not if the mask hides all of those keys from all of them."""
    return any(profile.uniform.get(score, 1.0) > 0 for profile in profiles)


class _Tally:
    """Means of each document, head by head, and what is kept of the first document."""

    def __init__(self, text: Text | None, uniform_on: int = CONTROLS, keep: bool = True) -> None:
        self.text, self.uniform_on, self.keep = text, uniform_on, keep
        self.sites: list[Site] = []
        self.scores: dict[str, dict[str, list[float]]] = {}  # head -> statistic -> one value a document
        self.uniform: dict[str, dict[str, list[float]]] = {}  # site -> statistic -> one value a document
        self.offsets: dict[str, list[Tensor]] = {}  # site -> (H, 2 REACH + 1) a document, shares of rows
        self.first: dict[str, tuple[Measured, Tensor, Tensor]] = {}  # site -> what was measured, top keys, weights
        self.factors = Factors()
        self.weights: dict[str, list[float]] = {}  # site -> copying score of each head
        self.probe_from: int | None = None  # rows before this one do not count
        if text is not None:
            self.probe = _Tally(None, uniform_on, keep=False)

    def take(self, number: int, site: Site, call: Call, b: int, document: Document) -> None:
        """Document `number`, which is document b of a call."""
        if all(site.name != known.name for known in self.sites):
            self.sites.append(site)
        if self.probe_from is not None:
            document = replace(document, real_rows=torch.arange(call.q.shape[2]) >= self.probe_from)
        found = measure(call, b, document, w_o=self.factors.of(site))
        self._add(site, found, document)
        if number < self.uniform_on:
            even = measure(uniform(call), b, document)
            rows = self.uniform.setdefault(site.name, {})
            for key, values in even.rows.items():
                rows.setdefault(key, []).append(float(values.double().mean()))
        if number == 0 and self.keep:
            n = min(PASSAGE, call.q.shape[2])
            self.first[site.name] = (found, *top_keys(call, b, range(n), TOP))

    def _add(self, site: Site, found: Measured, document: Document) -> None:
        means = {key: values.double().mean(1) for key, values in found.rows.items()}
        for key, values in means.items():
            for h, value in enumerate(values.tolist()):
                self.scores.setdefault(site.head(h), {}).setdefault(key, []).append(value)
        if document.start is not None:
            behind = found.places + document.start - found.argmax
            counts = (behind.cpu()[..., None] == torch.arange(-REACH, REACH + 1)).double().mean(1)
            self.offsets.setdefault(site.name, []).append(counts)

    def read_weights(self, model: nn.Module) -> None:
        """The scores that need no text."""
        for site in self.sites:
            values = copying(site, model)
            if values is not None:
                self.weights[site.name] = values

    def of_head(self, site: Site, h: int) -> dict[str, Interval]:
        """Every score of a head with its interval over documents."""
        scores = {key: interval_of(values) for key, values in self.scores[site.head(h)].items()}
        if site.name in self.offsets:
            shares = torch.stack([counts[h] for counts in self.offsets[site.name]])
            shares[:, REACH - 1 : REACH + 2] = 0  # the token itself and its neighbours have roles of their own
            scores["positional"] = interval_of(shares[:, int(shares.mean(0).argmax())].tolist())
        probed = self.probe.scores.get(site.head(h), {})
        table = all_statistics()
        scores |= {key: interval_of(probed[item.repeated]) for key, item in table.items() if item.repeated in probed}
        if site.name in self.weights:
            value = self.weights[site.name][h]
            scores["copying"] = Interval(value, value, value, 1)
        return {key: scores[key] for key in table if key in scores}

    def even(self, site: Site) -> dict[str, float]:
        """The control: the same statistics of attention that is spread evenly."""
        means = {key: float(np.mean(values)) for key, values in self.uniform.get(site.name, {}).items()}
        table = all_statistics()
        means |= {key: means[item.even] for key, item in table.items() if item.even in means}
        probed = self.probe.uniform.get(site.name, {})
        means |= {key: float(np.mean(probed[item.repeated])) for key, item in table.items() if item.repeated in probed}
        return {key: means[key] for key in table if key in means}


def _collect(
    model: nn.Module, documents: Sequence[Sequence[int]], tally: _Tally, progress: Callable[[int, int], None]
) -> None:
    """Run the documents through the model, and tally what each head does."""
    total = sum(map(len, documents))
    done = number = 0
    marker = None if tally.text is None else tally.text.marks

    def listener(site: Site, call: Call, described: Sequence[Document]) -> None:
        for b, document in enumerate(described):
            tally.take(number + b, site, call, b, document)

    with torch.no_grad(), listening(model, listener, marker), evaluating(model):
        for ids in batches(documents):
            run_body(model, ids)
            number += len(ids)
            done += ids.numel()
            progress(done, total)


def batches(documents: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """Neighbours of equal length as (B,T) ids, up to BATCH tokens together."""
    for length, group in itertools.groupby(documents, key=len):
        together = max(1, BATCH // length)
        while some := list(itertools.islice(group, together)):
            yield torch.tensor([list(document) for document in some])


def _require_reader(model: nn.Module) -> None:
    if not reads_tokens(model):
        raise HeadwiseError(
            f"{type(model).__name__} reads no tokens; watch it in Python, with headwise.watch(model), on its own input"
        )


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
    return [[*before, *one, *one, *after] for one in drawn]


def _second_half(probes: Sequence[Sequence[int]], text: Text) -> int:
    """The row from which on every token of a probe has been seen before."""
    before, after = text.frame
    return len(before) + (len(probes[0]) - len(before) - len(after)) // 2 if probes else 0


def _untrained(
    model: nn.Module, text: Text, probes: Sequence[Sequence[int]], seed: int, progress: Progress
) -> dict[str, float]:
    """The largest score that any head reaches in the same model with fresh weights."""
    tally = _Tally(text, uniform_on=0, keep=False)
    fresh = fresh_model(model, seed)
    _collect(fresh, text.documents[:CONTROLS], tally, lambda done, total: progress("untrained control", done, total))
    tally.probe.probe_from = _second_half(probes, text)
    _collect(fresh, probes, tally.probe, lambda done, total: progress("untrained control", done, total))
    tally.read_weights(fresh)
    heads = [tally.of_head(site, h) for site in tally.sites for h in range(site.n_heads)]
    keys = {key for scores in heads for key in scores}
    return {key: max(scores[key].mean for scores in heads if key in scores) for key in all_statistics() if key in keys}


def fresh_model(model: nn.Module, seed: int) -> nn.Module:
    """The same architecture with newly drawn weights; torch's own random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config: Any = model.config
        build: Any = type(model)
        fresh: nn.Module = build(config)
    return fresh.to(next(model.parameters()).dtype).eval()


@dataclass
class _Effects:
    importance: Mapping[str, float]
    ablation: Mapping[str, Interval]
    loss: float | None


def _effects(model: nn.Module, text: Text, how: str | None, progress: Progress, notes: list[str]) -> _Effects:
    """Importance and the change in loss, on the first documents."""
    if not has_loss(model):
        notes.append(f"{type(model).__name__} does not predict the next token, so there is no loss whose change could "
                     "tell what a head is worth: importance and ablation are left out.")  # fmt: skip
        return _Effects({}, {}, None)
    ends = np.cumsum([len(document) for document in text.documents])
    groups = list(batches(text.documents[: max(2, int(np.searchsorted(ends, EFFECTS, side="right")))]))
    progress("importance", 0, 1)
    found = importance(model, groups)
    progress("importance", 1, 1)
    if how is None:
        return _Effects(found, {}, None)
    with torch.no_grad():
        losses = torch.cat([next_token_losses(model, ids) for ids in groups])
    without = ablation(model, groups, how, progress=lambda done, total: progress("ablation", done, total))
    return _Effects(found, without, float(losses.mean()))


def _profile(
    site: Site, h: int, tally: _Tally, untrained: Mapping[str, float] | None, effects: _Effects
) -> HeadProfile:
    name = site.head(h)
    scores, even = tally.of_head(site, h), tally.even(site)
    found, keys, weights = tally.first[site.name]
    n = keys.shape[1]
    part, _, layer = site.name.rpartition(".")
    return HeadProfile(
        name=name,
        part=part,
        layer=int(layer.removeprefix("L")),
        head=h,
        scores=scores,
        uniform={key: even[key] for key in scores if key in even},
        roles=roles_of(scores, even, untrained),
        importance=effects.importance.get(name),
        ablation=effects.ablation.get(name),
        thumbnail=_numpy(found.thumbnail[h]),
        first_key=_numpy(found.first_key[h]),
        received=_numpy(found.received[h, :n] / max(1, len(found.places))),
        top_keys=keys[h].cpu().numpy(),
        top_weights=_numpy(weights[h]),
    )


def _adds_nothing(scores: Mapping[str, Interval]) -> bool:
    """Is the head silent, as one is that `headwise prune` has zeroed?"""
    return "norm" in scores and scores["norm"].mean == 0


def _numpy(values: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    return values.float().cpu().numpy()
