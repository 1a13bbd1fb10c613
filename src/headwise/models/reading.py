"""What a call of the attention interface of transformers asks for, in our words, held against rows of its output.

The model's own function makes the output. We read mask, scale, softcap, sinks and biases beside it, compute a few rows
from that reading, and hold them against the output: O(T) work in each call. Where they differ the call is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.backends.torch_ import trace
from headwise.errors import HeadwiseError
from headwise.masks import Allowed, Bias, Causal, Mask, Part, all_of
from headwise.records import Call
from headwise.spec import Options

# keywords that `options_of` reads
READ = {"scaling", "is_causal", "position_bias", "softcap", "s_aux", "dropout"}
# keywords that are not read: the mask that is passed has them in it already
IN_THE_MASK = {"sliding_window"}
WAYS = (
    "eager",
    "sdpa",
)  # implementations of transformers whose masks and outputs are read


class Asked(NamedTuple):
    """One call of the attention interface of transformers, as it was made, and what the model's own function gave.

    The interface is the dictionary in which a model of transformers looks up how to compute attention.
    """

    module: nn.Module
    q: Tensor  # (B,H,T,D)
    k: Tensor  # (B,G,S,D)
    v: Tensor  # (B,G,S,E)
    mask: Any  # a tensor of booleans, or of numbers to be added; or None
    keywords: Mapping[str, Any]  # all other arguments
    implementation: str  # "eager", "sdpa", ...
    function: Callable[..., Any]  # what the interface gave for that name
    out: Tensor  # (B,H,T,E)


def read_call(asked: Asked, cross: bool) -> Call:
    """A call of transformers as a call of ours. Raises HeadwiseError where our reading is not what the model did.

    cross  are keys and values of another text? The interface does not tell it
    """
    name = type(asked.module).__name__
    if asked.implementation not in WAYS:
        raise HeadwiseError(
            f"{name} runs its attention by {asked.implementation!r}, whose masks headwise does not read; call "
            f"model.set_attn_implementation('sdpa') first"
        )
    for keyword in _parameters(asked.function) - READ - IN_THE_MASK:
        if asked.keywords.get(keyword) is not None:
            raise HeadwiseError(
                f"{name} passes {keyword}= to its attention, which headwise does not know; watching it would give "
                f"wrong numbers"
            )
    if (
        asked.q.ndim != 4 or asked.k.is_nested
    ):  # a nested tensor holds keys of several lengths
        raise HeadwiseError(
            f"{name} gives its attention queries of {asked.q.ndim} axes; 4 are needed, (B,H,T,D)"
        )
    q, k, v = for_documents(len(asked.out), asked.q, asked.k, asked.v)
    # Autocast takes values of 16 bits beside queries and keys that a rotation made float32.
    dtype = torch.promote_types(q.dtype, torch.promote_types(k.dtype, v.dtype))
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    call = Call(asked.module, q, k, v, options_of(asked), asked.out, cross)
    # What dropout has dropped cannot be checked. Eager code drops in training alone, the fused call always.
    if not asked.keywords.get("dropout") or (
        asked.implementation == "eager" and not asked.module.training
    ):
        check(call, asked.implementation == "eager")
    return call


def for_documents(B: int, *tensors: Tensor) -> Iterator[Tensor]:
    """Tensors of B documents, (B,h,n,d); queries that are learned may be one set for all, (1,h,n,d).

    All others are handed back themselves: where two calls have the very same q and k, `hook` knows that their maps are
    the same, and an expanded view would be another tensor.
    """
    return (x if len(x) == B else x.expand(B, -1, -1, -1) for x in tensors)


@cache
def _parameters(function: Any) -> set[str]:
    """Names of what a function is given beside module, query, key, value and mask."""
    kinds = inspect.signature(function).parameters.values()
    further = list(kinds)[5:]
    # Without *args and **kwargs, which take what the function does not name.
    return {
        kind.name
        for kind in further
        if kind.kind not in (kind.VAR_KEYWORD, kind.VAR_POSITIONAL)
    }


def options_of(asked: Asked) -> Options:
    """Mask, scale, softcap and sinks of a call, as the function that was called reads them."""
    keywords, eager = asked.keywords, asked.implementation == "eager"
    causal = keywords.get("is_causal")
    # As sdpa_attention_forward of transformers decides it, here and below.
    if causal is None:
        causal = getattr(asked.module, "is_causal", True)
    # Eager code reads no such flag; and the fused call drops it for a single query, which may see all keys.
    causal = causal and asked.mask is None and not eager and asked.q.shape[2] > 1
    biases = (
        []
        if keywords.get("position_bias") is None
        else numbers_added(keywords["position_bias"])
    )
    return Options(
        mask=joined_mask(causal, asked.mask, biases, bools_are_numbers=eager),
        scale=keywords.get("scaling"),
        softcap=keywords.get("softcap"),
        sink=keywords.get("s_aux"),
        dropout=keywords.get("dropout") or 0.0,
    )


def joined_mask(
    causal: bool,
    mask: Tensor | None,
    biases: Sequence[Mask] = (),
    bools_are_numbers: bool = False,
) -> Mask | None:
    """The mask of a fused call: its causal flag, aligned at the first key, its mask tensor, and further biases.

    bools_are_numbers  a mask of booleans is added to the scores, as 0 and 1: so eager code does it
    """
    # With offset 0 query t sees keys 0 to t, however many keys there are.
    parts: list[Mask] = [Causal(offset=0)] if causal else []
    if mask is not None and mask.dtype == torch.bool and not bools_are_numbers:
        # axes of length 1 in front: (T,S) -> (1,1,T,S)
        parts.append(Allowed(mask[(None,) * (4 - mask.ndim)]))
    elif mask is not None:
        parts += numbers_added(mask)
    parts += biases
    return all_of(parts)


def numbers_added(added: Tensor) -> list[Mask]:
    """What is added to the scores, of up to four axes; the most negative numbers stand for "may not"."""
    added = added[(None,) * (4 - added.ndim)]
    added = added if added.is_floating_point() else added.float()
    # Half of the least number: a mask made in another format, or added to a bias, need not be that number to the bit.
    allowed = added > torch.finfo(added.dtype).min / 2
    return [Allowed(allowed), Bias(torch.where(allowed, added, 0))]


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
    mask = (
        None
        if call.options.mask is None
        else Part(call.options.mask, "t", rows, call.n_queries)
    )
    steps = trace(
        call.q[:, :, rows],
        call.k,
        call.v,
        call.options._replace(mask=mask, dropout=0.0),
    )
    theirs = call.out[:, :, rows].to(steps.weights.dtype)
    # (B,H,rows) each: is the row compared, and the largest difference of its features. Where a padded value has turned
    # to NaN, rows that do not see it have NaN, too, by 0 x NaN: they are not compared.
    sees_some = theirs.isfinite().all(-1) & (steps.masked.amax(-1) > -torch.inf)
    difference = (
        (steps.out.to(theirs.dtype) - theirs).abs().amax(-1).where(sees_some, 0)
    )
    # The format in which q and k were multiplied, whose rounding is allowed.
    multiplied, device = call.q.dtype, call.q.device.type
    if multiplied == torch.float32 and torch.is_autocast_enabled(device):
        multiplied = torch.get_autocast_dtype(device)
    digits = torch.finfo(multiplied).eps
    if eager:  # transformers computes that softmax in float32, in a float64 model too
        digits = max(digits, torch.finfo(torch.float32).eps)
    if call.q.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        # torch may multiply in TF32, which keeps 10 bits of each factor
        digits = max(digits, 2**-10)
    values = torch.stack(
        call.v.aminmax()
    ).abs()  # one pass over all of v, without a copy
    if (
        not values.isfinite().all()
    ):  # a document that is nothing but padding may have turned to NaN
        values = call.v.nan_to_num(0, 0, 0).abs()
    # In one tensor, so that a device is waited for once; `any_sees` is 1.0 or 0.0 then.
    sizes = torch.stack(
        [
            steps.scores.nan_to_num().abs().max(),
            values.max(),
            difference.max(),
            sees_some.any(),
        ]
    )
    score, value, largest, any_sees = sizes.tolist()
    # Sums of large terms may cancel and leave more of their rounding. In half precision `digits` are larger than that.
    sums = 4 if multiplied.itemsize >= 4 else 1
    # `score` roundings for the scores, which the softmax makes a factor, and 8 as room for the softmax and the output.
    # 4 and 8 are round numbers: a smaller bound refuses more models that are read well, a larger one misses more.
    bound = digits * (8 + score) * sums * value
    # Where no row was compared, only zeros and NaN pass: other numbers may come of keys that our reading of the mask
    # forbids wrongly.
    if largest <= bound and (any_sees or not theirs.nan_to_num().any()):
        return
    # The message names the row that differs most, and of it the feature that does.
    b, h, t = (
        int(i) for i in torch.unravel_index(difference.argmax(), difference.shape)
    )
    gave, read = theirs[b, h, t], steps.out[b, h, t]  # (E,)
    place = (read.to(gave.dtype) - gave).abs().argmax()
    raise HeadwiseError(
        f"{type(call.layer).__name__}: in document {b}, head {h}, query {rows[t]} its attention gives "
        f"{gave[place]:.5g}, and what headwise reads of its mask, scale and biases gives {read[place]:.5g}; watching "
        f"it would give wrong numbers"
    )
