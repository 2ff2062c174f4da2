"""Tensor and sequence parallelism from outside the model.

Each component declares a ``plan`` (parameter path → kind) and whether it is a *region*: code that
runs on a slice of heads, features or vocabulary and therefore needs an operation at its entry and
at its exit.  Parameters are stored as DTensors (placement, checkpoint, 2-D sharding) while the
component keeps computing on plain local tensors; no DTensor operator runs in forward or backward.

Kinds: ``column``, ``vocab`` and ``head`` shard dimension 0, ``row`` shards dimension 1,
``replicated`` shards nothing, and neither does ``partial``, which is for parameters outside regions
that regions use.  ``expert_column`` [E, F, D] and ``expert_row`` [E, D, F] shard F over ``tp`` and
E over ``ep``.  A parameter that no plan names is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from models.collectives import axis
from models.grouped import ExpertLinear
from models.linear import Linear

from .mesh import Mesh

_SHARDED_DIM: dict[str, int | None] = {
    "column": 0,
    "vocab": 0,
    "head": 0,
    "row": 1,
    "replicated": None,
    "partial": None,
    "expert_column": 1,
    "expert_row": 2,
}


@dataclass(frozen=True)
class ParameterPlan:
    """How one parameter lies on the tensor axis.

    shape: the whole stored tensor.  dim: the sharded dimension, or None.  partial: every rank's
    gradient is a share of the whole one (the parameter is replicated, but each rank applied it to
    different heads or sequence positions), so gradients must be summed over ``tp``.  expert:
    dimension 0 counts experts and is sharded over ``ep``.
    """

    shape: tuple[int, ...]
    dim: int | None
    partial: bool
    expert: bool = False

    def local_shape(self, tp: int, ep: int = 1) -> tuple[int, ...]:
        """Of one rank's part."""
        return tuple(
            n // (tp if dim == self.dim else 1) // (ep if self.expert and dim == 0 else 1)
            for dim, n in enumerate(self.shape)
        )


def parameter_plans(model: nn.Module, sequence_parallel: bool) -> dict[str, ParameterPlan]:
    """The plan of every parameter of ``model``, by name."""
    kinds: dict[str, str] = {}
    regions: list[str] = []
    for prefix, module in model.named_modules():
        lead = f"{prefix}." if prefix else ""
        if getattr(module, "region", False):
            regions.append(lead)
        plan: Mapping[str, str] = getattr(module, "plan", {})
        kinds.update({lead + path: kind for path, kind in plan.items()})
    plans = {}
    for name, parameter in model.named_parameters():
        if name not in kinds:
            raise ValueError(f"parameter {name!r} is named by no sharding plan of its module")
        dim = _SHARDED_DIM[kinds[name]]
        inside = any(name.startswith(lead) for lead in regions)
        partial = dim is None and (inside or sequence_parallel or kinds[name] == "partial")
        expert = kinds[name].startswith("expert")
        plans[name] = ParameterPlan(tuple(parameter.shape), dim, partial, expert)
    return plans


def shard_parameters(model: nn.Module, plans: Mapping[str, ParameterPlan], mesh: Mesh) -> None:
    """Replace every parameter by its DTensor over ``tp``, and those of experts by one over ``ep``
    as well.  Runs on meta tensors: no data moves."""
    tp, ep = mesh.size("tp"), mesh.size("ep")
    for prefix, module in model.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            plan = plans[f"{prefix}.{key}" if prefix else key]
            if plan.dim is not None and plan.shape[plan.dim] % tp:
                raise ValueError(f"tp={tp} does not divide dimension {plan.dim} of {prefix}")
            placements: dict[str, Placement] = {}
            if plan.expert and ep > 1:
                placements["ep"] = Shard(0)
            if tp > 1:
                placements["tp"] = Replicate() if plan.dim is None else Shard(plan.dim)
            if placements:
                local = parameter.detach().new_empty(plan.local_shape(tp, ep))
                axes = mesh.sub(*placements)
                stored = DTensor.from_local(local, axes, [*placements.values()], run_check=False)
                setattr(module, key, nn.Parameter(stored))


_classes: dict[tuple[Any, ...], type] = {}


def specialise(module: nn.Module, key: tuple[Any, ...], members: Mapping[str, Any]) -> None:
    """Give ``module`` a subclass of its class with ``members``; one class per (class, key)."""
    base = type(module)
    if (base, key) not in _classes:
        _classes[base, key] = type(base.__name__, (base,), dict(members))
    module.__class__ = _classes[base, key]


def is_fully_sharded(parameter: Tensor) -> bool:
    """Whether fully_shard holds this stored parameter (and has not gathered it)."""
    return isinstance(parameter, DTensor) and "fsdp" in (parameter.device_mesh.mesh_dim_names or ())


def _local(parameter: Tensor, dtype: torch.dtype | None) -> Tensor:
    if is_fully_sharded(parameter):  # read by fully_shard itself; in forward it is gathered
        return parameter
    if isinstance(parameter, DTensor):
        parameter = parameter.to_local()
    return parameter if dtype is None else parameter.to(dtype)


def compute_on_local(model: nn.Module, compute_dtype: torch.dtype | None) -> None:
    """Make every module see its own parameters as local tensors.

    Linear maps see them in ``compute_dtype``; the other components choose their dtype themselves
    (norms: at least fp32 where it matters; embedding and head: ``compute_dtype`` is set on them).
    """
    for module in model.modules():
        dtype = compute_dtype if isinstance(module, (Linear, ExpertLinear)) else None
        names = tuple(name for name, value in module._parameters.items() if value is not None)
        if names:
            specialise(module, ("local", names, dtype), _properties(names, dtype))
        if compute_dtype is not None and hasattr(module, "compute_dtype"):
            module.compute_dtype = compute_dtype  # type: ignore[assignment]


def _properties(names: tuple[str, ...], dtype: torch.dtype | None) -> dict[str, property]:
    def reader(name: str) -> property:
        return property(lambda self: _local(self._parameters[name], dtype))

    return {name: reader(name) for name in names}


def enter_region(x: Tensor) -> Tensor:
    """Whole sequence, on every rank; its gradient is summed (and scattered) over the axis."""
    if axis("sp").size > 1:
        return axis("sp").gather(x, 1)
    return axis("tp").copy(x)


def leave_region(x: Tensor) -> Tensor:
    """Sum the ranks' shares; under sequence parallelism keep this rank's positions."""
    if axis("sp").size > 1:
        return axis("sp").reduce_scatter(x, 1)
    return axis("tp").reduce(x)


def add_region_edges(model: nn.Module) -> None:
    """Run ``enter_region`` and ``leave_region`` around every region's forward."""
    for module in model.modules():
        if getattr(module, "region", False):
            edges = (getattr(module, "region_input", True), getattr(module, "region_output", True))
            specialise(module, ("region", *edges), {"forward": _edged(type(module), *edges)})


def _edged(base: type, enters: bool, leaves: bool) -> Callable[..., Any]:
    inner: Callable[..., Any] = base.forward  # type: ignore[attr-defined]

    def forward(self: nn.Module, x: Tensor, *args: Any) -> Any:
        out = inner(self, enter_region(x) if enters else x, *args)
        return leave_region(out) if leaves else out

    return forward


def apply_tensor_parallel(model: nn.Module, plans: Mapping[str, ParameterPlan], mesh: Mesh) -> None:
    """Shard storage and add the region edges (no-op where neither axis has two ranks)."""
    if mesh.size("tp") > 1 or mesh.size("ep") > 1:
        shard_parameters(model, plans, mesh)
    if mesh.size("tp") > 1:
        add_region_edges(model)
