"""Position encodings of queries and keys.

``POSITIONS.build(config, shape).rotate(q, k, context)`` takes q [B, S, H, d] and k [B, S, K, d] and
returns both rotated; head counts are read from them, for tensor parallelism leaves fewer than the
shape says.  Tables are computed in at least fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from .adarope import Granularity, LearnedTable, Temperature
from .collectives import axis
from .registry import Registry
from .rotary import (
    FixedTable,
    HeadShape,
    Position,
    PositionContext,
    rope_frequencies,
    wavelengths,
)

POSITIONS = Registry("position")

Problems = list[tuple[str, str]]


def _factor_problems(factor: float) -> Problems:
    return [] if factor >= 1 else [("factor", f"must be at least 1, got {factor}")]


@dataclass(frozen=True)
class TableConfig:
    """Settings of a fixed table: frequencies of the pairs of one head, and a magnitude."""

    base: float = field(default=10000.0, metadata={"help": "rotary base (theta)"})

    def problems(self) -> Problems:
        return [] if self.base > 1 else [("base", f"must be above 1, got {self.base}")]

    def frequencies(self, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Radians per position of each rotated pair, at most dim/2 of them."""
        return rope_frequencies(self.base, dim, dtype, device)

    def magnitude(self) -> float:
        """Factor on the rotated q and k (YaRN's attention factor)."""
        return 1.0


@POSITIONS.register("rope")
class RoPE(FixedTable):
    """Rotary embedding over the whole head dimension."""

    @dataclass(frozen=True)
    class Config(TableConfig):
        pass


