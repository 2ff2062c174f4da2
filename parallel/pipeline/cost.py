"""What each unit costs; the numbers come from the caller (counted FLOPs, or measured seconds)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any

from parallel.pipeline.actions import HW, B, F, H, I, Kind, Schedule, W
from parallel.pipeline.units import EMBEDDING, HEAD, NORM, Placement, Unit, lookup


@dataclass(frozen=True)
class UnitCost:
    """One unit and one micro-batch: times in seconds (or FLOPs), sizes in bytes.

    ``backward`` is the whole backward pass; ``weight_share`` is the part of it that computes weight
    gradients (action W, or HW).  ``activation_bytes`` stay from the forward to the backward action,
    ``output_bytes`` cross to the next stage, ``workspace_bytes`` exist during an action alone.
    ``parameter_bytes`` are this unit's own, with all that goes with them (gradients, optimizer
    state); ``shared_bytes`` are (name, bytes) of what a rank holds once for all units that name it.
    """

    forward: float = 0.0
    backward: float = 0.0
    weight_share: float = 0.5
    activation_bytes: float = 0.0
    parameter_bytes: float = 0.0
    output_bytes: float = 0.0
    workspace_bytes: float = 0.0
    shared_bytes: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in vars(self).items() if name != "shared_bytes"}
        for name, value in [*numbers.items(), *self.shared_bytes]:
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

    def times(self, factor: float) -> UnitCost:
        """So many times the work and the bytes; what is shared stays."""
        own = ("weight_share", "shared_bytes")
        return replace(
            self, **{name: value * factor for name, value in vars(self).items() if name not in own}
        )


def _together(costs: Sequence[UnitCost], output_bytes: float) -> UnitCost:
    backward = sum(cost.backward for cost in costs)
    weight = sum(cost.backward * cost.weight_share for cost in costs)
    return UnitCost(
        forward=sum(cost.forward for cost in costs),
        backward=backward,
        weight_share=min(weight / backward, 1.0) if backward else 0.5,
        activation_bytes=sum(cost.activation_bytes for cost in costs),
        parameter_bytes=sum(cost.parameter_bytes for cost in costs),
        output_bytes=output_bytes,
        workspace_bytes=max((cost.workspace_bytes for cost in costs), default=0.0),
        shared_bytes=tuple(dict(pair for cost in costs for pair in cost.shared_bytes).items()),
    )


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
        crossing = sum(
            self[edge.producer].output_bytes * float(edge.share)
            for edge in placement.outputs[stage]
        )
        return _together([self[unit] for unit in placement.stages[stage]], crossing)

    def rank_loads(self, placement: Placement) -> tuple[float, ...]:
        """Forward plus backward time of one micro-batch, per rank."""
        loads = [0.0] * placement.num_ranks
        for stage, rank in enumerate(placement.ranks):
            loads[rank] += self.stage(placement, stage).load
        return tuple(loads)

    def rank_parameters(self, placement: Placement) -> tuple[float, ...]:
        """Bytes of parameters per rank; what units share counts once on each rank that has one."""
        held = []
        for rank in range(placement.num_ranks):
            units = [u for stage in placement.stages_of(rank) for u in placement.stages[stage]]
            cost = _together([self[unit] for unit in units], 0.0)
            held.append(cost.parameter_bytes + sum(size for _, size in cost.shared_bytes))
        return tuple(held)

    def bound(self, units: Iterable[Unit], num_ranks: int) -> float:
        """The least time of one micro-batch on the busiest rank: perfect balance."""
        return sum(self[unit].load for unit in units) / num_ranks


@dataclass(frozen=True)
class Network:
    """``latency`` in the cost table's time unit, ``bandwidth`` in bytes per such unit."""

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if not self.latency >= 0 or not self.bandwidth > 0:
            raise ValueError(
                f"latency {self.latency} and bandwidth {self.bandwidth} cannot be so small"
            )


INSTANT = Network()


def given_costs(document: Mapping[str, Any], units: Sequence[Unit]) -> tuple[CostTable, Network]:
    """Costs written by hand, for exactly the ``units`` of a model.

    ``{"units": {"t": 1, "t0": {"forward": 2, "backward": 3}, "m": 1.1, "h": 2}, "latency": 0.03}``:
    a key is a kind or one unit (``t0``, ``m1``, ``h1``), a number is the forward time, and backward
    is twice that unless given.  ``h`` is a whole head; chunks divide it.  ``E`` and ``n`` are free
    unless given.  ``ValueError`` says which entry is wrong or missing.
    """
    allowed = {"units": None, "latency": None, "bandwidth": None}
    for key in document:
        lookup("entry of the cost table", allowed, key)
    chunks = sum(unit.kind == HEAD and unit.index == 0 for unit in units)
    names = {_name(unit): unit for unit in units}
    kinds = dict.fromkeys(unit.kind for unit in units)
    given = document.get("units")
    if not isinstance(given, Mapping):
        raise ValueError("the cost table needs 'units', such as {t: 1, h: 2}")
    read = {}
    for key, value in given.items():
        if str(key) not in names:
            lookup("kind of unit, or single unit of this model, in the cost table", kinds, str(key))
        read[str(key)] = _cost(str(key), value)
    by_unit = {}
    for unit in units:
        free = UnitCost() if unit.kind in (EMBEDDING, NORM) else None
        cost = read.get(_name(unit)) or read.get(unit.kind) or free
        if cost is None:
            raise ValueError(f"the cost table has no entry for unit {unit}: give {unit.kind!r}")
        if unit.kind == HEAD:
            copy = (("head", cost.parameter_bytes),)
            cost = replace(cost, parameter_bytes=0.0, shared_bytes=copy).times(1 / chunks)
        by_unit[unit] = cost
    network = {key: _number(key, document[key]) for key in ("latency", "bandwidth")
               if key in document}  # fmt: skip
    return CostTable(by_unit=by_unit), Network(**network)


def _name(unit: Unit) -> str:
    """A unit without its chunk."""
    return str(Unit(unit.kind, unit.index)).partition(",")[0]


_NUMBERS = {f.name: None for f in fields(UnitCost) if f.name != "shared_bytes"}


def _cost(where: str, value: Any) -> UnitCost:
    entries = value if isinstance(value, Mapping) else {"forward": value}
    found: dict[str, Any] = {}
    for key, number in entries.items():
        lookup(f"cost of unit {where}", _NUMBERS, str(key))
        found[str(key)] = _number(f"{where}.{key}", number)
    if "forward" not in found:
        raise ValueError(f"the cost of unit {where} has no 'forward'")
    found.setdefault("backward", 2 * found["forward"])
    try:
        return UnitCost(**found)
    except ValueError as error:
        raise ValueError(f"unit {where}: {error}") from None


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"the cost table's {where} must be a finite number, got {value!r}")
    return float(value)


def ideal_makespan(schedule: Schedule, costs: CostTable) -> float:
    """The time without any bubble: the busiest rank's work over all micro-batches."""
    return max(costs.rank_loads(schedule.placement)) * schedule.num_microbatches
