"""`share` and `prune` as functions: what they take and hand back, the model left alone; damage; half precision."""

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from cases import refuses, refuses_table
from reshape_models import ROTARY, build, plain_mean, texts
from torch import nn

from headwise import HeadwiseError, KVCache
from headwise.cli import reshape as commands
from headwise.gpt.gpt import GPT
from headwise.gpt.run import Settings, run_training
from headwise.models.ask import cache_in
from headwise.models.hf import load_folder
from headwise.models.open import open_folder
from headwise.models.weights import cast, head_counts, read_layers
from headwise.reshape import job
from headwise.reshape.align import moments
from headwise.reshape.heal import cache_bytes, compared, measure
from headwise.reshape.job import Options, Reshaped, verify
from headwise.reshape.prune import prune, prune_heads
from headwise.reshape.share import share, share_heads

IDS = torch.randint(31, (20, 13), generator=torch.Generator().manual_seed(4))
LETTERS = "the cat sat on the mat, and the dog ran to the barn.\n" * 29


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("functions")
    (folder / "a book.txt").write_text(LETTERS)
    shape = {"n_layers": 2, "n_heads": 6, "n_kv_heads": 6, "head_dim": 4, "d_model": 24, "d_ff": 29, "context": 17}
    settings = Settings("llama", (str(folder / "a book.txt"),), steps=30, shape=shape)
    run_training(folder / "run", settings, lambda progress: None, resume=False, n_samples=0)
    return folder / "run"


@pytest.mark.parametrize("name", ["rope", "llama", "granite", "phi3", "starcoder2"])
def test_a_model_in_memory_is_shared_and_left_as_it_was(name: str) -> None:
    model = build(name, dtype=torch.float32).train()
    next(model.parameters()).requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    child = share(model, 3, text=IDS, heal=2)
    assert head_counts(child.model)[1] == 3 and not child.model.training
    assert all(parameter.requires_grad for parameter in child.model.parameters())
    assert child.healed is not None and child.damage.kl > 0
    assert (child.out, child.verified, child.run) == (None, None, None)
    assert child.details["healing"]["steps_made"] == 2  # type: ignore[index]
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert [parameter.requires_grad for parameter in model.parameters()].count(False) == 1


def test_prune_takes_names_or_a_share_that_stays() -> None:
    model = build("rope", dtype=torch.float32)
    assert prune(model, ["L0.H1", "L1.H3"], text=IDS).details["heads"] == ["L0.H1", "L1.H3"]
    child = prune(model, keep=0.75, text=IDS)
    assert len(child.details["heads"]) == 3 and len(child.details["scores"]) == 12  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_text_is_a_file_a_string_or_ids(run: Path) -> None:
    source = open_folder(run)
    assert source.tokens is not None
    ids = source.tokens.encode(LETTERS)
    texts = (
        None, run.parent / "a book.txt", str(run.parent / "a book.txt"), LETTERS, ids, torch.tensor(ids),
        np.array(ids),
    )  # fmt: skip
    damages = [share(source.model, 2, text=text).damage for text in texts]
    assert len({(damage.loss, damage.kl) for damage in damages}) == 1
    refuses(lambda: share(source.model, 2, text="nowhere.txt"), r"there is no file nowhere\.txt")
    refuses(lambda: share(source.model, 2, text="the cat"), "the text is too short")


@pytest.mark.slow
def test_an_opened_model_is_written_with_its_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "verify", lambda *arguments: "not verified")
    opened = open_folder(run).model
    heard: list[Any] = []
    child = share(opened, 2, out=tmp_path / "child", listener=heard.append)
    assert child.verified == "not verified"
    assert heard[0].startswith("making the change by ") and heard[-1] == "reading it back"
    assert any(isinstance(event, Reshaped) and event.damage == child.damage for event in heard)
    assert json.loads((tmp_path / "child" / "headwise.json").read_text()) == child.document()
    assert child.run is not None and (tmp_path / "child" / child.run).resolve() == run
    assert child.document()["damage"] == share(run, 2).document()["damage"]


