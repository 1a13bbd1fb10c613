"""What a price comes to here: a prefill and a few steps of decoding are run, and timed beside what they should take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.cost import PRESETS, Price
from headwise.cost.measured import Measured, decode_bound, prefill_bound
from headwise.errors import HeadwiseError
from headwise.files import read_json
from headwise.gpt.device import device_named, free_on
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.markup import amount
from headwise.memory import free_memory, peak_memory
from headwise.models.ask import device_of, each, logits, reader, require_next, vocabulary_of
from headwise.models.open import DTYPES, open_folder
from headwise.models.stream import stream_of
from headwise.models.weights import cast

RUNS, STEPS, WARM_UP = 5, 10, 2  # of a prefill; tokens that are written, and how many of them are not timed
LONG = 5.0  # seconds of a prefill that is not repeated
WIDTH = 32  # numbers a token and a feature of the model's width that a pass holds at once, about
SIDE, ROWS = 8192, 512  # of the matrix by which the machine is measured, larger than its caches; and what is multiplied

Progress = Callable[[str, int, int], None]


def open_description(description: str, price: Price, stream: bool | None, device: str) -> tuple[nn.Module, str]:
    """The model that a price is of, and whether its weights are "stored" or "random".

    What has no weights is made with random ones. Raises HeadwiseError, before anything is made, for what does not fit.
    """
    if price.decode is None or price.setting.source is not None:
        raise HeadwiseError(f"--measure runs models that predict the next token, and a {price.family} does not")
    dtype = DTYPES.get(price.setting.dtype)
    if dtype is None or price.setting.cache_dtype != price.setting.dtype:
        formats = f"{price.setting.dtype} with a cache in {price.setting.cache_dtype}"
        raise HeadwiseError(f"--measure computes weights and cache in one of {', '.join(DTYPES)}; not {formats}")
    path, place = Path(description), device_named(device)
    if description not in PRESETS and path.is_dir() and any(path.glob("*.safetensors")):
        model = open_folder(path, stream=stream, dtype=price.setting.dtype, device=device).model
        if stream_of(model) is None:
            _require_room(price, place, 0)
        return model, "stored"
    if path.is_dir() and (pickled := [file.name for end in ("bin", "pt", "pth") for file in path.glob(f"*.{end}")]):
        raise HeadwiseError(f"{path} holds {pickled[0]}, which may run code when it is read; save it as safetensors")
    if stream:
        raise HeadwiseError(f"{description} has no weights to read layer by layer; leave out --stream")
    _require_room(price, place, price.weight_bytes)
    fields = PRESETS.get(description) or read_json(path / "config.json" if path.is_dir() else path)
    if "headwise" in fields:
        return cast(GPT(GPTConfig(**fields["headwise"])).eval(), dtype).to(place), "random"
    try:
        from headwise.models.hf import drawn
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise HeadwiseError(
            f"{description} is made by transformers to be measured: pip install 'headwise[hf]'"
        ) from None
    return drawn(fields, dtype).to(place), "random"


def _require_room(price: Price, device: torch.device, weights: int) -> None:
    """Refuse what does not fit beside the weights that are there already; `weights` are still to be made."""
    setting, free = price.setting, free_on(device)
    if weights > (here := free_memory()).size:  # where they are drawn, before they go to a device
        raise HeadwiseError(
            f"{amount(weights)} of weights to be made, and {amount(here.size)} are free ({here.limit}); "
            f"a folder of its weights is read layer by layer"
        )
    token = WIDTH * price.d_model * torch.empty((), dtype=DTYPES[setting.dtype]).itemsize + price.cache.bytes_per_token
    needed = weights + token * setting.batch * setting.context
    if needed <= free.size:
        return
    fits = (free.size - weights) // token
    remedy = f"--batch 1 --context {fits} would fit" if fits > 0 else "pass a smaller --batch or --context"
    tokens, cache = setting.batch * setting.context, amount(price.cache.total_bytes)
    made = f"{amount(weights)} of weights to be made, " if weights else ""
    raise HeadwiseError(
        f"{made}{cache} of cache and what {tokens:,} tokens fill take about {amount(needed)}, and {amount(free.size)} "
        f"are free ({free.limit}); {remedy}"
    )


@torch.no_grad()
def measured(model: nn.Module, weights: str, price: Price, progress: Progress = lambda *counts: None) -> Measured:
    """Run a model at the setting of its price: seconds, bytes, FLOPs a second, medians of several runs.

    weights   "stored" or "random", as `open_description` says
    progress  is told what is being done, how much of it is done, and how much there is

    Raises HeadwiseError for a model that does not predict the next token.
    """
    require_next(model)
    setting, device, streamed = price.setting, device_of(model), stream_of(model) is not None
    like = next(model.parameters())
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary_of(model) or 2, (setting.batch, setting.context), generator=generator).to(device)
    times = _prefilled(model, ids, streamed, progress)
    seconds = statistics.median(times)
    steps, held = ([], None) if streamed or setting.context < 2 else _decoded(model, ids, progress)
    step = statistics.median(steps) if steps else None
    peak = _peak(device)
    progress("the machine", 0, 0)
    flops = 2 * ROWS * SIDE**2 / _fastest(_product(like.dtype, device, ROWS))
    bandwidth = setting.bandwidth or like.itemsize * SIDE**2 / _fastest(_product(like.dtype, device, 1))
    assert price.decode is not None
    moved = price.decode.weight_bytes + price.decode.cache_bytes
    return Measured(
        weights=weights,
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
        decode_seconds=step,
        tokens_per_second=None if step is None else setting.batch / step,
        decode_bytes_per_second=None if step is None else moved / step,
        decode_share=None if step is None else decode_bound(price, flops, bandwidth) / step,
        cache_bytes=held,
        peak_bytes=peak,
    )


def _prefilled(model: nn.Module, ids: Tensor, streamed: bool, progress: Progress) -> list[float]:
    """Seconds of each prefill of ids (B,T) after the first, which warms up; of that alone where it takes long."""

    def prefill() -> None:
        rows = each(model, [ids], partial(logits, last=True)) if streamed else [reader(model)(ids)]
        [row.flatten()[0].item() for row in rows]

    times = [_timed(prefill)]
    while len(times) <= RUNS and times[0] < LONG:
        progress("prefill", len(times), RUNS)
        times.append(_timed(prefill))
    return times[1:] or times


def _decoded(model: nn.Module, ids: Tensor, progress: Progress) -> tuple[list[float], int]:
    """Seconds of each step that writes the last tokens of ids (B,T), and the bytes of the cache at the end."""
    n = min(STEPS + WARM_UP, ids.shape[1] - 1)
    read = reader(model)
    read(ids[:, :-n])
    times: list[float] = []
    for token in ids[:, -n:].T[..., None]:
        progress("step", len(times), n)
        times.append(_timed(lambda token=token: read(token)[0].item()))  # type: ignore[misc]
    caches: Any = getattr(read.cache, "layers", read.cache) or ()
    return times[min(WARM_UP, n - 1) :], sum(map(_bytes, caches))


def _bytes(cache: Any) -> int:
    """What the cache of a layer holds: one of ours says it, one of transformers has tensors, or none of its own."""
    tensors = (getattr(cache, name, None) for name in ("keys", "values"))
    return getattr(cache, "nbytes", 0) or sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs: what the machine can do while nobody disturbs it."""
    return min(_timed(run) for _ in range(2 * RUNS))


def _product(dtype: torch.dtype, device: torch.device, rows: int) -> Callable[[], object]:
    """Rows times a matrix: of many rows FLOPs take the time, of one the reading of the matrix."""
    matrix = torch.full((SIDE, SIDE), 0.01, dtype=dtype, device=device)
    x = torch.full((rows, SIDE), 0.01, dtype=dtype, device=device)
    return lambda: F.linear(x, matrix)[0, 0].item()


def _peak(device: torch.device) -> int | None:
    if device.type == "cpu":
        return peak_memory()
    with suppress(RuntimeError):  # not every device keeps account
        return int(torch.accelerator.max_memory_allocated(device)) or None
    return None
