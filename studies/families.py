"""Write studies/families.md: a small model of each class of transformers, built, watched and held to its own maps.

    nice python studies/families.py                 # all families, minutes on one core; goes on where it was stopped
    python studies/families.py --only llama,bert    # some of them anew, told on the screen

Each family is built from its own config with small sizes, its weights drawn anew, and run by its own eager functions,
which give maps, or, where an attention goes through no interface, with what every softmax in it gave kept below torch's
functions; then it is watched the way it runs by default. The largest difference between the two is written down, for
texts without padding, with padding on the left and on the right: of any weight, and of any statistic, whose definition
(tests/heads/dense.py) is laid over the map, with tokens and padding as they were put in. A model that takes a cache is
watched without one, with one, and part by part: the statistics must be the same. The answers of the watched and the
unwatched model must be the same to the bit; where a fast path of torch is left, the same but for rounding.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import re
import signal
import sys
import tomllib
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial, reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AttentionInterface, PretrainedConfig, PreTrainedModel, __version__
from transformers.models.auto import modeling_auto
from transformers.utils import logging

import headwise as hw
from headwise.files import write_whole
from headwise.heads.blocks import Measured, measure, output_factors, row_weights
from headwise.heads.documents import SPANS, Document, listening
from headwise.models.ask import cache_in, cache_name
from headwise.models.sites import Site, missing, sites_of
from headwise.records import Call

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "heads"))
from dense import row_statistics  # noqa: E402

SIZES = tomllib.loads((Path(__file__).parent / "families.toml").read_text(encoding="utf-8"))
LARGEST = 60_000_000  # parameters of a model that is built
SECONDS = 60  # of a processor, for one family
TOLERANCE = 1e-4  # of a weight, and of a statistic: see `distance_of`
B, T, PAD = 2, 23, 5
PADDINGS = ("none", "left", "right")
NONE: Mapping[Any, Any] = MappingProxyType({})
COLUMNS = 11  # of the table of the page
NOT_RUN = "## Not built, or not run"
MAPPINGS = ("MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_MAPPING")


# Building


def value_of(config: Any, name: str, usual: Any = None) -> Any:
    """A field of a config; of one whose layers differ, that of all layers."""
    if getattr(config, "is_heterogeneous", False):
        config.allow_global_per_layer_attribute_access = True
    return getattr(config, name, usual)


def named(config: PretrainedConfig) -> dict[str, Any]:
    """The fields of a config that its class takes, those that it works out by itself left out."""
    fields = {name: value_of(config, name) for name in (set(config.to_dict()) | set(vars(config)))}
    kind, other = type(config), getattr(config, "attribute_map", {})
    return {
        name: value
        for name, value in fields.items()
        if not any(isinstance(getattr(kind, each, None), property) for each in (name, other.get(name, name)))
    }


def small(config: PretrainedConfig, more: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a small config of the same class, its parts included: every known field gets one known size."""
    fields, wanted = named(config), {}
    for name, value in SIZES["sizes"].items():
        now = fields.get(name)
        number = isinstance(now, int | float) and not isinstance(now, bool)
        if number or (name in fields and name in SIZES["may_be_none"]):
            wanted[name] = int(value) if isinstance(now, int) else value
    if "kv_lora_rank" in wanted and "num_key_value_heads" in wanted:  # keys and values are made for every head
        wanted["num_key_value_heads"] = wanted["num_attention_heads"]
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in getattr(config, "ignore_keys_at_rope_validation", rope):
        pairs = int(wanted.get("head_dim", 8) * rope.get("partial_rotary_factor", 1.0)) // 2
        section = {"mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}
        kinds = {name: one | section for name, one in rope.items() if isinstance(one, dict)}  # of each kind of layer
        wanted["rope_parameters"] = rope | (kinds or section)
    wanted |= a_layer_of_each_kind(fields)
    wanted |= {name: small(part, {}) for name, part in parts_of(fields).items()}
    return joined(wanted, more, parts_of(fields))


def a_layer_of_each_kind(fields: dict[str, Any]) -> dict[str, Any]:
    kinds = list(dict.fromkeys(fields.get("layer_types") or []))
    types = [kinds[i % len(kinds)] for i in range(max(2, len(kinds)))] if kinds else []
    counts = {name: len(types) for name in ("num_hidden_layers", "num_layers") if name in fields}
    return {"layer_types": types, **counts} if types else {}


def scaled(config: PretrainedConfig, more: dict[str, Any], by: int) -> dict[str, Any]:
    """Arguments of a config whose widths are all divided by one number: what has to fit together still does."""
    fields, wanted = named(config), {}
    for name, value in fields.items():
        words = set(name.split("_"))
        if name in SIZES["depths"] and isinstance(value, int) and value > 2:
            wanted[name] = 2
        elif name in SIZES["sizes"] and ("token" in words or "dropout" in words or name == "vocab_size"):
            wanted[name] = SIZES["sizes"][name]
        elif words & set(SIZES["width_words"]) and not words & set(SIZES["no_width_words"]):
            numbers = value if isinstance(value, list | tuple) else [value]
            if numbers and all(type(x) is int and x % by == 0 and x >= 4 * by for x in numbers):
                wanted[name] = type(value)(x // by for x in value) if numbers is value else value // by
    wanted |= a_layer_of_each_kind(fields)
    wanted |= {name: scaled(part, {}, by) for name, part in parts_of(fields).items()}
    return joined(wanted, more, parts_of(fields))


def parts_of(fields: dict[str, Any]) -> dict[str, PretrainedConfig]:
    return {name: x for name, x in fields.items() if isinstance(x, PretrainedConfig)}


def joined(wanted: dict[str, Any], more: dict[str, Any], parts: Collection[str] = ()) -> dict[str, Any]:
    """Arguments and what is said of this family, also of a part of it."""
    result = dict(wanted)
    for name, value in more.items():
        inner = isinstance(value, dict) and isinstance(wanted.get(name), dict) and name in parts
        result[name] = joined(wanted[name], value, wanted[name]) if inner else value
    return {name: value for name, value in result.items() if value != "as it is"}


def configured(kind: type[PretrainedConfig], base: PretrainedConfig, wanted: dict[str, Any]) -> PretrainedConfig:
    """A config with these arguments; its parts are made first, each by its own class."""
    parts = {name: getattr(base, name) for name in wanted if isinstance(getattr(base, name, None), PretrainedConfig)}
    made = {name: configured(type(part), part, wanted[name]) for name, part in parts.items()}
    try:
        return kind(**wanted | {name: wanted[name] | {"model_type": parts[name].model_type} for name in parts})
    except Exception:  # some want their parts as configs
        return kind(**wanted | made)


def said_of(family: str, table: str) -> dict[str, Any]:
    """What a table of families.toml has of a family. A key names one or several, behind a dot a part of the config."""
    fields: dict[str, Any] = {}
    for names, more in SIZES[table].items():
        for first, *parts in (name.split(".") for name in names.split()):
            if first == family:
                fields |= reduce(lambda inner, part: {part: inner}, reversed(parts), more)
    return fields


def models_of(family: str) -> Iterator[nn.Module]:
    """Small models of a family, the smallest first, with weights that make its attention uneven.

    Where none can be built the first reason is raised.
    """
    kind, why = CONFIG_MAPPING[family], None
    more = said_of(family, "families")
    ways = [small, *(partial(scaled, by=by) for by in (16, 8, 4, 2))]
    count = 0
    for way in ways:
        try:
            base = kind()
            config = configured(kind, base, way(base, more))
            model_class = class_of(type(config))
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in model_class(config).parameters())
            if size > LARGEST:
                raise LookupError(f"{size:,} parameters at small sizes")
            torch.manual_seed(0)
            model: nn.Module = model_class(config).eval()
        except TimeoutError:
            raise
        except Exception as error:  # other people's code, which may raise anything
            why = why or error
            continue
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                # a frozen table holds what its class computes, such as sines of places
                if parameter.ndim > 1 and parameter.requires_grad:
                    parameter.normal_(std=0.2, generator=generator)
        count += 1
        yield model
    if not count and why is not None:
        raise why


def build(family: str) -> nn.Module:
    """The first of its small models that runs, else the first of all."""
    first = None
    for model in models_of(family):
        first = first or model
        with torch.no_grad(), suppress(Exception):
            runnable_inputs(model, family, "none")
            return model
    assert first is not None
    return first


def class_of(kind: type[PretrainedConfig]) -> Any:
    """The model class of a config: by transformers' own tables, or by name where it is a part of another model."""
    module = importlib.import_module(kind.__module__.replace("configuration_", "modeling_"))
    if kind.model_type in SIZES["classes"]:
        return getattr(module, SIZES["classes"][kind.model_type])
    for mapping in (getattr(modeling_auto, name) for name in MAPPINGS):
        if kind in mapping:
            model = mapping[kind][0] if isinstance(mapping[kind], tuple) else mapping[kind]
            if model.config_class is kind:  # else it is that of a part
                return model
    models = (each for each in vars(module).values() if isinstance(each, type) and issubclass(each, PreTrainedModel))
    names = {each.__name__: each for each in models if each.config_class is kind and "PreTrained" not in each.__name__}
    if not names:
        raise LookupError("no model class of its own")
    return names[min(names, key=lambda name: (not name.endswith("Model"), name))]


def image_tokens(config: Any) -> set[int]:
    """The numbers that stand for places of an image, or of sound, among the tokens."""
    parts = [part for part in (config, value_of(config, "text_config")) if part is not None]
    return {value_of(part, field) for part in parts for fields in SPANS.values() for field in fields} - {None}


def runnable_inputs(model: Any, family: str, padding: str) -> tuple[dict[str, Any], list[Tensor]]:
    """What the model is called with, and its answers; a spectrum may want its frames before its bins."""
    inputs = inputs_of(model, padding, family)
    try:
        return inputs, run(model, inputs)
    except TimeoutError:
        raise
    except Exception as error:  # other people's code, which may raise anything
        turned = inputs_of(model, padding, family, turned=True)
        try:
            return turned, run(model, turned)
        except TimeoutError:
            raise
        except Exception:
            raise error from None


def made(spec: Any, config: Any, generator: torch.Generator) -> Any:
    """An input by its line in families.toml: a shape of drawn numbers, or a kind and a shape; a name is a field."""

    def size(name: int | str) -> int:
        if isinstance(name, int):
            return name
        place = config
        for part in name.split("."):
            place = value_of(place, part)
        return int(place)

    if isinstance(spec, list):
        return torch.randn([size(x) for x in spec], generator=generator)
    kind, told = next(iter(spec.items()))
    if kind == "value":
        return torch.tensor(told) if isinstance(told, list) else told
    shape = [size(x) for x in told]
    if kind == "ids":
        return torch.randint(3, 17, shape, generator=generator)
    if kind == "patches":  # flat, each with its row and column before
        patches = torch.randn(shape, generator=generator)
        patches[..., 0], patches[..., 1] = 1 + torch.arange(shape[1]) // 3, 1 + torch.arange(shape[1]) % 3
        return patches
    if kind == "range":
        return torch.arange(shape[-1]).expand(shape).clone()
    return {"ones": torch.ones, "zeros": torch.zeros}[kind](shape, dtype=getattr(torch, spec.get("dtype", "long")))


def inputs_of(model: Any, padding: str, family: str = "", turned: bool = False) -> dict[str, Any]:
    """What the model is called with; `turned` has frames before the bins of a spectrum."""
    generator = torch.Generator().manual_seed(1)
    names = list(inspect.signature(model.forward).parameters)
    mask = torch.ones(B, T, dtype=torch.long)
    if padding != "none":
        mask[1, slice(None, PAD) if padding == "left" else slice(-PAD, None)] = 0
    config = model.config
    vision = value_of(config, "vision_config") or value_of(config, "backbone_config") or config
    size = value_of(vision, "image_size") or 20
    height, width = size if isinstance(size, list | tuple) else (size, size)
    sounds = [x for part in ("", "encoder_config", "audio_config") if (x := value_of(config, part) if part else config)]
    bins = next((n for x in sounds for key in ("num_mel_bins", "feature_size") if (n := value_of(x, key))), 80)
    frames = 2 * (value_of(config, "max_source_positions") or 40)
    shapes = {
        "pixel_values": (B, value_of(vision, "num_channels", 3), height, width),
        "input_values": (B, 1600),
        "input_features": (B, frames, bins) if turned else (B, bins, frames),
    }
    inputs: dict[str, Any] = {}
    ids = torch.randint(3, 17, (B, T), generator=generator)
    images = image_tokens(config)
    other = next(number for number in range(3, 17) if number not in images)
    for number in images:  # which would stand for places of an image that is not there
        ids[ids == number] = other
    side_by_side = hasattr(model, "get_text_features") and hasattr(model, "get_image_features")
    if "input_ids" in names and (model.main_input_name == "input_ids" or "pixel_values" in names):
        inputs |= {"input_ids": ids, "attention_mask": mask}
    if not inputs or model.main_input_name in shapes or side_by_side:
        for name, shape in shapes.items():
            if name in names:
                inputs[name] = torch.randn(shape, generator=generator)
                break
    if "grid_thw" in names:  # patches side by side, as flat rows
        patch, times = value_of(vision, "patch_size", 5), value_of(vision, "temporal_patch_size", 1)
        channels = value_of(vision, "in_channels", value_of(vision, "num_channels", 3))
        rows = torch.randn(B * 16, channels * times * patch * patch, generator=generator)
        inputs = {name: rows for name in ("hidden_states", "pixel_values") if name in names}
        inputs["grid_thw"] = torch.tensor([[1, 4, 4]] * B)
    if "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = ids[:, :11]
    if "attention_mask" not in names:
        inputs.pop("attention_mask", None)
    if "bbox" in names:
        inputs["bbox"] = torch.zeros(B, T, 4, dtype=torch.long)
    for name, spec in said_of(family, "inputs").items():
        if spec is False:
            inputs.pop(name, None)
        else:
            inputs[name] = made(spec, config, generator)
    return inputs


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else []
    return [tensor for value in values for tensor in tensors(value)]


def run(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """The model's answers; some draw numbers, the same each time."""
    torch.manual_seed(0)
    return tensors(model(**inputs))


# Comparing


@contextmanager
def spelled_out(model: nn.Module) -> Iterator[None]:
    """The model's attention by its eager functions inside this block."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        for config, _ in before:
            config._attn_implementation = "eager"
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name


@contextmanager
def eager_maps(model: nn.Module, silent: Mapping[Any, int] = NONE) -> Iterator[dict[nn.Module, list[Tensor]]]:
    """Inside this block the model runs by its eager functions, and the weights of each call are kept, (B,H,T,S).

    silent  module -> the head of it that gives zeros
    """
    maps: dict[nn.Module, list[Tensor]] = defaultdict(list)
    library = AttentionInterface.get_interface

    def get_interface(self: Any, name: str, default: Any) -> Any:
        def attend(module: nn.Module, *args: Any, **keywords: Any) -> Any:
            result = default(module, *args, **keywords)
            maps[module].append(result[1].detach())
            if module in silent:  # (B,T,H,E)
                result[0][:, :, silent[module]] = 0
            return result

        return attend

    AttentionInterface.get_interface = get_interface
    try:
        with spelled_out(model):
            yield maps
    finally:
        AttentionInterface.get_interface = library


@contextmanager
def hooked(hooks: Iterable[tuple[Any, Any]]) -> Iterator[None]:
    """Hooks of torch inside this block, each with a module's way to register it."""
    with ExitStack() as stack:
        for register, hook in hooks:
            stack.callback(register(hook).remove)
        yield


class Softmaxes(TorchDispatchMode):
    """What every softmax gives inside the attentions that go through no interface, kept below torch's functions.

    silent  module -> (the shape of its maps, (B,H,T,S), and the head whose weights become zeros)
    """

    def __init__(
        self,
        sites: Sequence[Site],
        maps: dict[nn.Module, list[Tensor]],
        silent: Mapping[Any, tuple[Sequence[int], int]] = NONE,
    ) -> None:
        super().__init__()
        self.modules, self.maps, self.silent = [site.module for site in sites if site.free], maps, silent
        self.running: list[nn.Module] = []

    def hooks(self) -> Iterator[Any]:
        for module in self.modules:
            yield module.register_forward_pre_hook, lambda module, args: self.running.append(module)
            yield module.register_forward_hook, self.leave

    def leave(self, *args: Any) -> None:
        self.running.pop()

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), keywords: Any = None) -> Any:
        result = function(*args, **(keywords or {}))
        if not self.running or not str(function).startswith(("aten._softmax.", "aten._safe_softmax.")):
            return result
        module = self.running[-1]
        self.maps[module].append(result.detach().clone())
        shape, head = self.silent.get(module, ((), 0))
        if shape and result.numel() == math.prod(shape):
            by_head(result, shape[1])[head].zero_()
        return result


