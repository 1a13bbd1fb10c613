"""microgpt in plain Python: a GPT learns a list of names, then writes new ones. Read it from top to bottom.

    python -m headwise.courses.microgpt names.txt

The algorithm, its names and the order of its random draws are those of Karpathy's microgpt (2026), so the same list
gives the same losses and the same samples. A dot product is one node of the graph here, and so is log(sum(exp)): ten
times as fast as a node for each + and *. `microgpt_numpy` does the same in arrays.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

n_embd, n_head, block_size = 16, 4, 16  # width, heads, longest text in tokens
# of Adam (Kingma & Ba 2014, arXiv 1412.6980)
STEPS, RATE, BETA1, BETA2, EPS = 1000, 0.01, 0.85, 0.99, 1e-8
TEMPERATURE = 0.5

Vector = Sequence[Any]  # of Values while the model learns, of floats when it writes
Matrix = Sequence[Vector]  # rows are outputs: y = W x
Weights = dict[str, Any]  # matrices of floats, by their names
Writer = Callable[[list[int]], Vector]  # the ids so far -> the logits of the next one
Cache = list[list[Vector]]  # for each layer, a vector for each token so far


# Numbers that remember how they were made


class Value:
    """A number, its gradient, and the numbers that it was made of, with the slope along each."""

    __slots__ = ("data", "grad", "inputs", "slopes")

    def __init__(
        self, data: float, inputs: Sequence[Value] = (), slopes: Sequence[float] = ()
    ) -> None:
        self.data = data
        self.grad = 0.0
        self.inputs = inputs
        self.slopes = slopes

    def __add__(self, other: Value | float) -> Value:
        other = other if isinstance(other, Value) else Value(other)
        return Value(self.data + other.data, (self, other), (1.0, 1.0))

    def __mul__(self, other: Value | float) -> Value:
        other = other if isinstance(other, Value) else Value(other)
        return Value(self.data * other.data, (self, other), (other.data, self.data))

    def __pow__(self, power: float) -> Value:
        return Value(self.data**power, (self,), (power * self.data ** (power - 1),))

    def __sub__(self, other: Value | float) -> Value:
        return self + other * -1.0

    def __truediv__(self, other: float) -> Value:
        return self * other**-1

    __radd__ = __add__

    def backward(self) -> None:
        """Add d self / d value to the gradient of every value below: the chain rule, from the end to the beginning."""
        order = []
        seen = set[Value]()

        def visit(value: Value) -> None:
            seen.add(value)
            for each in value.inputs:
                if each not in seen:
                    visit(each)
            order.append(value)

        visit(self)
        self.grad = 1.0
        for value in reversed(order):
            for each, slope in zip(value.inputs, value.slopes, strict=True):
                each.grad += slope * value.grad


def node(data: float, inputs: Vector, slopes: Sequence[float]) -> Any:
    """A Value made of Values; of floats the plain number."""
    return Value(data, inputs, slopes) if isinstance(inputs[0], Value) else data


def numbers(xs: Vector) -> list[float]:
    return [x.data if isinstance(x, Value) else x for x in xs]


def dot(xs: Vector, ys: Vector) -> Any:
    a = numbers(xs)
    b = numbers(ys)
    return node(sum([x * y for x, y in zip(a, b, strict=True)]), [*xs, *ys], b + a)


def log_sum_exp(xs: Vector) -> Any:
    data = numbers(xs)
    top = max(data)  # taken off before exp, so that nothing overflows
    powers = [math.exp(x - top) for x in data]
    total = sum(powers)
    return node(top + math.log(total), xs, [power / total for power in powers])


def exp(x: Any) -> Any:
    y = math.exp(*numbers([x]))
    return node(y, [x], [y])


def relu(x: Any) -> Any:
    (y,) = numbers([x])
    return node(max(0.0, y), [x], [float(y > 0)])


# The model


def linear(x: Vector, w: Matrix) -> Vector:
    """y = W x: (m,) and (n,m) -> (n,)"""
    return [dot(row, x) for row in w]


def add(x: Vector, y: Vector) -> Vector:
    return [a + b for a, b in zip(x, y, strict=True)]


def rmsnorm(x: Vector) -> Vector:
    """x at a root mean square of 1."""
    scale = (dot(x, x) / len(x) + 1e-5) ** -0.5
    return [a * scale for a in x]


def softmax(x: Vector) -> Vector:
    """exp(x) over its sum: positive numbers that add up to 1."""
    log_sum = log_sum_exp(x)
    return [exp(a - log_sum) for a in x]


def attention(q: Vector, keys: Matrix, values: Matrix, n_head: int) -> Vector:
    """Small attentions side by side: each head owns n_embd / n_head places of q, of each key and each value.

    q (n_embd,), keys and values (tokens so far, n_embd) -> (n_embd,): the outputs of the heads, one after another.
    """
    head_dim = len(q) // n_head
    x_attn = []
    for hs in range(0, len(q), head_dim):  # hs: where the head starts
        places = slice(hs, hs + head_dim)
        q_h = q[places]
        k_h = [key[places] for key in keys]
        v_h = [value[places] for value in values]
        # how well each key answers
        attn_logits = [dot(q_h, key) / math.sqrt(head_dim) for key in k_h]
        attn_weights = softmax(attn_logits)
        # zip(*v_h) gives for each place its numbers in all tokens so far.
        head_out = [dot(attn_weights, feature) for feature in zip(*v_h, strict=True)]
        x_attn += head_out
    return x_attn


def gpt(
    token: int,
    position: int,
    keys: Cache,
    values: Cache,
    state_dict: Mapping[str, Matrix],
) -> Vector:
    """The logits of the next token. Keys and values are appended to those before: nothing later can be seen."""
    # The norm is for the stream itself: layers add to an x of size 1. microgpt has none before lm_head.
    x = rmsnorm(add(state_dict["wte"][token], state_dict["wpe"][position]))
    for li, cached in enumerate(zip(keys, values, strict=True)):
        # Tokens exchange information.
        normed = rmsnorm(x)
        q, *kv = (
            linear(normed, state_dict[f"layer{li}.attn_w{role}"]) for role in "qkv"
        )
        for so_far, new in zip(cached, kv, strict=True):
            so_far.append(new)
        x_attn = attention(q, *cached, n_head)
        x = add(x, linear(x_attn, state_dict[f"layer{li}.attn_wo"]))
        # Each token is worked on alone.
        hidden = linear(rmsnorm(x), state_dict[f"layer{li}.mlp_fc1"])
        x = add(x, linear([relu(a) for a in hidden], state_dict[f"layer{li}.mlp_fc2"]))
    return linear(x, state_dict["lm_head"])


def no_tokens_yet(n_layer: int = 1) -> tuple[Cache, Cache]:
    """Empty keys and values."""
    return [[] for _ in range(n_layer)], [[] for _ in range(n_layer)]


def shapes(vocab_size: int, n_layer: int = 1) -> dict[str, tuple[int, int]]:
    """(rows, columns) of every matrix, in the order in which they are drawn."""
    drawn = {
        "wte": (vocab_size, n_embd),
        "wpe": (block_size, n_embd),
        "lm_head": (vocab_size, n_embd),
    }
    for li in range(n_layer):
        drawn |= {f"layer{li}.attn_w{role}": (n_embd, n_embd) for role in "qkvo"}
        drawn |= {
            f"layer{li}.mlp_fc1": (4 * n_embd, n_embd),
            f"layer{li}.mlp_fc2": (n_embd, 4 * n_embd),
        }
    return drawn


# Training and sampling


class Draw:
    """All that is random, from one stream in microgpt's order: the shuffle, the weights, then the samples."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self.random = random.Random(seed)
        self.documents = [name.strip() for name in names if name.strip()]
        if not self.documents:
            raise ValueError("the list has no names")
        self.random.shuffle(self.documents)
        self.characters = sorted(set("".join(self.documents)))
        self.end = len(self.characters)  # one id for beginning and end
        self.weights = {
            key: [
                [self.random.gauss(0, 0.08) for _ in range(columns)]
                for _ in range(rows)
            ]
            for key, (rows, columns) in shapes(self.end + 1).items()
        }

    def ids(self, step: int) -> list[int]:
        """The document of a step, from 0, between two ends; at most block_size of them are predicted."""
        document = self.documents[step % len(self.documents)]
        return [self.end, *map(self.characters.index, document), self.end][
            : block_size + 1
        ]

    def write(self, logits_after: Writer) -> str:
        """A new name, one token after another, from the logits that follow the ids so far."""
        ids = [self.end]
        while len(ids) <= block_size:
            weights = softmax([x / TEMPERATURE for x in logits_after(ids)])
            ids += self.random.choices(range(self.end + 1), weights=weights)
            if ids[-1] == self.end:
                break
        return "".join(self.characters[i] for i in ids if i != self.end)


