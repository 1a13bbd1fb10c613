"""W_O fitted anew, layer by layer, so that the child's residual stream follows its parent's: the first step of healing.

What the heads of a reshaped layer give is not what they gave, but W_O can still be the best linear map from it: ridge
regression onto the parent's output of the same layer, drawn towards the W_O that is there. From the first layer to the
last, so that each layer also makes up for what the layers before it left over. A closed form: no gradient, no rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.models.ask import hooked, run_body
from headwise.models.weights import blocks, output_projection, read_layers

RIDGE = 1e-3  # of the mean square of a feature


@torch.no_grad()
def refit(parent: nn.Module, child: nn.Module, batches: Sequence[Tensor]) -> None:
    """Fit W_O of each layer of `child` in place, on ids (B,T). Features whose columns are all 0 keep them."""
    for layer, weights in enumerate(read_layers(child)):
        before = weights.wo.flatten(1).double().T
        used = before.abs().sum(1) > 0
        square, product = (torch.zeros(len(before), n, dtype=torch.float64) for n in before.shape)
        for ids in batches:
            heads, wanted = _observed(parent, child, layer, ids)
            square += heads.T @ heads
            product += heads.T @ wanted
        square, product, start = square[used][:, used], product[used], before[used]
        ridge = RIDGE * square.diagonal().mean() * torch.eye(len(square), dtype=torch.float64)
        after = before.clone()
        after[used] = torch.linalg.solve(square + ridge, product + ridge @ start)
        weights.wo.copy_(after.T.view_as(weights.wo))


def _observed(parent: nn.Module, child: nn.Module, layer: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The child's joined heads (N,H*E) in a layer, and what W_O should make of them (N,C)."""
    seen: dict[str, Tensor] = {}

    def keep_input(name: str) -> Callable[..., None]:
        return lambda module, inputs: seen.update({name: inputs[0].flatten(0, 1).double()})

    def keep_output(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen["parent added"] = output.flatten(0, 1).double()

    projection = output_projection(child, layer)
    hooks = [
        blocks(parent)[layer].register_forward_pre_hook(keep_input("parent x")),
        blocks(child)[layer].register_forward_pre_hook(keep_input("child x")),
        output_projection(parent, layer).register_forward_hook(keep_output),
        projection.register_forward_pre_hook(keep_input("child heads")),
    ]
    with hooked(hooks):
        run_body(parent, ids)
        run_body(child, ids)
    bias: Any = getattr(projection, "bias", None)
    wanted = seen["parent x"] + seen["parent added"] - seen["child x"]
    return seen["child heads"], wanted if bias is None else wanted - bias.double()
