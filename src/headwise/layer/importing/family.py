"""What is known of the attention of a family of transformers' models: one record each, and where they are kept."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.layer.importing.parts import Parts, linear_weights


@dataclass(frozen=True, kw_only=True)
class Family:
    """Where the attention of a family keeps what a layer needs. Nothing here runs the model or imports transformers.

    The attention module is the one that has W_O: class `<prefix>Attention`. Paths of submodules and of attributes are
    seen from it, with dots; None is what the family does not have.
    """

    name: str  # the config's `model_type`: "llama"
    prefix: str  # what the names of its classes begin with: "Llama" of LlamaAttention
    # Path of the part that has W_Q, W_K and W_V and computes the heads, classes `<prefix>SelfAttention` and
    # `<prefix>CrossAttention`, where W_O stands beside it (BERT: "self"); "" where it is the module itself.
    core: str = ""
    # Paths of the projections, each a Linear, or GPT-2's Conv1D, with or without bias. Where q, k and v name one
    # module, its outputs are all queries, then all keys, then all values.
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    cross_q: str | None = None  # of the queries in modules for cross attention, whose `k` has keys, then values
    # Paths of RMSNorms over each head's queries and keys, before RoPE; one over all heads at once is refused. With
    # `kv_down` they are those of the latents.
    q_norm: str | None = None
    k_norm: str | None = None
    # Multi-head latent attention: the Linear to the latent and the rotary key, of which `k` and `v`, one module, make
    # the keys and values of each head in turn. Where there is a `q_down`, `q_up` makes the queries of its latent.
    kv_down: str | None = None
    q_down: str | None = None
    q_up: str | None = None
    # Are queries and keys turned? Pairs are features m and m + d/2, the angles those of `config.rope_parameters` and of
    # class `<prefix>RotaryEmbedding` in the same file.
    rope: bool = True
    rope_width: str = "head_dim"  # attribute with the number of features that may turn
    interleaved: str | bool = False  # are pairs features 2m and 2m + 1 instead? An attribute, or the answer
    n_heads: str = "config.num_attention_heads"  # attribute with the number of query heads
    n_kv_heads: str | None = "config.num_key_value_heads"  # and of key/value heads; None: as many
    scale: str = "scaling"  # attribute with the factor of q.k
    softcap: str | None = None  # attribute with the softcap, which may be None
    dropout: str = "attention_dropout"  # attribute with the probability of dropping a weight
    causal: tuple[str, ...] = ("is_causal",)  # attributes of which one that is True makes self attention causal
    window: str | None = None  # attribute with the length of a sliding window, the query included, which may be None
    cross_mask: str = "attention_mask"  # keyword of the mask in a call of cross attention
    layers: str = "layers"  # the list of layers, seen from the body of the model (its `base_model`)
    attention: str = "self_attn"  # the attention module, seen from a layer
    width: str = "hidden_size"  # the config's field for the width of the model
    even_width: bool = False  # must the number of heads divide the width, whatever head_dim says?

    @property
    def packed(self) -> bool:
        """Are queries, keys and values one matrix?"""
        return self.q == self.k == self.v

    @property
    def whole(self) -> str:
        """Class of the attention with W_O."""
        return f"{self.prefix}Attention"

    @property
    def classes(self) -> tuple[str, ...]:
        """Those of the attention with W_O, and of the part that computes the heads."""
        return (self.whole, *(f"{self.prefix}{kind}Attention" for kind in ("Self", "Cross") if self.core))

    def is_cross(self, core: nn.Module) -> bool:
        """Is the module for cross attention alone?"""
        return f"{self.prefix}CrossAttention" in class_names(core) or getattr(core, "is_cross_attention", False)

    def within_core(self, path: str) -> str:
        """A path seen from the core: "self.query" becomes "query"."""
        return path.removeprefix(f"{self.core}.")

    def read(self, core: nn.Module, name: str | None) -> Any:
        """The attribute at a path seen from the core; None where the family or the module has none."""
        value: Any = core
        for step in self.within_core(name).split(".") if name else ():
            value = getattr(value, step, None)
        return value if name else None

    def parts(self, core: nn.Module, w_o: nn.Module | None) -> Parts:
        """The weights as a layer has them, y = W x: views of the module's own.

        `w_o` is the module of W_O, or None to do without.
        """
        n_heads = self.read(core, self.n_heads)
        n_kv_heads = self.read(core, self.n_kv_heads) or n_heads
        q_down = None if self.read(core, self.q_down) is None else self.q_down
        if self.cross_q is not None and self.is_cross(core):
            q = self._projection(core, self.cross_q)
            k, v = self._split(core, (n_kv_heads, n_kv_heads))
        elif self.packed:
            q, k, v = self._split(core, (n_heads, n_kv_heads, n_kv_heads))
        else:
            queries = self.q if q_down is None or self.q_up is None else self.q_up
            q, k, v = (self._projection(core, path) for path in (queries, self.k, self.v))
        o = (None, None) if w_o is None else linear_weights(w_o, f"{self.whole}.{self.o}")
        widths = [q[0].shape[0] // n_heads] * 2 if self.kv_down is None else [q[0].shape[1], k[0].shape[1]]
        gains = [self._gain(core, path, width) for path, width in zip((self.q_norm, self.k_norm), widths, strict=True)]
        downs = [None if path is None else self._projection(core, path) for path in (self.kv_down, q_down)]
        return Parts(q, k, v, o, gains[0], gains[1], downs[0], downs[1])

    def _projection(self, core: nn.Module, path: str) -> tuple[Tensor, Tensor | None]:
        return linear_weights(self.read(core, path), f"{type(core).__name__}.{self.within_core(path)}")

    def _split(self, core: nn.Module, counts: tuple[int, ...]) -> list[tuple[Tensor, Tensor | None]]:
        """What one packed projection holds, for so many heads each."""
        weight, bias = self._projection(core, self.k)
        if weight.shape[0] % sum(counts):
            raise HeadwiseError(f"{self.k} has {weight.shape[0]} rows, no multiple of {sum(counts)} heads")
        rows = [weight.shape[0] // sum(counts) * count for count in counts]
        biases = [None] * len(rows) if bias is None else torch.split(bias, rows)
        return list(zip(torch.split(weight, rows), biases, strict=True))

    def _gain(self, core: nn.Module, path: str | None, head_dim: int) -> Tensor | None:
        norm = self.read(core, path)
        gain: Tensor | None = None if norm is None else norm.weight
        if gain is not None and tuple(gain.shape) != (head_dim,):
            raise HeadwiseError(
                f"{path} norms {len(gain)} features at once, and a headwise layer each head's {head_dim} apart; it can "
                f"be neither imported nor reshaped"
            )
        return gain

    def parameters(self, core: nn.Module) -> set[str]:
        """Names of the parameters, seen from the core, that a layer would get."""
        paths = [self.q, self.k, self.v, self.o, self.cross_q, self.q_norm, self.k_norm]
        paths += [self.kv_down, self.q_down, self.q_up]
        return {f"{self.within_core(path)}.{kind}" for path in paths if path for kind in ("weight", "bias")}


def _recorded() -> dict[str, Family]:
    """The families of families.toml, each made of the one that it is like."""
    known: dict[str, Family] = {}
    for name, fields in tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8")).items():
        base = known[fields.pop("like")] if "like" in fields else Family(name=name, prefix="")  # one that stands above
        values: dict[str, Any] = {
            field: tuple(x) if isinstance(x, list) else None if x == "" else x for field, x in fields.items()
        }
        known[name] = replace(base, name=name, **values)
    return known


_families = _recorded()


def register(family: Family) -> Family:
    """Make a family known to `import_attention`, in the place of one of the same name; returns it."""
    _families[family.name] = family
    return family


def families() -> Iterator[Family]:
    """All that are known."""
    yield from _families.values()


def family_of(module: nn.Module) -> Family | None:
    """The family whose class a module's class is, or comes from; None where none is known."""
    for name in class_names(module):
        for family in _families.values():
            if name in family.classes:
                return family
    return None


def class_names(module: nn.Module) -> list[str]:
    """Of a module's class and of those that it comes from, the nearest first."""
    return [base.__name__ for base in type(module).__mro__]
