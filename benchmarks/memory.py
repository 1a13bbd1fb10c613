"""What each head needs to remember, on models that must look far: loss and needles found against bytes of cache.

Parents: RMSNorm, RoPE, qk-norm, SwiGLU, 3 layers of 4 heads, context 512, one for each seed; kept in build/memory. The
text is made here: words of which each has three likely successors, and between them needles of eight words, new or said
before. What a needle's first words bring back can only be looked up. Plans of equal bytes are compared: chosen by
`hw.windows`; the same windows given to heads at random; chosen by mass alone, without the needle test; and all heads
alike. Layers as `hw.narrow` chooses them, for stock engines, beside them. Held-out text. A needle word counts where its
pair was last said more than FAR tokens ago. Precision float32.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise.corpus.documents import token_file
from headwise.corpus.tokens import Tokens
from headwise.corpus.training import Stream
from headwise.gpt.checkpoint import load_model, save_model
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import Recipe
from headwise.gpt.train import fit
from headwise.intervals import interval_of
from headwise.masks import Mask, Window
from headwise.models.ask import next_token_losses
from headwise.models.weights import windows_of
from headwise.reshape.narrow import seeing

PARENTS = Path(__file__).resolve().parents[1] / "build" / "memory"
CONTEXT, WORDS = 512, 300_000
FILLERS, NAMES, NEEDLE = 24, 96, 8
SHAPE = {"n_layers": 3, "n_heads": 4, "d_model": 64, "d_ff": 128, "qk_norm": True, "norm_eps": 1e-6}
# Short pieces and near needles first: what looks back is found there in a tenth of the time, and then learns to look
# far. Tokens of a text, of how many needles one is said again, recipe.
STAGES = (
    (64, 2, Recipe(steps=1200, batch=32, lr=3e-3, muon_lr=0.02, weight_decay=0.1, warmup=50, final_lr=0.3)),
    (CONTEXT, 24, Recipe(steps=200, batch=4, lr=2e-3, muon_lr=0.01, weight_decay=0.1, warmup=10, final_lr=0.02)),
)
SHARES = (0.3, 0.5, 0.7)  # of the cache
SINKS, FAR, DRAWS, LOOK, HELD_OUT = 4, 128, 3, 16, 24  # draws of the random choice; documents that are read


def run(runs: int) -> dict[str, Any]:
    rows = []
    for seed in range(runs):
        rows.append(measured(seed))
        print(f"memory seed {seed}: {rows[-1]}", file=sys.stderr)
    return {"seeds": rows, "table": _table(rows)}


@cache
def text(seed: int, memory: int) -> str:
    """Words, a needle after every fourth or so: a new one, or one of the latest `memory`."""
    draw = random.Random(seed)
    fillers, names = [f"w{n}" for n in range(FILLERS)], [f"N{n}" for n in range(NAMES)]
    successors = {word: draw.choices(fillers, k=3) for word in fillers}
    said: list[list[str]] = []
    pieces, word = [], fillers[0]
    while len(pieces) < WORDS:
        word = draw.choice(successors[word])
        pieces.append(word)
        if draw.random() < 0.25:
            if len(said) < 2 or draw.random() < 0.4:
                said.append(draw.sample(names, NEEDLE))
                pieces += said[-1]
            else:
                pieces += draw.choice(said[-memory:])
    return " ".join(pieces)


def stream_of(tokens: Tokens, text: str, context: int) -> Stream:
    """A text to train on, its ids in a file without a name."""
    return Stream(token_file(lambda: ([[tokens.encode(text)]], len(tokens), {})), context)


def parent(seed: int, folder: Path = PARENTS, **shape: Any) -> tuple[GPT, Tokens]:
    """The trained parent of a seed: from a folder of build/, or trained now; `shape` changes SHAPE."""
    folder = folder / f"seed{seed}"
    if not (folder / "model.safetensors").exists():
        began = time.perf_counter()
        tokens = Tokens.words([text(seed, STAGES[-1][1])])
        torch.manual_seed(seed)
        model = GPT(GPTConfig(vocab_size=len(tokens), context=CONTEXT, **(SHAPE | shape)))  # type: ignore[arg-type]
        for context, memory, recipe in STAGES:
            fit(model, recipe, stream_of(tokens, text(seed, memory), context), seed)
        save_model(folder, model.eval(), tokens)
        print(f"memory: trained parent {seed} in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return load_model(folder)


def measured(seed: int) -> dict[str, Any]:
    """All figures of one parent: for each share and each way to choose, nats above the parent and needles found."""
    model, tokens = parent(seed)
    ids = torch.tensor(tokens.encode(text(seed, STAGES[-1][1])))
    held_out = ids[int(0.9 * len(ids)) :]
    look = ids[: LOOK * CONTEXT].view(LOOK, CONTEXT)
    documents = held_out[: HELD_OUT * CONTEXT].view(HELD_OUT, CONTEXT)
    names = torch.tensor([i for word, i in tokens.vocabulary.items() if word.startswith("N")])
    reach = hw.windows(model, look.tolist())
    loss, found = _answers(model, documents, names, {})
    row: dict[str, Any] = {
        "seed": seed,
        "loss": loss,
        "needles": found,
        "retrieve": [n for n in reach if reach[n].retrieves],
    }

    def told(masks: Mapping[str, Mask], share: float) -> dict[str, float]:
        after, needles = _answers(model, documents, names, masks)
        return {"share": share, "nats": after - loss, "needles": needles}

    def plan_told(plan: hw.Plan) -> dict[str, float]:
        return told({f"L{n}": plan.mask(n, SHAPE["n_heads"]) for n in range(plan.n_layers)}, plan.share(CONTEXT))

    blind = replace(reach, heads=tuple(replace(h, needle=replace(h.needle, mean=0.0)) for h in reach.heads))
    draw = random.Random(seed)
    for share in SHARES:
        plan = reach.plan(cache=share, sinks=SINKS)
        row[f"{share} measured"] = plan_told(plan)
        row[f"{share} mass alone"] = plan_told(blind.plan(cache=share, sinks=SINKS))
        randoms = [plan_told(_shuffled(plan, draw)) for _ in range(DRAWS)]
        row[f"{share} random heads"] = {key: sum(x[key] for x in randoms) / DRAWS for key in randoms[0]}
        alike = hw.Keep(SINKS, round(share * CONTEXT) - SINKS)
        row[f"{share} all alike"] = plan_told(hw.Plan(((alike,) * plan.n_kv_heads,) * plan.n_layers))
        try:
            child = hw.narrow(model, cache=share, text=torch.cat([look.flatten(), documents.flatten()[: CONTEXT * 3]]))
        except hw.HeadwiseError as error:
            print(f"memory: layers at {share}: {error}", file=sys.stderr)
            continue
        windows = {f"L{n}": Window(w - 1, 0) for n, w in enumerate(windows_of(child.model)) if w}
        row[f"{share} layers"] = told(windows, float(child.details["share"]))  # type: ignore[arg-type]
    return row


def _shuffled(plan: hw.Plan, draw: random.Random) -> hw.Plan:
    """What the heads of a plan keep, given to heads at random."""
    every = [kept for layer in plan.keep for kept in layer]
    draw.shuffle(every)
    n = plan.n_kv_heads
    return hw.Plan(tuple(tuple(every[i : i + n]) for i in range(0, len(every), n)))


@torch.no_grad()
def _answers(model: GPT, documents: Tensor, names: Tensor, masks: Mapping[str, Mask]) -> tuple[float, float]:
    """Mean loss; and of the words of a needle whose pair was last said more than FAR tokens ago, the share right."""
    losses, right, asked = [], 0, 0
    with seeing(model, masks):
        for ids in documents.split(4):
            losses.append(next_token_losses(model, ids))
            best = model(ids).argmax(-1)
            for b, document in enumerate(ids.tolist()):
                for t in _far(document, set(names.tolist())):
                    asked += 1
                    right += int(best[b, t - 1]) == document[t]
    return float(torch.cat(losses).mean()), right / max(1, asked)


def _far(document: Sequence[int], names: set[int]) -> list[int]:
    """Places of words that, with the word before, were last said more than FAR tokens ago; both are of a needle."""
    last: dict[tuple[int, int], int] = {}
    places = []
    for t in range(1, len(document)):
        pair = document[t - 1], document[t]
        if names.issuperset(pair):
            if t - last.get(pair, t) > FAR:
                places.append(t)
            last[pair] = t
    return places


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'share of the cache, choice':28} {'share':>6} {'nats above the parent':>28} {'needles found':>24}"]
    whole = interval_of([row["needles"] for row in rows])
    lines.append(f"{'all kept':28} {1:6.2f} {'':>28} {_said(whole, 2):>24}")
    for key in (key for key in rows[0] if key[0] == "0"):
        cells = [row[key] for row in rows if key in row]
        share, nats, needles = (interval_of([cell[name] for cell in cells]) for name in ("share", "nats", "needles"))
        lines.append(f"{key:28} {share.mean:6.2f} {_said(nats, 3):>28} {_said(needles, 2):>24}")
    return "\n".join(lines)


def _said(interval: hw.Interval, digits: int) -> str:
    return f"{interval.mean:.{digits}f} ({interval.low:.{digits}f} to {interval.high:.{digits}f})"
