"""microgpt in NumPy, with the gradient worked out by hand: the same numbers as `plain`, a whole document at once.

A vector of `plain` is a column here and a document a matrix, so that y = W x stays as it is, and to split heads and to
join them is a reshape. Suffixes name the axes: c width, t position (of a query), s position of a key, h head, d width
of a head, f feed-forward, v vocabulary. `dx` is the slope of the loss along x, `back` takes slopes back through an
operation. float64 throughout. Width and layers follow from the weights; texts of one length may lie side by side as
more columns (`lab.courses.mini_gpt`).

All weights are windows on one flat vector, and all slopes on another: Adam is a dozen operations for the whole model.
At sizes as small as these `dot` and `take` cost less than `@` and indexing; `reduce` is what `sum` and `max` call.
Heads, as a stack of matrices, need `@`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwise.lab.microgpt import (
    ADAM_EPS,
    BETA1,
    BETA2,
    CONTEXT,
    NORM_EPS,
    TEMPERATURE,
    Draw,
    Matrix,
    Replay,
    Report,
    train,
)

Array = NDArray[np.float64]
Back = Callable[[Array], Array]  # from the slope of what an operation gave to the slope of what it was given

LATER = np.tril(np.full((CONTEXT, CONTEXT), -np.inf), -1)  # (s,t): added to a score; -inf where key s is after query t


@cache
def averaging(width: int) -> Array:
    """A row (1,c) whose product with x_ct is the mean over c, in a fifth to two thirds of a reduction's time."""
    return np.full((1, width), 1 / width)


def rms_norm(x_ct: Array) -> tuple[Array, Back]:
    """n = x r with r = 1 / sqrt(mean x^2 + eps), one r for each position; and the way back."""
    mean = averaging(len(x_ct))
    r = 1 / np.sqrt(mean.dot(x_ct * x_ct) + NORM_EPS)  # (1,t)
    n = x_ct * r

    def back(dn: Array) -> Array:
        """The part of dn along x is taken out: along x only the length changes, and n has the same length always."""
        return r * (dn - n * mean.dot(n * dn))

    return n, back


def softmax(x: Array, axis: int) -> Array:
    """exp x / sum exp x along an axis, written over x."""
    x -= np.maximum.reduce(x, axis=axis, keepdims=True)  # cancels in the ratio, and keeps exp from overflowing
    np.exp(x, out=x)
    x /= np.add.reduce(x, axis=axis, keepdims=True)
    return x


def attention(qkv: Array) -> tuple[Array, Back]:
    """Every head at once: q, k, v (3,...,d,t) -> out (...,d,t); and the way back, to the slopes of q, k and v."""
    q, k, v = qkv
    d, t = q.shape[-2:]  # width of a head, number of positions
    scores_st = k.swapaxes(-1, -2) @ q
    scores_st *= d**-0.5
    scores_st += LATER[:t, :t]
    # Weights (...,s,t), which add up to 1 over s. Where one is 0, so is its slope: the way back needs no mask.
    p = softmax(scores_st, axis=-2)

    def back(dout: Array) -> Array:
        # Each line differentiates the formula behind it.
        dp = v.swapaxes(-1, -2) @ dout  # out = v p
        dscores = p * (dp - np.add.reduce(p * dp, axis=-2, keepdims=True))  # softmax: dx = p (dp - sum p dp)
        dscores *= d**-0.5  # the same factor as on the way there
        d_qkv = np.empty_like(qkv)
        np.matmul(k, dscores, out=d_qkv[0])  # scores = k' q, along q
        np.matmul(q, dscores.swapaxes(-1, -2), out=d_qkv[1])  # along k
        np.matmul(dout, p.swapaxes(-1, -2), out=d_qkv[2])  # out = v p, along v
        return d_qkv

    return v @ p, back


class Layer(NamedTuple):
    """The matrices of a layer, or their slopes. Those of q, k and v stand one on another as one, (3c,c)."""

    qkv: Array
    wo: Array
    fc1: Array
    fc2: Array


