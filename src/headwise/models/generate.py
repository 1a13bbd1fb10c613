"""Continue a text by any model that predicts the next token: our GPT, or one of transformers.

A form of a model is a copy of its weights, laid out for reading one token a step. To make one takes as long as some
steps, so a model reads the prompt by itself, and its form is made when the first token has been shown. It is a
`Decoder` where the model has one; else `Rows`, the model itself with the products of its steps laid out anew.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.corpus.tokens import Tokens
from headwise.errors import HeadwiseError
from headwise.families import families
from headwise.gpt.checkpoint import as_gpt
from headwise.gpt.generate import MOST, WORTH, Decoder, Source, Texts, continued, hooked, only
from headwise.gpt.gpt import GPT, Block
from headwise.layer.importers import import_attention
from headwise.models.ask import Reader, context_of, logits, predicts, reader, vocabulary_of
from headwise.models.open import described, open_model, row_of
from headwise.models.stream import stream_of
from headwise.plan import Plan

SCORED = 512  # last tokens of a text on which the loss of a decode form is measured: a round number, more take longer
# The `rope_type` of models whose frequencies do not change with the length of the text; those of "dynamic" do.
ROPES = ("default", "linear", "llama3", "yarn")


def generate(
    model: nn.Module | Decoder | str | Path,
    prompt: str | Sequence[int],
    n_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop: int | None = None,
    cache: bool = True,
    plan: Plan | None = None,
    lookup: int = 0,
) -> Iterator[int]:
    """Yield ids that continue a prompt, as they come.

    A model with a decode form is run in it from some tokens on, unless somebody watches or ablates it. When the
    text reaches the model's context, its older half is forgotten and the rest is read again from the start.

    Args:
        model: a GPT of ours, a model of transformers, the folder of one, or the `decode_form` of one
        prompt: token ids, or a text where the model was read from a folder with a tokenizer
        n_tokens: so many at most
        temperature: 0 takes the likeliest token; 1 samples from the model as it is
        top_k: sample among the k likeliest only
        seed: the same seed gives the same text
        stop: the id that ends the text and is not yielded; None takes those that the model's folder names
        cache: False computes every step anew: slower, the same text
        plan: what each key/value head keeps of the text, and sees of it; None: all. Llama-like models of
            transformers (llama, mistral, qwen2, qwen3) are read in our form for it
        lookup: read so many tokens ahead, as they came after the last two where the text had these before; what
            is not what the model writes is dropped: the same text, sooner where it repeats itself. For models
            that have a decode form (`decode_form`): ours, and Llama-like ones of transformers

    Raises:
        HeadwiseError: for a model that does not predict the next token, one without a decode form where `lookup` is
            asked for, and ids that it does not know.
    """
    options = {"temperature": temperature, "top_k": top_k, "seed": seed, "cache": cache}
    return only(steps(model, [prompt], n_tokens, stop, plan, lookup, **options))


def generate_batch(
    model: nn.Module | Decoder | str | Path, prompts: Sequence[str | Sequence[int]], n_tokens: int, **options: Any
) -> list[list[int]]:
    """The ids that continue each of several prompts, written side by side: text n is `generate` with seed + n.

    Args:
        model: as for `generate`
        prompts: token ids of each, or texts
        n_tokens: so many at most, of each
        **options: temperature, top_k, seed, stop, cache and plan of `generate`; `lookup` is for one text

    Returns:
        Of each prompt the ids that follow it.
    """
    if isinstance(prompts, str):
        raise HeadwiseError(f"prompts={prompts!r} is one text; pass a list of them")
    texts: list[list[int]] = [[] for _ in prompts]
    for step in steps(model, prompts, n_tokens, **options):
        for text, token in zip(texts, step, strict=True):
            text += [] if token is None else [token]
    return texts


def steps(
    model: nn.Module | Decoder | str | Path,
    prompts: Sequence[str | Sequence[int]],
    n_tokens: int,
    stop: int | None = None,
    plan: Plan | None = None,
    lookup: int = 0,
    **options: Any,
) -> Iterator[list[int | None]]:
    """Yield, step by step, the next id of each text, None for one that has ended; arguments as of `generate`."""
    module = model.source if isinstance(model, Decoder) else open_model(model)
    if predicts(module) != "next":
        raise HeadwiseError(
            f"{type(module).__name__} does not predict the next token, so it cannot continue a text; "
            f"pass a model with a causal language-model head"
        )
    # The errors name int8, too: with --int8 the command passes a decode form.
    if isinstance(model, Decoder) and not options.get("cache", True):
        raise HeadwiseError("cache=False and a decode form, or int8: the form is what has the cache; pass one of them")
    if plan is not None and (lookup or isinstance(model, Decoder)):
        raise HeadwiseError("plan= with int8, lookup= or a decode form: the form keeps whole texts; pass one of them")
    ids = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids.append(prompt_ids(module, prompt))
        else:  # no ids at all are refused below
            is_empty = isinstance(prompt, Sequence) and not prompt
            ids.append([] if is_empty else row_of(module, prompt)[0].tolist())
    stops = end_ids(module) if stop is None else {stop}

    planned = _for_plan(module) if plan is not None and not isinstance(module, GPT) else module
    begin: Callable[[], Callable[[Tensor], Tensor]] = partial(reader, planned, plan)
    begin()  # only for its errors: a plan that does not fit is refused before the text begins

    decoder = model if isinstance(model, Decoder) else None
    if decoder is None and plan is None and options.get("cache", True):
        # Is the text long enough to make a form for it, and the model small enough to be held once more?
        is_worth_a_form = n_tokens >= WORTH and sum(x.nbytes for x in module.parameters()) <= MOST
        rows = len(prompts) + lookup  # tokens that a step reads: one of each text, and the guesses
        if lookup:
            decoder = decode_form(module, rows=rows)  # raises where there is none; without cache `continued` does
        # A `Decoder` reads texts side by side, a `Begun` each by itself. Nor can `Begun` take over the cache of a GPT
        # of ours, so that its form reads the prompt, too.
        elif is_worth_a_form and (len(prompts) > 1 or isinstance(module, GPT)):
            decoder = _form(module, rows)
        if decoder is None and is_worth_a_form:
            # `functools.cache` makes the form when the first text goes on, and gives the others the same one. Where
            # `_form` has given None above, it does so again, mostly before any work, and `Rows` is left.
            begin = partial(Begun, module, cache(lambda: _form(module) or Rows(module)), n_tokens)
    source = Source(begin, context_of(module), vocabulary_of(module), decoder)
    return continued(source, ids, n_tokens, stops=stops, lookup=lookup, **options)


class Begun:
    """A text that the model begins, and that a form of it continues: ids (1,T) -> logits (V,) of the next token.

    The model reads the prompt. With the next token the form takes over: a `Decoder` from the keys and values that the
    model kept, `Rows` by being the model. Where somebody watches, a `Decoder` steps back, and the model reads the
    whole text anew.

    form      makes the form, or has made it
    n_tokens  how many are written at most
    """

    def __init__(self, model: nn.Module, form: Callable[[], Decoder | Rows], n_tokens: int) -> None:
        self._model, self._form, self._n_tokens = model, form, n_tokens
        self._ids: list[int] = []
        self._reader: Reader | None = None  # of the model; None while the form reads
        self._texts: Texts | None = None  # what the form has read; None while the model reads

    def __call__(self, ids: Tensor) -> Tensor:
        unread, before = ids[0].tolist(), len(self._ids)
        self._ids += unread
        form = self._form() if before else None  # None: this is the prompt, which the model reads itself
        if isinstance(form, Decoder) and not form.disturbed():
            if self._texts is None:
                # What the form does not know yet: the new token, or the whole text.
                self._texts, is_read = self._taken_over(form, before)
                unread = unread if is_read else self._ids
            return self._texts([unread])[0, -1]  # of (1,1,V)
        if self._reader is None:  # the prompt, or all there is where somebody begins to watch
            self._reader, self._texts = reader(self._model), None
            return self._reader(ids.new_tensor([self._ids]))
        with form if isinstance(form, Rows) else nullcontext():
            return self._reader(ids)

    def _taken_over(self, form: Decoder, length: int) -> tuple[Texts, bool]:
        """What goes on in the form, and does it know the tokens before, from keys and values that the model kept?

        length  how many tokens came before
        """
        cached = [] if self._reader is None else getattr(self._reader.cache, "layers", [])
        self._reader = None
        # With room for all that is still written; at the context `gpt.generate.continued` begins anew.
        texts = Texts(form, min(context_of(self._model) or sys.maxsize, length + self._n_tokens))
        shape = (1, form.spec.n_kv_heads, length, form.spec.head_dim)
        past: list[tuple[Any, Any]] = []
        for layer in cached:
            pair = getattr(layer, "keys", None), getattr(layer, "values", None)
            if any(not isinstance(x, Tensor) or x.shape != shape for x in pair):
                return texts, False  # a window has dropped some
            past.append(pair)
        is_read = len(past) == len(form.layers)  # else the model keeps none, or not in this form
        if is_read:
            texts.take(past)
        return texts, is_read


class Rows:
    """The products of a model's layers in bfloat16, laid out for one row at a time: inside this block it uses them.

    In a plain product oneDNN (mkldnn in torch) lays the whole weight out anew, which takes longer than to multiply one
    row with it. Laid out once it gives the same bits; where a processor gives others, the product stays as it is. It
    takes the memory of the weights again.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self._forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
        same_bits: dict[tuple[int, ...], bool] = {}  # by shape: does the product give them laid out?
        mkldnn: Any = torch.backends.mkldnn
        # A streamed model has no weights to be laid out yet, and autocast multiplies copies in another format.
        if not mkldnn.is_available() or stream_of(model) is not None or torch.is_autocast_enabled("cpu"):
            return
        # What torch.compile has made of a module (it leaves these two marks) would have to be compiled anew, with
        # another `forward`.
        if any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules()):
            return
        for module in model.modules():
            if type(module) is not nn.Linear or "forward" in vars(module):  # it may compute something else
                continue
            weight = module.weight
            # A weight of inference mode does not count its versions, which `_laid_out` reads.
            if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or weight.is_inference():
                continue
            shape = (*weight.shape, module.bias is None)
            if not same_bits.get(shape, True):
                continue
            forward = _laid_out(module)
            if shape not in same_bits:  # one module of each shape is tried
                # Numbers of both signs and many sizes: sums that are rounded in another order differ.
                row = torch.arange(module.in_features).sin().bfloat16()[None]
                same_bits[shape] = torch.equal(forward(row), module(row))
            if same_bits[shape]:
                self._forwards[module] = forward

    def __enter__(self) -> None:
        for module, forward in self._forwards.items():
            # An attribute of the module goes before the method of its class; its hooks run as they did.
            vars(module)["forward"] = forward

    def __exit__(self, *error: object) -> None:
        for module in self._forwards:
            vars(module).pop("forward", None)  # another thread may have ended first


