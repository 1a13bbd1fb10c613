"""A GPT, read from top to bottom: configuration, norms, feed-forward, block, model; and how it continues a text.

One class serves microgpt, GPT-2 / nanoGPT, Llama and Qwen3: they differ in the fields of `GPTConfig`. Pre-norm
residual blocks: x + attention(norm(x)), then x + feed_forward(norm(x)).
"""

from __future__ import annotations

import inspect
import math
import runpy
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.backends.cache import KVCache
from headwise.errors import HeadwiseError
from headwise.gpt.presets import check_seed
from headwise.layer.layer import MultiHeadAttention
from headwise.masks import Causal
from headwise.positions import RoPE
from headwise.spec import AttentionSpec, require_size

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),  # So et al. 2021, arXiv 2109.08668
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),  # GPT-2
    "silu": F.silu,  # with gated=True: SwiGLU, Shazeer 2020, arXiv 2002.05202
}


OPTIONAL_SIZES = ("n_kv_heads", "head_dim", "d_ff")
SIZES = ("vocab_size", "context", "n_layers", "n_heads", "d_model", *OPTIONAL_SIZES)
CHOICES = {
    "norm": ("rms", "layer"),
    "position": ("rope", "learned"),
    "activation": tuple(ACTIVATIONS),
}


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a model. Widths count features, `context` counts tokens."""

    vocab_size: int
    context: int  # the longest text
    n_layers: int
    n_heads: int
    d_model: int
    n_kv_heads: int | None = None  # default n_heads
    head_dim: int | None = None  # default d_model / n_heads
    d_ff: int | None = None  # width of the feed-forward; default 4 * d_model
    norm: str = "rms"  # or "layer"
    norm_gain: bool = True  # do norms learn a factor for each feature?
    norm_eps: float = (
        1e-5  # added to the variance, or the mean square; as in Llama 2 and GPT-2
    )
    embedding_norm: bool = False  # a norm of the embeddings, before the first block
    final_norm: bool = True  # a norm behind the last block
    position: str = "rope"  # or "learned": an embedding of positions
    rope_theta: float = (
        10_000.0  # the base of RoPE's angles, of Su et al. 2021 (arXiv 2104.09864)
    )
    activation: str = "silu"  # one of ACTIVATIONS
    gated: bool = True  # the feed-forward; see `FeedForward`
    bias: bool = False  # of every projection but that to the logits, and of LayerNorm
    tied: bool = False  # the output projection is the token embedding
    qk_norm: bool = False  # an RMSNorm of each query and key, in each head
    dropout: float = (
        0.0  # of attention weights, and of what attention and feed-forward add
    )
    init_std: float = (
        0.02  # of the normal distribution that matrices are drawn from; as in GPT-2
    )
    # W_O and the last feed-forward matrix start at init_std / sqrt(2 n_layers), GPT-2
    scale_residual_init: bool = True
    # a class in place of MultiHeadAttention, by the name that `register` gave it
    own_attention: str | None = None

    def __post_init__(self) -> None:
        for name in SIZES:
            if getattr(self, name) is None and name in OPTIONAL_SIZES:
                continue
            # a frozen record has no assignment to its fields
            vars(self)[name] = require_size(name, getattr(self, name))
        for name in ("norm_eps", "rope_theta", "init_std"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise HeadwiseError(f"{name}={value!r} must be a positive number")
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise HeadwiseError(
                    f"{name}={value!r} is not known; one of {', '.join(known)}"
                )
        _ = self.attention  # validates heads and widths

    @property
    def attention(self) -> AttentionSpec:
        """The spec of every layer's attention. Making it checks heads and widths."""
        same = ("d_model", "n_heads", "n_kv_heads", "head_dim", "qk_norm")
        return AttentionSpec(
            **{name: getattr(self, name) for name in same},
            q_bias=self.bias,
            kv_bias=self.bias,
            out_bias=self.bias,
            mask=Causal(),
            rope=RoPE(self.rope_theta) if self.position == "rope" else None,
            dropout=self.dropout,
        )

    @property
    def feed_forward_width(self) -> int:
        return self.d_ff or 4 * self.d_model


