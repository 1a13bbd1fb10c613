"""headwise makes every attention head an object: name it, plot it, price it, switch it off.

    import headwise as hw

    out = hw.attend(q, k, v, mask=hw.Causal())     # lists, NumPy or torch: the backend follows q
    layer = hw.MultiHeadAttention(768, 12, n_kv_heads=4, mask=hw.Causal(), rope=hw.RoPE())
    model = hw.open("runs/verbs")                  # a GPT of ours, or a folder of transformers
    hw.survey(model, "he will work = ")["L0.H3"]   # what each head does; hw.watch while it runs, hw.ablate without it

Importing this loads neither torch nor transformers; what needs them loads when it is first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headwise.backends import attend, trace
from headwise.errors import HeadwiseError, MissingError
from headwise.intervals import Interval
from headwise.masks import Alibi, Allowed, Bias, Causal, Lengths, Mask, Segments, Window
from headwise.positions import RoPE
from headwise.records import Trace
from headwise.spec import AttentionSpec

# For type checkers and editors alone: when the package runs, `__getattr__` below loads these.
if TYPE_CHECKING:
    from headwise.backends.cache import KVCache
    from headwise.checker.bugs import Verdict
    from headwise.checker.verdict import check
    from headwise.cost.price import Price, price
    from headwise.gpt.gpt import GPT, GPTConfig
    from headwise.heads.ablate import ablate, steer
    from headwise.heads.attribute import Attribution, attribute
    from headwise.heads.composition import composition
    from headwise.heads.patch import Patching, patch
    from headwise.heads.survey import survey
    from headwise.heads.table import HeadProfile, Story, Survey
    from headwise.heads.watch import Seen, SeenHead, watch
    from headwise.heads.why import why
    from headwise.layer.convert import Replaced, from_torch, replace
    from headwise.layer.explain import Explanation, explain
    from headwise.layer.head import Head
    from headwise.layer.latent import MultiHeadLatentAttention
    from headwise.layer.layer import MultiHeadAttention
    from headwise.models.open import generate, train
    from headwise.models.open import open_model as open  # noqa: F401
    from headwise.models.verify import verify
    from headwise.reshape.job import Reshaped
    from headwise.reshape.prune import prune
    from headwise.reshape.share import share
    from headwise.view.look import look
    from headwise.view.page import story_page
    from headwise.view.pictures import attention, overlay

__version__ = "0.3.0"

# Without `open`, which a star import would put in the place of Python's own.
__all__ = [
    "GPT", "Alibi", "Allowed", "AttentionSpec", "Attribution", "Bias", "Causal",
    "Explanation", "GPTConfig", "Head", "HeadProfile", "HeadwiseError", "Interval",
    "KVCache", "Lengths", "Mask", "MultiHeadAttention", "MultiHeadLatentAttention", "Patching", "Price",
    "Replaced", "Reshaped", "RoPE", "Seen", "SeenHead", "Segments", "Story", "Survey", "Trace", "Verdict",
    "Window", "ablate", "attend", "attention", "attribute", "check", "composition",
    "explain", "from_torch", "generate", "look",
    "overlay", "patch", "price", "prune", "replace", "share", "steer", "story_page",
    "survey", "trace", "train", "verify", "watch", "why",
]  # fmt: skip

# Where the names are that load when they are first used: "ablate" -> ("headwise.heads.ablate", "ablate"). They are
# written module by module. `open` is called `open_model` in its module, where it would hide Python's own.
_LAZY = {
    name: (f"headwise.{module}", "open_model" if name == "open" else name)
    for module, names in {
        "cost.price": "Price price", "gpt.gpt": "GPT GPTConfig",
        "heads.attribute": "Attribution attribute",
        "heads.composition": "composition", "heads.ablate": "ablate steer", "heads.patch": "Patching patch",
        "heads.survey": "survey", "heads.table": "HeadProfile Story Survey",
        "heads.watch": "Seen SeenHead watch", "heads.why": "why",
        "layer.explain": "Explanation explain",
        "layer.head": "Head",
        "layer.convert": "from_torch Replaced replace",
        "layer.latent": "MultiHeadLatentAttention", "layer.layer": "MultiHeadAttention",
        "models.open": "generate open train", "models.verify": "verify",
        "reshape.prune": "prune",
        "reshape.job": "Reshaped", "reshape.share": "share", "backends.cache": "KVCache",
        "checker.verdict": "check", "checker.bugs": "Verdict", "view.look": "look",
        "view.pictures": "attention overlay", "view.page": "story_page",
    }.items()
    for name in names.split()
}  # fmt: skip


# Python asks this for a name that the package does not have (PEP 562).
def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    try:
        if name in ("look", "attention"):  # their modules draw without torch
            importlib.import_module("torch")
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        # the two that `pip install headwise` leaves out
        if error.name not in ("torch", "tokenizers"):
            raise
        raise MissingError(  # an AttributeError, so that `hasattr(hw, "watch")` is False
            f"headwise.{name} needs {error.name}, which is not installed: pip install 'headwise[torch]'"
        ) from None


def __dir__() -> list[str]:
    return [*__all__, "open"]
