"""microgpt in scalars: the whole of a GPT in one file, from a list of names to new ones. Read it top to bottom.

The algorithm is that of Karpathy's microgpt (2026). To learn, the numbers are `Value`s, which remember how they were
made, so that `backward` finds the slope of the loss along every weight; to write, they are floats. For speed a dot
product is a single node of that memory, and so is log(sum(exp)). Attention is causal because nothing here sees more
than one token at a time: a token can only look at keys and values that have been appended. The names are microgpt's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from headwise.lab.microgpt import ADAM_EPS, BETA1, BETA2, NORM_EPS, TEMPERATURE, Draw, Replay, Report, train
from headwise.rungs.autograd import Scalar, Value, dot, exp, log_sum_exp, number, relu

Vector = Sequence[Scalar]
Weights = Mapping[str, Sequence[Vector]]  # matrices as rows, by the names of `Draw`
Cached = list[list[Vector]]  # for each layer, one vector for each token so far


def linear(x: Vector, w: Sequence[Vector]) -> Vector:
    """y = W x: each row of W asks x one question, and the answer is a dot product. (m,) and (n,m) -> (n,)"""
    return [dot(row, x) for row in w]


def add(x: Vector, y: Vector) -> Vector:
    return [a + b for a, b in zip(x, y, strict=True)]


def rmsnorm(x: Vector) -> Vector:
    """x at a root mean square of 1, so that no layer has to guess how loud the one before it speaks."""
    scale = (dot(x, x) / len(x) + NORM_EPS) ** -0.5
    return [a * scale for a in x]


def softmax(x: Vector) -> Vector:
    """exp(x) over its sum, positive numbers that add up to 1: exp(a) / sum = exp(a - log sum)."""
    log_sum = log_sum_exp(x)
    return [exp(a - log_sum) for a in x]


def attention(q: Vector, keys: Sequence[Vector], values: Sequence[Vector], n_head: int) -> Vector:
    """Small attentions side by side. Each head owns n_embd / n_head places of q, of each key and each value.

    With the sizes of microgpt these are four heads of four places.

    q (n_embd,), keys and values (tokens so far, n_embd) -> (n_embd,): the outputs of the heads, one after another.
    """
    n_embd = len(q)
    head_dim = n_embd // n_head
    x_attn = []
    for hs in range(0, n_embd, head_dim):  # hs: where the head starts
        places = slice(hs, hs + head_dim)
        q_h, k_h, v_h = q[places], [key[places] for key in keys], [value[places] for value in values]
        attn_logits = [dot(q_h, key) / math.sqrt(head_dim) for key in k_h]  # how well each key answers
        attn_weights = softmax(attn_logits)
        # The values, mixed by weight. zip(*v_h) gives for each place its numbers in all tokens so far.
        head_out = [dot(attn_weights, feature) for feature in zip(*v_h, strict=True)]
        x_attn += head_out
    return x_attn


class Model:
    """The weights, and what they make of tokens. To learn they are Values, to write they are floats."""

    def __init__(self, weights: Weights, n_heads: int, n_layers: int) -> None:
        self.weights, self.n_heads, self.n_layers = weights, n_heads, n_layers

    def no_tokens_yet(self) -> tuple[Cached, Cached]:
        # Keys, then values: for each layer a list, to which `logits` appends.
        return [[] for _ in range(self.n_layers)], [[] for _ in range(self.n_layers)]

    def logits(self, token: int, position: int, keys: Cached, values: Cached) -> Vector:
        """One token in, the logits (V,) of the next one out. Its keys and values are appended to those before it."""
        weights = self.weights
        # What it is, and where it stands. The norm here is for the stream itself: layers add to an x of size 1.
        x = rmsnorm(add(weights["wte"][token], weights["wpe"][position]))
        for i in range(self.n_layers):
            # Tokens exchange information. What comes out is added to x: a layer corrects, it does not replace. So x
            # grows from layer to layer, and each layer takes its norm first; lm_head does not, as in microgpt.
            normed = rmsnorm(x)
            # attn_wq, attn_wk, attn_wv.
            q, k, v = (linear(normed, weights[f"layer{i}.attn_w{role}"]) for role in "qkv")
            keys[i].append(k)
            values[i].append(v)
            x_attn = attention(q, keys[i], values[i], self.n_heads)
            x = add(x, linear(x_attn, weights[f"layer{i}.attn_wo"]))
            # Each token is worked on alone: the feed-forward.
            hidden = linear(rmsnorm(x), weights[f"layer{i}.mlp_fc1"])
            x = add(x, linear([relu(a) for a in hidden], weights[f"layer{i}.mlp_fc2"]))
        return linear(x, weights["lm_head"])  # microgpt has no norm before it

    def loss(self, ids: list[int]) -> Scalar:
        """How surprised the model is by the next token, in nats, as a mean over the predictions of a document."""
        keys, values = self.no_tokens_yet()
        surprises = []
        for position, (token, following) in enumerate(pairwise(ids)):
            logits = self.logits(token, position, keys, values)
            surprises.append(log_sum_exp(logits) - logits[following])  # -log softmax(logits)[following]
        return sum(surprises) / len(surprises)

    def following(self, ids: list[int]) -> list[float]:
        """The probabilities of what comes after ids; at a temperature below 1 the likely becomes likelier.

        All ids are read again for each new one, though their keys could be kept: the rungs then share one `write`.
        """
        keys, values = self.no_tokens_yet()
        for position, token in enumerate(ids):
            logits = self.logits(token, position, keys, values)
        return [number(p) for p in softmax([x / TEMPERATURE for x in logits])]


class Adam:
    """Moves every weight against its slope, in steps that all have about the same length.

    The step is the running mean of the slope over the root of the running mean of its square. Both means start at 0, so
    each is divided by the sum of the weights that its terms have by now, 1 - beta^steps: a mean of equal terms is then
    the term itself.
    """

    def __init__(self, weights: list[Value]) -> None:
        self.weights = weights
        self.means = [0.0] * len(weights)
        self.squares = [0.0] * len(weights)
        self.steps = 0

    def update(self, rate: float) -> None:
        self.steps += 1
        filled_mean, filled_square = 1 - BETA1**self.steps, 1 - BETA2**self.steps
        for i, weight in enumerate(self.weights):
            # ADAM_EPS keeps a weight without any slope so far, such as of a letter not seen yet, from 0 / 0.
            self.means[i] = mean = BETA1 * self.means[i] + (1 - BETA1) * weight.grad
            self.squares[i] = square = BETA2 * self.squares[i] + (1 - BETA2) * weight.grad**2
            weight.data -= rate * (mean / filled_mean) / (math.sqrt(square / filled_square) + ADAM_EPS)
            weight.grad = 0.0  # `backward` adds to it


def run(draw: Draw, steps: int, n_samples: int, report: Report | None) -> Replay:
    """Learn from one document a step, then write some of our own; `Draw` has the documents and all that is random."""
    weights = {key: [[Value(x) for x in row] for row in matrix] for key, matrix in draw.weights.items()}
    model = Model(weights, draw.n_heads, draw.n_layers)
    adam = Adam([value for matrix in weights.values() for row in matrix for value in row])

    def step_on(ids: list[int], rate: float) -> float:
        loss = model.loss(ids)
        assert isinstance(loss, Value)  # since the weights are
        loss.backward()
        adam.update(rate)
        return loss.data

    losses = train(draw, steps, report, step_on)
    learned = {key: [[value.data for value in row] for row in matrix] for key, matrix in weights.items()}
    writer = Model(learned, draw.n_heads, draw.n_layers)
    return Replay(losses, [draw.write(writer.following) for _ in range(n_samples)], learned)
