"""`headwise share`, `prune` and `cost`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from headwise.cli.app import (
    File,
    Model,
    command,
    in_options,
    needs_torch,
    print_json,
    wants_json,
)
from headwise.errors import HeadwiseError
from headwise.table import Cell, Table
from headwise.view import Progress, Screen, err, screen

if TYPE_CHECKING:
    from headwise.reshape.heal import Damage, HealPoint
    from headwise.reshape.job import Change, Reshaped


@command()
def share(
    model: Model,
    kv_heads: Annotated[int, Option()],
    groups: str = "adjacent",
    text: File = None,
    out: File = None,  # a folder, or none: then the damage is shown and nothing written
    heal: int | None = None,
    device: str = "cpu",
    dtype: str | None = None,
) -> None:
    """Let query heads share key/value heads: a smaller cache.

    MODEL is a run of headwise or a folder of Llama, Mistral, Qwen2 or Qwen3. The damage is measured before any
    training. With --heal the model then learns to answer as it did before. --out is read back before it appears. The
    last tenth of TEXT is held out to measure on.

    Args:
        kv_heads: Key/value heads of each layer: a divisor of today's number, and smaller.
        groups: adjacent: neighbours share; best: heads that an estimate finds cheap to share.

    Example: headwise share runs/book --kv-heads 2 --text book.txt --groups best --heal 200 --out runs/book-2kv
    """
    with needs_torch():
        from headwise.reshape.share import Sharing
    _reshape(
        model,
        Sharing(kv_heads, groups),
        text=text,
        out=out,
        heal=heal,
        device=device,
        dtype=dtype,
    )


@command()
def prune(
    model: Model,
    heads: str | None = None,
    keep: float | None = None,
    uniform: Annotated[bool, Option("--uniform")] = False,
    text: File = None,
    out: File = None,
    heal: int | None = None,
    device: str = "cpu",
    dtype: str | None = None,
) -> None:
    """Remove query heads from a model.

    Heads leave the weights where the format can carry what remains: as many from each layer, whole groups or evenly
    from each group. Otherwise they are zeroed, and the reason is printed. The rest is as in `headwise share`: the
    damage is measured, healed if you ask for it, and a verified folder is written.

    Args:
        heads: Heads that go, as L0.H1,L3.H5.
        keep: Share of the heads that stays, below 1; those of least importance, by gradients, go.
        uniform: As many heads from each layer, so that they leave the weights.

    Example: headwise prune runs/book --keep 0.5 --uniform --text book.txt --heal 200 --out runs/less
    """
    with needs_torch():
        from headwise.reshape.prune import Pruning
    _reshape(
        model,
        Pruning(heads, keep, uniform),
        text=text,
        out=out,
        heal=heal,
        device=device,
        dtype=dtype,
    )


def _reshape(model: Any, change: Change, **options: Any) -> None:
    """Make the change; show the damage as soon as it is known, then the rest. The options are those of `reshape`."""
    from headwise.reshape.heal import HealPoint
    from headwise.reshape.job import reshape

    if options["heal"] is not None and options["out"] is None:
        raise HeadwiseError(
            "heal= makes a model to keep; pass out=, the folder to write it to"
        )

    def hear(event: str | HealPoint | Reshaped) -> None:
        if isinstance(event, str):
            line = in_options(event)
            err.print(line)
            if not err.is_terminal:
                # plain lines that follow repeat it, without a count (0 of 0), with the seconds
                progress(line, 0, 0)
        elif isinstance(event, HealPoint):
            line = f"distance {event.distance:.4f}"
            if event.held_out_loss is not None:
                line = f"held-out {event.held_out_loss:.3f}  {line}"
            progress("step", event.step, options["heal"], line, milestone=True)
        elif not wants_json():
            for line in (event.what, *event.notes):
                screen.say(line)
            title = "Before any training, on held-out text"
            print_damage(screen, title, event.damage)

    with Progress("reading the model") as progress:
        reshaped = reshape(model, change, hear, **options)
    if wants_json():
        print_json("reshaped", reshaped.document())
        return
    print_reshaped(screen, reshaped)
    if reshaped.out is None:
        screen.say("nothing was written; pass --out for a model folder")
        return
    screen.say(f"verified: {reshaped.verified}")
    screen.say(f"model: {reshaped.out}")


# What is printed: the damage as a table, the recovery curve, what was won.


def print_damage(screen: Screen, title: str, damage: Damage) -> None:
    """A row for each number, before and after."""
    Table(("", "before", "after", "change"), damage.rows, title).print(screen)


def print_curve(screen: Screen, curve: tuple[HealPoint, ...]) -> None:
    """The distance to the parent at each evaluation of a healing."""
    rows: list[list[Cell]] = []
    for point in curve:
        loss = "-" if point.held_out_loss is None else f"{point.held_out_loss:.4f}"
        rows.append([point.step, point.tokens, loss, f"{point.distance:.4f}"])
    title = "Healing: distance to the parent, on other held-out text than the tables"
    Table(("step", "tokens", "held-out loss", "distance"), rows, title).print(screen)


def print_reshaped(screen: Screen, reshaped: Reshaped) -> None:
    """What comes after the first damage: healing, and what was won."""
    if reshaped.curve:
        print_curve(screen, reshaped.curve)
    if reshaped.healed:
        # step 0 is before the first one
        best = min(reshaped.curve, key=lambda point: point.distance)
        title = f"After healing: the weights of step {best.step:,} were the best, and are kept"
        print_damage(screen, title, reshaped.healed)


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
