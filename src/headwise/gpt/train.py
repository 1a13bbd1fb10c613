"""Training: batches in, weights out, and nothing lost when it is stopped.

A step is a pure function of the weights, the optimizer's moments and (seed, step): the batch and the dropout of step s
are drawn from a generator seeded by both. So what a resumed run needs is the weights, the moments and the number of the
step; random state, place in the data and place in the schedule follow from it. They are saved together in one file,
which is replaced in one move: a run killed at any moment and resumed ends with the same bytes as one left alone.

Many processes (`headwise.gpt.ranks`) draw the same batch and compute a part of its rows each. The gradient of a step is
the sum of theirs: without dropout, which each draws for itself, the weights are those of one process to the rounding of
a sum. The first process writes the files.
"""

from __future__ import annotations

import inspect
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headwise.corpus.training import HELD_OUT_TOKENS, Batch, Documents, Stream
from headwise.errors import HeadwiseError
from headwise.files import StepLog
from headwise.gpt.checkpoint import read_tensors, write_tensors
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import Recipe
from headwise.gpt.ranks import current, gradients_kept, parted, whole
from headwise.records import CurvePoint, from_json

Kind = TypeVar("Kind", bound=Optimizer)

STATE = "state.safetensors"
METRICS = "metrics.jsonl"
# Round choices. Each evaluation takes time from training, and a line takes next to none.
EVALUATIONS = 10  # per run at least, the last one at its end
LONGEST_WAIT = 500  # steps between two evaluations at most
REPORTED = 10  # steps between two lines of the log at most
GLANCE = 10_000  # held-out tokens, at most, that the evaluations before the last one score


@dataclass(frozen=True)
class Progress:
    """Where training stands; losses in nats per token."""

    step: int
    steps: int
    loss: float
    tokens_per_second: float
    held_out_loss: float | None  # on the steps that are evaluated

    def row(self) -> dict[str, Any]:
        """Its line in metrics.jsonl, without `steps`, which run.json has."""
        return {name: value for name, value in asdict(self).items() if value is not None and name != "steps"}


@dataclass(frozen=True)
class Division:
    """How a step is divided: none of it changes what is learned, but for the rounding of sums."""

    accumulate: int = 1  # passes in which a process computes its part of a batch, one after another
    shard: bool = False  # weights, gradients and moments are spread over the processes

    @property
    def apart(self) -> bool:
        """Are the weights not all on the processor of the first process, where a film looks at them?"""
        return self.shard or current().device.type != "cpu"

    def check(self, data: Stream | Documents, recipe: Recipe) -> None:
        """Raise HeadwiseError, before the work begins, where a batch has too few texts to be divided so."""
        n_texts = len(data.batch(torch.Generator(), recipe.batch)[0])  # a small corpus has fewer lines than a batch
        current().parts(n_texts, self.accumulate)  # raises
        if self.shard:
            current().require_many("shard=True spreads a model over processes")


UNDIVIDED = Division()

# Sees the model where training begins or goes on and after every step, before its state is saved; and the steps done.
Look = Callable[[GPT, int], None]


def no_look(model: GPT, step: int) -> None:
    """Nobody looks on."""


class DivergedError(HeadwiseError):
    """A loss, gradient or weight is no number any more."""


class Stopped(KeyboardInterrupt):
    """Training was interrupted and has saved its state."""

    def __init__(self, step: int, folder: Path | None = None) -> None:
        super().__init__(f"stopped after step {step}")
        self.step, self.folder = step, folder  # the command tells both


