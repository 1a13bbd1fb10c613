"""The attention weights of a model, layer by layer, read from and written to every family that can be reshaped.

Our GPT, Llama, Mistral, Qwen2 and Qwen3 keep four Linears; GPT-2 keeps q, k and v in one matrix that holds y = x W;
BERT keeps query, key and value apart from the dense layer behind them. Here all are one record, y = W x, head by head.
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
from headwise.gpt.forms import hf_form
from headwise.gpt.gpt import GPT, GPTConfig

LINEAR = ("llama", "mistral", "qwen2", "qwen3")  # families of transformers with q_proj, k_proj, v_proj, o_proj
KNOWN = ("headwise", *LINEAR, "gpt2", "bert")


@dataclass(frozen=True)
class AttentionWeights:
    """One attention layer as query heads h, key/value heads g. Query head h reads key/value head h // (H / G)."""

    wq: Tensor  # (H,D,C)
    wk: Tensor  # (G,D,C)
    wv: Tensor  # (G,E,C)
    wo: Tensor  # (C,H,E)
    bq: Tensor | None = None  # (H,D)
    bk: Tensor | None = None  # (G,D)
    bv: Tensor | None = None  # (G,E)
    q_gain: Tensor | None = None  # (D,) of the qk-norm, one for all heads
    k_gain: Tensor | None = None  # (D,)
    pairs: tuple[tuple[int, int], ...] = ()  # features of a head that RoPE turns together

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

    def double(self) -> AttentionWeights:
        """In float64, detached: what is folded into weights is computed there."""
        tensors: dict[str, Any] = {
            f.name: x.detach().double()
            for f in dataclasses.fields(self)
            if isinstance(x := getattr(self, f.name), Tensor)
        }
        return dataclasses.replace(self, **tensors)

    def selected(self, heads: Sequence[int], kv_heads: Sequence[int]) -> AttentionWeights:
        """The layer of these query heads and key/value heads, in that order."""
        return dataclasses.replace(
            self,
            wq=self.wq[list(heads)],
            wo=self.wo[:, list(heads)],
            bq=None if self.bq is None else self.bq[list(heads)],
            wk=self.wk[list(kv_heads)],
            wv=self.wv[list(kv_heads)],
            bk=None if self.bk is None else self.bk[list(kv_heads)],
            bv=None if self.bv is None else self.bv[list(kv_heads)],
        )

    def permuted(self, kv_order: Sequence[int]) -> AttentionWeights:
        """The same function, its key/value heads in another order; the query heads of each go with it."""
        r = self.group_size
        return self.selected([g * r + i for g in kv_order for i in range(r)], kv_order)


def grouped(x: Tensor, n: int) -> Tensor:
    """(n*r,...) -> (n,r,...)"""
    return x.reshape(n, -1, *x.shape[1:])


def family_of(model: nn.Module) -> str:
    """`headwise` for our GPT, else transformers' model_type. Raises HeadwiseError for what cannot be reshaped."""
    if isinstance(model, GPT):
        return "headwise"
    name = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    if name not in KNOWN:
        raise HeadwiseError(f"{name} is a family whose heads cannot be reshaped yet; there are {', '.join(KNOWN)}")
    return name


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of the model, from the first to the last."""
    family = family_of(model)
    body: Any = getattr(model, "base_model", model)
    if family == "headwise":
        return list(body.blocks)
    return list(body.layers if family in LINEAR else body.h if family == "gpt2" else body.encoder.layer)


def attentions(model: nn.Module) -> list[nn.Module]:
    """The attention module of each layer, from the first to the last."""
    name = {"headwise": "attention", "gpt2": "attn", "bert": "attention"}.get(family_of(model), "self_attn")
    return [block.get_submodule(name) for block in blocks(model)]


def input_projection(model: nn.Module, layer: int) -> nn.Module:
    """The module that gets what a layer's attention reads, (B,T,C), as its first argument."""
    family, module = family_of(model), attentions(model)[layer]
    name = {"gpt2": "c_attn", "bert": "self.query"}.get(family, "q_proj")
    return module.get_submodule(name)


