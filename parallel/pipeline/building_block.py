"""The building block of a periodic schedule: one micro-batch's actions in a table of period T.

Micro-batch i + 1 does what micro-batch i does, T later.  So the actions of one micro-batch must not
overlap on a rank when their times are taken modulo T.  T cannot be less than the busiest rank's
load; a placement of the actions at exactly that T may not exist, so slightly longer periods are
tried too.  Each action is placed at an early time at which the rest of its rank's actions still fit
into the gaps that remain; a few of the best partial placements are kept (beam search).  Times are
whole ticks, so that what fits exactly does, on every machine alike.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from parallel.pipeline.actions import HW, B, F, H, I, W
from parallel.pipeline.program import Op, Program, Step

TICKS = 1 << 16  # per busiest rank's load
STRETCH = (1.0, 1.0025, 1.005, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.08)
STRETCH_FURTHER = (1.15, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # for tight limits in flight
MOST_OPTIONS = 3  # places tried per action and partial placement

Gap = tuple[int, int]  # start in [0, T), length
Gaps = tuple[Gap, ...] | None  # None: nothing is placed yet


@dataclass(frozen=True)
class Block:
    """``starts[i]`` of each op for micro-batch 0, in ticks; the same again every ``period``.

    span: of one micro-batch, in ticks.  tick: in the cost table's unit of time.
    """

    ops: tuple[Op, ...]
    starts: tuple[int, ...]
    period: int
    span: int
    tick: float

    def end(self, num_microbatches: int) -> float:
        """When the last op of the last micro-batch ends, as the table says."""
        return ((num_microbatches - 1) * self.period + self.span) * self.tick

    def orders(self, num_ranks: int, num_microbatches: int, ahead: int = 0) -> list[list[Step]]:
        """Every rank's steps.  ``ahead``: forward ops run up to so many micro-batches earlier than
        in the table, but never more than there are stages behind."""
        last = max((op.stage for op in self.ops if op.kind is F), default=0)
        timed: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]
        for number, (op, start) in enumerate(zip(self.ops, self.starts)):
            if op.kind is F:
                start -= min(ahead, last - op.stage) * self.period
            timed[op.rank] += [
                (start + microbatch * self.period, microbatch, number)
                for microbatch in range(num_microbatches)
            ]
        return [[(self.ops[number], mb) for _, mb, number in sorted(rank)] for rank in timed]


def building_blocks(
    program: Program, num_microbatches: int, *, split: bool = False,
    max_in_flight: Sequence[int] | None = None, width: int | None = None,
) -> list[Block]:  # fmt: skip
    """Blocks for several periods, the one that ends first in front; empty if none was found.

    ``split``: weight gradients are actions of their own (W, HW).  ``max_in_flight``: per rank, the
    most (stage, micro-batch) pairs between forward and backward.  ``width``: of the beam.
    """
    search = _Search(program, split, max_in_flight, width)
    blocks: list[Block] = []
    least = math.inf
    for factors in (STRETCH, STRETCH_FURTHER):
        for factor in factors:
            period = math.ceil(search.load * factor)
            if ((num_microbatches - 1) * period + search.critical_path) * search.tick >= least:
                break
            block = search.block(period)
            if block is not None:
                blocks.append(block)
                least = min(least, block.end(num_microbatches))
        if blocks:
            break
    return sorted(blocks, key=lambda block: block.end(num_microbatches))


def one_microbatch(program: Program, split: bool) -> list[Op]:
    """The ops of one micro-batch, each behind those it depends on."""
    stages, heads = range(program.placement.num_stages), program.placement.head_only
    trunk = [stage for stage in stages if not heads[stage]]
    ops = [program.op(stage, F) for stage in trunk]
    ops += [program.op(stage, H) for stage in stages if heads[stage]]
    ops += [program.op(stage, I if split else B) for stage in reversed(trunk)]
    if split:
        ops += [program.op(stage, HW) for stage in stages if heads[stage]]
        ops += [program.op(stage, W) for stage in reversed(trunk)]
    return ops


@dataclass(slots=True)
class _Partial:
    """Some ops placed.  bound: least end of the micro-batch that is still possible."""

    starts: tuple[int, ...]
    gaps: tuple[Gaps, ...]
    in_flight: tuple[int, ...]
    bound: int
    total: int  # of all starts: earlier is better


class _Search:
    def __init__(
        self, program: Program, split: bool, max_in_flight: Sequence[int] | None, width: int | None
    ) -> None:
        ops = one_microbatch(program, split)
        num_ranks = program.placement.num_ranks
        loads = [0.0] * num_ranks
        for op in ops:
            loads[op.rank] += op.duration
        self.tick = tick = (max(loads) or 1.0) / TICKS
        duration = [round(op.duration / tick) for op in ops]
        written = {slot: (i, 0) for i, op in enumerate(ops) for slot in op.kept}
        for i, op in enumerate(ops):
            for sent in op.sent:
                written[sent.slot] = (i, math.ceil((sent.duration + sent.latency) / tick))
        needs = [[written[slot] for slot in op.inputs] for op in ops]
        tail = duration[:]  # longest path from an op's start to the end of the micro-batch
        for i in reversed(range(len(ops))):
            for source, delay in needs[i]:
                tail[source] = max(tail[source], duration[source] + delay + tail[i])
        # Urgent ops first; weight gradients, which nothing waits for, fill what is left.
        order = sorted(range(len(ops)), key=lambda i: (ops[i].kind in (W, HW), -tail[i], i))
        position = {i: place for place, i in enumerate(order)}
        self.ops = [ops[i] for i in order]
        self.duration = [duration[i] for i in order]
        self.tail = [tail[i] for i in order]
        self.needs = [[(position[s], delay) for s, delay in needs[i]] for i in order]
        self.closing = W if split else B
        self.forward = {op.stage: i for i, op in enumerate(self.ops) if op.kind is F}
        self.max_in_flight = max_in_flight
        self.width = width or max(2, min(8, 64 // num_ranks))
        self.critical_path = max(tail, default=0)
        by_rank: list[list[int]] = [[] for _ in range(num_ranks)]
        self.rest: list[list[int]] = []  # durations of the rank's later ops, longest first
        for i in reversed(range(len(self.ops))):
            mine = by_rank[self.ops[i].rank]
            self.rest.append(mine[::-1])
            insort(mine, self.duration[i])
        self.rest.reverse()
        self.load = max(1, max(map(sum, by_rank), default=1))
        self.num_ranks = num_ranks

    def block(self, period: int) -> Block | None:
        """The best placement found with this period."""
        partials = [
            _Partial((), (None,) * self.num_ranks, (0,) * self.num_ranks, self.critical_path, 0)
        ]
        for i in range(len(self.ops)):
            grown = [new for old in partials for new in self._grow(old, i, period)]
            grown.sort(key=lambda partial: (partial.bound, partial.total))
            partials = _distinct(grown, self.width)
            if not partials:
                return None
        best = partials[0]
        return Block(tuple(self.ops), best.starts, period, best.bound, self.tick)

    def _grow(self, old: _Partial, i: int, period: int) -> list[_Partial]:
        rank, duration = self.ops[i].rank, self.duration[i]
        ready = 0
        for source, delay in self.needs[i]:
            ready = max(ready, old.starts[source] + self.duration[source] + delay)
        grown = []
        for start, gaps in _places(old.gaps[rank], period, ready, duration, self.rest[i]):
            in_flight = self._in_flight(old, i, start, period)
            if in_flight is None:
                continue
            grown.append(
                _Partial(
                    (*old.starts, start),
                    (*old.gaps[:rank], gaps, *old.gaps[rank + 1 :]),
                    in_flight,
                    max(old.bound, start + self.tail[i]),
                    old.total + start,
                )
            )
            if len(grown) == MOST_OPTIONS:
                break
        return grown

    def _in_flight(self, old: _Partial, i: int, start: int, period: int) -> tuple[int, ...] | None:
        """Micro-batches in flight per rank once op ``i`` is placed, or ``None`` for too many."""
        op = self.ops[i]
        if self.max_in_flight is None or op.kind is not self.closing:
            return old.in_flight
        opened = old.starts[self.forward[op.stage]]
        count = old.in_flight[op.rank] + -(-(start - opened) // period)
        if count > self.max_in_flight[op.rank]:
            return None
        return (*old.in_flight[: op.rank], count, *old.in_flight[op.rank + 1 :])


def _distinct(partials: list[_Partial], width: int) -> list[_Partial]:
    """The first ``width`` that differ in what lies ahead of them."""
    kept: list[_Partial] = []
    seen = set()
    for partial in partials:
        key = (partial.bound, partial.total, partial.gaps)
        if key not in seen:
            seen.add(key)
            kept.append(partial)
            if len(kept) == width:
                break
    return kept


def _places(
    gaps: Gaps, period: int, ready: int, duration: int, rest: Sequence[int]
) -> list[tuple[int, Gaps]]:
    """Start times from ``ready`` on, earliest first, with the gaps that each leaves.

    In every gap: as early as possible, and against either end; only where ``rest`` still fits.
    """
    if gaps is None:
        if duration > period:
            return []
        circle = ((ready + duration) % period, period - duration)
        return [(ready, (circle,) if circle[1] else ())]
    if not duration:
        return [(ready, gaps)]
    found: dict[int, Gaps] = {}
    for number, (start, length) in enumerate(gaps):
        if length < duration:
            continue
        into = (ready - start) % period  # how far ``ready`` lies behind the gap's latest start
        offsets = {period: 0, period + length - duration: length - duration}
        if into + duration <= length:
            offsets |= {into: into, length - duration: length - duration}
        for since, offset in offsets.items():
            left = _without(gaps, number, offset, duration, period)
            if _fit(sorted(size for _, size in left), rest):
                found[ready - into + since] = left
    return sorted(found.items())


def _without(
    gaps: tuple[Gap, ...], number: int, offset: int, duration: int, period: int
) -> tuple[Gap, ...]:
    start, length = gaps[number]
    after = length - offset - duration
    pieces: tuple[Gap, ...] = ((start, offset),) if offset else ()
    if after:
        pieces += (((start + offset + duration) % period, after),)
    return gaps[:number] + pieces + gaps[number + 1 :]


def _fit(gaps: list[int], items: Sequence[int]) -> bool:
    """Whether ``items`` (longest first) can be packed into gaps of these lengths (sorted)."""
    if not items or not items[0]:
        return True
    total = sum(items)
    if not gaps or total > sum(gaps) or items[0] > gaps[-1]:
        return False
    if total <= gaps[-1]:
        return True
    for number, gap in enumerate(gaps):
        if gap >= items[0] and (number == 0 or gap != gaps[number - 1]):
            smaller = gaps[:number] + gaps[number + 1 :]
            insort(smaller, gap - items[0])
            if _fit(smaller, items[1:]):
                return True
    return False
