"""Steer a model by its heads: add a direction to what a head gives, or scale it, with a certificate of what that does.

The direction is the mean difference of what a head gives in two kinds of text ("difference in means": Marks & Tegmark
2023, arXiv 2310.06824; added to a running model: Turner et al. 2023, arXiv 2308.10248; at heads: Li et al. 2023,
arXiv 2306.03341). It acts where W_O reads the head: behind a gate, and on each head apart, also where several read
the same keys and values.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads.documents import Document, listening
from headwise.heads.effect import by_site
from headwise.heads.patching import patch
from headwise.intervals import Interval, held_apart, interval_of
from headwise.models.ask import evaluating, logits, require_next
from headwise.models.hook import attach
from headwise.models.open import ids_of
from headwise.models.sites import Site, sites_of
from headwise.records import Call

# The part of the difference that a head must carry on average to be steered. A round choice: a smaller one steers
# more heads.
CLEAR = 0.1
LEAST_PAIRS = 4  # two to make a direction from, and two to judge it on: one would give no interval
# How often random directions are drawn as a control; each text's mean over them counts. A round choice: each draw
# runs all held-out texts once more.
DRAWS = 5
MOST_MOVED = 5  # tokens that a certificate names

Texts = Sequence[Sequence[int] | str]  # ids, or the text itself, of each


@dataclass(frozen=True)
class Direction:
    """What to add to which heads, and what came of it on pairs of texts from which it was not made."""

    vectors: dict[str, Tensor]  # head -> (E,): what it gives more of in the clean texts
    strength: float  # by which the vectors were multiplied for what follows
    n_pairs: int  # pairs of texts from which the vectors were made
    success: Interval  # fraction of held-out corrupted texts that get the clean answer; unsteered none does
    # The same of random directions of these lengths, a mean over DRAWS for each text; in other heads where enough are
    # left.
    control: Interval
    # How far steering moves what it should leave alone: KL(plain || steered) in nats, a mean over the tokens of each
    # text, on texts without the token that is to be answered.
    elsewhere: Interval
    moved: dict[int, float]  # ids behind which the prediction moved most, with their mean KL in nats

    def __repr__(self) -> str:
        return (
            f"Direction({', '.join(self.vectors)}: {self.success.mean:.0%} of {self.success.n} held-out texts get the "
            f"clean answer ({self.control.mean:.0%} by random directions), "
            f"{self.elsewhere.mean:.3f} nats elsewhere)"
        )


@contextmanager
def steer(
    model: nn.Module, changes: Direction | Mapping[str, Tensor | float], strength: float | None = None
) -> Iterator[None]:
    """Add to what heads give, or scale it, inside this block, in every call and at every token.

        with hw.steer(model, {"L0.H1": vector, "L1.H2": 0.5}):
            model(ids)

    What a head gives is its output (E,) before W_O.

    Args:
        model: any model that `watch` watches
        changes: for each head a vector (E,) to be added, or a number by which what it gives is multiplied; or a
            `Direction` of `hw.direction`
        strength: of all changes: vectors are multiplied by it, and a factor f becomes 1 + strength (f - 1);
            default that of a `Direction`, with which it was judged, else 1

    Raises:
        HeadwiseError: for a head that the model does not have, for a vector of another width than the head's, and
            at the end of a block in which none of the heads was reached.
    """
    if not isinstance(changes, Direction | Mapping):
        raise HeadwiseError(f"changes={changes!r} must name heads: a dict such as {{'L0.H1': 0.5}}, or a Direction")
    wanted = dict(changes.vectors if isinstance(changes, Direction) else changes)
    if strength is None:
        strength = changes.strength if isinstance(changes, Direction) else 1.0
    sites = sites_of(model)
    chosen = by_site(sites, wanted)  # site -> numbers of its heads that change; refuses unknown names
    for name, change in wanted.items():
        try:
            vector = torch.as_tensor(change)
        except (TypeError, ValueError, RuntimeError):  # what torch raises for what is no number, and for ragged lists
            raise HeadwiseError(f"what {name} is to give is {change!r}; pass a vector, or a factor") from None
        if not (vector * strength).isfinite().all():
            raise HeadwiseError(f"what {name} is to give is not finite")
        # From here on a tensor is added and a float multiplies, whether they came as lists or arrays of NumPy.
        wanted[name] = vector if vector.ndim else float(vector)

    def changed(site: Site, call: Call, documents: Sequence[Document]) -> Tensor:
        out = call.out.clone()  # (B,H,T,E)
        width = out.shape[-1]
        for h in chosen[site.name]:
            name = site.head(h)
            change = wanted[name]
            if not isinstance(change, Tensor):
                out[:, h] *= 1 + strength * (change - 1)
            elif change.shape == (width,):
                out[:, h] += strength * change.to(out)
            else:
                raise HeadwiseError(f"{name} gives vectors of {width}, and its direction is {tuple(change.shape)}")
        return out

    with listening(model, changed, sites=[site for site in sites if site.name in chosen]):
        yield


# Also where the caller is in inference mode: the vectors are used later, maybe where a gradient is asked, and a tensor
# of that mode could take no part.
@torch.inference_mode(False)
@torch.no_grad()
def direction(
    model: nn.Module,
    clean: Texts,
    corrupted: Texts,
    *,
    heads: Sequence[str] | None = None,
    other: Texts = (),
    held_out: float = 0.5,
    strength: float = 1.0,
    seed: int = 0,
) -> Direction:
    """The direction from corrupted to clean texts in the heads that carry the difference, with its certificate.

    Both answers are what the model likes best at the last token. Pairs that it answers alike are left out.

    Args:
        model: any model that `watch` watches and that answers with logits
        clean: one half of each pair, as ids or, of a model that `hw.open` opened, as strings; the two of a pair
            have as many tokens, each in its place
        corrupted: the other half of each pair
        heads: where to steer; default those that carry a tenth of the difference or more, by `hw.patch`
        other: texts on which the steered model is held to the plain one; default the held-out corrupted ones,
            without their last token, behind which the answer comes
        held_out: fraction of the pairs from which the direction is not made; on them it is judged
        strength: with which it is judged
        seed: draws the pairs that are held out, and the random control

    Raises:
        HeadwiseError: where fewer than four pairs remain, for heads that the model does not have, or none, and where
            no head carries a tenth.
    """
    require_next(model)
    if not 0 <= held_out <= 1:
        raise HeadwiseError(f"held_out={held_out} must lie between 0 and 1: a fraction of the pairs")
    if heads is not None:
        # A list, since a generator could be read only once. A string is no list of heads: `by_site` refuses it.
        heads = heads if isinstance(heads, str) else list(heads)
        if not by_site(sites_of(model), heads):
            raise HeadwiseError("heads=[] leaves no head to steer; name some, or leave heads= out")
    with evaluating(model):
        pairs = _answered(model, _as_ids(model, clean), _as_ids(model, corrupted))
        rng = random.Random(seed)
        # Two or more on either side, half of LEAST_PAIRS.
        made_from, held = held_apart(pairs, rng, held_out, least=2)
        names = _carriers(model, made_from) if heads is None else heads
        means = _differences(model, made_from)  # of all heads: the random control is drawn from them
        vectors = {name: means[name] for name in names}

        def successes(changes: Mapping[str, Tensor]) -> list[float]:
            # Of each held-out corrupted text 1.0 if it gets the clean answer, else 0.0.
            with steer(model, changes, strength):
                return [float(_likeliest(model, pair.corrupted) == pair.answer) for pair in held]

        controls = [successes(_random_direction(vectors, means, rng)) for _ in range(DRAWS)]
        # Without the last token: behind it steering is meant to change the answer.
        texts = _as_ids(model, other) or [pair.corrupted[:-1] for pair in held]
        elsewhere, moved = _divergence(model, vectors, strength, texts)
        # `controls` has a list of texts for each draw; zip gives for each text its draws.
        return Direction(
            vectors=vectors,
            strength=strength,
            n_pairs=len(made_from),
            success=interval_of(successes(vectors)).of_fraction(),
            control=interval_of([sum(draws) / DRAWS for draws in zip(*controls, strict=True)]).of_fraction(),
            elsewhere=interval_of(elsewhere),
            moved=moved,
        )


class _Pair(NamedTuple):
    clean: list[int]  # ids (T,)
    corrupted: list[int]  # as many
    answer: int  # to the clean text


def _as_ids(model: nn.Module, texts: Texts) -> list[list[int]]:
    if isinstance(texts, str):  # a string is a sequence of strings, too: its letters would be taken for texts
        raise HeadwiseError(f"{texts!r:.60} is one text; pass a list of them")  # its first 60 characters
    return [[int(token) for token in ids_of(model, text)] for text in texts]


def _answered(model: nn.Module, clean: list[list[int]], corrupted: list[list[int]]) -> list[_Pair]:
    """The pairs that the model answers differently."""
    if len(clean) != len(corrupted):
        raise HeadwiseError(f"there are {len(clean)} clean texts and {len(corrupted)} corrupted ones; they are pairs")
    pairs = []
    for number, (clean_ids, corrupted_ids) in enumerate(zip(clean, corrupted, strict=True)):
        if len(clean_ids) != len(corrupted_ids) or not clean_ids:
            raise HeadwiseError(
                f"pair {number} has {len(clean_ids)} clean tokens and {len(corrupted_ids)} corrupted ones; both need "
                f"as many, and at least one"
            )
        answer = _likeliest(model, clean_ids)
        if answer != _likeliest(model, corrupted_ids):
            pairs.append(_Pair(clean_ids, corrupted_ids, answer))
    if len(pairs) < LEAST_PAIRS:
        raise HeadwiseError(
            f"the model answers {len(pairs)} of {len(clean)} pairs differently, and a direction that is judged on "
            f"others than it is made from needs {LEAST_PAIRS}; pass more pairs"
        )
    return pairs


def _likeliest(model: nn.Module, ids: Sequence[int]) -> int:  # the next token
    return int(logits(model, torch.tensor([list(ids)]), last=True)[0, -1].argmax())


def _carriers(model: nn.Module, pairs: Sequence[_Pair]) -> list[str]:
    """The heads that carry a clear part of the difference between clean and corrupted texts, the largest first."""
    effects = [patch(model, pair.clean, pair.corrupted).effects for pair in pairs]  # head -> interval of one pair
    means = {name: sum(each[name].mean for each in effects) / len(pairs) for name in effects[0]}
    ordered = sorted(means, key=lambda name: -means[name])
    clear = [name for name in ordered if means[name] >= CLEAR]
    if not clear:
        raise HeadwiseError(
            f"no head carries {CLEAR:.0%} of the difference; {ordered[0]} carries most, {means[ordered[0]]:.1%}. "
            f"Name the heads to steer with heads="
        )
    return clear


def _differences(model: nn.Module, pairs: Sequence[_Pair]) -> dict[str, Tensor]:
    """What each head gives at the last token of the clean texts minus that of the corrupted ones, a mean, (E,)."""
    sums: dict[str, Any] = defaultdict(float)  # 0.0 + the first vector makes a vector
    sites = sites_of(model)

    def add(site: Site, call: Call) -> None:
        clean_he, corrupted_he = call.out[:, :, -1].float().cpu()  # (2,H,E): the pair runs as one batch of two
        for h, change in enumerate(clean_he - corrupted_he):
            sums[site.head(h)] += change

    with attach({site: partial(add, site) for site in sites}):
        for pair in pairs:
            logits(model, torch.tensor([pair.clean, pair.corrupted]), last=True)
    return {name: total / len(pairs) for name, total in sums.items()}


def _random_direction(
    vectors: Mapping[str, Tensor], all_heads: Mapping[str, Tensor], rng: random.Random
) -> dict[str, Tensor]:
    """The control: directions drawn at random, each as long as one of the vectors.

    They are in heads without a vector, or in any head where too few of these are left. `all_heads` has the heads by
    name, each with a vector (E,) of its width.
    """
    others = [name for name in all_heads if name not in vectors]
    if len(others) < len(vectors):
        others = list(all_heads)
    drawn = {}
    for name, vector in zip(rng.sample(others, len(vectors)), vectors.values(), strict=True):
        noise = torch.tensor([rng.gauss(0, 1) for _ in all_heads[name]])  # (E,) normal numbers favour no direction
        drawn[name] = noise * (vector.norm() / noise.norm())
    return drawn


def _divergence(
    model: nn.Module, vectors: Mapping[str, Tensor], strength: float, texts: list[list[int]]
) -> tuple[list[float], dict[int, float]]:
    """KL(plain || steered) in nats: the mean of each text; and the ids behind which it is largest, with the means."""
    of_text = []
    of_token = defaultdict(list)  # id -> KL at each place where it stands
    for text in texts:
        if not text:  # a corrupted text of one token, without it; where all are so, `elsewhere` is NaN
            continue
        ids = torch.tensor([text])
        plain = logits(model, ids)[0].float().log_softmax(-1)  # (T,V)
        with steer(model, vectors, strength):
            steered = logits(model, ids)[0].float().log_softmax(-1)
        nats = (plain.exp() * (plain - steered)).sum(-1)  # (T,) KL at each token
        of_text.append(float(nats.mean()))
        for token, value in zip(text, nats.tolist(), strict=True):
            of_token[token].append(value)
    means = {token: sum(values) / len(values) for token, values in of_token.items()}
    most_moved = sorted(means, key=means.__getitem__, reverse=True)[:MOST_MOVED]
    return of_text, {token: means[token] for token in most_moved}
