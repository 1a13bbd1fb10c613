"""Activation patching: what a head carries of the difference between two texts, and through which path.

A model reads a corrupted text; one part of it is given what it had while reading the clean text; how much of the clean
answer comes back is the effect of that part (Meng et al. 2022, arXiv 2202.05262; Wang et al. 2022, arXiv 2211.00593;
Heimersheim & Nanda 2024, arXiv 2404.15255). Effects are shares: 0 changes nothing, 1 restores the clean answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads.effect import slopes_of
from headwise.heads.statistics import unknown_head
from headwise.intervals import Interval, interval_of
from headwise.models.ask import answer_logits, evaluating, require_next, require_slopes
from headwise.models.hook import attach, attend_by_rows, hooked, inside
from headwise.models.open import ids_of, token_of
from headwise.models.sites import Layer, Site, layers_of
from headwise.records import Call, head_name
from headwise.words import unknown

PLACES = ("q", "k", "v", "out", "weights")

Ids = Tensor | Sequence[int] | Sequence[Sequence[int]] | str
Target = Sequence[int | str] | Sequence[Sequence[int]] | Tensor
SHARED = ("k", "v")  # places that belong to key/value heads, L3.KV1
LARGEST = 2**19  # numbers of the residual stream that run as one batch: more leave the processor's cache

Place = tuple[str, tuple[int, ...]]  # the name of a site, and the query heads whose output changes there


@dataclass(frozen=True)
class Patching:
    """What each head brings back of the clean answer; the mean over pairs of texts, with its interval."""

    at: str  # q, k, v, out or weights
    effects: dict[str, Interval]  # head, or key/value head, -> share of the difference; 1 is all of it
    clean: Interval  # the difference of logits, answer minus other, of the clean texts
    corrupted: Interval
    by_position: dict[str, NDArray[np.float64]] = field(default_factory=dict)  # (T,), where positions="each"

    def strongest(self, n: int = 5) -> list[str]:
        """The heads with the largest effects, the largest first."""
        return sorted(self.effects, key=lambda name: -abs(self.effects[name].mean))[:n]

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {self.effects[name].mean:+.2f}" for name in self.strongest(3))
        return f"Patching(at {self.at!r}, {self.clean.n} pairs: {parts}, ...)"


@torch.inference_mode(False)
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
    fast: bool = False,
    contexts: int | None = None,
    progress: Callable[[int, int], None] | None = None,
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
        fast: an estimate from one backward pass, of `out` alone: (clean - corrupted) times the slope of the
            answer (Nanda 2023, "Attribution patching"; Syed et al. 2023, arXiv 2310.10348)
        contexts: of `out` alone, and of all heads: the largest of what a head brings to the corrupted text, of
            what it takes from the clean one, and of what it does beside as many random halves of the heads. It
            finds heads that are needed together and heads that stand in for each other; 0 has no random halves
        progress: is called with the number of heads done, and of all
    """
    require_next(model)
    if at not in PLACES:
        raise unknown(f"at={at!r} is no place of a head", at, PLACES)
    if fast and (at != "out" or together):
        raise HeadwiseError(f"fast=True estimates heads one at a time and at='out' alone, not at={at!r}, {together=}")
    if contexts is not None and (at != "out" or together or fast or heads is not None or positions is not None):
        raise HeadwiseError(f"contexts={contexts} tries all heads at all tokens and at='out'; leave the others out")
    if fast:
        require_slopes(model)
    pairs, layers = _pairs(model, clean, corrupted, target), layers_of(model)
    effects: dict[str, list[float]] = defaultdict(list)  # of each head what every pair of texts gave
    by_position: dict[str, list[float]] = defaultdict(list)  # pair after pair, token after token
    ends = []
    with evaluating(model):
        for number, pair in enumerate(pairs, 1):
            study = Study(model, layers, *pair)
            names = chosen_heads(study.names(at), heads, at)
            ends.append((study.clean, study.corrupted))
            if positions == "each":
                for t in range(len(pair[0])):
                    for name, effect in study.effects(at, names, [t]).items():
                        by_position[name].append(effect)
            rows = _positions(positions, len(pair[0]))
            if contexts is not None:
                table = study.carried(contexts)
            else:
                table = study.estimate(names, rows) if fast else study.effects(at, names, rows, together)
            for name, effect in table.items():
                effects[name].append(effect)
            if progress is not None:
                progress(number, len(pairs))
    whole, none = (interval_of(list(values)) for values in zip(*ends, strict=True))
    intervals = {name: interval_of(values) for name, values in effects.items()}
    means = {name: np.mean(np.reshape(x, (len(pairs), -1)), 0) for name, x in by_position.items()}
    return Patching(at, intervals, whole, none, means)


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
    if at not in ("q", *SHARED):
        raise unknown(f"at={at!r} is nothing that a head reads from another", at, ("q", *SHARED))
    pairs, layers = _pairs(model, clean, corrupted, target), layers_of(model)
    effects: dict[str, list[float]] = defaultdict(list)
    with evaluating(model):
        for pair in pairs:
            study = Study(model, layers, *pair)
            chosen_heads(study.names(at), [receiver], at)
            for name, effect in study.paths(receiver, at, senders).items():
                effects[name].append(effect)
    return {name: interval_of(values) for name, values in effects.items()}