def _laid_out(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    """What the module does, for one row with the weight laid out; for more, or a weight that has changed, as ever."""
    weight, bias = linear.weight, linear.bias
    # 1 is the number of rows of x. Who writes to the weight later raises its version: then the layout is out of date.
    block, version = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1), weight._version

    def forward(x: Tensor) -> Tensor:
        if x.numel() != linear.in_features or x.dtype != weight.dtype or weight._version != version:
            return F.linear(x, weight, bias)
        return torch.ops.mkldnn._linear_pointwise(x, block, bias, "none", [], "")  # "none": no activation behind it

    return forward


# `decode_form`, or None where the model has none.
def _form(module: nn.Module, rows: int = 1) -> Decoder | None:
    with suppress(HeadwiseError):
        return decode_form(module, rows=rows)
    return None


def decode_form(model: nn.Module | str | Path, int8: bool = False, rows: int = 1) -> Decoder:
    """The form of a model in which `generate` decodes fastest, made once for many texts; see `gpt.generate.Decoder`.

    It serves our GPT, and models of transformers that are Llama-like: llama, mistral, qwen2, qwen3. Of these a few
    logits are held against the model's own.

    Args:
        model: a GPT of ours, a model of transformers, or the folder of one
        int8: products in 8 bits: faster, another function
        rows: tokens that a step reads: the texts written side by side, and those that `lookup` guesses

    Raises:
        HeadwiseError: with the reason, for all other models.
    """
    module: Any = open_model(model)
    if isinstance(module, GPT):
        return Decoder(module, int8, rows)
    decoder = Decoder(_as_ours(module, "no decode form"), int8, rows)
    decoder.follow(module)  # not the GPT that it was made of, which nobody else holds
    # The frequencies of RoPE as the model has computed them, with any scaling of its `rope_type`.
    rotary = module.model.rotary_emb
    assert decoder.rotation is not None  # a Llama-like model has RoPE
    decoder.rotation.frequencies, decoder.rotation.factor = rotary.inv_freq.tolist(), rotary.attention_scaling
    difference = decode_loss(decoder, _few_ids(module))
    # Another order of sums stays below a millionth of a nat. 8 bits cost more, those of our tests under 0.05: from 0.1
    # on the form is taken for another function. `not <`, so that NaN is refused, too.
    if not difference < (0.1 if int8 else 1e-6):
        raise HeadwiseError(f"this model has no decode form: ours differs from it by {difference:.2g} nats a token")
    return decoder


