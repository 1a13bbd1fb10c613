"""The attention of a model, layer by layer: its weights, read and given to a child.

Families keep weights in four Linears, or q, k and v in one matrix, or as y = x W; families.toml says where. Here all
are one record, y = W x, head by head.

A config of transformers says which layers have a window in `layer_types` and `sliding_window`: one window for all that
have one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.families import OURS, Family, family_for
from headwise.gpt.checkpoint import hf_form
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.layer.layer import MultiHeadAttention
from headwise.models.sites import (
    Site,
    attention_layers,
    block_path,
    is_hf,
    sites_of,
)
from headwise.positions import RoPE
from headwise.spec import is_adjacent

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class AttentionWeights:
    """One attention layer as H query heads and G key/value heads. Query head h reads key/value head h // (H / G)."""

    wq: Tensor  # (H,D,C)
    wk: Tensor  # (G,D,C)
    wv: Tensor  # (G,E,C)
    wo: Tensor  # (C,H,E)
    bq: Tensor | None = None  # (H,D)
    bk: Tensor | None = None  # (G,D)
    bv: Tensor | None = None  # (G,E)
    q_gain: Tensor | None = None  # (D,) of the qk-norm, one for all heads
    k_gain: Tensor | None = None  # (D,)
    # features of a head that RoPE rotates together
    pairs: Pairs = ()

    @property
    def n_heads(self) -> int:
        return self.wq.shape[0]

    @property
    def n_kv_heads(self) -> int:
        return self.wk.shape[0]

    @property
    def group_size(self) -> int:
        """Query heads for each key/value head."""
        return self.n_heads // self.n_kv_heads

    def widened(self) -> AttentionWeights:
        """A copy on the processor, without gradients, wide enough to compute new weights from.

        float64; of half precision, which keeps 8 or 11 bits of the result, float32: that takes half the time.
        """
        dtype = torch.float32 if self.wk.dtype.itemsize == 2 else torch.float64
        tensors: dict[str, Any] = {
            name: x.detach().to("cpu", dtype)
            for name, x in vars(self).items()
            if isinstance(x, Tensor)
        }
        return dataclasses.replace(self, **tensors)

    def selected(
        self, heads: Sequence[int], kv_heads: Sequence[int]
    ) -> AttentionWeights:
        """The layer of these query heads and key/value heads, in that order."""
        tensors: dict[str, Any] = {"wo": self.wo[:, list(heads)]}
        for name in ("wq", "bq", "wk", "bk", "wv", "bv"):
            x = getattr(self, name)
            if x is not None:
                # wq and bq have query heads, the others key/value heads.
                tensors[name] = x[list(heads if name.endswith("q") else kv_heads)]
        return dataclasses.replace(self, **tensors)

    def permuted(self, kv_order: Sequence[int]) -> AttentionWeights:
        """Its key/value heads, or some of them, in another order; the query heads of each go with it."""
        r = self.group_size
        return self.selected([g * r + i for g in kv_order for i in range(r)], kv_order)


def grouped(x: Tensor, n: int) -> Tensor:
    """(n*r,...) -> (n,r,...)"""
    return x.reshape(n, -1, *x.shape[1:])


def family_of(model: nn.Module) -> Family:
    """The record of a model's family. Raises HeadwiseError where it has none that the verb "reshape" serves."""
    if isinstance(model, GPT) and model.config.own_attention is not None:
        raise HeadwiseError(
            f"its attention is {model.config.own_attention}, whose weights headwise does not know"
        )
    if our_layers(model):
        return family_for(OURS)
    # A model without a config is refused by the name of its class.
    config = getattr(model, "config", None)
    return family_for(getattr(config, "model_type", type(model).__name__))


def our_layers(model: nn.Module) -> list[MultiHeadAttention]:
    """The layers of ours in a GPT or a model of one's own; none of a model of transformers."""
    return [] if is_hf(model) else attention_layers(model)


def own_layers(model: nn.Module) -> list[MultiHeadAttention]:
    """The layers of ours in a model of one's own; none of a GPT, or of a model of transformers."""
    return [] if isinstance(model, GPT) else our_layers(model)


def body_of(model: nn.Module) -> Any:
    """The model without the projection onto the vocabulary; a GPT of ours, which has no such part, itself."""
    return getattr(model, "base_model", model)


