"""Many processes: the one door to torch.distributed.

`torchrun` starts P processes with one command, the ranks 0 to P - 1. `joined` makes them a group, and `current()` is
what one of them knows of it. A process alone is rank 0 of 1: the same calls then do nothing and cost nothing. Objects
and sums on the processor travel by gloo, tensors of a GPU by NCCL.

Each rank gives a sign of life every second, and looks after its own host and the next rank. Who misses one says so, in
one line for all, and all end.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from headwise.errors import HeadwiseError
from headwise.files import is_running

T = TypeVar("T")
# Seconds between two signs of life; so many ticks without one, and a rank is lost. Round choices: fewer ticks would
# take a host for lost that is only busy, and more let the others wait longer.
TICK, SILENT = 1.0, 15
ORPHANED = 3  # ticks after which a rank that is told to end does, though none is found lost
# Seconds, at most, for which the first rank waits for the others to go. It may hold the store, by which they hear that
# a rank is lost, that one failed, or that all are done: if it went first, they would lose it. Mostly they go within a
# tick. The bounds are round; the one after a loss is short, for it is always reached: a rank that is lost never goes.
WAIT_AFTER_LOSS, WAIT_AFTER_ERROR, WAIT_AFTER_ALL = 10, 100, 60
# Exit codes: of a loss, or any failure of which no other code is known; and of SIGTERM, 128 + 15, as a shell has it.
LOST, TERMINATED = 1, 143
# For which torch lets a rank wait for another: one may evaluate or write for long. A dead one `_Watch` finds sooner.
LONGEST = timedelta(days=7)


@dataclass(frozen=True)
class Ranks:
    """What a process knows of its group: its number, from 0, and how many there are."""

    rank: int = 0
    world: int = 1

    @property
    def device(self) -> torch.device:
        """Where this process computes: of many, each takes the GPU of its local number, if there is one."""
        # Only what torchrun has started takes a GPU; for a single one that is `torchrun --nproc-per-node 1`.
        cuda = self is not ALONE and torch.cuda.is_available()
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

    @property
    def mesh(self) -> Any:
        """All ranks in a row, as torch wants them named to split tensors among them."""
        return init_device_mesh(self.device.type, (self.world,))

    def sum(self, *numbers: float) -> list[float]:
        """Each number summed over all ranks."""
        if self.world == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def agree(self, make: Callable[[], T]) -> T:
        """What the first rank makes, on all; the others do not call `make`."""
        if self.world == 1:
            return make()
        box: list[Any] = [None if self.rank else make()]  # what is sent takes the place of the None
        dist.broadcast_object_list(box)
        return box[0]

    def gathered(self, value: T) -> list[T]:
        """The value of each rank, in their order, on all."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def merged(self, value: T, join: Callable[[T, T], T]) -> T:
        """The values of all ranks joined two by two, on all: log2(P) rounds, and no rank holds more than two.

        With 4 ranks 0 takes what 1 has, and 2 what 3 has; then 0 takes what 2 has.
        """
        step = 1
        while step < self.world:
            if self.rank % (2 * step):  # the rank `step` to the left takes what it has, and it is done
                dist.send_object_list([value], self.rank - step)
                break
            if self.rank + step < self.world:
                box: list[Any] = [None]
                dist.recv_object_list(box, self.rank + step)
                value = join(value, box[0])
            step *= 2
        return self.agree(lambda: value)

    def counter(self) -> Callable[[int], int]:
        """A function that adds n to what all ranks have counted, and returns that; no rank waits for another."""
        key, count = f"count/{next(_counters)}", 0  # the count stands in the store; in `count` for a process alone

        def add(n: int) -> int:
            nonlocal count
            count = count + n if _store is None else int(_store.add(key, n))
            return count

        return add

    def parts(self, n: int, passes: int = 1) -> list[slice]:
        """The rows, of n texts, that are this rank's, in so many passes. Raises HeadwiseError for too few texts.

        Of 11 texts on 2 ranks in 1 pass the first has 5, the other 6: pieces differ by one at most.
        """
        pieces = self.world * passes
        if pieces > n:
            fewer = f"start {most} at most, or " if (most := n // passes) else ""  # 0: not even one process can
            raise HeadwiseError(
                f"a batch of {n} texts is too small for {self.world} processes of {passes} passes each; "
                f"{fewer}pass a smaller accumulate="
            )
        first = self.rank * passes
        return [slice(k * n // pieces, (k + 1) * n // pieces) for k in range(first, first + passes)]

    def require_many(self, what: str) -> None:
        """Raise HeadwiseError for a process that torchrun did not start."""
        if self is ALONE:
            raise HeadwiseError(f"{what}; start several of them with torchrun")

    def require_same(self, what: str, value: object) -> None:
        """Raise HeadwiseError, on every rank, where a rank has another value than the first."""
        values = self.gathered(value)
        if others := [str(rank) for rank, each in enumerate(values) if each != values[0]]:
            raise HeadwiseError(f"{what} is not the same on all processes: rank {', '.join(others)} has another one")

    def loss_module(self, model: nn.Module, shard: bool = False) -> nn.Module:
        """A module whose call gives `model.loss` and whose backward pass leaves the mean gradient of all ranks.

        By DDP, Li et al. 2020 (arXiv 2006.15704), or with `shard` by FSDP2, after Zhao et al. 2023 (arXiv 2304.11277).
        """
        if shard:
            from torch.distributed.fsdp import fully_shard  # these imports take half a second

            for block in (*model.blocks, model):  # type: ignore[misc]  # of a GPT, whose file imports this one
                fully_shard(block, mesh=self.mesh)  # each block by itself: never are all whole in memory at once
            # FSDP2 works by hooks on the call of the model, which `model.loss` makes.
        loss = _Loss(model)
        return DistributedDataParallel(loss) if self.world > 1 and not shard else loss

    def split_by_heads(self, model: nn.Module, plan: Mapping[str, str]) -> None:
        """Keep on this rank its part of a model, by a plan from modules to "colwise" and "rowwise".

        "colwise" splits the outputs of a linear layer, "rowwise" its inputs, whose products are then summed.
        Shoeybi et al. 2019, Megatron-LM (arXiv 1909.08053), section 3.
        """
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
        parallelize_module(model, self.mesh, {name: styles[style]() for name, style in plan.items()})

    @staticmethod
    def sum_gradient(weights: Tensor) -> None:
        """From now on, add up over the ranks the gradients of these weights, such as the gain of a norm of queries.

        Each rank has them whole, but its own gradient comes from its own heads alone.
        """

        def summed(gradient: Tensor) -> Tensor:
            total = gradient.clone()  # a hook must leave what it is given
            dist.all_reduce(total)
            return total

        weights.register_hook(summed)  # type: ignore[no-untyped-call]

    def require_divisor(self, counts: Mapping[str, int]) -> None:
        """Raise HeadwiseError where the ranks do not divide one of these counts of heads, by what they count."""
        for name, count in counts.items():
            if count % self.world:
                fitting = [str(n) for n in range(1, count + 1) if all(each % n == 0 for each in counts.values())]
                raise HeadwiseError(
                    f"{self.world} processes do not divide the {count} {name} of the model; start "
                    f"{' or '.join(fitting)}, or leave parallel= out: then each holds the model and reads its share"
                )


ALONE = Ranks()
_ranks = ALONE
_store: Any = None  # keys and values that all ranks read and write; None for a process alone
_counters = itertools.count()  # their numbers, alike on all ranks, which make them in one order


def current() -> Ranks:
    """The group of this process; `ALONE` outside `joined`."""
    return _ranks


class _Loss(nn.Module):
    """The loss as the call of a module: DDP sums the gradients of what its module gave when called, no others."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(ids, targets)  # type: ignore[operator]


@contextmanager
def gradients_kept(loss_module: nn.Module, keep: bool) -> Iterator[None]:
    """With `keep` a backward pass in this block adds to the gradients of this rank alone, and nothing is sent.

    So all passes of a step but the last are run: one sum over the ranks does for all of them.
    """
    model: Any = getattr(loss_module, "model", None)  # of a `_Loss`; DDP has none
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2 has given it this method
        model.set_requires_gradient_sync(not keep)
    with loss_module.no_sync() if keep and isinstance(loss_module, DistributedDataParallel) else nullcontext():
        yield


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which each rank holds a part; all ranks must ask, for they send it one another."""
    # A tensor with parts is a DTensor, whose class takes long to import; it is known by what only it has, also below.
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def parted(tensor: Tensor, like: Any) -> Tensor:
    """A whole tensor split as `like` is; as it was where that is not split, or has another shape.

    Of what an optimizer keeps for a weight, its moments have the weight's shape, and the count of steps has not.
    """
    if not hasattr(like, "placements") or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)


def held(tensor: Tensor) -> tuple[Tensor, int, int]:
    """The part of a matrix that this rank holds, which one it is, and of how many; (tensor, 0, 1) where it is whole."""
    part: Any = tensor
    if not any(placement.is_shard() for placement in getattr(part, "placements", ())):
        return whole(tensor), 0, 1
    return part.to_local(), part.device_mesh.get_local_rank(), part.device_mesh.size()


@contextmanager
def joined() -> Iterator[Callable[[Callable[[str], None], int], NoReturn]]:
    """Join the processes that torchrun has started; when the block ends, wait for all.

    Yields `fail(say, code)`, which ends this rank and all others after an error. `say` prints it behind a prefix,
    such as "rank 3: ". Of all ranks only one prints: the first, where it failed too.
    """
    global _ranks, _store
    # By the environment variables that torchrun sets. Five minutes, a round choice, for the slowest host to come.
    store, rank, world = next(rendezvous("env://", timeout=timedelta(minutes=5)))
    cuda = torch.cuda.is_available()
    if cuda:  # %: more processes than GPUs share them, which reading allows; to train, NCCL supports no two on one
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=LONGEST)
    watch = _Watch(store.clone(), rank, world)  # with a connection of its own: it is another thread
    _ranks, _store = Ranks(rank, world), store
    watch.start()
    store.add("here", 1)
    while store.add("here", 0) < world:  # one that went at once would look lost to those that still connect
        time.sleep(TICK / 100)

    def fail(say: Callable[[str], None], code: int) -> NoReturn:
        if code == LOST:  # perhaps only because another rank is gone: then the watch ends this one while it sleeps
            # 2: a tick may pass before the first silent one is counted, and one until this rank hears of the loss.
            time.sleep(TICK * (SILENT + 2))
        elif rank:  # where the first rank fails too, it is first, and prints
            time.sleep(TICK)
        watch.fail(partial(say, f"rank {rank}: " if rank else ""), code)

    try:
        yield fail
        watch.leave()
    except BaseException:
        watch.fail(traceback.print_exc, LOST)
    finally:
        _ranks, _store = ALONE, None
    dist.destroy_process_group()


class _Watch(threading.Thread):
    """Gives this rank's signs of life and looks for those of others, by these keys of the store:

    at/RANK     process and host of a rank, as "4711 on node3"
    alive/RANK  counts its signs of life
    failures    counts the ranks that want to end all; the first of them sets `over`, the exit code of all
    done        counts the ranks whose work is done
    gone        counts those that leave after that; gone/RANK is set by one that ends before
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        super().__init__(daemon=True)
        self.store, self.rank, self.world = store, rank, world
        self.next = (rank + 1) % world  # each looks after the next one, so that together they look after all
        # torchrun numbers the ranks of a host one after another. Those of this one can be looked up by their process,
        # which shows a loss at once, not only after SILENT ticks.
        first_here = rank - int(os.environ.get("LOCAL_RANK", 0))
        here = range(first_here, first_here + int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        self.beside = [other for other in here if other != rank]  # on this host
        self.signs = 0  # of life that the next rank has given
        self.silent = 0  # ticks without a new one
        # Ticks, counted from 1, since SIGTERM told this rank to end; 0: nobody did. torchrun sends it to all when a
        # rank is lost, and a few ticks give the watch time to find which, and to say so.
        self.ending = 0
        self.over = threading.Event()  # this rank ends, or its work is done: nothing is looked for any more
        store.set(f"at/{rank}", f"{os.getpid()} on {socket.gethostname()}")
        # Python runs handlers of signals in the main thread alone, which may wait in a collective call. But each signal
        # also writes a byte into this pipe, at once, and `run` waits on its other end. The handler that does nothing
        # keeps SIGTERM from killing the process.
        self.woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: None)

    def run(self) -> None:
        while not self.over.is_set():
            is_woken, _, _ = select.select([self.woken], [], [], TICK)
            # The pipe has a byte for each signal, its number. What is beyond 64 of them wakes the next `select`.
            if is_woken and signal.SIGTERM in os.read(self.woken, 64):
                self.ending = max(self.ending, 1)
            try:
                self._look()
            except dist.DistError:  # the store does not answer
                self._end("the meeting point, on the host of rank 0, is lost")

    def _look(self) -> None:
        if self.store.check(["over"]) and not self.over.is_set():  # another rank has failed, and this one has not
            self._follow()
        self.store.add(f"alive/{self.rank}", 1)
        signs = self.store.add(f"alive/{self.next}", 0)  # adding 0 reads a counter
        self.silent = self.silent + 1 if signs == self.signs else 0
        self.signs = signs
        at = {other: self.store.get(f"at/{other}").decode() for other in (*self.beside, self.next)}
        for other in self.beside:
            if not is_running(int(at[other].split()[0])):
                self._end(f"rank {other} of {self.world} is lost: process {at[other]} has ended")
        if self.silent >= SILENT and self.world > 1:  # alone, it is its own next rank
            silence = f"has given no sign of life for {SILENT * TICK:.0f} s"
            self._end(f"rank {self.next} of {self.world} is lost: process {at[self.next]} {silence}")
        if self.ending:
            self.ending += 1
        if self.ending > ORPHANED:
            os._exit(TERMINATED)  # not sys.exit, which would end this thread alone; so also in `_go`

    def _end(self, message: str) -> None:
        """End all for a lost rank, unless this one is ending already or all work is done."""

        def say() -> None:
            # A bar that was being drawn is wiped off its line, and the cursor shown again.
            clear = "\r\x1b[K\x1b[?25h" if sys.stderr.isatty() else ""
            remedy = "all end, and no file is half written; the same command goes on, a training where it is resumed"
            # 2 is standard error, without a buffer: `os._exit` would not write that out.
            os.write(2, f"{clear}headwise: {message}; {remedy}\n".encode())

        if self.over.is_set():
            return
        with suppress(dist.DistError):
            if self.store.add("done", 0) >= self.world:  # which this rank's main thread has not seen yet: no loss
                return
        self.fail(say, LOST)

    def fail(self, say: Callable[[], None], code: int) -> NoReturn:
        """End this rank, and tell the others to end, with this code, or with that of the rank that failed before."""
        self.over.set()
        with suppress(dist.DistError):  # without the store, here and below, this rank ends by itself
            if self.store.add("failures", 1) > 1:  # another one was first, and prints
                self._follow()
        say()
        with suppress(dist.DistError):
            self.store.set("over", str(code))
        self._go(code)

    def _follow(self) -> NoReturn:
        """End as the rank that failed first; `get` waits until that has set its code, after its message is out."""
        self._go(int(self.store.get("over")))

    def _go(self, code: int) -> NoReturn:
        """End. The first rank goes last, or after WAIT_AFTER_LOSS or WAIT_AFTER_ERROR seconds."""
        with suppress(dist.DistError):
            self.store.set(f"gone/{self.rank}", "")
            if self.rank == 0 and self.world > 1:
                others = [f"gone/{rank}" for rank in range(1, self.world)]
                self._wait(WAIT_AFTER_LOSS if code == LOST else WAIT_AFTER_ERROR, lambda: self.store.check(others))
        os._exit(code)

    def _wait(self, most: float, is_over: Callable[[], bool]) -> None:
        """Wait until it is over, at most that many seconds."""
        end = time.monotonic() + most
        while not is_over() and time.monotonic() < end:
            time.sleep(TICK / 10)

    def leave(self) -> None:
        """Wait until all ranks are done. The first leaves last."""
        self.store.add("done", 1)
        while self.store.add("done", 0) < self.world:
            time.sleep(TICK / 10)
        self.over.set()
        with suppress(dist.DistError):
            self.store.add("gone", 1)
            if self.rank == 0:
                self._wait(WAIT_AFTER_ALL, lambda: self.store.add("gone", 0) == self.world)
