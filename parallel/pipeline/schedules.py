"""Pipeline schedules: the order of compute actions on every rank.

A schedule is one function ``(placement, num_microbatches) -> compute orders`` registered by name;
transfers and parameter actions are added by ``lowering``.  In every schedule both the forward and
the backward actions of a stage go through the micro-batches in increasing order, so that losses
and gradients accumulate in the same order under every schedule.
"""

from __future__ import annotations

from collections.abc import Callable

from parallel.pipeline.actions import Action, B, F, Kind, Orders, Schedule
from parallel.pipeline.lowering import lower
from parallel.pipeline.units import Placement, lookup

Generator = Callable[[Placement, int], Orders]
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
    *,
    sharded: bool = False,
    reshard_between: bool = False,
    step: bool = False,
) -> Schedule:
    """The complete action lists of a registered schedule (see ``lowering.lower`` for the options).

    ``ValueError`` for an unknown name, for fewer than one micro-batch, and for a placement that
    the schedule cannot run.
    """
    generator = lookup("pipeline schedule", SCHEDULES, name)
    if num_microbatches < 1:
        raise ValueError(f"{num_microbatches} micro-batches given: at least one is needed")
    orders = generator(placement, num_microbatches)
    return lower(
        name,
        placement,
        num_microbatches,
        orders,
        sharded=sharded,
        reshard_between=reshard_between,
        step=step,
    )


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
def gpipe(placement: Placement, num_microbatches: int) -> Orders:
    """All forward actions, then all backward ones; any number of stages per rank."""
    orders = []
    for rank in range(placement.num_ranks):
        stages = placement.stages_of(rank)
        forward = [Action(F, s, mb) for s in stages for mb in range(num_microbatches)]
        backward = [Action(B, s, mb) for s in reversed(stages) for mb in range(num_microbatches)]
        orders.append(forward + backward)
    return orders


@register("1f1b")
def one_forward_one_backward(placement: Placement, num_microbatches: int) -> Orders:
    """One stage per rank; stage s of S keeps at most S − s micro-batches in flight."""
    for rank in range(placement.num_ranks):
        if len(placement.stages_of(rank)) > 1:
            raise ValueError(
                f"schedule 1f1b needs one stage per rank, but rank {rank} holds stages "
                f"{list(placement.stages_of(rank))}; use 'interleaved' or 'gpipe'"
            )
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
def interleaved(placement: Placement, num_microbatches: int) -> Orders:
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
