"""Schedules, lowering and the checker: property tests, then mutations that must be caught."""

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from parallel.pipeline.actions import COMPUTE, HW, Action, B, F, H, I, Kind, Orders, Schedule, W
from parallel.pipeline.checker import check_schedule
from parallel.pipeline.cost import INSTANT, CostTable, Network, UnitCost
from parallel.pipeline.interleaving import microbatch_groups
from parallel.pipeline.layout import read_layout
from parallel.pipeline.lowering import ScheduleError, lower
from parallel.pipeline.schedules import (
    SCHEDULES,
    Conditions,
    forward_schedule,
    make_schedule,
)
from parallel.pipeline.units import HEAD, Placement, Unit, model_units

ONE_STAGE = ("1f1b", "zb_h1")  # schedules that need one stage per rank


def chain(ranks: int, virtual: int = 1, layers: int | None = None) -> Placement:
    """A chain of stages with one block each; further blocks pile up on the first stage."""
    stages = ranks * virtual
    units = model_units(layers or stages)
    first = len(units) - 2 - (stages - 1)
    groups = [units[:first], *([unit] for unit in units[first:-2])]
    groups[-1] = [*groups[-1], *units[-2:]]
    return Placement.interleaved(units, groups, ranks)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Placement, int]:
    """Any schedule with a placement it supports: uneven stages, any number of micro-batches."""
    ranks = draw(st.integers(1, 8))
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    virtual = 1 if name in ONE_STAGE else draw(st.integers(1, 3))
    stages = ranks * virtual
    depth = draw(st.integers(0, 2))
    units = model_units(draw(st.integers(max(1, stages - 3), stages + 5)), depth, 2)
    stages = min(stages, len(units))
    if name == "interleaved":
        stages -= stages % ranks
    if stages < ranks or (name in ONE_STAGE and stages != ranks):
        ranks = stages = 1
    cuts = sorted(draw(st.permutations(range(1, len(units))))[: stages - 1])
    bounds = [0, *cuts, len(units)]
    groups = [units[a:b] for a, b in pairwise(bounds)]
    return name, Placement.interleaved(units, groups, ranks), draw(st.integers(1, 3 * ranks + 1))


@settings(deadline=None, max_examples=150)
@given(requests(), st.booleans(), st.booleans(), st.booleans())
def test_every_schedule_is_proved(
    request: tuple[str, Placement, int], sharded: bool, between: bool, step: bool
) -> None:
    name, placement, count = request
    schedule = make_schedule(
        name, placement, count, sharded=sharded, reshard_between=between, step=step
    )
    peaks = check_schedule(schedule)
    if name == "1f1b":
        limits = [min(count, placement.num_ranks - r) for r in range(placement.num_ranks)]
        assert list(peaks) == limits
        assert check_schedule(schedule, limits) == peaks
    if name == "gpipe":
        stages = [len(placement.stages_of(rank)) for rank in range(placement.num_ranks)]
        assert list(peaks) == [s * count for s in stages]
    forward = forward_schedule(schedule)
    assert forward.forward_only
    check_schedule(forward)
    kinds = {action.kind for actions in forward.actions for action in actions}
    assert kinds <= {F, Kind.SEND, Kind.RECV, Kind.UNSHARD, Kind.RESHARD}
    links = {(channel.removeprefix("head_"), a < b) for channel, a, b in forward.links}
    assert {channel for channel, _ in links} <= {"forward"}


@st.composite
def stars(draw: st.DrawFn) -> tuple[Placement, int, CostTable]:
    """The trunk cut anywhere and put on any rank, head chunks anywhere, any costs."""
    depth, chunks = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    ranks = draw(st.integers(1, 5))
    units = model_units(draw(st.integers(1, 7)), depth, chunks)
    trunk = [unit for unit in units if unit.kind != HEAD]
    cuts = sorted(draw(st.permutations(range(1, len(trunk))))[: draw(st.integers(0, 5))])
    stages = [trunk[a:b] for a, b in pairwise([0, *cuts, len(trunk)])]
    owners = [draw(st.integers(0, ranks - 1)) for _ in stages]
    for k in range(depth + 1):
        owner = [draw(st.integers(0, ranks - 1)) for _ in range(chunks)]
        for rank in sorted(set(owner)):
            stages.append([Unit(HEAD, k, c) for c in range(chunks) if owner[c] == rank])
            owners.append(rank)
    used = {rank: i for i, rank in enumerate(sorted(set(owners)))}
    placement = Placement(
        tuple(units), tuple(map(tuple, stages)), tuple(used[rank] for rank in owners),
        draw(st.sampled_from(["block", "norm", "trunk"])),
    )  # fmt: skip
    number = st.sampled_from([0.0, 0.3, 1.0, 2.7])
    kinds = {
        kind: UnitCost(draw(number), draw(number), draw(st.sampled_from([0.0, 0.4, 1.0])),
                       output_bytes=draw(number))
        for kind in "Etnmh"
    }  # fmt: skip
    return placement, draw(st.integers(1, 2 * ranks + 1)), CostTable(kinds)


