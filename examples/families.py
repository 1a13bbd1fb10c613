"""Write docs/families.md: a small model of every class of transformers that can be built, watched and held to its maps.

    nice python examples/families.py                 # all families, minutes on one core; goes on where it was stopped
    python examples/families.py --only llama,bert    # some of them anew, told on the screen

Each family is built from its own config with small sizes, its weights drawn anew, and run by its own eager functions,
which give maps; then it is watched the way it runs by default. The largest difference between the two is written down,
for texts without padding, with padding on the left and on the right. The answers of the watched and the unwatched model
must be the same to the bit.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import signal
import tomllib
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AttentionInterface, PretrainedConfig, PreTrainedModel, __version__
from transformers.models.auto import modeling_auto
from transformers.utils import logging

import headwise as hw
from headwise.files import write_whole
from headwise.heads.documents import Document, listening
from headwise.heads.measure import measure, output_factors, row_weights
from headwise.models.ask import hooked
from headwise.models.sites import Site, missing, sites_of
from headwise.records import Call

ROOT = Path(__file__).resolve().parents[1]
SIZES = tomllib.loads((Path(__file__).parent / "families.toml").read_text(encoding="utf-8"))
LARGEST = 30_000_000  # parameters of a model that is built
SECONDS = 60  # for one family
TOLERANCE = 1e-4  # of a weight
B, T, PAD = 2, 23, 5
PADDINGS = ("none", "left", "right")
MAPPINGS = ("MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_MAPPING")


# Building


def small(config: PretrainedConfig, more: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a small config of the same class, its parts included."""
    names = set(config.to_dict()) | set(vars(config))
    wanted: dict[str, Any] = {}
    for name, value in SIZES["sizes"].items():
        now = getattr(config, name, None)
        number = isinstance(now, int | float) and not isinstance(now, bool)
        if name in names and (number or name in SIZES["may_be_none"]):
            wanted[name] = value
    if "kv_lora_rank" in wanted and "num_key_value_heads" in wanted:  # keys and values are made for every head
        wanted["num_key_value_heads"] = wanted["num_attention_heads"]
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in getattr(config, "ignore_keys_at_rope_validation", rope):
        pairs = int(wanted.get("head_dim", 8) * rope.get("partial_rotary_factor", 1.0)) // 2
        wanted["rope_parameters"] = rope | {"mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    if kinds and not isinstance(getattr(type(config), "layer_types", None), property):
        wanted["layer_types"] = [kinds[i % len(kinds)] for i in range(max(2, len(kinds)))]
        wanted |= {name: len(wanted["layer_types"]) for name in ("num_hidden_layers", "num_layers") if name in wanted}
    for name in names:
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig) and name.endswith("config"):
            wanted[name] = {**small(part, {}), "model_type": part.model_type}
    return wanted | more


