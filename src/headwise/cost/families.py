"""All families that are priced, and the way from a config.json to a shape.

Every table of defaults is that of the config class named beside it, in transformers 5.23; a test holds them to it.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

from headwise.cost import encoders, seq2seq
from headwise.cost.decoder_families import DECODERS, GEMMA3_TEXT, REQUIRED
from headwise.cost.fields import Family, Fields
from headwise.cost.own import OWN, own_section
from headwise.cost.shape import ModelShape
from headwise.errors import HeadwiseError

_BERT: dict[str, Any] = {  # BertConfig, RobertaConfig
    "vocab_size": 30_522,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "tie_word_embeddings": True,
}

# Other kinds of positions added tables to every layer, in versions of transformers before 5.
_TEXT_ONLY: dict[str, Any] = {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        OWN,
        *DECODERS,
        Family(
            name="gemma3",
            required=(),
            defaults={"tie_word_embeddings": True, "text_config": None, "vision_config": None},  # Gemma3Config
            build=lambda f: encoders.gemma3(f, GEMMA3_TEXT),
            heads={"Gemma3ForConditionalGeneration": "lm"},
        ),
        Family(
            name="bert",
            required=REQUIRED,
            defaults=_BERT,
            fixed=_TEXT_ONLY,
            build=encoders.bert,
            heads={"BertModel": "base", "BertForMaskedLM": "masked", "BertForPreTraining": "pretraining"},
        ),
        Family(
            name="roberta",
            required=REQUIRED,
            defaults=_BERT | {"vocab_size": 50_265, "pad_token_id": 1},
            fixed=_TEXT_ONLY,
            build=encoders.roberta,
            heads={"RobertaModel": "base", "RobertaForMaskedLM": "masked"},
        ),
        Family(
            name="vit",
            required=REQUIRED,
            defaults={  # ViTConfig
                "intermediate_size": 3072,
                "image_size": 224,
                "patch_size": 16,
                "num_channels": 3,
                "qkv_bias": True,
                "pooler_output_size": None,
            },
            build=encoders.vit,
            heads={"ViTModel": "base", "ViTForImageClassification": "classes"},
        ),
        Family(
            name="t5",
            required=("d_model", "num_layers", "num_heads"),
            defaults={  # T5Config; n_positions is in the published files and says what the model was trained on
                "vocab_size": 32_128,
                "d_kv": 64,
                "d_ff": 2048,
                "num_decoder_layers": None,
                "relative_attention_num_buckets": 32,
                "feed_forward_proj": "relu",
                "tie_word_embeddings": True,
                "n_positions": None,
            },
            aliases={
                "hidden_size": "d_model",
                "num_attention_heads": "num_heads",
                "num_hidden_layers": "num_layers",
                "head_dim": "d_kv",
            },
            derived=("relative_attention_max_distance", "is_gated_act", "scale_decoder_outputs"),
            build=seq2seq.t5,
            heads={"T5ForConditionalGeneration": "lm", "T5WithLMHeadModel": "lm", "T5Model": "base"},
        ),
        Family(
            name="whisper",
            required=(
                "d_model",
                "encoder_layers",
                "decoder_layers",
                "encoder_attention_heads",
                "decoder_attention_heads",
            ),
            defaults={  # WhisperConfig
                "vocab_size": 51_865,
                "num_mel_bins": 80,
                "decoder_ffn_dim": 1536,
                "encoder_ffn_dim": 1536,
                "max_source_positions": 1500,
                "max_target_positions": 448,
                "tie_word_embeddings": True,
            },
            aliases={
                "hidden_size": "d_model",
                "num_hidden_layers": "encoder_layers",
                "num_attention_heads": "encoder_attention_heads",
                "num_key_value_heads": "encoder_attention_heads",
            },
            build=seq2seq.whisper,
            heads={"WhisperForConditionalGeneration": "lm", "WhisperModel": "base"},
        ),
    )
}


def model_shape(config: dict[str, Any]) -> ModelShape:
    """The sizes of the model that a config.json describes; HeadwiseError names the field that cannot be priced."""
    section = own_section(config)
    kind = "headwise" if section is not None else config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise HeadwiseError(_unknown(kind))
    family = FAMILIES[kind]
    shape = family.build(Fields(config if section is None else section, family))
    return replace(shape, dtype=_dtype(config), notes=(*shape.notes, *_file_notes(config)))


def _dtype(config: dict[str, Any]) -> str | None:
    """The number format that the file names, in itself or in the part for text."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        for name in ("dtype", "torch_dtype"):
            if isinstance(place.get(name), str) and place[name] != "auto":
                return str(place[name])
    return None


def _file_notes(config: dict[str, Any]) -> list[str]:
    """What the file asks for that is priced otherwise, or not at all."""
    notes = []
    if config.get("quantization_config"):
        notes.append("quantization_config: all weights are priced in one number format, and scales are not counted")
    if config.get("num_nextn_predict_layers") or config.get("num_mtp_layers"):
        notes.append("the layers that predict further tokens while training are not counted; transformers drops them")
    return notes


def _unknown(kind: object) -> str:
    known = ", ".join(FAMILIES)
    if kind is None:
        return f"model_type is missing; known: {known}"
    near = difflib.get_close_matches(str(kind), FAMILIES, n=2)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"model_type={kind!r} is not one that can be priced exactly{hint}; known: {known}"
