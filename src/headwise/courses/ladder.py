"""The ladder: one causal layer, one draw of its weights, and eight ways to compute it, from loops to one kernel."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from timeit import repeat, timeit
from typing import Any

import numpy as np
import torch
from torch import nn

from headwise.backends import attend
from headwise.courses import microgpt
from headwise.courses.from_scratch import MultiHeadAttn, wrapper_from_class
from headwise.courses.numpy_layer import attend_batched, attend_loop, causal_mask
from headwise.errors import HeadwiseError
from headwise.gpt.presets import check_seed
from headwise.layer.layer import MultiHeadAttention
from headwise.masks import Causal
from headwise.spec import require_size

# multiplications of the loops: each of the two ways in plain Python then takes some seconds
MOST = 30_000_000
UNIT = 2.0**-24  # the largest relative error of one rounding in float32
OTHER_ROUNDINGS = 32  # besides those of sums: casts, products, the scale, the softmax


@dataclass(frozen=True)
class Way:
    name: str
    # largest, of the output from that of the loops; None where it is not finite
    difference: float | None
    ms: float  # of a forward call, a median


@dataclass(frozen=True)
class Ladder:
    width: int
    heads: int
    tokens: int
    seed: int
    threads: int  # torch's
    tolerance: float  # what float32 may differ by
    ways: tuple[Way, ...]
    agrees: bool


def run_ladder(
    width: int = 64, heads: int = 4, tokens: int = 16, seed: int = 0, rounds: int = 7
) -> Ladder:
    """Compute one layer in eight ways, compare each with the loops, and time it.

    W_Q, W_K, W_V and W_O are standard normal times 1/sqrt(width), the text is standard normal. The two ways in plain
    Python compute in float64, the others in float32. Raises HeadwiseError for sizes that do not fit.
    """
    for name, value in (("width", width), ("heads", heads), ("tokens", tokens)):
        require_size(name, value)
    check_seed(seed)
    if width % heads:
        raise HeadwiseError(
            f"heads={heads} does not divide width={width}; pass a width that {heads} divides"
        )
    if (work := tokens * width * (4 * width + 2 * tokens)) > MOST:
        raise HeadwiseError(
            f"the loops would take {work:,} multiplications, at most {MOST:,}; pass a smaller width="
        )
    rng = np.random.default_rng(seed)
    drawn = [rng.standard_normal((width, width)) / width**0.5 for _ in range(4)]
    x = rng.standard_normal((tokens, width))
    # modules draw weights before they get these
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        calls = ways(drawn, x, heads)
        outputs = {
            name: np.asarray(call(), np.float64).reshape(tokens, width)
            for name, call in calls.items()
        }
        times = {name: seconds(call, rounds) for name, call in calls.items()}
    expected = outputs["scalar loops"]
    most = tolerance(drawn, x, heads)
    compared = []
    agrees = True
    for name, output in outputs.items():
        far = float(abs(output - expected).max())
        compared.append(
            Way(name, far if np.isfinite(far) else None, 1000 * times[name])
        )
        agrees &= far <= most  # not where it is NaN
    threads = torch.get_num_threads()
    return Ladder(width, heads, tokens, seed, threads, most, tuple(compared), agrees)


def seconds(call: Callable[[], Any], rounds: int) -> float:
    """The median of so many calls after one that warms up; of fewer where they would take over 3 seconds."""
    first = timeit(call, number=1)
    rounds = min(rounds, int(3 / first))
    return statistics.median(repeat(call, number=1, repeat=rounds)) if rounds else first


def tolerance(drawn: list[Any], x: Any, heads: int) -> float:
    """What rounding explains. A sum of n terms rounds n times (Higham 2002, section 3.1)."""
    q, k, v = (split(x @ w.T, heads) for w in drawn[:3])
    scores, _, _ = attend_batched(q, k, v, None)
    largest = max(abs(each).max() for each in (q, k, v, scores))
    # two projections, the scores, the mix of values
    terms = 2 * x.shape[1] + q.shape[2] + len(x)
    return float(UNIT * (terms + OTHER_ROUNDINGS) * largest)


def split(x: Any, heads: int) -> Any:
    """(T,C) -> (H,T,D)"""
    return x.reshape(len(x), heads, -1).swapaxes(0, 1)


def ways(drawn: list[Any], x: Any, heads: int) -> dict[str, Callable[[], Any]]:
    """Each way by its name, the reference first, as a call that gives (T,C); W_Q, W_K, W_V and W_O are (out,in)."""
    tokens, width = x.shape
    lists = [w.tolist() for w in drawn]
    text = x.tolist()
    narrow = [w.astype(np.float32) for w in drawn]
    x_tc = x.astype(np.float32)
    tensors = [torch.from_numpy(w) for w in narrow]
    x_btc = torch.from_numpy(x_tc)[None]
    mask = causal_mask(tokens)

    def loops() -> Any:
        q, k, v = (
            split(
                np.array([microgpt.linear(token, w) for token in text]), heads
            ).tolist()
            for w in lists[:3]
        )
        # (H,T,D) -> (T,C): the heads side by side
        joined = np.concatenate(attend(q, k, v, mask=Causal()), -1).tolist()
        return [microgpt.linear(token, lists[3]) for token in joined]

    def token_by_token() -> Any:
        rows = []
        keys = []
        values = []
        for token in text:
            q, k, v = (microgpt.linear(token, w) for w in lists[:3])
            keys.append(k)
            values.append(v)
            rows.append(
                microgpt.linear(microgpt.attention(q, keys, values, heads), lists[3])
            )
        return rows

    def in_numpy(form: Callable[..., Any]) -> Any:
        q, k, v = (split(x_tc @ w.T, heads) for w in narrow[:3])
        return (
            form(q, k, v, mask)[2].swapaxes(0, 1).reshape(tokens, width) @ narrow[3].T
        )

    course = MultiHeadAttn(width, width, tokens, 0.0, heads)
    names = ("W_query.weight", "W_key.weight", "W_value.weight", "out_proj.weight")
    zeros = {"mask": course.mask, "out_proj.bias": torch.zeros(width)}
    course.load_state_dict(dict(zip(names, tensors, strict=True)) | zeros)
    wrapper, projection = wrapper_from_class(course)
    theirs = nn.MultiheadAttention(width, heads, bias=False, batch_first=True)
    theirs.load_state_dict(
        {"in_proj_weight": torch.cat(tensors[:3]), "out_proj.weight": tensors[3]}
    )
    later = course.mask.bool()  # True forbids
    ours = MultiHeadAttention(width, heads, mask=Causal())
    ours.load_state_dict(
        {f"{role}_proj.weight": w for role, w in zip("qkvo", tensors, strict=True)}
    )
    return {
        "scalar loops": loops,
        "microgpt, token by token": token_by_token,
        "NumPy, head by head": lambda: in_numpy(attend_loop),
        "NumPy, all heads at once": lambda: in_numpy(attend_batched),
        "stacked heads": lambda: projection(wrapper(x_btc)),
        "course class": lambda: course(x_btc),
        "torch.nn.MultiheadAttention": lambda: theirs(
            x_btc, x_btc, x_btc, attn_mask=later, need_weights=False
        )[0],
        "headwise.MultiHeadAttention": lambda: ours(x_btc),
    }
