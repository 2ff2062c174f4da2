"""Position encodings applied to queries and keys.

``Position(config, head_dim).rotate(q, k, positions, cache)`` takes q [B, S, H, d], k [B, S, K, d]
and positions [S] or [B, S] (int64) and returns both rotated.  Pairs are half-split, (i, i + d/2),
the Hugging Face convention, so exported projections need no permutation.  Tables are computed in
at least fp32.  ``cache`` is a dict that lives for one forward pass of one sequence batch: layers
with the same parameter-free table compute it once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .linear import accumulation_dtype
from .registry import Registry

POSITIONS = Registry("position")

Problems = list[tuple[str, str]]


def _base_problems(base: float) -> Problems:
    return [] if base > 1 else [("base", f"must be above 1, got {base}")]


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


class _FixedTable(nn.Module):
    """A rotation whose frequencies are constants: subclasses give them, and a magnitude."""

    plan: ClassVar[dict[str, str]] = {}

    def __init__(self, config: Any, head_dim: int) -> None:
        super().__init__()
        self.config = config
        self.head_dim = head_dim

    def frequencies(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        raise NotImplementedError

    def magnitude(self) -> float:
        """Factor on the rotated q and k (YaRN's attention factor)."""
        return 1.0

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor, cache: dict[Any, Any]
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(q.dtype)
        key = (type(self), self.config, self.head_dim, dtype)
        if key not in cache:
            inverse = self.frequencies(dtype, q.device)
            angle = positions.to(dtype).unsqueeze(-1) * inverse
            if angle.dim() == 2:
                angle = angle.unsqueeze(0)
            angle = angle.unsqueeze(2)
            cache[key] = (angle.cos() * self.magnitude(), angle.sin() * self.magnitude())
        cos, sin = cache[key]
        return rotate_half_split(q, cos, sin), rotate_half_split(k, cos, sin)


@POSITIONS.register("rope")
class RoPE(_FixedTable):
    """Rotary embedding over the whole head dimension."""

    @dataclass(frozen=True)
    class Config:
        base: float = field(default=10000.0, metadata={"help": "rotary base (theta)"})

        def problems(self) -> Problems:
            return _base_problems(self.base)

    def frequencies(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return rope_frequencies(self.config.base, self.head_dim, dtype, device)


@POSITIONS.register("partial")
class PartialRoPE(_FixedTable):
    """Rotary embedding over the leading ``fraction`` of each head; the rest carries no position."""

    @dataclass(frozen=True)
    class Config:
        base: float = field(default=10000.0, metadata={"help": "rotary base (theta)"})
        fraction: float = field(default=0.5, metadata={"help": "rotated share of a head, (0, 1]"})

        def problems(self) -> Problems:
            found = _base_problems(self.base)
            if not 0 < self.fraction <= 1:
                found.append(("fraction", f"must be in (0, 1], got {self.fraction}"))
            return found

    def frequencies(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        rotated = max(2, int(self.head_dim * self.config.fraction) // 2 * 2)
        return rope_frequencies(self.config.base, rotated, dtype, device)


@POSITIONS.register("nope")
class NoPE(nn.Module):
    """No position encoding (Kazemnejad et al. 2023, arXiv 2305.19466)."""

    plan: ClassVar[dict[str, str]] = {}

    @dataclass(frozen=True)
    class Config:
        pass

    def __init__(self, config: Config, head_dim: int) -> None:
        super().__init__()

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor, cache: dict[Any, Any]
    ) -> tuple[Tensor, Tensor]:
        return q, k


@POSITIONS.register("yarn")
class YaRN(_FixedTable):
    """NTK-by-parts interpolation with an attention factor (Peng et al. 2023, arXiv 2309.00071).

    Dimensions that turn more than ``beta_fast`` times within the original length keep their
    frequency, those that turn less than ``beta_slow`` times are divided by ``factor``, with a
    linear ramp between (equations 17–23).  cos and sin are scaled by 0.1·ln(factor) + 1
    (equation 22 moved onto q and k).  The ramp's ends are rounded outwards to whole dimensions,
    as Hugging Face does.
    """

    @dataclass(frozen=True)
    class Config:
        base: float = field(default=10000.0, metadata={"help": "rotary base (theta)"})
        factor: float = field(default=4.0, metadata={"help": "context extension factor, >= 1"})
        original_length: int = field(default=2048, metadata={"help": "length trained before"})
        beta_fast: float = field(default=32.0, metadata={"help": "turns above which: unchanged"})
        beta_slow: float = field(default=1.0, metadata={"help": "turns below which: divided"})

        def problems(self) -> Problems:
            found = _base_problems(self.base)
            if self.factor < 1:
                found.append(("factor", f"must be at least 1, got {self.factor}"))
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

    def _ramp_end(self, turns: float) -> float:
        config = self.config
        numerator = self.head_dim * math.log(config.original_length / (turns * 2 * math.pi))
        return numerator / (2 * math.log(config.base))

    def frequencies(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        config = self.config
        length = wavelengths(config.base, self.head_dim, dtype, device)
        low = max(math.floor(self._ramp_end(config.beta_fast)), 0)
        high = min(math.ceil(self._ramp_end(config.beta_slow)), self.head_dim - 1)
        index = torch.arange(self.head_dim // 2, device=device).to(dtype)
        kept = 1 - ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
        # This order of operations gives Hugging Face's table bit for bit.
        return 1.0 / (config.factor * length) * (1 - kept) + 1.0 / length * kept

    def magnitude(self) -> float:
        return 0.1 * math.log(self.config.factor) + 1.0
