"""`headwise share` and `prune`: a command is a record of its options, and making one runs it.

Both have a model and seven options in common, and the same work around the change that each makes. As a dataclass
a command inherits both. The parameters of its constructor are its options, so typer takes the class as it takes a
function: it calls the class with the options, and `__post_init__` of `Reshape`, which runs once they are set, does the
work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, cast

from typer import Option

from headwise.cli.app import (
    File,
    Model,
    SomeCount,
    command,
    in_options,
    needs_torch,
    print_json,
    wants_json,
)
from headwise.cli.early import check_model, check_one_count, context_in, shape_of
from headwise.errors import HeadwiseError
from headwise.families import check_next, check_reshapable, require_run
from headwise.files import STDIN, read_text, text_path
from headwise.reshape.arguments import (
    Options,
    check_free,
    check_kv_heads,
    check_place,
    check_pruning,
    check_sharing,
    check_tokens,
    chosen_heads,
    recipe_of,
)
from headwise.table import Cell, Table
from headwise.view import Progress, Screen, err, screen

if TYPE_CHECKING:
    from headwise.cost.shape import ModelShape
    from headwise.reshape.heal import Damage, HealPoint, Pair
    from headwise.reshape.job import Change, Reshaped

SHOWN_LAYERS = 12  # layers whose entropy has a row; how many more there are is said below them


@dataclass(kw_only=True)
class Reshape(ABC):
    """What the three commands have in common: the model, and options of the library under the same names."""

    model: Model
    text: File = None
    out: File = None  # a folder, or none: then the damage is shown and nothing written
    tokens: int | None = None
    documents: SomeCount = None
    heal: int | None = None
    force: Annotated[bool, Option("--force")] = False
    device: str = "cpu"

    @abstractmethod
    def check(self, shape: ModelShape | None) -> None:
        """Refuse what the command's own options cannot ask for, of a model of these sizes where they are known."""

    @abstractmethod
    def change(self) -> Change:
        """The change that is asked for; torch is there."""

    def __post_init__(self) -> None:
        """Run the command: refuse what can be refused without torch, then load torch, then work."""
        # What the library takes in both, by the names of its arguments. Any other option goes into the change.
        options = cast(
            Options,
            {name: value for name, value in vars(self).items() if name in Options.__annotations__},
        )
        self._check(options)
        with needs_torch():  # `change` imports it
            change = self.change()
        self._run(change, options)

    def _check(self, options: Options) -> None:
        """Refuse, without torch, what names, numbers and config.json tell."""
        if self.heal is not None and self.out is None:
            raise HeadwiseError("heal= makes a model to keep; pass out=, the folder to write it to")
        # this and all that follow raise HeadwiseError; what they give is not needed here
        recipe_of(options)
        check_model(self.model)
        check_reshapable(self.model)
        if self.text is None:
            require_run(self.model)  # only a run knows a text of its own
        elif str(self.text) != STDIN:  # which can be read only once
            read_text(text_path(self.text))
        shape = shape_of(self.model)
        check_tokens(self.tokens, context_in(shape))
        if self.out is not None:
            check_place(self.model, self.out)
            check_free(self.out, self.force)
        self.check(shape)

    def _run(self, change: Change, options: Options) -> None:
        """Make the change; show the damage as soon as it is known, then the rest."""
        from headwise.reshape.job import Job, Listener

        def point(evaluation: HealPoint, steps: int) -> None:  # of so many steps of healing
            line = f"distance {evaluation.distance:.4f}"
            if evaluation.held_out_loss is not None:
                line = f"held-out {evaluation.held_out_loss:.3f}  {line}"
            progress("step", evaluation.step, steps, line, milestone=True)

        def damage(what: str, notes: tuple[str, ...], first: Damage) -> None:
            if not wants_json():
                for line in (what, *notes):
                    screen.say(line)
                print_damage(screen, "Before any training, on held-out text", first)

        def note(line: str) -> None:
            text = in_options(line)
            err.print(text)
            if not err.is_terminal:
                # plain lines that follow repeat it, without a count (0 of 0), with the seconds
                progress(text, 0, 0)

        with Progress("reading the model") as progress:
            reshaped = Job(self.model, change, options, Listener(note, point, damage)).run()
        if wants_json():
            print_json("reshaped", reshaped.document())
            return
        print_reshaped(screen, reshaped)
        if reshaped.out is None:
            screen.say("nothing was written; pass --out for a model folder")
            return
        screen.say(f"verified: {reshaped.verified}")
        screen.say(f"model: {reshaped.out}")


# Options that only one command has are a base class of their own, because --help shows options in the order of the
# fields, and these are to come first. A dataclass takes the fields of its last base first and its own last: `Reshape`
# therefore comes first in `class Share(Reshape, _Sharing)`. All are keywords, so that `model`, which has no default,
# may follow options that have one.
@dataclass(kw_only=True)
class _Sharing:
    kv_heads: Annotated[int, Option()]
    method: str = "aligned+norm"
    groups: str = "adjacent"


