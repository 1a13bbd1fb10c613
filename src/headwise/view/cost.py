"""The price of a model in the terminal: parameters, layers, costs; variants side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from headwise.cost import Price, Setting, Variant
from headwise.cost.price import context_text
from headwise.cost.shape import Heads, Layer
from headwise.table import DECIMAL, Cell, Table, amount, scaled
from headwise.view import Screen

_decimal = partial(scaled, base=1000, units=DECIMAL)  # 8030261248 -> "8.03 G"


def print_price(screen: Screen, price: Price) -> None:
    """What `headwise cost` says without further options."""
    screen.say(price.heading)
    if price.way == "built":
        screen.say("priced on the model, built by transformers without weights")
    _print_parameters(screen, price)
    _print_layers(screen, price)
    Table(("", "", ""), price.rows(), "Costs").print(screen)
    for note in price.notes:
        screen.say(f"note: {note}")


def print_models(screen: Screen, prices: Sequence[Price]) -> None:
    """A line for each model, with the sizes of its first layer with heads."""
    columns = (
        "model",
        "width",
        "heads",
        "head width",
        "kv heads",
        "variant",
        "layers",
        "window",
    )
    rows = []
    for price in prices:
        heads = price.first_heads
        assert heads is not None
        sizes = (price.d_model, heads.n_heads, heads.head_dim, heads.n_kv_heads)
        window = heads.window or ""
        # 0 of a model that keeps nothing, such as an encoder
        cache = price.cache.bytes_per_token or "none"
        rows.append([price.model, *sizes, heads.variant, price.n_layers, window, cache])
    title = f"Models, cache in {prices[0].setting.kv_dtype}"  # all are priced with the same one
    Table((*columns, "cache bytes per token"), rows, title).print(screen)


def _print_parameters(screen: Screen, price: Price) -> None:
    """The parts of the model; one without parameters of its own is tied to another (W_U to the embedding)."""
    # `active` leaves out experts that a token is not sent to, and tables in which it reads one row.
    total, active = price.parameters.total, price.parameters.active
    parts = price.parameters.parts.items()
    rows = [
        (part, count, f"{count / total:.1%}" if count else "tied")
        for part, count in parts
    ]
    rows += [
        ("total", total, _decimal(total)),
        ("active: what one token meets", active, _decimal(active)),
    ]
    # The last 2 rows, the total and the active ones, stand below a line.
    Table(("part", "number", "share"), rows, "Parameters").print(screen, last=2)


def _print_layers(screen: Screen, price: Price) -> None:
    """One column for each kind of layer."""
    # a layer without its name -> the names of all layers that equal it
    groups: dict[Layer, list[str]] = {}
    for layer in price.layers:
        groups.setdefault(replace(layer, name=""), []).append(layer.name)
    columns = list(map(_layer_rows, groups))
    # A kind may lack rows that another has, such as a window: the rows are those of all kinds, each label once, as
    # they come first.
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [
        [label, *(column.get(label, "-") for column in columns)] for label in labels
    ]
    Table(("", *map(_names, groups.values())), rows, "Layers").print(screen)


def _names(names: list[str]) -> str:
    """L0 to L79 where they follow one another, a few one by one, else the first two and the last; and how many."""
    # none between them is missing
    is_run = int(names[-1][1:]) - int(names[0][1:]) == len(names) - 1
    if len(names) > 1 and is_run:
        return f"{names[0]} to {names[-1]}"
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]}, {names[1]}, ... {names[-1]}: {len(names)}"


def _layer_rows(layer: Layer) -> dict[str, Cell]:
    """What is said of a layer: the label of a row, and the cell."""
    rows: dict[str, Cell] = {"kind": layer.kind}
    if layer.attention is not None:
        rows |= _head_rows(layer.attention)
    if layer.mixer_parameters:
        rows["mixer"] = layer.mixer_parameters
    rows["cache bytes per token"] = layer.cache_bytes_per_token or "none"
    if layer.cache_rows is not None:
        rows["  of the last tokens"] = layer.cache_rows
    if layer.state_bytes:
        rows["bytes that do not grow"] = layer.state_bytes
    rows["feed-forward"] = layer.feed_forward_parameters
    if layer.experts:  # to how many of them a token is sent, of how many
        experts = f"{layer.experts.active} of {layer.experts.count}"
        rows["experts per token"] = experts
    rows["norms"] = layer.norm_parameters
    rows["parameters of the layer"] = layer.parameters
    if layer.experts:
        rows["active for one token"] = layer.active_parameters
    return rows


def _head_rows(heads: Heads) -> dict[str, Cell]:
    """What is said of an attention and of each of its heads."""
    width: Cell = heads.head_dim
    # queries and keys are wider than values, or narrower
    if heads.head_dim != heads.value_dim:
        width = f"{heads.head_dim}, values {heads.value_dim}"
    shared = heads.n_kv_heads if heads.latent is None else f"latent of {heads.latent}"
    rows: dict[str, Cell] = {
        "variant": heads.variant,
        "query heads": heads.n_heads,
        "key/value heads": shared,
        "head width": width,
        "parameters of a key/value head": heads.kv_head_parameters or "-",
        "attention": heads.parameters,
    }
    if heads.window is not None:
        rows["window"] = f"{heads.window:,} tokens"
    if heads.sink:
        rows["sink"] = "1 logit per head"
    return rows


def print_variants(screen: Screen, setting: Setting, rows: Sequence[Variant]) -> None:
    """One line for each number of key/value heads; the model as it is carries a mark.

    The longest text has a column where a memory was given.
    """
    screen.say("")
    headings = ["parameters", "cache/token", "cache in all", "moved/token"]
    headings += ["longest"] if setting.memory is not None else []
    lines = []
    # The cells come in the order of the headings above, under the same conditions.
    for row in rows:
        sizes = (row.cache_bytes_per_token, row.cache_bytes, round(row.bytes_per_token))
        cells = [_decimal(row.parameters), *map(amount, sizes)]
        # "only" that long, where what was asked for does not fit
        if setting.memory is not None:
            longest = context_text(row.longest_context)
            cells.append(longest if row.fits else f"only {longest}")
        lines.append([f"{row.name} *" if row.present else row.name, *cells])
    title = f"Variants at context {setting.context:,}, batch {setting.batch:,}"
    Table(
        ("", *headings),
        lines,
        title,
        "* the model as it is. Fewer key/value heads cost quality that no formula gives: measure it.",
    ).print(screen)
