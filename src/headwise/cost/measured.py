"""What a price came to on a machine: the record that `models/meter.py` fills, and its rows beside the price."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.cost.pricing import Price
from headwise.markup import BINARY, DECIMAL, plural, scaled


@dataclass(frozen=True)
class Measured:
    """A prefill of random ids, and steps after it, at the setting of a price; times are medians.

    A share is the time that the bound needs over the time it took. The bound of a pass is the longer of its FLOPs at
    the machine's speed and its bytes at the machine's bandwidth, each measured right after.
    """

    weights: str  # "stored" or "random"
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
    decode_seconds: float | None  # of a step
    tokens_per_second: float | None  # of the batch together
    decode_bytes_per_second: float | None
    decode_share: float | None
    cache_bytes: int | None  # held after the last step
    peak_bytes: int | None  # most memory of the process; on another device, of the tensors there

    def rows(self, price: Price) -> list[tuple[str, str, str]]:
        """What, computed, measured."""
        machine = self.machine_flops_per_second, self.machine_bytes_per_second
        flops, held = _per_second(self.prefill_flops_per_second, "FLOP"), price.weight_bytes + price.cache.total_bytes
        rows = [
            ("prefill", f"{prefill_bound(price, *machine):,.3g} s at least", f"{self.prefill_seconds:,.3g} s"),
            ("  FLOPs", _per_second(machine[0], "FLOP"), f"{flops}: {self.prefill_share:.0%} of the bound"),
        ]
        if self.decode_seconds is not None:
            most = price.setting.batch / decode_bound(price, *machine)
            moved = _per_second(self.decode_bytes_per_second or 0, "B")
            rows += [
                ("decode", f"{most:,.3g} tokens/s at most", f"{self.tokens_per_second:,.3g} tokens/s"),
                ("  bytes", _per_second(machine[1], "B"), f"{moved}: {self.decode_share:.0%} of the bound"),
                ("cache", f"{price.cache.total_bytes:,} bytes", f"{self.cache_bytes:,} bytes"),
            ]
        if self.peak_bytes is not None:
            whole, most_held = (scaled(n, 1024, BINARY) for n in (held, self.peak_bytes))
            rows.append(("memory", f"{whole} of weights and cache", f"{most_held} at most"))
        return rows

    @property
    def conditions(self) -> str:
        """How it was measured, in a sentence."""
        way = "read layer by layer" if self.streamed else "in memory"
        steps = f", {plural(self.steps, 'step')}" if self.steps else ""
        where = f"{self.dtype} on {self.device}, {plural(self.threads, 'thread')}"
        return f"{self.weights} weights {way}, {where}; medians of {plural(self.runs, 'prefill')}{steps}"


def prefill_bound(price: Price, flops: float, bandwidth: float) -> float:
    """Seconds of a prefill at `flops` a second, or at `bandwidth` bytes a second for the weights of a single step.

    Of the experts and the embeddings a prefill may read more than a step does, and need not. The model must decode.
    """
    assert price.decode is not None
    return max(price.prefill.total_flops / flops, price.decode.weight_bytes / bandwidth)


def decode_bound(price: Price, flops: float, bandwidth: float) -> float:
    """Seconds of a step of decoding, by its FLOPs or by the bytes of its weights and cache. The model must decode."""
    assert price.decode is not None
    return max(price.decode.flops / flops, (price.decode.weight_bytes + price.decode.cache_bytes) / bandwidth)


def _per_second(number: float, unit: str) -> str:
    return f"{scaled(round(number), 1000, DECIMAL)}{unit}/s"
