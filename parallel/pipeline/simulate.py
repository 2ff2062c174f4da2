"""Event simulation of a schedule under a cost table: time, bubbles and memory, without a device.

Compute actions of a rank run one after another in list order.  Transfers run beside them: a tensor
is sent when it is ready and arrives after its bytes over the bandwidth and the latency, one at a
time on each link and channel, and only the action that reads it waits.  Parameter actions (UNSHARD,
RESHARD, REDUCE, STEP) are taken as fully overlapped and cost nothing.  Ranks that hold copies of
shared weights add up their gradients behind the last action.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from parallel.pipeline.actions import HW, Action, B, F, H, Orders, Schedule, W
from parallel.pipeline.checker import peak_in_flight
from parallel.pipeline.cost import INSTANT, CostTable, Network
from parallel.pipeline.program import Execution, Program, stages_with_split_heads
from parallel.pipeline.timeline import Event
from parallel.pipeline.units import Placement


@dataclass(frozen=True)
class Simulation:
    """Result of one simulated step; per-rank tuples are indexed by rank.

    ``peak_in_flight`` counts (stage, micro-batch) pairs between forward and backward;
    ``peak_bytes`` parameters (hosted copies included), activations kept for backward, tensors
    received and not used up, and the workspace of the action that runs.  ``exchange``: time in
    which copies of shared weights add up their gradients, behind ``makespan``.
    """

    makespan: float
    busy: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    peak_bytes: tuple[float, ...]
    events: tuple[Event, ...]
    exchange: float = 0.0

    @property
    def step(self) -> float:
        """The time from the first action until every gradient is complete."""
        return self.makespan + self.exchange

    @property
    def bubble(self) -> tuple[float, ...]:
        """The idle fraction of each rank until the last action ends."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """The idle fraction of all ranks together."""
        return sum(self.bubble) / len(self.bubble)


def simulate(
    schedule: Schedule, costs: CostTable, latency: float = 0.0, bandwidth: float = math.inf
) -> Simulation:
    """Simulate one step.  ``latency`` is in the cost table's time unit, ``bandwidth`` in bytes per
    such unit.  ``ScheduleError`` when the schedule cannot finish."""
    network = Network(latency, bandwidth)
    return simulate_orders(schedule.placement, schedule.compute_orders(), costs, network)


def simulate_orders(
    placement: Placement, orders: Orders, costs: CostTable, network: Network = INSTANT
) -> Simulation:
    """The same for compute orders, to which lowering has not yet added transfers."""
    program = Program(placement, costs, network, stages_with_split_heads(orders))
    run = Execution(program, program.steps(orders), record=True)
    events = [
        Event(rank, action, *span)
        for rank, order in enumerate(orders)
        for action, span in zip(order, run.spans[rank], strict=True)
    ]
    return Simulation(
        makespan=run.makespan,
        busy=tuple(sum(end - start for start, end in spans) for spans in run.spans),
        peak_in_flight=tuple(peak_in_flight([a.kind for a in order]) for order in orders),
        peak_bytes=peak_bytes(run, orders, costs),
        events=tuple(sorted(events, key=lambda event: event.start)),
        exchange=costs.step_exchange(placement),
    )


def peak_bytes(run: Execution, orders: Orders, costs: CostTable) -> tuple[float, ...]:
    """The most bytes at once per rank; ``run`` has recorded arrivals."""
    parameters = costs.rank_parameters(run.program.placement)
    return tuple(
        parameters[rank] + _passing_bytes(run, rank, order) for rank, order in enumerate(orders)
    )


def _passing_bytes(run: Execution, rank: int, order: Sequence[Action]) -> float:
    """The most bytes at once beyond parameters."""
    program = run.program
    changes = []  # (time, bytes); where times are equal what is freed goes first
    used_at: dict[tuple[int, int], float] = {}
    trains = any(action.kind is not F for action in order)
    for action, (op, microbatch), (start, end) in zip(
        order, run.orders[rank], run.spans[rank], strict=True
    ):
        cost = program.stage_costs[action.stage]
        changes += [(start, cost.workspace_bytes), (end, -cost.workspace_bytes)]
        if action.kind in (F, H):
            changes.append((start, cost.activation_bytes))
        if _frees(action, trains, action.stage in program.split_heads):
            changes.append((end, -cost.activation_bytes))
        read = program.op(action.stage, H).inputs if action.kind is HW else op.inputs
        used_at.update(((slot, microbatch), end) for slot in read)
    for arrival, slot, microbatch in run.arrivals[rank]:
        size = program.sizes[slot]
        changes += [(arrival, size), (used_at[slot, microbatch], -size)]
    now = peak = 0.0
    for _, change in sorted(changes):
        now += change
        peak = max(peak, now)
    return peak


def _frees(action: Action, trains: bool, split_head: bool) -> bool:
    """Whether a stage lets go of its activations at the end of this action."""
    if action.kind is F:
        return not trains
    if action.kind is H:
        return not split_head
    return action.kind in (B, W, HW)
