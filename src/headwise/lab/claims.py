"""The ledger: what courses claim, measured here, and a verdict that a rule makes of the figures.

First come the claims that need no training, counted on real layers or settled by a clock; then those that experiments
judge. No verdict and no figure of this machine is typed in; what cannot run here stands with the published figure.

Times are taken in turn within each round, so that a slow moment of the machine is shared; on one thread: with two,
another process that keeps a core busy made a call of 5 ms take 16 or 400 here.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from headwise import __version__, memory
from headwise.cost import TABLE, price
from headwise.gpt.train import one_thread
from headwise.intervals import Interval, interval_of
from headwise.lab.compare import EXPERIMENTS, SEEDS, compare, silent
from headwise.lab.courses.stacked import MultiHeadAttn, MultiHeadedAttentionWrapper, wrapper_from_class
from headwise.lab.experiments import ROLES, Report
from headwise.lab.results import (
    DEPENDS,
    FAILS,
    HOLDS,
    NOT_RUN,
    ArmResult,
    Claim,
    Comparison,
    Ledger,
    Metric,
    effect,
    judged_claim,
    measured_claim,
    of_all,
)
from headwise.layer.importers import from_course
from headwise.layer.layer import MultiHeadAttention
from headwise.masks import Causal
from headwise.rungs.tensor import attend
from headwise.spec import AttentionSpec, Options
from headwise.table import Cell, Table

FASTER = 1.1  # from this ratio of speeds on: smaller ones are lost among other differences
Times = dict[str, list[float]]  # seconds of each round


in_turn = one_thread()(memory.in_turn)


def median_ratio(times: Times, name: str, over: str) -> float:
    return statistics.median(a / b for a, b in zip(times[name], times[over], strict=True))


def milliseconds(times: Times, name: str) -> float:
    return 1000 * statistics.median(times[name])


def machine() -> dict[str, str | int]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "threads": "1 for each model in training, and in everything timed",
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "headwise": __version__,
    }


WIDTH = 768
TOKENS = 256
COUNTS = (1, 2, 4, 8, 16)
MINILM = {
    "model_type": "bert",
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "vocab_size": 30522,
}
RECOMMENDED = {100_000_000: (4, 8), 1_000_000_000: (8, 16), 10**15: (16, 96)}  # parameters below which so many heads
GROWS = 1.5  # from this ratio of times on, the softmax is said to grow


def counted_flops(layer: MultiHeadAttention, tokens: int) -> dict[str, int]:
    """FLOPs of a forward call on (1,tokens,d_in), as torch counts them: "linear" for projections, "attention"."""
    x = torch.zeros(1, tokens, layer.spec.d_in)
    # Of torch's ways, the counter sees into the one that is spelled out.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        layer(x)
    counts = {str(op): int(count) for op, count in counter.get_flop_counts()["Global"].items()}
    attention = sum(count for op, count in counts.items() if op == "aten.bmm")
    return {"linear": sum(counts.values()) - attention, "attention": attention}


def split_heads() -> tuple[Claim, Table]:
    """Heads that share a width against heads that each have all of it."""
    layers = {
        "4 heads of 4": MultiHeadAttention(16, 4),
        "1 head of 16": MultiHeadAttention(16, 1),
        "4 heads of 16": MultiHeadAttention(16, 4, head_dim=16),
    }
    # Half of the attention's products are scores, and a multiplication and an addition count 2.
    per_key = {name: counted_flops(layer, 1)["attention"] // 4 for name, layer in layers.items()}
    inputs = {
        name: sum(p.weight.numel() for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        for name, layer in layers.items()
    }
    ratio = per_key["4 heads of 16"] / per_key["4 heads of 4"]
    figures = {"split": per_key["4 heads of 4"], "full": per_key["4 heads of 16"], "single": per_key["1 head of 16"]}
    figures |= {"split_inputs": inputs["4 heads of 4"], "full_inputs": inputs["4 heads of 16"]}
    rows = ((name, per_key[name], inputs[name]) for name in layers)
    return measured_claim("split-heads", HOLDS if ratio == 16 else FAILS, rows, ratio=ratio, **figures)


def parameters_with_heads() -> tuple[Claim, Table]:
    """3 d^2 against 4 d^2."""
    layers = {
        "1 head, without W_O": MultiHeadAttention(WIDTH, 1, out_proj=False),
        "1 head": MultiHeadAttention(WIDTH, 1),
        "12 heads": MultiHeadAttention(WIDTH, 12),
        "12 heads, without W_O": MultiHeadAttention(WIDTH, 12, out_proj=False),
    }
    counts = {name: sum(p.numel() for p in layer.parameters()) for name, layer in layers.items()}
    squares = [count / WIDTH**2 for count in counts.values()]
    single_without, single, many, many_without = squares
    figures = {"single_without": single_without, "single": single, "many": many, "many_without": many_without}
    verdict = HOLDS if (single, many) == (3, 4) else DEPENDS if (single_without, many) == (3, 4) else FAILS
    rows = ((*count, square) for count, square in zip(counts.items(), squares, strict=True))
    return measured_claim("parameters", verdict, rows, width=WIDTH, **figures)


def heads_of_models() -> tuple[Claim, Table]:
    """The number of heads that a table recommends by size, against what published models have."""
    prices = {"MiniLM-L6": price(MINILM)} | {name: price(name) for name in TABLE}
    rows = []
    outside = []
    for name, priced in prices.items():
        total, heads = priced.parameters.total, priced.layers[0].attention.n_heads
        fewest, most = next(bounds for limit, bounds in RECOMMENDED.items() if total < limit)
        rows.append((name, total, heads, f"{fewest} to {most}"))
        if not fewest <= heads <= most:
            outside.append(f"{name} with {heads}")
    verdict = of_all([len(outside) < len(rows), not outside])
    figures = {"count": len(rows), "inside": len(rows) - len(outside), "outside": ", ".join(outside) or "none"}
    return measured_claim("sizes", verdict, rows, **figures)


def flops_with_heads(width: int = WIDTH, tokens: int = TOKENS, rounds: int = 15) -> tuple[Claim, Table]:
    """Counted products, counted exponentials, and the time of the softmax, by number of heads."""
    flops = {h: counted_flops(MultiHeadAttention(width, h, mask=Causal()), tokens) for h in COUNTS}
    scores = {str(h): torch.zeros(1, h, tokens, tokens) for h in COUNTS}
    times = in_turn({name: partial(torch.softmax, x, -1) for name, x in scores.items()}, rounds)
    most, fewest = str(COUNTS[-1]), str(COUNTS[0])
    products = {sum(parts.values()) for parts in flops.values()}
    growth = median_ratio(times, most, fewest)
    verdict = FAILS if len(products) > 1 else DEPENDS if growth > GROWS else HOLDS
    rows = ((h, sum(flops[h].values()) / 1e6, h * tokens**2 / 1e6, milliseconds(times, str(h))) for h in COUNTS)
    figures = {"width": width, "tokens": tokens, "rounds": rounds, "most": most, "fewest": fewest, "bar": GROWS}
    figures["products"] = " or ".join(f"{p / 1e6:,.1f}" for p in sorted(products))
    return measured_claim("flops", verdict, rows, growth=growth, **figures)


CLASS, WRAPPER, FUSED, PRINTED = "vectorised class", "stacked wrapper", "fused", "wrapper as printed"
COURSE = '"Build a Large Language Model (From Scratch)", section 3.6'


class LayerSize(NamedTuple):
    batch: int
    tokens: int
    width: int
    heads: int

    def __str__(self) -> str:
        return f"({self.batch},{self.tokens},{self.width}), {self.heads} heads"


LAYERS = (LayerSize(1, 16, 64, 8), LayerSize(16, 64, 128, 4), LayerSize(2, 1024, 768, 12))


def course_forms(sizes: Sequence[LayerSize] = LAYERS, rounds: int = 9) -> tuple[Claim, Table]:
    """The stacked heads, the vectorised class and the fused layer, with the same weights: one function."""
    all_times = {size: _course_times(size, (WRAPPER, CLASS, FUSED), rounds) for size in sizes}
    ratios = {size: median_ratio(times, WRAPPER, CLASS) for size, times in all_times.items()}
    fused = {size: median_ratio(times, CLASS, FUSED) for size, times in all_times.items()}
    each = "; ".join(f"{ratios[size]:.2f} at {size}" for size in sizes)
    rows: list[tuple[Cell, ...]] = [
        (str(size), *(milliseconds(times, name) for name in (WRAPPER, CLASS, FUSED)), ratios[size])
        for size, times in all_times.items()
    ]
    verdict = of_all([ratio >= FASTER for ratio in ratios.values()])
    figures = {"slowest": min(fused.values()), "fastest": max(fused.values()), "bar": FASTER, "rounds": rounds}
    return measured_claim("course-forms", verdict, rows, each=each, course=COURSE, **figures)


def printed_wrapper(sizes: Sequence[LayerSize] = LAYERS, rounds: int = 9) -> tuple[Claim, Table]:
    """The wrapper as the course prints it, whose heads each have the whole of d_out, weighed and timed."""
    rows = []
    same, each = [], []
    for size in sizes:
        layers = _course_layers(size)
        times = _course_times(size, (PRINTED, CLASS), rounds)
        x = torch.zeros(1, 1, size.width)
        with torch.no_grad():
            widths = {name: layers[name](x).shape[-1] for name in times}
        weights = {name: sum(p.numel() for p in layers[name].parameters()) for name in times}
        ratio = median_ratio(times, PRINTED, CLASS)
        same.append(widths[PRINTED] == widths[CLASS] and weights[PRINTED] == weights[CLASS])
        each.append(
            f"at {size} {weights[PRINTED]:,} weights against {weights[CLASS]:,}, an output {widths[PRINTED]:,} wide "
            f"against {widths[CLASS]:,}, and {ratio:.2f} times the time"
        )
        rows += [(f"{size}, {name}", weights[name], widths[name], milliseconds(times, name)) for name in times]
    verdict, words = HOLDS if all(same) else FAILS, "; ".join(each)
    return measured_claim("printed-wrapper", verdict, rows, each=words, rounds=rounds, course=COURSE)


def _course_layers(size: LayerSize) -> dict[str, nn.Module]:
    """With the same weights, but for the printed wrapper, which is another function."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        course = MultiHeadAttn(size.width, size.width, size.tokens, 0.0, size.heads).eval()
        printed = MultiHeadedAttentionWrapper(size.width, size.width, size.tokens, 0.0, size.heads).eval()
        stacked = nn.Sequential(*wrapper_from_class(course))
        return {WRAPPER: stacked, CLASS: course, FUSED: from_course(course).layer, PRINTED: printed}


