"""Where attention happens in a model: its modules, their names, their weights.

A site is one attention of a model. It is of one of three kinds:

    own      a `MultiHeadAttention` of ours, wherever it sits, or another module that hands its calls to watchers itself
    foreign  an attention module of transformers that goes through its attention interface
    free     any other module that calls functions of torch itself (`models.softmax`)

A model may have several stacks of layers, self and cross attention apart; what tells them apart becomes part of the
name, `encoder.L3`. Weights are found by the record of the family, or by names that many families share.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.families import FAMILIES, USUAL, Family
from headwise.layer.layer import MultiHeadAttention
from headwise.models.softmax import JOINS, attends, names_in, uses_interface
from headwise.records import head_name

# a part of a path that is a number: ".3" of "layers.3.attn"
NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")
# the longest path that ends so: "model.layers.3" of "model.layers.3.attn"
NUMBERED = re.compile(r"(.*\.)?\d+(?=\.|$)")
# Parameters of a matrix and a bias; torch.nn.utils.parametrize makes `weight` of those with the last names.
PLAIN = re.compile(r"weight|bias|parametrizations[.]weight[.].*")
Modules = Mapping[str, Any]  # by their paths
Listed = dict[str, list[str]]  # paths that go together, by what they share
# by name: models of ours need no transformers
BASE = ("transformers.modeling_utils", "PreTrainedModel")
# Names by which modules and configs call the same thing, tried in this order: of the number of heads, and parts of a
# path that say that an attention is cross attention. They stand in families.toml.
COUNTS = USUAL["counts"]
CROSS = frozenset(USUAL["cross"])
# of W_Q to W_O, and of the first three in one
PROJECTIONS = USUAL["projections"] | {"packed": USUAL["packed"]}
# Of W_O in classes that people write: whether it reads the heads is seen when it runs.
OWN_OUTPUTS = USUAL["own_outputs"]


class Matrix(NamedTuple):
    """One of W_Q to W_O: a module, and which rows of its weight, y = W x, where that holds several of them."""

    module: Any
    rows: slice = slice(None)

    @property
    def weight(self) -> Tensor:
        """(out, in), a view."""
        return as_rows(self.module)[self.rows]

    @property
    def bias(self) -> Tensor | None:
        """(out,), a view."""
        bias = self.module.bias
        return None if bias is None else bias[self.rows]

    @property
    def is_plain(self) -> bool:
        """Does its module no more than multiply with it and add a bias, as one with an adapter does?"""
        return all(PLAIN.fullmatch(name) for name, _ in self.module.named_parameters())


# two sites are equal if they are the same object: so they can be keys of a dict
@dataclass(frozen=True, eq=False)
class Site:
    """One attention of a model; its heads are `L3.H0`, `L3.H1`, ... with `name` L3."""

    # "L3"; in a model of several stacks with the stack before it: "encoder.L3", "cross.L3"
    name: str
    module: Any
    n_heads: int  # 0 of one that has not run yet and does not say it
    cross: bool = False  # as far as the module tells; a call of ours has the last word
    free: bool = False  # does it call functions of torch itself?
    # W_Q to W_O by "q", "k", "v" and "o", those that are found
    matrices: Mapping[str, Matrix] = field(default_factory=dict)
    # of a free one: the modules of a list, each of which is one of its heads
    members: tuple[nn.Module, ...] = ()

    def weights(self, name: str) -> Tensor | None:
        """W_Q, W_K, W_V or W_O ("q" to "o") as rows, as it is now: a layer that lies on the disk has some for a while.

        None where it is not known, or not all that its module does.
        """
        module = self.module
        matrix = self.matrices.get(name)
        if hasattr(module, "watched"):
            _, w_o, w_v = module.watched()
            return {"o": w_o, "v": w_v}.get(name)
        if isinstance(module, nn.MultiheadAttention) and name != "o":
            # the first three in one where keys are as wide as queries
            packed: Tensor | None = module.in_proj_weight
            if packed is None:
                return getattr(module, f"{name}_proj_weight")
            return packed.chunk(3)["qkv".index(name)]
        if not (matrix and matrix.is_plain):
            return None
        # Columns that the heads do not divide are no heads side by side.
        if name == "o" and matrix.weight.shape[1] % (self.n_heads or 1):
            return None
        return matrix.weight

    @property
    def w_o(self) -> Tensor | None:
        """(C, H*E); None, too, where the heads' output is not projected."""
        return self.weights("o")

    @property
    def projection(self) -> nn.Module | None:
        """The module of W_O, whose input is what the heads give; None where it is not known."""
        matrix = self.matrices.get("o")
        return None if self.w_o is None or not matrix else matrix.module

    def head(self, number: int) -> str:
        return head_name(self.name, number)

    @property
    def heads(self) -> list[str]:
        return [self.head(number) for number in range(self.n_heads)]


