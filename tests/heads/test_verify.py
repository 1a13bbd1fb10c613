"""`verify`: reported faults, planted one by one, are found where they begin; right models are right."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import every, refuses
from families import build, gpt_of
from torch import Tensor, nn

from headwise.models.verify import SHORTER, verify

WINDOW, V, C, H = 11, 31, 12, 2


class Attention(nn.Module):
    """Causal attention with a window, rotation by position, and a cache; `fault` names what is wrong in it."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.qkv, self.out = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)

    def forward(self, x: Tensor, positions: Tensor, real: Tensor | None, past: Any) -> tuple[Tensor, Any]:
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, H, C // H).permute(2, 0, 3, 1, 4)
        angle = positions[:, None, :, None] * torch.tensor([1.0, 0.3, 0.1])
        q, k = (turned(each, angle) for each in (q, k))
        old = 0 if past is None else past[0].shape[2]
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        kept = k, v
        if self.fault == "window" and past is not None:
            drop = max(0, k.shape[2] - WINDOW + 1 - (T - 1))
            k, v = k[:, :, drop:], v[:, :, drop:]
        S = k.shape[2]
        i, j = torch.arange(T)[:, None] + S - T, torch.arange(S)
        allowed = (j <= i) & (j > i - WINDOW)
        if self.fault == "chunk" and old:
            allowed = j > i - WINDOW
        if past is None and real is None and self.fault != "packed":  # texts of a row begin again
            begins = positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1
            text = begins.cumsum(1)[:, None]
            allowed = allowed & (text[..., None] == text[:, :, None])
        if real is not None and self.fault != "padding":
            allowed = allowed & real[:, None, None, -S:] | (i == j)  # no row without a key
        allowed = allowed.expand(B, 1, T, S)
        if self.fault == "ties":  # it reads the 5 best keys, and all are equally good
            best = torch.where(allowed, 0.0, -torch.inf).topk(min(5, S)).indices
            allowed = allowed & torch.zeros_like(allowed).scatter(-1, best, True)
        out = F.scaled_dot_product_attention(q, k, v, allowed)
        if self.fault == "batch":
            out = out + 0.1 * out.mean(0)
        return self.out(out.transpose(1, 2).reshape(B, T, C)), kept


