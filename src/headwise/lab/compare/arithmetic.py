"""Claims that counting settles: parameters of real layers, and operations counted while real layers run."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from headwise.lab.compare.results import DEPENDS, FAILS, HOLDS, Claim, Table
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
    claim = Claim(
        "Four split heads of width 4 cost 16 times less than four heads of the full width 16 (64 against 1024).",
        f"The scores of one query and one key take {per_key['4 heads of 4']} multiplications against "
        f"{per_key['4 heads of 16']}, a factor of {ratio:g}; one head of 16 takes {per_key['1 head of 16']} as well. "
        f"W_Q, W_K and W_V have {inputs['4 heads of 4']:,} weights against {inputs['4 heads of 16']:,}.",
        HOLDS if ratio == 16 else FAILS,
        "Holds if the counted factor is 16, and not otherwise.",
    )
    rows = tuple((name, per_key[name], inputs[name]) for name in layers)
    columns = ("heads", "multiplications per query and key", "weights of W_Q, W_K, W_V")
    return claim, Table("Split heads and full heads, width 16", columns, rows)


def parameters_with_heads() -> tuple[Claim, Table]:
    """3 d^2 against 4 d^2."""
    layers = {
        "1 head, without W_O": MultiHeadAttention(WIDTH, 1, out_proj=False),
        "1 head": MultiHeadAttention(WIDTH, 1),
        "12 heads": MultiHeadAttention(WIDTH, 12),
        "12 heads, without W_O": MultiHeadAttention(WIDTH, 12, out_proj=False),
    }
    counts = {name: sum(p.numel() for p in layer.parameters()) for name, layer in layers.items()}
    squares = {name: count / WIDTH**2 for name, count in counts.items()}
    as_claimed = (squares["1 head"], squares["12 heads"]) == (3, 4)
    only_without = (squares["1 head, without W_O"], squares["12 heads"]) == (3, 4)
    claim = Claim(
        "Single-head attention has 3 d² parameters, multi-head attention 4 d².",
        f"Counted at d = {WIDTH}: one head {squares['1 head']:g} d², 12 heads {squares['12 heads']:g} d²; without W_O "
        f"{squares['1 head, without W_O']:g} d² and {squares['12 heads, without W_O']:g} d².",
        HOLDS if as_claimed else DEPENDS if only_without else FAILS,
        "Holds if both layers with W_O have these counts; depends if the single head must drop W_O for it.",
    )
    rows = tuple((name, counts[name], squares[name]) for name in layers)
    return claim, Table(f"Parameters of an attention layer of width {WIDTH}", ("layer", "parameters", "in d²"), rows)


def flops_with_heads(width: int = WIDTH, tokens: int = TOKENS, rounds: int = 15) -> tuple[Claim, Table]:
    """Counted products, counted exponentials, and the time of the softmax, by number of heads."""
    flops = {h: counted_flops(MultiHeadAttention(width, h, mask=Causal()), tokens) for h in COUNTS}
    scores = {str(h): torch.zeros(1, h, tokens, tokens) for h in COUNTS}
    times = in_turn({name: partial(torch.softmax, x, -1) for name, x in scores.items()}, rounds)
    most, fewest = str(COUNTS[-1]), str(COUNTS[0])
    products = {sum(parts.values()) for parts in flops.values()}
    growth = median_ratio(times, most, fewest)
    same, grows = len(products) == 1, growth > GROWS
    claim = Claim(
        "The total number of FLOPs is the same for any number of heads.",
        f"Matrix products of a layer of width {width} on {tokens} tokens: "
        f"{' or '.join(f'{p / 1e6:,.1f}' for p in sorted(products))} million FLOPs with {fewest} to {most} heads. "
        f"The softmax takes h T² exponentials, and {growth:.1f} times as long with {most} heads as with {fewest}.",
        FAILS if not same else DEPENDS if grows else HOLDS,
        f"Holds if the products are equal and the softmax does not grow {GROWS:g} times; depends if only the products "
        f"are equal.",
    )
    rows = tuple((h, sum(flops[h].values()) / 1e6, h * tokens**2 / 1e6, milliseconds(times, str(h))) for h in COUNTS)
    columns = ("heads", "products, million FLOPs", "million exponentials", "softmax, ms")
    note = f"Products as torch counts them; the softmax of (1, heads, {tokens}, {tokens}) scores, median of {rounds}."
    return claim, Table(f"A layer of width {width} on {tokens} tokens", columns, rows, note)
