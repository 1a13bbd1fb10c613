"""Attention of any module of torch, read where it happens: the numbers of its own maps, its own answers to the bit."""

import copy
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from helpers import watch_call
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise.heads.patch import path_effects
from headwise.models import softmax
from headwise.models.sites import sites_of

sys.path.append(str(Path(__file__).parents[1] / "heads"))
from dense import assert_rows, row_statistics
from families import TABLES, untrained

V, T, B, C, H = 131, 23, 2, 32, 4
SIZES: dict[str, Any] = {"vocab_size": V, "hidden_size": C, "num_hidden_layers": 2, "num_attention_heads": H}
WIDE: dict[str, Any] = {**SIZES, "intermediate_size": 37, "max_position_embeddings": 97}
FAMILIES = TABLES["outside"]  # that do not go through the attention interface of transformers


def shaken(model: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2, generator=generator)
    return model.eval()


def model_of(family: str) -> Any:
    return shaken(untrained(family, "outside"))


IDS = torch.randint(3, V, (B, T), generator=torch.Generator().manual_seed(1))


@contextmanager
def zeroed(projection: nn.Module, h: int, n_heads: int) -> Iterator[None]:
    """A hook of one's own: W_O reads zeros of a head."""

    def hook(module: nn.Module, args: Any) -> Any:
        x = args[0].clone()
        width = x.shape[-1] // n_heads
        x[..., h * width : (h + 1) * width] = 0
        return (x,)

    handle = projection.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_families_outside_the_interface_give_their_own_maps(family: str) -> None:
    model = model_of(family)
    plain = model(IDS)[0]
    with hw.watch(model, maps=True) as seen:
        assert torch.equal(model(IDS)[0], plain)
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    spelled_out = type(model)(config).eval()
    spelled_out.load_state_dict(model.state_dict())
    maps = spelled_out(IDS, output_attentions=True).attentions
    assert list(seen) == [f"L{n}.H{h}" for n in range(2) for h in range(H)]
    assert not [note for note in seen.notes if "no map" in note]
    for n, layer in enumerate(maps):
        documents = [row_statistics(p, q_ids=ids, k_ids=ids) for p, ids in zip(layer, IDS, strict=True)]
        for h in range(H):
            head = seen[f"L{n}.H{h}"]
            torch.testing.assert_close(torch.tensor(head.map), layer[:, h].float(), rtol=0, atol=1e-5)
            expected = {name: torch.cat([document[name][h] for document in documents]) for name in documents[0]}
            assert_rows(head.rows, expected, T, f"{family} {head.name}")


@pytest.mark.parametrize("family", [name for name, entry in FAMILIES.items() if "w_o" in entry])
@torch.no_grad()
def test_a_head_of_any_family_is_silenced_as_by_a_hook_at_w_o(family: str) -> None:
    model = model_of(family)
    w_o = [module for name, module in model.named_modules() if name.endswith(FAMILIES[family]["w_o"])]
    assert len(w_o) == 2
    with hw.ablate(model, ["L1.H2"]):  # it has never run
        silenced = model(IDS)[0]
    with zeroed(w_o[1], 2, H):
        expected = model(IDS)[0]
    assert torch.equal(silenced, expected) and not torch.equal(silenced, model(IDS)[0])
    with hw.ablate(model, ["L1.H2"]), hw.watch(model) as seen:
        assert torch.equal(model(IDS)[0], expected)
    assert seen["L1.H2"].norm == 0 < seen["L1.H1"].norm


