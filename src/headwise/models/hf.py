"""The one door to transformers: model folders and their tokenizers.

Everything is read from disk: nothing is downloaded, no code of a folder is run, and no pickle is opened.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from headwise.corpus.tokens import TextTokens, tokenising
from headwise.errors import HeadwiseError, first_line
from headwise.families import check_folder
from headwise.files import read_json
from headwise.words import unknown

LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
FOREIGN_CODE = (
    "; the folder brings code of its own (auto_map), which headwise never runs"
)


def load_folder(
    folder: Path, dtype: Any = "auto", placing: Mapping[str, Any] | None = None
) -> Any:
    """The model of a folder in Hugging Face layout, in eval mode, with its own class (its head included).

    placing  device_map=, max_memory= and offload_folder= of `from_pretrained`, which hands them to accelerate
    """
    kind = _architecture(folder, check_folder(folder))
    with _loading(folder / "config.json", f"{folder} does not load as {kind.__name__}"):
        config = getattr(kind, "config_class", transformers.AutoConfig).from_pretrained(
            folder, **LOCAL
        )
        for name in ("", *getattr(config, "sub_configs", ())):
            part = getattr(config, name, None) if name else config
            if part is not None:
                # the library's own choice; a name may lead to a kernel on the hub
                part._attn_implementation = None
                vars(part).pop("auto_map", None)
        # `loading` tells which weights were found and which were not.
        options = {**LOCAL, **(placing or {}), "output_loading_info": True}
        model, loading = kind.from_pretrained(
            folder, config=config, dtype=dtype, use_safetensors=True, **options
        )
    # transformers would draw them at random
    if lacking := sorted(loading["missing_keys"])[:3]:
        raise HeadwiseError(
            f"{folder} lacks weights of {kind.__name__}: {', '.join(lacking)}"
        )
    for name, weights in model.named_parameters():
        numbers = weights.detach()
        # A finite sum tells it in a tenth of the time; one that is not may have overflowed.
        finite = numbers.is_meta or numbers.sum().isfinite()
        if not (finite or numbers.isfinite().all()):
            raise HeadwiseError(
                f"{folder} has NaN or inf in {name}; the model is not usable"
            )
    return model.eval()


def gguf_config(path: Path) -> dict[str, Any]:
    """The config that a GGUF file's own fields tell, without its weights."""
    with _loading(path, f"{path} does not load"):
        config = transformers.AutoConfig.from_pretrained(
            path.parent, gguf_file=path.name, **LOCAL
        )
    return config.to_dict()


def meta_model(fields: Mapping[str, Any]) -> tuple[Any, str | None]:
    """The model of a config on the meta device, without memory, in bfloat16; and what of it was built instead, if any.

    Its class is the first of `architectures`; where none is named, the one with a head for words.
    """
    kind = fields["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise unknown(
            f"transformers {transformers.__version__} has no model_type {kind!r}",
            kind,
            transformers.CONFIG_MAPPING,
            "see the list of models in its documentation",
        )
    of_weights = ("quantization_config", "auto_map", "dtype", "torch_dtype")
    plain = {name: value for name, value in fields.items() if name not in of_weights}
    failure = f"transformers {transformers.__version__} builds no {kind} of this config"
    with _loading(Path(), failure):
        config = transformers.CONFIG_MAPPING[kind].from_dict(plain)
        for name in ("hidden_size", "num_hidden_layers"):
            field = config.attribute_map.get(name, name)
            is_derived = isinstance(getattr(type(config), name, None), property)
            if (
                hasattr(config, name)
                and not is_derived
                and not {name, field} & fields.keys()
            ):
                raise HeadwiseError(
                    f"{field} is missing, and there is no size without it"
                )
        named = fields.get("architectures") or [""]
        by_words = transformers.AutoModelForCausalLM
        causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        automatic = by_words if type(config) in causal else transformers.AutoModel
        model_class = getattr(transformers, str(named[0]), None)
        build = getattr(model_class, "_from_config", automatic.from_config)
        part: str | None = "the decoder of text alone"
        try:
            model = _on_meta(build, config)
            # a class with a head for words may take its own part of the config
            return model, None if isinstance(model.config, type(config)) else part
        except Exception:
            # a class may want what the config lacks; its text part may do
            text = config.get_text_config(decoder=True)
            if text is config:
                text = _filled(config)
                part = None
            elif type(text) in causal:
                build = by_words.from_config
            with suppress(Exception):
                return _on_meta(build, text), part
            raise


def _on_meta(build: Callable[..., Any], config: Any) -> Any:
    with torch.device("meta"):
        model = build(config, attn_implementation="eager", dtype=torch.bfloat16)
    # this one alone is matrix products; a class without experts has none
    with suppress(Exception):
        model.set_experts_implementation("batched_mm")
    return model.eval().to("meta")  # XLNet makes its weights on the processor


