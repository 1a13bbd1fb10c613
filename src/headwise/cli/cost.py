"""`headwise cost`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from headwise.cli.app import Debug, Json, app, out, print_json
from headwise.errors import HeadwiseError

if TYPE_CHECKING:
    from headwise.cost import Choice, Price, Variant


def _presets() -> list[str]:
    from headwise.cost import PRESETS

    return list(PRESETS)


Model = Annotated[
    str | None,
    Argument(
        metavar="[MODEL]",
        help="A folder with config.json, such a file, or a preset, for example llama-2-70b.",
        autocompletion=_presets,
    ),
]
Context = Annotated[int | None, Option(help="Tokens in each text. Default: the longest text of the model.")]
Batch = Annotated[int, Option(help="Number of texts processed together.")]
Source = Annotated[
    int | None, Option(help="Tokens that the encoder reads, where there is one. Default: as many as --context.")
]
Dtype = Annotated[
    str | None,
    Option(help="Number format of the weights: fp32, bf16, fp16, fp8, int4, ... Default: that of the config, or bf16."),
]
CacheDtype = Annotated[str | None, Option(help="Number format of the cache. Default: as --dtype.")]
Memory = Annotated[str | None, Option(help="Memory of the device, such as 24GiB or 80GB: what fits in it?")]
Bandwidth = Annotated[str | None, Option(help="Memory bandwidth, such as 900GB/s: how fast can it be at most?")]
Variants = Annotated[
    bool, Option("--variants", help="Compare the same model as MHA, as GQA with each divisor, and as MQA.")
]
Choose = Annotated[bool, Option("--choose", help="Show which heads the usual guidelines would choose, and why.")]
AsTable = Annotated[bool, Option("--table", help="Show the models that courses compare, in one table.")]
AsList = Annotated[bool, Option("--list", help="Show all presets in the same table.")]


@app.command(epilog="Example: headwise cost llama-3-8b --context 8192 --batch 4 --gpu-memory 24GiB --variants")
def cost(
    model: Model = None,
    context: Context = None,
    batch: Batch = 1,
    source: Source = None,
    dtype: Dtype = None,
    cache_dtype: CacheDtype = None,
    gpu_memory: Memory = None,
    bandwidth: Bandwidth = None,
    variants: Variants = False,
    choose: Choose = False,
    as_table: AsTable = False,
    as_list: AsList = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Price a model: parameters, cache, FLOPs, bytes, a bound of the speed, what fits in memory.

    Reads the fields of the model's own config.json, and needs neither weights nor torch nor a network. A config that
    cannot be priced exactly is refused.
    """
    from headwise import cost as room

    if as_table or as_list:
        if model is not None or variants or choose:
            raise HeadwiseError("--table and --list show models side by side; leave MODEL, --variants and --choose out")
        _show_models(room.PRESETS if as_list else room.TABLE, dtype or "bf16", as_json)
        return
    if model is None:
        raise HeadwiseError(
            "no model is named; pass a folder, a config.json or a preset, or --table for those that courses compare"
        )
    name, shape = room.read_shape(model)
    setting = room.make_setting(shape, context, batch, source, dtype, cache_dtype, gpu_memory, bandwidth)
    price = room.price_shape(name, shape, setting)
    rows = room.variants(shape, setting) if variants else None
    _show_price(price, rows, room.choose(shape, setting) if choose else None, as_json)


def _show_models(names: Iterable[str], dtype: str, as_json: bool) -> None:
    from headwise.cost import price
    from headwise.view.cost import print_models

    prices = [price(name, dtype=dtype) for name in names]
    if as_json:
        print_json({"models": [_summary(price) for price in prices]})
    else:
        print_models(out, prices)


def _show_price(price: Price, rows: tuple[Variant, ...] | None, choice: Choice | None, as_json: bool) -> None:
    from headwise.view.cost import print_choice, print_price, print_variants

    if as_json:
        variants = None if rows is None else [asdict(row) for row in rows]
        print_json({**asdict(price), "variants": variants, "choice": None if choice is None else asdict(choice)})
        return
    print_price(out, price)
    if rows is not None:
        print_variants(out, price.setting, rows)
    if choice is not None:
        print_choice(out, choice)


def _summary(price: Price) -> dict[str, Any]:
    """A line of the table: the sizes under the names of their fields."""
    fields = ("n_heads", "head_dim", "n_kv_heads", "variant", "window")
    sizes = {field: getattr(price.layers[0].attention, field) for field in fields}
    cache = {"n_layers": price.n_layers, "cache_bytes_per_token": price.cache.bytes_per_token}
    return {"model": price.model, "d_model": price.d_model, **sizes, **cache}
