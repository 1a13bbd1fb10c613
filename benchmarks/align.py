"""Heads that align, chosen blind: of Whisper base the times of words, of RXNMapper the atoms of a reaction.

200 sentences of espeak-ng, half English, half Spanish, in twelve voices at four speeds. Heads are chosen by the first
three voices of each language and judged on the other three: other sentences, other voices. Needs `make models` and
espeak-ng.

Reactions are written with the pieces of the product in the order of the reactants, so that it is known which atom
becomes which; RXNMapper's product uses layer 10, head 5. Heads are chosen by one half of them and judged on the other.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import tempfile
import time
import wave
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speech import VOICES, Speech, SpeechError, spoken

MODEL = Path(__file__).resolve().parents[1] / "build" / "models" / "whisper-base"
SENTENCES = 200

MAPPER, PRODUCT = MODEL.parent / "rxnmapper", "L10.H5"
# What is kept of the first molecule, what leaves it, and how the second one, which is kept whole, begins.
REACTIONS = {
    "amide": ("C(=O)", "O", "N"), "amide of a chloride": ("C(=O)", "Cl", "N"),
    "ester": ("C(=O)", "O", "O"), "ester of a chloride": ("C(=O)", "Cl", "O"),
    "sulfonamide": ("S(=O)(=O)", "Cl", "N"), "ether": ("C", "Br", "O"), "amine": ("C", "Br", "N"),
}  # fmt: skip
BEFORE = ("C", "CC", "CCC", "CC(C)", "c1ccccc1", "C1CCC1", "CC(C)C", "COC", "Clc1ccc(cc1)", "c1ccsc1", "CCOC")
BEHIND = ("C", "CC", "C(C)C", "CCOC", "Cc1ccccc1", "C1CCCC1", "CCN(C)C", "CCC#N", "CCCC", "Cc1cccs1", "CC=C")
ATOM = re.compile(r"\[[^\]]+]|Br|Cl|[BCNOSPFIbcnosp]")
OF_EACH = 20  # reactions of a kind


def run(runs: int) -> dict[str, Any]:
    parts = {"speech": speech(), "reactions": reactions()}
    return {**parts, "table": "\n\n".join(part.pop("table") for part in parts.values())}


def reactions() -> dict[str, Any]:
    """The heads of RXNMapper by how often they look hardest at the atom before the arrow."""
    from headwise.heads.alignment import align
    from headwise.intervals import held_apart
    from headwise.models.open import open_folder

    if not MAPPER.is_dir():
        return {"table": "not run: no RXNMapper in build/models; `make models` builds it"}
    folder, rng = open_folder(MAPPER), random.Random(0)
    texts = []
    for kept, leaves, begins in REACTIONS.values():
        for before, behind in rng.sample(list(itertools.product(BEFORE, BEHIND)), OF_EACH):
            texts.append(_reaction(folder.tokens, f"{before}{kept}", leaves, f"{begins}{behind}"))
    result = align(folder.model, *held_apart(texts, rng), named=[PRODUCT])
    place = [scored.heads[0] for scored in result.ranking].index(PRODUCT) + 1
    facts = f"{len(texts)} reactions of {len(REACTIONS)} kinds; the product's head is number {place} alone"
    return {"place": place, "heads": list(result.chosen.heads), "table": f"{result.table().text(width=150)}\n{facts}"}


def _reaction(tokens: Any, first: str, leaves: str, second: str) -> Any:
    """A reaction with a link from each atom of the product to the same atom before."""
    import torch

    from headwise.heads.alignment import Linked

    text = f"{first}{leaves}.{second}>>{first}{second}"
    start, ids = len(tokens.frame[0]), [*tokens.prompt(text), *tokens.frame[1]]
    numbers = {begin: start + number for number, (begin, _) in enumerate(tokens.places(text))}
    product = text.index(">>") + 2
    links = []
    for piece, old, new in ((first, 0, product), (second, len(first + leaves) + 1, product + len(first))):
        links += [(numbers[new + atom.start()], numbers[old + atom.start()]) for atom in ATOM.finditer(piece)]
    return Linked({"input_ids": torch.tensor([ids])}, tuple(links))


def speech(model: Path = MODEL, sentences: int = SENTENCES) -> dict[str, Any]:
    import headwise.heads.alignment as alignment
    from headwise.heads.texts import read_aligned
    from headwise.models.open import open_folder

    if not model.is_dir():
        return {"table": "not run: no Whisper in build/models; `make models` builds it"}
    try:
        speeches = spoken(sentences)
    except SpeechError as error:
        return {"table": f"not run: {error}"}
    known = {voice for voices in VOICES.values() for voice in voices[: len(voices) // 2]}
    folder = open_folder(model)
    published: list[list[int]] = folder.model.generation_config.alignment_heads  # type: ignore[union-attr, assignment]
    with tempfile.TemporaryDirectory() as place:
        parts = []
        for name, wanted in (("known", True), ("new", False)):
            chosen = [speech for speech in speeches if (speech.voice in known) is wanted]
            parts.append(read_aligned(folder, _written(Path(place) / name, chosen)))
    began = time.perf_counter()
    named = [f"cross.L{layer}.H{head}" for layer, head in published]
    result = alignment.align(folder.model, *parts, named=named)
    seconds = time.perf_counter() - began
    gain_50, gain_100 = result.gains[f"named: {' '.join(named)}"]
    first = [scored.heads[0] for scored in result.ranking[:8]]
    facts = (
        f"{len(first)} best alone, blind: {sum(head in named for head in first)} of the published; chosen above "
        f"published: {100 * gain_50.mean:.1f} points within 50 ms (from {100 * gain_50.low:.1f} to "
        f"{100 * gain_50.high:.1f}), {100 * gain_100.mean:.1f} within 100 ms (from {100 * gain_100.low:.1f} to "
        f"{100 * gain_100.high:.1f}); {seconds:.0f} s"
    )
    return {
        "alignment_heads": result.alignment_heads,
        "gains": [[gain.mean, gain.low, gain.high] for gain in (gain_50, gain_100)],
        "seconds": seconds,
        "table": f"{result.table().text(width=150)}\n{facts}",
    }


def _written(folder: Path, speeches: list[Speech]) -> Path:
    """A file for `headwise align`, with its sound beside it."""
    folder.mkdir()
    lines = []
    for number, speech in enumerate(speeches):
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16_000)
            file.writeframes((speech.samples * 2**15).clip(-(2**15), 2**15 - 1).astype(np.int16).tobytes())
        words = [list(pair) for pair in zip(speech.words, speech.begins, strict=True)]
        lines.append(json.dumps({"audio": f"{number}.wav", "language": speech.language, "words": words}))
    path = folder / "speech.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
