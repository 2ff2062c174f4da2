"""Planners on twenty-seven settings of known results: loads, bounds and ratios of makespans.

One block's forward pass takes 1 and its backward pass 2.  A model is (blocks, cost of a head, cost
of a multi-token-prediction block); transfers take 0.03, there are 8 micro-batches per rank.
"""

from statistics import fmean

import pytest

from parallel.pipeline.adahc import best_plan
from parallel.pipeline.baselines import vocabulary_parallel
from parallel.pipeline.cost import CostTable, given_costs
from parallel.pipeline.head_layouts import least_load
from parallel.pipeline.planner import PlanRequest, make_placement
from parallel.pipeline.schedules import Conditions, make_schedule
from parallel.pipeline.simulate import simulate
from parallel.pipeline.units import Placement, model_units

MODELS = {
    "dsv3": (61, 1.385, 1.154),
    "dsv3e": (61, 0.831, 1.092),
    "l3-8b": (32, 2.087, 1.133),
    "l2-7b": (32, 0.598, 1.152),
    "q-14b": (48, 2.628, 1.177),
    "l3-70b": (80, 1.139, 1.144),
}
# model, ranks, depth; largest loads: the bound, then tail on the last rank with uniform and with
# balanced blocks, standalone, split, vocabulary-parallel, chunks, chunks and half blocks; how much
# longer a step takes than with chunks: uniform, balanced, standalone, split, vocabulary-parallel.
TABLE = """\
dsv3 8 1 24.35 32.77 26.77 26.77 26.77 25.04 24.52 24.52 1.29 1.08 1.08 1.08 1.02
dsv3 8 2 25.30 40.38 27.00 27.00 27.00 25.56 25.30 25.30 1.52 1.05 1.05 1.05 1.01
dsv3 8 4 27.20 55.61 34.61 30.00 27.92 29.60 27.26 27.26 1.92 1.24 1.07 1.02 1.07
dsv3 16 1 12.17 20.77 14.77 14.77 14.77 12.52 12.26 12.26 1.61 1.18 1.18 1.18 1.02
dsv3 16 2 12.65 28.38 19.38 15.00 15.00 12.78 12.78 12.78 2.09 1.46 1.14 1.14 1.00
dsv3 16 4 13.60 43.61 34.61 20.77 15.00 16.30 15.00 13.76 2.74 2.20 1.36 1.00 1.08
dsv3e 8 1 23.91 29.26 24.00 24.00 24.00 24.62 24.00 24.00 1.20 1.00 1.00 1.00 1.03
dsv3e 8 2 24.63 35.03 27.00 27.00 27.00 24.93 24.67 24.67 1.36 1.07 1.07 1.07 1.01
dsv3e 8 4 26.07 46.57 27.00 27.00 27.00 28.56 27.00 26.12 1.65 1.00 1.00 1.00 1.06
dsv3e 16 1 11.95 17.26 12.00 12.00 12.00 12.31 12.00 12.00 1.39 1.00 1.00 1.00 1.03
dsv3e 16 2 12.31 23.03 15.00 15.00 15.00 12.47 12.36 12.36 1.76 1.16 1.16 1.16 1.01
dsv3e 16 4 13.04 34.57 25.57 15.00 15.00 15.78 15.00 13.50 2.21 1.66 1.00 1.00 1.06
l3-8b 4 1 27.98 39.92 30.00 30.00 30.00 30.13 28.57 28.50 1.36 1.04 1.04 1.04 1.05
l3-8b 4 2 30.40 49.59 31.59 31.59 31.59 31.70 30.41 30.41 1.56 1.03 1.03 1.03 1.04
l3-8b 4 4 35.23 68.91 44.91 37.60 36.00 36.43 35.35 35.28 1.86 1.25 1.06 1.02 1.03
l3-8b 8 1 13.99 27.92 15.92 15.00 15.00 16.57 15.00 14.28 1.79 1.07 1.00 1.00 1.09
l3-8b 8 2 15.20 37.59 25.59 18.79 18.00 17.35 15.39 15.39 2.28 1.59 1.20 1.13 1.11
l3-8b 8 4 17.61 56.91 44.91 31.31 18.79 18.91 17.74 17.67 3.00 2.39 1.70 1.07 1.06
l2-7b 8 1 12.88 19.05 15.00 15.00 15.00 15.45 15.00 13.50 1.26 1.00 1.00 1.00 1.04
l2-7b 8 2 13.54 24.30 15.00 15.00 15.00 15.67 15.00 13.61 1.57 1.00 1.00 1.00 1.05
l2-7b 8 4 14.85 34.81 22.81 18.00 15.89 16.12 15.00 15.00 2.18 1.47 1.16 1.06 1.06
q-14b 8 1 20.41 37.30 21.00 21.00 21.00 22.97 21.00 20.49 1.70 1.00 1.00 1.00 1.08
q-14b 8 2 21.84 48.72 30.72 24.00 24.00 23.96 21.99 21.99 2.08 1.35 1.07 1.07 1.07
q-14b 8 4 24.69 71.55 53.55 39.42 27.00 25.93 24.99 25.50 2.51 1.91 1.43 1.00 0.97
l3-70b 8 1 31.28 40.27 33.00 33.00 33.00 33.85 33.00 31.50 1.20 1.00 1.00 1.00 1.03
l3-70b 8 2 32.14 47.12 33.00 33.00 33.00 34.28 33.00 32.14 1.38 1.00 1.00 1.00 1.03
l3-70b 8 4 33.85 60.83 36.00 36.00 36.00 35.13 33.85 33.85 1.70 1.04 1.04 1.04 1.03
"""
ROWS = [line.split() for line in TABLE.splitlines()]
HAND_MADE = ("uniform", "balanced", "standalone", "split")


