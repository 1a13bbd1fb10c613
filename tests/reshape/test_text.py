"""The user's text as documents: what is held out, what is framed, how much is read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import refuses
from small_models import quiet, text_stream
from torch import nn

from headwise import HeadwiseError
from headwise.corpus import verbs
from headwise.corpus.documents import BATCH
from headwise.corpus.tokens import Tokens
from headwise.corpus.training import verb_corpus
from headwise.gpt.run import Settings, run_training
from headwise.models.open import Folder, open_folder
from headwise.reshape.heal import batches
from headwise.reshape.job import Calibration, calibrate, read_user_text, spread

TEXT = "".join(f"line {n} of many\n" for n in range(60))


class Framed:
    """A tokenizer of characters that wants 7 before and 8, 9 after each document."""

    frame = ([7], [8, 9])
    specials = frozenset((7, 8, 9))
    unknown = None

    def __len__(self) -> int:
        return 300

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def shown(self, ids: Sequence[int]) -> tuple[str, ...]:
        return tuple(map(chr, ids))


def read_calibration(text: Any, folder: Folder) -> Calibration:
    return calibrate(*read_user_text(text, folder.path), folder)


def folder(tokens: object, context: int | None = 16, family: str = "headwise", vocab_size: int | None = None) -> Folder:
    return Folder(Path("here"), nn.Identity(), tokens, context, family, vocab_size)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def test_a_stream_is_cut_side_by_side_and_its_last_tenth_held_out(path: Path) -> None:
    tokens = Tokens.characters(TEXT, boundary=False)
    found = read_calibration(path, folder(tokens))
    ids = torch.tensor(tokens.encode(TEXT))
    cut = int(len(ids) * 0.9)
    assert torch.equal(torch.cat(found.train), ids[:cut])
    assert torch.equal(torch.cat(found.held_out)[: len(ids) - cut], ids[cut : cut + len(torch.cat(found.held_out))])
    assert {len(x) for x in found.train[:-1]} == {16}
    stream = text_stream(tokens, TEXT, 16)
    assert stream._cut == cut  # what a run of headwise held out of its own text stays held out


def test_documents_of_a_text(path: Path) -> None:
    tokens = Tokens.characters(TEXT.replace("\n", ""), boundary=True)
    found = read_calibration(path, folder(tokens, context=64))
    assert len(found.train) == 54 and len(found.held_out) == 6
    assert found.train[3].tolist() == tokens.document("line 3 of many")
    assert found.held_out[0].tolist() == tokens.document("line 54 of many")
    short = read_calibration(path, folder(tokens, context=9))
    assert short.train[3].tolist() == tokens.document("line 3 of many")[:9]
    found = read_calibration(path, folder(Framed(), context=11, family="bert"))
    for document in (*found.train, *found.held_out):
        assert document[0] == 7 and document[-2:].tolist() == [8, 9] and len(document) <= 11
    assert "".join(map(chr, torch.cat([x[1:-2] for x in found.train]).tolist())) == TEXT[: int(len(TEXT) * 0.9)]
    path.write_text(TEXT * 20)
    found = read_calibration(path, folder(Framed(), context=None, family="t5"))
    assert max(map(len, found.train)) == 1024
    documents = [torch.full((10,), n) for n in range(100)]
    some = [int(x[0]) for x in spread(documents, 200)]
    assert len(some) == 20 and some[0] == 0 and some[-1] >= 95 and some == sorted(set(some))
    assert len(spread(documents, 1000)) == 100
    assert len(spread(documents, 1)) == 1
    documents = [torch.full((n,), i) for i, n in enumerate((5, 3, 5, 5, 2))]
    assert [tuple(x.shape) for x in batches(documents, size=2)] == [(2, 5), (1, 5), (1, 3), (1, 2)]
    assert [tuple(x.shape) for x in batches(documents)] == [(3, 5), (1, 3), (1, 2)]
    long = [torch.zeros(BATCH) for _ in range(3)]
    assert [len(x) for x in batches(long)] == [1, 1, 1]


@pytest.mark.slow
def test_a_run_knows_what_it_was_trained_on(path: Path, tmp_path: Path) -> None:
    shape = {"n_layers": 1, "n_heads": 2, "d_model": 8, "context": 16}
    run_training(
        tmp_path / "own", Settings("llama", (str(path),), steps=1, shape={**shape, "n_kv_heads": 2}), quiet, False
    )
    own = read_calibration(None, open_folder(tmp_path / "own"))
    given = read_calibration(path, open_folder(tmp_path / "own"))
    assert all(torch.equal(a, b) for a, b in zip(own.train + own.held_out, given.train + given.held_out, strict=True))
    for preset, core in (("verbs", False), ("course", True)):
        settings = Settings(preset, seed=3, steps=1, shape={**shape, "context": 32})
        run_training(tmp_path / preset, settings, quiet, False)
        found = read_calibration(None, open_folder(tmp_path / preset))
        corpus, lines = verb_corpus(3, 32, core=core), verbs.corpus(3, core=core)
        assert (len(found.train), len(found.held_out)) == (len(lines.train_lines), 36)
        assert found.held_out[5].tolist() == corpus.tokens.document(lines.held_out_lines[5])
    (tmp_path / "own" / "run.json").unlink()
    with pytest.raises(HeadwiseError, match="is no run of headwise, nor made from one that can be found"):
        read_calibration(None, open_folder(tmp_path / "own"))


def test_tokenizers_of_others(path: Path) -> None:
    letters, other = folder(Tokens.characters("abc", boundary=False)), folder(Framed(), vocab_size=100, family="bert")
    said = "has the token id 121 and the model knows 100 tokens: they do not belong together"
    refuses(lambda: read_calibration(path, other), said)
    refuses(lambda: read_calibration([-3] * 99, letters), "the text: -3 is no token of a vocabulary of")
    said = r"has no tokenizer; pass token ids, or put tokenizer\.json beside"
    refuses(lambda: read_calibration(path, folder(None)), said)
    path.write_text("abc")
    said = "is too short: of documents of 2 to 16 tokens it makes 1 to .* and 0 to measure on"
    refuses(lambda: read_calibration(path, letters), said)
    path.write_text(" \n ")
    refuses(lambda: read_calibration(path, letters), "is empty, or holds nothing but white space")