def sites(model: nn.Module) -> list[Site]:
    """The attention of each layer, from the first to the last; of a model of one's own those of ours alone.

    Raises HeadwiseError where the family has no record.
    """
    is_ours = family_of(model).name == OURS
    return [
        site
        for site in sites_of(model)
        if isinstance(site.module, MultiHeadAttention) == is_ours and not site.free
    ]


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers, from the first to the last; the attention itself, where it lies in no numbered module."""
    paths = {module: path for path, module in model.named_modules()}
    places = [paths[module] for module in attentions(model)]
    return [model.get_submodule(block_path(path) or path) for path in places]


def attentions(model: nn.Module) -> list[nn.Module]:
    """The attention module of each layer, from the first to the last."""
    return [site.module for site in sites(model)]


def head_counts(model: nn.Module) -> tuple[int, int, int]:
    """Query heads, key/value heads, head width: what the config says, or all layers of ours share.

    Raises HeadwiseError where these differ, or weights are more than a record's.
    """
    family_of(model)  # refuses a family whose config may say something else
    first = None
    for n, layer in enumerate(our_layers(model)):
        spec = layer.spec
        counts = spec.n_heads, spec.n_kv_heads, spec.head_dim
        first = first or counts
        if layer.o_proj is None:
            what = f"layer {n} has no W_O"
        elif not is_adjacent(spec.kv_index, spec.n_heads, spec.n_kv_heads):
            what = f"layer {n} has kv_index={spec.kv_index}: no equal, adjacent groups"
        elif counts != first:
            what = f"layer {n} has {counts} query heads, key/value heads and width, layer 0 {first}"
        else:
            continue
        raise HeadwiseError(
            f"{what}; change such layers one by one, as with layer.without([0])"
        )
    if first:
        return first
    config: Any = model.config
    # GPT-2 calls it n_head and answers to this name too
    n_heads = config.num_attention_heads
    n_kv_heads = getattr(config, "num_key_value_heads", None) or n_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // n_heads
    return n_heads, n_kv_heads, head_dim


def read_layers(model: nn.Module) -> list[AttentionWeights]:
    """The attention weights of each layer; views of the model's own wherever that is possible."""
    pairs = _pairs(model, head_counts(model)[2])
    return [
        AttentionWeights(**_views(model, site), pairs=pairs) for site in sites(model)
    ]


@torch.no_grad()
def with_layers(
    model: nn.Module,
    layers: Iterable[AttentionWeights],
    n_heads: int | None = None,
    n_kv_heads: int | None = None,
) -> nn.Module:
    """A model of the same class with these attention weights, and all else copied; `model` is left alone.

    n_heads, n_kv_heads  of the new model, default the model's own. Where they differ its config is changed and the
                         model built anew from it. Raises HeadwiseError, naming the field, where it cannot carry them.

    Layers are taken one by one and written at once: what makes them holds one at a time.
    """
    before = head_counts(model)
    n_heads = n_heads or before[0]
    n_kv_heads = n_kv_heads or before[1]
    if problem := cannot_carry(model, n_heads, n_kv_heads):
        raise HeadwiseError(problem)
    if (n_heads, n_kv_heads) == before[:2]:
        new = copy.deepcopy(model)
    else:
        new = _rebuilt(model, n_heads, n_kv_heads)
    for site, weights in zip(sites(new), layers, strict=True):
        for name, view in _views(new, site).items():
            if not name.endswith("gain"):  # all heads share it
                view.copy_(getattr(weights, name))
    return new


def cannot_carry(model: nn.Module, n_heads: int, n_kv_heads: int) -> str | None:
    """Why the model's config cannot have these numbers of heads, naming the field; None where it can."""
    old_heads, old_kv_heads, head_dim = head_counts(model)
    if layers := own_layers(model):
        for layer in layers:
            mask = layer.spec.mask
            parts = mask.parts() if mask else ()
            differ = layer.spec.sink or not all(part.alike for part in parts)
            if n_heads != old_heads and differ:
                return "a sink or a mask of the layers differs between heads"
        return None
    config: Any = model.config
    # The architecture of transformers that must still read the model. One of ours that none reads may have any numbers.
    form = stock_form(config) if isinstance(model, GPT) else config.model_type
    if not form or (n_heads, n_kv_heads) == (old_heads, old_kv_heads):
        return None
    family = family_for(form)
    width = config.d_model if isinstance(model, GPT) else config.hidden_size
    field = f"{family.width}={width}"
    if not family.grouped:  # GPT-2's config has neither of two fields
        if n_heads != old_heads:
            return (
                f"{form}'s config has no head_dim: its {field} must be {old_heads} heads of {head_dim}, and {n_heads} "
                f"make {n_heads * head_dim}"
            )
        return (
            f"{form}'s config has no num_key_value_heads: {n_kv_heads} key/value heads for {n_heads} query "
            "heads cannot be written; share a Llama-type model"
        )
    if family.even_width and width % n_heads:
        # Below the old number, since no command adds heads.
        divisors = ", ".join(str(n) for n in range(1, old_heads) if width % n == 0)
        return f"{form}'s config wants num_attention_heads to divide {field}, and {n_heads} does not; {divisors} would"
    return None


