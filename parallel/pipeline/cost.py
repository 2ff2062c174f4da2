"""What each unit costs; the numbers come from the caller (counted FLOPs, or measured seconds)."""

from __future__ import annotations

import math
from collections import Counter
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
    gradients (action W, or HW).  ``fixed`` comes on top, once for all chunks of a head that a stage
    has, however few: the vocabulary matrix is read and its gradient updated whole.  It is divided
    among forward, backward and weight gradient as the rest is.  ``activation_bytes`` stay from the
    forward to the backward action, ``output_bytes`` cross to the next stage, ``workspace_bytes``
    exist during an action alone.
    ``parameter_bytes`` are this unit's own, with all that goes with them (gradients, optimizer
    state); ``shared_bytes`` are (name, bytes) of what a rank holds once for all units that name it.
    """

    forward: float = 0.0
    backward: float = 0.0
    weight_share: float = 0.5
    fixed: float = 0.0
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
        """Forward and backward together, without ``fixed``."""
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
        """So many times the work and the bytes; what is fixed or shared stays."""
        own = ("weight_share", "fixed", "shared_bytes")
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


def _with_fixed(costs: Sequence[UnitCost]) -> UnitCost:
    """All chunks of one head on one stage, with what they cost once."""
    fixed = max(cost.fixed for cost in costs)
    cost = costs[0] if len(costs) == 1 else _together(costs, 0.0)
    if not fixed:
        return cost
    early = cost.forward / cost.load if cost.load else 0.0
    return replace(
        cost, forward=cost.forward + fixed * early, backward=cost.backward + fixed * (1 - early)
    )


@dataclass(frozen=True)
class CostTable:
    """Costs by unit, else by unit kind (``E t n m h``); ``ValueError`` for a unit with neither.

    ``exchange``: by name of ``shared_bytes``, the time that each rank with a copy of these weights
    spends per step on the gradient of every other copy.
    """

    by_kind: Mapping[str, UnitCost] = field(default_factory=dict)
    by_unit: Mapping[Unit, UnitCost] = field(default_factory=dict)
    exchange: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, unit: Unit) -> UnitCost:
        cost = self.by_unit.get(unit) or self.by_kind.get(unit.kind)
        if cost is None:
            raise ValueError(f"the cost table has no entry for unit {unit}")
        return cost

    def scaled(self, factor: float) -> CostTable:
        """All times multiplied by ``factor``, for instance one over FLOP/s."""

        def scale(cost: UnitCost) -> UnitCost:
            return replace(
                cost,
                forward=cost.forward * factor,
                backward=cost.backward * factor,
                fixed=cost.fixed * factor,
            )

        return CostTable(
            {kind: scale(cost) for kind, cost in self.by_kind.items()},
            {unit: scale(cost) for unit, cost in self.by_unit.items()},
            {name: time * factor for name, time in self.exchange.items()},
        )

    def together(self, units: Iterable[Unit]) -> UnitCost:
        """Units on one stage; its ``output_bytes`` are none."""
        alike: dict[tuple[str, int], list[UnitCost]] = {}
        for unit in units:
            alike.setdefault((unit.kind, unit.index), []).append(self[unit])
        return _together([_with_fixed(costs) for costs in alike.values()], 0.0)

    def stage(self, placement: Placement, stage: int) -> UnitCost:
        """The sum over a stage's units; ``output_bytes`` counts every edge that leaves it."""
        crossing = sum(
            self[edge.producer].output_bytes * float(edge.share)
            for edge in placement.outputs[stage]
        )
        return replace(self.together(placement.stages[stage]), output_bytes=crossing)

    def rank_loads(self, placement: Placement) -> tuple[float, ...]:
        """Forward plus backward time of one micro-batch, per rank."""
        loads = [0.0] * placement.num_ranks
        for stage, rank in enumerate(placement.ranks):
            loads[rank] += self.stage(placement, stage).load
        return tuple(loads)

    def rank_parameters(self, placement: Placement) -> tuple[float, ...]:
        """Bytes of parameters per rank; what units share counts once on each rank that has one."""
        return tuple(
            sum(self[unit].parameter_bytes for unit in units) + sum(self._shared(units).values())
            for units in map(placement.units_of, range(placement.num_ranks))
        )

    def step_exchange(self, placement: Placement) -> float:
        """Time behind the last action of a step: copies of shared weights add up their gradients.

        All copies of one weight exchange at once, one weight after another.
        """
        held = [self._shared(placement.units_of(rank)) for rank in range(placement.num_ranks)]
        copies = Counter(name for names in held for name in names)
        return max(
            sum((copies[name] - 1) * self.exchange.get(name, 0.0) for name in names)
            for names in held
        )

    def _shared(self, units: Iterable[Unit]) -> dict[str, float]:
        return dict(pair for unit in units for pair in self[unit].shared_bytes)

    def bound(self, units: Iterable[Unit], num_ranks: int) -> float:
        """The least time of one micro-batch on the busiest rank: perfect balance, whole heads'
        fixed costs."""
        return self.together(units).load / num_ranks


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


SHARED = ("embedding", "head", "vocabulary", "mtp")  # vocabulary: embedding and head in one


def given_costs(document: Mapping[str, Any], units: Sequence[Unit]) -> tuple[CostTable, Network]:
    """Costs written by hand, for exactly the ``units`` of a model.

    ``{"units": {"t": 1, "t0": {"forward": 2, "backward": 3}, "m": 1.1, "h": 2}, "latency": 0.03}``:
    a key is a kind or one unit (``t0``, ``m1``, ``h1``), a number is the forward time, and backward
    is twice that unless given.  ``h`` is a whole head; chunks divide it, all but ``fixed``, which
    each stage with chunks of it pays on top.  ``E`` and ``n`` are free unless given.
    ``{"exchange": {"head": 0.1}}``: per step and further copy of shared weights (``SHARED``).
    ``ValueError`` says which entry is wrong or missing.
    """
    allowed = dict.fromkeys(("units", "latency", "bandwidth", "exchange"))
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
    return CostTable(by_unit=by_unit, exchange=_exchange(document)), Network(**network)


def _exchange(document: Mapping[str, Any]) -> dict[str, float]:
    given = document.get("exchange", {})
    if not isinstance(given, Mapping):
        raise ValueError("the cost table's exchange needs names, such as {head: 0.1}")
    for name in given:
        lookup("shared weight of the cost table's exchange", dict.fromkeys(SHARED), str(name))
    found = {str(name): _number(f"exchange.{name}", time) for name, time in given.items()}
    for name, time in found.items():
        if time < 0:
            raise ValueError(f"the cost table's exchange.{name} is {time}: it cannot be negative")
    return found


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