def train(
    folder: Path,
    config: GPTConfig,
    recipe: Recipe,
    data: Stream | Documents,
    seed: int,
    report: Callable[[Progress], None],
    save_seconds: float = 10.0,  # what a kill loses at most, but for a long step; a round choice
    look: Look = no_look,
    build: Callable[[GPTConfig], GPT] = GPT,
    division: Division = UNDIVIDED,
) -> tuple[GPT, list[CurvePoint]]:
    """Train a GPT to the end of its recipe, going on from the state in `folder` if there is one.

    Writes `state.safetensors` every `save_seconds` and on Ctrl-C, and a line a report to `metrics.jsonl`. Returns the
    model, on the CPU, and its evaluations. Raises HeadwiseError for a loss that is no number, Stopped after Ctrl-C.
    """
    ranks = current()
    ranks.require_same("the text", data.digest)
    torch.manual_seed(seed)  # the weights are drawn from it
    model = build(config).to(ranks.device)
    loss_module = ranks.loss_module(model, division.shard)
    # DDP orders its sums by its first backward pass: done before the state is read, a resumed run gives the same bytes.
    if ranks.world > 1:
        step_loss(loss_module, data.batch(torch.Generator(), recipe.batch), division.accumulate)
        loss_module.zero_grad()
    optimizers = make_optimizers(model, recipe)
    weights = dict(model.named_parameters())
    start, _ = restore_state(folder / STATE, weights, optimizers)
    log = StepLog(folder / METRICS, start) if ranks.rank == 0 else None
    _curve(log)  # raises where the log is damaged: now, before the work
    interval = min(max(1, recipe.steps // EVALUATIONS), LONGEST_WAIT)
    saved_at = reported_at = time.monotonic()
    tokens_read = 0  # since the last report
    try:
        with interrupts() as interrupted:
            look(model, start)
            for done in range(start + 1, recipe.steps + 1):
                # The factor is odd: seeds below 2^63 begin apart. Above the steps of a run it keeps nearby seeds so.
                step_seed = (seed * 1_000_003 + done - 1) % 2**63
                # The dropout's: nearby steps differ in bits below the 40th, ranks above, so no two draw alike.
                torch.manual_seed(step_seed ^ ranks.rank << 40)
                batch = data.batch(torch.Generator().manual_seed(step_seed), recipe.batch)  # the same on all
                loss_module.train()
                loss = step_loss(loss_module, batch, division.accumulate)
                update(loss, loss_module.parameters(), optimizers, done - 1, recipe.rate(done - 1), recipe.clip)
                tokens_read += batch[0].numel()
                look(model, done)
                is_last = done == recipe.steps
                held_out = None
                if is_last or done % interval == 0:
                    held_out = evaluate(model, data, HELD_OUT_TOKENS if is_last else GLANCE)
                    require_finite(done, held_out_loss=held_out)
                if held_out is not None or done % REPORTED == 0:
                    if log is not None:
                        speed = tokens_read / (time.monotonic() - reported_at)
                        progress = Progress(done, recipe.steps, loss, speed, held_out)
                        log.add(progress.row())
                        report(progress)
                    tokens_read, reported_at = 0, time.monotonic()
                # Asked once a step: a Ctrl-C that comes while the state is being saved is for the next step.
                # The sum over the processes is above 0 on all of them if one of them wants it.
                stopping, saving = ranks.sum(interrupted(), time.monotonic() - saved_at > save_seconds)
                if stopping or saving:
                    magnitude = sum(whole(weight.detach().abs().sum()).item() for weight in weights.values())
                    require_finite(done, weights=magnitude)  # finite only if each weight is
                    save_state(folder / STATE, weights, optimizers, done)
                    saved_at = time.monotonic()
                if stopping:
                    raise Stopped(done, folder)
    except DivergedError as error:
        raise HeadwiseError(f"training diverged: {error}; lower the learning rate or take another seed") from None
    save_state(folder / STATE, weights, optimizers, recipe.steps)  # until the caller has written the model
    trained = model
    if division.shard:  # each process holds a part of each weight: a new model gets them whole
        trained = build(config)
        with torch.no_grad():
            for parameter, part in zip(trained.parameters(), model.parameters(), strict=True):
                parameter.copy_(whole(part))
    return trained.cpu().eval(), _curve(log)


def _curve(log: StepLog | None) -> list[CurvePoint]:
    """The evaluations of a training; none in a process that has no log. Raises HeadwiseError for a damaged log."""
    if log is None:
        return []
    rows = [
        {"step": row.get("step"), "train_loss": row.get("loss"), "held_out_loss": row["held_out_loss"]}
        for row in log.rows
        if "held_out_loss" in row
    ]
    return list(from_json(tuple[CurvePoint, ...], rows, str(log.path)))


def step_loss(loss_module: nn.Module, batch: Batch, passes: int) -> float:
    """The mean loss of a batch (B,T), of which each process computes a part, in so many passes; leaves its gradient."""
    inputs, targets = batch
    ranks = current()
    scored = targets >= 0  # a target below 0 does not count
    parts = ranks.parts(len(inputs), passes)
    loss = 0.0
    for n, rows in enumerate(parts, 1):
        weight = (scored[rows].sum() / scored.sum()).item()  # of this part in the mean: its fraction of scored targets
        with gradients_kept(loss_module, keep=n < len(parts)):
            weighted = loss_module(inputs[rows].to(ranks.device), targets[rows].to(ranks.device)) * weight
            # Backward gives the mean of the processes' gradients, and their sum is wanted.
            (weighted * ranks.world).backward()
        loss += weighted.item()
    return ranks.sum(loss)[0]


def fit(model: GPT, recipe: Recipe, data: Stream | Documents, seed: int) -> None:
    """Train in memory, without a folder, to the end of the recipe. Raises DivergedError."""
    optimizers = make_optimizers(model, recipe)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for step in range(recipe.steps):
        loss = model.loss(*data.batch(generator, recipe.batch))
        take_step(loss, model.parameters(), optimizers, step, recipe.rate(step), recipe.clip)


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
    update(number, weights, optimizers, step, rate, clip)
    return number


def update(
    loss: float,
    weights: Iterable[nn.Parameter],
    optimizers: Iterable[Optimizer],
    step: int,
    rate: float,
    clip: float,
) -> None:
    """`take_step` where the gradients of the loss are there already."""
    norm = whole(torch.nn.utils.clip_grad_norm_(weights, clip))  # the norm before it is clipped
    require_finite(step + 1, loss=loss, gradient=norm.item())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"] * rate  # defaults: the peak, with which the optimizer was made
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


_lock = threading.Lock()
_before: list[int] = []  # how many threads torch had before, once for each thread of Python in such a block
_within = threading.local()  # .block: is this thread of Python in one already? An inner block then does nothing


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread within this block: small matrices gain nothing from a second one, and wait for it.

    A thread of Python that starts while another is in such a block finds torch on one thread; it must not take that for
    what was there before.
    """
    if getattr(_within, "block", False):
        yield
        return
    with _lock:
        # torch is asked always: a thread of Python that has never asked would take over what another thread sets when
        # its block ends.
        before = (*_before, torch.get_num_threads())[0]
        _before.append(before)
    _within.block = True
    torch.set_num_threads(1)
    try:
        yield
    finally:
        _within.block = False
        with _lock:
            _before.pop()  # any one: they are all the same number
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
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))  # its wrapper is also what records no gradient in it
    return type(kind.__name__, (kind,), methods)


# The names are those that `without_compiler` gives the classes: pickle looks for a class by its name in its module.
Adam = without_compiler(torch.optim.Adam)
AdamW = without_compiler(torch.optim.AdamW)
Muon = without_compiler(torch.optim.Muon)


def make_optimizers(model: GPT, recipe: Recipe) -> list[Optimizer]:
    """AdamW, with Muon on the matrices of the blocks if the recipe has a rate for it. Only matrices decay."""
    # Those of the blocks, which Muon updates if it is there; all other matrices; gains and biases.
    hidden, matrices, vectors = list[nn.Parameter](), list[nn.Parameter](), list[nn.Parameter]()
    for name, p in model.named_parameters():
        if p.ndim < 2:
            vectors.append(p)
        elif recipe.muon_lr and p.ndim == 2 and name.startswith("blocks."):  # torch's Muon takes nothing but 2 axes
            hidden.append(p)
        else:
            matrices.append(p)
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # fused: one pass over each weight, where torch's own choice on the CPU takes one for each operation.
    optimizers: list[Optimizer] = [AdamW(groups, lr=recipe.lr, betas=recipe.betas, fused=True)]
    if recipe.muon_lr:
        optimizers.append(Muon(hidden, lr=recipe.muon_lr, weight_decay=recipe.weight_decay))
    return optimizers


@torch.no_grad()
def evaluate(model: GPT, data: Stream | Documents, limit: int = HELD_OUT_TOKENS, batch: int = 64) -> float:
    """Mean cross-entropy in nats per counted token, on about `limit` tokens of the held-out part.

    `batch` texts run side by side; 64 is a round choice, and more would take more memory. The model is afterwards in
    training mode if it was before.
    """
    training, device = model.training, next(model.parameters()).device
    model.eval()
    total, count = 0.0, 0
    for inputs, targets in data.held_out_batches(batch, limit):
        n = int((targets >= 0).sum())
        total += model.loss(inputs.to(device), targets.to(device)).item() * n
        count += n
    model.train(training)
    return total / count


def save_state(
    path: Path,
    weights: Mapping[str, nn.Parameter],
    optimizers: Sequence[Optimizer],
    step: int,
    kept: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Weights, moments, step and `kept`, whatever else must survive; of many processes the first writes, all call."""
    tensors = {f"model.{name}": whole(parameter.detach()) for name, parameter in weights.items()}
    for n, optimizer in enumerate(optimizers):
        for index, moments in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{n}.{index}.{name}": whole(moment) for name, moment in moments.items()}
    tensors |= {f"kept.{name}": tensor for name, tensor in kept.items()}
    if current().rank == 0:
        write_tensors(path, tensors, {"step": str(step)})


def restore_state(
    path: Path, weights: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
) -> tuple[int, dict[str, Tensor]]:
    """Load what `save_state` wrote; returns the steps done and what was kept; 0 and nothing without a file."""
    if not current().agree(path.exists):
        return 0, {}
    tensors, metadata = current().agree(lambda: read_tensors(path))
    saved = under("model.", tensors)
    if {name: tensor.shape for name, tensor in saved.items()} != {name: p.shape for name, p in weights.items()}:
        raise HeadwiseError(f"{path} is the state of another model; resume with the settings it began with")
    with torch.no_grad():
        for name, parameter in weights.items():
            parameter.copy_(parted(saved[name], parameter))
    for n, optimizer in enumerate(optimizers):
        state = optimizer.state_dict()  # {"state": {number of a parameter: its moments}, "param_groups": settings}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            moments = under(f"optimizer.{n}.{index}.", tensors)
            # A moment of the parameter's shape is split as it is; a step counter, a single number, stays whole.
            state["state"][index] = {name: parted(moment, parameter) for name, moment in moments.items()}
        optimizer.load_state_dict(state)
    return int(metadata["step"]), under("kept.", tensors)


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


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
