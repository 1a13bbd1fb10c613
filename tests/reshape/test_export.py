"""A model folder appears whole or not at all, and where nothing stood."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import refuses
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

import headwise as hw
from headwise import HeadwiseError
from headwise.families import run_of
from headwise.reshape.job import check_place, new_folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


def fill(folder: Path, weights: str) -> Path:
    """A folder as share writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "headwise.json").write_text("{}")
    (folder / "model.safetensors").write_text(weights)
    return folder


def read(folder: Path) -> str:
    return (folder / "model.safetensors").read_text()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("damaged", ["{", "[]", '{"run": 3}', '"run"'])
def test_a_damaged_record_is_named(source: Path, damaged: str) -> None:
    (source / "headwise.json").write_text(damaged)
    with pytest.raises(HeadwiseError, match=r"headwise\.json"):
        run_of(source)


@pytest.mark.parametrize("before", [None, "empty"])
def test_a_new_folder_appears_whole(source: Path, tmp_path: Path, before: str | None) -> None:
    out = tmp_path / "out"
    if before == "empty":
        out.mkdir()
    with new_folder(out) as fresh:
        fill(fresh, "new")
        assert not out.exists() or not list(out.iterdir())
    assert read(out) == "new" and names(tmp_path) == ["out", "source"]


def test_work_that_fails_leaves_nothing_behind(source: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "out") as fresh:
        fill(fresh, "half")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["source"]


def test_a_folder_that_appeared_meanwhile_is_left_alone(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(HeadwiseError, match="exists"), new_folder(out) as fresh:
        fill(fresh, "new")
        fill(out, "of somebody else")
    assert read(out) == "of somebody else" and names(tmp_path) == ["out", "source"]


def test_files_and_folders_that_hold_something_are_refused(source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text("{}")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(source)
    fill(tmp_path / "written", "mine")
    for name, words in {
        "file": "exists",
        "link": "exists",
        "written": "exists",
        "source": "exists",
        ".": "exists",
        "source/below": "is never changed",
        "nowhere/out": "nowhere",
    }.items():
        with pytest.raises(HeadwiseError, match=words):
            check_place(source, tmp_path / name)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 88, "intermediate_size": 61, "num_attention_heads": 4, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=101, max_position_embeddings=37)).to(torch.bfloat16)


IDS = torch.arange(900) * 7 % 101


def test_a_child_keeps_the_files_of_its_parent_and_says_what_was_done(source: Path, tmp_path: Path) -> None:
    llama().save_pretrained(source, max_shard_size=90_000)
    for name in ("LICENSE.txt", "chat_template.jinja"):
        (source / name).write_text(name)
    child = hw.share(source, 2, text=IDS, out=tmp_path / "out", dtype="fp16")
    assert names(tmp_path / "out") == sorted([*names(source), "README.md", "headwise.json"])
    assert (tmp_path / "out" / "LICENSE.txt").read_text() == "LICENSE.txt"
    again = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == torch.float16 == next(child.model.parameters()).dtype
    card = (tmp_path / "out" / "README.md").read_text()
    assert child.what in card and str(child.verified) in card
    assert f"| parameters | {child.damage.parameters.before:,} | {child.damage.parameters.after:,} |" in card


TEXT_IDS = torch.randint(31, (29, 23), generator=torch.Generator().manual_seed(2))


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(42), hw.MultiHeadAttention(42, 6, mask=hw.Causal(), **options)
        self.wide, self.narrow = nn.Linear(42, 53), nn.Linear(53, 42, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.narrow(self.wide(x).relu())


class Model(nn.Module):
    def __init__(self, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(31, 42), nn.Sequential(Block(**options), Block(**options))
        self.head = nn.Linear(42, 31, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.table(ids)))
        return logits


def made(**options: Any) -> Any:
    torch.manual_seed(3)
    return Model(**options).eval()


@pytest.mark.parametrize("options", [{"n_kv_heads": 2, "q_bias": True}, {"tied": True, "sink": True, "qk_norm": True}])
def test_the_price_is_that_of_its_modules(options: dict[str, Any]) -> None:
    model = made(**options)
    bill = hw.price(model, context=23)
    assert bill.parameters.total == sum(p.numel() for p in model.parameters())
    assert bill.cache.bytes_per_token == 2 * 2 * 7 * 4 * options.get("n_kv_heads", 6)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(TEXT_IDS[:1])
    pairs = 2 * 4 * 23 * 23 * 42  # of the two layers; the counter misses the kernel of a processor
    assert bill.prefill.dense_flops in (counter.get_total_flops(), counter.get_total_flops() + pairs)
    model.blocks[0].matrix = nn.Parameter(torch.zeros(3, 5))
    refuses(lambda: hw.price(model), "blocks.0 has a matrix and is no Linear or Embedding")


def test_what_is_pruned_is_the_model_with_silent_heads(tmp_path: Path) -> None:
    model, heads = made(n_kv_heads=2, rope=hw.RoPE(dim=4)), ["L0.H0", "L0.H1", "L0.H2", "L1.H3", "L1.H4", "L1.H5"]
    with hw.ablate(model, heads, how="zero"):
        silenced = model(TEXT_IDS)
    pruned = hw.prune(model, heads, text=TEXT_IDS)
    torch.testing.assert_close(pruned.model(TEXT_IDS), silenced)
    child: Any = pruned.model
    assert child.blocks[0].attn.n_heads == 3 and model.blocks[0].attn.n_heads == 6
    assert len(hw.generate(pruned.model, TEXT_IDS[0].tolist(), 3)) == 3
    ways_out = "a model of your own, for which there is no folder; leave out= away"
    refuses(lambda: hw.prune(model, heads, text=TEXT_IDS, out=tmp_path / "child"), ways_out)


def test_heads_that_are_alike_are_shared_exactly() -> None:
    model = made(n_kv_heads=2, rope=hw.RoPE(dim=4))
    for block in model.blocks:
        key, value = block.attn.heads[0].wk, block.attn.heads[0].wv
        block.attn.heads[5].wk, block.attn.heads[5].wv = key, value
    shared = hw.share(model, 1, text=TEXT_IDS, groups="best", heal=1)
    torch.testing.assert_close(shared.model(TEXT_IDS), model(TEXT_IDS), rtol=1e-4, atol=1e-4)
    assert shared.damage.cache_bytes.after * 2 == shared.damage.cache_bytes.before


def test_layers_that_one_record_cannot_hold_are_refused() -> None:
    apart = {"n_kv_heads": 2, "kv_index": [1, 0] * 3}
    for options, said in ((apart, "layer 0 has kv_index=.* no equal"), ({"out_proj": False}, "layer 0 has no W_O")):
        refuses(lambda options=options: hw.share(made(**options), 1, text=TEXT_IDS), said)
    model = made(sink=True)
    said = "a sink or a mask of the layers differs between heads"
    refuses(lambda: hw.prune(model, keep=0.5, uniform=True, text=TEXT_IDS), said)
    model.blocks[1].attn = model.blocks[1].attn.without([0])
    refuses(lambda: hw.share(model, 1, text=TEXT_IDS), "layer 1 has .5, 5, 7. query heads, key/value heads")
