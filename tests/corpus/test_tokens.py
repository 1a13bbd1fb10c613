"""Text to ids and back: characters, words, and any tokenizer file."""

import json
from pathlib import Path
from typing import Any

import pytest
from cases import refuses, refuses_table
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headwise.corpus.tokens import BOUNDARY, Tokens

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


@pytest.fixture
def bpe(tmp_path: Path) -> Path:
    """A small byte-level BPE, as GPT-2 has one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[BOUNDARY],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the cat that sat"] * 7, trainer)
    tokenizer.save(str(tmp_path / "bpe.json"))
    return tmp_path / "bpe.json"


def saved(tokens: Tokens, folder: Path) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(tokens.to_json(), encoding="utf-8")
    return path


@given(texts, st.booleans())
@example("a\n\n\r\n  b", True)
def test_characters(text: str, boundary: bool) -> None:
    """They are looked up directly, for speed; the library's own way must agree."""
    tokens = Tokens.characters(text, boundary)
    library = Tokenizer.from_str(tokens.to_json())
    library.encode_special_tokens = True  # a text may be "<|end|>", as characters
    ids = tokens.encode(text)
    assert tokens.decode(ids) == text
    assert [sorted(set(text))[i] for i in ids] == list(text)
    assert library.encode(text, add_special_tokens=False).ids == ids
    assert library.decode(ids, skip_special_tokens=False) == text


def test_words(tmp_path: Path) -> None:
    tokens = Tokens.words(["él habló =", "tú hablas"])
    assert len(tokens) == 6
    assert tokens.decode(tokens.encode("tú  habló\t=")) == "tú habló ="
    assert tokens.document("tú") == [5, tokens.encode("tú")[0], 5]
    tokens = Tokens.words(["I work , you work , he works"])
    for reader in (tokens, Tokens.from_file(saved(tokens, tmp_path))):
        assert reader.decode(reader.encode("I work, you work,he")) == "I work , you work , he"
        assert reader.places("I work, you") == [(0, 1), (2, 6), (6, 7), (8, 11)]
    assert len(Tokens.words(["1,000 , 2"]).encode("1,000 , 2")) == 3  # where commas are parts of words, they stay so
    assert Tokens.words(["a b c"]).encode("c  a") == [2, 0]
    tokens = Tokens.words(["I sing . = yo canto ."])
    for reader in (tokens, Tokens.from_file(saved(tokens, tmp_path))):
        assert reader.encode("i SING. = Yo canto.") == reader.encode("I sing . = yo canto .")
        for blank in ("____.", "…", "...", "... "):
            assert reader.prompt(f"I sing. = yo {blank}") == reader.prompt("I sing . = yo"), blank
        assert reader.prompt("I sing...") == reader.prompt("I sing . . .")
        refuses(lambda r=reader: r.prompt("I ___ = yo canto"), "___ stands before '= yo canto', .* put it last")


def test_any_tokenizer_file_will_do(bpe: Path) -> None:
    tokens, library = Tokens.from_file(bpe), Tokenizer.from_file(str(bpe))
    text = "the mat, ñandú \U0001f600!\n"
    assert tokens.encode(text) == library.encode(text).ids
    assert tokens.decode(tokens.encode(text)) == text
    assert len(tokens.encode("the cat sat")) < len("the cat sat")
    assert len(tokens) == library.get_vocab_size()
    assert tokens.boundary == 0


def test_a_typed_boundary_is_ordinary_text(bpe: Path) -> None:
    for tokens in (Tokens.characters(BOUNDARY + "the ", boundary=True), Tokens.from_file(bpe)):
        ids = tokens.encode("the " + BOUNDARY)
        assert tokens.boundary not in ids and len(ids) > 2
        assert tokens.decode(ids) == "the " + BOUNDARY


def test_boundaries() -> None:
    assert Tokens.characters("ab", boundary=False).prompt("ba") == [1, 0]
    tokens = Tokens.characters("ab", boundary=True)
    assert tokens.prompt("ba") == [2, 1, 0] and tokens.prompt("") == [2]
    assert tokens.document("ab") == [2, 0, 1, 2]
    assert tokens.decode([2, 0, 2, 1, 2]) == "ab"
    assert tokens.shown([2, 0, 1]) == (BOUNDARY, "a", "b")


def test_unknown_characters_are_named() -> None:
    for boundary in (True, False):
        refuses_table("characters", {"ab": Tokens.characters("ab\n", boundary)})


def test_the_first_token_stands_for_the_unknown_where_there_is_neither_boundary_nor_space() -> None:
    """Not any token: the same text gives the same file in every process."""
    tokens = Tokens.characters("nopqrstuvwxyzabcdefghijklm", boundary=False)
    assert json.loads(tokens.to_json())["model"]["unk_token"] == "a" and tokens.unknown is None  # for other readers
    assert len(Tokens.characters("", boundary=False)) == 0


BY_CHARACTER = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
PIECES = {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0], ["b", -2.0]]}
WORDS = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "[UNK]"}
STRIP = {"type": "Strip", "strip_left": True, "strip_right": True}


def written(path: Path, **parts: Any) -> Path:
    """A tokenizer file of two words, with other parts."""
    path.write_text(json.dumps({"version": "1.0", "model": WORDS, **parts}))
    return path


LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"

    def read(content: str) -> Tokens:
        path.write_text(content)
        return Tokens.from_file(path)

    def made(**parts: Any) -> Tokens:
        return Tokens.from_file(written(path, **parts))

    refuses_table("tokenizers", globals() | {"read": read, "made": made, "folder": tmp_path})
    assert made(normalizer=LONGER).encode("a") == [0]
    assert made(model=PIECES | {"unk_id": 1}).unknown == 1


def test_a_tokenizer_file_neither_cuts_a_text_nor_fills_it_up(tmp_path: Path) -> None:
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    filled = {"strategy": {"Fixed": 7}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    filled |= {"pad_type_id": 0, "pad_token": "a"}
    for parts in ({"truncation": cut}, {"padding": filled}):
        path = written(tmp_path / "tokenizer.json", normalizer=STRIP, pre_tokenizer=BY_CHARACTER, **parts)
        assert Tokens.from_file(path).encode("aaaaa") == [0] * 5
