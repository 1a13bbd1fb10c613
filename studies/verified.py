"""Ask `verify` of every causal family of the installed transformers, small and with random weights.

    nice python studies/verified.py                  # all families, some minutes on one core
    nice python studies/verified.py --only llama,bart

A line for each family: what differs, or how many ways were equal; at the end how many families ran, and how many are
equal in all that could be asked.
"""

from __future__ import annotations

import argparse
import runpy
from collections import Counter
from pathlib import Path

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

import headwise as hw

# By its path: the tests have a module of that name.
models_of = runpy.run_path(str(Path(__file__).with_name("families.py")))["models_of"]
CAUSAL = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def line(family: str) -> tuple[str, str]:
    """What became of a family: equal, differs or not run; and what to print of it."""
    try:
        # the class with a head for words, where there is one, else the last
        for model in models_of(family):
            if "CausalLM" in type(model).__name__ or "LMHead" in type(model).__name__:
                break
        verified = hw.verify(model)
    except Exception as error:  # other people's code, which may raise anything
        return "not run", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:100]
    wrong = [f"{a.question}, {a.way}: {a.layer} from {a.position}" for a in verified.answers if a.status == "differs"]
    count = sum(answer.status == "equal" for answer in verified.answers)
    return ("differs", "; ".join(wrong)) if wrong else ("equal", f"{count} ways equal")


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask verify of every causal family of transformers.")
    parser.add_argument("--only", help="names of families, with commas between; default: all")
    only = parser.parse_args().only
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for family in only.split(",") if only else CAUSAL:
        status, told = line(family)
        counts[status] += 1
        print(f"{family:<28}{told}", flush=True)
    print(", ".join(f"{count} {status}" for status, count in counts.most_common()))


if __name__ == "__main__":
    main()
