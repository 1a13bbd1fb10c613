"""How a layer knows where tokens stand: rotary positions."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from headwise.errors import HeadwiseError

# The fields that each way of stretching reads; without it they have to be as usual.
SCALINGS = {
    None: (),
    "linear": ("factor",),
    "llama3": ("factor", "original_context", "beta_fast", "beta_slow"),
    "yarn": (
        "factor",
        "original_context",
        "beta_fast",
        "beta_slow",
        "attention_factor",
    ),
}


@dataclass(frozen=True, repr=False)
class RoPE:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864, section 3.2), and ways to stretch it.

    Attributes:
        theta: base of the wavelengths
        dim: rotate only the first `dim` features of each head; None = all
        interleaved: pair feature 2m with 2m+1 (the paper, GPT-J); otherwise m with m + dim/2 (GPT-NeoX, Llama)
        before_norm: rotate before the qk-norm rather than after it
        scaling: None, or for texts `factor` times as long as in training one of

            - "linear": positions divided by factor (Chen et al. 2023, arXiv 2306.15595)
            - "yarn": slow features as linear, fast ones untouched, a ramp between, and sharper scores (Peng et al.
              2023, arXiv 2309.00071, section 3; the ramp runs over the features, as in the authors' code and the
              checkpoints made with it)
            - "llama3": as yarn, but the ramp runs over the turns within original_context, and scores are no sharper
              (Llama 3.1; low_freq_factor is beta_slow, high_freq_factor is beta_fast)
        factor: how many times as long; NTK scaling is a larger theta, theta * factor^(dim/(dim-2))
        original_context: length of the texts in training, for yarn and llama3
        beta_fast: rotations within original_context above which a feature counts as fast
        beta_slow: and below which it counts as slow
        attention_factor: for yarn, on cosines and sines; None: 0.1 ln(factor) + 1, the sharper scores
    """

    theta: float = 10_000.0
    dim: int | None = None
    interleaved: bool = False
    before_norm: bool = False
    scaling: str | None = None
    factor: float = 1.0
    original_context: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        if self.scaling not in [*SCALINGS]:  # a dict of a config has no hash
            raise HeadwiseError(
                f"rope scaling={self.scaling!r} is not known; one of linear, yarn, llama3"
            )
        reads = SCALINGS[self.scaling]
        for field in fields(self):
            name = field.name
            value = getattr(self, field.name)
            takers = [str(each) for each in SCALINGS if name in SCALINGS[each]]
            if takers and name not in reads and value != field.default:
                raise HeadwiseError(
                    f"rope {name}={value} needs scaling=; one of {', '.join(takers)}"
                )
            if name not in ("theta", "dim", *SCALINGS["yarn"]) or value is None:
                continue
            if isinstance(value, bool) or not value > 0:
                raise HeadwiseError(f"rope {name}={value} must be a positive number")
        if (self.dim or 0) % 2:
            raise HeadwiseError(
                f"rope dim={self.dim} must be even: features turn in pairs"
            )
        if not self.factor >= 1:
            raise HeadwiseError(
                f"rope factor={self.factor} is below 1; it says how many times longer the texts become"
            )
        if "original_context" not in reads:
            return
        if self.original_context is None:
            raise HeadwiseError(
                f"rope scaling={self.scaling!r} needs original_context=, the length of the texts in training"
            )
        if not self.beta_fast > self.beta_slow:
            raise HeadwiseError(
                f"rope beta_fast={self.beta_fast} must exceed beta_slow={self.beta_slow}"
            )
        # `_pair_that_turns` divides by its logarithm, and pairs must slow down
        if not self.theta > 1:
            raise HeadwiseError(
                f"rope theta={self.theta} with scaling={self.scaling!r} must exceed 1; 10000 is usual"
            )

    def __repr__(self) -> str:
        """Without what is as usual."""
        chosen = [
            f"{name}={value!r}"
            for name, value in vars(self).items()
            if value != getattr(RoPE, name)
        ]
        return f"RoPE({', '.join(chosen)})"

    def pairs(self, head_dim: int) -> tuple[tuple[int, int], ...]:
        """The features of a head that are rotated together: (m, m + dim/2) for each m, or (2m, 2m + 1)."""
        half = (self.dim or head_dim) // 2
        return tuple(
            (2 * m, 2 * m + 1) if self.interleaved else (m, m + half)
            for m in range(half)
        )

    def frequencies(self, head_dim: int) -> tuple[list[float], float]:
        """Radians per position of each pair of features, and the factor on cosines and sines (1, but for yarn)."""
        dim = self.dim or head_dim
        plain = [self.theta ** (-2 * m / dim) for m in range(dim // 2)]
        if self.scaling is None:
            return plain, 1.0
        mixed = []
        for m, frequency in enumerate(plain):
            slowness = min(1.0, max(0.0, self._slowness(m, frequency, dim)))
            mixed.append(
                frequency * (1 - slowness) + frequency / self.factor * slowness
            )
        if self.scaling != "yarn":
            return mixed, 1.0
        # The paper's fit. As it multiplies queries and keys, scores grow by its square.
        return mixed, self.attention_factor or 0.1 * math.log(self.factor) + 1.0

    def _slowness(self, m: int, frequency: float, dim: int) -> float:
        """Pair m goes by `factor` where this is 1 or more, stays where it is 0 or less, and between them in part."""
        if self.original_context is None:  # linear: all alike
            return 1.0
        if self.scaling == "llama3":
            # beta_fast turns within the original context are fast, beta_slow are slow
            turns = self.original_context * frequency / (2 * math.pi)
            return (self.beta_fast - turns) / (self.beta_fast - self.beta_slow)
        # YaRN: pairs up to `low` are fast, those from `high` on are slow.
        low = max(math.floor(self._pair_that_turns(self.beta_fast, dim)), 0)
        # dim - 1 as in the authors' code, and so in checkpoints, though there are only dim / 2 pairs.
        high = min(math.ceil(self._pair_that_turns(self.beta_slow, dim)), dim - 1)
        # Where low = high, the 1e-3 makes a step of the ramp and keeps the division from 0.
        return (m - low) / max(high - low, 1e-3)

    def _pair_that_turns(self, times: float, dim: int) -> float:
        """The (fractional) pair of features that turns `times` times within the original context.

        Pair m turns context * theta^(-2m/dim) / (2 pi) times; this is solved for m.
        """
        assert self.original_context is not None
        turns = self.original_context / (times * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(self.theta))
