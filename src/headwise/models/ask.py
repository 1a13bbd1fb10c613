"""Asking a model, ours or one of transformers: what it predicts, its logits, its losses, its body alone.

The questions that every study asks stand here once. What builds on models, such as heads and reshape, never asks what
class a model is of.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import Context
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headwise.errors import HeadwiseError, first_line
from headwise.gpt.checkpoint import hf_config
from headwise.gpt.gpt import GPT
from headwise.models.hook import hooked
from headwise.models.sites import is_hf, loaded
from headwise.models.weights import blocks, body_of

# Tokens of the vocabulary whose rows of the output matrix are copied to float32 at a time: at a width of 4096 that is
# 256 MiB. A round choice; the whole matrix of a large vocabulary would take some GiB.
ROWS = 2**14
# Logits whose losses are computed at a time: as float32 they fit into what malloc keeps and need no fresh memory.
LOGITS = 2**22
DECLARE = (
    "say how it is asked: hw.open(model, logits=lambda model, ids: ..., unembed=...)"
)

Prediction = Literal["next", "masked"] | None
# What the trial of each model showed, and what the model raised in it, if anything.
_predicts: WeakKeyDictionary[nn.Module, tuple[Prediction, str]] = WeakKeyDictionary()


def predicts(model: nn.Module) -> Prediction:
    """What the logits of a model are about: "next" (the next token), "masked" (hidden tokens), or None without any.

    It is None of an encoder-decoder, too: its logits are about another text than the one that it is given.

    It is told by what the model does: logits over its vocabulary, one row a token, are of the next token where a later
    token changes no row before it. A class name may be wrong: whether a BertLMHeadModel looks ahead, its config says.
    """
    return _shown(model)[0]


def _shown(model: nn.Module) -> tuple[Prediction, str]:
    """`predicts`, and why it is None where the model raised something."""
    if isinstance(model, GPT):
        return "next", ""
    if has_encoder(model):
        return None, ""
    if model not in _predicts:
        # Watchers act in the context (contextvars) that opened their block: in an empty one they do not see this call.
        try:
            _predicts[model] = Context().run(_try_predicting, model), ""
        except Exception as error:  # it wants more than ids; the library lets through whatever its parts raise
            raised = f"{type(error).__name__}: {first_line(error):.200}"
            _predicts[model] = None, f" (it raises {raised} where it reads ids alone)"
    return _predicts[model]


# How a model is asked


@dataclass(frozen=True)
class Adapter:
    """How a model is asked that is not of transformers."""

    # the model and ids (B,T) -> logits (B,T,V), or what holds them; see `_tensor_in`
    logits: Callable[[Any, Tensor], Any]
    # paths of the modules whose `weight` is W_E, which reads the ids, and W_U, (V,C) each; None: not known
    embed: str | None
    unembed: str | None
    vocabulary: int
    context: int | None


# None: it gives no logits for ids
_adapters: WeakKeyDictionary[nn.Module, Adapter | None] = WeakKeyDictionary()


def adapter_of(model: nn.Module) -> Adapter | None:
    """How a model of one's own is asked, as `declare` was told or a run has shown, or a GPT of ours; else None."""
    if isinstance(model, GPT):
        sizes = model.config.vocab_size, model.config.context
        return Adapter(GPT.__call__, "token_embedding", "lm_head", *sizes)
    if is_hf(getattr(model, "_orig_mod", model)):
        return None
    if model not in _adapters:
        _adapters[model] = None  # the trial itself asks, too
        with suppress(HeadwiseError):
            declare(model)
    return _adapters[model]


def is_own(model: nn.Module) -> bool:
    """Is it a model of one's own, neither a GPT of ours nor one of transformers?"""
    return not isinstance(model, GPT) and adapter_of(model) is not None


def declare(model: nn.Module, logits: Any = None, unembed: Any = None) -> None:
    """Note how a model is asked; what is None is found by a run.

    Raises HeadwiseError where the run does not give logits, or the module is none of the model's.
    """
    paths = [
        path
        for path, module in model.named_modules()
        if (path == unembed or module is unembed) and hasattr(module, "weight")
    ]
    if unembed is not None and not paths:
        raise HeadwiseError(
            f"{unembed!r} is no module with a weight in {type(model).__name__}; pass the module, or its path"
        )
    reason = ""
    for way in [logits] if logits else WAYS:
        try:
            # Watchers act in the context that opened their block: in an empty one they do not see this call.
            _adapters[model] = Context().run(_tried, model, way, *paths[:1])
            return
        except Exception as error:  # the model may raise anything
            reason = reason or str(error) or type(error).__name__
    raise HeadwiseError(
        f"{type(model).__name__} gives no logits (1,4,V) for ids (1,4): {reason}; {DECLARE}"
    )


