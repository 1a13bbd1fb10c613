"""Activation patching: what a head carries of the difference between two texts, and through which path.

A model reads a corrupted text; one part of it is given what it had while reading the clean text; how much of the clean
answer comes back is the effect of that part (Meng et al. 2022, arXiv 2202.05262; Wang et al. 2022, arXiv 2211.00593;
Heimersheim & Nanda 2024, arXiv 2404.15255). Effects are shares of the difference between the two answers: 0
changes nothing, 1 restores the clean answer.

Variants of a text are rows of one batch. A hook at each attention changes its rows, with a setter for each place.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.backends.torch_ import attend
from headwise.errors import HeadwiseError
from headwise.heads.statistics import unknown_head
from headwise.intervals import Interval, interval_of
from headwise.models.ask import answer_logits, device_of, evaluating, require_next
from headwise.models.hook import attach, hooked
from headwise.models.open import ids_of, token_of
from headwise.models.sites import Site, layers_of
from headwise.records import Call, head_name
from headwise.spec import resolve_kv_index
from headwise.words import unknown

# As `patch` explains them.
Ids = Tensor | Sequence[int] | Sequence[Sequence[int]] | str
Target = Sequence[int | str] | Sequence[Sequence[int]] | Tensor
Tokens = slice | list[int]  # at which something is changed
ALL = slice(None)  # every token
# Numbers of the residual stream, T times C of each text, that run as one batch. More leave the processor's cache, and
# larger batches of long texts took longer.
LARGEST = 2**19
SHARED = ("k", "v")  # places that belong to key/value heads, L3.KV1
READ = ("q", *SHARED)  # what a head makes of the residual stream

# ("q", "L3.H5") or ("k", "L3.KV1"): what of a head, or key/value head, reads
Receiver = tuple[str, str]
# a clean and a corrupted text (T,), and two targets
Pair = tuple[Tensor, Tensor, tuple[int, int] | None]
Metric = Callable[[Tensor], Tensor]  # logits (...,V) -> (...)
Progress = Callable[[int, int], None]  # steps done, and of all
Key = TypeVar("Key", bound=Hashable)


def no_progress(done: int, total: int) -> None:
    """Nobody is told."""


@dataclass(frozen=True)
class Patching:
    """What each head brings back of the clean answer, with its interval over pairs of texts.

    Over several pairs it is the share of the means: what comes back on average, over the mean difference. A mean of
    shares would hang on the pair whose two answers are nearest to each other.
    """

    at: str  # q, k, v, out or weights
    # head, or key/value head, -> share of the difference; 1 is all of it
    effects: dict[str, Interval]
    clean: Interval  # the difference of logits, answer minus other, of the clean texts
    corrupted: Interval  # the same of the corrupted ones
    # (T,), where positions="each"
    by_position: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    # (N,) share of each pair's own difference
    by_pair: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    def strongest(self, n: int = 5) -> list[str]:
        """The heads with the largest effects, the largest first."""
        return sorted(self.effects, key=lambda name: -abs(self.effects[name].mean))[:n]

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{name} {self.effects[name].mean:+.2f}" for name in self.strongest(3)
        )
        return f"Patching(at {self.at!r}, {self.clean.n} pairs: {parts}, ...)"


@torch.no_grad()
def patch(
    model: nn.Module,
    clean: Ids,
    corrupted: Ids,
    at: str = "out",
    *,
    heads: Iterable[str] | None = None,
    positions: Sequence[int] | str | None = None,
    target: Target | None = None,
    together: bool = False,
    progress: Progress = no_progress,
) -> Patching:
    """Give one head at a time, while the model reads `corrupted`, what it had while reading `clean`.

    The answer is read at the last position: the logit of the first target minus that of the second.

    Args:
        model: any model that `watch` watches and that answers with logits
        clean: ids (T,) of one text, or (N,T) of several; or, of a model that `open` opened, a string
        corrupted: as many, each of the same length as its clean one
        at: "out": what the head adds to; "weights": where it looks; "q", "k", "v": what it asks with, is found
            by, hands over. Keys and values belong to key/value heads, which are named L3.KV1
        heads: names, default all
        positions: at which tokens: a list, default all; "each" tries every token alone and fills `by_position`
        target: two token ids, or words such as " Mary": the answer to the clean text and the one to the corrupted
            text, or ids (N,2); default: what the model likes best after each
        together: patch all `heads` at once; the one effect is named "together"
        progress: is called with the number of pairs of texts done, and of all
    """
    require_next(model)
    if at not in PLACES:
        raise unknown(f"at={at!r} is no place of a head", at, PLACES)
    if together and at != "out":
        raise HeadwiseError(f"together=True is of at='out' alone, not of {at=}")
    pairs = _pairs(model, clean, corrupted, target)
    T = len(pairs[0][0])
    tokens = _tokens(positions, T)
    effects: dict[Any, list[float]] = defaultdict(list)  # of heads, or heads and tokens
    ends = []
    for study in _studies(model, pairs):
        names = _chosen(study.text.names(at), heads)
        ends.append((study.clean, study.corrupted))
        sets = {"together": names} if together else {name: [name] for name in names}
        table = study.effects(at, sets, tokens)
        for t in range(T if positions == "each" else 0):
            table |= study.effects(at, {(name, t): [name] for name in names}, [t])
        for key, effect in table.items():
            effects[key].append(effect)
        progress(len(ends), len(pairs))
    shares = _shares(effects, ends)
    by_position: dict[str, NDArray[np.float64]] = {}
    if positions == "each":
        for name in names:
            by_position[name] = np.array([shares.pop((name, t)).mean for t in range(T)])
    by_pair = {name: np.array(effects[name]) for name in shares}
    clean_end, corrupted_end = (
        interval_of(list(of_texts)) for of_texts in zip(*ends, strict=True)
    )
    return Patching(at, shares, clean_end, corrupted_end, by_position, by_pair)


@torch.no_grad()
def path_effects(
    model: nn.Module,
    clean: Ids,
    corrupted: Ids,
    receiver: str,
    at: str = "q",
    *,
    target: Target | None = None,
    senders: Iterable[str] | None = None,
) -> dict[str, Interval]:
    """Path patching: what each earlier head brings back of the clean answer through what one head reads.

    receiver  the head that reads, L3.H5, for at="q"; for "k" and "v" a key/value head, L3.KV1
    senders   heads of earlier layers, default all of them

    The sender gives its clean output; other heads between the two are frozen as they were in the corrupted text,
    feed-forwards run. The query, key or value that the receiver makes of this takes the place of its own, and
    everything after runs freely (Wang et al. 2022, section 3.1 and appendix B; Goldowsky-Dill et al. 2023,
    arXiv 2304.05969).
    """
    require_next(model)
    if at not in READ:
        raise unknown(f"at={at!r} is nothing that a head reads from another", at, READ)
    effects, ends = defaultdict(list), []
    for study in _studies(model, _pairs(model, clean, corrupted, target)):
        ends.append((study.clean, study.corrupted))
        _chosen(
            study.text.names(at), [receiver]
        )  # raises for a receiver that is not there
        for (_, name), effect in study.paths([(at, receiver)], senders).items():
            effects[name].append(effect)
    return _shares(effects, ends)


def _pairs(
    model: nn.Module, clean: Ids, corrupted: Ids, target: Target | None
) -> list[Pair]:
    """The arguments of `patch`, checked, pair by pair."""
    good, bad = (torch.as_tensor(ids_of(model, ids)) for ids in (clean, corrupted))
    if good.shape != bad.shape or good.ndim not in (1, 2) or good.numel() == 0:
        raise HeadwiseError(
            f"clean is {tuple(good.shape)} and corrupted {tuple(bad.shape)}: pass as many tokens in both, (T,) or (N,T)"
        )
    good, bad = (
        ids.reshape(-1, ids.shape[-1]) for ids in (good, bad)
    )  # of one pair, too, (N,T)
    targets: Any = [None] * len(good)
    if target is not None:
        words = target.tolist() if isinstance(target, Tensor) else target
        rows = torch.as_tensor(
            [token_of(model, x) if isinstance(x, str) else x for x in words]
        )
        if tuple(rows.shape) not in ((2,), (len(good), 2)):
            raise HeadwiseError(
                f"target is {tuple(rows.shape)}; pass two token ids, or ({len(good)}, 2)"
            )
        targets = rows.expand(len(good), 2).tolist()
    return list(zip(good, bad, targets, strict=True))


def _tokens(positions: Sequence[int] | str | None, T: int) -> Tokens:
    """The tokens that `patch` changes at once."""
    if positions is None or positions == "each":
        return ALL
    if isinstance(positions, str) or not len(
        positions
    ):  # `len`, as an array has no truth
        raise HeadwiseError(
            f"positions={positions!r} names no token; pass a list, or 'each'"
        )
    for position in positions:
        if not -T <= position < T:
            raise HeadwiseError(f"position {position} is not among the {T} tokens")
    return list(positions)


def _studies(model: nn.Module, pairs: Sequence[Pair]) -> Iterator[Study]:
    """The study of each pair; an error names the pair."""
    with evaluating(model):
        passes = Passes(model)
        for number, (clean, corrupted, target) in enumerate(pairs):
            texts = passes.read(clean), passes.read(corrupted)
            answer, other = target or [int(text.answer.argmax()) for text in texts]
            try:
                study = Study(passes, *texts, answer, other)
            except HeadwiseError as error:
                raise HeadwiseError(f"pair {number}, counted from 0: {error}") from None
            yield study


def _shares(
    effects: Mapping[Key, Sequence[float]], ends: Sequence[tuple[float, float]]
) -> dict[Key, Interval]:
    """Of each head the share of the means, from its share in each pair; `ends` are both differences of each pair."""
    size = np.subtract(*np.transpose(ends))  # (pairs,) what there is to bring back
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


# Variants of a text: a setter for each place


def set_q(call: Call, clean: Call, tokens: Tokens) -> Call:
    return call._replace(q=clean.q)


def set_k(call: Call, clean: Call, tokens: Tokens) -> Call:
    return call._replace(k=_put(call.k, clean.k, tokens))


def set_v(call: Call, clean: Call, tokens: Tokens) -> Call:
    return call._replace(v=_put(call.v, clean.v, tokens))


def set_weights(call: Call, clean: Call, tokens: Tokens) -> Call:
    """Weights of the clean queries and keys; the options, among them the mask, stay."""
    return call._replace(q=clean.q, k=clean.k, weights=clean.weights)


# What makes the output of heads; at k and v tokens count, elsewhere what heads give there is all that changes.
SETTERS = {"q": set_q, "k": set_k, "v": set_v, "weights": set_weights}
PLACES = ("out", *SETTERS)  # `at` of `patch`


def _put(part: Tensor, clean: Tensor, tokens: Tokens) -> Tensor:
    part = part.clone()
    part[:, :, tokens] = clean[:, :, tokens]
    return part


class Edit(NamedTuple):
    """What heads of an attention give in a variant, (T,E) by their numbers, at these tokens."""

    outs: Mapping[int, Tensor]
    tokens: Tokens = ALL


# a text in which some heads give something else, by the names of their sites
Variant = Mapping[str, Edit]


def _attended(call: Call) -> Tensor:
    """What the heads of a call give, (B,H,T,E), where each reads the key/value head of its number."""
    if (
        call.weights is not None
    ):  # the module made them itself, of what is not known: they stay
        return call.weights.to(call.v.dtype) @ call.v
    return attend(call.q, call.k, call.v, call.options)


def _of_heads(call: Call, heads: list[int]) -> Call:
    """A call with these query heads alone, and with as many key/value heads: those that they read."""
    read = [_index(call)[h] for h in heads]
    options = call.options
    options = options._replace(
        mask=None
        if options.mask is None
        else options.mask.for_heads(heads, call.q.shape[1]),
        sink=None if options.sink is None else torch.as_tensor(options.sink)[heads],
        gate=None if options.gate is None else torch.as_tensor(options.gate)[heads],
        kv_index=None,
    )
    weights = None if call.weights is None else call.weights[:, heads]
    q, k, v = call.q[:, heads], call.k[:, read], call.v[:, read]
    return call._replace(q=q, k=k, v=v, weights=weights, options=options)


def _index(call: Call) -> list[int]:
    """Of each query head the key/value head that it reads."""
    return list(
        resolve_kv_index(call.out.shape[1], call.k.shape[1], call.options.kv_index)
    )


def _readers(call: Call, at: str, n: int) -> list[int]:
    """The query heads whose output a head, or key/value head, makes at a place."""
    if call.weights is not None and at in ("q", "k"):
        raise HeadwiseError(
            f"at={at!r}: {type(call.layer).__name__} makes its weights itself, and what it makes them of is not "
            f"known; pass at='out', 'weights' or 'v'"
        )
    return [h for h, g in enumerate(_index(call)) if g == n] if at in SHARED else [n]


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
            attach({site: partial(keep, site) for site in self.sites.values()}),
            hooked((block.register_forward_hook, record) for block in blocks),
        ):
            answer = answer_logits(self.model, row, self.position)[0]
        return Reading(row, answer, calls, outputs)

    def ask(
        self,
        text: Reading,
        variants: Mapping[Key, Variant],
        metric: Metric,
        early: bool = False,
        progress: Progress = no_progress,
        on_call: Callable[[Key, str, Call, int], None] | None = None,
        until: str = "",
    ) -> dict[Key, float]:
        """What a metric makes of the answer to each variant of a text.

        early    do the heads give it before the gates and norms of their site?
        on_call  is called with the call of each site that changes, and the row of the variant there
        until    the site behind which nothing is asked: passes end there, without an answer
        """
        order = list(text.outputs)
        # Only the states of the block below are handed on, and a block that reads an encoder takes more than these.
        is_crossed = any(call.cross for call in text.calls.values())
        starts = defaultdict(list)  # number of the first block that changes -> variants
        for key, edits in variants.items():
            start = min(order.index(self.blocks[name]) for name in edits)
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
                out = call.out.clone()
                for row, key in enumerate(batch):
                    if site.name not in variants[key]:
                        continue
                    edit = variants[key][site.name]
                    if on_call is not None:
                        on_call(key, site.name, call, row)
                    for h, new in edit.outs.items():
                        out[row, h, edit.tokens] = new[edit.tokens].to(out)
                if site.name == until:
                    raise _ReachedError
                return out

            outputs = {block: _repeated(text.outputs[block], n) for block in skipped}
            names = set().union(*(variants[key] for key in batch))
            handlers = {
                self.sites[name]: partial(change, self.sites[name]) for name in names
            }
            with attach(handlers, early):
                model = _begun(self.model, outputs)
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
    """One pair of texts in a model, and variants of the corrupted one. Effects are shares of the difference.

    answer, other  the two tokens that are compared; without another the answer's log-probability counts
    """

    def __init__(
        self,
        passes: Passes,
        clean: Reading,
        text: Reading,
        answer: int,
        other: int | None,
    ) -> None:
        self.passes, self.clean_text, self.text = passes, clean, text
        self.answer, self.other = answer, other
        for token in (answer, other):
            if token is not None and not 0 <= token < len(text.answer):
                raise HeadwiseError(
                    f"target {token} is outside the vocabulary of {len(text.answer)} tokens"
                )
        if answer == other:
            raise HeadwiseError(
                f"both texts are answered with token {answer}, so there is no difference to bring back; pass "
                f"target=(answer, other), or texts that the model answers differently"
            )
        # the difference that each text has
        self.clean, self.corrupted = map(
            float, self.metric(torch.stack([clean.answer, text.answer]))
        )
        if self.clean == self.corrupted:
            raise HeadwiseError(
                "both texts give the answer the same logits: there is no difference to bring back"
            )

    def metric(self, logits: Tensor) -> Tensor:
        """The logit of the answer minus that of the other; where there is none, the answer's log-probability."""
        if self.other is None:
            return logits.cpu().double().log_softmax(-1)[..., self.answer]
        return (
            logits[..., self.answer].cpu().double()
            - logits[..., self.other].cpu().double()
        )

    def ask(
        self,
        variants: Mapping[Key, Variant],
        early: bool = False,
        progress: Progress = no_progress,
    ) -> dict[Key, float]:
        """How far the answer to each variant of the corrupted text has come from there to the clean one."""

        def share(logits: Tensor) -> Tensor:
            return (self.metric(logits) - self.corrupted) / (
                self.clean - self.corrupted
            )

        return self.passes.ask(self.text, variants, share, early, progress)

    def effects(
        self,
        at: str,
        sets: Mapping[Key, Iterable[str]],
        tokens: Tokens = ALL,
        progress: Progress = no_progress,
    ) -> dict[Key, float]:
        """The effect of each of these sets of heads, patched together; of several sites at "out" alone."""
        variants = {key: self.variant(at, names, tokens) for key, names in sets.items()}
        return self.ask(variants, at != "out", progress)

    def variant(self, at: str, names: Iterable[str], tokens: Tokens = ALL) -> Variant:
        """The corrupted text in which heads have this part of the clean run at these tokens."""
        outs: dict[str, dict[int, Tensor]] = defaultdict(dict)
        for name in names:
            site, n = place_of(name)
            call, clean = self.text.calls[site], self.clean_text.calls[site]
            if at == "out":
                outs[site][n] = clean.out[0, n]
                continue
            heads = _readers(call, at, n)
            changed = SETTERS[at](
                _of_heads(call, heads), _of_heads(clean, heads), tokens
            )
            outs[site] |= zip(heads, _attended(changed)[0], strict=True)
        # Other keys and values change what heads give at every token that looks at them.
        reach = ALL if at in SHARED else tokens
        return {site: Edit(of_site, reach) for site, of_site in outs.items()}

    def paths(
        self,
        receivers: Sequence[Receiver],
        senders: Iterable[str] | None = None,
        progress: Progress = no_progress,
    ) -> dict[tuple[Receiver, str], float]:
        """By receiver, such as ("q", "L3.H5"), and earlier head, a sender: its effect through what the receiver reads.

        First each sender gives its clean output, heads above it are frozen, and what all receivers make of that is
        kept. Then each receiver has it, from one sender after another.
        """
        order = list(self.text.calls)  # from the first layer up
        last = max(order.index(place_of(name)[0]) for _, name in receivers)
        arrived: dict[Receiver, dict[str, Tensor]] = defaultdict(dict)

        def keep(sender: str, site: str, call: Call, row: int) -> None:
            for at, name in receivers:
                place, n = place_of(name)
                if place == site != place_of(sender)[0]:
                    arrived[at, name][sender] = getattr(call, at)[row, n].clone()

        heads = self.text.names("out")
        below = [head for head in heads if place_of(head)[0] in order[:last]]
        variants = {}
        for sender in _chosen(below, senders) if below else []:
            above = order[order.index(place_of(sender)[0]) + 1 : last + 1]
            frozen = {
                site: Edit(dict(enumerate(self.text.calls[site].out[0])))
                for site in above
            }
            variants[sender] = {**self.variant("out", [sender]), **frozen}
        self.passes.ask(
            self.text, variants, self.metric, on_call=keep, until=order[last]
        )
        received: dict[tuple[Receiver, str], Variant] = {}
        for (at, name), parts in arrived.items():
            site, n = place_of(name)
            readers = _readers(self.text.calls[site], at, n)
            call = _of_heads(self.text.calls[site], readers)
            rows: Any = {
                each: getattr(call, each).expand(len(parts), -1, -1, -1)
                for each in READ
            }
            rows[at] = torch.stack(list(parts.values()))[:, None].expand_as(rows[at])
            for sender, outs in zip(
                parts, _attended(call._replace(**rows)), strict=True
            ):
                edit = Edit(dict(zip(readers, outs, strict=True)))
                received[(at, name), sender] = {site: edit}
        return self.ask(received, True, progress)


def place_of(name: str) -> tuple[str, int]:
    """The site of a head, or key/value head, and its number there: ("L3", 5) of L3.H5."""
    site, _, last = name.rpartition(".")
    return site, int(
        last.lstrip("HKV")
    )  # without the letters, "H" or "KV", before the number


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
