"""The price of every causal family of the installed transformers: a table, and small models that hold it to account.

    nice python studies/prices.py > prices.md        # all families, some minutes on one core
    nice python studies/prices.py --only jamba,gemma3

Of each family the default config is priced, and its parameters are those of the model that transformers builds. Then a
small model reads prompts of 64, 300 and 1,000 tokens, and its own cache holds as many bytes as its price says.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

import headwise as hw
from headwise.cost.built import Stack, called
from headwise.models.hf import meta_model

# By its path: the tests have a module of that name.
models_of = runpy.run_path(str(Path(__file__).with_name("families.py")))["models_of"]
CAUSAL = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
TOKENS = (64, 300, 1000)


def default_price(family: str) -> tuple[hw.Price, bool]:
    """The price of the default config, and whether the model that is built has as many parameters."""
    config = CONFIG_MAPPING[family]()
    bill = hw.price(config)
    model, _ = meta_model(config.to_dict())
    return bill, bill.parameters.total == sum(p.numel() for p in model.parameters())


def held(model: Any, tokens: int) -> int:
    """Bytes that the cache of a model holds after a prompt."""
    # ids from 20 on: those before may stand for images, or for the end of a text
    ids = torch.randint(20, 30, (1, tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        stack, cache = Stack(model), called(model, ids)[1]
    return sum(tensor.nbytes for part in stack.kept(cache) for tensor in part.values())


def small_model(family: str) -> Any:
    """The first small model of a family that reads a prompt; None where none does."""
    for model in models_of(family):
        try:
            held(model, 8)
        except Exception:  # other people's code, which may raise anything
            continue
        return model
    return None


def small_prices(model: Any, lengths: tuple[int, ...] = TOKENS) -> list[tuple[int, int, int]]:
    """Of a small model by the length of a prompt the bytes of its cache and those of its price, as far as it reads."""
    rows: list[tuple[int, int, int]] = []
    if model is None:
        return rows
    for tokens in lengths:
        try:
            measured = held(model, tokens)
        except Exception:  # more than its positions
            break
        bill = hw.price(model, context=tokens, dtype="fp32")
        rows.append((tokens, measured, bill.cache.total_bytes))
    return rows


def row(family: str, counts: Counter[str]) -> str:
    start = time.process_time()
    try:
        bill, is_equal = default_price(family)
    except Exception as error:  # also of the default config itself
        counts["refused"] += 1
        cells = [family, "refused: " + str(error).split(": ", 1)[-1].splitlines()[0][:90], *[""] * 5]
    else:
        seconds = time.process_time() - start
        counts["priced"] += 1
        counts["parameters differ"] += not is_equal
        kinds = Counter(layer.kind for layer in bill.layers)
        told = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        sizes = [bill.parameters.total, bill.cache.bytes_per_token, bill.cache.state_bytes]
        cells = [family, bill.way, *(f"{size:,}" for size in sizes), told, f"{seconds:.1f}"]
    try:
        rows = small_prices(small_model(family))
        wrong = [f"{tokens}: {theirs:,} != {ours:,}" for tokens, theirs, ours in rows if theirs != ours]
        cells.append("; ".join(wrong) or ", ".join(f"{tokens:,}" for tokens, _, _ in rows) or "does not run")
        counts["caches equal" if rows and not wrong else "caches differ" if wrong else "small models do not run"] += 1
    except Exception as error:
        counts["small models refused"] += 1
        cells.append(f"refused: {str(error).splitlines()[0][:90]}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of families, with commas between; default: all")
    options = parser.parse_args()
    logging.set_verbosity_error()
    columns = (
        "family",
        "way",
        "parameters",
        "bytes a token",
        "bytes of states",
        "layers",
        "s",
        "cache of a small model",
    )
    print(f"Default configs of transformers {__version__}.\n\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    counts: Counter[str] = Counter()
    for family in options.only.split(",") if options.only else CAUSAL:
        print(row(family, counts), flush=True)
    print("\n" + ", ".join(f"{count} {what}" for what, count in counts.items()))


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))
    main()
