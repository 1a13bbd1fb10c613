"""What every head of a model does on many documents: means, intervals, controls, roles and effects.

Documents go through the model once. Of each the mean of a statistic over its rows goes into a running mean for each
head, so that many documents cost no more memory than one. Two controls go with every number: attention spread evenly
over what the mask allows, and the same model with untrained weights. Duplicate-token and induction heads are looked for
on random tokens that are repeated (Olsson et al. 2022, arXiv 2209.11895), where nothing but the repetition can be used.
"""

from __future__ import annotations

import copy
import math
import time
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
from headwise.heads.documents import run_documents
from headwise.heads.effect import ablation, importance
from headwise.heads.relation import Scores, follow
from headwise.heads.relation import described as described_relations
from headwise.heads.statistics import all_statistics
from headwise.heads.table import ROLES, TOKENS, HeadProfile, Survey, relation_role
from headwise.heads.tally import CONTROLS, PASSAGE, Tally, read_shared, vocabulary_product
from headwise.heads.texts import Texts, read_texts
from headwise.heads.watch import watch
from headwise.intervals import Interval
from headwise.models import ask
from headwise.models.open import Folder, folder_of, open_model
from headwise.models.sites import Site, loaded, missing
from headwise.models.weights import blocks, has_record
from headwise.records import parse_head
from headwise.words import Note

# Round choices, all of them. Of the first two larger ones take more time, and smaller ones make wider intervals.
EFFECTS = 4096  # tokens that heads are ablated on, in whole documents; two of them at least, for an interval
PROBES, PROBE = 4, 64  # texts of repeated random tokens, and the most tokens of one before it is repeated
# A model of more parameters than the first gets an untrained control of so many layers: a whole one takes its memory
# a second time.
WHOLE, SAMPLE = 200_000_000, 2
ABLATE_UP_TO = 10_000_000  # parameters; a larger model is ablated when asked for: it takes a pass for each head
PATIENCE = 20  # seconds: what takes less needs no forecast
GLIMPSE = 64  # tokens by whose time a forecast is made
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
    if not ask.reads_tokens(folder.model):
        remedy = "watch it in Python on its own input, with headwise.watch(model)"
        raise HeadwiseError(f"{type(folder.model).__name__} reads no tokens; {remedy}")
    text = read_texts(folder, texts, tokens, documents, relations=relations)
    if ablate == "auto":
        size = sum(parameter.numel() for parameter in folder.model.parameters())
        ablate = "zero" if size <= ABLATE_UP_TO else "none"
    study = _Study(folder, text, seed, progress or (lambda *counts: None))
    return study.survey(controls, ablate, distributed)


@torch.no_grad()
def forecast(model: nn.Module, documents: Sequence[Ids]) -> str:
    """How long a survey takes at the speed of the first tokens, in a line; "" where that is seconds."""
    ids = torch.tensor([documents[0][:GLIMPSE]])
    for _ in range(2):  # the time of the second counts: the first run of all is slower
        began = time.perf_counter()
        with ask.evaluating(model), watch(model):
            ask.run_body(model, ids)
    speed = ids.numel() / max(time.perf_counter() - began, 1e-9)  # tokens a second; a coarse clock may say 0 s
    # The untrained control reads the first documents once more.
    to_read = sum(map(len, documents)) + sum(map(len, documents[:CONTROLS]))
    if to_read / speed < PATIENCE:
        return ""
    return (
        f"about {to_read / speed / 60:,.1f} min: {to_read:,} tokens at {speed:,.0f} a second, control and all; tokens= "
        "and documents= bound them"
    )


