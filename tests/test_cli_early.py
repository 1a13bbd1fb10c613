"""What can be known from the arguments, the names of files and config.json is refused at once, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from cases import every

pytestmark = pytest.mark.clock

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 23, "hidden_size": 24}
LLAMA |= {"intermediate_size": 7, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 6}
LLAMA |= {"max_position_embeddings": 29}

LONGEST = 1.0  # seconds of the processor for a refusal; it takes some hundredths

TABLE = {
    # numbers that no command takes
    "heads llama --seed 99999999999999999999 --text book.txt": ("--seed", "less than or equal to 9223372036854775807"),
    "heads llama --seed -1 --text book.txt": ("--seed", "greater than or equal to 0"),
    "windows llama --seed -1 --text book.txt": ("--seed", "greater than or equal to 0"),
    "ladder --seed 99999999999999999999": ("--seed",),
    "ladder --tokens 0": ("--tokens", "greater than or equal to 1"),
    "bugs missing-scale --workers 0": ("--workers", "greater than or equal to 1"),
    "bugs missing-scale --seeds 2": ("--seeds", "greater than or equal to 3"),
    "compare heads --workers 0": ("--workers", "greater than or equal to 1"),
    "compare heads --text nowhere.txt": ("nowhere.txt does not exist",),
    "cost --table --context -5": ("--table shows models side by side",),
    "cost --table --batch 3": ("--table shows models side by side",),
    "cost gpt2 --measure --context 0": ("--context 0 is outside 1 to",),
    "train --samples 100000000000000000000": ("--samples", "less than or equal to 10000"),
    "train book.txt nowhere.txt": ("nowhere.txt does not exist",),
    "train book.txt --preset lama": ("no preset 'lama'; did you mean llama?",),
    "generate llama --top-k 0": ("--top-k",),
    "generate llama --ids nowhere": ("nowhere does not exist",),
    "generate llama --plan nowhere.json": ("nowhere.json does not exist",),
    "heads llama --text book.txt --documents 0": ("--documents",),
    "heads llama --text book.txt --ablate median": ("--ablate", "'mean'"),
    "heads llama --text book.txt --tokens 30": ("--tokens 30 exceeds what llama takes at a time, 29",),
    "heads llama --tokens 5": ("--tokens 5 cuts a text",),
    # names that are empty, links that lead nowhere
    "heads llama --text book.txt --keep=": ("--keep", "the name is empty"),
    "generate =": ("MODEL", "the name is empty"),
    "heads llama --text book.txt --csv loop.csv": ("loop.csv is a link that leads back to itself",),
    # folders that are no models, texts that are not there
    **{f"{name} nowhere": ("nowhere is no folder",) for name in ("heads", "windows", "generate", "why --prompt=x")},
    **{f"{name} book.txt": ("book.txt is no folder",) for name in ("heads", "share --kv-heads=2", "prune --keep=0.5")},
    "heads empty": ("empty has no config.json",),
    "heads --circuits empty": ("empty has no config.json",),
    "heads pickled": ("pytorch_model.bin is a pickle",),
    "heads llama": ("llama is no run of headwise", "--text"),
    "windows llama": ("llama is no run of headwise", "--text"),
    "share llama --kv-heads 2": ("llama is no run of headwise", "--text"),
    "heads llama --text nowhere.txt": ("there is no file nowhere.txt",),
    "heads llama --ids nowhere": ("nowhere does not exist",),
    "heads llama --relations nowhere.json": ("nowhere.json does not exist",),
    "heads llama --text book.txt --against nowhere": ("nowhere is no folder",),
    "narrow llama --text nowhere.txt": ("nowhere.txt does not exist",),
    # what the config cannot have
    "share llama --kv-heads 4 --text book.txt": ("--kv-heads 4 does not divide the model's 6", "1, 2, 3"),
    "share llama --kv-heads 2 --text book.txt --method average": ("--method average is not known",),
    "share llama --kv-heads 2 --text book.txt --tokens 30": ("--tokens 30 exceeds the model's context of 29",),
    "share llama --kv-heads 2 --text book.txt --heal 5": ("pass --out",),
    "share llama --kv-heads 2 --text book.txt --heal 0 --out new": ("heal steps=0",),
    "share llama --kv-heads 2 --text book.txt --out empty/../full": ("has no headwise.json",),
    "share llama --kv-heads 2 --text book.txt --out written": ("written exists already; pass --force",),
    "share llama --kv-heads 2 --text book.txt --out llama/new": ("lies inside the source",),
    "share bloom --kv-heads 2 --text book.txt": ("bloom is a family whose heads cannot be reshaped yet",),
    "prune llama --heads L2.H0 --text book.txt": ("the model has no head L2.H0: 2 layers of 6 heads",),
    "prune llama --text book.txt": ("say which heads go",),
    "prune llama --keep 1 --text book.txt": ("--keep 1.0 keeps every head",),
    "prune bert --keep 0.5 --text book.txt": ("BertModel", "does not predict the next token", "--by role"),
    "narrow bert --text book.txt": ("BertModel", "does not predict the next token", "headwise heads"),
    "windows bert --text book.txt": ("BertModel", "does not predict the next token", "headwise heads"),
    "why bert --prompt x": ("BertModel, which has no head for words", "headwise.watch"),
    "why whisper --prompt x": ("whisper, which reads sound and no text",),
    "generate bert": ("BertModel", "does not predict the next token", "causal language-model head"),
    "share bert --kv-heads 1 --text book.txt": ("bert's config has no num_key_value_heads", "headwise prune"),
    "share gemma --kv-heads 1 --text book.txt": ("one key/value head for its 6 query heads already", "headwise narrow"),
    "generate whisper": ("whisper, which does not predict the next token",),
    "heads whisper --text book.txt": ("whisper, which reads sound and no text", "headwise.watch", "headwise align"),
    "narrow llama --cache 1.5 --text book.txt": ("--cache 1.5 must lie between 0 and 1",),
}

PROGRAM = """
import contextlib, io, json, sys, time
from headwise import cli

