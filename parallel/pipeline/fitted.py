"""Orders of compute actions that are fitted to a placement and its costs.

Three kinds are tried: periodic orders built from one micro-batch, 1F1B and its relatives where the
placement allows them, and interleaved 1F1B with heads in its gaps.  The fastest wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallel.pipeline.actions import Action, Orders
from parallel.pipeline.building_block import Block, building_blocks
from parallel.pipeline.checker import peak_in_flight
from parallel.pipeline.cost import INSTANT, CostTable, Network, UnitCost
from parallel.pipeline.interleaving import insert_heads, interleaved_orders
from parallel.pipeline.program import Execution, Program, Step
from parallel.pipeline.units import HEAD, Placement

MOST_BLOCKS = 2  # periods that are tried in full
ENOUGH_STEPS = 4000  # micro-batches times ranks that tell one order from another
EXTRA = (0, 1, 2)  # forward actions more than interleaved 1F1B needs, to cover the heads' way
MANY_STEPS = 10_000  # micro-batches times ranks from which less is tried
WORTH = 1.004  # gain below which fewer micro-batches in flight are preferred


@dataclass(frozen=True)
class Conditions:
    """What a schedule may be fitted to.  costs: None for blocks of one unit of time, backward twice
    that, and a head like a block.  max_in_flight: the most (stage, micro-batch) pairs between
    forward and backward, for every rank or for each."""

    costs: CostTable | None = None
    network: Network = INSTANT
    max_in_flight: int | Sequence[int] | None = None

    def limits(self, num_ranks: int) -> Sequence[int] | None:
        limit = self.max_in_flight
        return [limit] * num_ranks if isinstance(limit, int) else limit


ANY = Conditions()


@dataclass(frozen=True)
class Candidate:
    """Every rank's steps.  time: of a step, exactly or nearly.  peak: most in flight on a rank."""

    time: float
    peak: int
    steps: list[list[Step]]


def fitted_orders(
    placement: Placement,
    num_microbatches: int,
    conditions: Conditions,
    plain: Sequence[Orders],
    split: bool,
) -> Orders:
    """The least makespan, or nearly so with fewer micro-batches in flight.

    ``plain``: orders made without costs, also candidates.  ``split``: weight gradients are actions
    of their own.  ``ValueError`` when no schedule keeps to the limits in flight.
    """
    costs = conditions.costs or nominal_costs(placement)
    program = program_of(placement, costs, conditions.network, split)
    limits = conditions.limits(placement.num_ranks)
    candidates = list(_given(program, [program.steps(orders) for orders in plain], limits))
    if not split:
        candidates += _inserted(program, num_microbatches, limits)
    large = num_microbatches * placement.num_ranks >= MANY_STEPS
    if not candidates or not (large or _is_interleaved(placement)):
        candidates += _periodic(program, num_microbatches, limits, split)
    if not candidates:
        raise ValueError(
            f"no schedule keeps at most {limits} micro-batches in flight on the ranks of this "
            "placement; allow more"
        )
    least = min(candidate.time for candidate in candidates)
    near = [candidate for candidate in candidates if candidate.time <= WORTH * least]
    best = min(near, key=lambda candidate: (candidate.peak, candidate.time))
    return [[Action(op.kind, op.stage, mb) for op, mb in order] for order in best.steps]


def program_of(placement: Placement, costs: CostTable, network: Network, split: bool) -> Program:
    heads = [stage for stage, alone in enumerate(placement.head_only) if alone]
    return Program(placement, costs, network, heads if split else ())