@settings(max_examples=50)
@given(stars(), st.sampled_from(["adahc", "adahc_zb"]), st.sampled_from([INSTANT, Network(0.2, 3)]))
def test_periodic_schedules_of_any_placement_are_proved(
    star: tuple[Placement, int, CostTable], name: str, network: Network
) -> None:
    placement, count, costs = star
    schedule = make_schedule(name, placement, count, Conditions(costs, network))
    peaks = check_schedule(schedule)
    again = make_schedule(name, placement, count, Conditions(costs, network))
    assert again.actions == schedule.actions
    check_schedule(forward_schedule(schedule))
    # As few as a stage can have: one micro-batch at a time.
    stages = [
        sum(not placement.head_only[s] for s in placement.stages_of(rank))
        for rank in range(placement.num_ranks)
    ]
    least = [max(1, number) for number in stages]
    tight = make_schedule(name, placement, count, Conditions(costs, network, least))
    assert all(peak <= limit for peak, limit in zip(check_schedule(tight, least), least))
    limit = max(1, max(peaks) - 1)
    if limit >= max(least):
        check_schedule(
            make_schedule(name, placement, count, Conditions(costs, network, limit)), limit
        )


def test_limits_that_no_schedule_keeps() -> None:
    placement = chain(2, 2)
    with pytest.raises(ValueError, match=r"no schedule keeps at most \[1, 1\] micro-batches"):
        make_schedule("adahc", placement, 4, Conditions(max_in_flight=1))


def test_one_stage_per_rank_is_plain_1f1b() -> None:
    schedule = make_schedule("1f1b", chain(3), 4)
    orders = [[f"{a.kind}{a.microbatch}" for a in order] for order in schedule.compute_orders()]
    assert orders == [
        "F0 F1 F2 B0 F3 B1 B2 B3".split(),
        "F0 F1 B0 F2 B1 F3 B2 B3".split(),
        "F0 B0 F1 B1 F2 B2 F3 B3".split(),
    ]
    again = make_schedule("interleaved", chain(3), 4)
    assert again.actions == schedule.actions


def test_neighbouring_stages_on_one_rank_exchange_nothing() -> None:
    units = model_units(4)
    groups = (tuple(units[:2]), tuple(units[2:4]), tuple(units[4:]))
    schedule = make_schedule("gpipe", Placement(tuple(units), groups, (0, 0, 1)), 3)
    check_schedule(schedule)
    assert schedule.links == (("backward", 1, 0), ("forward", 0, 1))
    sends = [a for a in schedule.actions[0] if a.kind is Kind.SEND]
    assert len(sends) == 3 and all(a.stage == 1 and a.peer == 1 for a in sends)


def test_microbatch_groups_are_even_and_large_enough() -> None:
    assert microbatch_groups(8, 4) == [range(4), range(4, 8)]
    assert microbatch_groups(11, 4) == [range(6), range(6, 11)]
    assert microbatch_groups(3, 4) == [range(3)]


