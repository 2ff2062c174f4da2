"""Adaptive head chunking: heads cut into token chunks that go to whichever ranks have room.

The load of the busiest rank is not enough to choose by: a schedule also fills and drains.  So the
best layouts of every kind, hand-made ones included, are scheduled, and the one with the least
simulated makespan wins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from parallel.pipeline.actions import Orders
from parallel.pipeline.fitted import Conditions, program_of, quick_time
from parallel.pipeline.head_layouts import divided_heads
from parallel.pipeline.program import Execution, Program, stages_with_split_heads
from parallel.pipeline.request import PLANNERS, PlanRequest, hosts, register
from parallel.pipeline.schedules import SCHEDULES, compute_orders
from parallel.pipeline.simulate import peak_bytes
from parallel.pipeline.units import Placement, Unit, lookup

HAND_MADE = ("uniform", "balanced", "standalone", "split")
MOST_RUNS = 4  # placements with divided heads that are scheduled in full
MANY_STEPS = 10_000  # ranks times micro-batches from which half as many are


@dataclass(frozen=True)
class Planned:
    """A placement with its schedule for the request's micro-batches."""

    placement: Placement
    orders: Orders
    makespan: float


@register("adahc")
def adahc(request: PlanRequest) -> Placement:
    """The placement of the least simulated makespan under ``request.schedule``."""
    return best_plan(request).placement


def best_plan(request: PlanRequest) -> Planned:
    """The fastest of all candidates within the limits; ``ValueError`` when none keeps to them."""
    lookup("pipeline schedule", SCHEDULES, request.schedule)
    costs = request.known_costs("adahc")
    best: Planned | None = None
    refusals: list[str] = []
    chunked = _ranked(request, divided_heads(request))
    many = request.num_ranks * request.microbatches >= MANY_STEPS
    for candidates, enough in (
        (chunked, MOST_RUNS // (1 + many)),
        (hand_made_placements(request), None),
    ):
        accepted = 0
        for placement in candidates:
            ideal = max(costs.rank_loads(placement)) * request.microbatches
            if accepted == enough or (best is not None and ideal >= best.makespan):
                continue
            try:
                planned = plan_within(request, placement)
            except ValueError as error:
                refusals.append(str(error))
                continue
            accepted += 1
            if best is None or planned.makespan < best.makespan:
                best = planned
    if best is None:
        why = refusals[-1] if refusals else f"{len(request.units)} units are too few"
        raise ValueError(
            f"planner adahc cannot place this model on {request.num_ranks} ranks: {why}"
        )
    return best


def hand_made_placements(request: PlanRequest) -> list[Placement]:
    """What the other planners propose, where they can, with one stage per rank and with several;
    each once."""
    found: dict[tuple[tuple[Unit, ...], ...], Placement] = {}
    for virtual in sorted({1, 2, request.stages_per_rank}):
        for name in HAND_MADE:
            try:
                placement = PLANNERS[name](replace(request, stages_per_rank=virtual))
            except ValueError:
                continue
            if request.max_hosts is None or len(hosts(placement)) <= request.max_hosts:
                found.setdefault(placement.stages, placement)
    return list(found.values())


def plan_within(request: PlanRequest, placement: Placement) -> Planned:
    """Schedule a placement; ``ValueError`` when that breaks a limit of the request."""
    costs, limit = request.known_costs("adahc"), request.memory_bytes
    conditions = Conditions(costs, request.network, _in_flight_limits(request, placement))
    orders = compute_orders(request.schedule, placement, request.microbatches, conditions)
    program = Program(placement, costs, request.network, stages_with_split_heads(orders))
    run = Execution(program, program.steps(orders), record=limit is not None)
    if limit is not None:
        most = max(peak_bytes(run, orders, costs))
        if most > limit:
            raise ValueError(f"a rank needs {most:.4g} bytes, more than {limit:.4g}")
    return Planned(placement, orders, run.makespan)


def _in_flight_limits(request: PlanRequest, placement: Placement) -> list[int] | None:
    """The request's limit, or what its memory leaves room for where that is less."""
    limits = [request.max_in_flight] * placement.num_ranks if request.max_in_flight else None
    if request.memory_bytes is None:
        return limits
    costs = request.known_costs("adahc")
    rooms = []
    for rank, parameters in enumerate(costs.rank_parameters(placement)):
        stages = placement.stages_of(rank)
        trunk = [costs.stage(placement, s) for s in stages if not placement.head_only[s]]
        kept = max((cost.activation_bytes for cost in trunk), default=0.0)
        work = max((costs.stage(placement, s).workspace_bytes for s in stages), default=0.0)
        room = request.memory_bytes - parameters - work
        if room < kept:
            raise ValueError(
                f"rank {rank} needs {parameters + work + kept:.4g} bytes for one micro-batch, more "
                f"than {request.memory_bytes:.4g}"
            )
        most = len(trunk) * request.microbatches
        rooms.append(min(most, int(room / kept)) if kept else most)
    return rooms if limits is None else [min(pair) for pair in zip(rooms, limits)]


def _ranked(request: PlanRequest, placements: Iterable[Placement]) -> list[Placement]:
    """Placements by about the time that a step takes, the fastest first."""
    timed = []
    for number, placement in enumerate(placements):
        costs = request.known_costs("adahc")
        program = program_of(placement, costs, request.network, request.split)
        time = quick_time(program, request.microbatches, request.split)
        if time is not None:
            timed.append((time, number, placement))
    return [placement for _, _, placement in sorted(timed, key=lambda entry: entry[:2])]
