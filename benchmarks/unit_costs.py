"""How long each unit of a model takes on this device: what planners are best fed with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from models.config import ModelConfig
from models.losses import Term
from models.transformer import Transformer
from parallel.pipeline.actions import Action, B, F, H
from parallel.pipeline.cost import CostTable, UnitCost
from parallel.pipeline.executor import Executor
from parallel.pipeline.links import Links
from parallel.pipeline.lowering import lower
from parallel.pipeline.measure import Seconds, measured_costs, stage_seconds
from parallel.pipeline.units import HEAD, Placement, Unit, model_units
from parallel.stage import MicroBatch, ShardedWeights, Stage
from pretrain.placement import cost_table

CUTS = ((0,), (1,), (2, 3))  # of the head of depth 0, in quarters of the rows; the others are whole
QUARTERS = 4


def measure_units(
    config: ModelConfig,
    model: Transformer,
    batches: Sequence[MicroBatch],
    terms: Sequence[Term],
) -> CostTable:
    """Median seconds of every unit, of whole heads, over these micro-batches, in this process.

    Each unit is a stage of its own, so every forward and backward pass is one timed action.  The
    head of depth 0 is run in pieces: what does not shrink with the rows is ``fixed``.  The first
    micro-batch warms up and does not count.
    """
    units = tuple(model_units(config.layers, config.mtp.depth, QUARTERS))
    each = _one_by_one(units, config.mtp.wiring)
    body = [stage for stage, alone in enumerate(each.head_only) if not alone]
    heads = [stage for stage, alone in enumerate(each.head_only) if alone]
    order = []
    for index in range(len(batches)):
        order += [Action(F, stage, index) for stage in body]
        order += [Action(H, stage, index) for stage in heads]
        order += [Action(B, stage, index) for stage in reversed(body)]
    schedule = lower("unit by unit", each, len(batches), [order])
    weights = ShardedWeights(model, reshard=True)
    dtype = next(model.parameters()).dtype
    stages = {number: Stage(weights, dtype, each, number) for number in range(each.num_stages)}
    links = Links(0, (0,), {}, batches[0].ids.device)
    executor = Executor(schedule, stages, links, record=True)
    for stage in stages.values():
        stage.begin(batches, terms)
    executor.run()
    model.zero_grad(set_to_none=True)
    seconds = stage_seconds(event for event in executor.events if event.action.microbatch)
    size, length = batches[0].ids.shape
    counted = cost_table(config, length, QUARTERS, size)
    found = measured_costs(each, counted, seconds)
    head = _whole_head(each, found, seconds)
    whole = model_units(config.layers, config.mtp.depth)
    return CostTable(by_unit={unit: head if unit.kind == HEAD else found[unit] for unit in whole})


def _one_by_one(units: Sequence[Unit], wiring: str) -> Placement:
    """Every unit a stage of its own, on one rank; heads in ``CUTS``, or whole."""
    stages: list[tuple[Unit, ...]] = [(unit,) for unit in units if unit.kind != HEAD]
    stages += [tuple(Unit(HEAD, 0, c) for c in cut) for cut in CUTS]
    deeper = {unit.index for unit in units if unit.kind == HEAD and unit.index}
    stages += [tuple(Unit(HEAD, k, c) for c in range(QUARTERS)) for k in sorted(deeper)]
    return Placement(tuple(units), tuple(stages), (0,) * len(stages), wiring)


def _whole_head(each: Placement, found: CostTable, seconds: Seconds) -> UnitCost:
    """A whole head of any depth, from the times of pieces."""
    points = [
        (len(each.stages[stage]) / QUARTERS, time)
        for (stage, kind), time in seconds.items()
        if kind is H
    ]
    fixed, rest = affine(points)
    cost = found[Unit(HEAD)].times(QUARTERS)
    early = cost.forward / cost.load
    return replace(cost, forward=rest * early, backward=rest * (1 - early), fixed=fixed)


def affine(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope, neither negative, of the line through (share of the rows, seconds) with
    the least squared error."""
    x, y = fmean(share for share, _ in points), fmean(time for _, time in points)
    squares = sum((share - x) ** 2 for share, _ in points)
    slope = sum((share - x) * (time - y) for share, time in points) / squares
    if slope < 0:
        return y, 0.0
    if y - slope * x < 0:
        both = sum(share * time for share, time in points)
        return 0.0, both / sum(share * share for share, _ in points)
    return y - slope * x, slope


def cut_heads(costs: CostTable, config: ModelConfig, chunks: int) -> CostTable:
    """Costs of whole heads divided among their chunks."""
    by_unit = {}
    for unit in model_units(config.layers, config.mtp.depth, chunks):
        cost = costs[replace(unit, chunk=0)]
        by_unit[unit] = cost.times(1 / chunks) if unit.kind == HEAD else cost
    return replace(costs, by_unit=by_unit)


def average_costs(tables: Sequence[CostTable]) -> CostTable:
    """The mean times of tables with the same units."""

    def mean(unit: Unit) -> UnitCost:
        costs = [table[unit] for table in tables]
        return replace(
            costs[0],
            forward=fmean(cost.forward for cost in costs),
            backward=fmean(cost.backward for cost in costs),
            fixed=fmean(cost.fixed for cost in costs),
        )

    return replace(tables[0], by_unit={unit: mean(unit) for unit in tables[0].by_unit})


def listed(costs: CostTable) -> str:
    """Milliseconds of the units, blocks by their mean."""
    parts = []
    for kind in dict.fromkeys(unit.kind for unit in costs.by_unit):
        found = [cost for unit, cost in costs.by_unit.items() if unit.kind == kind]
        load, fixed = (1000 * fmean(values) for values in zip(*((c.load, c.fixed) for c in found)))
        parts.append(f"{kind} {load:.3g}" + (f" + {fixed:.3g} fixed" if kind == HEAD else ""))
    parts += [f"exchange of {n} {1000 * time:.3g}" for n, time in sorted(costs.exchange.items())]
    return ", ".join(parts)