def _as_ours(module: Any, lacks: str) -> GPT:
    """A Llama-like model of transformers as a GPT of ours with the same weights, whose RoPE is still to be set.

    lacks  how the error begins where it cannot be one: "this model has" ...
    """
    if stream_of(module) is not None:
        raise HeadwiseError(f"this model has {lacks}: it is read layer by layer, and that takes it whole in memory")
    config: Any = getattr(module, "config", None)
    kind, rope = getattr(config, "model_type", type(module).__name__), getattr(config, "rope_parameters", None) or {}
    decoded = families("decode")
    if kind not in decoded or rope.get("rope_type") not in ROPES or hooked(module):
        raise HeadwiseError(
            f"this model has {lacks}: {kind} is none of {', '.join(decoded)}, "
            f"its rope_type is none of {', '.join(ROPES)}, or it is watched"
        )
    return as_gpt(config.to_dict(), module.state_dict())


def _for_plan(module: Any) -> GPT:
    """A Llama-like model of transformers as a GPT of ours, whose caches take a plan."""
    ours = _as_ours(module, "no cache that takes a plan")
    rope = import_attention(module.model.layers[0].self_attn).layer.spec.rope  # all layers of these families share it
    for block in cast(list[Block], ours.blocks):
        block.attention.spec = block.attention.spec.replace(rope=rope)
    ids = torch.tensor([_few_ids(module)])
    difference = _divergence(logits(module, ids), logits(ours, ids))
    # Of another order of sums, as in `decode_form`; half precision rounds more, and is allowed 1,000 times as much.
    most = 1e-6 if next(module.parameters()).dtype == torch.float32 else 1e-3
    if not difference < most:
        raise HeadwiseError(f"this model takes no plan: our form differs from it by {difference:.2g} nats a token")
    return ours


