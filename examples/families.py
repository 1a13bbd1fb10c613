"""Write docs/families.md: a small model of every class of transformers that can be built, watched and held to its maps.

    python examples/families.py                      # all families; goes on where it was stopped
    python examples/families.py --only llama,bert    # some of them, anew
    nice python examples/families.py &               # minutes on one core

Each family is built from its own config with small sizes, its weights drawn anew, and run by its own eager attention,
which gives maps; then watched the way it runs by default. The largest difference between the two is written down, for
texts without padding, with padding on the left and on the right. The answers of the watched and the unwatched model
must be the same to the bit.
"""

from __future__ import annotations

import argparse
import inspect
import json
import signal
import tomllib
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AttentionInterface, PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.utils import logging

import headwise as hw
from headwise.heads.documents import listening
from headwise.heads.measure import measure, output_factors, row_weights

ROOT = Path(__file__).resolve().parents[1]
SIZES = tomllib.loads((Path(__file__).parent / "families.toml").read_text(encoding="utf-8"))
LARGEST = 30_000_000  # parameters of a model that is built
SECONDS = 60  # for one family
B, T, PAD = 2, 23, 5
PADDINGS = ("none", "left", "right")
MAPPINGS = ("MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_MAPPING")


def small(config: PretrainedConfig, more: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a small config of the same class, its parts included."""
    names = set(config.to_dict()) | set(vars(config))
    wanted: dict[str, Any] = {}
    for name, value in SIZES["sizes"].items():
        now = getattr(config, name, None)
        if name in names and (
            name in SIZES["may_be_none"] or (isinstance(now, int | float) and not isinstance(now, bool))
        ):
            wanted[name] = value
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
        parts = {
            name: dict(value) for name, value in wanted.items() if isinstance(value, dict) and name.endswith("config")
        }
        for name, value in parts.items():
            value.pop("model_type", None)
            parts[name] = type(getattr(base, name))(**value)
        config = kind(**wanted | parts)
    mappings = (getattr(modeling_auto, name) for name in MAPPINGS)
    model_class = next((mapping[type(config)] for mapping in mappings if type(config) in mapping), None)
    if model_class is None:
        raise LookupError("no model class of its own")
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
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


def inputs_of(model: Any, padding: str) -> dict[str, Tensor]:
    """What the model is called with."""
    generator = torch.Generator().manual_seed(1)
    names = list(inspect.signature(model.forward).parameters)
    mask = torch.ones(B, T, dtype=torch.long)
    if padding != "none":
        mask[1, slice(None, PAD) if padding == "left" else slice(-PAD, None)] = 0
    config = model.config
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 20
    height, width = size if isinstance(size, list | tuple) else (size, size)
    shapes = {
        "pixel_values": (B, getattr(vision, "num_channels", 3), height, width),
        "input_values": (B, 1600),
        "input_features": (
            B,
            getattr(config, "num_mel_bins", 16),
            2 * (getattr(config, "max_source_positions", 0) or 40),
        ),
    }
    inputs = {}
    ids = torch.randint(3, 17, (B, T), generator=generator)
    if (
        "input_ids" in names
        and model.main_input_name == "input_ids"
        or "input_ids" in names
        and "pixel_values" in names
    ):
        inputs |= {"input_ids": ids, "attention_mask": mask}
    if (
        model.main_input_name in shapes
        or not inputs
        or ("pixel_values" in names and _needs(model, "get_image_features"))
    ):
        for name, shape in shapes.items():
            if name in names:
                inputs[name] = torch.randn(shape, generator=generator)
                break
    if "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = ids[:, :11]
    if "attention_mask" not in names:
        inputs.pop("attention_mask", None)
    if "bbox" in names:
        inputs["bbox"] = torch.zeros(B, T, 4, dtype=torch.long)
    return inputs


def _needs(model: nn.Module, name: str) -> bool:
    """Do texts and images go through two stacks side by side (CLIP), so that both must be there?"""
    return hasattr(model, name) and hasattr(model, "get_text_features")


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else []
    return [tensor for value in values for tensor in tensors(value)]


@contextmanager
def eager_maps(model: Any) -> Iterator[dict[nn.Module, list[Tensor]]]:
    """Inside this block the model runs by its eager functions, and the weights of each call are kept, (B,H,T,S)."""
    maps: dict[nn.Module, list[Tensor]] = defaultdict(list)
    library = AttentionInterface.get_interface

    def get_interface(self: Any, name: str, default: Any) -> Any:
        def attend(module: nn.Module, *args: Any, **keywords: Any) -> Any:
            result = default(module, *args, **keywords)
            maps[module].append(result[1].detach())
            return result

        return attend

    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    AttentionInterface.get_interface = get_interface  # type: ignore[method-assign]
    try:
        for config, _ in before:
            config._attn_implementation = "eager"
        yield maps
    finally:
        AttentionInterface.get_interface = library  # type: ignore[method-assign]
        for config, name in before:
            config._attn_implementation = name


@torch.no_grad()
def try_padding(model: nn.Module, padding: str) -> dict[str, Any]:
    """Run, run by eager functions, run watched; how far the watched one is from both."""
    inputs = inputs_of(model, padding)
    plain = tensors(model(**inputs))
    maps: dict[nn.Module, list[Tensor]] = {}
    joined: dict[nn.Module, list[Tensor]] = defaultdict(list)
    sites = hw_sites(model)
    handles = [
        site.projection.register_forward_pre_hook(lambda module, args, site=site: joined[site.module].append(args[0]))
        for site in sites
        if site.projection is not None
    ]
    with eager_maps(model) as maps:
        model(**inputs)
    for handle in handles:
        handle.remove()
    worst, worst_norm, rows, used = 0.0, 0.0, 0, Counter()
    notes: dict[str, None] = {}

    def note(site: Any, call: Any, documents: Any) -> None:
        nonlocal worst, worst_norm, rows
        number = used[site.module]
        used[site.module] += 1
        if call.note:
            notes.setdefault(call.note.partition(": ")[2])
        stored = maps.get(site.module, [])
        if len(stored) % max(1, len(joined[site.module]) or 1) == 0 and len(joined[site.module]):
            number *= 1 if len(stored) == used[site.module] or len(stored) <= number else 1
        dense = stored[min(number, len(stored) - 1)] if stored else None
        factors = None if site.w_o is None or not call.at_w_o else output_factors(site.w_o, site.n_heads)
        for b, document in enumerate(documents):
            measured = measure(call, b, document, w_o=factors)
            rows += len(measured.places)
            if dense is not None:
                ours = row_weights(call, b, range(call.q.shape[2]))[:, measured.places]
                worst = max(worst, float((ours - dense[b][:, measured.places]).abs().max()) if ours.numel() else 0.0)
            if factors is not None and len(joined[site.module]) == len(stored):
                heads = joined[site.module][number].reshape(*call.out[:, 0].shape[:2], site.n_heads, -1)[
                    b, measured.places
                ]
                blocks = site.w_o.reshape(len(site.w_o), site.n_heads, -1)
                expected = torch.einsum("the,che->htc", heads, blocks).norm(dim=-1)
                worst_norm = max(
                    worst_norm, float((measured.rows["norm"] - expected).abs().max() / expected.abs().max())
                )

    with listening(model, note):
        watched = tensors(model(**inputs))
    same = all(torch.equal(x, y) or bool(x.isnan().any()) for x, y in zip(plain, watched, strict=True))
    unseen = [site.name for site in sites if site.module not in used and maps.get(site.module)]
    return {"weights": worst, "norm": worst_norm, "rows": rows, "same": same, "notes": list(notes), "unseen": unseen,
            "sites": len(sites), "ran": len(used)}  # fmt: skip


def hw_sites(model: nn.Module) -> Any:
    from headwise.models.sites import sites_of

    return sites_of(model)


def try_family(family: str) -> dict[str, Any]:
    """What happens to one family."""
    from headwise.models.sites import missing

    try:
        model = build(family)
    except Exception as error:
        return {
            "built": False,
            "why": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120] if str(error).strip() else ''}",
        }
    result: dict[str, Any] = {"built": True, "class": type(model).__name__, "paddings": {}}
    try:
        hw_sites(model)
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
            result["paddings"][padding] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="families, with commas")
    parser.add_argument("--results", type=Path, default=ROOT / "out" / "families.json", help="where it goes on")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "families.md")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    chosen = arguments.only.split(",") if arguments.only else [name for name in CONFIG_MAPPING if name not in results]

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    for family in chosen:
        signal.alarm(SECONDS)
        try:
            results[family] = try_family(family)
        except TimeoutError as error:
            results[family] = {"built": False, "why": str(error)}
        signal.alarm(0)
        if arguments.only:
            print(family, json.dumps(results[family], indent=1))
        arguments.results.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