def sites_of(model: nn.Module) -> list[Site]:
    """The attentions of a model: own ones, then foreign, then free ones, each in the order of its modules.

    Raises HeadwiseError where there are none. What stays without a map is said by `missing`.
    """
    if not isinstance(model, nn.Module):
        raise HeadwiseError(
            f"model={model!r} is no model; pass an nn.Module, such as headwise.open gives"
        )
    modules = dict(model.named_modules())
    sites: list[Site] = []
    parts: set[nn.Module] = set()
    for module in modules.values():
        # a watchable module inside another one is a part of it
        if module in parts or not is_watchable(module):
            continue
        parts.update(module.modules())
        matrices = {}
        # modules of others may call W_O as torch does
        for name in ("q_proj", "k_proj", "v_proj", "out_proj", "o_proj"):
            part = getattr(module, name, None)
            if part is not None:
                matrices[name[0]] = Matrix(part)
        is_layer = isinstance(module, MultiHeadAttention)
        n_heads = module.spec.n_heads if is_layer else module.watched()[0]
        sites.append(Site(f"L{len(sites)}", module, n_heads, matrices=matrices))
    paths = {module: path for path, module in modules.items()}
    for free in (False, True):
        taken = {site.name for site in sites}
        for site in _other_sites(model, modules, parts, free):
            # A name that a site of another kind has gets the module's whole path before it.
            name = f"{paths[site.module]}.{site.name.rpartition('.')[2]}"
            sites.append(replace(site, name=name) if site.name in taken else site)
    if not sites:
        kind = getattr(getattr(model, "config", None), "model_type", None)
        raise HeadwiseError(
            f"{type(model).__name__}{f' ({kind})' if kind else ''} has no attention that headwise can read: no "
            f"headwise.MultiHeadAttention, none that goes through the attention interface of transformers, and no "
            f"module that calls scaled_dot_product_attention or multiplies a softmax with values"
        )
    return sites


def attention_layers(model: nn.Module) -> list[MultiHeadAttention]:
    """Our own attention layers of a model, in the order of its modules."""
    return [
        module for module in model.modules() if isinstance(module, MultiHeadAttention)
    ]


def is_watchable(module: nn.Module) -> bool:
    """Does the module hand its calls to watchers itself: a layer of ours, or one that answers `records.Watchable`?"""
    return isinstance(module, MultiHeadAttention) or callable(
        getattr(module, "watched", None)
    )


def is_attention(module: nn.Module) -> bool:
    """Is this an attention of any of the three kinds, as far as its class tells?"""
    return is_watchable(module) or uses_interface(module) or attends(module)


def is_hf(module: nn.Module) -> bool:
    """Is this a model of transformers? Its classes tell it by name, so that transformers need not be loaded."""
    return BASE in {(kind.__module__, kind.__name__) for kind in type(module).__mro__}


def _config_around(modules: Modules, path: str) -> Any:
    """Of the innermost model of transformers around a module; its own, where a model of one's own has taken it over."""
    owner = path
    while owner and not is_hf(modules[owner]):
        owner = owner.rpartition(".")[0]
    return getattr(modules[owner if is_hf(modules[owner]) else path], "config", None)


# modules that were seen to attend, and their heads
_ran: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def remember(module: nn.Module, n_heads: int) -> None:
    """Keep how many heads a module had when it ran."""
    _ran[module] = n_heads