def stands_for(copy: nn.Module, model: nn.Module) -> None:
    """A copy of a model is asked as the model is."""
    if model in _adapters:
        _adapters[copy] = _adapters[model]


# nanoGPT gives the last row alone unless it is told what comes next.
WAYS: Sequence[Callable[[Any, Tensor], Any]] = (
    lambda model, ids: model(ids),
    lambda model, ids: model(ids, targets=ids),
)


def _tensor_in(gave: Any) -> Tensor:
    """The logits in what a model gives: a tensor, a tuple with one, or an object with `logits`."""
    if isinstance(gave, tuple | list):
        gave = next(x for x in gave if isinstance(x, Tensor) and x.ndim == 3)
    if isinstance(gave, Mapping):
        gave = gave["logits"]
    return gave if isinstance(gave, Tensor) else gave.logits


@torch.no_grad()
def _tried(model: nn.Module, way: Any, unembed: str | None = None) -> Adapter:
    """How a model is asked, seen while it reads four ids. Raises whatever the model raises."""
    ids = torch.tensor([[1, 0, 1, 1]], device=device_of(model))
    paths = {
        module: path
        for path, module in model.named_modules()
        if getattr(getattr(module, "weight", None), "ndim", 0) == 2
    }
    # of each module with a matrix that ran: itself, what it read, what it gave
    seen: list[tuple[nn.Module, Tensor, Tensor]] = []

    def keep(module: nn.Module, args: Any, gave: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(gave, Tensor):
            seen.append((module, args[0], gave))

    hooks = ((module.register_forward_hook, keep) for module in paths)
    with evaluating(model), hooked(hooks):
        rows = _tensor_in(way(model, ids))
    if rows.ndim != 3 or rows.shape[:2] != ids.shape or not rows.is_floating_point():
        raise HeadwiseError(f"it gives {tuple(rows.shape)} of {rows.dtype}")
    embed = None
    context = None
    last = None
    for module, read, gave in seen:
        if read.numel() == ids.numel() and read.flatten().equal(ids[0]):
            embed = embed or paths[module]
        elif isinstance(module, nn.Embedding):  # of positions
            context = module.num_embeddings
        elif gave.shape == rows.shape:
            last = paths[module]
    for holder in (model, getattr(model, "config", None)):
        context = getattr(holder, "block_size", context)
    # tied: the table itself is W_U
    return Adapter(way, embed, unembed or last or embed, rows.shape[-1], context)


@torch.no_grad()
def _try_predicting(model: nn.Module) -> Prediction:
    """Run the model on two texts that differ in the last token, and see whether the rows before it differ.

    Raises whatever the model raises.
    """
    size = vocabulary_of(model) or 0
    most = context_of(model) or 8
    # Two texts can be drawn as below from 5 ids on; 8 ids and 4 tokens are round choices, and only toys have fewer.
    if not reads_tokens(model) or size < 8 or most < 4:
        return None
    # Two texts of up to 8 tokens that differ in the last; ids from 3 on, for the first ones are often special.
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, size, (1, min(8, most)), generator=generator).repeat(2, 1)
    # one id further; behind the last id of the vocabulary comes 3
    ids[1, -1] = 3 + (ids[0, -1] - 2) % (size - 3)
    with evaluating(model):
        rows = getattr(_forward(model, ids), "logits", None)
    # Logits of something else: of classes, or of a whole text. A row may be padded to more than the vocabulary.
    if rows is None or rows.shape[:-1] != ids.shape or rows.shape[-1] < size:
        return None
    # each text's logits (T-1,V), without those of the last token
    first, second = rows[:, :-1].cpu().double()
    # Kernels may round the two texts of a batch differently: 4 roundings are allowed in half precision, 16 in float32.
    # A later token that is seen moves the logits of a trained model by more: 10 (ALBERT in bfloat16), or 10^5.
    eps = torch.finfo(rows.dtype).eps
    rounding = (16 if eps < 1e-6 else 4) * eps * first.abs().max()
    return "next" if (first - second).abs().max() <= rounding else "masked"


