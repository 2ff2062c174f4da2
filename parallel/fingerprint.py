"""A hash of all weights that does not depend on how they are sharded.

Every element contributes a 64-bit mix of its bits and its position in the stored tensor; the
contributions are added modulo 2^64, per parameter, over all ranks.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor

from models.initialize import mix
from models.transformer import Transformer, logical_name

from .apply import ParallelModel, local_tensor, shard_offsets
from .gradients import counted_here

_BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}


def _element_sum(local: Tensor, offsets: list[int], shape: tuple[int, ...]) -> Tensor:
    position = torch.zeros((1,) * local.dim(), dtype=torch.int64, device=local.device)
    stride = 1
    for dim in range(local.dim() - 1, -1, -1):
        view = [1] * local.dim()
        view[dim] = local.shape[dim]
        coordinate = torch.arange(local.shape[dim], device=local.device) + offsets[dim]
        position = position + (coordinate * stride).view(view)
        stride *= shape[dim]
    bits = local.view(_BITS[local.dtype]).to(torch.int64)
    return mix(bits ^ mix(position)).sum()


def weights_hash(model: ParallelModel) -> str:
    """SHA-256 over (name, element sum) of every parameter; equal on all ranks and layouts."""
    with torch.device("meta"):
        whole = Transformer(model.config)
    names = sorted({logical_name(name, model.config) for name, _ in whole.named_parameters()})
    sums = torch.zeros(len(names), dtype=torch.int64, device=model.mesh.device)
    for name, parameter in model.named_parameters():
        if counted_here(model, name, parameter):
            local = local_tensor(parameter)
            offsets = shard_offsets(model, name, parameter)
            sums[names.index(name)] += _element_sum(local, offsets, model.plans[name].shape)
    if model.mesh.device_mesh is not None:
        dist.all_reduce(sums)
    text = "\n".join(f"{name} {value}" for name, value in zip(names, sums.tolist(), strict=True))
    return hashlib.sha256(text.encode()).hexdigest()
