"""`headwise align`: a tiny Whisper that hears a tone, a tiny BART with links, files that are not as they must be."""

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers as tf
from cases import refuses, rows

from headwise.heads.align import Linked, Spoken, read_aligned, read_wav
from headwise.models.open import open_folder

WORDS = ["[UNK]", "the", "old", "house", "la", "casa", "vieja", "river", "s", "en", "write", "plain"]


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tf.PreTrainedTokenizerFast(tokenizer_object=split, unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = tf.BartConfig(
        vocab_size=23, d_model=24, encoder_layers=1, decoder_layers=2, encoder_attention_heads=3,
        decoder_attention_heads=3, encoder_ffn_dim=29, decoder_ffn_dim=29, max_position_embeddings=31,
        decoder_start_token_id=7, bos_token_id=13, eos_token_id=14, pad_token_id=15, forced_eos_token_id=14,
    )  # fmt: skip
    return save(tf.BartForConditionalGeneration(config), tmp_path_factory.mktemp("bart"))


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    config = tf.WhisperConfig(
        vocab_size=23, d_model=24, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=3, encoder_ffn_dim=29, decoder_ffn_dim=29, max_source_positions=50,
        max_target_positions=31, num_mel_bins=80, decoder_start_token_id=8, bos_token_id=8, eos_token_id=8,
        pad_token_id=8,
    )  # fmt: skip
    model = tf.WhisperForConditionalGeneration(config)
    options: Any = model.generation_config
    options.is_multilingual, options.lang_to_id, options.task_to_id = True, {"<|en|>": 9}, {"transcribe": 10}
    options.no_timestamps_token_id, options.alignment_heads = 11, [[1, 2]]
    options._from_model_config = False  # else it is not read back
    folder = save(model, tmp_path_factory.mktemp("whisper"))
    tf.WhisperFeatureExtractor(chunk_length=1).save_pretrained(folder)
    return folder


def write_tone(path: Path, seconds: float, rate: int = 16_000) -> None:
    times = np.arange(round(seconds * rate)) / rate
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((9000 * np.sin(2 * np.pi * 440 * times)).astype("<i2").tobytes())


def test_sound_is_read_at_its_rate_alone(tmp_path: Path) -> None:
    write_tone(tmp_path / "a.wav", 0.7)
    expected = 9000 / 2**15 * np.sin(2 * np.pi * 440 * np.arange(11_200) / 16_000)
    assert np.abs(read_wav(tmp_path / "a.wav") - expected).max() < 2**-15
    write_tone(tmp_path / "b.wav", 0.7, 22_050)
    refuses(
        lambda: read_wav(tmp_path / "b.wav"), r"b\.wav has 22,050 samples of 16 bits a second; write it with 16,000"
    )
    (tmp_path / "c.wav").write_bytes(b"RIFF no sound")
    refuses(lambda: read_wav(tmp_path / "c.wav"), r"c\.wav is no WAV file")


def test_words_become_rows_and_keys(tmp_path: Path, whisper: Path, bart: Path) -> None:
    write_tone(tmp_path / "a.wav", 0.5)
    lines = tmp_path / "speech.jsonl"
    lines.write_text(json.dumps({"audio": "a.wav", "words": [["the", 0.0], ["old", 0.2], ["river", 0.31]]}) + "\n\n")
    (speech,) = read_aligned(open_folder(whisper), lines)
    assert isinstance(speech, Spoken)
    assert speech.inputs["decoder_input_ids"].tolist() == [[8, 9, 10, 11, 1, 2, 7]]
    assert list(speech.rows) == [3, 4, 5, 6] and speech.starts == [0, 1, 2]
    assert (speech.seconds_per_key, speech.n_keys) == (0.02, 25)
    lines.write_text(json.dumps({"source": "the old house", "target": "la casa vieja", "links": [[2, 1]]}))
    (pair,) = read_aligned(open_folder(bart), lines)
    assert isinstance(pair, Linked)
    assert pair.inputs["decoder_input_ids"].tolist() == [[7, 4, 5, 6]] and pair.links == ((2, 1),)


def test_the_command_ranks_judges_and_writes(tmp_path: Path, whisper: Path, invoke: Any, monkeypatch: Any) -> None:
    lines, stages = [], set()
    monkeypatch.setattr("headwise.view.Progress.__call__", lambda self, stage, *_: stages.add(stage))
    for number in range(4):
        write_tone(tmp_path / f"{number}.wav", 0.5 + 0.1 * number)
        lines.append(json.dumps({"audio": f"{number}.wav", "words": [["the", 0.0], ["river", 0.21]]}))
    (tmp_path / "speech.jsonl").write_text("\n".join(lines))
    out = tmp_path / "heads.json"
    done = invoke("align", whisper, "--pairs", tmp_path / "speech.jsonl", "--out", out, "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["n_texts"] == [2, 2] and len(result["ranking"]) == 6 and stages == {"reading the texts"}
    assert json.loads(out.read_text()) == {"alignment_heads": result["alignment_heads"]}
    assert "named: cross.L1.H2" in result["controls"]
    shown = invoke("align", whisper, "--pairs", tmp_path / "speech.jsonl")
    assert "alignment_heads: [[" in shown.out and "straight line" in shown.out
    for phrase in ("mean error, s", "within 50 ms", "named: cross.L1.H2", "all below on 2 others"):
        assert phrase in " ".join(shown.out.split()), shown.out


@pytest.mark.parametrize(("line", "message"), rows("wrong_lines"))
def test_a_line_that_is_wrong_is_named(line: Any, message: str, tmp_path: Path, whisper: Path, invoke: Any) -> None:
    write_tone(tmp_path / "a.wav", 0.3)
    write_tone(tmp_path / "long.wav", 1.2)
    (tmp_path / "pairs.jsonl").write_text(json.dumps(line))
    refused = invoke("align", whisper, "--pairs", tmp_path / "pairs.jsonl")
    assert refused.code == 2
    assert f"line 1 of {tmp_path / 'pairs.jsonl'}: " in refused.err and message in refused.err


def test_what_is_missing_is_said_before_a_model_is_read(tmp_path: Path, bart: Path, invoke: Any) -> None:
    refused = invoke("align", bart, "--pairs", tmp_path / "none.jsonl")
    assert refused.code == 2 and "none.jsonl is no file" in refused.err
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "the old house", "links": [[1, 0]]}))
    refused = invoke("align", bart, "--pairs", tmp_path / "one.jsonl")
    assert refused.code == 2 and "one.jsonl has one text" in refused.err
