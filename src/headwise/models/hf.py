"""The one door to transformers: model folders, their tokenizers, and the attention interface.

Transformers 5 routes the attention of most families through `AttentionInterface`; `routed` hands what such a call of
some modules gave to a function of ours. Everything is read from disk: nothing is downloaded, no code of a folder is
run, and no pickle is opened.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

from headwise.errors import HeadwiseError
from headwise.files import check_regular, read_json
from headwise.gpt.checkpoint import FORMATS, Place, tensors_in
from headwise.gpt.device import CPU
from headwise.gpt.ranks import ALONE, Ranks
from headwise.gpt.tokens import BOUNDARY, check_tokenizer, tokenising
from headwise.layer.layer import shapes_alone
from headwise.models.sites import inside
from headwise.models.stream import Stream, hollow

LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
FOREIGN_CODE = "; the folder brings code of its own (auto_map), which headwise never runs"
MOST_LAYERS = 1000  # so many are built without comparing them with the weights
TIED = 8  # times the weights in its files that a model may have: an embedding may serve in several places


class Asked(NamedTuple):
    """One call of the attention interface of transformers, as it was made, and what the model's own function gave."""

    module: nn.Module
    q: Tensor  # (B,H,T,D)
    k: Tensor  # (B,G,S,D)
    v: Tensor  # (B,G,S,E)
    mask: Any
    keywords: Mapping[str, Any]
    implementation: str  # "eager", "sdpa", ...
    function: Callable[..., Any]
    out: Tensor  # (B,H,T,E)


Route = Callable[[Asked, Tensor], Tensor | None]  # a call and its output so far -> what takes the output's place