def request_for(model: str, ranks: int, depth: int, halves: int = 1) -> PlanRequest:
    """``halves=2``: blocks may be cut in the middle: twice as many, of half the cost each."""
    layers, head, mtp = MODELS[model]
    units = tuple(model_units(layers * halves, depth, head_chunks=16))
    given = {"units": {"t": 1 / halves, "h": head, "m": mtp}, "latency": 0.03}
    costs, network = given_costs(given, units)
    return PlanRequest(units, ranks, costs=costs, network=network, num_microbatches=8 * ranks)


def makespan(request: PlanRequest, schedule: str, placement: Placement, costs: CostTable) -> float:
    conditions = Conditions(costs, request.network)
    actions = make_schedule(schedule, placement, request.microbatches, conditions)
    return simulate(actions, costs, request.network.latency).makespan


def check_row(row: list[str]) -> None:
    request = request_for(row[0], int(row[1]), int(row[2]))
    bound, *loads, chunks, _ = map(float, row[3:11])
    ratios = [float(cell) for cell in row[11:]]
    costs, ranks = request.costs, request.num_ranks
    assert costs is not None
    assert costs.bound(request.units, ranks) == pytest.approx(bound, abs=0.006)
    assert least_load(request) <= chunks * 1.0005
    plan = best_plan(request)  # of the least makespan, for which a little more load may be worth it
    assert max(costs.rank_loads(plan.placement)) <= chunks * 1.05
    placed = [(make_placement(name, request), costs, "1f1b") for name in HAND_MADE]
    placed.append((*vocabulary_parallel(request), "adahc"))
    for (placement, table, schedule), load, ratio in zip(placed, loads, ratios, strict=True):
        assert max(table.rank_loads(placement)) == pytest.approx(load, rel=0.001)
        found = makespan(request, schedule, placement, table) / plan.makespan
        assert found >= 0.98 * ratio, (schedule, found, ratio)
        # Where it is much more, then because chunks do better here than in the table.
        assert found <= 1.13 * ratio, (schedule, found, ratio)


@pytest.mark.parametrize("number", [12, 16])
def test_two_rows(number: int) -> None:
    check_row(ROWS[number])


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.slow] * (row[1] == "16")) for row in ROWS],
    ids=lambda row: "-".join(row[:3]),
)
def test_the_whole_table(row: list[str]) -> None:
    check_row(row)


def test_distance_to_the_bound() -> None:
    """On average, over depths 1 to 4 of every setting: 3 %, and 1 % with half blocks."""
    distances: dict[int, list[float]] = {1: [], 2: []}
    for model, ranks in dict.fromkeys((row[0], int(row[1])) for row in ROWS):
        for depth in (1, 2, 3, 4):
            for halves, found in distances.items():
                request = request_for(model, ranks, depth, halves)
                assert request.costs is not None
                found.append(least_load(request) / request.costs.bound(request.units, ranks))
    assert len(distances[1]) == 36
    assert 1 <= fmean(distances[1]) < 1.03
    assert 1 <= fmean(distances[2]) < 1.01
    half = {tuple(row[:3]): float(row[10]) for row in ROWS}
    for (model, ranks_, depth_), load in half.items():
        assert least_load(request_for(model, int(ranks_), int(depth_), 2)) <= load * 1.0005
