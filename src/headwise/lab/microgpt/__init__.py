"""microgpt, replayed exactly on three rungs: scalar autograd, NumPy with a backward by hand, and the general model.

microgpt (Karpathy 2026) is a GPT of one layer, 4 heads and width 16 that learns names, one a step. The rungs share
what stands here: the shape, the recipe, and everything random. So they give the same losses, but for roundings, and
the same samples, letter for letter. Random numbers are drawn from one stream in one order, microgpt's: shuffled
documents, weights, then samples. Nothing else draws in between. Read `plain` first.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headwise.errors import HeadwiseError
from headwise.spec import require_size

RUNGS = ("plain", "array", "tensor")

# microgpt's shape, number by number. A replay may have other numbers of layers and of heads; `lab.courses.mini_gpt`
# is wider, too.
N_LAYERS = 1
N_HEADS = 4
WIDTH = 16
CONTEXT = 16  # tokens
NORM_EPS = 1e-5  # added to the mean square in RMSNorm
WEIGHT_STD = 0.08  # of all first weights, which are normal

# microgpt's recipe: Adam (Kingma & Ba 2014, arXiv 1412.6980), a document a step, the rate falling to 0 in a line.
LEARNING_RATE = 0.01
BETA1, BETA2 = 0.85, 0.99
ADAM_EPS = 1e-8
SCHEDULE = 1000  # steps; a shorter run is the beginning of this one, a longer run stretches it
TEMPERATURE = 0.5

Matrix = list[list[float]]
Report = Callable[[int, float], None]  # is told the number of a step, from 1, and its loss


@dataclass(frozen=True)
class Replay:
    """What a run left: the loss of each step, in nats per character; the samples; the weights, as in `Draw`."""

    losses: list[float]
    samples: list[str]
    parameters: dict[str, Matrix]


def learning_rate(step: int, steps: int) -> float:
    """The rate of a step, counted from 0, of a run of so many."""
    return LEARNING_RATE * (1 - step / max(steps, SCHEDULE))


class Characters:
    """The ids of characters: their places in sorted order. The next id, `end`, begins and ends every document."""

    def __init__(self, documents: Iterable[str]) -> None:
        self.characters = sorted(set("".join(documents)))
        self.end = len(self.characters)
        self.size = self.end + 1
        self._ids = {character: i for i, character in enumerate(self.characters)}

    def encode(self, document: str) -> list[int]:
        return [self.end, *(self._ids[character] for character in document), self.end]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.characters[i] for i in ids if i != self.end)


class Draw:
    """Shuffled documents, their tokens, the first weights, and the stream that goes on to draw the samples.

    weights  one matrix for each key, as rows; rows are outputs, so that y = W x. Keys in the order of the draw:
             wte (V,16), wpe (16,16), lm_head (V,16), then for each layer i layeri.attn_wq, attn_wk, attn_wv, attn_wo
             (16,16), layeri.mlp_fc1 (64,16), layeri.mlp_fc2 (16,64); V is the number of tokens
    n_heads  is not drawn by: heads are slices of the matrices. The rungs read it here
    """

    def __init__(self, documents: Sequence[str], seed: int, n_heads: int = N_HEADS, n_layers: int = N_LAYERS) -> None:
        self._random = random.Random(seed)
        self.n_heads, self.n_layers = n_heads, n_layers
        self.documents = list(documents)
        self._random.shuffle(self.documents)
        self.tokens = Characters(self.documents)
        self.weights = {key: self._matrix(*shape) for key, shape in shapes(self.tokens.size, n_layers).items()}

    def _matrix(self, n_rows: int, n_columns: int) -> Matrix:
        return [[self._random.gauss(0, WEIGHT_STD) for _ in range(n_columns)] for _ in range(n_rows)]

    def document(self, step: int) -> list[int]:
        """The ids of the document of a step (from 0), cut so that there are at most CONTEXT predictions."""
        # + 1: each id but the last is an input, and each but the first is predicted.
        return self.tokens.encode(self.documents[step % len(self.documents)])[: CONTEXT + 1]

    def choose(self, probabilities: Sequence[float]) -> int:
        # [0]: `choices` gives a list, here of one id.
        return self._random.choices(range(self.tokens.size), weights=probabilities)[0]

    def write(self, following: Callable[[list[int]], list[float]]) -> str:
        """A new document, one token after another; `following` gives the probabilities of what comes after ids."""
        ids = [self.tokens.end]
        while len(ids) <= CONTEXT:  # the model reads CONTEXT ids at most, this one among them
            ids.append(self.choose(following(ids)))
            if ids[-1] == self.tokens.end:
                break
        return self.tokens.decode(ids)


def shapes(vocabulary: int, n_layers: int = N_LAYERS, width: int = WIDTH) -> dict[str, tuple[int, int]]:
    """(rows, columns) of every matrix, in the order in which they are drawn; the feed-forward is 4 times as wide."""
    drawn = {"wte": (vocabulary, width), "wpe": (CONTEXT, width), "lm_head": (vocabulary, width)}
    for i in range(n_layers):
        drawn |= {f"layer{i}.attn_{name}": (width, width) for name in ("wq", "wk", "wv", "wo")}
        drawn |= {f"layer{i}.mlp_fc1": (4 * width, width), f"layer{i}.mlp_fc2": (width, 4 * width)}
    return drawn


def train(draw: Draw, steps: int, report: Report | None, step_on: Callable[[list[int], float], float]) -> list[float]:
    """The loss of each step. `step_on(ids, rate)` updates the weights once on a document; its loss before."""
    losses = []
    for step in range(steps):
        losses.append(step_on(draw.document(step), learning_rate(step, steps)))
        if report is not None:
            report(step + 1, losses[-1])
    return losses


def replay(
    documents: Sequence[str],
    rung: str = "array",
    steps: int = 1000,
    seed: int = 42,
    n_samples: int = 20,
    report: Report | None = None,
    n_heads: int = N_HEADS,
    n_layers: int = N_LAYERS,
) -> Replay:
    """Train microgpt on documents, such as the lines of a list of names, and draw samples from it.

    documents  texts; they are stripped, and empty ones left out. Step i trains on the i-th of them, shuffled, and
               begins again after the last
    rung       plain (scalars), array (NumPy, no torch) or tensor (torch, the project's own GPT); all in float64
    steps      the learning rate falls from 0.01 to 0 over max(steps, 1000): a short run is the beginning of a long one
    seed       of the one stream of Python's `random` that draws order, weights and samples; 42 is
               microgpt's own, as are 1000 steps and 20 samples
    n_samples  how many texts of at most 16 characters to draw afterwards, at temperature 0.5
    report     is called after each step with its number, from 1, and its loss in nats per character
    n_heads    a divisor of the width 16; microgpt has 4
    n_layers   microgpt has 1

    HeadwiseError for a rung or a number that there is not, for no documents, and for tensor where torch is missing.
    """
    if rung not in RUNGS:
        raise HeadwiseError(f"rung={rung!r} is not known; one of {', '.join(RUNGS)}")
    if steps < 1:
        raise HeadwiseError(f"steps={steps} must be at least 1")
    # What no command lets through has no phrase of `refusal`, with its Spanish: the three errors that follow.
    if n_samples < 0:
        raise HeadwiseError(f"n_samples={n_samples} is less than none; pass 0 or more")
    if isinstance(documents, str):  # which is a sequence of texts, too, of its characters
        raise HeadwiseError("documents is one text; pass a list of them, such as its lines")
    stripped = [document.strip() for document in documents]
    kept = [document for document in stripped if document]
    if not kept:
        raise HeadwiseError(f"none of the {len(stripped)} documents has a character; pass at least one name")
    require_size("n_layers", n_layers)
    require_size("n_heads", n_heads)
    if WIDTH % n_heads:
        raise HeadwiseError(f"n_heads={n_heads} does not divide the width of microgpt, {WIDTH}; pass 1, 2, 4, 8 or 16")
    try:  # loaded when it is asked for: array needs no torch, plain no NumPy either
        module: Any = importlib.import_module(f"headwise.lab.microgpt.{rung}")
    except ModuleNotFoundError as error:
        if error.name != "torch":  # another module is missing: the traceback says which
            raise
        message = "rung='tensor' needs torch, which is not installed: pip install 'headwise[torch]'"
        raise HeadwiseError(message) from None
    replayed: Replay = module.run(Draw(kept, seed, n_heads, n_layers), steps, n_samples, report)
    return replayed
