"""Planners: which unit goes to which stage and rank.

A planner is one function registered by name.  Layer counts need not be divisible by anything, and
``Placement`` itself refuses a plan that drops or repeats a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from parallel.pipeline.cost import CostTable
from parallel.pipeline.layout import read_layout
from parallel.pipeline.units import BLOCK, EMBEDDING, HEAD, Placement, Unit, lookup


@dataclass(frozen=True)
class PlanRequest:
    """What a planner is asked: the model, P ranks with V stages each, costs or a layout string."""

    units: tuple[Unit, ...]
    num_ranks: int
    stages_per_rank: int = 1
    costs: CostTable | None = None
    layout: str | None = None
    mtp_input: str = "block"

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.stages_per_rank < 1:
            raise ValueError(
                f"{self.num_ranks} ranks with {self.stages_per_rank} stages each: both must be "
                "at least 1"
            )

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.stages_per_rank


Planner = Callable[[PlanRequest], Placement]
PLANNERS: dict[str, Planner] = {}


def register(name: str) -> Callable[[Planner], Planner]:
    """Enter a planner under ``name``."""

    def add(planner: Planner) -> Planner:
        assert name not in PLANNERS, f"planner {name!r} is registered twice"
        PLANNERS[name] = planner
        return planner

    return add


def make_placement(name: str, request: PlanRequest) -> Placement:
    """Run a registered planner; ``ValueError`` when the name or the request does not fit."""
    return lookup("pipeline planner", PLANNERS, name)(request)


def _place(request: PlanRequest, stages: Sequence[Sequence[Unit]]) -> Placement:
    return Placement.interleaved(request.units, stages, request.num_ranks, request.mtp_input)


@register("uniform")
def uniform(request: PlanRequest) -> Placement:
    """Blocks spread evenly, the first stages taking the remainder; the whole tail on the last."""
    blocks = [unit for unit in request.units if unit.kind == BLOCK]
    count = request.num_stages
    if len(blocks) < count:
        raise ValueError(
            f"planner uniform needs a block for each of {count} stages, the model has "
            f"{len(blocks)}; use fewer stages, or planner 'balanced'"
        )
    size, larger = divmod(len(blocks), count)
    starts = [stage * size + min(stage, larger) for stage in range(count + 1)]
    stages = [blocks[a:b] for a, b in pairwise(starts)]
    stages[0] = [unit for unit in request.units if unit.kind == EMBEDDING] + stages[0]
    stages[-1] += [unit for unit in request.units if unit.kind not in (EMBEDDING, BLOCK)]
    return _place(request, stages)


@register("balanced")
def balanced(request: PlanRequest) -> Placement:
    """Contiguous stages with the least possible maximum load, then the most even loads.

    Loads are forward plus backward times from ``request.costs``; virtual stages are balanced, not
    their sums per rank, because a long virtual stage delays every micro-batch.
    """
    if request.costs is None:
        raise ValueError("planner balanced needs a cost table")
    units, count = request.units, request.num_stages
    if len(units) < count:
        raise ValueError(f"{len(units)} units cannot fill {count} stages")
    cuts = balanced_cuts([request.costs[unit].load for unit in units], count)
    return _place(request, [units[a:b] for a, b in pairwise(cuts)])


def balanced_cuts(loads: Sequence[float], parts: int) -> list[int]:
    """Cut positions ``[0, .., len(loads)]`` of the best contiguous split into non-empty parts.

    Minimises the largest part, then the sum of squares; exact, O(parts · len²).
    """
    total = [0.0]
    for load in loads:
        total.append(total[-1] + load)
    largest = _best_split(total, parts, lambda load: load, max)[0]
    cap = largest * (1 + 1e-12)

    def square(load: float) -> float:
        return load * load if load <= cap else float("inf")

    return _best_split(total, parts, square, lambda a, b: a + b)[1]


def _best_split(
    total: Sequence[float],
    parts: int,
    price: Callable[[float], float],
    join: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """Dynamic programme over prefixes: the cheapest split and its cuts."""
    n = len(total) - 1
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(float("inf"), 0)] * n]
    for part in range(1, parts + 1):
        row = [(float("inf"), 0)] * (n + 1)
        for end in range(part, n + 1):
            row[end] = min(
                (join(best[-1][start][0], price(total[end] - total[start])), start)
                for start in range(part - 1, end)
            )
        best.append(row)
    cuts = [n]
    for part in range(parts, 0, -1):
        cuts.append(best[part][cuts[-1]][1])
    return best[parts][n][0], cuts[::-1]


@register("explicit")
def explicit(request: PlanRequest) -> Placement:
    """The placement written in ``request.layout``, which must describe exactly this model."""
    if request.layout is None:
        raise ValueError("planner explicit needs a layout string, for example 'Et*3|t*3L'")
    heads = [unit for unit in request.units if unit.kind == HEAD and unit.index == 0]
    placement = read_layout(
        request.layout, request.num_ranks, max(len(heads), 1), request.mtp_input
    )
    if placement.units != request.units:
        given, wanted = (
            [sum(unit.kind == kind for unit in units) for kind in "tm"]
            for units in (placement.units, request.units)
        )
        raise ValueError(
            f"layout {request.layout!r} has {given[0]} t and {given[1]} m; the model has "
            f"{wanted[0]} and {wanted[1]}"
        )
    if request.stages_per_rank > 1 and placement.num_stages != request.num_stages:
        raise ValueError(
            f"layout {request.layout!r} has {placement.num_stages} stages; {request.num_ranks} "
            f"ranks with {request.stages_per_rank} stages each need {request.num_stages}"
        )
    return placement
