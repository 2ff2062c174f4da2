"""Pipeline schedules: the order of compute actions on every rank.

A schedule is one function ``(placement, num_microbatches, conditions) -> compute orders``
registered by name; transfers and parameter actions are added by ``lowering``.  In every schedule
both the forward and the backward actions of a stage go through the micro-batches in increasing
order, so that losses and gradients accumulate in the same order under every schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parallel.pipeline.actions import Action, B, F, I, Kind, Orders, Schedule, W
from parallel.pipeline.building_block import Block, building_blocks
from parallel.pipeline.checker import peak_in_flight
from parallel.pipeline.cost import INSTANT, CostTable, Network, UnitCost
from parallel.pipeline.lowering import lower
from parallel.pipeline.program import Execution, Program, Step
from parallel.pipeline.units import HEAD, Placement, lookup


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


Generator = Callable[[Placement, int, Conditions], Orders]
SCHEDULES: dict[str, Generator] = {}


def register(name: str) -> Callable[[Generator], Generator]:
    """Enter a generator of compute orders under ``name``."""

    def add(generator: Generator) -> Generator:
        assert name not in SCHEDULES, f"schedule {name!r} is registered twice"
        SCHEDULES[name] = generator
        return generator

    return add


def make_schedule(
    name: str,
    placement: Placement,
    num_microbatches: int,
    conditions: Conditions = Conditions(),
    *,
    sharded: bool = False,
    reshard_between: bool = False,
    step: bool = False,
) -> Schedule:
    """The complete action lists of a registered schedule (see ``lowering.lower`` for the options).

    ``ValueError`` for an unknown name, for fewer than one micro-batch, and for a placement that
    the schedule cannot run.
    """
    orders = compute_orders(name, placement, num_microbatches, conditions)
    return lower(
        name,
        placement,
        num_microbatches,
        orders,
        sharded=sharded,
        reshard_between=reshard_between,
        step=step,
    )


def compute_orders(
    name: str, placement: Placement, num_microbatches: int, conditions: Conditions
) -> Orders:
    """A registered schedule's compute actions per rank; ``ValueError`` as ``make_schedule``."""
    generator = lookup("pipeline schedule", SCHEDULES, name)
    if num_microbatches < 1:
        raise ValueError(f"{num_microbatches} micro-batches given: at least one is needed")
    return generator(placement, num_microbatches, conditions)


def forward_schedule(schedule: Schedule) -> Schedule:
    """The same schedule restricted to its forward actions, for evaluation."""
    orders = [
        [Action(F, a.stage, a.microbatch) for a in order if a.kind in (F, Kind.HEAD)]
        for order in schedule.compute_orders()
    ]
    sharded = any(a.kind is Kind.UNSHARD for actions in schedule.actions for a in actions)
    return lower(
        schedule.name, schedule.placement, schedule.num_microbatches, orders, sharded=sharded
    )


def _warm_up(forward: list[Action], backward: list[Action], ahead: int) -> list[Action]:
    """``ahead`` forward actions, then forward and backward in turn, then the other backwards."""
    ahead = min(ahead, len(forward))
    steady = len(forward) - ahead
    order = forward[:ahead]
    for pair in zip(forward[ahead:], backward[:steady]):
        order += pair
    return order + backward[steady:]


@register("gpipe")
def gpipe(placement: Placement, num_microbatches: int, _: Conditions) -> Orders:
    """All forward actions, then all backward ones; any number of stages per rank."""
    orders = []
    for rank in range(placement.num_ranks):
        stages = placement.stages_of(rank)
        forward = [Action(F, s, mb) for s in stages for mb in range(num_microbatches)]
        backward = [Action(B, s, mb) for s in reversed(stages) for mb in range(num_microbatches)]
        orders.append(forward + backward)
    return orders


def _require_one_stage_per_rank(name: str, placement: Placement) -> None:
    for rank in range(placement.num_ranks):
        if len(placement.stages_of(rank)) > 1:
            raise ValueError(
                f"schedule {name} needs one stage per rank, but rank {rank} holds stages "
                f"{list(placement.stages_of(rank))}; use 'adahc', 'interleaved' or 'gpipe'"
            )


