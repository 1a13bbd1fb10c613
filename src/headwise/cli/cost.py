"""`headwise cost`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from headwise.cli.app import Progress, command, err, needs_torch, print_json, screen, wants_json
from headwise.errors import HeadwiseError

if TYPE_CHECKING:
    from headwise.cost import Choice, Price, Variant
    from headwise.models.meter import Measured

MEASURED = 512  # tokens at most of a text that is measured, where --context does not say: a round choice


def _presets() -> list[str]:  # what a shell offers to complete MODEL
    from headwise.cost import PRESETS

    return list(PRESETS)


@command()
def cost(
    model: Annotated[str | None, Argument(metavar="[MODEL]", autocompletion=_presets)] = None,
    context: int | None = None,
    batch: int = 1,
    source: int | None = None,
    dtype: str | None = None,
    cache_dtype: str | None = None,
    gpu_memory: str | None = None,
    bandwidth: str | None = None,
    variants: bool = False,
    choose: bool = False,
    measure: bool = False,
    stream: bool | None = None,
    device: str = "cpu",
) -> None:
    """Price a model: its parameters, cache, FLOPs and bytes.

    With a bound of the speed, and what fits in memory. Reads the fields of the model's own config.json, and needs
    neither weights nor torch nor a network. A config that cannot be priced exactly is refused. Without MODEL a table of
    the models that courses compare.
    """  # its options: [cost] in commands.toml
    from headwise import cost as room  # whose name this function has
    from headwise.models.lineage import config_of

    if model is None:
        # All options but --dtype are of one model, and refused where they are not at their defaults.
        of_one = (context, source, cache_dtype, gpu_memory, bandwidth, stream)
        if of_one != (None,) * len(of_one) or variants or choose or measure or device != "cpu" or batch != 1:
            raise HeadwiseError(
                "no model is named; pass a folder, a config.json, a name on the hub or a preset, or no "
                "options, for a table of those that courses compare"
            )
        _show_models(room.TABLE, dtype or "bf16")  # one format for all, whatever a preset names: so caches compare
        return
    # The user's own text (a folder, a file, a preset); of a name on the hub a folder; of a GGUF file a dict.
    config = config_of(model)
    name, shape = room.read_shape(config)
    if config is not model:  # the folder of a name on the hub is called by a number, and a dict has no name
        name = model if isinstance(config, Path) else Path(model).stem
    if isinstance(config, dict):
        shape = shape.noted("a GGUF file: all weights are priced in one number format, however the file packs them")
    if measure:
        # `positions`: the longest text of the model, None where it has no bound.
        context = min(MEASURED, shape.positions or MEASURED) if context is None else context
    elif stream is not None or device != "cpu":
        raise HeadwiseError("--stream and --device are about running the model; pass --measure with them")
    setting = room.make_setting(shape, context, batch, source, dtype, cache_dtype, gpu_memory, bandwidth)
    price = room.price_shape(name, shape, setting)
    rows = room.variants(shape, setting) if variants else None
    measured = _measured(model, price, stream, device) if measure else None
    _show_price(price, rows, room.choose(shape, setting) if choose else None, measured)


def _measured(model: str, price: Price, stream: bool | None, device: str) -> Measured:
    """Run the model at the setting of its price: batch, context, number formats. `stream` None: as memory allows."""
    with needs_torch():
        from headwise.models import meter
        from headwise.models.stream import stream_of
    with Progress("reading the weights") as progress:
        opened = meter.open_priced(Path(model), price, stream, device)
        if (streamed := stream_of(opened)) is not None:  # read layer by layer: slow, so that it says how long
            setting = price.setting
            err.say(streamed.forecast(setting.batch * setting.context, setting.context))
        return meter.measured(opened, price, progress)


def _show_models(names: Iterable[str], dtype: str) -> None:
    from headwise.cost import price
    from headwise.view.cost import print_models

    prices = [price(name, dtype=dtype) for name in names]
    if not wants_json():
        print_models(screen, prices)
        return
    models = []
    for each in prices:
        heads = each.layers[0].attention  # in each of these presets all layers are alike
        sizes = {field: getattr(heads, field) for field in ("n_heads", "head_dim", "n_kv_heads", "variant", "window")}
        cache = {"n_layers": each.n_layers, "cache_bytes_per_token": each.cache.bytes_per_token}
        models.append({"model": each.model, "d_model": each.d_model, **sizes, **cache})
    print_json("models", {"models": models})


def _show_price(
    price: Price, rows: tuple[Variant, ...] | None, choice: Choice | None, measured: Measured | None
) -> None:
    from headwise.view.cost import print_choice, print_measured, print_price, print_variants

    if wants_json():
        print_json("cost", {**vars(price), "variants": rows, "choice": choice, "measured": measured})
        return
    print_price(screen, price)
    if measured is not None:
        print_measured(screen, price, measured)
    if rows is not None:
        print_variants(screen, price.setting, rows)
    if choice is not None:
        print_choice(screen, choice)