def turned(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Model(nn.Module):
    """Two layers, learned positions besides; it takes what a model of transformers takes."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fault = fault
        self.config = SimpleNamespace(vocab_size=V, model_type="planted", is_encoder_decoder=False)
        self.embed, self.place, self.head = nn.Embedding(V, C), nn.Embedding(97, C), nn.Linear(C, V)
        deeper = fault if fault in ("window", "chunk", "packed", "ties") else ""  # these lie in the second layer alone
        self.layers = nn.ModuleList([Attention("" if deeper else fault), Attention(deeper or fault)])

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> SimpleNamespace:
        B, T = input_ids.shape
        past = past_key_values
        old = 0 if past is None or self.fault == "restart" else past[0][0].shape[2]
        if position_ids is None or self.fault == "positions":
            position_ids = (old + torch.arange(T)).expand(B, -1)
        if self.fault == "uncached" and not use_cache:
            position_ids = position_ids.flip(1)
        x = self.embed(input_ids) + self.place(position_ids)
        kept = []
        for layer, attention in enumerate(self.layers):
            before = None if past is None else past[0 if self.fault == "layers" else layer]
            real = None if attention_mask is None else attention_mask.bool()
            added, cache = attention(x, position_ids.float(), real, before)
            kept.append(cache)
            x = x + added
        return SimpleNamespace(logits=self.head(x), past_key_values=kept if use_cache else None)


# What is wrong -> ways that find it, and where it begins: the attention, and the position.
FAULTS = {
    "window": ({"cache: token by token"}, "layers.1", WINDOW - 1),
    "chunk": ({"cache: in chunks"}, "layers.1", 9),
    "restart": ({"cache: token by token", "cache: in chunks"}, "embedding", 1),
    "layers": ({"cache: token by token", "cache: in chunks"}, "layers.1", 1),
    "uncached": ({"cache: token by token", "cache: in chunks"}, "embedding", 0),
    "padding": ({"padding: left", "padding: left, then token by token"}, "layers.0", 0),
    "positions": ({"padding: left", "padding: left, then token by token"}, "embedding", 0),
    "packed": ({"documents: packed into one row"}, "layers.1", 0),
    "batch": ({"documents: side by side", "padding: right"}, "layers.0", 0),
}


@every("fault", FAULTS)
def test_a_planted_fault_is_found_where_it_begins(fault: str) -> None:
    ways, layer, position = FAULTS[fault]
    verified = verify(Model(fault))
    wrong = {f"{a.question}: {a.way}": a for a in verified.answers if a.status == "differs"}
    assert not verified.right and ways <= set(wrong), (fault, verified.text())
    assert (wrong[min(ways)].layer, {wrong[way].layer for way in ways}) == (layer, {layer}), verified.text()
    assert min(answer.position or 0 for way, answer in wrong.items() if way in ways) == position, verified.text()
    asked_of = {"cache"} if fault in ("window", "chunk", "restart", "layers") else {"padding", "documents", "cache"}
    assert {answer.question for answer in wrong.values()} <= asked_of | {"padding"}, verified.text()


def test_the_same_model_without_a_fault_is_right() -> None:
    verified = verify(Model())
    assert verified.right, verified.text()
    statuses = {answer.way: answer.status for answer in verified.answers}
    assert [way for way, status in statuses.items() if status == "not asked"] == ["static"]
    for answer in verified.answers:
        if answer.status == "equal":
            assert answer.difference is not None and answer.rounding is not None
            assert answer.difference <= answer.rounding < 1e-3


def unplaced(fault: str = "") -> Model:
    """It takes no positions, and counts them from the beginning of a row."""
    model = Model(fault)
    whole = model.forward
    model.forward = lambda input_ids, attention_mask=None, past_key_values=None, use_cache=False: whole(
        input_ids, attention_mask, None, past_key_values, use_cache
    )
    return model


def test_what_has_no_right_answer_is_not_asked() -> None:
    """Choices between ties, and padding before positions that nobody can shift; a fault before them is found."""
    verified = verify(Model("ties"))
    unsure = [answer.reason for answer in verified.answers if "hangs on rounding" in answer.reason]
    assert verified.right and unsure and set(unsure) == {"layers.1 hangs on rounding, as where scores tie"}
    model = Model("ties")
    model.layers[0].fault = "batch"
    assert {answer.layer for answer in verify(model).answers if answer.status == "differs"} == {"layers.0"}
    verified = verify(unplaced())
    statuses = {answer.way: answer.status for answer in verified.answers if answer.question == "padding"}
    assert list(statuses.values()) == ["equal", "not asked", "not asked"], verified.text()
    assert "it counts the padding as positions: pad right" in verified.text()
    assert not verify(unplaced("batch")).right


@pytest.mark.slow
@every("name", ["llama", "gpt2", "mistral", "gemma2", "bert"])
def test_families_of_transformers_are_right(name: str) -> None:
    verified = verify(build(name))
    assert verified.right and sum(answer.status == "equal" for answer in verified.answers) >= 3, verified.text()


def test_a_model_of_ours_and_what_cannot_be_asked() -> None:
    verified = verify(gpt_of("llama"))
    cache = [answer.status for answer in verified.answers if answer.question == "cache"]
    assert cache == ["equal", "equal", "equal", "not asked"] and verified.tokens == 24
    assert verify(gpt_of("llama"), tokens=SHORTER).tokens == SHORTER
    refuses(lambda: verify(gpt_of("llama"), tokens=1), "tokens=1 must be 2 or more")
    refuses(lambda: verify(nn.Linear(3, 5)), "does not say its vocab_size")
    refuses(lambda: verify(build("t5")), "reads one text and writes another; verify needs a model of one text")
