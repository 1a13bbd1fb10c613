"""Training: batches in, weights out; and a film of where the heads look meanwhile.

The batch and the dropout of step s are drawn from a generator seeded by (seed, s). So a run that is resumed needs the
weights, the optimizers' moments and the number of the step, which are saved together in one file.
"""

from __future__ import annotations

import inspect
import json
import math
import signal
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headwise.backends.torch_ import trace
from headwise.corpus.training import HELD_OUT_TOKENS, Documents, Stream
from headwise.errors import HeadwiseError
from headwise.files import read_json, write_whole
from headwise.gpt.checkpoint import read_tensors, write_tensors
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import Recipe
from headwise.layer.layer import MultiHeadAttention
from headwise.records import Call, CurvePoint

Kind = TypeVar("Kind", bound=Optimizer)

STATE = "state.safetensors"
# Round choices. Each evaluation takes time from training, and a line takes next to none.
EVALUATIONS = 10  # per run at least, the last one at its end
LONGEST_WAIT = 500  # steps between two evaluations at most
REPORTED = 10  # steps between two reports at most
GLANCE = (
    10_000  # held-out tokens, at most, that the evaluations before the last one score
)
FRAMES = 20  # of a film, at most


@dataclass(frozen=True)
class Progress:
    """Where training stands; losses in nats per token."""

    step: int
    steps: int
    loss: float
    held_out_loss: float | None  # on the steps that are evaluated


class DivergedError(HeadwiseError):
    """A loss, gradient or weight is no number any more."""


class Stopped(KeyboardInterrupt):
    """Training was interrupted and has saved its state."""

    def __init__(self, step: int, folder: Path) -> None:
        super().__init__(
            f"stopped after step {step}, and saved; go on with resume=True out={folder}"
        )


@dataclass
class Film:
    """The weights of all heads on one line, at some of the steps of a training, in a file of its folder.

    Attributes:
        path: of the file, which has `about` and the frames, and from which a training that goes on takes them
        ids: of the line
        about: "heads", "tokens" and "steps": names of the N heads, layer by layer; the line; steps of the training

    A frame is its "step" and "maps" (N,T,T), base64 of a byte a weight, 255 times it.
    """

    path: Path
    ids: list[int]
    about: dict[str, Any]

    def see(self, model: GPT, step: int) -> None:
        """Take a frame where the step is due."""
        steps = self.about["steps"]
        # most of the first steps, where most happens, and the last
        due = {round(steps * (n / (FRAMES - 1)) ** 3) for n in range(FRAMES)}
        if step not in due:
            return
        # a training that goes on may see a step again
        seen = read_json(self.path)["frames"] if self.path.exists() else []
        frames = [frame for frame in seen if frame["step"] < step]
        maps = maps_on(model, self.ids).numpy().tobytes()
        frame = {"step": step, "maps": b64encode(maps).decode("ascii")}
        write_whole(self.path, json.dumps({**self.about, "frames": [*frames, frame]}))


@torch.no_grad()
def maps_on(model: GPT, ids: list[int]) -> Tensor:
    """The weights (N,T,T) of all heads on a text, as bytes of 255 times each."""
    maps = []

    def keep(call: Call) -> None:
        maps.append(trace(call.q, call.k, call.v, call.options).weights[0])

    training = model.training
    layers = [m for m in model.modules() if isinstance(m, MultiHeadAttention)]
    for layer in layers:
        layer.watchers.append(keep)
    model.eval()(torch.tensor([ids]))
    for layer in layers:
        layer.watchers.remove(keep)
    model.train(training)
    return (255 * torch.cat(maps)).round().byte()


