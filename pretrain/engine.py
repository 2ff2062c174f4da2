"""Model, stages, schedule and executor of one rank, and the step that uses them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from models.config import ModelConfig
from models.losses import Term
from parallel.apply import BuildOptions, ParallelModel, build_parallel_model
from parallel.expert import ExpertLayers
from parallel.gradients import reduce_gradients, zero_gradients
from parallel.mesh import Mesh, ParallelConfig
from parallel.pipeline.actions import Kind, Schedule
from parallel.pipeline.checker import check_schedule
from parallel.pipeline.cost import INSTANT, CostTable, Network
from parallel.pipeline.executor import Executor
from parallel.pipeline.links import Links, create_links
from parallel.pipeline.schedules import Conditions, make_schedule
from parallel.pipeline.timeline import Event
from parallel.pipeline.units import HEAD, Placement
from parallel.split import split_linear_maps
from parallel.stage import MicroBatch, ShardedWeights, Stage

from .objectives.base import Objective
from .placement import cost_table, plan_pipeline, rank_units, shared_hosts
from .sequence_losses import BySequence


@dataclass
class StepResult:
    """losses: mean of each term over the global count.  total: the optimised scalar.  experts:
    figures of expert layers.  sequences: of an evaluation, each one's primary loss summed."""

    losses: dict[str, float]
    total: float
    counts: dict[str, int]
    experts: dict[str, float] = field(default_factory=dict)
    sequences: Tensor | None = None


@dataclass
class Recording:
    """One rank's recorded step.  seconds: of all its actions.  events: compute actions and waits
    for receives, by wall clock, so that those of several ranks can be drawn together."""

    micro_batches: int
    seconds: float
    events: list[Event]


def _by_wall_clock(events: Sequence[Event]) -> list[Event]:
    ahead = time.time() - time.perf_counter()
    return [replace(e, start=e.start + ahead, end=e.end + ahead) for e in events]