def make_norm(config: GPTConfig) -> nn.Module:
    """RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467) or LayerNorm over the width, with or without gain.

    LayerNorm has a bias where the config says so, but none without a gain; RMSNorm has none.
    """
    sizes = config.d_model, config.norm_eps, config.norm_gain
    if config.norm == "rms":
        return nn.RMSNorm(*sizes)
    return nn.LayerNorm(*sizes, bias=config.bias)


class FeedForward(nn.Module):
    """down(act(up x)), or down(act(gate x) * up x) when gated. (B,T,c) -> (B,T,c)"""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.feed_forward_width
        self.gate = (
            nn.Linear(config.d_model, width, bias=config.bias) if config.gated else None
        )
        self.up = nn.Linear(config.d_model, width, bias=config.bias)
        self.down = nn.Linear(width, config.d_model, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


# A class of one's own as the attention.

# What courses and libraries call the sizes that a class is built with.
SPELLINGS = {
    "d_model": "d_model d_in d_out dim emb_dim embed_dim embed_size hidden_size n_embd width",
    "n_heads": "n_heads n_head num_heads num_attention_heads nhead heads h",
    "n_kv_heads": "n_kv_heads num_kv_heads num_kv_groups num_key_value_heads",
    "head_dim": "head_dim head_size d_head d_k d_v",
    "context": "context context_length block_size max_len max_seq_len seq_len",
    "dropout": "dropout",
    "causal": "causal is_causal",
}
MEANINGS = {name: size for size, names in SPELLINGS.items() for name in names.split()}
# by the name that a config has for it; of this process alone
_classes: dict[str, type[nn.Module]] = {}


def register(kind: Any, name: str | None = None) -> str:
    """The name under which a config finds a class, in this process alone."""
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise HeadwiseError(
            f"attention={kind!r} is no class of torch modules (torch.nn.Module)"
        )
    name = name or f"{kind.__module__}:{kind.__qualname__}"
    _classes[name] = kind
    return name


def register_file(place: str) -> str:
    """The same of FILE:CLASS, a class in a file of Python, which is run."""
    file, _, name = place.rpartition(":")
    path = Path(file).resolve()
    if not path.is_file():
        raise HeadwiseError(
            f"attention={place!r} names no class in a file; pass FILE:CLASS, such as attention.py:Mine"
        )
    return register(runpy.run_path(str(path)).get(name), f"{path}:{name}")


class OwnAttention(nn.Module):
    """A module of a registered class, called as its parameters ask: (B,T,C) -> (B,T,C), causal."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.name = str(config.own_attention)
        self.is_checked = False
        if self.name not in _classes:
            raise HeadwiseError(
                f"the attention of this model is {self.name}, and headwise runs no code that a folder names; train it "
                f"again with attention=, or load the weights into that class"
            )
        kind = _classes[self.name]
        sizes = {**vars(config), **vars(config.attention), "causal": True}
        arguments = {}
        for name, parameter in inspect.signature(kind).parameters.items():
            if name in MEANINGS:
                arguments[name] = sizes[MEANINGS[name]]
            # no *args, no **kwargs
            elif (
                parameter.default is parameter.empty
                and "VAR" not in parameter.kind.name
            ):
                raise HeadwiseError(
                    f"{kind.__name__} wants {name}=, whose meaning is not known; pass a class that says it: class Mine("
                    f"{kind.__name__}): def __init__(self, d_model, n_heads): super().__init__(...)"
                )
        self.module = kind(**arguments)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        if not self.is_checked and x.shape[1] > 1:
            self._check(x[:1].detach())
            self.is_checked = True
        inputs = x
        # A class without a cache of its own reads all inputs again at each step: they are kept as keys.
        if cache is not None:
            kept, _ = cache.append(x[:, None], x[:, None, :, :0])
            inputs = kept[:, 0]
        return self._call(inputs)[:, -x.shape[1] :]

    def _call(self, x: Tensor) -> Tensor:
        """Each input that the class asks for is x; a mask (T,T) is True where a token may be attended."""
        visible = torch.ones(
            x.shape[1], x.shape[1], dtype=torch.bool, device=x.device
        ).tril()
        arguments = {}
        for name, parameter in inspect.signature(
            self.module.forward
        ).parameters.items():
            is_needed = parameter.default is parameter.empty
            if "mask" in name:
                arguments[name] = visible
            elif is_needed and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                arguments[name] = x
        result = self.module(**arguments)
        return result[0] if isinstance(result, tuple | list) else result

    @torch.no_grad()
    def _check(self, x: Tensor) -> None:
        """Refuse what gives another shape than its input, or sees later tokens."""
        changed = x.clone()
        training = self.module.training
        wrong = ""
        changed[:, -1] += 1
        self.module.eval()
        try:
            first = self._call(x)
            second = self._call(changed)
            if first.shape != x.shape:
                wrong = (
                    f"it gives {tuple(first.shape)} for an input of {tuple(x.shape)}"
                )
            elif not torch.allclose(first[:, :-1], second[:, :-1], atol=1e-5):
                wrong = "it sees later tokens; mask them, or take a mask= of which True may be attended"
        except Exception as error:  # it is somebody's own code
            wrong = f"{type(error).__name__}: {error}"
        self.module.train(training)
        if wrong:
            raise HeadwiseError(
                f"{self.name} cannot be the attention of a GPT: {wrong}"
            )


class Block(nn.Module):
    """One layer: attention, in which tokens read what others hold, then a feed-forward for each token by itself."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention: Any
        if config.own_attention is None:
            self.attention = MultiHeadAttention.from_spec(config.attention)
        else:
            self.attention = OwnAttention(config)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cache: KVCache | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cache=cache))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class GPT(nn.Module):
    """Token ids (B,T) -> logits (B,T,V) of the next token at each position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        # RoPE has no weights: each layer's attention rotates
        learned = config.position == "learned"
        self.position_embedding = (
            nn.Embedding(config.context, config.d_model) if learned else None
        )
        self.embedding_norm = (
            make_norm(config) if config.embedding_norm else nn.Identity()
        )
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.final_norm = make_norm(config) if config.final_norm else nn.Identity()
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.token_embedding.weight
        self._init_weights()

    def _init_weights(self) -> None:
        for name, parameter in self.named_parameters():
            std = self.config.init_std
            # The last matrix of what is added to the residual stream, 2 n_layers times: so many variances add up.
            if (
                name.endswith(("o_proj.weight", "down.weight"))
                and self.config.scale_residual_init
            ):
                std /= math.sqrt(2 * self.config.n_layers)
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):  # gains are 1 as torch makes them
                nn.init.zeros_(parameter)

    def forward(
        self, ids: Tensor, caches: list[KVCache] | None = None, last_only: bool = False
    ) -> Tensor:
        """Logits (B,T,V) of the token that follows each.

        Args:
            ids: (B,T)
            caches: one a layer; ids are then what follows the cached tokens, and are cached, too
            last_only: give the logits (B,1,V) of the last position alone, all that generation needs
        """
        return self.lm_head(self._features(ids, caches, last_only))

    def _features(
        self, ids: Tensor, caches: list[KVCache] | None = None, last_only: bool = False
    ) -> Tensor:
        """What the logits are made of, (B,T,c)."""
        start = caches[0].length if caches else 0
        end = start + ids.shape[1]
        if end > self.config.context:
            raise HeadwiseError(
                f"{end} tokens exceed the model's context of {self.config.context}; pass fewer, or train with more"
            )
        x = self.token_embedding(ids)
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[start:end]
        x = self.embedding_norm(x)
        for layer, block in enumerate(self.blocks):
            x = block(x, caches[layer] if caches else None)
        return self.final_norm(x[:, -1:] if last_only else x)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token of targets (B,T); targets of -100, torch's default, do not count.

        It is computed in float32, for half precision would round it to 8 or 11 bits.
        """
        counted = targets != -100
        # logits over a vocabulary cost as much as a layer: none of what pads a line
        logits = self.lm_head(self._features(ids)[counted])
        return F.cross_entropy(logits.float(), targets[counted])

    def new_caches(self) -> list[KVCache]:
        """One empty cache for each layer."""
        return [KVCache() for _ in self.blocks]

    @property
    def n_parameters(self) -> int:
        """Number of distinct weights; tied ones count once."""
        return sum(p.numel() for p in self.parameters())


