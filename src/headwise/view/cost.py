"""The price of a model in the terminal: parameters, layers, costs; variants side by side; what the rules choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console

from headwise.cost import Choice, Price, Setting, Variant
from headwise.cost.pricing import HeadPrice, LayerPrice
from headwise.markup import BINARY, DECIMAL, scaled
from headwise.table import Cell, Table, say

if TYPE_CHECKING:
    from headwise.models.meter import Measured

_binary = partial(scaled, base=1024, units=BINARY)
_decimal = partial(scaled, base=1000, units=DECIMAL)


def print_price(console: Console, price: Price) -> None:
    """What `headwise cost` says without further options."""
    say(console, price.heading)
    _print_parameters(console, price)
    _print_layers(console, price)
    Table(("", "", ""), price.rows(), "Costs").print(console)
    for note in price.notes:
        say(console, f"note: {note}")


def print_measured(console: Console, price: Price, measured: Measured) -> None:
    """What it takes here, beside what it should."""
    say(console, "")
    bandwidth = "times one" if price.setting.bandwidth is None else "the bandwidth that was given"
    bounds = f"the bounds are by what a large matrix times many rows reaches here, and {bandwidth}"
    heading = ("", "computed", "measured")
    Table(heading, measured.rows(price), "Measured here", f"{measured.conditions}; {bounds}").print(console)


def print_models(console: Console, prices: Sequence[Price]) -> None:
    """A line for each model, with the sizes of its first layer of text."""
    columns = ("model", "width", "heads", "head width", "kv heads", "variant", "layers", "window")
    rows = []
    for price in prices:
        heads = price.layers[0].attention
        sizes = (price.d_model, heads.n_heads, heads.head_dim, heads.n_kv_heads)
        sliding = {layer.attention.window for layer in price.layers} - {None}
        all_slide = all(layer.attention.window for layer in price.layers)
        window = "".join(f"{window:,}{'' if all_slide else ', some'}" for window in sliding)
        cache = price.cache.bytes_per_token or "none"
        rows.append([price.model, *sizes, heads.variant, price.n_layers, window, cache])
    title = f"Models, cache in {prices[0].setting.cache_dtype}"
    Table((*columns, "cache bytes per token"), rows, title).print(console)


def _print_parameters(console: Console, price: Price) -> None:
    total, active = price.parameters.total, price.parameters.active
    parts = price.parameters.parts.items()
    rows = [(part, count, f"{count / total:.1%}" if count else "tied") for part, count in parts]
    rows += [("total", total, _decimal(total)), ("active: what one token meets", active, _decimal(active))]
    Table(("part", "number", "share"), rows, "Parameters").print(console, last=2)


def _print_layers(console: Console, price: Price) -> None:
    """One column for each kind of layer."""
    groups: dict[LayerPrice, list[str]] = {}
    for layer in price.layers:
        groups.setdefault(replace(layer, name=""), []).append(layer.name)
    columns = list(map(_layer_rows, groups))
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [[label, *(column.get(label, "-") for column in columns)] for label in labels]
    Table(("", *map(_names, groups.values())), rows, "Layers").print(console)


def _names(names: list[str]) -> str:
    """L0 to L79 where they follow one another, else the first two and the last; and how many."""
    if len(names) == 1:
        return names[0]
    first, last = (int(name.rpartition("L")[2]) for name in (names[0], names[-1]))
    if last - first == len(names) - 1:
        return f"{names[0]} to {names[-1]}"
    return f"{names[0]}, {names[1]}, ... {names[-1]}: {len(names)}"


def _layer_rows(layer: LayerPrice) -> dict[str, Cell]:
    rows = _head_rows(layer.attention, "")
    if layer.cross:
        rows |= _head_rows(layer.cross, "cross: ")
    rows["feed-forward"] = layer.feed_forward_parameters
    if layer.experts:
        rows["experts per token"] = f"{layer.experts[0]} of {layer.experts[1]}"
    rows["norms"] = layer.norm_parameters
    rows["parameters of the layer"] = layer.parameters
    if layer.experts:
        rows["active for one token"] = layer.active_parameters
    return rows


def _head_rows(heads: HeadPrice, prefix: str) -> dict[str, Cell]:
    has_two_widths = heads.head_dim != heads.value_dim
    rows: dict[str, Cell] = {
        "variant": heads.variant,
        "query heads": heads.n_heads,
        "key/value heads": heads.n_kv_heads if heads.latent is None else f"latent of {heads.latent}",
        "head width": f"{heads.head_dim}, values {heads.value_dim}" if has_two_widths else heads.head_dim,
        "parameters of a query head": heads.query_head_parameters,
        "of a key/value head": heads.kv_head_parameters,
        "shared by the heads": heads.shared_parameters or "-",
        "attention": heads.parameters,
        "cache bytes per token": heads.cache_bytes_per_token or "none",
    }
    if heads.window is not None:
        rows["window"] = f"{heads.window:,} tokens"
    if heads.streaming:
        rows["streaming key/value heads"] = f"{heads.streaming} of {heads.n_kv_heads}"
    if heads.sink:
        rows["sink"] = "1 logit per head"
    return {prefix + label: value for label, value in rows.items()}


def print_variants(console: Console, setting: Setting, rows: Sequence[Variant]) -> None:
    """One line for each number of key/value heads; the model as it is carries a mark."""
    say(console, "")
    headings = ["parameters", "cache/token", "cache in all", "moved/token"]
    headings += ["tokens/s"] if setting.bandwidth is not None else []
    headings += ["longest"] if setting.gpu_memory is not None else []
    lines = []
    for row in rows:
        sizes = (row.cache_bytes_per_token, row.cache_bytes, round(row.bytes_per_token))
        cells = [_decimal(row.parameters), *map(_binary, sizes)]
        cells += [f"{row.tokens_per_second:,.1f}"] if row.tokens_per_second is not None else []
        if setting.gpu_memory is not None:
            longest = "no limit" if row.longest_context is None else f"{row.longest_context:,}"
            cells.append(longest if row.fits else f"only {longest}")
        lines.append([f"{row.name} *" if row.present else row.name, *cells])
    title = f"Variants at context {setting.context:,}, batch {setting.batch:,}"
    note = "* the model as it is. Fewer key/value heads cost quality that no formula gives: measure it."
    Table(("", *headings), lines, title, note).print(console)


def print_choice(console: Console, choice: Choice) -> None:
    """Each rule with its arithmetic, and what follows for the cache."""
    say(console, "")
    say(console, "Rules of thumb, not measurements:")
    for rule in choice.rules:
        kept = rule.present == rule.advised
        verdict = f"keep {rule.present}" if kept else f"{rule.advised} instead of {rule.present}"
        say(console, f"  {rule.name}: {verdict}. {rule.arithmetic}.")
        say(console, f"    The rule: {rule.guideline}. Source: {rule.source}.")
    before, after = choice.present_cache_bytes_per_token, choice.cache_bytes_per_token
    line = f"So {choice.n_heads} query heads of {choice.head_dim} on {choice.n_kv_heads} key/value heads"
    if before:
        line += f": cache {after:,} bytes per token, now {before:,}"
    if choice.fits is not None:
        line += "; weights and cache fit" if choice.fits else "; weights and cache do NOT fit"
    say(console, line + ".")
