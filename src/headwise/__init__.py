"""headwise: multi-head attention in which a head is a thing you can hold.

    import headwise as hw

    out = hw.attend(q, k, v, mask=hw.Causal())     # lists, NumPy or torch: the rung follows q
    layer = hw.MultiHeadAttention(768, 12, n_kv_heads=4, mask=hw.Causal(), rope=hw.RoPE())
    model = hw.open("runs/verbs")                  # a GPT of ours, or a folder of transformers
    hw.survey(model, "he will work = ")["L0.H3"]   # what each head does; hw.watch while it runs, hw.ablate without it

Importing this loads neither torch nor transformers; what needs them loads when it is first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headwise.errors import HeadwiseError, MissingError
from headwise.intervals import Interval
from headwise.masks import Alibi, Allowed, Bias, Causal, Lengths, Mask, Segments, Window
from headwise.positions import RelativeBias, RoPE
from headwise.records import Trace
from headwise.rungs import attend, trace
from headwise.spec import AttentionSpec

if TYPE_CHECKING:
    from headwise.cost.pricing import Price
    from headwise.cost.read import price
    from headwise.gpt.gpt import GPT, GPTConfig
    from headwise.heads.attribution import Attribution, attribute
    from headwise.heads.effect import ablate
    from headwise.heads.patching import Patching, patch
    from headwise.heads.profiles import HeadProfile, Survey
    from headwise.heads.seen import Seen, SeenHead
    from headwise.heads.survey import survey
    from headwise.heads.train import train
    from headwise.heads.watch import watch
    from headwise.layer.explain import Explanation, explain
    from headwise.layer.head import Head, Heads
    from headwise.layer.importing.certificate import Imported
    from headwise.layer.importing.importers import import_attention
    from headwise.layer.layer import MultiHeadAttention
    from headwise.models.generate import generate
    from headwise.models.open import open_model as open
    from headwise.reshape.prune import prune
    from headwise.reshape.report import Damage, Reshaped
    from headwise.reshape.share import share
    from headwise.rungs.cache import KVCache
    from headwise.teach.check import check
    from headwise.teach.verdict import Verdict

__version__ = "0.1.0"

__all__ = [
    "GPT",
    "Alibi",
    "Allowed",
    "AttentionSpec",
    "Attribution",
    "Bias",
    "Causal",
    "Damage",
    "Explanation",
    "GPTConfig",
    "Head",
    "HeadProfile",
    "Heads",
    "HeadwiseError",
    "Imported",
    "Interval",
    "KVCache",
    "Lengths",
    "Mask",
    "MultiHeadAttention",
    "Patching",
    "Price",
    "RelativeBias",
    "Reshaped",
    "RoPE",
    "Seen",
    "SeenHead",
    "Segments",
    "Survey",
    "Trace",
    "Verdict",
    "Window",
    "ablate",
    "attend",
    "attribute",
    "check",
    "explain",
    "generate",
    "import_attention",
    "open",
    "patch",
    "price",
    "prune",
    "share",
    "survey",
    "trace",
    "train",
    "watch",
]

# Where the names are that load when they are first used: module, and what they are called there.
_LAZY = {
    "Attribution": ("headwise.heads.attribution", "Attribution"),
    "Damage": ("headwise.reshape.report", "Damage"),
    "Explanation": ("headwise.layer.explain", "Explanation"),
    "GPT": ("headwise.gpt.gpt", "GPT"),
    "GPTConfig": ("headwise.gpt.gpt", "GPTConfig"),
    "Head": ("headwise.layer.head", "Head"),
    "HeadProfile": ("headwise.heads.profiles", "HeadProfile"),
    "Heads": ("headwise.layer.head", "Heads"),
    "Imported": ("headwise.layer.importing.certificate", "Imported"),
    "KVCache": ("headwise.rungs.cache", "KVCache"),
    "MultiHeadAttention": ("headwise.layer.layer", "MultiHeadAttention"),
    "Patching": ("headwise.heads.patching", "Patching"),
    "Price": ("headwise.cost.pricing", "Price"),
    "Reshaped": ("headwise.reshape.report", "Reshaped"),
    "Seen": ("headwise.heads.seen", "Seen"),
    "SeenHead": ("headwise.heads.seen", "SeenHead"),
    "Survey": ("headwise.heads.profiles", "Survey"),
    "Verdict": ("headwise.teach.verdict", "Verdict"),
    "ablate": ("headwise.heads.effect", "ablate"),
    "attribute": ("headwise.heads.attribution", "attribute"),
    "check": ("headwise.teach.check", "check"),
    "explain": ("headwise.layer.explain", "explain"),
    "generate": ("headwise.models.generate", "generate"),
    "import_attention": ("headwise.layer.importing.importers", "import_attention"),
    "open": ("headwise.models.open", "open_model"),
    "patch": ("headwise.heads.patching", "patch"),
    "price": ("headwise.cost.read", "price"),
    "prune": ("headwise.reshape.prune", "prune"),
    "share": ("headwise.reshape.share", "share"),
    "survey": ("headwise.heads.survey", "survey"),
    "train": ("headwise.heads.train", "train"),
    "watch": ("headwise.heads.watch", "watch"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "tokenizers"):
            raise
        raise MissingError(  # so that `hasattr(hw, "watch")` is False
            f"headwise.{name} needs {error.name}, which is not installed: pip install 'headwise[torch]'"
        ) from None


def __dir__() -> list[str]:
    return __all__
