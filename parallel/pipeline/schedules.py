"""Pipeline schedules: the order of compute actions on every rank.

A schedule is one function ``(placement, num_microbatches, conditions) -> compute orders``
registered by name; transfers and parameter actions are added by ``lowering``.  In every schedule
both the forward and the backward actions of a stage go through the micro-batches in increasing
order, so that losses and gradients accumulate in the same order under every schedule.
"""

from __future__ import annotations

from collections.abc import Callable

from parallel.pipeline.actions import Action, B, F, I, Kind, Orders, Schedule, W
from parallel.pipeline.fitted import ANY, Conditions, fitted_orders
from parallel.pipeline.interleaving import interleaved_orders, warm_up
from parallel.pipeline.lowering import lower
from parallel.pipeline.units import Placement, lookup

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
    conditions: Conditions = ANY,
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
        orders.append(warm_up(forward, backward, placement.num_stages - stage - 1))
    return orders


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
    return interleaved_orders(
        [placement.stages_of(rank) for rank in range(ranks)], num_microbatches
    )


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
        for action in warm_up(forward, inputs, placement.num_stages - stage - 1):
            order.append(action)
            if action.kind is I and action.microbatch >= stage:
                order.append(Action(W, stage, action.microbatch - stage))
        rest = range(max(0, num_microbatches - stage), num_microbatches)
        orders.append(order + [Action(W, stage, mb) for mb in rest])
    return orders


@register("adahc")
def adahc(placement: Placement, num_microbatches: int, conditions: Conditions) -> Orders:
    """The fastest order for any placement, head-only stages in particular: periodic ones built
    from one micro-batch, 1F1B, interleaved 1F1B with heads in its gaps.

    ``ValueError`` when no schedule keeps to the limits in flight.
    """
    plain = _where_possible((one_forward_one_backward, interleaved), placement, num_microbatches)
    return fitted_orders(placement, num_microbatches, conditions, plain, split=False)


@register("adahc_zb")
def adahc_zero_bubble(
    placement: Placement, num_microbatches: int, conditions: Conditions
) -> Orders:
    """The same with weight gradients as actions of their own, which fill idle time."""
    plain = _where_possible((zero_bubble,), placement, num_microbatches)
    return fitted_orders(placement, num_microbatches, conditions, plain, split=True)


def _where_possible(
    generators: tuple[Generator, ...], placement: Placement, num_microbatches: int
) -> list[Orders]:
    found = []
    for generator in generators:
        try:
            found.append(generator(placement, num_microbatches, ANY))
        except ValueError:
            continue
    return found
