"""Attention weights of every family that has a record: read, written, and rebuilt with fewer heads."""

from typing import Any

import pytest
import torch
import transformers as tf
from small_models import shaken

from headwise.families import FAMILIES, OURS
from headwise.models.ask import answers
from headwise.models.weights import cannot_carry, head_counts, read_layers, with_layers

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