def _pairs(
    model: nn.Module, clean: Ids, corrupted: Ids, target: Target | None
) -> list[tuple[Tensor, Tensor, list[int] | None]]:
    """Pairs of texts (T,), each with its two targets."""
    good, bad = (
        torch.as_tensor(ids_of(model, ids)).clone() for ids in (clean, corrupted)
    )  # not of torch.inference_mode
    if good.shape != bad.shape:
        raise HeadwiseError(
            f"clean is {tuple(good.shape)} and corrupted {tuple(bad.shape)}: pass as many tokens in both"
        )
    if good.ndim not in (1, 2) or good.numel() == 0:
        raise HeadwiseError(f"clean is {tuple(good.shape)}; pass ids (T,) or (N,T)")
    good, bad = (ids.reshape(-1, ids.shape[-1]) for ids in (good, bad))
    targets: list[list[int] | None] = [None] * len(good)
    if target is not None:
        ids = target.tolist() if isinstance(target, Tensor) else target
        rows = torch.as_tensor([token_of(model, x) if isinstance(x, str) else x for x in ids])
        if tuple(rows.shape) not in ((2,), (len(good), 2)):
            raise HeadwiseError(f"target is {tuple(rows.shape)}; pass two token ids, or ({len(good)}, 2)")
        targets = rows.expand(len(good), 2).tolist()
    return list(zip(good, bad, targets, strict=True))


def _positions(positions: Sequence[int] | str | None, T: int) -> list[int] | None:
    if positions is None or positions == "each":
        return None
    if isinstance(positions, str):
        raise HeadwiseError(f"positions={positions!r} is not known; pass a list, or 'each'")
    for position in positions:
        if not -T <= position < T:
            raise HeadwiseError(f"position {position} is not among the {T} tokens")
    return [position % T for position in positions]


# One pair of texts