def require_next(model: nn.Module) -> None:
    """Raise HeadwiseError for a model that does not predict the next token."""
    prediction, reason = _shown(model)
    if prediction != "next":
        remedy = "" if is_hf(model) else f", or {DECLARE}"
        raise HeadwiseError(
            f"{type(model).__name__} does not predict the next token{reason}, so it has no loss and continues no "
            f"text; load the model with its causal language-model head{remedy}"
        )


def answering(model: nn.Module) -> Literal["next", "masked", "first"]:
    """Which token a model answers a text with: the next, that of a masked word, or the first that a decoder writes.

    Raises HeadwiseError for a model that answers with none.
    """
    prediction, reason = _shown(model)
    if has_encoder(model) and _head_of(model):
        return "first"
    if not (prediction and reads_tokens(model)):
        raise HeadwiseError(
            f"{type(model).__name__} answers a text with no token{reason}, so there is no prediction to be explained; "
            f"load the model with its language-model head"
        )
    return prediction


def answer_logits(model: nn.Module, ids: Tensor, position: int = -1) -> Tensor:
    """Logits (B,V) of the token that the model answers ids (B,T) with; see `answering`.

    position  that of the masked token; -1, the end, where the next one is asked for. An encoder-decoder ignores it.
    """
    start = _start_of(model)
    with _wide_row(model, position if start is None else -1):
        if start is not None:
            return _forward(model, ids, start=start).logits[:, -1]
        return logits(model, ids, last=position == -1)[:, position]


@contextmanager
def _wide_row(model: nn.Module, position: int) -> Iterator[None]:
    """Inside this block W_U multiplies the state at a position in float32, where the model does in half precision.

    Logits of 8 digits are steps of a sixteenth; two of them that differ by less differ by nothing.
    """
    head = _head_of(model)

    def widen(module: Any, args: tuple[Tensor, ...], gave: Tensor) -> Tensor | None:
        if gave.dtype.itemsize > 2 or gave.ndim != 3:
            return None
        rest = gave.float()
        state = args[0][:, position].float()
        # A float32 copy of a large vocabulary's matrix is not held as a whole.
        pieces = torch.split(module.weight, ROWS)
        wide = torch.cat([state @ rows.float().T for rows in pieces], -1)
        rest[:, position] = wide if module.bias is None else wide + module.bias.float()
        return rest

    is_linear = isinstance(head, nn.Linear)
    with hooked([(head.register_forward_hook, widen)] if is_linear else []):
        yield


def has_encoder(model: nn.Module) -> bool:
    """Does it read one text and write another?"""
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def _start_of(model: Any) -> list[int] | None:
    """The ids that the decoder of an encoder-decoder reads before it writes; None of another model.

    Those are the start, and where the model is made to write a certain token first, that one, too: a translator's
    language (forced_bos_token_id of mBART).
    """
    if not has_encoder(model):
        return None
    # As transformers does, the generation config is asked before the config of the model.
    holders = getattr(model, "generation_config", None), model.config
    start: list[int] = []
    for name in ("decoder_start_token_id", "forced_bos_token_id"):
        told = [getattr(holder, name, None) for holder in holders]
        start += [token for token in told if token is not None][:1]
    if not start:
        raise HeadwiseError(
            f"the config of {type(model).__name__} does not say its decoder_start_token_id; set it there"
        )
    return start


def device_of(model: nn.Module) -> torch.device:
    """Where the model takes its ids."""
    # On meta are weights that accelerate brings from the disk for each call.
    return next(
        (weights.device for weights in model.parameters() if not weights.is_meta),
        torch.device("cpu"),
    )


def reads_tokens(model: nn.Module) -> bool:
    """Does the model take token ids?"""
    # the body of some decoders (BART) takes *args
    parts = model, body_of(model)
    return bool(adapter_of(model)) or any(
        "input_ids" in parameters_of(part) for part in parts
    )


def logits(model: nn.Module, ids: Tensor, last: bool = False) -> Tensor:
    """Logits (B,T,V) of ids (B,T); with `last` those of the last position alone, (B,1,V)."""
    rows = _forward(model, ids, last).logits
    # not every model of transformers can leave the other rows out
    return rows[:, -1:] if last else rows


