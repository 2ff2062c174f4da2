"""The executor in real processes: every schedule gives the single-process loss and gradients."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.pipeline.actions import HW, Action, B, F, H, I, Kind, Orders, Schedule, W
from parallel.pipeline.checker import check_schedule
from parallel.pipeline.executor import Executor
from parallel.pipeline.layout import read_layout
from parallel.pipeline.links import create_links
from parallel.pipeline.lowering import lower
from parallel.pipeline.schedules import SCHEDULES, make_schedule
from parallel.pipeline.stage import StageModule
from parallel.pipeline.timeline import ascii_timeline
from parallel.pipeline.units import Placement, Unit, model_units
from tests.distributed import RankError, run_ranks
from tests.parity.pipeline_toy import Outcome, ToyStage, error, joined, reference

pytestmark = pytest.mark.parity

# ------------------------------------------------------------------ what runs on every rank


def clear(stages: Iterable[ToyStage]) -> None:
    for stage in stages:
        stage.losses = {}
        for parameter in stage.parameters():
            parameter.grad = None


def train(rank: int, world: int, schedules: list[Schedule]) -> list[Outcome]:
    """Each schedule twice (the second time on recycled buffers), and forward only."""
    outcomes = []
    for schedule in schedules:
        check_schedule(schedule)
        links = create_links(schedule, [range(world)])
        placement = schedule.placement
        stages = {s: ToyStage(placement, s) for s in placement.stages_of(rank)}
        executor = Executor(schedule, stages, links, timeout=30)
        executor.run()
        first = Outcome.of(stages.values())
        buffers = sum(map(len, executor.free.values()))
        clear(stages.values())
        executor.run()
        second = Outcome.of(stages.values())
        assert sum(map(len, executor.free.values())) == buffers, "buffers are reused"
        assert first.losses == second.losses
        for name, gradients in first.gradients.items():
            assert all(map(torch.equal, gradients, second.gradients[name]))
        clear(stages.values())
        executor.run_forward()
        assert all(p.grad is None for stage in stages.values() for p in stage.parameters())
        assert {k: v for s in stages.values() for k, v in s.losses.items()} == first.losses
        assert not any(stage.graphs for stage in stages.values())
        outcomes.append(first)
    return outcomes


def uneven(ranks: int, virtual: int) -> Placement:
    """Stages of 1, 2, 3, 1, 2, 3, ... blocks."""
    stages = ranks * virtual
    blocks = ["t" * (stage % 3 + 1) for stage in range(stages)]
    return read_layout("E" + "|".join(blocks) + "L", ranks)


@pytest.mark.parametrize(
    "ranks, virtual",
    [(2, 1), pytest.param(2, 2, marks=pytest.mark.smoke), (4, 1), (4, 2)],
)
def test_every_schedule_matches_the_single_process_run(ranks: int, virtual: int) -> None:
    placement = uneven(ranks, virtual)
    counts = sorted({1, ranks - 1, ranks, 3 * ranks})
    schedules = [
        make_schedule(name, placement, count)
        for name in SCHEDULES
        for count in counts
        if name not in ("1f1b", "zb_h1") or virtual == 1
    ]
    results = run_ranks(ranks, train, schedules)
    for i, schedule in enumerate(schedules):
        found = joined([result[i] for result in results])
        expected = reference(placement.units, schedule.num_microbatches)
        assert error(found, expected) <= 1e-12, (schedule.name, schedule.num_microbatches)


def test_one_rank_alone() -> None:
    for name, layout in (("1f1b", "EttL"), ("gpipe", "Et|tt|L"), ("interleaved", "Et|tt|L")):
        schedule = make_schedule(name, read_layout(layout, 1), 3)
        (result,) = run_ranks(1, train, [schedule])
        assert error(result[0], reference(schedule.placement.units, 3)) <= 1e-12


def test_mtp_units_on_stages_of_their_own() -> None:
    """Skip edges and several heads: a stage reads and writes more than one tensor."""
    schedules = [
        make_schedule("1f1b", read_layout(layout, 4, head_chunks=2, mtp_input=order), 5)
        for layout, order in (
            ("Et|t|m|L", "block"),
            ("Et|t|mm|LLL", "block"),
            ("Et|tm|L|L", "block"),
            ("E|t|t|mL", "norm"),
        )
    ]
    results = run_ranks(4, train, schedules)
    for i, schedule in enumerate(schedules):
        found = joined([result[i] for result in results])
        placement = schedule.placement
        expected = reference(placement.units, 5, order=placement.mtp_input)
        assert error(found, expected) <= 1e-12, str(placement)


def split(schedule: Schedule) -> Schedule:
    """I in the place of B, and W one backward later."""
    orders: Orders = []
    for order in schedule.compute_orders():
        new: list[Action] = []
        late: list[Action] = []
        for action in order:
            if action.kind is B:
                new += [replace(action, kind=I), *late]
                late = [replace(action, kind=W)]
            else:
                new.append(action)
        orders.append(new + late)
    return lower("split", schedule.placement, schedule.num_microbatches, orders)


def star(count: int) -> Schedule:
    """Blocks on ranks 0 and 1; each head chunk on a rank of its own choice, sent there directly."""
    units = model_units(3, mtp_depth=1, head_chunks=4)
    heads = [unit for unit in units if unit.kind == "h"]
    body = [unit for unit in units if unit.kind != "h"]
    owners = [(unit.index + unit.chunk) % 3 for unit in heads]
    groups = (tuple(body[:2]), tuple(body[2:]), *((head,) for head in heads))
    placement = Placement(tuple(units), groups, (0, 1, *owners))
    orders: Orders = [[], [], []]
    for mb in range(count):
        orders[0].append(Action(F, 0, mb))
        orders[1].append(Action(F, 1, mb))
        for stage, owner in enumerate(owners, 2):
            orders[owner].append(Action(H, stage, mb))
        orders[1].append(Action(B, 1, mb))
        orders[0].append(Action(B, 0, mb))
        for stage, owner in enumerate(owners, 2):
            orders[owner].append(Action(HW, stage, mb))
    return lower("star", placement, count, orders)


def test_split_backward_and_head_chunks_in_a_star() -> None:
    for schedule in (split(make_schedule("interleaved", uneven(2, 2), 5)), star(3)):
        ranks = schedule.placement.num_ranks
        results = run_ranks(ranks, train, [schedule])
        expected = reference(schedule.placement.units, schedule.num_microbatches)
        assert error(joined([result[0] for result in results]), expected) <= 1e-12


# ------------------------------------------------------------------ negative controls


class DropsALayer(ToyStage):
    def unit_output(self, unit: Unit, x: Tensor | None, microbatch: int) -> Tensor:
        if unit == Unit("t", 1):
            assert x is not None
            return nn.functional.gelu(x) + 0 * super().unit_output(unit, x, microbatch)
        return super().unit_output(unit, x, microbatch)


class SkipsABackward(ToyStage):
    def backward(self, microbatch: int, grad_output: Any) -> Any:
        if microbatch != 1 or self.stage != 1:
            return super().backward(microbatch, grad_output)
        kept = [p.grad.clone() if p.grad is not None else None for p in self.parameters()]
        result = super().backward(microbatch, grad_output)
        for parameter, gradient in zip(self.parameters(), kept):
            parameter.grad = gradient
        return result


class Identity(ToyStage):
    """Hands its own input on, and the gradient it was given back; stage 0 is slow to take it."""

    def forward(self, microbatch: int, x: Any) -> Any:
        return x if self.stage == 1 else super().forward(microbatch, x)

    def backward(self, microbatch: int, grad_output: Any) -> Any:
        if self.stage == 1:
            return grad_output
        time.sleep(0.01 if self.stage == 0 else 0)
        return super().backward(microbatch, grad_output)


class Slow(ToyStage):
    """Random pauses, other ones on every rank."""

    def forward(self, microbatch: int, x: Any) -> Any:
        time.sleep(random.random() * 0.01)
        return super().forward(microbatch, x)

    def backward(self, microbatch: int, grad_output: Any) -> Any:
        time.sleep(random.random() * 0.01)
        return super().backward(microbatch, grad_output)


def run_stages(
    rank: int,
    world: int,
    schedule: Schedule,
    make: Callable[[Placement, int], ToyStage],
    runs: int,
    send_window: int = 1,
) -> list[Outcome]:
    random.seed(rank)
    links = create_links(schedule, [range(world)])
    outcomes = []
    stages = {s: make(schedule.placement, s) for s in schedule.placement.stages_of(rank)}
    executor = Executor(schedule, stages, links, timeout=30, prefetch=1, send_window=send_window)
    for _ in range(runs):
        clear(stages.values())
        executor.run()
        outcomes.append(Outcome.of(stages.values()))
    return outcomes


@pytest.mark.parametrize("wrong", [DropsALayer, SkipsABackward])
def test_the_comparison_sees_a_dropped_layer_and_a_skipped_backward(wrong: type) -> None:
    schedule = make_schedule("1f1b", uneven(2, 1), 4)
    results = run_ranks(2, run_stages, schedule, wrong, 1)
    expected = reference(schedule.placement.units, 4)
    assert error(joined([result[0] for result in results]), expected) > 1e-3


def test_a_stage_that_hands_its_buffers_on() -> None:
    """A recycled buffer must not be one that is still being sent."""
    placement = read_layout("Et|t|tL", 3)
    schedule = make_schedule("gpipe", placement, 9)
    results = run_ranks(3, run_stages, schedule, Identity, 3, 9)
    # The same network without block 1: blocks 0 and 2 in one process.
    first, last = ToyStage(placement, 0), ToyStage(placement, 2)
    for mb in range(9):
        x = first.forward(mb, None).detach()
        last.forward(mb, x)
        first.backward(mb, last.backward(mb, None))
    expected = Outcome.of([first, last])
    for run in range(3):
        found = joined([result[run] for result in results])
        del found.gradients["t", 1]
        assert error(found, expected) <= 1e-12


def test_random_pauses_change_no_bit() -> None:
    schedule = make_schedule("interleaved", uneven(4, 2), 6)
    results = run_ranks(4, run_stages, schedule, Slow, 5)
    runs = [joined([result[i] for result in results]) for i in range(5)]
    assert error(runs[0], reference(schedule.placement.units, 6)) <= 1e-12
    for run in runs[1:]:
        assert run.losses == runs[0].losses
        for name, gradients in run.gradients.items():
            assert all(map(torch.equal, gradients, runs[0].gradients[name]))


# ------------------------------------------------------------------ replicas, parameters, errors


class Replicated(ToyStage):
    """Sums its gradients over the data-parallel ranks in the REDUCE action."""

    group: Any = None

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        for parameter in self.parameters():
            dist.all_reduce(parameter.grad, group=self.group)


def replicas(rank: int, world: int, schedule: Schedule) -> tuple[Outcome, list[str], int]:
    pipelines = [[0, 2], [3, 1]]  # not in rank order
    links = create_links(schedule, pipelines)
    groups = [dist.new_group([0, 3]), dist.new_group([2, 1])]
    offset = 3 if rank in pipelines[1] else 0
    stage = Replicated(schedule.placement, links.rank, offset)
    stage.group = groups[links.rank]
    steps: list[int] = []
    Executor(schedule, {links.rank: stage}, links, on_step=lambda: steps.append(1)).run()
    return Outcome.of([stage]), stage.calls, len(steps)


def test_two_pipelines_reduce_over_their_replicas() -> None:
    placement = uneven(2, 1)
    schedule = make_schedule("1f1b", placement, 3, sharded=True, step=True)
    results = run_ranks(4, replicas, schedule)
    one, two = reference(placement.units, 3), reference(placement.units, 3, offset=3)
    two.add(Outcome({}, one.gradients))
    assert error(joined([results[3][0], results[1][0]]), two) <= 1e-12
    for outcome, calls, steps in results:
        assert calls == ["unshard", "reduce", "reshard"]
        assert steps == 1
        assert outcome.gradients


def stuck(rank: int, world: int, schedule: Schedule) -> None:
    class Late(ToyStage):
        def forward(self, microbatch: int, x: Any) -> Any:
            if self.stage == 1 and microbatch == 1:
                time.sleep(2)
            return super().forward(microbatch, x)

    links = create_links(schedule, [range(world)])
    executor = Executor(schedule, {rank: Late(schedule.placement, rank)}, links, timeout=0.5)
    executor.run()


def test_a_late_message_says_who_waited_for_what() -> None:
    schedule = make_schedule("1f1b", uneven(2, 1), 2)
    with pytest.raises(RankError) as caught:
        run_ranks(2, stuck, schedule)
    assert (
        "TransferError: rank 0 (global rank 0) waited 0.5 s for RECV of gradient of t0 "
        "(stage 1 to 0, micro-batch 1) from rank 1 on channel backward (global rank 1) at action "
        "8 of 9: B of stage 0, micro-batch 1"
    ) in str(caught.value)
    # The other rank's send fails because its peer is gone, and it says so as well.
    assert "TransferError: rank 1 (global rank 1) waited" in str(caught.value)


def recorded(rank: int, world: int, schedule: Schedule) -> list[Any]:
    links = create_links(schedule, [range(world)])
    executor = Executor(schedule, {rank: Slow(schedule.placement, rank)}, links, record=True)
    executor.run()
    return executor.events


def test_recorded_times() -> None:
    schedule = make_schedule("1f1b", uneven(2, 1), 4)
    results = run_ranks(2, recorded, schedule)
    for rank, events in enumerate(results):
        compute = [event.action for event in events if event.action.kind is not Kind.RECV]
        assert compute == schedule.compute_orders()[rank]
        assert sum(event.action.kind is Kind.RECV for event in events) == 4
        assert all(event.start <= event.end for event in events)
        assert all(a.end <= b.start for a, b in pairwise(events))
    drawing = ascii_timeline([event for events in results for event in events])
    assert drawing.count("rank") == 2


def misfits(rank: int, world: int, schedule: Schedule) -> list[str]:
    class Wide(ToyStage):
        def forward(self, microbatch: int, x: Any) -> Any:
            return super().forward(microbatch, x)[:, :-1]

    class Two(ToyStage):
        def forward(self, microbatch: int, x: Any) -> Any:
            y = super().forward(microbatch, x)
            return y, y

    class NoReduce(ToyStage):
        reduce_gradients = None  # type: ignore[assignment]

    placement = schedule.placement
    links = create_links(schedule, [range(world)])
    longer = make_schedule("gpipe", read_layout("Et|t|t|L", 2), 2, step=True)
    attempts: list[Callable[[], Any]] = [
        lambda: Executor(schedule, {7: ToyStage(placement, 0)}, links),
        lambda: Executor(schedule, {rank: cast(StageModule, NoReduce(placement, rank))}, links),
        lambda: Executor(schedule, {rank: ToyStage(placement, rank)}, links, prefetch=0),
        lambda: Executor(
            longer, {s: ToyStage(longer.placement, s) for s in (rank, rank + 2)}, links
        ),
        lambda: create_links(schedule, [[0]]),
        lambda: create_links(schedule, [[0, 0]]),
    ]
    if rank == 0:
        attempts += [
            lambda: Executor(schedule, {0: Wide(placement, 0)}, links).run(),
            lambda: Executor(schedule, {0: Two(placement, 0)}, links).run(),
        ]
    messages = []
    for attempt in attempts:
        with pytest.raises(ValueError) as caught:
            attempt()
        messages.append(str(caught.value))
    return messages


def test_what_does_not_fit_is_refused() -> None:
    schedule = make_schedule("1f1b", uneven(2, 1), 2)
    messages = run_ranks(2, misfits, schedule)[0]
    for message, part in zip(
        messages,
        [
            "rank 0 runs stages [0]; modules given for [7]",
            "the module of stage 0 has no method reduce_gradients",
            "prefetch 0, send_window 8: at least 1 each",
            "the links have no ('forward', 1, 0), needed for RECV of t1",
            "must hold 2 ranks each",
            "each rank once",
            "the stage returned (8, 5) of torch.float64, agreed are (8, 6) of torch.float64",
            "the stage returned 2 tensors for 1 edges",
        ],
        strict=True,
    ):
        assert part in message