def _few_ids(module: Any) -> list[int]:
    """A text of 8 tokens, 0 to 7, on which two forms are compared: what it says does not matter, and 8 take no time."""
    return list(range(min(8, module.config.vocab_size, module.config.max_position_embeddings)))


@torch.no_grad()
def _divergence(theirs: Tensor, ours: Tensor) -> float:
    """Mean KL(theirs || ours) of logits (...,V), in nats."""
    log_p, log_q = theirs.double().log_softmax(-1), ours.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@torch.no_grad()
def decode_loss(decoder: Decoder, ids: Sequence[int]) -> float:
    """What a decode form loses against its model on the end of a text: mean KL(model || form), in nats a token."""
    ids = ids[-min(SCORED, decoder.config.context) :]
    theirs = logits(decoder.source, torch.tensor([ids]))
    ours = Texts(decoder, len(ids))([ids], last=len(ids))
    return _divergence(theirs, ours)


def prompt_ids(model: nn.Module, text: str) -> list[int]:
    """Ids of a text that the model is to continue; of an empty one, what a text begins with."""
    folder = described(model)
    if folder is None or folder.tokens is None:  # a command shows `ids=` as its option --ids
        where = "the model was not read from a folder" if folder is None else f"{folder.path} has no tokenizer"
        raise HeadwiseError(f"{where}, so its words are not known; pass token ids instead of a text (ids=)")
    if isinstance(folder.tokens, Tokens):
        return folder.tokens.prompt(text) or folder.tokens.opening()
    # Of a model of transformers, the token that begins a text (bos), the lowest id where it names several.
    return folder.tokens.prompt(text) or sorted(_special(model, "bos_token_id"))[:1]


def end_ids(model: nn.Module) -> set[int]:
    """The tokens that end a text, as far as the model's folder names them."""
    folder = described(model)
    if folder is not None and isinstance(folder.tokens, Tokens):
        return set(folder.tokens.specials)  # of ours the boundary alone, where there is one
    return _special(model, "eos_token_id")


def _special(model: nn.Module, name: str) -> set[int]:
    """Ids that a model of transformers names, one or a list, where its own `generate` looks for them."""
    value = getattr(getattr(model, "generation_config", None), name, None)
    if value is None:
        return set()
    return set(value) if isinstance(value, list) else {value}
