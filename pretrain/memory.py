"""Bytes per rank of a run's actual layout, from the config alone.

Weights, gradients and optimizer state are counted exactly as ``parallel.apply`` stores them (each
``fully_shard`` block padded to whole rows).  Activations and workspace come from
``pretrain.activations``; how many micro-batches they are held for comes from the schedule's action
lists.  Not counted: scratch memory inside kernels, communication libraries, fragmentation, and
what the framework itself takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from models.transformer import Transformer, logical_name
from parallel.gradients import _BUCKET_BYTES
from parallel.pipeline.actions import Action, B, F, Schedule
from parallel.pipeline.units import Placement
from parallel.stage import unit_name
from parallel.tensor import parameter_plans

from .activations import StageMeter, local_shape
from .config import RunConfig
from .placement import shared_hosts

STEP_BYTES = 4  # AdamW counts steps in one float32 per parameter
PREFETCH = 2  # receives that the executor posts ahead on every link


@dataclass(frozen=True)
class StoredParameter:
    """One parameter on a rank of the tensor axis.

    shape: this rank's part before ``fully_shard``.  sharded: ``fully_shard`` divides dimension 0.
    partial: its gradient is summed over the tensor axis.
    """

    name: str
    unit: str
    shape: tuple[int, ...]
    sharded: bool
    partial: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def rows(self, fsdp: int) -> int:
        """Rows of dimension 0 that are stored per rank, padding of an uneven split included."""
        return -(-self.shape[0] // fsdp) if self.sharded else self.shape[0]

    def stored(self, fsdp: int) -> int:
        return self.rows(fsdp) * math.prod(self.shape[1:])

    def owned(self, fsdp: int, rank: int) -> int:
        """Elements without padding, which the optimizer sees."""
        rows = self.rows(fsdp)
        start = rank * rows if self.sharded else 0
        return min(max(self.shape[0] - start, 0), rows) * math.prod(self.shape[1:])


def stage_parameters(config: RunConfig, units: Sequence[str]) -> list[StoredParameter]:
    """Every parameter of a stage, in the order of ``named_parameters``."""
    parallel = config.parallel
    with torch.device("meta"):
        stage = Transformer(config.model, units)
    found = []
    for name, plan in parameter_plans(stage, parallel.sp).items():
        parts = name.split(".")
        unit = ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]
        vocabulary = unit in ("embedding", "head") and not config.model.tie_embeddings
        sharded = parallel.fsdp > 1 and (parts[0] == "blocks" or vocabulary)
        logical = logical_name(name, config.model)
        shape = local_shape(plan, parallel.tp)
        found.append(StoredParameter(logical, unit, shape, sharded, plan.partial))
    return found


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the largest rank of one pipeline position.

    weights, gradients, optimizer: between backward pass and update, exactly.  gathered: whole
    weights, not yet reduced gradients and copies under ``fully_shard``.  activations: the most that
    is kept for backward passes.  workspace: the most beyond
    that in one action (chunk of logits, recomputed block, gradients under way).  buffers: tensors
    received and sent between stages, token batches.  reduction: copies while gradients are summed.
    in_flight: micro-batches between forward and backward, per stage held.  peak: the most at one
    instant, less than the sum because these do not coincide.
    """

    pp_rank: int
    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    workspace: int
    buffers: int
    reduction: int
    in_flight: int
    peak: int


def memory_per_rank(
    config: RunConfig, world_size: int, placement: Placement, schedule: Schedule
) -> list[RankMemory]:
    """One entry per pipeline rank, each for fsdp and tp rank 0: the others hold no more."""
    meter = StageMeter(config)
    return [
        _Rank(config, world_size, placement, rank, meter, schedule.num_microbatches).memory(
            schedule.actions[rank]
        )
        for rank in range(placement.num_ranks)
    ]


def stage_units(placement: Placement, pp_rank: int) -> dict[int, list[str]]:
    """Unit names of each stage of a pipeline rank."""
    return {
        stage: [unit_name(unit) for unit in placement.stages[stage]]
        for stage in placement.stages_of(pp_rank)
    }


def static_bytes(
    config: RunConfig, parameters: Iterable[StoredParameter], fsdp_rank: int = 0
) -> tuple[int, int, int]:
    """(weights, gradients, optimizer state) of one rank."""
    fsdp, size = config.parallel.fsdp, config.precision.weight_dtype.itemsize
    parameters = list(parameters)
    stored = sum(p.stored(fsdp) for p in parameters) * size
    owned = sum(p.owned(fsdp, fsdp_rank) for p in parameters) * size
    return stored, stored, 2 * owned + STEP_BYTES * len(parameters)


@dataclass
class _Peaks:
    """The most of everything that changes while a step runs."""

    activations: int = 0
    workspace: int = 0
    inputs: int = 0
    in_flight: int = 0
    together: int = 0