def distance_of(name: str, ours: Any, theirs: Any, keys: int) -> float:
    """How far two numbers are from each other, as a share of the attention that would be elsewhere.

    A share at the other end of the keys moves a distance by that many, and a variance by their square, twice.
    """
    scale = {"entropy": 10.0, "distance": float(keys), "spread": 2.0 * keys**2}.get(name, 1.0)
    power = 2 if name == "spread" else 1
    off = np.abs(np.asarray(ours, np.float64) ** power - np.asarray(theirs, np.float64) ** power)
    return float(off.max(initial=0)) / scale


def windows_last(weights: Tensor, n_heads: int) -> bool:
    """Are maps (B,H,W,T,S), the windows behind the heads?"""
    return weights.ndim == 5 and weights.shape[1] == n_heads != weights.shape[2]


def by_head(weights: Tensor, n_heads: int) -> Tensor:
    """The same numbers with the heads first; where they lie is told by their count."""
    if weights.ndim == 3 and n_heads > 1:  # (B*H,T,S)
        return weights.unflatten(0, (-1, n_heads)).transpose(0, 1)
    if windows_last(weights, n_heads):
        return weights.transpose(0, 1)
    if weights.ndim == 5 and weights.shape[1] * weights.shape[2] == n_heads:  # by the key/value head that they read
        return weights.flatten(1, 2).transpose(0, 1)
    if weights.ndim < 4 or weights.shape[-3] != n_heads:
        raise LookupError(f"which axis of {tuple(weights.shape)} are its {n_heads} heads is not known")
    return weights.movedim(-3, 0)


