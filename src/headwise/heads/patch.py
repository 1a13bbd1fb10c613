"""Activation patching: what a head carries of the difference between two texts, and through which path.

A model reads a corrupted text; one part of it is given what it had while reading the clean text; how much of the clean
answer comes back is the effect of that part (Meng et al. 2022, arXiv 2202.05262; Wang et al. 2022, arXiv 2211.00593;
Heimersheim & Nanda 2024, arXiv 2404.15255). Effects are shares of the difference between the two answers: 0
changes nothing, 1 restores the clean answer.

Variants of a text are rows of one batch, each with its edits (`headwise.heads.ablate`); the batch begins at the first
layer that differs.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads.ablate import ALL, READ, SHARED, Edit, Places, edited, kv_index_of
from headwise.heads.blocks import row_weights
from headwise.heads.documents import Progress, no_progress
from headwise.heads.statistics import unknown_head
from headwise.heads.table import Numbers, frame
from headwise.intervals import Interval, interval_of
from headwise.models.ask import (
    answer_logits,
    device_of,
    evaluating,
    require_next,
    stands_for,
)
from headwise.models.hook import Hook, attach, hooked
from headwise.models.open import texts_of, token_of
from headwise.models.sites import Site, block_path, sites_of
from headwise.records import Call
from headwise.table import head_figure
from headwise.words import unknown

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

# Numbers of the residual stream, T times C of each text, that run as one batch. More leave the processor's cache, and
# larger batches of long texts took longer.
LARGEST = 2**19
PLACES = ("out", *READ, "weights")  # `at` of `patch`

# ("q", "L3.H5") or ("k", "L3.KV1+L4.KV0"): what of a head, or of one or several key/value heads, reads
Receiver = tuple[str, str]
Values = NDArray[np.float64]
Metric = Callable[[Tensor], Tensor]  # logits (n,V) -> (n,)
Variant = Sequence[Edit]  # a text in which some heads have something else
Calls = dict[str, Call]  # by the name of the site
Key = TypeVar("Key", bound=Hashable)
Variants = Mapping[Key, Variant]


class HeadNumbers(ABC):
    """A number for each head, or an interval."""

    @abstractmethod
    def _shown(self) -> tuple[Mapping[str, Any], str]:
        """The numbers by the name of the head, and what they are."""

    def strongest(self, n: int = 5) -> list[str]:
        """The heads with the largest numbers, above 0 or below, the largest first."""
        means = self._means()
        return sorted(means, key=lambda name: -abs(means[name]))[:n]

    def _means(self) -> Numbers:
        return {name: getattr(x, "mean", x) for name, x in self._shown()[0].items()}

    def figure(self, n: int | None = None) -> Figure:
        """A figure of matplotlib: all heads, a line a layer; with `n` the strongest as bars with their intervals.

        `figure().savefig("heads.pdf")` writes PDF, SVG or PNG by the name.
        """
        return head_figure(*self._shown(), n)

    def __repr__(self) -> str:
        heads = [f"{name} {self._means()[name]:+.3f}" for name in self.strongest(3)]
        return f"{type(self).__name__}({self._shown()[1]}: {', '.join(heads)}, ...)"


@dataclass(frozen=True, repr=False)
class Patching(HeadNumbers):
    """What each head brings back of the clean answer, with its interval over pairs of texts.

    Over several pairs it is the share of the means: what comes back on average, over the mean difference. A mean of
    shares would hang on the pair whose two answers are nearest to each other. The interval is that of one head alone:
    of 72 heads without an effect about four exclude 0.
    """

    at: str  # q, k, v, out or weights
    # head, or key/value head, -> share of the difference; 1 is all of it
    effects: dict[str, Interval]
    clean: Interval  # what is compared, as the difference of two logits, of the clean texts
    corrupted: Interval  # the same of the corrupted ones
    ends: Values  # (N,2) both of each pair
    # head -> (T,), where positions="each"; pandas.DataFrame makes a table of it, and of the next
    by_position: dict[str, Values]
    # head -> (N,): share of each pair's own difference
    by_pair: dict[str, Values]

    def to_frame(self) -> DataFrame:
        """A row a head: the share of the means, its bounds, and the mean of the shares of pairs, `by_pair`."""
        rows = []
        for name, effect in self.effects.items():
            row = {"head": name, "share_of_means": effect.mean, "low": effect.low}
            mean = float(self.by_pair[name].mean())
            rows.append(row | {"high": effect.high, "mean_of_shares": mean})
        return frame(rows)

    def _shown(self) -> tuple[Mapping[str, Any], str]:
        return self.effects, f"share of the difference, {self.at}"


@torch.no_grad()
def patch(
    model: nn.Module,
    clean: Any,
    corrupted: Any,
    at: str = "out",
    *,
    heads: Iterable[str] | None = None,
    positions: Sequence[int] | str | None = None,
    target: Any = None,
    together: bool = False,
) -> Patching:
    """Give one head at a time, while the model reads `corrupted`, what it had while reading `clean`.

    The answer is read at the last position: the logit of the first target minus that of the second.

    Args:
        model: any model that `watch` watches and that answers with logits
        clean: one text or a list of them, which may differ in length: ids (T,), or, where the tokenizer is known, a
            string; or ids (N,T)
        corrupted: as many, each of as many tokens as its clean one
        at: "out": what the head adds to; "weights": where it looks; "q", "k", "v": what it asks with, is found
            by, hands over. Keys and values belong to key/value heads, which are named L3.KV1
        heads: names, default all
        positions: at which tokens: a list, default all; "each" tries every token alone and fills `by_position`
        target: the answer to the clean text and the one to the corrupted text: two token ids, or words such as
            " Mary"; two sets of them, whose mean logits are compared, ({7, 13}, {11}) or [[7], [11]]; (N,2), a row
            of two for each pair, so that [[7, 11], [13, 17]] is one where there are two pairs; or a function of the
            logits (V,), float64, that gives a number. Default: what the model likes best after each
        together: patch all `heads` at once; the one effect is named "together"
    """
    if at not in PLACES:
        raise unknown(f"at={at!r} is no place of a head", at, PLACES)

    def tried(study: Study) -> dict[tuple[str, int | None], float]:
        names = _chosen(study.text.names(at), heads)
        sets = {"together": "+".join(names)} if together else {x: x for x in names}
        moments = _moments(positions, study.text.ids.shape[1])
        variants = {}
        for name, t in itertools.product(sets, moments):
            variants[name, t] = study.variant(at, sets[name], moments[t])
        return study.ask(variants)

    shares, by_pair, ends = _of_pairs(model, clean, corrupted, target, tried)
    effects = {name: share for (name, t), share in shares.items() if t is None}
    by_position = defaultdict(list)
    for (name, t), share in shares.items():
        if t is not None:
            by_position[name].append(share.mean)
    clean_ends, corrupted_ends = map(interval_of, ends.T.tolist())
    return Patching(
        at,
        effects,
        clean_ends,
        corrupted_ends,
        ends,
        {name: np.array(means) for name, means in by_position.items()},
        {name: by_pair[name, None] for name in effects},
    )


@torch.no_grad()
def path_effects(
    model: nn.Module,
    clean: Any,
    corrupted: Any,
    receiver: str,
    at: str = "q",
    *,
    target: Any = None,
) -> dict[str, Interval]:
    """Path patching: what each earlier head brings back of the clean answer through what one head reads.

    receiver  the head that reads, L3.H5, for at="q"; for "k" and "v" a key/value head, L3.KV1

    The sender gives its clean output; other heads between the two are frozen as they were in the corrupted text,
    feed-forwards run. The query, key or value that the receiver makes of this takes the place of its own, and
    everything after runs freely (Wang et al. 2022, section 3.1 and appendix B; Goldowsky-Dill et al. 2023,
    arXiv 2304.05969).
    """
    if at not in READ:
        raise unknown(f"at={at!r} is nothing that a head reads from another", at, READ)

    def tried(study: Study) -> Numbers:
        # raises for a receiver that is not there
        _chosen(study.text.names(at), receiver.split("+"))
        paths = study.paths([(at, receiver)])
        return {sender: effect for (_, sender), effect in paths.items()}

    return _of_pairs(model, clean, corrupted, target, tried)[0]


def _moments(positions: Sequence[int] | str | None, T: int) -> dict[int | None, Places]:
    """The tokens that `patch` changes at once: None -> those that are asked for; with "each" a token -> itself."""
    if positions is None:
        return {None: ALL}
    if isinstance(positions, str) and positions == "each":
        return {None: ALL} | {t: [t] for t in range(T)}
    # `len`, as an array has no truth
    if isinstance(positions, str) or not len(positions):
        raise HeadwiseError(
            f"positions={positions!r} names no token; pass a list, or 'each'"
        )
    for position in positions:
        if not -T <= position < T:
            raise HeadwiseError(f"position {position} is not among the {T} tokens")
    return {None: list(positions)}


def _of_pairs(
    model: nn.Module,
    clean: Any,
    corrupted: Any,
    target: Any,
    tried: Callable[[Study], dict[Key, float]],
) -> tuple[dict[Key, Interval], dict[Key, Values], Values]:
    """Shares of the means of what `tried` finds in each pair; these effects (N,); and both ends of each pair, (N,2)."""
    require_next(model)
    texts = texts_of(model, clean)
    others = texts_of(model, corrupted)
    n = len(texts)
    if n != len(others):
        raise HeadwiseError(
            f"clean is {n} texts and corrupted {len(others)}; pass as many"
        )
    pairs = zip(texts, others, _metrics(model, target, n), strict=True)
    ends = []
    effects = []
    with evaluating(model):
        for number, (first, second, metric) in enumerate(pairs):
            try:
                study = Study(Reading(model, first), Reading(model, second), metric)
                effects.append(tried(study))
            except HeadwiseError as error:
                raise HeadwiseError(f"pair {number}, counted from 0: {error}") from None
            ends.append(study.ends)
    if any(each.keys() != effects[0].keys() for each in effects):
        raise HeadwiseError("positions='each' needs texts of one length; pass a list")
    ends_n2 = np.array(ends)
    effects_nk = np.array([[*each.values()] for each in effects])
    size = ends_n2 @ [1, -1]  # (N,) what there is to bring back
    if size.mean() == 0:
        raise HeadwiseError(
            f"over the {n} pairs clean and corrupted texts differ by 0 on average"
        )
    shares_k = size @ effects_nk / size.sum()
    # A ratio of two means, to first order: its mean is the share, and its spread that of the ratio.
    spread_kn = (effects_nk - shares_k).T * size / size.mean()
    intervals = map(interval_of, (shares_k[:, None] + spread_kn).tolist())
    shares = dict(zip(effects[0], intervals, strict=True))
    return shares, dict(zip(effects[0], effects_nk.T, strict=True)), ends_n2


# What is compared


def _metrics(model: nn.Module, target: Any, n: int) -> list[Metric | None]:
    """What is compared in each of n pairs; None: what the model likes best after each text."""
    if target is None or callable(target):
        return [target and partial(_row_by_row, target)] * n
    rows = target.tolist() if hasattr(target, "tolist") else target
    # one token alone is no pair, and the letters of a word are not its tokens
    rows = list(rows) if _is_several(rows) else []
    is_each = [isinstance(row, list | tuple) and len(row) == 2 for row in rows]
    if len(rows) == n and all(is_each):
        return [Compared.of(model, row) for row in rows]
    if len(rows) != 2 or _is_several(rows[0]) != _is_several(rows[1]):
        raise HeadwiseError(
            f"target={target!r:.60} is not known; pass two token ids, or ({n}, 2) of them, two sets of tokens, or a "
            f"function of the logits"
        )
    return [Compared.of(model, rows)] * n


def _is_several(side: Any) -> bool:
    """Are these several tokens, as a list, a set, a range or an array has them?"""
    # a word is one token, and so is a tensor without an axis
    is_one = isinstance(side, str) or getattr(side, "ndim", 1) == 0
    return isinstance(side, Iterable) and not is_one


def _row_by_row(function: Callable[[Tensor], Any], logits: Tensor) -> Tensor:
    """A metric of somebody's own, which takes the logits (V,) of one answer."""
    try:
        values = [float(function(row)) for row in logits.cpu().double()]
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise HeadwiseError(
            f"target= was given the logits {tuple(logits.shape[1:])} of one answer and did not give a number: {error}"
        ) from None
    return torch.tensor(values, dtype=torch.float64)


