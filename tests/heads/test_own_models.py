"""A language model of one's own in plain torch: every study, against plain hooks; what cannot be found is said once."""

import math
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import refuses, refuses_table
from families import untrained
from small_models import shaken
from torch import Tensor, nn

import headwise as hw
from headwise.models.ask import adapter_of, logits

pytestmark = pytest.mark.usefixtures("no_gradients")

V, T, C, H, CONTEXT = 61, 17, 36, 3, 23
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"[:V]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.c_attn, self.c_proj = H, nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (y.view(B, T, H, C // H).transpose(1, 2) for y in self.c_attn(x).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return out


class Block(nn.Module):
    def __init__(self, feed_forward: bool) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(C), Attention(), nn.LayerNorm(C)
        self.mlp = nn.Sequential(nn.Linear(C, 2 * C), nn.GELU(), nn.Linear(2 * C, C)) if feed_forward else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x if self.mlp is None else x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """As nanoGPT: positions learned, the head tied, and without targets the logits of the last token alone."""

    def __init__(self, tied: bool = True, feed_forward: bool = True) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(V, C), "wpe": nn.Embedding(CONTEXT, C), "ln_f": nn.LayerNorm(C)}
        self.transformer = nn.ModuleDict(parts | {"h": nn.ModuleList(Block(feed_forward) for _ in range(2))})
        self.lm_head = nn.Linear(C, V, bias=False)
        if tied:
            self.transformer["wte"].weight = self.lm_head.weight

    def states(self, idx: Tensor) -> Tensor:
        parts: Any = self.transformer
        turn = (1, 0, 2) if isinstance(self, TimeFirst) else (0, 1, 2)
        x = (parts["wte"](idx) + parts["wpe"](torch.arange(idx.shape[1]))).permute(turn)
        for block in parts["h"]:
            x = block(x)
        states: Tensor = parts["ln_f"](x).permute(turn)
        return states

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        x = self.states(idx)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        rows = self.lm_head(x)
        return rows, F.cross_entropy(rows.view(-1, V), targets.view(-1))


class Tied(NanoGPT):
    """Its head is no module, and it gives an object."""

    def forward(self, tokens: Tensor) -> Any:  # type: ignore[override]
        table: Any = self.transformer["wte"]
        return types.SimpleNamespace(logits=self.states(tokens) @ table.weight.T)


class Capped(NanoGPT):
    """As nanochat: the logits have a softcap, and come with something else."""

    def forward(self, idx: Tensor, scale: float) -> Any:  # type: ignore[override]
        return {"more": 5, "rows": 15 * torch.tanh(self.lm_head(self.states(idx)) / scale)}


