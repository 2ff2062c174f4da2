"""Process groups behind the axes of ``models/collectives.py``, with autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.collectives import Axis

from .mesh import Mesh


class GroupAxis(Axis):
    """An axis over a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def sum_(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def max_(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x

    def copy(self, x: Tensor) -> Tensor:
        result: Tensor = _Copy.apply(x, self)
        return result

    def reduce(self, x: Tensor) -> Tensor:
        result: Tensor = _Reduce.apply(x, self)
        return result

    def gather(self, x: Tensor, dim: int) -> Tensor:
        result: Tensor = _Gather.apply(x, self, dim)
        return result

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        result: Tensor = _ReduceScatter.apply(x, self, dim)
        return result

    def exchange(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        if not x.requires_grad:
            return self.all_to_all(x, send, receive)
        result: Tensor = _Exchange.apply(x, self, list(send), list(receive))
        return result

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """``exchange`` without gradient."""
        assert sum(send) == x.shape[0]
        out = x.new_empty((sum(receive), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=self.group)
        return out

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Concatenate every member's x along ``dim`` (no gradient)."""
        parts = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(parts, x.contiguous()[None], group=self.group)
        if dim == 0:
            return parts.flatten(0, 1)
        return torch.cat(tuple(parts), dim=dim)

    def sum_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Sum over members, keep this rank's slice of ``dim`` (no gradient)."""
        stacked = torch.stack(x.chunk(self.size, dim=dim))
        out = torch.empty(stacked.shape[1:], dtype=x.dtype, device=x.device)
        dist.reduce_scatter_tensor(out[None], stacked, group=self.group)
        return out


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: GroupAxis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.sum_(grad.clone(memory_format=torch.contiguous_format)), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: GroupAxis) -> Tensor:
        return axis.sum_(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: GroupAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.sum_scatter(grad, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: GroupAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.sum_scatter(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.all_gather(grad, ctx.dim), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: GroupAxis, send: list[int], receive: list[int]
    ) -> Tensor:
        ctx.axis, ctx.send, ctx.receive = axis, send, receive
        return axis.all_to_all(x, send, receive)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis.all_to_all(grad, ctx.receive, ctx.send), None, None, None


def mesh_axes(mesh: Mesh, sequence_parallel: bool) -> dict[str, Axis]:
    """The bindings for :func:`models.collectives.bind` on this mesh."""
    axes: dict[str, Axis] = {}
    tensor, expert, data = mesh.group("tp"), mesh.group("ep"), mesh.group("data")
    if tensor is not None:
        axes["tp"] = GroupAxis(tensor)
        if sequence_parallel:
            axes["sp"] = axes["tp"]
    if expert is not None:
        axes["ep"] = GroupAxis(expert)
    if data is not None:
        axes["dp"] = GroupAxis(data)
    return axes
