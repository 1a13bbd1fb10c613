"""A small model of each kind of attention that transformers has, held to the maps of its own eager functions.

The whole list is that of `studies/families.py`.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from families import TABLES
from transformers.utils import logging

PATH = Path(__file__).resolve().parents[2] / "studies" / "families.py"

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
        notes = families.missing(model, families.sites_of(model))
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
