"""`headwise cost`."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from headwise.cli.app import command, print_json, wants_json
from headwise.errors import HeadwiseError
from headwise.table import Table
from headwise.view import screen


@command()
def cost(
    model: Annotated[str | None, Argument(metavar="[MODEL]")] = None,
    context: int | None = None,
    batch: int = 1,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    memory: str | None = None,
    variants: Annotated[bool, Option("--variants")] = False,
) -> None:
    """Price a model: its parameters, cache, FLOPs and bytes.

    With what fits in memory. Reads the fields of the model's own config.json, and needs neither weights nor a network;
    families that no formula describes are built without weights, by transformers. Without MODEL a table of the models
    that courses compare.

    Args:
        model: A folder with config.json, such a file, a .gguf file, a name on the hub, or a preset, for example
            llama-2-70b. Default: those that courses compare, in one table.
        context: Tokens in each text. Default: the longest text of the model.
        batch: Number of texts processed together.
        dtype: Number format of the weights: fp32, bf16, fp16, fp8, int4, ... Default: that of the config, or bf16.
        kv_dtype: Number format of the cache. Default: as --dtype.
        memory: Memory of the device, such as 24GiB or 80GB: what fits in it?
        variants: Compare the same model as MHA, as GQA with each divisor, and as MQA.

    Example: headwise cost llama-3-8b --context 8192 --batch 4 --memory 24GiB --variants
    """
    from headwise import cost as pricing  # this function has its name
    from headwise.view.cost import print_price, print_variants

    if model is None:
        # All options but --dtype are of one model, and refused where they are not at their defaults.
        if (context, kv_dtype, memory, variants, batch) != (None, None, None, False, 1):
            raise HeadwiseError(
                "no model is named; pass a folder, a config.json, a name on the hub or a preset, or no "
                "options, for a table of those that courses compare"
            )
        # one format for all, whatever a preset names: so caches compare
        _show_models(dtype or "bf16")
        return
    name, shape = pricing.shape_of(model)
    setting = pricing.make_setting(shape, context, batch, dtype, kv_dtype, memory)
    price = pricing.price_shape(name, shape, setting)
    rows = pricing.variants(shape, setting) if variants else None
    if wants_json():
        print_json("cost", {**vars(price), "variants": rows})
        return
    print_price(screen, price)
    if rows is not None:
        print_variants(screen, price.setting, rows)


def _show_models(dtype: str) -> None:
    """A line for each model of the courses, with the sizes of its first layer with heads."""
    from headwise.cost import TABLE, price

    rows = []
    for name in TABLE:
        bill = price(name, dtype=dtype)
        heads = bill.first_heads
        row = {"model": name, "d_model": bill.d_model}
        for field in ("n_heads", "head_dim", "n_kv_heads", "variant"):
            row[field] = getattr(heads, field, None)
        row |= {"n_layers": bill.n_layers, "window": getattr(heads, "window", None)}
        rows.append(row | {"cache_bytes_per_token": bill.cache.bytes_per_token})
    if wants_json():
        print_json("models", {"models": rows})
        return
    named = [{key.replace("_", " "): row[key] for key in row} for row in rows]
    Table.of(named).print(screen)
