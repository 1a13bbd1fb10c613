"""What those type who come from torch.nn, transformers or a course, and what it is called here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Concatenate, ParamSpec, TypeVar

from headwise.errors import HeadwiseError

_D_MODEL, _N_HEADS = "d_model=", "n_heads="
_WEIGHTS = "left out: inside `with hw.watch(layer, maps=True) as seen` a call notes them, seen['L0.H3'].map"
_CAUSAL = "mask=hw.Causal()"
_CACHE = "cache=hw.KVCache()"

BUILT = {
    "embed_dim": _D_MODEL,
    "n_embd": _D_MODEL,
    "hidden_size": _D_MODEL,
    "num_heads": _N_HEADS,
    "n_head": _N_HEADS,
    "num_attention_heads": _N_HEADS,
    "num_kv_heads": "n_kv_heads=",
    "num_key_value_heads": "n_kv_heads=",
    "bias": "q_bias=, kv_bias= and out_bias=, and here all three are False unless you say so",
    "qkv_bias": "q_bias= and kv_bias=",
    "batch_first": "left out: a layer always takes (batch, tokens, width); of another order pass x.transpose(0, 1)",
    "kdim": "d_context=",
    "vdim": "d_values=",
    "add_zero_attn": "sink=True, a learned logit a head, which starts at 0",
    "add_bias_kv": "without a counterpart; sink=True comes nearest",
    "context_length": f"{_CAUSAL}, for texts of any length",
    "block_size": f"{_CAUSAL}, for texts of any length",
    "is_causal": _CAUSAL,
    "causal": _CAUSAL,
    "seed": "torch.manual_seed(seed) before; the NumPy course's class of these arguments is "
    "headwise.lab.courses.numpy_layer.MultiHeadAttention",
}
CALLED = {
    "query": "the first argument, layer(q, k, v)",
    "key": "the second argument, layer(q, k, v)",
    "value": "the third argument, layer(q, k, v)",
    "key_padding_mask": "mask=hw.Lengths(n), the number of real tokens of each document; or "
    "mask=hw.Allowed(~key_padding_mask[:, None, None]), since True is padding there and means may attend here",
    "attn_mask": f"{_CAUSAL}, or mask=hw.Allowed(~attn_mask), or of numbers hw.Bias(attn_mask); True forbids in "
    "nn.MultiheadAttention, and allows in hw.Allowed and in F.scaled_dot_product_attention",
    "attention_mask": "mask=hw.Lengths(attention_mask.sum(-1)), the number of real tokens of each document",
    "valid_lens": "mask=hw.Lengths(valid_lens)",
    "is_causal": _CAUSAL,
    "need_weights": _WEIGHTS,
    "average_attn_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
    "past_key_value": _CACHE,
    "past_key_values": _CACHE,
    "layer_past": _CACHE,
    "use_cache": _CACHE,
}


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
Method = Callable[Concatenate[S, P], R]


def translates(words: Mapping[str, str]) -> Callable[[Method[S, P, R]], Method[S, P, R]]:
    """A method that, asked with one of these `words` as a keyword, says what it is called here."""

    def around(method: Method[S, P, R]) -> Method[S, P, R]:
        def checked(self: S, /, *args: P.args, **keywords: P.kwargs) -> R:
            foreign = [name for name in keywords if name in words]
            if foreign:
                raise HeadwiseError("; ".join(f"{name}= is here {words[name]}" for name in foreign))
            return method(self, *args, **keywords)

        functools.update_wrapper(checked, method)
        return checked

    return around
