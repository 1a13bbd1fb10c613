"""The door to transformers: what it opens, what it refuses by name, that it is silent; weights read and written."""

import io
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from cases import every, refuses
from invoking import Invoke
from safetensors.torch import load_file, save_file
from small_models import shaken
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers.utils import logging

from headwise.families import FAMILIES, OURS, has_tokenizer
from headwise.models.ask import answers
from headwise.models.hf import FolderTokens, load_folder
from headwise.models.sites import is_hf
from headwise.models.weights import cannot_carry, head_counts, read_layers, with_layers

V = 19
SMALL: dict[str, Any] = {"vocab_size": V, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2() -> Any:
    torch.manual_seed(0)
    config = tf.GPT2Config(n_embd=21, n_layer=2, n_head=3, n_positions=23, **SMALL)
    return tf.GPT2LMHeadModel(config).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of transformers, as it saves itself."""
    gpt2().save_pretrained(tmp_path)
    return tmp_path


def words(folder: Path, framed: bool) -> None:
    """A tokenizer of nine words, which puts [CLS] before a text and [SEP] behind it, or nothing."""
    vocabulary = {word: n for n, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", "a", "b", "c", "d", "e"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if framed:
        made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 1), ("[SEP]", 2)])
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    tf.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)


def test_folders_of_weights(folder: Path) -> None:
    # With its own class, in eval mode, and the weights that were saved.
    model = load_folder(folder)
    assert type(model) is tf.GPT2LMHeadModel and not model.training
    ids = torch.arange(7)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, gpt2()(ids).logits)
    (folder / "pytorch_model.bin").write_bytes(b"no pickle at all")  # beside the weights it is not opened
    assert is_hf(load_folder(folder))
    (folder / "model.safetensors").unlink()
    gpt2().save_pretrained(folder, max_shard_size="5KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    model = load_folder(folder)
    for one, other in zip(model.parameters(), gpt2().parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_library_is_silent(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # No bar, no warning, on neither stream; and the library speaks afterwards as it did before.
    words(folder, framed=True)
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    capfd.readouterr()
    load_folder(folder)
    tokens = FolderTokens(folder)
    tokens.encode("a b " * 999)
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    (folder / "model.safetensors").write_bytes(b"")
    refuses(lambda: load_folder(folder), "does not load as GPT2LMHeadModel")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def change(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


Damage = Callable[[Path], object]
WEIGHTS, PROJECTION = "model.safetensors", "transformer.h.1.attn.c_proj.weight"
LOADS = "does not load as GPT2LMHeadModel: "


def with_tensor(tensor: torch.Tensor | None) -> Damage:
    """Another tensor in the place of one, or none. Random numbers there would be reported as the model's own."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        del tensors[PROJECTION]
        save_file(tensors if tensor is None else {**tensors, PROJECTION: tensor}, folder / WEIGHTS, {"format": "pt"})

    return damage


def without_a_shard(folder: Path) -> None:
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    (folder / WEIGHTS).rename(folder / names[0])
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": dict(enumerate(names))}))


REFUSED: list[tuple[Damage | dict[str, Any] | bytes, str]] = [
    (lambda folder: (folder / WEIGHTS).rename(folder / "last.ckpt"), "last.ckpt is a pickle, which can run code; conv"),
    (lambda folder: (folder / WEIGHTS).unlink(), r"has no model\.safetensors: it is no model folder, or not finished$"),
    (lambda folder: (folder / WEIGHTS).write_bytes(b""), LOADS),
    (lambda folder: os.truncate(folder / WEIGHTS, 3000), LOADS),
    (without_a_shard, LOADS),
    (with_tensor(None), r"h\.1\.attn\.c_proj\.weight"),
    (with_tensor(torch.zeros(3, 5)), LOADS),
    (with_tensor(torch.full((21, 21), math.nan)), rf"has NaN or inf in {re.escape(PROJECTION)}"),
    ({"architectures": ["NoSuchModel"]}, f"NoSuchModel, which is no model of transformers {tf.__version__}$"),
    ({"architectures": ["pipeline"]}, "names the architecture pipeline"),  # of the library, and no model
    ({"architectures": [5]}, r"config\.json"),
    *(({name: value}, LOADS) for name, value in (("n_embd", "wide"), ("n_head", 0), ("n_head", 4), ("n_embd", -3))),
    *((content, "is no JSON: ") for content in (b"{", b"", b"\xff\xfe\x80")),
    (b"[1]", "holds no fields$"),
    (lambda folder: (folder / "config.json").unlink(), "no config.json: it is neither a run of headwise nor a model"),
]


@every("damage, said", REFUSED, map(str, range(len(REFUSED))))
def test_a_damaged_folder_is_refused(damage: Any, said: str, folder: Path, tmp_path_factory: Any) -> None:
    folder = shutil.copytree(folder, tmp_path_factory.mktemp("damaged") / "gpt2")
    if isinstance(damage, dict):
        change(folder, **damage)
    elif isinstance(damage, bytes):
        (folder / "config.json").write_bytes(damage)
    else:
        damage(folder)
    refuses(lambda: load_folder(folder), said)


def test_without_a_named_architecture_it_is_the_body(folder: Path) -> None:
    change(folder, architectures=None)
    model = load_folder(folder)
    assert type(model) is tf.GPT2Model
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, gpt2().transformer.state_dict()[name])


