"""Adaptive head chunking: heads cut into token chunks that go to whichever ranks have room.

The load of the busiest rank is not enough to choose by: a schedule also fills and drains.  So the
best layouts of every kind, hand-made ones included, are scheduled, and the one with the shortest
simulated step wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from parallel.pipeline.actions import Orders
from parallel.pipeline.fitted import MANY_STEPS, Conditions, program_of, quick_time
from parallel.pipeline.head_layouts import divided_heads
from parallel.pipeline.program import Execution, Program, stages_with_split_heads
from parallel.pipeline.request import PLANNERS, PlanRequest, hosts, register
from parallel.pipeline.schedules import SCHEDULES, compute_orders
from parallel.pipeline.simulate import peak_bytes
from parallel.pipeline.units import Placement, Unit, lookup

HAND_MADE = ("uniform", "balanced", "standalone", "split")
MOST_RUNS = 4  # placements with divided heads that are scheduled in full
ROUNDS_COST = 1.01  # what a second round must gain: it sends twice as much
COPY_COST = 0.002  # what each further copy of the head must gain: it takes memory and a sum


@dataclass(frozen=True)
class Planned:
    """A placement with its schedule for the request's micro-batches.  ``exchange``: time behind the
    last action, see ``Simulation``."""

    placement: Placement
    orders: Orders
    makespan: float
    exchange: float

    @property
    def step(self) -> float:
        return self.makespan + self.exchange


@register("adahc")
def adahc(request: PlanRequest) -> Placement:
    """The placement of the shortest simulated step under ``request.schedule``."""
    return best_plan(request).placement


def best_plan(request: PlanRequest) -> Planned:
    """The fastest of all candidates within the limits; ``ValueError`` when none keeps to them."""
    lookup("pipeline schedule", SCHEDULES, request.schedule)
    choice = _Choice(request)
    divided = _ranked(request, divided_heads(request))
    many = request.num_ranks * request.microbatches >= MANY_STEPS
    choice.consider([p for p in divided if not has_rounds(p)], MOST_RUNS // (1 + many))
    choice.consider([p for p in divided if has_rounds(p)], MOST_RUNS // (1 + many))
    choice.consider(hand_made_placements(request))
    if choice.best is None:
        why = choice.refusal or f"{len(request.units)} units are too few"
        raise ValueError(
            f"planner adahc cannot place this model on {request.num_ranks} ranks: {why}"
        )
    return choice.best


def has_rounds(placement: Placement) -> bool:
    """Whether the stages that are not heads go round the ranks more than once."""
    return placement.head_only.count(False) > placement.num_ranks


def _dear(placement: Placement) -> float:
    """What a plan's time is multiplied with before it is compared: it must be worth what it asks
    for besides."""
    copies = max(len(hosts(placement)) - 1, 0)
    return (ROUNDS_COST if has_rounds(placement) else 1.0) * (1 + COPY_COST * copies)


class _Choice:
    """The best plan so far."""

    def __init__(self, request: PlanRequest) -> None:
        self.request, self.costs = request, request.known_costs("adahc")
        self.best: Planned | None = None
        self.least = math.inf  # step of the best, and what it asks for besides
        self.refusal = ""

    def consider(self, placements: Iterable[Placement], enough: int | None = None) -> None:
        """Plan each, or the first ``enough`` that keep to the limits."""
        accepted = 0
        for placement in placements:
            dear = _dear(placement)
            ideal = max(self.costs.rank_loads(placement)) * self.request.microbatches
            ideal += self.costs.step_exchange(placement)
            if accepted == enough or ideal * dear >= self.least:
                continue
            try:
                planned = plan_within(self.request, placement)
            except ValueError as error:
                self.refusal = str(error)
                continue
            accepted += 1
            if planned.step * dear < self.least:
                self.best, self.least = planned, planned.step * dear


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
    return Planned(placement, orders, run.makespan, costs.step_exchange(placement))


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
    timed, costs = [], request.known_costs("adahc")
    for number, placement in enumerate(placements):
        program = program_of(placement, costs, request.network, request.split)
        time = quick_time(program, request.microbatches, request.split)
        if time is not None:
            time += costs.step_exchange(placement)
            timed.append((time * _dear(placement), number, placement))
    return [placement for _, _, placement in sorted(timed, key=lambda entry: entry[:2])]
