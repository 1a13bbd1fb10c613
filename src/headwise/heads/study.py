"""Two texts in one model: both runs, and variants of the second in which heads have what they had in the first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads.statistics import unknown_head
from headwise.models.ask import hooked, logits
from headwise.models.sites import Site, attach, attend_by_rows
from headwise.models.stacks import Layer
from headwise.records import Call, head_name

SHARED = ("k", "v")  # places that belong to key/value heads, L3.KV1
LARGEST = 2**19  # numbers of the residual stream that run as one batch: more leave the processor's cache

Place = tuple[str, tuple[int, ...]]  # the name of a site, and the query heads whose output changes there


class Study:
    """One pair of texts in a model: both runs, and variants of the corrupted one. Effects are shares of the difference.

    Variants begin at the layer in which they differ: what lies below it is not computed again.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], clean: Tensor, corrupted: Tensor, target: Sequence[int] | None
    ) -> None:
        device = next(model.parameters()).device
        self.model, self.layers = model, layers
        self.ids = corrupted[None].to(device)
        self.clean_calls, good = self._calls(clean[None].to(device))
        self.outputs: dict[nn.Module, Any] = {}  # of each block, in the corrupted run
        with hooked(layer.block.register_forward_hook(self._record) for layer in layers):
            self.calls, bad = self._calls(self.ids)
        self.target = (int(good.argmax()), int(bad.argmax())) if target is None else (target[0], target[1])
        if self.target[0] == self.target[1]:
            raise HeadwiseError(
                f"both texts are answered with token {self.target[0]}, so there is no difference to bring back; pass "
                f"target=(answer, other), or texts that the model answers differently"
            )
        self.clean, self.corrupted = (float(self._difference(x)) for x in (good, bad))
        if self.clean == self.corrupted:
            raise HeadwiseError("both texts give the answer the same logits: there is no difference to bring back")

    def _calls(self, ids: Tensor) -> tuple[dict[str, Call], Tensor]:
        """Each attention's call, and the logits (V,) of the last position."""
        calls: dict[str, Call] = {}

        def keep(site: Site, call: Call) -> None:
            calls[site.name] = call

        with attach({layer.site: partial(keep, layer.site) for layer in self.layers}, self.model):
            return calls, logits(self.model, ids, last=True)[0, -1]

    def _record(self, block: nn.Module, args: Any, gave: Any) -> None:
        self.outputs[block] = gave

    @contextmanager
    def _from(self, layer: Layer, n: int) -> Iterator[None]:
        """Below this layer the corrupted run is replayed, and the layer reads its one text n times, as a batch."""

        def widen(block: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            x = args[0] if args else keywords["hidden_states"]
            wide = x.expand(n, *x.shape[1:])
            return ((wide, *args[1:]), keywords) if args else (args, keywords | {"hidden_states": wide})

        with ExitStack() as stack:
            for below in self.layers[: self.layers.index(layer)]:
                stack.enter_context(_replayed(below.block, self.outputs[below.block]))
            stack.enter_context(hooked([layer.block.register_forward_pre_hook(widen, with_kwargs=True)]))
            yield

    def _difference(self, logits_v: Tensor) -> Tensor:
        return logits_v[..., self.target[0]] - logits_v[..., self.target[1]]

    def _answers(self) -> Tensor:
        """The difference (n,) of each text that runs, from now on."""
        return self._difference(logits(self.model, self.ids, last=True)[:, -1])

    @property
    def _at_once(self) -> int:
        """Variants that run as one batch."""
        call = next(iter(self.calls.values()))
        return max(1, LARGEST // (self.ids.numel() * call.q.shape[1] * call.q.shape[3]))

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

    def by_position(self, at: str, names: Sequence[str]) -> dict[str, list[float]]:
        """The effect of each of these heads at each token alone, (T,)."""
        columns = [self.effects(at, names, [t]) for t in range(self.ids.shape[1])]
        return {name: [column[name] for column in columns] for name in names}

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

    def _source(self, site: Site, at: str, positions: Sequence[int] | None) -> tuple[Tensor, list[int]]:
        """What the heads of a site give, (1,H,T,E), with this part of the clean run, and the rows that take it."""
        call, clean = self.calls[site.name], self.clean_calls[site.name]
        every = list(range(call.q.shape[2]))
        chosen = every if positions is None else list(positions)
        if at == "out":
            return clean.out, chosen
        plain = attend_by_rows(call.q, call.k, call.v, call.options)
        if not torch.allclose(plain, call.out, rtol=1e-2, atol=1e-3 * float(plain.abs().max())):
            raise HeadwiseError(
                f"at={at!r}: {site.name} gates or norms what its heads give before W_O, so other queries, keys or "
                f"values do not say what W_O reads; pass at='out'"
            )
        if at in ("q", "weights"):
            k = clean.k if at == "weights" else call.k
            return attend_by_rows(clean.q, k, call.v, call.options), chosen
        changed: Tensor = getattr(call, at).clone()
        changed[:, :, chosen] = getattr(clean, at)[:, :, chosen]
        k, v = (changed, call.v) if at == "k" else (call.k, changed)
        return attend_by_rows(call.q, k, v, call.options), every

    def _variants(self, layer: Layer, heads: Sequence[Sequence[int]], source: Tensor, rows: list[int]) -> list[float]:
        """Effects of variants of the corrupted run; in variant i heads[i] of the layer give source[0] or [i]."""
        effects: list[float] = []
        for start in range(0, len(heads), self._at_once):
            part = slice(start, start + self._at_once)

            def change(call: Call, part: slice = part) -> Tensor:
                return self._replaced(call.out, heads[part], source if len(source) == 1 else source[part], rows)

            with self._from(layer, len(heads[part])), attach({layer.site: change}, self.model):
                effects += self._share(self._answers())
        return effects

    def _together(self, at: str, names: Sequence[str], positions: Sequence[int] | None) -> float:
        """The effect of all these heads at once."""
        places = self.names(at)
        chosen: dict[str, list[int]] = {}
        for name in names:
            chosen.setdefault(places[name][0], []).extend(places[name][1])

        def change(site: Site, call: Call) -> Tensor:
            source, rows = self._source(site, at, positions)
            out = call.out.clone()
            for h in chosen[site.name]:
                out[0, h, rows] = source[0, h, rows].to(out)
            return out

        sites = [layer.site for layer in self.layers if layer.site.name in chosen]
        with attach({site: partial(change, site) for site in sites}, self.model):
            return self._share(self._answers())[0]

    def estimate(self, names: Sequence[str], positions: Sequence[int] | None) -> dict[str, float]:
        """What one backward pass says of the effect of each head's output."""
        outs: dict[str, Tensor] = {}

        def keep(site: Site, call: Call) -> Tensor:
            outs[site.name] = call.out.detach().requires_grad_() if not call.out.requires_grad else call.out
            return outs[site.name]

        with torch.enable_grad(), attach({x.site: partial(keep, x.site) for x in self.layers}, self.model):
            slopes = dict(zip(outs, torch.autograd.grad(self._answers(), list(outs.values())), strict=True))
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
        parts = torch.cat([self._read_by(layer, at, sender, every, chosen) for sender in earlier])
        call, every_row = self.calls[site], list(range(self.ids.shape[1]))
        reads = ({"q": call.q, "k": call.k, "v": call.v, at: part[None]} for part in parts)
        source = torch.cat([attend_by_rows(each["q"], each["k"], each["v"], call.options) for each in reads])
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
            return self._replaced(call.out, heads, self.clean_calls[layer.site.name].out, range(call.out.shape[2]))

        def keep(call: Call) -> None:
            kept.append(getattr(call, at))
            raise _StopError

        def freeze(site: Site, call: Call) -> Tensor:
            return self.calls[site.name].out.expand_as(call.out)

        between = {x.site: partial(freeze, x.site) for x in self.layers[first + 1 : last]}
        handlers: dict[Site, Callable[[Call], Tensor | None]] = {layer.site: change, **between, receiver.site: keep}
        if heads:
            with self._from(layer, len(heads)), attach(handlers, self.model), suppress(_StopError):
                logits(self.model, self.ids, last=True)
        return kept[0] if kept else getattr(self.calls[receiver.site.name], at)[:0]

    @staticmethod
    def _replaced(out: Tensor, heads: Sequence[Sequence[int]], source: Tensor, rows: Sequence[int]) -> Tensor:
        """Outputs (n,H,T,E) in which heads[i] of variant i give source[0], or source[i], in these rows."""
        out, places = out.clone(), list(rows)
        for i, members in enumerate(heads):
            for h in members:
                out[i, h, places] = source[i % len(source), h, places].to(out)
        return out


class _StopError(Exception):
    """What was wanted of a forward pass is there; no need to go on."""


@contextmanager
def _replayed(block: nn.Module, output: Any) -> Iterator[None]:
    """Inside this block of code a layer computes nothing and gives what it gave before."""
    before = vars(block).get("forward")
    block.forward = lambda *args, **keywords: output
    try:
        yield
    finally:
        del block.forward
        if before is not None:
            block.forward = before


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
