"""Bytes per rank of a run's actual layout, from the config alone.

Weights, gradients and optimizer state are counted exactly as ``parallel.apply`` stores them (each
``fully_shard`` block padded to whole rows).  Activations and workspace come from
``pretrain.activations``; how many micro-batches they are held for comes from the schedule's action
lists.  Not counted: scratch memory inside kernels, communication libraries, fragmentation, and
what the framework itself takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from models.transformer import Transformer, logical_name
from parallel.gradients import BUCKET_BYTES, exchange_bytes
from parallel.pipeline.actions import HW, Kind, Schedule, W
from parallel.pipeline.units import Placement
from parallel.tensor import parameter_plans

from .activations import StageMeter, device_type, gathered_together
from .config import RunConfig
from .observed import Driving
from .optimizer_config import Rule, parameter_rules
from .placement import rank_units, shared_hosts
from .step_memory import Edges, StepWalk, receive_buffers

STEP_BYTES = 4  # AdamW counts steps in one float32 per parameter


@dataclass(frozen=True)
class StoredParameter:
    """One parameter on a rank of the tensor and expert axes.

    shape: this rank's part before ``fully_shard``.  gathered_with: what ``fully_shard`` divides
    along dimension 0 and gathers as one has the same name here; None where it divides nothing.
    narrow: gathered in the compute dtype.  partial: its gradient is summed over the tensor axis.
    divided: over the expert axis, so that its gradient is summed over fewer data ranks.
    rule: how it is updated.
    """

    name: str
    shape: tuple[int, ...]
    gathered_with: str | None
    narrow: bool
    partial: bool
    divided: bool
    rule: Rule

    @property
    def trained(self) -> bool:
        return self.rule.method != "frozen"

    @property
    def sharded(self) -> bool:
        return self.gathered_with is not None

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


def stored_parameters(config: RunConfig, units: Iterable[str]) -> list[StoredParameter]:
    """Every parameter of a rank with these units, in the order of ``named_parameters``.  One that
    several units use is there once."""
    parallel = config.parallel
    with torch.device("meta"):
        part = Transformer(config.model, set(units))
    together = gathered_together(part) if parallel.fsdp > 1 else {}
    rules = parameter_rules(part, config.optimizer)
    found = []
    for name, plan in parameter_plans(part, parallel.sp).items():
        gathered_with, narrow = together.get(name, (None, False))
        logical = logical_name(name, config.model)
        shape = plan.local_shape(parallel.tp, parallel.ep)
        found.append(
            StoredParameter(
                logical, shape, gathered_with, narrow, plan.partial,
                plan.expert and parallel.ep > 1, rules[logical],
            )
        )  # fmt: skip
    return found


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the largest rank of one pipeline position.

    weights, gradients, optimizer: between backward pass and update, exactly.  gathered: whole
    weights, not yet reduced gradients and copies under ``fully_shard``.  activations: the most that
    is kept for backward passes and for weight gradients that follow them.  workspace: the most
    beyond that in one action (chunk of logits, recomputed block, gradients under way).  buffers:
    tensors received and sent between stages, token batches.  reduction: copies while gradients are
    summed.  in_flight: micro-batches between forward and backward, per stage held.  peak: the most
    at one instant, less than the sum because these do not coincide.
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
    assert schedule.placement == placement
    data_size = config.parallel.replicas(world_size) * config.parallel.fsdp
    hosts = {name: len(ranks) for name, ranks in shared_hosts(config.model, placement).items()}
    meter, driving = StageMeter(config), _driving(schedule)
    return [
        _Rank(config, schedule, rank, meter, driving).memory(data_size, hosts)
        for rank in range(placement.num_ranks)
    ]


def _driving(schedule: Schedule) -> list[Driving]:
    """How each stage is run."""
    kinds: list[set[Kind]] = [set() for _ in schedule.placement.stages]
    for order in schedule.compute_orders():
        for action in order:
            kinds[action.stage].add(action.kind)
    split = any(found & {W, HW} for found in kinds)
    return [Driving(frozenset(found), split) for found in kinds]


def static_bytes(
    config: RunConfig, parameters: Iterable[StoredParameter], fsdp_rank: int = 0
) -> tuple[int, int, int]:
    """(weights, gradients, optimizer state) of one rank."""
    fsdp, size = config.parallel.fsdp, config.precision.weight_dtype.itemsize
    parameters = list(parameters)
    weights = sum(p.stored(fsdp) for p in parameters) * size
    gradients = sum(p.stored(fsdp) for p in parameters if p.trained) * size
    moments = sum(p.owned(fsdp, fsdp_rank) * len(p.rule.moments) for p in parameters) * size
    steps = STEP_BYTES * sum(p.rule.method == "adamw" for p in parameters)
    return weights, gradients, moments + steps


class _Rank:
    """One pipeline position and its parameters."""

    def __init__(
        self, config: RunConfig, schedule: Schedule, rank: int, meter: StageMeter,
        driving: Sequence[Driving],
    ) -> None:  # fmt: skip
        self.config, self.schedule, self.rank = config, schedule, rank
        self.meter, self.driving = meter, driving
        self.parameters = stored_parameters(config, rank_units(schedule.placement, rank))
        precision = config.precision
        self.size = precision.weight_dtype.itemsize
        self.compute_size = (precision.compute_dtype or precision.weight_dtype).itemsize

    def memory(self, data_size: int, hosts: Mapping[str, int]) -> RankMemory:
        """``data_size``: ranks that gradients are summed over; ``hosts``: pipeline ranks that hold
        a parameter, where there are several."""
        weights, gradients, optimizer = static_bytes(self.config, self.parameters)
        edges = Edges(self.schedule, self.rank, self.meter)
        walk = StepWalk(
            self.schedule, self.rank, self.meter, self.driving, self.gradient_bytes, edges
        )
        peaks, gathered = walk.peaks(), self._gathered_weights()
        buffers = receive_buffers(self.schedule, self.rank, edges)
        # token batches of this step and the next
        buffers += 2 * self.schedule.num_microbatches * self.meter.batch_bytes
        reduction = self._reduction(data_size, hosts)
        most = max(gathered + peaks.together, gradients + reduction)
        unreduced = sum(self.gradient_bytes.values())
        return RankMemory(
            pp_rank=self.rank,
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            gathered=gathered + unreduced - gradients,
            activations=peaks.activations,
            workspace=peaks.workspace,
            buffers=buffers + peaks.sent,
            reduction=reduction,
            in_flight=peaks.in_flight,
            peak=weights + optimizer + buffers + most,
        )

    @cached_property
    def gradient_bytes(self) -> dict[str, int]:
        """Bytes of each gradient from its first backward pass on.

        Where gathered weights are kept, sharded gradients are accumulated whole over micro-batches,
        and until weight gradients are made, and reduced in the last one; otherwise each one is
        reduced.
        """
        fsdp = self.config.parallel.fsdp
        return {
            p.name: (p.numel if self._accumulates_whole or not p.sharded else p.stored(fsdp))
            * self.size
            * p.trained
            for p in self.parameters
        }

    @property
    def _accumulates_whole(self) -> bool:
        several = self.schedule.num_microbatches > 1 or any(d.split for d in self.driving)
        return several and not self.config.parallel.reshard_after_forward

    def _gathered_weights(self) -> int:
        """Whole weights of fully sharded units and the copies that their collectives make."""
        fsdp = self.config.parallel.fsdp
        weights: dict[str, int] = {}
        copies: dict[str, int] = {}
        for p in self.parameters:
            if p.gathered_with is not None:
                size = self.compute_size if p.narrow else self.size
                whole = p.stored(fsdp) * fsdp
                weights[p.gathered_with] = weights.get(p.gathered_with, 0) + whole * size
                reduced = p.trained * whole * self.size + (
                    0 if self._accumulates_whole else whole * size
                )
                copied = max(whole * size, reduced)
                copies[p.gathered_with] = copies.get(p.gathered_with, 0) + copied
        if not weights:
            return 0
        passing = self.config.parallel.reshard_after_forward
        return (max if passing else sum)(weights.values()) + max(copies.values())

    def _reduction(self, data_size: int, hosts: Mapping[str, int]) -> int:
        """Copies of gradients while they are summed over data, tensor and hosting ranks."""
        trained = [p for p in self.parameters if p.trained]
        whole = [p for p in trained if not p.sharded]
        over_data = [p.numel * self.size for p in whole if not p.divided]
        over_replicas = [p.numel * self.size for p in whole if p.divided]
        fsdp = self.config.parallel.fsdp
        own = {p.name: p.owned(fsdp, 0) * self.size for p in trained}
        over_tensor = [own[p.name] for p in trained if p.partial]
        part = exchange_bytes(device_type(self.config))
        return max(
            bucket_bytes(over_data) if data_size > 1 else 0,
            bucket_bytes(over_replicas) if data_size > self.config.parallel.ep else 0,
            bucket_bytes(over_tensor) if self.config.parallel.tp > 1 else 0,
            # in parts, one after another: what every other host sends
            max(
                (
                    min(own[name], part) * (count - 1)
                    for name, count in hosts.items()
                    if name in own
                ),
                default=0,
            ),
        )


def bucket_bytes(gradients: Iterable[int]) -> int:
    """What the buckets of a reduction copy: all of them are in flight at once, and a gradient that
    is alone in its bucket is reduced in place."""
    copied = room = members = 0
    first = 0
    for size in gradients:
        if size > room:
            members, room, first = 0, BUCKET_BYTES, size
        room -= size
        members += 1
        if members == 2:
            copied += first
        if members >= 2:
            copied += size
    return copied
