"""The price of a model in the terminal: parameters, layers, costs; variants side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from headwise.cost import Price, Setting, Variant
from headwise.cost.price import context_text
from headwise.cost.shape import Layer
from headwise.table import DECIMAL, Cell, Table, amount, listed, scaled
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


def _print_parameters(screen: Screen, price: Price) -> None:
    """The parts of the model; one without parameters of its own is tied to another (W_U to the embedding)."""
    # `active` leaves out experts that a token is not sent to, and tables in which it reads one row.
    total = price.parameters.total
    active = price.parameters.active
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
    headings = [listed(names, 2) for names in groups.values()]
    Table(("", *headings), rows, "Layers").print(screen)


def _layer_rows(layer: Layer) -> dict[str, Cell]:
    """What is said of a layer: the label of a row, and the cell."""
    heads = layer.attention
    experts = layer.experts
    rows: dict[str, Cell] = {"kind": layer.kind}
    if heads is not None:
        # queries and keys are wider than values, or narrower
        is_even = heads.head_dim == heads.value_dim
        is_latent = heads.latent is not None
        rows |= {
            "variant": heads.variant,
            "query heads": heads.n_heads,
            "key/value heads": None if is_latent else heads.n_kv_heads,
            "numbers of a latent": heads.latent,
            "head width": heads.head_dim,
            "  of values": None if is_even else heads.value_dim,
            "parameters of a key/value head": heads.kv_head_parameters or None,
            "attention": heads.parameters,
            "window, in tokens": heads.window,
            "logits of a sink": heads.n_heads if heads.sink else None,
        }
    rows |= {
        "mixer": layer.mixer_parameters or None,
        "cache bytes per token": layer.cache_bytes_per_token or "none",
        "  of the last tokens": layer.cache_rows,
        "bytes that do not grow": layer.state_bytes or None,
        "feed-forward": layer.feed_forward_parameters,
        "experts per token": f"{experts.active} of {experts.count}"
        if experts
        else None,
        "norms": layer.norm_parameters,
        "parameters of the layer": layer.parameters,
        "active for one token": layer.active_parameters if experts else None,
    }
    return {label: cell for label, cell in rows.items() if cell is not None}


def print_variants(screen: Screen, setting: Setting, rows: Sequence[Variant]) -> None:
    """One line for each number of key/value heads; the model as it is carries a mark.

    The longest text has a column where a memory was given.
    """
    screen.say("")
    lines = []
    for row in rows:
        line = {
            "": f"{row.name} *" if row.present else row.name,
            "parameters": _decimal(row.parameters),
            "cache/token": amount(row.cache_bytes_per_token),
            "cache in all": amount(row.cache_bytes),
            "moved/token": amount(round(row.bytes_per_token)),
        }
        if setting.memory is not None:
            # "only" that long, where what was asked for does not fit
            longest = context_text(row.longest_context)
            line["longest"] = longest if row.fits else f"only {longest}"
        lines.append(line)
    table = replace(
        Table.of(lines),
        title=f"Variants at context {setting.context:,}, batch {setting.batch:,}",
        note="* the model as it is. Fewer key/value heads cost quality that no formula gives: measure it.",
    )
    table.print(screen)
