"""Layouts with heads divided over ranks: the least load of the busiest rank, and near it.

Blocks and multi-token-prediction blocks stay one stage per rank, in order.  For a target load T
every rank takes as many blocks as fit, except that the last ranks may keep room for heads; the
chunks then fill the room that is left, on at most so many ranks.  Small models are also searched
exactly.  The least T that works is found for every way to put the multi-token-prediction blocks on
the last ranks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, combinations_with_replacement
from typing import NamedTuple

from parallel.pipeline.cost import CostTable
from parallel.pipeline.request import PlanRequest
from parallel.pipeline.units import BLOCK, EMBEDDING, HEAD, MTP, NORM, Placement, Unit

HOST_LIMITS = (1, 2, 3, 4, 8)  # and all ranks
SLACK = (1.0, 1.01, 1.04)  # above the least T, layouts that may still be faster
MOST_SHAPES = 32
EXACT, MOST_EXACT_RANKS = -1, 16
EPS = 1e-9


def divided_heads(request: PlanRequest) -> list[Placement]:
    """Placements with heads divided over ranks, those of the least possible makespan first."""
    model = _Model(request)
    shapes: dict[Shape, float] = {}
    most = min(request.max_hosts or request.num_ranks, request.num_ranks)
    for limit in sorted({*(z for z in HOST_LIMITS if z < most), most}, reverse=True):
        shapes |= _Search(model, limit, whole_heads=False).shapes()
    shapes |= _Search(model, most, whole_heads=True).shapes()
    chosen = sorted(shapes, key=lambda shape: (shapes[shape], shape))[:MOST_SHAPES]
    if not request.split:
        shapes = _Search(model, most, whole_heads=False, virtual=2).shapes()
        fewer = MOST_SHAPES // (2 if model.ranks <= MOST_EXACT_RANKS else 8)
        chosen += sorted(shapes, key=lambda shape: (shapes[shape], shape))[:fewer]
    return [model.placement(shape) for shape in chosen]


def least_load(request: PlanRequest) -> float:
    """The least load of the busiest rank over all layouts, whatever they take to fill and drain."""
    limit = min(request.max_hosts or request.num_ranks, request.num_ranks)
    return _Search(_Model(request), limit, whole_heads=False).least()


class Shape(NamedTuple):
    """How many blocks each stage has, the stage of each multi-token-prediction block, and how many
    chunks of each depth each rank hosts.  Stage s is on rank s mod P; one without a unit is left
    out."""

    blocks: tuple[int, ...]
    mtp_stages: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]  # by rank, then depth

    @property
    def is_filled(self) -> bool:
        """Every rank has work, and with several stages per rank each stage has."""
        ranks = len(self.chunks)
        for stage, count in enumerate(self.blocks):
            hosts = len(self.blocks) == ranks and any(self.chunks[stage])
            if stage and not count and stage not in self.mtp_stages and not hosts:
                return False
        return True


class _Trunk(NamedTuple):
    """Everything but heads: blocks and load of each rank, and the ranks that heads go to."""

    blocks: tuple[int, ...]
    loads: list[float]
    hosts: list[int]


class _Model:
    """The loads of a model's pieces."""

    def __init__(self, request: PlanRequest) -> None:
        costs: CostTable = request.known_costs("adahc")
        self.request, self.ranks = request, request.num_ranks
        self.blocks = sum(unit.kind == BLOCK for unit in request.units)
        self.depth, self.chunks = request.mtp_depth, request.head_chunks
        first, last = costs[Unit(EMBEDDING)].load, costs[Unit(NORM)].load
        self.prefix = [first]  # load of the embedding and the first n blocks together
        for block in range(self.blocks):
            end = last if block == self.blocks - 1 else 0.0
            self.prefix.append(self.prefix[-1] + costs[Unit(BLOCK, block)].load + end)
        depths = range(1, self.depth + 1)
        self.mtp = [costs[Unit(MTP, k)].load + costs[Unit(NORM, k)].load for k in depths]
        heads = [costs[Unit(HEAD, k)] for k in range(self.depth + 1)]
        self.head_chunk = [head.load for head in heads]
        self.head_fixed = [head.fixed for head in heads]  # on each rank with chunks of this depth
        self.heads = sum(self.head_chunk) * self.chunks + sum(self.head_fixed)
        self.total = self.prefix[-1] + sum(self.mtp) + self.heads

    def hosted(self, counts: Sequence[int]) -> float:
        """The load of so many chunks of each depth on one rank."""
        parts = zip(counts, self.head_chunk, self.head_fixed)
        return sum(n * size + fixed for n, size, fixed in parts if n)

    def mtp_placements(self) -> list[tuple[int, ...]]:
        """Ranks of the multi-token-prediction blocks: among the last, in order."""
        among = range(max(0, self.ranks - self.depth - 2), self.ranks)
        return list(combinations_with_replacement(among, self.depth))

    def placement(self, shape: Shape) -> Placement:
        """The stages of what is not a head, then one per (depth, rank) with chunks."""
        stages, ranks, block = [], [], 0
        for stage, count in enumerate(shape.blocks):
            units = [Unit(EMBEDDING)] if stage == 0 else []
            units += [Unit(BLOCK, i) for i in range(block, block + count)]
            block += count
            if count and block == self.blocks:
                units.append(Unit(NORM))
            for k, owner in enumerate(shape.mtp_stages, 1):
                units += [Unit(MTP, k), Unit(NORM, k)] if owner == stage else []
            if units:
                stages.append(tuple(units))
                ranks.append(stage % self.ranks)
        for depth in range(self.depth + 1):
            start = 0
            for rank, counts in enumerate(shape.chunks):
                end = start + counts[depth]
                if end > start:
                    stages.append(tuple(Unit(HEAD, depth, c) for c in range(start, end)))
                    ranks.append(rank)
                start = end
        request = self.request
        return Placement(request.units, tuple(stages), tuple(ranks), request.mtp_input)


