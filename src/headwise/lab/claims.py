"""The ledger: what courses claim, measured here, and a verdict that a rule makes of the figures.

First come the claims that need no training: they are counted on real layers or settled by a clock. Then come those
that experiments judge. No verdict and no figure of this machine is typed in: `claims.toml` has only the words, with
places for figures. What cannot run here stands with the published figure.

Every round runs all calls, one after the other, so that a slow moment of the machine is shared. They run on one
thread: with two, another process that kept a core busy made a call of 5 ms take 16 to 400 ms here.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
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
from headwise.intervals import Interval
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
    Measured,
    Metric,
    effect,
    judged_claim,
    measured_claim,
    of_all,
    paired,
)
from headwise.layer.importers import from_course
from headwise.layer.layer import MultiHeadAttention
from headwise.masks import Causal
from headwise.rungs.tensor import attend
from headwise.spec import AttentionSpec, Options
from headwise.table import Cell, Table

FASTER = 1.1  # from this ratio of speeds on, a way is said to be faster: a round choice, named in the rules
Times = dict[str, list[float]]  # name of a call -> its seconds in each round

# Without gradients, as `memory.in_turn` times all calls, and in the block `one_thread()`: contextlib's blocks are
# decorators, too. How many rounds stand below is a round choice: more take longer, and the median is surer.
in_turn = one_thread()(memory.in_turn)


def median_ratio(times: Times, name: str, over: str) -> float:
    # Round by round, not median over median: a slow round slows both.
    return statistics.median(a / b for a, b in zip(times[name], times[over], strict=True))


def milliseconds(times: Times, name: str) -> float:
    return 1000 * statistics.median(times[name])


def machine() -> dict[str, str | int]:
    cpuinfo = Path("/proc/cpuinfo")  # of Linux; some of its processors have no "model name" there
    named = re.search(r"^model name\s*:(.*)", cpuinfo.read_text("utf-8"), re.MULTILINE) if cpuinfo.exists() else None
    return {
        "processor": named[1].strip() if named else platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "threads": "1 for each model in training, and in everything timed",
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "headwise": __version__,
    }


WIDTH = 768  # GPT-2's, for a layer that is counted
TOKENS = 256  # each head's map of the softmax is 256 x 256
COUNTS = (1, 2, 4, 8, 16)  # numbers of heads that are compared
MINILM = {  # the config of a small model: all models of cost's own table have more than 100 million parameters
    "model_type": "bert",
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "vocab_size": 30522,
}
# The claim: the fewest and the most heads of models below so many parameters. 10**15 stands for no limit.
RECOMMENDED = {100_000_000: (4, 8), 1_000_000_000: (8, 16), 10**15: (16, 96)}
# Above this ratio of times the softmax is said to grow: a round choice between 1, no growth, and 16, as heads do.
GROWS = 1.5


def counted_flops(layer: MultiHeadAttention, tokens: int) -> dict[str, int]:
    """FLOPs of a forward call on (1,tokens,d_in), as torch counts them: a multiplication and an addition are 2.

    "linear" has those of the projections, "attention" those of the scores and of the mixed values.
    """
    x = torch.zeros(1, tokens, layer.spec.d_in)
    # torch's counter does not see into the fused kernel of the processor. MATH makes two batched products instead.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        layer(x)
    counts = {str(op): int(count) for op, count in counter.get_flop_counts()["Global"].items()}
    attention = sum(count for op, count in counts.items() if op == "aten.bmm")
    return {"linear": sum(counts.values()) - attention, "attention": attention}


def split_heads() -> Measured:
    """Heads that share a width against heads with all of it: the claim says that they cost 16 times more."""
    layers = {
        "4 heads of 4": MultiHeadAttention(16, 4),
        "1 head of 16": MultiHeadAttention(16, 1),
        "4 heads of 16": MultiHeadAttention(16, 4, head_dim=16),
    }
    rows = []
    for name, layer in layers.items():
        # One token is one query and one key. Half of the FLOPs are of scores, the other half of the mixed values; and
        # half of those are multiplications, the rest additions.
        per_key = counted_flops(layer, 1)["attention"] // 4
        rows.append((name, per_key, sum(p.weight.numel() for p in (layer.q_proj, layer.k_proj, layer.v_proj))))
    (_, split, split_inputs), (_, single, _), (_, full, full_inputs) = rows
    return measured_claim(
        "split-heads",
        HOLDS if full == 16 * split else FAILS,
        rows,
        ratio=full / split,
        split=split,
        full=full,
        single=single,
        split_inputs=split_inputs,
        full_inputs=full_inputs,
    )


def parameters_with_heads() -> Measured:
    """The claim: 3 d^2 parameters with one head, W_Q, W_K and W_V, and 4 d^2 with several, which need W_O besides."""
    layers = {
        "1 head, without W_O": MultiHeadAttention(WIDTH, 1, out_proj=False),
        "1 head": MultiHeadAttention(WIDTH, 1),
        "12 heads": MultiHeadAttention(WIDTH, 12),
        "12 heads, without W_O": MultiHeadAttention(WIDTH, 12, out_proj=False),
    }
    rows = []
    for name, layer in layers.items():
        count = sum(p.numel() for p in layer.parameters())
        rows.append((name, count, count / WIDTH**2))
    single_without, single, many, many_without = (squares for *_, squares in rows)
    figures = {"single_without": single_without, "single": single, "many": many, "many_without": many_without}
    # DEPENDS where the claim counts a single head without W_O, and several with it.
    verdict = HOLDS if (single, many) == (3, 4) else DEPENDS if (single_without, many) == (3, 4) else FAILS
    return measured_claim("parameters", verdict, rows, width=WIDTH, **figures)


def heads_of_models() -> Measured:
    """The number of heads that a table recommends by size, against what published models have."""
    prices = {"MiniLM-L6": price(MINILM)} | {name: price(name) for name in TABLE}
    rows = []
    outside = []
    for name, priced in prices.items():
        total, heads = priced.parameters.total, priced.layers[0].attention.n_heads  # all layers have as many
        fewest, most = next(bounds for limit, bounds in RECOMMENDED.items() if total < limit)
        rows.append((name, total, heads, f"{fewest} to {most}"))
        if not fewest <= heads <= most:
            outside.append(f"{name} with {heads}")
    # Is any model inside the bounds, and are all? One yes of two gives DEPENDS.
    verdict = of_all([len(outside) < len(rows), not outside])
    figures = {"count": len(rows), "inside": len(rows) - len(outside), "outside": ", ".join(outside) or "none"}
    return measured_claim("sizes", verdict, rows, **figures)


def flops_with_heads(width: int = WIDTH, tokens: int = TOKENS, rounds: int = 15) -> Measured:
    """By number of heads: counted products, which should be the same, and the softmax, one exponential a weight."""
    calls = {str(h): partial(torch.softmax, torch.zeros(1, h, tokens, tokens), -1) for h in COUNTS}
    times = in_turn(calls, rounds)
    rows = []
    for h in COUNTS:
        products = sum(counted_flops(MultiHeadAttention(width, h), tokens).values())
        rows.append((h, products / 1e6, h * tokens**2 / 1e6, milliseconds(times, str(h))))
    fewest, *_, most = times  # its keys are the COUNTS in order: "1" and "16"
    growth = median_ratio(times, most, fewest)
    counts = sorted({products for _, products, *_ in rows})  # one number where all heads take equally many
    verdict = FAILS if len(counts) > 1 else DEPENDS if growth > GROWS else HOLDS
    figures = {"width": width, "tokens": tokens, "rounds": rounds, "most": most, "fewest": fewest, "bar": GROWS}
    figures["products"] = " or ".join(f"{count:,.1f}" for count in counts)
    return measured_claim("flops", verdict, rows, growth=growth, **figures)


# The forms of a layer: all heads in one product, heads one by one, the fused layer of headwise, and heads one by one
# as the course prints them, each as wide as the whole layer.
CLASS, WRAPPER, FUSED, PRINTED = "vectorised class", "stacked wrapper", "fused", "wrapper as printed"
COURSE = '"Build a Large Language Model (From Scratch)", section 3.6'


class LayerSize(NamedTuple):
    batch: int
    tokens: int
    width: int
    heads: int

    def __str__(self) -> str:
        return f"({self.batch},{self.tokens},{self.width}), {self.heads} heads"


# From so small that the calls of Python take the time, to GPT-2's width and heads on its longest text.
LAYERS = (LayerSize(1, 16, 64, 8), LayerSize(16, 64, 128, 4), LayerSize(2, 1024, 768, 12))


def course_forms(sizes: Sequence[LayerSize] = LAYERS, rounds: int = 9) -> Measured:
    """The stacked heads, the vectorised class and the fused layer, with the same weights: one function."""
    rows: list[tuple[Cell, ...]] = []
    each, is_faster, fused = [], [], []
    for size in sizes:
        layers = _course_layers(size)
        del layers[PRINTED]  # another function; `printed_wrapper` times it
        times = _course_times(layers, size, rounds)
        ratio = median_ratio(times, WRAPPER, CLASS)
        rows.append((str(size), *(milliseconds(times, name) for name in layers), ratio))
        each.append(f"{ratio:.2f} at {size}")
        is_faster.append(ratio >= FASTER)
        fused.append(median_ratio(times, CLASS, FUSED))
    figures = {"slowest": min(fused), "fastest": max(fused), "bar": FASTER, "rounds": rounds}
    return measured_claim("course-forms", of_all(is_faster), rows, each="; ".join(each), course=COURSE, **figures)


def printed_wrapper(sizes: Sequence[LayerSize] = LAYERS, rounds: int = 9) -> Measured:
    """The wrapper as the course prints it, whose heads each have the whole of d_out, weighed and timed."""
    rows = []
    each, is_same = [], []
    for size in sizes:
        layers = _course_layers(size)
        layers = {name: layers[name] for name in (PRINTED, CLASS)}
        times = _course_times(layers, size, rounds)
        forms = []
        for name, layer in layers.items():
            weights = sum(p.numel() for p in layer.parameters())
            width = layer(torch.zeros(1, 1, size.width)).shape[-1]
            forms.append((weights, width))
            rows.append((f"{size}, {name}", weights, width, milliseconds(times, name)))
        (weights, width), (class_weights, class_width) = forms
        is_same.append(forms[0] == forms[1])
        each.append(
            f"at {size} {weights:,} weights against {class_weights:,}, an output {width:,} wide against "
            f"{class_width:,}, and {median_ratio(times, PRINTED, CLASS):.2f} times the time"
        )
    verdict = HOLDS if all(is_same) else FAILS
    return measured_claim("printed-wrapper", verdict, rows, each="; ".join(each), rounds=rounds, course=COURSE)


def _course_layers(size: LayerSize) -> dict[str, nn.Module]:
    """The forms by their names, with the same weights, but for the printed wrapper, which is another function."""
    # torch's random state is left as it was: that of the processor, since no device is used.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Both take d_in, d_out, context_length, dropout and num_heads.
        course = MultiHeadAttn(size.width, size.width, size.tokens, 0.0, size.heads).eval()
        printed = MultiHeadedAttentionWrapper(size.width, size.width, size.tokens, 0.0, size.heads).eval()
        stacked = nn.Sequential(*wrapper_from_class(course))  # the heads, then the projection
        return {WRAPPER: stacked, CLASS: course, FUSED: from_course(course).layer, PRINTED: printed}


def _course_times(layers: Mapping[str, nn.Module], size: LayerSize, rounds: int) -> Times:
    x = torch.randn(size.batch, size.tokens, size.width, generator=torch.Generator().manual_seed(1))
    return in_turn({name: partial(layer, x) for name, layer in layers.items()}, rounds)


DECODE_HEADS, DECODE_WIDTH = 32, 64  # query heads, and the width of each: with 8 key/value heads as in Llama 3.2 1B
CACHED = (1024, 8192)  # tokens before the new one: a short and a long text


def decoding(cached: Sequence[int] = CACHED, rounds: int = 15) -> Measured:
    """One new token against cached keys and values, shared as they are or repeated for every query head."""
    rows = []
    speeds, is_faster = [], []
    for n in cached:
        times = in_turn(_decode_ways(n), rounds)
        ratios = {name: median_ratio(times, "MHA", name) for name in times}
        rows += [(name, n, milliseconds(times, name), ratio) for name, ratio in ratios.items()]
        del ratios["MHA"]  # over itself: 1
        speeds.append(f"after {n:,} tokens " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))
        is_faster += [ratio >= FASTER for ratio in ratios.values()]
    figures = {"heads": DECODE_HEADS, "width": DECODE_WIDTH, "rounds": rounds, "bar": FASTER}
    return measured_claim("decoding", of_all(is_faster), rows, speeds="; ".join(speeds), **figures)


def _decode_ways(cached: int) -> dict[str, Callable[[], Tensor]]:
    # All numbers are 1: the time does not hang on them.
    q = torch.ones(1, DECODE_HEADS, 1, DECODE_WIDTH)
    ways: dict[str, Callable[[], Tensor]] = {}
    for name, kv_heads in (("MHA", DECODE_HEADS), ("GQA", 8), ("MQA", 1)):
        k, v = (torch.ones(1, kv_heads, cached, DECODE_WIDTH) for _ in range(2))
        ways[name] = partial(attend, q, k, v, Options(mask=Causal()))
        if kv_heads < DECODE_HEADS:
            ways[f"{name}, repeated"] = partial(_repeated, q, k, v)
    return ways


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # No mask: the one query is the latest token, which sees all.
    times = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))


# The whole ledger, and the claims that experiments judge.

# A head has a role from this many times the mass that even weights would give it: a round choice.
CLEAR = 2.0

# What cannot run here: claims.toml has the published figures.
ELSEWHERE = tuple(
    judged_claim(f"elsewhere-{name}", NOT_RUN) for name in ("shared", "needed", "deep", "semantic", "parallel")
)
# The claims that need no training, in the order of the page. The names are for the reports of progress alone.
COUNTED: dict[str, Callable[[], Measured]] = {
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

    out      folder in which finished units are kept, so that a second call goes on
    command  how the ledger was asked for, to stand on its page
    """
    wall, cpu = time.monotonic(), _cpu_seconds()
    # None: on the built-in data.
    comparisons = compare(list(EXPERIMENTS.values()), out, n_seeds, steps, None, workers, report)
    claims: list[Claim] = []
    tables: list[Table] = []
    for name, measure in COUNTED.items():
        report(f"claims: {name}", len(claims), len(COUNTED))
        claim, table = measure()
        claims.append(claim)
        tables.append(table)
    report("claims: all measured", len(COUNTED), len(COUNTED))
    return Ledger(
        command=command,
        machine=machine(),
        seeds=tuple(range(n_seeds)),
        claims=(*claims, *judged(comparisons), *ELSEWHERE),
        comparisons=comparisons,
        tables=tuple(tables),
        wall_seconds=time.monotonic() - wall,
        cpu_seconds=_cpu_seconds() - cpu,
    )


