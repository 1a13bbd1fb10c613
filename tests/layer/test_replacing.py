"""nn.MultiheadAttention inside a model, replaced: every call it took gives what it gave."""

import math
from typing import Any

import pytest
import torch
from cases import every, refuses
from torch import Tensor, nn

import headwise as hw
from headwise.layer.convert import TorchAttention

B, T, S, WIDTH, HEADS = 2, 5, 7, 15, 3
RNG = torch.Generator().manual_seed(0)

FLOATS = torch.randn(T, S, generator=RNG)
EACH_HEAD = torch.rand(B * HEADS, T, S, generator=RNG) > 0.7
PADDING = torch.arange(S) >= torch.tensor([[S], [4]])
CALLS: dict[str, dict[str, Any]] = {
    "bare": {},
    "no weights": {"need_weights": False},
    "weights of each head": {"average_attn_weights": False},
    "numbers": {"attn_mask": FLOATS},
    "a mask for each head": {"attn_mask": EACH_HEAD & ~EACH_HEAD.all(-1, keepdim=True)},
    "padding": {"key_padding_mask": PADDING},
    "padding in numbers": {"key_padding_mask": torch.zeros(B, S).masked_fill(PADDING, -math.inf)},
    "padding and numbers": {"attn_mask": FLOATS, "key_padding_mask": torch.zeros(B, S).masked_fill(PADDING, -math.inf)},
    "causal": {"attn_mask": torch.ones(T, S, dtype=torch.bool).triu(1), "is_causal": True},
    "causal, no weights": {
        "attn_mask": torch.full((T, S), -math.inf).triu(1),
        "is_causal": True,
        "need_weights": False,
    },
}


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def close(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@every("name", list(CALLS))
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_call_gives_what_torch_gives(batch_first: bool, name: str) -> None:
    theirs = nn.MultiheadAttention(WIDTH, HEADS, kdim=11, vdim=13, batch_first=batch_first).eval()
    ours = hw.replace(theirs).model
    sources = drawn(B, T, WIDTH), drawn(B, S, 11), drawn(B, S, 13)
    if not batch_first:
        sources = tuple(source.transpose(0, 1) for source in sources)  # type: ignore[assignment]
    for mine, right in zip(ours(*sources, **CALLS[name]), theirs(*sources, **CALLS[name]), strict=True):
        assert close(mine, right)


def test_a_text_alone_and_a_module_at_two_places() -> None:
    theirs = nn.MultiheadAttention(WIDTH, HEADS).eval()
    ours, x = hw.replace(theirs).model, drawn(T, WIDTH)
    arguments: dict[str, Any] = {"key_padding_mask": torch.arange(T) > 2, "average_attn_weights": False}
    for mine, right in zip(ours(x, x, x, **arguments), theirs(x, x, x, **arguments), strict=True):
        assert close(mine, right)
    blind = torch.eye(T, dtype=torch.bool)[0].expand(T, T).T  # row 0 may look nowhere
    assert ours(x, x, x, attn_mask=blind)[1][0].eq(0).all() and theirs(x, x, x, attn_mask=blind)[1][0].isnan().all()
    shared = nn.MultiheadAttention(WIDTH, HEADS)
    done = hw.replace(nn.ModuleList([shared, shared]))
    places = dict(done.model.named_modules(remove_duplicate=False))
    assert places["0"] is places["1"] and isinstance(places["0"], TorchAttention) and len(done.layers) == 1


def test_a_transformer_is_replaced_watched_and_compared() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 17, batch_first=True), 2).eval()
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 17, batch_first=True), 1).eval()
    x, causal = drawn(3, T, 16), nn.Transformer.generate_square_subsequent_mask(T)
    encoder.layers[1].self_attn.in_proj_weight.requires_grad_(False)
    done = hw.replace(encoder, inputs=(x, causal))
    assert list(done.layers) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert all(difference < 1e-5 for difference in done.differences.values())
    assert done.difference is not None and done.difference < 1e-5 and "the model within" in str(done)
    assert isinstance(encoder.layers[0].self_attn, nn.MultiheadAttention)  # the model that was passed is as it was
    second: Any = done.model.get_submodule("layers.1.self_attn.layer")
    assert not second.k_proj.weight.requires_grad and second.k_proj.bias.requires_grad
    padding = torch.arange(T) >= torch.tensor([[T], [3], [1]])
    with torch.no_grad(), hw.watch(done.model) as seen:
        ours = done.model(x, src_key_padding_mask=padding)
    assert close(ours[~padding], encoder(x, src_key_padding_mask=padding)[~padding])
    assert seen["L1.H1"].entropy > 0
    both = hw.replace(decoder).model
    assert close(both(x, ours, causal), decoder(x, ours, causal))
    dropping = hw.replace(encoder.train()).model  # dropout of the layer, and of what stands around it
    assert isinstance(inner := dropping.get_submodule("layers.0.self_attn"), TorchAttention) and inner.training


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_replaced_module_compiles_into_one_graph(need_weights: bool) -> None:
    torch.compiler.reset()
    stock, x = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval(), drawn(B, T, WIDTH)
    compiled = torch.compile(hw.replace(stock).model, fullgraph=True, backend="eager")
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    for call in ({}, {"attn_mask": causal, "is_causal": True}, {"key_padding_mask": PADDING[:, :T]}):
        arguments: dict[str, Any] = {**call, "need_weights": need_weights}
        for mine, right in zip(compiled(x, x, x, **arguments), stock(x, x, x, **arguments), strict=True):
            assert close(mine, right)


def test_a_replaced_encoder_compiles_into_one_graph() -> None:
    torch.compiler.reset()
    stock = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 17, batch_first=True), 2).eval()
    compiled, x = torch.compile(hw.replace(stock).model, fullgraph=True, backend="eager"), drawn(3, T, 16)
    assert close(compiled(x), stock(x))


def test_what_cannot_be_replaced_is_named_and_nothing_is() -> None:
    hooked, sloped = (nn.MultiheadAttention(WIDTH, HEADS) for _ in range(2))
    hooked.register_forward_hook(lambda *_: None)
    sloped.register_full_backward_pre_hook(lambda *_: None)
    kind = type("Own", (nn.MultiheadAttention,), {})
    model = nn.ModuleDict(
        {
            "right": nn.MultiheadAttention(WIDTH, HEADS),
            "zero": nn.MultiheadAttention(WIDTH, HEADS, add_zero_attn=True),
            "own": kind(WIDTH, HEADS),
            "hooked": hooked,
            "sloped": sloped,
        }
    )
    with pytest.raises(hw.HeadwiseError) as refusal:
        hw.replace(model)
    for part in (
        "4 of 5",
        "zero: add_bias_kv and add_zero_attn",
        "own: it is a Own",
        "hooked: it has hooks",
        "sloped: it has",
    ):
        assert part in str(refusal.value)
    refuses(lambda: hw.replace(nn.Linear(2, 3)), "Linear has no nn")
    with pytest.raises(hw.HeadwiseError, match=r"call model.eval\(\) first"):
        hw.replace(nn.MultiheadAttention(WIDTH, HEADS), inputs=(drawn(T, WIDTH),) * 3)
