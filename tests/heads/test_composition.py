"""Composition in the weights: against dense matrices, drawn ones, and heads that were built by hand."""

import sys
from typing import Any

import pytest
import torch
import transformers as tf
from cases import refuses
from planted import induction_model
from small_models import shaken
from torch import Tensor, nn

import headwise as hw

SIZES: dict[str, Any] = {"vocab_size": 131, "bos_token_id": 1, "eos_token_id": 2}
SIZED = {"hidden_size": 42, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 37, **SIZES}
GROUPED = {"num_key_value_heads": 2, "head_dim": 10, "pad_token_id": 0, **SIZED}
MODELS: dict[str, Any] = {
    "ours": lambda: hw.GPT(
        hw.GPTConfig(vocab_size=131, context=31, n_layers=3, n_heads=6, n_kv_heads=2, d_model=42, head_dim=10)
    ),
    "packed": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=42, n_layer=3, n_head=6, **SIZES)),
    "interleaved": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(rotary_pct=0.6, **SIZED)),
    "normed": lambda: tf.PersimmonForCausalLM(tf.PersimmonConfig(partial_rotary_factor=0.6, **SIZED)),
    "gated": lambda: tf.Qwen3NextForCausalLM(
        tf.Qwen3NextConfig(num_experts=0, layer_types=["full_attention"] * 3, **GROUPED)
    ),
    "grouped": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)),
}


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
    if isinstance(model, tf.GPTNeoXForCausalLM | tf.PersimmonForCausalLM):
        is_neox = isinstance(model, tf.GPTNeoXForCausalLM)
        attention = model.gpt_neox.layers[layer].attention if is_neox else model.model.layers[layer].self_attn
        q, k, v = attention.query_key_value.weight.view(6, 3, 7, 42)[h].double()
        return q.T @ k, attention.dense.weight[:, h * 7 : h * 7 + 7].double() @ v
    attention, g = model.model.layers[layer].self_attn, h // 3  # type: ignore[union-attr, index]
    # Qwen3-Next has the gate of a head behind its query
    wide = len(attention.q_proj.weight) // 6
    q = attention.q_proj.weight[h * wide : h * wide + 10].double()
    k, v = (x.weight[g * 10 : g * 10 + 10].double() for x in (attention.k_proj, attention.v_proj))
    return q.T @ k, attention.o_proj.weight[:, h * 10 : h * 10 + 10].double() @ v


@pytest.mark.parametrize("kind", MODELS)
def test_scores_are_those_of_the_dense_matrices(kind: str) -> None:
    torch.manual_seed(3)
    model = shaken(MODELS[kind](), size=0.1)
    found = hw.composition(model)
    names = [f"L{layer}.H{h}" for layer in range(3) for h in range(6)]
    later = [(s, r) for r in names for s in names if s[1] < r[1]]
    assert sorted(zip(found.sender, found.receiver, strict=True)) == sorted(later)
    found = found.set_index(["sender", "receiver"])
    with torch.no_grad():
        for s, r in ((0, 7), (5, 12), (8, 17), (3, 16)):
            (_, ov), (qk, v) = dense(model, names[s]), dense(model, names[r])
            for at, matrix in (("q", qk.T), ("k", qk), ("v", v)):
                expected = (matrix @ ov).norm() / matrix.norm() / ov.norm()
                assert found.loc[(names[s], names[r]), at] == pytest.approx(float(expected), abs=1e-9)