def _filled(config: Any) -> Any:
    """The config with the sizes that its class leaves open, as all families derive them."""
    config = copy.deepcopy(config)
    if getattr(config, "num_key_value_heads", 0) is None:
        config.num_key_value_heads = config.num_attention_heads
    if getattr(config, "head_dim", 0) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


class AnyCache(transformers.DynamicCache):  # type: ignore[misc]  # transformers has no types here
    """A cache for configs that name fewer layers than their model has, or none that counts tokens."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        # what further layers are made of
        self.layer_class_to_replicate = transformers.cache_utils.DynamicLayer

    def get_seq_length(self, layer_idx: int = 0) -> int:
        try:
            return super().get_seq_length(layer_idx)
        except ValueError:
            return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        try:
            return super().get_mask_sizes(query_length, layer_idx)
        except ValueError:
            return query_length, 0


@contextmanager
def _loading(config: Path, failure: str, remedy: str = "") -> Iterator[None]:
    """What goes wrong in this block becomes a HeadwiseError of one line: failure, the reason, remedy.

    config  where a field auto_map shows that the folder relies on code of its own, that is the reason
    """
    try:
        with quiet():
            yield
    except Exception as error:  # the library lets through whatever its parts raise
        first = first_line(error)
        with suppress(OSError, ValueError, TypeError):
            if "auto_map" in read_json(config):
                first = f"transformers has no class for it{FOREIGN_CODE}"
        raise HeadwiseError(f"{failure}: {first}{remedy}") from None


def _architecture(folder: Path, config: Mapping[str, Any]) -> Any:
    """The class that `config.json` names; where it names none, the model without a head."""
    names = config.get("architectures")
    if not names:
        return transformers.AutoModel
    name = names[0] if isinstance(names, list) else names
    kind = getattr(transformers, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        code = FOREIGN_CODE if "auto_map" in config else ""
        raise HeadwiseError(
            f"{folder / 'config.json'} names the architecture {name}, which is no model of transformers "
            f"{transformers.__version__}{code}"
        )
    return kind


class FolderTokens(TextTokens):
    """The tokenizer of a model folder, through transformers; or one of transformers that is open already.

    One that the library calls fast is written in Rust (`backend_tokenizer`). A slow one, in Python, can do less.
    """

    def __init__(self, source: Any) -> None:
        if isinstance(source, Path):
            failure = f"the tokenizer of {source} does not load"
            with _loading(source / "tokenizer_config.json", failure, "; pass ids="):
                source = transformers.AutoTokenizer.from_pretrained(source, **LOCAL)
        super().__init__(source)
        # The ids that the model expects before and after a text, such as [CLS] and [SEP]: what stands around the bare
        # ids, where they are found among the framed ones.
        framed = self._read("a", add_special_tokens=True).input_ids
        plain = self.encode("a")
        for start in reversed(range(len(framed))):
            end = start + len(plain)
            if framed[start:end] == plain:
                self.frame = framed[:start], framed[end:]
        self.specials = frozenset(source.all_special_ids)
        self.unknown = source.unk_token_id
        self.mask: str | None = source.mask_token

    def _read(self, text: str, **options: Any) -> Any:
        # a text longer than the model is cut into documents later
        with quiet(), tokenising():
            return self._tokenizer(text, **{"add_special_tokens": False, **options})

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        ids = self._read(text).input_ids
        return ids[self._begun(ids) :]

    def _begun(self, ids: Sequence[int]) -> int:
        """How many ids of what the model expects before a text are there, as in one from a chat template."""
        before = self.frame[0]
        count = len(before)
        return count if len(ids) > count and list(ids[:count]) == before else 0

    def places(self, text: str) -> list[tuple[int, int]]:
        framed = self._read(text, return_offsets_mapping=True)
        return [*map(tuple, framed.offset_mapping)][self._begun(framed.input_ids) :]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def shown(self, ids: Sequence[int]) -> tuple[str, ...]:
        shown = []
        for i in ids:
            text = self._tokenizer.decode([i])
            # A token of no text, or of a part of a character, which decodes to U+FFFD: it is shown as the vocabulary
            # writes it, where it has the id.
            if not text or "\ufffd" in text:
                text = self._tokenizer.convert_ids_to_tokens(i) or f"[{i}]"
            shown.append(text)
        return tuple(shown)


def feature_extractor(folder: Path) -> Any:
    """What turns samples of a sound, or pixels, into the inputs of a model."""
    failure = f"{folder} has nothing that turns sound into its inputs"
    with _loading(folder / "preprocessor_config.json", failure):
        return transformers.AutoFeatureExtractor.from_pretrained(folder, **LOCAL)


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and warnings of the library inside this block: what matters is said by our own errors."""
    level = logging.get_verbosity()
    has_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


def static_cache(model: Any, length: int) -> Any:
    """A cache of transformers with a fixed number of places."""
    return transformers.StaticCache(config=model.config, max_cache_len=length)
