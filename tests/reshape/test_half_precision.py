"""Models in half precision: the child in memory is the one that is written, and what is wrong with it is found."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from reshape_models import ROTARY, plain_mean
from torch import nn

from headwise import HeadwiseError
from headwise.models.hf import load_folder
from headwise.models.weights import cast, read_layers
from headwise.reshape.heal import compared
from headwise.reshape.job import verify

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
