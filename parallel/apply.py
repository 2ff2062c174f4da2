"""From a configuration to this rank's part of the model, in one fixed order:

tensor → recompute → compile → fully_shard → materialise → initialise.

Everything up to materialisation happens on meta tensors, so no rank ever holds a whole tensor.
Order matters: a tensor plan applied after fully_shard would match nothing, and recomputation
outside fully_shard would gather weights twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from models.attention import AttentionBackend
from models.collectives import bind
from models.config import ModelConfig
from models.declarations import initial_value, named_state, wide_parameters
from models.initialize import initialize_, unpadded_shape
from models.linear import accumulation_dtype
from models.mtp import MTPBlock
from models.transformer import Transformer, logical_name, module_name

from .collectives import mesh_axes
from .mesh import Mesh, ParallelConfig
from .tensor import (
    ParameterPlan,
    apply_tensor_parallel,
    compute_on_local,
    is_fully_sharded,
    parameter_plans,
    specialise,
)

Recompute = Literal["none", "selective", "full"]


@dataclass
class BuildOptions:
    """What, besides the two configs, decides how the model is built."""

    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype | None = None
    seed: int = 0
    attention_backend: AttentionBackend = "auto"
    compile: bool = False
    initialize: bool = True


@dataclass
class ParallelModel:
    """This rank's units and what is known about their parameters.

    part: the units of all virtual stages of this rank.  plans: by logical name.
    hosts: pipeline ranks that hold each logical parameter, only for those with several.
    """

    config: ModelConfig
    mesh: Mesh
    part: Transformer
    plans: dict[str, ParameterPlan] = field(default_factory=dict)
    hosts: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(logical name, stored parameter) of this rank, each once."""
        for name, parameter in self.part.named_parameters():
            yield logical_name(name, self.config), parameter

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """(name, buffer) of what is carried along without being trained."""
        yield from named_state(self.part)


