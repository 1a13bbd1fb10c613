"""Any model folder: a run of headwise, or a model in Hugging Face layout; and texts that a model continues."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from headwise.corpus.tokens import OwnTokens, TextTokens, Tokens
from headwise.errors import HeadwiseError
from headwise.families import OURS, has_tokenizer, is_own, require_transformers
from headwise.files import free_memory, text_path
from headwise.gpt.checkpoint import save_model
from headwise.gpt.gpt import GPT, continued, register
from headwise.gpt.run import Settings, kept_text, load_run, run_training
from headwise.models import computed_in, located
from headwise.models.ask import (
    Reader,
    context_of,
    declare,
    predicts,
    require_next,
    vocabulary_of,
)
from headwise.models.weights import cast
from headwise.table import amount

# What stands beside the weights and belongs to the tokenizer or to generation; weights and config are written anew.
COPIED = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja",
    "chat_template.json", "generation_config.json",
)  # fmt: skip

# of the free memory that weights may take, a round number: activations and a cache need the rest
FRACTION = 0.8


@dataclass(frozen=True)
class Folder:
    """A model that was read from a folder, in eval mode."""

    path: Path
    model: nn.Module  # a GPT of ours, or a PreTrainedModel
    tokens: TextTokens | None  # None when the folder has no tokenizer
    context: int | None  # most tokens of a document; None where the model sets no bound
    family: str  # "headwise", or transformers' model_type
    vocab_size: int | None

    @property
    def name(self) -> str:
        """How a reader knows the model: the name of its folder, with that above it where it is just `model`."""
        *_, owner, parent, name = ("", "", *self.path.resolve().parts)
        # of the hub's cache, models--owner--name/snapshots/revision
        if parent == "snapshots":
            return owner.removeprefix("models--").replace("--", "/")
        return f"{parent}/model" if name == "model" else name


# Of each model that was opened its path, its tokenizer, its family.
_origins: WeakKeyDictionary[nn.Module, tuple[Path, TextTokens | None, str]] = (
    WeakKeyDictionary()
)


def open_model(
    source: str | Path | nn.Module,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    tokenizer: Any = None,
    logits: Callable[[Any, Tensor], Tensor] | None = None,
    unembed: nn.Module | str | None = None,
    **placing: Any,
) -> nn.Module:
    """The model of a folder, in eval mode: our GPT, or a model of transformers. A model is handed back as it is.

        hw.open(my_gpt, tokenizer=enc, logits=lambda model, ids: model(ids)[0])     # a model of one's own

    Of a model of one's own that predicts the next token, what is not told here is found by one run. Where it came
    from is remembered beside it (`described`), so that `survey`, `generate`, `share` and `prune` know its tokenizer and
    its text.

    Args:
        source: a folder, or a name on the hub such as "openai-community/gpt2" (`models.located`)
        dtype: its number format: "auto", as it is stored, but float32 for bfloat16 on a processor without
            instructions for it, where it is slower and coarser; or "float32", "bfloat16", "float16"
        device: where it computes: "cpu", "cuda", "cuda:1", "mps"; "auto" is device_map="auto"
        tokenizer: of a model: one of transformers, tokenizers or tiktoken, or anything with `encode` and `decode`
        logits: of a model of one's own: from the model and ids (B,T) its logits (B,T,V)
        unembed: the module, or its path, that has W_U (V,C)
        **placing: for a model of transformers that is larger than a device or than memory, device_map="auto" lets
            accelerate spread it over what there is, and leave on the disk what does not fit; max_memory={0: "10GB"} and
            offload_folder= as in `from_pretrained`

    Raises:
        HeadwiseError: for a folder that is no model, is damaged, or holds pickled weights; and where `logits` gives
            something else, which a run shows.
    """
    if isinstance(source, nn.Module):
        if logits or unembed:
            declare(source, logits, unembed)
        if tokenizer is not None:
            folder = folder_of(source, tokenizer)
            remember(source, folder.path, folder.tokens, folder.family)
        return source
    if tokenizer or logits or unembed:
        raise HeadwiseError(
            "tokenizer=, logits= and unembed= tell of a model that is open; pass the model itself"
        )
    if not isinstance(source, str | Path):
        raise HeadwiseError(
            f"source={source!r} is no model; pass a folder, a name on the hub, or the model itself"
        )
    if unknown := placing.keys() - {"device_map", "max_memory", "offload_folder"}:
        raise TypeError(f"hw.open has no argument {min(unknown)}")
    return open_folder(Path(source), dtype=dtype, device=device, **placing).model


def described(model: nn.Module) -> Folder | None:
    """What is known of a model that was read from a folder; None for one that was made in memory."""
    return folder_of(model) if model in _origins else None


def folder_of(model: nn.Module, tokenizer: Any = None) -> Folder:
    """What is known of a model, with another tokenizer where one is passed: of ours (`TextTokens`) or of transformers.

    Of a model made in memory the name of its class stands in the place of a path.
    """
    family = getattr(getattr(model, "config", None), "model_type", OURS)
    in_memory = Path(type(model).__name__), None, family
    path, tokens, family = _origins.get(model, in_memory)
    if hasattr(tokenizer, "to_str"):  # of the library tokenizers
        tokens = Tokens(tokenizer)
    elif hasattr(tokenizer, "all_special_ids"):  # of transformers
        from headwise.models.hf import FolderTokens

        tokens = FolderTokens(tokenizer)
    elif tokenizer is not None:
        tokens = tokenizer if hasattr(tokenizer, "shown") else OwnTokens(tokenizer)
    return Folder(path, model, tokens, context_of(model), family, vocabulary_of(model))


def tokens_of(model: nn.Module) -> TextTokens:
    """The tokenizer of a model that was opened. Raises HeadwiseError where none is known."""
    tokens = folder_of(model).tokens
    if tokens is None:
        raise HeadwiseError(
            f"no tokenizer of this {type(model).__name__} is known, so it reads no text; pass ids, open its "
            f"folder, where tokenizer.json lies, or name it: headwise.open(model, tokenizer=...)"
        )
    return tokens


def ids_of(model: nn.Module, text: Any) -> Any:
    """The ids of a text, with what the model expects around it; what is no text is handed back as it is."""
    if not isinstance(text, str):
        return text
    tokens = tokens_of(model)
    if not text.strip():
        raise HeadwiseError("the text is empty; pass one with words in it")
    ids = list(tokens.prompt(text))
    # it reads a whole text, with what stands behind one, such as [SEP]
    if predicts(model) != "next":
        ids += tokens.frame[1]
    most = context_of(model)
    if most and len(ids) > most:
        raise HeadwiseError(
            f"the text has {len(ids)} tokens, and {type(model).__name__} takes {most}; pass a shorter one"
        )
    return ids


def row_of(model: nn.Module, text: Any) -> Tensor:
    """The ids (1,T) of one text, as `ids_of` has them."""
    ids = ids_of(model, text)
    try:
        ids = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError):
        raise HeadwiseError(f"{text!r:.60} is neither a text nor its ids") from None
    # Only the last axis may be longer than 1: (T,) or (1,T).
    is_row = ids.shape[-1:].numel() == ids.numel() > 0 < ids.ndim
    if not is_row or ids.is_floating_point():
        raise HeadwiseError(
            f"the ids are {tuple(ids.shape)} of {ids.dtype}; pass those of one text, (T,) whole numbers, one or more"
        )
    return ids.reshape(1, -1)


def texts_of(model: nn.Module, texts: Any) -> list[Tensor]:
    """The ids (T,) of one text, or of each in a list of them."""
    several = getattr(texts, "ndim", 1) > 1  # a tensor or an array (N,T)
    if isinstance(texts, list | tuple) and texts:
        several = isinstance(texts[0], str | list | tuple) or getattr(
            texts[0], "ndim", 0
        )
    return [row_of(model, text)[0] for text in (texts if several else [texts])]


def token_of(model: nn.Module, word: int | str) -> int:
    """The id of a word that is one token, written as it stands in a text: with the space before it, if there is one.

    An id is handed back as it is. Raises HeadwiseError for a word of several tokens.
    """
    if not isinstance(word, str):
        return int(word)
    ids = tokens_of(model).encode(word)
    if len(ids) != 1:
        pieces = " ".join(map(repr, tokens_of(model).shown(ids)))
        raise HeadwiseError(
            f"{word!r} is {len(ids)} tokens, {pieces}; pass one, with a space before it where it has one"
        )
    return ids[0]


def remember(
    model: nn.Module, path: Path, tokens: TextTokens | None, family: str
) -> Folder:
    """Note where a model came from, for as long as it lives."""
    _origins[model] = path, tokens, family
    return folder_of(model)


def open_folder(
    path: Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    check: Callable[[TextTokens | None], None] = lambda tokens: None,
    **placing: Any,
) -> Folder:
    """Read a model folder, with our own model where it is one of ours, else through transformers; see `open_model`.

    check  is called with the tokenizer of a model of others before its weights are read: what it raises saves the wait
    """
    path = located(path)
    if device == "auto":
        device = "cpu"
        placing = {"device_map": "auto", **placing}
    place = device_named(device)
    if placing and (place.type != "cpu" or is_own(path)):
        raise HeadwiseError(
            "device_map= places a model of transformers; pass device= for a run of headwise, or alone"
        )
    name_of_dtype = computed_in(dtype)
    numbers: Any = name_of_dtype
    if name_of_dtype != "auto":
        numbers = getattr(torch, name_of_dtype)
    tokens: TextTokens | None
    if is_own(path):
        model, tokens = load_run(path)
        if numbers != "auto":
            cast(model, numbers)
    else:
        require_transformers(path)
        from headwise.models.hf import FolderTokens, load_folder

        tokens = FolderTokens(path) if has_tokenizer(path) else None
        check(tokens)
        if not placing:
            _require_room(path)
        model = load_folder(path, numbers, placing)
        stays = placing or place.type != "cpu" or has_bfloat16()
        if numbers == "auto" and model.dtype == torch.bfloat16 and not stays:
            cast(model, torch.float32)
    if place.type != "cpu":
        model.to(place)
    return remember(model, path, tokens, getattr(model.config, "model_type", OURS))


def _require_room(path: Path) -> None:
    """Refuse weights that leave too little of the free memory."""
    # A repository may have the weights twice: consolidated.safetensors, beside those of Mistral, is not read.
    free = free_memory()
    needed = sum(file.stat().st_size for file in path.glob("model*.safetensors"))
    if needed > FRACTION * free:
        raise HeadwiseError(
            f"the weights of {path} take {amount(needed)}, and {amount(free)} are free; pass device_map='auto', with "
            f"which accelerate leaves on the disk what does not fit"
        )


def device_named(name: str | torch.device) -> torch.device:
    """The device of this name: "cpu", "cuda", "cuda:1", "mps". Raises HeadwiseError for one that is not there."""
    counts = {"cpu": 1}  # of each kind
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator:
        counts[accelerator.type] = torch.accelerator.device_count()
    with suppress(RuntimeError, TypeError):  # a word that is no device to torch
        device = torch.device(name)
        if (device.index or 0) < counts.get(device.type, 0):
            return device
    known = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    raise HeadwiseError(f"device {name} is not on this machine; there is {known}")


def has_bfloat16() -> bool:
    """Has this processor instructions for products in bfloat16?"""
    mkldnn: Any = torch.backends.mkldnn
    return mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def write_folder(folder: Path, model: nn.Module, source: Folder, **sizes: Any) -> None:
    """Write a model, with the tokenizer of the folder that it comes from (`source`), to a folder that exists.

    sizes  max_shard_size= of `save_pretrained`
    """
    if isinstance(model, GPT):
        # each run of ours has a tokenizer of ours
        assert isinstance(source.tokens, Tokens)
        save_model(folder, model, source.tokens)
        return
    foreign: Any = model  # a PreTrainedModel
    foreign.save_pretrained(folder, **sizes)
    for name in COPIED:
        if (source.path / name).is_file():
            shutil.copyfile(source.path / name, folder / name)


# Texts that go on, and trainings


def generate(
    model: nn.Module | str | Path,
    prompt: str | Sequence[int],
    n_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop: int | None = None,
    stream: bool = False,
) -> Any:
    """The ids that continue a prompt; with `stream` an iterator, which yields each as it comes.

    The model keeps its keys and values between tokens. When the text reaches the model's context, its older half is
    forgotten and the rest is read again from the start.

    Args:
        model: a GPT of ours, a model of transformers, or the folder of one
        prompt: token ids, or a text where the model was read from a folder with a tokenizer; ___ at the end of a text
            for a model of words is the place to fill
        n_tokens: so many at most
        temperature: 0 takes the likeliest token; 1 samples from the model as it is
        top_k: sample among the k likeliest only
        seed: the same seed gives the same text
        stop: the id that ends the text and is not part of it; None takes those that the model's folder names
        stream: yield each id as it comes?

    Raises:
        HeadwiseError: for a model that does not predict the next token, and ids that it does not know.
    """
    module = open_model(model)
    require_next(module)
    if isinstance(prompt, str):
        ids = prompt_ids(module, prompt)
    else:  # no ids at all are refused in `continued`
        is_empty = isinstance(prompt, Sequence) and not prompt
        ids = [] if is_empty else row_of(module, prompt)[0].tolist()
    stops = end_ids(module) if stop is None else {stop}
    sizes = context_of(module), vocabulary_of(module)
    ids_behind = continued(
        partial(Reader, module), ids, n_tokens, temperature, top_k, seed, stops, *sizes
    )
    return ids_behind if stream else list(ids_behind)


def prompt_ids(model: nn.Module, text: str) -> list[int]:
    """Ids of a text that the model is to continue; of an empty one, what a text begins with."""
    tokens = tokens_of(model)
    ids = list(tokens.prompt(text))
    if not ids and isinstance(tokens, Tokens):
        return tokens.opening()
    # Of a model of transformers, the token that begins a text (bos), the lowest id where it names several.
    return ids or sorted(_special(model, "bos_token_id"))[:1]


def end_ids(model: nn.Module) -> set[int]:
    """The tokens that end a text, as far as the model's folder names them."""
    tokens = folder_of(model).tokens
    if isinstance(tokens, Tokens):  # the boundary alone, where there is one
        return set(tokens.specials)
    return _special(model, "eos_token_id")


