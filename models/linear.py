"""A linear map whose parameters may be sharded from outside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """*At least fp32*: float64 stays float64, everything narrower becomes float32."""
    return torch.promote_types(dtype, torch.float32)


class Linear(nn.Module):
    """``y = x Wᵀ (+ b)`` with ``W`` of shape [out_features, in_features].

    The input is brought to the weight's dtype, so a float32 residual stream can feed bf16
    weights.  Shapes are read from the weight, never remembered: under tensor parallelism the
    local weight is smaller than the one that was declared.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        return F.linear(x.to(weight.dtype), weight, self.bias)
