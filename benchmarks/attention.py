"""The layer against its limit and its peers, and grouped decoding against the ways to repeat keys and values.

Limit: the layer's own matrix products plus one fused attention call, nothing else. Peers: torch.nn.MultiheadAttention,
transformers' Llama and GPT-2 attention on sdpa, x-transformers' Attention where it is installed, and the class of
"Build a Large Language Model (From Scratch)", section 3.6.
All causal, eval mode or forward + backward, in turn within each round; the ratio to the limit is taken round by round.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw

SHAPES = ((8, 1024, 768, 12), (1, 4096, 768, 12), (8, 256, 384, 6))
DECODE = {"heads": 32, "head_dim": 128, "kv_heads": (32, 8, 1), "lengths": (8192, 32768)}
MASKS = {"batch": 2, "heads": 6, "head_dim": 64, "window": 256, "document": 256}
Side = Callable[[Tensor], Tensor]


def limit(width: int, heads: int, dtype: torch.dtype) -> nn.Module:
    class Limit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (p(x).unflatten(-1, (heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
            return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    return Limit()


def sides(tokens: int, width: int, heads: int, dtype: torch.dtype) -> dict[str, Side]:
    """Each side as a function of x (B,T,width)."""
    ours = hw.MultiHeadAttention(width, heads, mask=hw.Causal()).to(dtype)
    theirs = nn.MultiheadAttention(width, heads, bias=False, batch_first=True, dtype=dtype)
    causal = nn.Transformer.generate_square_subsequent_mask(tokens, dtype=dtype)
    found: dict[str, Side] = {
        "limit": limit(width, heads, dtype),
        "headwise": ours,
        "nn.MultiheadAttention": lambda x: theirs(x, x, x, attn_mask=causal, is_causal=True, need_weights=False)[0],
    }
    found |= _of_transformers(tokens, width, heads, dtype)
    try:
        from x_transformers.x_transformers import Attention
    except ImportError:
        print("x-transformers is not installed: not measured", file=sys.stderr)
    else:
        attention = Attention(width, heads=heads, dim_head=width // heads, causal=True, flash=True).to(dtype)
        found["x-transformers"] = attention
    from headwise.courses.from_scratch import MultiHeadAttn

    found["the course's class"] = MultiHeadAttn(width, width, tokens, 0.0, heads).to(dtype)
    return found


def _of_transformers(tokens: int, width: int, heads: int, dtype: torch.dtype) -> dict[str, Side]:
    from transformers import GPT2Config, LlamaConfig
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=width, num_attention_heads=heads, num_key_value_heads=heads, attn_implementation="sdpa"
    )
    llama = LlamaAttention(config, layer_idx=0).to(dtype)
    rotary = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=dtype), torch.arange(tokens)[None])
    gpt2 = GPT2Attention(
        GPT2Config(n_embd=width, n_head=heads, attn_pdrop=0.0, resid_pdrop=0.0, attn_implementation="sdpa"), layer_idx=0
    ).to(dtype)
    return {
        "transformers Llama": lambda x: llama(x, position_embeddings=rotary, attention_mask=None)[0],
        "transformers GPT-2": lambda x: gpt2(x)[0],
    }


def run(runs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    rows = []
    for batch, tokens, width, heads in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for backward in (False, True):
                row = {"shape": [batch, tokens, width, heads], "dtype": str(dtype)[6:], "backward": backward}
                rows.append(
                    row | _measure(sides(tokens, width, heads, dtype), batch, tokens, width, dtype, backward, runs)
                )
                print(_line(rows[-1]), file=sys.stderr)
    return {"rows": rows, "table": "\n".join(map(_line, rows))}


def _measure(
    found: dict[str, Side], batch: int, tokens: int, width: int, dtype: torch.dtype, backward: bool, runs: int
) -> dict[str, Any]:
    x = torch.randn(batch, tokens, width, dtype=dtype, requires_grad=backward)
    times: dict[str, list[float]] = {name: [] for name in found}
    for round_ in range(max(3, runs) + 1):
        for name, side in found.items():
            began = time.perf_counter()
            with torch.set_grad_enabled(backward):
                y = side(x)
                if backward:
                    y.sum().backward()
            if round_:  # the first round warms up
                times[name].append((time.perf_counter() - began) * 1000)
    ratios = {
        name: statistics.median(t / u for t, u in zip(each, times["limit"], strict=True))
        for name, each in times.items()
    }
    return {"ms": {name: statistics.median(each) for name, each in times.items()}, "over_limit": ratios}


def _line(row: dict[str, Any]) -> str:
    what = "forward + backward" if row["backward"] else "forward"
    parts = [f"{name} {row['over_limit'][name]:.2f}" for name in row["ms"] if name != "limit"]
    return f"{tuple(row['shape'])} {row['dtype']} {what}: limit {row['ms']['limit']:.1f} ms; x limit: " + ", ".join(
        parts
    )


def masks(runs: int) -> dict[str, Any]:
    """Windows over full causal attention; packed and padded documents over the same documents apart.

    Processor time of one thread, each pair in turn. Documents apart are calls of the kernel on tensors of their own;
    of padding, which a query behind the text has to read the text, too, those queries count on both sides.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for tokens in (1024, 4096):
        for kv_heads in (2, 6):
            for backward in (False, True):
                for name, (ours, theirs) in _mask_pairs(tokens, kv_heads, backward).items():
                    ratio = _ratio(ours, theirs, max(5, runs))
                    row = {"name": name, "tokens": tokens, "kv_heads": kv_heads, "backward": backward, "ratio": ratio}
                    rows.append(row)
                    print(_mask_line(row), file=sys.stderr)
    torch.set_num_threads(threads)
    return {"rows": rows, "table": "\n".join(map(_mask_line, rows))}


