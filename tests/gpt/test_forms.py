"""Hugging Face reads our folders: the same logits, the same ids, nothing missing and nothing left over."""

import json
import os
import tomllib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import refuses
from small_models import tiny

from headwise.corpus.tokens import Tokens
from headwise.gpt.checkpoint import hf_form, load_model, save_model
from headwise.gpt.generate import generate
from headwise.gpt.gpt import GPT

TEXT = "the quick brown fox jumps"
FORMS = tomllib.loads(Path(__file__).with_name("forms.toml").read_text(encoding="utf-8"))


def model_of(preset: str, vocab_size: int, changes: dict[str, Any]) -> GPT:
    """A tiny model of a preset with the changes of a table, in which "none" is None."""
    fields = {name: None if value == "none" else value for name, value in changes.items()}
    return tiny(preset, vocab_size, **fields)


@contextmanager
def quiet() -> Iterator[None]:
    """The library's own deprecations are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def hf() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with quiet():
        transformers = pytest.importorskip("transformers", reason="the forms need the extra hf")
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
    return transformers


@pytest.fixture
def tokens() -> Tokens:
    return Tokens.characters(TEXT, boundary=True)


def read_by_hf(hf: Any, folder: Path) -> Any:
    with quiet():
        model, report = hf.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not report[kind], kind
    return model.eval()


def same_bytes(one: GPT, other: GPT) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return list(a) == list(b) and all(a[n].numpy().tobytes() == b[n].numpy().tobytes() for n in a)


@pytest.mark.parametrize("variant", FORMS["carried"])
def test_hugging_face_gives_our_logits_and_bytes(hf: Any, tokens: Tokens, tmp_path: Path, variant: str) -> None:
    preset, form, changes = FORMS["carried"][variant]
    model = model_of(preset, len(tokens), changes)
    save_model(tmp_path, model, tokens)
    theirs = read_by_hf(hf, tmp_path)
    ids = torch.randint(len(tokens), (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(ids)
        assert (theirs(ids).logits - logits).abs().max() < 1e-5
        assert logits.std() > 0.1  # the comparison is not one of zeros
    assert theirs.config.tie_word_embeddings == model.config.tied
    assert theirs.config.model_type == form == hf_form(model.config)
    again, read = load_model(tmp_path)
    assert again.config == model.config and same_bytes(again, model)
    assert (again.lm_head.weight is again.token_embedding.weight) == model.config.tied
    assert not again.training
    assert read.encode(TEXT) == tokens.encode(TEXT)


@pytest.mark.parametrize("variant", FORMS["alone"])
def test_a_model_without_a_form_keeps_its_own_names(tokens: Tokens, tmp_path: Path, variant: str) -> None:
    preset, changes = FORMS["alone"][variant]
    model = model_of(preset, len(tokens), changes)
    assert hf_form(model.config) is None
    save_model(tmp_path, model, tokens)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "headwise"
    assert same_bytes(load_model(tmp_path)[0], model)


def test_a_bias_that_the_model_has_no_place_for_is_refused(hf: Any, tokens: Tokens, tmp_path: Path) -> None:
    """GPT-2 always has biases. One that was trained there cannot be dropped on the way back."""
    save_model(tmp_path, tiny("nanogpt", len(tokens)), tokens)
    theirs = read_by_hf(hf, tmp_path)
    with torch.no_grad(), quiet():
        theirs.transformer.h[1].mlp.c_fc.bias += 0.5
        theirs.save_pretrained(tmp_path)
    refuses(lambda: load_model(tmp_path), r"transformer\.h\.1\.mlp\.c_fc\.bias|blocks\.1\.feed_forward\.up\.bias")


@pytest.mark.parametrize("kind", ["characters", "words"])
def test_auto_tokenizer_gives_the_same_ids_and_text(hf: Any, tmp_path: Path, kind: str) -> None:
    ours = Tokens.characters(TEXT, boundary=True) if kind == "characters" else Tokens.words([TEXT])
    save_model(tmp_path, tiny("llama", len(ours)), ours)
    with quiet():
        theirs = hf.AutoTokenizer.from_pretrained(tmp_path)
    ids = ours.prompt(TEXT)
    assert theirs(TEXT)["input_ids"] == ids == [ours.boundary, *ours.encode(TEXT)]
    assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids) == TEXT
    assert len(theirs) == len(ours)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["bos_token_id"] == config["eos_token_id"] == ours.boundary


WORDS = ["he works = él trabaja", "yo trabajo , tú trabajas , él trabaja", "I work = yo trabajo"]
CORPORA: dict[str, tuple[str, Tokens]] = {  # name -> preset, tokens
    "verbs": ("verbs", Tokens.words(WORDS)),
    "llama lines": ("llama", Tokens.characters("".join(WORDS), boundary=True)),
    "llama": ("llama", Tokens.characters("".join(WORDS), boundary=False)),
}


@pytest.mark.parametrize("corpus", CORPORA)
def test_stock_generation_gives_our_text(hf: Any, tmp_path: Path, corpus: str) -> None:
    preset, tokens = CORPORA[corpus]
    model = tiny(preset, len(tokens), context=29)
    save_model(tmp_path, model, tokens)
    theirs, tokenizer = read_by_hf(hf, tmp_path), hf.AutoTokenizer.from_pretrained(tmp_path)
    for prompt in ("he works =", "yo trabajo ,", "I work = yo"):
        with quiet():
            ids = theirs.generate(**tokenizer(prompt, return_tensors="pt", return_token_type_ids=False))[0]
        start = tokens.prompt(prompt)
        ours = [*start, *generate(model, start, 29 - len(start), temperature=0, stops=[tokens.boundary])]
        assert ids.tolist()[: len(ours)] == ours and len(ids) - len(ours) == (len(ours) < 29)  # the end, said by one
        assert tokenizer.decode(ids, skip_special_tokens=True) == tokens.decode(ours)
