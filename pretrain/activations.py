"""Activation memory of a pipeline stage, measured on the real modules without doing arithmetic.

The stage is built as one tensor-parallel rank holds it and runs forward and backward on meta
tensors, which have shapes and lifetimes but no data; every storage that an operator allocates is
followed until nothing refers to it any more.  So a new component needs no formula here.  Of
consecutive blocks of equal structure the first, the second and the last are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from models.attention import AttentionBackend
from models.collectives import Axis, bound
from models.config import ModelConfig
from models.declarations import wide_parameters
from models.experts import MoE
from models.linear import accumulation_dtype
from models.losses import Elsewhere, HeadOptions, Term, common_views
from models.transformer import Transformer, module_name
from parallel.apply import apply_recompute, blocks, sharded_roots
from parallel.collectives import GroupAxis
from parallel.pipeline.actions import Kind
from parallel.pipeline.units import BLOCK, HEAD, Edge, Placement, Unit, model_units
from parallel.ports import Port, Wiring, stage_wiring
from parallel.split import Owed, WeightGradients, split_linear_maps
from parallel.stage import MicroBatch, ShardedWeights, unit_name
from parallel.tensor import add_region_edges, compute_on_local, parameter_plans

from .config import RunConfig
from .objectives.base import build_objective
from .observed import WHOLE, Allocations, Driving, ObservedStage, UnitRun, fused_attention
from .stage_profile import StageProfile, UnitProfile, unit_profile


class _PlannedAxis(GroupAxis):
    """Member 0 of an axis of ``size`` ranks without a process group: the right shapes, no sums."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0

    def sum_(self, x: Tensor) -> Tensor:
        return x

    def max_(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        parts = x.new_empty((self.size, *x.shape))
        return parts.flatten(0, 1) if dim == 0 else torch.cat(tuple(parts), dim=dim)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        return x.new_empty((sum(receive), *x.shape[1:]))

    def sum_scatter(self, x: Tensor, dim: int) -> Tensor:
        return torch.empty_like(torch.stack(x.chunk(self.size, dim=dim))[0])


def gathered_together(part: Transformer) -> dict[str, tuple[str, bool]]:
    """By parameter name, for those that ``fully_shard`` divides: a name for what is gathered with
    it, and whether that is in the compute dtype."""
    found = {}
    names = {parameter: name for name, parameter in part.named_parameters()}
    wide = wide_parameters(part)
    for unit, roots in sharded_roots(part).items():
        for number, root in enumerate(roots):
            for parameter in set(root.module.parameters()) - wide:
                found[names[parameter]] = (f"{unit} {number}", root.narrow)
    return found


def signature(block: nn.Module) -> tuple[Any, ...]:
    """Equal for blocks that compute the same on parameters of the same shapes."""
    return (str(block), *((name, tuple(p.shape)) for name, p in block.named_parameters()))


def device_type(config: RunConfig) -> str:
    """Kind of device: of this machine, if the run does not say."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def _dense_mask(config: RunConfig) -> bool:
    """Whether documents become a [B, 1, S, S] mask: in SDPA, which ``auto`` leaves on a GPU."""
    kind = config.kernels.attention
    return kind == "sdpa" or (kind == "auto" and device_type(config) != "cuda")


def around(config: ModelConfig, names: Collection[str]) -> tuple[Placement, int]:
    """A placement with a stage of just these units, and the number of that stage."""
    units = model_units(config.layers, config.mtp.depth)
    mine = [unit for unit in units if unit_name(unit) in names]
    first = units.index(mine[0])
    rest = [unit for unit in units[first:] if unit not in mine]
    stages = tuple(tuple(stage) for stage in (units[:first], mine, rest) if stage)
    ranks = tuple(range(len(stages)))
    return Placement(tuple(units), stages, ranks, config.mtp.wiring), min(first, 1)


Step = tuple[Unit, Port | None, tuple[Port, ...]]


def _key(wiring: Wiring, kinds: Sequence[Any]) -> tuple[Any, ...]:
    """Equal for stages that compute the same on tensors of the same shapes."""
    numbers: dict[Port, int] = {}

    def ports(these: Iterable[Port | None]) -> tuple[Any, ...]:
        found = []
        for port in these:
            if port is not None:
                number = numbers.setdefault(port, len(numbers))
                found.append((number, port.order, _rows(port.chunks)))
        return tuple(found)

    inputs = tuple((_rows(e.chunks), ports(p)) for e, p in zip(wiring.inputs, wiring.sources))
    steps = tuple((kind, ports((p,)), ports(out))
                  for kind, (_, p, out) in zip(kinds, wiring.steps, strict=True))  # fmt: skip
    return inputs, steps, ports(wiring.leaving), wiring.head_chunks


def _rows(chunks: tuple[int, ...]) -> tuple[int, bool]:
    """How many chunks, and whether they follow each other: where they are does not matter."""
    return len(chunks), not chunks or chunks[-1] + 1 - chunks[0] == len(chunks)


class _FullyShardedHead:
    """Gradients of a head that fully_shard divides, where none is really divided: they are left for
    later or made by the backward pass."""

    def __init__(self, gradients: WeightGradients) -> None:
        self.gradients = gradients

    def elsewhere(self, owner: nn.Module, weight: Callable[[], Tensor]) -> Elsewhere | None:
        late = self.gradients.late(weight)
        return late and self.gradients.elsewhere(owner, weight)


class StageMeter:
    """Measures stages of one run on tensor-parallel rank 0, which holds the most vocabulary."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        with torch.device("meta"):
            layers = Transformer(config.model).blocks
        self._kinds = {f"blocks.{layer}": signature(block) for layer, block in layers.items()}
        self._measured: dict[Any, tuple[UnitProfile, ...]] = {}
        tp = config.parallel.tp
        self._axes: dict[str, Axis] = {"tp": _PlannedAxis(tp)} if tp > 1 else {}
        if config.parallel.sp:
            self._axes["sp"] = self._axes["tp"]
        if config.parallel.ep > 1:
            self._axes["ep"] = _PlannedAxis(config.parallel.ep)
        self._batch, self._terms = self._objective()

    def _objective(self) -> tuple[MicroBatch, list[Term]]:
        """A micro-batch of zeros as the objective sees it, and its loss terms."""
        training = self.config.training
        objective = build_objective(self.config.objective, self.config.model, batch=training.batch)
        tokens = torch.zeros(training.micro_batch, training.sequence_length + 1, dtype=torch.long)
        batch = objective.micro_batch(tokens, torch.zeros_like(tokens), range(len(tokens)))
        self.batch_bytes = sum(tensor.nbytes for tensor in batch.tensors())
        if not _dense_mask(self.config):
            batch = replace(batch, documents=None)
        return batch, objective.terms(objective.counts([batch]))

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of matrix products."""
        return self.config.precision.compute_dtype or self.config.precision.weight_dtype

    @property
    def residual_dtype(self) -> torch.dtype:
        """Of what crosses stages."""
        wide = self.config.model.wide_residual
        return accumulation_dtype(self.compute_dtype) if wide else self.compute_dtype

    def edge_bytes(self, edge: Edge) -> int:
        """One tensor [B, S, D] between two stages, or the rows of it that are sent; S is this
        rank's share under sequence parallelism."""
        batch, length = self._batch.ids.shape
        share = self.config.parallel.tp if self.config.parallel.sp else 1
        whole = batch * (length // share) * self.config.model.hidden * self.residual_dtype.itemsize
        return int(whole * edge.share)

    def profile(self, units: Collection[str]) -> StageProfile:
        """The profile of a stage made of ``units``, run in the simplest way."""
        return self.stage_profile(*around(self.config.model, units))

    def stage_profile(
        self, placement: Placement, number: int, driving: Driving = WHOLE,
        existing: frozenset[str] = frozenset(),
    ) -> StageProfile:  # fmt: skip
        """The profile of a stage of ``placement``.  ``existing``: logical names of parameters
        that have a gradient before this stage's first backward pass."""
        wiring = stage_wiring(placement, number)
        names = [unit_name(unit) for unit, _, _ in wiring.steps]
        short, stands_for = self._shortened(wiring, names)
        kinds = [self._kind(unit) for unit, _, _ in short.steps]
        key = (_key(short, kinds), driving, existing)
        if key not in self._measured:
            self._measured[key] = self._measure(placement, number, short, driving, existing)
        measured = self._measured[key]
        profiles = (
            measured[place].named(f"{module_name(self.config.model, name)}.")
            for name, place in zip(names, stands_for, strict=True)
        )
        return StageProfile(tuple(names), tuple(profiles))

    def _kind(self, unit: Unit) -> Any:
        """Equal for units that compute the same."""
        if unit.kind == HEAD:
            return "head", tuple(type(term) for term in self._terms_of(unit.index))
        name = unit_name(unit)
        return self._kinds.get(name, name)

    def _terms_of(self, depth: int) -> list[Term]:
        return [term for term in self._terms if term.depth == depth]

    def _shortened(self, wiring: Wiring, names: Sequence[str]) -> tuple[Wiring, list[int]]:
        """Of equal blocks in a row just the first, the second and the last, and for every step of
        ``wiring`` the remaining one that stands for it."""
        steps: list[Step] = []
        stands_for: list[int] = []
        skipped: dict[Port, Port] = {}

        def kind(place: int) -> Any:
            unit, _, out = wiring.steps[place]
            in_row = unit.kind == BLOCK and len(out) == 1 and not out[0].chunks
            return self._kinds.get(names[place], names[place]) if in_row else place

        for _, group in groupby(range(len(names)), key=kind):
            places = list(group)
            measured = sorted({0, 1, len(places) - 1} & set(range(len(places))))
            for i, place in enumerate(places):
                unit, port, out = wiring.steps[place]
                port = port and skipped.get(port, port)
                if i in measured:
                    stands_for.append(len(steps))
                    steps.append((unit, port, out))
                else:
                    assert port is not None
                    stands_for.append(stands_for[-1])
                    skipped[out[0]] = port
        return replace(wiring, steps=tuple(steps)), stands_for

    def _measure(
        self, placement: Placement, number: int, wiring: Wiring, driving: Driving,
        existing: frozenset[str],
    ) -> tuple[UnitProfile, ...]:  # fmt: skip
        names = [unit_name(unit) for unit, _, _ in wiring.steps]
        with fused_attention(), bound(self._axes):
            weights = ShardedWeights(self._build(names), False)
            if driving.split:
                split_linear_maps(weights.model, weights.gradients)
            for module in weights.model.modules():
                if isinstance(module, MoE):
                    module.begin_step(self._batch.ids.numel())
            head = weights.model.head
            if head is not None:
                head.chunk_rows = self._batch.ids.numel()  # chunks are measured apart
                if self.config.parallel.fsdp > 1 and not self.config.model.tie_embeddings:
                    head.weight_gradients = _FullyShardedHead(weights.gradients)
            stage = ObservedStage(weights, self.compute_dtype, placement, number)
            stage.wiring = wiring
            batch = self._batch.map(lambda x: x.to("meta"))
            first = stage.observe(batch, self._terms, driving, existing)
            later = stage.observe(batch, self._terms, driving)
            for run in (*first, *later):
                if run.rows:
                    self._chunked(stage, run, driving)
        modules = [f"{module_name(self.config.model, name)}." for name in names]
        return tuple(map(unit_profile, modules, first, later))

    def _build(self, units: Sequence[str]) -> Transformer:
        """The stage in the order of ``parallel.apply``, with plain local parameters."""
        config, parallel = self.config, self.config.parallel
        backend: AttentionBackend = "sdpa"  # keeps q, k, v, output and row statistics, as all do
        with torch.device("meta"):
            stage = Transformer(config.model, units, backend)
        plans = parameter_plans(stage, parallel.sp)
        stored, compute = config.precision.weight_dtype, config.precision.compute_dtype
        together = gathered_together(stage) if parallel.fsdp > 1 else {}
        for prefix, module in stage.named_modules():
            for key in [key for key, _ in module.named_parameters(recurse=False)]:
                name = f"{prefix}.{key}" if prefix else key
                narrow = compute is not None and together.get(name, ("", False))[1]
                dtype = compute if narrow else stored
                shape = plans[name].local_shape(parallel.tp, parallel.ep)
                setattr(module, key, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")))
        if parallel.tp > 1:
            add_region_edges(stage)
        if parallel.tp > 1 or compute is not None:
            compute_on_local(stage, compute)
        for block in blocks(stage):
            apply_recompute(block, parallel.recompute)
        return stage

    def _chunked(self, stage: ObservedStage, run: UnitRun, driving: Driving) -> None:
        """Put in what a head needs when its rows go through it chunk by chunk."""
        creates = run.created[0] or run.created[2]
        workspace, weight = self._head_chunks(stage, run, driving, not creates)
        run.forward = run.beside_chunks + workspace
        if run.weight:
            run.weight = weight

    def _head_chunks(
        self, stage: ObservedStage, run: UnitRun, driving: Driving, gradient: bool
    ) -> tuple[int, int]:
        """The most that the chunked loss holds beyond its results, and that the weight gradient
        which it leaves over takes beyond those: measured on three chunks.  ``gradient``: there is
        one already."""
        model, parallel, head = self.config.model, self.config.parallel, stage.model.head
        late = Kind.HEAD_WEIGHT in driving.kinds
        assert head is not None
        matrix, device = head.matrix(), device_type(self.config)
        chunk = HeadOptions(model.vocab_size).rows_per_chunk(matrix.shape[0], device)
        rows = run.rows if run.rows <= 3 * chunk else 2 * chunk + (run.rows % chunk or chunk)
        share = parallel.tp if parallel.sp else 1
        terms = self._terms_of(run.depth)
        views = common_views(terms)
        rows = -(-rows // (share * views)) * share
        fields = {
            name: torch.empty(views, rows, dtype=value.dtype, device="meta")
            for name, value in self._batch.fields.items()
        }
        head.chunk_rows = chunk
        shape = (views, rows // share, model.hidden)
        x = torch.empty(shape, dtype=self.residual_dtype, device="meta")
        x.requires_grad_()
        matrix.grad = torch.empty_like(matrix) if gradient else None
        present = [x, *fields.values(), matrix]
        present += [] if matrix.grad is None else [matrix.grad]
        later = stage.weights.gradients
        nothing: AbstractContextManager[list[Owed]] = nullcontext([])
        with Allocations(present) as memory, later.collect() if late else nothing as owed:
            result = head(x, fields, terms)
            workspace = memory.peak - memory.live
        del result
        with memory:
            before = memory.live
            memory.restart()
            later.add(owed)
            return workspace, memory.peak - before
