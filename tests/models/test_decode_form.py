"""Llama-like models of transformers in our decode form: the text stays that of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from cases import refuses
from small_models import shaken

import headwise as hw
from headwise import HeadwiseError
from headwise.gpt.generate import Texts
from headwise.models.generate import decode_form, decode_loss
from headwise.reshape.narrow import seeing

PROMPT = [3, 1, 4, 1, 5]
SMALL = {"vocab_size": 19, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3, "hidden_size": 24}
SMALL |= {"intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
SMALL |= {"max_position_embeddings": 71}
LONGER = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGER |= {"original_max_position_embeddings": 17}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig, {"tie_word_embeddings": True}),
    "llama 3": (tf.LlamaForCausalLM, tf.LlamaConfig, {"rope_parameters": LONGER, "attention_bias": True}),
    "mistral": (tf.MistralForCausalLM, tf.MistralConfig, {"sliding_window": 7, "head_dim": 8}),
    "qwen2": (tf.Qwen2ForCausalLM, tf.Qwen2Config, {}),
    "qwen2 with windows": (
        tf.Qwen2ForCausalLM,
        tf.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config, {"head_dim": 8}),
}


def foreign(name: str) -> Any:
    torch.manual_seed(1)
    kind, config, options = MODELS[name]
    return shaken(kind(config(**SMALL | options)), size=0.1)


@pytest.mark.parametrize("name", MODELS)
def test_the_text_is_that_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls, call = foreign(name), [], Texts.__call__
    monkeypatch.setattr(Texts, "__call__", lambda self, ids, last=1: calls.append(last) or call(self, ids, last))
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=61, do_sample=False, pad_token_id=0)[0].tolist()
    assert PROMPT + list(hw.generate(model, PROMPT, 61, temperature=0)) == expected and len(calls) == 61
    form = decode_form(model)
    assert PROMPT + list(hw.generate(form, PROMPT, 61, temperature=0, lookup=3)) == expected
    assert decode_loss(form, expected) < 1e-6
    texts = hw.generate_batch(form, [PROMPT, expected[:29]], 31, temperature=0)
    assert texts == [expected[5:36], expected[29:60]]
    assert 1e-7 < decode_loss(decode_form(model, int8=True), expected) < 0.05


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama 3"])
def test_a_plan_means_what_its_mask_says(name: str) -> None:
    model = foreign(name)
    plan = hw.Plan(((hw.Keep(1, 5), None), (None, hw.Keep(2, 11))))
    ids = [(7 * n + 3) % 19 for n in range(41)]
    with torch.no_grad(), seeing(model, {f"L{n}": plan.mask(n, 6) for n in range(2)}):
        expected = [int(model(torch.tensor([ids[:n]])).logits[0, -1].argmax()) for n in range(5, 41, 5)]
    text = [next(hw.generate(model, ids[:n], 1, temperature=0, plan=plan)) for n in range(5, 41, 5)]
    assert text == expected
    whole = list(hw.generate(model, PROMPT, 23, temperature=0))
    full = hw.Plan(((None, None),) * 2)
    assert list(hw.generate(model, PROMPT, 23, temperature=0, plan=full)) == whole
    assert list(hw.generate(model, PROMPT, 23, temperature=0, plan=plan)) != whole


def test_who_has_no_form_or_plan(tmp_path: Path) -> None:
    with pytest.raises(HeadwiseError, match="rope_type='llama3' cannot be represented"):
        next(hw.generate(foreign("llama 3"), PROMPT, 3, plan=hw.Plan(((None, None),) * 2)))
    gpt2 = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=19, n_embd=12, n_head=3, n_layer=2, n_positions=31)).eval()
    refuses(lambda: decode_form(gpt2), "gpt2 is none of llama, mistral, qwen2, qwen3, its rope_type is none of def")
    refuses(lambda: next(hw.generate(gpt2, PROMPT, 3, lookup=2)), "no decode form")
    refuses(lambda: hw.generate_batch(gpt2, "31415", 3), "prompts='31415' is one text; pass a list of them")
    half = foreign("llama").bfloat16()
    refuses(lambda: decode_form(half), "float32")
    changed = foreign("llama")
    changed.model.layers[1].mlp.act_fn = torch.nn.GELU()  # not what the config says
    refuses(lambda: decode_form(changed), r"ours differs from it by .* nats a token")
    assert list(hw.generate(changed, PROMPT, 23, temperature=0)) == list(
        hw.generate(changed, PROMPT, 23, temperature=0, cache=False)
    )
