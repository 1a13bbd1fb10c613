"""The price of a model in the terminal: parameters, layers, costs; variants side by side; what the rules choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rich.console import Console

from headwise.cost import Choice, Price, Setting, Variant
from headwise.cost.measured import Measured
from headwise.cost.pricing import HeadPrice, LayerPrice
from headwise.markup import BINARY, DECIMAL, scaled
from headwise.view.tables import print_table, say

_binary = partial(scaled, base=1024, units=BINARY)
_decimal = partial(scaled, base=1000, units=DECIMAL)


def print_price(console: Console, price: Price) -> None:
    """What `headwise cost` says without further options."""
    say(console, price.heading)
    _print_parameters(console, price)
    _print_layers(console, price)
    print_table(console, "Costs", ("", "", ""), price.rows())
    for note in price.notes:
        say(console, f"note: {note}")


def print_measured(console: Console, price: Price, measured: Measured) -> None:
    """What it takes here, beside what it should."""
    say(console, "")
    print_table(console, "Measured here", ("", "computed", "measured"), measured.rows(price))
    bandwidth = "times one" if price.setting.bandwidth is None else "the bandwidth that was given"
    say(
        console,
        f"{measured.conditions}; the bounds are by what a large matrix times many rows reaches here, and {bandwidth}",
    )


def print_models(console: Console, prices: Sequence[Price]) -> None:
    """A line for each model, with the sizes of its first layer of text."""
    columns = ("model", "width", "heads", "head width", "kv heads", "variant", "layers", "window")
    rows = []
    for price in prices:
        heads = price.layers[0].attention
        sizes = (price.d_model, heads.n_heads, heads.head_dim, heads.n_kv_heads)
        cache = f"{price.cache.bytes_per_token:,}" if price.cache.bytes_per_token else "none"
        sliding = {layer.attention.window for layer in price.layers} - {None}
        all_slide = all(layer.attention.window for layer in price.layers)
        window = "".join(f"{window:,}{'' if all_slide else ', some'}" for window in sliding)
        rows.append([price.model, *(f"{size:,}" for size in sizes), heads.variant, str(price.n_layers), window, cache])
    title = f"Models, cache in {prices[0].setting.cache_dtype}"
    print_table(console, title, (*columns, "cache bytes per token"), rows)


def _print_parameters(console: Console, price: Price) -> None:
    total, active = price.parameters.total, price.parameters.active
    rows = [
        (part, f"{count:,}", f"{count / total:.1%}" if count else "tied")
        for part, count in price.parameters.parts.items()
    ]
    rows.append(("total", f"{total:,}", _decimal(total)))
    rows.append(("active: what one token meets", f"{active:,}", _decimal(active)))
    print_table(console, "Parameters", ("part", "number", "share"), rows, last=2)


def _print_layers(console: Console, price: Price) -> None:
    """One column for each kind of layer."""
    groups: dict[LayerPrice, list[str]] = {}
    for layer in price.layers:
        groups.setdefault(replace(layer, name=""), []).append(layer.name)
    columns = list(map(_layer_rows, groups))
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [[label, *(column.get(label, "-") for column in columns)] for label in labels]
    print_table(console, "Layers", ("", *map(_names, groups.values())), rows)


def _names(names: list[str]) -> str:
    """L0 to L79 where they follow one another, else the first two and the last; and how many."""
    if len(names) == 1:
        return names[0]
    first, last = (int(name.rpartition("L")[2]) for name in (names[0], names[-1]))
    if last - first == len(names) - 1:
        return f"{names[0]} to {names[-1]}"
    return f"{names[0]}, {names[1]}, ... {names[-1]}: {len(names)}"


def _layer_rows(layer: LayerPrice) -> dict[str, str]:
    rows = _head_rows(layer.attention, "")
    if layer.cross:
        rows |= _head_rows(layer.cross, "cross: ")
    rows["feed-forward"] = f"{layer.feed_forward_parameters:,}"
    if layer.experts:
        rows["experts per token"] = f"{layer.experts[0]} of {layer.experts[1]}"
    rows["norms"] = f"{layer.norm_parameters:,}"
    rows["parameters of the layer"] = f"{layer.parameters:,}"
    if layer.experts:
        rows["active for one token"] = f"{layer.active_parameters:,}"
    return rows


def _head_rows(heads: HeadPrice, prefix: str) -> dict[str, str]:
    widths = f"{heads.head_dim}" if heads.head_dim == heads.value_dim else f"{heads.head_dim}, values {heads.value_dim}"
    rows = {
        "variant": heads.variant,
        "query heads": f"{heads.n_heads}",
        "key/value heads": f"{heads.n_kv_heads}" if heads.latent is None else f"latent of {heads.latent}",
        "head width": widths,
        "parameters of a query head": f"{heads.query_head_parameters:,}",
        "of a key/value head": f"{heads.kv_head_parameters:,}",
        "shared by the heads": f"{heads.shared_parameters:,}" if heads.shared_parameters else "-",
        "attention": f"{heads.parameters:,}",
        "cache bytes per token": f"{heads.cache_bytes_per_token:,}" if heads.cache_bytes_per_token else "none",
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
    print_table(console, title, ("", *headings), lines)
    say(console, "* the model as it is. Fewer key/value heads cost quality that no formula gives: measure it.")


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