def test_parameter_actions() -> None:
    def words(**options: bool) -> list[str]:
        schedule = make_schedule("gpipe", chain(1, 2), 4, Conditions(), **options)
        check_schedule(schedule)
        return [f"{a.kind}{a.stage}" for a in schedule.actions[0] if a.kind not in (F, B)]

    assert words() == ["REDUCE1", "REDUCE0"]
    kept = ["UNSHARD0", "UNSHARD1", "REDUCE1", "RESHARD1", "REDUCE0", "RESHARD0"]
    assert words(sharded=True) == kept
    assert words(sharded=True, step=True) == [*kept, "STEP-1"]
    between = words(sharded=True, reshard_between=True)
    # Stage 0 is used, left during stage 1, and used again; stage 1 turns round at once.
    first = ["UNSHARD0", "UNSHARD1", "RESHARD0"]
    assert between == [*first, "UNSHARD0", "REDUCE1", "RESHARD1", "REDUCE0", "RESHARD0"]


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"unknown pipeline schedule '1f1'.*mean '1f1b'"):
        make_schedule("1f1", chain(2), 2)
    with pytest.raises(ValueError, match="at least one is needed"):
        make_schedule("1f1b", chain(2), 0)
    with pytest.raises(ValueError, match=r"rank 0 holds stages \[0, 2\]; use 'adahc', 'interl"):
        make_schedule("1f1b", chain(2, 2), 2)
    units = tuple(model_units(1))
    swapped = Placement(units, (units[:2], units[2:]), (1, 0))
    with pytest.raises(ValueError, match=r"stage s on rank s mod 2 .* on ranks \[1, 0\]"):
        make_schedule("interleaved", swapped, 2)
    check_schedule(make_schedule("1f1b", swapped, 3))
    orders: Orders = [[Action(B, 0, 0), Action(F, 0, 0)], [Action(F, 1, 0), Action(B, 1, 0)]]
    with pytest.raises(ScheduleError, match=r"rank 0 cannot run B .* never arrives; rank 1 cannot"):
        lower("mine", chain(2), 1, orders)


# ------------------------------------------------------------------ the checker must object


def edit(schedule: Schedule, rank: int, change: Callable[[list[Action]], object]) -> Schedule:
    lists = [list(actions) for actions in schedule.actions]
    change(lists[rank])
    return replace(schedule, actions=tuple(map(tuple, lists)))


@settings(deadline=None, max_examples=100)
@given(requests(), st.booleans(), st.randoms(use_true_random=False))
def test_dropping_any_action_is_caught(
    request: tuple[str, Placement, int], sharded: bool, rng: random.Random
) -> None:
    name, placement, count = request
    schedule = make_schedule(name, placement, count, sharded=sharded, reshard_between=sharded)
    rank = rng.randrange(placement.num_ranks)
    at = rng.randrange(len(schedule.actions[rank]))
    with pytest.raises(ScheduleError):
        check_schedule(edit(schedule, rank, lambda actions: actions.pop(at)))


@settings(deadline=None, max_examples=100)
@given(requests(), st.booleans(), st.randoms(use_true_random=False))
def test_repeating_any_action_is_caught(
    request: tuple[str, Placement, int], sharded: bool, rng: random.Random
) -> None:
    name, placement, count = request
    schedule = make_schedule(name, placement, count, sharded=sharded, reshard_between=sharded)
    rank = rng.randrange(placement.num_ranks)
    at = rng.randrange(len(schedule.actions[rank]))
    with pytest.raises(ScheduleError):
        check_schedule(edit(schedule, rank, lambda actions: actions.insert(at, actions[at])))


@settings(deadline=None, max_examples=100)
@given(requests(), st.randoms(use_true_random=False))
def test_swapping_two_actions_of_a_kind_is_caught(
    request: tuple[str, Placement, int], rng: random.Random
) -> None:
    """Same kind and stage (or a forward and its own backward): their order is never free."""
    name, placement, count = request
    schedule = make_schedule(name, placement, count)
    rank = rng.randrange(placement.num_ranks)
    actions = schedule.actions[rank]
    i = rng.choice([i for i, action in enumerate(actions) if action.kind in COMPUTE])
    kind, stage, mb = actions[i].kind, actions[i].stage, actions[i].microbatch
    partners = [
        j
        for j, other in enumerate(actions)
        if j != i and other.stage == stage and other.kind in COMPUTE
        if other.kind is kind or other.microbatch == mb
    ]
    j = rng.choice(partners)

    def swap(actions: list[Action]) -> None:
        actions[i], actions[j] = actions[j], actions[i]

    with pytest.raises(ScheduleError):
        check_schedule(edit(schedule, rank, swap))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.filter_too_much])
