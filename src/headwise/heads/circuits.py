"""Circuits in the weights: what heads read, what they write, and who reads whom. No text is needed.

A head has two matrices, C x C: W_QK = W_Q^T W_K says which tokens it looks at, W_OV = W_O W_V what it writes of them
(Elhage et al. 2021, "A mathematical framework for transformer circuits"). Does a later head, the receiver, read what
an earlier one, the sender, writes? The composition score tells: |A W_OV| / (|A| |W_OV|) with the Frobenius norm, W_OV
of the sender, and A of the receiver: W_QK^T for what it reads through its queries, W_QK for keys, W_OV for values.

The baseline is a sender of the same spectrum that writes into random directions. Elhage et al. draw such matrices; here
their mean and variance are exact. Let a be the squared singular values of A, divided by their sum, and s those of the
sender's W_OV. Then the square of the score is sum a_i s_j O_ij^2, O being orthogonal and random, and the moments of
O_ij^2 are known (Collins & Sniady 2006, arXiv math-ph/0402073). How often chance reaches a score is the tail of that
distribution, which is taken as the gamma distribution with these two moments; this last step is ours.

Norms, biases and RoPE between the matrices are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.gpt.train import one_thread
from headwise.models.ask import embeddings, evaluating, run_body
from headwise.models.hook import hooked
from headwise.models.sites import Site, layers_of, sites_of
from headwise.models.stream import stream_of
from headwise.spec import resolve_kv_index
from headwise.table import plural

Numbers = NDArray[np.float64]

# A path is clear where chance would bring forth fewer than this many as strong ones in the whole model: one in a
# thousand models. A round choice: a larger one shows more paths, of which more are chance.
CLEAR = 0.001
# Places at the top and at the bottom of all logits, as in the papers at `HeadWeights`. A small vocabulary has fewer.
COPIED, SUPPRESSED = 5, 10
PROBED = 64  # tokens that are tried at most, evenly spaced in the vocabulary: a round choice


class Scored(NamedTuple):
    """The fraction of the tokens for which a head does something, and how many it would be by chance alone."""

    share: float
    control: float


@dataclass(frozen=True)
class HeadWeights:
    """One head by its weights.

    The three scores are None where the matrices W_E and W_U, which embed tokens and make logits, are not there or
    differ in width; `succeeds` also where no order was given.
    """

    qk: Numbers  # singular values of W_QK, (D,), the largest first
    ov: Numbers  # of W_OV, (E,)
    # Looking at a token, it puts the logit of that token among the highest (name movers, Wang et al. 2022, arXiv
    # 2211.00593).
    copies: Scored | None
    # It puts the logit of that token among the lowest (McDougall et al. 2023, arXiv 2310.04625).
    suppresses: Scored | None
    # Looking at a token of an order, such as Monday, it gives the next one the highest logit of that order (Gould et
    # al. 2023, arXiv 2312.09230).
    succeeds: Scored | None

    @property
    def qk_rank(self) -> float:  # how many directions count, 1 to D: see `effective_rank`
        return effective_rank(self.qk)

    @property
    def ov_rank(self) -> float:
        return effective_rank(self.ov)


class Path(NamedTuple):
    """What one head reads of what an earlier one writes."""

    sender: str
    receiver: str
    at: str  # q, k or v: through what the receiver reads it
    score: float
    baseline: float  # the score that random directions have
    chance: float  # paths of at least this strength that chance would bring forth in the whole model


@dataclass(frozen=True, repr=False)
class Circuits:
    """The heads of a model by their weights, and how they compose."""

    heads: dict[str, HeadWeights]
    scores: dict[str, Numbers]  # "q", "k", "v" -> (receiver, sender), in the order of `heads`; nan: it cannot read it
    chances: dict[str, Numbers]  # as `scores`: of each pair what `Path.chance` is
    baseline: float  # root of the mean square of the score of random directions, 1/sqrt(C)

    @property
    def paths(self) -> list[Path]:
        """The paths that stand out, the strongest first. In a trained model these may be many."""
        names = list(self.heads)
        clear = []
        for at, chances in self.chances.items():
            for r, s in np.argwhere(chances < CLEAR):  # receiver and sender; nan is not below it
                score = float(self.scores[at][r, s])
                clear.append(Path(names[s], names[r], at, score, self.baseline, float(chances[r, s])))
        return sorted(clear, key=lambda path: -path.score)

    def plain(self) -> dict[str, Any]:
        """In plain types: the JSON of `headwise heads --circuits`."""
        heads = {}
        for name, head in self.heads.items():
            heads[name] = {"qk_rank": head.qk_rank, "ov_rank": head.ov_rank}
            for score in ("copies", "suppresses", "succeeds"):
                scored = getattr(head, score)
                heads[name][score] = scored and scored._asdict()  # None stays None
        return {"heads": heads, "paths": [path._asdict() for path in self.paths]}

    def __repr__(self) -> str:
        # The twelve strongest paths, a round choice; `paths` has all.
        paths = [f"  {p.sender} -> {p.receiver} through {p.at}: {p.score:.2f}" for p in self.paths[:12]]
        head = f"Circuits({len(self.heads)} heads; random directions compose to {self.baseline:.2f}; "
        return "\n".join([f"{head}{plural(len(self.paths), 'path')} above chance)", *paths])


@torch.no_grad()
def circuits(model: nn.Module, *, orders: Sequence[Sequence[int]] = ()) -> Circuits:
    """Spectra, composition and the scores of copying, suppression and succession, of every head; from the weights.

    A token enters as what the first layer makes of it when it stands alone (Wang et al. 2022 and Gould et al. 2023
    take the first feed-forward). Tokens evenly spaced in the vocabulary are tried, 64 of a large one. "Among the
    highest" is the first 5, "among the lowest" the last 10 (the papers'), but never more than a twentieth of the
    vocabulary (ours: by chance a token is among so many once in 20 times). The control is another token's logit; for
    an order, blind choice.

    Args:
        model: a GPT of ours, or a model of transformers
        orders: ids in an order, such as those of the days of the week, for `succeeds`; two or more each

    Raises:
        HeadwiseError: for an attention whose W_Q, W_K, W_V or W_O is not one matrix.
    """
    if stream_of(model) is not None:
        raise HeadwiseError("paths from head to head need all layers at once, and this model is read layer by layer")
    # Cross attention has its keys and values from another stack: its W_QK and W_OV are between two streams.
    layers = [_Factors.of(site) for site in sites_of(model) if not site.cross]
    if not layers:
        raise HeadwiseError(f"{type(model).__name__} has no self attention, and so no paths from head to head")
    probe = _Probe.of(model, orders)
    heads = {}
    for number, layer in enumerate(layers):
        for h, name in enumerate(layer.site.heads):
            copies = suppresses = next_one = None
            if probe is not None:
                copies, suppresses = probe.shares(layer.v[h], layer.o[h], number == 0)
                if orders:
                    next_one = probe.successor(layer.v[h], layer.o[h], orders)
            spectra = layer.qk[h].cpu().numpy(), layer.ov[h].cpu().numpy()
            heads[name] = HeadWeights(*spectra, copies, suppresses, next_one)
    scores, chances = _composition(layers)
    # The baseline 1 / sqrt(C): `random_moments` has 1 / C for the mean of the square. `o` is (H,C,E).
    return Circuits(heads, scores, chances, 1 / math.sqrt(layers[0].o.shape[1]))


def effective_rank(values: Numbers) -> float:
    """How many directions count: the exponential of the entropy of singular values divided by their sum.

    1 where a single one is not 0, n where n are equal, 0 where all are 0 (Roy & Vetterli 2007).
    """
    shares = values[values > 0] / max(values.sum(), 1e-300)  # 1e-300: of a silent head all are 0
    return math.exp(-math.fsum(share * math.log(share) for share in shares)) if len(shares) else 0.0


@dataclass(frozen=True)
class _Factors:
    """One layer in float64: what its heads read and write, and the spectra of both products.

    A QR decomposition W_K^T = Q R_K gives a Q of orthonormal columns, which changes no length: |W_K^T x| = |R_K x|.
    So the norm of a product of C x C numbers is that of a product with the small R, D x D, in the place of W_K^T, and
    none of C x C is ever made.
    """

    site: Site
    v: Tensor  # W_V (H,E,C), shared ones repeated
    o: Tensor  # W_O (H,C,E)
    reads: dict[str, Tensor]  # A: "q": R_K W_Q (H,D,C), "k": R_Q W_K (H,D,C), "v": R_O W_V (H,E,C)
    writes: Tensor  # W_OV: W_O R_V^T (H,C,E)
    qk: Tensor  # (H,D) singular values of W_QK
    ov: Tensor  # (H,E) of W_OV

    @classmethod
    def of(cls, site: Site) -> _Factors:
        H = site.n_heads
        w_q, w_k, w_v, w_o = map(site.weights, "qkvo")  # (H D,C), (G D,C), (G E,C) and (C,H E); None where not known
        if w_q is None or w_k is None or w_v is None or w_o is None or w_o.shape[1] % H:
            raise HeadwiseError(f"{site.name}: W_Q, W_K, W_V and W_O are not four matrices that are known there")
        E = w_o.shape[1] // H
        G, remainder = divmod(w_v.shape[0], E)  # key/value heads: values are as wide as what W_O reads of a head
        are_groups = not remainder and G > 0 and H % G == 0 and w_k.shape[0] % G == 0
        if not are_groups or w_q.shape[0] != w_k.shape[0] // G * H:
            raise HeadwiseError(
                f"{site.name}: W_Q has {w_q.shape[0]} rows, W_K {w_k.shape[0]} and W_V {w_v.shape[0]}, which is no "
                f"whole number of heads of one width for {H} heads of {E} values"
            )
        spec = getattr(site.module, "spec", None)  # of layers of ours, which may share key/value heads in any way
        index = list(resolve_kv_index(H, G, getattr(spec, "kv_index", None)))
        q, k, v = _by_head(w_q, H), _by_head(w_k, G)[index], _by_head(w_v, G)[index]
        o = w_o.double().reshape(-1, H, E).transpose(0, 1)  # (H,C,E)
        with one_thread():  # in matrices as small as these two threads wait for each other more than they work
            # Of matrices with C rows each: mT transposes the last two axes.
            r_q, r_k, r_v, r_o = (torch.linalg.qr(columns, mode="r").R for columns in (q.mT, k.mT, v.mT, o))
            # The singular values of W_QK and W_OV: what is left out, Q, has orthonormal columns and changes none.
            qk = torch.linalg.svdvals(r_q @ r_k.mT)
            ov = torch.linalg.svdvals(r_o @ r_v.mT)
        reads = {"q": r_k @ q, "k": r_q @ k, "v": r_o @ v}
        return cls(site, v, o, reads, writes=o @ r_v.mT, qk=qk, ov=ov)


def _by_head(weight: Tensor, n_heads: int) -> Tensor:
    """(H*D,C) as (H,D,C), in float64."""
    return weight.double().reshape(n_heads, -1, weight.shape[1])


def _composition(layers: Sequence[_Factors]) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
    """Scores, and how many as strong chance would bring forth: q, k, v -> (receiver, sender) of all heads.

    Of pairs in one layer, of an encoder and a decoder, or whose sender comes later, both stay nan.
    """
    starts = list(accumulate((layer.site.n_heads for layer in layers), initial=0))
    N, C = starts[-1], layers[0].o.shape[1]  # heads of the model, its width
    rows = [slice(*ends) for ends in pairwise(starts)]  # of each layer, those of its heads
    scores, chances = ({at: np.full((N, N), np.nan) for at in "qkv"} for _ in range(2))
    for b, later in enumerate(layers):
        for a, earlier in enumerate(layers[:b]):
            if later.site.name.startswith("encoder.") != earlier.site.name.startswith("encoder."):
                continue  # each has a residual stream of its own, and only cross attention reads the other's
            place = rows[b], rows[a]  # their heads in the tables: R receivers, S senders
            writes = earlier.writes.transpose(0, 1).flatten(1)  # (C,S*E)
            for at, reads in later.reads.items():
                spectrum = later.ov if at == "v" else later.qk
                products = reads.flatten(0, 1) @ writes
                passed = products.view(*reads.shape[:2], -1, earlier.o.shape[2])  # (R,D,S,E): A W_OV of each pair
                # |A| |W_OV|, (R,S); 1e-300: of a silent head it is 0.
                sizes = (spectrum.norm(dim=-1)[:, None] * earlier.ov.norm(dim=-1)).clamp(min=1e-300)
                square = (torch.linalg.vector_norm(passed, dim=(1, 3)) / sizes).square()
                scores[at][place] = square.sqrt().cpu().numpy()
                # How likely random directions reach such a square: the tail of a gamma distribution.
                mean, variance = random_moments(spectrum, earlier.ov, C)
                # Rounding may leave none, or less than 0, and it is divided by: a tiny one stands in, of which the
                # standard deviation is a millionth of the mean.
                variance = variance.clamp(min=1e-12 * mean**2)
                # A gamma distribution of shape m^2 / v and scale v / m has mean m and variance v. `gammaincc` takes
                # the shape, and the value divided by the scale.
                tail = torch.special.gammaincc(mean**2 / variance, square * mean / variance)
                chances[at][place] = tail.cpu().numpy()
    tried = 3 * int((~np.isnan(scores["q"])).sum())  # pairs of heads, by q, k and v
    # What is expected of so many tries: the chance of one times their number.
    return scores, {at: tried * chance for at, chance in chances.items()}


def random_moments(reads: Tensor, writes: Tensor, C: int) -> tuple[float, Tensor]:
    """Mean, and variance (R,S), of the squared score for random directions, from spectra (R,D) and (S,E).

    C is the width of the model.
    """
    p, q = _concentration(reads)[:, None], _concentration(writes)[None]
    # The mean of the square of sum a_i s_j O_ij^2 runs over pairs of entries of O. Times C (C + 2), the mean of the
    # product of their squares is 3 for an entry with itself, 1 for two in a row or column, else (C + 1) / (C - 1).
    elsewhere = (1 - p) * (1 - q) * (C + 1) / max(C - 1, 1)  # pairs of entries that share neither row nor column
    same_line = p * (1 - q) + (1 - p) * q  # pairs in one row, or in one column
    second = (3 * p * q + same_line + elsewhere) / (C * (C + 2))
    return 1 / C, second - 1 / C**2  # the mean of O_ij^2 is 1 / C: the C squares of a row sum to 1


def _concentration(spectrum: Tensor) -> Tensor:
    """sum_i p_i^2 of the fractions p_i that each direction has in the squared length: 1 where a single one has it."""
    squares = spectrum.square()
    shares = squares / squares.sum(-1, keepdim=True).clamp(min=1e-300)
    return shares.square().sum(-1)


@dataclass(frozen=True)
class _Probe:
    """Some tokens, as the first layer reads them and as later ones do, and the matrix that makes logits."""

    model: nn.Module
    tokens: Tensor  # (n,)
    states: tuple[Tensor, Tensor]  # (n,C) each, float64: before and after the first layer
    unembed: Tensor  # (V,C) float32: half the time of float64, and enough to tell which logits are the largest

    @classmethod
    def of(cls, model: nn.Module, orders: Sequence[Sequence[int]]) -> _Probe | None:
        pair = embeddings(model)  # the matrix that embeds tokens, and the one that makes logits
        if pair is None or pair[0].shape[1] != pair[1].shape[1]:
            return None
        V = len(pair[1])
        for order in orders:
            if len(order) < 2 or not 0 <= min(order) <= max(order) < V:
                raise HeadwiseError(f"the order {list(order)} must be two or more ids below {V}")
        tokens = torch.arange(0, V, math.ceil(V / PROBED), device=pair[1].device)  # PROBED or fewer, evenly spaced
        return cls(model, tokens, _alone(model, tokens), pair[1].float())

    def shares(self, v: Tensor, o: Tensor, first: bool) -> tuple[Scored, Scored]:
        """Of one head, v (E,C) and o (C,E): how often a token's own logit comes out on top, and at the bottom.

        `first` says that it is a head of the first layer.
        """
        states = self.states[0] if first else self.states[1]  # the heads of the first layer read what it is given
        logits = (states @ v.mT @ o.mT).float() @ self.unembed.mT  # (n,V) what it writes of each token, as logits
        tried = torch.stack([self.tokens, self.tokens.roll(1)], dim=1)  # (n,2) itself, and as control another of them
        most = max(1, len(self.unembed) // 20)  # places of a small vocabulary: a twentieth of it

        def among_first(places: int, sign: int) -> Scored:
            # (n,1) The logit at the first place behind them: a token is among them if its own lies beyond that.
            # `sign` is 1 for the highest logits and -1 for the lowest.
            left_out = logits.topk(min(places, most) + 1, largest=sign > 0).values[:, -1:]
            ahead = sign * logits.gather(1, tried) > sign * left_out
            return Scored(*ahead.double().mean(0).tolist())  # of each column, itself and the control

        return among_first(COPIED, 1), among_first(SUPPRESSED, -1)

    def successor(self, v: Tensor, o: Tensor, orders: Sequence[Sequence[int]]) -> Scored:
        """How often the next token of an order has the highest logit of all tokens of that order."""
        hits, blind = [], []  # of each token of each order, but the last: is it so, and how likely by blind choice
        for order in orders:
            row = torch.tensor(list(order), device=self.unembed.device)
            # For every head what the first layer gives, as in Gould et al. Its own heads never read that: how they
            # score here says what their matrices would do, while `shares` gives them what they read.
            read = _alone(self.model, row)[1]
            logits = (read @ v.mT @ o.mT).float() @ self.unembed[row].mT
            following = torch.arange(1, len(row), device=row.device)  # the place of the next one
            hits += (logits[:-1].argmax(1) == following).tolist()
            blind += [1 / len(row)] * len(following)
        return Scored(sum(hits) / len(hits), sum(blind) / len(blind))  # not by 0: an order has two ids or more


def _alone(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What the first layer reads and gives of each token (n,) when it is the whole text, (n,C) each.

    They run as n texts of one token.
    """
    states = []

    def keep(block: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], gave: Any) -> None:
        read = args[0] if args else keywords["hidden_states"]
        written = gave[0] if isinstance(gave, tuple) else gave  # a tuple begins with the hidden states
        states.extend([read[:, 0].double(), written[:, 0].double()])

    block = layers_of(model)[0].block  # the first one with an attention, also where others (Mamba) stand before it
    with evaluating(model), hooked([(block.register_forward_hook, keep)], with_kwargs=True):
        run_body(model, tokens[:, None])
    return states[0], states[1]