# Continuing a text.


# Begins a text, and returns what reads on in it with a cache: ids (1,T) that follow -> logits (V,) of the next one.
Begin = Callable[[], Callable[[Tensor], Tensor]]


def generate(
    model: GPT, prompt: Sequence[int], n_tokens: int, **options: Any
) -> Iterator[int]:
    """Continue ids by a GPT of ours, as `continued` does it; see also `models.open.generate`."""

    def begin() -> Callable[[Tensor], Tensor]:
        caches = model.new_caches()
        device = model.lm_head.weight.device
        return lambda ids: model(ids.to(device), caches, last_only=True)[0, -1]

    options |= {
        "context": model.config.context,
        "vocab_size": model.config.vocab_size,
    }
    return continued(begin, prompt, n_tokens, **options)


def continued(
    begin: Begin,
    prompt: Sequence[int],
    n_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stops: Collection[int] = (),
    context: int | None = None,
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Yield the ids that continue a text, until `n_tokens` are written or one of `stops` ends it.

    A text that reaches the model's context forgets its older half, and the rest is read again from the start.

    temperature   0 takes the likeliest id
    top_k         draw among so many of the likeliest; None among all
    context       most tokens of a text; None where the model sets no bound
    vocab_size    None where the model does not say it: then no id is too large
    """
    if not prompt:
        raise HeadwiseError(
            "the prompt is empty, and this model has no token that begins a text; pass prompt="
        )
    for i in prompt:
        if i < 0 or i >= (vocab_size or sys.maxsize):
            raise HeadwiseError(
                f"token id {i} lies outside the vocabulary of {vocab_size}"
            )
    if n_tokens < 0:
        raise HeadwiseError(f"{n_tokens=} is negative")
    if not temperature >= 0:
        raise HeadwiseError(
            f"temperature={temperature} must be 0 or more; 0 takes the likeliest token"
        )
    if top_k is not None and top_k < 1:
        raise HeadwiseError(f"{top_k=} must be at least 1")
    check_seed(seed)
    limit = context or sys.maxsize
    generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def tokens() -> Iterator[int]:
        text = list(prompt)[-limit:]
        read = begin()
        unread = text
        for _ in range(n_tokens):
            if len(text) > limit:
                text = text[-max(1, limit // 2) :]
                read = begin()
                unread = text
            token = _choose(read(torch.tensor([unread])), generator, temperature, top_k)
            if token in stops:
                return
            yield token
            text.append(token)
            unread = [token]

    return tokens()


def _choose(
    logits: Tensor, generator: torch.Generator, temperature: float, top_k: int | None
) -> int:
    # The next token by its logits (V,), drawn with the probabilities softmax(logits / temperature).
    # One that is not finite makes the sum so. In float32: in float16 that of a large vocabulary would overflow.
    if not math.isfinite(logits.sum(dtype=torch.float32)):
        raise HeadwiseError(
            "the model's logits are NaN or inf; its weights are damaged or its training diverged"
        )
    if temperature == 0:
        return int(logits.argmax())
    rows = logits.cpu().double()
    ids = torch.arange(len(rows))
    if top_k is not None and top_k < len(rows):
        rows, ids = rows.topk(top_k)
    # Token i has the stretch from bounds[i - 1] to bounds[i], as long as it is likely; the largest term is exp(0), so
    # that none overflows.
    bounds = ((rows - rows.max()) / temperature).exp().cumsum(0)
    point = torch.rand((), generator=generator, dtype=torch.float64) * bounds[-1]
    # rounding may reach the last bound
    place = min(int(torch.searchsorted(bounds, point, right=True)), len(rows) - 1)
    return int(ids[place])