@given(requests(), st.randoms(use_true_random=False))
def test_swapping_two_transfers_of_a_link_is_caught(
    request: tuple[str, Placement, int], rng: random.Random
) -> None:
    name, placement, count = request
    schedule = make_schedule(name, placement, count)
    rank = rng.randrange(placement.num_ranks)
    ends: dict[tuple[Kind, int, str], list[int]] = {}
    for at, action in enumerate(schedule.actions[rank]):
        if action.tensor is not None:
            ends.setdefault((action.kind, action.peer, action.channel), []).append(at)
    assume(any(len(link) > 1 for link in ends.values()))
    i, j = rng.sample(rng.choice([link for link in ends.values() if len(link) > 1]), 2)

    def swap(actions: list[Action]) -> None:
        actions[i], actions[j] = actions[j], actions[i]

    with pytest.raises(ScheduleError):
        check_schedule(edit(schedule, rank, swap))


def position(schedule: Schedule, rank: int, kind: Kind, microbatch: int = -1) -> int:
    return next(
        i
        for i, a in enumerate(schedule.actions[rank])
        if a.kind is kind and microbatch in (-1, a.microbatch)
    )


def test_explanations() -> None:
    schedule = make_schedule("1f1b", chain(3), 4, sharded=True, step=True)

    def objects(match: str, rank: int, target: Kind, **change: object) -> None:
        at = position(schedule, rank, target)

        def apply(actions: list[Action]) -> None:
            actions[at] = replace(actions[at], **change)  # type: ignore[arg-type]

        with pytest.raises(ScheduleError, match=match):
            check_schedule(edit(schedule, rank, apply))

    objects("goes from rank 0 to rank 1", 0, Kind.SEND, peer=2)
    objects("deadlock with blocking sends: .*rank 0 waits at", 0, Kind.SEND, channel="backward")
    objects("there is no such micro-batch", 1, F, microbatch=9)
    objects("there is no such stage", 1, F, stage=7)
    objects("the stage lives on rank 2", 1, F, stage=2)
    objects(r"needs exactly F.B or F.I.W; the schedule has B, B", 1, F, kind=B)
    objects("no such tensor", 1, Kind.RECV, tensor=None)

    def move(rank: int, kind: Kind, to: int) -> Schedule:
        at = position(schedule, rank, kind)
        return edit(schedule, rank, lambda actions: actions.insert(to, actions.pop(at)))

    with pytest.raises(ScheduleError, match="B of stage 1, micro-batch 3 still adds to"):
        check_schedule(move(1, Kind.REDUCE, 1))
    with pytest.raises(ScheduleError, match="STEP: it is not the last action"):
        check_schedule(move(1, Kind.STEP, 0))
    with pytest.raises(ScheduleError, match="F of stage 1, micro-batch 0: its parameters are not"):
        check_schedule(move(1, Kind.UNSHARD, position(schedule, 1, F) + 1))
    with pytest.raises(ScheduleError, match="rank 0 keeps 3 micro-batches in flight, more than 2"):
        check_schedule(schedule, 2)
    with pytest.raises(ScheduleError, match="2 action lists for 3 ranks"):
        check_schedule(replace(schedule, actions=schedule.actions[:2]))


def test_crossing_blocking_sends_are_a_deadlock() -> None:
    """Both ranks send before they receive: fine with buffered sends, a deadlock without."""
    schedule = make_schedule("1f1b", chain(2), 2)

    def receive_late(actions: list[Action]) -> None:
        receive = position(schedule, 1, Kind.RECV, 1)
        assert receive < position(schedule, 1, Kind.SEND, 0), "the lowering is careful about this"
        actions.insert(position(schedule, 1, Kind.SEND, 0), actions.pop(receive))

    late = edit(schedule, 1, receive_late)
    words = [[f"{a.kind}{a.microbatch}" for a in actions] for actions in late.actions]
    assert words[0][:5] == "F0 SEND0 F1 SEND1 RECV0".split()
    assert words[1][:5] == "RECV0 F0 B0 SEND0 RECV1".split()
    with pytest.raises(
        ScheduleError, match=r"deadlock.*rank 0 waits .*SEND.*; rank 1 waits .*SEND"
    ):
        check_schedule(late)


# ------------------------------------------------------------------ other shapes, same frame