class _Search:
    """Layouts of nearly the least T with at most ``limit`` hosts.

    With two stages per rank (``virtual``), the multi-token-prediction blocks are in the second
    round, so that every rank can have blocks in the first.
    """

    def __init__(self, model: _Model, limit: int, whole_heads: bool, virtual: int = 1) -> None:
        self.model, self.limit, self.virtual = model, limit, virtual
        self.pieces = 1 if whole_heads else model.chunks  # per head
        self.piece_loads = [load * model.chunks / self.pieces for load in model.head_chunk]
        self.needed = self.pieces * len(self.piece_loads)
        # How many of the last ranks keep the same room for heads.  0: heads get what is left.
        windows = {n for n in (0, 1, 2, 3, 4, model.ranks // 2, model.ranks) if n <= model.ranks}
        kinds = [*sorted(windows), *([EXACT] if model.ranks <= MOST_EXACT_RANKS else [])]
        self.options = [(m, kind) for m in model.mtp_placements() for kind in kinds]

    def least(self) -> float:
        """The least T that was found, to a hundredth of a percent."""
        least, low = 2 * self.model.total, self.model.total / self.model.ranks
        for option in self.options:
            lowest, highest = low, least * (1 - 1e-4)
            if self._trunk(option, highest) is None:
                continue
            while highest - lowest > 1e-4 * highest:
                middle = (lowest + highest) / 2
                if self._trunk(option, middle) is None:
                    lowest = middle
                else:
                    highest = middle
            least = highest
        return least

    def shapes(self) -> dict[Shape, float]:
        """Shapes of nearly the least T, with the least makespan that each allows."""
        found: dict[Shape, float] = {}
        least = self.least()
        for slack in SLACK:
            trunks = {}
            for option in self.options:
                trunk = self._trunk(option, least * slack)
                if trunk is not None:
                    trunks[trunk.blocks, option[0]] = trunk
            for (blocks, mtp_ranks), trunk in trunks.items():
                chunks = self._even(trunk, least * slack)
                shape = Shape(blocks, mtp_ranks, chunks)
                shapes = [shape]
                if self.virtual == 2:
                    shapes = [self._two_rounds(shape, share) for share in (0.0, 1.0)]
                for filled in (shape for shape in shapes if shape.is_filled):
                    found[filled] = self.bound(chunks, trunk)
        return found

    def _two_rounds(self, shape: Shape, share: float) -> Shape:
        """The blocks of every rank in two stages, none behind the first multi-token-prediction
        block.  The second stage, with this ``share`` of the rank's heads, is about as long as the
        first."""
        model, ranks = self.model, self.model.ranks
        first = min(shape.mtp_stages, default=ranks - 1)
        usual = (model.prefix[-1] - model.prefix[0]) / max(model.blocks, 1) or 1.0
        rounds: tuple[list[int], list[int]] = ([], [])
        for rank, count in enumerate(shape.blocks):
            late = sum(m for m, owner in zip(model.mtp, shape.mtp_stages) if owner == rank)
            late += share * model.hosted(shape.chunks[rank])
            early = count if rank > first else min(count, round((count + late / usual) / 2 + 0.01))
            rounds[0].append(early)
            rounds[1].append(count - early)
        mtp_stages = tuple(ranks + rank for rank in shape.mtp_stages)
        return Shape((*rounds[0], *rounds[1]), mtp_stages, shape.chunks)

    def bound(self, chunks: tuple[tuple[int, ...], ...], trunk: _Trunk) -> float:
        """No schedule takes less: a rank works off its load for each micro-batch, and before and
        after that the stages in front of it have one micro-batch to themselves."""
        ahead = accumulate((load / self.virtual for load in trunk.loads), initial=0.0)
        return max(
            before + self.model.request.microbatches
            * (load + self.model.hosted(mine))
            for before, load, mine in zip(ahead, trunk.loads, chunks)
        )  # fmt: skip

    def _trunk(self, option: tuple[tuple[int, ...], int], target: float) -> _Trunk | None:
        """Everything but heads, with hosts that have room for these below ``target``."""
        mtp_ranks, window = option
        loads = [0.0] * self.model.ranks
        for rank, load in zip(mtp_ranks, self.model.mtp):
            loads[rank] += load
        if max(loads) > target * (1 + EPS):
            return None
        last = min(mtp_ranks, default=len(loads) - 1) if self.virtual == 1 else len(loads) - 1
        if window == EXACT:
            blocks = self._exact_blocks(loads, last, target)
        else:
            blocks = self._fill_blocks(loads, last, window, target)
        if blocks is None:
            return None
        by_room = sorted(range(len(loads)), key=lambda rank: (loads[rank], -rank))
        room = accumulate(target - loads[rank] for rank in by_room)
        enough = self.model.heads * (1 - EPS)
        count = next((n for n, sum_ in enumerate(room, 1) if sum_ >= enough), len(loads) + 1)
        for size in range(count, self.limit + 1):
            chosen = sorted(by_room[:size])
            if self._deal(chosen, loads, target) is not None:
                return _Trunk(tuple(blocks), loads, chosen)
        return None

    def _fill_blocks(
        self, loads: list[float], last: int, window: int, target: float
    ) -> list[int] | None:
        """Blocks per rank up to rank ``last``, as many as fit; adds them to ``loads``."""
        prefix, ranks = self.model.prefix, self.model.ranks
        level = _level(loads[ranks - window :], target, self.model.heads) if window else target
        blocks, done, loads[0] = [], 0, loads[0] + prefix[0]
        for rank in range(ranks):
            cap = level if rank >= ranks - window else target
            end = done
            if rank <= last:
                limit = prefix[done] + (cap - loads[rank]) * (1 + EPS)
                end = max(done, bisect_right(prefix, limit) - 1)
            blocks.append(end - done)
            loads[rank] += prefix[end] - prefix[done]
            done = end
        return blocks if done == self.model.blocks and loads[0] <= target * (1 + EPS) else None

    def _exact_blocks(self, loads: list[float], last: int, target: float) -> list[int] | None:
        """The blocks per rank that leave room for the most pieces of heads; adds to ``loads``.

        A dynamic programme over ranks; its states are the blocks placed and the hosts used.
        """
        prefix, ranks, total = self.model.prefix, self.model.ranks, self.model.blocks
        room = [(target - load) * (1 + EPS) for load in loads]
        room[0] -= prefix[0]
        least = [0] * ranks + [total]  # blocks that must be placed before each rank
        for rank in reversed(range(ranks)):
            taken = prefix[least[rank + 1]] - (room[rank] if rank <= last else 0.0)
            least[rank] = min(least[rank + 1], bisect_left(prefix, max(taken, prefix[0])))
        if least[0] or room[0] < 0:
            return None
        limited = self.limit < ranks
        table: list[dict[tuple[int, int], tuple[int, tuple[int, int]]]] = [{(0, 0): (0, (0, 0))}]
        for rank in range(ranks):
            row: dict[tuple[int, int], tuple[int, tuple[int, int]]] = {}
            for state, (pieces, _) in table[-1].items():
                done, used = state
                most = bisect_right(prefix, prefix[done] + room[rank]) - 1 if rank <= last else done
                for end in range(max(done, least[rank + 1]), max(done, most) + 1):
                    options = [(used, pieces)]
                    if used < self.limit:
                        filled = self._filled(pieces, room[rank] - (prefix[end] - prefix[done]))
                        if filled > pieces:
                            options.append((used + limited, filled))
                    for hosts_used, total_pieces in options:
                        if total_pieces > row.get((end, hosts_used), (-1,))[0]:
                            row[end, hosts_used] = (total_pieces, state)
            table.append(row)
        state = max(table[-1], key=lambda s: (table[-1][s][0], -s[1]), default=(0, 0))
        if total != state[0] or table[-1][state][0] < self.needed:
            return None
        blocks = [0] * ranks
        for rank in reversed(range(ranks)):
            before = table[rank + 1][state][1]
            blocks[rank] = state[0] - before[0]
            loads[rank] += prefix[state[0]] - prefix[before[0]] + (prefix[0] if rank == 0 else 0.0)
            state = before
        return blocks

    def _even(self, trunk: _Trunk, target: float) -> tuple[tuple[int, ...], ...]:
        """Chunks of each depth by rank, the hosts filled to the lowest common level."""
        high, low = target, 0.0
        for _ in range(8):
            middle = (low + high) / 2
            if self._deal(trunk.hosts, trunk.loads, middle) is None:
                low = middle
            else:
                high = middle
        dealt = self._deal(trunk.hosts, trunk.loads, high)
        assert dealt is not None
        scale = self.model.chunks // self.pieces
        chunks = [(0,) * len(self.piece_loads)] * self.model.ranks
        for rank, counts in zip(trunk.hosts, dealt):
            chunks[rank] = tuple(n * scale for n in counts)
        return tuple(chunks)

    def _filled(self, dealt: int, room: float) -> int:
        """Pieces dealt, depth after depth, when a rank with this room has taken what fits on top of
        ``dealt``."""
        while dealt < self.needed:
            depth, left = dealt // self.pieces, self.pieces - dealt % self.pieces
            size, room = self.piece_loads[depth], room - self.model.head_fixed[depth]
            taken = min(left, int(room / size + EPS)) if size > 0 else left * (room >= 0)
            if taken <= 0:
                break
            dealt += taken
            room -= taken * size
            if taken < left:
                break
        return dealt

    def _deal(
        self, hosts: Sequence[int], loads: Sequence[float], target: float
    ) -> list[list[int]] | None:
        """Give the ``hosts`` in turn what fits below ``target``: pieces of each depth by host;
        ``None`` when some are left."""
        done, dealt = 0, []
        for rank in hosts:
            room = (target - loads[rank]) * (1 + EPS) + EPS * target
            end = self._filled(done, room)
            starts = range(0, self.needed, self.pieces)
            dealt.append([max(0, min(end, s + self.pieces) - max(done, s)) for s in starts])
            done = end
        return dealt if done == self.needed else None


def _level(loads: Sequence[float], target: float, heads: float) -> float:
    """How high the loads of these ranks may get, all alike, so that ``heads`` still fit on top."""
    low, room = sorted(loads), target * len(loads) - heads
    for count in range(len(low), 0, -1):
        level = (room - sum(low[count:])) / count
        if level >= low[count - 1]:
            return level
    return 0.0
