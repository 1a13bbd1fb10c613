"""Steer a model by its heads: scale what a head gives, or add a vector to it (Turner et al. 2023, arXiv 2308.10248).

It acts where W_O reads the head: behind a gate, and on each head apart, also where several read the same keys and
values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads.ablate import by_site
from headwise.heads.documents import Document, listening
from headwise.models.sites import Site, sites_of
from headwise.records import Call


@contextmanager
def steer(model: nn.Module, changes: Mapping[str, Tensor | float]) -> Iterator[None]:
    """Scale what heads give, or add to it, inside this block, in every call and at every token.

        with hw.steer(model, {"L0.H1": vector, "L1.H2": 0.5}):
            model(ids)

    Args:
        model: any model that `watch` watches
        changes: for each head a number by which its output (E,) before W_O is multiplied, or a vector (E,) that is
            added to it

    Raises:
        HeadwiseError: for a head that the model does not have, for a vector of another width than the head's, and
            at the end of a block in which none of the heads was reached.
    """
    if not isinstance(changes, Mapping):
        raise HeadwiseError(f"changes={changes!r} must name heads: a dict such as {{'L0.H1': 0.5}}")
    sites = sites_of(model)
    # site -> numbers of its heads that change; refuses unknown names
    chosen = by_site(sites, changes)
    wanted = {name: _tensor(name, change) for name, change in changes.items()}

    def changed(site: Site, call: Call, documents: Sequence[Document]) -> Tensor:
        out = call.out.clone()  # (B,H,T,E)
        for h in chosen[site.name]:
            change = wanted[site.head(h)].to(out)
            if change.ndim and change.shape != out.shape[-1:]:
                raise HeadwiseError(
                    f"{site.head(h)} gives vectors of {out.shape[-1]} before W_O, and its change is {(*change.shape,)}"
                )
            out[:, h] = out[:, h] + change if change.ndim else out[:, h] * change
        return out

    with listening(model, changed, sites=[site for site in sites if site.name in chosen]):
        yield


def _tensor(name: str, change: object) -> Tensor:
    try:
        tensor = torch.as_tensor(change)
    # what torch raises for what is no number, and for ragged lists
    except (TypeError, ValueError, RuntimeError):
        raise HeadwiseError(
            f"the change of {name} is {change!r}; pass a factor, or a vector"
        ) from None
    if not tensor.isfinite().all():
        raise HeadwiseError(f"the change of {name} is not finite")
    return tensor
