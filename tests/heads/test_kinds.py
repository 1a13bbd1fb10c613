"""A small model of each kind of attention that transformers has, held to the maps of its own eager functions.

The whole list is that of `examples/families.py`, which writes `docs/families.md`.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from families import TABLES
from transformers.utils import logging

PATH = Path(__file__).resolve().parents[2] / "examples" / "families.py"

KINDS = TABLES["kinds"]


@pytest.fixture(scope="module")
def families() -> ModuleType:
    spec = importlib.util.spec_from_file_location("families_example", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_attention(kind: str, families: Any) -> None:
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        model = families.build(kind)
        names = [head for site in families.sites_of(model) for head in site.heads]
        assert len(set(names)) == len(names)
        notes = families.missing(model)
        for padding in ("none", "left"):
            result = families.try_padding(model, padding, kind)
            assert result["same"] and result["compared"] > 0 and not result["unseen"]
            assert result["weights"] < 1e-4 and result["norm"] < 1e-4 and result["statistics"] < 1e-4
            assert result.get("ablation", 0) < 1e-4 and result.get("moved", 1) == result.get("silenced", 1) > 0
            assert result.get("cache", 0) < 1e-4 and not result.get("lost") and not result["lacking"]
            notes = [*notes, *(note for note in result["notes"] if note not in notes)]
        assert notes == ([KINDS[kind]] if KINDS[kind] else [])
    finally:
        logging.set_verbosity(level)


def test_the_page_tells_of_every_family(families: Any) -> None:
    """What is watched, refused and wrong, by the numbers of a run."""
    run = {
        "weights": 3e-7, "norm": 0.0, "statistics": 2e-7, "cache": 1e-7, "rows": 5, "compared": 2, "same": True,
        "notes": [], "unseen": [], "sites": 2, "free": 1, "ran": 2, "ablation": 3e-8, "silenced": 2, "moved": 2,
    }  # fmt: skip
    watched = dict.fromkeys(("none", "left", "right"), run)
    wrong = {name: run | {"weights": 0.5} for name in watched}
    refused = "TwoModel (two) has no attention that headwise can read: no"
    results = {
        "one": {"built": True, "class": "OneModel", "missing": [], "paddings": watched},
        "two": {"built": True, "class": "TwoModel", "refused": refused},
        "three": {"built": True, "class": "ThreeModel", "missing": ["L0: short conv, no map"], "paddings": wrong},
        "four": {"built": False, "why": "LookupError: no model class of its own"},
    }
    page = families.page(results, "")
    assert "| one | OneModel | watched | both | 3e-07 | 3e-07 | 3e-07 | 2e-07 | 1e-07 | 3e-08 |  |" in page
    assert "| two | TwoModel | refused | | | | | | | | has no attention that headwise can read |" in page
    told = "L0: short conv, no map; weights differ"
    assert f"| three | ThreeModel | wrong | both | 0.5 | 0.5 | 0.5 | 2e-07 | 1e-07 | 3e-08 | {told} |" in page
    bar = "Of the 2 families in which an attention is a softmax over keys that goes through no interface"
    assert bar in page and "1 are watched, 50%, and in 1, 50%, a silenced head" in page
    assert (
        "Of 4 families 1 are watched, 0 are watched with something to know, 1 are refused by name, 1 are wrong" in page
    )


def test_the_page_keeps_what_was_not_tried_again(families: Any) -> None:
    written = (PATH.parents[1] / "docs" / "families.md").read_text(encoding="utf-8")
    again = families.page({}, written)
    assert families.lines_of(again) == families.lines_of(written)
    assert families.reasons_of(again) == families.reasons_of(written) != {}