def load_folder(folder: Path, ranks: Ranks = ALONE, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """The model of a folder in Hugging Face layout, in eval mode, with its own class (its head included).

    ranks  processes of which each holds some of the heads, by the family's own plan
    """
    kind, config = _described(folder)
    if ranks.world > 1:
        _check_plan(folder, config(), ranks)
    with _loading(folder / "config.json", f"{folder} does not load as {kind.__name__}"):
        model, loading = kind.from_pretrained(
            folder, config=config(), dtype=dtype, use_safetensors=True, output_loading_info=True, **LOCAL
        )
    _require_whole(folder, kind, loading["missing_keys"])  # transformers would draw them at random
    bad = next((name for name, weights in model.named_parameters() if not weights.isfinite().all()), None)
    if bad is not None:
        raise HeadwiseError(f"{folder} has NaN or inf in {bad}; the model is not usable")
    if ranks.world > 1:  # after the weights are there: to load them in parts the library needs accelerate
        spread, _, mesh = kind.prepare_distribute_model(DistributedConfig(tp_size=ranks.world))
        with torch.no_grad():
            model = kind.maybe_distribute_model(model, spread, mesh)
    loaded: PreTrainedModel = model.eval()
    return loaded


def stream_folder(folder: Path, dtype: torch.dtype | str = "auto", device: torch.device = CPU) -> Any:
    """The same model without its weights, which each layer borrows from the files while it runs (`models.stream`)."""
    kind, config = _described(folder)
    places = tensors_in(folder / "model.safetensors") if (folder / "model.safetensors").exists() else {}
    if not places:
        index = read_json(folder / "model.safetensors.index.json")["weight_map"]
        files = {name: tensors_in(folder / name) for name in set(index.values())}
        places = {name: files[file][name] for name, file in index.items() if name in files[file]}
    with _loading(folder / "config.json", f"{folder} does not load as {kind.__name__}"):
        described = config()
        if getattr(described, "quantization_config", None) or described.is_encoder_decoder:
            raise HeadwiseError("a quantised model, or one of two stacks, is not run layer by layer")
        if isinstance(dtype, str):
            dtype = described.dtype or next(FORMATS[place.dtype] for place in places.values() if place.dtype in FORMATS)
        model = hollow(kind, described, dtype)
    prefix = f"{model.base_model_prefix}."  # a file may hold the body of a model with a head, or the reverse
    held: dict[nn.Parameter, Place] = {}  # by the weights: an embedding may be the output matrix, too
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, weights in named.items():
        for key in (name, name.removeprefix(prefix), prefix + name):
            if place := places.get(key):
                held.setdefault(weights, place)
    _require_whole(folder, kind, [name for name, weights in named.items() if weights not in held])
    Stream(model.eval(), {name: held[weights] for name, weights in named.items()}, device=device)
    return model


def drawn(fields: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """A model that predicts the next token, with random weights, out of the fields of a config.json."""
    described = dict(fields)
    kind = described.pop("model_type")
    with _loading(Path("config.json"), f"no {kind} can be made of these fields"):
        config = _own_choices(AutoConfig.for_model(kind, **described))
        build: Any = AutoModelForCausalLM.from_config
        return build(config, dtype=dtype).eval()


def shallow(model: Any, n_layers: int, seed: int) -> Any:
    """The first layers alone, newly drawn each time that they run, between the model's own embeddings and head."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = n_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:n_layers]
    fresh = hollow(type(model), config, model.dtype)
    kept = {name: weights.detach() for name, weights in model.named_parameters(remove_duplicate=False)}
    Stream(fresh.eval(), kept, seed, model.device)
    return fresh


def _described(folder: Path) -> tuple[Any, Callable[[], Any]]:
    """The class of a folder's model and what makes its config, once all that can be told before loading is in order."""
    config = read_config(folder)
    check_regular(folder)
    if not any(folder.glob("*.safetensors")):
        pickled = [path for path in sorted(folder.iterdir()) if path.suffix in (".bin", ".pt", ".pth", ".ckpt")]
        if pickled:
            raise HeadwiseError(f"{pickled[0]} is a pickle, which can run code; convert it to model.safetensors")
        raise HeadwiseError(f"{folder} has no model.safetensors: it is no model folder")
    kind = _architecture(folder, config)
    _check_shards(folder)
    _check_sizes(folder, config, kind)
    config_class = AutoConfig if kind is AutoModel else kind.config_class
    return kind, lambda: _own_choices(config_class.from_pretrained(folder, **LOCAL))


def _require_whole(folder: Path, kind: Any, lacking: Iterable[str]) -> None:
    if lacking := sorted(lacking):
        raise HeadwiseError(f"{folder} lacks weights of {kind.__name__}: {', '.join(lacking[:3])}")


def _check_plan(folder: Path, config: Any, ranks: Ranks) -> None:
    """Refuse a family without a plan of how its heads are spread, and numbers of heads that the ranks do not divide."""
    part = config.get_text_config()
    if not getattr(part, "base_model_tp_plan", None):
        raise HeadwiseError(
            f"{folder} is a {part.model_type}, for which transformers {transformers.__version__} has no plan to "
            f"spread it; leave --parallel out: then each process holds the model and reads its share of the documents"
        )
    heads = part.num_attention_heads
    ranks.require_divisor({"heads": heads, "key/value heads": getattr(part, "num_key_value_heads", None) or heads})


def _own_choices(config: Any) -> Any:
    """A config without what could lead to foreign code: its own kernels of attention, and code of the folder."""
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if part is not None:
            part._attn_implementation = None
            if hasattr(part, "auto_map"):
                del part.auto_map
    return config


@contextmanager
def _loading(config: Path, failure: str, remedy: str = "") -> Iterator[None]:
    """What goes wrong in this block, in one line; a config with an auto_map names code that lies beside it."""
    try:
        with _quiet():
            yield
    except Exception as error:  # the library lets through whatever its parts raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        with suppress(OSError, ValueError, TypeError):
            if "auto_map" in read_json(config):
                first = f"transformers has no class for it{FOREIGN_CODE}"
        raise HeadwiseError(f"{failure}: {first}{remedy}") from None


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


def _check_sizes(folder: Path, config: Mapping[str, Any], kind: Any) -> None:
    """Compare what config.json describes with the weights, before anything of that size is made."""
    shapes = [place.shape for path in folder.glob("*.safetensors") for place in tensors_in(path).values()]
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    for name, value in (field for part in parts for field in part.items()):
        if "layer" in name and isinstance(value, int) and value > max(MOST_LAYERS, len(shapes)):
            raise HeadwiseError(f"{folder / 'config.json'} says {name}={value:,}, and there are {len(shapes)} tensors")
    described, there = 0, sum(map(math.prod, shapes))
    if not there or config.get("quantization_config"):
        return  # damaged, which is said when it is loaded; or its tensors hold several weights in a number
    with suppress(Exception), _quiet(), shapes_alone():  # what cannot be built is said when it is loaded
        shape_config = (AutoConfig if kind is AutoModel else kind.config_class).from_pretrained(folder, **LOCAL)
        build = kind.from_config if kind is AutoModel else kind
        described = sum(weights.numel() for weights in build(_own_choices(shape_config)).parameters())
    if described > TIED * there:
        raise HeadwiseError(
            f"{folder / 'config.json'} describes {described:,} weights, and its files hold {there:,}: "
            f"they do not belong together"
        )


def _architecture(folder: Path, config: Mapping[str, Any]) -> Any:
    """The class that `config.json` names; where it names none, the model without a head."""
    names = config.get("architectures")
    if not names:
        return AutoModel
    name = names[0] if isinstance(names, list) else None
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    fact, library = f"{folder / 'config.json'} names the architecture", f"transformers {transformers.__version__}"
    if kind is None and isinstance(name, str):
        code = FOREIGN_CODE if "auto_map" in config else ""
        raise HeadwiseError(f"{fact} {name}, which {library} does not have{code}")
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise HeadwiseError(f"{fact} {name or names}, which is no model of {library}")
    return kind


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder. Raises HeadwiseError when there is none or it is damaged."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise HeadwiseError(f"{folder} is no folder; pass a run folder or a model in Hugging Face layout")
    if not path.exists():
        raise HeadwiseError(f"{folder} has no config.json: it is neither a run of headwise nor a model folder")
    config = read_json(path)
    if not isinstance(config, dict):
        raise HeadwiseError(f"{path} holds no fields")
    return config


def has_tokenizer(folder: Path) -> bool:
    """Is there a tokenizer file?"""
    names = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model")
    return any((folder / name).exists() for name in names)


class FolderTokens:
    """The tokenizer of a model folder, through transformers; or one of transformers that is open already."""

    def __init__(self, source: Any) -> None:
        self._tokenizer = _open_tokenizer(source) if isinstance(source, Path) else source
        boundary = self._tokenizer.get_vocab().get(BOUNDARY)  # a run folder of our own, read as any other
        self.frame = ([boundary], []) if boundary is not None else self._find_frame()
        self.specials = frozenset(self._tokenizer.all_special_ids)
        self.unknown: int | None = self._tokenizer.unk_token_id if self._tokenizer.is_fast else None

    def _find_frame(self) -> tuple[list[int], list[int]]:
        """The ids that the model expects before and after a text, such as [CLS] and [SEP]."""
        with tokenising():
            framed = list(self._tokenizer("a").input_ids)
        plain = self.encode("a")
        for start in range(len(framed) - len(plain) + 1):
            if framed[start : start + len(plain)] == plain:
                return framed[:start], framed[start + len(plain) :]
        return [], []

    def __len__(self) -> int:
        return len(self._tokenizer)

    # What the methods give is said in `open.TextTokens`.
    def encode(self, text: str) -> list[int]:
        with _quiet(), tokenising():  # a text longer than the model is cut into documents later
            return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def places(self, text: str) -> list[tuple[int, int]]:
        if not self._tokenizer.is_fast:
            raise HeadwiseError(
                f"{type(self._tokenizer).__name__} does not say where its tokens stand; mark spans of ids"
            )
        with _quiet(), tokenising():
            framed = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [(start, end) for start, end in framed.offset_mapping]

    def prompt(self, text: str) -> list[int]:
        return self.frame[0] + self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def shown(self, ids: Sequence[int]) -> tuple[str, ...]:
        shown = []
        for i in ids:
            text = str(self._tokenizer.decode([i]))
            whole = text and "\ufffd" not in text  # else it shows as the vocabulary writes it, where it has the id
            shown.append(text if whole else str(self._tokenizer.convert_ids_to_tokens(i) or f"[{i}]"))
        return tuple(shown)


def _open_tokenizer(folder: Path) -> Any:
    check_regular(folder)
    with _loading(folder / "tokenizer_config.json", f"the tokenizer of {folder} does not load", "; pass --ids FILE"):
        if (folder / "tokenizer.json").exists():
            check_tokenizer(folder / "tokenizer.json")
        return AutoTokenizer.from_pretrained(folder, **LOCAL)


def class_named(name: str) -> Any:
    """A class of transformers."""
    return getattr(transformers, name)


def is_hf(module: nn.Module) -> bool:
    """Is this a model of transformers?"""
    return isinstance(module, PreTrainedModel)


def uses_interface(module: nn.Module) -> bool:
    """Does a method of this module's class call the attention interface itself?"""
    return _calls_interface(type(module).__mro__)


@cache
def _calls_interface(classes: tuple[type, ...]) -> bool:
    bases = [base for base in classes if base not in PreTrainedModel.__mro__]
    functions = [inspect.unwrap(member) for base in bases for member in vars(base).values() if callable(member)]
    codes = [code for function in functions if (code := getattr(function, "__code__", None)) is not None]
    return any("ALL_ATTENTION_FUNCTIONS" in code.co_names for code in codes)


@contextmanager
def routed(routes: Mapping[nn.Module, Route]) -> Iterator[None]:
    """Inside this block, and in its thread, what the attention of each module in `routes` gave goes through its route.

    The model's own attention function runs as it does without us, with its own masks. Blocks nest: a later one gets
    what an earlier one has made of the output. They may end in any order.
    """
    with inside() as here:
        block = here, routes
        with _lock:
            if not _blocks:  # the first of all threads: what the interface hands out is ours
                _library.update({name: getattr(AttentionInterface, name) for name in ("get_interface", "__getitem__")})
                AttentionInterface.get_interface = _get_interface  # type: ignore[method-assign]
                AttentionInterface.__getitem__ = _getitem  # type: ignore[method-assign]
            _blocks.append(block)
        try:
            yield
        finally:
            with _lock:
                _blocks.remove(block)
                if not _blocks:
                    AttentionInterface.get_interface = _library["get_interface"]  # type: ignore[method-assign]
                    del AttentionInterface.__getitem__


_blocks: list[tuple[Callable[[], bool], Mapping[nn.Module, Route]]] = []  # that are open, in any thread
_lock = Lock()
_library: dict[str, Any] = {}  # the library's own ways, while there are blocks


def _get_interface(self: Any, attn_implementation: str, default: Any) -> Any:
    return _listened(_library["get_interface"](self, attn_implementation, default), attn_implementation)


def _getitem(self: Any, key: str) -> Any:
    return _listened(_library["__getitem__"](self, key), key)


def _listened(function: Any, name: str) -> Any:
    """An attention function of transformers whose output goes through the routes of the module that calls it."""
    if hasattr(function, "headwise") or not any(here() for here, _ in [*_blocks]):
        return function

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **keywords: Any
    ) -> Any:
        routes = [routes[module] for here, routes in [*_blocks] if here() and module in routes]
        result = function(module, query, key, value, attention_mask, **keywords)
        if not routes:
            return result
        asked = Asked(module, query, key, value, attention_mask, keywords, name, function, result[0].transpose(1, 2))
        out = asked.out
        for route in routes:
            changed = route(asked, out)
            out = out if changed is None else changed
        return result if out is asked.out else (out.transpose(1, 2).contiguous(), *result[1:])

    attend.headwise = True  # type: ignore[attr-defined]
    return attend


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's progress bars and warnings: what matters is said by our own errors."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
