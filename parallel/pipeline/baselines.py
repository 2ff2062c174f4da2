"""Hand-made layouts: contiguous stages, stage s on rank s mod P.

What differs is which part of the tail (multi-token-prediction blocks and heads) stays together.
Layer counts need not be divisible by anything, and ``Placement`` itself refuses a plan that drops
or repeats a unit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from parallel.pipeline.cost import CostTable
from parallel.pipeline.layout import read_layout
from parallel.pipeline.request import PlanRequest, register
from parallel.pipeline.units import BLOCK, EMBEDDING, HEAD, MTP, NORM, Placement, Unit, model_units

Groups = list[list[Unit]]  # consecutive units that a planner keeps together


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
    """Contiguous stages with the least possible maximum load, then the most even loads; a tail
    with multi-token prediction stays whole, on the last stage.

    Loads are forward plus backward times from ``request.costs``; virtual stages are balanced, not
    their sums per rank, because a long virtual stage delays every micro-batch.
    """
    heads = _heads(request)
    if request.mtp_depth == 0:
        return _cut("balanced", request, [*_trunk(request), [Unit(NORM)], *heads])
    tail = [unit for unit in request.units if unit.kind not in (EMBEDDING, BLOCK)]
    return _cut("balanced", request, [*_trunk(request), tail])


@register("standalone")
def standalone(request: PlanRequest) -> Placement:
    """All multi-token-prediction blocks on one stage and all heads on one stage, which may be
    their own: the layouts that Megatron-core accepts, with the least possible maximum load."""
    mtp = [unit for block in _mtp_blocks(request) for unit in block]
    heads = [unit for head in reversed(_heads(request)) for unit in head]
    groups = [*_trunk(request), *([mtp] if mtp else []), heads]
    return _cut("standalone", request, _with_norm(request, groups))


@register("split")
def split(request: PlanRequest) -> Placement:
    """Every multi-token-prediction block and every whole head on any stage behind what it reads,
    the deepest head first, with the least possible maximum load."""
    groups = [*_trunk(request), *_mtp_blocks(request), *_heads(request)]
    return _cut("split", request, _with_norm(request, groups))


def _trunk(request: PlanRequest) -> Groups:
    return [[unit] for unit in request.units if unit.kind in (EMBEDDING, BLOCK)]


def _mtp_blocks(request: PlanRequest) -> Groups:
    return [[Unit(MTP, k), Unit(NORM, k)] for k in range(1, request.mtp_depth + 1)]


def _heads(request: PlanRequest) -> Groups:
    """Whole heads, the deepest first."""
    depths = range(request.mtp_depth, -1, -1)
    return [[Unit(HEAD, k, c) for c in range(request.head_chunks)] for k in depths]


def _with_norm(request: PlanRequest, groups: Groups) -> Groups:
    """The final norm joins next-token prediction, or the last block if others read it too."""
    if request.mtp_input == "norm" and request.mtp_depth:
        at = max(i for i, group in enumerate(groups) if group[0].kind in (EMBEDDING, BLOCK))
        return [*groups[:at], [*groups[at], Unit(NORM)], *groups[at + 1 :]]
    return [*groups[:-1], [Unit(NORM), *groups[-1]]]


def _cut(planner: str, request: PlanRequest, groups: Groups) -> Placement:
    costs, count = request.known_costs(planner), request.num_stages
    if len(groups) < count:
        raise ValueError(
            f"planner {planner} cannot fill {count} stages with the {len(groups)} pieces that it "
            f"keeps whole ({sum(g[0].kind == BLOCK for g in groups)} blocks among them); use fewer "
            "stages"
        )
    cuts = balanced_cuts([costs.together(group).load for group in groups], count)
    order = {unit: i for i, unit in enumerate(request.units)}
    stages = [[unit for group in groups[a:b] for unit in group] for a, b in pairwise(cuts)]
    return _place(request, [sorted(stage, key=order.__getitem__) for stage in stages])


def balanced_cuts(loads: Sequence[float], parts: int) -> list[int]:
    """Cut positions ``[0, .., len(loads)]`` of the best contiguous split into non-empty parts.

    Minimises the largest part, then the sum of squares; exact.
    """
    total = [0.0]
    for load in loads:
        total.append(total[-1] + load)
    cap = _feasible_cap(total, parts) * (1 + 1e-12)
    largest = _best_split(total, parts, lambda load: load, max, cap)[0]
    cap = largest * (1 + 1e-12)
    return _best_split(total, parts, lambda load: load * load, lambda a, b: a + b, cap)[1]


def _feasible_cap(total: Sequence[float], parts: int) -> float:
    """The largest part of some split that is nearly the best."""
    n = len(total) - 1
    low, high = total[-1] / parts, total[-1]
    for _ in range(20):
        middle, start, largest = (low + high) / 2, 0, 0.0
        for part in range(parts, 0, -1):
            # As much as fits, but at least one piece, and one is left for each later part.
            end = bisect_right(total, total[start] + middle, start + 1) - 1
            end = n if part == 1 else min(max(end, start + 1), n - part + 1)
            largest = max(largest, total[end] - total[start])
            start = end
        if largest <= middle:
            high = largest
        else:
            low = middle
    return high


def _best_split(
    total: Sequence[float],
    parts: int,
    price: Callable[[float], float],
    join: Callable[[float, float], float],
    cap: float,
) -> tuple[float, list[int]]:
    """Dynamic programme over prefixes: the cheapest split without a part over ``cap``."""
    n = len(total) - 1
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(float("inf"), 0)] * n]
    for part in range(1, parts + 1):
        row = [(float("inf"), 0)] * (n + 1)
        for end in range(part, n - parts + part + 1):
            for start in range(end - 1, part - 2, -1):
                load = total[end] - total[start]
                if load > cap:
                    break
                row[end] = min(row[end], (join(best[-1][start][0], price(load)), start))
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
    chunks = max(request.head_chunks, 1)
    placement = read_layout(request.layout, request.num_ranks, chunks, request.mtp_input)
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


def vocabulary_parallel(request: PlanRequest) -> tuple[Placement, CostTable]:
    """Every head divided by vocabulary over all ranks, blocks re-balanced: to simulate, not to run.

    The piece of a rank is modelled as one head chunk that reads all rows: the gradient of the
    hidden states is there when the last rank has finished its piece.  Pieces of the weight are on
    one rank each and share nothing.
    """
    costs, ranks = request.known_costs("vocab"), request.num_ranks
    units = tuple(model_units(_blocks(request), request.mtp_depth, ranks))
    groups = [*_trunk(request), *_mtp_blocks(request)]
    last = len(groups) - request.mtp_depth - 1
    groups[last] = [*groups[last], Unit(NORM)]
    if len(groups) < ranks:
        raise ValueError(f"planner vocab cannot fill {ranks} stages with {len(groups)} pieces")
    cuts = balanced_cuts([costs.together(group).load for group in groups], ranks)
    trunk = [tuple(unit for group in groups[a:b] for unit in group) for a, b in pairwise(cuts)]
    heads = [Unit(HEAD, k, r) for k in range(request.mtp_depth + 1) for r in range(ranks)]
    table = {unit: costs[unit] for unit in request.units if unit.kind != HEAD}
    for unit in heads:
        chunk = costs[Unit(HEAD, unit.index)]
        shared = tuple((name, size / ranks) for name, size in chunk.shared_bytes)
        piece = chunk.times(request.head_chunks / ranks)
        table[unit] = replace(piece, fixed=chunk.fixed / ranks, shared_bytes=shared)
        norm = Unit(NORM, unit.index)  # each rank reads all rows, not a share of them
        table[norm] = replace(costs[norm], output_bytes=costs[norm].output_bytes * ranks)
    placement = Placement(
        units,
        (*trunk, *((unit,) for unit in heads)),
        (*range(ranks), *(unit.chunk for unit in heads)),
        request.mtp_input,
    )
    pieces = {name for unit in heads for name, _ in costs[Unit(HEAD, unit.index)].shared_bytes}
    whole = {name: time for name, time in costs.exchange.items() if name not in pieces}
    return placement, CostTable(by_unit=table, exchange=whole)


def _blocks(request: PlanRequest) -> int:
    return sum(unit.kind == BLOCK for unit in request.units)
