"""Torch's encoder leaves its native path where it is watched: its answers stay those of that path, but for rounding."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw

B, T, C, H = 3, 11, 20, 4
PADDING = torch.arange(T) >= torch.tensor([[5], [T], [8]])  # the second text has none
BLANK = torch.arange(T) >= torch.tensor([[5], [T], [0]])  # the third one is nothing but padding
BAND = torch.ones(T, T, dtype=torch.bool).tril().triu(-2).logical_not()
SLOPE = -0.3 * (torch.arange(T)[:, None] - torch.arange(T)).abs()


def layer(**more: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(C, H, 23, batch_first=True, **more)


def encoder(**more: Any) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(layer(), 2, **more)


class Alone(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(C, H, batch_first=True, bias=bias)

    def forward(self, x: Tensor, **masks: Any) -> Tensor:
        return self.attention(x, x, x, need_weights=False, **masks)[0]


CASES: dict[str, tuple[Any, dict[str, Tensor]]] = {
    "packed": (encoder, {"src_key_padding_mask": PADDING}),
    "packed, then a norm": (lambda: encoder(norm=nn.LayerNorm(C)), {"src_key_padding_mask": PADDING}),
    "packed, a text of padding": (encoder, {"src_key_padding_mask": BLANK}),
    "padding on the left": (encoder, {"src_key_padding_mask": PADDING.flip(1)}),
    "not packed": (lambda: encoder(enable_nested_tensor=False), {"src_key_padding_mask": PADDING}),
    "rows without a key": (encoder, {"mask": BAND, "src_key_padding_mask": PADDING}),
    "numbers in a mask": (encoder, {"mask": SLOPE}),
    "numbers in the padding": (layer, {"src_key_padding_mask": torch.zeros(B, T).masked_fill(PADDING, -2.0)}),
    "a layer of another activation": (lambda: layer(activation=nn.SiLU()), {"src_mask": SLOPE}),
    "an attention without biases": (lambda: Alone(bias=False), {"attn_mask": BAND, "key_padding_mask": PADDING}),
    "an attention": (Alone, {"attn_mask": BAND, "key_padding_mask": PADDING}),
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
