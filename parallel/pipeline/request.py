"""What a planner is asked, and the registry of planners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parallel.pipeline.cost import INSTANT, CostTable, Network
from parallel.pipeline.units import HEAD, Placement, Unit


@dataclass(frozen=True)
class PlanRequest:
    """The model, P ranks with V stages each, and what is known about the run.

    ``layout`` is for planner ``explicit`` alone.  Planner ``adahc`` fits the placement to
    ``schedule``, ``num_microbatches`` (8 per rank unless given) and ``network``, within limits per
    rank: ``max_hosts`` ranks with a copy of the head, ``memory_bytes`` as the simulator counts
    them, ``max_in_flight`` (stage, micro-batch) pairs between forward and backward.
    """

    units: tuple[Unit, ...]
    num_ranks: int
    stages_per_rank: int = 1
    costs: CostTable | None = None
    layout: str | None = None
    mtp_input: str = "block"
    schedule: str = "adahc"
    num_microbatches: int | None = None
    network: Network = INSTANT
    max_hosts: int | None = None
    memory_bytes: float | None = None
    max_in_flight: int | None = None

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.stages_per_rank < 1:
            raise ValueError(
                f"{self.num_ranks} ranks with {self.stages_per_rank} stages each: both must be "
                "at least 1"
            )
        for name in ("num_microbatches", "max_hosts", "memory_bytes", "max_in_flight"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}: at least 1 is needed")

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.stages_per_rank

    @property
    def microbatches(self) -> int:
        return self.num_microbatches or 8 * self.num_ranks

    @property
    def split(self) -> bool:
        """Whether the schedule has weight gradients as actions of their own."""
        return self.schedule in ("adahc_zb", "zb_h1")

    @property
    def mtp_depth(self) -> int:
        return max((unit.index for unit in self.units if unit.kind == HEAD), default=0)

    @property
    def head_chunks(self) -> int:
        """Token chunks of each head."""
        return sum(unit.kind == HEAD and unit.index == 0 for unit in self.units)

    def known_costs(self, planner: str) -> CostTable:
        if self.costs is None:
            raise ValueError(f"planner {planner} needs a cost table")
        return self.costs


def hosts(placement: Placement) -> tuple[int, ...]:
    """The ranks that hold head chunks, and so a copy of the head's weight."""
    found = {
        rank
        for rank, stage in zip(placement.ranks, placement.stages)
        if any(unit.kind == HEAD for unit in stage)
    }
    return tuple(sorted(found))


Planner = Callable[[PlanRequest], Placement]
PLANNERS: dict[str, Planner] = {}


def register(name: str) -> Callable[[Planner], Planner]:
    """Enter a planner under ``name``."""

    def add(planner: Planner) -> Planner:
        assert name not in PLANNERS, f"planner {name!r} is registered twice"
        PLANNERS[name] = planner
        return planner

    return add