def build(family: str) -> nn.Module:
    """A small model of a family, with weights that make its attention uneven."""
    kind = CONFIG_MAPPING[family]
    base = kind()
    wanted = small(base, SIZES["families"].get(family, {}))
    try:
        config = kind(**wanted)
    except Exception:  # some want their parts as configs
        parts = {name: dict(wanted[name]) for name in wanted if name.endswith("config")}
        for name, values in parts.items():
            values.pop("model_type", None)
            parts[name] = type(getattr(base, name))(**values)
        config = kind(**wanted | parts)
    model_class = class_of(type(config))
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in model_class(config).parameters())
    if count > LARGEST:
        raise LookupError(f"{count:,} parameters at small sizes")
    torch.manual_seed(0)
    model: nn.Module = model_class(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.is_floating_point():
                parameter.normal_(std=0.2, generator=generator)
    return model


def class_of(kind: type[PretrainedConfig]) -> Any:
    """The model class of a config: by transformers' own tables, or by name where it is a part of another model."""
    for mapping in (getattr(modeling_auto, name) for name in MAPPINGS):
        if kind in mapping:
            return mapping[kind][0] if isinstance(mapping[kind], tuple) else mapping[kind]
    module = importlib.import_module(kind.__module__.replace("configuration_", "modeling_"))
    models = (each for each in vars(module).values() if isinstance(each, type) and issubclass(each, PreTrainedModel))
    names = {each.__name__: each for each in models if each.config_class is kind and "PreTrained" not in each.__name__}
    if not names:
        raise LookupError("no model class of its own")
    return names[min(names, key=lambda name: (not name.endswith("Model"), name))]


def inputs_of(model: Any, padding: str, turned: bool = False) -> dict[str, Any]:
    """What the model is called with; `turned` has frames before the bins of a spectrum."""
    generator = torch.Generator().manual_seed(1)
    names = list(inspect.signature(model.forward).parameters)
    mask = torch.ones(B, T, dtype=torch.long)
    if padding != "none":
        mask[1, slice(None, PAD) if padding == "left" else slice(-PAD, None)] = 0
    config = model.config
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 20
    height, width = size if isinstance(size, list | tuple) else (size, size)
    bins = next((n for key in ("num_mel_bins", "feature_size") if (n := getattr(config, key, None))), 80)
    frames = 2 * (getattr(config, "max_source_positions", 0) or 40)
    shapes = {
        "pixel_values": (B, getattr(vision, "num_channels", 3), height, width),
        "input_values": (B, 1600),
        "input_features": (B, frames, bins) if turned else (B, bins, frames),
    }
    inputs: dict[str, Any] = {}
    ids = torch.randint(3, 17, (B, T), generator=generator)
    side_by_side = hasattr(model, "get_text_features") and hasattr(model, "get_image_features")
    if "input_ids" in names and (model.main_input_name == "input_ids" or "pixel_values" in names):
        inputs |= {"input_ids": ids, "attention_mask": mask}
    if not inputs or model.main_input_name in shapes or side_by_side:
        for name, shape in shapes.items():
            if name in names:
                inputs[name] = torch.randn(shape, generator=generator)
                break
    if "grid_thw" in names:  # patches side by side, as flat rows
        patch, times = getattr(vision, "patch_size", 5), getattr(vision, "temporal_patch_size", 1)
        channels = getattr(vision, "in_channels", getattr(vision, "num_channels", 3))
        rows = torch.randn(B * 16, channels * times * patch * patch, generator=generator)
        inputs = {name: rows for name in ("hidden_states", "pixel_values") if name in names}
        inputs["grid_thw"] = torch.tensor([[1, 4, 4]] * B)
    if "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = ids[:, :11]
    if "attention_mask" not in names:
        inputs.pop("attention_mask", None)
    if "bbox" in names:
        inputs["bbox"] = torch.zeros(B, T, 4, dtype=torch.long)
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
def eager_maps(model: nn.Module) -> Iterator[dict[nn.Module, list[Tensor]]]:
    """Inside this block the model runs by its eager functions, and the weights of each call are kept, (B,H,T,S)."""
    maps: dict[nn.Module, list[Tensor]] = defaultdict(list)
    library = AttentionInterface.get_interface

    def get_interface(self: Any, name: str, default: Any) -> Any:
        def attend(module: nn.Module, *args: Any, **keywords: Any) -> Any:
            result = default(module, *args, **keywords)
            maps[module].append(result[1].detach())
            return result

        return attend

    AttentionInterface.get_interface = get_interface
    try:
        with spelled_out(model):
            yield maps
    finally:
        AttentionInterface.get_interface = library


class Comparison:
    """What watching gives beside the maps of the model's eager functions."""

    def __init__(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        joined: dict[nn.Module, list[Tensor]] = defaultdict(list)

        def keep(site: Site) -> Any:
            return site.projection.register_forward_pre_hook(lambda module, args: joined[site.module].append(args[0]))

        with eager_maps(model) as maps, hooked([keep(site) for site in sites_of(model) if site.projection is not None]):
            self.eager = run(model, inputs)
        self.maps, self.joined = maps, joined
        self.weights = self.norm = 0.0
        self.rows = self.compared = 0
        self.calls: Counter[nn.Module] = Counter()
        self.notes: dict[str, None] = {}

    def note(self, site: Site, call: Call, documents: Sequence[Document]) -> None:
        number = self.calls[site.module]
        self.calls[site.module] += 1
        if call.note:
            self.notes.setdefault(call.note.partition(": ")[2])
        maps, joined = self.maps.get(site.module, []), self.joined[site.module]
        whole = bool(joined) and joined[0].numel() == call.out.numel()  # else W_O reads several calls at once
        times = len(maps) // len(joined) if whole else 1  # some lay the same maps over several values
        factors = None if site.w_o is None or not call.at_w_o else output_factors(site.w_o, site.n_heads)
        for b, document in enumerate(documents):
            measured = measure(call, b, document, w_o=factors)
            self.rows += len(measured.places)
            if not len(measured.places):
                continue
            if number * times < len(maps):
                ours = row_weights(call, b, range(call.q.shape[2]))[:, measured.places]
                dense = maps[number * times][b][:, measured.places]
                self.compared += 1
                self.weights = max(self.weights, float((ours - dense).abs().max()))
            if factors is not None and whole and number < len(joined):
                batch, _, rows, _ = call.out.shape
                heads = joined[number].reshape(batch, rows, site.n_heads, -1)[b, measured.places]
                blocks = site.w_o.reshape(len(site.w_o), site.n_heads, -1)
                expected = torch.einsum("the,che->htc", heads, blocks).norm(dim=-1)
                off = (measured.rows["norm"] - expected).abs().max() / expected.abs().max().clamp(min=1e-9)
                self.norm = max(self.norm, float(off))


@torch.no_grad()
def try_padding(model: nn.Module, padding: str) -> dict[str, Any]:
    """Run, run by eager functions, run watched; how far the watched one is from both."""
    inputs, sites = inputs_of(model, padding), sites_of(model)
    try:
        run(model, inputs)
    except Exception:  # other people's code, which may raise anything; what the next line's run raises is told
        inputs = inputs_of(model, padding, turned=True)
    plain = run(model, inputs)
    seen = Comparison(model, inputs)
    with listening(model, seen.note):
        watched = run(model, inputs)
    same = all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(plain, watched, strict=True))
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
        "rows": seen.rows,
        "compared": seen.compared,
        "same": same,
        "notes": list(seen.notes),
        "unseen": [site.name for site in sites if not seen.calls[site.module] and seen.maps.get(site.module)],
        "sites": len(sites),
        "ran": sum(1 for site in sites if seen.calls[site.module]),
    }


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
        sites_of(model)
        result["missing"] = missing(model)
    except hw.HeadwiseError as error:
        return result | {"refused": str(error)}
    for padding in PADDINGS:
        try:
            result["paddings"][padding] = try_padding(model, padding)
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
        reason = result["refused"].partition(") does")[2]
        reason = f"does{reason.partition(', so its')[0]}" if reason else result["refused"]
        return "refused", f"| {family} | {result['class']} | refused | | | | {reason} |"
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
        if each.get("same") is False:
            why.setdefault("the watched model answers differently")
        if each.get("unseen"):
            why.setdefault(f"{', '.join(each['unseen'])} ran and was not heard")
        if each.get("weights", 0) > TOLERANCE:
            why.setdefault(SIZES["known"].get(family, "weights differ"))
    ran = [each for each in paddings if each.get("rows")]
    idle = next((f"{each['ran']} of {each['sites']} attentions ran" for each in ran if each["ran"] < each["sites"]), "")
    wrong = any("was not heard" in w or w.startswith(("weights differ", "`norm`", "the watched")) for w in why)
    state = "refused" if not ran and any("refused" in each for each in paddings) else "wrong" if wrong else ""
    state = state or ("partly" if why or not ran else "watched")
    text = "; ".join([*why, idle] if idle else why).replace("|", "/")
    return state, f"| {family} | {result['class']} | {state} | {' | '.join(cells)} | {text} |"


