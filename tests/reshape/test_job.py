"""A job from end to end: which text serves for what, how heads are chosen, what is refused before work begins."""

from pathlib import Path
from typing import Any

import pytest
import reshape_models
import torch
from cases import refuses_table
from reshape_models import build
from torch import nn

from headwise.corpus.tokens import Tokens
from headwise.models.open import Folder, remember
from headwise.reshape import prune, share
from headwise.reshape.job import calibrate, read_user_text, reshape

LETTERS = "abcdefghijklmnopqrstuvwxyz .,!\n"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(31, (17 * 97,), generator=generator).tolist()
    (tmp_path / "text.txt").write_text("".join(LETTERS[n] for n in letters))
    return tmp_path / "text.txt"


def opened(model: nn.Module, path: Path = Path("source")) -> Folder:
    """A model as if it came from a folder, which has no files."""
    return remember(model, path, Tokens.characters(LETTERS, boundary=False), "headwise")


def test_a_line_says_how_long_it_takes() -> None:
    ids = torch.randint(31, (61, 13), generator=torch.Generator().manual_seed(0))
    heard: list[Any] = []
    reshaped = prune.prune(build("llama", dtype=torch.float32), keep=0.5, text=ids, listener=heard.append)
    assert heard[0] == "making the change by 702 tokens, and measuring it on 52"
    assert "ranked by importance on 702 tokens" in reshaped.notes[0]
    assert any("nothing is faster" in note for note in reshaped.notes)


def test_each_part_of_the_text_serves_for_one_thing(text: Path) -> None:
    """What heads are chosen on, what follows the healing, and what is reported."""
    folder = opened(build("rope", dtype=torch.float32))
    parts = calibrate(*read_user_text(text, Path()), folder)
    documents = []
    for batches in (parts.statistics, parts.glance, parts.evaluation):
        documents.append({tuple(ids.tolist()) for batch in batches for ids in batch})
    assert list(map(len, documents)) == [88, 5, 5] and len(set.union(*documents)) == 98
    assert documents[0] == {tuple(ids.tolist()) for ids in parts.train}


NANOGPT: Any = {"norm": "layer", "position": "learned", "activation": "gelu", "gated": False}


def test_what_cannot_be_done_is_said_before_a_text_is_read() -> None:
    def job(model: Any, change: Any) -> None:
        reshape(model.eval(), change, text="no text: two words")

    refuses_table("jobs", vars(reshape_models) | vars(prune) | vars(share) | {"job": job, "NANOGPT": NANOGPT})
