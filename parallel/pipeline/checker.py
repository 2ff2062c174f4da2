"""Proves that a schedule is complete, ordered, monotone, bounded and free of deadlock.

Transfers are checked as if every send blocked until its receive is reached and messages carried no
tags: the strictest behaviour that any backend may show.  Which transfer a rank waits for is then
fixed by its list, so every execution reaches the same end and one symbolic run is a proof.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from parallel.pipeline.actions import (
    ACCUMULATE,
    COMPUTE,
    HW,
    Action,
    B,
    F,
    H,
    I,
    Kind,
    Schedule,
    TensorId,
    W,
    reader,
    reads,
    writer,
    writes,
)
from parallel.pipeline.lowering import ScheduleError

TRANSFER = frozenset((Kind.SEND, Kind.RECV))


def check_schedule(
    schedule: Schedule, max_in_flight: int | Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return each rank's peak of (stage, micro-batch) pairs between forward and backward.

    ``ScheduleError`` explains the first violation: a compute action that is missing, repeated or
    on the wrong rank; a tensor read before it is there; a send and a receive that do not match; a
    deadlock under blocking sends; micro-batches out of order in a stage; parameters used while
    sharded or reduced too early; more pairs in flight than ``max_in_flight`` (one number, or one
    per rank).
    """
    ranks = schedule.placement.num_ranks
    if len(schedule.actions) != ranks:
        raise ScheduleError(f"{len(schedule.actions)} action lists for {ranks} ranks")
    _check_form(schedule)
    _check_complete(schedule)
    for rank in range(ranks):
        _check_microbatch_order(schedule, rank)
        _check_parameters(schedule, rank)
    _check_transfers(schedule)
    caps = [max_in_flight] * ranks if isinstance(max_in_flight, int) else max_in_flight
    peaks = tuple(peak_in_flight([a.kind for a in actions]) for actions in schedule.actions)
    for rank, peak in enumerate(peaks):
        if caps is not None and peak > caps[rank]:
            raise ScheduleError(
                f"rank {rank} keeps {peak} micro-batches in flight, more than {caps[rank]}"
            )
    return peaks


def _check_form(schedule: Schedule) -> None:
    """Every action names an existing stage of its own rank, micro-batch, tensor and peer."""
    placement = schedule.placement
    edges = {(e.tensor, e.source, e.target) for e in placement.edges}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind is Kind.STEP:
                continue
            if not 0 <= action.stage < placement.num_stages:
                raise ScheduleError(f"rank {rank}: {action}: there is no such stage")
            if placement.ranks[action.stage] != rank:
                home = placement.ranks[action.stage]
                raise ScheduleError(f"rank {rank}: {action}: the stage lives on rank {home}")
            once = action.kind in (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE)
            if not once and not 0 <= action.microbatch < schedule.num_microbatches:
                raise ScheduleError(f"rank {rank}: {action}: there is no such micro-batch")
            if action.kind not in TRANSFER:
                continue
            tensor = action.tensor
            if tensor is None or (tensor.name, tensor.source, tensor.target) not in edges:
                raise ScheduleError(f"rank {rank}: {action}: the placement has no such tensor")
            sends = action.kind is Kind.SEND
            near, far = (writer, reader) if sends else (reader, writer)
            if placement.ranks[near(tensor)] != rank or placement.ranks[far(tensor)] != action.peer:
                raise ScheduleError(
                    f"rank {rank}: {action}: the tensor goes from rank "
                    f"{placement.ranks[writer(tensor)]} to rank {placement.ranks[reader(tensor)]}"
                )


def _check_complete(schedule: Schedule) -> None:
    """Each (stage, micro-batch) has exactly one full set of compute actions."""
    done: dict[tuple[int, int], list[Kind]] = {}
    for action in (a for order in schedule.compute_orders() for a in order):
        done.setdefault((action.stage, action.microbatch), []).append(action.kind)
    for stage in range(schedule.placement.num_stages):
        allowed = [[F, B], [F, I, W]] if not schedule.forward_only else [[F]]
        if schedule.placement.head_only[stage] and not schedule.forward_only:
            allowed += [[H], [H, HW]]
        for microbatch in range(schedule.num_microbatches):
            kinds = sorted(done.get((stage, microbatch), []))
            if kinds not in [sorted(kinds_allowed) for kinds_allowed in allowed]:
                given = ", ".join(kinds) or "nothing"
                wanted = " or ".join("+".join(option) for option in allowed)
                raise ScheduleError(
                    f"stage {stage}, micro-batch {microbatch}: needs exactly {wanted}; "
                    f"the schedule has {given}"
                )