def test_what_does_not_fit_or_changes_nothing_is_refused_and_not_written(tmp_path: Path) -> None:
    model, gpt2 = build("rope", dtype=torch.float32), build("gpt2", dtype=torch.float32)
    silent = prune(gpt2, ["L0.H1"], text=IDS).model
    names = {"model": model, "gpt2": gpt2, "silent": silent, "out": tmp_path / "out"}
    refuses_table("functions", globals() | names)
    assert list(tmp_path.iterdir()) == []
    assert prune(silent, ["L0.H1", "L1.H2"], text=IDS).details["heads"] == ["L0.H1", "L1.H2"]


def test_an_editor_knows_the_options() -> None:
    for function in (share, prune):
        assert inspect.signature(function).parameters["options"].annotation == "Unpack[Options]"
    for command in (commands.share, commands.prune):
        missing = Options.__annotations__.keys() - inspect.signature(command).parameters.keys()
        assert not missing
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        share(build("rope"), 1, colour=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in ("rope", "rope, GQA", "mistral", "gemma3, tied", "gpt2")]
    + [("rope", torch.bfloat16), ("llama", torch.bfloat16)],
)
def test_the_bytes_of_a_cache_are_those_of_a_cache(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype=dtype)
    models = [model]
    if name != "gpt2":
        models.append(share_heads(model, 2, moments(model, [texts()])).model)
    ids = texts()[:, :5]
    for model in models:
        if isinstance(model, GPT):
            caches = [KVCache() for _ in model.blocks]
            model(ids, caches)
            held = sum(cache.nbytes for cache in caches)
        else:
            cache = cache_in(model(input_ids=ids, use_cache=True))
            held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
        assert held == cache_bytes(model) * ids.numel(), head_counts(model)


def test_models_without_caches_or_heads() -> None:
    parent = build("bert", dtype=torch.float32)
    child = prune_heads(parent, ((1,), ())).model
    damage = measure(parent, child, [texts()], 17)
    assert damage.loss is None
    assert damage.cache_bytes.before == damage.cache_bytes.after == 0
    assert damage.kl > 0
    assert damage.parameters.before == damage.parameters.after


def test_parameters_are_counted_once() -> None:
    model = build("llama, tied", dtype=torch.float32)
    child = share_heads(model, 3, moments(model, [texts()])).model
    damage = measure(model, child, [texts()], None)
    gone = sum(w.wk[3:].numel() + w.wv[3:].numel() for w in read_layers(model))
    assert damage.parameters.before - damage.parameters.after == gone
    assert damage.parameters.before == sum(p.numel() for p in model.parameters())


HALF = [torch.bfloat16, torch.float16]
LONG = {**ROTARY, "max_position_embeddings": 512}


def twins(dtype: torch.dtype) -> nn.Module:
    """Pairs of equal key/value heads, and scores large enough that a rounded frequency of RoPE changes them."""
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**LONG)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.ndim == 2 else 1)
        for weights in read_layers(model):
            for heads in (weights.wk, weights.wv):
                heads[1::2] = heads[::2]
    return cast(model, dtype)


def ids(n: int = 499) -> torch.Tensor:
    return torch.randint(31, (2, n), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_twins_share_without_any_loss_at_far_positions(dtype: torch.dtype) -> None:
    model = twins(dtype)
    child = plain_mean(model, 3)
    assert compared(model, child, [ids()])[1] == 0
    assert {p.dtype for p in child.parameters()} == {dtype}
    ours, theirs = dict(model.named_buffers()), dict(child.named_buffers())
    assert ours and {x.dtype for x in theirs.values()} == {torch.float32}
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())


def test_a_written_folder_that_is_not_the_model_in_memory_is_refused(tmp_path: Path) -> None:
    dtype = torch.bfloat16
    model: Any = plain_mean(twins(dtype), 3)
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        read_layers(model)[0].wo[:, 3] = 0  # one head of six
    with pytest.raises(HeadwiseError, match=r"read by transformers [0-9.]+, differs from the one in memory by"):
        verify(model, tmp_path / "model", 512)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert next(load_folder(tmp_path / "model").parameters()).dtype == dtype
