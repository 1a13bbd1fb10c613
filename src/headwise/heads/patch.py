"""Activation patching: what a head carries of the difference between two texts, and through which path.

A model reads a corrupted text; one part of it is given what it had while reading the clean text; how much of the clean
answer comes back is the effect of that part (Meng et al. 2022, arXiv 2202.05262; Wang et al. 2022, arXiv 2211.00593;
Heimersheim & Nanda 2024, arXiv 2404.15255). Effects are shares of the difference between the two answers: 0
changes nothing, 1 restores the clean answer.

Variants of a text are rows of one batch. A hook at each attention changes its rows (`write_edits`).
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.backends.torch_ import attend
from headwise.errors import HeadwiseError
from headwise.heads.documents import Progress, no_progress
from headwise.heads.statistics import unknown_head
from headwise.heads.table import Row, frame
from headwise.intervals import Interval, interval_of
from headwise.models.ask import (
    answer_logits,
    device_of,
    evaluating,
    require_next,
    stands_for,
)
from headwise.models.hook import attach, hooked
from headwise.models.open import texts_of, token_of
from headwise.models.sites import Site, layers_of
from headwise.records import Call, head_name
from headwise.spec import Options, resolve_kv_index
from headwise.table import head_figure
from headwise.words import unknown

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Tokens = slice | list[int]  # at which something is changed
ALL = slice(None)  # every token
# Numbers of the residual stream, T times C of each text, that run as one batch. More leave the processor's cache, and
# larger batches of long texts took longer.
LARGEST = 2**19
SHARED = ("k", "v")  # places that belong to key/value heads, L3.KV1
READ = ("q", *SHARED)  # what a head makes of the residual stream
PLACES = ("out", *READ, "weights")  # `at` of `patch`

# ("q", "L3.H5") or ("k", "L3.KV1+L4.KV0"): what of a head, or of one or several key/value heads, reads
Receiver = tuple[str, str]
Metric = Callable[[Tensor], Tensor]  # logits (n,V) -> (n,)
Key = TypeVar("Key", bound=Hashable)


def frame_by(by: str, rows: Mapping[str, Iterable[Row]]) -> DataFrame:
    """The rows of this kind as a pandas DataFrame."""
    if by not in rows:
        raise unknown(f"by={by!r} is no row", by, list(rows))
    return frame(list(rows[by]))


def largest(numbers: Mapping[str, Any], n: int) -> list[str]:
    """The heads with the largest numbers, or means of intervals, above 0 or below."""
    sizes = {name: -abs(getattr(x, "mean", x)) for name, x in numbers.items()}
    return sorted(sizes, key=sizes.__getitem__)[:n]


@dataclass(frozen=True)
class Patching:
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
    ends: NDArray[np.float64]  # (N,2) both of each pair
    # (T,), where positions="each"
    by_position: dict[str, NDArray[np.float64]]
    # (N,) share of each pair's own difference
    by_pair: dict[str, NDArray[np.float64]]

    def strongest(self, n: int = 5) -> list[str]:
        """The heads with the largest effects, the largest first."""
        return largest(self.effects, n)

    def to_frame(self, by: str = "head") -> DataFrame:
        """The effects as a pandas DataFrame.

        by  "head": a row a head, with the share of the means, its bounds, and the mean of the shares of pairs;
            "pair": a row for each pair and head, with what is compared in both texts; "token": a row for each head
            and position, of positions="each"
        """
        pairs: list[Row] = []
        tokens: list[Row] = []
        for name, shares in self.by_pair.items():
            for n, share in enumerate(shares):
                good, bad = self.ends[n]
                row = {"head": name, "pair": n, "share": share, "clean": good}
                pairs.append(row | {"corrupted": bad})
            for t, share in enumerate(self.by_position.get(name, ())):
                tokens.append({"head": name, "position": t, "share": share})
        heads = map(self._row, self.effects)
        return frame_by(by, {"head": heads, "pair": pairs, "token": tokens})

    def _row(self, name: str) -> Row:
        effect, shares = self.effects[name], self.by_pair[name]
        return {
            "head": name,
            "share_of_means": effect.mean,
            "low": effect.low,
            "high": effect.high,
            "mean_of_shares": float(shares.mean()),
        }

    def figure(self, n: int | None = None) -> Figure:
        """A figure of matplotlib: all heads, a line a layer; with `n` the strongest as bars with their intervals.

        `figure().savefig("heads.pdf")` writes PDF, SVG or PNG by the name.
        """
        return head_figure(self.effects, f"share of the difference, {self.at}", n)

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{name} {self.effects[name].mean:+.2f}" for name in self.strongest(3)
        )
        return f"Patching(at {self.at!r}, {self.clean.n} pairs: {parts}, ...)"


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
            logits (V,), float64, that gives a number, or a list of them, one for each pair. Default: what the model
            likes best after each
        together: patch all `heads` at once; the one effect is named "together"
    """
    if at not in PLACES:
        raise unknown(f"at={at!r} is no place of a head", at, PLACES)
    pairs = _pairs(model, clean, corrupted)
    lengths = {len(good) for good, _ in pairs}
    T, is_each = min(lengths), positions == "each"
    if is_each and len(lengths) > 1:
        raise HeadwiseError(
            f"positions='each' needs texts of one length, and they have {T} to {max(lengths)} tokens; pass "
            f"positions=[-1], or texts of one length"
        )
    tokens = _tokens(positions, T)

    def tried(study: Study) -> dict[tuple[str, int | None], float]:
        names = _chosen(study.text.names(at), heads)
        sets = {"together": names} if together else {name: [name] for name in names}
        variants: dict[Any, Variant] = {}
        for key, of_set in sets.items():
            variants[key, None] = study.variant(at, of_set, tokens)
            for t in range(T if is_each else 0):
                variants[key, t] = study.variant(at, of_set, [t])
        return study.ask(variants)

    effects, ends = _of_pairs(model, pairs, target, tried)
    every_share = _shares(effects, ends)
    shares = {name: share for (name, t), share in every_share.items() if t is None}
    by_position = {
        name: np.array([every_share[name, t].mean for t in range(T)])
        for name in shares
        if is_each
    }
    good, bad = (interval_of(values) for values in ends.T.tolist())
    by_pair = {name: np.array(effects[name, None]) for name in shares}
    return Patching(at, shares, good, bad, ends, by_position, by_pair)


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

    def tried(study: Study) -> dict[str, float]:
        # raises for a receiver that is not there
        _chosen(study.text.names(at), receiver.split("+"))
        paths = study.paths([(at, receiver)])
        return {sender: effect for (_, sender), effect in paths.items()}

    pairs = _pairs(model, clean, corrupted)
    return _shares(*_of_pairs(model, pairs, target, tried))


