"""What is known of a model before a weight is read, without torch: the record of its family, and what its folder says.

Each family has a record in families.toml, which also decides what may be done with its models; the rest is refused at
once, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError
from headwise.files import read_json, read_toml
from headwise.words import Facts

OURS = "headwise"  # the model_type of our own GPT


@dataclass(frozen=True, kw_only=True)
class Family:
    """One record. What its form says is read in `gpt`; the rest is what its attention has, None what it lacks."""

    name: str  # the config's `model_type`: "llama"
    # how a model of ours is written as one of the family; the head of families.toml has its keys
    form: Mapping[str, Any] | None = None
    # Names of the projections, each a Linear, or GPT-2's Conv1D, with or without bias, before those of `USUAL`. Where
    # `packed` is the first three in one, its outputs are all queries, then all keys, then all values.
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    packed: str | None = None
    # what a gain is above the weight of its norm: Gemma's norms multiply by 1 + weight
    norm_offset: float = 0.0
    rope: bool = True  # are queries and keys rotated? Pairs are features m and m + d/2
    grouped: bool = True  # does its config say how many key/value heads there are?
    width: str = "hidden_size"  # the config's field for the width of the model
    # must the number of heads divide the width, whatever head_dim says?
    even_width: bool = False


# What is no record is taken out of the table, so that families are left alone in it.
_TABLE = read_toml("families.toml")
# names of modules and fields, for families without a record
USUAL = _TABLE.pop("usual")


def _form(name: str) -> Facts | None:
    """How a model of ours is written as one; `like` names the family whose form holds what is not said here."""
    form = _TABLE[name].get("form")
    if form is not None and "like" in form:
        return (_form(form["like"]) or {}) | form
    return form


# all that are known, by name
FAMILIES = {
    name: Family(name=name, form=_form(name), **record.get("attention", {}))
    for name, record in _TABLE.items()
}


def family_for(name: str) -> Family:
    """The record of a family. Raises HeadwiseError, with the name, for one that has none."""
    if name not in FAMILIES:
        raise HeadwiseError(
            f"{name} is a family whose heads cannot be reshaped yet; there are {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


# What a model folder says of itself.

RUN = "run.json"  # in the folder of a training of ours
# Classes whose names end so have no logits of a next token. "Model" has no head at all, but `...HeadModel` has one.
NO_NEXT = (
    "Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification",
    "ForQuestionAnswering",
)  # fmt: skip
# weights as pickles, which are never read
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def check_folder(folder: Path) -> Facts:
    """`config.json` of a model folder in the layout of Hugging Face.

    Raises HeadwiseError where its weights are no safetensors files.
    """
    config = read_config(folder)
    if not any(folder.glob("*.safetensors")):
        pickled = [path for path in sorted(folder.iterdir()) if path.suffix in PICKLED]
        if pickled:
            raise HeadwiseError(
                f"{pickled[0]} is a pickle, which can run code; convert it to model.safetensors"
            )
        raise HeadwiseError(
            f"{folder} has no model.safetensors: it is no model folder, or not finished"
        )
    return config


def check_model(folder: Path) -> Facts:
    """Refuse what is no model folder, before torch is loaded; gives its config.

    A folder of ours is not looked into, and has no fields here: all commands take it. What is wrong in it is said by
    what reads it, which is quick, too.
    """
    if is_own(folder):
        return {}
    config = check_folder(folder)
    require_transformers(folder)
    return config


def require_transformers(folder: Path) -> None:
    """Raise HeadwiseError where what reads a model of others is not installed; it is not imported for that."""
    if find_spec("transformers") is None:
        raise HeadwiseError(
            f"{folder} is no run of headwise; to read other models: pip install 'headwise[hf]'"
        )


def has_tokenizer(folder: Path) -> bool:
    """Is there a file of a tokenizer?"""
    names = "tokenizer.json tokenizer.model vocab.txt vocab.json spiece.model"
    return any((folder / name).exists() for name in names.split())


def read_config(folder: Path) -> Facts:
    """`config.json` of a model folder. Raises HeadwiseError when there is none or it is damaged."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise HeadwiseError(
            f"{folder} is no folder; pass a run folder or a model in Hugging Face layout"
        )
    if not path.exists():
        raise HeadwiseError(
            f"{folder} has no config.json: it is neither a run of headwise nor a model folder"
        )
    config = read_json(path)
    if not isinstance(config, dict):
        raise HeadwiseError(f"{path} holds no fields")
    return config


