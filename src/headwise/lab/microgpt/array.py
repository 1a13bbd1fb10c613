"""microgpt in NumPy, with the gradient worked out by hand: the same numbers as `plain`, a whole document at once.

The algorithm is that of Karpathy's microgpt (2026). A vector of `plain` is a column here and a document is a matrix, so
that y = W x stays as it is, and the rows of q, k and v that belong to a head lie together: to split heads and to join
them is a reshape. Suffixes name the axes: c width, t position (of a query), s position of a key, h head, d width of a
head, f feed-forward, v vocabulary. `dx` is the slope of the loss along x. float64 throughout.

All weights lie in one flat vector and all slopes in another, and the matrices are windows on them: Adam is then a dozen
operations for the whole model.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwise.lab.microgpt.draw import (
    ADAM_EPS,
    BETA1,
    BETA2,
    CONTEXT,
    NORM_EPS,
    TEMPERATURE,
    WIDTH,
    Draw,
    Replay,
    Report,
    shapes,
    trained,
)

Array = NDArray[np.float64]

MEAN = np.full((1, WIDTH), 1 / WIDTH)  # MEAN.dot(x_ct) is the mean over c, in half the time of a reduction
LATER = np.tril(np.full((CONTEXT, CONTEXT), -np.inf), -1)  # (s,t): added to a score; -inf where key s is after query t


def rms_norm(x_ct: Array) -> tuple[Array, Array]:
    """n = x r with r = 1 / sqrt(mean x^2 + eps), one r for each position. Returns n (c,t) and r (1,t)."""
    r = 1 / np.sqrt(MEAN.dot(x_ct * x_ct) + NORM_EPS)
    return x_ct * r, r


def rms_norm_back(dn: Array, n: Array, r: Array) -> Array:
    """dx = r (dn - n mean(n dn)): the part of dn that points along x changes nothing but the length, which is fixed."""
    dx: Array = r * (dn - n * MEAN.dot(n * dn))
    return dx


def softmax(x: Array, axis: int) -> Array:
    """exp x / sum exp x along an axis, written over x."""
    x -= np.maximum.reduce(x, axis=axis, keepdims=True)  # cancels in the ratio, and keeps exp from overflowing
    np.exp(x, out=x)
    x /= np.add.reduce(x, axis=axis, keepdims=True)
    return x


def attention(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Every head at once: q, k, v (h,d,t) -> weights (h,s,t), which add up to 1 over s, and out (h,d,t)."""
    scores_hst = k.transpose(0, 2, 1) @ q
    scores_hst *= q.shape[1] ** -0.5
    scores_hst += LATER[: q.shape[2], : q.shape[2]]
    weights_hst = softmax(scores_hst, axis=1)
    return weights_hst, v @ weights_hst


def attention_back(dout: Array, p: Array, q: Array, k: Array, v: Array) -> Array:
    """The slopes of q, k and v, stacked (3,h,d,t). p are the weights (h,s,t); where they are 0, so is every slope."""
    dp = v.transpose(0, 2, 1) @ dout  # out = v p
    dscores = p * (dp - np.add.reduce(p * dp, axis=1, keepdims=True))  # softmax: dx = p (dp - sum p dp)
    dscores *= q.shape[1] ** -0.5
    d_qkv = np.empty((3, *q.shape))
    np.matmul(k, dscores, out=d_qkv[0])  # scores = k' q
    np.matmul(q, dscores.transpose(0, 2, 1), out=d_qkv[1])
    np.matmul(dout, p.transpose(0, 2, 1), out=d_qkv[2])
    return d_qkv


class Layer(NamedTuple):
    """The matrices of a layer; q, k and v are one, (48,16)."""

    qkv: Array
    wo: Array
    fc1: Array
    fc2: Array


class Windows:
    """The matrices of the model, as windows on one flat vector."""

    def __init__(self, flat: Array, vocabulary: int, n_layers: int) -> None:
        self.flat = flat
        self.named: dict[str, Array] = {}
        self.layers: list[Layer] = []
        start = 0
        for key, (rows, columns) in shapes(vocabulary, n_layers).items():
            self.named[key] = flat[start : start + rows * columns].reshape(rows, columns)
            if key.endswith("attn_wq"):  # those of k and v come next
                qkv = flat[start : start + 3 * rows * columns].reshape(3 * rows, columns)
            elif key.endswith("mlp_fc2"):
                wo, fc1 = (self.named[f"layer{len(self.layers)}.{name}"] for name in ("attn_wo", "mlp_fc1"))
                self.layers.append(Layer(qkv, wo, fc1, self.named[key]))
            start += rows * columns
        self.wte, self.wpe, self.lm_head = (self.named[key] for key in ("wte", "wpe", "lm_head"))


class LayerSteps(NamedTuple):
    """What a layer leaves for the way back: each array is the input of an operation that has a slope."""

    n1: Array
    r1: Array
    q: Array
    k: Array
    v: Array
    weights_hst: Array
    joined_ct: Array
    n2: Array
    r2: Array
    hidden_ft: Array


class Forward(NamedTuple):
    """The same of the whole model."""

    tokens_vt: Array  # one column for each token, with a single 1
    x0: Array
    r0: Array
    layers: list[LayerSteps]
    x: Array
    logits_vt: Array


