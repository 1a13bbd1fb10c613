"""One function on three backends: `attend`, and `trace`, which keeps every step.

What q is chooses the backend: nested lists take the plain loops, a NumPy array the NumPy backend, a torch tensor
the torch backend. A backend loads when it is first used, so only those who hold a tensor import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from headwise.errors import HeadwiseError, refuses_foreign
from headwise.masks import Mask, bare_mask_error
from headwise.records import AnyArray, Trace
from headwise.shapes import shape_of
from headwise.spec import Options, PerHead

# What those type who come from torch's function or from kernels, and what it is called here.
ELSEWHERE = {
    "attn_mask": "mask=hw.Allowed(attn_mask), or of numbers mask=hw.Bias(attn_mask)",
    "is_causal": "mask=hw.Causal(offset=0); without offset= queries stand at the end of the keys",
    "causal": "mask=hw.Causal()",
    "window_size": "mask=hw.Window(left, right)",
    "dropout_p": "dropout=",
    "softmax_scale": "scale=",
    "enable_gqa": "left out: k and v may have fewer heads than q",
    "key_padding_mask": "mask=hw.Allowed(~key_padding_mask[:, None, None]), where True is padding",
    "valid_lens": "mask=hw.Lengths(valid_lens)",
}


@refuses_foreign(ELSEWHERE)
def attend(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink: PerHead | None = None,
    dropout: float = 0.0,
    gate: PerHead | None = None,
    kv_index: Sequence[int] | None = None,
) -> AnyArray:
    """Multi-head attention: softmax(cap(q k^T * scale) + mask) v, for MHA, GQA and MQA alike.

    Vaswani et al. 2017 (arXiv 1706.03762), section 3.2; grouped heads: Ainslie et al. 2023 (arXiv 2305.13245).

    Args:
        q: (B,H,T,D); nested lists, numpy.ndarray or torch.Tensor, and k and v of the same kind. One head of one
            document may go as (T,D), (S,D) and (S,E)
        k: (B,G,S,D), never repeated to H heads; on nested lists the axis B may be left out of all three
        v: (B,G,S,E)
        mask: Causal, Window, Lengths, Segments, Allowed, Bias, Alibi, one of your own, or several with &
        scale: multiplies the scores; default 1/sqrt(D)
        softcap: c of c*tanh(score/c), before mask and bias (Gemma 2)
        sink: (H,) one extra logit a head, which takes its share of the softmax and gives nothing (gpt-oss)
        dropout: probability of dropping a weight; torch only
        gate: (H,) multiplies each head's output
        kv_index: (H,) kv_index[h] is the key/value head that query head h reads; default h // (H // G): H=6, G=2
            reads 0 0 0 1 1 1

    Returns:
        (B,H,T,E), in q's kind and dtype. A query that may attend nothing gets 0.

    Raises:
        HeadwiseError: with both numbers when shapes, dtypes or devices do not fit.
    """
    options = Options(mask, scale, softcap, sink, dropout, gate, kv_index)
    backend, is_one_head, *heads = _prepared(q, k, v, mask)
    out: AnyArray = backend.attend(*heads, options)
    return out[0][0] if is_one_head else out


@refuses_foreign(ELSEWHERE)
def trace(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink: PerHead | None = None,
    dropout: float = 0.0,
    gate: PerHead | None = None,
    kv_index: Sequence[int] | None = None,
) -> Trace[AnyArray]:
    """`attend` with a record of every step. The arguments are those of `attend`, and so are the errors.

    Returns:
        scores, capped, masked and weights (B,H,T,S), lse (B,H,T) and out (B,H,T,E), in q's kind and dtype.
    """
    options = Options(mask, scale, softcap, sink, dropout, gate, kv_index)
    backend, is_one_head, *heads = _prepared(q, k, v, mask)
    steps = backend.trace(*heads, options)
    if is_one_head:
        return Trace(*(step[0][0] for step in vars(steps).values()))
    return steps


def _prepared(q: Any, k: Any, v: Any, mask: Any) -> tuple[Any, ...]:
    """The backend; are these one head of one document? And q, k and v with four axes then: (T,D) as (1,1,T,D).

    Raises HeadwiseError for a mixture, and for a bare mask.
    """
    kinds = {_kind("q", q), _kind("k", k), _kind("v", v)}
    if len(kinds) > 1:
        raise HeadwiseError(
            f"q is a {type(q).__name__}, k a {type(k).__name__}, v a {type(v).__name__}; pass all three as lists, as "
            f"NumPy arrays or as torch tensors"
        )
    if mask is not None and not isinstance(mask, Mask):
        raise bare_mask_error(mask)
    backend: Any
    # spelled out, since torch.compile does not look into importlib
    if "torch" in kinds:
        from headwise.backends import torch_ as backend
    elif "numpy" in kinds:
        from headwise.backends import numpy_ as backend
    else:
        from headwise.backends import loops as backend
    heads = q, k, v
    if any(len(shape_of(x)) != 2 for x in heads):
        return backend, False, q, k, v
    is_list = isinstance(q, list | tuple)
    return backend, True, *([[x]] if is_list else x[None, None] for x in heads)


def _kind(name: str, x: Any) -> str:
    # What was never imported has made no tensor or array; to ask so loads neither library.
    torch = sys.modules.get("torch")
    numpy = sys.modules.get("numpy")
    if torch and isinstance(x, torch.Tensor):
        return "torch"
    if numpy and isinstance(x, numpy.ndarray):
        return "numpy"
    if isinstance(x, list | tuple):
        return "list"
    raise HeadwiseError(
        f"{name} is {type(x).__name__}; pass nested lists, a numpy.ndarray or a torch.Tensor"
    )