class Windows:
    """The matrices of the model, as windows on one flat vector: what is written to them is written there.

    `weights` gives names and shapes, in the order in which they lie in `flat`.
    """

    def __init__(self, flat: Array, weights: Mapping[str, Matrix]) -> None:
        self.flat = flat
        self.named: dict[str, Array] = {}
        joined = []  # of each layer the matrices of q, k and v as one
        start = 0
        for key, matrix in weights.items():
            rows, columns = np.shape(matrix)
            size = rows * columns
            self.named[key] = flat[start : start + size].reshape(rows, columns)
            if key.endswith("attn_wq"):  # attn_wk and attn_wv come next, and are as large
                joined.append(flat[start : start + 3 * size].reshape(3 * rows, columns))
            start += size
        self.wte, self.wpe, self.lm_head = self.named["wte"], self.named["wpe"], self.named["lm_head"]
        self.layers = []
        for i, qkv in enumerate(joined):
            wo, fc1, fc2 = (self.named[f"layer{i}.{name}"] for name in ("attn_wo", "mlp_fc1", "mlp_fc2"))
            self.layers.append(Layer(qkv, wo, fc1, fc2))


class Model:
    """Weights, their slopes, and Adam's running means; `weights` as in `Draw`, of any width."""

    def __init__(self, weights: Mapping[str, Matrix], n_heads: int) -> None:
        flat = np.concatenate([np.ravel(matrix) for matrix in weights.values()])
        self.n_heads = n_heads
        self.weights, self.slopes = Windows(flat, weights), Windows(np.zeros_like(flat), weights)
        # Column i is token i.
        self.one_hot = np.eye(len(weights["wte"]))
        self.means, self.squares, self.scratch = np.zeros((3, flat.size))
        self.updates = 0

    def forward(self, ids: Sequence[int], n_texts: int = 1) -> tuple[Array, Callable[[Array], None]]:
        """Logits (v,t) of what follows each of the ids (t,); and the way back, from their slope to all of `slopes`.

        Where there are several texts, of one length, they follow one another along t.

        For every y = W x: dW = dy x' and dx = W' dy; a sum hands its slope to both of its parts.
        """
        w, d = self.weights, self.slopes  # `back` fills d anew: with out= nothing of the last step is added to
        # One column for each token, with a single 1: on the way back a product with it beats np.add.at.
        tokens_vt = self.one_hot.take(ids, axis=1)
        length = len(ids) // n_texts  # of each text; all begin at position 0
        positions_ct = np.tile(w.wpe[:length].T, n_texts)
        # microgpt takes the norm of the embedding, so that layers add to an x of size 1, and none before the logits.
        x, embedding_back = rms_norm(w.wte.T.dot(tokens_vt) + positions_ct)
        layers_back = []
        for weights, slopes in zip(w.layers, d.layers, strict=True):
            x, layer_back = self._layer(weights, slopes, x, n_texts)
            layers_back.append(layer_back)

        def back(dlogits: Array) -> None:
            np.dot(dlogits, x.T, out=d.lm_head)
            dx = w.lm_head.T.dot(dlogits)
            for layer_back in reversed(layers_back):
                dx = layer_back(dx)
            dx = embedding_back(dx)
            np.dot(tokens_vt, dx.T, out=d.wte)  # the one-hot matrix adds up the positions of each token
            d.wpe[:length] = dx.T.reshape(n_texts, length, -1).sum(0)  # and here each position, over the texts
            d.wpe[length:] = 0.0  # positions that this text does not reach

        return w.lm_head.dot(x), back

    # w has the weights of the layer, d takes their slopes.
    def _layer(self, w: Layer, d: Layer, x: Array, n_texts: int) -> tuple[Array, Back]:
        width, columns = x.shape
        split = (self.n_heads, width // self.n_heads, n_texts, columns // n_texts)  # h, d, text, t
        n1, norm1_back = rms_norm(x)
        qkv = w.qkv.dot(n1).reshape(3, *split)  # heads are slices of the width
        out, attention_back = attention(qkv.swapaxes(2, 3))  # (3,h,text,d,t): each text of a head by itself
        joined_ct = out.swapaxes(1, 2).reshape(width, columns)  # (h,text,d,t) -> (h,d,text,t) -> (c, all columns)
        x = x + w.wo.dot(joined_ct)
        n2, norm2_back = rms_norm(x)
        hidden_ft = np.maximum(w.fc1.dot(n2), 0)

        def back(dx: Array) -> Array:
            # The lines above in reverse. x + f(x) has two slopes to add: dx itself, and what comes back through f.
            np.dot(dx, hidden_ft.T, out=d.fc2)
            dhidden = w.fc2.T.dot(dx)
            dhidden *= hidden_ft > 0  # ReLU: open or shut
            np.dot(dhidden, n2.T, out=d.fc1)
            dx = dx + norm2_back(w.fc1.T.dot(dhidden))
            np.dot(dx, joined_ct.T, out=d.wo)
            dqkv = attention_back(w.wo.T.dot(dx).reshape(split).swapaxes(1, 2))
            dqkv = dqkv.swapaxes(2, 3).reshape(3 * width, columns)
            np.dot(dqkv, n1.T, out=d.qkv)
            return dx + norm1_back(w.qkv.T.dot(dqkv))

        return x + w.fc2.dot(hidden_ft), back

    def gradient(self, ids: Sequence[int], following: Sequence[int], n_texts: int = 1) -> float:
        """The loss of what follows the ids (t,), in nats per token, and its slopes along every weight, in `slopes`.

        A following token below 0 does not count: it fills up a text.
        """
        counted = np.greater_equal(following, 0)
        # (t,): how much each token counts in the mean, 1/n where n count, or 0.
        share = counted / np.add.reduce(counted)
        logits_vt, back = self.forward(ids, n_texts)
        # "clip" makes an id below 0 the id 0: a valid column, whose share is 0.
        following_vt = self.one_hot.take(following, axis=1, mode="clip")
        p = softmax(logits_vt, axis=0)
        loss = -np.log(np.add.reduce(p * following_vt, axis=0)).dot(share)
        # loss = -sum share log softmax(logits)[following], so dlogits = (p - following) share: p becomes dlogits.
        p -= following_vt
        p *= share
        back(p)
        return float(loss)

    def update(self, rate: float, decay: float = 0.0) -> None:
        """Adam: w -= rate * m / (sqrt v + eps), m and v the bias-corrected running means of the slope and its square.

        With `decay` the weights shrink by rate * decay first (AdamW, Loshchilov & Hutter 2017, arXiv 1711.05101).

        m = beta m + (1 - beta) slope takes one more product a step than means = beta means + slope. So `means` and
        `squares` are kept without the factors 1 - beta. These join the corrections 1 / (1 - beta^updates) in a and b:
        with m = a * means and v = b^2 * squares the step is rate a/b * means / (sqrt squares + eps/b).
        """
        self.updates += 1
        a = (1 - BETA1) / (1 - BETA1**self.updates)
        b = ((1 - BETA2) / (1 - BETA2**self.updates)) ** 0.5
        # `step` is a buffer, kept so that nothing is allocated: it holds the squared slopes, then sqrt squares + eps/b,
        # and from the division on the step itself.
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
        self.weights.flat *= 1 - rate * decay
        self.weights.flat -= step

    def step_on(self, ids: list[int], rate: float) -> float:
        """One step on a document; its loss before the step."""
        loss = self.gradient(ids[:-1], ids[1:])
        self.update(rate)
        return loss

    def following(self, ids: list[int]) -> list[float]:
        """The probabilities of the next token. All ids are read again for each: `Draw.write` stops at CONTEXT."""
        return softmax(self.forward(ids)[0][:, -1] / TEMPERATURE, axis=0).tolist()


def run(draw: Draw, steps: int, n_samples: int, report: Report | None) -> Replay:
    """Learn from one document a step, then write some of our own."""
    model = Model(draw.weights, draw.n_heads)
    losses = train(draw, steps, report, model.step_on)
    samples = [draw.write(model.following) for _ in range(n_samples)]
    return Replay(losses, samples, {key: matrix.tolist() for key, matrix in model.weights.named.items()})
