"""A text gives the same ids and parts whatever files it lies in, and however large; and its tokens are found again."""

import gzip
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
import torch
from cases import refuses
from pyarrow import parquet
from small_models import quiet, stop

from headwise import HeadwiseError
from headwise.corpus import documents, sources, training
from headwise.corpus.documents import read_documents
from headwise.corpus.sources import Sources
from headwise.corpus.tokens import Tokens
from headwise.corpus.training import Corpus, Documents, Stream, text_corpus
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.run import Settings, held_out_documents, run_training
from headwise.gpt.train import Stopped
from headwise.models.open import Folder

LINES = [f"line {n} of the bóok {n * n}" for n in range(211)]
TEXT = "\n".join(LINES)
RECORDS = [{"id": n, "body": line} for n, line in enumerate(LINES)]


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every text counts as large, and comes in many pieces; the folder of what is kept of it."""
    monkeypatch.setattr(training, "LARGE", 1)
    monkeypatch.setattr("headwise.corpus.documents.LARGE", 1)
    monkeypatch.setattr(sources, "PIECE", 53)
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def jsonl(records: list[Any]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def write_forms(folder: Path) -> dict[str, list[Path]]:
    """The same text in many forms."""
    records = jsonl(RECORDS)
    contents = {
        "plain.txt": TEXT.encode(),
        "windows.txt": b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode(),
        "packed.txt.gz": gzip.compress(TEXT.encode()),
        "packed.md.zst": pyarrow.compress(TEXT.encode(), codec="zstd", asbytes=True),
        "records.jsonl": records + b"\n \n",
        "records.ndjson.gz": gzip.compress(records),
        "two/a.txt": "\n".join(LINES[:100]).encode(),
        "two/b.jsonl.zst": pyarrow.compress(jsonl(RECORDS[100:]), codec="zstd", asbytes=True),
        "two/c.bin": b"\xff",
        "two/d.txt": b"",
    }
    (folder / "two").mkdir(parents=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), folder / "table.parquet", row_group_size=17)
    forms = {name: [folder / name] for name in [*contents, "table.parquet"] if "/" not in name}
    return forms | {"a folder": [folder / "two"], "two files": [folder / "two/a.txt", folder / "two/b.jsonl.zst"]}


def corpus_of(paths: list[Path], lines: bool, tokenizer: Path | None = None) -> Corpus:
    field = "body" if any(sources._kind(file) in sources.RECORDS for file in Sources(paths).files) else None
    return text_corpus(Sources(paths, field), lines, 13, 3, tokenizer)


def facts(corpus: Corpus) -> Any:
    """What a model would see of it."""
    text = corpus.data
    batches = [text.batch(torch.Generator().manual_seed(seed), 5) for seed in range(3)] + [*text.held_out_batches(7)]
    ids = [tensor.tolist() for batch in batches for tensor in batch]
    return ids, text.held_out_documents(60), text.ngram(len(corpus.tokens)), corpus.tokens.vocabulary, corpus.example


@pytest.mark.parametrize("lines", [False, True])
def test_a_text_is_the_same_in_any_form_and_size(lines: bool, tmp_path: Path, large: Path) -> None:
    forms = write_forms(tmp_path / "forms")
    kept = {name: corpus_of(paths, lines) for name, paths in forms.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "LARGE", 2**24)
        patch.setattr(sources, "PIECE", 2**20)
        whole = corpus_of(forms["plain.txt"], lines)
    assert [name for name, corpus in kept.items() if facts(corpus) != facts(whole)] == []
    text = whole.data
    assert isinstance(text, Documents if lines else Stream)
    ids = text._lines if isinstance(text, Documents) else text._ids
    expected = [whole.tokens.document(line) for line in LINES] if lines else [whole.tokens.encode(TEXT)]
    assert list(ids) == expected
    digests = {name: corpus.data.digest for name, corpus in kept.items()}
    assert {digests[name] for name in forms if lines or ("record" not in name and "table" not in name)} == {
        digests["plain.txt"]
    }


def test_tokens_are_made_once_and_a_damaged_file_again(
    tmp_path: Path, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    opened: list[Path] = []
    documents = sources._documents
    monkeypatch.setattr(sources, "_documents", lambda file, *rest: opened.append(file) or documents(file, *rest))

    def look(lines: bool = False, tokenizer: Path | None = None) -> tuple[Any, bool]:
        """What came of it, and whether the text was read for it."""
        opened.clear()
        return facts(corpus_of([path], lines, tokenizer)), bool(opened)

    first, made = look()
    assert made and look() == (first, False)
    (kept,) = large.glob("*.tokens")
    whole = kept.read_bytes()
    for damaged in (whole[:-1], whole[:9] + bytes([whole[9] ^ 1]) + whole[10:], b"", whole[:3]):
        kept.write_bytes(damaged)
        assert look() == (first, True) and kept.read_bytes() == whole
    assert look(lines=True)[1]
    (tmp_path / "tokenizer.json").write_text(Tokens.characters(TEXT, boundary=False).to_json())
    assert look(tokenizer=tmp_path / "tokenizer.json") == (first, True)
    path.write_text(TEXT.replace("line 7", "lane 7"))
    changed, made = look()
    assert made and changed != first
    assert not [file for file in large.iterdir() if file.suffix not in (".tokens", ".lock")]
    assert Sources([path]).key() != Sources([path.rename(path.with_suffix(".jsonl"))]).key()  # now it has records


def test_more_lines_than_are_shuffled(tmp_path: Path, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "MOST_SHUFFLED", 100)
    path = tmp_path / "lines.txt"
    path.write_text(TEXT)
    corpus = corpus_of([path], True)
    assert isinstance(corpus.data, Documents)
    assert (corpus.data._train, corpus.data._held_out) == (range(189), range(189, 211))
    shown = [corpus.tokens.decode(ids) for ids in corpus.data.held_out_documents(60)]
    assert shown == [line[:12] for line in LINES[189:193]] and corpus.example == LINES[189][:12]
    assert corpus.data._some(corpus.data._held_out, 155).tolist() == list(range(189, 211, 2))
    drawn = corpus.data.batch(torch.Generator().manual_seed(1), 500)[0]
    assert len({tuple(row.tolist()) for row in drawn}) > 100


BAD: dict[str, tuple[str, bytes, str | None, str]] = {
    "no JSON": ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', None, "a.jsonl, line 3 is no JSON: Expecting value"),
    "too deep": ("a.jsonl", b"[" * 100_000, None, "line 1 is no JSON: maximum recursion"),
    "no record": ("a.jsonl", b"[1]\n", None, "line 1 has no text in its field 'text': [1]"),
    "a number": ("a.jsonl", b'{"text": 7}\n', None, "line 1 has no text in its field 'text': {'text': 7}"),
    "half": ("a.jsonl", b'{"text": "\\ud800"}\n', None, "line 1 has no text in its field 'text'"),
    "no field": ("a.jsonl", b'{"id": 1, "body": "b"}', None, "has no field 'text'; it has id, body (field=)"),
    "other field": ("a.jsonl", b'{"text": "b"}', "body", "has no field 'body'; it has text (field=)"),
    "plain field": ("a.txt", b"abc", "body", "field=body is a field of .jsonl and .parquet files"),
    "no gzip": ("a.txt.gz", b"plain text", None, "a.txt.gz is damaged or cut short: Not a gzipped file"),
    "cut gzip": ("a.txt.gz", gzip.compress(TEXT.encode())[:-9], None, "a.txt.gz is damaged or cut short"),
    "no zst": ("a.txt.zst", b"plain text", None, "a.txt.zst is damaged or cut short"),
    "no table": ("a.parquet", b"plain text", None, "a.parquet is damaged or cut short"),
    "blank": ("a.txt.gz", gzip.compress(b" \n\n"), None, "a.txt.gz is empty, or holds nothing but white space"),
    "far byte": ("a.txt", b"abc\n" * 9000 + b"ab\xff", None, "a.txt is not UTF-8: byte 36002 is 0xff"),
    "packed byte": ("a.txt.gz", gzip.compress(b"ab\xff"), None, "a.txt.gz is not UTF-8: a byte is 0xff"),
    "not there": ("a.txt", b"", None, "none.txt does not exist"),
}


def test_bad_files(tmp_path: Path) -> None:
    for name, (file, content, field, said) in BAD.items():
        path = tmp_path / file
        path.write_bytes(content)
        with pytest.raises(HeadwiseError) as refusal:
            for _ in Sources([tmp_path / "none.txt" if name == "not there" else path], field):
                pass
        assert said in str(refusal.value) and "\n" not in str(refusal.value), name
    parquet.write_table(pyarrow.table({"text": pyarrow.array([b"ab\xff"]).view("string")}), tmp_path / "b.parquet")
    refuses(lambda: list(Sources([tmp_path / "b.parquet"])), "b.parquet is not UTF-8: a byte is 0xff")
    with pytest.raises(HeadwiseError, match="holds no text files"):
        (tmp_path / "empty").mkdir()
        Sources([tmp_path / "empty"])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(HeadwiseError, match="needs pyarrow: pip install"):
        patch.setitem(__import__("sys").modules, "pyarrow", None)
        list(Sources([tmp_path / "a.parquet"]))


def test_a_small_table_of_large_records_takes_the_memory_of_one(tmp_path: Path) -> None:
    pool, size = pyarrow.proxy_memory_pool(pyarrow.default_memory_pool()), 2**20
    parquet.write_table(
        pyarrow.table({"text": ["a b " * (size // 4)] * 50}), tmp_path / "same.parquet", compression="zstd"
    )
    before = pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(pool)
    tracemalloc.start()
    try:
        assert sum(len(piece) for _, piece in Sources([tmp_path / "same.parquet"])) == 50 * size
        largest = pool.max_memory() + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pyarrow.set_memory_pool(before)
    assert largest < 10 * size  # pyarrow's page, dictionary and batch; the record as a text and as bytes


def test_a_column_that_unpacks_to_more_than_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.parquet"
    texts = [f"{n} " + "a b " * 2**15 for n in range(9)]  # each another, so that no dictionary holds them
    parquet.write_table(pyarrow.table({"text": texts, "n": ["x"] * 9}), path, compression="zstd", use_dictionary=False)
    monkeypatch.setattr(sources, "MOST_TEXT", 2**20)
    refuses(lambda: list(Sources([path])), r"bytes of its column text unpack to 1,\d+,\d+; at most 1,048,576, or 100")
    assert len(list(Sources([path], "n"))) == 9  # the large column is not read
    monkeypatch.setattr(sources, "MOST_PACKING", 2**20)  # a text that packs well may be large
    assert len(list(Sources([path]))) == 9


def test_a_pipe_among_kept_tokens(tmp_path: Path, large: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    corpus_of([path], False)
    (tokens,) = large.glob("*.tokens")
    for file in (tokens.with_suffix(".lock"), tokens):
        file.unlink(missing_ok=True)
        os.mkfifo(file)
        refuses(lambda: corpus_of([path], False), "is a pipe or a device")
        file.unlink()


def test_a_disk_without_room(tmp_path: Path, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    monkeypatch.setattr(documents.shutil, "disk_usage", lambda folder: SimpleNamespace(free=7_000))
    said = f"take about {2 * len(TEXT.encode()):,} bytes, and .* has 7,000 free; make room, or name another folder"
    refuses(lambda: corpus_of([path], False), said)
    assert not [*large.glob("*.tokens"), *large.glob(".*")]


def test_a_run_on_a_large_text_goes_on_to_the_same_bytes(tmp_path: Path, large: Path) -> None:
    forms = write_forms(tmp_path / "forms")
    texts = tuple(str(path) for path in forms["two files"])
    shape = {"n_layers": 1, "n_heads": 2, "d_model": 12, "context": 11}
    settings = Settings("nanogpt", texts, steps=23, shape=shape, field="body")
    run_training(tmp_path / "whole", settings, quiet, resume=False, n_samples=0)
    with pytest.raises(Stopped):
        run_training(tmp_path / "stopped", settings, stop, resume=False, n_samples=0)
    shutil.rmtree(large)  # it is made again
    run_training(tmp_path / "stopped", settings, quiet, resume=True, n_samples=0)
    weights = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("whole", "stopped")]
    assert weights[0] == weights[1]
    assert held_out_documents(tmp_path / "whole", 50) == held_out_documents(tmp_path / "stopped", 50)
    forms["two files"][0].write_text("another text\n" * 99)
    refuses(lambda: held_out_documents(tmp_path / "whole", 50), "was trained on has changed")


def test_documents_of_a_survey(tmp_path: Path, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Tokens.characters(TEXT, boundary=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text(tokens.to_json())
    model = GPT(GPTConfig(vocab_size=len(tokens), context=60, n_layers=1, n_heads=2, d_model=12))
    folder = Folder(tmp_path / "model", model, tokens, 60, "headwise", len(tokens))
    forms = write_forms(tmp_path / "forms")

    def documents(name: str, size: int | None, **options: Any) -> list[str]:
        paths = [str(path) for path in forms[name]]
        text = read_documents(folder, paths, size, options.get("most"), field=options.get("field"))
        return [tokens.decode(ids) for ids in text.documents]

    cut = documents("plain.txt", 17)
    assert "".join(cut) == TEXT and {len(piece) for piece in cut[:-1]} == {16}
    assert documents("packed.md.zst", 17) == documents("windows.txt", 17) == cut
    assert documents("records.jsonl", None, field="body") == documents("table.parquet", None, field="body") == LINES
    assert len([*large.glob("*.tokens")]) == 5
    encode: Callable[[str], list[int]] = tokens.encode
    monkeypatch.setattr(tokens, "encode", lambda text: pytest.fail("the text is read again"))
    assert documents("plain.txt", 17) == cut
    monkeypatch.setattr(tokens, "encode", encode)
    assert documents("records.jsonl", None, most=3, field="body") == LINES[:3]
    assert len([*large.glob("*.tokens")]) == 5  # a part is not kept
    whole = documents("plain.txt", None)  # longer than the context
    assert "".join(whole) == TEXT and {len(piece) for piece in whole[:-1]} == {59}
