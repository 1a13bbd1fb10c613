"""Any model folder: ours, transformers', and what is neither."""

import gc
import json
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers as tf
from cases import refuses
from invoking import Invoke
from small_models import tiny

import headwise as hw
from headwise.corpus.tokens import BOUNDARY, Tokens
from headwise.families import is_own
from headwise.gpt.checkpoint import save_model
from headwise.gpt.gpt import GPT
from headwise.models.open import Folder, described, open_folder, open_model

TEXT = "the cat sat on the mat\nthe dog sat\n"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A model of ours with the characters of a text."""
    tokens = Tokens.characters(TEXT, boundary=True)
    save_model(tmp_path / "run", tiny("llama", vocab_size=len(tokens)), tokens)
    return tmp_path / "run"


def test_a_run_of_ours(run_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = open_folder(run_folder)
    assert isinstance(found, Folder) and isinstance(found.model, GPT) and not found.model.training
    assert found.family == "headwise" and found.context == 11 and found.name == "run"
    assert found.tokens is not None
    assert found.vocab_size == len(found.tokens) == found.model.config.vocab_size
    boundary = found.model.config.vocab_size - 1
    assert found.tokens.frame == ([boundary], []) and found.tokens.specials == {boundary}
    assert found.tokens.shown(found.tokens.encode("cat")) == ("c", "a", "t")
    assert capfd.readouterr() == ("", "")


def test_a_run_of_ours_read_by_transformers(run_folder: Path) -> None:
    """The same folder as any other: the same logits, ids and frame."""
    from headwise.models.hf import FolderTokens, load_folder

    found, ids = open_folder(run_folder), torch.arange(7)[None]
    with torch.no_grad():
        expected, logits = found.model(ids), load_folder(run_folder)(ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    tokens = FolderTokens(run_folder)
    assert found.tokens is not None
    assert tokens.encode("the mat") == found.tokens.encode("the mat")
    assert tokens.frame == found.tokens.frame and BOUNDARY not in tokens.shown([0, 1])


@pytest.mark.parametrize("name", [".", "run/../run"])
def test_the_name_of_a_folder(run_folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_folder if name == "." else run_folder.parent)
    assert open_folder(Path(name)).name == "run"


WIDE = {"hidden_size": 21, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 17}
FOREIGN: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 21, "n_layer": 1, "n_head": 3, "n_positions": 23}, 23),
    "bert": ("BertModel", {**WIDE, "max_position_embeddings": 29}, 29),
    "t5": ("T5ForConditionalGeneration", {"d_model": 21, "d_kv": 7, "num_layers": 1, "num_heads": 3, "d_ff": 17}, None),
}


@pytest.mark.parametrize("family", FOREIGN)
def test_a_folder_of_transformers(family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    name, sizes, context = FOREIGN[family]
    kind = getattr(tf, name)
    config = kind.config_class(vocab_size=19, bos_token_id=1, eos_token_id=2, decoder_start_token_id=0, **sizes)
    kind(config).save_pretrained(tmp_path / "model")
    capfd.readouterr()
    found = open_folder(tmp_path / "model")
    assert capfd.readouterr() == ("", "")
    assert type(found.model).__name__ == name and not found.model.training
    assert (found.family, found.context, found.vocab_size, found.tokens) == (family, context, 19, None)


def test_what_is_no_folder_or_a_pickle_or_not_finished(run_folder: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", run_folder / "config.json"):
        refuses(partial(open_folder, path), "is no folder")
    assert not is_own(tmp_path) and not is_own(tmp_path / "nowhere")
    (run_folder / "model.safetensors").rename(run_folder / "pytorch_model.bin")
    refuses(lambda: open_folder(run_folder), r"pytorch_model\.bin is a pickle, which can run code")
    (run_folder / "config.json").unlink()
    (run_folder / "run.json").write_text("{}")
    assert is_own(run_folder)
    refuses(lambda: open_folder(run_folder), r"run\.json is damaged")


def test_a_model_that_was_opened_remembers_its_folder_as_long_as_it_lives(tmp_path: Path) -> None:
    model, tokens = tiny("llama"), Tokens.characters("abcdefghijklmnopqr\n", boundary=False)
    save_model(tmp_path, model, tokens)
    reopened = open_model(str(tmp_path))
    folder = described(reopened)
    assert folder is not None and folder.model is reopened
    assert (folder.path, folder.family, folder.vocab_size, folder.context) == (tmp_path, "headwise", 19, 11)
    assert folder.tokens is not None and folder.tokens.decode(folder.tokens.prompt("abc")) == "abc"
    assert open_model(reopened) is reopened and described(model) is None
    known = weakref.ref(reopened)
    del reopened, folder
    gc.collect()
    assert known() is None


@pytest.fixture
def hub(tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub that holds someone/tiny, and no network."""
    import huggingface_hub

    repository = tmp_path / "hub" / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    run_folder.rename(repository / "snapshots" / "abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return repository


def test_a_name_on_the_hub_is_what_lies_in_its_cache(hub: Path) -> None:
    folder = described(hw.open("someone/tiny"))
    assert folder is not None and folder.name == "someone/tiny" and folder.path == hub / "snapshots" / "abc"


@pytest.mark.parametrize("begun", [True, False])  # False: the config alone, which was priced
def test_a_download_that_was_interrupted_goes_on(hub: Path, begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = hub / "snapshots" / "abc"
    whole, shards = snapshot / "model.safetensors", [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    part = (snapshot if begun else hub) / shards[0]
    whole.rename(part)
    if begun:
        (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(enumerate(shards))}))

    def download(name: str, local_files_only: bool = False, **options: Any) -> str:
        if not local_files_only:
            part.rename(whole)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert described(hw.open("someone/tiny")) is not None


def test_the_price_of_a_name_on_the_hub_needs_its_config_alone(hub: Path, invoke: Invoke) -> None:
    for weights in (hub / "snapshots" / "abc").glob("*.safetensors"):
        weights.unlink()
    outcome = invoke("cost", "someone/tiny", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["model"] == "someone/tiny"
    assert "someone/else is no folder here" in invoke("cost", "someone/else").err


def test_a_gguf_file_is_priced_by_its_fields(tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    asked: list[Any] = []

    def told(folder: Path, gguf_file: str, **more: Any) -> tf.LlamaConfig:
        asked.append(folder / gguf_file)
        return tf.LlamaConfig(hidden_size=36, num_attention_heads=6, num_key_value_heads=2)

    monkeypatch.setattr(tf.AutoConfig, "from_pretrained", told)
    price = json.loads(invoke("cost", str(tmp_path / "small.gguf"), "--json").out)
    assert (price["model"], price["d_model"], asked) == ("small", 36, [tmp_path / "small.gguf"])
    assert any("however the file packs them" in note for note in price["notes"])
    assert hw.price(tmp_path / "small.gguf", context=7).d_model == 36


SMALL = {"hidden_size": 12, "intermediate_size": 7, "num_hidden_layers": 1, "num_attention_heads": 3, "vocab_size": 11}


def test_bfloat16_is_float32_on_a_processor_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL)).bfloat16().save_pretrained(tmp_path)
    for there, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("headwise.models.open.has_bfloat16", lambda there=there: there)
        assert hw.open(tmp_path).dtype == dtype
        assert hw.open(tmp_path, dtype="bf16").dtype == torch.bfloat16


def test_a_text_of_a_chat_template_has_one_beginning(tmp_path: Path) -> None:
    from headwise.models.hf import FolderTokens

    letters = {text: i for i, text in enumerate(["<s>", "</s>", "a", "b"])}
    layout = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="b"))
    layout.add_special_tokens(["<s>", "</s>"])
    layout.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    layout.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokens = FolderTokens(tf.PreTrainedTokenizerFast(tokenizer_object=layout, bos_token="<s>", eos_token="</s>"))
    assert tokens.frame == ([0], [])
    assert tokens.prompt("<s>ab") == tokens.prompt("ab") == [0, 2, 3]
    assert tokens.encode("<s>ab") == tokens.encode("ab") and tokens.places("<s>ab") == [(3, 4), (4, 5)]
    assert tokens.encode("<s>") == [0] and tokens.prompt("<s><s>a") == [0, 0, 2]  # what is typed beyond stays


def test_names_that_are_not_to_be_had(hub: Path, tmp_path: Path) -> None:
    refuses(lambda: hw.open("someone/else"), r"someone/else is no folder here.*`hf download someone/else`")
    refuses(lambda: hw.open("hub/else"), "hub/else is no folder; pass a run folder")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refuses(
        lambda: hw.open(tmp_path / "model.gguf"),
        r"GGUF file; .*from_pretrained\('.*', gguf_file='model.gguf'\).*headwise.open\(model\)$",
    )
    refuses(lambda: hw.price(tmp_path / "model.gguf"), r"model.gguf does not load: ")