class Learner:
    """The weights as Values, and Adam, which moves each against its slope."""

    def __init__(self, weights: Weights) -> None:
        self.state_dict = {
            key: [[Value(x) for x in row] for row in matrix]
            for key, matrix in weights.items()
        }
        self.weights = [
            weight
            for matrix in self.state_dict.values()
            for row in matrix
            for weight in row
        ]
        self.means, self.squares = [0.0] * len(self.weights), [0.0] * len(self.weights)

    def loss(self, ids: Sequence[int]) -> Any:
        """The mean over a document of -log softmax(logits)[next token]."""
        keys, values = no_tokens_yet()
        surprises = []
        for position, (token, following) in enumerate(pairwise(ids)):
            logits = gpt(token, position, keys, values, self.state_dict)
            surprises.append(log_sum_exp(logits) - logits[following])
        return sum(surprises) / len(surprises)

    def learn(self, ids: Sequence[int], step: int, rate: float) -> float:
        """One step, counted from 1, on a document; its loss before the step."""
        loss = self.loss(ids)
        loss.backward()
        # Both means start at 0: each is divided by the sum of the weights that its terms have by now.
        filled_mean = 1 - BETA1**step
        filled_square = 1 - BETA2**step
        for i, weight in enumerate(self.weights):
            self.means[i] = mean = BETA1 * self.means[i] + (1 - BETA1) * weight.grad
            self.squares[i] = square = (
                BETA2 * self.squares[i] + (1 - BETA2) * weight.grad**2
            )
            weight.data -= (
                rate * (mean / filled_mean) / (math.sqrt(square / filled_square) + EPS)
            )
            weight.grad = 0.0  # `backward` adds to it
        return float(loss.data)

    def writer(self) -> Writer:
        """The logits after the ids so far, of which it must hear one more with each call: it keeps keys and values."""
        keys, values = no_tokens_yet()
        return lambda ids: numbers(
            gpt(ids[-1], len(ids) - 1, keys, values, self.state_dict)
        )