def quick_time(program: Program, num_microbatches: int, split: bool) -> float | None:
    """About how long a step takes: one candidate of the likely kind, on some micro-batches."""
    placement, count = program.placement, num_microbatches
    ranks = placement.num_ranks
    few = min(count, 2 * ranks + 8)
    if _is_interleaved(placement) and not split:
        few = min(count, max(3 * ranks, ENOUGH_STEPS // ranks))
        inserted = insert_heads(program, _interleaved_trunk(program, few, 1), few)
        if inserted is None:
            return None
        loads = [0.0] * ranks
        for rank, cost in zip(placement.ranks, program.stage_costs):
            loads[rank] += cost.load
        return Execution(program, inserted).makespan + (count - few) * max(loads)
    for block in building_blocks(program, count, split=split)[:1]:
        steps = block.orders(ranks, few, ranks // 2)
        return Execution(program, steps).makespan + (count - few) * block.period * block.tick
    return None


def _is_interleaved(placement: Placement) -> bool:
    """Whether every rank has the same number of stages that are not heads, at least two, one after
    another round the ranks."""
    owners = [rank for rank, alone in zip(placement.ranks, placement.head_only) if not alone]
    ranks = placement.num_ranks
    return len(owners) >= 2 * ranks and len(owners) % ranks == 0 and all(
        owner == stage % ranks for stage, owner in enumerate(owners)
    )  # fmt: skip


def _interleaved_trunk(program: Program, count: int, extra: int) -> list[list[Step]]:
    placement = program.placement
    stages = [
        [stage for stage in placement.stages_of(rank) if not placement.head_only[stage]]
        for rank in range(placement.num_ranks)
    ]
    return program.steps(interleaved_orders(stages, count, extra))


def _given(
    program: Program, every: Sequence[list[list[Step]]], limits: Sequence[int] | None
) -> Iterator[Candidate]:
    for steps in every:
        peak = _peak(steps, limits)
        if peak is not None:
            yield Candidate(Execution(program, steps).makespan, peak, steps)


def _inserted(program: Program, count: int, limits: Sequence[int] | None) -> Iterator[Candidate]:
    """Interleaved 1F1B with heads in its gaps."""
    if not _is_interleaved(program.placement) or not any(program.placement.head_only):
        return
    for extra in EXTRA:
        steps = insert_heads(program, _interleaved_trunk(program, count, extra), count)
        if steps is not None:
            yield from _given(program, [steps], limits)


def _periodic(
    program: Program, count: int, limits: Sequence[int] | None, split: bool
) -> Iterator[Candidate]:
    """The fastest periodic orders, and nearly as fast ones that keep the fewest in flight.

    They are compared on as many micro-batches as it takes to fill and drain.
    """
    ranks = program.placement.num_ranks
    few = min(count, max(2 * ranks + 8, ENOUGH_STEPS // ranks))
    aheads = {0, ranks // 4} | ({1, ranks // 2} if ranks * count < MANY_STEPS else set())
    tried: list[tuple[float, int, Block, int]] = []
    blocks = building_blocks(program, count, split=split, max_in_flight=limits)
    for block in blocks[:MOST_BLOCKS]:
        for ahead in sorted(aheads):
            peak = _peak(block.orders(ranks, min(count, 4 * ranks), ahead), limits)
            if peak is not None:
                rest = (count - few) * block.period * block.tick
                time = Execution(program, block.orders(ranks, few, ahead)).makespan + rest
                tried.append((time, peak, block, ahead))
    tried.sort(key=lambda entry: entry[:2])
    near = [entry for entry in tried if entry[0] <= WORTH * tried[0][0]]
    chosen = {id(entry): entry for entry in (*tried[:1], *sorted(near, key=lambda e: e[1::-1])[:1])}
    for _, _, block, ahead in chosen.values():
        yield from _given(program, [block.orders(ranks, count, ahead)], limits)


def _peak(orders: Sequence[Sequence[Step]], limits: Sequence[int] | None) -> int | None:
    """The most micro-batches in flight on a rank, or ``None`` if that is over a limit."""
    peaks = [peak_in_flight([op.kind for op, _ in order]) for order in orders]
    if limits is not None and any(peak > limit for peak, limit in zip(peaks, limits)):
        return None
    return max(peaks)


def nominal_costs(placement: Placement) -> CostTable:
    """Blocks of one unit of time, a whole head like a block, backward twice forward."""
    chunks = max((unit.chunk for unit in placement.units if unit.kind == HEAD), default=0) + 1
    block, free = UnitCost(1, 2), UnitCost()
    return CostTable({"E": free, "t": block, "n": free, "m": block, "h": block.times(1 / chunks)})