def _pairs(model: nn.Module, clean: Any, corrupted: Any) -> list[tuple[Tensor, Tensor]]:
    """Both texts (T,) of each pair."""
    require_next(model)
    good, bad = texts_of(model, clean), texts_of(model, corrupted)
    if len(good) != len(bad):
        raise HeadwiseError(
            f"clean is {len(good)} texts and corrupted {len(bad)}; pass as many"
        )
    pairs = list(zip(good, bad, strict=True))
    for number, (first, second) in enumerate(pairs):
        if len(first) != len(second):
            raise HeadwiseError(
                f"pair {number}, counted from 0: clean is {len(first)} tokens and corrupted {len(second)}; exchange "
                f"a word for one of as many tokens"
            )
    return pairs


def _of_pairs(
    model: nn.Module,
    pairs: Sequence[tuple[Tensor, Tensor]],
    target: Any,
    tried: Callable[[Study], dict[Key, float]],
) -> tuple[dict[Key, list[float]], NDArray[np.float64]]:
    """By name the effects that `tried` finds in each pair, and what is compared in both texts of each, (N,2)."""
    metrics = _metrics(model, target, len(pairs))
    effects: dict[Key, list[float]] = defaultdict(list)
    ends = []
    with evaluating(model):
        passes = Passes(model)
        for number, (pair, metric) in enumerate(zip(pairs, metrics, strict=True)):
            good, bad = map(passes.read, pair)
            best = [(int(text.answer.argmax()),) for text in (good, bad)]
            try:
                study = Study(passes, good, bad, metric or Compared(*best))
            except HeadwiseError as error:
                raise HeadwiseError(f"pair {number}, counted from 0: {error}") from None
            ends.append((study.clean, study.corrupted))
            for key, effect in tried(study).items():
                effects[key].append(effect)
    return effects, np.array(ends)


