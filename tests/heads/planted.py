"""Models built by hand, whose heads do what is known: one with a head for each job, one with an induction circuit."""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw

# --- A head for each job ---

KNOWN, DELIMITERS, RARE = 29, 3, 5  # tokens 0 to 28; the last three of these are delimiters; then five rare words
V, P = KNOWN + RARE, 67  # vocabulary, positions
C = V + P + V  # a token, its position, and the token before, which layer 0 writes
SHARP = 40.0

JOBS = {
    "L0.H0": ("previous token",),
    "L0.H1": ("first token",),
    "L0.H2": ("duplicate token",),
    "L0.H3": ("delimiter",),
    "L0.H4": ("self",),
    "L0.H5": ("positional",),  # two back
    "L0.H6": (),  # looks at everything alike
    "L1.H0": ("induction",),
    "L1.H1": ("rare token",),
    **{f"L1.H{h}": () for h in range(2, 7)},
}


class HandMade(nn.Module):
    """One-hot tokens and positions, two layers of seven heads; with `built=False` its weights are drawn at random."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.tokens, self.positions = nn.Embedding(V, C), nn.Embedding(P, C)
        self.layers = nn.ModuleList(
            hw.MultiHeadAttention(C, 7, head_dim=V + P + 1, value_dim=V, q_bias=True, mask=hw.Causal())
            for _ in range(2)
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = x + layer(x)
        return x


@torch.no_grad()
def hand_made() -> HandMade:
    model = HandMade(SimpleNamespace(max_position_embeddings=P))
    for parameter in model.parameters():
        parameter.zero_()
    model.tokens.weight[:, :V] = torch.eye(V)
    model.positions.weight[:, V : V + P] = torch.eye(P)
    for layer in model.layers:
        layer.q_proj.weight.mul_(0)
    token, position, before = slice(0, V), slice(V, V + P), slice(V + P, C)
    first, second = model.layers
    scale = SHARP * math.sqrt(V + P + 1)

    def looks(layer: nn.Module, h: int, query: slice | None, key: Tensor) -> None:
        """Head h scores q . k with q the named part of x, or a constant, and k = key @ x, (V+P+1, C)."""
        head = layer.heads[h]
        if query is None:
            layer.q_proj.bias[h * (V + P + 1)] = scale
        else:
            n = query.stop - query.start
            head.wq[torch.arange(n), torch.arange(query.start, query.stop)] = scale
        head.wk.copy_(key)

    def keys(*entries: tuple[int, int]) -> Tensor:
        key = torch.zeros(V + P + 1, C)
        for row, column in entries:
            key[row, column] = 1.0
        return key

    looks(first, 0, position, keys(*((i, V + i - 1) for i in range(1, P))))  # q of position i finds i - 1
    looks(first, 1, None, keys((0, V)))
    twins = torch.zeros(V + P + 1, C)
    twins[:V, token], twins[V : V + P, position] = torch.eye(V), -torch.eye(P)  # alike, but not oneself
    looks(first, 2, slice(0, V + P), twins)
    looks(first, 3, None, keys(*((0, t) for t in range(KNOWN - DELIMITERS, KNOWN))))
    looks(first, 4, position, keys(*((i, V + i) for i in range(P))))
    looks(first, 5, position, keys(*((i, V + i - 2) for i in range(2, P))))  # two back
    looks(second, 0, token, keys(*((t, V + P + t) for t in range(V))))  # keys carry the token before
    looks(second, 1, None, keys(*((0, t) for t in range(KNOWN, V))))
    writes = first.heads[0]
    writes.wv[:, token] = torch.eye(V)
    writes.wo[before, :] = torch.eye(V)
    return model


def documents(count: int = 11, length: int = 61) -> list[list[int]]:
    """Words drawn evenly, one in six a delimiter, four rare words a document, and no delimiter first."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(count):
        ids = torch.randint(KNOWN - DELIMITERS, (length,), generator=generator)
        ids[7::6] = torch.randint(KNOWN - DELIMITERS, KNOWN, ids[7::6].shape, generator=generator)
        places = torch.randperm(length - 9, generator=generator)[:4] + 5
        ids[places] = torch.randint(KNOWN, V, (4,), generator=generator)
        found.append(ids.tolist())
    return found


def shown(ids: Any) -> tuple[str, ...]:
    return tuple("." if KNOWN - DELIMITERS <= i < KNOWN else f"w{i}" for i in ids)


WORDS, PLACES = 11, 17  # tokens and positions, each an axis of the residual stream


def induction_model() -> hw.GPT:
    """L0.H1 copies the token before, L1.H0 looks for it and copies what it finds; the other heads are noise.

    The residual stream has room for the token, its position, the token before it, and the token to come.
    """
    C = 3 * WORDS + PLACES
    token, place, before, answer = (slice(0, 11), slice(11, 28), slice(28, 39), slice(39, 50))
    config = hw.GPTConfig(
        vocab_size=WORDS, context=PLACES, n_layers=2, n_heads=3, d_model=C, head_dim=PLACES, position="learned",
        final_norm=False, norm_gain=False,
    )  # fmt: skip
    torch.manual_seed(5)
    model = hw.GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        model.token_embedding.weight.zero_()[:, token] = torch.eye(WORDS)
        model.position_embedding.weight.zero_()[:, place] = torch.eye(PLACES)  # type: ignore[union-attr]
        model.lm_head.weight.zero_()[:, answer] = torch.eye(WORDS)
        for block in model.blocks:
            block.feed_forward.down.weight.zero_()  # type: ignore[union-attr]
        shift = torch.zeros(PLACES, PLACES)
        shift[range(PLACES - 1), range(1, PLACES)] = 1  # the query of place i is the key of place i - 1
        wire(model, 0, 1, (place, shift), (place, torch.eye(PLACES)), token, before)
        wire(model, 1, 0, (token, torch.eye(WORDS)), (before, torch.eye(WORDS)), token, answer)
    return model


def wire(model: hw.GPT, layer: int, h: int, q: Any, k: Any, reads: slice, writes: slice, pull: float = 4.0) -> None:
    head = model.blocks[layer].attention.heads[h]  # type: ignore[union-attr, index]
    for weight, (where, matrix) in ((head.wq, q), (head.wk, k)):
        weight.zero_()[: len(matrix), where] = pull * matrix
    words = reads.stop - reads.start
    head.wv.zero_()[:words, reads] = torch.eye(words)
    head.wo.zero_()[writes, :words] = torch.eye(words)