class Study:
    """One pair of texts in a model: both runs, and variants of the corrupted one. Effects are shares of the difference.

    Variants begin at the layer in which they differ: what lies below it is not computed again.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        clean: Tensor,
        corrupted: Tensor,
        target: Sequence[int | None] | None,
        position: int = -1,
    ) -> None:
        device = next(model.parameters()).device
        self.model, self.layers, self.position, self.texts = model, layers, position, (clean, corrupted)
        self.ids = corrupted[None].to(device)
        self.clean_calls, good = calls_of(model, layers, clean[None].to(device), position)
        self.n_texts = 1
        self.outputs: dict[nn.Module, Any] = {}  # of each block, in the corrupted run
        with hooked((layer.block.register_forward_hook, self._record) for layer in layers):
            self.calls, bad = calls_of(model, layers, self.ids, position)
        self.target = (int(good.argmax()), int(bad.argmax())) if target is None else tuple(target)
        if self.target[0] == self.target[1]:
            raise HeadwiseError(
                f"both texts are answered with token {self.target[0]}, so there is no difference to bring back; pass "
                f"target=(answer, other), or texts that the model answers differently"
            )
        self.clean, self.corrupted = (float(self._difference(x)) for x in (good, bad))
        if self.clean == self.corrupted:
            raise HeadwiseError("both texts give the answer the same logits: there is no difference to bring back")

    def _record(self, block: nn.Module, args: Any, gave: Any) -> None:
        self.outputs[block] = gave

    @contextmanager
    def _from(self, layer: Layer, n: int) -> Iterator[None]:
        """Below this layer the corrupted run is replayed, and the layer reads its one text n times, as a batch.

        The layers of a decoder read what an encoder gives, too: there the whole model reads n texts.
        """
        if any(call.cross for call in self.calls.values()):
            self.n_texts = n
            try:
                yield
            finally:
                self.n_texts = 1
            return

        def widen(block: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            x = args[0] if args else keywords["hidden_states"]
            wide = x.expand(n, *x.shape[1:])
            return ((wide, *args[1:]), keywords) if args else (args, keywords | {"hidden_states": wide})

        with ExitStack() as stack:
            here = stack.enter_context(inside())
            for below in self.layers[: self.layers.index(layer)]:
                stack.enter_context(_replayed(below.block, here, self.outputs[below.block]))
            stack.enter_context(hooked([(layer.block.register_forward_pre_hook, widen)], with_kwargs=True))
            yield

    def _difference(self, logits_v: Tensor) -> Tensor:
        """The logit of the answer minus that of the other; where there is none, the answer's log-probability."""
        answer, other = self.target
        if other is None:
            return logits_v.cpu().double().log_softmax(-1)[..., answer]  # some devices have no float64
        return logits_v[..., answer].cpu().double() - logits_v[..., other].cpu().double()

    def _answers(self) -> Tensor:
        """The difference (n,) of each text that runs, from now on."""
        return self._difference(answer_logits(self.model, self.ids.expand(self.n_texts, -1), self.position))

    @property
    def _at_once(self) -> int:
        """Variants that run as one batch."""
        call = next(iter(self.calls.values()))
        return max(1, LARGEST // (self.ids.numel() * call.out.shape[1] * call.out.shape[3]))

    def _share(self, answers: Tensor) -> list[float]:
        return [(answer - self.corrupted) / (self.clean - self.corrupted) for answer in answers.tolist()]

    def names(self, at: str) -> dict[str, Place]:
        """Every head, or key/value head, of the model by name."""
        places: dict[str, Place] = {}
        for layer in self.layers:
            site, call = layer.site, self.calls[layer.site.name]
            H, G = call.q.shape[1], call.k.shape[1]
            index = call.options.kv_index or [h // (H // G) for h in range(H)]
            if at in SHARED:
                for g in range(G):
                    places[f"{site.name}.KV{g}"] = site.name, tuple(h for h in range(H) if index[h] == g)
            else:
                places |= {head_name(site.name, h): (site.name, (h,)) for h in range(H)}
        return places

    def effects(
        self, at: str, names: Sequence[str], positions: Sequence[int] | None, together: bool = False
    ) -> dict[str, float]:
        """The effect of each of these heads alone, or of all of them at once under the name "together"."""
        if together:
            return {"together": self._together(at, names, positions)}
        places = self.names(at)
        effects: dict[str, float] = {}
        for layer in self.layers:
            here = [name for name in names if places[name][0] == layer.site.name]
            source, rows = self._source(layer.site, at, positions)
            answers = self._variants(layer, [places[name][1] for name in here], source, rows)
            effects |= dict(zip(here, answers, strict=True))
        return effects

    def at_each(self, name: str, positions: Sequence[int]) -> list[float]:
        """The effect of what a head gives at each of these positions alone."""
        site, members = self.names("out")[name]
        layer = next(layer for layer in self.layers if layer.site.name == site)
        clean, out = self.clean_calls[site].out, self.calls[site].out
        source = out.repeat(len(positions), 1, 1, 1)
        for i, t in enumerate(positions):
            source[i, :, t] = clean[0, :, t]
        return self._variants(layer, [members] * len(positions), source, list(range(out.shape[2])))

    def carried(self, contexts: int = 0) -> dict[str, float]:
        """What each head carries of the difference: the largest of what it brings, takes, and does in random contexts.

        Of two heads that are needed at once neither brings anything to the corrupted text alone, but each takes all
        from the clean one; of two of which either will do, each brings something, and neither takes anything. Where
        both are at work at once, a head matters only beside some of the others: `contexts` are random halves of all
        heads, which give their clean output, and each head joins or leaves them.
        """
        names = list(self.names("out"))
        reverse = Study(self.model, self.layers, *self.texts[::-1], self.target[::-1], self.position)
        tables = [self.effects("out", names, None), reverse.effects("out", names, None)]
        generator = torch.Generator().manual_seed(0)
        for _ in range(contexts):
            drawn = torch.rand(len(names), generator=generator) < 0.5
            tables.append(self._joining({name for name, chosen in zip(names, drawn, strict=True) if chosen}))
        return {name: max((table[name] for table in tables), key=abs) for name in names}

    def _joining(self, half: set[str]) -> dict[str, float]:
        """What each head does beside these, which give their clean output: by joining them, or by leaving them."""
        names = list(self.names("out"))
        joined = torch.tensor([name in half for name in names])
        clean = torch.cat([joined[None], joined ^ torch.eye(len(names), dtype=torch.bool)])  # (1+heads, heads)
        shares: list[float] = []
        for rows in torch.split(clean, self._at_once):

            def change(site: Site, call: Call, rows: Tensor = rows) -> Tensor:
                here = rows[:, [names.index(head) for head in site.heads]].to(call.out.device)
                return torch.where(here[:, :, None, None], self.clean_calls[site.name].out, call.out)

            with attach({layer.site: partial(change, layer.site) for layer in self.layers}):
                answers = answer_logits(self.model, self.ids.expand(len(rows), -1), self.position)
            shares += self._share(self._difference(answers))
        moved = [share - shares[0] for share in shares[1:]]
        return {name: -more if name in half else more for name, more in zip(names, moved, strict=True)}

    def _source(self, site: Site, at: str, positions: Sequence[int] | None) -> tuple[Tensor, list[int]]:
        """What the heads of a site give, (1,H,T,E), with this part of the clean run, and the rows that take it."""
        call, clean = self.calls[site.name], self.clean_calls[site.name]
        every = list(range(call.q.shape[2]))
        places = range(call.k.shape[2]) if at in SHARED else every  # keys and values, or queries
        chosen = list(places if positions is None else positions)
        if at == "out":
            return clean.out, chosen
        _require_scores(call, at)
        plain = _attend(call, call.v)
        if not torch.allclose(plain, call.out, rtol=1e-2, atol=1e-3 * float(plain.abs().max())):
            raise HeadwiseError(
                f"at={at!r}: {site.name} gates or norms what its heads give before W_O, so other queries, keys or "
                f"values do not say what W_O reads; pass at='out'"
            )
        if at == "weights":
            return _attend(clean._replace(options=call.options), call.v), chosen
        if at == "q":
            return _attend(call._replace(q=clean.q), call.v), chosen
        changed: Tensor = getattr(call, at).clone()
        changed[:, :, chosen] = getattr(clean, at)[:, :, chosen]
        return (_attend(call._replace(k=changed), call.v) if at == "k" else _attend(call, changed)), every

    def _variants(self, layer: Layer, heads: Sequence[Sequence[int]], source: Tensor, rows: list[int]) -> list[float]:
        """Effects of variants of the corrupted run; in variant i heads[i] of the layer give source[0] or [i]."""
        effects: list[float] = []
        for start in range(0, len(heads), self._at_once):
            part = slice(start, start + self._at_once)

            def change(call: Call, part: slice = part) -> Tensor:
                return _replaced(call.out, heads[part], source if len(source) == 1 else source[part], rows)

            with self._from(layer, len(heads[part])), attach({layer.site: change}):
                effects += self._share(self._answers())
        return effects

    def _together(self, at: str, names: Sequence[str], positions: Sequence[int] | None) -> float:
        """The effect of all these heads at once."""
        places = self.names(at)
        chosen: dict[str, list[int]] = {}
        for name in names:
            chosen.setdefault(places[name][0], []).extend(places[name][1])

        def change(site: Site, call: Call) -> Tensor:
            return _replaced(call.out, [chosen[site.name]], *self._source(site, at, positions))

        sites = [layer.site for layer in self.layers if layer.site.name in chosen]
        with attach({site: partial(change, site) for site in sites}):
            return self._share(self._answers())[0]

    def estimate(self, names: Sequence[str], positions: Sequence[int] | None) -> dict[str, float]:
        """What one backward pass says of the effect of each head's output."""
        slopes = {site.name: slope for site, _, slope in slopes_of([x.site for x in self.layers], self._answers)}
        effects: dict[str, float] = {}
        for name, (site, (h,)) in self.names("out").items():
            if name in names:
                rows = list(range(self.ids.shape[1]) if positions is None else positions)
                moved = self.clean_calls[site].out[0, h, rows] - self.calls[site].out[0, h, rows]
                effects[name] = float((moved * slopes[site][0, h, rows]).sum()) / (self.clean - self.corrupted)
        return effects

    def paths(self, receiver: str, at: str, senders: Iterable[str] | None) -> dict[str, float]:
        """The effect of each earlier head through what the receiver reads."""
        site, members = self.names(at)[receiver]
        layer = next(layer for layer in self.layers if layer.site.name == site)
        earlier = self.layers[: self.layers.index(layer)]
        every = {name: place for name, place in self.names("out").items() if place[0] in {x.site.name for x in earlier}}
        names = set(chosen_heads(every, senders, "out")) if every else set()
        chosen = [name for name in every if name in names]
        if not chosen:
            return {}
        _require_scores(self.calls[site], at)
        parts = torch.cat([self._read_by(layer, at, sender, every, chosen) for sender in earlier])
        call = self.calls[site]
        every_row = list(range(call.q.shape[2]))
        reads = (call._replace(**{at: part[None]}) for part in parts)
        source = torch.cat([_attend(each, each.v) for each in reads])
        return dict(zip(chosen, self._variants(layer, [members] * len(chosen), source, every_row), strict=True))

    def _read_by(
        self, receiver: Layer, at: str, layer: Layer, places: Mapping[str, Place], senders: Sequence[str]
    ) -> Tensor:
        """Queries, keys or values (n,H,T,D) of the receiver's layer, where one head of an earlier layer after another

        gives its clean output. Other heads between the two are frozen, feed-forwards run.
        """
        heads = [places[name][1] for name in senders if places[name][0] == layer.site.name]
        first, last = self.layers.index(layer), self.layers.index(receiver)
        kept: list[Tensor] = []

        def change(call: Call) -> Tensor:
            return _replaced(call.out, heads, self.clean_calls[layer.site.name].out, range(call.out.shape[2]))

        def keep(call: Call) -> None:
            kept.append(getattr(call, at))
            raise _StopError

        def freeze(site: Site, call: Call) -> Tensor:
            return self.calls[site.name].out.expand_as(call.out)

        between = {x.site: partial(freeze, x.site) for x in self.layers[first + 1 : last]}
        handlers: dict[Site, Callable[[Call], Tensor | None]] = {layer.site: change, **between, receiver.site: keep}
        if heads:
            with self._from(layer, len(heads)), attach(handlers), suppress(_StopError):
                self._answers()
        return kept[0] if kept else getattr(self.calls[receiver.site.name], at)[:0]


def _attend(call: Call, v: Tensor) -> Tensor:
    """What a call would give of other values."""
    if call.weights is None:
        return attend_by_rows(call.q, call.k, v, call.options)
    return call.weights.to(v.dtype) @ v.repeat_interleave(call.weights.shape[1] // v.shape[1], 1)


def _require_scores(call: Call, at: str) -> None:
    if call.weights is not None and at in ("q", "k"):
        raise HeadwiseError(
            f"at={at!r}: {type(call.layer).__name__} makes its weights itself, and what it makes them of is not known; "
            f"pass at='out', 'weights' or 'v'"
        )


def _replaced(out: Tensor, heads: Sequence[Sequence[int]], source: Tensor, rows: Sequence[int]) -> Tensor:
    """Outputs (n,H,T,E) in which heads[i] of variant i give source[0], or source[i], in these rows."""
    out, places = out.clone(), list(rows)
    for i, members in enumerate(heads):
        for h in members:
            out[i, h, places] = source[i % len(source), h, places].to(out)
    return out


def calls_of(
    model: nn.Module, layers: Sequence[Layer], ids: Tensor, position: int = -1
) -> tuple[dict[str, Call], Tensor]:
    """Each attention's call, and the logits (V,) of the token that the model answers with."""
    calls: dict[str, Call] = {}

    def keep(site: Site, call: Call) -> None:
        if site.name in calls:
            raise HeadwiseError(
                f"{site.name} of {type(model).__name__} runs several times in one pass, and which of its runs is to be "
                f"patched is not known; watch it instead, with headwise.watch"
            )
        calls[site.name] = call

    with attach({layer.site: partial(keep, layer.site) for layer in layers}):
        return calls, answer_logits(model, ids, position)[0]


class _StopError(Exception):
    """What was wanted of a forward pass is there; no need to go on."""


class _Replay:
    """The `forward` of a layer that computes nothing where it is replayed: one for all threads that do so at a time."""

    def __init__(self, block: nn.Module) -> None:
        self.block, self.forward, self.before = block, block.forward, vars(block).get("forward")
        self.outputs: list[tuple[Callable[[], bool], Any]] = []

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        for here, output in [*self.outputs]:
            if here():
                return output
        return self.forward(*args, **keywords)

    def __reduce__(self) -> Any:
        return _Replay, (self.block,)  # a copy of the model, made meanwhile in another thread, computes


@contextmanager
def _replayed(block: nn.Module, here: Callable[[], bool], output: Any) -> Iterator[None]:
    """Inside this block of code, and where `here` says so, a layer computes nothing and gives what it gave before."""
    with _lock:
        replay = block.forward if isinstance(block.forward, _Replay) else _Replay(block)
        replay.outputs.append((here, output))
        block.forward = replay
    try:
        yield
    finally:
        with _lock:
            replay.outputs = [each for each in replay.outputs if each[0] is not here]
            if not replay.outputs:
                del block.forward
                if replay.before is not None:
                    block.forward = replay.before


_lock = Lock()


def chosen_heads(places: dict[str, Place], heads: Iterable[str] | None, at: str) -> list[str]:
    if isinstance(heads, str):
        raise HeadwiseError(f"heads={heads!r} must be a list of names, such as [{heads!r}]")
    names = list(places) if heads is None else list(heads)
    for name in names:
        if name not in places:
            if at in SHARED and ".KV" not in name:
                raise HeadwiseError(f"{name}: keys and values belong to key/value heads, such as {next(iter(places))}")
            raise unknown_head(name, list(places))
    return names