@torch.no_grad()
def local_tensor(parameter: Tensor) -> Tensor:
    """The storage of this rank's part of a stored parameter, outside autograd."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def build_parallel_model(
    config: ModelConfig,
    parallel: ParallelConfig,
    mesh: Mesh,
    options: BuildOptions,
    units: Collection[str] | None = None,
    hosts: dict[str, tuple[int, ...]] | None = None,
) -> ParallelModel:
    """Build, shard and initialise; binds the collectives seam to this mesh.

    ``units``: names of this rank's units (default: all of them).
    """
    bind(mesh_axes(mesh, parallel.sp))
    with torch.device("meta"):
        part = Transformer(config, units, options.attention_backend)
    part.to(options.dtype)
    plans = parameter_plans(part, parallel.sp)
    model = ParallelModel(config, mesh, part, hosts=hosts or {})
    model.plans.update({logical_name(name, config): plan for name, plan in plans.items()})
    apply_tensor_parallel(part, plans, mesh)
    if mesh.size("tp") > 1 or mesh.size("ep") > 1 or options.compute_dtype is not None:
        compute_on_local(part, options.compute_dtype)
    for block in blocks(part):
        apply_recompute(block, parallel.recompute)
        if options.compile:
            block.compile()
    if mesh.size("fsdp") > 1:
        apply_fully_shard(part, parallel, mesh, options)
    part.to_empty(device=mesh.device)
    if options.initialize:
        initialize_parameters(model, options.seed)
        update_state(model, 0)
    return model


def blocks(part: Transformer) -> list[nn.Module]:
    """Every block, those of multi-token prediction included."""
    mtp = [m.block if isinstance(m, MTPBlock) else m for m in part.mtp.values()]
    return [*part.blocks.values(), *mtp]


_SAVED_OPERATORS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def _keep_matrix_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    if operator in _SAVED_OPERATORS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def apply_recompute(block: nn.Module, mode: Recompute) -> None:
    """Recompute a block's activations in backward: all of them, or all but matrix products."""
    if mode == "none":
        return
    inner = type(block).forward
    extra: dict[str, Any] = {}
    if mode == "selective":
        extra["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_matrix_products)

    def forward(self: nn.Module, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(self, *args)
        return checkpoint(
            partial(inner, self), *args, use_reentrant=False, preserve_rng_state=False, **extra
        )

    specialise(block, ("recompute", mode), {"forward": forward})


@dataclass(frozen=True)
class Root:
    """What is fully sharded on its own.  narrow: gathered in the compute dtype, as linear maps and
    blocks are; vocabulary matrices are gathered as stored."""

    module: nn.Module
    narrow: bool = True


def sharded_roots(part: Transformer) -> dict[str, list[Root]]:
    """By module name.  The norms are too small to be worth a collective and a tied embedding serves
    two units: both stay replicated and are reduced explicitly."""
    roots = {f"blocks.{layer}": [Root(block)] for layer, block in part.blocks.items()}
    for depth, mtp in part.mtp.items():
        if isinstance(mtp, MTPBlock):
            own = [] if mtp.embedding is None else [Root(mtp.embedding, False)]
            roots[f"mtp.{depth}"] = [*own, Root(mtp.projection), Root(mtp.block)]
        else:
            roots[f"mtp.{depth}"] = [Root(mtp)]
    if not part.config.tie_embeddings:
        for name, module in (("embedding", part.embedding), ("head", part.head)):
            roots[name] = [] if module is None else [Root(module, False)]
    return roots


def apply_fully_shard(
    part: Transformer, parallel: ParallelConfig, mesh: Mesh, options: BuildOptions
) -> None:
    """Each unit becomes a root of its own; no root contains another."""
    shard_mesh = mesh.sub("dp", "fsdp") if mesh.size("dp") > 1 else mesh.sub("fsdp")
    wide_ones = wide_parameters(part)
    wide = accumulation_dtype(options.dtype)
    narrow = MixedPrecisionPolicy(options.compute_dtype, wide, cast_forward_inputs=False)
    stored = MixedPrecisionPolicy(None, wide, cast_forward_inputs=False)
    for root in (root for roots in sharded_roots(part).values() for root in roots):
        fully_shard(
            root.module,
            mesh=shard_mesh,
            reshard_after_forward=parallel.reshard_after_forward,
            mp_policy=narrow if root.narrow else stored,
            ignored_params=wide_ones,
        )
        assert isinstance(root.module, FSDPModule)
        # Gradients are sums; the one division is by global counts, inside the loss.
        root.module.set_gradient_divide_factor(1.0)
        root.module.set_force_sum_reduction_for_comms(True)


def sharded_units(part: Transformer, units: Iterable[str]) -> list[FSDPModule]:
    """The fully sharded roots that these units use, each once."""
    roots = sharded_roots(part)
    found = []
    for unit in units:
        name = module_name(part.config, unit)
        found += roots.get(name, [])
        if name.startswith("mtp.") and part.config.mtp.shares_embedding:
            found += roots.get("embedding", [])
    modules = dict.fromkeys(root.module for root in found)
    return [module for module in modules if isinstance(module, FSDPModule)]


def shard_offsets(model: ParallelModel, name: str, parameter: Tensor) -> list[int]:
    """Where this rank's block of the stored tensor begins, per dimension."""
    plan, mesh = model.plans[name], model.mesh
    offsets = [0] * len(plan.shape)
    block = plan.local_shape(mesh.size("tp"), mesh.size("ep"))
    if plan.dim is not None:
        offsets[plan.dim] = mesh.rank("tp") * block[plan.dim]
    if plan.expert:
        offsets[0] = mesh.rank("ep") * block[0]
    if is_fully_sharded(parameter):
        rows = -(-block[0] // mesh.size("fsdp"))
        offsets[0] += min(mesh.rank("fsdp") * rows, block[0])
    return offsets


def initialize_parameters(model: ParallelModel, seed: int) -> None:
    """Fill every local shard from (seed, logical name, coordinates), and the state."""
    for stored_name, parameter in model.part.named_parameters():
        name = logical_name(stored_name, model.config)
        shape = unpadded_shape(model.config, name, model.plans[name].shape)
        offsets = shard_offsets(model, name, parameter)
        declared = initial_value(model.part, stored_name)
        initialize_(local_tensor(parameter), model.config, seed, name, offsets, shape, declared)
    for name, buffer in model.named_state():
        declared = initial_value(model.part, name)
        assert declared is not None, f"{name} has no initial value"
        initialize_(buffer, model.config, seed, name, [0] * buffer.dim(), buffer.shape, declared)


@torch.no_grad()
def update_state(model: ParallelModel, step: int) -> None:
    """Let every module move its state on after ``step`` updates (0: the weights are new)."""
    roots = [r.module for roots in sharded_roots(model.part).values() for r in roots]
    root_of = {m: root for root in roots if isinstance(root, FSDPModule) for m in root.modules()}
    for module in model.part.modules():
        update = getattr(module, "update_state", None)
        if update is None:
            continue
        reads = getattr(module, "reads_weights", None)
        root = root_of.get(module) if reads is not None and reads(step) else None
        if root is not None:
            root.unshard()
        update(step)
        if root is not None:
            root.reshard()
