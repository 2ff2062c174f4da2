"""From recorded runs to costs: what the stages of a pipeline really took."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from parallel.pipeline.actions import COMPUTE, HW, B, F, H, I, Kind, W
from parallel.pipeline.cost import CostTable, UnitCost
from parallel.pipeline.timeline import Event
from parallel.pipeline.units import HEAD, Placement

Seconds = Mapping[tuple[int, Kind], float]


def stage_seconds(events: Iterable[Event]) -> dict[tuple[int, Kind], float]:
    """The median seconds of every (stage, kind of compute action) among recorded events."""
    found: dict[tuple[int, Kind], list[float]] = {}
    for event in events:
        if event.action.kind in COMPUTE:
            key = (event.action.stage, event.action.kind)
            found.setdefault(key, []).append(event.end - event.start)
    return {key: statistics.median(times) for key, times in found.items()}


def measured_costs(placement: Placement, costs: CostTable, seconds: Seconds) -> CostTable:
    """``costs`` with the times of every stage brought to what was measured (in seconds).

    The units of a stage share its times in proportion to what they had, and so does what is fixed.
    A fused head's time is divided into forward and backward as it was, a split one's weight
    gradient is its own.
    """
    by_unit, seen, known = {}, 0.0, 0.0
    for stage, units in enumerate(placement.stages):
        before = costs.stage(placement, stage)
        times = {kind: seconds[stage, kind] for kind in Kind if (stage, kind) in seconds}
        forward, backward, weight = _parts(before, times)
        seen, known = seen + forward + backward, known + before.load
        slower = (forward + backward) / before.load if before.load else 1.0
        for unit in units:
            cost = costs[unit]
            by_unit[unit] = replace(
                cost,
                forward=forward * _share(cost.forward, before.forward, len(units)),
                backward=backward * _share(cost.backward, before.backward, len(units)),
                weight_share=weight,
                fixed=cost.fixed * slower,
            )
    slower = seen / known if known else 1.0  # what is not measured here changes with the rest
    exchange = {name: time * slower for name, time in costs.exchange.items()}
    return CostTable(by_unit=by_unit, exchange=exchange)


def _parts(before: UnitCost, times: Mapping[Kind, float]) -> tuple[float, float, float]:
    """Forward and backward seconds, and the share of weight gradients in the latter."""
    if H in times:
        late = times.get(HW, 0.0)
        whole = times[H] + late
        forward = whole * _share(before.forward, before.load, 3)
        share = late / (whole - forward) if late else before.weight_share
        return forward, whole - forward, min(share, 1.0)
    if I in times:
        backward = times[I] + times[W]
        return times[F], backward, times[W] / backward if backward else 0.5
    return times[F], times[B], before.weight_share


def _share(part: float, whole: float, among: int) -> float:
    return part / whole if whole else 1 / among


def whole_heads(costs: CostTable, placement: Placement) -> dict[str, UnitCost]:
    """The costs of every unit by name, the chunks of a head added up."""
    found: dict[str, UnitCost] = {}
    for unit in placement.units:
        name, cost = f"h{unit.index}" if unit.kind == HEAD else str(unit), costs[unit]
        if name in found:
            other = found[name]
            cost = replace(
                cost,
                forward=cost.forward + other.forward,
                backward=cost.backward + other.backward,
                fixed=max(cost.fixed, other.fixed),
            )
        found[name] = cost
    return found


def measured_bubble(busy: Sequence[float], spans: Sequence[float]) -> float:
    """The idle share of all ranks' time, from their busy seconds and the seconds of their step."""
    whole = max(spans) * len(spans)
    return 1 - sum(busy) / whole if whole else 0.0
