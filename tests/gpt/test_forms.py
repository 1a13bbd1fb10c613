"""Hugging Face reads our folders: the same logits and ids. What is wrong with a folder is said in one error."""

import json
import os
import pickle
import random
import shutil
import tomllib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import every, refuses
from safetensors.torch import load_file, save_file
from small_models import tiny

from headwise import HeadwiseError
from headwise.corpus.tokens import Tokens
from headwise.gpt.checkpoint import hf_form, load_model, save_model
from headwise.gpt.gpt import GPT, generate

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


Damage = Callable[[Path], object]
TOKENS = Tokens.characters("abcdefghijklmnopqrs", boundary=False)
WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"


@pytest.fixture(params=["llama", "nanogpt", "microgpt"])
def folder(request: Any, tmp_path: Path) -> Path:
    """A sound model folder, one for each kind of names."""
    save_model(tmp_path / "run", tiny(request.param), TOKENS)
    return tmp_path / "run"


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    save_model(tmp_path / "run", tiny("llama"), TOKENS)
    return tmp_path / "run"


def refusal(folder: Path) -> str:
    with pytest.raises(HeadwiseError) as caught:
        load_model(folder)
    return str(caught.value)


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    config["headwise"].update(changes)
    (folder / CONFIG).write_text(json.dumps(config))


class Trap:
    """Opening this pickle creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def sprung(tmp_path: Path) -> Path:
    """The file that a trap creates. A trap that is opened does create it."""
    path = tmp_path / "sprung"
    pickle.loads(pickle.dumps(Trap(path)))
    assert path.exists()
    path.unlink()
    return path


def test_cut_short_at_any_point(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    rng = random.Random(0)
    cuts = {0, 1, 7, 8, 9, header - 1, header, header + 1, len(data) - 1, *rng.sample(range(len(data)), 30)}
    for cut in cuts:
        (folder / WEIGHTS).write_bytes(data[:cut])
        message = refusal(folder)
        assert f"{WEIGHTS} is damaged or cut short ({cut} bytes)" in message


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", [WEIGHTS, CONFIG, TOKENIZER])
def test_no_file_of_the_folder_is_unpickled(sound: Path, sprung: Path, protocol: int, name: str) -> None:
    (sound / name).write_bytes(pickle.dumps(Trap(sprung), protocol=protocol))
    assert name in refusal(sound)
    assert not sprung.exists()


def test_a_pickle_is_refused_by_its_contents_and_by_its_name(sound: Path, sprung: Path) -> None:
    for new_format in (True, False):
        torch.save({"a": Trap(sprung)}, sound / WEIGHTS, _use_new_zipfile_serialization=new_format)
        assert "is damaged or cut short" in refusal(sound)
    (sound / WEIGHTS).unlink()
    for name in ("pytorch_model.bin", "model.pt", "model.pth", "last.ckpt", "weights.pkl"):
        path = sound / name
        torch.save({"a": Trap(sprung)}, path)
        assert f"{name} is a pickle, which can run code; convert it to model.safetensors" in refusal(sound)
        path.unlink()
    assert not sprung.exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers(sound: Path, value: float) -> None:
    tensors = load_file(sound / WEIGHTS)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, sound / WEIGHTS)
    assert "has NaN or inf in model.layers.1.mlp.up_proj.weight; the model is not usable" in refusal(sound)


def holding(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def configured(**changes: Any) -> Damage:
    return lambda folder: change_config(folder, **changes)


NO_FIT = "holds weights that do not fit its config.json"
NOTHING_OF_OURS = (b"{}", b'{"model_type": "llama"}', b'{"headwise": 3}', b'{"headwise": {}}', b'{"headwise": null}')
WRONG_FIELDS = [{"n_layers": n} for n in (1.5, "2", None, 0)] + [{"d_ff": -3}, {"d_ff": "wide"}, {"n_brains": 3}]
WRONG_FIELDS += [{"vocab_size": 19.5}, {"d_model": 24.0}, {"n_kv_heads": "x"}, {"norm_eps": "small"}, {"dropout": 2}]
WRONG_FIELDS += [{"rope_theta": None}, {"context": "long"}, {"activation": ["silu"]}]
OTHER_SIZES = [{"d_ff": 29}, {"d_model": 12}, {"vocab_size": 23}, {"n_layers": 3}, {"n_kv_heads": 3}, {"qk_norm": True}]
REFUSED: list[tuple[Damage, str]] = [
    (lambda folder: (folder / WEIGHTS).unlink(), "has no model.safetensors: it is no model folder, or not finished"),
    (lambda folder: (folder / CONFIG).unlink(), "has no config.json"),
    (lambda folder: (folder / TOKENIZER).unlink(), "has no tokenizer.json"),
    (lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes() + b"more"), "damaged or cut short"),
    (lambda folder: save_file({}, folder / WEIGHTS), NO_FIT),
    *((holding(CONFIG, content), f"{CONFIG} is no JSON") for content in (b"", b"{", b"no json", b"\xff\xfe{}")),
    *((holding(CONFIG, content), f"{CONFIG} holds no fields") for content in (b"[]", b"3", b"null")),
    *((holding(CONFIG, content), f"{CONFIG} does not describe a headwise model") for content in NOTHING_OF_OURS),
    *((holding(TOKENIZER, content), f"{TOKENIZER} is no tokenizer file") for content in (b"{", b"{}")),
    *((holding(TOKENIZER, text), words) for text, words in ((b"", "json is empty"), (b"\xff", "json is not UTF-8"))),
    *((configured(**changes), next(iter(changes))) for changes in WRONG_FIELDS),
    # Half a model is not a model: no tensor of the file is left out in silence.
    *((configured(**changes), NO_FIT) for changes in [*OTHER_SIZES, {"n_layers": 1}, {"tied": True}]),
]


@every("damage, said", REFUSED, [str(n) for n in range(len(REFUSED))])
def test_a_damaged_folder_is_refused_and_says_why(damage: Damage, said: str, sound: Path) -> None:
    folder = sound.with_name("damaged")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder)
    damage(folder)
    assert said in refusal(folder)
    assert "is no folder; pass a run folder" in refusal(sound / CONFIG)