def _other_sites(
    model: nn.Module, modules: Modules, apart: set[nn.Module], free: bool
) -> Iterator[Site]:
    """The attentions that go through the interface of transformers, or, `free`, call functions of torch themselves.

    apart  modules that belong to sites of ours

    All whose code reads as a free one are named, whether they run or not, so that a run changes no name; `n_heads` is 0
    where it is known after a run only.
    """
    attending = []
    for path, module in modules.items():
        is_foreign = uses_interface(module)
        is_free = not is_foreign and module not in apart and attends(module)
        if is_free if free else is_foreign:
            attending.append(path)
    lists = _listed(modules, attending) if free else {}
    outer = {*attending, *lists}.difference(*lists.values())
    paths = [path for path in modules if path in outer]
    # An attention that has others inside belongs to none of their layers, and does not change their names.
    innermost = [
        path
        for path in paths
        if not any(path != part and _within(part, path) for part in paths)
    ]
    names = _names(model, modules, innermost)
    for path in paths:
        # "whole": the model itself, whose path is ""
        name = names.get(path, f"{path or 'whole'}.L0")
        module = modules[path]
        config = None if free else _config_around(modules, path)
        holders = module, getattr(module, "config", None), config
        members = tuple(modules[member] for member in lists.get(path, ()))
        n_heads = len(members) or _ran.get(module) or _told_count(*holders) or 0
        family = FAMILIES.get(getattr(config, "model_type", ""))
        matrices = _matrices(modules, path, family, free)
        cross = _is_cross(modules, path)
        yield Site(name, module, n_heads, cross, free, matrices, members)


def _listed(modules: Modules, paths: Sequence[str]) -> Listed:
    """Modules that join what the attentions of one list give, by their paths, and the paths of those: their heads."""
    lists = {}
    for path, module in modules.items():
        parent, _, name = path.rpartition(".")
        if not isinstance(module, nn.ModuleList) or len(module) < 2 or parent in paths:
            continue
        members = [f"{path}.{n}" for n in range(len(module))]
        # One with several heads, or a W_O of its own, is a layer.
        are_heads = all(
            member in paths
            and _told_count(modules[member]) in (None, 1)
            and "o" not in _matrices(modules, member, free=True)
            for member in members
        )
        kind: Any = type(modules[parent])
        names = names_in(kind)
        if are_heads and name in names and names & JOINS:
            lists[parent] = members
    return lists


def _within(path: str, outer: str) -> bool:
    """Is a module another one, or inside of it? The model's own path is ""."""
    return not outer or f"{path}.".startswith(f"{outer}.")


