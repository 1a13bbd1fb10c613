"""Where attention happens in a model of transformers: its modules, their names, their weights.

A model may have several stacks of layers, self and cross attention apart; what tells them apart becomes part of the
name, `encoder.L3`. Weights are found by the record of the family, or by names that many families share.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.layer.importing.family import families
from headwise.models.hf import is_hf, uses_interface
from headwise.models.sites import Site, is_watchable, sites_of
from headwise.models.weights import as_rows

# Names by which the modules and configs of transformers call the same thing, tried in this order: what a family without
# a record keeps under them is found all the same.
PROJECTIONS = {
    "q": ("q_proj", "query", "q_lin", "q", "q_attn"),
    "k": ("k_proj", "key", "k_lin", "k"),
    "v": ("v_proj", "value", "v_lin", "v"),
    "o": ("o_proj", "c_proj", "out_proj", "out_lin", "o", "output.dense", "dense"),  # or beside the attention
}
PACKED = ("c_attn",)  # queries, keys and values in one matrix
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "encoder_attention_heads")
CROSS = ("encdecattention", "encoder_attn", "crossattention", "cross_attn", "cross_attention")


def foreign_sites(model: nn.Module) -> list[Site]:
    """The attentions of a transformers model that go through its attention interface, in the order of its modules."""
    modules = dict(model.named_modules())
    through = [path for path, module in modules.items() if uses_interface(module)]
    _check_family(model, modules, through)
    stacks: dict[str, int] = {}  # stack -> attentions found in it so far
    names = _stack_names(model, list(dict.fromkeys(map(_stack, through))))
    sites = []
    for path in through:
        stack, module = _stack(path), modules[path]
        order = stacks[stack] = stacks.get(stack, -1) + 1
        owner = next(modules[above] for above in _upwards(path) if is_hf(modules[above]))
        number = next((int(part) for part in path.split(".") if part.isdigit()), order)
        weights = _weights(modules, path, owner)
        name = f"{names[stack]}L{number}"
        sites.append(Site(name, module, _count(module, owner), **weights, cross=_is_cross(path)))
    return sites


@dataclass(frozen=True)
class Layer:
    """A layer of a decoder as its residual stream sees it."""

    site: Site
    block: nn.Module  # reads the residual stream (B,T,C) and gives it back
    projection: nn.Module  # W_O
    around: tuple[nn.Module, ...]  # modules beside the list of layers: embeddings, the last norm


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers with an attention, from the first to the last. Raises HeadwiseError where W_O is not to be found."""
    paths = {module: path for path, module in model.named_modules()}
    layers = []
    for site in sites_of(model):
        above = list(_upwards(paths[site.module]))
        block = next((path for path in above if path.rpartition(".")[2].isdigit()), None)
        within = model.get_submodule(block).modules() if block is not None else ()
        weights = {module: weight for module in within if isinstance(weight := getattr(module, "weight", None), Tensor)}
        place = None if site.w_o is None else site.w_o.data_ptr()
        projection = next((module for module, weight in weights.items() if weight.data_ptr() == place), None)
        if block is None or projection is None:
            raise HeadwiseError(f"{site.name} of {type(model).__name__}: where its output projection lies is not known")
        body = model.get_submodule(block.rpartition(".")[0].rpartition(".")[0])
        around = tuple(child for child in body.children() if not isinstance(child, nn.ModuleList))
        layers.append(Layer(site, model.get_submodule(block), projection, around))
    return layers


def _check_family(model: nn.Module, modules: Mapping[str, nn.Module], through: Sequence[str]) -> None:
    """Refuse a model of whose attention some, or all, would be missed."""
    missed = {
        type(module).__name__
        for path, module in modules.items()
        if "attention" in type(module).__name__.lower()
        and not is_watchable(module)
        and any(True for _ in module.parameters())
        and not any(other == path or other.startswith(path + ".") or path.startswith(other + ".") for other in through)
    }
    name = f"{type(model).__name__} ({getattr(getattr(model, 'config', None), 'model_type', type(model).__name__)})"
    if not through:
        raise HeadwiseError(
            f"{name} does not go through the attention interface of transformers, so its "
            f"heads cannot be watched or ablated; families that do are, among others, GPT-2, BERT, Llama, Mistral, "
            f"Qwen3, Gemma, gpt-oss, T5, Whisper, ViT"
        )
    if missed:
        raise HeadwiseError(
            f"{name}: {', '.join(sorted(missed))} does not go through the attention "
            f"interface of transformers, and its heads would be missing"
        )


