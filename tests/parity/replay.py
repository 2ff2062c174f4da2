"""A pipeline replayed in one process: every rank's own weights and actions, no communication.

What the processes of a pipeline compute must have the bits of this replay, shared weights included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel.apply import build_parallel_model
from parallel.mesh import ParallelConfig, build_mesh
from parallel.pipeline.actions import HW, Action, B, F, H, I, TensorId, W, reads, writes
from parallel.pipeline.stage import METHODS
from parallel.split import split_linear_maps
from parallel.stage import ShardedWeights, Stage
from pretrain.objectives.base import build_objective
from pretrain.placement import rank_units
from tests.parity.harness import Case, enlarge, micro_batches_of, options_of


def replay(case: Case, orders: list[list[Action]]) -> dict[str, Tensor]:
    """Every gradient by logical name; copies of a weight are added in rank order from zero."""
    placement = case.placement
    assert placement is not None
    mesh = build_mesh(ParallelConfig(), torch.device("cpu"))
    objective = build_objective(case.objective, case.model)
    batches = micro_batches_of(case, 0, 0, 1)
    terms = objective.terms(objective.counts(batches))
    kinds = {(a.stage, a.kind) for order in orders for a in order}
    models = []
    stages: dict[int, Stage] = {}
    for rank in range(placement.num_ranks):
        units = rank_units(placement, rank)
        model = build_parallel_model(case.model, ParallelConfig(), mesh, options_of(case), units)
        enlarge(model)
        models.append(model)
        weights = ShardedWeights(model.part, reshard=True)
        split_linear_maps(model.part, weights.gradients)
        for number in placement.stages_of(rank):
            stages[number] = Stage(weights, case.dtype, placement, number)
            stages[number].split_head = (number, HW) in kinds
            stages[number].begin(batches, terms)
    _run(placement, orders, stages)
    total: dict[str, Tensor] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            before = total.get(name, torch.zeros_like(parameter.grad))
            total[name] = before + parameter.grad
    return total


def _run(placement: Any, orders: list[list[Action]], stages: dict[int, Stage]) -> None:
    """Take actions from any rank's list as soon as what they read is there."""
    have: dict[TensorId, Tensor] = {}
    done: set[TensorId] = set()
    left = [list(order) for order in orders]
    while any(left):
        ready = next(
            order for order in left if order and done.issuperset(reads(placement, order[0]))
        )
        action = ready.pop(0)
        needed = [t for t in reads(placement, action) if t.source != t.target]
        made = [t for t in writes(placement, action) if t.source != t.target]
        given = [have.pop(t) for t in needed]
        method = getattr(stages[action.stage], METHODS[action.kind])
        if action.kind in (W, HW):
            method(action.microbatch)
            result = None
        else:
            assert action.kind in (F, B, I, H)
            result = method(action.microbatch, given[0] if len(given) == 1 else given or None)
        outputs = [result] if isinstance(result, Tensor) else list(result or ())
        have.update({t: value.clone() for t, value in zip(made, outputs)})
        done.update(writes(placement, action))
