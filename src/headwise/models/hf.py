"""The one door to transformers: model folders, their tokenizers, and the attention interface that `hook` listens at.

Everything is read from disk: nothing is downloaded, no code of a folder is run, and no pickle is opened.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import nn

# `as` itself: `hook` takes the name from here
from transformers import AttentionInterface as AttentionInterface
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.utils import logging

from headwise.corpus.tokens import BOUNDARY, tokenising
from headwise.errors import HeadwiseError
from headwise.families import check_folder
from headwise.files import read_json

LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
FOREIGN_CODE = "; the folder brings code of its own (auto_map), which headwise never runs"


def load_folder(
    folder: Path, dtype: torch.dtype | str = "auto", placing: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """The model of a folder in Hugging Face layout, in eval mode, with its own class (its head included).

    placing  device_map=, max_memory= and offload_folder= of `from_pretrained`, which hands them to accelerate
    """
    kind = _architecture(folder, check_folder(folder))
    config_class = AutoConfig if kind is AutoModel else kind.config_class
    with _loading(folder / "config.json", f"{folder} does not load as {kind.__name__}"):
        # `loading` tells which weights were found and which were not.
        options = {**LOCAL, **(placing or {}), "use_safetensors": True, "output_loading_info": True}
        config = _own_choices(config_class.from_pretrained(folder, **LOCAL))
        model, loading = kind.from_pretrained(folder, config=config, dtype=dtype, **options)
    if lacking := sorted(loading["missing_keys"])[:3]:  # transformers would draw them at random
        raise HeadwiseError(f"{folder} lacks weights of {kind.__name__}: {', '.join(lacking)}")
    held = ((name, weights) for name, weights in model.named_parameters() if not weights.is_meta)
    bad = next((name for name, weights in held if not is_finite(weights)), None)
    if bad is not None:
        raise HeadwiseError(f"{folder} has NaN or inf in {bad}; the model is not usable")
    return _layers_apart(model.eval())


def _layers_apart(model: Any) -> Any:
    """The model; of an ALBERT, which runs one layer again and again, with a module for each time that it runs.

    Then a hook can tell the times apart, as layers with the same weights and heads of their own names.
    """
    for module in [*model.modules()]:
        groups, config = getattr(module, "albert_layer_groups", None), model.config
        if groups is not None:
            # ALBERT's own rule for the group of layer n: it divides so even where that gives no whole number.
            layers_of_group = config.num_hidden_layers / len(groups)
            # What deepcopy finds in its memo, by id, it takes for copied: so all layers have these in common.
            shared = {id(x): x for x in (config, module.config, *groups.parameters())}
            layers = []
            for n in range(config.num_hidden_layers):
                layers.append(copy.deepcopy(groups[int(n / layers_of_group)], dict(shared)))
            module.albert_layer_groups = nn.ModuleList(layers)
            # As many groups as layers: then ALBERT's rule picks group n for layer n.
            module.config.num_hidden_groups = config.num_hidden_groups = config.num_hidden_layers
    return model


def write_gguf(path: Path, folder: Path) -> None:
    """Write a GGUF file as a model folder; the library does not save such a model as it reads it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as scratch, _loading(path, f"{path} does not load"):
        read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **LOCAL)
        config = read.config
        fields = config.to_dict()
        # A model of the same class is made anew, without the form of quantisation that the file has. The other three
        # fields are written by `save_pretrained`, as they are in the new model.
        for name in ("model_type", "quantization_config", "architectures", "dtype"):
            fields.pop(name, None)
        fresh: Any = type(read)(type(config)(**fields))
        fresh.load_state_dict(read.state_dict())
        fresh.to(_gguf_dtype(path)).save_pretrained(scratch)
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, **LOCAL).save_pretrained(
            scratch
        )
        try:
            Path(scratch).rename(folder)  # so that the folder appears whole, or not at all
        except OSError:
            if not folder.exists():  # else another process has written it in the meantime
                raise
        # the end of the block removes it, and would fail without one
        Path(scratch).mkdir(exist_ok=True)


def _gguf_dtype(path: Path) -> torch.dtype:
    """The number format of a GGUF file's matrices; bfloat16, which has digits enough, where any is quantised."""
    import gguf

    kinds = {
        tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) > 1
    }
    if not kinds <= {"F32", "F16"}:
        return torch.bfloat16
    return torch.float16 if kinds == {"F16"} else torch.float32  # of both float32 keeps all digits


def gguf_config(path: Path) -> dict[str, Any]:
    """The config that a GGUF file's own fields tell, without its weights."""
    with _loading(path, f"{path} does not load"):
        config: dict[str, Any] = AutoConfig.from_pretrained(
            path.parent, gguf_file=path.name, **LOCAL
        ).to_dict()
    return config


def is_finite(weights: torch.Tensor) -> bool:
    """Is there no NaN and no inf?

    A finite sum tells it in a tenth of the time. Where the sum is not, it may have overflowed: then each is looked at.
    """
    # float16 ends at 65,504, which a sum soon passes
    wide = torch.float32 if weights.dtype == torch.float16 else None
    return bool(weights.detach().sum(dtype=wide).isfinite() or weights.isfinite().all())


