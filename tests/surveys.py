"""Surveys made up for the tests of the views: any number of heads, and everything that a record may hold."""

import math
from dataclasses import replace

import numpy as np

from headwise.heads.statistics import all_statistics
from headwise.heads.table import ROLES as ALL_ROLES
from headwise.heads.table import HeadProfile, Survey
from headwise.intervals import Interval
from headwise.records import CurvePoint, HeadMap, HeadMaps, RunSummary

STATISTICS = {name: each.meaning for name, each in all_statistics().items() if name != "next"}  # of causal texts
ROLES = tuple(role for role in ALL_ROLES if role.name != "next token")
LARGE = {"entropy": 4.0, "distance": 300.0, "spread": 200.0, "norm": 12.0}  # the others lie between 0 and 1
BLOCKS = 32


SUMMARY = RunSummary(
    facts={"preset": "small", "note <b>": "<script>alert(2)</script>"},
    curve=(CurvePoint(0, 5.3, 5.5), CurvePoint(70, 3.1, 3.4), CurvePoint(130, 2.0, 2.3)),
    held_out_loss=2.3,
    baseline_loss=2.5,
    baseline_name="5-gram, Kneser-Ney",
    samples=("</pre><script>alert(3)</script>", "a " + "very" * 60 + " long word"),
)


