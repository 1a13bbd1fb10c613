"""The Mini-GPT of a course on the core of the verb corpus, in NumPy alone: forward and backward by hand, no torch.

    python -m headwise.lab.courses.mini_gpt runs/mini-gpt       # a minute or two; then: headwise heads runs/mini-gpt

2 layers of 4 heads, width 64, feed-forward 256: the model of `lab.microgpt.array`, which derives the gradient, on
batches of lines. torch comes in at the end, to write the run folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headwise.corpus import verbs
from headwise.files import require_empty
from headwise.gpt.presets import warm_cosine
from headwise.lab.microgpt import CONTEXT, WEIGHT_STD, Matrix, Replay, shapes
from headwise.lab.microgpt.array import Model

N_LAYERS, N_HEADS, WIDTH = 2, 4, 64
STEPS, BATCH = 1500, 32  # round choices: more of either takes longer
# The learning rate rises to its peak, a round choice, over 50 steps, then falls to this fraction of it.
RATE, WARMUP, FINAL = 4e-3, 50, 0.05
# Of the weights. The corpus is small enough to be learned by heart: with the lines in one order, 0.3 in place of 3.0
# left a held-out loss of 1.72 in place of 1.50 nats.
DECAY = 3.0
IGNORED = -1  # a following token that does not count: `Model.gradient` passes over those below 0

Report = Callable[[int, int, float], None]  # is told the step, from 1, of how many, and its loss


def first_weights(vocabulary: int, seed: int, width: int = WIDTH, n_layers: int = N_LAYERS) -> dict[str, Matrix]:
    """The matrices under the keys of `microgpt.Draw`, as rows, normal with microgpt's standard deviation 0.08.

    Tests draw small ones, of another width and fewer layers.
    """
    rng = np.random.default_rng(seed)
    drawn = shapes(vocabulary, n_layers, width)
    return {key: rng.normal(0, WEIGHT_STD, shape).tolist() for key, shape in drawn.items()}


def batch(lines: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """Inputs and what follows each, both (t,): text after text, each filled up to the longest.

    [7,1,2,7] and [7,3,7] give inputs 7,1,2, 7,3,0 and following 1,2,7, 3,7,-1.
    """
    longest = max(map(len, lines)) - 1  # the last token of a line is no input
    # Inputs are filled up with the token 0: any would do, since no token looks at later ones.
    inputs = np.zeros((len(lines), longest), int)
    following = np.full((len(lines), longest), IGNORED)
    for n, line in enumerate(lines):
        inputs[n, : len(line) - 1] = line[:-1]
        following[n, : len(line) - 1] = line[1:]
    return inputs.ravel(), following.ravel()


def train(steps: int = STEPS, seed: int = 0, report: Report = lambda step, steps, loss: None) -> Replay:
    """Learn the training lines of the core of the verb corpus: losses in nats per token, and the weights."""
    lines = verbs.corpus(seed, core=True).train_lines
    words = sorted({word for line in lines for word in line.split()})
    ids = {word: number for number, word in enumerate(words)}
    end = len(words)  # stands before and after every line; the tokenizer of the run folder gives the same ids
    texts = []  # of each line its ids, with the persons of a conjugation in every order, as `headwise train` has them
    for line in lines:
        orders = [[ids[word] for word in order.split()] for order in verbs.clause_orders(line)]
        texts.append([[end, *order, end] for order in orders])
    model = Model(first_weights(end + 1, seed), N_HEADS)
    rng = np.random.default_rng(seed)  # draws lines and their orders
    losses = []
    for step in range(steps):
        chosen = rng.choice(len(texts), BATCH, replace=False)
        drawn = [texts[n][rng.integers(len(texts[n]))] for n in chosen]
        losses.append(model.gradient(*batch(drawn), n_texts=BATCH))
        model.update(RATE * warm_cosine(step, steps, WARMUP, FINAL), DECAY)
        report(step + 1, steps, losses[-1])
    # [] stands for the samples: a replay of microgpt writes names at its end, and here nothing is written.
    return Replay(losses, [], {key: matrix.tolist() for key, matrix in model.weights.named.items()})


def main(folder: Path, steps: int = STEPS, seed: int = 0) -> None:
    """Train, and write a run folder for `headwise heads`, `trace` and `generate`."""

    def report(step: int, steps: int, loss: float) -> None:
        # 15 lines for 1,500 steps, and never more than 29.
        if step % max(1, steps // 15) == 0:
            print(f"step {step}/{steps}  loss {loss:.3f}", flush=True)

    require_empty(folder)
    result = train(steps, seed, report)
    # Imported here, so that the training above needs no torch.
    from headwise.gpt.run import Settings
    from headwise.lab.microgpt.tensor import write_folder

    shape = {"n_layers": N_LAYERS, "n_heads": N_HEADS, "d_model": WIDTH, "context": CONTEXT}
    # The preset microgpt gives the form of the model; its recipe is not the one used here, and is passed over.
    write_folder(folder, result, Settings("microgpt", seed=seed, steps=steps, shape=shape))
    print(f"run folder: {folder}; its heads: headwise heads {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/mini-gpt"))
