"""Continuing a text: one loop for our GPT and for models of transformers."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from cases import refuses
from small_models import tiny
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import headwise as hw
from headwise import HeadwiseError
from headwise.corpus.tokens import Tokens
from headwise.gpt.checkpoint import save_model
from headwise.gpt.generate import generate as generate_ours
from headwise.models.ask import predicts
from headwise.models.generate import generate
from headwise.models.open import described, open_model

LINES = ["he works = él trabaja", "I work = yo trabajo"]
PROMPT = [3, 1, 4, 1, 5]
SMALL = {"vocab_size": 19, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3}
LLAMA = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 3}


def llama(**changes: Any) -> Any:
    torch.manual_seed(1)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL | LLAMA | {"max_position_embeddings": 31} | changes)).eval()


def gpt2() -> Any:
    torch.manual_seed(2)
    return tf.GPT2LMHeadModel(tf.GPT2Config(**SMALL, n_embd=12, n_head=3, n_layer=2, n_positions=31)).eval()


def first_gpt() -> Any:
    """Of the first GPT transformers keeps no keys and values."""
    torch.manual_seed(3)
    config = tf.OpenAIGPTConfig(vocab_size=19, n_embd=12, n_head=3, n_layer=2, n_positions=31, initializer_range=0.3)
    return tf.OpenAIGPTLMHeadModel(config).eval()


@pytest.mark.parametrize("make", [llama, gpt2, first_gpt])
def test_greedy_text_is_that_of_transformers_and_the_cache_changes_none(make: Any) -> None:
    model, n = make(), 67  # more than twice the context of 31: the older half is forgotten
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=23, do_sample=False, pad_token_id=0)[0].tolist()
    assert PROMPT + list(generate(model, PROMPT, 23, temperature=0)) == expected
    for options in ({}, {"temperature": 0.7, "top_k": 5, "seed": 3}):
        text = list(generate(model, PROMPT, n, **options))
        assert len(text) == n and list(generate(model, PROMPT, n, cache=False, **options)) == text
        assert list(generate(model, PROMPT, n, **options | {"seed": 8})) != text
        assert list(generate(model, PROMPT, n, stop=text[11], **options)) == text[: text.index(text[11])]


@pytest.mark.slow
def test_a_plan_is_kept_and_refused_by_name() -> None:
    torch.manual_seed(5)
    shape = {"vocab_size": 19, "context": 31, "n_layers": 2, "n_heads": 6, "n_kv_heads": 3, "d_model": 36}
    model = hw.GPT(hw.GPTConfig(**shape, init_std=0.3)).eval()
    plan = hw.Plan(((hw.Keep(1, 3), None, hw.Keep(0, 2)), (None, hw.Keep(2, 1), hw.Keep(1, 3))))
    masked = copy.deepcopy(model)
    for layer, block in enumerate(masked.blocks):
        block.attention.spec = block.attention.spec.replace(mask=plan.mask(layer, 6))
    for options in ({"temperature": 0}, {"temperature": 0.7, "top_k": 5, "seed": 3}):
        text = list(generate(model, PROMPT, 67, plan=plan, **options))
        assert text == list(generate(masked, PROMPT, 67, cache=False, **options))
        assert text == list(generate(model, PROMPT, 67, plan=plan, cache=False, **options))
        assert text != list(generate(model, PROMPT, 67, **options))
    with pytest.raises(HeadwiseError, match="no cache that takes a plan: gpt2 is none of llama, mistral"):
        list(generate(gpt2(), PROMPT, 3, plan=plan))
    with pytest.raises(HeadwiseError, match="the plan is for 1 layers of 3 key/value heads, and the model has 2 of 3"):
        list(generate(model, PROMPT, 3, plan=hw.Plan(plan.keep[:1])))


def word_tokenizer(start: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(18)} | {"</s>": 18}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    if start:
        tokenizer.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 18)])
    return tokenizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sharded_folder_and_a_text(tmp_path: Path, dtype: torch.dtype) -> None:
    llama().to(dtype).save_pretrained(tmp_path, max_shard_size="2KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    tf.PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(True)).save_pretrained(tmp_path)
    model = open_model(tmp_path)
    assert next(model.parameters()).dtype == dtype
    expected = list(generate(model, [18, 3, 5], 9, temperature=0))
    assert list(generate(model, "w3 w5", 9, temperature=0)) == expected
    assert list(generate(tmp_path, "w3 w5", 9, temperature=0)) == expected


def test_ends_and_texts(tmp_path: Path) -> None:
    model = llama()
    whole = list(generate(model, PROMPT, 23, temperature=0))
    model.generation_config.eos_token_id = [whole[5], 18]
    model.save_pretrained(tmp_path)
    assert list(generate(tmp_path, PROMPT, 23, temperature=0)) == whole[: whole.index(whole[5])]
    tokens = Tokens.words(LINES)
    save_model(tmp_path, tiny("verbs", len(tokens), context=29), tokens)
    model = open_model(tmp_path)
    for text, ids in (("he works =", tokens.prompt("he works =")), ("", [tokens.boundary])):
        expected = list(generate_ours(model, ids, 17, stop=tokens.boundary))  # type: ignore[arg-type]
        assert list(generate(model, text, 17)) == expected == list(generate(tmp_path, ids, 17))
    refuses(lambda: generate(model, "he flies", 3), "has not seen the words 'flies'")
    model, calls = llama(), []
    predicts(model)  # tries the model once
    model.register_forward_hook(lambda *_: calls.append(1))
    stream = generate(model, PROMPT, 7)
    for n in range(1, 4):
        next(stream)
        assert len(calls) == n


def test_what_cannot_be_continued_says_so(tmp_path: Path) -> None:
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 20}
    bert = tf.BertForMaskedLM(tf.BertConfig(vocab_size=19, **sizes))
    refuses(lambda: generate(bert, PROMPT, 3), "BertForMaskedLM does not predict the next token, so it cannot continue")
    refuses(lambda: generate(llama(), "he works", 3), r"the model was not read from a folder.*; pass token ids instead")
    llama().save_pretrained(tmp_path)
    refuses(lambda: generate(tmp_path, "he works", 3), "has no tokenizer, so its words are not known; pass token ids")
    refuses(lambda: next(generate(llama(), [19], 3)), "token id 19 lies outside the vocabulary of 19")
    assert described(llama()) is None