def _metrics(model: nn.Module, target: Any, n: int) -> list[Metric | None]:
    """What is compared in each of n pairs; None: what the model likes best after each text."""
    if target is None or callable(target):
        target = [target] * n
    # one token alone is no pair, and the letters of a word are not its tokens
    sides = [] if isinstance(target, int | str) else target
    sides = sides.tolist() if hasattr(sides, "tolist") else list(sides)
    if len(sides) == n and all(side is None or callable(side) for side in sides):
        return [side and partial(_row_by_row, side) for side in sides]
    several = [isinstance(side, list | tuple | set | frozenset) for side in sides]
    is_each = all(several) and not any(isinstance(side, set) for side in sides)
    if len(sides) == n and is_each and all(len(row) == 2 for row in sides):
        rows = sides
    elif len(sides) == 2 and several[0] == several[1]:
        rows = [sides] * n
    else:
        raise HeadwiseError(
            f"target={target!r:.60} is not known; pass two token ids, or ({n}, 2) of them, two sets of tokens, a "
            f"function of the logits, or {n} functions"
        )
    metrics: list[Metric | None] = []
    for row in rows:
        tokens = []
        for side in row:
            words = [side] if isinstance(side, str | int) else side
            tokens.append(tuple(token_of(model, word) for word in words))
        metrics.append(Compared(*tokens))
    return metrics


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

    def __call__(self, logits: Tensor) -> Tensor:
        scores = logits.cpu().double()
        if not self.other:
            return scores.log_softmax(-1)[..., list(self.answer)].mean(-1)
        first, second = list(self.answer), list(self.other)
        return scores[..., first].mean(-1) - scores[..., second].mean(-1)

    def check(self, n: int) -> None:
        """Refuse what a vocabulary of n tokens does not have, and a comparison of a token with itself."""
        for token in (*self.answer, *self.other):
            if not 0 <= token < n:
                raise HeadwiseError(
                    f"target {token} is outside the vocabulary of {n} tokens"
                )
            if token in self.answer and token in self.other:
                raise HeadwiseError(
                    f"token {token} is the answer and what it is compared with, so there is no difference to "
                    f"explain; pass two tokens, or texts that the model answers differently"
                )


def _tokens(positions: Sequence[int] | str | None, T: int) -> Tokens:
    """The tokens that `patch` changes at once; T of the shortest text."""
    if positions is None or positions == "each":
        return ALL
    # `len`, as an array has no truth
    if isinstance(positions, str) or not len(positions):
        raise HeadwiseError(
            f"positions={positions!r} names no token; pass a list, or 'each'"
        )
    for position in positions:
        if not -T <= position < T:
            raise HeadwiseError(f"position {position} is not among the {T} tokens")
    return list(positions)


def _shares(
    effects: Mapping[Key, Sequence[float]], ends: NDArray[np.float64]
) -> dict[Key, Interval]:
    """Of each head the share of the means, from its share in each pair; `ends` (N,2) are both ends of each pair."""
    size = ends[:, 0] - ends[:, 1]  # (N,) what there is to bring back
    if size.mean() == 0:
        raise HeadwiseError(
            f"over the {len(ends)} pairs clean and corrupted texts differ by 0 on average"
        )
    intervals = {}
    for name, values in effects.items():
        share = float(size @ values / size.sum())
        # A ratio of two means, to first order: its mean is the share, and its spread that of the ratio.
        spread = (np.array(values) - share) * size / size.mean()
        intervals[name] = interval_of((share + spread).tolist())
    return intervals


# Variants of a text