def page(results: dict[str, Any]) -> str:
    rows = {family: row(family, result) for family, result in sorted(results.items())}
    states = Counter(state for state, _ in rows.values())
    largest = max(
        (each["weights"] for family, result in results.items() if rows[family][0] in ("watched", "partly")
         for each in result["paddings"].values() if each.get("weights", 1) <= TOLERANCE), default=0.0
    )  # fmt: skip
    why_not = Counter(result["why"].partition(":")[0] for result in results.values() if not result["built"])
    unbuilt = ", ".join(f"{count} {name}" for name, count in why_not.most_common())
    return "\n".join(
        [
            "# Families of transformers",
            "",
            f"Written by `python examples/families.py` with transformers {__version__} and torch {torch.__version__}.",
            "A small model of every family that can be built from its config is watched without padding, with padding",
            "on the left and on the right, and held to the maps of its own eager functions. The three numbers are the",
            "largest difference of any weight of any head. The answers of watched and unwatched models were the same",
            "to the bit in every run that is listed as watched or partly watched.",
            "",
            f"Of {len(results)} families {states['watched']} are watched, {states['partly']} are watched with "
            f"something to know, {states['refused']} are refused by name, {states['wrong']} are wrong; "
            f"{states['not run']} were built and not run, as the inputs that they want are not made here, and "
            f"{states['not built']} were not built ({unbuilt}). The largest difference of those that are watched is "
            f"{largest:.1g}.",
            "",
            "| family | class | state | none | left | right | to know |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *[line for _, line in rows.values() if line],
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="families, with commas")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "families.json", help="where it goes on")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "families.md")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity(logging.CRITICAL)
    torch.set_num_threads(1)
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    chosen = arguments.only.split(",") if arguments.only else [name for name in CONFIG_MAPPING if name not in results]

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    for number, family in enumerate(chosen, 1):
        signal.alarm(SECONDS)
        try:
            results[family] = try_family(family)
        except TimeoutError as error:
            results[family] = {"built": False, "why": f"TimeoutError: {error}"}
        signal.alarm(0)
        print(f"{number} of {len(chosen)}: {row(family, results[family])[1] or family}", flush=True)
        write_whole(arguments.results, json.dumps(results))
    write_whole(arguments.page, page(results))


if __name__ == "__main__":
    main()
