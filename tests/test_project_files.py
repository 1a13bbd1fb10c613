"""What stands around the code: the hook, the workflow, what is published, the Spanish pages, the studies."""

import email
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import headwise
import headwise as hw

ROOT = Path(__file__).resolve().parents[1]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_hook_stops_at_bugs_and_passes_what_is_no_attention(tmp_path: Path) -> None:
    """With a `headwise` that answers by the names of files: 0 right, 1 a bug, 2 nothing to check."""
    (hook,) = read(ROOT / ".pre-commit-hooks.yaml")
    command = tmp_path / "headwise"
    command.write_text('#!/bin/sh\necho "$@" >> calls\ncase "$2" in *wrong*) exit 1;; *other*) exit 2;; esac\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}

    def code(*files: str) -> int:
        return subprocess.run([*shlex.split(hook["entry"]), *files], cwd=tmp_path, env=environment).returncode

    assert code("right.py", "other.py", "a name.py") == 0
    assert (tmp_path / "calls").read_text() == "check right.py\ncheck other.py\ncheck a name.py\n"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(hook["additional_dependencies"]) <= set(extras["torch"])
    assert hook["entry"] in (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    assert code("right.py", "wrong.py", "right.py") == 1 and code("other.py", "wrong.py") == 1 and code() == 0


def test_the_workflow_and_hooks_run_the_makefile() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    commands = []
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in read(path)["jobs"].values():
            assert job["runs-on"] and job["timeout-minutes"]
            commands += [step["run"] for step in job["steps"] if "run" in step]
    assert {"make test", "make package", "make docs"} == set(commands)
    assert all(command.removeprefix("make ") in targets for command in commands)
    hooks = [hook["entry"] for repo in read(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for entry in hooks:
        assert entry.replace(".venv/bin/", "$(BIN)/").replace(" --force-exclude", "") in makefile


BUILD = "import sys; from setuptools import build_meta as b; d = sys.argv[1]; b.build_wheel(d); b.build_sdist(d)"
USE = """
import sys
for name in ("torch", "transformers", "tokenizers"):
    sys.modules[name] = None
import numpy as np
import headwise as hw

q = [[[0.5, 1.0], [1.0, -1.0], [0.0, 2.0]]]
out = hw.attend(q, q, q, mask=hw.Causal())
steps = hw.trace(np.array([q]), np.array([q]), np.array([q]), mask=hw.Causal())
assert np.allclose(np.array(out), steps.out[0]) and hw.__file__.startswith(sys.argv[1])
sizes = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
assert hw.price({"model_type": "gpt2", **sizes}).parameters.total > 10**8
from headwise.words import table
from headwise.checker.bugs import catalogue
assert table() and catalogue()
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel and a source archive, made from a copy of what git would hand out."""
    copy, dist = (tmp_path_factory.mktemp(name) for name in ("copy", "dist"))
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("README.md", "LICENSE", "pyproject.toml", "setup.py", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy / name)
    subprocess.run([sys.executable, "-c", BUILD, str(dist)], cwd=copy, check=True, capture_output=True)
    return dist


@pytest.mark.slow
def test_a_wheel_holds_every_file_and_runs_without_torch(built: Path, tmp_path: Path) -> None:
    wheel = next(built.glob("*.whl"))
    assert wheel.name.startswith(f"headwise-{headwise.__version__}-")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    source = ROOT / "src"
    wanted = {str(path.relative_to(source)) for path in (source / "headwise").rglob("*") if path.is_file()}
    wanted = {name for name in wanted if "__pycache__" not in name}
    assert wanted - {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == set()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", USE, str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_archives_and_versions(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = archive.getnames()
    assert any(name.endswith("src/headwise/view/page/model.js") for name in names)
    assert any(name.endswith("pyproject.toml") for name in names)
    assert not any("/tests" in name for name in names)  # by themselves setuptools take half of them
    version = headwise.__version__
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    latest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert latest is not None and latest[1] == version
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        metadata = email.message_from_bytes(archive.read(f"headwise-{headwise.__version__}.dist-info/METADATA"))
    page, readme = str(metadata.get_payload()), (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"\]\((?!https?:|#)", readme) and not re.search(r"\]\((?!https?:|#)", page)
    assert "hw.MultiHeadAttention(64, 4" in page and metadata["Description-Content-Type"].startswith("text/markdown")
    headings = re.findall(r"^#+ .*", readme, re.MULTILINE)
    assert headings == [line for line in page.splitlines() if line in headings]
    assert metadata["License-Expression"] == "MIT" and metadata["Requires-Python"] == ">=3.11"
    kinds = metadata.get_all("Classifier")
    assert len(kinds) == len(set(kinds)) and all(" :: " in kind for kind in kinds)


def test_a_spanish_page_leads_to_spanish_pages() -> None:
    docs = ROOT / "docs"
    for page in [ROOT / "README.es.md", *docs.glob("*.es.md")]:
        text = re.sub(r"\[In English\]\(.*?\)", "", page.read_text("utf-8"))
        links = re.findall(r"\]\((?:docs/)?([\w-]+)\.md\b", text)
        assert [name for name in links if (docs / f"{name}.es.md").exists()] == [], page.name


def figures(row: str) -> list[str]:
    return sorted(re.findall(r"\d[\d.,]*\d|\d", row))


def test_the_readme_in_spanish_runs_the_same_and_has_the_same_figures() -> None:
    texts = [(ROOT / name).read_text("utf-8") for name in ("README.md", "README.es.md")]
    code = [re.findall(r"^```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE) for text in texts]
    english, spanish = ([re.sub(r"#.*|[ \t]+$", "", block, flags=re.MULTILINE) for block in blocks] for blocks in code)
    assert [re.sub(r"\s+\n", "\n", block) for block in spanish] == [re.sub(r"\s+\n", "\n", block) for block in english]
    rows = [re.findall(r"^\|.*\|$", text, re.MULTILINE) for text in texts]
    assert [figures(row) for row in rows[1]] == [figures(row) for row in rows[0]]
    heads = [re.findall(r"L\d\.H\d|\b0\.\d\d\b|`\w+`", text.split("## ")[0]) for text in texts]
    assert set(heads[1]) >= {figure for figure in heads[0] if re.match(r"L\d|0\.", figure)}
    assert len(texts[1].splitlines()) < 110


@pytest.mark.slow
def test_the_torture_starts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["torture", "--seed", "31", "--cases", "1"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "studies" / "torture"), run_name="__main__")
    assert re.findall(r"^(\w+): 1 cases, 0 failed", capsys.readouterr().out, re.M) == ["calls", "files", "cycles"]


def test_a_head_that_qk_clip_clips_has_the_bound_as_its_largest_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clip brings the largest score of each head to the bound, and touches no other head."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import qk_clip

    torch.manual_seed(0)
    model = hw.GPT(hw.GPTConfig(vocab_size=qk_clip.VOCAB, context=53, n_layers=2, n_heads=3, d_model=24, init_std=0.7))
    ids = torch.randint(qk_clip.VOCAB, (2, 47))

    def peaks() -> dict[str, float]:
        with hw.watch(model, only=["score_max"]) as seen:
            model(ids).sum().backward()
        return {name: head.score_peak for name, head in seen.items()}

    with hw.watch(model, only=["score_max"]) as seen:
        model(ids)
    before = {name: head.score_peak for name, head in seen.items()}
    first = sorted(peak for name, peak in before.items() if name.startswith("L0"))  # later layers read what it changes
    bound = (first[0] + first[1]) / 2
    qk_clip.clip(model, seen, bound)
    after = peaks()
    for head in range(3):
        name = f"L0.H{head}"
        assert after[name] == pytest.approx(min(bound, before[name]), rel=1e-5)
    assert all(weights.grad is not None for weights in model.parameters())
