"""Trained models of packages: how their files are read, and, where `make models` built them, that they open."""

import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import headwise as hw

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import models
import real


def test_a_file_of_ctranslate2_is_read() -> None:
    """Names end with a zero; a variable is its shape, the number of its format, its bytes."""

    def name(text: str) -> bytes:
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    half, count = np.arange(6, dtype="<f2").reshape(2, 3), np.int16(5)
    content = struct.pack("<I", 6) + name("WhisperSpec") + struct.pack("<II", 3, 2)
    content += name("a/weight") + struct.pack("<BIIBI", 2, 2, 3, 4, 12) + half.tobytes()
    content += name("n") + struct.pack("<BBI", 0, 2, 2) + count.tobytes()
    variables = models.ctranslate2(content)
    assert np.array_equal(variables["a/weight"], half) and variables["n"] == 5
    with pytest.raises(SystemExit, match="version 7"):
        models.ctranslate2(b"\7" + content[1:])


def test_reactions_are_cut_as_their_model_expects() -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "C", "Cl", "(", "=", "O", ")", "[OH-]", ">>"]
    tokenizer = models.smiles_tokenizer({word: number for number, word in enumerate(words)})
    encoded = tokenizer.encode("ClC(=O)C.[OH-]>>C\n")
    assert encoded.tokens == ["[CLS]", "Cl", "C", "(", "=", "O", ")", "C", "[UNK]", "[OH-]", ">>", "C", "[SEP]"]
    assert tokenizer.decode(encoded.ids[1:5]) == "ClC(="


def test_an_atom_of_a_product_is_paired_with_the_same_atom() -> None:
    documents = real.reactions()["documents"]
    assert len({document["text"] for document in documents}) == len(documents) == 50
    for document in documents:
        before, after = document["text"].split(">>")
        spans = [(slice(*pair["from"]), slice(*pair["to"])) for pair in document["pairs"]]
        assert len(spans) == len(real.ATOM.findall(after)) == len(real.ATOM.findall(before)) - 1  # water leaves
        for new, old in spans:
            assert document["text"][new] == document["text"][old] and old.stop <= len(before) < new.start


def test_a_verb_works_or_refuses_at_once() -> None:
    works = {"code": 0, "out": "", "err": "", "seconds": 70.0, "processor": 60.0}
    assert real.wrong("heads", works) is None
    refuses = works | {"code": 2, "err": "reading\nheadwise: no; do this\n", "seconds": 9.0, "processor": 1.9}
    assert real.refusal(refuses) == "no; do this" and real.wrong("heads", refuses) is None
    assert real.wrong("heads", refuses | {"processor": 2.1}) == "refuses after 2.1 s: no; do this"
    assert real.wrong("patch", refuses | {"processor": 2.1}) is None  # there the model is open already
    assert real.wrong("heads", works | {"code": 1, "err": "Traceback\nKeyError: 3"}) == "exit code 1: KeyError: 3"


@pytest.mark.slow
@pytest.mark.parametrize("name", real.NAMES)
def test_a_trained_model_opens_and_is_watched(name: str) -> None:
    if not (models.MODELS / name).is_dir():
        pytest.skip(f"build/models has no {name}: `make models` builds it")
    model = hw.open(models.MODELS / name)
    inputs = {"input_ids": torch.tensor([[3, 5, 7]])}
    if name.startswith("whisper"):
        inputs = {
            "input_features": torch.zeros(1, 80, 3000),
            "decoder_input_ids": torch.tensor([[50258, 50259, 50359]]),
        }
    with hw.watch(model) as seen, torch.no_grad():
        model(**inputs)
    sizes = {"gemma-3-270m": 18 * 4, "whisper-base": 3 * 6 * 8, "rxnmapper": 12 * 8, "all-minilm-l6-v2": 6 * 12}
    assert len(list(seen)) == sizes[name]
