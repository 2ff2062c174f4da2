"""Row-wise arithmetic of the norms, with backward passes that keep an input as it came.

Statistics and every sum are taken in at least fp32; results have the input's dtype.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from .collectives import Axis
from .linear import accumulation_dtype


def rms_normalised(x: Tensor, weight: Tensor, eps: float, across: Axis | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight for x [..., D], weight [D].

    across: the axis over whose members a row is spread in equal parts; None for whole rows.
    """
    out: Tensor = _RMSNorm.apply(x, weight, eps, across)
    return out


def mean_square(x: Tensor) -> Tensor:
    """mean(x²) of the rows of x [..., D]: [..., 1] in at least fp32."""
    square: Tensor = _MeanSquare.apply(x)
    return square


def squashed(x: Tensor, scale: Tensor, weight: Tensor, shift: Tensor | None = None,
             f: Literal["tanh", "erf"] = "tanh") -> Tensor:  # fmt: skip
    """f(scale · x + shift) · weight for x [..., D], weight [D], shift [1] or none.

    scale: [1], or [..., 1] for one per row.  f is evaluated again in the backward pass."""
    out: Tensor = _Squashed.apply(x, scale, shift, weight, f)
    return out


class _RMSNorm(torch.autograd.Function):
    """The formula with its backward pass written out.  It keeps its input alone; recorded operation
    by operation it would keep an fp32 copy as well (with bf16, and a bf16 one), and be slower."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, across: Axis | None) -> Tensor:
        wide = x.to(accumulation_dtype(x.dtype))
        square = wide.square().mean(-1, keepdim=True)
        if across is not None:
            square = across.sum_(square) / across.size
        scale = torch.rsqrt(square + eps)
        ctx.save_for_backward(x, scale, weight)
        ctx.across = across
        return (wide * scale).to(x.dtype) * weight.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, scale, weight = ctx.saved_tensors
        normed, wide = x.to(scale.dtype) * scale, grad.to(scale.dtype)
        d_weight = (wide * normed).reshape(-1, x.shape[-1]).sum(0)
        d_normed = wide * weight.to(scale.dtype)
        along = torch.linalg.vecdot(d_normed, normed).unsqueeze(-1) / x.shape[-1]
        if ctx.across is not None:
            along = ctx.across.sum_(along) / ctx.across.size
        d_x = d_normed.addcmul_(normed, along, value=-1).mul_(scale)
        return d_x.to(x.dtype), d_weight.to(weight.dtype), None, None


class _MeanSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.to(accumulation_dtype(x.dtype)).square().mean(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (x.to(grad.dtype) * (grad * (2 / x.shape[-1]))).to(x.dtype)


class _Squashed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, shift: Tensor | None, weight: Tensor, f: str
    ) -> Tensor:
        ctx.save_for_backward(x, scale, shift, weight)
        ctx.f = f
        z = _affine(x, scale, shift)
        value = z.tanh_() if f == "tanh" else z.erf_()
        return value.to(x.dtype) * weight.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, scale, shift, weight = ctx.saved_tensors
        z = _affine(x, scale, shift)
        wide = grad.to(z.dtype)
        if ctx.f == "tanh":
            value = z.tanh_()
            slope = 1 - value.square()
        else:
            slope = z.square().neg_().exp_().mul_(2 / math.sqrt(math.pi))
            value = z.erf_()
        d_weight = value.mul_(wide).reshape(-1, x.shape[-1]).sum(0)
        d_z = slope.mul_(wide).mul_(weight.to(z.dtype))
        along = torch.linalg.vecdot(d_z, x.to(z.dtype)).unsqueeze(-1)
        d_scale = along.sum_to_size(scale.shape)
        d_shift = None if shift is None else d_z.sum().view(1).to(shift.dtype)
        d_x = d_z.mul_(scale.to(z.dtype)).to(x.dtype)
        return d_x, d_scale.to(scale.dtype), d_shift, d_weight.to(weight.dtype), None


def _affine(x: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    dtype = accumulation_dtype(x.dtype)
    z = x.to(dtype) * scale.to(dtype)
    return z if shift is None else z.add_(shift.to(dtype))
