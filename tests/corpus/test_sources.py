"""A text gives the same ids and parts whatever files it lies in; what is no text is refused by its file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import refuses

from headwise.corpus import sources
from headwise.corpus.sources import Sources, pieces
from headwise.corpus.training import Corpus, text_corpus

LINES = [f"line {n} of the bóok {n * n}" for n in range(211)]
TEXT = "\n".join(LINES)


def write_forms(folder: Path) -> dict[str, list[Path]]:
    """The same text in many forms."""
    contents = {
        "plain.txt": TEXT.encode(),
        "windows.txt": b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode(),
        "two/a.txt": "\n".join(LINES[:100]).encode(),
        "two/b.md": "\n".join(LINES[100:]).encode(),
        "two/c.bin": b"\xff",
        "two/d.txt": b"",
    }
    (folder / "two").mkdir(parents=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    forms = {name: [folder / name] for name in contents if "/" not in name}
    return forms | {"a folder": [folder / "two"], "two files": [folder / "two/a.txt", folder / "two/b.md"]}


def facts(corpus: Corpus) -> Any:
    """What a model would see of it."""
    text = corpus.data
    batches = [text.batch(torch.Generator().manual_seed(seed), 5) for seed in range(3)] + [*text.held_out_batches(7)]
    ids = [tensor.tolist() for batch in batches for tensor in batch]
    found = text.held_out_documents(60), text.ngram(len(corpus.tokens)), corpus.tokens.vocabulary, corpus.example
    return ids, found


@pytest.mark.parametrize("lines", [False, True])
def test_a_text_is_the_same_in_any_form(lines: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpora = {name: text_corpus(Sources(paths), lines, 13, 3) for name, paths in write_forms(tmp_path).items()}
    monkeypatch.setattr(sources, "PIECE", 53)
    text_pieces = text_corpus(Sources([tmp_path / "plain.txt"]), lines, 13, 3)
    whole = corpora["plain.txt"]
    assert [name for name, corpus in corpora.items() if facts(corpus) != facts(whole)] == []
    assert facts(text_pieces) == facts(whole) and len(list(pieces(TEXT))) > 50 and "".join(pieces(TEXT)) == TEXT


def test_bad_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b" \n\n")
    refuses(lambda: list(Sources([tmp_path / "a.txt"])), "a.txt is empty, or holds nothing but white space")
    refuses(lambda: Sources([tmp_path / "none.txt"]), "none.txt does not exist")
    (tmp_path / "empty").mkdir()
    refuses(lambda: Sources([tmp_path / "empty"]), "holds no text files")
