"""Normalisations over the last dimension.

``Norm(config, dim, site)`` maps [..., dim] to [..., dim]; statistics are taken in at least fp32 and
the result has the input's dtype.  ``plan`` names how each parameter is stored under tensor
parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .linear import accumulation_dtype
from .registry import Registry

NORMS = Registry("norm")

Role = Literal["attention", "feedforward", "final", "head", "input"]


@dataclass(frozen=True)
class Site:
    """Where a norm stands.

    role: in a block, at its attention or its feed-forward layer; behind the last block; inside
    attention, on heads; or on what a multi-token-prediction block reads.  layer: the block's global
    index, at least ``layers`` behind the trunk.  layers: the depth of the model.
    """

    role: Role = "feedforward"
    layer: int = 0
    layers: int = 1


def _positive_eps(eps: float) -> list[tuple[str, str]]:
    return [] if eps > 0 else [("eps", f"must be positive, got {eps}")]


class _RMSNorm(torch.autograd.Function):
    """The formula with its backward pass written out.  It keeps its input alone; recorded operation
    by operation it would keep an fp32 copy as well (with bf16, and a bf16 one), and be slower."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(accumulation_dtype(x.dtype))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, scale, weight)
        return (wide * scale).to(x.dtype) * weight.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, scale, weight = ctx.saved_tensors
        normed, wide = x.to(scale.dtype) * scale, grad.to(scale.dtype)
        d_weight = (wide * normed).reshape(-1, x.shape[-1]).sum(0)
        d_normed = wide * weight.to(scale.dtype)
        along = torch.linalg.vecdot(d_normed, normed).unsqueeze(-1) / x.shape[-1]
        d_x = d_normed.addcmul_(normed, along, value=-1).mul_(scale)
        return d_x.to(x.dtype), d_weight.to(weight.dtype), None


@NORMS.register("rms")
class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight  (Zhang & Sennrich 2019, arXiv 1910.07467, eq. 4)."""

    plan: ClassVar[dict[str, str]] = {"weight": "replicated"}

    @dataclass(frozen=True)
    class Config:
        eps: float = field(default=1e-5, metadata={"help": "added to the mean square"})

        def problems(self) -> list[tuple[str, str]]:
            return _positive_eps(self.eps)

    def __init__(self, config: Config, dim: int, site: Site = Site()) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _RMSNorm.apply(x, self.weight, self.eps)
        return out


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

    def __init__(self, config: Config, dim: int, site: Site = Site()) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if config.bias else None

    def forward(self, x: Tensor) -> Tensor:
        dtype = accumulation_dtype(x.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        weight = self.weight.to(dtype)
        return F.layer_norm(x.to(dtype), weight.shape, weight, bias, self.eps).to(x.dtype)
