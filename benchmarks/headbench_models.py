"""Models whose circuit is known, because their weights were set by hand: the bench of `python -m benchmarks headbench`.

The residual stream is made of registers: what a token is, where it stands, and what heads have written. A head is set
by saying which register its query reads, which one its key must match, what it hands over and where it writes it. The
same work is set into MHA, GQA, MQA and MLA, with RoPE or learned positions, qk-norm, windows and sinks, and has beside
it idle heads that look somewhere and write noise into a register that nobody reads, and a little of it everywhere.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import headwise as hw

N = 5  # of each kind of token: symbols, names, repeated names; and keys times values
CONTEXT, HEADS = 16, 6
FAST, RATIO = 3, 0.2  # pairs of features that tell positions apart under RoPE, and each one's speed beside the last
KINDS = ("bos", "ask", "sym", "name", "again", "cell", "language", "open", "close", "filler")
JUNK = 8

SIZES = {
    "kind": len(KINDS), "one": 1, "sym": N, "name": N, "again": N, "key": N, "val": N, "language": 2,
    "r1": N, "r2": N, "s1": N, "s2": N, "done": 1, "answer": 2 * N, "junk": JUNK, "pos": CONTEXT,
}  # fmt: skip
REGISTERS = {}
for _name, _size in SIZES.items():
    _start = sum(r.stop - r.start for r in REGISTERS.values())
    REGISTERS[_name] = slice(_start, _start + _size)
C = REGISTERS["pos"].stop + (REGISTERS["pos"].stop % 2)
LATENT = REGISTERS["pos"].start  # of MLA: all that a token says, but for its place

TOKENS: dict[str, dict[str, int]] = {"bos": {"kind": 0}, "?": {"kind": 1}}
for _i in range(N):
    TOKENS |= {f"{kind}{_i}": {"kind": KINDS.index(kind), kind: _i} for kind in ("sym", "name", "again")}
for _i, _j in itertools.product(range(N), repeat=2):
    TOKENS[f"cell{_i}{_j}"] = {"kind": KINDS.index("cell"), "key": _i, "val": _j}
TOKENS |= {name: {"kind": KINDS.index("language"), "language": i} for i, name in enumerate(("english", "spanish"))}
TOKENS |= {"(": {"kind": KINDS.index("open")}, ")": {"kind": KINDS.index("close")}}
TOKENS |= {f"filler{i}": {"kind": KINDS.index("filler")} for i in range(6)}
TOKENS |= {f"answer{i}": {} for i in range(2 * N)}
ID = {name: i for i, name in enumerate(TOKENS)}

LONG = 5.0  # the square of every token's length
GAIN = math.sqrt(C / LONG)  # what the norm before a layer multiplies a token with, about
LATENT_GAIN = math.sqrt(LATENT / LONG)  # and the norm of a latent what is kept of it

Matrix = Tensor | None  # None is the identity
Term = tuple[str, str, Matrix]


@dataclass(frozen=True)
class Work:
    """One head's work: each term is a register of queries, one of keys, and the matrix between them."""

    name: str
    layer: int
    terms: tuple[Term, ...]
    reads: str
    writes: tuple[tuple[str, Matrix, float], ...]
    offset: int = 0  # looks at the token so many places back, whatever it is
    idle: bool = False


@dataclass(frozen=True)
class Pair:
    clean: list[int]
    corrupted: list[int]
    answer: int
    other: int


@dataclass(frozen=True)
class Task:
    """Work and texts. `paths` are (sender, receiver, place), by the names of works."""

    name: str
    works: tuple[Work, ...]
    circuit: tuple[str, ...]
    pair: Callable[[random.Random], Pair]
    paths: tuple[tuple[str, str, str], ...] = ()
    needed: tuple[str, ...] = ()  # without them the answer breaks, and they do the same in both texts
    spare: tuple[str, ...] = ()  # takes over where another is silent
    alike: tuple[tuple[str, ...], ...] = ()  # works that stand in for each other
    feed_forwards: tuple[str, ...] = ()  # what the feed-forward of each layer does
    twin: str = ""  # the work that may be split between two heads


@dataclass(frozen=True)
class Form:
    name: str
    kv_heads: int | None = None  # None: MLA
    position: str = "rope"
    qk_norm: bool = False
    windows: bool = False
    sink: bool = False


