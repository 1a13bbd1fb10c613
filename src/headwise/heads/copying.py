"""Does a head copy what it looks at? Read off the weights alone."""

from __future__ import annotations

import torch
from torch import nn

from headwise.models.ask import embeddings
from headwise.models.sites import Site


@torch.no_grad()
def copying(site: Site, model: nn.Module) -> list[float] | None:
    """For each head the sum of the eigenvalues of W_U W_O W_V W_E over the sum of their moduli, -1 to 1.

    Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", section on copying: 1 raises the logit of
    every token that the head looks at. The V x V product has the non-zero eigenvalues of the E x E one computed here.
    Norms between the matrices are left out. None where the model has no such matrices of one width.
    """
    pair = embeddings(model)
    if pair is None or site.w_o is None or site.w_v is None or site.cross:
        return None
    embed, unembed = pair
    C = embed.shape[1]
    H = site.n_heads
    if unembed.shape != embed.shape or site.w_o.shape[0] != C or site.w_v.shape[1] != C or site.w_o.shape[1] % H:
        return None
    E = site.w_o.shape[1] // H
    G = site.w_v.shape[0] // E
    if site.w_v.shape[0] % E or H % G:
        return None
    w_v = site.w_v.double().reshape(G, E, C).repeat_interleave(H // G, 0)
    w_o = site.w_o.double().reshape(C, H, E).transpose(0, 1)
    through = w_v @ (embed.double().T @ unembed.double()) @ w_o  # (H,E,E)
    values = torch.linalg.eigvals(through)
    ratio = values.sum(-1).real / values.abs().sum(-1).clamp(min=torch.finfo(torch.float64).tiny)
    scores: list[float] = ratio.tolist()
    return scores