def _cpu_seconds() -> float:
    """Of this process and of its children that have ended, in the program and in the system: four numbers."""
    return sum(os.times()[:4])  # the fifth is the time of the clock on the wall


def judged(comparisons: Sequence[Comparison]) -> tuple[Claim, ...]:
    named = {comparison.name: comparison for comparison in comparisons}
    return (
        several_heads(named["heads"], named["two-lookups"]),
        *price_of_sharing(named["sharing"]),
        indispensable_output(named["output-projection"]),
        *roles_of_heads(named["roles"]),
    )


def several_heads(heads: Comparison, lookups: Comparison) -> Claim:
    """That several heads beat one, the first arm, in both experiments."""
    shown, parts = [], []
    for comparison in (heads, lookups):
        metric, (first, *others) = comparison.metrics[0], comparison.arms
        # The claim is of equal parameters: the arm of one head with more neurons is left out.
        differences = {arm.name: difference(arm, first, metric) for arm in others if arm.parameters == first.parameters}
        shown += [effect(each, metric) == 1 for each in differences.values()]  # 1: detectably better
        parts.append(f"{comparison.name}, {metric.words}: {_in_words(differences)}")
    return judged_claim("several-heads", of_all(shown), differences=_capital(". ".join(parts)))


def price_of_sharing(sharing: Comparison) -> tuple[Claim, Claim]:
    """That quality falls with each step from MHA to MQA, and the advice that rests on it: one verdict for both."""
    metric, (mha, gqa, mqa) = sharing.metrics[0], sharing.arms
    steps = {"GQA less MHA": difference(gqa, mha, metric), "MQA less GQA": difference(mqa, gqa, metric)}
    effects = [effect(step, metric) for step in steps.values()]
    # 1: a step to fewer key/value heads made the model better. -1: it made it worse, as claimed.
    verdict = FAILS if 1 in effects else of_all([step == -1 for step in effects])
    cached = {  # of 8 heads of 64, as the words of "advice" in claims.toml say
        name: AttentionSpec(d_model=512, n_heads=8, n_kv_heads=groups).cache_values_per_token
        for name, groups in (("mha", 8), ("gqa", 2), ("mqa", 1))
    }
    ordered = judged_claim("ordered-quality", verdict, differences=_in_words(steps))
    return ordered, judged_claim("advice", verdict, differences=_in_words(steps), **cached)


