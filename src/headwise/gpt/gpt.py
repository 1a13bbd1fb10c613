"""A GPT, read from top to bottom: configuration, norms, feed-forward, block, model.

One class serves microgpt, GPT-2 / nanoGPT, Llama and Qwen3: they differ in the fields of `GPTConfig`. Pre-norm
residual blocks: x + attention(norm(x)), then x + feed_forward(norm(x)).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from headwise.backends.cache import KVCache
from headwise.errors import HeadwiseError
from headwise.gpt.own import InputCache, OwnAttention
from headwise.layer.layer import MultiHeadAttention
from headwise.masks import Causal, Window
from headwise.positions import RoPE
from headwise.spec import AttentionSpec, require_size

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),  # So et al. 2021, arXiv 2109.08668
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),  # GPT-2
    "silu": F.silu,  # with gated=True: SwiGLU, Shazeer 2020, arXiv 2002.05202
}


# Sizes that no model exceeds: larger ones would loop for hours over layers and heads before memory is asked for. The
# largest matrix, of n_heads * head_dim rows and d_model columns, then has fewer than 2^63 bytes, as torch wants: 2^57
# numbers of 4 bytes. Below that the bounds are round choices.
MOST = {"n_layers": 2**14, "n_heads": 2**19, "d_model": 2**19, "head_dim": 2**19}
MOST |= {"vocab_size": 2**30, "d_ff": 2**30, "context": 2**30}


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
    norm_eps: float = 1e-5  # added to the variance, or the mean square; as in Llama 2 and GPT-2
    embedding_norm: bool = False  # a norm of the embeddings, before the first block
    final_norm: bool = True  # a norm behind the last block
    position: str = "rope"  # or "learned": an embedding of positions
    rope_theta: float = 10_000.0  # the base of RoPE's angles, of Su et al. 2021 (arXiv 2104.09864)
    activation: str = "silu"  # one of ACTIVATIONS
    gated: bool = True  # the feed-forward; see `FeedForward`
    bias: bool = False  # of every projection but that to the logits, and of LayerNorm
    tied: bool = False  # the output projection is the token embedding
    qk_norm: bool = False  # an RMSNorm of each query and key, in each head
    dropout: float = 0.0  # of attention weights, and of what attention and feed-forward add
    init_std: float = 0.02  # of the normal distribution that matrices are drawn from; as in GPT-2
    # W_O and the last feed-forward matrix start at init_std / sqrt(2 n_layers), GPT-2
    scale_residual_init: bool = True
    # of each layer the tokens that a query sees, its own too; None: all
    windows: tuple[int | None, ...] | None = None

    # a class in place of MultiHeadAttention, by its name in `gpt.own`
    own_attention: str | None = None

    def __post_init__(self) -> None:
        # A frozen record has no assignment to its fields: its sizes, made plain integers, are put in by `vars`.
        for name in ("vocab_size", "context", "n_layers", "n_heads", "d_model"):
            vars(self)[name] = require_size(name, getattr(self, name))
        for name in ("n_kv_heads", "head_dim", "d_ff"):
            if getattr(self, name) is not None:
                vars(self)[name] = require_size(name, getattr(self, name))
        for name, most in MOST.items():
            if (getattr(self, name) or 0) > most:  # None is bounded by what it defaults to
                raise HeadwiseError(
                    f"{name}={getattr(self, name):,} is more than headwise builds, {most:,}"
                )
        for name in ("norm_eps", "rope_theta", "init_std"):
            value = getattr(self, name)
            if isinstance(value, bool) or not (
                isinstance(value, int | float) and 0 < value < math.inf
            ):
                raise HeadwiseError(f"{name}={value!r} must be a positive number")
        choices = {
            "norm": ("rms", "layer"),
            "position": ("rope", "learned"),
            "activation": tuple(ACTIVATIONS),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise HeadwiseError(
                    f"{name}={getattr(self, name)!r} is not known; one of {', '.join(known)}"
                )
        _ = self.attention  # validates heads and widths
        if self.windows is not None:
            # A JSON document has a list; or by mistake one number, which is refused as no window at all.
            windows = tuple(self.windows) if isinstance(self.windows, Iterable) else ()
            wrong = [w for w in windows if w is not None and (type(w) is not int or w < 1)]
            if len(windows) != self.n_layers or wrong:
                raise HeadwiseError(
                    f"windows={self.windows!r} must have a whole number of tokens, or None, for each of "
                    f"{self.n_layers} layers"
                )
            vars(self)["windows"] = windows

    @property
    def attention(self) -> AttentionSpec:
        """The spec of every layer's attention, but for its window. Making it checks heads and widths."""
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

    def window(self, layer: int) -> int | None:
        """How many tokens a query of this layer sees, its own included; None: all."""
        return self.windows[layer] if self.windows else None

    def attention_of(self, layer: int) -> AttentionSpec:
        """The spec of one layer's attention."""
        window = self.window(layer)
        # A Window counts the tokens before a query, without its own, and those behind it.
        return (
            self.attention if window is None else self.attention.replace(mask=Window(window - 1, 0))
        )

    @property
    def sizes(self) -> dict[str, Any]:
        """What a class of one's own may be built with."""
        spec = self.attention
        sizes = {
            name: getattr(spec, name) for name in ("d_model", "n_heads", "n_kv_heads", "head_dim")
        }
        return {**sizes, "context": self.context, "dropout": self.dropout, "causal": True}

    @property
    def feed_forward_width(self) -> int:
        return self.d_ff or 4 * self.d_model