class Edit(NamedTuple):
    """What heads of an attention, or at k and v key/value heads, have in a variant at these tokens."""

    at: str  # one of PLACES
    # by their numbers (T,E), (T,D) or (S,D); at "weights" the call that has their weights
    parts: Mapping[int, Any]
    tokens: Tokens = ALL


# a text in which some heads have something else, by the names of their sites
Variant = Mapping[str, Edit]


def write_edits(
    call: Call, edits: Mapping[int, Edit], options: Options, out: Tensor
) -> None:
    """Write into `out` (n,H,T,E), what the heads of a call of n texts gave, what they give with edits, by text.

    options  of a call of one text
    """
    # head, and whose options it has -> its text, the tokens at which it changes, and what it reads, of each edit
    anew: dict[tuple[int, bool], list[Any]] = defaultdict(list)
    looking = options
    for row, (at, parts, tokens) in edits.items():
        if at == "out":
            for h, part in parts.items():
                out[row, h, tokens] = part[tokens].to(out)
            continue
        # other keys and values change every token that looks at them
        changed = ALL if at in SHARED else tokens
        for h, g in enumerate(_index(call)):
            n = g if at in SHARED else h
            if n not in parts:
                continue
            x = {"q": call.q[row, h], "k": call.k[row, g], "v": call.v[row, g]}
            weights = None if call.weights is None else call.weights[row, h]
            if at == "weights":  # a mask may hang on the text, too; a gate stays
                clean = parts[n]
                looking = clean.options._replace(gate=options.gate)
                x |= {"q": clean.q[0, h], "k": clean.k[0, g]}
                weights = None if clean.weights is None else clean.weights[0, h]
            else:
                x[at] = x[at].clone()
                x[at][tokens] = parts[n][tokens]
            if weights is None:
                anew[h, at == "weights"].append((row, changed, x))
            else:  # the module made them itself: they are not known to hang on q and k
                made = weights.to(x["v"].dtype) @ x["v"]
                out[row, h, changed] = made[changed].to(out)
    for (h, looks), of_head in anew.items():
        q, k, v = (torch.stack([x[at] for *_, x in of_head])[:, None] for at in READ)
        of_text = looking if looks else options
        outs = attend(q, k, v, _of_head(of_text, h, call.q.shape[1]))[:, 0]
        for (row, changed, _), made in zip(of_head, outs, strict=True):
            out[row, h, changed] = made[changed].to(out)


def _of_head(options: Options, h: int, n_heads: int) -> Options:
    """The options of a call of one of `n_heads` heads alone."""
    mask, sink, gate = options.mask, options.sink, options.gate
    return options._replace(
        mask=None if mask is None else mask.for_heads([h], n_heads),
        sink=None if sink is None else torch.as_tensor(sink)[[h]],
        gate=None if gate is None else torch.as_tensor(gate)[[h]],
        kv_index=None,
    )


def _index(call: Call) -> Sequence[int]:
    """Of each query head the key/value head that it reads."""
    return resolve_kv_index(call.out.shape[1], call.k.shape[1], call.options.kv_index)


# Passes of one model


@dataclass(frozen=True)
class Reading:
    """A text (1,T) that a model has read, and what is kept of that."""

    ids: Tensor
    answer: Tensor  # (V,) logits of the token that is answered
    calls: dict[str, Call]  # of each attention that ran, by the name of its site
    outputs: dict[nn.Module, Any]  # what each block gave, blocks in their order

    def names(self, at: str) -> list[str]:
        """The heads, from the first layer up; at k and v the key/value heads."""
        names = []
        for site, call in self.calls.items():
            if at in SHARED:
                names += [f"{site}.KV{g}" for g in range(call.k.shape[1])]
            else:
                names += [head_name(site, h) for h in range(call.q.shape[1])]
        return names

    def read_by(self, head: str, at: str) -> str:
        """What a head reads: of k and v the name of its key/value head."""
        site, h = place_of(head)
        return f"{site}.KV{_index(self.calls[site])[h]}" if at in SHARED else head