@dataclass(frozen=True)
class Layer:
    """A layer of a decoder as its residual stream sees it."""

    site: Site
    block: nn.Module  # reads the residual stream (B,T,C) and gives it back
    projection: nn.Module  # W_O
    # modules beside the list of layers: embeddings, the last norm
    around: tuple[nn.Module, ...]


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers with an attention, from the first to the last. Raises HeadwiseError where W_O is not to be found."""
    paths = {module: path for path, module in model.named_modules()}
    layers = []
    for site in sites_of(model):
        path = block_path(paths[site.module])
        if not path or "o" not in site.matrices:
            raise HeadwiseError(
                f"{site.name} of {type(model).__name__}: where its output projection lies is not known; give a layer "
                f"one attention, whose W_O is called out_proj"
            )
        # "model", which has the list of layers
        body = model.get_submodule(path.rpartition(".")[0].rpartition(".")[0])
        around = tuple(
            child for child in body.children() if not isinstance(child, nn.ModuleList)
        )
        projection = site.matrices["o"].module
        layers.append(Layer(site, model.get_submodule(path), projection, around))
    return layers


def block_path(path: str) -> str:
    """Of what adds to the residual stream around an attention: the innermost path that ends in a number, else "".

    It is "model.layers.3" of "model.layers.3.self_attn"; in T5 "block.0.layer.0", one half of a layer.
    """
    block = NUMBERED.match(path)
    return block[0] if block else ""


def missing(model: nn.Module, sites: Sequence[Site]) -> list[str]:
    """What of a model has no heads to be watched, in lines, "L0 and 2 more: no attention, no map".

    sites  its attentions

    Then where watching takes the model off torch's native fast path, so that its answers may be rounded differently.
    """
    modules = dict(model.named_modules())
    paths = {module: path for path, module in modules.items()}
    attentions = {site.module for site in sites}
    covered = [paths[site.module] for site in sites]  # of these something is said
    stacks: dict[str, str] = {}  # lists of layers, by their paths, and their names
    for site in sites:
        if not site.free and not is_watchable(site.module):
            stacks[_place(paths[site.module])] = site.name.rpartition("L")[0]
    stacks.pop("", None)
    lines = []
    for place, prefix in stacks.items():
        numbers = [
            number
            for number, layer in modules[place].named_children()
            if number.isdigit() and attentions.isdisjoint(layer.modules())
        ]
        if numbers:
            more = f" and {len(numbers) - 1} more" if numbers[1:] else ""
            lines.append(f"{prefix}L{numbers[0]}{more}: no attention, no map")
            covered += [f"{place}.{number}" for number in numbers]
    # Modules with weights whose class calls itself an attention, and of which nothing is read or told yet.
    told = set()
    for path, module in modules.items():
        kind = type(module).__name__
        if "attention" not in kind.lower() or not [*module.parameters()]:
            continue
        if any(_within(path, x) or _within(x, path) for x in covered):
            continue
        covered.append(path)
        if kind not in told:
            lines.append(
                f"{path} and its kin: {kind} is no attention that headwise reads, no map"
            )
        told.add(kind)
    native = [x for x in modules if isinstance(modules[x], nn.MultiheadAttention)]
    if native and not model.training:  # in training torch does not take it
        lines.append(
            f"{native[0]} and its kin leave torch's native fast path here: in evaluation answers may differ from it "
            f"by rounding"
        )
    return lines


def _names(model: nn.Module, modules: Modules, paths: Sequence[str]) -> dict[str, str]:
    """For each attention a name, "encoder.L3"; those that would share one get what tells their paths apart.

    Before `L3` stands nothing for the one stack of self attention, else what tells the stacks apart.
    """
    crosses = {path: _is_cross(modules, path) for path in paths}
    places = list(dict.fromkeys(_place(path) for path in paths if not crosses[path]))
    config = getattr(model, "config", None)
    is_alone = len(places) == 1 and not getattr(config, "is_encoder_decoder", False)
    orders: Counter[tuple[str, bool]] = Counter()  # attentions of a stack so far
    sharing: Listed = {}  # paths by the name that they would have
    for path, cross in crosses.items():
        place = _place(path)
        # The first number of a path is its layer's. A path without one counts the attentions of its stack.
        number = NUMBER.search(path)
        layer = f"L{number[1] if number else orders[place, cross]}"
        orders[place, cross] += 1
        prefix = "cross." if cross else "" if is_alone else _telling(place, places)
        sharing.setdefault(prefix + layer, []).append(path)
    names = {group[0]: name for name, group in sharing.items()}
    for name, group in sharing.items():
        if len(group) > 1:
            names |= _apart(name, group)
    return {path: names[path] for path in paths}


def _telling(place: str, places: Sequence[str]) -> str:
    """The part of the path of a stack that no other has, else its side, else the first part; with a dot."""
    parts = place.split(".")
    elsewhere = ".".join(other for other in places if other != place).split(".")
    telling = [part for part in parts if part not in elsewhere]
    side = [part for part in parts if part in ("encoder", "decoder")]
    return f"{(telling or side or parts)[0]}."


def _apart(name: str, paths: Sequence[str]) -> dict[str, str]:
    """Names of attentions that would share one: layers.3.attn.0 and layers.3.attn.1 are attn0.L3 and attn1.L3."""
    parts_of: Listed = {}
    for path in paths:
        # its parts with their numbers, without that of the layer: "layers.3.attn.1" is layers, attn1
        without_layer = NUMBER.sub("", path, count=1)
        parts_of[path] = NUMBER.sub(r"\1", without_layer).strip(".").split(".")
    # what all of them have tells none from another
    shared = set.intersection(*map(set, parts_of.values()))
    prefix, _, layer = name.rpartition(".")  # "encoder" of "encoder.L3", "" of "L3"
    names = {}
    for path, parts in parts_of.items():
        telling = [part for part in parts if part not in shared] or parts
        before = [prefix] if prefix and prefix not in telling else []
        names[path] = ".".join([*before, *telling, layer])
    return names


def _is_cross(modules: Modules, path: str) -> bool:
    """Is it cross attention, as its path tells? In a decoder layer of torch that is called multihead_attn."""
    parent, _, name = path.rpartition(".")
    if isinstance(modules.get(parent), nn.TransformerDecoderLayer):
        return name == "multihead_attn"
    return not CROSS.isdisjoint(path.lower().split("."))


def _place(path: str) -> str:
    """The path of the list of layers that a module belongs to: what stands before its first number."""
    return NUMBER.split(path, 1)[0]


def _told_count(*holders: Any) -> int | None:
    """How many heads the first of these says that there are, a module or a config."""
    for holder, name in itertools.product(holders, COUNTS):
        value = getattr(holder, name, None)
        if type(value) is int:  # a bool is an int to isinstance
            return value
    return None


def _matrices(
    modules: Modules, path: str, family: Family | None = None, free: bool = False
) -> dict[str, Matrix]:
    """Where W_Q to W_O of an attention lie, those that are found: by the record of its family, or by usual names.

    free  an attention that people wrote, which may call W_O as they do
    """
    outer = path.rpartition(".")[0]
    matrices: dict[str, Matrix] = {}
    for part, usual in PROJECTIONS.items():
        recorded = getattr(family, part, None)
        names = [recorded, *usual] if recorded else usual
        # The record's attention may lie around the one that calls the interface, and W_O may stand beside it.
        places = [path, outer] if recorded or part == "o" else [path]
        if free and part == "o":
            names = [*names, *OWN_OUTPUTS]
        for place, name in itertools.product(places, names):
            module = modules.get(f"{place}.{name}".lstrip("."))
            if getattr(getattr(module, "weight", None), "ndim", 0) == 2:
                matrices[part] = Matrix(module)
                break
    packed = matrices.pop("packed", None)
    # Where values have a matrix of their own, what has a packed name is something else. In which order the rows of one
    # that people wrote lie is not known here.
    if not packed or "v" in matrices or free:
        return matrices
    # Queries have as many rows as W_O has columns; keys and values have half of the rest each, one after the other, as
    # in GPT-2, whose is the usual packed name; a record says so of its family.
    n_rows = len(packed.weight)
    n_queries = matrices["o"].weight.shape[1] if "o" in matrices else n_rows // 3
    n_keys, left = divmod(n_rows - n_queries, 2)
    if n_keys > 0 and not left:  # else it is not packed like this
        ends = n_queries, n_queries + n_keys, n_rows
        for name, start, end in zip("qkv", (0, *ends), ends, strict=False):
            matrices[name] = packed._replace(rows=slice(start, end))
    return matrices


def as_rows(module: nn.Module) -> Tensor:
    """The weight of a projection as y = W x, (out, in); GPT-2's Conv1D holds y = x W."""
    weight: Any = module.weight
    return weight.T if type(module).__name__ == "Conv1D" else weight


@contextmanager
def loaded(*modules: nn.Module) -> Iterator[None]:
    """A block in which modules have their weights, where accelerate brings them from the disk for each call alone."""
    with ExitStack() as stack:
        for part in itertools.chain(*(module.modules() for module in modules)):
            hook = getattr(part, "_hf_hook", None)
            if hook and any(x.is_meta for x in part.parameters(recurse=False)):
                hook.pre_forward(part)
                stack.callback(hook.post_forward, part, None)
        yield


def require_held(model: nn.Module, what: str) -> None:
    """Refuse, for the sake of `what`, a model some of whose weights are not in memory."""
    if any(weights.is_meta for weights in model.parameters()):
        raise HeadwiseError(
            f"{what} of {type(model).__name__} needs all its weights in memory, and some are on the meta device, as "
            f"where device_map= leaves them on the disk; open it without device_map=, where memory holds it"
        )