def split_backward(orders: Orders) -> Orders:
    """Every B becomes I, with its W one backward later: a zero-bubble-like order."""
    result = []
    for order in orders:
        late: list[Action] = []
        new: list[Action] = []
        for action in order:
            if action.kind is B:
                new.append(replace(action, kind=I))
                new += late
                late = [replace(action, kind=W)]
            else:
                new.append(action)
        result.append(new + late)
    return result


@pytest.mark.parametrize("name, virtual", [("1f1b", 1), ("gpipe", 2), ("interleaved", 2)])
def test_split_backward_in_any_schedule(name: str, virtual: int) -> None:
    placement = chain(4, virtual)
    orders = split_backward(make_schedule(name, placement, 8).compute_orders())
    schedule = lower("split", placement, 8, orders, sharded=True)
    check_schedule(schedule)
    for rank in range(4):
        last = max(i for i, a in enumerate(schedule.actions[rank]) if a.kind is W)
        assert position(schedule, rank, Kind.REDUCE) > position(schedule, rank, W, 7)
        assert schedule.actions[rank][last + 1].kind is Kind.REDUCE
    at = position(schedule, 2, W, 5)
    with pytest.raises(ScheduleError, match=r"needs exactly F.B or F.I.W; the schedule has F, I"):
        check_schedule(edit(schedule, 2, lambda actions: actions.pop(at)))

    def early(actions: list[Action]) -> None:
        actions.insert(0, actions.pop(at))

    with pytest.raises(ScheduleError):
        check_schedule(edit(schedule, 2, early))


def star(chunks: int = 4) -> tuple[Placement, Orders]:
    """Two block stages; the head's token chunks go to ranks 0, 1 and 2 in a star."""
    units = model_units(2, head_chunks=chunks)
    heads = units[4:]
    groups = (tuple(units[:2]), tuple(units[2:4]), *((head,) for head in heads))
    owners = tuple(c % 3 for c in range(chunks))
    placement = Placement(tuple(units), groups, (0, 1, *owners))
    orders: Orders = [[], [], []]
    for mb in range(3):
        orders[0].append(Action(F, 0, mb))
        orders[1].append(Action(F, 1, mb))
        for c, owner in enumerate(owners):
            orders[owner].append(Action(H, 2 + c, mb))
        orders[1].append(Action(B, 1, mb))
        orders[0].append(Action(B, 0, mb))
        for c, owner in enumerate(owners):
            if c % 2:
                orders[owner].append(Action(HW, 2 + c, mb))
    return placement, orders


def test_head_chunks_in_a_star_need_no_new_machinery() -> None:
    placement, orders = star()
    schedule = lower("star", placement, 3, orders, sharded=True, reshard_between=True)
    check_schedule(schedule)
    assert schedule.links == (
        ("backward", 1, 0),
        ("forward", 0, 1),
        ("head_backward", 0, 1),
        ("head_backward", 2, 1),
        ("head_forward", 1, 0),
        ("head_forward", 1, 2),
    )
    at = position(schedule, 2, H, 1)
    with pytest.raises(ScheduleError, match=r"stage 4, micro-batch 1: needs exactly F.B"):
        check_schedule(edit(schedule, 2, lambda actions: actions.pop(at)))
    # A block stage cannot be a fused head action.
    wrong = [[replace(a, kind=H) if (a.kind, a.stage) == (F, 0) else a for a in o] for o in orders]
    with pytest.raises(ScheduleError):
        check_schedule(lower("wrong", placement, 3, wrong))
    check_schedule(forward_schedule(schedule))


def test_mtp_stages_skip_and_split_losses() -> None:
    for layout in ("Et|t|m|L", "Et|t|m|m|L", "E|t|tm|m|LL|L", "E|t|m|L|L"):
        for name in ("1f1b", "gpipe", "interleaved"):
            placement = read_layout(layout, layout.count("|") + 1, head_chunks=2)
            check_schedule(make_schedule(name, placement, 5))
    placement = read_layout("Et|t|t|t|m|L", 3)
    check_schedule(make_schedule("interleaved", placement, 6))


def test_planning_needs_no_torch() -> None:
    modules = "actions checker cost layout lowering planner rebalance schedules simulate timeline"
    modules += " units"
    imports = ", ".join(f"parallel.pipeline.{name}" for name in modules.split())
    code = f"import sys, {imports}; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)