def train(
    folder: Path,
    config: GPTConfig,
    recipe: Recipe,
    data: Stream | Documents,
    seed: int,
    report: Callable[[Progress], None],
    save_seconds: float = 10.0,  # what a kill loses at most, but for a long step; a round choice
    film: Film | None = None,
) -> tuple[GPT, list[CurvePoint]]:
    """Train a GPT to the end of its recipe, going on from the state in `folder` if there is one.

    Writes `state.safetensors` every `save_seconds`, on Ctrl-C and at the end. Returns the model and its evaluations.
    Raises HeadwiseError for a loss that is no number, Stopped after Ctrl-C.
    """
    torch.manual_seed(seed)  # the weights are drawn from it
    model = GPT(config)
    state = State(
        folder / STATE, dict(model.named_parameters()), make_optimizers(model, recipe)
    )
    start = state.restore()
    interval = min(max(1, recipe.steps // EVALUATIONS), LONGEST_WAIT)
    saved_at = time.monotonic()
    try:
        with interrupts() as interrupted:
            if film:
                film.see(model, start)
            for done in range(start + 1, recipe.steps + 1):
                # The factor is odd: seeds below 2^63 begin apart. Above the steps of a run it keeps nearby seeds so.
                step_seed = (seed * 1_000_003 + done - 1) % 2**63
                torch.manual_seed(step_seed)  # the dropout's
                batch = data.batch(
                    torch.Generator().manual_seed(step_seed), recipe.batch
                )
                model.train()
                rate = recipe.rate(done - 1)
                weights = state.weights.values()
                loss = model.loss(*batch)
                number = take_step(
                    loss, weights, state.optimizers, done - 1, rate, recipe.clip
                )
                if film:
                    film.see(model, done)
                is_last = done == recipe.steps
                held_out = None
                if is_last or done % interval == 0:
                    held_out = evaluate(
                        model, data, HELD_OUT_TOKENS if is_last else GLANCE
                    )
                    require_finite(done, held_out_loss=held_out)
                    state.curve.append((done, number, held_out))
                if held_out is not None or done % REPORTED == 0:
                    report(Progress(done, recipe.steps, number, held_out))
                # Asked once a step: a Ctrl-C that comes while the state is being saved is for the next step.
                stopping = interrupted()
                if stopping or is_last or time.monotonic() - saved_at > save_seconds:
                    state.save(done)
                    saved_at = time.monotonic()
                if stopping:
                    raise Stopped(done, folder)
    except DivergedError as error:
        raise HeadwiseError(
            f"training diverged: {error}; lower the learning rate or take another seed"
        ) from None
    return model.eval(), [CurvePoint(*point) for point in state.curve]


@dataclass
class State:
    """Where a training stands, and its file: weights, moments of the optimizers, evaluations."""

    path: Path
    weights: dict[str, nn.Parameter]
    optimizers: Sequence[Optimizer]
    # as `CurvePoint`
    curve: list[tuple[int, float, float]] = field(default_factory=list)

    def save(self, step: int) -> None:
        """Write it; DivergedError where a weight is no number."""
        tensors = self._tensors()
        # finite only if each weight is
        magnitude = sum(weight.abs().sum().item() for weight in self.weights.values())
        require_finite(step, weights=magnitude)
        tensors["curve"] = torch.tensor(self.curve, dtype=torch.float64)
        write_tensors(self.path, tensors, {"step": str(step)})

    def restore(self) -> int:
        """Read what `save` wrote; returns the steps done, 0 without a file."""
        if not self.path.exists():
            return 0
        saved, metadata = read_tensors(self.path)
        curve = saved.pop("curve").tolist()
        self.curve = [(int(step), *losses) for step, *losses in curve]
        # before the first step there are weights alone
        shapes = {name: weight.shape for name, weight in self._tensors().items()}
        of_file = {n: x.shape for n, x in saved.items() if n.startswith("model.")}
        if of_file != shapes:
            raise HeadwiseError(
                f"{self.path} is the state of another model; resume with the settings it began with"
            )
        # which makes the moments, and at rate 0 changes no weight
        weights = self.weights.values()
        nothing = torch.stack([0 * weight.sum() for weight in weights]).sum()
        take_step(nothing, weights, self.optimizers, 0, rate=0)
        for name, tensor in self._tensors().items():
            # a weight that no loss depends on has no moments in the file
            if name in saved:
                tensor.copy_(saved[name])
        return int(metadata["step"])

    def _tensors(self) -> dict[str, Tensor]:
        """The weights and the moments by their names in the file."""
        tensors = {f"model.{name}": x.detach() for name, x in self.weights.items()}
        for n, optimizer in enumerate(self.optimizers):
            for index, moments in optimizer.state_dict()["state"].items():
                for name, moment in moments.items():
                    tensors[f"optimizer.{n}.{index}.{name}"] = moment
        return tensors


def fit(model: GPT, recipe: Recipe, data: Stream | Documents, seed: int) -> None:
    """Train in memory, without a folder, to the end of the recipe. Raises DivergedError."""
    optimizers = make_optimizers(model, recipe)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for step in range(recipe.steps):
        loss = model.loss(*data.batch(generator, recipe.batch))
        take_step(
            loss, model.parameters(), optimizers, step, recipe.rate(step), recipe.clip
        )


def take_step(
    loss: Tensor,
    weights: Iterable[nn.Parameter],
    optimizers: Iterable[Optimizer],
    step: int,
    rate: float,
    clip: float = math.inf,
) -> float:
    """Update the weights by the gradients of a loss (a scalar), which are gone afterwards; returns the loss.

    step  the number of this update, from 0
    rate  the fraction of its peak learning rate that each optimizer takes
    clip  largest norm of all gradients together

    Raises DivergedError, before any weight changes, when the loss or the gradient is no number.
    """
    loss.backward()  # type: ignore[no-untyped-call]
    number = loss.item()
    # the norm before it is clipped
    norm = torch.nn.utils.clip_grad_norm_(weights, clip)
    require_finite(step + 1, loss=number, gradient=norm.item())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # defaults: the peak, with which the optimizer was made
            group["lr"] = optimizer.defaults["lr"] * rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return number


_lock = threading.RLock()  # torch has one number of threads, for all threads of Python


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread within this block: small matrices gain nothing from a second one, and wait for it."""
    with _lock:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def require_finite(step: int, **numbers: float) -> None:
    """Raise DivergedError where one is not: weights that went wrong reach neither the state nor the model."""
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise DivergedError(f"{name} is {number} at step {step}")


def without_compiler(kind: type[Kind]) -> type[Kind]:
    """A class of torch's optimizers that does not load torch's compiler.

    torch wraps these methods, so that compiled code leaves its graph before them. The wrappers import `torch._dynamo`,
    500 modules: two seconds of each process that trains, and far more where no bytecode of them lies there yet. Nothing
    is compiled here. What the wrappers hold is torch's own and computes the same.
    """
    wrapped = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in wrapped}
    # its wrapper is also what records no gradient in it
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), methods)


# The names are those that `without_compiler` gives the classes: pickle looks for a class by its name in its module.
AdamW = without_compiler(torch.optim.AdamW)
Muon = without_compiler(torch.optim.Muon)


def make_optimizers(model: GPT, recipe: Recipe) -> list[Optimizer]:
    """AdamW, with Muon on the matrices of the blocks if the recipe has a rate for it. Only matrices decay."""
    # Those of the blocks, which Muon updates if it is there; all other matrices; gains and biases.
    hidden, matrices, vectors = ([] for _ in range(3))
    for name, p in model.named_parameters():
        if p.ndim < 2:
            vectors.append(p)
        # torch's Muon takes nothing but 2 axes
        elif recipe.muon_lr and p.ndim == 2 and name.startswith("blocks."):
            hidden.append(p)
        else:
            matrices.append(p)
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # fused: one pass over each weight, where torch's own choice on the CPU takes one for each operation.
    optimizers: list[Optimizer] = [
        AdamW(groups, lr=recipe.lr, betas=recipe.betas, fused=True)
    ]
    if recipe.muon_lr:
        optimizers.append(
            Muon(hidden, lr=recipe.muon_lr, weight_decay=recipe.weight_decay)
        )
    return optimizers


@torch.no_grad()
def evaluate(
    model: GPT, data: Stream | Documents, limit: int = HELD_OUT_TOKENS, batch: int = 64
) -> float:
    """Mean cross-entropy in nats per counted token, on about `limit` tokens of the held-out part.

    `batch` texts run side by side; 64 is a round choice, and more would take more memory. The model is afterwards in
    training mode if it was before.
    """
    training = model.training
    device = next(model.parameters()).device
    model.eval()
    total = 0.0
    count = 0
    for inputs, targets in data.held_out_batches(batch, limit):
        n = int((targets >= 0).sum())
        total += model.loss(inputs.to(device), targets.to(device)).item() * n
        count += n
    model.train(training)
    return total / count


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C within this block is noted, not raised, so that no step is cut in half; a second one is raised."""
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noted.is_set  # only the main thread may handle signals
        return

    def note(signum: int, frame: Any) -> None:
        if noted.is_set():
            raise KeyboardInterrupt
        noted.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted.is_set
    finally:
        signal.signal(signal.SIGINT, before)