def _course_times(size: LayerSize, names: Sequence[str], rounds: int) -> Times:
    layers = _course_layers(size)
    x = torch.randn(size.batch, size.tokens, size.width, generator=torch.Generator().manual_seed(1))
    return in_turn({name: partial(layers[name], x) for name in names}, rounds)


DECODE_HEADS, DECODE_WIDTH = 32, 64
CACHED = (1024, 8192)


def decoding(cached: Sequence[int] = CACHED, rounds: int = 15) -> tuple[Claim, Table]:
    """One new token against cached keys and values, shared as they are or repeated for every query head."""
    all_times = {n: in_turn(_decode_ways(n), rounds) for n in cached}
    rows = []
    speeds = []
    shown = []
    for n, times in all_times.items():
        ratios = {name: median_ratio(times, "MHA", name) for name in times}
        rows += [(name, n, milliseconds(times, name), ratio) for name, ratio in ratios.items()]
        del ratios["MHA"]
        speeds.append(f"after {n:,} tokens " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))
        shown += [ratio >= FASTER for ratio in ratios.values()]
    figures = {"heads": DECODE_HEADS, "width": DECODE_WIDTH, "rounds": rounds, "bar": FASTER}
    return measured_claim("decoding", of_all(shown), rows, speeds="; ".join(speeds), **figures)


