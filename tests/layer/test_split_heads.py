"""Tensor parallelism leaves a process some of the heads: a layer and a model say so, and answer nothing."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import headwise as hw

LAYERS: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "plain": (hw.MultiHeadAttention(48, 6), ("q_proj", "k_proj", "v_proj"), "3 of 6"),
    "queries": (hw.MultiHeadAttention(48, 6, 1, rope=hw.RoPE()), ("q_proj",), "3 of 6"),
    "keys": (hw.MultiHeadAttention(48, 6, 1), ("k_proj",), "0.5 of 1"),
    "values": (hw.MultiHeadAttention(48, 6, 2), ("v_proj",), "1 of 2"),
    "latent": (hw.MultiHeadLatentAttention(48, 6, 13, 4), ("kv_up",), "3 of 6"),
}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of two processes, of which this is the second; the first is not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("local", [True, False])
@torch.no_grad()
def test_a_layer_with_some_of_its_heads_is_refused(mesh: DeviceMesh, local: bool) -> None:
    for name, (whole, cut, held) in LAYERS.items():
        layer, cache = type(whole).from_spec(whole.spec) if name != "latent" else whole, hw.KVCache()
        if name == "latent" and not local:
            continue  # it is cut already
        plan = {part: ColwiseParallel(use_local_output=local) for part in cut}
        parallelize_module(layer, mesh, {**plan, "o_proj": RowwiseParallel()})
        refused = rf"^this process holds {held} heads, .*; run the whole layer in each process$"
        with pytest.raises(hw.HeadwiseError, match=refused):
            layer(torch.randn(2, 7, 48), cache=cache)
        assert cache.length == 0
        with (
            pytest.raises(hw.HeadwiseError, match=r"^Multi.*: each of 2 processes holds some of its heads"),
            hw.watch(layer),
        ):
            pass


def test_a_model_with_some_of_its_heads_is_refused(mesh: DeviceMesh) -> None:
    model = tf.LlamaForCausalLM(
        tf.LlamaConfig(vocab_size=97, hidden_size=48, intermediate_size=62, num_attention_heads=6, num_hidden_layers=2)
    )
    parallelize_module(model.model.layers[1].self_attn, mesh, {"q_proj": ColwiseParallel()})
    with pytest.raises(hw.HeadwiseError, match=r"^model.layers.1.self_attn: each of 2 processes .* the whole model"):
        hw.survey(model, [[5, 7, 11]])
