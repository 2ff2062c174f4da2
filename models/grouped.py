"""One linear map per expert, applied to rows that are sorted by expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def _grouped_kernel(x: Tensor) -> bool:
    """Whether torch's grouped product takes these rows.  Not yet run on a GPU."""
    return x.is_cuda and x.dtype == torch.bfloat16 and hasattr(torch, "_grouped_mm")


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(counts, device=device).cumsum(0).to(torch.int32)


class _GroupedLinear(torch.autograd.Function):
    """Every group of rows through its own matrix.  The weight's gradient is made as a whole, zero
    for experts without tokens: on every rank there is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        if _grouped_kernel(x):
            out: Tensor = torch._grouped_mm(x, weight.transpose(1, 2), offs=_ends(counts, x.device))
            return out
        return torch.cat([part @ w.T for part, w in zip(x.split(counts), weight, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        d_x = d_weight = None
        if _grouped_kernel(x):
            ends = _ends(ctx.counts, x.device)
            if ctx.needs_input_grad[0]:
                d_x = torch._grouped_mm(grad, weight, offs=ends)
            if ctx.needs_input_grad[1]:
                d_weight = torch._grouped_mm(grad.T, x, offs=ends)
            return d_x, d_weight, None
        parts = grad.split(ctx.counts)
        if ctx.needs_input_grad[0]:
            d_x = torch.cat([part @ w for part, w in zip(parts, weight, strict=True)])
        if ctx.needs_input_grad[1]:
            d_weight = torch.empty_like(weight)
            for out, part, rows in zip(d_weight, parts, x.split(ctx.counts), strict=True):
                torch.mm(part.T, rows, out=out)
        return d_x, d_weight, None


class ExpertLinear(nn.Module):
    """One linear map per expert, ``weight`` [E, out_features, in_features]."""

    def __init__(self, experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features))

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """x [sum(counts), in_features], the rows of the first expert first."""
        weight = self.weight
        out: Tensor = _GroupedLinear.apply(x.to(weight.dtype), weight, counts)
        return out
