"""Tiny models of transformers that read words, as folders: one that predicts, one that fills in, one that embeds."""

from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ["the", "cat", "saw", "a", "dog", "and", "Ann", "met", "Bob", "in", "park", "then", ".", ",", "house"]
SIGNS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZES: dict[str, Any] = {
    "hidden_size": 30, "num_hidden_layers": 2, "intermediate_size": 37, "max_position_embeddings": 23,
}  # fmt: skip


def word_folder(folder: Path, kind: str) -> Path:
    """A model of random weights, so large that every head matters. A kind: next, masked, states."""
    vocabulary = {word: i for i, word in enumerate([*SIGNS, *WORDS])}
    torch.manual_seed(5)
    if kind == "next":
        sizes = SIZES | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
        model: Any = tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=len(vocabulary), **sizes))
        template = "[CLS] $A"
    else:
        config = tf.BertConfig(vocab_size=len(vocabulary), num_attention_heads=3, **SIZES)
        model = (tf.BertForMaskedLM if kind == "masked" else tf.BertModel)(config)
        template = "[CLS] $A [SEP]"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    signs = [(sign, vocabulary[sign]) for sign in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=signs)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SIGNS, strict=True))
    tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return folder
