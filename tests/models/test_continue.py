"""Continuing a text: one loop for our GPT and for models of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from cases import refuses
from small_models import tiny
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import headwise as hw
from headwise.corpus.tokens import Tokens
from headwise.gpt.checkpoint import save_model
from headwise.gpt.gpt import generate as generate_ours
from headwise.models.ask import predicts
from headwise.models.open import described, generate, open_model

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
def test_greedy_text_is_that_of_transformers(make: Any) -> None:
    model, n = make(), 67  # more than twice the context of 31: the older half is forgotten
    assert generate(model, PROMPT, 23, temperature=0) == stock(model, PROMPT, 23)
    for options in ({}, {"temperature": 0.7, "top_k": 5, "seed": 3}):
        text = generate(model, PROMPT, n, **options)
        assert len(text) == n
        assert generate(model, PROMPT, n, **options | {"seed": 8}) != text
        assert generate(model, PROMPT, n, stop=text[11], **options) == text[: text.index(text[11])]


def word_tokenizer(start: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(18)} | {"</s>": 18}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    if start:
        tokenizer.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 18)])
    return tokenizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sharded_folder_and_a_text(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.models.open.has_bfloat16", lambda: True)  # also on a processor without
    llama().to(dtype).save_pretrained(tmp_path, max_shard_size="2KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    tf.PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(True)).save_pretrained(tmp_path)
    model = open_model(tmp_path)
    assert next(model.parameters()).dtype == dtype
    expected = generate(model, [18, 3, 5], 9, temperature=0)
    assert generate(model, "w3 w5", 9, temperature=0) == expected
    assert generate(tmp_path, "w3 w5", 9, temperature=0) == expected


def test_ends_and_texts(tmp_path: Path) -> None:
    model = llama()
    whole = generate(model, PROMPT, 23, temperature=0)
    model.generation_config.eos_token_id = [whole[5], 18]
    model.save_pretrained(tmp_path)
    assert generate(tmp_path, PROMPT, 23, temperature=0) == whole[: whole.index(whole[5])]
    tokens = Tokens.words(LINES)
    save_model(tmp_path, tiny("verbs", len(tokens), context=29), tokens)
    model = open_model(tmp_path)
    for text, ids in (("he works =", tokens.prompt("he works =")), ("", [tokens.boundary])):
        expected = list(generate_ours(model, ids, 17, stops=[tokens.boundary]))  # type: ignore[arg-type]
        assert generate(model, text, 17) == expected == generate(tmp_path, ids, 17)
    refuses(lambda: generate(model, "he flies", 3), "has not seen the words 'flies'")
    model, calls = llama(), []
    predicts(model)  # tries the model once
    model.register_forward_hook(lambda *_: calls.append(1))
    stream = generate(model, PROMPT, 7, stream=True)
    for n in range(1, 4):
        next(stream)
        assert len(calls) == n


def test_what_cannot_be_continued_says_so(tmp_path: Path) -> None:
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 20}
    bert = tf.BertForMaskedLM(tf.BertConfig(vocab_size=19, **sizes))
    refuses(lambda: generate(bert, PROMPT, 3), "BertForMaskedLM does not predict the next token, so it has no")
    refuses(lambda: generate(llama(), "he works", 3), "no tokenizer of this LlamaForCausalLM is known, .*pass ids")
    llama().save_pretrained(tmp_path)
    refuses(lambda: generate(tmp_path, "he works", 3), "no tokenizer of this")
    refuses(lambda: generate(llama(), [19], 3), "token id 19 lies outside the vocabulary of 19")
    assert described(llama()) is None


def stock(model: Any, prompt: list[int], n_tokens: int) -> list[int]:
    text = model.generate(torch.tensor([prompt]), max_new_tokens=n_tokens, do_sample=False, pad_token_id=0)
    return text[0, len(prompt) :].tolist()


def gemma() -> Any:
    """In bfloat16, which some processors lay out in another way."""
    torch.manual_seed(1)
    shape = LLAMA | {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 71, "sliding_window": 7}
    return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**SMALL | shape, pad_token_id=None)).eval().bfloat16()


@pytest.mark.parametrize("watched", [1, 11])
def test_who_begins_to_watch_sees_the_model_and_the_text_stays(watched: int) -> None:
    for model in (llama(max_position_embeddings=71), gemma()):
        expected, text = stock(model, PROMPT, 47), []
        stream = generate(model, PROMPT, 47, temperature=0, stream=True)
        for n in range(47):
            if n != watched:
                text.append(next(stream))
                continue
            with hw.watch(model) as seen:
                text.append(next(stream))
            assert seen["L1.H2"].n_rows >= 1
        assert text == expected
