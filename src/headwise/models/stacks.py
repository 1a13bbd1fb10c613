"""Where attention happens in a model of transformers: its modules, their names, their weights.

A model may have several stacks of layers, self and cross attention apart; what tells them apart becomes part of the
name, `encoder.L3`. Weights are found by the record of the family, or by names that many families share.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.layer.importing.family import Family, families
from headwise.layer.importing.parts import as_rows
from headwise.layer.latent import through
from headwise.models.sites import Site, held_here, sites_of

# Names by which modules and configs call the same thing, tried in this order.
_NAMES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*|[a-z0-9]+")  # of the name of a class
PROJECTIONS, PACKED, COUNTS, CROSS = (_NAMES[key] for key in ("projections", "packed", "counts", "cross"))


def foreign_sites(model: nn.Module) -> list[Site]:
    """The attentions of a transformers model that go through its attention interface, in the order of its modules."""
    from headwise.models.hf import is_hf  # here: models of ours come to this module, too, and need no transformers

    modules = dict(model.named_modules())
    through = _through(modules)
    if not through:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise HeadwiseError(
            f"{type(model).__name__} ({kind}) does not go through the attention interface of transformers, so its "
            f"heads cannot be watched or ablated; families that do are, among others, GPT-2, BERT, Llama, Mistral, "
            f"Qwen3, Gemma, gpt-oss, T5, Whisper, ViT"
        )
    sites = []
    for path, name in _names(model, through).items():
        owner = next(modules[above] for above in _upwards(path) if is_hf(modules[above]))
        n_heads, parts = _count(modules[path], owner), _projections(modules, path, owner)
        weights = _weights(modules[path], _family(owner), parts, n_heads)
        projection = None if weights("o") is None else parts["o"]
        site = held_here(Site(name, modules[path], n_heads, weights, _is_cross(path), projection))
        sites.append(replace(site, n_heads=n_heads // site.parts))
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
        projection = site.projection or next((module for module in within if _holds(module, site.w_o)), None)
        if block is None or projection is None:
            raise HeadwiseError(f"{site.name} of {type(model).__name__}: where its output projection lies is not known")
        body = model.get_submodule(block.rpartition(".")[0].rpartition(".")[0])
        around = tuple(child for child in body.children() if not isinstance(child, nn.ModuleList))
        layers.append(Layer(site, model.get_submodule(block), projection, around))
    return layers


def _holds(module: nn.Module, weights: Tensor | None) -> bool:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weights is None or weight.is_meta:
        return weight is weights is not None
    return weight.data_ptr() == weights.data_ptr()


def _through(modules: Mapping[str, nn.Module]) -> list[str]:
    from headwise.models.hf import uses_interface

    return [path for path, module in modules.items() if uses_interface(module)]


def without_maps(model: nn.Module) -> list[str]:
    """Layers of another kind than attention, and attention outside the interface, as lines for a reader."""
    modules = dict(model.named_modules())
    through = _through(modules)
    lines, covered = [], set(through)
    for stack in dict.fromkeys(_stack(path).removesuffix("/cross") for path in through):
        places = (path.rpartition(".") for path in modules)
        numbers = sorted(int(last) for above, _, last in places if above == stack and last.isdigit())
        with_heads = {n for n in numbers if any(f"{path}.".startswith(f"{stack}.{n}.") for path in through)}
        usual = {type(part) for n in with_heads for part in modules[f"{stack}.{n}"].modules()}
        kinds: dict[str, list[int]] = {}
        for n in numbers:
            if n not in with_heads:
                parts = [type(part) for part in list(modules[f"{stack}.{n}"].modules())[1:] if type(part) not in usual]
                kind = _words(parts[0], modules) if parts else "no attention"
                kinds.setdefault(kind, []).append(n)
                covered.add(f"{stack}.{n}")
        place = _stack_names(model, [stack])[stack] if with_heads else ""
        lines += [f"{_ranges(place, layers)}: {kind}, no map" for kind, layers in kinds.items()]
    outside: dict[str, list[str]] = {}
    for path, module in modules.items():
        inside = any(path == each or path.startswith(each + ".") or each.startswith(path + ".") for each in covered)
        if not inside and "attention" in type(module).__name__.lower() and any(True for _ in module.parameters()):
            covered.add(path)
            outside.setdefault(type(module).__name__, []).append(path)
    for kind, paths in outside.items():
        place = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        lines.append(f"{place}: {kind} is outside the attention interface, no map")
    return lines


def _words(kind: type, modules: Mapping[str, nn.Module]) -> str:
    """The name of a class as words, without what all classes of its family begin with."""
    name, model = (WORD.findall(each.__name__) for each in (kind, type(modules[""])))
    shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(name, model, strict=False))))
    return " ".join(name[shared:] or name).lower()


def _ranges(place: str, numbers: Sequence[int]) -> str:
    """Layers 0, 1, 2, 4 as "L0 to L2, L4"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{place}L{run[0]}" + (f" to {place}L{run[-1]}" if run[1:] else "") for run in runs)


