"""New shares of the heads for the ranks that already host them, from measured times.

No weight moves: a host has the head's weight whatever its share.  What changes is which rows are
sent where, and with it the rounding of the head's gradient.
"""

from __future__ import annotations

from collections import Counter
from statistics import fmean

from parallel.pipeline.cost import CostTable
from parallel.pipeline.request import hosts
from parallel.pipeline.units import HEAD, Placement, Unit

LEAST_GAIN = 0.005  # of the busiest host's load


def rebalanced(placement: Placement, costs: CostTable, least_gain: float = LEAST_GAIN) -> Placement:
    """Move head chunks one by one from the busiest host to where they cost least.

    ``costs`` are those of the units on the ranks where they are now, so a slow rank's chunks cost
    more.  Chunks inside a stage with other units stay.  Every host keeps at least one chunk.  The
    placement itself is returned when the busiest host would gain less than ``least_gain``.
    """
    shares = _Shares(placement, costs)
    before = shares.most()
    while shares.move():
        pass
    if shares.most() > before * (1 - least_gain):
        return placement
    return shares.placement()


class _Shares:
    """The chunks of each host and depth, and what they cost there."""

    def __init__(self, old: Placement, costs: CostTable) -> None:
        self.old = old
        self.hosts = hosts(old)
        self.loads = list(costs.rank_loads(old))
        self.chunks: dict[tuple[int, int], list[Unit]] = {}  # by rank and depth
        self.count = Counter(
            rank
            for rank, stage in zip(old.ranks, old.stages)
            for unit in stage
            if unit.kind == HEAD
        )
        for stage, alone in enumerate(old.head_only):
            for unit in old.stages[stage] if alone else ():
                self.chunks.setdefault((old.ranks[stage], unit.index), []).append(unit)
        self.known, self.fixed = (
            {place: fmean(map(value, units)) for place, units in self.chunks.items()}
            for value in (lambda unit: costs[unit].load, lambda unit: costs[unit].fixed)
        )

    def most(self) -> float:
        return max((self.loads[rank] for rank in self.hosts), default=0.0)

    def cost(self, rank: int, depth: int) -> float:
        """Of one chunk: as measured there, or elsewhere, as far as the rank is slow or fast."""
        if (rank, depth) in self.known:
            return self.known[rank, depth]
        return self._usual(self.known, depth) * self._slowness(rank)

    def once(self, rank: int, depth: int) -> float:
        """What the first chunk of a depth costs on top."""
        if (rank, depth) in self.fixed:
            return self.fixed[rank, depth]
        return self._usual(self.fixed, depth) * self._slowness(rank)

    def _slowness(self, rank: int) -> float:
        ratios = [
            load / (self._usual(self.known, k) or 1.0)
            for (r, k), load in self.known.items()
            if r == rank
        ]
        return fmean(ratios) if ratios else 1.0

    def _usual(self, among: dict[tuple[int, int], float], depth: int) -> float:
        return fmean(cost for (_, k), cost in among.items() if k == depth)

    def given(self, rank: int, depth: int) -> float:
        """What the rank is relieved of with one chunk."""
        last = len(self.chunks[rank, depth]) == 1
        return self.cost(rank, depth) + (self.once(rank, depth) if last else 0.0)

    def taken(self, rank: int, depth: int) -> float:
        """What one more chunk costs the rank."""
        first = not self.chunks.get((rank, depth))
        return self.cost(rank, depth) + (self.once(rank, depth) if first else 0.0)

    def move(self) -> bool:
        """Take one chunk from the busiest host if that makes the busier of the two less busy."""
        rank = max(self.hosts, key=lambda host: (self.loads[host], -host), default=None)
        if rank is None or self.count[rank] < 2:
            return False
        best = None
        for (owner, depth), units in sorted(self.chunks.items()):
            for host in self.hosts:
                if owner != rank or host == rank or not units:
                    continue
                left = self.loads[rank] - self.given(rank, depth)
                busier = max(left, self.loads[host] + self.taken(host, depth))
                choice = (busier, (host, depth) not in self.chunks, host, depth)
                if busier < self.loads[rank] * (1 - 1e-9) and (best is None or choice < best):
                    best = choice
        if best is None:
            return False
        _, _, host, depth = best
        self.loads[rank] -= self.given(rank, depth)
        self.loads[host] += self.taken(host, depth)
        self.chunks.setdefault((host, depth), []).append(self.chunks[rank, depth].pop())
        self.count[rank] -= 1
        self.count[host] += 1
        return True

    def placement(self) -> Placement:
        old = self.old
        trunk = [stage for stage, alone in enumerate(old.head_only) if not alone]
        heads = sorted((depth, rank) for (rank, depth), units in self.chunks.items() if units)
        stages = [
            *(old.stages[stage] for stage in trunk),
            *(
                tuple(sorted(self.chunks[rank, depth], key=lambda unit: unit.chunk))
                for depth, rank in heads
            ),
        ]
        ranks = (*(old.ranks[stage] for stage in trunk), *(rank for _, rank in heads))
        return Placement(old.units, tuple(stages), ranks, old.mtp_input)
