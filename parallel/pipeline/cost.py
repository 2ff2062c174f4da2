"""What each unit costs; the numbers come from the caller (counted FLOPs, or measured seconds)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from parallel.pipeline.actions import HW, B, F, H, I, Kind, Schedule, W
from parallel.pipeline.units import Placement, Unit


@dataclass(frozen=True)
class UnitCost:
    """One unit and one micro-batch: times in seconds (or FLOPs), sizes in bytes.

    ``backward`` is the whole backward pass; ``weight_share`` is the part of it that computes weight
    gradients (action W, or HW).  ``activation_bytes`` stay from the forward to the backward action,
    ``output_bytes`` cross to the next stage.
    """

    forward: float = 0.0
    backward: float = 0.0
    weight_share: float = 0.5
    activation_bytes: float = 0.0
    parameter_bytes: float = 0.0
    output_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise ValueError(f"cost {name} is {value}: it cannot be negative")
        if self.weight_share > 1:
            raise ValueError(f"cost weight_share is {self.weight_share}: it cannot exceed 1")

    @property
    def load(self) -> float:
        """Forward and backward together: what planners balance."""
        return self.forward + self.backward

    def duration(self, kind: Kind, split: bool = False) -> float:
        """Time of one compute action; ``split`` says that HW follows H."""
        weight = self.backward * self.weight_share
        if kind is H:
            return self.load - (weight if split else 0.0)
        if kind is I:
            return self.backward - weight
        return {F: self.forward, B: self.backward, W: weight, HW: weight}[kind]


@dataclass(frozen=True)
class CostTable:
    """Costs by unit, else by unit kind (``E t n m h``); ``ValueError`` for a unit with neither."""

    by_kind: Mapping[str, UnitCost] = field(default_factory=dict)
    by_unit: Mapping[Unit, UnitCost] = field(default_factory=dict)

    def __getitem__(self, unit: Unit) -> UnitCost:
        cost = self.by_unit.get(unit) or self.by_kind.get(unit.kind)
        if cost is None:
            raise ValueError(f"the cost table has no entry for unit {unit}")
        return cost

    def scaled(self, factor: float) -> CostTable:
        """All times multiplied by ``factor``, for instance one over FLOP/s."""

        def scale(cost: UnitCost) -> UnitCost:
            return replace(cost, forward=cost.forward * factor, backward=cost.backward * factor)

        return CostTable(
            {kind: scale(cost) for kind, cost in self.by_kind.items()},
            {unit: scale(cost) for unit, cost in self.by_unit.items()},
        )

    def stage(self, placement: Placement, stage: int) -> UnitCost:
        """The sum over a stage's units; ``output_bytes`` counts every edge that leaves it."""
        costs = [self[unit] for unit in placement.stages[stage]]
        backward = sum(cost.backward for cost in costs)
        weight = sum(cost.backward * cost.weight_share for cost in costs)
        return UnitCost(
            forward=sum(cost.forward for cost in costs),
            backward=backward,
            weight_share=min(weight / backward, 1.0) if backward else 0.5,
            activation_bytes=sum(cost.activation_bytes for cost in costs),
            parameter_bytes=sum(cost.parameter_bytes for cost in costs),
            output_bytes=sum(
                self[edge.producer].output_bytes * float(edge.share)
                for edge in placement.outputs[stage]
            ),
        )

    def rank_loads(self, placement: Placement) -> tuple[float, ...]:
        """Forward plus backward time of one micro-batch, per rank."""
        loads = [0.0] * placement.num_ranks
        for stage, rank in enumerate(placement.ranks):
            loads[rank] += self.stage(placement, stage).load
        return tuple(loads)


def ideal_makespan(schedule: Schedule, costs: CostTable) -> float:
    """The time without any bubble: the busiest rank's work over all micro-batches."""
    return max(costs.rank_loads(schedule.placement)) * schedule.num_microbatches
