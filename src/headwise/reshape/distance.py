"""How far a child's answers are from its parent's, for measuring and for healing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.models.ask import answers, predicts


class Comparison(NamedTuple):
    """Losses in nats a token, None where no next token is predicted; the divergence a token, or the relative error."""

    parent_loss: float | None
    child_loss: float | None
    distance: float


def divergence(parent: Tensor, child: Tensor) -> Tensor:
    """KL(parent || child) in nats, a mean over the distributions of logits (...,V) (Hinton et al. 2015, 1503.02531)."""
    log_p, log_q = (F.log_softmax(x.flatten(0, -2).float(), -1) for x in (parent, child))
    return F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")


def relative_error(parent: Tensor, child: Tensor) -> Tensor:
    """Mean square of the difference over that of the parent."""
    return (child - parent).float().square().mean() / parent.float().square().mean().clamp(min=1e-30)


@torch.no_grad()
def compared(parent: nn.Module, child: nn.Module, batches: Sequence[Tensor]) -> Comparison:
    """Both models on batches (B,T). They are taken as they are: call this in eval mode."""
    kind = predicts(parent)
    losses, far, count, predicted = [0.0, 0.0], 0.0, 0, 0
    for ids in batches:
        both = answers(parent, ids), answers(child, ids)
        measure = divergence if kind else relative_error
        far += measure(*both).item() * ids.numel()
        count += ids.numel()
        if kind == "next":
            n = ids.shape[0] * (ids.shape[1] - 1)
            predicted += n
            for i, logits in enumerate(both):
                losses[i] += F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).item() * n
    if kind != "next":
        return Comparison(None, None, far / count)
    return Comparison(losses[0] / predicted, losses[1] / predicted, far / count)
