"""Event simulation of a schedule under a cost table: time, bubbles and memory, without a device.

Compute actions of a rank run one after another in list order.  Transfers run beside them: a tensor
arrives after the latency and its bytes over the bandwidth, one at a time on each link and channel,
and only the action that reads it waits.  Parameter actions (UNSHARD, RESHARD, REDUCE, STEP) are
taken as fully overlapped and cost nothing.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from parallel.pipeline.actions import (
    COMPUTE,
    HW,
    Action,
    B,
    F,
    Kind,
    Schedule,
    TensorId,
    W,
    reads,
    writes,
)
from parallel.pipeline.cost import CostTable
from parallel.pipeline.lowering import ScheduleError
from parallel.pipeline.timeline import Event


@dataclass(frozen=True)
class Simulation:
    """Result of one simulated step; per-rank tuples are indexed by rank.

    ``peak_bytes`` counts parameters and the activations kept between forward and backward.
    """

    makespan: float
    busy: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    peak_bytes: tuple[float, ...]
    events: tuple[Event, ...]

    @property
    def bubble(self) -> tuple[float, ...]:
        """The idle fraction of each rank."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """The idle fraction of all ranks together."""
        return sum(self.bubble) / len(self.bubble)


class _Run:
    """The state of one simulation."""

    def __init__(
        self, schedule: Schedule, costs: CostTable, latency: float, bandwidth: float
    ) -> None:
        self.schedule, self.latency, self.bandwidth = schedule, latency, bandwidth
        placement = self.placement = schedule.placement
        self.stage_costs = [costs.stage(placement, s) for s in range(placement.num_stages)]
        self.edge_bytes = {
            (e.tensor, e.source, e.target): costs[e.producer].output_bytes * float(e.share)
            for e in placement.edges
        }
        self.split = {a.stage for order in schedule.compute_orders() for a in order if a.kind is HW}
        ranks = len(schedule.actions)
        self.position = [0] * ranks
        self.clock = [0.0] * ranks
        self.arrival: list[dict[TensorId, float]] = [{} for _ in range(ranks)]
        self.link_free: dict[tuple[str, int, int], float] = {}
        self.waiting: list[TensorId | None] = [None] * ranks
        self.runnable = deque(range(ranks))
        self.events: list[Event] = []

    def run(self) -> None:
        while self.runnable:
            rank = self.runnable.popleft()
            actions = self.schedule.actions[rank]
            while self.position[rank] < len(actions) and self.step(rank, actions):
                self.position[rank] += 1
        for rank, actions in enumerate(self.schedule.actions):
            if self.position[rank] < len(actions):
                action, tensor = actions[self.position[rank]], self.waiting[rank]
                raise ScheduleError(f"rank {rank} never gets {tensor} for {action}; check it first")

    def step(self, rank: int, actions: tuple[Action, ...]) -> bool:
        """Run the rank's next action if what it reads is known; otherwise remember that."""
        action = actions[self.position[rank]]
        if action.kind is Kind.RECV:  # posted, not waited for
            return True
        needed = reads(self.placement, action)
        start = self.clock[rank]
        for tensor in needed:
            if tensor not in self.arrival[rank]:
                self.waiting[rank] = tensor
                return False
            start = max(start, self.arrival[rank][tensor])
        if action.kind is Kind.SEND:
            self.send(rank, action)
        elif action.kind in COMPUTE:
            split = action.stage in self.split
            end = start + self.stage_costs[action.stage].duration(action.kind, split)
            self.clock[rank] = end
            self.events.append(Event(rank, action, start, end))
            for tensor in writes(self.placement, action):
                self.arrival[rank][tensor] = end
        return True

    def send(self, rank: int, action: Action) -> None:
        tensor = action.tensor
        assert tensor is not None
        link = (action.channel, rank, action.peer)
        size = self.edge_bytes[tensor.name, tensor.source, tensor.target]
        start = max(self.arrival[rank][tensor], self.link_free.get(link, 0.0))
        self.link_free[link] = start + size / self.bandwidth
        self.arrival[action.peer][tensor] = self.link_free[link] + self.latency
        if self.waiting[action.peer] == tensor:
            self.waiting[action.peer] = None
            self.runnable.append(action.peer)


def simulate(
    schedule: Schedule, costs: CostTable, latency: float = 0.0, bandwidth: float = math.inf
) -> Simulation:
    """Simulate one step.  ``latency`` is in the cost table's time unit, ``bandwidth`` in bytes per
    such unit.  ``ScheduleError`` when the schedule cannot finish."""
    if latency < 0 or bandwidth <= 0:
        raise ValueError(f"latency {latency} and bandwidth {bandwidth} cannot be so small")
    run = _Run(schedule, costs, latency, bandwidth)
    run.run()
    ranks = range(len(schedule.actions))
    by_rank = [[event for event in run.events if event.rank == rank] for rank in ranks]
    memory = [_peaks(run, rank, by_rank[rank]) for rank in ranks]
    return Simulation(
        makespan=max((event.end for event in run.events), default=0.0),
        busy=tuple(sum(event.end - event.start for event in events) for events in by_rank),
        peak_in_flight=tuple(count for count, _ in memory),
        peak_bytes=tuple(size for _, size in memory),
        events=tuple(run.events),
    )


def _peaks(run: _Run, rank: int, events: list[Event]) -> tuple[int, float]:
    """The most (stage, micro-batch) pairs kept for their backward, and the most bytes at once."""
    parameters = sum(
        run.stage_costs[stage].parameter_bytes for stage in run.placement.stages_of(rank)
    )
    count = most_count = 0
    size = most_size = 0.0
    trains = not run.schedule.forward_only
    for event in events:
        kind, cost = event.action.kind, run.stage_costs[event.action.stage]
        if kind is F:
            count, size = count + 1, size + cost.activation_bytes
        most_count, most_size = max(most_count, count), max(most_size, size)
        if kind in (B, W) or (kind is F and not trains):
            count, size = count - 1, size - cost.activation_bytes
    return most_count, parameters + most_size
