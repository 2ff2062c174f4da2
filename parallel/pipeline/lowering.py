"""From compute orders to complete action lists: transfers and parameter actions are inserted here.

Transfers are inserted in one global order of events: when an action is done, the SEND goes to the
end of its rank's list and the RECV to the end of the peer's list *at that moment*.  Running the
events one after another in this order is a legal execution in which both ends of every transfer
meet, so the lists cannot deadlock even if every send blocks until it is received, and the messages
of a pair match in order without tags.
"""

from __future__ import annotations

import heapq
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
    Orders,
    Schedule,
    TensorId,
    W,
    channel_of,
    reader,
    reads,
    writes,
)
from parallel.pipeline.units import Placement

NOMINAL = {F: 1, B: 2, I: 1, W: 1, H: 2, HW: 1}  # durations that shape the global order


class ScheduleError(ValueError):
    """A schedule that cannot run; the message says which action of which rank is wrong and why."""


def lower(
    name: str,
    placement: Placement,
    num_microbatches: int,
    orders: Sequence[Sequence[Action]],
    *,
    sharded: bool = False,
    reshard_between: bool = False,
    step: bool = False,
) -> Schedule:
    """Complete the compute ``orders`` (one per rank) to a schedule.

    ``sharded`` adds UNSHARD and RESHARD around the use of every stage; with ``reshard_between`` a
    stage stays gathered only during its own compute action and the one before it.  REDUCE follows a
    stage's last contribution to its gradients, ``step`` appends STEP.  Orders with forward actions
    alone give a forward-only schedule.  ``ScheduleError`` when the orders wait for each other.
    """
    forward_only = all(action.kind is F for order in orders for action in order)
    lists = tuple(
        tuple(_parameter_actions(actions, sharded, reshard_between, step and not forward_only))
        for actions in _insert_transfers(placement, orders)
    )
    return Schedule(name, placement, num_microbatches, lists, forward_only)


def _insert_transfers(placement: Placement, orders: Sequence[Sequence[Action]]) -> Orders:
    lists: Orders = [[] for _ in orders]
    position = [0] * len(orders)
    present: list[set[TensorId]] = [set() for _ in orders]
    busy_until = [0] * len(orders)
    # (time, 0, rank): the rank's latest action is done; (time, 1, rank): its next one starts.
    events: list[tuple[int, int, int]] = []
    queued = [False] * len(orders)

    def start_if_ready(rank: int, now: int) -> None:
        at = position[rank]
        if queued[rank] or at == len(orders[rank]):
            return
        if present[rank].issuperset(reads(placement, orders[rank][at])):
            queued[rank] = True
            heapq.heappush(events, (max(now, busy_until[rank]), 1, rank))

    for rank in range(len(orders)):
        start_if_ready(rank, 0)
    while events:
        now, starts, rank = heapq.heappop(events)
        action = orders[rank][position[rank]]
        if starts:
            lists[rank].append(action)
            busy_until[rank] = now + NOMINAL[action.kind]
            heapq.heappush(events, (busy_until[rank], 0, rank))
            continue
        position[rank] += 1
        queued[rank] = False
        for tensor in writes(placement, action):
            peer = placement.ranks[reader(tensor)]
            present[peer].add(tensor)
            if peer != rank:
                mb, channel = tensor.microbatch, channel_of(placement, tensor)
                lists[rank].append(Action(Kind.SEND, action.stage, mb, tensor, peer, channel))
                lists[peer].append(Action(Kind.RECV, reader(tensor), mb, tensor, rank, channel))
                start_if_ready(peer, now)
        start_if_ready(rank, now)
    _require_finished(placement, orders, position, present)
    return lists


def _require_finished(
    placement: Placement,
    orders: Sequence[Sequence[Action]],
    position: list[int],
    present: list[set[TensorId]],
) -> None:
    stuck = []
    for rank, order in enumerate(orders):
        if position[rank] < len(order):
            action = order[position[rank]]
            missing = [t for t in reads(placement, action) if t not in present[rank]]
            stuck.append(f"rank {rank} cannot run {action}: {missing[0]} never arrives")
    if stuck:
        raise ScheduleError("the compute orders wait for each other: " + "; ".join(stuck))


def _parameter_actions(
    actions: Sequence[Action], sharded: bool, reshard_between: bool, step: bool
) -> list[Action]:
    """Insert UNSHARD, RESHARD, REDUCE and STEP into one rank's list."""
    computes = [i for i, action in enumerate(actions) if action.kind in COMPUTE]
    uses: dict[int, list[int]] = {}
    for use, i in enumerate(computes):
        uses.setdefault(actions[i].stage, []).append(use)
    before: dict[int, list[Action]] = {}
    after: dict[int, list[Action]] = {}
    for stage, at in uses.items():
        sums = [use for use in at if actions[computes[use]].kind in ACCUMULATE]
        if sums:
            after.setdefault(computes[sums[-1]], []).append(Action(Kind.REDUCE, stage))
        if not sharded:
            continue
        starts, ends = [at[0]], [at[-1]]
        if reshard_between:
            # Gathered one action ahead, so neighbours at distance 2 have no time in between.
            gaps = [k for k in range(1, len(at)) if at[k] - at[k - 1] > 2]
            starts, ends = at[:1] + [at[k] for k in gaps], [at[k - 1] for k in gaps] + at[-1:]
        for first, last in zip(starts, ends):
            ahead = computes[max(first - 1, 0)]
            before.setdefault(ahead, []).append(Action(Kind.UNSHARD, stage))
            after.setdefault(computes[last], []).append(Action(Kind.RESHARD, stage))
    lowered: list[Action] = []
    for i, action in enumerate(actions):
        lowered += [*before.get(i, []), action, *after.get(i, [])]
    return lowered + ([Action(Kind.STEP, -1)] if step else [])
