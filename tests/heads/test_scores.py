"""Largest scores, log-sum-exp, sinks and gates of families of transformers, against their own softmax in float64."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from cases import refuses
from dense import score_statistics
from families import gpt_of
from helpers import watch_call
from torch import Tensor

import headwise as hw

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_gradients")

SIZES = {
    "vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 32, "max_position_embeddings": 64, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
# Family -> its own fields, and the statistics that its heads have beside `score_max` and `lse`.
FAMILIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "llama": ({}, set()),
    "mistral": ({"sliding_window": 7}, set()),
    "gemma2": ({"sliding_window": 7, "query_pre_attn_scalar": 3, "attn_logit_softcapping": 2.0}, set()),
    "gpt_oss": ({"sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2}, {"sink"}),
    "qwen3_next": ({**EXPERTS, **DELTA, "shared_expert_intermediate_size": 16}, {"gate"}),
    "qwen3_5_text": (DELTA, {"gate"}),
    "olmo_hybrid": (DELTA, set()),  # its gates lie in the layers that have a state in the place of keys
    "step3p5": ({"sliding_window": 7, "n_routed_experts": 4, "num_experts_per_tok": 2}, {"gate"}),
    "afmoe": ({"sliding_window": 7}, {"gate"}),
    "laguna": ({}, {"gate"}),
    "bitnet": ({}, set()),  # a norm between attention and W_O is no gate
    "diffllama": ({}, set()),  # nor are differences of heads
}


def model_of(family: str) -> Any:
    torch.manual_seed(3)
    config = transformers.CONFIG_MAPPING[family](**{**SIZES, **FAMILIES[family][0]})
    if family == "step3p5":  # the text part of a larger model, which no auto class builds
        model = transformers.models.step3p7.modeling_step3p7.Step3p7TextModel(config).eval()
    else:
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, weights in model.named_parameters():
        if "sink" in name:
            weights.normal_()
    return model


def dense(model: Any, ids: Tensor) -> dict[int, dict[str, Tensor]]:
    """Layer -> name -> (H,T) of the first text, by an attention function that keeps everything, in float64."""
    model, found, gave = copy.deepcopy(model), {}, {}

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor, **options: Any) -> Any:
        k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        dtype, q, sink = q.dtype, q.double(), options.get("s_aux")
        scores = q @ k.mT * options["scaling"]
        if options.get("softcap"):
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        scores = logits = scores.masked_fill(attention_mask[..., : k.shape[2]] < -1e30, -torch.inf)
        found[module.layer_idx] = score_statistics(scores[0], sink)
        if sink is not None:
            logits = torch.cat([scores, sink.double().view(1, -1, 1, 1).expand(*q.shape[:3], 1)], -1)
        out = (logits.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2).contiguous().to(dtype)
        gave[module.layer_idx] = out
        return out, None

    def at_w_o(module: Any, args: Any, layer: int) -> None:
        H = found[layer]["lse"].shape[0]
        ratio = args[0][0].double().unflatten(-1, (H, -1)) / gave[layer][0].double()
        found[layer]["gate"] = ratio.mean(-1).T

    transformers.AttentionInterface.register("dense", attend)
    transformers.AttentionMaskInterface.register("dense", transformers.masking_utils.eager_mask)
    model.set_attn_implementation("dense")
    for layer, block in enumerate(model.base_model.layers):
        for name, module in block.named_modules():
            if name.endswith("self_attn.o_proj"):
                module.register_forward_pre_hook(lambda m, args, layer=layer: at_w_o(m, args, layer))
    model(ids)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    model, ids = model_of(family), torch.randint(3, 61, (1, 29), generator=torch.Generator().manual_seed(1))
    seen, more = watch_call(model, ids), FAMILIES[family][1]
    expected = dense(model, ids)
    assert expected
    for layer, of_layer in expected.items():
        for h in range(len(of_layer["lse"])):
            rows = seen[f"L{layer}.H{h}"].rows
            assert {"score_max", "lse", "sink", "gate"} & set(rows) == {"score_max", "lse"} | more
            for name in ("score_max", "lse", *more):
                right = of_layer[name][h]
                # a score is a sum of products, as large as the largest score of its head
                near = 1e-5 + 2e-6 * float(abs(right).max())
                np.testing.assert_allclose(rows[name], right, rtol=1e-5, atol=near, err_msg=f"{name} {layer}")


def test_only_some_statistics() -> None:
    model, ids = gpt_of("llama", vocab_size=61), torch.randint(61, (2, 13))
    whole = watch_call(model, ids)
    for only in (["score_max"], ["score_peak", "lse"], ["previous", "first"]):
        with hw.watch(model, only=only) as seen:
            model(ids)
        head, names = seen["L1.H1"], {"score_max" if name == "score_peak" else name for name in only}
        assert set(head.rows) == names and repr(head) and seen.to_frame().shape[0] == len(whole)
        for name in names:
            np.testing.assert_allclose(head.rows[name], whole["L1.H1"].rows[name], rtol=1e-5, atol=1e-6)
    with hw.watch(model, only=["lse"]) as seen:
        model(ids)
    refuses(lambda: seen["L0.H0"].thumbnail, "keeps no pictures")
    refuses(lambda: watch_call(model, ids, only=["induction"]), "'induction' is measured on random tokens")
    refuses(lambda: watch_call(model, ids, only=["entropie"]), "no statistic 'entropie'")
