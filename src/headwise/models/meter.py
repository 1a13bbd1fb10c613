"""What a price comes to here: a prefill and a few steps of decoding are run, and timed beside what they should take."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.cost import PRESETS, Price
from headwise.cost.pricing import COMPUTED, bytes_of
from headwise.errors import HeadwiseError
from headwise.memory import device_named, free_on, in_turn, peak_memory, seconds_of
from headwise.models.ask import device_of, each, logits, reader, require_next, vocabulary_of
from headwise.models.open import open_folder
from headwise.models.stream import stream_of
from headwise.table import DECIMAL, amount, scaled

# Round numbers: more runs and steps give steadier medians, and take longer.
RUNS = 5  # prefills that are timed
STEPS, WARM_UP = 10, 2  # tokens that are written and timed; and those before them that are not timed
LONG = 5.0  # seconds that all timed prefills together may take: a longer one is not repeated
# An estimate: so many numbers a pass holds at once for each token and each feature of the model's width. Larger: a text
# that would fit is refused; smaller: one is begun that memory does not hold.
NUMBERS = 32
SIDE = 8192  # of the square matrix by which the machine is measured: 268 MB in float32, larger than its caches
ROWS = 512  # that are multiplied with it at once: so many that FLOPs take the time, and not the reading of the matrix

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Measured:
    """A prefill of random ids, and steps after it, at the setting of a price; times are medians.

    A share is the time that the bound needs over the time it took, 1 at best. The bound of a pass is the longer of two
    times: its FLOPs at the speed of the machine, and its bytes at its bandwidth, each measured right after the model.
    """

    streamed: bool  # the weights were read from files, a layer at a time
    device: str
    dtype: str
    threads: int
    machine_flops_per_second: float  # of many rows times a large matrix, in this format
    machine_bytes_per_second: float  # of one row times that matrix; or the bandwidth that was given
    runs: int  # of the prefill
    prefill_seconds: float
    prefill_flops_per_second: float
    prefill_share: float
    steps: int  # of decoding; 0 where the model is streamed, which reads all weights for each
    decode_seconds: float | None = None  # of a step
    tokens_per_second: float | None = None  # of the batch together
    decode_bytes_per_second: float | None = None
    decode_share: float | None = None
    cache_bytes: int | None = None  # held after the last step
    peak_bytes: int | None = None  # most memory of the process; on another device, of the tensors there

    def rows(self, price: Price) -> list[tuple[str, str, str]]:
        """The rows of a table: what it is, what the price says of it, what was measured."""
        machine = self.machine_flops_per_second, self.machine_bytes_per_second
        flops, held = _per_second(self.prefill_flops_per_second, "FLOP"), price.weight_bytes + price.cache.total_bytes
        at_least = f"{prefill_bound(price, *machine):,.3g} s at least"
        rows = [
            ("prefill", at_least, f"{self.prefill_seconds:,.3g} s"),
            ("  FLOPs", _per_second(machine[0], "FLOP"), _of_bound(flops, self.prefill_share)),
        ]
        if self.decode_seconds is not None:
            most = price.setting.batch / decode_bound(price, *machine)
            moved = _per_second(self.decode_bytes_per_second or 0, "B")
            rows += [
                ("decode", f"{most:,.3g} tokens/s at most", f"{self.tokens_per_second:,.3g} tokens/s"),
                ("  bytes", _per_second(machine[1], "B"), _of_bound(moved, self.decode_share)),
                ("cache", f"{price.cache.total_bytes:,} bytes", f"{self.cache_bytes:,} bytes"),
            ]
        if self.peak_bytes is not None:
            whole, peak = f"{amount(held)} of weights and cache", amount(self.peak_bytes)
            rows.append(("memory", whole, f"{peak} at most"))
        return rows

    @property
    def conditions(self) -> str:
        """How it was measured, in a sentence."""
        way = "read layer by layer" if self.streamed else "in memory"
        threads = "thread" if self.threads == 1 else "threads"
        prefills = "prefill" if self.runs == 1 else "prefills"
        steps = f", {self.steps} {'step' if self.steps == 1 else 'steps'}" if self.steps else ""
        return (
            f"weights {way}, {self.dtype} on {self.device}, {self.threads} {threads}; medians of {self.runs} "
            f"{prefills}{steps}"
        )


def prefill_bound(price: Price, flops: float, bandwidth: float) -> float:
    """Seconds of a prefill at `flops` a second, or at `bandwidth` bytes a second for the weights of a single step.

    Of the experts and the embeddings a prefill may read more than a step does, but it need not: so these bytes are the
    least. The model must be one that decodes, whose price has `decode`.
    """
    assert price.decode is not None
    return max(price.prefill.total_flops / flops, price.decode.weight_bytes / bandwidth)


def decode_bound(price: Price, flops: float, bandwidth: float) -> float:
    """Seconds of a step of decoding, by its FLOPs or by the bytes of its weights and cache; see `prefill_bound`."""
    assert price.decode is not None
    return max(price.decode.flops / flops, (price.decode.weight_bytes + price.decode.cache_bytes) / bandwidth)


def _per_second(number: float, unit: str) -> str:
    return f"{scaled(round(number), 1000, DECIMAL)}{unit}/s"


def _of_bound(reached: str, share: float | None) -> str:  # None without decoding, whose rows are then left out
    return f"{reached}: {share:.0%} of the bound"


def open_priced(folder: Path, price: Price, stream: bool | None, device: str) -> nn.Module:
    """The model that a price is of. Raises HeadwiseError where it cannot be measured at the price's setting."""
    setting = price.setting
    # `source` has the tokens that an encoder reads: what is measured is a decoder without one.
    if price.decode is None or setting.source is not None:
        raise HeadwiseError(f"measure=True runs models that predict the next token, and a {price.family} does not")
    # Formats that torch computes in; the cache of a model that runs has the format of its weights.
    if setting.dtype not in COMPUTED or setting.cache_dtype != setting.dtype:
        raise HeadwiseError(
            f"measure=True computes weights and cache in one of {', '.join(COMPUTED)}; not {setting.dtype} "
            f"with a cache in {setting.cache_dtype}"
        )
    if str(folder) in PRESETS or not folder.is_dir():  # a preset is a price alone, without weights
        raise HeadwiseError(f"{folder} has no weights to run; measure=True takes the folder of a model")
    model = open_folder(folder, stream=stream, dtype=setting.dtype, device=device).model
    if stream_of(model) is None:  # a streamed one takes texts a layer at a time
        _require_room(price, device_named(device))
    return model


