"""How a layer knows where tokens stand: rotary positions."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from headwise.errors import HeadwiseError

# Fields of RoPE that mean something with scaling="yarn" alone.
_OF_YARN = ("original_context", "beta_fast", "beta_slow", "attention_factor")


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
            - "ntk": theta times factor^(dim/(dim-2)), for texts of any length: were theta to grow with the text, keys
              that a cache has rotated already would keep an older one (dynamic NTK)
            - "yarn": slow features as linear, fast ones untouched, a ramp between, and sharper scores (Peng et al.
              2023, arXiv 2309.00071, section 3; the ramp runs over the features, as in the authors' code and the
              checkpoints made with it)
            - "llama3": as yarn, but the ramp runs over the turns within original_context, and scores are no sharper
              (Llama 3.1; low_freq_factor is beta_slow, high_freq_factor is beta_fast)
        factor: how many times as long
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
        for name in ("theta", "dim", "factor", "original_context", *_OF_YARN[1:]):
            if isinstance(getattr(self, name), bool):
                raise HeadwiseError(
                    f"rope {name}={getattr(self, name)} must be a number"
                )
        # Fields that would be ignored, with the setting that each needs. `factor` stands first, as the first that is
        # found is named in the error, and it asks for less: for any scaling.
        ramps = self.scaling in ("yarn", "llama3")
        needs = {} if ramps else dict.fromkeys(_OF_YARN, "scaling='yarn'")
        if self.scaling == "llama3":
            needs = {"attention_factor": "scaling='yarn'"}
        if self.scaling is None:
            needs = {"factor": "scaling=; one of linear, ntk, yarn, llama3", **needs}
        for name, setting in needs.items():
            if getattr(self, name) != RoPE.__dataclass_fields__[name].default:
                raise HeadwiseError(
                    f"rope {name}={getattr(self, name)} needs {setting}"
                )
        if not self.theta > 0:
            raise HeadwiseError(
                f"rope theta={self.theta} is not positive; 10000 is usual"
            )
        if self.dim is not None and (self.dim <= 0 or self.dim % 2):
            raise HeadwiseError(
                f"rope dim={self.dim} must be even and positive: features turn in pairs"
            )
        if self.scaling not in (None, "linear", "ntk", "yarn", "llama3"):
            raise HeadwiseError(
                f"rope scaling={self.scaling!r} is not known; one of linear, ntk, yarn, llama3"
            )
        if not self.factor >= 1:
            raise HeadwiseError(
                f"rope factor={self.factor} is below 1; it says how many times longer the texts become"
            )
        if not ramps:
            return
        if self.original_context is None:
            raise HeadwiseError(
                f"rope scaling={self.scaling!r} needs original_context=, the length of the texts in training"
            )
        if not self.original_context > 0:
            raise HeadwiseError(
                f"rope original_context={self.original_context} is not positive"
            )
        if not self.beta_fast > self.beta_slow > 0:
            raise HeadwiseError(
                f"rope beta_fast={self.beta_fast} must exceed beta_slow={self.beta_slow}, and both 0"
            )
        if not (self.attention_factor is None or self.attention_factor > 0):
            raise HeadwiseError(
                f"rope attention_factor={self.attention_factor} is not positive; 1 changes nothing"
            )
        # `_pair_that_turns` divides by its logarithm, and pairs must slow down
        if not self.theta > 1:
            raise HeadwiseError(
                f"rope theta={self.theta} with scaling='yarn' must exceed 1; 10000 is usual"
            )

    def __repr__(self) -> str:
        """Without what is as usual."""
        chosen = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                chosen.append(f"{field.name}={value!r}")
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
        theta = self.theta
        if self.scaling == "ntk" and dim > 2:
            # So the slowest pair, m = dim/2 - 1, slows down by exactly `factor`. dim = 2 has only one, of 1 radian.
            theta *= self.factor ** (dim / (dim - 2))
        plain = [theta ** (-2 * m / dim) for m in range(dim // 2)]
        if self.scaling == "linear":
            return [f / self.factor for f in plain], 1.0
        if self.scaling == "llama3":
            return [self._llama3(frequency) for frequency in plain], 1.0
        if self.scaling != "yarn":
            return plain, 1.0
        # YaRN: pairs up to `low` are fast and stay, those from `high` on are slow and go by `factor`.
        low = max(math.floor(self._pair_that_turns(self.beta_fast, dim)), 0)
        # dim - 1 as in the authors' code, and so in checkpoints, though there are only dim / 2 pairs.
        high = min(math.ceil(self._pair_that_turns(self.beta_slow, dim)), dim - 1)
        mixed = []
        for m, frequency in enumerate(plain):
            # 0 for a fast pair, 1 for a slow one, a ramp between. Where low = high, the 1e-3 makes a step of the ramp
            # and keeps the division from 0.
            slowness = min(1.0, max(0.0, (m - low) / max(high - low, 1e-3)))
            mixed.append(
                frequency * (1 - slowness) + frequency / self.factor * slowness
            )
        if self.attention_factor is not None:
            return mixed, self.attention_factor
        # The paper's fit. As it multiplies queries and keys, scores grow by its square.
        return mixed, 0.1 * math.log(self.factor) + 1.0

    def _llama3(self, frequency: float) -> float:
        """A pair that turns beta_fast times within the original context stays, beta_slow times goes by factor."""
        assert self.original_context is not None
        turns = self.original_context * frequency / (2 * math.pi)
        fastness = (turns - self.beta_slow) / (self.beta_fast - self.beta_slow)
        fastness = min(1.0, max(0.0, fastness))
        return frequency * fastness + frequency / self.factor * (1 - fastness)

    def _pair_that_turns(self, times: float, dim: int) -> float:
        """The (fractional) pair of features that turns `times` times within the original context.

        Pair m turns context * theta^(-2m/dim) / (2 pi) times; this is solved for m.
        """
        assert self.original_context is not None
        return (
            dim
            * math.log(self.original_context / (times * 2 * math.pi))
            / (2 * math.log(self.theta))
        )
