"""Head statistics by their definitions, from whole maps in double precision; no line is shared with the package."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCKS = 32  # of a thumbnail, in each direction

# In float32, against the same numbers in double precision: shares of the attention, and nats.
MASS, NATS = 1e-5, 1e-4


def row_statistics(
    p_hts: Tensor,
    *,
    start: int | None = 0,
    first: int = 0,
    q_ids: Tensor | None = None,
    k_ids: Tensor | None = None,
    marks: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Name -> (H,T) for weights (H,T,S); query i stands at key i + start, None for two sequences."""
    p = p_hts.double()
    T, S = p.shape[1:]
    found = {"entropy": torch.special.entr(p).sum(-1), "confidence": p.amax(-1), "first": p[..., first]}
    if start is not None:
        behind = torch.arange(T)[:, None] + start - torch.arange(S)  # (T,S): i - j
        mass = p.sum(-1)
        share = torch.where(mass[..., None] > 0, p / mass[..., None], 0)
        found["distance"] = (share * behind).sum(-1)
        found["spread"] = (share * (behind - found["distance"][..., None]) ** 2).sum(-1).sqrt()
        for name, k in (("self", 0), ("next", -1), ("previous", 1)):
            found[name] = (p * (behind == k)).sum(-1)
        if q_ids is not None and k_ids is not None:
            same = (q_ids[:, None] == k_ids) & (behind > 0)  # earlier keys with the query's token
            after = torch.zeros_like(same)
            after[:, 1:] = same[:, :-1]  # and the keys right behind those
            found["same_token"], found["after_same"] = (p * same).sum(-1), (p * after).sum(-1)
    return found | {name: (p * mark).sum(-1) for name, mark in (marks or {}).items()}


def score_statistics(masked_hts: Tensor, sink_h: Tensor | None = None) -> dict[str, Tensor]:
    """Name -> (H,T) of what a softmax reads, (H,T,S), -inf where a query may not look; NaN where it may nowhere."""
    scores = masked_hts.double()
    found = {"score_max": scores.amax(-1), "lse": scores.logsumexp(-1)}
    if sink_h is not None:
        sink = sink_h.detach().double()[:, None].expand(found["lse"].shape)
        found["lse"] = torch.where(found["lse"] > -torch.inf, torch.logaddexp(found["lse"], sink), -torch.inf)
        found["sink"] = torch.where(found["lse"] > -torch.inf, (sink - found["lse"]).exp(), 0)
    return {name: values.masked_fill(values == -torch.inf, torch.nan) for name, values in found.items()}


def reach(p_hts: Tensor, start: int, first: int, part: float = 0.99) -> Tensor:
    """(H,T): so many of the latest keys hold that part of a row's weight, the first key beside them."""
    p, (T, S) = p_hts.double(), p_hts.shape[1:]
    behind, is_first = torch.arange(T)[:, None] + start - torch.arange(S), torch.arange(S) == first
    windows = [(p * ((behind < w) | is_first)).sum(-1) for w in range(T + start)]  # of 0, 1, 2, ... latest keys
    return (torch.stack(windows) < part * p.sum(-1)).sum(0)


def block_means(p_hts: Tensor, rows: Sequence[int], keys: Sequence[int]) -> tuple[Tensor, ...]:
    """Means over even blocks of those rows and keys; their sums over keys; the mean of the first of the keys."""
    p = p_hts.double()[:, list(rows)][:, :, list(keys)]
    row_parts, key_parts = _even(len(rows)), _even(len(keys))
    means = torch.stack([torch.stack([p[:, r][:, :, c].mean((1, 2)) for c in key_parts], -1) for r in row_parts], 1)
    first = torch.stack([p[:, r, 0].mean(-1) for r in row_parts], -1)
    return means, means * torch.tensor([*map(len, key_parts)]), first


def _even(n: int) -> list[list[int]]:
    """0 to n-1 in at most BLOCKS even parts."""
    count = min(BLOCKS, n)
    return [[x for x in range(n) if x * count // n == part] for part in range(count)]


def assert_rows(actual: Mapping[str, Any], expected: Mapping[str, Tensor], reach: int, what: str, **norm: Any) -> None:
    """Every statistic of one head, (n,) each. `reach` is the largest distance between a query and a key.

    A distance is sum p (i-j), so a share that is off by MASS moves it by at most MASS times the reach, and a variance
    by MASS times its square, twice since the mean moves too. The spread is compared as a variance: its root would
    blow up what is lost where a head looks at one place.
    """
    for name, wanted in expected.items():
        found = np.asarray(actual[name], np.float64)
        value, tolerance = wanted.numpy(), MASS
        if name in ("entropy", "score_max", "lse"):
            tolerance = NATS
        elif name == "distance":
            tolerance = MASS * reach
        elif name == "spread":
            found, value, tolerance = found**2, value**2, 2 * MASS * reach**2
        elif name == "norm":
            tolerance = norm.get("tolerance", MASS * max(1.0, float(wanted.max())))
        np.testing.assert_allclose(found, value, rtol=0, atol=tolerance, err_msg=f"{name} of {what}")