class Engine:
    """This rank's part of a training step under any layout."""

    def __init__(
        self,
        model: ParallelModel,
        parallel: ParallelConfig,
        placement: Placement,
        compute_dtype: torch.dtype,
        costs: CostTable | None = None,
        network: Network = INSTANT,
    ) -> None:
        self.model = model
        self.network = network
        self.costs = costs
        self.parallel = parallel
        self.compute_dtype = compute_dtype
        self.weights = ShardedWeights(model.part, parallel.reshard_after_forward)
        self.experts = ExpertLayers(model)
        self.recording: Recording | None = None
        self._links: Links | None = None
        self.place(placement)
        if parallel.pipeline.splits_weight_gradients:
            split_linear_maps(model.part, self.weights.gradients)

    def place(self, placement: Placement, costs: CostTable | None = None) -> None:
        """Run this placement from the next step on; every rank calls it.

        Each rank must hold the same weights as before: head chunks may move between ranks that
        already have heads, everything else stays.  ``costs``: better ones than known so far, the
        same on every rank; the schedule is fitted to them.
        """
        self.costs = costs or self.costs
        rank = self.model.mesh.rank("pp")
        assert rank_units(placement, rank) == self.model.part.units, "a unit changed its rank"
        self.placement = placement
        self.stages = {
            number: Stage(self.weights, self.compute_dtype, placement, number)
            for number in placement.stages_of(rank)
        }
        self.weights.forget()
        self._executors: dict[int, Executor] = {}

    def schedule(self, micro_batches: int) -> Schedule:
        """The actions of a step of so many micro-batches."""
        keeps_weights = self.model.mesh.size("fsdp") > 1 and not self.parallel.reshard_after_forward
        pipeline = self.parallel.pipeline
        conditions = Conditions(self.costs, self.network, pipeline.max_in_flight)
        return make_schedule(
            pipeline.schedule, self.placement, micro_batches, conditions, sharded=keeps_weights
        )

    def _make_links(self, schedule: Schedule) -> Links:
        """What the schedule needs and is not there yet; collective."""
        mesh = self.model.mesh
        if mesh.size("pp") == 1:
            return Links(0, (0,), {}, mesh.device)
        assert mesh.device_mesh is not None
        pipelines = mesh.device_mesh.mesh.reshape(mesh.size("pp"), -1).T.tolist()
        timeout = timedelta(minutes=self.parallel.timeout_minutes)
        return create_links(schedule, pipelines, mesh.device, timeout, self._links)

    def executor(self, micro_batches: int) -> Executor:
        """The checked action lists for this number of micro-batches, prepared once."""
        if micro_batches not in self._executors:
            schedule = self.schedule(micro_batches)
            check_schedule(schedule)
            orders = schedule.compute_orders()
            split = {a.stage for order in orders for a in order if a.kind is Kind.HEAD_WEIGHT}
            for number, stage in self.stages.items():
                # Whether head weights are made apart is a property of the schedule's kind.
                assert not self._executors or stage.split_head == (number in split)
                stage.split_head = number in split
            self._links = self._make_links(schedule)
            timeout = 60 * self.parallel.timeout_minutes
            self._executors[micro_batches] = Executor(
                schedule, self.stages, self._links, timeout=timeout
            )
        return self._executors[micro_batches]

    def forward_backward(
        self, batches: Sequence[MicroBatch], objective: Objective, record: bool = False
    ) -> StepResult:
        """Accumulate and reduce every gradient of one step (gradients are zeroed first).

        ``record``: keep the times of its actions in ``recording``.
        """
        zero_gradients(self.model)
        counts = self._counts(batches, objective)
        terms = self._begin(batches, objective.terms(counts))
        executor = self.executor(len(batches))
        executor.record = record
        begin = time.perf_counter()
        executor.run()
        if record:
            seconds = time.perf_counter() - begin
            self.recording = Recording(len(batches), seconds, _by_wall_clock(executor.events))
        reduce_gradients(self.model)
        result = self._result(counts, {term.name: term.normalizer for term in terms})
        if self.experts.all:
            report = self.experts.report()
            result.losses |= report.losses
            result.total += report.total
            result.experts = report.figures
        return result

    @torch.no_grad()
    def evaluate(
        self, batches: Sequence[MicroBatch], objective: Objective, sequences: int
    ) -> StepResult:
        """Losses of these batches, and of each of the ``sequences`` that their field of that name
        numbers; no gradient, no change of state."""
        counts = self._counts(batches, objective)
        sums = torch.zeros(sequences + 1, dtype=torch.float64, device=self.model.mesh.device)
        terms: list[Term] = [
            BySequence(term, sums) if term.name == objective.primary else term
            for term in objective.evaluation_terms(counts)
        ]
        self._begin(batches, terms)
        self.executor(len(batches)).run_forward()
        result = self._result(counts, {term.name: term.normalizer for term in terms})
        result.sequences = self.sum_over(("data", "pp"), sums[:-1])
        if self.experts.all:
            result.experts = self.experts.report().figures
        return result

    def _begin(self, batches: Sequence[MicroBatch], terms: list[Term]) -> list[Term]:
        for stage in self.stages.values():
            stage.begin(batches, terms)
        return terms

    def _counts(self, batches: Sequence[MicroBatch], objective: Objective) -> dict[str, int]:
        """What the losses of the global batch are divided by; expert layers are told."""
        counts = objective.counts(batches)
        if self.experts.all:
            counts["slots"] = sum(batch.ids.numel() for batch in batches)
        counts = self.global_counts(counts)
        if self.experts.all:
            self.experts.begin_step(counts["slots"])
        return counts

    def global_counts(self, counts: dict[str, int]) -> dict[str, int]:
        """Sum over data ranks, before any backward pass."""
        group = self.model.mesh.group("data")
        if group is None:
            return counts
        values = torch.tensor(list(counts.values()), device=self.model.mesh.device)
        dist.all_reduce(values, group=group)
        return dict(zip(counts, values.tolist(), strict=True))

    def sum_over(self, axes: Sequence[str], values: Tensor) -> Tensor:
        """``values``, summed in place over the ranks of these axes."""
        for axis in axes:
            group = self.model.mesh.group(axis)
            if group is not None:
                dist.all_reduce(values, group=group)
        return values

    def _result(self, counts: dict[str, int], normalizers: dict[str, float]) -> StepResult:
        """Loss sums live where the head is; every rank learns them."""
        mesh = self.model.mesh
        wide = torch.float64
        packed = torch.zeros(len(normalizers) + 1, dtype=wide, device=mesh.device)
        for stage in self.stages.values():
            if stage.total is not None:
                none = torch.zeros_like(stage.total)  # a term of a depth whose head is elsewhere
                values = [stage.total, *(stage.sums.get(name, none) for name in normalizers)]
                packed += torch.stack([v.to(wide) for v in values])
        total, *sums = self.sum_over(("data", "pp"), packed).tolist()
        losses = {
            name: value / normalizers[name] for name, value in zip(normalizers, sums, strict=True)
        }
        return StepResult(losses, total, counts)


def build_engine(
    config: ModelConfig,
    parallel: ParallelConfig,
    mesh: Mesh,
    options: BuildOptions,
    sequence_length: int,
    placement: Placement | None = None,
    micro_batches: int | None = None,
    micro_batch: int = 1,
) -> Engine:
    """Plan (unless a ``placement`` is given), build, shard and initialise this rank's part of the
    model.  ``micro_batches`` of a usual step, each of ``micro_batch`` sequences: what the plan is
    made for."""
    if placement is None:
        request, placement = plan_pipeline(
            config, parallel, sequence_length, micro_batches, micro_batch
        )
        costs, network = request.costs, request.network
    else:
        chunks = sum(unit.kind == HEAD and unit.index == 0 for unit in placement.units)
        rate = parallel.pipeline.flops_per_byte
        costs = cost_table(config, sequence_length, chunks, micro_batch, rate)
        network = INSTANT
    units, hosts = rank_units(placement, mesh.rank("pp")), shared_hosts(config, placement)
    model = build_parallel_model(config, parallel, mesh, options, units, hosts)
    dtype = options.compute_dtype or options.dtype
    return Engine(model, parallel, placement, dtype, costs, network)
