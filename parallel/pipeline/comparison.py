"""All planners on one model, each under its own schedule: what a table of them needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from parallel.pipeline.actions import Orders
from parallel.pipeline.adahc import HAND_MADE, best_plan
from parallel.pipeline.baselines import vocabulary_parallel
from parallel.pipeline.cost import CostTable
from parallel.pipeline.planner import make_placement
from parallel.pipeline.request import PlanRequest, hosts
from parallel.pipeline.schedules import Conditions, compute_orders
from parallel.pipeline.simulate import Simulation, simulate_orders
from parallel.pipeline.units import BLOCK, Placement, Unit, model_units

CANNOT_RUN = ("vocab", "adahc half")  # planned and simulated alone


@dataclass(frozen=True)
class Entry:
    """One planner's placement, simulated; times in the cost table's unit."""

    planner: str
    schedule: str
    placement: Placement
    loads: tuple[float, ...]  # forward and backward of one micro-batch, by rank
    simulation: Simulation

    @property
    def step(self) -> float:
        return self.simulation.step

    @property
    def hosts(self) -> int:
        return len(hosts(self.placement))

    @property
    def runs(self) -> bool:
        return self.planner not in CANNOT_RUN


@dataclass(frozen=True)
class Comparison:
    """``bound``: the load of every rank if all were equal.  ``refused``: why a planner has no
    entry."""

    request: PlanRequest
    bound: float
    entries: tuple[Entry, ...]
    refused: dict[str, str]

    def entry(self, planner: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.planner == planner), None)


def compare_planners(request: PlanRequest, half_blocks: bool = False) -> Comparison:
    """Every planner that can place the model.

    Hand-made layouts run 1F1B (interleaved with several stages per rank, ZB-H1 where the request's
    schedule splits weight gradients), the others the request's schedule.  ``half_blocks``: also
    what ``adahc`` could do if blocks were cut between attention and feed-forward.
    """
    costs = request.known_costs("adahc")
    names = [*HAND_MADE, *(["explicit"] if request.layout is not None else []), "vocab", "adahc"]
    entries, refused = [], {}
    for name in [*names, *(["adahc half"] if half_blocks else [])]:
        try:
            entries.append(_entry(name, request))
        except ValueError as error:
            refused[name] = str(error)
    bound = costs.bound(request.units, request.num_ranks)
    return Comparison(request, bound, tuple(entries), refused)


def _entry(name: str, request: PlanRequest) -> Entry:
    costs, schedule = request.known_costs(name), request.schedule
    if name in ("adahc", "adahc half"):
        if name == "adahc half":
            request = halved(request)
            costs = request.known_costs(name)
        planned = best_plan(request)
        return _simulated(name, schedule, planned.placement, planned.orders, costs, request)
    if name == "vocab":
        placement, costs = vocabulary_parallel(request)
    else:
        placement = make_placement(name, request)
        schedule = next(_plain_schedules(request, placement))
    conditions = Conditions(costs, request.network)
    orders = compute_orders(schedule, placement, request.microbatches, conditions)
    return _simulated(name, schedule, placement, orders, costs, request)


def _plain_schedules(request: PlanRequest, placement: Placement) -> Iterator[str]:
    """What a hand-made layout is run with."""
    if placement.num_stages == placement.num_ranks:
        yield "zb_h1" if request.split else "1f1b"
    if placement.num_stages % placement.num_ranks == 0:
        yield "interleaved"
    yield "gpipe"


def _simulated(
    planner: str, schedule: str, placement: Placement, orders: Orders, costs: CostTable,
    request: PlanRequest,
) -> Entry:  # fmt: skip
    simulation = simulate_orders(placement, orders, costs, request.network)
    return Entry(planner, schedule, placement, costs.rank_loads(placement), simulation)


def halved(request: PlanRequest) -> PlanRequest:
    """The same model with every block as two units of half its cost.  To plan with: no such unit
    can be run."""
    costs = request.known_costs("adahc")
    blocks = [unit for unit in request.units if unit.kind == BLOCK]
    units = model_units(2 * len(blocks), request.mtp_depth, request.head_chunks)
    table = {unit: costs[unit] for unit in request.units if unit.kind != BLOCK}
    for block in blocks:
        half = replace(costs[block].times(0.5), output_bytes=costs[block].output_bytes)
        table |= {Unit(BLOCK, 2 * block.index): half, Unit(BLOCK, 2 * block.index + 1): half}
    return replace(request, units=tuple(units), costs=replace(costs, by_kind={}, by_unit=table))
