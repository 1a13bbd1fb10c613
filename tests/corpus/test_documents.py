"""Texts and ids become documents that fit the model, whatever files they lie in, or a clear line says why not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import refuses, refuses_table
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headwise import files
from headwise.corpus.documents import read_documents, read_ids
from headwise.corpus.tokens import Tokens
from headwise.corpus.training import Corpus, text_corpus
from headwise.files import Sources, pieces
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.models.hf import FolderTokens
from headwise.models.open import Folder

CONTEXT = 13


@pytest.fixture(scope="module")
def folder() -> Folder:
    tokens = Tokens.characters("abcdefgh\n .", boundary=True)
    model = GPT(GPTConfig(vocab_size=len(tokens), context=CONTEXT, n_layers=1, n_heads=2, d_model=12))
    return Folder(Path("somewhere/letters"), model, tokens, CONTEXT, "headwise", len(tokens))


def test_texts_become_documents(folder: Folder, tmp_path: Path) -> None:
    text = read_documents(folder, ["abc abc"], None, None)
    assert len(text.documents) == 1
    assert text.shown(text.documents[0]) == ("<|end|>", "a", "b", "c", " ", "a", "b", "c")
    (tmp_path / "b.txt").write_text("abc")
    (tmp_path / "a.md").write_text("cba.")
    (tmp_path / "c.bin").write_text("hhh")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "d.txt").write_text("ha")
    text = read_documents(folder, [str(tmp_path), *[str(tmp_path / "b.txt")] * 2], None, None)
    assert ["".join(text.shown(ids)[1:]) for ids in text.documents] == ["cba.", "abc", "ha", "abc", "abc"]
    content = "abcdefgh" * 4 + "a"
    text = read_documents(folder, [content], 8, None)
    assert [len(ids) for ids in text.documents] == [8, 8, 8, 8, 6]  # one of each is the boundary
    assert "".join("".join(text.shown(ids)[1:]) for ids in text.documents) == content
    assert len(read_documents(folder, ["abcdefgh" * 9], 8, 3).documents) == 3


def test_a_text_longer_than_the_model_is_cut_and_that_is_said(folder: Folder) -> None:
    text = read_documents(folder, ["abcdefgh" * 2, "abc"], None, None)
    assert [len(ids) for ids in text.documents] == [13, 5, 4]
    said = (
        "1 text longer than the 13 tokens that letters takes at a time: cut into documents of 13; tokens= cuts shorter"
    )
    assert [about.startswith(said) for about in text.about] == [True]
    assert read_documents(folder, ["abcdefgh" * 2], 13, None).about == read_documents(folder, ["abc"], None, None).about
    assert read_documents(folder, ["abc"], None, None).about == ()


def test_what_the_tokenizer_does_not_know_is_counted(folder: Folder) -> None:
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "ab": 1, "##c": 2, "[": 3}, unk_token="[UNK]"))
    pieces.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pieces.normalizer = normalizers.Lowercase()
    for tokens in (FolderTokens(PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="[UNK]")), Tokens(pieces)):
        other = replace(folder, tokens=tokens)
        assert read_documents(other, ["ab abc"], None, None).about == ()
        (said,) = read_documents(other, ["abc éé ab дом"], None, None).about
        assert said.startswith("2 of 5 tokens of the text are '[UNK]', which stands for what the tokenizer does not")


def test_texts_that_do_not_fit(folder: Folder) -> None:
    refuses_table("texts", globals() | {"folder": folder})


def test_what_is_no_text_of_this_model(folder: Folder, tmp_path: Path) -> None:
    smaller = Folder(folder.path, folder.model, folder.tokens, CONTEXT, "headwise", 5)
    said = "the token id 9 and the model knows 5 tokens: they do not belong"
    refuses(lambda: read_documents(smaller, ["abcdefg"], None, None), said)
    refuses(lambda: read_documents(folder, [str(tmp_path)], None, None), "holds no text files")
    bare = Folder(folder.path, folder.model, None, CONTEXT, "headwise", 12)
    refuses(lambda: read_documents(bare, ["abc"], None, None), "has no tokenizer; pass token ids")
    (tmp_path / "ids").write_text("1 2 3\n\n4,5, 6 7\n")
    text = read_ids(bare, tmp_path / "ids", None)
    assert [list(ids) for ids in text.documents] == [[1, 2, 3], [4, 5, 6, 7]]
    assert text.shown([4, 5]) == ("4", "5")


def test_ids_that_do_not_fit(folder: Folder, tmp_path: Path) -> None:
    def written(content: str) -> Path:
        (tmp_path / "ids").write_text(content)
        return tmp_path / "ids"

    refuses_table("ids", {"read": lambda content: read_ids(folder, written(content), None)})


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
    monkeypatch.setattr(files, "PIECE", 53)
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