def _decode_ways(cached: int) -> dict[str, Callable[[], Tensor]]:
    q = torch.ones(1, DECODE_HEADS, 1, DECODE_WIDTH)
    ways: dict[str, Callable[[], Tensor]] = {}
    for name, kv_heads in (("MHA", DECODE_HEADS), ("GQA", 8), ("MQA", 1)):
        k, v = (torch.ones(1, kv_heads, cached, DECODE_WIDTH) for _ in range(2))
        ways[name] = partial(attend, q, k, v, Options(mask=Causal()))
        if kv_heads < DECODE_HEADS:
            ways[f"{name}, repeated"] = partial(_repeated, q, k, v)
    return ways


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    times = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))


# The whole ledger, and the claims that experiments judge.

CLEAR = 2.0  # times the mass of an even look that a head must give to a role

ELSEWHERE = tuple(
    judged_claim(f"elsewhere-{name}", NOT_RUN) for name in ("shared", "needed", "deep", "semantic", "parallel")
)
COUNTED: dict[str, Callable[[], tuple[Claim, Table]]] = {
    "split heads": split_heads,
    "parameters": parameters_with_heads,
    "FLOPs": flops_with_heads,
    "heads by size": heads_of_models,
    "course forms": course_forms,
    "wrapper as printed": printed_wrapper,
    "decoding": decoding,
}


