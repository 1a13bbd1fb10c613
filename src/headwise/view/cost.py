"""The price of a model in the terminal: parameters, layers, costs; variants side by side; what the rules choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwise.cost.bill import HeadPrice, LayerPrice, Price, Setting
from headwise.cost.choices import Choice, Variant

BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
DECIMAL = ("", "k", "M", "G", "T", "P", "E")


def print_price(console: Console, price: Price) -> None:
    """What `headwise cost` says without further options."""
    setting = price.setting
    side = f", source {setting.source:,}" if setting.source is not None else ""
    formats = setting.dtype + ("" if setting.cache_dtype == setting.dtype else f", cache {setting.cache_dtype}")
    _say(
        console,
        f"{price.model} ({price.family}): {len(price.layers)} layers, context {setting.context:,}{side}, "
        f"batch {setting.batch:,}, {formats}",
    )
    console.print(_parameters(price))
    for table in _layers(price):
        console.print(table)
    console.print(_costs(price))
    for note in price.notes:
        _say(console, f"note: {note}")


def _parameters(price: Price) -> Table:
    table = _table("Parameters", "part", ["number", "share"])
    total = price.parameters.total
    for part, number in price.parameters.parts.items():
        table.add_row(part, f"{number:,}", f"{number / total:.1%}" if number else "tied")
    table.add_section()
    table.add_row("total", f"{total:,}", _prefixed(total))
    table.add_row("active: what one token meets", f"{price.parameters.active:,}", _prefixed(price.parameters.active))
    return table


def _layers(price: Price, across: int = 3) -> list[Table]:
    """One column for each kind of layer, `across` of them in a table."""
    groups: dict[LayerPrice, list[str]] = {}
    for layer in price.layers:
        groups.setdefault(replace(layer, name=""), []).append(layer.name)
    kinds = list(groups.items())
    tables = []
    for start in range(0, len(kinds), across):
        some = kinds[start : start + across]
        table = _table("Layers" if not start else "Layers, continued", "", [_names(names) for _, names in some])
        rows = [_layer_rows(layer) for layer, _ in some]
        for label in dict.fromkeys(label for row in rows for label in row):
            table.add_row(label, *(row.get(label, "-") for row in rows))
        tables.append(table)
    return tables


def _names(names: list[str]) -> str:
    """L0 to L79 where they follow one another, else the first two and the last; and how many."""
    number = [int(name.rpartition("L")[2]) for name in names]
    if len(names) == 1:
        return names[0]
    if number[-1] - number[0] == len(names) - 1:
        return f"{names[0]} to {names[-1]}"
    return f"{names[0]}, {names[1]}, ... {names[-1]}: {len(names)}"


def _layer_rows(layer: LayerPrice) -> dict[str, str]:
    rows = _head_rows(layer.attention, "")
    if layer.cross:
        rows |= _head_rows(layer.cross, "cross: ")
    rows["feed-forward"] = f"{layer.feed_forward_parameters:,}"
    if layer.experts:
        rows["experts a token"] = f"{layer.experts[0]} of {layer.experts[1]}"
    rows["norms"] = f"{layer.norm_parameters:,}"
    rows["the layer"] = f"{layer.parameters:,}"
    if layer.experts:
        rows["active in it"] = f"{layer.active_parameters:,}"
    return rows


def _head_rows(heads: HeadPrice, prefix: str) -> dict[str, str]:
    widths = f"{heads.head_dim}" if heads.head_dim == heads.value_dim else f"{heads.head_dim}, values {heads.value_dim}"
    rows = {
        "query heads": f"{heads.n_heads}",
        "key/value heads": f"{heads.n_kv_heads}" if heads.latent is None else f"latent of {heads.latent}",
        "head width": widths,
        "a query head": f"{heads.query_head_parameters:,}",
        "a key/value head": f"{heads.kv_head_parameters:,}",
        "of no head": f"{heads.shared_parameters:,}" if heads.shared_parameters else "-",
        "attention": f"{heads.parameters:,}",
        "cache bytes a token": f"{heads.cache_bytes_per_token:,}" if heads.cache_bytes_per_token else "none",
    }
    if heads.window is not None:
        rows["window"] = f"{heads.window:,} tokens"
    if heads.sink:
        rows["sink"] = "1 logit a head"
    return {prefix + label: value for label, value in rows.items()}


def _costs(price: Price) -> Table:
    table = _table("Costs", "", ["", ""])
    table.show_header = False
    for label, exact, short in _cost_rows(price):
        table.add_row(label, exact, short)
    return table


def _cost_rows(price: Price) -> list[tuple[str, str, str]]:
    cache, prefill, decode, memory = price.cache, price.prefill, price.decode, price.memory
    rows = [_bytes("weights", price.weight_bytes)]
    if decode is not None:
        rows.append(_bytes("cache of one token", cache.bytes_per_token))
        if cache.bytes_per_token_beyond_windows != cache.bytes_per_token:
            rows.append(_bytes("the same beyond the windows", cache.bytes_per_token_beyond_windows))
        if cache.bytes_per_source_token:
            rows.append(_bytes("cache of one source token", cache.bytes_per_source_token))
            rows.append(_bytes("cache of the texts", cache.text_bytes))
            rows.append(_bytes("cache of the sources", cache.source_bytes))
        rows.append(_bytes("cache in all", cache.total_bytes))
    rows.append(_flops("prefill" if decode else "forward pass", prefill.total_flops))
    rows.append(_flops("  of it in attention", prefill.attention_flops))
    rows.append(_flops("  if every pair is computed", prefill.dense_flops))
    if decode is not None:
        rows.append(_flops("decode, one step", decode.flops))
        if decode.expanded_flops != decode.flops:
            rows.append(_flops("  if the latent is expanded", decode.expanded_flops))
        rows.append(_bytes("weights read in a step", decode.weight_bytes))
        rows.append(_bytes("bytes moved a new token", round(decode.bytes_per_token)))
        rows.append(("arithmetic intensity", f"{decode.flops_per_byte:.3g}", "FLOPs a byte"))
        if decode.tokens_per_second is not None:
            rate = _prefixed(price.setting.bandwidth or 0)
            rows.append(("speed at most", f"{decode.tokens_per_second:,.1f}", f"tokens/s at {rate}B/s"))
    if memory is not None:
        longest = "no limit" if memory.longest_context is None else f"{memory.longest_context:,}"
        rows.append(_bytes("memory left for the cache", memory.free_bytes))
        rows.append(("longest context that fits", longest, f"tokens at batch {price.setting.batch:,}"))
        rows.append(("largest batch that fits", f"{memory.largest_batch:,}", f"texts of {price.setting.context:,}"))
    return rows


def print_variants(console: Console, setting: Setting, rows: Sequence[Variant]) -> None:
    """One line for each number of key/value heads; the model as it is carries a mark."""
    _say(console, "")
    headings = ["parameters", "cache/token", "cache in all", "moved/token"]
    headings += ["tokens/s"] if setting.bandwidth is not None else []
    headings += ["longest"] if setting.gpu_memory is not None else []
    table = _table(f"Variants at context {setting.context:,}, batch {setting.batch:,}", "", headings)
    for row in rows:
        cells = [_prefixed(row.parameters), _binary(row.cache_bytes_per_token), _binary(row.cache_bytes)]
        cells.append(_binary(round(row.bytes_per_token)))
        cells += [f"{row.tokens_per_second:,.1f}"] if row.tokens_per_second is not None else []
        if setting.gpu_memory is not None:
            longest = "no limit" if row.longest_context is None else f"{row.longest_context:,}"
            cells.append(longest if row.fits else f"only {longest}")
        table.add_row(f"{row.name} *" if row.present else row.name, *cells)
    console.print(table)
    _say(console, "* the model as it is. Fewer key/value heads cost quality that no formula gives: measure it.")


def print_choice(console: Console, choice: Choice) -> None:
    """Each rule with its arithmetic, and what follows for the cache."""
    _say(console, "")
    _say(console, "Rules of thumb, not measurements:")
    for rule in choice.rules:
        kept = rule.present == rule.advised
        verdict = f"keep {rule.present}" if kept else f"{rule.advised} instead of {rule.present}"
        _say(console, f"  {rule.name}: {verdict}. The rule: {rule.guideline}. Here {rule.arithmetic}.")
    before, after = choice.present_cache_bytes_per_token, choice.cache_bytes_per_token
    line = f"So {choice.n_heads} query heads of {choice.head_dim} on {choice.n_kv_heads} key/value heads"
    if before:
        line += f": cache {after:,} bytes a token, now {before:,}"
    if choice.fits is not None:
        line += "; weights and cache fit" if choice.fits else "; weights and cache do NOT fit"
    _say(console, line + ".")


def _table(title: str, first: str, headings: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=Text(title), title_justify="left", padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _bytes(label: str, number: int) -> tuple[str, str, str]:
    return label, f"{number:,} bytes", _binary(number)


def _flops(label: str, number: int) -> tuple[str, str, str]:
    return label, f"{number:,}", f"{_prefixed(number)}FLOP"


def _binary(number: int) -> str:
    power = min(max(number.bit_length() - 1, 0) // 10, len(BINARY) - 1)
    return f"{number / 1024**power:.4g} {BINARY[power]}"


def _prefixed(number: int) -> str:
    """1,234,567 as `1.235 M`."""
    power = min(max(len(str(number)) - 1, 0) // 3, len(DECIMAL) - 1)
    return f"{number / 1000**power:.4g} {DECIMAL[power]}"


def _say(console: Console, line: str) -> None:
    console.print(Text(line), highlight=False, markup=False)
