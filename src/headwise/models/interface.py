"""One call of transformers' attention interface in our words: its mask, its scale, and what else it asks for."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.masks import Allowed, Bias, Causal, Mask
from headwise.rungs.tensor import attend
from headwise.spec import Options

KNOWN = {"dropout", "scaling", "is_causal", "position_bias", "softcap", "s_aux"}
# Keywords of transformers that say nothing about the arithmetic of attention, or say it a second time: a window is in
# the mask already.
HARMLESS = {
    "sliding_window",
    "position_ids",
    "cache_position",
    "use_cache",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "num_items_in_batch",
    "logits_to_keep",
    "token_type_ids",
    "past_key_values",
    "mm_token_type_ids",
}
LARGEST = 2**24  # scores held at once where the kernel cannot do without them


def options_of(module: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, keywords: Mapping[str, Any]) -> Options:
    """What transformers asks for, in our words. A keyword that is not known is refused by name."""
    for name, value in keywords.items():
        if name not in KNOWN | HARMLESS and value is not None and value is not False:
            if name == "output_attentions":
                raise HeadwiseError("output_attentions=True: a watched model keeps no maps; drop it, and read `seen`")
            raise HeadwiseError(
                f"{type(module).__name__} passes {name}= to its attention, which headwise does not know; "
                f"watching it would give wrong numbers"
            )
    return Options(
        mask=_mask(module, q.shape[2], k.shape[2], mask, keywords),
        scale=keywords.get("scaling"),
        softcap=keywords.get("softcap"),
        sink=keywords.get("s_aux"),
        dropout=keywords.get("dropout") or 0.0,
    )


def _mask(module: nn.Module, T: int, S: int, mask: Tensor | None, keywords: Mapping[str, Any]) -> Mask | None:
    """The mask of a call of T queries and S keys: bool with True = may attend, or numbers to add; None means causal."""
    parts: list[Mask] = []
    if mask is None:
        causal = keywords.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if causal and T > 1:
            parts.append(Causal(offset=0))  # aligned at the first key
    elif mask.dtype == torch.bool:
        parts.append(Allowed(mask[..., :S]))
    else:
        allowed = mask[..., :S] > torch.finfo(mask.dtype).min / 2  # the most negative numbers stand for "may not"
        parts += [Allowed(allowed), Bias(torch.where(allowed, mask[..., :S], 0))]
    if keywords.get("position_bias") is not None:
        parts.append(Bias(keywords["position_bias"][..., :S]))
    return reduce(operator.and_, parts) if parts else None


def attend_by_rows(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    """`attend`; where it has to hold scores, a softcap's, a block of queries at a time."""
    B, H, T, _ = q.shape
    S = k.shape[2]
    if options.softcap is None or B * H * T * S <= LARGEST:
        return attend(q, k, v, options)
    count = max(1, LARGEST // (B * H * S))
    blocks = []
    for start in range(0, T, count):
        rows = slice(start, min(start + count, T))
        mask = None if options.mask is None else options.mask.for_queries(rows, T)
        blocks.append(attend(q[:, :, rows], k, v, options._replace(mask=mask)))
    return torch.cat(blocks, 2)
