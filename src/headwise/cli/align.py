"""`headwise align`."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

from headwise.cli.app import Progress, command, in_words, language, needs_torch, print_json, wants_json
from headwise.cli.app import out as console
from headwise.cli.early import check_model
from headwise.errors import HeadwiseError
from headwise.files import write_whole
from headwise.intervals import held_apart
from headwise.records import MOST_ALIGNED
from headwise.words import translator


@command()
def align(
    model: Path,
    pairs: Path,
    judge: Path | None = None,
    out: Path | None = None,
    most: int = MOST_ALIGNED,
    device: str = "cpu",
) -> None:
    """Find the heads that follow the words in time, or in the source."""
    check_model(model)
    for file in filter(None, (pairs, judge)):  # before torch is loaded
        if not file.is_file():
            raise HeadwiseError(f"{file} is no file; pass texts whose alignment is known")
    with needs_torch():
        from headwise.heads.alignment import align as aligned
        from headwise.heads.texts import read_aligned
        from headwise.models.open import open_folder
    folder = open_folder(model, device=device)
    texts = read_aligned(folder, pairs)
    if judge is not None:
        others = read_aligned(folder, judge)
    elif len(texts) < 2:
        raise HeadwiseError(f"{pairs} has one text; heads are chosen by some and judged on others: pass more")
    else:
        texts, others = held_apart(texts, random.Random(0))
    published = getattr(getattr(folder.model, "generation_config", None), "alignment_heads", None) or []
    named = [f"cross.L{layer}.H{head}" for layer, head in published]
    with Progress("reading the texts") as progress:
        step = partial(progress, "reading the maps")
        result = aligned(folder.model, texts, others, named=named, most=most, progress=step)
    if out is not None:
        write_whole(out, json.dumps({"alignment_heads": result.alignment_heads}) + "\n")
    if wants_json():
        print_json("align", {**vars(result), "alignment_heads": result.alignment_heads})
        return
    result.table().print(console, speak=translator("aligned", language()))
    console.print(f"alignment_heads: {json.dumps(result.alignment_heads)}")
    if out is not None:
        console.print(in_words("aligned.written", path=out))