class Comparison:
    """What watching gives beside the maps of the model's eager functions."""

    def __init__(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        joined: dict[nn.Module, list[Tensor]] = defaultdict(list)

        def keep(site: Site, module: nn.Module, args: Any) -> None:
            joined[site.module].append(args[0])

        sites = sites_of(model)
        hooks = [(site.projection.register_forward_pre_hook, partial(keep, site)) for site in sites if site.projection]
        with eager_maps(model) as maps, hooked([*hooks, *(below := Softmaxes(sites, maps)).hooks()]):
            if below.modules:  # the fused call is spelled out, too
                with sdpa_kernel(SDPBackend.MATH), below:
                    self.eager = run(model, inputs)
            else:
                self.eager = run(model, inputs)
        self.maps, self.joined = maps, joined
        self.ids, self.padding = inputs.get("input_ids"), inputs.get("attention_mask")
        if self.ids is not None:  # places of an image are no copies of one another
            places = torch.arange(self.ids.numel()).reshape(self.ids.shape)
            images = torch.tensor(sorted(image_tokens(model.config)), dtype=torch.long)
            self.ids = torch.where(torch.isin(self.ids, images), -1 - places, self.ids)
        self.weights = self.norm = self.statistics = 0.0
        self.lacking: set[str] = set()  # statistics that the tokens and the map have, and watching has not
        self.rows = self.compared = 0
        self.calls: Counter[nn.Module] = Counter()
        self.heard: set[nn.Module] = set()  # attentions that gave maps
        self.notes: dict[str, None] = {}
        self.elsewhere: set[str] = set()  # attentions whose W_O reads something else than their heads
        self.shapes: dict[nn.Module, Sequence[int]] = {}  # of the maps of an attention

    def note(self, site: Site, call: Call, documents: Sequence[Document]) -> None:
        number = self.calls[site.module]
        self.calls[site.module] += 1
        if call.note:
            self.notes.setdefault(call.note.partition(": ")[2])
        self.elsewhere |= set() if call.at_w_o else {site.name}
        if not len(call.out):
            return
        self.heard.add(site.module)
        self.shapes[site.module] = (*call.out.shape[:3], call.k.shape[2])
        maps, joined = self.maps.get(site.module, []), self.joined[site.module]
        if site.free:
            shape = self.shapes[site.module]
            maps = [each.transpose(1, 2) if windows_last(each, shape[1]) else each for each in maps]
            maps = [each.reshape(shape) for each in maps if each.numel() == math.prod(shape)]
        whole = bool(joined) and joined[0].numel() == call.out.numel()  # else W_O reads several calls at once
        times = len(maps) // len(joined) if whole and not site.free else 1  # some lay the same maps over several values
        factors = None if site.w_o is None or not call.at_w_o else output_factors(site.w_o, site.n_heads)
        for b, document in enumerate(documents):
            measured = measure(call, b, document, w_o=factors)
            self.rows += len(measured.places)
            if not len(measured.places):
                continue
            if number * times < len(maps) and not maps[number * times][b].isfinite().all():
                self.notes.setdefault("its eager maps are no numbers")
            elif number * times < len(maps):
                ours = row_weights(call, b, range(call.q.shape[2]))[:, measured.places]
                dense = maps[number * times][b][:, measured.places]
                self.compared += 1
                self.weights = max(self.weights, float((ours - dense).abs().max()))
                self.compare(site, call, b, maps[number * times][b], measured)
            if factors is not None and whole and number < len(joined):
                batch, _, rows, _ = call.out.shape
                entered = joined[number]
                if site.free and entered.shape[:2] == (rows, batch) != (batch, rows):  # time first
                    entered = entered.transpose(0, 1)
                heads = entered.reshape(batch, rows, site.n_heads, -1)[b, measured.places]
                blocks = site.w_o.reshape(len(site.w_o), site.n_heads, -1)
                expected = torch.einsum("the,che->htc", heads, blocks).norm(dim=-1)
                off = (measured.rows["norm"] - expected).abs().max() / expected.abs().max().clamp(min=1e-9)
                self.norm = max(self.norm, float(off))

    def compare(self, site: Site, call: Call, b: int, map_hts: Tensor, measured: Measured) -> None:
        """Every statistic of a document beside its definition; keys have places where there is one for each query."""
        T, S = map_hts.shape[1:]
        p = map_hts[:, measured.places].double()
        places = T == S and not (call.cross or site.cross)
        ids = self.ids[b] if places and self.ids is not None and self.ids.shape[1] == T else None
        if self.padding is None:
            first = 0
        elif ids is not None:
            first = int(self.padding[b].int().argmax())
        else:  # the padding of other tokens: keys that nobody looks at
            first = int((p > 0).any(0).any(0).int().argmax())
        rows = row_statistics(map_hts, start=0 if places else None, first=first, q_ids=ids, k_ids=ids)
        self.lacking |= rows.keys() - measured.rows.keys()
        for name in rows.keys() & measured.rows.keys():
            off = distance_of(name, measured.rows[name], rows[name][:, measured.places], S)
            self.statistics = max(self.statistics, off)


def silent_at_w_o(module: nn.Module, args: Any, n_heads: int, head: int) -> Any:
    """What W_O reads, without a head; its columns lie side by side."""
    joined = args[0].clone()
    joined.unflatten(-1, (n_heads, -1))[..., head, :] = 0
    return (joined, *args[1:])


@contextmanager
def silenced(model: nn.Module, site: Site, head: int, shape: Sequence[int]) -> Iterator[None]:
    """A head of the model gives zeros where its weights meet the values, by hooks that know nothing of headwise's."""
    below = Softmaxes([site], defaultdict(list), {site.module: (shape, head)})
    at_interface = {} if site.free else {site.module: head}
    with eager_maps(model, at_interface), hooked(below.hooks()), below if site.free else nullcontext():
        yield


@contextmanager
def silenced_at_w_o(model: nn.Module, site: Site, head: int, shape: Sequence[int]) -> Iterator[None]:
    """W_O reads zeros of a head; its columns lie side by side. LookupError where W_O is not called as a module."""
    called = []

    def zeros(module: nn.Module, args: Any) -> Any:
        called.append(module)
        joined = args[0].clone()
        joined.unflatten(-1, (site.n_heads, -1))[..., head, :] = 0
        return (joined, *args[1:])

    assert site.projection is not None
    with hooked([(site.projection.register_forward_pre_hook, zeros)]):
        yield
    if not called:
        raise LookupError


@torch.no_grad()
def try_ablation(model: nn.Module, inputs: dict[str, Any], seen: Comparison) -> dict[str, Any]:
    """A head of each attention silenced by headwise, and by hooks of one's own: how far the answers are apart.

    There are two such hooks: zeros in what W_O reads, where W_O is a module, in the way by which the model runs; and
    zeros where weights meet values, in the model's eager way. Where something is done to the heads in between, a norm
    of all of them or a convolution that is added, these are two questions, and what W_O reads is the one that is asked.
    """
    result: dict[str, Any] = {"ablation": 0.0, "silenced": 0, "moved": 0, "ablation_notes": []}
    whole = run(model, inputs)
    for number, site in enumerate(site for site in sites_of(model) if site.module in seen.heard):
        head, ways, apart = number % site.n_heads, [], []
        if site.projection is not None and site.name not in seen.elsewhere:
            ways.append((silenced_at_w_o, nullcontext()))
        ways.append((silenced, spelled_out(model)))
        for hook, way in ways:
            with way, sdpa_kernel(SDPBackend.MATH):
                try:
                    with hook(model, site, head, seen.shapes[site.module]):
                        expected = run(model, inputs)
                except LookupError:  # there the heads are not known: the other hook counts
                    continue
                with hw.ablate(model, [site.head(head)]):
                    ours = run(model, inputs)
            apart.append(furthest(ours, expected))
        if apart:
            result["ablation"] = max(result["ablation"], apart[0])
            result["silenced"] += 1
            result["moved"] += furthest(ours, whole) > TOLERANCE
            if max(apart) > TOLERANCE >= apart[0]:
                result["ablation_notes"].append("what W_O reads of a head is more than its weights times values")
    return result


def furthest(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The largest difference of two runs' answers, as a share of the largest of each tensor where that is above 1."""
    pairs = [(x.nan_to_num(), y.nan_to_num()) for x, y in zip(some, others, strict=True) if x.is_floating_point()]
    if any(x.shape != y.shape for x, y in pairs):
        return math.inf
    return max((float((x - y).abs().max() / y.abs().max().clamp(min=1)) for x, y in pairs if x.numel()), default=0.0)


Rows = dict[str, NDArray[np.float64]]


def rows_of(model: nn.Module, calls: Sequence[dict[str, Any]]) -> tuple[Rows, Tensor]:
    """Head and statistic -> its rows in ascending order, as a cache brings them in another one; and the answer.

    calls  what the model is called with, one after the other: each gets the cache of the one before
    """
    torch.manual_seed(0)
    answers, cache = [], {}
    with hw.watch(model) as seen:
        for inputs in calls:
            output = model(**inputs, **cache)
            cache = {cache_name(model): cache_in(output)}
            answers.append(tensors(output)[0])
    rows = {f"{head} {name}": np.sort(each.rows[name]) for head, each in seen.items() for name in each.rows}
    return rows, torch.cat(answers, 1)


@torch.no_grad()
def try_cache(model: nn.Module, padding: str, family: str) -> dict[str, Any]:
    """Without a cache, with one, in parts: how far the statistics are apart, and which of them one way lacks."""
    names, inputs = inspect.signature(model.forward).parameters, inputs_of(model, padding, family)
    if not {"use_cache", cache_name(model)} <= set(names) or inputs.keys() != {"input_ids", "attention_mask"}:
        return {}
    plain, answer = rows_of(model, [inputs | {"use_cache": False}])
    ways, note, apart = [rows_of(model, [inputs | {"use_cache": True}])[0]], "", 0.0
    ends = (11, 12, 13, 16, T)
    parts = [
        {"input_ids": inputs["input_ids"][:, start:end], "attention_mask": inputs["attention_mask"][:, :end]}
        for start, end in zip((0, *ends), ends, strict=False)
    ]
    try:
        rows, by_part = rows_of(model, [part | {"use_cache": True} for part in parts])
    except hw.HeadwiseError:
        raise
    except Exception as error:  # other people's code: not every family takes a text in parts
        note = f"in parts it raises {type(error).__name__}"
    else:
        kept = inputs["attention_mask"].bool()
        apart = 1.0
        if by_part.shape == answer.shape:
            apart = float((by_part - answer)[kept].abs().max() / answer[kept].abs().max())
        if apart < 1e-3:
            ways.append(rows)
        else:  # as a model has it that looks ahead
            note = "in parts it answers differently"
    # Statistics may be as far apart as the answers are: a mixer of states adds up in another order in parts.
    result: dict[str, Any] = {"cache": 0.0, "lost": [], "cache_note": note, "apart": apart}
    for rows in ways:
        result["lost"] += {key.partition(" ")[2] for key in plain.keys() ^ rows.keys()}
        for key in plain.keys() & rows.keys():
            name, size = key.partition(" ")[2], max(1.0, float(np.abs(plain[key]).max(initial=0)))
            same_count = plain[key].shape == rows[key].shape
            off = distance_of(name, rows[key], plain[key], T) if same_count else float("inf")
            result["cache"] = max(result["cache"], off / size if name == "norm" else off)
    return result | {"lost": sorted(set(result["lost"]))}


@torch.no_grad()
def try_padding(model: nn.Module, padding: str, family: str) -> dict[str, Any]:
    """Run, run by eager functions, run watched; how far the watched one is from both."""
    sites = sites_of(model)
    inputs, plain = runnable_inputs(model, family, padding)
    seen = Comparison(model, inputs)
    with listening(model, seen.note):
        watched = run(model, inputs)
    answers = [(x.nan_to_num(), y.nan_to_num()) for x, y in zip(plain, watched, strict=True)]
    same = all(torch.equal(x, y) for x, y in answers)
    if not same and any("fast path" in line for line in missing(model, sites)):
        same = all(torch.allclose(x, y, rtol=1e-5, atol=1e-5) for x, y in answers)
        seen.notes.setdefault("answers differ by rounding, as a fast path of torch is left")
    pairs = [(x, y) for x, y in zip(plain, seen.eager, strict=False) if x.shape == y.shape and x.is_floating_point()]
    ways = max((float((x - y).abs().max()) for x, y in pairs), default=0.0)
    if seen.weights > TOLERANCE and ways > TOLERANCE:  # the library's two ways differ: held to the one that has maps
        seen = Comparison(model, inputs)
        with spelled_out(model), listening(model, seen.note):
            run(model, inputs)
        seen.notes.setdefault(f"its sdpa and eager ways differ by {ways:.2g} in the library itself; held to eager")
    return {
        "weights": seen.weights,
        "norm": seen.norm,
        **(try_ablation(model, inputs, seen) if padding == "none" else {}),
        "statistics": seen.statistics,
        "lacking": sorted(seen.lacking),
        **try_cache(model, padding, family),
        "rows": seen.rows,
        "compared": seen.compared,
        "same": same,
        "notes": list(seen.notes),
        "unseen": [s.name for s in sites if not s.free and not seen.calls[s.module] and seen.maps.get(s.module)],
        "sites": len(sites),
        "free": sum(1 for site in sites if site.free),
        "ran": sum(1 for site in sites if site.module in seen.heard),
    }


def same_inputs(model: nn.Module, family: str, padding: str) -> bool:
    """Is the model called with the same as without padding?"""
    ours, theirs = inputs_of(model, padding, family), inputs_of(model, "none", family)
    return all(torch.equal(torch.as_tensor(x), torch.as_tensor(theirs[name])) for name, x in ours.items())


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:120]


def try_family(family: str) -> dict[str, Any]:
    """What happens to one family."""
    try:
        model = build(family)
    except TimeoutError:
        raise
    except Exception as error:
        return {"built": False, "why": f"{type(error).__name__}: {first_line(error)}"}
    result: dict[str, Any] = {"built": True, "class": type(model).__name__, "paddings": {}}
    try:
        result["missing"] = missing(model, sites_of(model))
    except hw.HeadwiseError as error:
        return result | {"refused": str(error)}
    for padding in PADDINGS:
        try:
            if padding != "none" and same_inputs(model, family, padding):  # it takes no text that could be padded
                result["paddings"][padding] = result["paddings"]["none"]
            else:
                result["paddings"][padding] = try_padding(model, padding, family)
        except hw.HeadwiseError as error:
            result["paddings"][padding] = {"refused": str(error)}
        except TimeoutError:
            raise
        except Exception as error:
            result["paddings"][padding] = {"error": f"{type(error).__name__}: {first_line(error)}"}
    return result


# The page


def row(family: str, result: dict[str, Any]) -> tuple[str, str]:
    """What became of a family, and its line of the table; "" where it says nothing about headwise."""
    if not result["built"]:
        return "not built", ""
    if "refused" in result:
        reason = result["refused"].partition(") has")[2]
        reason = f"has{reason.partition(':')[0]}" if reason else result["refused"]
        return "refused", f"| {family} | {result['class']} | refused | | | | | | | | {reason} |"
    paddings = [result["paddings"][padding] for padding in PADDINGS]
    if all("error" in each for each in paddings):
        return "not run", ""
    cells, why = [], dict.fromkeys(result["missing"])
    for each in paddings:
        refused = each.get("refused")
        number = f"{each['weights']:.1g}" if each.get("compared") else "no map" if each.get("rows") else "nothing ran"
        cells.append("refused" if refused else "not run" if "error" in each else number)
        why |= dict.fromkeys([refused] if refused else each.get("notes", []))
        if each.get("norm", 0) > TOLERANCE:
            why.setdefault(f"`norm` is off by {each['norm']:.2g}")
        if each.get("lacking"):
            why.setdefault(f"without {', '.join(each['lacking'])}")
        if each.get("statistics", 0) > TOLERANCE >= each.get("weights", 0):
            why.setdefault(f"statistics are off by {each['statistics']:.2g}")
        if each.get("lost"):
            why.setdefault(f"statistics differ: with a cache or without it there is no {', '.join(each['lost'])}")
        if each.get("cache", 0) > max(TOLERANCE, 10 * min(1e-3, each.get("apart", 0))):
            why.setdefault(f"statistics with a cache and without it differ by {each['cache']:.2g}")
        if each.get("ablation", 0) > TOLERANCE:
            why.setdefault(f"a silenced head differs from a hook of one's own by {each['ablation']:.2g}")
        if each.get("moved", 0) < each.get("silenced", 0):
            why.setdefault(f"without {each['silenced'] - each['moved']} of its heads it answers the same")
        why |= dict.fromkeys(each.get("ablation_notes", []))
        if each.get("same") is False:
            why.setdefault("the watched model answers differently")
        if each.get("unseen"):
            why.setdefault(f"{', '.join(each['unseen'])} ran and was not heard")
        if each.get("weights", 0) > TOLERANCE:
            why.setdefault(SIZES["known"].get(family, "weights differ"))
    ran = [each for each in paddings if each.get("rows")]
    idle = next((f"{each['ran']} of {each['sites']} attentions ran" for each in ran if each["ran"] < each["sites"]), "")
    mistakes = ("weights differ", "`norm`", "statistics", "the watched", "a silenced")
    wrong = any("was not heard" in w or w.startswith(mistakes) for w in why)
    state = "refused" if not ran and any("refused" in each for each in paddings) else "wrong" if wrong else ""
    state = state or ("partly" if why or not ran else "watched")
    ends = []
    shown = {"statistics": "compared", "cache": "cache_note", "ablation": "moved"}  # and what there is where they are
    for key, there in shown.items():
        numbers = [each[key] for each in paddings if key in each and (key == "cache" or each.get(there))]
        ends.append(f"{max(numbers):.1g}" if numbers else "")
    free, sites = (max((each.get(key, 0) for each in paddings), default=0) for key in ("free", "sites"))
    cells.insert(0, "interface" if not free else "torch" if free == sites else "both")
    notes = dict.fromkeys(each.get("cache_note", "") for each in paddings)
    text = "; ".join(filter(None, [*why, idle, *notes])).replace("|", "/")
    return state, f"| {family} | {result['class']} | {state} | {' | '.join(cells + ends)} | {text} |"


def lines_of(text: str) -> dict[str, str]:
    """Family -> its line of a page that was written before."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and line.count("|") == COLUMNS + 1]
    return {line.split("|")[1].strip(): line for line in lines if not line.startswith(("| family", "| ---"))}


def reasons_of(text: str) -> dict[str, str]:
    """Family -> why it was not built, or not run, by a page that was written before."""
    _, _, end = text.partition(f"{NOT_RUN}\n")
    lines = [line.removeprefix("- ") for line in end.splitlines() if line.startswith("- ")]
    return dict(line.split(": ", 1) for line in lines)


def refusals(lines: dict[str, str]) -> list[str]:
    """The families without a map, by what they do in its place."""
    kinds: dict[str, list[str]] = {kind: [] for kind in SIZES["refused"]}
    for family, line in lines.items():
        if line.split("|")[3].strip() == "refused":
            kind = next((kind for kind, names in SIZES["refused"].items() if family in names), "not sorted yet")
            kinds.setdefault(kind, []).append(family)
    return [f"- {kind}: {', '.join(families)}" for kind, families in kinds.items() if families]


def bar(lines: dict[str, str]) -> str:
    """How many of the families whose attention is a softmax over keys by functions of torch are read, in words."""
    cells = {family: [cell.strip() for cell in line.split("|")[1:-1]] for family, line in lines.items()}
    softmax = [names for kind, names in SIZES["refused"].items() if kind.startswith("a softmax")]
    refused = [family for names in softmax for family in names if family in lines and cells[family][2] == "refused"]
    ours = [each for family, each in cells.items() if each[3] in ("torch", "both") and family not in refused]
    watched = [each for each in ours if each[2] in ("watched", "partly")]
    silenced = [each for each in watched if each[9] and float(each[9]) <= TOLERANCE]
    total = len(ours) + len(refused)
    return (
        f"Of the {total} families in which an attention is a softmax over keys that goes through no interface (`torch` "
        f"or `both` in the column `read`) {len(watched)} are watched, {len(watched) / max(1, total):.0%}, and in "
        f"{len(silenced)}, {len(silenced) / max(1, total):.0%}, a silenced head also gives what hooks of one's own "
        f"give; at least 90 % were wanted."
    )


def page(results: dict[str, Any], written: str) -> str:
    """The page of these results, with what an earlier page tells of all other families."""
    before, reasons_before = lines_of(written), reasons_of(written)
    rows = {family: row(family, result) for family, result in results.items()}
    lines = dict(sorted({**before, **{family: line for family, (_, line) in rows.items()}}.items()))
    lines = {family: line for family, line in lines.items() if line}
    states = Counter(line.split("|")[3].strip() for line in lines.values())
    largest = max(
        (each["weights"] for family, result in results.items() if rows[family][0] in ("watched", "partly")
         for each in result["paddings"].values() if each.get("weights", 1) <= TOLERANCE), default=0.0
    )  # fmt: skip
    if told := re.search(r"those that are watched is ([\d.e-]+)\.", written):
        largest = max(largest, float(told[1]))
    kept = before.keys() - results.keys()
    untried = set(CONFIG_MAPPING) - results.keys() - before.keys() - reasons_before.keys() if kept else set()
    merged = (
        f" {len(kept)} lines are those of earlier runs, some from before `read` and `ablation` were told"
        if kept
        else ""
    )
    merged += f", and {len(untried)} families without a line were not tried since" if untried else ""
    reasons = {
        family: re.sub(r" from '/[^']*'?", "", result["why"])  # where the library lies is nobody's business
        for family, result in sorted(results.items())
        if not result["built"]
    }
    idle = {
        family: next(each["error"] for each in result["paddings"].values() if "error" in each)
        for family, result in sorted(results.items())
        if rows[family][0] == "not run"
    }
    earlier = {family: why for family, why in reasons_before.items() if family not in results}
    unread = earlier | reasons | idle
    count = len(lines) + len(unread) + len(untried)
    return "\n".join(
        [
            "# Families of transformers",
            "",
            f"Written by `python studies/families.py` with transformers {__version__} and torch {torch.__version__}.",
            "A small model of every family that can be built from its config is watched without padding, with padding",
            "on the left and on the right, and held to the maps of its own eager functions. The three numbers are the",
            "largest difference of any weight of any head. Where an attention goes through no interface, its maps are",
            "what its softmax gave, kept below torch's functions. `statistics` is the largest difference of any",
            "statistic from its definition on those maps, `cache` that between statistics without a cache, with one",
            "and in parts, as shares of the attention. `ablation` is how far the answers are apart when a head of each",
            "attention is silenced by `ablate` and by a hook of one's own, once where weights meet values and once in",
            "what W_O reads. The answers of watched and unwatched models were the same to",
            "the bit in every run that is listed as watched or partly watched, or to rounding where that is said.",
            "",
            f"Of {count} families {states['watched']} are "
            f"watched, {states['partly']} are watched with something to know, {states['refused']} are refused by name, "
            f"{states['wrong']} are wrong; {len(unread)} were not built, or built and not "
            f"run: below is why. The largest difference of those that are watched is {largest:.1g}."
            + (merged and f"{merged}."),
            "",
            bar(lines),
            "",
            "Refused are, by what they do in the place of a map that could be read:",
            "",
            *refusals(lines),
            "",
            "| family | class | state | read | none | left | right | statistics | cache | ablation | to know |",
            "|" + " --- |" * COLUMNS,
            *lines.values(),
            "",
            NOT_RUN,
            "",
            *[f"- {family}: {' '.join(why.split())}" for family, why in sorted(unread.items())],
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="families, with commas")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "families.json", help="where it goes on")
    parser.add_argument("--page", type=Path, default=ROOT / "studies" / "families.md")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity(logging.CRITICAL)
    torch.set_num_threads(1)
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    chosen = arguments.only.split(",") if arguments.only else [name for name in CONFIG_MAPPING if name not in results]

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} s of a processor")

    signal.signal(signal.SIGPROF, late)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    for number, family in enumerate(chosen, 1):
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            results[family] = try_family(family)
        except TimeoutError as error:
            results[family] = {"built": False, "why": f"TimeoutError: {error}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(f"{number} of {len(chosen)}: {row(family, results[family])[1] or family}", flush=True)
        write_whole(arguments.results, json.dumps(results))
    written = arguments.page.read_text(encoding="utf-8") if arguments.page.exists() else ""
    write_whole(arguments.page, page(results, written))


if __name__ == "__main__":
    main()