class Model:
    """Weights, their slopes, and Adam's running means."""

    def __init__(self, draw: Draw) -> None:
        flat = np.concatenate([np.ravel(matrix) for matrix in draw.weights.values()])
        self.n_heads = draw.n_heads
        self.weights = Windows(flat, draw.tokens.size, draw.n_layers)
        self.slopes = Windows(np.zeros_like(flat), draw.tokens.size, draw.n_layers)
        self.one_hot = np.eye(draw.tokens.size)
        self.means, self.squares, self.scratch = np.zeros((3, flat.size))
        self.updates = 0

    def forward(self, ids: list[int]) -> Forward:
        """Logits (v,t) of what follows each of the ids (t,), and everything they came from."""
        w = self.weights
        tokens_vt = self.one_hot.take(ids, axis=1)
        x0, r0 = rms_norm(w.wte.T.dot(tokens_vt) + w.wpe[: len(ids)].T)
        x, layers = x0, []
        for layer in w.layers:
            x, steps = self._layer(layer, x)
            layers.append(steps)
        return Forward(tokens_vt, x0, r0, layers, x, w.lm_head.dot(x))

    def _layer(self, w: Layer, x: Array) -> tuple[Array, LayerSteps]:
        n1, r1 = rms_norm(x)
        q, k, v = w.qkv.dot(n1).reshape(3, self.n_heads, WIDTH // self.n_heads, -1)
        weights_hst, out_hdt = attention(q, k, v)
        joined_ct = out_hdt.reshape(WIDTH, -1)
        x = x + w.wo.dot(joined_ct)
        n2, r2 = rms_norm(x)
        hidden_ft = np.maximum(w.fc1.dot(n2), 0)
        return x + w.fc2.dot(hidden_ft), LayerSteps(n1, r1, q, k, v, weights_hst, joined_ct, n2, r2, hidden_ft)

    def backward(self, f: Forward, dlogits: Array) -> None:
        """Fill the slopes. For every y = W x: dW = dy x' and dx = W' dy; a sum hands its slope to both of its parts."""
        w, d, length = self.weights, self.slopes, f.x.shape[1]
        np.dot(dlogits, f.x.T, out=d.lm_head)
        dx = w.lm_head.T.dot(dlogits)
        for i in reversed(range(len(f.layers))):
            dx = self._layer_back(w.layers[i], d.layers[i], f.layers[i], dx)
        dx = rms_norm_back(dx, f.x0, f.r0)
        np.dot(f.tokens_vt, dx.T, out=d.wte)  # the one-hot matrix adds up the positions of each token
        d.wpe[:length] = dx.T
        d.wpe[length:] = 0.0

    def _layer_back(self, w: Layer, d: Layer, f: LayerSteps, dx: Array) -> Array:
        """Fill the slopes of a layer; from the slope of what it gives that of what it was given."""
        np.dot(dx, f.hidden_ft.T, out=d.fc2)
        dhidden = w.fc2.T.dot(dx)
        dhidden *= f.hidden_ft > 0  # ReLU: open or shut
        np.dot(dhidden, f.n2.T, out=d.fc1)
        dx = dx + rms_norm_back(w.fc1.T.dot(dhidden), f.n2, f.r2)

        np.dot(dx, f.joined_ct.T, out=d.wo)
        dout_hdt = w.wo.T.dot(dx).reshape(f.q.shape)
        dqkv = attention_back(dout_hdt, f.weights_hst, f.q, f.k, f.v).reshape(3 * WIDTH, -1)
        np.dot(dqkv, f.n1.T, out=d.qkv)
        return dx + rms_norm_back(w.qkv.T.dot(dqkv), f.n1, f.r1)

    def gradient(self, ids: list[int]) -> float:
        """The loss of one document, in nats per token, and its slopes along every weight, in `slopes`."""
        f = self.forward(ids[:-1])
        following_vt = self.one_hot.take(ids[1:], axis=1)
        p = softmax(f.logits_vt, axis=0)
        loss = -np.log(np.add.reduce(p * following_vt, axis=0)).mean()
        p -= following_vt  # loss = -mean log softmax(logits)[following], so dlogits = (p - following) / t
        p /= p.shape[1]
        self.backward(f, p)
        return float(loss)

    def update(self, rate: float) -> None:
        """Adam: w -= rate * m / (sqrt v + eps), m and v the bias-corrected running means of the slope and its square.

        `means` and `squares` are kept without their factors 1 - beta, which are constant and join the correction: with
        m = a * means and v = b^2 * squares the step is rate a/b * means / (sqrt squares + eps/b).
        """
        self.updates += 1
        a = (1 - BETA1) / (1 - BETA1**self.updates)
        b = ((1 - BETA2) / (1 - BETA2**self.updates)) ** 0.5
        slopes, means, squares, step = self.slopes.flat, self.means, self.squares, self.scratch
        means *= BETA1
        means += slopes
        squares *= BETA2
        np.multiply(slopes, slopes, out=step)
        squares += step
        np.sqrt(squares, out=step)
        step += ADAM_EPS / b
        np.divide(means, step, out=step)
        step *= rate * a / b
        self.weights.flat -= step

    def learn(self, ids: list[int], rate: float) -> float:
        """One step on a document; its loss before the step."""
        loss = self.gradient(ids)
        self.update(rate)
        return loss

    def following(self, ids: list[int]) -> list[float]:
        """The probabilities of the next token. The ids are read again for each: they are at most 16."""
        probabilities: list[float] = softmax(self.forward(ids).logits_vt[:, -1] / TEMPERATURE, axis=0).tolist()
        return probabilities


def run(draw: Draw, steps: int, n_samples: int, report: Report | None) -> Replay:
    """Learn from one document a step, then write some of our own."""
    model = Model(draw)
    losses = trained(draw, steps, report, model.learn)
    samples = [draw.write(model.following) for _ in range(n_samples)]
    return Replay(losses, samples, {key: matrix.tolist() for key, matrix in model.weights.named.items()})
