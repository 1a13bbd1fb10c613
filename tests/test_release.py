"""What is published: a wheel and a source archive that hold all that the package needs, and run without torch."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import headwise

ROOT = Path(__file__).resolve().parents[1]
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
