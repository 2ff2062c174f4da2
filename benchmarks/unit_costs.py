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
from parallel.pipeline.measure import measured_costs, stage_seconds
from parallel.pipeline.units import Placement, Unit, model_units
from parallel.stage import MicroBatch, ShardedWeights, Stage
from pretrain.placement import cost_table


def measure_units(
    config: ModelConfig,
    model: Transformer,
    batches: Sequence[MicroBatch],
    terms: Sequence[Term],
    chunks: int = 1,
) -> CostTable:
    """Median seconds of every unit over these micro-batches, in this process alone.

    Each unit is a stage of its own, so every forward and backward pass is one timed action; heads
    are cut into ``chunks``.  The first micro-batch warms up and does not count.
    """
    units = tuple(model_units(config.layers, config.mtp.depth, chunks))
    each = Placement(units, tuple((u,) for u in units), (0,) * len(units), config.mtp.wiring)
    order = []
    for index in range(len(batches)):
        body = [stage for stage, alone in enumerate(each.head_only) if not alone]
        heads = [stage for stage, alone in enumerate(each.head_only) if alone]
        order += [Action(F, stage, index) for stage in body]
        order += [Action(H, stage, index) for stage in heads]
        order += [Action(B, stage, index) for stage in reversed(body)]
    schedule = lower("unit by unit", each, len(batches), [order])
    device = batches[0].ids.device
    weights = ShardedWeights(model, reshard=True)
    dtype = next(model.parameters()).dtype
    stages = {number: Stage(weights, dtype, each, number) for number in range(each.num_stages)}
    executor = Executor(schedule, stages, Links(0, (0,), {}, device), record=True)
    for stage in stages.values():
        stage.begin(batches, terms)
    executor.run()
    model.zero_grad(set_to_none=True)
    seen = [event for event in executor.events if event.action.microbatch]
    length = batches[0].ids.shape[1]
    return measured_costs(each, cost_table(config, length, chunks=chunks), stage_seconds(seen))


def average_costs(tables: Sequence[CostTable]) -> CostTable:
    """The mean times of tables with the same units."""

    def mean(unit: Unit) -> UnitCost:
        costs = [table[unit] for table in tables]
        return replace(
            costs[0],
            forward=fmean(cost.forward for cost in costs),
            backward=fmean(cost.backward for cost in costs),
        )

    return CostTable(by_unit={unit: mean(unit) for unit in tables[0].by_unit})
