"""The compute actions of a placement with their costs and dependencies, and how long they take.

Planners time thousands of orders; so each (stage, kind) is resolved once into an ``Op`` whose
inputs and outputs are numbered slots.  A slot is one tensor of ``actions.reads`` and ``writes``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from parallel.pipeline.actions import (
    HW,
    Action,
    Kind,
    TensorId,
    channel_of,
    reader,
    reads,
    writes,
)
from parallel.pipeline.cost import INSTANT, CostTable, Network
from parallel.pipeline.lowering import ScheduleError
from parallel.pipeline.units import Placement


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """A tensor on its way to another rank: it occupies its link for ``duration`` and arrives
    ``latency`` later."""

    slot: int
    peer: int
    link: int
    duration: float
    latency: float


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One compute action, of any micro-batch: the slots it reads, those it writes for its own rank,
    and what it sends."""

    stage: int
    kind: Kind
    rank: int
    duration: float
    inputs: tuple[int, ...]
    kept: tuple[int, ...]
    sent: tuple[Transfer, ...]


Step = tuple[Op, int]  # an op and its micro-batch
Span = tuple[float, float]  # start and end
Arrival = tuple[float, int, int]  # time, slot, micro-batch


class Program:
    """All ops of a placement under a cost table.

    ``split_heads``: the head-only stages whose weight gradient is an action of its own (HW).
    """

    def __init__(
        self,
        placement: Placement,
        costs: CostTable,
        network: Network = INSTANT,
        split_heads: Collection[int] = (),
    ) -> None:
        self.placement, self.network = placement, network
        self.stage_costs = [costs.stage(placement, s) for s in range(placement.num_stages)]
        self.split_heads = frozenset(split_heads)
        self.tensors: list[TensorId] = []  # by slot, of micro-batch 0
        self.sizes: list[float] = []  # bytes, by slot
        self._slots: dict[TensorId, int] = {}
        self._links: dict[tuple[str, int, int], int] = {}
        self._ops: dict[tuple[int, Kind], Op] = {}
        self._edge_bytes = {
            (e.tensor, e.source, e.target): costs[e.producer].output_bytes * float(e.share)
            for e in placement.edges
        }

    def op(self, stage: int, kind: Kind) -> Op:
        """The op of a compute action."""
        found = self._ops.get((stage, kind))
        if found is None:
            action = Action(kind, stage, 0)
            rank, written = self.placement.ranks[stage], writes(self.placement, action)
            away = [self.placement.ranks[reader(tensor)] != rank for tensor in written]
            found = self._ops[stage, kind] = Op(
                stage=stage,
                kind=kind,
                rank=rank,
                duration=self.stage_costs[stage].duration(kind, stage in self.split_heads),
                inputs=tuple(map(self._slot, reads(self.placement, action))),
                kept=tuple(self._slot(t) for t, goes in zip(written, away) if not goes),
                sent=tuple(self._transfer(rank, t) for t, goes in zip(written, away) if goes),
            )
        return found

    def steps(self, orders: Iterable[Iterable[Action]]) -> list[list[Step]]:
        """Compute orders, resolved."""
        return [[(self.op(a.stage, a.kind), a.microbatch) for a in order] for order in orders]

    def _slot(self, tensor: TensorId) -> int:
        if tensor not in self._slots:
            self._slots[tensor] = len(self.tensors)
            self.tensors.append(tensor)
            edge = (tensor.name, tensor.source, tensor.target)
            self.sizes.append(self._edge_bytes.get(edge, 0.0))
        return self._slots[tensor]

    def _transfer(self, rank: int, tensor: TensorId) -> Transfer:
        slot, peer = self._slot(tensor), self.placement.ranks[reader(tensor)]
        name = (channel_of(self.placement, tensor), rank, peer)
        link = self._links.setdefault(name, len(self._links))
        duration = self.sizes[slot] / self.network.bandwidth
        return Transfer(slot, peer, link, duration, self.network.latency)


def stages_with_split_heads(orders: Iterable[Iterable[Action]]) -> frozenset[int]:
    """The head-only stages that have HW actions."""
    return frozenset(action.stage for order in orders for action in order if action.kind is HW)


class Execution:
    """Every rank's steps run in order, each as soon as its inputs are there.

    Transfers run beside the steps, one at a time on each link.  ``spans[rank][i]`` belongs to step
    i; ``arrivals[rank]`` lists what other ranks sent, if ``record`` asks for it.
    ``ScheduleError`` when a rank waits for a tensor that never comes.
    """

    def __init__(
        self, program: Program, orders: Sequence[Sequence[Step]], record: bool = False
    ) -> None:
        self.program, self.orders, self.record = program, orders, record
        self.spans: list[list[Span]] = [[] for _ in orders]
        self.arrivals: list[list[Arrival]] = [[] for _ in orders]
        self._clock = [0.0] * len(orders)
        count = 1 + max((microbatch for order in orders for _, microbatch in order), default=-1)
        self._there = [[-1.0] * count for _ in program.tensors]  # by slot, then micro-batch
        self._waiting: dict[int, tuple[int, int]] = {}  # by slot: micro-batch and rank
        self._link_free: dict[int, float] = {}
        self._runnable = list(range(len(orders)))
        while self._runnable:
            self._advance(self._runnable.pop())
        self._require_finished()

    @property
    def makespan(self) -> float:
        return max(self._clock, default=0.0)

    def _advance(self, rank: int) -> None:
        order, spans, there = self.orders[rank], self.spans[rank], self._there
        now = self._clock[rank]
        for position in range(len(spans), len(order)):
            op, microbatch = order[position]
            start = now
            for slot in op.inputs:
                arrival = there[slot][microbatch]
                if arrival < 0:
                    self._waiting[slot] = (microbatch, rank)
                    self._clock[rank] = now
                    return
                if arrival > start:
                    start = arrival
            now = start + op.duration
            spans.append((start, now))
            for slot in op.kept:
                there[slot][microbatch] = now
            for transfer in op.sent:
                self._send(transfer, microbatch, now)
        self._clock[rank] = now

    def _send(self, transfer: Transfer, microbatch: int, now: float) -> None:
        slot = transfer.slot
        if transfer.duration:
            now = max(now, self._link_free.get(transfer.link, 0.0)) + transfer.duration
            self._link_free[transfer.link] = now
        now += transfer.latency
        self._there[slot][microbatch] = now
        if self.record:
            self.arrivals[transfer.peer].append((now, slot, microbatch))
        if slot in self._waiting and self._waiting[slot][0] == microbatch:
            self._runnable.append(self._waiting.pop(slot)[1])

    def _require_finished(self) -> None:
        for slot, (microbatch, rank) in self._waiting.items():
            op, of = self.orders[rank][len(self.spans[rank])]
            tensor = self.program.tensors[slot]._replace(microbatch=microbatch)
            action = Action(op.kind, op.stage, of)
            raise ScheduleError(f"rank {rank} never gets {tensor} for {action}; check it first")
