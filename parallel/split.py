"""Backward passes in two parts: input gradients now, weight gradients of linear maps later.

The next stage back waits for input gradients alone, so weight gradients can fill a pipeline's
bubbles (Qi et al. 2024, arXiv 2401.10241).  Linear maps, and heads that are a stage of their own,
note what their weight gradient is made of while a sink is *open*; everything else (norm gains,
embeddings, heads behind the blocks of a stage) gets its gradient at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from models.linear import Linear
from models.losses import Late
from models.transformer import Head

from .tensor import specialise


class WeightGradients:
    """Where one rank's linear maps leave what they owe."""

    def __init__(self) -> None:
        self.open: Late | None = None

    @contextmanager
    def collect(self) -> Iterator[Late]:
        """Backward passes inside leave linear weight gradients in the list that this gives."""
        assert self.open is None, "backward passes in two parts do not nest"
        late: Late = []
        self.open = late
        try:
            yield late
        finally:
            self.open = None

    @staticmethod
    def add(late: Late) -> None:
        """Accumulate what was left, through whatever lies between stored and used weights."""
        while late:
            x, weight, grad = late.pop()
            gradient = grad.flatten(0, -2).T @ x.flatten(0, -2)
            padding = weight.shape[0] - gradient.shape[0]  # of a vocabulary matrix
            torch.autograd.backward(weight, F.pad(gradient, (0, 0, 0, padding)).to(weight.dtype))


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_weight = None
        if ctx.sink.open is None:
            d_weight = grad.flatten(0, -2).T @ x.flatten(0, -2)
        else:
            ctx.sink.open.append((x, weight, grad))
        d_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return grad @ weight, d_weight, d_bias, None


def split_linear_maps(model: nn.Module, sink: WeightGradients) -> None:
    """Make every linear map and the head able to leave their weight gradients in ``sink``."""

    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.weight
        out: Tensor = _SplitLinear.apply(x.to(weight.dtype), weight, self.bias, self.later)
        return out

    for module in model.modules():
        if isinstance(module, Linear):
            specialise(module, ("split",), {"forward": forward})
        if isinstance(module, Linear | Head):
            module.later = sink


def reduce_now(root: FSDPModule) -> None:
    """Reduce what a fully sharded root has accumulated; its hooks run in backward passes only."""
    root.set_is_last_backward(True)
    root.set_requires_gradient_sync(True)
    root.set_reshard_after_backward(True)
    root._get_fsdp_state()._root_post_backward_final_callback()
