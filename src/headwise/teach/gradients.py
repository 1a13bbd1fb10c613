"""The check of a `backward` written by hand: what it returns and keeps, held against differences of `forward`."""

from __future__ import annotations

from typing import Any

import numpy as np

from headwise.teach.bugs import UncheckedError
from headwise.teach.subject import Subject, pick, to_array, to_kind

STEP = 1e-3  # of a difference: float32 rounds by far less, and a slope bends by less
LARGEST = 0.02  # of the slope itself: what differences of float32 numbers may be off by


def wrong_gradients(subject: Subject, x: Any) -> list[str]:
    """The names of what `module.backward(slope of the output)` gives a wrong gradient of; empty where all are right.

    The gradient of the input is what `backward` returns; that of a weight `W` is what the object then keeps as `dW`,
    `d_W`, `grad_W` or `W_grad`, or in a dictionary under one of these names or its own. UncheckedError where there is
    neither.

    x  (B,T,C); code that takes one document gets the first
    """
    module = subject.module
    x = np.array(x if subject.rank == x.ndim else x[0])
    rng = np.random.default_rng(2)

    def forward(inputs: Any) -> Any:
        result = subject.result({name: to_kind(inputs, subject.kind) for name in subject.inputs}, inputs.shape[-2])
        return pick(result, inputs.shape)

    slope = rng.normal(size=forward(x).shape)
    gradients = {"x": (x, pick(module.backward(to_kind(slope, subject.kind)), x.shape))}
    kept = {**vars(module)}
    for holder in vars(module).values():
        if isinstance(holder, dict):
            kept.update({str(name) if name not in kept else f"grad_{name}": value for name, value in holder.items()})
    for name, weight in vars(module).items():
        names = (f"d{name}", f"d_{name}", f"grad_{name}", f"{name}_grad")
        gradient = next((to_array(kept[other]) for other in names if other in kept), None)
        if isinstance(weight, np.ndarray):
            gradients[name] = (weight, gradient)
    gradients = {name: pair for name, pair in gradients.items() if np.shape(pair[0]) == np.shape(pair[1])}
    if not gradients:
        raise UncheckedError("no_slope", name=type(module).__name__)
    wrong: list[str] = []
    for name, (place, gradient) in gradients.items():
        direction = rng.normal(size=place.shape)
        before, ends = place.copy(), []
        for sign in (1, -1):
            place[...] = before + sign * STEP * direction
            ends.append(float((forward(x) * slope).sum()))
        place[...] = before
        difference = (ends[0] - ends[1]) / (2 * STEP)
        size = float(np.linalg.norm(gradient)) + abs(difference)
        if not abs(difference - float((gradient * direction).sum())) <= LARGEST * size:
            wrong.append(name)
    return wrong
