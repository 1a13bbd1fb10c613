"""The heads of Whisper base that give the times of words, chosen blind, beside those that were published.

200 sentences of espeak-ng, half English, half Spanish, in twelve voices at four speeds. Heads are chosen by the first
three voices of each language and judged on the other three: other sentences, other voices. Needs `make models` and
espeak-ng.
"""

from __future__ import annotations

import json
import tempfile
import time
import wave
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speech import VOICES, Speech, SpeechError, spoken

MODEL = Path(__file__).resolve().parents[1] / "build" / "models" / "whisper-base"
SENTENCES = 200


def run(runs: int, model: Path = MODEL, sentences: int = SENTENCES) -> dict[str, Any]:
    import headwise.heads.alignment as alignment
    from headwise.heads.aligned_texts import read_aligned
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