def _mask_pairs(tokens: int, kv_heads: int, backward: bool) -> dict[str, tuple[Callable[[], None], ...]]:
    B, H, D = MASKS["batch"], MASKS["heads"], MASKS["head_dim"]
    whole = [torch.randn(B, n, tokens, D, requires_grad=backward) for n in (H, kv_heads, kv_heads)]
    length = MASKS["document"]
    ids = (torch.arange(tokens) // length)[None].repeat(B, 1)
    lengths = [tokens - tokens // 8 * b for b in range(B)]
    packed = [[x.detach()[:, :, a : a + length] for x in whole] for a in range(0, tokens, length)]
    padded = []
    for b, n in enumerate(lengths):
        q, k, v = (x.detach()[b : b + 1] for x in whole)
        padded.append([q[:, :, :n], k[:, :, :n], v[:, :, :n]])
        padded.append([q[:, :, n:], k[:, :, :n], v[:, :, :n]])
    for call in (*packed, *padded):
        call[:] = [x.clone().requires_grad_(backward) for x in call]

    def ours(mask: hw.Mask) -> Callable[[], None]:
        return lambda: _ran([hw.attend(*whole, mask)], backward)

    def apart(calls: list[list[Tensor]]) -> Callable[[], None]:
        return lambda: _ran([_sdpa(*call) for call in calls if call[0].shape[2]], backward)

    causal = hw.Causal()
    return {
        f"window of {MASKS['window']} over causal": (ours(hw.Window(MASKS["window"] - 1, 0)), ours(causal)),
        f"packed documents of {length} over them apart": (ours(hw.Segments(ids, ids) & causal), apart(packed)),
        "padding over documents apart": (ours(hw.Lengths(lengths) & causal), apart(padded)),
    }


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    is_causal = q.shape[2] == k.shape[2]
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])


def _ran(outs: list[Tensor], backward: bool) -> None:
    if backward:
        torch.autograd.backward([out.sum() for out in outs])


def _ratio(ours: Callable[[], None], theirs: Callable[[], None], runs: int) -> float:
    ratios = []
    for round_ in range(runs + 1):
        times = []
        for side in (ours, theirs):
            began = time.process_time()
            side()
            times.append(time.process_time() - began)
        ratios += [times[0] / times[1]] if round_ else []  # the first round warms up
    return statistics.median(ratios)


def _mask_line(row: dict[str, Any]) -> str:
    what = "forward + backward" if row["backward"] else "forward"
    return f"T={row['tokens']:4} G={row['kv_heads']} {what:18}: {row['name']} {row['ratio']:.2f}"


@torch.no_grad()
def decode(runs: int) -> dict[str, Any]:
    """One new token of 32 heads of 128 against S cached keys; and what an append to the cache costs as it grows."""
    torch.manual_seed(0)
    H, D = DECODE["heads"], DECODE["head_dim"]
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for S in DECODE["lengths"]:
            for G in DECODE["kv_heads"]:
                q = torch.randn(1, H, 1, D, dtype=dtype)
                k, v = (torch.randn(1, G, S, D, dtype=dtype) for _ in range(2))
                times = _decode_times(q, k, v, max(3, runs))
                rows.append({"dtype": str(dtype)[6:], "S": S, "G": G, "ms": times})
                print(_decode_line(rows[-1]), file=sys.stderr)
    appends = _append_times()
    flat = "append, microseconds a token, up to " + ", ".join(f"{n}: {us:.1f}" for n, us in appends.items())
    return {"rows": rows, "append_us": appends, "table": "\n".join([*map(_decode_line, rows), flat])}


def _decode_times(q: Tensor, k: Tensor, v: Tensor, runs: int) -> dict[str, float]:
    r, other = q.shape[1] // k.shape[1], torch.ones(2**26)
    ways: dict[str, Callable[[], Tensor]] = {
        "headwise": lambda: hw.attend(q, k, v, mask=hw.Causal()),
        "enable_gqa": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "read": lambda: k.sum() + v.sum(),
        "repeated": lambda: F.scaled_dot_product_attention(q, k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(runs + 1):
        for name, way in ways.items():
            other.sum()  # each finds the caches as full of something else as the others do
            began = time.perf_counter()
            way()
            if round_:
                times[name].append((time.perf_counter() - began) * 1000)
    return {name: statistics.median(each) for name, each in times.items()}


def _append_times(total: int = 32768, piece: int = 4096) -> dict[int, float]:
    """Mean microseconds of one append in each stretch of the text, growth included."""
    cache, k = hw.KVCache(), torch.randn(1, 8, 1, 128)
    cache.append(k, k)
    found = {}
    for end in range(piece, total + 1, piece):
        began = time.perf_counter()
        while cache.length < end:
            cache.append(k, k)
        found[end] = (time.perf_counter() - began) / piece * 1e6
    return found


def _decode_line(row: dict[str, Any]) -> str:
    ms = row["ms"]
    numbers = 2 * row["G"] * row["S"] * DECODE["head_dim"] * (4 if row["dtype"] == "float32" else 2)
    ours, most = (numbers / ms[name] / 1e6 for name in ("headwise", "read"))
    return (
        f"{row['dtype']:8} S={row['S']:5} G={row['G']:2}: headwise {ms['headwise']:8.2f} ms; enable_gqa x "
        f"{ms['enable_gqa'] / ms['headwise']:.1f}, repeated x {ms['repeated'] / ms['headwise']:.1f}; "
        f"keys and values at {ours:.1f} GB/s, their sum alone at {most:.1f}"
    )