def test_the_gains_of_norms_are_a_table_of_their_own() -> None:
    """Gemma 3 has four: before the layer, of queries and of keys, and after W_O; the score with them folded in."""
    sizes = {"hidden_size": 42, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 1}
    model = tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(head_dim=10, intermediate_size=37, pad_token_id=0, **sizes, **SIZES)
    )
    torch.manual_seed(3)
    model.requires_grad_(False)
    found = hw.composition(shaken(model, size=0.3)).set_index(["sender", "receiver"])
    maps = []
    for layer in model.model.layers:
        attention, reads = layer.self_attn, 1 + layer.input_layernorm.weight.double()
        gains = (1 + norm.weight.double() for norm in (attention.q_norm, attention.k_norm))
        q, k = (
            x.weight.double().view(-1, 10, 42) * reads * gain[:, None]
            for x, gain in zip((attention.q_proj, attention.k_proj), gains, strict=True)
        )
        o = attention.o_proj.weight.double() * (1 + layer.post_attention_layernorm.weight.double())[:, None]
        ov = o.view(42, 6, 10).transpose(0, 1) @ (attention.v_proj.weight.double() * reads)
        maps.append((q.mT @ k[0], ov))
    for (a, s), (b, r) in (((0, 1), (1, 5)), ((0, 4), (2, 0)), ((1, 2), (2, 3))):
        qk, ov = maps[b][0][r], maps[a][1][s]
        for at, matrix in (("q", qk.T), ("k", qk), ("v", maps[b][1][r])):
            expected = float((matrix @ ov).norm() / matrix.norm() / ov.norm())
            assert found.loc[(f"L{a}.H{s}", f"L{b}.H{r}"), f"{at}_gain"] == pytest.approx(expected, abs=1e-6)
            assert abs(found.loc[(f"L{a}.H{s}", f"L{b}.H{r}"), at] - expected) > 1e-4


@pytest.mark.parametrize(
    ("kind", "more"), [("StableLm", {"qk_layernorm": True}), ("Cohere", {"use_qk_norm": True}), ("Qwen3", {})]
)
def test_a_gain_of_queries_may_be_of_one_head(kind: str, more: dict[str, Any]) -> None:
    """It gives what the same gain gives in the rows of W_Q and W_K."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = getattr(tf, f"{kind}Config")(intermediate_size=37, head_dim=8, pad_token_id=0, **sizes, **SIZES, **more)
    model = shaken(getattr(tf, f"{kind}ForCausalLM")(config), size=0.3).requires_grad_(False)
    found = hw.composition(model)
    for name, norm in list(model.named_modules()):
        if name.rpartition(".")[2] not in ("q_norm", "k_norm", "q_layernorm", "k_layernorm"):
            continue
        gain = torch.cat([p.reshape(-1, 8).clone() for p in norm.parameters()])
        rows = model.get_submodule(f"{name[: name.rindex('.') + 2]}_proj").weight.view(-1, 8, 48)
        rows *= gain[..., None]
        for p in norm.parameters():
            p.fill_(1)
    folded = hw.composition(model)
    assert (found.k - folded.k).abs().max() > 1e-3
    for at in ("q_gain", "k_gain"):
        assert found[at].to_numpy() == pytest.approx(folded[at].to_numpy(), abs=1e-6)


def test_the_induction_circuit_is_the_strongest_path() -> None:
    found = hw.composition(induction_model())
    best = found.loc[found.k.idxmax()]
    assert (best.sender, best.receiver) == ("L0.H1", "L1.H0")
    assert best.k == pytest.approx(11**-0.5)  # two maps of rank 11 that meet in all of it
    assert best.random == pytest.approx(50**-0.5)


def test_what_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = hw.composition(tf.T5Model(tf.T5Config(num_layers=2, vocab_size=131)))
    assert {(s[: s.index(".")], r[: r.index(".")]) for s, r in zip(found.sender, found.receiver, strict=True)} == {
        ("encoder", "encoder"),
        ("decoder", "decoder"),
    }
    sizes = {"hidden_size": 33, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 37}
    config = tf.CLIPConfig(text_config=sizes, vision_config=sizes | {"image_size": 20, "patch_size": 5})
    assert len(hw.composition(tf.CLIPModel(config))) == 2 * 9  # within either tower
    body = tf.BertModel(tf.BertConfig(hidden_size=33, num_hidden_layers=2, num_attention_heads=3, intermediate_size=37))
    body.encoder.layer[1].attention.output.dense.weight = nn.Parameter(torch.zeros(33, 32))
    refuses(lambda: hw.composition(body), r"L1.*W_O")
    monkeypatch.setitem(sys.modules, "pandas", None)
    refuses(lambda: hw.composition(body), r"pandas: pip install")