@pytest.mark.parametrize("family", ["gpt_neo", "bloom"])  # Bloom adds its ALiBi to the heads of all texts in one axis
def test_causes_in_a_model_that_makes_its_maps_itself(family: str) -> None:
    model, (text, other) = model_of(family), IDS
    with torch.no_grad():
        logits = model(text[None])[0][0, -1]
    parts = hw.attribute(model, text, target=(7, 11))
    assert parts.logit == pytest.approx(float(logits[7] - logits[11]), abs=1e-4)
    assert parts.total == pytest.approx(parts.logit, abs=1e-4)
    every = [f"L{n}.H{h}" for n in range(2) for h in range(H)]
    found = {at: hw.patch(model, text, other, target=(7, 11), at=at) for at in ("out", "weights", "v")}
    # All heads of the last layer at once: weights and values together are what the heads give, at the last token.
    both = hw.patch(model, text, other, target=(7, 11), heads=every, together=True)
    assert list(found["out"].effects) == list(found["weights"].effects) == every
    assert both.effects["together"].mean != pytest.approx(0, abs=1e-3)
    assert found["v"].effects.keys() == {f"L{n}.KV{h}" for n in range(2) for h in range(H)}
    for call in (partial(hw.patch, at="q"), partial(path_effects, receiver="L1.H2", at="q")):
        with pytest.raises(hw.HeadwiseError, match=r"\w+Attention makes its weights itself, and what it makes"):
            call(model, text, other, target=(7, 11))
    documents = [text.tolist(), other.tolist()]
    survey = hw.survey(model, documents)
    seen = watch_call(model, IDS)
    for name in every:
        assert survey[name].entropy.mean == pytest.approx(seen[name].entropy, abs=1e-4)
        assert survey[name].ablation is not None


class Attention(nn.Module):
    """The attention of a small GPT: by a softmax, or by the fused call; a sink is one more column of scores."""

    def __init__(self, fused: bool = False, told: bool = True, dropout: float = 0.0, sink: bool = False) -> None:
        super().__init__()
        if told:
            self.n_head = H
        self.c_attn, self.c_proj, self.fused = nn.Linear(C, 3 * C), nn.Linear(C, C), fused
        self.drop = nn.Dropout(dropout)
        self.sink = nn.Parameter(torch.arange(float(H)).view(H, 1, 1)) if sink else None
        self.map: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (y.view(batch, length, H, C // H).transpose(1, 2) for y in self.c_attn(x).split(C, 2))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
            scores = scores.masked_fill(torch.tril(torch.ones(length, length)) == 0, float("-inf"))
            if self.sink is not None:
                scores = torch.cat(tensors=[scores, self.sink.expand(batch, H, length, 1)], dim=-1)
            self.map = F.softmax(scores, dim=-1)[..., :length]
            y = self.drop(self.map) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, C))


