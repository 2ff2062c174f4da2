"""Interleaved 1F1B, and heads run in the gaps of a given order."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from parallel.pipeline.actions import Action, B, F, H, Orders
from parallel.pipeline.program import Op, Program, Step


def microbatch_groups(num_microbatches: int, num_ranks: int) -> list[range]:
    """Groups of micro-batches that go through one virtual stage before the next one's turn.

    At least ``num_ranks`` per group where there are that many, and as even as possible: with a
    smaller last group the first rank would wait for itself through the others.
    """
    count = max(1, num_microbatches // num_ranks)
    size, larger = divmod(num_microbatches, count)
    groups, start = [], 0
    for group in range(count):
        end = start + size + (group < larger)
        groups.append(range(start, end))
        start = end
    return groups


def warm_up(forward: list[Action], backward: list[Action], ahead: int) -> list[Action]:
    """``ahead`` forward actions, then forward and backward in turn, then the other backwards."""
    ahead = min(ahead, len(forward))
    steady = len(forward) - ahead
    order = forward[:ahead]
    for pair in zip(forward[ahead:], backward[:steady]):
        order += pair
    return order + backward[steady:]


def interleaved_orders(
    stages: Sequence[Sequence[int]], num_microbatches: int, extra: int = 0
) -> Orders:
    """Interleaved 1F1B over ``stages[rank]``, the same number on every rank, stage after stage
    round the ranks.  ``extra``: forward actions more than needed before the first backward."""
    ranks, virtual = len(stages), len(stages[0])
    groups = microbatch_groups(num_microbatches, ranks)
    orders = []
    for rank, mine in enumerate(stages):
        forward = [Action(F, s, mb) for group in groups for s in mine for mb in group]
        backward = [Action(B, s, mb) for group in groups for s in mine[::-1] for mb in group]
        ahead = ranks - rank - 1
        if virtual > 1:
            ahead = 2 * ahead + (virtual - 1) * len(groups[0])
        orders.append(warm_up(forward, backward, ahead + extra))
    return orders


def insert_heads(
    program: Program, trunk: Sequence[Sequence[Step]], num_microbatches: int
) -> list[list[Step]] | None:
    """Orders in which every rank keeps to its ``trunk`` steps and runs its heads as soon as it is
    free and they can run; ``None`` when the trunk steps would wait for ever."""
    return _Insertion(program, trunk, num_microbatches).run()


class _Insertion:
    """Events in time: a rank is free, or what it waits for may have come."""

    def __init__(
        self, program: Program, trunk: Sequence[Sequence[Step]], num_microbatches: int
    ) -> None:
        placement, self.count = program.placement, num_microbatches
        self.trunk = trunk
        ranks = range(placement.num_ranks)
        self.heads: list[list[Op]] = [
            [program.op(s, H) for s in placement.stages_of(rank) if placement.head_only[s]]
            for rank in ranks
        ]
        self.next_head = [[0] * len(ops) for ops in self.heads]
        self.next_trunk = [0 for _ in ranks]
        self.orders: list[list[Step]] = [[] for _ in ranks]
        self.free_at = [0.0 for _ in ranks]
        self.there: dict[tuple[int, int], float] = {}
        self.idle: set[int] = set()
        self.events = [(0.0, rank) for rank in ranks]

    def run(self) -> list[list[Step]] | None:
        while self.events:
            now, rank = heapq.heappop(self.events)
            now = max(now, self.free_at[rank])
            choice = self._choose(rank, now)
            if choice is None:
                self.idle.add(rank)
            elif choice[0] > now:
                heapq.heappush(self.events, (choice[0], rank))
            else:
                self._start(rank, now, choice[3])
        done = sum(map(len, self.orders))
        wanted = sum(map(len, self.trunk)) + self.count * sum(map(len, self.heads))
        return self.orders if done == wanted else None

    def _choose(self, rank: int, now: float) -> tuple[float, int, int, int] | None:
        """(start, micro-batch, 0, head) of the rank's next step, head −1 for the trunk's; heads
        come first."""
        choices = []
        for number, op in enumerate(self.heads[rank]):
            microbatch = self.next_head[rank][number]
            ready = self._ready(op, microbatch) if microbatch < self.count else None
            if ready is not None:
                choices.append((max(ready, now), 0, microbatch, number))
        if self.next_trunk[rank] < len(self.trunk[rank]):
            ready = self._ready(*self.trunk[rank][self.next_trunk[rank]])
            if ready is not None:
                choices.append((max(ready, now), 1, 0, -1))
        return min(choices, default=None)

    def _ready(self, op: Op, microbatch: int) -> float | None:
        latest = 0.0
        for slot in op.inputs:
            arrival = self.there.get((slot, microbatch))
            if arrival is None:
                return None
            latest = max(latest, arrival)
        return latest

    def _start(self, rank: int, now: float, head: int) -> None:
        if head < 0:
            op, microbatch = self.trunk[rank][self.next_trunk[rank]]
            self.next_trunk[rank] += 1
        else:
            op, microbatch = self.heads[rank][head], self.next_head[rank][head]
            self.next_head[rank][head] += 1
        self.orders[rank].append((op, microbatch))
        end = self.free_at[rank] = now + op.duration
        for slot in op.kept:
            self.there[slot, microbatch] = end
        for sent in op.sent:
            self.there[sent.slot, microbatch] = end + sent.duration + sent.latency
            if sent.peer in self.idle:
                self.idle.remove(sent.peer)
                heapq.heappush(self.events, (end, sent.peer))
        heapq.heappush(self.events, (end, rank))