def survey_of(
    layers: int = 2,
    heads: int = 3,
    tokens: tuple[str, ...] | int = 41,
    passage: int | None = None,
    parts: tuple[str, ...] = ("",),
    k: int = 5,
    documents: int = 7,
    seed: int = 0,
    **changes: object,
) -> Survey:
    """A survey in which every third head has a role; what `cross` looks at is a text of another length.

    Its texts are causal, its `shares` those of maps that are drawn here and then forgotten.
    """
    random = np.random.default_rng(seed)
    words = tuple(f"t{i}" for i in range(tokens)) if isinstance(tokens, int) else tokens
    n = min(len(words), 128) if passage is None else passage
    profiles = [
        _profile(random, part, layer, head, len(words), n, k, documents)
        for part in parts
        for layer in range(layers)
        for head in range(heads)
    ]
    made = Survey(
        model="toy",
        family="gpt2",
        texts=("book.txt",),
        n_documents=documents,
        n_tokens=documents * len(words),
        longest=len(words),
        statistics=STATISTICS,
        roles=ROLES,
        untrained={name: 0.09 for name in STATISTICS if name not in LARGE},
        loss=3.21,
        ablated="zero",
        tokens=words[:1024],
        passage=n,
        profiles=tuple(profiles),
        notes=(),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def _profile(
    random: np.random.Generator, part: str, layer: int, head: int, length: int, n: int, k: int, documents: int
) -> HeadProfile:
    role = ROLES[(layer + head) % len(ROLES)] if (layer * 5 + head) % 3 == 0 else None
    scores = {name: _interval(random, LARGE.get(name, 0.3), documents) for name in STATISTICS}
    if role is not None:
        scores[role.score] = Interval(0.95, 0.94, 0.96, documents)
    keys = length if part != "cross" else 2 * length + 3
    shrunk = max(1, length // 128)  # a long text is drawn short
    sizes = length // shrunk, keys // shrunk
    shares, first = shares_of(pattern(random, *sizes, role.name if role else "", part in ("", "decoder")))
    top = np.sort(random.dirichlet(np.ones(k), n).astype(np.float32) * 0.9)[:, ::-1]
    before = np.arange(n)[:, None] - np.arange(k)
    name = f"{part}.L{layer}.H{head}".removeprefix(".")
    return HeadProfile(
        name=name,
        part=part,
        layer=layer,
        head=head,
        scores=scores,
        uniform={name: 0.02 + 0.001 * head for name in STATISTICS if name != "norm"},
        roles=() if role is None else (role.name,),
        importance=float(random.exponential(0.01)),
        ablation=_interval(random, 0.02, documents, low=-0.01),
        shares=shares,
        first_key=first,
        received=random.dirichlet(np.ones(n)).astype(np.float32) if n else np.zeros(0, np.float32),
        top_keys=np.maximum(before, 0),
        top_weights=np.where(before >= 0, top, 0).astype(np.float32),
    )


def _interval(random: np.random.Generator, largest: float, documents: int, low: float = 0.0) -> Interval:
    mean = float(random.uniform(low, largest))
    if documents == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    reach = 0.05 * largest
    return Interval(mean, mean - reach, mean + reach, documents)


def pattern(random: np.random.Generator, rows: int, keys: int, role: str, causal: bool) -> np.ndarray:
    """Weights (rows, keys) of a head with that role, or of none in particular."""
    i, j = np.arange(rows)[:, None], np.arange(keys)
    scores = random.normal(0, 1.0, (rows, keys)) - 0.02 * abs(i - j)
    scores += {"previous token": 9 * (j == i - 1), "self": 9 * (j == i), "first token": 6 * (j == 0)}.get(
        role, 7 * (j % 11 == 3) if role else 3 * (j == 0)
    )
    if causal:
        scores = np.where(j <= i, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def shares_of(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What each of at most 32 blocks of rows gives to each block of keys, and to the first key."""
    blocks = [np.arange(size) * min(BLOCKS, size) // size for size in weights.shape]
    rows, keys = (np.eye(block[-1] + 1)[block].T for block in blocks)  # (b, T), (b, S)
    means = (rows @ weights / rows.sum(1)[:, None]).astype(np.float32)
    return means @ keys.T.astype(np.float32), means[:, 0]


def maps_of(
    length: int = 7, layers: int = 2, heads: int = 3, causal: bool = True, tokens: tuple[str, ...] | None = None
) -> HeadMaps:
    """Maps of random weights."""
    random = np.random.default_rng(11)
    allowed = np.tri(length, dtype=bool) if causal else np.ones((length, length), dtype=bool)
    maps = []
    for layer in range(layers):
        for head in range(heads):
            scores = np.where(allowed, np.exp(random.normal(size=(length, length))), 0.0)
            maps.append(HeadMap(layer, head, (scores / scores.sum(axis=1, keepdims=True)).astype(np.float32)))
    return HeadMaps("toy", tokens or tuple(f"t{i}" for i in range(length)), tuple(maps))


def survey_of_maps(maps: HeadMaps, **changes: object) -> Survey:
    """The survey of one document whose exact maps are known; its pictures, lists and first scores are those maps'."""
    made = survey_of(tokens=maps.tokens, documents=1, model=maps.model)
    profiles = []
    for head in maps.maps:
        weights = head.weights.astype(np.float64)
        k = min(8, weights.shape[1])
        keys = np.argsort(-weights, axis=1, kind="stable")[:, :k]
        shares, first = shares_of(weights)
        profiles.append(
            replace(
                made.profiles[0],
                name=head.name,
                layer=head.layer,
                head=head.head,
                scores={"first": Interval(float(weights[:, 0].mean()), -math.inf, math.inf, 1)},
                uniform={"first": 0.1},
                roles=(),
                shares=shares,
                first_key=first,
                received=weights.mean(0).astype(np.float32),
                top_keys=keys,
                top_weights=np.take_along_axis(weights, keys, 1).astype(np.float32),
            )
        )
    roles = tuple(role for role in ROLES if role.score == "first")
    shared = {"statistics": {"first": STATISTICS["first"]}, "roles": roles, "passage": len(maps.tokens)}
    return replace(made, profiles=tuple(profiles), **{**shared, **changes})  # type: ignore[arg-type]


HOSTILE = (
    "<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "</script><script>alert(3)</script>", "\n", "\r\n",
    "-->", "<!--", "&amp;", "'\"", "\u2028", "עברית", "مرحبا", "👩\u200d👧", "🙂", "$model ${data}", "", "\ud800",
    "\u202egnp.exe",
)  # fmt: skip


def broken_survey() -> Survey:
    """All that a survey may lack or bring: NaN, no interval, no effect, odd shapes, empty lists, hostile text."""
    made = survey_of(2, 3, HOSTILE, parts=("encoder", "decoder", "cross"), documents=1, k=3)
    nan = Interval(math.nan, math.nan, math.nan, 0)
    first, second, *rest = made.profiles
    scores = {**first.scores, "distance": nan, "self": Interval(0.5, -math.inf, math.inf, 1)}
    first = replace(first, scores=scores, ablation=None)
    second = replace(
        second,
        scores={"entropy": Interval(0.0, 0.0, 0.0, 3)},
        uniform={"entropy": math.nan},
        importance=None,
        shares=np.full((5, 7), 0.1, np.float32),
        first_key=np.full(5, 0.02, np.float32),
        received=np.zeros(0, np.float32),
        top_keys=np.zeros((0, 3), np.int64),
        top_weights=np.zeros((0, 3), np.float32),
        roles=(),
    )
    return replace(
        made,
        model="</title><script>alert(4)</script>",
        texts=("<b>file</b>",),
        notes=("A note <img src=x onerror=alert(5)> & more.",),
        untrained=None,
        loss=None,
        ablated=None,
        profiles=(first, second, *rest),
    )
