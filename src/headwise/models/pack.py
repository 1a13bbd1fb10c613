"""A small model of ours as one block of data for a page, where `view/page/model.js` runs it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from torch import nn

from headwise.corpus.tokens import SMALL_I, Tokens
from headwise.gpt.gpt import GPT
from headwise.models.sites import attention_layers

# most parameters of a packed model, a round number by the size of the page: base64 takes 4 bytes for 3, 10.7 MB
MOST = 2_000_000

# The kinds that `view/page/tokens.js` reads, as tokenizer.json calls them.
READABLE = {
    "normalizer": "NFC NFD NFKC NFKD Lowercase Prepend Replace Sequence",
    "pre_tokenizer": "WhitespaceSplit Whitespace Split ByteLevel Sequence",
}
# options of a tokenizer that it does not follow; others, such as ignore_merges of Llama 3, it does
UNREAD = "dropout continuing_subword_prefix end_of_word_suffix byte_fallback fuse_unk"


def pack_model(model: nn.Module, tokens: object) -> dict[str, Any]:
    """The block of data: config, tokenizer, weights in base64; or `{"reason": ..., ...}`, why there is none.

    tokens  the model's tokenizer
    reason  "foreign" (no GPT of ours, or with an attention that is not), "reshaped" (its layers differ), "size" (with
            `parameters` and `most`), or "tokenizer" (with the `part` that the page cannot follow)
    """
    if (
        not (isinstance(model, GPT) and isinstance(tokens, Tokens))
        or model.config.own_attention
    ):
        return {"reason": "foreign"}
    if any(
        layer.spec != model.config.attention
        for n, layer in enumerate(attention_layers(model))
    ):
        return {"reason": "reshaped"}
    if model.n_parameters > MOST:
        return {"reason": "size", "parameters": model.n_parameters, "most": MOST}
    layout = json.loads(tokens.to_json())
    part = unread_part(layout)
    if part:
        return {"reason": "tokenizer", "part": part}
    # Where each token is shown as the vocabulary writes it, the list is not packed (None at the end).
    shown = tokens.shown(range(len(tokens)))
    config = model.config
    spec = model.config.attention
    state = model.state_dict()
    if config.tied:
        del state["lm_head.weight"]  # the embedding once more
    # in float32 with the lowest byte first (<), whatever the machine's own order is
    pieces = [
        weight.detach().cpu().float().numpy().astype("<f4").tobytes()
        for weight in state.values()
    ]
    return {
        # The spec has worked out what the config leaves to a default, and has eps, which the config lacks.
        "config": asdict(config)
        | {"n_kv_heads": spec.n_kv_heads, "qk_norm_eps": spec.qk_norm_eps},
        "parameters": model.n_parameters,
        "tensors": [[name, list(weight.shape)] for name, weight in state.items()],
        "weights": base64.b64encode(b"".join(pieces)).decode("ascii"),
        "tokenizer": {
            key: layout[key]
            for key in ("model", "normalizer", "pre_tokenizer", "added_tokens")
        },
        "shown": None
        if all(tokens.vocabulary.get(token) == i for i, token in enumerate(shown))
        else shown,
    }


def unread_part(layout: dict[str, Any]) -> str | None:
    """What of a tokenizer.json the page could not follow exactly; None where it follows all.

    Its post_processor frames a text for other programs alone: `Tokens` leaves it out as the page does.
    """
    model = layout["model"]
    if model["type"] not in ("WordLevel", "BPE"):
        return f"model {model['type']}"
    for name in UNREAD.split():
        if model.get(name):
            return f"{model['type']} with {name}"
    # Added tokens that are not special are looked for in the text before all else, which tokens.js does not do.
    if any(not token["special"] for token in layout["added_tokens"]):
        return "added tokens"
    for key, readable in READABLE.items():
        for step in _steps(layout[key]):
            kind = step["type"]
            # Replacing is followed where the pattern is a text, or that of `Tokens.words`; splitting, where what
            # matches becomes a piece of its own (Isolated) or is dropped (Removed). The page reads a regular
            # expression as JavaScript's, which those that `Tokens` sets are, too; others are not looked at here.
            simple = True
            if kind == "Replace":
                pattern = step["pattern"]
                simple = "String" in pattern or pattern == {"Regex": SMALL_I}
            elif kind == "Split":
                simple = (
                    step["behavior"] in ("Isolated", "Removed") and not step["invert"]
                )
            if kind not in readable.split() or not simple:
                return f"{key} {kind}"
    return None


def _steps(rule: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A rule and those that it is made of, at any depth; none for None."""
    if rule:
        yield rule
        for part in rule.get("pretokenizers") or rule.get("normalizers") or ():
            yield from _steps(part)
