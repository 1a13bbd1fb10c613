"""`headwise share`, `prune` and `narrow`: a command is a record of its options, and making one runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from headwise.cli.app import (
    Progress,
    as_options,
    command,
    err,
    needs_torch,
    out,
    print_json,
    running_options,
    wants_json,
)
from headwise.cli.early import check_model, check_one_count, context_in, in_words, shape_of
from headwise.cli.interrupt import leaving
from headwise.errors import HeadwiseError
from headwise.files import STDIN, check_file, text_path
from headwise.folders import check_next, check_reshapable
from headwise.models.lineage import require_run
from headwise.reshape.arguments import (
    Options,
    check_kv_heads,
    check_narrowing,
    check_pruning,
    check_sharing,
    check_tokens,
    chosen_heads,
    recipe_of,
)
from headwise.reshape.workplace import STATE, check_free, check_place
from headwise.table import say

if TYPE_CHECKING:
    from headwise.cost.shape import ModelShape
    from headwise.reshape.damage import Damage
    from headwise.reshape.heal import HealPoint
    from headwise.reshape.job import Change


@dataclass(kw_only=True)
class Reshape(ABC):
    """What the three commands share: the options of the library, under the same names, and the model."""

    model: Path
    text: Path | None = None
    out: Path | None = None
    tokens: int | None = None
    documents: int | None = None
    heal: int | None = None
    force: bool = False
    resume: bool = False
    device: str = "cpu"

    @abstractmethod
    def check(self, shape: ModelShape | None) -> None:
        """Refuse what the command's own options cannot ask for, of a model of these sizes where they are known."""

    @abstractmethod
    def change(self) -> Change:
        """The change that is asked for; torch is there."""

    def __post_init__(self) -> None:
        options = cast(Options, {name: value for name, value in vars(self).items() if name in Options.__annotations__})
        with leaving(_ending(self.out)):
            self._check(options)
            with needs_torch():
                change = self.change()
            self._run(change, options)

    def _check(self, options: Options) -> None:
        """Refuse, without torch, what names, numbers and config.json tell."""
        if self.heal is not None and self.out is None:
            raise HeadwiseError("heal= makes a model to keep; pass out=, the folder to write it to")
        recipe_of(options)
        check_model(self.model)
        check_reshapable(self.model)
        if self.text is None:
            require_run(self.model)
        elif str(self.text) != STDIN:
            check_file(text_path(self.text))
        shape = shape_of(self.model)
        check_tokens(self.tokens, context_in(shape))
        if self.out is not None:
            check_place(self.model, self.out)
            check_free(self.out, self.force)
        self.check(shape)

    def _run(self, change: Change, options: Options) -> None:
        """Make the change; show the damage as soon as it is known, then the rest."""
        from headwise.reshape.job import Job, Listener
        from headwise.view.reshape import print_changed, print_damage, print_reshaped

        def point(evaluation: HealPoint, steps: int) -> None:
            loss = "" if evaluation.held_out_loss is None else f"held-out {evaluation.held_out_loss:.3f}  "
            progress("step", evaluation.step, steps, f"{loss}distance {evaluation.distance:.4f}", milestone=True)

        def damage(what: str, notes: tuple[str, ...], first: Damage) -> None:
            if not wants_json():
                print_changed(out, what, notes)
                print_damage(out, "Before any training, on held-out text", first)

        def note(line: str) -> None:
            line = as_options(line, running_options())
            err.print(line, soft_wrap=True)
            if not err.is_terminal:
                progress(line, 0, 0)  # the lines that follow tell how long it takes

        with Progress("reading the model") as progress:
            reshaped = Job(self.model, change, options, Listener(note, point, damage)).run()
        if wants_json():
            print_json("reshaped", reshaped.document())
        else:
            print_reshaped(out, reshaped)
            lines = ["nothing was written; pass --out for a model folder"]
            if reshaped.out is not None:
                compare = f"compare: headwise heads {reshaped.out} --against {reshaped.source}"
                lines = [f"verified: {reshaped.verified}", f"model: {reshaped.out}", compare]
            for line in lines:
                say(out, line)


def _ending(folder: Path | None) -> Callable[[], str]:
    """What Ctrl-C leaves of a job: a folder that is whole, a healing that waits, or nothing."""

    def written() -> int | None:
        path = None if folder is None else folder / "config.json"
        return path.stat().st_mtime_ns if path is not None and path.exists() else None

    before = written()

    def tell() -> str:
        if folder is not None and written() != before:
            return in_words("ended.out_written", folder=folder)
        waiting = folder is not None and (folder.parent / f"{folder.name}.partial" / STATE).exists()
        return in_words("ended.healing_waits" if waiting else "ended.nothing")

    return tell


# The options of a command alone are a base of it, to the right of `Reshape`: so --help shows them first.
@dataclass(kw_only=True)
class _Sharing:
    kv_heads: int
    method: str = "aligned+norm"
    groups: str = "adjacent"
    stream: bool | None = None


@command()
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
        if shape is not None:
            attention = shape.main_layers[0].attention.spec
            check_kv_heads(self.kv_heads, attention.n_heads, attention.n_kv_heads)

    def change(self) -> Change:
        from headwise.reshape.share import Sharing

        return Sharing(self.kv_heads, self.method, self.groups)


@dataclass(kw_only=True)
class _Pruning:
    heads: str | None = None
    keep: float | None = None
    by: str | None = None
    uniform: bool = False
    stream: bool | None = None


@command()
@dataclass(kw_only=True)
class Prune(Reshape, _Pruning):
    """Remove query heads from a model.

    Heads leave the weights where the format can carry what remains: as many from each layer, whole groups or evenly
    from each group. Otherwise they are zeroed, and the reason is printed. The rest is as in `headwise share`: the
    damage is measured, healed if you ask for it, and a verified folder is written.
    """

    def check(self, shape: ModelShape | None) -> None:
        check_pruning(self.heads, self.keep, self.by)
        if self.keep is not None and self.by != "role":
            check_next(self.model, "pass by='role', or heads=")
        if shape is not None and self.heads is not None:
            chosen_heads(self.heads, len(shape.main_layers), shape.main_layers[0].attention.spec.n_heads)

    def change(self) -> Change:
        from headwise.reshape.prune import Pruning

        return Pruning(self.heads, self.keep, self.by, self.uniform)


@dataclass(kw_only=True)
class _Narrowing:
    tolerance: float | None = None
    cache: float | None = None
    window: int | None = None


@command()
@dataclass(kw_only=True)
class Narrow(Reshape, _Narrowing):
    """Give layers a window: a smaller cache.

    A layer with a window keeps only the latest tokens. Layers are chosen by the loss with the windows in place; one in
    which a head finds needles keeps all. --out is a folder that stock engines load: `layer_types` and `sliding_window`
    say which layers look how far, and a Llama is written as the Qwen2 of the same function. The rest is as in
    `headwise share`.
    """

    def check(self, shape: ModelShape | None) -> None:
        check_narrowing(self.tolerance, self.cache, self.window)
        check_next(self.model, "a window is chosen by what it costs in loss; `headwise heads` says how far heads look")

    def change(self) -> Change:
        from headwise.reshape.narrow import Narrowing

        return Narrowing(self.tolerance, self.cache, self.window)