def indispensable_output(output: Comparison) -> Claim:
    """That a model cannot do without W_O."""
    metric, (first, without) = output.metrics[0], output.arms
    added = difference(without, first, metric)
    # -1: detectably worse. A failure: training without W_O diverged.
    verdict = HOLDS if effect(added, metric) == -1 or without.failure is not None else FAILS
    words = {"metric": _capital(metric.words), "difference": _in_words({without.name: added})}
    return judged_claim("indispensable-output", verdict, **words)


def roles_of_heads(roles: Comparison) -> tuple[Claim, Claim]:
    """That heads take roles, and that the model can do without any one of these heads.

    For each role `role_scores` gives three numbers of the head that plays it most: its mass, the mass of even
    weights, and what silencing the head adds to the loss.
    """
    untrained, trained = roles.arms
    metrics = {metric.name: metric for metric in roles.metrics}
    is_role, masses, costs = [], [], {}  # of each role: does it count? its words for the page; what silencing costs
    for role in ROLES if trained.scores else ():  # there are no scores where training diverged
        # `Score.mean` is an interval; the mean itself is `mass.mean`.
        mass, even, cost = (trained.scores[name].mean for name in (role, f"even {role}", f"silenced {role}"))
        is_learned = effect(difference(trained, untrained, metrics[role]), metrics[role]) == 1
        # cost.low > 0: the whole interval lies above 0, so silencing the head detectably adds to the loss.
        is_role.append(is_learned and mass.mean >= CLEAR * even.mean and cost.low > 0)
        before = untrained.scores[role].mean.mean
        silenced = f"silenced {cost.mean:+z.2f} ± {cost.half_width:.2f} nats"  # "z": -0.001 is +0.00, not -0.00
        no_role = "" if is_role[-1] else ": no role"
        masses.append(f"{role} {mass.mean:.2f} (untrained {before:.2f}, even {even.mean:.2f}), {silenced}{no_role}")
        costs[role] = cost
    words = {"masses": "; ".join(masses) or "diverged", "bar": CLEAR, "count": len(ROLES)}
    # It never holds: only the heads that play a role best are silenced, and the claim is of all heads.
    is_needed = any(cost.low > 0 for cost in costs.values())
    return (
        # [False]: where training diverged there is no role to judge, and `all` of an empty list would be true.
        judged_claim("roles", of_all(is_role or [False]), **words),
        judged_claim("robust", FAILS if is_needed else DEPENDS, costs=_in_words(costs) or "diverged"),
    )


def difference(arm: ArmResult, other: ArmResult, metric: Metric) -> Interval | None:
    """How far an arm lies from another one; None where one of them was not trained to the end."""
    if not arm.scores or not other.scores:
        return None
    return paired(arm.scores[metric.name].values, other.scores[metric.name].values)


def _in_words(differences: Mapping[str, Interval | None]) -> str:
    parts = []  # such as "2 heads +0.018 ± 0.084", "4 heads diverged"
    for name, each in differences.items():
        parts.append(f"{name} diverged" if each is None else f"{name} {each.mean:+z.3f} ± {each.half_width:.3f}")
    return ", ".join(parts)


def _capital(text: str) -> str:
    # Not `capitalize`, which makes the rest small: "loss of W_O" would be "Loss of w_o".
    return text[:1].upper() + text[1:]