def is_own(path: Path) -> bool:
    """Does the folder hold a run, or a model that headwise wrote?"""
    if (path / RUN).exists():
        return True
    try:
        return "headwise" in read_config(path)  # a field of our configs alone
    except (OSError, HeadwiseError):
        # what is wrong is said by whoever reads it for itself
        return False


def _class_name(config: Facts) -> str:
    """The class of the model, such as "GPT2LMHeadModel"; "" where its config does not say."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def check_reshapable(folder: Path) -> None:
    """Refuse by its config a family that has no record, or one whose keys and values are made of a latent."""
    config = {} if is_own(folder) else check_folder(folder)
    # A model of pictures and text has a family for each, and its `model_type` is neither: it is looked at when open.
    if "model_type" in config and "text_config" not in config:
        family_for(str(config["model_type"]))


def check_next(folder: Path, remedy: str) -> None:
    """Refuse by its config a model that has no head for a next token, or that has an encoder beside its decoder.

    remedy  what to do instead
    """
    config = check_model(folder)
    name = _class_name(config)
    two_stacks = config.get("is_encoder_decoder") is True
    # `is_decoder` makes a model for next tokens of an encoder such as BERT.
    if two_stacks or (
        name.endswith(NO_NEXT)
        and not name.endswith("HeadModel")
        and not config.get("is_decoder")
    ):
        raise HeadwiseError(
            f"{folder} holds a {name or config.get('model_type')}, which does not predict the next token of a "
            f"text by the text alone; {remedy}"
        )


def check_answers(folder: Path) -> None:
    """Refuse by its config a model without a head: it ends in hidden states, and answers with no word."""
    name = _class_name(check_model(folder))
    if name.endswith("Model") and not name.endswith("HeadModel"):
        raise HeadwiseError(
            f"{folder} holds a {name}, which has no head for words and so predicts none; load the model with "
            "its language-model head, or watch it with headwise.watch(model)"
        )


def check_reads_tokens(folder: Path) -> None:
    """Refuse by its config a model whose input is sound or pictures."""
    config = check_model(folder)
    # Fields tell what is read: spectrograms (Whisper) and waves (wav2vec 2.0), or pictures (ViT).
    has_text = {"vocab_size", "text_config"} & config.keys()
    remedy = "watch it in Python on its own input, with headwise.watch(model)"
    if {"num_mel_bins", "feat_extract_norm"} & config.keys():
        what = "sound"
        remedy += "; `headwise align` finds the heads that follow words"
    elif "image_size" in config and not has_text:
        what = "pictures"
    else:
        return
    raise HeadwiseError(
        f"{folder} holds a {config.get('model_type')}, which reads {what} and no text; {remedy}"
    )


# The run that a reshaped model comes from.

RECORD = "headwise.json"  # what was done; also the sign that a folder may be replaced


def run_of(folder: Path) -> Path | None:
    """The run of headwise that a folder is, or that its model comes from; None without one, or where it has moved.

    A run is where the training and its text are known. Raises HeadwiseError for a damaged record.
    """
    if (folder / RUN).exists():
        return folder
    path = folder / RECORD
    if not path.exists():
        return None
    record = read_json(path)
    if not isinstance(record, dict) or not isinstance(record.get("run"), str | None):
        raise HeadwiseError(
            f"{path} is damaged: it does not say where the model comes from; remove it"
        )
    run = record.get("run")
    return folder / run if run is not None and (folder / run / RUN).exists() else None


def require_run(folder: Path) -> Path:
    """`run_of` where nothing but the run knows what the model was trained on."""
    run = run_of(folder)
    if run is None:
        raise HeadwiseError(
            f"{folder} is no run of headwise, nor made from one that can be found, so it has no text; pass text="
        )
    return run
