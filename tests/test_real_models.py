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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma-3-270m", "whisper-base", "rxnmapper", "all-minilm-l6-v2"])
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
