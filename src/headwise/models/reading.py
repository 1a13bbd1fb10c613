"""What a call of the attention interface of transformers asks for, in our words, held against rows of its output.

The model's own function makes the output. We read beside it what its backend was given:

    a mask (B,H,T,S)        bools allow, numbers are added to the scores; to eager and flex code bools are numbers, too
    a BlockMask             `mask_mod`, asked for the blocks of queries and keys that are looked at
    a mask (B,S), or none   of flash attention: the keys that are padding; then is_causal= and sliding_window=
    none                    is_causal= alone

By which of them a backend goes, the mask function tells that is registered for its name. A few rows are computed from
that reading, and held against the output: O(T) work in each call. Where they differ the call is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.backends.torch_ import trace
from headwise.errors import HeadwiseError
from headwise.masks import (
    Allowed,
    Bias,
    Causal,
    Grid,
    Mask,
    Part,
    Window,
    all_of,
)
from headwise.records import Call
from headwise.spec import Options


class Asked(NamedTuple):
    """One call of the attention interface of transformers, as it was made, and what the model's own function gave.

    The interface is the dictionary in which a model of transformers looks up how to compute attention.
    """

    module: nn.Module
    q: Tensor  # (B,H,T,D)
    k: Tensor  # (B,G,S,D)
    v: Tensor  # (B,G,S,E)
    mask: Any  # what the backend's mask function made, or the model passed; or None
    keywords: Mapping[str, Any]  # all other arguments
    implementation: str  # "eager", "sdpa", ...
    function: Callable[..., Any]  # what the interface gave for that name
    out: Tensor  # (B,H,T,E)


def read_call(asked: Asked) -> Call:
    """A call of transformers as a call of ours. Raises HeadwiseError where our reading is not what the model did.

    Whether keys and values are of another text the interface does not tell.
    """
    name = type(asked.module).__name__
    backend = asked.implementation
    if not mask_function(backend):
        raise HeadwiseError(
            f"{name} runs its attention by {backend!r}, which has no mask function, so no mask tells what it reads; "
            f"register one, transformers.AttentionMaskInterface.register({backend!r}, sdpa_mask), or call "
            f"model.set_attn_implementation('sdpa')"
        )
    # a nested tensor holds keys of several lengths
    if asked.q.ndim != 4 or asked.k.is_nested:
        raise HeadwiseError(
            f"{name} gives its attention queries of {asked.q.ndim} axes; 4 are needed, (B,H,T,D)"
        )
    # queries that are learned may be one set for all documents
    q, k, v = (x.expand(len(asked.out), -1, -1, -1) for x in asked[1:4])
    # Autocast takes values of 16 bits beside queries and keys that a rotation made float32.
    dtype = torch.promote_types(q.dtype, torch.promote_types(k.dtype, v.dtype))
    q = q.to(dtype)
    k = k.to(dtype)
    v = v.to(dtype)
    call = Call(asked.module, q, k, v, options_of(asked), asked.out)
    whole = asked.out
    if asked.keywords.get("dropout"):
        # What dropout has dropped is not known: the function runs once more, without it.
        keywords = {**asked.keywords, "dropout": 0.0}
        with torch.no_grad():
            whole = asked.function(*asked[:5], **keywords)[0].transpose(1, 2)
    check(call._replace(out=whole), backend == "eager")
    return call


def mask_function(backend: str) -> str:
    """The name of the function that makes the masks of a backend, such as "sdpa_mask"; "" where none is registered."""
    # its door is `hf`; a model of ours needs no transformers
    functions = sys.modules["transformers.masking_utils"].ALL_MASK_ATTENTION_FUNCTIONS
    return getattr(functions.get(backend), "__name__", "")


def options_of(asked: Asked) -> Options:
    """Mask, scale, softcap and sinks of a call, as the backend reads them."""
    keywords = asked.keywords
    mask = asked.mask
    T = asked.q.shape[2]
    maker = mask_function(asked.implementation)
    causal = keywords.get("is_causal")
    # As the functions of transformers decide it, here and below.
    if causal is None:
        causal = getattr(asked.module, "is_causal", True)
    if hasattr(mask, "mask_mod"):
        parts: list[Mask] = [OfFunction(mask.mask_mod, mask.shape[1] == 1)]
    elif "flash" in maker or getattr(mask, "ndim", 4) == 2:
        parts = _flash_masks(asked, causal)
    else:
        # Eager and flex code reads no such flag; and the fused call drops it for a single query, which may see all.
        bools_allow = maker not in ("eager_mask", "flex_attention_mask")
        has_flag = bools_allow and mask is None and T > 1
        # A backend that is not transformers' own may get no mask for queries behind a cache.
        offset = 0 if asked.implementation == "sdpa" else None
        parts = [Causal(offset=offset)] if causal and has_flag else []
        if mask is not None:
            parts += masks_of(mask, bools_allow)
    if keywords.get("position_bias") is not None and "flash" not in maker:
        parts += masks_of(keywords["position_bias"], False)
    return Options(
        mask=all_of(parts),
        scale=keywords.get("scaling"),
        softcap=keywords.get("softcap"),
        sink=keywords.get("s_aux"),
        dropout=keywords.get("dropout") or 0.0,
    )


def masks_of(mask: Tensor, bools_allow: bool = True) -> list[Mask]:
    """A mask of up to four axes. Where bools do not allow, they are added to the scores, as 0 and 1.

    Of what is added the most negative numbers stand for "may not".
    """
    mask = mask[(None,) * (4 - mask.ndim)]  # axes of length 1 in front
    if mask.dtype == torch.bool and bools_allow:
        return [Allowed(mask)]
    added = mask if mask.is_floating_point() else mask.float()
    # Half of the least number: a mask made in another format, or added to a bias, need not be that number to the bit.
    allowed = added > torch.finfo(added.dtype).min / 2
    return [Allowed(allowed), Bias(torch.where(allowed, added, 0))]


@dataclass(frozen=True)
class OfFunction(Mask):
    """What a `mask_mod` of flex attention allows: a function of the numbers of document, head, query and key."""

    function: Callable[..., Any]
    alike: bool

    def allowed(self, grid: Grid) -> Any:
        b = grid.pick(torch.arange(grid.B, device=grid.j.device), "b")
        h = grid.pick(torch.arange(grid.H, device=grid.j.device), "h")
        return self.function(b, h, grid.i, grid.j)


def _flash_masks(asked: Asked, causal: bool) -> list[Mask]:
    """What flash attention reads: it lays real tokens side by side, the last query of a text beside its last key."""
    B = len(asked.q)
    T = asked.q.shape[2]
    S = asked.k.shape[2]
    window = asked.keywords.get("sliding_window")
    left = window - 1 if window else None
    right = 0 if causal else left
    if asked.mask is None:
        return [] if left is right is None else [Window(left, right)]
    # A static cache has room behind the tokens that the mask knows. A single query is real.
    real = asked.mask.bool()
    rows = real[:, -T:] if T > 1 else real.new_ones(B, 1)
    keys = F.pad(real, (0, S - real.shape[1]))
    # places are counted back from the end of the text
    of_rows, of_keys = (x.cumsum(1) - x.sum(1, keepdim=True) for x in (rows, keys))
    near, far = (S if bound is None else bound for bound in (left, right))

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        """Of real tokens keys from `near` places before their query to `far` behind it."""
        ahead = of_keys[b, j] - of_rows[b, i]
        in_window = (ahead >= -near) & (ahead <= far)
        return rows[b, i] & keys[b, j] & in_window

    return [OfFunction(seen, True)]


def probed_rows(T: int) -> list[int]:
    """The queries of T on which a reading is held against what the model computed: both ends, and two between them."""
    return sorted({0, T // 3, 2 * T // 3, T - 1})


@torch.no_grad()
def check(call: Call, eager: bool) -> None:
    """Hold a few rows of our reading against what the model's own function gave.

    The tolerance is that of rounding: scores s of n binary digits change the weights by 2^-n |s|, and weights the
    output by as much of the largest value. Rows that may attend nothing are padding: functions give them what they
    like, and they are not compared.

    eager  did transformers' own eager code run?
    """
    rows = probed_rows(call.n_queries)
    # The mask of these rows alone, which keep their places among all queries.
    options = call.options._replace(dropout=0.0)
    if options.mask:
        options = options._replace(mask=Part(options.mask, "t", rows, call.n_queries))
    steps = trace(call.q[:, :, rows], call.k, call.v, options)
    theirs = call.out[:, :, rows].to(steps.weights.dtype)
    # (B,H,rows) each: is the row compared, and the largest difference of its features. Where a padded value has turned
    # to NaN, rows that do not see it have NaN, too, by 0 x NaN: they are not compared.
    sees_some = theirs.isfinite().all(-1) & (steps.masked.amax(-1) > -torch.inf)
    difference = (
        (steps.out.to(theirs.dtype) - theirs).abs().amax(-1).where(sees_some, 0)
    )
    # The format in which q and k were multiplied, whose rounding is allowed.
    multiplied = call.q.dtype
    device = call.q.device.type
    if multiplied == torch.float32 and torch.is_autocast_enabled(device):
        multiplied = torch.get_autocast_dtype(device)
    # flash attention casts float32 to the dtype of the weights
    steps_of = [torch.finfo(dtype).eps for dtype in (multiplied, call.out.dtype)]
    if eager:  # transformers computes that softmax in float32, in a float64 model too
        steps_of.append(2**-23)
    if call.q.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        # torch may multiply in TF32, which keeps 10 bits of each factor
        steps_of.append(2**-10)
    digits = max(steps_of)
    # a document that is nothing but padding may have turned to NaN
    score = float(steps.scores.nan_to_num().abs().max())
    value = float(call.v.nan_to_num(0, 0, 0).abs().max())
    # Sums of large terms may cancel and leave more of their rounding. In half precision `digits` are larger than that.
    sums = 4 if multiplied.itemsize >= 4 else 1
    # `score` roundings for the scores, which the softmax makes a factor, and 8 as room for the softmax and the output.
    # 4 and 8 are round numbers: a smaller bound refuses more models that are read well, a larger one misses more.
    bound = digits * (8 + score) * sums * value
    # Where no row was compared, only zeros and NaN pass: other numbers may come of keys that our reading of the mask
    # forbids wrongly.
    if difference.max() <= bound and (sees_some.any() or not theirs.nan_to_num().any()):
        return
    # The message names the row that differs most, and of it the feature that does.
    b, h, t = map(int, torch.unravel_index(difference.argmax(), difference.shape))
    gave, read = theirs[b, h, t], steps.out[b, h, t]  # (E,)
    place = (read.to(gave.dtype) - gave).abs().argmax()
    raise HeadwiseError(
        f"{type(call.layer).__name__}: in document {b}, head {h}, query {rows[t]} its attention gives "
        f"{gave[place]:.5g}, and what headwise reads of its mask, scale and biases gives {read[place]:.5g}; watching "
        f"it would give wrong numbers"
    )
