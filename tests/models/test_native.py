"""Torch's encoder leaves its native path where it is watched: its answers stay those of that path, but for rounding."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw

B, T, C, H = 3, 11, 20, 4
PADDING = torch.arange(T) >= torch.tensor([[5], [T], [8]])  # the second text has none
BLANK = torch.arange(T) >= torch.tensor([[5], [T], [0]])  # the third one is nothing but padding
SLOPE = -0.3 * (torch.arange(T)[:, None] - torch.arange(T)).abs()


def layer(**more: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(C, H, 23, batch_first=True, **more)


def encoder(**more: Any) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(layer(), 2, **more)


CASES: dict[str, tuple[Any, dict[str, Tensor]]] = {
    "packed": (encoder, {"src_key_padding_mask": PADDING}),
    "packed, then a norm": (lambda: encoder(norm=nn.LayerNorm(C)), {"src_key_padding_mask": PADDING}),
    "packed, a text of padding": (encoder, {"src_key_padding_mask": BLANK}),
    "padding on the left": (encoder, {"src_key_padding_mask": PADDING.flip(1)}),
    "not packed": (lambda: encoder(enable_nested_tensor=False), {"src_key_padding_mask": PADDING}),
    "a layer of another activation": (lambda: layer(activation=nn.SiLU()), {"src_mask": SLOPE}),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("slopes", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_watched_encoder_answers_as_it_does_outside(case: str, slopes: bool) -> None:
    make, masks = CASES[case]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = make().eval(), torch.randn(B, T, C)
    silent = slice(2 * C + C // H, 2 * C + 2 * C // H)  # the values of head 1: it gives nothing
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "in_proj" in name:
                weights[silent] = 0
    with torch.set_grad_enabled(slopes):  # with slopes torch takes the Python code itself
        plain = model(x, **masks)
        with hw.watch(model):
            watched = model(x, **masks)
        with hw.ablate(model, ["L0.H1"]), hw.watch(model):
            silenced = model(x, **masks)
    torch.testing.assert_close(watched, plain, equal_nan=True)
    torch.testing.assert_close(silenced, plain, equal_nan=True)


@torch.no_grad()
def test_numbers_in_a_mask_are_refused_where_the_native_path_reads_them_as_hidden() -> None:
    model, x = layer().eval(), torch.randn(B, T, C)
    for masks in ({"src_mask": SLOPE}, {"src_key_padding_mask": torch.zeros(B, T).masked_fill(PADDING, -2.0)}):
        with pytest.raises(hw.HeadwiseError, match="has numbers beside 0 and -inf"), hw.watch(model):
            model(x, **masks)
    hidden = torch.zeros(B, T).masked_fill(PADDING, -torch.inf)
    plain = model(x, src_key_padding_mask=hidden)
    with hw.watch(model):
        torch.testing.assert_close(model(x, src_key_padding_mask=hidden), plain)