class _Study:
    """One survey on its way: what is asked, and what has been measured so far."""

    def __init__(self, folder: Folder, text: Text, seed: int, progress: Progress) -> None:
        self.folder, self.model = folder, folder.model
        self.text, self.seed, self.progress = text, seed, progress
        self.probes, self.second_half = repeated_tokens(text, folder.context, seed)
        self.known_pairs = text.relations
        self.notes: list[str] = []
        self.relations = () if self.known_pairs is None else described_relations(self.known_pairs)
        self.roles = (*map(relation_role, self.relations), *ROLES)
        self.followed: Scores = {}  # relation -> name of a head -> how it follows
        self.untrained: dict[str, float] | None = None  # the control, as `_untrained` gives it
        # What the loss says of the heads, by name; empty where there is no loss.
        self.importance: Mapping[str, float] = {}
        self.ablation: Mapping[str, Interval] = {}
        self.loss: float | None = None

    def survey(self, controls: bool, how: str, distributed: bool) -> Survey:
        self.notes += self.text.about

        # The documents, and the repeated tokens.
        documents = self.text.documents
        first = list(documents[0])
        vocabulary = vocabulary_product(self.model)
        settings = CONTROLS, self.second_half, True, vocabulary
        stages = "running the model", "repeated tokens"  # what `progress` is told
        tally = self._tally(partial(Tally, self.model, *settings), documents, stages, distributed)
        self.notes += [f"{line}." for line in [*missing(self.model), *tally.notes]]
        # MLA: values come out of a latent, so no matrix of the head's own tells what it copies. Without W_O,
        # as where heads are spread over processes, or without embeddings no head has it, and there is nothing to say.
        latent = [site.name for site in tally.sites.values() if site.w_v is None and site.w_o is not None]
        if latent and ask.embeddings(self.model) is not None:
            self._note("note.compressed", sites=", ".join(latent))
        if not self.probes:
            self._note("note.few_tokens")
        if len(documents) == 1:
            self._note("note.one_document")

        # What needs further passes: relations, controls, effects.
        self.followed = self._follow(self.model, "relations")
        if controls:
            self.untrained = self._untrained(vocabulary)
        self._weigh(how)

        # Now all is known of each head that its roles hang on.
        profiles = tuple(self._profile(tally, site, h) for site, h in tally.heads())
        # They add 0 to the residual stream, such as heads whose part of W_O `headwise prune` has set to 0.
        silent = [profile.name for profile in profiles if profile.means.get("norm") == 0]
        if silent:
            self._note("note.silent", heads=", ".join(silent))
        if self.text.note and self.loss is not None:  # it is about the loss on this text
            self.notes.append(self.text.note)
        present: set[str] = set().union(*(profile.scores for profile in profiles))
        # A mask may hide all keys of a role from all heads: even attention has 0 there. Then the role is left out of
        # those that were looked for, and no reader takes it for missing. A statistic without a control counts as 1.
        possible = {key for key in present if any(profile.uniform.get(key, 1.0) > 0 for profile in profiles)}
        statistics = {key: item.meaning for key, item in all_statistics().items() if key in present}
        for relation in self.relations:
            statistics[relation.name] = f"mass on the right tokens: {relation.meaning}"
        return Survey(
            model=self.folder.name,
            family=self.folder.family,
            texts=self.text.sources,
            n_documents=len(documents),
            n_tokens=sum(map(len, documents)),
            longest=max(map(len, documents)),
            statistics=statistics,
            roles=tuple(role for role in self.roles if role.score in possible),
            untrained=self.untrained,
            loss=self.loss,
            ablated=None if self.loss is None else how,
            tokens=self.text.shown(first[:TOKENS]),
            passage=min(PASSAGE, len(first)),
            profiles=profiles,
            notes=tuple(self.notes),
            relations=self.relations,
        )

    def _note(self, key: str, **facts: Any) -> None:
        # The phrase of `key` in words.toml, with its facts in its braces.
        self.notes.append(Note.of(key, **facts))

    def _tally(
        self,
        blank: Callable[[], Tally],
        documents: Sequence[Ids],
        stages: Sequence[str],
        distributed: bool = False,
    ) -> Tally:
        """What the heads do on documents, on repeated tokens, and by their weights.

        blank   makes an empty tally
        stages  what `progress` is told: of the documents, and of the repeated tokens
        """
        tally, marks = blank(), self.text.marks
        progress, progress_repeated = (partial(self.progress, stage) for stage in stages)
        if distributed:
            tally = read_shared(blank, documents, marks, progress)
        else:
            run_documents(tally.model, documents, tally.take, marks, progress)
        run_documents(tally.model, self.probes, tally.take_repeated, None, progress_repeated)
        return tally

    def _untrained(self, vocabulary: Tensor | None) -> dict[str, float] | None:
        """Statistic -> the largest score of any head of the same model with fresh weights; None where none is made.

        vocabulary  `vocabulary_product` of the model, for a sample, which has the model's own embeddings
        """
        is_sample = is_sampled(self.model)
        # Layers are drawn one at a time, and the record of the family says where they lie.
        if is_sample and not has_record(self.model):
            self._note("note.no_record", most=f"{WHOLE:,}", family=self.folder.family)
            return None
        fresh, stage = fresh_model(self.model, self.seed), "untrained control"
        if is_sample:
            self._note("note.sampled", layers=SAMPLE, most=f"{WHOLE:,}")
        else:
            vocabulary = vocabulary_product(fresh)
        # On 0 documents even attention is measured: that of the model itself is the same.
        blank = partial(Tally, fresh, 0, self.second_half, vocabulary=vocabulary)
        tally = self._tally(blank, self.text.documents[:CONTROLS], (stage, stage))
        largest: dict[str, float] = {}
        for site, h in tally.heads():
            for key, score in tally.of_head(site, h).items():
                largest[key] = max(score.mean, largest.get(key, -math.inf))
        for relation, by_head in self._follow(fresh, stage).items():
            largest[relation] = max(score.mass.mean for score in by_head.values())
        return largest

    def _follow(self, model: nn.Module, stage: str) -> Scores:
        """How the heads follow what is known to belong together: relation -> head -> scores; {} where none is known."""
        if self.known_pairs is None:
            return {}
        return follow(model, self.known_pairs, self.text.shown, partial(self.progress, stage))

    def _weigh(self, how: str) -> None:
        """Set `importance`, `loss` and `ablation`, on the first documents; `how` as `ablate` of `survey`.

        A note says why, where there is no loss, or where it would take too long.
        """
        if ask.predicts(self.model) != "next":
            self._note("note.no_loss", kind=type(self.model).__name__)
            return
        documents, after = self.text.documents, self.text.scored_after
        count = bisect_right(list(accumulate(map(len, documents))), EFFECTS)  # documents that fit into EFFECTS tokens
        # With the token that ends a line, where the text has one: a model of lines predicts it, too.
        ended = [[*ids, *self.text.end] for ids in documents[: max(2, count)]]
        groups = list(batches([ids[: self.folder.context] for ids in ended]))
        self.progress("importance", 0, 1)
        self.importance = importance(self.model, groups, after)
        self.progress("importance", 1, 1)
        if how == "none":
            return
        with torch.no_grad(), ask.evaluating(self.model):
            losses = [ask.next_token_losses(self.model, ids, after) for ids in groups]
        self.loss, size = float(torch.cat(losses).mean()), self.folder.vocab_size  # the mean over documents
        if size is not None and self.loss > GUESS * math.log(size):  # log V is the loss of an even guess
            self._note("note.guess", loss=f"{self.loss:.2f}", size=f"{size:,}", guess=f"{math.log(size):.2f}")
        self.ablation = ablation(self.model, groups, how, partial(self.progress, "ablation"), after, losses)

    def _profile(self, tally: Tally, site: Site, h: int) -> HeadProfile:
        """The row of a head: its numbers, what they are held against, and the roles that it earns by that."""
        name = site.head(h)
        part, layer, _ = parse_head(name)
        scores, even, untrained = tally.of_head(site, h), tally.even(site), self.untrained or {}
        relations, elsewhere = {}, {}  # relation -> how the head follows it; its third control
        for relation, by_head in self.followed.items():
            if name in by_head:
                score = replace(by_head[name], untrained=untrained.get(relation, math.nan))
                relations[relation] = score
                scores[relation] = score.mass
                even[relation] = score.even
                if math.isfinite(score.elsewhere):  # NaN where no other token has a key at these distances
                    elsewhere[relation] = score.elsewhere
        fields: dict[str, Any] = {key: of_site[h].numpy() for key, of_site in tally.first[site.name].items()}
        # Where it looks, with examples; none where queries and keys are two sequences, as in cross attention.
        if site.name in tally.gleanings:
            fields["examples"] = tally.gleanings[site.name].examples(h, self.text)
        return HeadProfile(
            name=name,
            part=part,
            layer=layer,
            head=h,
            scores=scores,
            uniform={key: even[key] for key in scores if key in even},
            roles=tuple(role.name for role in self.roles if role.earned(scores, even, untrained, elsewhere)),
            importance=self.importance.get(name),
            ablation=self.ablation.get(name),
            relations=relations,
            **fields,
        )


def repeated_tokens(text: Text, context: int | None, seed: int) -> tuple[list[list[int]], int]:
    """PROBES lists of random tokens of the text, no two alike, then the same again; and the row where that begins.

    None, and row 0, where the text or the model's context has too few tokens.
    """
    before, after = text.frame  # the special tokens with which the model's tokenizer surrounds a text
    candidates = sorted(set(text.counts) - text.specials)
    room = PROBE if context is None else (context - len(before) - len(after)) // 2  # for each of the two halves
    length = min(PROBE, room, len(candidates))
    if length < 4:  # a repetition of so few tells nothing, as attention is on the copy by chance; a round choice
        return [], 0
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for _ in range(PROBES):
        drawn = [candidates[i] for i in torch.randperm(len(candidates), generator=generator)[:length]]
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
    with torch.random.fork_rng(devices=[]):  # without devices it keeps the state of the CPU's generator alone
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