@POSITIONS.register("partial")
class PartialRoPE(FixedTable):
    """Rotary embedding of a ``fraction`` of each head; the rest carries no position.

    ``leading`` rotates the first dimensions of a head with a table of their own (GPT-NeoX, Black et
    al. 2022, arXiv 2204.06745, section 2.1).  ``fastest`` keeps the highest frequencies of the
    whole head's table and sets the others to 0 (p-RoPE, Barbero et al. 2024, arXiv 2410.06205,
    section 6).  Dimensions come in pairs: the share is rounded down.
    """

    @dataclass(frozen=True)
    class Config(TableConfig):
        fraction: float = field(default=0.5, metadata={"help": "rotated share of a head, (0, 1]"})
        bands: Literal["leading", "fastest"] = field(
            default="leading", metadata={"help": "what rotates: leading dimensions, or fast pairs"}
        )

        def problems(self) -> Problems:
            found = super().problems()
            if not 0 < self.fraction <= 1:
                found.append(("fraction", f"must be in (0, 1], got {self.fraction}"))
            return found

        def frequencies(self, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            rotated = max(2, int(dim * self.fraction) // 2 * 2)
            if self.bands == "leading":
                return rope_frequencies(self.base, rotated, dtype, device)
            kept = torch.arange(dim // 2, device=device) < rotated // 2
            return rope_frequencies(self.base, dim, dtype, device) * kept


@POSITIONS.register("nope")
class NoPE(Position):
    """No position encoding (Kazemnejad et al. 2023, arXiv 2305.19466)."""

    @dataclass(frozen=True)
    class Config:
        pass


@POSITIONS.register("pi")
class PI(FixedTable):
    """Position interpolation: positions divided by ``factor`` (Chen et al. 2023, arXiv 2306.15595,
    section 2.3), which is to say, every frequency."""

    @dataclass(frozen=True)
    class Config(TableConfig):
        factor: float = field(default=4.0, metadata={"help": "context extension factor, >= 1"})

        def problems(self) -> Problems:
            return super().problems() + _factor_problems(self.factor)

        def frequencies(self, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            return super().frequencies(dim, dtype, device) / self.factor


@POSITIONS.register("ntk")
class NTK(FixedTable):
    """NTK-aware scaling: base · factor^(d/(d−2)) divides the lowest frequency by ``factor`` and
    leaves the highest alone (Peng et al. 2023, arXiv 2309.00071, section 3.1)."""

    @dataclass(frozen=True)
    class Config(TableConfig):
        factor: float = field(default=4.0, metadata={"help": "context extension factor, >= 1"})

        def problems(self) -> Problems:
            return super().problems() + _factor_problems(self.factor)

        def frequencies(self, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            base = self.base if dim == 2 else self.base * self.factor ** (dim / (dim - 2))
            return rope_frequencies(base, dim, dtype, device)


@POSITIONS.register("yarn")
class YaRN(FixedTable):
    """NTK-by-parts interpolation with an attention factor (Peng et al. 2023, arXiv 2309.00071).

    Dimensions that turn more than ``beta_fast`` times within the original length keep their
    frequency, those that turn less than ``beta_slow`` times are divided by ``factor``, with a
    linear ramp between (equations 17–23).  cos and sin are scaled by 0.1·ln(factor) + 1
    (equation 22 moved onto q and k).  The ramp's ends are rounded outwards to whole dimensions,
    as Hugging Face does.
    """

    @dataclass(frozen=True)
    class Config(TableConfig):
        factor: float = field(default=4.0, metadata={"help": "context extension factor, >= 1"})
        original_length: int = field(default=2048, metadata={"help": "length trained before"})
        beta_fast: float = field(default=32.0, metadata={"help": "turns above which: unchanged"})
        beta_slow: float = field(default=1.0, metadata={"help": "turns below which: divided"})

        def problems(self) -> Problems:
            found = super().problems() + _factor_problems(self.factor)
            if self.original_length < 1:
                found.append(("original_length", f"must be positive, got {self.original_length}"))
            if self.beta_slow <= 0:
                found.append(("beta_slow", f"must be positive, got {self.beta_slow}"))
            elif 1 <= self.original_length <= 2 * math.pi * self.beta_slow:
                shortest = math.floor(2 * math.pi * self.beta_slow) + 1
                text = f"{self.original_length} is too short for beta_slow={self.beta_slow}: "
                text += f"no dimension turns that often; the shortest is {shortest}"
                found.append(("original_length", text))
            if self.beta_fast <= self.beta_slow:
                found.append(("beta_fast", f"must exceed beta_slow={self.beta_slow}"))
            return found

        def ramp(self, dim: int) -> tuple[int, int]:
            """The pairs between which frequencies go over from unchanged to divided."""

            def end(turns: float) -> float:
                numerator = dim * math.log(self.original_length / (turns * 2 * math.pi))
                return numerator / (2 * math.log(self.base))

            low, high = math.floor(end(self.beta_fast)), math.ceil(end(self.beta_slow))
            return max(low, 0), min(high, dim - 1)

        def frequencies(self, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            length = wavelengths(self.base, dim, dtype, device)
            low, high = self.ramp(dim)
            index = torch.arange(dim // 2, device=device).to(dtype)
            kept = 1 - ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
            # This order of operations gives Hugging Face's table bit for bit.
            return 1.0 / (self.factor * length) * (1 - kept) + 1.0 / length * kept

        def magnitude(self) -> float:
            return 0.1 * math.log(self.factor) + 1.0


@POSITIONS.register("llama3")
class Llama3(FixedTable):
    """NTK-by-parts as Llama 3.1 to 3.3 have it (their rope_type; code in transformers).

    Pairs that turn more than ``high_freq_factor`` times within the original length keep their
    frequency, those that turn less than ``low_freq_factor`` times are divided by ``factor``, and
    between them the weight of either is linear in the number of turns (in YaRN's: in the pair's
    index).  q and k keep their size.
    """

    @dataclass(frozen=True)
    class Config(TableConfig):
        factor: float = field(default=8.0, metadata={"help": "context extension factor, >= 1"})
        original_length: int = field(default=8192, metadata={"help": "length trained before"})
        low_freq_factor: float = field(default=1.0, metadata={"help": "turns below which: divided"})
        high_freq_factor: float = field(
            default=4.0, metadata={"help": "turns above which: unchanged"}
        )

        def problems(self) -> Problems:
            found = super().problems() + _factor_problems(self.factor)
            if self.original_length < 1:
                found.append(("original_length", f"must be positive, got {self.original_length}"))
            if self.low_freq_factor <= 0:
                found.append(("low_freq_factor", f"must be positive, got {self.low_freq_factor}"))
            if self.high_freq_factor <= self.low_freq_factor:
                text = f"must exceed low_freq_factor={self.low_freq_factor}"
                found.append(("high_freq_factor", text))
            return found

        def frequencies(self, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            plain = super().frequencies(dim, dtype, device)
            turns = self.original_length / (2 * math.pi / plain)
            low, high = self.low_freq_factor, self.high_freq_factor
            kept = ((turns - low) / (high - low)).clamp(0, 1)
            # This order of operations gives Hugging Face's table bit for bit.
            return (1 - kept) * plain / self.factor + kept * plain


def _start_problems(start: Any) -> Problems:
    if isinstance(start, (RoPE.Config, PI.Config, NTK.Config, YaRN.Config, Llama3.Config)):
        return []
    text = "must be a table without zeros (rope, pi, ntk, yarn, llama3), got "
    return [("start", text + position_name(start))]


@POSITIONS.register("adarope")
class AdaRoPE(LearnedTable):
    """Learned frequencies, per key/value head by default, and a learned temperature per query head
    that grows with the number of keys (arXiv 2607.19363; docs/positions.md says what of this is
    known from the paper).  At the start it computes what its ``start`` table does, bit for bit."""

    @dataclass(frozen=True)
    class Config:
        start: Any = field(
            default=RoPE.Config(),
            metadata={"registry": POSITIONS, "help": "table that frequencies start from"},
        )
        granularity: Granularity = field(
            default="kv_head", metadata={"help": "who shares learned frequencies"}
        )
        temperature: Temperature = field(
            default="query", metadata={"help": "how queries grow with the number of keys"}
        )
        reference_length: int = field(
            default=1, metadata={"help": "keys up to which the temperature is 1 (L₀)"}
        )

        def problems(self) -> Problems:
            found = _start_problems(self.start)
            if self.reference_length < 1:
                found.append(("reference_length", f"must be positive, got {self.reference_length}"))
            elif self.temperature == "none" and self.reference_length != 1:
                text = "is set but temperature=none: it would be ignored"
                found.append(("reference_length", text))
            return found

    def __init__(self, config: Config, shape: HeadShape) -> None:
        super().__init__(
            config, shape, config.granularity, config.temperature, config.reference_length
        )


@POSITIONS.register("lerope")
class LeRoPE(LearnedTable):
    """θ₀ · exp(a) with one learned log-scale per pair, shared by all heads and layers (arXiv
    2607.10134): AdaRoPE's ``global`` granularity without temperatures."""

    @dataclass(frozen=True)
    class Config:
        start: Any = field(
            default=RoPE.Config(),
            metadata={"registry": POSITIONS, "help": "table that frequencies start from"},
        )

        def problems(self) -> Problems:
            return _start_problems(self.start)

    def __init__(self, config: Config, shape: HeadShape) -> None:
        super().__init__(config, shape, "global")


@POSITIONS.register("alibi")
class ALiBi(Position):
    """Attention scores minus slope · |i − j| (Press et al. 2021, arXiv 2108.12409, section 3).

    Slopes of n heads are 2^(−8h/n), h = 1 … n, where n is a power of two; otherwise those of the
    next smaller power, then every other one of its double.
    """

    @dataclass(frozen=True)
    class Config:
        pass

    def slopes(self, heads: int, device: torch.device) -> Tensor:
        total = self.shape.heads
        power = 1 << total.bit_length() - 1
        values = [2 ** (-8 * h / power) for h in range(1, power + 1)]
        values += [2 ** (-4 * h / power) for h in range(1, 2 * power, 2)][: total - power]
        first = axis("tp").rank * heads
        return torch.tensor(values[first : first + heads], dtype=torch.float64, device=device)


@POSITIONS.register("rnope")
class RNoPE(Position):
    """``inner`` in all layers but every ``every``-th, which has no position: layers every − 1,
    2 · every − 1, … counted from 0 over the whole model  (Yang et al. 2025, arXiv 2501.18795; the
    same layers as ``no_rope_layer_interval`` of SmolLM3)."""

    @dataclass(frozen=True)
    class Config:
        inner: Any = field(
            default=RoPE.Config(),
            metadata={"registry": POSITIONS, "help": "encoding of the other layers"},
        )
        every: int = field(default=4, metadata={"help": "each such layer has no position, >= 2"})

        def problems(self) -> Problems:
            found: Problems = []
            if isinstance(self.inner, (RNoPE.Config, NoPE.Config)):
                found.append(("inner", f"must have positions, got {position_name(self.inner)}"))
            if self.every < 2:
                found.append(("every", f"must be at least 2, got {self.every}"))
            return found

    def __init__(self, config: Config, shape: HeadShape) -> None:
        super().__init__(config, shape)
        without = (shape.layer + 1) % config.every == 0
        self.inner: Position = POSITIONS.build(NoPE.Config() if without else config.inner, shape)

    def rotate(self, q: Tensor, k: Tensor, context: PositionContext) -> tuple[Tensor, Tensor]:
        return self.inner.rotate(q, k, context)

    def slopes(self, heads: int, device: torch.device) -> Tensor | None:
        return self.inner.slopes(heads, device)


def position_name(config: Any) -> str:
    return POSITIONS.name_of(type(config))


def biases_scores(config: Any) -> bool:
    """Whether attention scores need a bias, which not every backend has."""
    return isinstance(config.inner if isinstance(config, RNoPE.Config) else config, ALiBi.Config)