class TimeFirst(NanoGPT):
    """Its blocks pass (T,B,C)."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            turn = lambda module, args, *gave: (gave or args)[0].transpose(0, 1)  # noqa: E731
            block.attn.register_forward_pre_hook(turn)
            block.attn.register_forward_hook(turn)


class Classifier(NanoGPT):
    def forward(self, idx: Tensor) -> Tensor:  # type: ignore[override]
        classes: Tensor = self.lm_head(self.states(idx)).mean(1)
        return classes


class Characters:
    """A tokenizer of one's own, as courses write it."""

    vocab_size = V

    def encode(self, text: str) -> list[int]:
        return [{c: i for i, c in enumerate(LETTERS)}[c] for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(LETTERS[i] for i in ids)


def made(kind: Any, **fields: Any) -> Any:
    torch.manual_seed(7)
    return shaken(kind(**fields), size=0.2)


def capped(model: Any, ids: Tensor) -> Tensor:
    rows: Tensor = model(ids, 15.0)["rows"]
    return rows


MODELS: dict[str, Any] = {
    "nanoGPT": lambda: made(NanoGPT),
    "untied, no feed-forward": lambda: made(NanoGPT, tied=False, feed_forward=False),
    "tied by hand": lambda: made(Tied),
    "(T,B,C)": lambda: made(TimeFirst),
    "capped": lambda: hw.open(made(Capped), logits=capped, unembed="lm_head"),
}
IDS, OTHER = (torch.randint(V, (T,), generator=torch.Generator().manual_seed(seed)) for seed in (3, 4))


def row(model: Any, ids: Tensor) -> Tensor:
    if isinstance(model, Capped):
        return capped(model, ids[None])[0, -1]
    gave = model(ids[None])
    return (gave[0] if isinstance(gave, tuple) else gave.logits)[0, -1]


@pytest.mark.parametrize("name", MODELS)
def test_every_study_of_a_model_of_ones_own(name: str) -> None:
    model = MODELS[name]()
    plain = row(model, IDS)
    assert logits(model, IDS[None]).shape == (1, T, V)
    found = hw.patch(model, IDS, OTHER, target=(7, 11)).effects
    # by plain hooks at W_O
    blocks, kept = model.transformer["h"], dict[int, Tensor]()
    for n, block in enumerate(blocks):

        def keep(module: Any, args: Any, n: int = n) -> None:
            kept.setdefault(n, args[0])

        block.attn.c_proj.register_forward_pre_hook(keep)
    good, bad = (float(x[7] - x[11]) for x in (plain, row(model, OTHER)))
    kept.clear()
    row(model, IDS)
    for n, block in enumerate(blocks):
        for h in range(H):

            def change(module: Any, args: Any, n: int = n, h: int = h) -> Any:
                joined = args[0].clone()
                part = slice(h * C // H, (h + 1) * C // H)
                joined[..., part] = kept[n][..., part]
                return (joined,)

            hook = block.attn.c_proj.register_forward_pre_hook(change)
            patched = row(model, OTHER)
            hook.remove()
            share = (float(patched[7] - patched[11]) - bad) / (good - bad)
            assert found[f"L{n}.H{h}"].mean == pytest.approx(share, rel=1e-4, abs=1e-4)
    # in the place of a head's output that of another text, or what a function makes of it
    part = slice(2 * C // H, None)  # L1.H2
    read: list[Tensor] = []
    hook = blocks[1].attn.c_proj.register_forward_hook(lambda m, args, out: read.append(args[0].clone()))
    with hw.ablate(model, ["L1.H2"], how="resample", texts=[IDS]):
        row(model, OTHER)
    with hw.steer(model, {"L1.H2": lambda z: z.relu()}):
        row(model, OTHER)
    row(model, OTHER)
    hook.remove()
    texts_row, resampled, steered, unchanged = read[0], *read[-3:]
    assert torch.equal(texts_row, kept[1]) and torch.equal(resampled[..., part], kept[1][..., part])
    assert torch.equal(steered[..., part], unchanged[..., part].relu())
    assert torch.equal(steered[..., : 2 * C // H], resampled[..., : 2 * C // H])
    parts = hw.attribute(model, IDS, (7, 11))
    expected = good
    if name == "capped":  # before the softcap
        expected = 15 * (math.atanh(float(plain[7]) / 15) - math.atanh(float(plain[11]) / 15))
    assert parts.total == pytest.approx(expected, abs=1e-4)
    assert len(hw.why(model, IDS, OTHER, 7, 11).heads) == 2 * H
    head = hw.survey(model, [IDS.tolist(), OTHER.tolist()], ablate="zero")["L1.H2"]
    assert len(head.roles) == 0 and {"after_same", "induction"} <= set(head.means)  # its ids are known
    assert len(hw.composition(model)) == H * H
    assert len(list(hw.generate(model, IDS.tolist(), 9, temperature=0))) == 9  # beyond its context of 23
    torch.testing.assert_close(row(model, IDS), plain)


def test_a_tokenizer_of_ones_own_reads_the_texts() -> None:
    model = hw.open(made(NanoGPT), tokenizer=Characters())
    text, other = (Characters().decode(ids.tolist()) for ids in (IDS, OTHER))
    of_ids = hw.patch(model, IDS, OTHER, target=(7, 11)).effects
    assert hw.patch(model, text, other, target=("h", "l")).effects == of_ids
    assert hw.why(model, text, other, "h", "l").answer == "h"
    assert hw.attention(model, text).tokens == tuple(text)
    adapter = adapter_of(model)
    assert adapter is not None
    assert (adapter.vocabulary, adapter.context, adapter.unembed) == (V, CONTEXT, "lm_head")
    names = {"model": model, "made": made, "Capped": Capped, "Classifier": Classifier, "hw": hw, "IDS": IDS}
    refuses_table("own models", names | {"NanoGPT": NanoGPT})


class Adapted(nn.Linear):
    """As peft's LoRA on a projection."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight, self.down = base.weight, nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = super().forward(x) + self.up(self.down(x))
        return rows


class Peft(nn.Module):
    """As peft's models around one of transformers: `base_model`, whose `model` it is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **more: Any) -> Any:
        return self.base_model(input_ids=input_ids, attention_mask=attention_mask, **more)


def test_an_adapted_model_is_asked_by_its_wrapper() -> None:
    model = untrained("next", "predicting")
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    ids, other = (torch.randint(3, 23, (T,), generator=torch.Generator().manual_seed(n)) for n in (3, 4))
    wrapped = Peft(model)
    expected, found = (hw.patch(each, ids, other, target=(7, 11)).by_pair for each in (model, wrapped))
    for name, shares in expected.items():
        assert found[name] == pytest.approx(shares, abs=1e-4)
    heads = hw.attribute(model, ids, 7).heads
    assert hw.attribute(wrapped, ids, 7).heads == pytest.approx(heads, abs=1e-5)
    assert len(hw.why(wrapped, ids, other, 7, 11).heads) == len(expected)
    for layer in model.model.layers:
        layer.self_attn.o_proj = Adapted(layer.self_attn.o_proj)
    refuses(lambda: hw.attribute(wrapped, ids, 7), "well enough; merge the adapter of its output projections first")