def stock_form(config: GPTConfig) -> str | None:
    """The architecture of transformers that reads a run of ours with this config; None where none does."""
    form = hf_form(config)
    # LlamaConfig refuses a width that the number of heads does not divide, whatever head_dim says.
    return None if form == "llama" and config.d_model % config.n_heads else form


def reads_as_stock(model: nn.Module) -> bool:
    """Does transformers read the folder of this model?"""
    return not isinstance(model, GPT) or stock_form(model.config) is not None


def _rebuilt(model: nn.Module, n_heads: int, n_kv_heads: int) -> nn.Module:
    """A model of the same class, made anew from its config with other numbers of heads.

    Weights of the same name and shape are copied; others are newly drawn, and the caller writes them.
    """
    kind: Any = type(model)
    config: Any = copy.deepcopy(getattr(model, "config", None))
    parameter = next(model.parameters())
    # stated, for the default is the width by the number of heads
    head_dim = head_counts(model)[2]
    # first weights are drawn: torch's random state stays as it was
    with torch.random.fork_rng(devices=[]):
        if isinstance(model, GPT):
            sizes = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
            new: nn.Module = GPT(dataclasses.replace(config, **sizes))
        elif own_layers(model):
            new = _with_heads(model, n_heads, n_kv_heads)
        else:
            config.num_attention_heads = n_heads
            config.num_key_value_heads = n_kv_heads
            config.head_dim = head_dim
            # transformers notes the dtype in the config, too; a GPT of ours gets it by `cast`.
            new = kind._from_config(config, dtype=parameter.dtype)
    new = cast(new.to(parameter.device), parameter.dtype)
    drawn = new.state_dict()
    for name, x in model.state_dict().items():
        if name in drawn and drawn[name].shape == x.shape:
            drawn[name].copy_(x)
    return new.train(model.training)


def _with_heads(model: nn.Module, n_heads: int, n_kv_heads: int) -> nn.Module:
    """A copy of a model of one's own, each of whose layers is drawn anew with so many heads."""
    new = copy.deepcopy(model)
    drawn: dict[nn.Module, nn.Module] = {}
    for path, layer in [*new.named_modules(remove_duplicate=False)]:
        if isinstance(layer, MultiHeadAttention):
            sizes = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "kv_index": None}
            fresh = drawn.get(layer) or type(layer).from_spec(
                layer.spec.replace(**sizes)
            )
            drawn[layer] = fresh
            new.set_submodule(path, fresh)
    return new


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model, its parameters cast to `dtype` in place; buffers keep theirs, as where a folder is read.

    RoPE's frequencies are such a buffer: in half precision far positions would get wrong angles.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _views(model: nn.Module, site: Site) -> dict[str, Tensor]:
    """The weights of an attention by their names in `AttentionWeights`: views, to be read and written to."""
    n_heads, n_kv_heads, _ = head_counts(model)
    views: dict[str, Tensor] = {}
    for name in "qkvo":
        matrix = site.matrices.get(name)
        kind = type(None if matrix is None else matrix.module)
        # transformers' Conv1D goes by its name, as nothing here imports transformers.
        is_linear = issubclass(kind, nn.Linear) or kind.__name__ == "Conv1D"
        if not (matrix and is_linear):
            raise HeadwiseError(
                f"W_{name.upper()} of {type(site.module).__name__} is no nn.Linear; dequantise or unfuse it"
            )
        weight = matrix.weight
        bias = matrix.bias
        if name == "o":
            views["wo"] = weight.view(len(weight), n_heads, -1)
            continue
        n = n_heads if name == "q" else n_kv_heads
        views[f"w{name}"] = weight.view(n, -1, weight.shape[1])
        if bias is not None:
            views[f"b{name}"] = bias.view(n, -1)
    offset = family_of(model).norm_offset
    for name in "qk":
        norm = getattr(site.module, f"{name}_norm", None)
        if norm:
            # Without an offset nothing is added, not even 0: a sum is a copy, and to write there misses the module.
            views[f"{name}_gain"] = norm.weight + offset if offset else norm.weight
    return views


def _pairs(model: nn.Module, head_dim: int) -> Pairs:
    """The features that RoPE rotates together; none without RoPE."""
    rope = None
    if layers := our_layers(model):
        rope = layers[0].spec.rope
    elif family_of(model).rope:
        # RoPE rotates twice as many features as it has frequencies, one a pair. (The config's partial_rotary_factor
        # does not tell it: not every family heeds that.) Gemma 3 has a list for each type of layer, of one length.
        for name, values in body_of(model).rotary_emb.named_buffers():
            if name.endswith("inv_freq"):
                rope = RoPE(dim=2 * len(values))
    return rope.pairs(head_dim) if rope else ()