class Passes:
    """The passes of a model that a study asks for: texts, and variants of them, answered at a position.

    Variants begin at the first block that changes: the blocks below give at once what they gave when the text was
    read. The model runs from its beginning, so that masks and positions are its own.
    """

    def __init__(self, model: nn.Module, position: int = -1) -> None:
        self.model, self.position = model, position
        self.layers = layers_of(model)
        self.sites = {layer.site.name: layer.site for layer in self.layers}
        self.blocks = {layer.site.name: layer.block for layer in self.layers}

    def read(self, ids: Tensor) -> Reading:
        """Read a text (T,)."""
        calls: dict[str, Call] = {}
        outputs: dict[nn.Module, Any] = {}

        def keep(site: Site, call: Call) -> None:
            if not len(call.out):
                raise HeadwiseError(call.note)
            if site.name in calls:
                raise HeadwiseError(
                    f"{site.name} of {type(self.model).__name__} runs several times in one pass, and which of its runs "
                    f"is to be patched is not known; watch it instead, with headwise.watch"
                )
            calls[site.name] = call

        def record(block: nn.Module, args: Any, output: Any) -> None:
            outputs[block] = output

        row = ids[None].to(device_of(self.model))
        blocks = dict.fromkeys(self.blocks.values())
        with (
            attach(self.sites.values(), keep),
            hooked((block.register_forward_hook, record) for block in blocks),
        ):
            answer = answer_logits(self.model, row, self.position)[0]
        return Reading(row, answer, calls, outputs)

    def ask(
        self,
        text: Reading,
        variants: Mapping[Key, Variant],
        metric: Metric,
        progress: Progress = no_progress,
        on_call: Callable[[Key, str, Call, int], None] | None = None,
        until: str = "",
    ) -> dict[Key, float]:
        """What a metric makes of the answer to each variant of a text.

        on_call  is called with each variant, the call of each site that changes in it, and its row there
        until    the site behind which nothing is asked: passes end there, without an answer
        """
        order = list(text.outputs)
        # What a head makes of its queries, keys and values comes before the gates and norms of its site.
        edits = [edit for sites in variants.values() for edit in sites.values()]
        early = any(edit.at != "out" for edit in edits)
        # Only the states of the block below are handed on, and a block that reads an encoder takes more than these.
        is_crossed = any(call.cross for call in text.calls.values())
        starts = defaultdict(list)  # number of the first block that changes -> variants
        for key, sites in variants.items():
            start = min(order.index(self.blocks[name]) for name in sites)
            starts[0 if is_crossed else start].append(key)

        def run(skipped: Sequence[nn.Module], batch: Sequence[Key]) -> Tensor:
            # logits (n,V) of variants that begin behind the skipped blocks
            n, ran = len(batch), set()

            def change(site: Site, call: Call) -> Tensor:
                if early and site in ran:  # DiffLlama lays its maps over several values
                    raise HeadwiseError(
                        f"{site.name} of {type(call.layer).__name__} attends twice in a pass; pass at='out'"
                    )
                ran.add(site)
                edits = {}
                for row, key in enumerate(batch):
                    if site.name in variants[key]:
                        edits[row] = variants[key][site.name]
                        if on_call is not None:
                            on_call(key, site.name, call, row)
                out = call.out.clone()
                write_edits(call, edits, text.calls[site.name].options, out)
                if site.name == until:
                    raise _ReachedError
                return out

            outputs = {block: _repeated(text.outputs[block], n) for block in skipped}
            names = set().union(*(variants[key] for key in batch))
            with attach([self.sites[name] for name in names], change, early):
                model = _begun(self.model, outputs)
                stands_for(model, self.model)
                return answer_logits(model, text.ids.expand(n, -1), self.position)

        most = max(1, LARGEST // next(iter(text.calls.values())).out.numel())
        answers: dict[Key, float] = {}
        for start, keys in starts.items():
            for first in range(0, len(keys), most):
                batch = keys[first : first + most]
                with suppress(_ReachedError):
                    logits = run(order[:start], batch)
                    answers |= zip(batch, metric(logits).tolist(), strict=True)
                progress(len(answers), len(variants))
        return answers


class _ReachedError(Exception):
    """A pass has come to the last site that is asked about."""


def _begun(module: nn.Module, outputs: Mapping[nn.Module, Any]) -> nn.Module:
    """The module with blocks that compute nothing and give these outputs.

    What holds such a block is a shallow copy, so that other threads do not see it; all else is the module's own.
    """
    if module in outputs:
        block = copy.copy(module)
        block.forward = lambda *args, **keywords: outputs[module]
        return block
    children = dict(module.named_children())
    begun = {name: _begun(child, outputs) for name, child in children.items()}
    if begun == children:
        return module
    holder = copy.copy(module)
    holder._modules = {**module._modules, **begun}
    return holder


def _repeated(output: Any, n: int) -> Any:
    """What a block gave for one text, as for n: a tensor, or a tuple that begins with it."""
    if isinstance(output, tuple):
        return (_repeated(output[0], n), *output[1:])
    return output.expand(n, *output.shape[1:])


# One pair of texts


class Study:
    """One pair of texts in a model, and variants of the corrupted one. Effects are shares of the difference."""

    def __init__(
        self, passes: Passes, clean: Reading, text: Reading, metric: Metric
    ) -> None:
        self.passes, self.clean_text, self.text = passes, clean, text
        self.metric = metric
        if isinstance(metric, Compared):
            metric.check(len(text.answer))
        # what is compared in each text
        self.clean, self.corrupted = map(
            float, metric(torch.stack([clean.answer, text.answer]))
        )
        if self.clean == self.corrupted:
            raise HeadwiseError(
                "both texts give the answer the same logits: there is no difference to bring back"
            )

    def ask(
        self, variants: Mapping[Key, Variant], progress: Progress = no_progress
    ) -> dict[Key, float]:
        """How far the answer to each variant of the corrupted text has come from there to the clean one."""

        values = self.passes.ask(self.text, variants, self.metric, progress)
        whole = self.clean - self.corrupted
        return {key: (value - self.corrupted) / whole for key, value in values.items()}

    def variant(
        self, at: str, names: Iterable[str], tokens: Tokens = ALL
    ) -> dict[str, Edit]:
        """The corrupted text in which heads have this part of the clean run at these tokens."""
        parts: dict[str, dict[int, Any]] = defaultdict(dict)
        for name in names:
            site, n = place_of(name)
            clean = self.clean_text.calls[site]
            _require_made(clean, at)
            parts[site][n] = clean if at == "weights" else getattr(clean, at)[0, n]
        return {site: Edit(at, of_site, tokens) for site, of_site in parts.items()}

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
        # of each receiver the sites and numbers of its heads
        places = {
            receiver: list(map(place_of, receiver[1].split("+")))
            for receiver in receivers
        }
        last = 0
        for (at, _), of_receiver in places.items():
            for site, _ in of_receiver:
                _require_made(self.text.calls[site], at)
                last = max(last, order.index(site))
        received: dict[tuple[Receiver, str], dict[str, Edit]] = defaultdict(dict)

        def keep(sender: str, site: str, call: Call, row: int) -> None:
            for receiver, of_receiver in places.items():
                at = receiver[0]
                there = [n for place, n in of_receiver if place == site]
                if there and site != place_of(sender)[0]:
                    parts = {n: getattr(call, at)[row, n] for n in there}
                    received[receiver, sender][site] = Edit(at, parts)

        variants = {}
        for sender in [*self.text.names("out"), *groups]:
            first = order.index(place_of(sender)[0])
            if first < last:
                variants[sender] = self.variant("out", sender.split("+"))
                for site in order[first + 1 : last + 1]:
                    frozen = dict(enumerate(self.text.calls[site].out[0]))
                    variants[sender][site] = Edit("out", frozen)
        self.passes.ask(
            self.text, variants, self.metric, on_call=keep, until=order[last]
        )
        return self.ask(received, progress)


def _require_made(call: Call, at: str) -> None:
    """Refuse queries and keys of a module that makes its weights itself: what it makes them of is not known."""
    if call.weights is not None and at in ("q", "k"):
        raise HeadwiseError(
            f"at={at!r}: {type(call.layer).__name__} makes its weights itself, and what it makes them of is not "
            f"known; pass at='out', 'weights' or 'v'"
        )


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