FORMS = (
    Form("MHA, RoPE", 6),
    Form("MHA, learned positions", 6, "learned"),
    Form("GQA, RoPE", 2),
    Form("GQA, RoPE, qk-norm", 3, qk_norm=True),
    Form("GQA, learned positions, windows", 2, "learned", windows=True),
    Form("GQA, RoPE, sinks", 2, sink=True),
    Form("MQA, RoPE", 1),
    Form("MLA, RoPE", None),
)


@dataclass(frozen=True)
class Known:
    """A model and what is known of it. Heads are named as everywhere, L1.H3."""

    name: str
    task: str
    form: str
    model: hw.GPT
    pairs: list[Pair]
    circuit: frozenset[str]
    paths: frozenset[tuple[str, str, str]]
    needed: frozenset[str] = frozenset()
    spare: frozenset[str] = frozenset()
    alike: tuple[frozenset[str], ...] = ()

    @property
    def heads(self) -> tuple[str, ...]:
        blocks = enumerate(self.model.blocks)
        return tuple(f"L{layer}.H{h}" for layer, block in blocks for h in range(block.attention.spec.n_heads))

    def texts(self, pairs: Sequence[Pair] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Clean and corrupted texts (N,T), and what answers each, (N,2)."""
        rows = self.pairs if pairs is None else pairs
        clean, corrupted = (torch.tensor([getattr(pair, name) for pair in rows]) for name in ("clean", "corrupted"))
        return clean, corrupted, torch.tensor([[pair.answer, pair.other] for pair in rows])

    def effects(self, pairs: Sequence[Pair], contexts: int | None) -> dict[str, float]:
        clean, corrupted, target = self.texts(pairs)
        effects = hw.patch(self.model, clean, corrupted, target=target, contexts=contexts).effects
        return {name: effect.mean for name, effect in effects.items()}


# --- Weights ---


def built(task: Task, form: Form, seed: int, noise: float, sharp: float) -> tuple[hw.GPT, dict[str, str]]:
    """The model, and which head does which work.

    noise  of what an idle head writes, the part that falls on every register
    sharp  the score of what a head looks for, above all else
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    n_layers = max(len(task.feed_forwards), 1 + max(work.layer for work in task.works))
    layers = [[work for work in task.works if work.layer == n] for n in range(n_layers)]
    places = [dict(zip(rng.sample(range(HEADS), len(works)), works, strict=True)) for works in layers]
    G = form.kv_heads or HEADS
    features = [
        [_union(form, [layer[h] for h in layer if h // (HEADS // G) == g]) for g in range(G)] for layer in places
    ]
    if form.qk_norm:  # what a key is held against: without it noise alone would be made as long as a key
        features = [[([*keys, "one"], values) for keys, values in layer] for layer in features]
    width = max(max(_width(keys), _width(values)) for layer in features for keys, values in layer)
    config = _config(form, width, [not any(w.offset == 0 for w in works) for works in layers])
    model = hw.GPT(config).eval()
    if form.sink:
        for block in model.blocks:
            block.attention = hw.MultiHeadAttention.from_spec(block.attention.spec.replace(sink=True))
            torch.nn.init.uniform_(block.attention.sink, -1, 1)
    with torch.no_grad():
        _set_tokens(model, task)
        for number, block in enumerate(model.blocks):
            block.feed_forward.down.weight.zero_()
            _set_layer(block.attention, form, places[number], features[number], noise, sharp)
        for block, kind in zip(model.blocks, task.feed_forwards, strict=False):
            if kind:
                _set_feed_forward(block.feed_forward, kind)
    where = {work.name: f"L{n}.H{h}" for n, layer in enumerate(places) for h, work in layer.items()}
    return model.eval(), where


def _union(form: Form, works: Sequence[Work]) -> tuple[list[str], list[str]]:
    """What the keys of a group hold, and what its values do."""
    keys = dict.fromkeys(key for work in works for _, key, _ in work.terms)
    if form.position == "learned" and any(work.offset for work in works):
        keys["pos"] = None
    return list(keys), list(dict.fromkeys(work.reads for work in works))


def _width(names: Sequence[str]) -> int:
    return max(8, sum(SIZES[name] for name in names))


def _config(form: Form, width: int, local: Sequence[bool]) -> hw.GPTConfig:
    rope = form.position == "rope"
    head_dim, theta, latent = width, 10_000.0, {}
    if form.kv_heads is None:
        head_dim, theta = width + 2 * FAST, RATIO**-FAST
        latent = {"latent_dim": LATENT, "rope_dim": 2 * FAST}
    elif rope:
        head_dim = width + width % 2 + 2 * FAST
        theta = RATIO ** -(head_dim / 2)
    windows = tuple(4 if near else None for near in local) if form.windows else None
    return hw.GPTConfig(
        vocab_size=len(TOKENS), context=CONTEXT, n_layers=len(local), n_heads=HEADS, d_model=C, head_dim=head_dim,
        n_kv_heads=None if form.kv_heads is None else form.kv_heads, position=form.position, rope_theta=theta,
        qk_norm=form.qk_norm, norm_eps=1e-6, d_ff=N * N + 2 * N, activation="relu", windows=windows, **latent,
    )  # fmt: skip


def _set_tokens(model: hw.GPT, task: Task) -> None:
    embedding = model.token_embedding.weight.zero_()
    for i, features in enumerate(TOKENS.values()):
        embedding[i, REGISTERS["one"]] = 1
        for name, value in features.items():
            embedding[i, REGISTERS[name].start + value] = 1
    if task.name == "brackets":  # "balanced" is the answer unless something speaks against it
        embedding[ID["?"], REGISTERS["answer"].start + 1] = 0.5
    # Noise fills every token up to one length: the norm before a layer then multiplies all of them with one number.
    left = (LONG - (model.config.position == "learned") - embedding.square().sum(1, keepdim=True)).sqrt()
    embedding[:, REGISTERS["junk"]] = left * torch.nn.functional.normalize(torch.randn(len(TOKENS), JUNK))
    if model.position_embedding is not None:
        model.position_embedding.weight.zero_()[:, REGISTERS["pos"]] = torch.eye(CONTEXT)
    unembed = model.lm_head.weight.normal_(std=0.02)
    for i in range(2 * N):
        unembed[ID[f"answer{i}"], REGISTERS["answer"].start + i] = 2.5


def _set_layer(
    attention: hw.MultiHeadAttention,
    form: Form,
    works: dict[int, Work],
    features: Sequence[tuple[list[str], list[str]]],
    noise: float,
    sharp: float,
) -> None:
    D, G = attention.spec.head_dim, len(features)
    latent = form.kv_heads is None
    content, fast = _rooms(form, D)
    key_gain = LATENT_GAIN if latent else GAIN
    pull = math.sqrt(sharp * math.sqrt(D))
    far = any(work.offset for work in works.values())
    if form.qk_norm:  # queries and keys come with length sqrt(D) each, times a gain
        gain = (sharp / math.sqrt(D) * (12 if far and form.position == "rope" else 2.5)) ** 0.5
        attention.q_norm.weight.fill_(gain)
        attention.k_norm.weight.fill_(gain)
    drawn = math.sqrt(2 / C)  # scores of idle heads spread by 2
    q, k, v = drawn * torch.randn(HEADS, D, C), drawn * torch.randn(G, D, C), torch.randn(G, D, C) / math.sqrt(C)
    o = torch.zeros(C, HEADS, D)
    for g, (keys, values) in enumerate(features):
        if not values:
            continue
        k[g], v[g] = 0, 0
        if fast and (not latent):  # the same at each token; RoPE makes a place of it
            k[g, [a for a, _, _ in fast], REGISTERS["one"].start] = pull / key_gain
        _spread(k[g], keys, content, pull / key_gain)
        _spread(v[g], values, list(range(D)), 1.0)
    for h in range(HEADS):
        g = h // (HEADS // G)
        if h not in works:
            o[:, h] = noise * torch.randn(C, D) / math.sqrt(C * D)
            o[REGISTERS["junk"], h] = 0.3 * torch.randn(JUNK, D) / math.sqrt(D)
            continue
        work, (keys, values) = works[h], features[g]
        q[h] = 0
        if work.offset:
            _look_back(q[h], work.offset, fast, pull, keys, content)
        for query, key, matrix in work.terms:
            start = sum(SIZES[name] for name in keys[: keys.index(key)])
            rows = content[start : start + SIZES[key]]
            between = torch.eye(SIZES[key]) if matrix is None else matrix
            q[h, rows, REGISTERS[query]] += pull / GAIN * between
        start = sum(SIZES[name] for name in values[: values.index(work.reads)])
        columns = slice(start, start + SIZES[work.reads])
        for register, matrix, scale in work.writes:
            through = torch.eye(SIZES[work.reads]) if matrix is None else matrix
            o[REGISTERS[register], h, columns] += scale / key_gain * _padded(through, SIZES[register])
    _store(attention, latent, q, k, v, o, pull / key_gain)


def _rooms(form: Form, D: int) -> tuple[list[int], list[tuple[int, int, float]]]:
    """Which features of queries and keys say what, and which say where: pairs, with their speed."""
    if form.position == "learned":
        return list(range(D)), []
    if form.kv_heads is None:
        first = D - 2 * FAST
        return list(range(first)), [(first + m, first + m + FAST, RATIO**m) for m in range(FAST)]
    half = D // 2
    fast = [(m, m + half, RATIO**m) for m in range(FAST)]
    return [*range(FAST, half), *range(half + FAST, D)], fast


def _spread(matrix: Tensor, names: Sequence[str], rows: Sequence[int], scale: float) -> None:
    row = 0
    for name in names:
        for column in range(REGISTERS[name].start, REGISTERS[name].stop):
            matrix[rows[row], column] = scale
            row += 1


def _look_back(
    q: Tensor,
    offset: int,
    fast: Sequence[tuple[int, int, float]],
    pull: float,
    keys: Sequence[str],
    rows: Sequence[int],
) -> None:
    one = REGISTERS["one"].start
    for a, b, speed in fast:  # a key at s, rotated by s * speed, meets this query at t best where s = t - offset
        q[a, one] = 2.5 * pull / GAIN * math.cos(offset * speed)
        q[b, one] = -2.5 * pull / GAIN * math.sin(offset * speed)
    if not fast:
        start = sum(SIZES[name] for name in keys[: keys.index("pos")])
        for t in range(offset, CONTEXT):
            q[rows[start + t - offset], REGISTERS["pos"].start + t] = pull / GAIN


def _padded(matrix: Tensor, rows: int) -> Tensor:
    """The matrix with rows of zeros: a register may be longer than what is written into it."""
    return torch.cat([matrix, matrix.new_zeros(rows - len(matrix), matrix.shape[1])])


def _store(
    attention: hw.MultiHeadAttention, latent: bool, q: Tensor, k: Tensor, v: Tensor, o: Tensor, rotary: float
) -> None:
    attention.q_proj.weight.copy_(q.flatten(0, 1))
    attention.o_proj.weight.copy_(o.flatten(1))
    if not latent:
        attention.k_proj.weight.copy_(k.flatten(0, 1))
        attention.v_proj.weight.copy_(v.flatten(0, 1))
        return
    attention.kv_down.weight.zero_()[:LATENT, :LATENT] = torch.eye(LATENT)
    attention.kv_down.weight[LATENT : LATENT + FAST, REGISTERS["one"].start] = rotary * LATENT_GAIN / GAIN
    n = attention.spec.content_dim
    ups = torch.cat([k[:, :n, :LATENT], v[:, :, :LATENT]], 1)
    attention.kv_up.weight.copy_(ups.flatten(0, 1))


WRITTEN = {"r1 > answer": 4, "r1 > s1, r2 > s2": 8, "s1 + s2": 10}  # length beside the token's own


def _set_feed_forward(part: torch.nn.Module, kind: str) -> None:
    """What one does: `A + B` answers i + j where A holds i and B holds j, `A > B` puts 1 into B where A holds more."""
    for weight in (part.gate.weight, part.up.weight, part.down.weight):
        weight.zero_()
    one, answer, gain = REGISTERS["one"].start, REGISTERS["answer"].start, math.sqrt(C / (LONG + WRITTEN.get(kind, 2)))
    part.up.weight[:, one] = 1 / gain
    if " + " in kind:
        a, b = (REGISTERS[name].start for name in kind.split(" + "))
        for unit, (i, j) in enumerate(itertools.product(range(N), repeat=2)):
            part.gate.weight[unit, [a + i, b + j, one]] = torch.tensor([1.0, 1.0, -1.3]) / gain
            part.down.weight[answer + (i + j) % N, unit] = 1.5 * math.sqrt(1 + WRITTEN.get(kind, 2) / 10)
        return
    for number, clip in enumerate(kind.split(", ")):
        source, target = (REGISTERS[name].start for name in clip.split(" > "))
        for i in range(N):
            unit = 2 * (number * N + i)
            part.gate.weight[unit, [source + i, one]] = torch.tensor([1.0, -0.2]) / gain
            part.gate.weight[unit + 1, [source + i, one]] = torch.tensor([1.0, -0.8]) / gain
            part.down.weight[target + i, unit : unit + 2] = torch.tensor([1.7, -1.7])