def replay(
    names: Sequence[str],
    steps: int = STEPS,
    n_samples: int = 20,
    report: Callable[[int, float], object] = lambda step, loss: None,
    learner: Callable[[Weights], Any] = Learner,
) -> tuple[list[float], list[str]]:
    """Learn from one name a step, then write some: the loss of each step, in nats a token, and the samples.

    steps    the rate falls to 0 in a line of 1,000: fewer steps are the beginning of it, more stretch it
    report   gets the number of a step, from 1, and its loss
    learner  makes a model of the drawn weights: the one above, or that of `microgpt_numpy`
    """
    draw = Draw(names, seed=42)
    losses = []
    model = learner(draw.weights)
    for step in range(steps):
        losses.append(
            model.learn(draw.ids(step), step + 1, RATE * (1 - step / max(steps, STEPS)))
        )
        report(step + 1, losses[-1])
    return losses, [draw.write(model.writer()) for _ in range(n_samples)]


def main(learner: Callable[[Weights], Any]) -> None:
    """The command line of this file and of `microgpt_numpy`: NAMES [STEPS] -> losses, then samples."""
    names = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else STEPS

    def report(step: int, loss: float) -> None:
        print(f"step {step:4}  loss {loss:.4f}")

    print("\n".join(replay(names, steps, report=report, learner=learner)[1]))


if __name__ == "__main__":
    main(Learner)
