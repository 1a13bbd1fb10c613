"""Claims that counting settles: parameters of real layers, and operations counted while real layers run."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from headwise.lab.compare.results import DEPENDS, FAILS, HOLDS, Claim, Table, measured_claim
from headwise.lab.compare.timing import in_turn, median_ratio, milliseconds
from headwise.layer.layer import MultiHeadAttention
from headwise.masks import Causal

WIDTH = 768
TOKENS = 256
COUNTS = (1, 2, 4, 8, 16)
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
    single_without, single, many, many_without = squares = [count / WIDTH**2 for count in counts.values()]
    figures = {"single_without": single_without, "single": single, "many": many, "many_without": many_without}
    verdict = HOLDS if (single, many) == (3, 4) else DEPENDS if (single_without, many) == (3, 4) else FAILS
    rows = ((*count, square) for count, square in zip(counts.items(), squares, strict=True))
    return measured_claim("parameters", verdict, rows, width=WIDTH, **figures)


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