@dataclass(frozen=True)
class Compared:
    """The mean logit of some tokens minus that of others; without others, the log-probability of the first."""

    answer: tuple[int, ...]
    other: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, sides: Iterable[Any]) -> Compared:
        """Of one side or two, each a token or several; a token is an id or a word."""
        ids = []
        for side in sides:
            words = side if _is_several(side) else [side]
            ids.append(tuple(token_of(model, word) for word in words))
        return cls(*ids)

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.answer, *self.other)

    def __call__(self, logits: Tensor) -> Tensor:
        scores = logits.cpu().double()
        if not self.other:
            scores = scores.log_softmax(-1)
        answer, other = (scores[..., list(x)] for x in (self.answer, self.other))
        return answer.mean(-1) - (other.mean(-1) if self.other else 0)

    def check(self, n: int) -> None:
        """Refuse what a vocabulary of n tokens does not have, and a comparison of a token with itself."""
        for token in self.tokens:
            if not 0 <= token < n:
                raise HeadwiseError(
                    f"target {token} is outside the vocabulary of {n} tokens"
                )
            if token in self.answer and token in self.other:
                raise HeadwiseError(
                    f"token {token} is the answer and what it is compared with, so there is no difference to "
                    f"explain; pass two tokens, or texts that the model answers differently"
                )