def _names(model: nn.Module, through: Sequence[str]) -> dict[str, str]:
    """For each attention a name, "encoder.L3"; those that would share one get what tells their paths apart."""
    stacks: dict[str, int] = {}  # stack -> attentions found in it so far
    prefixes = _stack_names(model, list(dict.fromkeys(map(_stack, through))))
    names, numbers = {}, {}
    for path in through:
        stack = _stack(path)
        order = stacks[stack] = stacks.get(stack, -1) + 1
        numbers[path] = next((int(part) for part in path.split(".") if part.isdigit()), order)
        names[path] = f"{prefixes[stack]}L{numbers[path]}"
    for base in [name for name, times in Counter(names.values()).items() if times > 1]:
        alike = {path: _parts(path) for path in through if names[path] == base}
        shared = set.intersection(*map(set, alike.values()))
        for path, parts in alike.items():
            telling = [part for part in parts if part not in shared] or parts
            stack = base.rpartition(".")[0]
            before = [stack] if stack and stack not in telling else []
            names[path] = ".".join([*before, *telling, f"L{numbers[path]}"])
    twice = {name for name, times in Counter(names.values()).items() if times > 1}
    return {path: f"{path}.L{numbers[path]}" if name in twice else name for path, name in names.items()}


def _parts(path: str) -> list[str]:
    """The parts of a path with their numbers, without that of the layer: "layers.3.attn.1" is layers, attn1."""
    within = re.sub(r"(^|\.)\d+(?=\.|$)", "", path, count=1)
    return re.sub(r"\.(?=\d+(\.|$))", "", within.removeprefix(".")).split(".")


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


def _projections(modules: Mapping[str, nn.Module], path: str, owner: nn.Module) -> dict[str, nn.Module | None]:
    """The modules of W_Q to W_O, "q" to "o", or of the first three in one, "packed": by the record or usual names."""
    # The record's attention may lie around the one that calls the interface, and W_O may stand beside it.
    family = _family(owner)
    around = [path, path.rpartition(".")[0]]
    parts: dict[str, nn.Module | None] = {}
    for x in "qkvo":
        apart = family is not None and (x == "o" or not (family.packed or family.kv_down))
        recorded = (getattr(family, x),) if apart else ()
        places = around if x == "o" or recorded else around[:1]
        parts[x] = _first_matrix(modules, places, [*recorded, *PROJECTIONS[x]])
    recorded = (family.q,) if family is not None and family.packed else ()
    parts["packed"] = _first_matrix(modules, around[:1], [*recorded, *PACKED]) if parts["v"] is None else None
    return parts


def _family(owner: nn.Module) -> Family | None:
    kind = getattr(getattr(owner, "config", None), "model_type", None)
    return next((family for family in families() if family.name == kind), None)


def _weights(
    core: nn.Module, family: Family | None, parts: Mapping[str, nn.Module | None], n_heads: int
) -> Callable[[str], Tensor | None]:
    if family is not None and family.kv_down and family.read(core, family.kv_down) is not None:
        return partial(_latent_weight, family, core, parts, n_heads)
    return partial(_weight, parts, n_heads)


def _weight(parts: Mapping[str, nn.Module | None], n_heads: int, name: str) -> Tensor | None:
    """W_Q, W_K, W_V or W_O, of the name "q" to "o", as rows, y = W x."""
    w_o, rows = (None if (module := parts[x]) is None else as_rows(module) for x in ("o", name))
    if name == "o":
        return None if w_o is None or w_o.shape[1] % n_heads else w_o
    if parts["packed"] is None:
        return rows
    packed = as_rows(parts["packed"])  # as many rows of queries as W_O reads, the rest keys and values alike
    n_queries = packed.shape[0] // 3 if w_o is None else w_o.shape[1]
    n_keys, left = divmod(packed.shape[0] - n_queries, 2)
    if n_keys <= 0 or left:
        return rows
    return torch.split(packed, [n_queries, n_keys, n_keys])["qkv".index(name)]


def _latent_weight(
    family: Family, core: nn.Module, parts: Mapping[str, nn.Module | None], n_heads: int, name: str
) -> Tensor | None:
    """The same where keys and values come out of a latent: W_UK,h W_DKV beside the rotary rows, and W_UV,h W_DKV."""
    w_o = _weight(parts, n_heads, "o")
    if name == "o" or w_o is None:
        return w_o
    read = partial(family.read, core)
    if name == "q":
        if (low := read(family.q_down)) is None:
            return as_rows(read(family.q))
        return through(as_rows(low), read(family.q_norm), as_rows(read(family.q_up)))
    down, up = as_rows(read(family.kv_down)), as_rows(read(family.k))
    made = through(down, read(family.k_norm), up).reshape(n_heads, -1, down.shape[1])
    k, v = made.tensor_split([-(w_o.shape[1] // n_heads)], 1)
    rotary = down[up.shape[1] :].expand(n_heads, -1, -1)
    return (v if name == "v" else torch.cat([k, rotary], 1)).flatten(0, 1)


def _first_matrix(modules: Mapping[str, nn.Module], places: Sequence[str], names: Sequence[str]) -> nn.Module | None:
    """The first module with a matrix of these names in these places."""
    for place, name in itertools.product(places, names):
        module = modules.get(f"{place}.{name}" if place else name)
        weight = getattr(module, "weight", None)
        if module is not None and isinstance(weight, Tensor) and weight.ndim == 2:
            return module
    return None