def run_claims(
    out: Path,
    command: str,
    n_seeds: int = SEEDS,
    steps: int | None = None,
    workers: int = 1,
    report: Report = silent,
) -> Ledger:
    """Run all experiments, then count and time, and judge every claim. The arguments are those of `compare`.

    command  how the ledger was asked for, to stand on its page
    """
    wall, cpu = time.monotonic(), _cpu_seconds()
    comparisons = compare(list(EXPERIMENTS.values()), out, n_seeds, steps, None, workers, report)
    rows: list[tuple[Claim, Table]] = []
    for name, measure in COUNTED.items():
        report(f"claims: {name}", len(rows), len(COUNTED))
        rows.append(measure())
    report("claims: all measured", len(rows), len(COUNTED))
    return Ledger(
        command=command,
        machine=machine(),
        seeds=tuple(range(n_seeds)),
        claims=(*(claim for claim, _ in rows), *judged(comparisons), *ELSEWHERE),
        comparisons=comparisons,
        tables=tuple(table for _, table in rows),
        wall_seconds=time.monotonic() - wall,
        cpu_seconds=_cpu_seconds() - cpu,
    )


def _cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def judged(comparisons: tuple[Comparison, ...]) -> tuple[Claim, ...]:
    named = {comparison.name: comparison for comparison in comparisons}
    sharing, roles = named["sharing"], named["roles"]
    return (
        several_heads(named["heads"], named["two-lookups"]),
        ordered_quality(sharing),
        advice(sharing),
        indispensable_output(named["output-projection"]),
        roles_of_heads(roles),
        robust(roles),
    )


def several_heads(heads: Comparison, lookups: Comparison) -> Claim:
    shown, differences = [], []
    for comparison in (heads, lookups):
        metric, first = comparison.metrics[0], comparison.arms[0]
        equal = [arm for arm in comparison.arms[1:] if arm.parameters == first.parameters]
        shown += [_effect(arm, metric) == 1 for arm in equal]
        each = ", ".join(_difference(arm, metric) for arm in equal)
        differences.append(f"{comparison.name}, {metric.words}: {each}")
    return judged_claim("several-heads", of_all(shown), differences=_capital(". ".join(differences)))


