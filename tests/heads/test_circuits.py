"""Circuits in the weights: against dense matrices, drawn baselines, and heads that were built by hand."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from cases import refuses
from planted import WORDS, induction_model
from small_models import shaken
from torch import Tensor, nn

import headwise as hw
from headwise.heads.circuits import circuits, random_moments

SIZES: dict[str, Any] = {"vocab_size": 131, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, Any] = {
    "ours": lambda: hw.GPT(
        hw.GPTConfig(vocab_size=131, context=31, n_layers=3, n_heads=6, n_kv_heads=2, d_model=42, head_dim=10)
    ),
    "packed": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=42, n_layer=3, n_head=6, **SIZES)),
    "grouped": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(
            hidden_size=42, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=10,
            intermediate_size=37, pad_token_id=0, **SIZES,
        )
    ),
}  # fmt: skip


def dense(model: nn.Module, name: str) -> tuple[Tensor, Tensor]:
    """W_QK and W_OV of a head, (42,42) each, cut out of the model's own matrices."""
    layer, h = int(name[1]), int(name[-1])
    if isinstance(model, hw.GPT):
        head = model.blocks[layer].attention.heads[h]  # type: ignore[union-attr, index]
        return head.wq.double().T @ head.wk.double(), head.wo.double() @ head.wv.double()
    if isinstance(model, tf.GPT2LMHeadModel):
        attention = model.transformer.h[layer].attn
        q, k, v = (x[:, h * 7 : h * 7 + 7].T.double() for x in attention.c_attn.weight.split(42, 1))
        return q.T @ k, attention.c_proj.weight[h * 7 : h * 7 + 7].T.double() @ v
    attention, g = model.model.layers[layer].self_attn, h // 3  # type: ignore[union-attr, index]
    q = attention.q_proj.weight[h * 10 : h * 10 + 10].double()
    k, v = (x.weight[g * 10 : g * 10 + 10].double() for x in (attention.k_proj, attention.v_proj))
    return q.T @ k, attention.o_proj.weight[:, h * 10 : h * 10 + 10].double() @ v


@pytest.mark.parametrize("kind", MODELS)
def test_scores_and_spectra_are_those_of_the_dense_matrices(kind: str) -> None:
    torch.manual_seed(3)
    model = shaken(MODELS[kind](), size=0.1)
    with torch.no_grad():
        found = circuits(model)
        names = list(found.heads)
        for name, head in found.heads.items():
            for values, matrix in zip((head.qk, head.ov), dense(model, name), strict=True):
                assert values == pytest.approx(torch.linalg.svdvals(matrix)[: len(values)].numpy(), abs=1e-9)
        for s, r in ((0, 7), (5, 12), (8, 17), (3, 16)):
            (_, ov), (qk, later) = dense(model, names[s]), dense(model, names[r])
            for at, matrix in (("q", qk.T), ("k", qk), ("v", later)):
                expected = (matrix @ ov).norm() / matrix.norm() / ov.norm()
                assert found.scores[at][r, s] == pytest.approx(float(expected), abs=1e-9)
    earlier = np.arange(18)[None] // 6 < np.arange(18)[:, None] // 6
    assert all((np.isfinite(scores) == earlier).all() for scores in found.scores.values())


def test_the_baseline_is_that_of_drawn_directions() -> None:
    """4,000 draws know the mean to 1.6 % of the spread, and the variance of a skewed score to some 5 %."""
    generator = torch.Generator().manual_seed(3)
    C, reads, writes = 13, torch.tensor([[5.0, 2, 1]]).double(), torch.tensor([[3.0, 3, 1, 0.5, 0.1]]).double()
    drawn = torch.randn(4000, C, C, generator=generator, dtype=torch.float64)
    turned = torch.linalg.qr(drawn).Q[:, :3, :5]
    squares = (reads.mT * turned * writes).square().sum((1, 2)) / reads.norm() ** 2 / writes.norm() ** 2
    mean, variance = random_moments(reads, writes, C)
    spread = float(squares.std())
    assert float(squares.mean()) == pytest.approx(mean, abs=4 * spread / 4000**0.5)
    assert float(squares.var()) == pytest.approx(float(variance), rel=0.2)


def test_the_induction_circuit_is_the_only_path() -> None:
    found = circuits(induction_model())
    assert [path[:3] for path in found.paths] == [("L0.H1", "L1.H0", "k")]
    assert found.paths[0].score == pytest.approx(11**-0.5)  # two maps of rank 11 that meet in all of it
    assert found.baseline == pytest.approx(50**-0.5)
    assert found.heads["L1.H0"].ov_rank == pytest.approx(11) and found.heads["L0.H1"].qk_rank == pytest.approx(16)
    assert "L0.H1 -> L1.H0 through k: 0.30" in repr(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_nothing_stands_out_in_untrained_models(kind: str) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        found = circuits(MODELS[kind](), orders=[[7, 11, 13, 17, 19]])
        assert found.paths == []
        for head in found.heads.values():
            assert head.copies and head.suppresses and head.succeeds
            assert head.copies.share < 0.2 and head.suppresses.share < 0.2 and head.succeeds.control == 0.2


def test_copying_suppression_and_succession_are_told_apart() -> None:
    """L1.H0 copies; L1.H1 is made to suppress, and L1.H2 to say the next token."""
    model = induction_model()
    with torch.no_grad():
        for h, matrix in ((1, -torch.eye(WORDS)), (2, torch.diag(torch.ones(WORDS - 1), -1))):
            head = model.blocks[1].attention.heads[h]  # type: ignore[union-attr, index]
            head.wv.zero_()[:WORDS, :WORDS] = torch.eye(WORDS)
            head.wo.zero_()[39:50, :WORDS] = matrix
    heads = circuits(model, orders=[[2, 3, 4, 5], [7, 8, 9]]).heads
    copies, suppresses, succeeds = (
        {name for name, head in heads.items() if getattr(head, what).share > 0.9}
        for what in ("copies", "suppresses", "succeeds")
    )
    assert (copies, suppresses, succeeds) == ({"L1.H0"}, {"L1.H1"}, {"L1.H2"})
    assert heads["L1.H0"].copies.control < 0.2 and heads["L1.H2"].succeeds.control == pytest.approx((3 / 4 + 2 / 3) / 5)


def test_what_is_not_known_is_refused() -> None:
    refuses(lambda: circuits(induction_model(), orders=[[3, 11]]), "two or more ids below 11")
    assert np.isnan(circuits(tf.T5Model(tf.T5Config(num_layers=1, vocab_size=131))).scores["v"][8:, :8]).all()
    body = tf.BertModel(tf.BertConfig(hidden_size=33, num_hidden_layers=2, num_attention_heads=3, intermediate_size=37))
    assert circuits(body).heads["L1.H2"].copies is None  # no output matrix
    body.encoder.layer[1].attention.output.dense.weight = nn.Parameter(torch.zeros(33, 32))
    refuses(lambda: circuits(body), r"L1.*W_O")