def test_a_tokenizer_that_fails_says_so() -> None:
    broken = tf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, unk_token="[UNK]")))
    refuses(lambda: FolderTokens(broken), r"cannot tokenise: WordLevel error: Missing \[UNK\]")


@pytest.mark.parametrize("framed", [True, False])
def test_frame_and_what_is_shown(folder: Path, framed: bool) -> None:
    assert not has_tokenizer(folder)
    words(folder, framed)
    assert has_tokenizer(folder)
    tokens = FolderTokens(folder)
    assert tokens.frame == (([1], [2]) if framed else ([], []))
    assert tokens.encode("a c b") == [4, 6, 5]
    assert len(tokens) == 9 and tokens.specials == {0, 1, 2, 3}
    assert tokens.shown([1, 4, 6, 2]) == ("[CLS]", "a", "c", "[SEP]")
    assert tokens.shown([4, 9]) == ("a", "[9]")  # a row of the embedding that is nobody's


def test_bytes_that_are_no_character_show_as_the_vocabulary_writes_them(folder: Path) -> None:
    made = Tokenizer(models.BPE({"a": 0, "Ġ": 1, "Ã": 2, "¤": 3}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tf.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    tokens = FolderTokens(folder)
    assert tokens.encode("a ä") == [0, 1, 2, 3]
    assert tokens.shown([0, 1, 2, 3]) == ("a", " ", "Ã", "¤")


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"model": {"type": "BPE"}}', ""])
def test_damaged_tokenizers(folder: Path, text: str) -> None:
    words(folder, framed=True)
    (folder / "tokenizer.json").write_text(text)
    refuses(lambda: FolderTokens(folder), r"^the tokenizer of .* does not load: .*; pass ids=$")


MARKER = "import pathlib\npathlib.Path(__file__).parent.joinpath('ran').write_text('x')\n"


@pytest.mark.slow
@pytest.mark.parametrize("part", ["config", "architecture", "no architecture", "tokenizer"])
def test_code_of_a_folder_never_runs(part: str, folder: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where `y` stands on standard input, which transformers would take for consent."""
    (folder / "foreign.py").write_text(MARKER + "class Foreign: pass\n")
    config = json.loads((folder / "config.json").read_text())
    words(folder, framed=False)
    if part == "tokenizer":
        given = json.loads((folder / "tokenizer_config.json").read_text())
        given |= {"tokenizer_class": "Foreign", "auto_map": {"AutoTokenizer": ["foreign.Foreign", None]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(given))
        (folder / "tokenizer.json").rename(folder / "vocab.txt")
    else:
        config["auto_map"] = {"AutoConfig": "foreign.Foreign", "AutoModelForCausalLM": "foreign.Foreign"}
        config["auto_map"]["AutoModel"] = "foreign.Foreign"
    if part == "architecture":
        config |= {"architectures": ["Foreign"], "model_type": "foreign"}
    if part == "no architecture":
        config |= {"architectures": None, "model_type": "foreign"}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    code, out, err = invoke("heads", folder, "--text", "a b c d e a b", "--json")
    assert not list(folder.rglob("ran")) and "[y/N]" not in out + err
    if part == "config":  # transformers has this class itself
        assert code == 0, err
    else:
        assert code == 2 and "auto_map), which headwise never runs" in " ".join(err.split())


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"])
def test_the_attention_that_a_config_names_is_not_taken(field: str, folder: Path) -> None:
    change(folder, **{field: "somebody/kernels"})
    model = load_folder(folder)
    assert model.config._attn_implementation in ("sdpa", "eager")


SIZES: dict[str, Any] = {
    "vocab_size": 19, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 6,
    "max_position_embeddings": 41, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 6, "n_positions": 41, "vocab_size": 19}
NAMES = sorted(set(FAMILIES) - {OURS})


def build(name: str, n_kv_heads: int = 3) -> Any:
    """A small model of a family without its language-model head, its weights far from their first values."""
    kind = tf.models.auto.configuration_auto.CONFIG_MAPPING[name]
    sizes = GPT2 if name == "gpt2" else dict(SIZES)
    defaults = kind().to_dict()
    if "num_key_value_heads" in defaults:
        sizes["num_key_value_heads"] = n_kv_heads
    if defaults.get("head_dim") is not None or name in ("qwen3", "qwen3_moe", "ministral"):
        sizes["head_dim"] = 4
    if "moe_intermediate_size" in defaults:
        sizes |= {"moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}
    torch.manual_seed(0)
    return shaken(tf.AutoModel.from_config(kind(**sizes)), size=0.1)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_can_be_written(name: str) -> None:
    """Heads in another order, key/value heads with theirs, are the same function; other weights are another one."""
    model, ids = build(name), torch.arange(7)[None] + 3
    n_kv_heads = head_counts(model)[1]
    expected = answers(model, ids)
    turned = with_layers(model, [layer.permuted(list(range(n_kv_heads))[::-1]) for layer in read_layers(model)])
    assert not torch.equal(read_layers(turned)[0].wq, read_layers(model)[0].wq)
    assert (answers(turned, ids) - expected).abs().max() < 1e-5 * expected.abs().max()
    silent = with_layers(model, [layer.selected(range(6), range(n_kv_heads)) for layer in read_layers(model)])
    read_layers(silent)[0].wo[:, 2] = 0
    assert (answers(silent, ids) - expected).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_heads_that_are_twins_may_share_or_go(name: str) -> None:
    """A model whose three key/value heads are alike is the model that has one of them."""
    model, ids = build(name), torch.arange(7)[None] + 3
    n_heads, n_kv_heads, _ = head_counts(model)
    if n_kv_heads == n_heads:
        assert "no num_key_value_heads" in str(cannot_carry(model, 6, 2))
        return
    layers = [layer.selected(range(6), [0] * 3) for layer in read_layers(model)]
    twins = with_layers(model, layers)
    child = with_layers(twins, [layer.selected(range(6), [0]) for layer in read_layers(twins)], 6, 1)
    assert head_counts(child)[:2] == (6, 1) and child.config.num_key_value_heads == 1
    expected = answers(twins, ids)
    assert (answers(child, ids) - expected).abs().max() < 1e-5 * expected.abs().max()
