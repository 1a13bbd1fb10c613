"""headwise: multi-head attention in which a head is a thing you can hold.

    import headwise as hw

    out = hw.attend(q, k, v, mask=hw.Causal())     # lists, NumPy or torch: the rung follows q
    layer = hw.MultiHeadAttention(768, 12, n_kv_heads=4, mask=hw.Causal(), rope=hw.RoPE())

Importing this loads neither torch nor transformers; what needs them loads when it is first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headwise.errors import HeadwiseError
from headwise.masks import Alibi, Allowed, Bias, Causal, Lengths, Mask, Segments, Window
from headwise.positions import RelativeBias, RoPE
from headwise.records import Trace
from headwise.rungs import attend, trace
from headwise.spec import AttentionSpec

if TYPE_CHECKING:
    from headwise.heads.effect import ablate
    from headwise.heads.watch import watch
    from headwise.layer.explain import explain
    from headwise.layer.importing.importers import import_attention
    from headwise.layer.layer import MultiHeadAttention
    from headwise.rungs.cache import KVCache

__version__ = "0.1.0"

__all__ = [
    "Alibi",
    "Allowed",
    "AttentionSpec",
    "Bias",
    "Causal",
    "HeadwiseError",
    "KVCache",
    "Lengths",
    "Mask",
    "MultiHeadAttention",
    "RelativeBias",
    "RoPE",
    "Segments",
    "Trace",
    "Window",
    "ablate",
    "attend",
    "explain",
    "import_attention",
    "trace",
    "watch",
]

_NEEDS_TORCH = {
    "KVCache": "headwise.rungs.cache",
    "MultiHeadAttention": "headwise.layer.layer",
    "ablate": "headwise.heads.effect",
    "explain": "headwise.layer.explain",
    "import_attention": "headwise.layer.importing.importers",
    "watch": "headwise.heads.watch",
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_NEEDS_TORCH[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise HeadwiseError(
            f"headwise.{name} needs torch, which is not installed: pip install 'headwise[torch]'"
        ) from None


def __dir__() -> list[str]:
    return __all__
