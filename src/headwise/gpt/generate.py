"""Continue texts, one token at a time; and the decode form of a GPT, in which that goes fast.

The form has the weights once more. A step reads every weight once and computes little with it, so memory sets the pace,
and what lies between the products is kept short, all the more as each product drives the rest out of the processor's
cache. Queries, keys and values come from one matrix, gate and up from another. Features that RoPE rotates together
stand side by side, as one complex number. Keys and values have one buffer, made once, and a step of one token needs no
mask. The answer is that of `GPT.forward` up to rounding; that one is the definition.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.gpt.gpt import GPT, Block, FeedForward
from headwise.gpt.presets import check_seed
from headwise.layer.layer import MultiHeadAttention
from headwise.masks import Allowed
from headwise.rungs.tensor import FEW_KEYS, Rotation, attend
from headwise.spec import Options
from headwise.words import refusal

WORTH = 16  # new tokens from which on a decode form pays: to make it takes about as long as so many steps of the model
MOST = 2**31  # bytes of weights, at most, of which `models.generate` makes a second copy unasked; a round choice


@dataclass(frozen=True)
class Source:
    """What the loop must know of a model, ours or another."""

    # Begins a text, and returns what reads on in it: ids (1,T) that follow -> logits (V,) of the next one.
    begin: Callable[[], Callable[[Tensor], Tensor]]
    context: int | None  # most tokens of a text; None where the model sets no bound
    vocab_size: int | None  # None where the model's config does not say it: then no id is too large
    decoder: Decoder | None = None  # its decode form


class Apart:
    """Texts side by side that a model reads one by one; `Texts` is the same for a decode form."""

    def __init__(self, source: Source, n_texts: int) -> None:
        self.readers = [source.begin() for _ in range(n_texts)]
        self.logits = [torch.empty(0)] * n_texts  # of each text, the latest

    def __call__(self, ids: Sequence[Sequence[int]], last: int = 1) -> Tensor:
        """Read what follows in each text, nothing in one that has ended; logits (B,1,V) of what comes next.

        `last` is always 1: it is there since `Texts`, for which tokens are guessed, has it.
        """
        for n, new in enumerate(ids):
            if new:
                self.logits[n] = self.readers[n](torch.tensor([new]))
        return torch.stack(self.logits)[:, None]


def generate(
    model: GPT, prompt: Sequence[int], n_tokens: int, *, stop: int | None = None, cache: bool = True, **options: Any
) -> Iterator[int]:
    """Continue ids by a GPT of ours; see `models.generate.generate`, which serves other models and texts too."""

    def begin() -> Callable[[Tensor], Tensor]:
        caches, device = model.new_caches(), model.lm_head.weight.device
        return lambda ids: model(ids.to(device), caches, last_only=True)[0, -1]

    # However large it is (`MOST`): a training calls this, which holds the weights several times in any case.
    is_worth_a_form = cache and n_tokens >= WORTH and why_not(model) is None
    decoder = Decoder(model) if is_worth_a_form else None
    source = Source(begin, model.config.context, model.config.vocab_size, decoder)
    stops = () if stop is None else (stop,)
    return only(continued(source, [prompt], n_tokens, stops=stops, cache=cache, **options))


def only(steps: Iterator[list[int | None]]) -> Iterator[int]:
    """The ids of a single text."""
    return (token for step in steps for token in step if token is not None)


def continued(
    source: Source,
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stops: Collection[int] = (),
    cache: bool = True,
    lookup: int = 0,
) -> Iterator[list[int | None]]:
    """Yield, step by step, the next id of each text, None once it has ended: by `n_tokens`, or by one of `stops`.

    Text n draws with the seed `seed + n`, as it would alone. A text that reaches the model's context forgets its older
    half, and the rest is read again from the start.

    temperature   0 takes the likeliest id; top_k draws among so many of the likeliest, None among all
    cache         without it the whole text is read again at each step
    lookup        how many ids may be guessed in a step, and are read together; 0 guesses none
    """
    _check(source, prompts, n_tokens=n_tokens, temperature=temperature, top_k=top_k, seed=seed, lookup=lookup)
    decoder = source.decoder if cache else None
    if lookup and (decoder is None or len(prompts) > 1):
        raise HeadwiseError(f"lookup={lookup} is for one text, and needs the cache; leave it out")
    generators = [torch.Generator().manual_seed(seed + n) for n in range(len(prompts))]
    limit = source.context or sys.maxsize

    @torch.no_grad()
    def steps() -> Iterator[list[int | None]]:
        texts = [list(prompt)[-limit:] for prompt in prompts]
        ended, written = [False] * len(texts), 0
        reading = None
        while written < n_tokens and not all(ended):
            form = None if decoder is None or decoder.disturbed() else decoder
            # The second: padding takes places, too, so these may run out while every text is still short enough.
            if any(len(text) > limit for text in texts) or (isinstance(reading, Texts) and reading.length >= limit):
                reading = None
                for n, text in enumerate(texts):
                    if ended[n]:
                        texts[n] = text[-1:]  # nobody reads it on; something has to stand in its row
                    elif len(text) > limit:
                        texts[n] = text[-max(1, limit // 2) :]
            # Normally only the latest token is unread: guesses that were accepted are in the cache already.
            # The whole text is read at first, after older tokens were forgotten, and without a cache. It also is when
            # somebody begins to watch the model: the decode form shows a watcher nothing, so the model takes over.
            unread = [[] if end else text[-1:] for text, end in zip(texts, ended, strict=True)]
            if reading is None or not cache or (form is None and isinstance(reading, Texts)):
                room = min(limit, max(map(len, texts)) + n_tokens - written)
                reading = Apart(source, len(texts)) if form is None else Texts(form, room)
                unread = texts
            # Behind the guess the model writes one token of its own, which must have its place, too.
            room_for_guess = min(lookup, n_tokens - written - 1, limit - len(texts[0]))
            guess = looked_up(texts[0], room_for_guess) if isinstance(reading, Texts) else []
            logits = reading([[*ids, *guess] for ids in unread], 1 + len(guess))
            # Choose a token at each guessed place, and one behind the last (None: nothing was guessed there). The first
            # token that differs from its guess ends this: the logits behind it belong to a text that was not written.
            for place, guessed in enumerate([*guess, None]):
                step: list[int | None] = [None] * len(texts)
                for n, text in enumerate(texts):
                    if not ended[n]:
                        token = _choose(logits[n, place], generators[n], temperature, top_k)
                        text.append(token)
                        ended[n] = token in stops
                        step[n] = None if ended[n] else token
                written += 1
                if not all(ended):
                    yield step
                if step != [guessed]:
                    break
            if isinstance(reading, Texts):  # `place` guesses were right; the cache forgets the rest
                reading.length -= len(guess) - place

    return steps()


def _check(source: Source, prompts: Sequence[Sequence[int]], *, seed: int, **numbers: Any) -> None:
    # Raises HeadwiseError for what `continued` cannot honour.
    if not prompts or not all(prompts):
        raise HeadwiseError("the prompt is empty, and this model has no token that begins a text; pass prompt=")
    wrong = [i for ids in prompts for i in ids if not 0 <= i < (source.vocab_size or sys.maxsize)]
    if wrong:
        raise HeadwiseError(f"token id {wrong[0]} lies outside the vocabulary of {source.vocab_size}")
    n_tokens, temperature = numbers["n_tokens"], numbers["temperature"]
    if n_tokens < 0:
        raise HeadwiseError(f"{n_tokens=} is negative")
    if not temperature >= 0:
        raise refusal("temperature", temperature=temperature)
    check_seed(seed)
    for name, least in (("top_k", 1), ("lookup", 0)):
        if numbers[name] is not None and numbers[name] < least:
            raise HeadwiseError(f"{name}={numbers[name]} must be at least {least}")


def looked_up(ids: Sequence[int], n: int) -> list[int]:
    """The n ids that came after the latest place where the text has had its last two before (Saxena 2023).

    [7, 8, 9, 4, 7, 8] -> [9, 4] for n = 2; none where the two are new. That they are two is a round choice: what came
    after one token is more often wrong, and three come again less often.
    """
    if n <= 0:
        return []
    for end in range(len(ids) - 1, 1, -1):  # behind each pair of tokens, the latest first
        if ids[end - 1] == ids[-1] and ids[end - 2] == ids[-2]:
            return list(ids[end : end + n])
    return []


def _choose(logits: Tensor, generator: torch.Generator, temperature: float, top_k: int | None) -> int:
    # The next token by its logits (V,), drawn with the probabilities softmax(logits / temperature).
    # One that is not finite makes the sum so. In float32: in float16 that of a large vocabulary would overflow.
    if not math.isfinite(logits.sum(dtype=torch.float32)):
        raise HeadwiseError("the model's logits are NaN or inf; its weights are damaged or its training diverged")
    if temperature == 0:
        return int(logits.argmax())
    ids, rows = None, logits.cpu().double()
    if top_k is not None and top_k < len(rows):
        rows, ids = rows.topk(top_k)
    # Token i has the stretch from bounds[i - 1] to bounds[i], as long as it is likely; the largest term is exp(0), so
    # that none overflows.
    bounds = ((rows - rows.max()) / temperature).exp().cumsum(0)
    point = torch.rand((), generator=generator, dtype=torch.float64) * bounds[-1]
    place = min(int(torch.searchsorted(bounds, point, right=True)), len(rows) - 1)  # rounding may reach the last bound
    return place if ids is None else int(ids[place])


# The decode form.

# The classes of modules that a model may be made of; one of a subclass may compute something else.
PARTS = {
    GPT, Block, MultiHeadAttention, FeedForward, nn.ModuleList, nn.Linear, nn.Embedding, nn.RMSNorm, nn.LayerNorm,
    nn.Dropout, nn.Identity,
}  # fmt: skip

Product = Callable[..., None]  # (x, y, add=False): W x + b for rows of x, written into y or added to it


def product(
    *parts: nn.Linear, int8: bool, rows: int, gain: Tensor | None = None, order: Tensor | slice = slice(None)
) -> Product:
    """A product whose W and b are those of the parts, one after another.

    gain   (in) is multiplied into W; `order` rearranges the outputs
    int8   W in 8 bits with a scale for each output, x in 8 bits with one scale: torch's dynamic quantised product
    rows   how many rows x will mostly have: for one, W is stored transposed, for more in oneDNN's own layout. Each is
           the faster one for so many rows
    """
    weight = torch.cat([part.weight for part in parts])[order] * (1 if gain is None else gain)
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])[order]
    rest: tuple[Any, ...]  # what the operation takes behind x
    if int8:
        # The largest weight of a row becomes 127; the bound keeps the scale of a row of zeros from being 0.
        scales = weight.abs().amax(1).clamp(min=1e-12).double() / 127
        zeros = torch.zeros(len(weight)).long()
        with warnings.catch_warnings():  # torch means to drop such tensors, and has no product as fast without them
            warnings.simplefilter("ignore", UserWarning)
            quantised = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(quantised, bias)
        # Without these instructions two products of 8 bits are summed in 16 bits, which 8 bits of x could overflow.
        # This is `reduce_range` of the operation: x then has 7 bits.
        seven_bits = not torch.cpu.get_capabilities().get("avx512_vnni")
        operation, rest = torch.ops.quantized.linear_dynamic, (packed, seven_bits)
    elif rows > 1 and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        operation, rest = torch.ops.mkldnn._linear_pointwise, (packed, bias, "none", [], "")  # no activation behind it
    else:
        columns = weight.T.contiguous()

        def by_columns(x: Tensor, y: Tensor, add: bool = False) -> None:
            torch.addmm(y, x, columns, beta=int(add), out=y)  # beta * y + x W; with beta 0 what y holds is not read
            if bias is not None:
                y.add_(bias)

        return by_columns

    def by_rows(x: Tensor, y: Tensor, add: bool = False) -> None:
        result = operation(x, *rest)
        if add:
            y.add_(result)
        else:
            y.copy_(result)

    return by_rows


class Layer:
    """One block: its products, with the gains of its norms in them, and what else its norms do."""

    def __init__(self, block: Block, window: int | None, laid_out: Callable[..., Product]) -> None:
        attention, ff, spec = block.attention, block.feed_forward, block.attention.spec
        H, G, D = spec.n_heads, spec.n_kv_heads, spec.head_dim
        # (H+2G,D): for each output of the product its row in W_Q, W_K and W_V, which stand one below another.
        order = torch.arange((H + 2 * G) * D).view(-1, D)
        # RoPE rotates feature m together with m + D/2. In each query and key they come to stand side by side, as
        # 0, D/2, 1, D/2 + 1, ..., so that memory holds a pair as one complex number. Values keep their order.
        if spec.rope is not None:
            order[: H + G] = order[: H + G].view(-1, 2, D // 2).transpose(1, 2).flatten(1)
        self.gain = None  # (H+G,D) of the qk-norm, times sqrt(D), which `_rms` leaves out; None: there is no qk-norm
        # `_rms` adds small^2 to a sum of D squares; RMSNorm adds eps to their mean. So small^2 is D * eps.
        self.small = torch.tensor((D * spec.qk_norm_eps) ** 0.5)
        if attention.q_norm is not None and attention.k_norm is not None:
            gains = [attention.q_norm.weight.expand(H, D), attention.k_norm.weight.expand(G, D)]
            self.gain = D**0.5 * torch.cat(gains).gather(1, order[: H + G] % D)  # % D: the feature within its head
        assert spec.mask is not None  # every config has a causal one, and `why_not` lets no other spec through
        self.mask = spec.mask  # has the window in it, too
        self.window = window  # tokens that a query sees, its own too; None: all
        # The gain of each norm is multiplied into the matrices that read what it gives.
        self.norm, gain = _norm(block.attention_norm)
        self.heads = laid_out(attention.q_proj, attention.k_proj, attention.v_proj, gain=gain, order=order.flatten())
        self.out, self.down = laid_out(attention.o_proj), laid_out(ff.down)
        self.second_norm, gain = _norm(block.feed_forward_norm)
        self.up = laid_out(*([] if ff.gate is None else [ff.gate]), ff.up, gain=gain)
        self.activation = ff.activation


class Decoder:
    """The decode form of a GPT in float32 on the CPU, with the weights as they are now; it takes their memory again.

    int8   products in 8 bits: a quarter of the bytes, and another function; measure its loss
    rows   how many tokens a step reads, over all texts; the layout follows it, the answer does not

    Raises HeadwiseError, with the reason, for a model that has no such form.
    """

    @torch.inference_mode()
    def __init__(self, model: GPT, int8: bool = False, rows: int = 1) -> None:
        if reason := why_not(model):
            raise HeadwiseError(f"this model has no decode form: {reason}")
        self.follow(model)
        self.config, self.spec = model.config, model.config.attention
        self.rotation = None if self.spec.rope is None else Rotation(self.spec.rope, self.spec.head_dim)
        laid_out = partial(product, int8=int8, rows=rows)
        blocks = cast(list[Block], model.blocks)
        self.layers = [Layer(block, model.config.window(n), laid_out) for n, block in enumerate(blocks)]
        # The model's own modules, not copies: products alone have another layout.
        self.embedding, self.embedding_norm = model.token_embedding, model.embedding_norm
        self.positions = None if model.position_embedding is None else model.position_embedding.weight
        self.final_norm, gain = _norm(model.final_norm)
        self.head = laid_out(model.lm_head, gain=gain)

    def follow(self, source: nn.Module) -> None:
        """Remember whose form this is, and where that model keeps hooks and watchers: `disturbed` asks each step.

        `decode_form` calls it again for a model of transformers, whose form is made of a GPT with the same weights.
        """
        self.source, modules = source, list(source.modules())
        self._hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._layers = [module for module in modules if isinstance(module, MultiHeadAttention)]

    def disturbed(self) -> bool:
        """Does somebody watch the model, or change what it computes? Then it must be asked itself."""
        return any(self._hooks) or any(layer.watchers for layer in self._layers)


class Texts:
    """Texts side by side that a decoder reads, with room for the keys and values of so many tokens of each."""

    def __init__(self, decoder: Decoder, room: int) -> None:
        self.decoder, self.room = decoder, room
        self.length = 0  # tokens read, padding too; whoever lowers it makes the cache forget the latest ones
        self._sizes = (0, 0)  # texts and tokens of a step: those for which `_lay` has made its buffers

    def _begin(self, ids: Sequence[Sequence[int]], T: int) -> None:
        spec, room = self.decoder.spec, self.room
        # (n,B,2,G,room,D): of each layer and text the keys, then the values.
        self._cache = torch.empty(len(self.decoder.layers), len(ids), 2, spec.n_kv_heads, room, spec.head_dim)
        starts = torch.tensor([[T - len(text)] for text in ids])
        # Shorter texts are padded at their front, so that all end at the same place.
        # (B,1): where each begins; None: all at 0.
        self._first = starts if starts.any() else None
        # For each position the complex numbers that rotate pairs when multiplied with them: what RoPE makes of 1 + 0i.
        if self.decoder.rotation is not None:  # (room,1,D/2)
            ones = torch.ones(1, 1, room, spec.head_dim // 2)
            rotated = self.decoder.rotation(torch.cat([ones, 0 * ones], -1), 0)[0, 0]
            self._rotations = torch.complex(*rotated.chunk(2, -1))[:, None]

    def take(self, past: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Begin with tokens that the model itself has read: for each layer their keys and values, (1,G,T,D) each."""
        self.length = past[0][0].shape[2]
        self._begin([[0] * self.length], self.length)  # of the ids only their number counts
        for cache, (k, v) in zip(self._cache, past, strict=True):
            if self.decoder.rotation is not None:
                k = k.view(*k.shape[:-1], 2, -1).transpose(-2, -1).flatten(-2)  # pairs side by side, as in `Layer`
            cache[:, 0, :, : self.length], cache[:, 1, :, : self.length] = k, v

    def _lay(self, B: int, T: int) -> None:
        """Make the buffers for the results of a step, and all views of them that it needs.

        Layers and steps of the same (B,T) write into them in turn. A view takes time to make, little but each time, so
        they are made once here.
        """
        spec, config, self._sizes = self.decoder.spec, self.decoder.config, (B, T)
        H, G, D, W = spec.n_heads, spec.n_kv_heads, spec.head_dim, config.feed_forward_width
        heads = torch.empty(B, T, H + 2 * G, D)  # queries, then keys, then values
        self._heads = heads.view(B * T, -1)
        self._q, self._kv, self._qk = heads[:, :, :H], heads[:, :, H:], heads[:, :, : H + G]
        self._pairs = self._qk.view(torch.complex64) if self.decoder.rotation else self._qk  # (B,T,H+G,D/2)
        # The queries of the first token, for steps of one: by key/value head, as if a group were H/G query positions.
        self._groups = heads[:, 0, :H].view(B, G, H // G, D)
        self._hidden = torch.empty(B * T, W * (1 + config.gated))
        # Without a gate the activation is of `up` itself, which then stands in the place of the gate.
        self._gate, self._up = self._hidden[:, :W], self._hidden[:, W:] if config.gated else None

    @torch.inference_mode()
    def __call__(self, ids: Sequence[Sequence[int]], last: int = 1) -> Tensor:
        """Read what follows in each text; logits (B,last,V) of what comes after each of the last tokens."""
        decoder, B, T = self.decoder, len(ids), max(map(len, ids))
        start, end = self.length, self.length + T
        if start == 0:
            self._begin(ids, T)
        if self._sizes != (B, T):
            self._lay(B, T)
        # The positions of these tokens: one slice for all texts, or (B,T) where they begin at different places. Padding
        # before a text gets position 0; no token looks at it.
        where = slice(start, end) if self._first is None else (torch.arange(start, end) - self._first).clamp(min=0)
        padded = [[0] * (T - len(text)) + list(text) for text in ids]
        x = decoder.embedding(torch.tensor(padded))
        if decoder.positions is not None:
            x = x + decoder.positions[where]
        x = decoder.embedding_norm(x).view(B * T, -1)
        rotations = None if decoder.rotation is None else self._rotations[where]  # (T,1,D/2), or for each text
        # Of each layer what is read, (B,G,S,D), and where the new keys and values go, (B,T,2G,D): views of the cache.
        keys, values = (self._cache[:, :, kind, :, :end].unbind(0) for kind in (0, 1))
        places = self._cache.flatten(2, 3)[:, :, :, start:end].transpose(2, 3).unbind(0)
        for layer, k, v, place in zip(decoder.layers, keys, values, places, strict=True):
            layer.heads(layer.norm(x), self._heads)  # this also fills _q, _kv, _qk and _pairs, its views
            if layer.gain is not None:
                self._qk.copy_(_rms(self._qk, layer.small).mul_(layer.gain))
            if rotations is not None:
                self._pairs.mul_(rotations)
            place.copy_(self._kv)
            layer.out(self._attend(layer, k, v), x, add=True)
            layer.up(layer.second_norm(x), self._hidden)
            hidden = layer.activation(self._gate)
            layer.down(hidden if self._up is None else hidden * self._up, x, add=True)
        self.length = end
        x = decoder.final_norm(x.view(B, T, -1)[:, -last:].flatten(0, 1))
        logits = x.new_empty(len(x), decoder.config.vocab_size)
        decoder.head(x, logits)
        return logits.view(B, last, -1)

    def _attend(self, layer: Layer, k: Tensor, v: Tensor) -> Tensor:
        """What the heads give, (B*T,H*D)."""
        (B, T), S, alive = self._sizes, k.shape[2], None
        if self._first is not None:  # (B,1,1,S) which places hold a token
            alive = (torch.arange(S) >= self._first)[:, None, None]
        # A single query sees all keys, or those of its window, and needs no mask but for padding. On few keys torch's
        # own operation would hide NaN in the scores (`FEW_KEYS`), and `attend` does not.
        if T > 1 or S < FEW_KEYS:  # a mask takes the T queries for the last of the S places
            mask = layer.mask if alive is None else layer.mask & Allowed(alive)
            return attend(self._q.transpose(1, 2), k, v, Options(mask)).transpose(1, 2).reshape(B * T, -1)
        if layer.window is not None and layer.window < S:
            seen = slice(-layer.window, None)
            k, v = k[:, :, seen], v[:, :, seen]
            alive = None if alive is None else alive[..., seen]
        return F.scaled_dot_product_attention(self._groups, k, v, alive).view(B, -1)


def why_not(model: GPT) -> str | None:
    """Why a model has no decode form; None where it has one."""
    foreign = {type(module).__name__ for module in model.modules() if type(module) not in PARTS}
    if foreign:
        return f"{min(foreign)} is no part that it knows"
    # Autocast multiplies copies of the weights in another format.
    if torch.is_autocast_enabled("cpu") or any(
        x.dtype != torch.float32 or x.device.type != "cpu" for x in model.parameters()
    ):
        return "it is made for float32 on the CPU"
    if hooked(model) or (model.training and model.config.dropout):
        return "somebody watches the model, or it is being trained"
    # The form serves every config but those with latents. Somebody may have changed a layer's spec since, and the form
    # would not know what it says beyond the config.
    specs = [block.attention.spec for block in cast(list[Block], model.blocks)]
    if model.config.latent_dim is not None or specs != list(map(model.config.attention_of, range(len(specs)))):
        return "its attention has options that the form lacks"
    return None


def hooked(model: nn.Module) -> bool:
    """Does somebody watch a model, or change what it computes?"""
    return any(m._forward_hooks or m._forward_pre_hooks or vars(m).get("watchers") for m in model.modules())


def _norm(norm: nn.Module) -> tuple[Callable[[Tensor], Tensor], Tensor | None]:
    """A norm over the width, and the gain that is left to the product behind it."""
    if not isinstance(norm, nn.RMSNorm):
        return norm, None
    # `_rms` leaves out sqrt(width), which goes into the gain, and takes small^2 = width * eps, as in `Layer`. `or 0` is
    # for the type checker alone: a config gives every norm its eps.
    root = torch.tensor(norm.normalized_shape[0] ** 0.5)
    gain = root if norm.weight is None else norm.weight * root
    return partial(_rms, small=root * (norm.eps or 0) ** 0.5), gain


def _rms(x: Tensor, small: Tensor) -> Tensor:
    """x / sqrt(sum of squares + small^2): RMSNorm but for its gain and sqrt(width), in 3 steps; `F.rms_norm` has 9."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / size.hypot(small)
