"""Blocks that are told how much noise is in what they read: adaptive layer norm, adaLN.

The noise σ = −log α becomes a condition c, by a network that all blocks share, and c becomes a
shift, a scale and a gate of every layer, by a linear map that starts at zero.  c is made in at
least fp32, and anew in each block, for a few thousand operations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import SequenceContext
from .blocks import BLOCKS, Block, NormFactory, Problems
from .collectives import axis
from .linear import accumulation_dtype

SINUSOIDS = 256
LONGEST = 10_000.0


def noise_here(x: Tensor, context: SequenceContext) -> Tensor:
    """σ of the positions of x [B, S, D]: [B, S], [B, 1] where it is the same all along, zeros
    without noise.  Under sequence parallelism x is this rank's positions."""
    noise = context.noise
    if noise is None:
        return x.new_zeros((x.shape[0], 1), dtype=accumulation_dtype(x.dtype))
    if noise.shape[1] == 1:
        return noise
    length = noise.shape[1] // axis("sp").size
    return noise.narrow(1, axis("sp").rank * length, length)


def sinusoids(noise: Tensor) -> Tensor:
    """σ [B, S] to [B, S, 256]: cos(σ ω), then sin(σ ω), with ω from 1 down to nearly 1e-4."""
    dtype = accumulation_dtype(noise.dtype)
    half = SINUSOIDS // 2
    step = torch.arange(half, dtype=dtype, device=noise.device) / half
    angle = noise.to(dtype)[..., None] * torch.exp(-math.log(LONGEST) * step)
    return torch.cat([angle.cos(), angle.sin()], -1)


class NoiseEmbedding(nn.Module):
    """c = SiLU(W₂ SiLU(W₁ s + b₁) + b₂) of the sinusoids s of σ, [B, S] to [B, S, C]."""

    plan: ClassVar[dict[str, str]] = dict.fromkeys(
        ("first", "first_bias", "second", "second_bias"), "replicated"
    )
    wide: ClassVar[tuple[str, ...]] = tuple(plan)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(dim, SINUSOIDS))
        self.first_bias = nn.Parameter(torch.empty(dim))
        self.second = nn.Parameter(torch.empty(dim, dim))
        self.second_bias = nn.Parameter(torch.empty(dim))

    def initial(self, key: str) -> float | None:
        return 0.0 if key.endswith("bias") else None

    def forward(self, noise: Tensor) -> Tensor:
        s = sinusoids(noise).to(self.first.dtype)
        hidden = F.silu(F.linear(s, self.first, self.first_bias))
        return F.silu(F.linear(hidden, self.second, self.second_bias))


class Modulation(nn.Module):
    """``parts`` vectors per position, W c + b, all zero at the start."""

    plan: ClassVar[dict[str, str]] = {"weight": "replicated", "bias": "replicated"}

    def __init__(self, parts: int, dim: int, condition_dim: int) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(parts * dim, condition_dim))
        self.bias = nn.Parameter(torch.empty(parts * dim))
        self._embedding: tuple[NoiseEmbedding, ...] = ()  # in a tuple: not a submodule of this one

    def use_shared(self, shared: nn.ModuleDict) -> None:
        if "noise" not in shared:
            shared["noise"] = NoiseEmbedding(self.weight.shape[1])
        embedding = shared["noise"]
        assert isinstance(embedding, NoiseEmbedding)
        self._embedding = (embedding,)

    def initial(self, key: str) -> float:
        return 0.0

    def forward(self, x: Tensor, context: SequenceContext) -> tuple[Tensor, ...]:
        """For x [B, S, D]: each [B, S or 1, D] in its dtype."""
        condition = self._embedding[0](noise_here(x, context)).to(x.dtype)
        out = F.linear(condition, self.weight.to(x.dtype), self.bias.to(x.dtype))
        return out.chunk(self.parts, -1)

    def extra_flops(self, sequence_length: int) -> int:
        """With one σ per sequence, whatever its length."""
        condition_dim = self.weight.shape[1]
        return 2 * (self.weight.numel() + condition_dim * (SINUSOIDS + condition_dim))


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x · (1 + scale) + shift; 1 + scale would lose a small scale in bf16."""
    return torch.addcmul(x + shift, x, scale)


class ModulatedNorm(nn.Module):
    """A norm whose output is shifted and scaled as the noise says."""

    def __init__(self, norm: nn.Module, dim: int, condition_dim: int) -> None:
        super().__init__()
        self.norm = norm
        self.modulation = Modulation(2, dim, condition_dim)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        shift, scale = self.modulation(x, context)
        return modulated(self.norm(x), shift, scale)


@BLOCKS.register("adaln")
class AdaLNBlock(Block):
    """x + g₁ A(N(x)(1 + s₁) + b₁), then x + g₂ F(N(x)(1 + s₂) + b₂), where (b₁, s₁, g₁, b₂, s₂, g₂)
    is an affine map of the condition c of a position (adaLN-Zero: Peebles & Xie 2023, arXiv
    2212.09748, section 3.2; in language models arXiv 2310.16834 and 2602.15014, whose published
    code this follows).  The final norm is modulated alike, without a gate.

    These maps start at zero, so that every block starts as the identity.  Gates are not 1 + g.  A
    model that is told of no noise has σ = 0 everywhere.
    """

    @dataclass(frozen=True)
    class Config:
        condition_dim: int = field(
            default=128, metadata={"help": "width of what the noise is embedded in"}
        )

        def problems(self) -> Problems:
            text = f"must be positive, got {self.condition_dim}"
            return [] if self.condition_dim > 0 else [("condition_dim", text)]

    def add_parts(self, norm: NormFactory) -> None:
        attention: Any = self.attention
        dim = attention.o_proj.weight.shape[0]
        self.modulation = Modulation(6, dim, self.config.condition_dim)

    @classmethod
    def shrink(cls, layers: int) -> dict[str, float]:
        return {}  # gates that start at zero need no help

    @classmethod
    def last_norm(cls, config: Any, norm: nn.Module, dim: int) -> nn.Module:
        return ModulatedNorm(norm, dim, config.condition_dim)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        shift, scale, gate, *feedforward = self.modulation(x, context)
        assert self.attention_norm is not None
        branch = self.attention(modulated(self.attention_norm(x), shift, scale), context)
        x = torch.addcmul(x, gate, branch.to(x.dtype))
        shift, scale, gate = feedforward
        branch = self.feedforward(modulated(self.feedforward_norm(x), shift, scale))
        return torch.addcmul(x, gate, branch.to(x.dtype))
