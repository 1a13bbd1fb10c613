"""Bad command lines: each is refused in one line and writes nothing; what can be known early, without torch too."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import every, read_table, refused
from invoking import Invoke, contents

import headwise as hw

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 23, "hidden_size": 24}
LLAMA |= {"intermediate_size": 7, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 6}
LLAMA |= {"max_position_embeddings": 29}

FORWARD = "Attention(Base):\n    def forward(self, x): return x\n"
CODE = {"blank": "", "two": f"class First{FORWARD}class Next{FORWARD}"}

TABLE = {name: dict(refused(rows)) for name, rows in read_table("refusals").items()}

PROGRAM = """
import contextlib, io, json, sys
from headwise import cli

sys.modules["torch"] = None  # an import of it is an error
outcomes = []
for arguments in json.load(sys.stdin):
    sys.argv = ["headwise", *arguments]
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(err):
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code
    outcomes.append([code, err.getvalue()])
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command lines name: folders of models without weights, a run, texts."""
    folder = tmp_path_factory.mktemp("refusals") / "here"
    configs = {"llama": LLAMA, "bloom": LLAMA | {"model_type": "bloom"}, "pickled": LLAMA}
    configs |= {"inside/llama": LLAMA, "unread": LLAMA}
    configs |= {"bert": LLAMA | {"model_type": "bert", "architectures": ["BertModel"]}}
    configs |= {
        "whisper": {"model_type": "whisper", "is_encoder_decoder": True, "num_mel_bins": 80, "max_source_positions": 50}
    }
    configs |= {"gemma": LLAMA | {"model_type": "gemma3_text", "architectures": None, "num_key_value_heads": 1}}
    configs |= {"vast": configs["gemma"] | {"num_key_value_heads": 10**15}}
    for name in ("empty", "full", "written", *configs):
        (folder / name).mkdir(parents=True)
    for name, config in configs.items():
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / name / "model.safetensors").touch()
    (folder / "pickled" / "model.safetensors").rename(folder / "pickled" / "pytorch_model.bin")
    files = {
        "full/letter.txt": "dear", "written/headwise.json": "{}", "book.txt": "the cat sat\n" * 99, "ids.txt": "1 2",
    }  # fmt: skip
    files |= {f"{name}.py": f"class Base:\n    size = 1\n{code}" for name, code in CODE.items()}
    for name, content in {**files, "blank.txt": " \n", "short.txt": "th", "foreign.txt": "ñ" * 99}.items():
        (folder / name).write_text(content, encoding="utf-8")
    (folder / "latin.json").write_bytes(b"\xff\xfe")
    (folder / "loop.csv").symlink_to("loop.csv")
    hw.train(folder / "book.txt", out=folder / "run", steps=3, n_layers=2, n_heads=2, d_model=8, context=8)
    shutil.copy(folder / "run" / "tokenizer.json", folder / "unread")
    for name, file in (("cut", "model.safetensors"), ("torn", "run.json")):
        shutil.copytree(folder / "run", folder / name)
        (folder / name / file).write_bytes((folder / name / file).read_bytes()[:-5])
    return folder


def assert_one_line(code: int, words: str, expected: str) -> None:
    assert code == 2 and words.splitlines()[-1].startswith("headwise: ") and words.count("\nheadwise: ") == 0, words
    assert "Traceback" not in words and re.search(expected, words.splitlines()[-1]), words


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Any]:
    """Code and words of each early line, where torch cannot be imported: so no work has begun."""
    before, program = contents(folder), [sys.executable, "-c", PROGRAM]
    given = json.dumps([shlex.split(line) for line in TABLE["early"]])
    child = subprocess.run(program, input=given, cwd=folder, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr
    assert contents(folder) == before
    return dict(zip(TABLE["early"], json.loads(child.stdout), strict=True))


@pytest.mark.slow
@every("line", TABLE["early"])
def test_a_refusal_comes_before_the_work(line: str, outcomes: dict[str, Any]) -> None:
    code, words = outcomes[line]
    assert_one_line(code, words, TABLE["early"][line])
    assert words.count("\n") == 1


@pytest.mark.slow
@every("line", TABLE["late"])
def test_a_refusal_is_one_line_and_writes_nothing(line: str, folder: Path, invoke: Invoke, monkeypatch: Any) -> None:
    monkeypatch.chdir(folder)
    before = contents(folder)
    outcome = invoke(*shlex.split(line))
    assert outcome.out == "" and contents(folder) == before
    assert_one_line(outcome.code, outcome.err, TABLE["late"][line])