def _require_room(price: Price, device: torch.device) -> None:
    """Refuse a text whose cache and features do not fit beside the weights, which are there already."""
    setting, free = price.setting, free_on(device)
    # Bytes of a token: features, and its keys and values.
    token = NUMBERS * price.d_model * bytes_of(1, setting.dtype) + price.cache.bytes_per_token
    tokens = setting.batch * setting.context
    if token * tokens <= free.size:
        return
    fits = free.size // token
    remedy = f"batch=1 with context={fits} would fit" if fits > 0 else "pass a smaller batch= or context="
    raise HeadwiseError(
        f"{amount(price.cache.total_bytes)} of cache and what {tokens:,} tokens fill take about "
        f"{amount(token * tokens)}, and {amount(free.size)} are free ({free.limit}); {remedy}"
    )


@torch.no_grad()
def measured(model: nn.Module, price: Price, progress: Progress = lambda *counts: None) -> Measured:
    """Run a model at the setting of its price: seconds, bytes, FLOPs a second, medians of several runs.

    progress  is told what is being done, how much of it is done, and how much there is

    Raises HeadwiseError for a model that does not predict the next token.
    """
    require_next(model)
    setting, device, streamed = price.setting, device_of(model), stream_of(model) is not None
    like = next(model.parameters())  # for its format and device
    generator = torch.Generator().manual_seed(0)
    # Where the config does not say how many ids there are, 0 and 1 are among them.
    ids = torch.randint(vocabulary_of(model) or 2, (setting.batch, setting.context), generator=generator).to(device)
    times = _prefilled(model, ids, streamed, progress)
    seconds = statistics.median(times)
    # Of one token nothing is left to be decoded after a prefill.
    steps, held = ([], None) if streamed or setting.context < 2 else _decoded(model, ids, progress)
    peak = peak_memory() if device.type == "cpu" else None
    if device.type != "cpu":
        with suppress(RuntimeError):  # not every device keeps account
            peak = int(torch.accelerator.max_memory_allocated(device)) or None
    progress("the machine", 0, 0)
    # 2 FLOPs, a product and a sum, for each number of the matrix and each row.
    flops = 2 * ROWS * SIDE**2 / _product_seconds(like, ROWS)
    bandwidth = setting.bandwidth or like.itemsize * SIDE**2 / _product_seconds(like, 1)
    decoding: dict[str, Any] = {}
    if steps and price.decode is not None:
        step = statistics.median(steps)
        decoding = {
            "decode_seconds": step,
            "tokens_per_second": setting.batch / step,
            "decode_bytes_per_second": (price.decode.weight_bytes + price.decode.cache_bytes) / step,
            "decode_share": decode_bound(price, flops, bandwidth) / step,
            "cache_bytes": held,
        }
    return Measured(
        streamed=streamed,
        device=str(device),
        dtype=str(like.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        machine_flops_per_second=flops,
        machine_bytes_per_second=bandwidth,
        runs=len(times),
        prefill_seconds=seconds,
        prefill_flops_per_second=price.prefill.total_flops / seconds,
        prefill_share=prefill_bound(price, flops, bandwidth) / seconds,
        steps=len(steps),
        peak_bytes=peak,
        **decoding,
    )


def _prefilled(model: nn.Module, ids: Tensor, streamed: bool, progress: Progress) -> list[float]:
    """Seconds of each prefill of ids (B,T) after the first, which warms up; of that alone where it takes long."""
    # The number of the prefill that runs, which `progress` is told: 0 is the one that warms up.
    count = itertools.count()

    def prefill() -> None:
        progress("prefill", next(count), RUNS)
        # `each` reads the weights of a streamed model once; a new reader begins a text with an empty cache.
        rows = each(model, [ids], partial(logits, last=True)) if streamed else [reader(model)(ids)]
        for row in rows:
            row.flatten()[0].item()  # waits until the device has computed what it was handed

    return in_turn({"prefill": prefill}, RUNS, LONG)["prefill"]


def _decoded(model: nn.Module, ids: Tensor, progress: Progress) -> tuple[list[float], int]:
    """Seconds of each step that writes the last tokens of ids (B,T), and the bytes of the cache at the end."""
    n = min(STEPS + WARM_UP, ids.shape[1] - 1)
    read = reader(model)
    read(ids[:, :-n])
    times: list[float] = []
    for token in ids[:, -n:].T[..., None]:  # (B,1)
        progress("step", len(times), n)
        # `read` gives one row of logits (V,): reading a number of it waits until the device has computed it.
        times.append(seconds_of(lambda: read(token)[0].item()))  # noqa: B023  # called at once, with this token
    held = 0
    # The cache of transformers has its layers in `layers`; that of a GPT of ours is a list of them, with `nbytes` each.
    for cache in getattr(read.cache, "layers", read.cache) or ():
        tensors = (getattr(cache, name, None) for name in ("keys", "values"))
        held += getattr(cache, "nbytes", 0) or sum(x.nbytes for x in tensors if isinstance(x, Tensor))
    return times[min(WARM_UP, n - 1) :], held  # of a text too short to warm up, the last step at least


def _product_seconds(like: Tensor, rows: int) -> float:
    """Seconds of rows times a matrix, the fastest of 2 * RUNS, a round choice: its speed while nobody disturbs it.

    Of many rows FLOPs take the time, of one the reading of the matrix. `like` has the format and the device.
    """
    # 8192 products of 0.01 with 0.01 sum up to 0.8, within the range of every format.
    matrix = torch.full((SIDE, SIDE), 0.01, dtype=like.dtype, device=like.device)
    x = torch.full((rows, SIDE), 0.01, dtype=like.dtype, device=like.device)
    return min(seconds_of(lambda: F.linear(x, matrix)[0, 0].item()) for _ in range(2 * RUNS))