def _check_microbatch_order(schedule: Schedule, rank: int) -> None:
    """Forward actions and gradient contributions of a stage take micro-batches in order."""
    latest: dict[tuple[int, str], Action] = {}
    for action in schedule.actions[rank]:
        if action.kind not in COMPUTE:
            continue
        phases = ["gradients accumulate"] if action.kind in ACCUMULATE else []
        if action.kind is HW:  # H of the same micro-batch came before
            phases = ["head weight gradients accumulate"]
        if action.kind in (F, I):
            phases = [f"{action.kind} actions run"]
        for phase in phases:
            previous = latest.get((action.stage, phase))
            if previous is not None and previous.microbatch >= action.microbatch:
                raise ScheduleError(
                    f"rank {rank}: {action} comes after {previous}, but the {phase} in the order "
                    "of micro-batches"
                )
            latest[action.stage, phase] = action


def _check_parameters(schedule: Schedule, rank: int) -> None:
    """Compute finds gathered parameters, REDUCE comes once and last, STEP ends the list."""
    actions = schedule.actions[rank]
    sharded = {a.stage for a in actions if a.kind in (Kind.UNSHARD, Kind.RESHARD)}
    gathered: set[int] = set()
    last_sum = {a.stage: i for i, a in enumerate(actions) if a.kind in ACCUMULATE}
    reduced = Counter(a.stage for a in actions if a.kind is Kind.REDUCE)
    for stage in schedule.placement.stages_of(rank):
        wanted = 0 if schedule.forward_only else 1
        if reduced[stage] != wanted:
            raise ScheduleError(
                f"rank {rank}: {reduced[stage]} REDUCE of stage {stage}, not {wanted}"
            )
    for i, action in enumerate(actions):
        stage, kind = action.stage, action.kind
        wrong = ""
        if kind is Kind.UNSHARD:
            wrong = "its parameters are gathered already" if stage in gathered else ""
            gathered.add(stage)
        elif kind is Kind.RESHARD:
            wrong = "its parameters are not gathered" if stage not in gathered else ""
            gathered.discard(stage)
        elif kind in COMPUTE and stage in sharded - gathered:
            wrong = "its parameters are not gathered"
        elif kind is Kind.REDUCE and i < last_sum.get(stage, -1):
            wrong = f"{actions[last_sum[stage]]} still adds to the gradients"
        elif kind is Kind.STEP and i + 1 < len(actions):
            wrong = "it is not the last action"
        if wrong:
            raise ScheduleError(f"rank {rank}: action {i}, {action}: {wrong}")
    if gathered:
        raise ScheduleError(f"rank {rank}: stages {sorted(gathered)} are never resharded")


def _check_transfers(schedule: Schedule) -> None:
    """Run the lists symbolically with blocking transfers that match by order alone."""
    lists = schedule.actions
    position = [0] * len(lists)
    present: list[set[TensorId]] = [set() for _ in lists]
    runnable = deque(range(len(lists)))

    def head(rank: int) -> Action | None:
        return lists[rank][position[rank]] if position[rank] < len(lists[rank]) else None

    def advance(rank: int, action: Action) -> None:
        for tensor in reads(schedule.placement, action):
            if tensor not in present[rank]:
                raise ScheduleError(
                    f"rank {rank}: action {position[rank]}, {action}, reads {tensor}, "
                    "which is not there yet"
                )
        for tensor in writes(schedule.placement, action):
            if tensor in present[rank]:
                raise ScheduleError(f"rank {rank}: {action} happens twice")
            present[rank].add(tensor)
        position[rank] += 1

    while runnable:
        rank = runnable.popleft()
        while (action := head(rank)) is not None:
            if action.kind not in TRANSFER:
                advance(rank, action)
                continue
            other = head(action.peer)
            if other is None or not _meet(rank, action, other):
                break
            if action.tensor != other.tensor:
                raise ScheduleError(
                    f"mismatched transfer: rank {rank} is at {action}, "
                    f"rank {action.peer} at {other}"
                )
            peer = action.peer
            advance(rank, action)
            advance(peer, other)
            runnable.append(peer)
    stuck = [
        f"rank {rank} waits at action {position[rank]}, {action}"
        for rank in range(len(lists))
        if (action := head(rank)) is not None
    ]
    if stuck:
        raise ScheduleError("deadlock with blocking sends: " + "; ".join(stuck))


def _meet(rank: int, action: Action, other: Action) -> bool:
    """Whether two list heads are the two ends of one transfer, by peer and channel alone."""
    return (
        {action.kind, other.kind} == TRANSFER
        and other.peer == rank
        and action.channel == other.channel
    )


def peak_in_flight(kinds: Sequence[Kind]) -> int:
    """The most (stage, micro-batch) pairs between forward and backward in a rank's actions."""
    if B not in kinds and W not in kinds:
        return 0
    now = peak = 0
    for kind in kinds:
        if kind is F:
            now += 1
            peak = max(peak, now)
        elif kind is B or kind is W:
            now -= 1
    return peak