def output_projection(model: nn.Module, layer: int) -> nn.Module:
    """W_O of a layer, which reads the joined heads (B,T,H*E) and gives (B,T,C)."""
    family, module = family_of(model), attentions(model)[layer]
    return module.get_submodule({"gpt2": "c_proj", "bert": "output.dense"}.get(family, "o_proj"))


def head_counts(model: nn.Module) -> tuple[int, int, int]:
    """Query heads, key/value heads, head width: what the config says."""
    family_of(model)  # refuses what has no such config
    if isinstance(model, GPT):
        spec = model.config.attention
        return spec.n_heads, spec.n_kv_heads, spec.head_dim
    config: Any = model.config
    n_heads = int(config.num_attention_heads)  # GPT-2 calls it n_head and answers to this name too
    n_kv_heads = int(getattr(config, "num_key_value_heads", None) or n_heads)
    return n_heads, n_kv_heads, int(getattr(config, "head_dim", None) or config.hidden_size // n_heads)


def read_layers(model: nn.Module) -> list[AttentionWeights]:
    """The attention weights of each layer; views of the model's own wherever that is possible."""
    n_heads, n_kv_heads, head_dim = head_counts(model)
    pairs = _pairs(model, head_dim)
    counts = {"q": n_heads, "k": n_kv_heads, "v": n_kv_heads}
    layers = []
    for module in attentions(model):
        found: dict[str, Any] = {
            name: x.view(len(x), n_heads, -1) if name == "wo" else x.view(counts[name[1]], -1, *x.shape[1:])
            for name, x in _views(model, module).items()
        }
        found |= {f"{x}_gain": getattr(getattr(module, f"{x}_norm", None), "weight", None) for x in "qk"}
        layers.append(AttentionWeights(**found, pairs=pairs))
    return layers


@torch.no_grad()
def with_layers(
    model: nn.Module, layers: Iterable[AttentionWeights], n_heads: int | None = None, n_kv_heads: int | None = None
) -> nn.Module:
    """A model of the same class with these attention weights, and all else copied; `model` is left alone.

    n_heads, n_kv_heads  of the new model, default the model's own. Where they differ its config is changed and the
                         model built anew from it. Raises HeadwiseError, naming the field, where it cannot carry them.

    Layers are taken one by one and written at once: what makes them holds one at a time.
    """
    before = head_counts(model)
    n_heads, n_kv_heads = n_heads or before[0], n_kv_heads or before[1]
    if (n_heads, n_kv_heads) == before[:2]:
        new = copy.deepcopy(model)
    else:
        problem = cannot_carry(model, n_heads, n_kv_heads)
        if problem:
            raise HeadwiseError(problem)
        new = _rebuilt(model, n_heads, n_kv_heads)
    for module, weights in zip(attentions(new), layers, strict=True):
        assert (weights.n_heads, weights.n_kv_heads) == (n_heads, n_kv_heads)
        for name, view in _views(new, module).items():
            value = getattr(weights, name)
            view.copy_(value.flatten(1) if name == "wo" else value.flatten(0, 1))
    return new.train(model.training)


def cannot_carry(model: nn.Module, n_heads: int, n_kv_heads: int) -> str | None:
    """Why the model's config cannot have these numbers of heads, naming the field; None where it can."""
    family, (old_heads, old_kv_heads, head_dim) = family_of(model), head_counts(model)
    config: Any = model.config
    if (n_heads, n_kv_heads) == (old_heads, old_kv_heads):
        return None
    form = stock_form(model.config) if isinstance(model, GPT) else family
    if form in ("gpt2", "bert"):
        width = config.d_model if family == "headwise" else config.hidden_size
        field = {"gpt2": "n_embd", "bert": "hidden_size"}[form]
        if n_heads != old_heads:
            return (
                f"{form}'s config has no head_dim: its {field}={width} must be {old_heads} heads of {head_dim}, "
                f"and {n_heads} make {n_heads * head_dim}"
            )
        return (
            f"{form}'s config has no num_key_value_heads: {n_kv_heads} key/value heads for {n_heads} query heads "
            f"cannot be written; share a Llama-type model"
        )
    width = config.d_model if family == "headwise" else config.hidden_size
    if form == "llama" and width % n_heads:
        known = ", ".join(str(n) for n in range(1, old_heads) if width % n == 0)
        return (
            f"llama's config wants num_attention_heads to divide hidden_size={width}, and {n_heads} does not; "
            f"{known} would"
        )
    return None


def stock_form(config: GPTConfig) -> str | None:
    """The architecture of transformers that reads a run of ours with this config; None where none does."""
    form = hf_form(config)
    return None if form == "llama" and config.d_model % config.n_heads else form


def reads_as_stock(model: nn.Module) -> bool:
    """Does transformers read the folder of this model?"""
    return not isinstance(model, GPT) or stock_form(model.config) is not None


def _rebuilt(model: nn.Module, n_heads: int, n_kv_heads: int) -> nn.Module:
    """A model with other numbers of heads; what has the same shape is copied, the attention is left to be written."""
    head_dim = head_counts(model)[2]
    parameter = next(model.parameters())
    with torch.random.fork_rng(devices=[]):  # the first weights are drawn, and thrown away
        if isinstance(model, GPT):
            changed = dataclasses.replace(model.config, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim)
            new: nn.Module = GPT(changed)
        else:
            config: Any = copy.deepcopy(model.config)
            config.num_attention_heads, config.num_key_value_heads, config.head_dim = n_heads, n_kv_heads, head_dim
            kind: Any = type(model)
            new = kind._from_config(config, dtype=parameter.dtype)
    new = cast(new.to(parameter.device), parameter.dtype)
    ours = new.state_dict()
    kept = {name: tensor for name, tensor in model.state_dict().items() if ours[name].shape == tensor.shape}
    new.load_state_dict(kept, strict=False)
    return new


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model, its parameters turned into `dtype` in place; buffers keep theirs, as where a folder is read.

    RoPE's frequencies are such a buffer: in half precision they would turn far positions by wrong angles.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _views(model: nn.Module, module: Any) -> dict[str, Tensor]:
    """wq (H*D,C), wk (G*D,C), wv (G*E,C), wo (C,H*E), and bq, bk, bv where there are biases, as views to write to."""
    family = family_of(model)
    if family == "gpt2":
        n = module.c_proj.weight.shape[0]
        weights, biases = module.c_attn.weight.T.split(n), module.c_attn.bias.split(n)
        names = [f"{kind}{x}" for kind in "wb" for x in "qkv"]
        return {"wo": module.c_proj.weight.T, **dict(zip(names, (*weights, *biases), strict=True))}
    if family == "bert":
        linears, out = [getattr(module.self, name) for name in ("query", "key", "value")], module.output.dense
    else:
        linears, out = [getattr(module, f"{x}_proj") for x in "qkv"], module.o_proj
    found: dict[str, Tensor] = {"wo": out.weight}
    for x, linear in zip("qkv", linears, strict=True):
        found |= {f"w{x}": linear.weight} if linear.bias is None else {f"w{x}": linear.weight, f"b{x}": linear.bias}
    return found


def _pairs(model: nn.Module, head_dim: int) -> tuple[tuple[int, int], ...]:
    """The features that RoPE turns together; none without RoPE."""
    family = family_of(model)
    if family in ("gpt2", "bert"):
        return ()
    dim, interleaved = head_dim, False  # the families of transformers above know no partial rotation
    if isinstance(model, GPT):
        rope = model.config.attention.rope
        if rope is None:
            return ()
        dim, interleaved = rope.dim or head_dim, rope.interleaved
    if interleaved:
        return tuple((2 * m, 2 * m + 1) for m in range(dim // 2))
    return tuple((m, m + dim // 2) for m in range(dim // 2))
