"""Position encodings of queries and keys.

``POSITIONS.build(config, shape).rotate(q, k, context)`` takes q [B, S, H, d] and k [B, S, K, d] and
returns both rotated.  Pairs are half-split, (i, i + d/2), the Hugging Face convention, so exported
projections need no permutation.  Tables are computed in at least fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from .linear import accumulation_dtype
from .registry import Registry

POSITIONS = Registry("position")

Problems = list[tuple[str, str]]


@dataclass(frozen=True)
class HeadShape:
    """The heads of one attention layer, over all ranks, and where it stands: ``layer`` counts from
    0 over the whole model of ``layers`` blocks (blocks of multi-token prediction follow it)."""

    head_dim: int
    heads: int = 1
    kv_heads: int = 1
    layer: int = 0
    layers: int = 1


class PositionContext(Protocol):
    """What a position encoding may ask of a batch of sequences.

    positions: int64 [S] or [B, S].  cache: a dict that lives for one forward pass; layers with the
    same parameter-free table compute it once.
    """

    positions: Tensor
    cache: dict[Any, Any]


def _factor_problems(factor: float) -> Problems:
    return [] if factor >= 1 else [("factor", f"must be at least 1, got {factor}")]


def wavelengths(base: float, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """base^(2f/dim): positions per radian of each pair."""
    exponent = torch.arange(0, dim, 2, device=device).to(dtype) / dim
    return base**exponent


def rope_frequencies(base: float, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """base^(−2f/dim) for f = 0 … dim/2 − 1 (Su et al. 2021, arXiv 2104.09864, section 3.2.2)."""
    return 1.0 / wavelengths(base, dim, dtype, device)


def rotate_half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2·cos.shape[-1] dimensions of x [B, S, H, d]; cos, sin [·, S, 1, pairs]."""
    pairs = cos.shape[-1]
    wide = x.to(cos.dtype)
    first, second, rest = wide.split([pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(rotated, dim=-1).to(x.dtype)


class Position(nn.Module):
    """A position encoding; this one does nothing."""

    plan: ClassVar[dict[str, str]] = {}

    def __init__(self, config: Any, shape: HeadShape) -> None:
        super().__init__()
        self.config = config
        self.shape = shape

    def rotate(self, q: Tensor, k: Tensor, context: PositionContext) -> tuple[Tensor, Tensor]:
        return q, k


class FixedTable(Position):
    """A rotation by constant frequencies, which its configuration gives."""

    def rotate(self, q: Tensor, k: Tensor, context: PositionContext) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(q.dtype)
        key = (self.config, self.shape.head_dim, dtype)
        if key not in context.cache:
            inverse = self.config.frequencies(self.shape.head_dim, dtype, q.device)
            angle = context.positions.to(dtype).unsqueeze(-1) * inverse
            if angle.dim() == 2:
                angle = angle.unsqueeze(0)
            angle = angle.unsqueeze(2)
            magnitude = self.config.magnitude()
            context.cache[key] = (angle.cos() * magnitude, angle.sin() * magnitude)
        cos, sin = context.cache[key]
        return rotate_half_split(q, cos, sin), rotate_half_split(k, cos, sin)


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
    """Rotary embedding over the leading ``fraction`` of each head; the rest carries no position."""

    @dataclass(frozen=True)
    class Config(TableConfig):
        fraction: float = field(default=0.5, metadata={"help": "rotated share of a head, (0, 1]"})

        def problems(self) -> Problems:
            found = super().problems()
            if not 0 < self.fraction <= 1:
                found.append(("fraction", f"must be in (0, 1], got {self.fraction}"))
            return found

        def frequencies(self, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            rotated = max(2, int(dim * self.fraction) // 2 * 2)
            return rope_frequencies(self.base, rotated, dtype, device)


@POSITIONS.register("nope")
class NoPE(Position):
    """No position encoding (Kazemnejad et al. 2023, arXiv 2305.19466)."""

    @dataclass(frozen=True)
    class Config:
        pass


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
