"""Flash attention and flex attention on a processor: plain code in the place of kernels and of the compiler."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.integrations import flex_attention as flex


def flash_attn_func(
    q: Tensor,  # (B,T,H,D)
    k: Tensor,  # (B,S,G,D)
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,  # of flash attention 3
) -> Tensor:
    """flash_attn 2.8's function of this name: the last query stands beside the last key, and -1 bounds nothing."""
    T, S, H = q.shape[1], k.shape[1], q.shape[2]
    k, v = (x.repeat_interleave(H // x.shape[2], 2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(S) - torch.arange(T)[:, None] - (S - T)
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = (ahead < -left) & (left >= 0) | (ahead > right) & (right >= 0)
    scores = scores.masked_fill(hidden, -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, H, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1).nan_to_num(0)[..., :S]  # a query without a key gives 0
    return torch.einsum("bhts,bshe->bthe", weights, v)


def flash_attn_varlen_func(
    q: Tensor,  # (tokens of all texts, H, D)
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """flash_attn 2.8's function of this name: each text by itself."""
    parts = []
    for n in range(len(cu_seqlens_q) - 1):
        rows, keys = (slice(*edges[n : n + 2].tolist()) for edges in (cu_seqlens_q, cu_seqlens_k))
        of_text = q[None, rows], k[None, keys], v[None, keys]
        options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size}
        parts.append(flash_attn_func(*of_text, **options, softcap=softcap, s_aux=s_aux)[0])
    return torch.cat(parts)


@contextmanager
def flash_stand_in(name: str = "flash_attention_2") -> Iterator[None]:
    """Inside this block transformers' code for flash attention calls these two functions."""
    put: dict[str, Any] = {
        "_flash_fn": flash_attn_func,
        "_flash_varlen_fn": flash_attn_varlen_func,
        "_flash_with_kvcache_fn": None,
        "_pad_fn": flash_utils._pad_input,
        "_unpad_fn": flash_utils._unpad_input,
        "_loaded_implementation": name,
        "_process_flash_kwargs_fn": flash_utils._lazy_define_process_function(flash_attn_varlen_func),
        "_process_with_kvcache_kwargs_fn": dict,
    }
    before = {key: getattr(flash_utils, key) for key in put}
    vars(flash_utils).update(put)
    try:
        yield
    finally:
        vars(flash_utils).update(before)


@contextmanager
def uncompiled_flex() -> Iterator[None]:
    """Inside this block flex attention runs as plain code: to compile it takes a minute for each form of call."""

    def plain(*inputs: Any, training: bool = False, **keywords: Any) -> Any:
        return torch_flex.flex_attention(*inputs, **keywords)

    before = flex.compile_friendly_flex_attention, torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    flex.compile_friendly_flex_attention = plain
    torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        # Blocks of masks are compiled, too, by an option that torch has since given up.
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        flex.compile_friendly_flex_attention, torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


def use_backend(model: Any, name: str) -> Any:
    """The model, which runs its attention by a backend, whether the package of that is there or not."""
    waiting = [module.config for module in model.modules() if hasattr(module, "config")]
    for config in waiting:  # the list grows in the loop
        config._attn_implementation_internal = name
        parts = (getattr(config, part, None) for part in getattr(config, "sub_configs", ()))
        waiting += [part for part in parts if part is not None]
    return model
