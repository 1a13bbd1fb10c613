"""Steering by heads: tense and person of the verb model, both ways, in three models of other seeds; Gemma 3 270M.

Of all pairs of lines that differ in will and would, or in I and you, half make the direction, and half judge it. Added
at every token; what moves is the divergence at all tokens but the last.

In Gemma a published effect: a few heads carry which task a prompt's examples show (function vectors, Todd et al. 2023,
arXiv 2310.15213). Their difference between prompts whose examples name capitals and prompts whose examples repeat the
country is added to the latter, for countries that it was not made from; what moves elsewhere is measured on a tale.
Needs `make models`.
"""

from __future__ import annotations

import random
import re
import tempfile
from pathlib import Path
from typing import Any

SEEDS = (0, 1, 2)
GEMMA = Path(__file__).resolve().parents[1] / "build" / "models" / "gemma-3-270m"
CAPITALS = (
    "France Paris", "Germany Berlin", "Italy Rome", "Spain Madrid", "Russia Moscow", "China Beijing", "Japan Tokyo",
    "Greece Athens", "Egypt Cairo", "Austria Vienna", "Portugal Lisbon", "Ireland Dublin", "Poland Warsaw",
    "Sweden Stockholm", "Norway Oslo", "Denmark Copenhagen", "Cuba Havana", "Peru Lima", "Iraq Baghdad",
    "Iran Tehran", "Syria Damascus", "Turkey Ankara", "Kenya Nairobi", "Belgium Brussels", "Hungary Budapest",
    "India Delhi", "Canada Ottawa", "Lebanon Beirut",
)  # fmt: skip
EXAMPLES, CHOSEN_BY, CLEAR, ELSEWHERE = 4, 4, 0.1, 8  # in a prompt; pairs; the least share of a head; texts


def run(runs: int) -> dict[str, Any]:
    rows = [row for seed in SEEDS for row in _judged(seed)]
    lines = ["seed  turned                 heads           success  random  elsewhere, nats"]
    if GEMMA.is_dir():
        rows.append(capitals())
    else:
        lines.insert(0, "Gemma was not run: it is not in build/models; `make models` builds it")
    for row in rows:
        shares = f"{row['success']:7.0%}  {row['control']:6.0%}  {row['elsewhere']:15.3f}"
        line = f"{row['seed']:4}  {row['turned']:21}  {' '.join(row['heads']):14}  {shares}"
        lines.append(line)
    return {"rows": rows, "table": "\n".join(lines)}


def capitals() -> dict[str, Any]:
    """The task that a prompt's examples show, turned in Gemma from repeating a country to naming its capital."""
    import torch

    import headwise as hw
    from headwise.files import packaged, read_text
    from headwise.models.ask import logits
    from headwise.models.open import tokens_of

    model, rng = hw.open(GEMMA, dtype="float32"), random.Random(0)
    tokens = tokens_of(model)
    words: list[tuple[str, str]] = [(first, second) for first, second in map(str.split, CAPITALS)]
    words = [pair for pair in words if all(len(tokens.encode(f" {word}")) == 1 for word in pair)]
    pairs: list[tuple[list[int], list[int]]] = []
    for country, capital in words:
        examples = rng.sample([pair for pair in words if pair[0] != country], EXAMPLES)
        ends = [f"{x} : {y}" for x, y in examples], [f"{x} : {x}" for x, _ in examples]
        named, repeated = (tokens.prompt("\n".join([*lines, f"{country} :"])) for lines in ends)
        both = torch.tensor([named, repeated])
        answers = logits(model, both, last=True)[:, -1].argmax(-1).tolist()
        if answers == [tokens.encode(f" {word}")[0] for word in (capital, country)]:
            pairs.append((list(named), list(repeated)))
    shares: dict[str, float] = {}
    for named, repeated in pairs[:CHOSEN_BY]:
        for head, effect in hw.patch(model, named, repeated, fast=True).effects.items():
            shares[head] = shares.get(head, 0.0) + effect.mean / CHOSEN_BY
    heads = sorted((head for head in shares if shares[head] >= CLEAR), key=lambda head: -shares[head])
    sentences = [text for text in re.split(r"(?<=[.!?])\s+", read_text(packaged("tale"))) if len(text.split()) > 12]
    others = [list(tokens.prompt(text)) for text in rng.sample(sentences, ELSEWHERE)]
    clean, corrupted = zip(*pairs[CHOSEN_BY:], strict=True)
    found = hw.direction(model, clean, corrupted, heads=heads, other=others)
    row = {"seed": 0, "turned": "country to capital", "heads": heads, "shares": [shares[head] for head in heads]}
    row |= {"answered": len(pairs), "of": len(words), "success": found.success.mean, "control": found.control.mean}
    return row | {"n": found.success.n, "elsewhere": found.elsewhere.mean}


def _judged(seed: int) -> list[dict[str, Any]]:
    import headwise as hw
    from headwise.corpus.verbs import Cell, cells
    from headwise.models.open import open_folder

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "verbs"
        hw.train(out=path, seed=seed)
        opened = open_folder(path)
    model, tokens = opened.model, opened.tokens
    assert tokens is not None
    sides: dict[str, list[tuple[str, str]]] = {"tense": [], "person": []}
    for cell in cells():
        if cell.tense == "future":
            other = Cell(cell.verb, "conditional", cell.person)
            sides["tense"].append((cell.line.rpartition(" ")[0], other.line.rpartition(" ")[0]))
        if cell.person == "I":
            sides["person"].append((f"{cell.english} =", f"{Cell(cell.verb, cell.tense, 'you').english} ="))
    rows = []
    for name, lines in sides.items():
        pairs = [(tokens.prompt(a), tokens.prompt(b)) for a, b in lines if len(a.split()) == len(b.split())]
        first, second = ([pair[i] for pair in pairs] for i in (0, 1))
        ends = {"tense": ("would", "will"), "person": ("you", "I")}[name]
        for clean, corrupted, turned in (
            (second, first, f"{ends[1]} to {ends[0]}"),
            (first, second, f"{ends[0]} to {ends[1]}"),
        ):
            found = hw.direction(model, clean, corrupted, seed=seed)
            row = {"seed": seed, "turned": turned, "heads": list(found.vectors)}
            row |= {"success": found.success.mean, "control": found.control.mean, "n": found.success.n}
            rows.append(row | {"elsewhere": found.elsewhere.mean})
    return rows
