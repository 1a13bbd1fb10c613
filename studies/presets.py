"""Writes the presets of `headwise cost`: each model of presets.toml is priced once, and its layers are kept as data.

    python studies/presets.py

Models that no formula describes are built by transformers, without weights. PaLM has no class there: it is a Llama with
one norm a layer.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

from headwise.cost import shape_of
from headwise.cost.shape import ModelShape

HERE = Path(__file__).parent
PAGE = HERE.parent / "src" / "headwise" / "cost" / "presets.json"
CONFIGS: dict[str, dict[str, Any]] = tomllib.loads((HERE / "presets.toml").read_text(encoding="utf-8"))


def preset_shape(name: str) -> ModelShape:
    """The sizes of a preset, out of its config."""
    config = dict(CONFIGS[name])
    notes, is_palm = config.pop("notes", []), name.startswith("palm")
    shape = shape_of(config)[1]  # its number formats and notes, too
    layers = shape.layers
    if is_palm:
        layers = tuple(dataclasses.replace(layer, norm_parameters=shape.d_model) for layer in layers)
    family = name.split("-")[0] if is_palm else shape.family
    return dataclasses.replace(shape, family=family, way="config", layers=layers).noted(*notes)


def data_of(shape: ModelShape) -> dict[str, Any]:
    """Rows of different layers, and the number of the row of each layer; without what is at its default."""
    rows: list[dict[str, Any]] = []
    order = []
    for layer in shape.layers:
        row = plain(layer)
        del row["name"]
        if row not in rows:
            rows.append(row)
        order.append(rows.index(row))
    fields = plain(dataclasses.replace(shape, layers=()))
    return fields | {"order": order, "rows": rows}


def plain(record: Any) -> dict[str, Any]:
    values = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if not field.init or value == field.default or value == ():
            continue
        if isinstance(value, tuple) and dataclasses.is_dataclass(value[0]):
            value = [plain(part) for part in value]
        values[field.name] = plain(value) if dataclasses.is_dataclass(value) else value
    return values


def main() -> None:
    lines = []
    for name in CONFIGS:
        lines.append(f" {json.dumps(name)}: {json.dumps(data_of(preset_shape(name)))}")
    PAGE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
