"""How far a child's answers are from its parent's, for measuring and for healing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.heads.effect import has_loss
from headwise.model.gpt import GPT
from headwise.reshape.weights import blocks, family_of


def answers(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits of ids (B,T), over the last axis; of a model that gives none, its last hidden states (B,T,C)."""
    if isinstance(model, GPT):
        result: Tensor = model(ids)
        return result
    found: Any = model(input_ids=ids, **({} if family_of(model) == "bert" else {"use_cache": False}))
    logits: Tensor | None = getattr(found, "logits", None)
    return found.last_hidden_state if logits is None else logits


def gives_logits(model: nn.Module) -> bool:
    """Does the model end in a distribution, so that a divergence can be taken?"""
    return isinstance(model, GPT) or "For" in type(model).__name__ or "LMHead" in type(model).__name__


def divergence(parent: Tensor, child: Tensor) -> Tensor:
    """KL(parent || child) in nats, a mean over the distributions of logits (...,V) (Hinton et al. 2015, 1503.02531)."""
    log_p, log_q = (F.log_softmax(x.flatten(0, -2).float(), -1) for x in (parent, child))
    return F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")


def relative_error(parent: Tensor, child: Tensor) -> Tensor:
    """Mean square of the difference over that of the parent."""
    return (child - parent).float().square().mean() / parent.float().square().mean().clamp(min=1e-30)


@contextmanager
def hidden_states(model: nn.Module) -> Iterator[list[Tensor]]:
    """Inside this block the list gets the output (B,T,C) of each layer that runs."""
    found: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    hooks = [block.register_forward_hook(keep) for block in blocks(model)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def compared(
    parent: nn.Module, child: nn.Module, batches: Sequence[Tensor]
) -> tuple[float | None, float | None, float]:
    """Next-token losses of parent and child, None where they predict none, and how far the child is from the parent.

    Losses in nats a token; the distance is the divergence a token, or `relative_error` where there are no logits.
    Both models are taken as they are: call them in eval mode.
    """
    predicts, has_logits = has_loss(parent), gives_logits(parent)
    losses, far, count, predicted = [0.0, 0.0], 0.0, 0, 0
    for ids in batches:
        both = answers(parent, ids), answers(child, ids)
        measure = divergence if has_logits else relative_error
        far += measure(*both).item() * ids.numel()
        count += ids.numel()
        if predicts:
            n = ids.shape[0] * (ids.shape[1] - 1)
            predicted += n
            for i, logits in enumerate(both):
                losses[i] += F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).item() * n
    if not predicts:
        return None, None, far / count
    return losses[0] / predicted, losses[1] / predicted, far / count
