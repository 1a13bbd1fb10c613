"""microgpt in NumPy, with the gradient by hand: the losses and the samples of `microgpt`, in under a second.

    python -m headwise.courses.microgpt_numpy names.txt

Axes: t tokens, c width, h heads, d width of a head, v vocabulary. For y = x W' the slopes are dW = dy' x and dx = dy W;
a sum hands its slope to both of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from headwise.courses import microgpt
from headwise.courses.microgpt import (
    BETA1,
    BETA2,
    EPS,
    block_size,
    main,
    n_embd,
    n_head,
)

# the slope of what a step gives -> that of what it was given
Back = Callable[[Any], Any]
# added to scores: a token sees none that come later
LATER = np.triu(np.full((block_size, block_size), -np.inf), 1)


def rmsnorm(x: Any) -> tuple[Any, Back]:
    """The norm, and the way back from its slope to that of x."""
    scale = ((x * x).mean(-1, keepdims=True) + 1e-5) ** -0.5
    y = x * scale
    return y, lambda dy: scale * (dy - y * (dy * y).mean(-1, keepdims=True))


def softmax(x: Any) -> Any:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def split(x: Any) -> Any:
    """(t,n*c) -> (n,h,t,d): heads are slices of the width."""
    return x.reshape(len(x), -1, n_head, n_embd // n_head).transpose(1, 2, 0, 3)


def joined(x: Any) -> Any:
    """(n,h,t,d) -> (t,n*c)"""
    return x.transpose(2, 0, 1, 3).reshape(x.shape[2], -1)


class Learner:
    """As that of `microgpt`. All weights lie in one vector, of which the matrices are parts."""

    def __init__(self, weights: dict[str, Any]) -> None:
        self.n_tokens = len(weights["wte"])
        self.flat = np.concatenate([np.ravel(matrix) for matrix in weights.values()])
        self.means, self.squares = np.zeros((2, self.flat.size))

    def parts(self, flat: Any) -> list[Any]:
        """wte, wpe, lm_head, then of the layer W_Q, W_K and W_V as one, W_O, and the two of the feed-forward."""
        v = self.n_tokens
        c = n_embd
        *rest, fc2 = np.split(
            flat.reshape(-1, c), np.cumsum([v, block_size, v, 3 * c, c, 4 * c])
        )
        return [*rest, fc2.reshape(c, 4 * c)]

    def forward(self, ids: Sequence[int]) -> tuple[Any, Back]:
        """The logits (t,v) after each of the ids, and the way back from their slope to that of the vector."""
        wte, wpe, lm_head, wqkv, wo, fc1, fc2 = self.parts(self.flat)
        t = len(ids)
        shrink = (n_embd // n_head) ** -0.5
        x0, back_to_embeddings = rmsnorm(wte[ids] + wpe[:t])
        n1, back1 = rmsnorm(x0)
        q, k, v = split(n1 @ wqkv.T)
        p = softmax(q @ k.swapaxes(1, 2) * shrink + LATER[:t, :t])
        x_attn = joined((p @ v)[None])
        x1 = x0 + x_attn @ wo.T
        n2, back2 = rmsnorm(x1)
        hidden = np.maximum(n2 @ fc1.T, 0)
        x2 = x1 + hidden @ fc2.T

        def back(dlogits: Any) -> Any:
            dx2 = dlogits @ lm_head
            dhidden = dx2 @ fc2 * (hidden > 0)
            dx1 = dx2 + back2(dhidden @ fc1)
            dout = split(dx1 @ wo)[0]
            dp = dout @ v.swapaxes(1, 2)
            dscores = p * (dp - (p * dp).sum(-1, keepdims=True)) * shrink
            dqkv = joined(
                np.stack(
                    [dscores @ k, dscores.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ dout]
                )
            )
            dx = back_to_embeddings(dx1 + back1(dqkv @ wqkv))
            slopes = np.zeros_like(self.flat)
            dwte, dwpe, *others = self.parts(slopes)
            np.add.at(dwte, ids, dx)
            dwpe[:t] = dx
            pairs = (
                (dlogits, x2),
                (dqkv, n1),
                (dx1, x_attn),
                (dhidden, n2),
                (dx2, hidden),
            )
            for dw, (dy, x) in zip(others, pairs, strict=True):
                dw[:] = dy.T @ x
            return slopes

        return x2 @ lm_head.T, back

    def gradient(self, ids: Sequence[int]) -> tuple[float, Any]:
        """The loss of a document and its slope along the vector."""
        logits, back = self.forward(ids[:-1])
        p = softmax(logits)
        following = (np.arange(len(logits)), ids[1:])
        loss = -np.log(p[following]).mean()
        p[following] -= 1
        return float(loss), back(p / len(p))

    def learn(self, ids: Sequence[int], step: int, rate: float) -> float:
        loss, slopes = self.gradient(ids)
        self.means += (1 - BETA1) * (slopes - self.means)
        self.squares += (1 - BETA2) * (slopes**2 - self.squares)
        root = np.sqrt(self.squares / (1 - BETA2**step))
        self.flat -= rate * self.means / (1 - BETA1**step) / (root + EPS)
        return loss

    def writer(self) -> Callable[[list[int]], Any]:
        return lambda ids: self.forward(ids)[0][-1]


replay = partial(microgpt.replay, learner=Learner)

if __name__ == "__main__":
    main(Learner)
