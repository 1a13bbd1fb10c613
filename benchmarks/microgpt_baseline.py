"""microgpt on its three rungs against a straightforward version, where each + and each * is a node of the graph.

The baseline is written as tutorials of scalar autograd are (in the manner of micrograd): no operation is fused, each
step sorts its graph with a recursive walk. All sides draw the same weights and names, run the same steps, one thread,
double precision, and are compared in the same run by processor time.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from headwise.lab.microgpt import (
    ADAM_EPS,
    BETA1,
    BETA2,
    N_HEADS,
    NORM_EPS,
    WIDTH,
    Draw,
    learning_rate,
)

HEAD_WIDTH = WIDTH // N_HEADS
NAMES = Path(__file__).resolve().parents[1] / ".." / "shared" / "data" / "names.txt"
DOCUMENTS = 20  # all sides read the first of them, over and over
STEPS = {"baseline": 20, "plain": 60, "array": 2000, "tensor": 200}  # multiples of it: about equal times to measure


class Number:
    """A number of the baseline: its value, its gradient, its parents with the slope along each."""

    __slots__ = ("data", "grad", "parents", "slopes")

    def __init__(self, data: float, parents: tuple[Number, ...] = (), slopes: tuple[float, ...] = ()) -> None:
        self.data = data
        self.grad = 0.0
        self.parents = parents
        self.slopes = slopes

    def __add__(self, other: Number | float) -> Number:
        other = other if isinstance(other, Number) else Number(other)
        return Number(self.data + other.data, (self, other), (1.0, 1.0))

    def __mul__(self, other: Number | float) -> Number:
        other = other if isinstance(other, Number) else Number(other)
        return Number(self.data * other.data, (self, other), (other.data, self.data))

    def __pow__(self, exponent: float) -> Number:
        return Number(self.data**exponent, (self,), (exponent * self.data ** (exponent - 1),))

    def __sub__(self, other: Number | float) -> Number:
        return self + other * -1.0

    def __truediv__(self, other: Number | float) -> Number:
        return self * other**-1.0

    __radd__ = __add__

    def exp(self) -> Number:
        return Number(math.exp(self.data), (self,), (math.exp(self.data),))

    def log(self) -> Number:
        return Number(math.log(self.data), (self,), (1 / self.data,))

    def relu(self) -> Number:
        return Number(max(0.0, self.data), (self,), (float(self.data > 0),))

    def backward(self) -> None:
        order: list[Number] = []
        seen: set[Number] = set()

        def visit(number: Number) -> None:
            if number not in seen:
                seen.add(number)
                for parent in number.parents:
                    visit(parent)
                order.append(number)

        visit(self)
        self.grad = 1.0
        for number in reversed(order):
            for parent, slope in zip(number.parents, number.slopes, strict=True):
                parent.grad += slope * number.grad


Vector = list[Number]
Weights = dict[str, list[Vector]]


def total(terms: Iterable[Number]) -> Number:
    return sum(terms, Number(0.0))


def linear(matrix: list[Vector], x: Vector) -> Vector:
    return [total(w * a for w, a in zip(row, x, strict=True)) for row in matrix]


def rms_norm(x: Vector) -> Vector:
    scale = (total(a * a for a in x) / len(x) + NORM_EPS) ** -0.5
    return [a * scale for a in x]


def softmax(x: Vector) -> Vector:
    top = max(a.data for a in x)
    powers = [(a - top).exp() for a in x]
    whole = total(powers)
    return [power / whole for power in powers]


def logits_of(weights: Weights, token: int, position: int, keys: list[Vector], values: list[Vector]) -> Vector:
    x = rms_norm([a + b for a, b in zip(weights["wte"][token], weights["wpe"][position], strict=True)])
    normed = rms_norm(x)
    q = linear(weights["layer0.attn_wq"], normed)
    keys.append(linear(weights["layer0.attn_wk"], normed))
    values.append(linear(weights["layer0.attn_wv"], normed))
    joined = []
    for start in range(0, N_HEADS * HEAD_WIDTH, HEAD_WIDTH):
        own = range(start, start + HEAD_WIDTH)
        share = softmax([total(q[c] * key[c] for c in own) / HEAD_WIDTH**0.5 for key in keys])
        joined += [total(p * value[c] for p, value in zip(share, values, strict=True)) for c in own]
    x = [a + b for a, b in zip(x, linear(weights["layer0.attn_wo"], joined), strict=True)]
    hidden = [a.relu() for a in linear(weights["layer0.mlp_fc1"], rms_norm(x))]
    x = [a + b for a, b in zip(x, linear(weights["layer0.mlp_fc2"], hidden), strict=True)]
    return linear(weights["lm_head"], x)


def baseline(draw: Draw, steps: int) -> list[float]:
    """The losses of the first steps."""
    weights = {key: [[Number(x) for x in row] for row in rows] for key, rows in draw.weights.items()}
    parameters = [x for rows in weights.values() for row in rows for x in row]
    first, second = [0.0] * len(parameters), [0.0] * len(parameters)
    losses = []
    for step in range(steps):
        ids = draw.document(step)
        keys: list[Vector] = []
        values: list[Vector] = []
        terms: Vector = []
        for position, token in enumerate(ids[:-1]):
            shares = softmax(logits_of(weights, token, position, keys, values))
            terms.append(shares[ids[position + 1]].log() * -1.0)
        loss = total(terms) / len(terms)
        loss.backward()
        rate = learning_rate(step, steps)
        for i, x in enumerate(parameters):
            first[i] = BETA1 * first[i] + (1 - BETA1) * x.grad
            second[i] = BETA2 * second[i] + (1 - BETA2) * x.grad**2
            mean, square = first[i] / (1 - BETA1 ** (step + 1)), second[i] / (1 - BETA2 ** (step + 1))
            x.data -= rate * mean / (square**0.5 + ADAM_EPS)
            x.grad = 0.0
        losses.append(loss.data)
    return losses


def run(runs: int) -> dict[str, Any]:
    if not NAMES.exists():
        return {"table": f"not run: {NAMES} is absent (makemore's names.txt, 32,033 names)"}
    rounds = []
    for _ in range(runs):
        command = [sys.executable, "-m", "benchmarks.microgpt_baseline"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment)
        rounds.append(json.loads(done.stdout))
        print(f"microgpt ms/step: {rounds[-1]}", file=sys.stderr)
    medians = {side: statistics.median(one[side] for one in rounds) for side in STEPS}
    ratios = {side: statistics.median(one["baseline"] / one[side] for one in rounds) for side in STEPS}
    rows = ["side       ms/step  times faster"]
    rows += [f"{side:8}  {medians[side]:8.3f}  {ratios[side]:12,.1f}" for side in STEPS]
    return {"runs": rounds, "medians": medians, "speedup": ratios, "table": "\n".join(rows)}


def one_round() -> dict[str, float]:
    """Milliseconds of processor time a step, for each side; reading and drawing are left out, Adam is in."""
    names = [line.strip() for line in NAMES.read_text(encoding="utf-8").splitlines()]
    figures = {}
    for side, steps in STEPS.items():
        train = trainer(side)  # torch comes last: what it loads would slow Python's garbage collector for the others
        train(Draw(names, seed=42), 2)  # what is loaded at first use is not a step
        draw = Draw(names, seed=42)
        draw.documents = draw.documents[:DOCUMENTS]
        began = time.process_time()
        train(draw, steps)
        figures[side] = (time.process_time() - began) / steps * 1000
    return figures


def trainer(side: str) -> Callable[[Draw, int], Any]:
    if side == "baseline":
        return baseline
    run_rung = importlib.import_module(f"headwise.lab.microgpt.{side}").run
    return lambda draw, steps: run_rung(draw, steps, 0, None)


if __name__ == "__main__":
    print(json.dumps(one_round()))