def make_norm(config: GPTConfig) -> nn.Module:
    """RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467) or LayerNorm over the width, with or without gain.

    LayerNorm has a bias where the config says so, but none without a gain; RMSNorm has none.
    """
    if config.norm == "rms":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps, elementwise_affine=config.norm_gain)
    return nn.LayerNorm(
        config.d_model, config.norm_eps, elementwise_affine=config.norm_gain, bias=config.bias
    )


class FeedForward(nn.Module):
    """down(act(up x)), or down(act(gate x) * up x) when gated. (B,T,c) -> (B,T,c)"""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.feed_forward_width
        self.gate = nn.Linear(config.d_model, width, bias=config.bias) if config.gated else None
        self.up = nn.Linear(config.d_model, width, bias=config.bias)
        self.down = nn.Linear(width, config.d_model, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            hidden = self.activation(self.up(x))
        else:
            hidden = self.activation(self.gate(x)) * self.up(x)
        return self.down(hidden)


class Block(nn.Module):
    """One layer: attention, in which tokens read what others hold, then a feed-forward for each token by itself."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention: Any = (
            MultiHeadAttention.from_spec(config.attention_of(layer))
            if config.own_attention is None
            else OwnAttention(config.own_attention, config.sizes)
        )
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
        self.position_embedding = nn.Embedding(config.context, config.d_model) if learned else None
        self.embedding_norm = make_norm(config) if config.embedding_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.final_norm = make_norm(config) if config.final_norm else nn.Identity()
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.token_embedding.weight
        self._init_weights()

    def _init_weights(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                if name.endswith("bias"):
                    nn.init.zeros_(parameter)
                continue  # gains are 1 as torch makes them
            # The last matrix of what is added to the residual stream, 2 n_layers times: so many variances add up.
            last = (
                name.endswith(("o_proj.weight", "down.weight")) and self.config.scale_residual_init
            )
            std = self.config.init_std / (math.sqrt(2 * self.config.n_layers) if last else 1)
            nn.init.normal_(parameter, std=std)

    def forward(
        self, ids: Tensor, caches: list[KVCache] | None = None, last_only: bool = False
    ) -> Tensor:
        """Logits (B,T,V) of the token that follows each.

        Args:
            ids: (B,T)
            caches: one a layer; ids are then what follows the cached tokens, and are cached, too
            last_only: give the logits (B,1,V) of the last position alone, all that generation needs
        """
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
        x = self.final_norm(x[:, -1:] if last_only else x)
        return self.lm_head(x)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token of targets (B,T); targets of -100, torch's default, do not count.

        It is computed in float32, for half precision would round it to 8 or 11 bits.
        """
        return F.cross_entropy(
            self(ids).flatten(0, 1).float(), targets.flatten(), ignore_index=-100
        )

    def new_caches(self) -> list[KVCache]:
        """One empty cache for each layer; that of a window rolls, and drops the tokens that no later query sees."""
        if self.config.own_attention is not None:
            return [InputCache() for _ in self.blocks]  # type: ignore[misc]  # it has `length`, all that is read here
        return [KVCache(window=self.config.window(layer)) for layer in range(self.config.n_layers)]

    @property
    def n_parameters(self) -> int:
        """Number of distinct weights; tied ones count once."""
        return sum(p.numel() for p in self.parameters())