# A text and its variants


class Reading:
    """A text (1,T) that a model has read, and its answer at a position; variants of it are rows of one batch.

    The blocks that end before the first change give at once what they gave when the text was read. The model runs from
    its beginning, so that masks and positions are its own.
    """

    def __init__(self, model: nn.Module, ids: Tensor, position: int = -1) -> None:
        self.model = model
        self.position = position
        self.sites = {site.name: site for site in sites_of(model)}
        self.ids = ids[None].to(device_of(model))
        # of each attention that ran, by the name of its site
        self.calls: Calls = {}
        paths = {module: path for path, module in model.named_modules()}
        # by site; an attention outside a list of layers has the whole model for its block
        self.blocks = {
            name: model.get_submodule(block_path(paths[site.module]))
            for name, site in self.sites.items()
        }
        # what blocks gave, in the order in which they ended
        self.outputs: dict[nn.Module, Any] = {}
        self.below: dict[nn.Module, int] = {}  # how many had ended when a block began
        self._maps: dict[str, Tensor] = {}

        def keep(site: Site, call: Call) -> None:
            if not len(call.out):
                raise HeadwiseError(call.note)
            if site.name in self.calls:
                raise HeadwiseError(
                    f"{site.name} of {type(model).__name__} runs several times in one pass, and which of its runs is "
                    f"to be patched is not known; watch it instead, with headwise.watch"
                )
            self.calls[site.name] = call

        def begin(block: nn.Module, args: Any, keywords: Any) -> None:
            # In a mapping is what the blocks below have left there: keys and values of Gemma 3n. All of them must run.
            is_left = any(isinstance(each, Mapping) for each in keywords.values())
            self.below[block] = 0 if is_left else len(self.outputs)

        def end(block: nn.Module, args: Any, keywords: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple | list) else output
            if isinstance(states, Tensor) and 1 in states.shape:
                self.outputs[block] = output

        hooks: list[Hook] = []
        for block in set(self.blocks.values()):
            hooks.append((block.register_forward_pre_hook, begin))
            hooks.append((block.register_forward_hook, end))
        with attach(self.sites.values(), keep), hooked(hooks, with_kwargs=True):
            # (V,) logits of the token that is answered
            self.answer = answer_logits(model, self.ids, position)[0]

    def names(self, at: str) -> list[str]:
        """The heads, from the first layer up; at k and v the key/value heads."""
        names = []
        for site, call in self.calls.items():
            letters, x = ("KV", call.k) if at in SHARED else ("H", call.q)
            names += [f"{site}.{letters}{i}" for i in range(x.shape[1])]
        return names

    def read_by(self, head: str, at: str) -> str:
        """What a head reads: of k and v the name of its key/value head."""
        site, h = place_of(head)
        g = kv_index_of(self.calls[site])[h]
        return f"{site}.KV{g}" if at in SHARED else head

    def maps(self, site: str) -> Tensor:
        """The weights (H,T,S) of an attention."""
        if site not in self._maps:
            call = self.calls[site]
            self._maps[site] = row_weights(call, 0, range(call.n_queries))
        return self._maps[site]

    def ask(
        self, variants: Variants[Key], metric: Metric, progress: Progress
    ) -> dict[Key, float]:
        """What a metric makes of the answer to each variant."""
        answers: dict[Key, float] = {}
        for keys, _, logits in self.batches(variants):
            answers |= zip(keys, metric(logits).tolist(), strict=True)
            progress(len(answers), len(variants))
        return answers

    def batches(
        self, variants: Variants[Key], until: str = ""
    ) -> Iterator[tuple[list[Key], Calls, Any]]:
        """Run variants: of each batch those in it, the calls of the sites that change, by name, and logits (n,V).

        until  the site at which passes end, without logits
        """
        # Only the states of the block below are handed on, and a block that reads an encoder takes more than these.
        is_crossed = any(call.cross for call in self.calls.values())
        starts = defaultdict(list)  # number of blocks that do not change -> variants
        for key, edits in variants.items():
            numbers = [self.below[self.blocks[edit.site]] for edit in edits]
            starts[0 if is_crossed else min(numbers)].append(key)
        most = max(1, LARGEST // next(iter(self.calls.values())).out.numel())
        for start, keys in starts.items():
            for first in range(0, len(keys), most):
                batch = keys[first : first + most]
                rows = [variants[key] for key in batch]
                yield batch, *self._run(rows, start, until)

    def _run(
        self, variants: Sequence[Variant], start: int, until: str
    ) -> tuple[Calls, Tensor | None]:
        """One batch of variants, which begin behind the first `start` blocks."""
        calls = {}
        edits = defaultdict(list)
        # What a head makes of its queries, keys and values comes before the gates and norms of its site.
        early = False
        for row, variant in enumerate(variants):
            for edit in variant:
                edits[edit.site].append((row, edit))
                early = early or edit.at != "out"

        def change(site: Site, call: Call) -> Tensor:
            # DiffLlama lays its maps over several values.
            if early and site.name in calls:
                raise HeadwiseError(
                    f"{site.name} of {type(call.layer).__name__} attends twice in a pass; pass at='out'"
                )
            calls[site.name] = call
            if site.name == until:
                raise _ReachedError
            return edited(call, edits[site.name])

        n = len(variants)
        done = itertools.islice(self.outputs.items(), start)
        outputs = {block: _repeated(output, n) for block, output in done}
        model = _begun(self.model, outputs)
        stands_for(model, self.model)
        sites = [self.sites[name] for name in edits]
        with suppress(_ReachedError), attach(sites, change, early):
            return calls, answer_logits(model, self.ids.expand(n, -1), self.position)
        return calls, None


class _ReachedError(Exception):
    """A pass has come to the last site that is asked about."""


def _begun(module: nn.Module, outputs: Mapping[nn.Module, Any]) -> nn.Module:
    """The module with blocks that compute nothing and give these outputs.

    What holds such a block is a shallow copy, so that other threads do not see it; all else is the module's own.
    """
    if module in outputs:
        block = copy.copy(module)
        block.forward = lambda *args, **keywords: outputs[module]
        block._forward_hooks = {}  # they have acted on the output
        return block
    children = dict(module.named_children())
    begun = {name: _begun(child, outputs) for name, child in children.items()}
    if begun == children:
        return module
    holder = copy.copy(module)
    holder._modules = {**module._modules, **begun}
    return holder


def _repeated(output: Any, n: int) -> Any:
    """What a block gave for one text, as for n: a tensor, (1,T,C) or (T,1,C), or what begins with it."""
    if isinstance(output, tuple | list):
        return type(output)([_repeated(output[0], n), *output[1:]])
    return output.repeat_interleave(n, output.shape.index(1))


# One pair of texts


class Study:
    """One pair of texts in a model, and variants of the corrupted one. Effects are shares of the difference."""

    def __init__(self, clean: Reading, text: Reading, metric: Metric | None) -> None:
        self.clean = clean
        self.text = text
        size = clean.ids.shape[1]
        other = text.ids.shape[1]
        if size != other:
            raise HeadwiseError(
                f"clean is {size} tokens and corrupted {other}; exchange a word for one of as many tokens"
            )
        answers = torch.stack([clean.answer, text.answer])
        if metric is None:  # what the model likes best after each text
            first, second = answers.argmax(-1).tolist()
            metric = Compared((first,), (second,))
        if isinstance(metric, Compared):
            metric.check(answers.shape[1])
        self.metric = metric
        # what is compared, in the clean text and in the corrupted one
        self.ends = metric(answers).tolist()
        if self.ends[0] == self.ends[1]:
            raise HeadwiseError(
                "both texts give the answer the same logits: there is no difference to bring back"
            )

    def share(self, logits: Tensor) -> Tensor:
        """How far answers (n,V) to variants of the corrupted text have come from there to the clean one, (n,)."""
        clean, corrupted = self.ends
        return (self.metric(logits) - corrupted) / (clean - corrupted)

    def ask(
        self, variants: Variants[Key], progress: Progress = no_progress
    ) -> dict[Key, float]:
        """The effect of each variant of the corrupted text."""
        return self.text.ask(variants, self.share, progress)

    def variant(self, at: str, names: str, tokens: Places = ALL) -> list[Edit]:
        """The corrupted text in which a head, or "L0.H1+L0.H2", has this part of the clean run at these tokens."""
        edits = []
        for name in names.split("+"):
            site, n = place_of(name)
            if at == "weights":
                parts = self.clean.maps(site)
            else:
                parts = getattr(self.clean.calls[site], at)[0]
            edits.append(Edit(site, at, n, parts[n], tokens))
        return edits

    def paths(
        self,
        receivers: Sequence[Receiver],
        progress: Progress = no_progress,
        groups: Iterable[str] = (),
    ) -> dict[tuple[Receiver, str], float]:
        """By receiver, such as ("q", "L3.H5"), and earlier head, a sender: its effect through what the receiver reads.

        groups  further senders, heads of one layer that give their clean output together: "L0.H1+L0.H2"

        First each sender gives its clean output, heads above it are frozen, and what all receivers make of that is
        kept. Then each receiver has it, from one sender after another.
        """
        order = list(self.text.calls)  # from the first layer up
        wanted = [(each, edit) for each in receivers for edit in self.variant(*each)]
        last = max(order.index(edit.site) for _, edit in wanted)
        variants = {}
        for sender in [*self.text.names("out"), *groups]:
            above = order[order.index(place_of(sender)[0]) + 1 : last + 1]
            if above:
                variants[sender] = self.variant("out", sender) + [
                    Edit(site, "out", ALL, self.text.calls[site].out[0])
                    for site in above
                ]
        received = defaultdict(list)
        for senders, calls, _ in self.text.batches(variants, order[last]):
            for row, sender in enumerate(senders):
                for receiver, edit in wanted:
                    # above the sender, and so among those that are frozen
                    if order.index(edit.site) > order.index(place_of(sender)[0]):
                        value = getattr(calls[edit.site], edit.at)[row, edit.n]
                        edit = edit._replace(value=value)
                        received[receiver, sender].append(edit)
        return self.ask(received, progress)


def place_of(name: str) -> tuple[str, int]:
    """The site of a head, or key/value head, and its number there: ("L3", 5) of L3.H5; of several those of the last."""
    site, _, last = name.rpartition("+")[2].rpartition(".")
    # without the letters, "H" or "KV", before the number
    return site, int(last.lstrip("HKV"))


def _chosen(names: list[str], heads: Iterable[str] | None) -> list[str]:
    """The named heads, or all, in the order of the model. Raises HeadwiseError for a name that is not among them."""
    if heads is None:
        return names
    chosen = [heads] if isinstance(heads, str) else list(heads)
    if not chosen:
        raise HeadwiseError(
            "heads=[] leaves no head to patch; name some, or leave it out"
        )
    for name in chosen:
        if name not in names:
            raise unknown_head(name, names)
    return [name for name in names if name in chosen]