def _special(model: nn.Module, name: str) -> set[int]:
    """Ids that a model of transformers names, one or a list, where its own `generate` looks for them."""
    value = getattr(getattr(model, "generation_config", None), name, None)
    return set(value if isinstance(value, list) else [value]) - {None}


def train(
    text: str | Path | Sequence[str | Path] | None = None,
    preset: str = "verbs",
    out: str | Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    *,
    lines: bool | None = None,
    tokenizer: str | Path | None = None,
    attention: type[nn.Module] | None = None,
    **shape: int,
) -> GPT:
    """Train a small GPT and return it in eval mode, with its tokenizer known to `generate`, `survey` and the others.

    Args:
        text: the path of a UTF-8 text, of a folder of them, or several; "tale", a little book; a string with a line
            break is the text itself; None: the built-in verb corpus
        preset: verbs, microgpt, nanogpt, fast, book, llama or course
        out: a new folder for the run, as `headwise train --out` writes it; None keeps nothing on the disk
        steps: updates of the weights; None takes the preset's
        seed: of weights, batches and the held-out choice: the same seed gives the same weights on the same
            machine
        lines: each line is a document of its own; None takes the preset's way
        tokenizer: the path of a tokenizer.json; None: characters, or words for the verb corpus
        attention: a class in place of headwise's attention, built with the width and the number of heads, by the
            names of its parameters, and called with (B,T,width)
        **shape: fields of `GPTConfig` that differ from the preset, such as n_heads=8

    Raises:
        HeadwiseError: for settings that do not fit, a text that is too short, and a folder that is not empty.
    """
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = temporary / "run" if out is None else Path(out)
        if isinstance(text, str) and "\n" in text:
            text = stack.enter_context(kept_text(folder, text))
        paths = (text,) if isinstance(text, str | Path) else text or ()
        texts = tuple(str(text_path(path).absolute()) for path in paths)
        tokenizer_file = str(tokenizer) if tokenizer else None
        name = register(attention) if attention else None
        settings = Settings(
            preset, texts, tokenizer_file, lines, seed, steps, shape, name
        )
        run_training(folder, settings, n_samples=0, is_filmed=out is not None)
        model, tokens = load_run(folder)
    # So that `survey(model)` and others find its tokenizer; where nothing is kept, the path is of no use any more.
    remember(model, folder, tokens, "headwise")
    return model
