"""How much of what a head writes a later head reads, by the weights alone.

The composition score (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits") is
|A W_OV| / (|A| |W_OV|) with the Frobenius norm. W_OV = W_O W_V is the sender's; A is what the receiver reads by: W_QK^T
through its queries, W_QK through its keys, W_OV through its values. Norms between the layers are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.gpt.train import one_thread
from headwise.heads.table import frame
from headwise.models.sites import Site, require_held, sites_of
from headwise.spec import resolve_kv_index

if TYPE_CHECKING:
    from pandas import DataFrame


@torch.no_grad()
def composition(model: nn.Module) -> DataFrame:
    """Q-, K- and V-composition of every head with every head of earlier layers, a row a pair.

    Columns: `sender`, `receiver`, the scores `q`, `k` and `v`, 0 to 1, and their control `random`: the root mean square
    of the score of random matrices of these shapes, 1/sqrt(d_model). Pairs across two stacks are left out.

    Args:
        model: a GPT of ours, or a model of transformers

    Raises:
        HeadwiseError: where pandas is missing, and for an attention whose W_Q, W_K, W_V or W_O is not one matrix.
    """
    frame(())  # refuses here, not after the work, where pandas is missing
    require_held(model, "composition")
    # Cross attention reads the residual stream of another stack.
    layers = [(site, *_matrices(site)) for site in sites_of(model) if not site.cross]
    rows = []
    for number, (later, reads, _) in enumerate(layers):
        for earlier, _, writes in layers[:number]:
            if later.name.startswith("encoder.") != earlier.name.startswith("encoder."):
                continue
            for r, receiver in enumerate(later.heads):
                # (S,D,C) @ (S,C,E): of each sender.
                scores = {
                    at: torch.linalg.matrix_norm(a_hdc[r] @ writes).tolist()
                    for at, a_hdc in reads.items()
                }
                for s, sender in enumerate(earlier.heads):
                    pair = {"sender": sender, "receiver": receiver}
                    rows.append(
                        pair
                        | {at: of[s] for at, of in scores.items()}
                        | {"random": writes.shape[1] ** -0.5}
                    )
    return frame(rows)


def _matrices(site: Site) -> tuple[dict[str, Tensor], Tensor]:
    """What the heads of a layer read by, (H,D,C) each, and W_OV as (H,C,E), all of norm 1, in float64.

    A QR decomposition W_K^T = Q R_K gives a Q of orthonormal columns, which changes no norm: |W_K^T x| = |R_K x|. So
    R_K W_Q (D,C) stands for W_QK (C,C), which is never made.
    """
    H = site.n_heads
    # (H D,C), (G D,C), (G E,C) and (C,H E); None where not known
    w_q, w_k, w_v, w_o = map(site.weights, "qkvo")
    if w_q is None or w_k is None or w_v is None or w_o is None or w_o.shape[1] % H:
        raise HeadwiseError(
            f"{site.name}: W_Q, W_K, W_V and W_O are not four matrices that are known there"
        )
    E = w_o.shape[1] // H
    G = w_v.shape[0] // E  # values are as wide as what W_O reads of a head
    if w_v.shape[0] % E or w_q.shape[0] % H or w_q.shape[0] * G != w_k.shape[0] * H:
        raise HeadwiseError(
            f"{site.name}: W_Q has {w_q.shape[0]} rows, W_K {w_k.shape[0]} and W_V {w_v.shape[0]}, which is no whole "
            f"number of heads of one width for {H} heads of {E} values"
        )
    # Layers of ours may share key/value heads in any way.
    index = list(
        resolve_kv_index(
            H, G, getattr(getattr(site.module, "spec", None), "kv_index", None)
        )
    )
    q, k, v = (
        w.cpu().double().reshape(n, -1, w.shape[1])
        for w, n in ((w_q, H), (w_k, G), (w_v, G))
    )
    k, v, o = k[index], v[index], w_o.cpu().double().reshape(-1, H, E).transpose(0, 1)
    # in matrices as small as these two threads wait for each other more than they work
    with one_thread():
        r_q, r_k, r_v, r_o = (
            torch.linalg.qr(columns, mode="r").R for columns in (q.mT, k.mT, v.mT, o)
        )
    return {
        "q": _of_norm_1(r_k @ q),
        "k": _of_norm_1(r_q @ k),
        "v": _of_norm_1(r_o @ v),
    }, _of_norm_1(o @ r_v.mT)


def _of_norm_1(matrices: Tensor) -> Tensor:
    norms = torch.linalg.matrix_norm(matrices, keepdim=True)
    return matrices / norms.clamp(min=1e-300)  # a silent head has norm 0
