"""Backward passes in two parts: input gradients now, weight gradients of linear maps later.

The next stage back waits for input gradients alone, so weight gradients can fill a pipeline's
bubbles (Qi et al. 2024, arXiv 2401.10241).  Linear maps, and heads that are a stage of their own,
note what their weight gradient is made of while it is collected; everything else (norm gains,
embeddings, heads behind the blocks of a stage) gets its gradient at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from models.linear import Linear, accumulation_dtype
from models.losses import Elsewhere

from .gradients import local_gradient
from .tensor import specialise


class Owed(NamedTuple):
    """A weight gradient still to be made: gᵀ x, in the first rows of ``weight()``.

    The weight is looked up when it is needed: what a forward pass made of the stored one (a cast, a
    gathered copy) need not live so long.
    """

    weight: Callable[[], Tensor]
    x: Tensor
    g: Tensor


class WeightGradients:
    """Who makes one rank's weight gradients where the backward pass does not."""

    def __init__(self) -> None:
        self._open: list[Owed] | None = None

    @contextmanager
    def collect(self) -> Iterator[list[Owed]]:
        """Backward passes inside leave weight gradients in the list that this gives."""
        assert self._open is None, "backward passes in two parts do not nest"
        self._open = owed = list[Owed]()
        try:
            yield owed
        finally:
            self._open = None

    def late(self, weight: Callable[[], Tensor]) -> Elsewhere | None:
        """Takes what the gradient of ``weight()`` is made of; None while nothing is collected."""
        owed = self._open
        return None if owed is None else lambda x, g: owed.append(Owed(weight, x.detach(), g))

    def elsewhere(self, owner: nn.Module, weight: Callable[[], Tensor]) -> Elsewhere | None:
        """For a head: later while gradients are collected, otherwise at once into the stored
        gradient, so that nothing as large as the vocabulary matrix is made per micro-batch.  None
        where fully_shard must see the gradient, or where the stored one is too narrow for sums."""
        parameter, owed = owner._parameters["weight"], self._open
        assert parameter is not None
        if not parameter.requires_grad:
            return None
        if owed is not None:
            return lambda x, g: owed.append(Owed(weight, x.detach(), g.clone()))
        narrow = parameter.dtype != accumulation_dtype(parameter.dtype)
        if narrow or isinstance(owner, FSDPModule):
            return None
        return partial(_accumulate, parameter)

    @staticmethod
    def add(owed: list[Owed]) -> None:
        """Accumulate what was left, through whatever lies between stored and used weights."""
        while owed:
            weight, x, g = owed.pop()
            used, gradient = weight(), g.flatten(0, -2).T @ x.flatten(0, -2)
            padding = used.shape[0] - gradient.shape[0]  # of a vocabulary matrix
            torch.autograd.backward(used, F.pad(gradient, (0, 0, 0, padding)).to(used.dtype))


@torch.no_grad()
def _accumulate(parameter: Tensor, x: Tensor, g: Tensor) -> None:
    stored = local_gradient(parameter)[: g.shape[1]]
    if g.dtype == stored.dtype:
        stored.addmm_(g.T, x)
    else:
        stored += g.T @ x


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, module: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module = module
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        module, d_weight = ctx.module, None
        late = module.weight_gradients.late(lambda: module.weight)
        if not ctx.needs_input_grad[1]:
            pass  # frozen
        elif late is None:
            d_weight = grad.flatten(0, -2).T @ x.flatten(0, -2)
        else:
            late(x, grad)
        d_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return grad @ weight, d_weight, d_bias, None


def split_linear_maps(model: nn.Module, sink: WeightGradients) -> None:
    """Make every linear map able to leave its weight gradient in ``sink``."""

    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.weight
        out: Tensor = _SplitLinear.apply(x.to(weight.dtype), weight, self.bias, self)
        return out

    for module in model.modules():
        if isinstance(module, Linear):
            specialise(module, ("split",), {"forward": forward})
            module.weight_gradients = sink  # type: ignore[assignment]


def reduce_now(root: FSDPModule) -> None:
    """Reduce what a fully sharded root has accumulated; its hooks run in backward passes only."""
    root.set_is_last_backward(True)
    root.set_requires_gradient_sync(True)
    root.set_reshard_after_backward(True)
    root._get_fsdp_state()._root_post_backward_final_callback()
