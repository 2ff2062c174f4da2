"""Placements of a model with multi-token prediction that no planner would choose.

If every scattered placement trains the same model, so does every planned one.
"""

from __future__ import annotations

import random
from itertools import pairwise

from models.config import ModelConfig
from parallel.pipeline.units import HEAD, Placement, Unit, model_units


def scattered(model: ModelConfig, ranks: int, chunks: int, seed: int = 0) -> Placement:
    """The trunk cut at random places, every head chunk on a random rank."""
    pick = random.Random(seed)
    units = model_units(model.layers, model.mtp.depth, chunks)
    trunk = [unit for unit in units if unit.kind != HEAD]
    cuts = sorted(pick.sample(range(1, len(trunk)), ranks - 1))
    stages = [tuple(trunk[a:b]) for a, b in pairwise([0, *cuts, len(trunk)])]
    owners = list(range(ranks))
    for depth in range(model.mtp.depth + 1):
        owner = [pick.randrange(ranks) for _ in range(chunks)]
        for rank in range(ranks):
            mine = tuple(Unit(HEAD, depth, c) for c in range(chunks) if owner[c] == rank)
            if mine:
                stages.append(mine)
                owners.append(rank)
    return Placement(tuple(units), tuple(stages), tuple(owners), model.mtp.wiring)


def tail_on_last(model: ModelConfig, ranks: int) -> Placement:
    """Blocks spread evenly, everything behind them on the last rank."""
    units = model_units(model.layers, model.mtp.depth)
    size = model.layers // ranks
    cuts = [0, *(1 + size * rank for rank in range(1, ranks)), len(units)]
    stages = tuple(tuple(units[a:b]) for a, b in pairwise(cuts))
    return Placement(tuple(units), stages, tuple(range(ranks)), model.mtp.wiring)