sys.modules["torch"] = None  # an import of it is an error
outcomes = []
for arguments in json.load(sys.stdin):
    sys.argv = ["headwise", *arguments]
    began, err = time.process_time(), io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(err):
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code
    outcomes.append([code, err.getvalue(), time.process_time() - began])
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Code, words and seconds of each line of `TABLE`, where torch cannot be imported."""
    folder = tmp_path_factory.mktemp("early")
    configs = {"llama": LLAMA, "bloom": LLAMA | {"model_type": "bloom"}, "pickled": LLAMA}
    configs |= {"bert": LLAMA | {"model_type": "bert", "architectures": ["BertModel"]}}
    configs |= {"gemma": LLAMA | {"model_type": "gemma3_text", "architectures": None, "num_key_value_heads": 1}}
    configs |= {"whisper": {"model_type": "whisper", "is_encoder_decoder": True, "num_mel_bins": 80}}
    for name in ("empty", "full", "written", *configs):
        (folder / name).mkdir()
    for name, config in configs.items():
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / name / "model.safetensors").touch()
    (folder / "pickled" / "model.safetensors").rename(folder / "pickled" / "pytorch_model.bin")
    (folder / "full" / "letter.txt").write_text("dear")
    (folder / "written" / "headwise.json").write_text("{}")
    (folder / "book.txt").write_text("a b\n" * 99)
    (folder / "loop.csv").symlink_to("loop.csv")
    lines = [["" if word == "=" else word for word in line.split()] for line in TABLE]
    program = [sys.executable, "-c", PROGRAM]
    child = subprocess.run(program, input=json.dumps(lines), cwd=folder, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr
    return dict(zip(TABLE, json.loads(child.stdout), strict=True))


@pytest.mark.slow
@every("line", TABLE)
def test_a_refusal_comes_before_the_work(line: str, outcomes: dict[str, Any]) -> None:
    code, words, seconds = outcomes[line]
    assert code == 2 and words.startswith("headwise: ") and words.count("\n") == 1, words
    for word in TABLE[line]:
        assert word in words
    assert seconds < LONGEST


def test_the_names_that_are_known_early_are_those_of_the_rooms() -> None:
    from headwise.reshape.arguments import METHODS
    from headwise.reshape.pool import POOLS

    assert tuple(POOLS) == METHODS