@register("1f1b")
def one_forward_one_backward(placement: Placement, num_microbatches: int, _: Conditions) -> Orders:
    """One stage per rank; stage s of S keeps at most S − s micro-batches in flight."""
    _require_one_stage_per_rank("1f1b", placement)
    orders = []
    for rank in range(placement.num_ranks):
        (stage,) = placement.stages_of(rank)
        forward = [Action(F, stage, mb) for mb in range(num_microbatches)]
        backward = [Action(B, stage, mb) for mb in range(num_microbatches)]
        orders.append(_warm_up(forward, backward, placement.num_stages - stage - 1))
    return orders


def microbatch_groups(num_microbatches: int, num_ranks: int) -> list[range]:
    """Groups of micro-batches that go through one virtual stage before the next one's turn.

    At least ``num_ranks`` per group where there are that many, and as even as possible: with a
    smaller last group the first rank would wait for itself through the others.
    """
    count = max(1, num_microbatches // num_ranks)
    size, larger = divmod(num_microbatches, count)
    groups, start = [], 0
    for group in range(count):
        end = start + size + (group < larger)
        groups.append(range(start, end))
        start = end
    return groups


@register("interleaved")
def interleaved(placement: Placement, num_microbatches: int, _: Conditions) -> Orders:
    """Interleaved 1F1B: stage s on rank s mod P, V stages per rank, any number of micro-batches.

    The bubble is (P − 1)/V forward and backward times of a rank when P divides the number of
    micro-batches; otherwise groups of more than P micro-batches keep more of them in flight.
    """
    ranks, stages = placement.num_ranks, placement.num_stages
    if stages % ranks or placement.ranks != tuple(s % ranks for s in range(stages)):
        raise ValueError(
            f"schedule interleaved needs stage s on rank s mod {ranks} and the same number of "
            f"stages on each rank; the stages are on ranks {list(placement.ranks)}"
        )
    virtual = stages // ranks
    groups = microbatch_groups(num_microbatches, ranks)
    orders = []
    for rank in range(ranks):
        mine = placement.stages_of(rank)
        forward = [Action(F, s, mb) for group in groups for s in mine for mb in group]
        backward = [Action(B, s, mb) for group in groups for s in mine[::-1] for mb in group]
        ahead = ranks - rank - 1
        if virtual > 1:
            ahead = 2 * ahead + (virtual - 1) * len(groups[0])
        orders.append(_warm_up(forward, backward, ahead))
    return orders


@register("zb_h1")
def zero_bubble(placement: Placement, num_microbatches: int, _: Conditions) -> Orders:
    """1F1B with the weight gradients split off; one stage per rank.

    Stage s computes the weight gradients of a micro-batch s micro-batches after its input
    gradients, which the earlier stage waits for: a third of the bubble of 1F1B where forward, input
    and weight gradients take the same time.  No stage keeps more micro-batches than the first one.
    """
    _require_one_stage_per_rank("zb_h1", placement)
    orders = []
    for rank in range(placement.num_ranks):
        (stage,) = placement.stages_of(rank)
        forward = [Action(F, stage, mb) for mb in range(num_microbatches)]
        inputs = [Action(I, stage, mb) for mb in range(num_microbatches)]
        order = []
        for action in _warm_up(forward, inputs, placement.num_stages - stage - 1):
            order.append(action)
            if action.kind is I and action.microbatch >= stage:
                order.append(Action(W, stage, action.microbatch - stage))
        rest = range(max(0, num_microbatches - stage), num_microbatches)
        orders.append(order + [Action(W, stage, mb) for mb in rest])
    return orders


@register("adahc")
def adahc(placement: Placement, num_microbatches: int, conditions: Conditions) -> Orders:
    """The fastest of periodic schedules built from one micro-batch, and of 1F1B and interleaved
    1F1B where these fit: for any placement, head-only stages in particular.

    ``ValueError`` when no schedule keeps to the limits in flight.
    """
    return _fastest(placement, num_microbatches, conditions, split=False)


@register("adahc_zb")
def adahc_zero_bubble(
    placement: Placement, num_microbatches: int, conditions: Conditions
) -> Orders:
    """The same with weight gradients as actions of their own, which fill idle time."""
    return _fastest(placement, num_microbatches, conditions, split=True)


MOST_BLOCKS = 2  # periods that are tried in full
ENOUGH_STEPS = 4000  # micro-batches times ranks that tell one order from another
WORTH = 1.004  # gain below which fewer micro-batches in flight are preferred


def _fastest(
    placement: Placement, num_microbatches: int, conditions: Conditions, split: bool
) -> Orders:
    """The least makespan, or nearly so with fewer micro-batches in flight.

    Periodic orders are compared on as many micro-batches as it takes to fill and drain, and the
    best of them are run in full beside the orders that are made without costs.
    """
    heads = [stage for stage, alone in enumerate(placement.head_only) if alone]
    costs = conditions.costs or nominal_costs(placement)
    program = Program(placement, costs, conditions.network, heads if split else ())
    limits = conditions.limits(placement.num_ranks)
    finalists = [
        *_periodic_orders(program, num_microbatches, limits, split),
        *_simple_orders(program, num_microbatches, limits, split),
    ]
    if not finalists:
        raise ValueError(
            f"no schedule keeps at most {limits} micro-batches in flight on the ranks of this "
            "placement; allow more"
        )
    if len(finalists) == 1:
        times = [0.0]
    else:
        times = [Execution(program, orders).makespan for _, orders in finalists]
    near = [i for i, time in enumerate(times) if time <= WORTH * min(times)]
    best = min(near, key=lambda i: (finalists[i][0], times[i], i))
    return [[Action(op.kind, op.stage, mb) for op, mb in order] for order in finalists[best][1]]


Counted = tuple[int, list[list[Step]]]  # most in flight, and every rank's steps


def _periodic_orders(
    program: Program, count: int, limits: Sequence[int] | None, split: bool
) -> list[Counted]:
    """The fastest periodic orders, and the fastest that keeps the fewest in flight."""
    ranks = program.placement.num_ranks
    few = min(count, max(2 * ranks + 8, ENOUGH_STEPS // ranks))
    tried: list[tuple[float, int, Block, int]] = []
    blocks = building_blocks(program, count, split=split, max_in_flight=limits)
    for block in blocks[:MOST_BLOCKS]:
        for ahead in sorted({0, 1, ranks // 4, ranks // 2, min(ranks, 16)}):
            orders = block.orders(ranks, few, ahead)
            peak = _peak(block.orders(ranks, min(count, 4 * ranks), ahead), limits)
            if peak is not None:
                rest = (count - few) * block.period * block.tick
                time = Execution(program, orders).makespan + rest
                tried.append((time, peak, block, ahead))
    tried.sort(key=lambda entry: entry[:2])
    near = [entry for entry in tried if entry[0] <= WORTH * tried[0][0]]
    chosen = [*tried[:1], *sorted(near, key=lambda entry: entry[1::-1])[:1]]
    chosen = chosen[: 1 + (chosen[0] is not chosen[-1])] if chosen else []
    full = [block.orders(ranks, count, ahead) for *_, block, ahead in chosen]
    counted = [(_peak(orders, limits), orders) for orders in full]
    return [(peak, orders) for peak, orders in counted if peak is not None]


def _simple_orders(
    program: Program, count: int, limits: Sequence[int] | None, split: bool
) -> list[Counted]:
    """The orders without costs that this placement allows."""
    found = []
    for generator in (zero_bubble,) if split else (one_forward_one_backward, interleaved):
        try:
            orders = program.steps(generator(program.placement, count, Conditions()))
        except ValueError:
            continue
        peak = _peak(orders, limits)
        if peak is not None:
            found.append((peak, orders))
    return found


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