def _own_choices(config: Any) -> Any:
    """A config without what could lead to foreign code: its own kernels of attention, and code of the folder."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    for part in (config, *parts):
        if part is not None:
            # the library's own choice; a name may lead to a kernel on the hub
            part._attn_implementation = None
            if hasattr(part, "auto_map"):
                del part.auto_map
    return config


@contextmanager
def _loading(config: Path, failure: str, remedy: str = "") -> Iterator[None]:
    """What goes wrong in this block becomes a HeadwiseError of one line: failure, the reason, remedy.

    config  where a field auto_map shows that the folder relies on code of its own, that is the reason
    """
    try:
        with _quiet():
            yield
    except Exception as error:  # the library lets through whatever its parts raise
        # The first line of its message, or the name of its class where it has none.
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        with suppress(OSError, ValueError, TypeError):
            if "auto_map" in read_json(config):
                first = f"transformers has no class for it{FOREIGN_CODE}"
        raise HeadwiseError(f"{failure}: {first}{remedy}") from None


def _architecture(folder: Path, config: Mapping[str, Any]) -> Any:
    """The class that `config.json` names; where it names none, the model without a head."""
    names = config.get("architectures")
    if not names:
        return AutoModel
    name = names[0] if isinstance(names, list) else names
    kind = getattr(transformers, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        code = FOREIGN_CODE if "auto_map" in config else ""
        raise HeadwiseError(
            f"{folder / 'config.json'} names the architecture {name}, which is no model of transformers "
            f"{transformers.__version__}{code}"
        )
    return kind


def has_tokenizer(folder: Path) -> bool:
    """Is there a tokenizer file?"""
    names = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model")
    return any((folder / name).exists() for name in names)


class FolderTokens:
    """The tokenizer of a model folder, through transformers; or one of transformers that is open already.

    One that the library calls fast is written in Rust (`backend_tokenizer`). A slow one, in Python, can do less.
    """

    def __init__(self, source: Any) -> None:
        self._tokenizer = source
        if isinstance(source, Path):
            failure = f"the tokenizer of {source} does not load"
            with _loading(source / "tokenizer_config.json", failure, "; pass ids="):
                self._tokenizer = AutoTokenizer.from_pretrained(source, **LOCAL)
        # The token between documents, where this is a run folder of our own, read as any other; else None.
        boundary = self._tokenizer.get_vocab().get(BOUNDARY)
        self.frame: tuple[list[int], list[int]] = [], []
        self.frame = self._find_frame() if boundary is None else ([boundary], [])
        self.specials = frozenset(self._tokenizer.all_special_ids)
        # Of a slow one None: where an unknown character stands is asked of `places`, which it does not have.
        self.unknown: int | None = self._tokenizer.unk_token_id if self._tokenizer.is_fast else None
        self.mask: str | None = self._tokenizer.mask_token

    def _find_frame(self) -> tuple[list[int], list[int]]:
        """The ids that the model expects before and after a text, such as [CLS] and [SEP]."""
        with tokenising():
            framed = list(self._tokenizer("a").input_ids)
        plain = self.encode("a")
        # Where the bare ids are found among the framed ones, what stands before and after them is the frame.
        for start in range(len(framed) - len(plain) + 1):
            if framed[start : start + len(plain)] == plain:
                return framed[:start], framed[start + len(plain) :]
        return [], []

    def __len__(self) -> int:
        return len(self._tokenizer)

    # What the methods give is said in `corpus/tokens.TextTokens`.
    def encode(self, text: str) -> list[int]:
        with _quiet(), tokenising():  # a text longer than the model is cut into documents later
            ids = list(self._tokenizer(text, add_special_tokens=False).input_ids)
        return ids[self._begun(ids) :]

    def _begun(self, ids: Sequence[int]) -> int:
        """How many ids of what the model expects before a text are there, as in one from a chat template."""
        before = self.frame[0]
        return (
            len(before)
            if before and len(ids) > len(before) and [*ids[: len(before)]] == before
            else 0
        )

    def places(self, text: str) -> list[tuple[int, int]]:
        if not self._tokenizer.is_fast:
            raise HeadwiseError(
                f"{type(self._tokenizer).__name__} does not say where its tokens stand; mark spans of ids"
            )
        with _quiet(), tokenising():
            framed = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [(start, end) for start, end in framed.offset_mapping][
            self._begun(framed.input_ids) :
        ]

    def prompt(self, text: str) -> list[int]:
        return self.frame[0] + self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def shown(self, ids: Sequence[int]) -> tuple[str, ...]:
        shown = []
        for i in ids:
            text = str(self._tokenizer.decode([i]))
            # A token of no text, or of a part of a character, which decodes to U+FFFD: it is shown as the vocabulary
            # writes it, where it has the id.
            if not text or "\ufffd" in text:
                text = str(self._tokenizer.convert_ids_to_tokens(i) or f"[{i}]")
            shown.append(text)
        return tuple(shown)


def feature_extractor(folder: Path) -> Any:
    """What turns samples of a sound, or pixels, into the inputs of a model."""
    with _loading(
        folder / "preprocessor_config.json",
        f"{folder} has nothing that turns sound into its inputs",
    ):
        return AutoFeatureExtractor.from_pretrained(folder, **LOCAL)


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and warnings of the library inside this block: what matters is said by our own errors."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