class _Rank:
    """One pipeline position: its parameters and the profiles of its stages."""

    def __init__(
        self, config: RunConfig, world_size: int, placement: Placement, rank: int,
        meter: StageMeter, micro_batches: int,
    ) -> None:  # fmt: skip
        self.config, self.placement, self.rank, self.meter = config, placement, rank, meter
        self.micro_batches = micro_batches
        self.data_size = config.parallel.replicas(world_size) * config.parallel.fsdp
        self.hosts = shared_hosts(config.model, placement)
        units = stage_units(placement, rank)
        self.parameters = {stage: stage_parameters(config, units[stage]) for stage in units}
        self.profiles = {stage: meter.profile(units[stage]) for stage in units}
        precision = config.precision
        self.size = precision.weight_dtype.itemsize
        self.compute_size = (precision.compute_dtype or precision.weight_dtype).itemsize

    def memory(self, actions: Iterable[Action]) -> RankMemory:
        parameters = [p for stage in self.parameters.values() for p in stage]
        weights, gradients, optimizer = static_bytes(self.config, parameters)
        peaks = self._walk(actions)
        gathered = self._gathered_weights(parameters)
        buffers = self._buffers()
        reduction = self._reduction(parameters)
        running = gathered + buffers + peaks.together
        unreduced = sum(sum(self._gradients(stage)) for stage in self.profiles)
        return RankMemory(
            pp_rank=self.rank,
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            gathered=gathered + unreduced - gradients,
            activations=peaks.activations,
            workspace=peaks.workspace,
            buffers=buffers + peaks.inputs,
            reduction=reduction,
            in_flight=peaks.in_flight,
            peak=weights + optimizer + max(running, gradients + reduction),
        )

    def _walk(self, actions: Iterable[Action]) -> _Peaks:
        """Follow the rank's action list; timing does not matter, its order is fixed."""
        peaks = _Peaks()
        kept = inputs = gradients = in_flight = 0
        created = {stage: self._gradients(stage) for stage in self.profiles}
        beyond = {stage: (p.forward_peak - p.kept, p.backward_peak(None))
                  for stage, p in self.profiles.items()}  # fmt: skip
        first = {stage: p.backward_peak(created[stage]) for stage, p in self.profiles.items()}
        for action in actions:
            if action.kind not in (F, B):
                continue
            stage, forward = action.stage, action.kind is F
            profile = self.profiles[stage]
            if forward:
                kept, inputs = kept + profile.kept, inputs + profile.input_bytes
                in_flight += 1
            # A stage's first backward pass creates its gradients.
            more = beyond[stage][0] if forward else first.pop(stage, beyond[stage][1])
            peaks.activations = max(peaks.activations, kept)
            peaks.inputs = max(peaks.inputs, inputs)
            peaks.in_flight = max(peaks.in_flight, in_flight)
            peaks.workspace = max(peaks.workspace, *beyond[stage])
            peaks.together = max(peaks.together, kept + inputs + gradients + more)
            if not forward:
                kept, inputs = kept - profile.kept, inputs - profile.input_bytes
                in_flight -= 1
                gradients += sum(created.pop(stage, ()))
                peaks.together = max(peaks.together, kept + inputs + gradients)
        return peaks

    def _gradients(self, stage: int) -> list[int]:
        """Bytes of each unit's gradients from its first backward pass on, in unit order.

        Where gathered weights are kept, sharded gradients of several micro-batches are accumulated
        whole and reduced in the last one; otherwise each one is reduced.  A tied matrix has its
        gradient once the embedding has run backward.
        """
        units = self.profiles[stage].units
        total = dict.fromkeys(units, 0)
        for p in self.parameters[stage]:
            whole = not p.sharded or self._accumulates_whole
            size = p.numel if whole else p.stored(self.config.parallel.fsdp)
            total[p.unit] += size * self.size
        return [total[unit] for unit in units]

    @property
    def _accumulates_whole(self) -> bool:
        return self.micro_batches > 1 and not self.config.parallel.reshard_after_forward

    def _gathered_weights(self, parameters: Iterable[StoredParameter]) -> int:
        """Whole weights of fully sharded units and the copies that their collectives make."""
        fsdp = self.config.parallel.fsdp
        weights: dict[str, int] = {}
        copies: dict[str, int] = {}
        for p in parameters:
            if p.sharded:
                size = self.compute_size if p.unit.startswith("blocks.") else self.size
                whole = p.stored(fsdp) * fsdp
                weights[p.unit] = weights.get(p.unit, 0) + whole * size
                reduced = whole * self.size + (0 if self._accumulates_whole else whole * size)
                copies[p.unit] = copies.get(p.unit, 0) + max(whole * size, reduced)
        if not weights:
            return 0
        passing = self.config.parallel.reshard_after_forward
        return (max if passing else sum)(weights.values()) + max(copies.values())

    def _buffers(self) -> int:
        """Receives posted ahead, the gradient in use and the one being sent; token batches of
        this step and the next."""
        count = 0
        ranks = self.placement.ranks
        for stage in self.profiles:
            incoming = [e for e in self.placement.inputs[stage] if ranks[e.source] != self.rank]
            outgoing = [e for e in self.placement.outputs[stage] if ranks[e.target] != self.rank]
            ahead = min(PREFETCH, self.micro_batches)
            count += len(incoming) * (ahead + 1) + len(outgoing) * (ahead + 1)
        return count * self.meter.boundary_bytes + 2 * self.micro_batches * self.meter.batch_bytes

    def _reduction(self, parameters: Sequence[StoredParameter]) -> int:
        """Copies of gradients while they are summed over data, tensor and hosting ranks."""
        over_data = [p.numel * self.size for p in parameters if not p.sharded]
        fsdp = self.config.parallel.fsdp
        over_tensor = [p.owned(fsdp, 0) * self.size for p in parameters if p.partial]
        shared = [p.numel * self.size for p in parameters if p.name in self.hosts]
        return max(
            bucket_bytes(over_data) if self.data_size > 1 else 0,
            bucket_bytes(over_tensor) if self.config.parallel.tp > 1 else 0,
            sum(shared) * 2,  # received and summed; a matrix has two hosts at most
        )


def bucket_bytes(gradients: Iterable[int]) -> int:
    """What the buckets of a reduction copy: all of them are in flight at once, and a gradient that
    is alone in its bucket is reduced in place."""
    copied = room = members = 0
    first = 0
    for size in gradients:
        if size > room:
            members, room, first = 0, _BUCKET_BYTES, size
        room -= size
        members += 1
        if members == 2:
            copied += first
        if members >= 2:
            copied += size
    return copied