@command("share")
@dataclass(kw_only=True)
class Share(Reshape, _Sharing):
    """Let query heads share key/value heads: a smaller cache.

    MODEL is a run of headwise or a folder of Llama, Mistral, Qwen2 or Qwen3. The damage is measured before any
    training. With --heal the model then learns to answer as it did before. A fresh process verifies --out before it
    appears. The last tenth of TEXT is held out to measure on.
    """

    def check(self, shape: ModelShape | None) -> None:
        check_sharing(self.method, self.groups)
        check_one_count(self.model)
        if shape is not None:  # else the library tells once it has the model
            attention = shape.layers[0].attention
            check_kv_heads(self.kv_heads, attention.n_heads, attention.n_kv_heads)

    def change(self) -> Change:
        from headwise.reshape.share import Sharing

        return Sharing(self.kv_heads, self.method, self.groups)


@dataclass(kw_only=True)
class _Pruning:
    heads: str | None = None
    keep: float | None = None
    by: str | None = None
    uniform: Annotated[bool, Option("--uniform")] = False


@command("prune")
@dataclass(kw_only=True)
class Prune(Reshape, _Pruning):
    """Remove query heads from a model.

    Heads leave the weights where the format can carry what remains: as many from each layer, whole groups or evenly
    from each group. Otherwise they are zeroed, and the reason is printed. The rest is as in `headwise share`: the
    damage is measured, healed if you ask for it, and a verified folder is written.
    """

    def check(self, shape: ModelShape | None) -> None:
        check_pruning(self.heads, self.keep, self.by)
        # Importance and ablation need the loss of a next token; a model without one is told that --by role does not.
        if self.keep is not None and self.by != "role":
            check_next(self.model, "pass by='role', or heads=")
        # the first layer has as many heads as any other
        if shape is not None and self.heads is not None:
            chosen_heads(self.heads, len(shape.layers), shape.layers[0].attention.n_heads)

    def change(self) -> Change:
        from headwise.reshape.prune import Pruning

        return Pruning(self.heads, self.keep, self.by, self.uniform)


# What is printed: the damage as a table, the recovery curve, what was won.


def print_damage(screen: Screen, title: str, damage: Damage) -> None:
    """A row for each number, before and after."""
    Table(("", "before", "after", "change"), rows_of(damage), title).print(screen)


def rows_of(damage: Damage) -> list[tuple[str, str, str, str]]:
    """Name, before, after and change of each number, as text; what was not measured is no row."""
    rows = []
    if damage.loss is not None:
        rows.append(("loss, nats per token", *_numbers(damage.loss, 4)))
    if damage.kl is not None:
        rows.append(("KL to the parent, nats per token", "", f"{damage.kl:.4f}", ""))
    if damage.error is not None:
        rows.append(("error of the hidden states, relative", "", f"{damage.error:.4f}", ""))
    for layer, pair in enumerate(damage.entropy[:SHOWN_LAYERS]):
        rows.append((f"entropy of layer {layer}, nats, heads of both", *_numbers(pair, 3)))
    if len(damage.entropy) > SHOWN_LAYERS:
        rows.append(
            (
                f"... and {len(damage.entropy) - SHOWN_LAYERS} more layers (all in the JSON)",
                "",
                "",
                "",
            )
        )
    rows.append(("cache, bytes per token", *_counts(damage.cache_bytes)))
    rows.append(("parameters", *_counts(damage.parameters)))
    speed = damage.tokens_per_second
    if speed is not None:
        before, after, factor = _counts(speed)
        name = f"decoding, tokens/s at {damage.decode_context:,} cached"
        # Where the ranges of the two overlap, a factor would say more than was measured.
        rows.append((name, before, after, factor if speed.told_apart else "not told apart"))
        before, after = (
            f"{low:,.0f}-{high:,.0f}" for low, high in (speed.before_range, speed.after_range)
        )
        rows.append((f"  its range, {speed.runs} runs in turn", before, after, ""))
    return rows


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
    if reshaped.healed is not None:
        print_damage(screen, _kept(reshaped.curve), reshaped.healed)
    screen.say(f"in all: {reshaped.won}")


def _kept(curve: tuple[HealPoint, ...]) -> str:
    """The title of the damage after healing; step 0 is before the first one."""
    best = min(curve, key=lambda point: point.distance)
    return f"After healing: the weights of step {best.step:,} were the best, and are kept"


def _numbers(pair: Pair, digits: int) -> tuple[str, str, str]:
    """Before, after and difference, as text with so many decimals."""
    return (
        f"{pair.before:.{digits}f}",
        f"{pair.after:.{digits}f}",
        f"{pair.after - pair.before:+.{digits}f}",
    )


def _counts(pair: Pair) -> tuple[str, str, str]:
    """Before, after and factor, as text."""
    if not pair.before:  # no factor leads from 0
        factor = ""
    elif pair.after == pair.before:
        factor = "same"
    else:
        factor = f"x {pair.after / pair.before:.2f}"
    return f"{pair.before:,.0f}", f"{pair.after:,.0f}", factor
