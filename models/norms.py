"""Normalisations over the last dimension.

``Norm(config, dim)`` maps [..., dim] to [..., dim]; statistics are taken in at least fp32 and the
result has the input's dtype.  ``plan`` names how each parameter is stored under tensor
parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .linear import accumulation_dtype
from .registry import Registry

NORMS = Registry("norm")


def _positive_eps(eps: float) -> list[tuple[str, str]]:
    return [] if eps > 0 else [("eps", f"must be positive, got {eps}")]


@NORMS.register("rms")
class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight  (Zhang & Sennrich 2019, arXiv 1910.07467, eq. 4)."""

    plan: ClassVar[dict[str, str]] = {"weight": "replicated"}

    @dataclass(frozen=True)
    class Config:
        eps: float = field(default=1e-5, metadata={"help": "added to the mean square"})

        def problems(self) -> list[tuple[str, str]]:
            return _positive_eps(self.eps)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(accumulation_dtype(x.dtype))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight.to(x.dtype)


@NORMS.register("layer")
class LayerNorm(nn.Module):
    """(x − mean) / sqrt(var + eps) · weight + bias  (Ba et al. 2016, arXiv 1607.06450, eq. 4)."""

    plan: ClassVar[dict[str, str]] = {"weight": "replicated", "bias": "replicated"}

    @dataclass(frozen=True)
    class Config:
        eps: float = field(default=1e-5, metadata={"help": "added to the variance"})
        bias: bool = field(default=True, metadata={"help": "learn an additive term"})

        def problems(self) -> list[tuple[str, str]]:
            return _positive_eps(self.eps)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if config.bias else None

    def forward(self, x: Tensor) -> Tensor:
        dtype = accumulation_dtype(x.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        weight = self.weight.to(dtype)
        return F.layer_norm(x.to(dtype), weight.shape, weight, bias, self.eps).to(x.dtype)
