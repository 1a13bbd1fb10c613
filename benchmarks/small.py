"""NumPy's attention, forward and with its hand-made backward, over the arithmetic it needs; what imports cost."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import headwise as hw
from headwise.lab.microgpt.array import attention

SHAPES = ((2, 8, 2, 256, 64), (1, 12, 12, 1024, 64))  # B, H, G, T, D
TRAINED = ((1, 4, 4, 16), (32, 4, 16, 16), (16, 8, 32, 16))  # texts, H, D, T: microgpt's, the mini GPT's, a wider one


def run(runs: int) -> dict[str, Any]:
    rows = [_array(shape, max(5, runs)) for shape in SHAPES]
    backward = [_backward(shape, max(30, runs)) for shape in TRAINED]
    imports = _imports(max(5, runs))
    lines = [
        f"array rung {tuple(row['shape'])} float32: needed {row['needed_ms']:.2f} ms, headwise x {row['ratio']:.2f}"
        for row in rows
    ]
    lines += [
        f"with backward {tuple(row['shape'])} float64: needed {row['needed_ms']:.3f} ms, headwise x {row['ratio']:.2f}"
        for row in backward
    ]
    added = imports["layer_s"] - imports["torch_s"]
    lines.append(f"import headwise {imports['headwise_s']:.3f} s; its layer adds {added:.3f} s to import torch")
    return {"array": rows, "backward": backward, "imports": imports, "table": "\n".join(lines)}


def _array(shape: tuple[int, ...], runs: int) -> dict[str, Any]:
    """Two matrix products and one softmax, nothing forbidden, K and V not repeated; against `attend`."""
    B, H, G, T, D = shape
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(B, n, T, D)).astype(np.float32) for n in (H, G, G))

    def needed() -> np.ndarray:
        folded = q.reshape(B, G, H // G * T, D) * np.float32(D**-0.5)
        scores = folded @ k.swapaxes(-1, -2)
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        return (scores @ v).reshape(B, H, T, D)

    return {"shape": shape, **_in_turn(needed, lambda: hw.attend(q, k, v), runs)}


def _backward(shape: tuple[int, ...], runs: int) -> dict[str, Any]:
    """Six matrix products, a causal softmax and its slope, each written over what it no longer needs."""
    B, H, D, T = shape
    rng = np.random.default_rng(0)
    qkv, dout = rng.normal(size=(3, H, B, D, T)), rng.normal(size=(H, B, D, T))
    later = np.tril(np.full((T, T), -np.inf), -1)

    def needed() -> tuple[np.ndarray, ...]:
        q, k, v = qkv
        p = k.swapaxes(-1, -2) @ (q * D**-0.5)
        p += later
        p -= p.max(-2, keepdims=True)
        np.exp(p, out=p)
        p /= p.sum(-2, keepdims=True)
        out = v @ p
        ds = v.swapaxes(-1, -2) @ dout
        ds -= (out * dout).sum(-2, keepdims=True)
        ds *= p
        return out, k @ ds, q @ ds.swapaxes(-1, -2), dout @ p.swapaxes(-1, -2)

    def ours() -> tuple[np.ndarray, ...]:
        out, back = attention(qkv)
        return out, back(dout)

    return {"shape": shape, **_in_turn(needed, ours, runs)}


def _in_turn(needed: Callable[[], Any], ours: Callable[[], Any], runs: int) -> dict[str, float]:
    """Milliseconds of what is needed, and how many times as long ours takes: the median over rounds."""
    times: dict[str, list[float]] = {"needed": [], "headwise": []}
    for round_ in range(runs + 1):
        for name, way in (("needed", needed), ("headwise", ours)):
            began = time.perf_counter()
            way()
            if round_:
                times[name].append((time.perf_counter() - began) * 1000)
    ratio = statistics.median(a / b for a, b in zip(times["headwise"], times["needed"], strict=True))
    return {"needed_ms": statistics.median(times["needed"]), "ratio": ratio}


def _imports(runs: int) -> dict[str, float]:
    """Median seconds of an import, the start of Python taken off."""
    codes = {
        "python_s": "pass",
        "headwise_s": "import headwise",
        "torch_s": "import torch",
        "layer_s": "import torch, headwise; headwise.MultiHeadAttention, headwise.KVCache",
    }
    times: dict[str, list[float]] = {name: [] for name in codes}
    for _ in range(runs):
        for name, code in codes.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            times[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {name: seconds - medians["python_s"] for name, seconds in medians.items() if name != "python_s"}