def answers(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits (B,T,V) of ids (B,T); of a model that predicts no tokens its last hidden states (B,T,C)."""
    return logits(model, ids) if predicts(model) else last_states(model, ids)


def last_states(model: nn.Module, ids: Tensor) -> Tensor:
    """The last hidden states (B,T,C) of ids (B,T); of a model of transformers, for a GPT of ours gives logits alone."""
    return _forward(body_of(model), ids).last_hidden_state


def run_body(model: nn.Module, ids: Tensor) -> None:
    """Run the layers on ids (B,T) for what watchers see there; the logits, by far the largest tensor, are left out.

    Of a model that holds a text against an image or a sound (CLIP), the layers of the text.
    """
    # the modules that have both sides, by the method by which transformers runs the text alone
    modules: Iterator[Any] = model.modules()
    pair = next((x for x in modules if hasattr(x, "get_text_features")), None)
    if pair is not None:
        pair.get_text_features(input_ids=ids.to(device_of(model)))
    else:
        # a GPT of ours is its own body: one row of logits is the least
        _forward(body_of(model), ids, last=True)


def next_token_losses(
    model: nn.Module, ids: Tensor, after: int | None = None
) -> Tensor:
    """Cross-entropy of the next token in nats, the mean of each document of ids (B,T); (B,).

    after  count only what comes behind the first token of this id, which each document must have (else NaN)
    """
    ids = ids.to(device_of(model))
    if ids.shape[1] < 2:
        raise HeadwiseError(
            f"documents of {ids.shape[1]} tokens have no next token to predict; pass longer ones"
        )
    predicted = logits(model, ids).flatten(0, 1)
    # The last row has nothing to predict: it gets the first token, and is left out.
    targets = ids.roll(-1, 1).flatten()
    step = max(1, LOGITS // predicted.shape[1])
    # Memory for all rows in float32, and what the way back keeps of it, takes longer to come than the loss to count.
    parts = [
        checkpoint(_losses, *part, use_reentrant=False, preserve_rng_state=False)
        for part in zip(
            torch.split(predicted, step), torch.split(targets, step), strict=True
        )
    ]
    losses = torch.cat(parts).reshape(ids.shape)[:, :-1]
    if after is None:
        return losses.mean(1)
    # False up to that token, True from it on: it predicts the next
    counted = (ids[:, :-1] == after).cumsum(1) > 0
    return (losses * counted).sum(1) / counted.sum(1)


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    # In float32, for half precision would round each loss to 8 or 11 bits.
    return F.cross_entropy(logits.float(), targets, reduction="none")


def embeddings(model: Any) -> tuple[Tensor, Tensor] | None:
    """W_E and W_U, (V,C) each; None where a model has no such pair."""
    head = _head_of(model)
    adapter = adapter_of(model)
    if not head:
        return None
    table = _part(model, adapter.embed) if adapter else model.get_input_embeddings()
    if not table:
        return None
    with loaded(table, head):
        return table.weight, head.weight


def output_matrix(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """W_U (V,C) and its bias (V,), which turn the last hidden state into logits."""
    head = _head_of(model)
    if not head:
        raise HeadwiseError(
            f"{type(model).__name__} has no output matrix, so no part of it adds to a logit"
        )
    return head.weight, getattr(head, "bias", None)


def _head_of(model: Any) -> Any:
    """The module of W_U; None of a model without logits."""
    if adapter := adapter_of(model):
        return _part(model, adapter.unembed)
    return getattr(model, "get_output_embeddings", lambda: None)()


def _part(model: nn.Module, path: str | None) -> Any:
    return model.get_submodule(path) if path else None


def context_of(model: nn.Module) -> int | None:
    """The most tokens that the model takes at a time; None where it sets no bound."""
    adapter = adapter_of(model)
    if adapter and adapter.context:
        return adapter.context
    config = _text_config(model)
    if getattr(config, "model_type", "") in ("t5", "mt5", "umt5"):
        # positions are distances, so that no text is too long; n_positions in their configs is no bound
        return None
    most = getattr(config, "max_position_embeddings", 0)
    most = most or getattr(config, "n_positions", 0)
    if not isinstance(most, int) or most < 1:  # XLNet says -1: any length
        return None
    for name, table in model.named_modules():
        if not isinstance(table, nn.Embedding) or table.num_embeddings != most:
            continue
        if name.endswith("position_embeddings") and table.padding_idx is not None:
            # RoBERTa counts positions from padding_idx + 1 on, so that the first rows of the table stand for no token.
            return most - table.padding_idx - 1
    return most


def vocabulary_of(model: nn.Module) -> int | None:
    """The number of different token ids; None where the config does not say."""
    if adapter := adapter_of(model):
        return adapter.vocabulary
    return getattr(_text_config(model), "vocab_size", None)


def _text_config(model: nn.Module) -> Any:
    """The config, or the part of it that is about text; None without."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def config_fields(model: Any) -> dict[str, Any]:
    """The fields of the model's config.json."""
    # None: the token between documents, which the file names, belongs to a tokenizer, and a model alone has none.
    return (
        hf_config(model.config, None)
        if isinstance(model, GPT)
        else model.config.to_dict()
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode inside this block; behind it each module has the mode again that it had before.

    Blocks of several threads on one model that is in training are not kept apart.
    """
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


# the argument of transformers for a cache: from version 5.24 on, and before
CACHES = ("cache", "past_key_values")


def cache_name(model: nn.Module) -> str:
    """The argument by which this model, ours or one of transformers, is passed a cache."""
    taken = parameters_of(model)
    return next((name for name in (CACHES[0], "caches") if name in taken), CACHES[1])


def cache_in(fields: Any) -> Any:
    """The cache of transformers among the arguments of a call, or in its answer; None without one."""
    for name in CACHES:
        # An answer of 5.24 warns at the older name, and has the newer one, without a cache, too.
        if hasattr(fields, name):
            return getattr(fields, name)
        if isinstance(fields, Mapping) and fields.get(name) is not None:
            return fields[name]
    return None


@dataclass
class Reader:
    """Reads a text piece by piece, with the model's own cache: ids (1,T) -> logits (V,) of the next token.

    Of several texts side by side, of one length, the logits are those of the first.
    """

    model: nn.Module
    # of a GPT of ours those of its layers; of transformers what the last call gave, if anything
    cache: Any = None
    # all ids so far, for a model without a cache; a GPT of ours needs none
    text: Tensor | None = None

    def __post_init__(self) -> None:
        if isinstance(self.model, GPT):
            self.cache = self.model.new_caches()

    def __call__(self, ids: Tensor) -> Tensor:
        model = self.model
        ids = ids.to(device_of(self.model))
        if isinstance(model, GPT):
            return model(ids, self.cache, last_only=True)[0, -1]
        self.text = ids if self.text is None else torch.cat([self.text, ids], 1)
        # A layer with a state in the place of keys (Mamba) goes on from it by one token, and by several wrongly: then
        # the cache is dropped.
        layers = getattr(self.cache, "layers", ())
        if ids.shape[1] > 1 and any(not hasattr(layer, "keys") for layer in layers):
            self.cache = None
        # Without a past, at first and always with a model that keeps no keys and values, the whole text is read.
        past = {} if self.cache is None else {cache_name(model): self.cache}
        answer = _forward(
            model, ids if past else self.text, last=True, use_cache=True, **past
        )
        self.cache = cache_in(answer)
        return answer.logits[0, -1]


@contextmanager
def hidden_states(model: nn.Module) -> Iterator[list[Tensor]]:
    """Inside this block the list gets the output (B,T,C) of each layer that runs."""
    states = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        # Some families hand other things on in a tuple behind the states.
        states.append(output[0] if isinstance(output, tuple) else output)

    with hooked((block.register_forward_hook, keep) for block in blocks(model)):
        yield states


def _forward(
    model: nn.Module,
    ids: Tensor,
    last: bool = False,
    start: Sequence[int] | None = None,
    use_cache: bool = False,
    **past: Any,
) -> Any:
    """What a model gives for ids (B,T); `.logits` or, of a body, `.last_hidden_state` is read of it.

    last   spare the logits of all but the last position, where the model can
    start  ids of one text, which the decoder beside an encoder reads; default: ids, which the encoder reads, too
    past   a cache, by the name that the model has for it
    """
    ids = ids.to(device_of(model))
    if isinstance(model, GPT):
        return SimpleNamespace(logits=model(ids, last_only=last))
    if adapter := adapter_of(model):
        T = ids.shape[1]
        if (adapter.context or T) < T:
            raise HeadwiseError(
                f"the text has {T} tokens, and {type(model).__name__} takes {adapter.context}; pass a shorter one"
            )
        # its code may ask for views of the ids, as nanoGPT's loss does
        gave = adapter.logits(model, ids.contiguous())
        return SimpleNamespace(logits=_tensor_in(gave))
    inputs: dict[str, Any] = {"input_ids": ids, **past}
    if has_encoder(model):
        decoded = ids if start is None else torch.tensor([start]).expand(len(ids), -1)
        inputs["decoder_input_ids"] = decoded.to(ids)
    options = {"use_cache": use_cache} | ({"logits_to_keep": 1} if last else {})
    taken = parameters_of(model)
    return model(**inputs, **{name: x for name, x in options.items() if name in taken})


def parameters_of(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The arguments that its `forward` takes, by name."""
    return inspect.signature(model.forward).parameters
