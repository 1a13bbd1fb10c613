"""The exact attention map of every head of a model on one short text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from headwise.errors import HeadwiseError
from headwise.heads.documents import Document, listening
from headwise.heads.texts import Text
from headwise.models.ask import context_of, evaluating, run_body
from headwise.models.sites import Site, sites_of
from headwise.records import Call, HeadMap, HeadMaps, parse_head
from headwise.rungs.tensor import trace

LONGEST = 400  # tokens; every head keeps a T x T map
CELLS = 2**20  # numbers of all maps that are drawn beside a survey


@torch.no_grad()
def head_maps(model: nn.Module, ids: Sequence[int], tokens: Sequence[str], name: str) -> HeadMaps:
    """Run a model that reads ids (T,) and keep the weights (T,T) of each head; `tokens` are the ids as text.

    Models of a single stack only: the maps are named by layer and head. Raises HeadwiseError for an empty text, one
    that exceeds the context of a model of ours, or one of over 400 tokens.
    """
    longest = min(LONGEST, context_of(model) or LONGEST)
    why = "the model's context" if longest < LONGEST else "the most that whole maps are drawn for"
    require_text(ids, longest, why)
    maps: list[HeadMap] = []

    def keep(site: Site, call: Call, documents: Sequence[Document]) -> None:
        part, layer, _ = parse_head(site.head(0))
        if part:
            raise HeadwiseError(f"{name} has several stacks ({site.name}), and maps are drawn for one; use watch")
        weights_hts = trace(call.q, call.k, call.v, call.options).weights[0].float().cpu().numpy()
        maps.extend(HeadMap(layer, head, weights) for head, weights in enumerate(weights_hts))

    with listening(model, keep), evaluating(model):
        run_body(model, torch.tensor([list(ids)]))
    return HeadMaps(name, tuple(tokens), tuple(maps))


def require_text(ids: Sequence[int], longest: int, why: str) -> None:
    """Raise HeadwiseError for a text without tokens, or with more than the longest."""
    if not ids:
        raise HeadwiseError("the text has no tokens; pass one with --text")
    if len(ids) > longest:
        raise HeadwiseError(f"the text has {len(ids)} tokens, and {why} is {longest}; pass a shorter one")


def maps_of_text(model: nn.Module, text: Text, name: str) -> HeadMaps | None:
    """The maps of a text that is one short document, in a model of a single stack; else None."""
    first = text.documents[0]
    sites = sites_of(model)
    several = any(parse_head(site.head(0))[0] for site in sites)
    cells = len(first) ** 2 * sum(site.n_heads for site in sites)
    if several or len(text.documents) > 1 or len(first) > LONGEST or cells > CELLS:
        return None
    return head_maps(model, first, text.shown(first), name)