def _price_of_sharing(sharing: Comparison) -> tuple[str, str]:
    """The verdict on "each step costs quality", and the steps with their intervals."""
    metric, (mha, gqa, mqa) = sharing.metrics[0], sharing.arms
    steps = [paired(gqa, mha, metric), paired(mqa, gqa, metric)]
    effects = [0 if step is None else effect(step, metric) for step in steps]
    differences = [f"{name} {_pm(step)}" for name, step in zip(("GQA less MHA", "MQA less GQA"), steps, strict=True)]
    return FAILS if 1 in effects else of_all([step == -1 for step in effects]), ", ".join(differences)


def ordered_quality(sharing: Comparison) -> Claim:
    verdict, differences = _price_of_sharing(sharing)
    return judged_claim("ordered-quality", verdict, differences=differences)


def advice(sharing: Comparison) -> Claim:
    verdict, differences = _price_of_sharing(sharing)
    cached = {
        name: AttentionSpec(d_model=512, n_heads=8, n_kv_heads=groups).cache_values_per_token
        for name, groups in (("mha", 8), ("gqa", 2), ("mqa", 1))
    }
    return judged_claim("advice", verdict, differences=differences, **cached)


def indispensable_output(output: Comparison) -> Claim:
    metric, (_, without) = output.metrics[0], output.arms
    verdict = HOLDS if _effect(without, metric) == -1 or without.failure is not None else FAILS
    difference = _difference(without, metric)
    return judged_claim("indispensable-output", verdict, metric=_capital(metric.words), difference=difference)


def roles_of_heads(roles: Comparison) -> Claim:
    trained = roles.arm("trained")
    metrics = {metric.name: metric for metric in roles.metrics}
    shown, masses = [], []
    for role in ROLES if trained.scores else ():
        mass, even = trained.scores[role].mean.mean, trained.scores[f"even {role}"].mean.mean
        cost = trained.scores[f"silenced {role}"].mean
        learned = _effect(trained, metrics[role]) == 1 and mass >= CLEAR * even
        shown.append(learned and cost.low > 0)
        before = roles.arm("untrained").scores[role].mean.mean
        silenced = f"silenced {cost.mean:+z.2f} ± {cost.half_width:.2f} nats"
        no_role = "" if shown[-1] else ": no role"
        masses.append(f"{role} {mass:.2f} (untrained {before:.2f}, even {even:.2f}), {silenced}{no_role}")
    words = "; ".join(masses) or "diverged"
    return judged_claim("roles", of_all(shown or [False]), masses=words, bar=CLEAR, count=len(ROLES))


def robust(roles: Comparison) -> Claim:
    trained = roles.arm("trained")
    costs = {role: trained.scores[f"silenced {role}"].mean for role in ROLES if trained.scores}
    words = ", ".join(f"{role} {_pm(cost)}" for role, cost in costs.items()) or "diverged"
    return judged_claim("robust", FAILS if any(cost.low > 0 for cost in costs.values()) else DEPENDS, costs=words)


def _effect(arm: ArmResult, metric: Metric) -> int:
    """1 better than the first arm, -1 worse, 0 not detectably different, or not trained to the end."""
    score = arm.scores.get(metric.name)
    return 0 if score is None or score.difference is None else effect(score.difference, metric)


def paired(arm: ArmResult, other: ArmResult, metric: Metric) -> Interval | None:
    if metric.name not in arm.scores or metric.name not in other.scores:
        return None
    pairs = zip(arm.scores[metric.name].values, other.scores[metric.name].values, strict=True)
    return interval_of([value - baseline for value, baseline in pairs])


def _difference(arm: ArmResult, metric: Metric) -> str:
    score = arm.scores.get(metric.name)
    return f"{arm.name} {_pm(None if score is None else score.difference)}"


def _pm(difference: Interval | None) -> str:
    return "diverged" if difference is None else f"{difference.mean:+z.3f} ± {difference.half_width:.3f}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
