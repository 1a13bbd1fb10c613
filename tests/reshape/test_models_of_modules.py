"""A model of one's own out of layers of ours: priced, shared and pruned by its modules and by running it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import refuses
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw

IDS = torch.randint(31, (29, 23), generator=torch.Generator().manual_seed(2))


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
        model(IDS[:1])
    pairs = 2 * 4 * 23 * 23 * 42  # of the two layers; the counter misses the kernel of a processor
    assert bill.prefill.dense_flops in (counter.get_total_flops(), counter.get_total_flops() + pairs)
    model.blocks[0].matrix = nn.Parameter(torch.zeros(3, 5))
    refuses(lambda: hw.price(model), "blocks.0 has a matrix and is no Linear or Embedding")


def test_what_is_pruned_is_the_model_with_silent_heads(tmp_path: Path) -> None:
    model, heads = made(n_kv_heads=2, rope=hw.RoPE(dim=4)), ["L0.H0", "L0.H1", "L0.H2", "L1.H3", "L1.H4", "L1.H5"]
    with hw.ablate(model, heads, how="zero"):
        silenced = model(IDS)
    pruned = hw.prune(model, heads, text=IDS)
    torch.testing.assert_close(pruned.model(IDS), silenced)
    child: Any = pruned.model
    assert child.blocks[0].attn.n_heads == 3 and model.blocks[0].attn.n_heads == 6
    assert len(hw.generate(pruned.model, IDS[0].tolist(), 3)) == 3
    ways_out = "a model of your own, for which there is no folder; leave out= away"
    refuses(lambda: hw.prune(model, heads, text=IDS, out=tmp_path / "child"), ways_out)


def test_heads_that_are_alike_are_shared_exactly() -> None:
    model = made(n_kv_heads=2, rope=hw.RoPE(dim=4))
    for block in model.blocks:
        key, value = block.attn.heads[0].wk, block.attn.heads[0].wv
        block.attn.heads[5].wk, block.attn.heads[5].wv = key, value
    shared = hw.share(model, 1, text=IDS, groups="best", heal=1)
    torch.testing.assert_close(shared.model(IDS), model(IDS), rtol=1e-4, atol=1e-4)
    assert shared.damage.cache_bytes.after * 2 == shared.damage.cache_bytes.before


def test_layers_that_one_record_cannot_hold_are_refused() -> None:
    apart = {"n_kv_heads": 2, "kv_index": [1, 0] * 3}
    for options, said in ((apart, "layer 0 has kv_index=.* no equal"), ({"out_proj": False}, "layer 0 has no W_O")):
        refuses(lambda options=options: hw.share(made(**options), 1, text=IDS), said)
    model = made(sink=True)
    said = "a sink or a mask of the layers differs between heads"
    refuses(lambda: hw.prune(model, keep=0.5, uniform=True, text=IDS), said)
    model.blocks[1].attn = model.blocks[1].attn.without([0])
    refuses(lambda: hw.share(model, 1, text=IDS), "layer 1 has .5, 5, 7. query heads, key/value heads")
