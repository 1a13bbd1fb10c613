"""How much of what a head writes a later head reads, by the weights alone.

The composition score (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits") is
|A W_OV| / (|A| |W_OV|) with the Frobenius norm. W_OV = W_O W_V is the sender's; A is what the receiver reads by: W_QK^T
through its queries, W_QK through its keys, W_OV through its values.

Norms have gains, a factor for each feature: before a layer, on queries and keys, after W_O. A model computes with them,
so the scores are given without and with them. What a norm divides by hangs on the text and is left out.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.gpt.train import one_thread
from headwise.heads.attribute import States, heard, is_norm
from headwise.heads.table import frame
from headwise.models.ask import device_of, evaluating, run_body
from headwise.models.hook import attach
from headwise.models.sites import NUMBER, Site, as_rows, require_held, sites_of
from headwise.records import Call
from headwise.spec import resolve_kv_index

if TYPE_CHECKING:
    from pandas import DataFrame

# of a layer's norms by "reads" and "writes" (1,C), "q" and "k" (1,D), (H,D) or (1,H D)
Factors = dict[str, Tensor]


@torch.no_grad()
def composition(model: nn.Module) -> DataFrame:
    """Q-, K- and V-composition of every head with every head of earlier layers, a row a pair.

    Columns: `sender`, `receiver`, the scores `q`, `k` and `v`, 0 to 1, and their control `random`: the root mean square
    of the score of random matrices of these shapes, 1/sqrt(d_model). `q_gain`, `k_gain` and `v_gain` are the same with
    the gains of the norms, where a run on ids shows these. Pairs across two stacks are left out.

    Args:
        model: a GPT of ours, a model of transformers, or one of one's own

    Raises:
        HeadwiseError: where pandas is missing, and for an attention whose W_Q, W_K, W_V or W_O is not one matrix.
    """
    frame(())  # refuses here, not after the work, where pandas is missing
    require_held(model, "composition")
    # Cross attention reads the residual stream of another stack.
    sites = [site for site in sites_of(model) if not site.cross]
    weights, gains = _seen(model, sites)
    forms = {"": [_matrices(site, weights[site], {}) for site in sites]}
    if len(gains) == len(sites):
        forms["_gain"] = [_matrices(site, weights[site], gains[site]) for site in sites]
    paths = {module: path for path, module in model.named_modules()}
    # the list of layers that each is in: up to the first number, "encoder.block" of "encoder.block.3.layer.0"
    split = (NUMBER.split(paths[site.module]) for site in sites)
    stacks = [before if behind else "" for before, *behind in split]
    rows = []
    for number, later in enumerate(sites):
        for before, earlier in enumerate(sites[:number]):
            if stacks[number] != stacks[before]:
                continue
            scores = {}  # (receivers, senders) each
            for suffix, layers in forms.items():
                writes = layers[before][1]
                for at, reads in layers[number][0].items():
                    # (R,1,D,C) @ (S,C,E)
                    products = reads[:, None] @ writes
                    scores[at + suffix] = torch.linalg.matrix_norm(products)
            random = len(forms[""][before][1][0]) ** -0.5
            for r, receiver in enumerate(later.heads):
                for s, sender in enumerate(earlier.heads):
                    row = {"sender": sender, "receiver": receiver, "random": random}
                    rows.append(row | {at: float(x[r, s]) for at, x in scores.items()})
    return frame(rows)


def _matrices(
    site: Site, weights: Mapping[str, Tensor | None], factors: Factors
) -> tuple[dict[str, Tensor], Tensor]:
    """What the heads of a layer read by, (H,D,C) each, and W_OV as (H,C,E), all of norm 1, in float64.

    A QR decomposition W_K^T = Q R_K gives a Q of orthonormal columns, which changes no norm: |W_K^T x| = |R_K x|. So
    R_K W_Q (D,C) stands for W_QK (C,C), which is never made.
    """
    H = site.n_heads
    is_whole = False
    # (H D,C), (G D,C), (G E,C) and (C,H E)
    known = [w for w in map(weights.get, "qkvo") if w is not None]
    if len(known) == 4:
        w_q, w_k, w_v, w_o = known
        E = max(1, w_o.shape[1] // H)
        G = len(w_v) // E  # values are as wide as what W_O reads of a head
        rests = w_o.shape[1] % H, len(w_v) % E, len(w_q) % H
        is_whole = not any(rests) and len(w_q) * G == len(w_k) * H
    if not is_whole:
        names = [f"W_{at.upper()}" for at in "qkvo" if weights.get(at) is None]
        raise HeadwiseError(
            f"{site.name}: of {type(site.module).__name__} no matrix of whole heads is known for "
            f"{', '.join(names) or 'W_Q to W_O'}; headwise.heads.patch.path_effects follows paths by running the model"
        )
    # Layers of ours may share key/value heads in any way.
    kv_index = getattr(getattr(site.module, "spec", None), "kv_index", None)
    index = list(resolve_kv_index(H, G, kv_index))
    ones = torch.ones(1, 1)

    def heads(at: str, w: Tensor, n: int) -> Tensor:
        parts = w.cpu().double().reshape(n, -1, w.shape[1])  # (n,D,C)
        if at in factors:
            parts = parts * factors[at].reshape(-1, parts.shape[1], 1)
        return parts * factors.get("reads", ones)

    q = heads("q", w_q, H)
    k, v = (heads(at, w, G)[index] for at, w in (("k", w_k), ("v", w_v)))
    o = w_o.cpu().double().reshape(-1, H, E).transpose(0, 1)
    o = o * factors.get("writes", ones).mT
    # in matrices as small as these two threads wait for each other more than they work
    with one_thread():
        r_q, r_k, r_v, r_o = (
            torch.linalg.qr(columns, mode="r").R for columns in (q.mT, k.mT, v.mT, o)
        )
    reads = {"q": r_k @ q, "k": r_q @ k, "v": r_o @ v}
    return {at: _of_norm_1(x) for at, x in reads.items()}, _of_norm_1(o @ r_v.mT)


def _of_norm_1(matrices: Tensor) -> Tensor:
    norms = torch.linalg.matrix_norm(matrices, keepdim=True)
    return matrices / norms.clamp(min=1e-300)  # a silent head has norm 0


# What a run of four tokens shows: which norm a layer reads through, and which rows of a packed matrix make queries.


def _seen(
    model: nn.Module, sites: list[Site]
) -> tuple[dict[Site, dict[str, Tensor | None]], dict[Site, Factors]]:
    """W_Q to W_O of each site by "q" to "o", and the gains of its norms where they are found."""
    calls: dict[Site, Call] = {}
    weights = {site: {at: site.weights(at) for at in "qkvo"} for site in sites}
    ids = torch.tensor([[1, 0, 1, 1]], device=device_of(model))
    try:
        with (
            evaluating(model),
            heard(model.modules(), lambda x: x) as read,
            attach(sites, calls.__setitem__),
        ):
            run_body(model, ids)
    except Exception:  # it takes more than ids: then the weights alone are read
        return weights, {}
    paths = {module: path for path, module in model.named_modules()}
    gains = {}
    for site in sites:
        if site not in calls or site.module not in read:
            continue
        # norms of queries and keys, by "q" and "k"
        inner = {}
        for name, norm in site.module.named_children():
            if name[0] in "qk" and is_norm(norm) and norm in read:
                inner[name[0]] = norm
        for at in "qkv":
            weight = weights[site][at]
            # of each head what it has at the first token, (n,D), which no rotation turns
            first = getattr(calls[site], at)[0, :, 0]
            # some families pack several in one matrix, or a gate beside each query
            if weight is None or (at == "q" and len(weight) == 2 * first.numel()):
                if at in inner and read[inner[at]][0].shape[2:] == first.shape:
                    # the rows give what the norm reads
                    first = read[inner[at]][0][0, 0]
                weights[site][at] = _rows_of(site, first, read)
        entered, left = read[site.module]
        gains[site] = {at: _gain(norm, read[norm][0]) for at, norm in inner.items()}
        layer = model.get_submodule(paths[site.module].rpartition(".")[0])
        for norm in layer.children():
            if not is_norm(norm) or norm not in read:
                continue
            state, out = read[norm]
            if out.equal(entered):
                gains[site]["reads"] = _gain(norm, state)
            elif state.equal(left):
                gains[site]["writes"] = _gain(norm, state)
    return weights, gains


def _rows_of(site: Site, first: Tensor, read: States) -> Tensor | None:
    """The rows of a matrix of this site whose products for the first token are these heads (n,D); None: of none."""
    D = first.shape[-1]
    for module in site.module.modules():
        weight = getattr(module, "weight", None)
        if module not in read or weight is None or weight.ndim != 2 or not D:
            continue
        pieces = torch.split(read[module][1].flatten(0, -2)[0], D)
        places = [
            [at for at, piece in enumerate(pieces) if piece.equal(head)]
            for head in first
        ]
        if all(len(of_head) == 1 for of_head in places):
            rows = torch.split(as_rows(module), D)
            return torch.cat([rows[at] for (at,) in places])
    return None


def _gain(norm: nn.Module, state: Tensor) -> Tensor:
    """The factor of each feature in a norm, (1,C) or of each head (H,D), but for a factor that all have in common.

    state  what it reads, which tells its shape
    """
    twin = copy.deepcopy(norm).cpu().double()
    x = torch.randn(state.shape[-1], dtype=torch.float64, generator=torch.Generator())
    x = (x - x.mean()).expand(state.shape)  # so that a LayerNorm subtracts nothing
    made = (twin(x) - twin(torch.zeros_like(x))).double() / x
    for axis in range(made.ndim - 1):  # all tokens are alike, and heads mostly
        first = made.narrow(axis, 0, 1)
        made = first if first.expand_as(made).allclose(made) else made
    return made.flatten(0, -2)