def _is_cross(path: str) -> bool:
    return any(part.lower() in CROSS for part in path.split("."))


def _stack(path: str) -> str:
    """Modules of one stack of layers share their path up to the number; self and cross attention are apart."""
    before = list(itertools.takewhile(lambda part: not part.isdigit(), path.split(".")))
    return ".".join(before) + ("/cross" if _is_cross(path) else "")


def _stack_names(model: nn.Module, stacks: list[str]) -> dict[str, str]:
    """What stands before `L3`: nothing for the one stack of self attention, else what tells the stacks apart."""
    plain = [stack for stack in stacks if not stack.endswith("/cross")]
    names = {}
    for stack in stacks:
        parts = stack.removesuffix("/cross").split(".")
        if stack.endswith("/cross"):
            names[stack] = "cross."
        elif len(plain) == 1 and not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            names[stack] = ""
        else:
            others = [other.split(".") for other in plain if other != stack]
            telling = [part for part in parts if not any(part in other for other in others)]
            known = [part for part in parts if part in ("encoder", "decoder")]
            names[stack] = (telling or known or parts)[0] + "."
    return names


def _upwards(path: str) -> Iterator[str]:
    """A path and those of its parents, the model's own "" last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _count(module: nn.Module, owner: nn.Module) -> int:
    for holder in (module, getattr(module, "config", None), getattr(owner, "config", None)):
        for name in COUNTS:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    raise HeadwiseError(f"{type(module).__name__} does not say how many heads it has: none of {', '.join(COUNTS)}")


def _weights(modules: Mapping[str, nn.Module], path: str, owner: nn.Module) -> dict[str, Tensor | None]:
    """W_Q, W_K, W_V and W_O of an attention as rows, y = W x; None where none of the known names is there.

    The record of the family names them first, seen from its attention module, which may lie around the one that calls
    the interface; then the names that transformers' modules have in common. W_O may stand beside the attention.
    """
    kind = getattr(getattr(owner, "config", None), "model_type", None)
    family = next((family for family in families() if family.name == kind), None)
    around = [path, path.rpartition(".")[0]]
    weights: dict[str, Tensor | None] = {}
    for x in "qkvo":
        recorded = () if family is None or (family.packed and x != "o") else (getattr(family, x),)
        places = around if x == "o" or recorded else around[:1]
        weights[f"w_{x}"] = _first_matrix(modules, places, recorded + PROJECTIONS[x])
    if weights["w_v"] is None:
        recorded = (family.q,) if family is not None and family.packed else ()
        packed = _first_matrix(modules, around[:1], recorded + PACKED)
        if packed is not None:  # as many rows of queries as W_O reads, the rest keys and values alike
            n_queries = packed.shape[0] // 3 if weights["w_o"] is None else weights["w_o"].shape[1]
            n_keys, left = divmod(packed.shape[0] - n_queries, 2)
            if n_keys > 0 and not left:
                parts = torch.split(packed, [n_queries, n_keys, n_keys])
                weights |= dict(zip(("w_q", "w_k", "w_v"), parts, strict=True))
    return weights


def _first_matrix(modules: Mapping[str, nn.Module], places: Sequence[str], names: Sequence[str]) -> Tensor | None:
    """The first matrix of these names in these places, as rows."""
    for place, name in itertools.product(places, names):
        module = modules.get(f"{place}.{name}" if place else name)
        weight = getattr(module, "weight", None)
        if module is not None and isinstance(weight, Tensor) and weight.ndim == 2:
            return as_rows(module)
    return None
