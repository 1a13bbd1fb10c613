"""What a model folder says of itself before a weight is read, without torch: what cannot work is refused at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError
from headwise.families import family_for
from headwise.files import check_file, check_regular, read_json
from headwise.words import refusal

RUN = "run.json"
# Ends of the names of classes that have no logits of a next token.
NO_NEXT = (
    "Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification",
    "ForQuestionAnswering",
)  # fmt: skip
NO_LOSS = "does not predict the next token of a text by the text alone"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def check_folder(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder in Hugging Face layout whose files are all there, and files."""
    config = read_config(folder)
    check_regular(folder)
    if not any(folder.glob("*.safetensors")):
        pickled = [path for path in sorted(folder.iterdir()) if path.suffix in PICKLED]
        if pickled:
            raise HeadwiseError(f"{pickled[0]} is a pickle, which can run code; convert it to model.safetensors")
        raise refusal("no_weights", folder=folder)
    _check_shards(folder)
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder. Raises HeadwiseError when there is none or it is damaged."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise refusal("no_model_folder", folder=folder)
    if not path.exists():
        raise refusal("no_config", folder=folder)
    config = read_json(path)
    if not isinstance(config, dict):
        raise HeadwiseError(f"{path} holds no fields")
    return config


def is_own(path: Path) -> bool:
    """Does the folder hold a run, or a model that headwise wrote?"""
    if (path / RUN).exists():
        return True
    try:
        return "headwise" in read_config(path)
    except (OSError, HeadwiseError):
        return False


def _foreign_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model of others, checked; without fields where the model is ours, which all verbs take."""
    return {} if is_own(folder) else check_folder(folder)


def _class_name(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def check_reshapable(folder: Path) -> None:
    """Refuse by its config a family that has no record, or one whose keys and values are made of a latent."""
    config = _foreign_config(folder)
    if "model_type" in config and "text_config" not in config:
        family_for("reshape", str(config["model_type"]))


def check_next(folder: Path, remedy: str) -> None:
    """Refuse by its config a model that has no head for a next token, or that writes what another stack has read."""
    config = _foreign_config(folder)
    name = _class_name(config)
    two_stacks = config.get("is_encoder_decoder") is True
    if two_stacks or (name.endswith(NO_NEXT) and not name.endswith("HeadModel") and not config.get("is_decoder")):
        raise HeadwiseError(f"{folder} holds a {name or config.get('model_type')}, which {NO_LOSS}; {remedy}")


def check_answers(folder: Path) -> None:
    """Refuse by its config a model without a head: it ends in hidden states, and answers with no word."""
    config = _foreign_config(folder)
    name = _class_name(config)
    if name.endswith("Model") and not name.endswith("HeadModel"):
        raise HeadwiseError(
            f"{folder} holds a {name}, which has no head for words and so predicts none; load the model with its "
            f"language-model head, or watch it with headwise.watch(model)"
        )


def check_reads_tokens(folder: Path, texts: Sequence[str] | None = None) -> None:
    """Refuse by its config a model whose input is pictures, or sound where these are no WAV files."""
    config = _foreign_config(folder)
    sound, pictures = bool({"num_mel_bins", "feat_extract_norm"} & config.keys()), "image_size" in config
    speech = "max_source_positions" in config and all(text.lower().endswith(".wav") for text in texts or ())
    if speech and texts:
        for text in texts:
            check_file(Path(text))
    elif sound or (pictures and not {"vocab_size", "text_config"} & config.keys()):
        what = "sound" if sound else "pictures"
        remedy = "watch it in Python on its own input, with headwise.watch(model)"
        if texts is not None and "max_source_positions" in config:
            remedy = "pass a WAV file"
        remedy += "; `headwise align` finds the heads that follow words" * sound
        raise HeadwiseError(f"{folder} holds a {config.get('model_type')}, which reads {what} and no text; {remedy}")


def _check_shards(folder: Path) -> None:
    """The index of a sharded model names safetensors files of this folder, and those are there."""
    path = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists() or not path.exists():
        return
    try:
        names = set(read_json(path)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise HeadwiseError(f"{path} is damaged: it has no weight_map from tensors to files") from None
    for name in sorted(names, key=str):
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise HeadwiseError(f"{path} names {name!r}, which is no safetensors file of this folder; it is not opened")
        if not (folder / name).is_file():
            raise HeadwiseError(f"{path} names {name}, which is not there; the model is not whole")
