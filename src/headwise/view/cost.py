"""The price of a model in the terminal: parameters, layers, costs; variants side by side; what the rules choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from headwise.cost import Choice, Price, Setting, Variant
from headwise.cost.pricing import HeadPrice, LayerPrice
from headwise.table import DECIMAL, Cell, Table, amount, scaled
from headwise.view import Screen
from headwise.words import Note, key_of, labelled

if TYPE_CHECKING:
    from headwise.models.meter import Measured

_decimal = partial(scaled, base=1000, units=DECIMAL)  # 8030261248 -> "8.03 G"


def print_price(screen: Screen, price: Price) -> None:
    """What `headwise cost` says without further options. Labels of tables are phrases of [price] of the words."""
    screen.say(price.heading)
    _print_parameters(screen, price)
    _print_layers(screen, price)
    screen.show(Table(("", "", ""), price.rows(), "Costs"), "price")
    for note in price.notes:
        screen.tell("price.note", note=note)


def print_measured(screen: Screen, price: Price, measured: Measured) -> None:
    """What it takes here, beside what it should; `conditions` says in a sentence how it was measured."""
    screen.say("")
    is_known = price.setting.bandwidth is not None  # else the bounds are of the bandwidth that was measured here
    note = Note.of("price.bounds_given" if is_known else "price.bounds_here", conditions=measured.conditions)
    screen.show(Table(("", "computed", "measured"), measured.rows(price), "Measured here", note), "price")


def print_models(screen: Screen, prices: Sequence[Price]) -> None:
    """A line for each model, with the sizes of its first layer of text."""
    columns = ("model", "width", "heads", "head width", "kv heads", "variant", "layers", "window")
    rows = []
    for price in prices:
        heads = price.layers[0].attention
        sizes = (price.d_model, heads.n_heads, heads.head_dim, heads.n_kv_heads)
        # Each window once, in the order of the layers; None stands for a layer that sees all tokens.
        windows = dict.fromkeys(layer.attention.window for layer in price.layers)
        window = ", ".join(f"{size:,}" for size in windows if size is not None)
        if window and None in windows:
            window = Note.of("price.some_layers", window=window)
        cache = price.cache.bytes_per_token or "none"  # 0 of a model that keeps nothing, such as an encoder
        rows.append([price.model, *sizes, heads.variant, price.n_layers, window, cache])
    title = Note.of("price.models", dtype=prices[0].setting.cache_dtype)  # all are priced with the same one
    screen.show(Table((*columns, "cache bytes per token"), rows, title), "price")


def _print_parameters(screen: Screen, price: Price) -> None:
    """The parts of the model; one without parameters of its own is tied to another (W_U to the embedding)."""
    # `active` leaves out experts that a token is not sent to, and tables in which it reads one row.
    total, active = price.parameters.total, price.parameters.active
    parts = price.parameters.parts.items()
    rows = [(part, count, f"{count / total:.1%}" if count else "tied") for part, count in parts]
    rows += [("total", total, _decimal(total)), ("active: what one token meets", active, _decimal(active))]
    # The last 2 rows, the total and the active ones, stand below a line.
    screen.show(Table(("part", "number", "share"), rows, "Parameters"), "price", last=2)


def _print_layers(screen: Screen, price: Price) -> None:
    """One column for each kind of layer."""
    groups: dict[LayerPrice, list[str]] = {}  # a layer without its name -> the names of all layers that equal it
    for layer in price.layers:
        groups.setdefault(replace(layer, name=""), []).append(layer.name)
    columns = list(map(_layer_rows, groups))
    # A kind may lack rows that another has, such as a window: the rows are those of all kinds, each label once, as
    # they come first.
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [[label, *(column.get(label, "-") for column in columns)] for label in labels]
    screen.show(Table(("", *map(_names, groups.values())), rows, "Layers"), "price")


def _names(names: list[str]) -> str:
    """L0 to L79 where they follow one another, a few one by one, else the first two and the last; and how many."""
    # A name is `L3`, with a prefix in a model of several stacks: its number is what follows the last L.
    (first_stack, _, first), (last_stack, _, last) = (name.rpartition("L") for name in (names[0], names[-1]))
    is_run = first_stack == last_stack and int(last) - int(first) == len(names) - 1  # none between them is missing
    if len(names) > 1 and is_run:
        return Note.of("price.from_to", first=names[0], last=names[-1])
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]}, {names[1]}, ... {names[-1]}: {len(names)}"


def _layer_rows(layer: LayerPrice) -> dict[str, Cell]:
    """What is said of a layer: the label of a row, and the cell."""
    rows = _head_rows(layer.attention)
    if layer.cross:  # its rows have the same labels, and are told apart: "cross: query heads"
        across = _head_rows(layer.cross)
        rows |= {Note.of("price.cross", what=Note.of(key_of("price", label))): across[label] for label in across}
    rows["feed-forward"] = layer.feed_forward_parameters
    if layer.experts:  # to how many of them a token is sent, of how many
        active, count = layer.experts
        rows["experts per token"] = Note.of("price.so_many_of", active=active, count=count)
    rows["norms"] = layer.norm_parameters
    rows["parameters of the layer"] = layer.parameters
    if layer.experts:
        rows["active for one token"] = layer.active_parameters
    return rows


def _head_rows(heads: HeadPrice) -> dict[str, Cell]:
    """What is said of an attention and of each of its heads."""
    width: Cell = heads.head_dim
    if heads.head_dim != heads.value_dim:  # queries and keys are wider than values, or narrower
        width = Note.of("price.two_widths", head_dim=heads.head_dim, value_dim=heads.value_dim)
    shared = heads.n_kv_heads if heads.latent is None else Note.of("price.latent", latent=heads.latent)
    rows: dict[str, Cell] = {
        "variant": heads.variant,
        "query heads": heads.n_heads,
        "key/value heads": shared,
        "head width": width,
        "parameters of a query head": heads.query_head_parameters,
        "of a key/value head": heads.kv_head_parameters,
        "shared by the heads": heads.shared_parameters or "-",
        "attention": heads.parameters,
        "cache bytes per token": heads.cache_bytes_per_token or "none",
    }
    if heads.window is not None:
        rows["window"] = Note.of("price.so_many_tokens", count=f"{heads.window:,}")
    if heads.sink:
        rows["sink"] = "1 logit per head"
    return rows


def print_variants(screen: Screen, setting: Setting, rows: Sequence[Variant]) -> None:
    """One line for each number of key/value heads; the model as it is carries a mark.

    The speed has a column where a bandwidth was given, the longest text where a memory was.
    """
    screen.say("")
    headings = ["parameters", "cache/token", "cache in all", "moved/token"]
    headings += ["tokens/s"] if setting.bandwidth is not None else []
    headings += ["longest"] if setting.gpu_memory is not None else []
    lines = []
    # The cells come in the order of the headings above, under the same conditions.
    for row in rows:
        sizes = (row.cache_bytes_per_token, row.cache_bytes, round(row.bytes_per_token))
        cells = [_decimal(row.parameters), *map(amount, sizes)]
        cells += [f"{row.tokens_per_second:,.1f}"] if row.tokens_per_second is not None else []
        if setting.gpu_memory is not None:  # "only" that long, where what was asked for does not fit
            longest = "no limit" if row.longest_context is None else f"{row.longest_context:,}"
            cells.append(longest if row.fits else Note.of("price.only", longest=longest))
        lines.append([f"{row.name} *" if row.present else row.name, *cells])
    title = Note.of("price.variants", context=f"{setting.context:,}", batch=f"{setting.batch:,}")
    screen.show(Table(("", *headings), lines, title, Note.of("price.as_it_is", star="*")), "price")


def print_choice(screen: Screen, choice: Choice) -> None:
    """Each rule with its arithmetic, and what follows for the cache."""
    screen.say("")
    screen.tell("price.rules_of_thumb")
    for rule in choice.rules:  # such as "head width: keep 128", with the numbers and the source of the rule
        key = "price.keep" if rule.present == rule.advised else "price.instead"
        verdict = Note.of(key, advised=rule.advised, present=rule.present)
        name = labelled("price", rule.name)
        screen.tell("price.rule", name=name, verdict=verdict, arithmetic=rule.arithmetic)
        screen.tell("price.guideline", guideline=rule.guideline, source=rule.source)
    before, after = choice.present_cache_bytes_per_token, choice.cache_bytes_per_token
    line = screen.phrase("price.so", n_heads=choice.n_heads, head_dim=choice.head_dim, n_kv_heads=choice.n_kv_heads)
    if before:  # 0 of a model without a cache
        line += screen.phrase("price.cache_then", after=f"{after:,}", before=f"{before:,}")
    if choice.fits is not None:
        line += screen.phrase("price.fits" if choice.fits else "price.does_not_fit")
    screen.say(f"{line}.")
