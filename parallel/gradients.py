"""Gradient reduction, the global norm, clipping.

Every reduction is a sum.  A parameter's gradient is summed over

* ``data`` unless fully_shard reduced it already; an expert's over ``edp`` alone, because other
  ``ep`` ranks own other experts and sent their tokens here,
* ``tp`` when each rank holds a share (``ParameterPlan.partial``),
* the pipeline ranks that host it (a tied embedding), in rank order, so that every host ends with
  the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .apply import ParallelModel, local_tensor
from .tensor import is_fully_sharded

BUCKET_BYTES = 32 << 20
# Measured with gloo on a CPU: two ranks that exchange 32 MiB at once take five times as long as in
# parts of 2 to 4 MiB (smaller ones are slower again).
_EXCHANGE_BYTES = {"cpu": 4 << 20}


def exchange_bytes(device_type: str) -> int:
    """What hosts of a shared weight send each other at once."""
    return _EXCHANGE_BYTES.get(device_type, BUCKET_BYTES)


def local_gradient(parameter: Tensor) -> Tensor:
    """This rank's part of the gradient, in its own storage; zeros when nothing was computed."""
    grad = parameter.grad
    if grad is None:
        parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def trained_parameters(model: ParallelModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Those that have a gradient: all that are not frozen."""
    return (item for item in model.named_parameters() if item[1].requires_grad)


def reduce_gradients(model: ParallelModel) -> None:
    """Complete every gradient; call once per step, after the last backward pass."""
    for axis in ("data", "edp", "tp"):
        group = model.mesh.group(axis)
        if group is not None:
            _sum_bucketed(_gradients_over(model, axis), group)
    for name, hosts in sorted(model.hosts.items()):
        _sum_over_hosts(model, name, hosts)


def _gradients_over(model: ParallelModel, axis: str) -> list[Tensor]:
    """``edp``: of the parameters that ``ep`` shards, which are not summed over ``data``."""
    chosen = []
    divided = model.mesh.size("ep") > 1
    for name, parameter in trained_parameters(model):
        plan = model.plans[name]
        if axis == "tp":
            wanted = plan.partial
        elif divided and plan.expert:
            wanted = axis == "edp"
        else:
            wanted = axis == "data" and not is_fully_sharded(parameter)
        if wanted:
            chosen.append(local_gradient(parameter))
    return chosen


def _sum_bucketed(gradients: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """All-reduce in buckets, all in flight at once."""
    buckets: list[list[Tensor]] = []
    room = 0
    for gradient in gradients:
        size = gradient.numel() * gradient.element_size()
        if size > room or not buckets or buckets[-1][0].dtype != gradient.dtype:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(gradient)
        room -= size
    flights = []
    for bucket in buckets:
        alone = len(bucket) == 1 and bucket[0].is_contiguous()
        flat = bucket[0] if alone else torch.cat([g.reshape(-1) for g in bucket])
        flights.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in flights:
        work.wait()
        if flat is not bucket[0]:
            parts = flat.split([g.numel() for g in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))


def _sum_over_hosts(model: ParallelModel, name: str, hosts: tuple[int, ...]) -> None:
    me = model.mesh.rank("pp")
    if me not in hosts:
        return
    group = model.mesh.group("pp")
    assert group is not None
    parameter = dict(model.named_parameters())[name]
    if not parameter.requires_grad:
        return
    sum_over_ranks(local_gradient(parameter), hosts, me, group)


def sum_over_ranks(mine: Tensor, hosts: tuple[int, ...], me: int, group: dist.ProcessGroup) -> None:
    """Replace a contiguous tensor by its sum over these ranks of a group, in rank order."""
    # In parts: a vocabulary matrix from every other host at once would be the largest thing here.
    size = exchange_bytes(mine.device.type)
    for part in mine.view(-1).split(size // mine.element_size()):
        _exchange(part, hosts, me, group)


def _exchange(mine: Tensor, hosts: tuple[int, ...], me: int, group: dist.ProcessGroup) -> None:
    received = {rank: torch.empty_like(mine) for rank in hosts if rank != me}
    works = []
    for rank, buffer in sorted(received.items()):
        peer = dist.get_global_rank(group, rank)
        exchange = [
            dist.P2POp(dist.isend, mine, peer, group),
            dist.P2POp(dist.irecv, buffer, peer, group),
        ]
        works += dist.batch_isend_irecv(exchange)
    for work in works:
        work.wait()
    first, *others = sorted(hosts)
    parts = {**received, me: mine}
    total = parts[first]
    for rank in others:
        total += parts[rank]
    if total is not mine:
        mine.copy_(total)


def counted_here(model: ParallelModel, name: str, parameter: Tensor) -> bool:
    """Whether this rank is the one that counts its part of a parameter in global sums."""
    mesh, plan = model.mesh, model.plans[name]
    if mesh.rank("edp" if plan.expert else "dp") != 0:
        return False
    if not is_fully_sharded(parameter) and mesh.rank("fsdp") != 0:
        return False
    if plan.dim is None and mesh.rank("tp") != 0:
        return False
    hosts = model.hosts.get(name)
    return hosts is None or mesh.rank("pp") == hosts[0]


def gradient_norm(model: ParallelModel) -> Tensor:
    """‖g‖₂ of the whole gradient (float64 scalar), each element counted once in the world."""
    squares = torch.zeros((), dtype=torch.float64, device=model.mesh.device)
    for name, parameter in trained_parameters(model):
        if counted_here(model, name, parameter):
            gradient = local_gradient(parameter)
            if gradient.numel():
                squares += torch.linalg.vector_norm(gradient).to(torch.float64).square()
    if model.mesh.device_mesh is not None:
        dist.all_reduce(squares)
    return squares.sqrt()


def scale_gradients(model: ParallelModel, factor: Tensor | float) -> None:
    for _, parameter in trained_parameters(model):
        local_gradient(parameter).mul_(factor)


def clip_gradients(model: ParallelModel, norm: Tensor, maximum: float) -> None:
    """Scale so that the norm does not exceed ``maximum`` (exactly 1 when it does not)."""
    # a true division: ``maximum / norm`` multiplies by the reciprocal, which rounds below 1
    factor = torch.full_like(norm, maximum) / norm.clamp(min=1e-12)
    scale_gradients(model, factor.clamp(max=1.0).to(torch.float64))


def zero_gradients(model: ParallelModel) -> None:
    for _, parameter in model.named_parameters():
        parameter.grad = None


def full_tensor(model: ParallelModel, name: str, local: Tensor, sharded: bool) -> Tensor:
    """Assemble the whole stored tensor from every rank's block (collective over fsdp, tp and ep).

    For tests, exports and comparisons of small models.  ``sharded``: fully_shard splits it.
    """
    plan, mesh = model.plans[name], model.mesh
    if sharded:
        shape = plan.local_shape(mesh.size("tp"))
        local = _gather_uneven(local, shape, mesh.group("fsdp"), mesh.size("fsdp"))
    for axis, dim in (("tp", plan.dim), ("ep", 0 if plan.expert else None)):
        group = mesh.group(axis)
        if dim is not None and group is not None:
            parts = [torch.empty_like(local) for _ in range(mesh.size(axis))]
            dist.all_gather(parts, local.contiguous(), group=group)
            local = torch.cat(parts, dim=dim)
    return local.clone()


def _gather_uneven(
    local: Tensor, shape: Sequence[int], group: dist.ProcessGroup | None, size: int
) -> Tensor:
    if group is None:
        return local
    rows = -(-shape[0] // size)
    padded = local.new_zeros((rows, *shape[1:]))
    padded[: local.shape[0]] = local
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts)[: shape[0]]


def full_gradients(model: ParallelModel) -> dict[str, Tensor]:
    """Every whole gradient of this rank's stages, by logical name (collective)."""
    return {
        name: full_tensor(model, name, local_gradient(parameter), is_fully_sharded(parameter))
        for name, parameter in trained_parameters(model)
    }


def full_parameters(model: ParallelModel) -> dict[str, Tensor]:
    """Every whole stored parameter of this rank's stages, by logical name (collective)."""
    return {
        name: full_tensor(model, name, local_tensor(parameter), is_fully_sharded(parameter))
        for name, parameter in model.named_parameters()
    }