class Router(nn.Module):
    """A mixture of three experts: its softmax is times what they give, and is no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(C, 3), nn.ModuleList([nn.Linear(C, C) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return (weights.unsqueeze(-2) @ torch.stack([expert(x) for expert in self.experts], -2)).squeeze(-2)


class Einsum(nn.Module):
    """Axes in another order, one set of values for all heads, and a library function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(C, C), nn.Linear(C, 2 * C // H), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(*x.shape[:2], H, C // H)
        k, v = self.kv(x).chunk(2, -1)
        weights = torch.einsum("bihd,bjd->bihj", q, k).softmax(-1)
        joined = torch.einsum("bihj, bjd -> bihd", weights, v).flatten(2)
        return joined if self.o is None else self.o(joined)


class Folded(nn.Module):
    """Documents and heads in one axis."""

    def __init__(self, told: bool) -> None:
        super().__init__()
        if told:
            self.num_heads = H
        self.qkv, self.out_proj = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            y.view(batch, length, H, C // H).transpose(1, 2).reshape(batch * H, length, C // H)
            for y in self.qkv(x).chunk(3, -1)
        )
        out = torch.bmm(torch.softmax(torch.bmm(q, k.mT), -1), v)
        return self.out_proj(out.view(batch, H, length, C // H).transpose(1, 2).reshape(batch, length, C))


X = torch.randn(B, 11, C, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("way", ["softmax", "fused", "sink"])
@torch.no_grad()
def test_the_class_of_a_learner_is_watched(way: str) -> None:
    options = {"sink": way == "sink"}
    model, twin = (
        shaken(nn.Sequential(Attention(fused, **options), Router(), Attention(fused, **options), nn.Softmax(-1)))
        for fused in (way == "fused", False)
    )
    twin.load_state_dict(model.state_dict())
    plain, _ = model(X), twin(X)
    with hw.watch(model, maps=True) as seen:
        assert torch.equal(model(X), plain)
    assert list(seen) == [f"L{n}.H{h}" for n in (0, 2) for h in range(H)]
    assert [note for note in seen.notes if note.startswith("L1: Router ran")] and len(seen.notes) == 1
    for n in (0, 2):
        expected = [row_statistics(p) for p in twin[n].map]
        for h in range(H):
            head = seen[f"L{n}.H{h}"]
            torch.testing.assert_close(torch.tensor(head.map), twin[n].map[:, h], rtol=0, atol=1e-5)
            assert_rows(head.rows, {name: torch.cat([e[name][h] for e in expected]) for name in expected[0]}, 11, "own")
    with hw.ablate(model, ["L2.H3"]):
        silenced = model(X)
    with zeroed(model[2].c_proj, 3, H):
        torch.testing.assert_close(silenced, model(X), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("layout", ["batch first", "time first"])
@torch.no_grad()
def test_torchs_own_encoder_and_decoder(layout: str) -> None:
    first = layout == "batch first"
    layer, other = (
        kind(C, H, 37, batch_first=first) for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    )
    encoder = nn.TransformerEncoder(layer, 2)
    decoder = nn.TransformerDecoder(other, 1)
    model = shaken(nn.Transformer(C, H, custom_encoder=encoder, custom_decoder=decoder, batch_first=first))
    x, y = (X, X[:, :7]) if first else (X.transpose(0, 1), X[:, :7].transpose(0, 1))
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    real = torch.ones(B, 11, dtype=torch.bool)
    real[0, 8:] = False
    asked: dict[str, Any] = {"tgt_mask": mask, "src_key_padding_mask": ~real, "memory_key_padding_mask": ~real}
    plain = model(x, y, **asked)
    with hw.watch(model, maps=True) as seen:
        torch.testing.assert_close(model(x, y, **asked), plain, rtol=0, atol=2e-6)
    names = ["encoder.L0", "encoder.L1", "decoder.L0", "cross.L0"]
    assert list(seen) == [f"{name}.H{h}" for name in names for h in range(H)]
    assert [note for note in seen.notes if "fast path" in note]
    # of two such models side by side a name still begins with the side, encoder or decoder
    pair = [site.name for site in sites_of(nn.ModuleDict({"left": model, "right": copy.deepcopy(model)}))]
    assert [name.partition(".")[0] for name in pair] == 2 * ["encoder", "encoder", "decoder", "cross"]
    attention = model.encoder.layers[0].self_attn
    expected = attention(x, x, x, average_attn_weights=False, key_padding_mask=~real)[1]
    torch.testing.assert_close(torch.tensor(seen["encoder.L0.H1"].map), expected[:, 1], rtol=0, atol=1e-5)
    assert seen["encoder.L0.H1"].n_rows == 8 + 11 and seen["decoder.L0.H1"].next == 0
    w_o = attention.out_proj.weight.view(C, H, C // H)
    value = F.linear(X, attention.in_proj_weight, attention.in_proj_bias)[1, :, 2 * C :].view(11, H, C // H)
    norm = torch.einsum("hts,she,che->thc", expected[1], value, w_o).norm(dim=-1)
    assert seen["encoder.L0.H1"].rows.norm[-11:] == pytest.approx(norm[:, 1].numpy(), abs=1e-4)
    with pytest.raises(hw.MissingError):
        _ = seen["cross.L0.H0"].distance
    with hw.ablate(model, ["cross.L0.H0", "cross.L0.H1", "cross.L0.H2", "cross.L0.H3"]):
        alone = model(x, y, **asked)
    model.decoder.layers[0].multihead_attn.out_proj.weight.zero_()
    torch.testing.assert_close(alone, model(x, y, **asked), rtol=0, atol=2e-6)


@torch.no_grad()
def test_axes_of_another_order_and_folded_ones() -> None:
    model = shaken(nn.Sequential(Einsum(), Folded(told=True)))
    with pytest.raises(hw.HeadwiseError, match=r"^how many heads L0 has, a Einsum, is known after it has ru"):
        hw.ablate(model, ["L0.H0"]).__enter__()
    plain = model(X)
    with hw.watch(model, maps=True) as seen:
        assert torch.equal(model(X), plain)
    assert list(seen) == [f"L{n}.H{h}" for n in range(2) for h in range(H)]
    q, (k, _) = model[0].q(X).view(B, 11, H, -1), model[0].kv(X).chunk(2, -1)
    shared = torch.einsum("bihd,bjd->bhij", q, k).softmax(-1)
    torch.testing.assert_close(torch.tensor(seen["L0.H2"].map), shared[:, 2], rtol=0, atol=1e-6)
    for name, w_o, h in (("L0.H2", model[0].o, 2), ("L1.H3", model[1].out_proj, 3)):
        with hw.ablate(model, [name]):
            silenced = model(X)
        with zeroed(w_o, h, H):
            torch.testing.assert_close(silenced, model(X), rtol=0, atol=1e-6)
    bare: Any = Einsum()
    bare.o = None  # what is silenced goes back into the product
    expected = bare(X).unflatten(-1, (H, -1))
    expected[:, :, 2] = 0
    watch_call(bare, X)
    with hw.ablate(bare, ["L0.H2"]):
        assert torch.equal(bare(X), expected.flatten(2))
    wrong: Any = Einsum()
    wrong.n_head = H + 1
    with pytest.raises(hw.HeadwiseError, match=rf"{H + 1} heads, and its att"), hw.ablate(wrong, [f"L0.H{H}"]):
        wrong(X)
    grouped = acting(by_group)
    grouped.n_head = H
    head = watch_call(grouped, X, maps=True)["L0.H2"]
    q, k = X[..., 16:24], X[..., 8:16]  # the third query head reads the second of two key heads
    torch.testing.assert_close(torch.tensor(head.map), (q @ k.mT).softmax(-1), rtol=0, atol=1e-6)
    # as many tokens as heads of all texts
    assert list(watch_call(model[1], X[:1, :H])) == [f"L0.H{h}" for h in range(H)]
    head = CausalHead("softmax")
    assert softmax.attends(torch.fx.symbolic_trace(acting(lambda self, x: (x @ x.mT).softmax(-1) @ x)))
    vars(head)["forward"] = lambda x, y: (x @ F.linear(input=y, weight=torch.eye(C)).mT).softmax(-1) @ y
    assert "distance" not in watch_call(head, X, X[:, :7])["L0.H0"].means


class TimeFirst(Attention):
    """As many write it: (T,B,C), and texts and heads in one axis or in two."""

    def __init__(self, folded: bool) -> None:
        super().__init__()
        self.folded = folded

    def forward(self, x: Tensor) -> Tensor:
        lead = (B * H,) if self.folded else (B, H)
        q, k, v = (y.reshape(len(x), *lead, C // H).movedim(0, -2) for y in self.c_attn(x).split(C, 2))
        return self.c_proj(((q @ k.mT).softmax(-1) @ v).movedim(-2, 0).reshape(x.shape))


@pytest.mark.parametrize("folded", [False, True])
@torch.no_grad()
def test_heads_whose_texts_are_the_second_axis(folded: bool) -> None:
    model, x = shaken(nn.Sequential(TimeFirst(folded), TimeFirst(folded))), X.transpose(0, 1)
    seen = watch_call(model, x)
    assert seen["L1.H2"].norm > 0 and not seen.notes
    with zeroed(model[1].c_proj, 2, H):
        expected = model(x)
    with hw.ablate(model, ["L1.H2"]):
        assert torch.equal(model(x), expected)
        with hw.ablate(model, ["L1.H2"]), hw.watch(model) as seen:
            assert torch.equal(model(x), expected)
    assert seen["L1.H2"].norm == 0 < seen["L1.H1"].norm


class CausalHead(nn.Module):
    """A head by the course's names; by the fused call with a flag, or with a mask of its own, or by a softmax."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.W_query, self.W_key, self.W_value = (nn.Linear(C, 7, bias=False) for _ in range(3))
        self.far = nn.Parameter(torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        length = x.shape[1]
        bias = -self.far * (torch.arange(length)[:, None] - torch.arange(length)).abs()
        bias = bias.masked_fill(torch.ones(length, length).triu(1) > 0, -torch.inf)
        if self.way == "flag":
            return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        if self.way == "mask":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(len(x), -1, -1))
        return (q @ k.mT / math.sqrt(7) + bias).softmax(-1) @ v


class CausalHeads(nn.Module):
    """The wrapper of the course: no projection, or one behind what joins its heads."""

    def __init__(self, way: str, projects: bool = True) -> None:
        super().__init__()
        self.heads = nn.ModuleList([CausalHead(way) for _ in range(3)])
        self.out_proj = nn.Linear(21, C) if projects else None

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([head(x) for head in self.heads], dim=-1)
        return joined if self.out_proj is None else x + self.out_proj(joined)


@pytest.mark.parametrize("projects", [False, True])
@pytest.mark.parametrize("way", ["flag", "mask", "softmax"])
@torch.no_grad()
def test_modules_of_a_list_are_heads_of_one_layer(way: str, projects: bool) -> None:
    first, second = CausalHeads(way, projects), CausalHeads(way, projects)
    model = shaken(nn.Sequential(first, nn.Identity() if projects else nn.Linear(21, C), second))
    plain = model(X)
    with hw.watch(model, maps=True) as seen:
        assert torch.equal(model(X), plain)
    assert list(seen) == [f"L{n}.H{h}" for n in (0, 2) for h in range(3)]
    for n, x in ((0, X), (2, model[:2](X))):
        for h, head in enumerate(model[n].heads):
            with hw.watch(head, maps=True) as alone:
                head(x)
            of_all = seen[f"L{n}.H{h}"]
            torch.testing.assert_close(torch.tensor(of_all.map), torch.tensor(alone["L0.H0"].map), rtol=0, atol=1e-6)
            assert all(of_all[name] == pytest.approx(mean, abs=1e-5) for name, mean in alone["L0.H0"].means.items())
    values = model[2].heads[1].W_value.weight
    values *= 0.5
    expected = model(X)
    values *= 2
    with hw.steer(model, {"L2.H1": 0.5}), hw.watch(model):
        torch.testing.assert_close(model(X), expected)
    with hw.ablate(model, ["L2.H1"]):
        without = model(X)
    values.zero_()
    torch.testing.assert_close(without, model(X))


def acting(forward: Any) -> nn.Module:
    """A module that does no more than this."""
    module = type("Acting", (nn.Module,), {"forward": forward})()
    module.out_proj = nn.Linear(C, C)
    return module


def by_group(self: nn.Module, x: Tensor) -> Tensor:
    """Four query heads read two key heads: (B,G,r,T,S)."""
    q, k = (y.unflatten(-1, (2, -1, 8)).permute(0, 2, 3, 1, 4) for y in (x, x[..., :16]))
    return self.out_proj(((q @ k.mT).softmax(-1) @ k).permute(0, 3, 1, 2, 4).flatten(2))  # type: ignore[operator]


def in_pieces(self: nn.Module, x: Tensor) -> Tensor:
    """One map is whole; the other one lies in two pieces, and to read the first alone is half of the truth."""
    near, far = x[:, :5], x[:, 5:]
    weights = torch.cat([x @ near.mT, x @ far.mT], -1).softmax(-1)
    whole = (x @ x.mT).softmax(-1) @ x
    return self.out_proj(whole + weights[..., :5] @ near + weights[..., 5:] @ far)  # type: ignore[operator]


@torch.no_grad()
def test_what_is_no_attention_is_refused_by_name() -> None:
    codes, mixed = nn.Parameter(X[0, :7]), CausalHeads("mask")
    mixed.heads[1] = CausalHead("flag")
    landmarks = tf.NystromformerConfig(**WIDE, num_landmarks=4, segment_means_seq_len=24)
    chunks = tf.LongformerConfig(**WIDE, attention_window=4)
    none, rows = "ran, and no softmax over keys was seen", "no distribution over keys: a row of 11 weights sums to"
    refused: list[tuple[nn.Module, str]] = [
        (Router(), f"^L0: Router {none}"),
        (acting(lambda self, x: (x @ codes.T).softmax(-1) @ codes), none),
        (acting(lambda self, x: x.softmax(-1) @ (x.softmax(1).mT @ x)), none),
        (acting(lambda self, x: (0.1 * x @ x.mT).softmax(1) @ x), rows),
        (acting(lambda self, x: (2 * (x @ x.mT).softmax(-1)) @ x), rows),
        (acting(in_pieces), "^L0: joins the scores of several products before its softmax"),
        (Folded(told=False), r"^L0: Folded makes maps of \(8, 11, 11\), and says that it has no number of heads"),
        (tf.NystromformerModel(landmarks), "^L0: multiplies the weights of one softmax with those of another"),
        (tf.LongformerModel(chunks), "^L0: LongformerSelfAttention says that it has 4 heads, and its .* chunks"),
        (nn.Linear(C, C), "^Linear has no attention that headwise can read"),
        (mixed, "^L0: the modules of its list, CausalHead, have lengths, scales or masks of their"),
        (Attention(dropout=0.5), r"^L0: drops weights of its map, as in training; call model.eval\(\), or set that"),
    ]
    for model, why in refused:
        inputs = torch.cat([IDS, IDS[:, :1]], 1) if hasattr(model, "config") else X
        model.train(isinstance(model, Attention))
        with pytest.raises(hw.HeadwiseError, match=why), hw.watch(model) as seen:
            model(inputs)
        assert not softmax._thread.listener.blocks and not list(seen)


def test_weights_that_fully_shard_gathers_are_those_of_all_heads() -> None:
    """In a call they are whole; only tensor parallelism gives each process heads of its own."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        model = tf.GPT2Model(tf.GPT2Config(vocab_size=V, n_embd=C, n_layer=2, n_head=H, n_positions=29))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        assert [site.heads for site in sites_of(model)] == [[f"L{n}.H{h}" for h in range(H)] for n in range(2)]
    finally:
        torch.distributed.destroy_process_group()


@torch.no_grad()
def test_a_part_that_is_handed_queries_and_keys_has_no_distances() -> None:
    class Attend(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend, self.qkv, self.to_out = Attend(), nn.Linear(C, 3 * C), nn.Linear(C, C)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
            return self.to_out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    model = shaken(Around())
    seen = watch_call(model, X)
    assert "distance" not in seen["L0.H0"].means and seen["L0.H0"].norm > 0
    assert any("handed queries and keys" in note for note in seen.notes)
    model.attend.out_proj = nn.Linear(C, C)  # is never called, which a note says behind that of the call
    assert watch_call(model, X).notes[0].startswith(f"L0: {softmax.HANDED}; L0: what enters W_O")


def test_gradients_pass_in_training() -> None:
    model = nn.Sequential(Attention(dropout=0.0)).train()
    plain = model(X)
    with hw.watch(model, maps=True) as seen:
        watched = model(X)
    assert torch.equal(plain, watched) and watched.requires_grad
    torch.testing.assert_close(torch.tensor(seen["L0.H1"].map), model[0].map[:, 1].detach(), rtol=0, atol=1e-6)
    with hw.ablate(model, ["L0.H1"]):
        model(X).sum().backward()
    assert model[0].c_proj.weight.grad is not None and not model[0].c_proj.weight.grad[:, 8:16].any()


@pytest.mark.parametrize("kind", [Attention, Einsum])
def test_checkpoints_autocast_and_compiled_models_are_watched(kind: Any) -> None:
    model = shaken(nn.Sequential(kind()))
    plain = watch_call(model, X)["L0.H1"].entropy

    def halved() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(X)

    def checkpointed() -> None:
        x = X.clone().requires_grad_()
        checkpoint(model[0], x, use_reentrant=False).sum().backward()

    compiled = torch.compile(model, backend="eager")
    for run, close in ((halved, 1e-2), (checkpointed, 1e-6), (lambda: compiled(X), 1e-6)):
        with hw.watch(model) as seen:
            run()
        assert seen["L0.H1"].n_rows == 22 and seen["L0.H1"].entropy == pytest.approx(plain, abs=close)


class Adapted(nn.Linear):
    """A linear layer with an adapter of rank 2 beside its weight."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.down, self.up = nn.Linear(sizes[0], 2, bias=False), nn.Linear(2, sizes[1], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up(self.down(x))


@torch.no_grad()
def test_behind_an_adapter_there_is_no_norm_and_a_head_is_silenced_exactly() -> None:
    model = nn.Sequential(Attention())
    model[0].c_attn, model[0].c_proj = Adapted(C, 3 * C), Adapted(C, C)
    plain = shaken(model)(X)
    with hw.watch(model, maps=True) as seen:
        assert torch.equal(model(X), plain)
    torch.testing.assert_close(torch.tensor(seen["L0.H1"].map), model[0].map[:, 1], rtol=0, atol=1e-6)
    assert "norm" not in seen["L0.H1"].means and [note for note in seen.notes if "its W_O is not known" in note]
    with hw.ablate(model, ["L0.H1"]):
        silenced = model(X)
    with zeroed(model[0].c_proj, 1, H):
        torch.testing.assert_close(silenced, model(X), rtol=0, atol=1e-6)


class TwoTexts(nn.Module):
    """The same queries read the keys of a text, and those of another one; both outputs are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.kv, self.out_proj = nn.Linear(C, 3 * C), nn.Linear(C, 2 * C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        parts = [*self.qkv(x).chunk(3, -1), *self.kv(x.flip(1)).chunk(2, -1)]
        q, *pairs = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, *pairs[:2]) + F.scaled_dot_product_attention(q, *pairs[2:])
        return self.out_proj(y.transpose(1, 2).flatten(2))


@torch.no_grad()
def test_queries_that_read_two_sets_of_keys_are_two_calls() -> None:
    model = shaken(nn.Sequential(TwoTexts()))
    with hw.watch(model) as seen:
        model(X)
    assert seen["L0.H0"].n_rows == 2 * X.shape[0] * X.shape[1] and "norm" not in seen["L0.H0"].means


@torch.no_grad()
def test_names_stay_and_nothing_is_left_behind() -> None:
    model = shaken(nn.Sequential(Attention(told=False), Router(), Attention(told=False)))
    names = [site.name for site in sites_of(model)]
    with hw.watch(model) as seen:
        model[2](X)
    assert list(seen) == [f"L2.H{h}" for h in range(H)]
    assert [site.name for site in sites_of(model)] == names == ["L0", "L1", "L2"]
    with pytest.raises(RuntimeError), hw.watch(model):
        model(X[..., :7])
    assert not softmax._thread.listener.blocks
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    a, b = hw.watch(model), hw.watch(model)
    first, second = a.__enter__(), b.__enter__()
    model(X)
    a.__exit__(None, None, None)
    model(X)
    b.__exit__(None, None, None)
    assert (first["L0.H0"].n_rows, second["L0.H0"].n_rows) == (22, 44)


def test_a_name_that_cannot_be_unwrapped_is_passed_by() -> None:
    """`torch.classes`, which Apertus' activation asks for, raises at each unknown attribute."""

    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x if x.ndim else torch.classes

    assert not softmax.uses_interface(Asks())
