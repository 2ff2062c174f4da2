"""Adaptive head chunking: heads cut into token chunks that go to whichever ranks have room.

Blocks and multi-token-prediction blocks stay one stage per rank, in order.  For a target load T
every rank takes as many blocks as fit, except that the last ranks may keep room for heads; the
chunks then fill the room that is left, on at most so many ranks.  The least T that works is found
for every way to put the multi-token-prediction blocks on the last ranks.  T alone is not enough: a
schedule also fills and drains.  So the best layouts of every kind, hand-made ones included, are
scheduled, and the one with the least simulated makespan wins.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations_with_replacement
from typing import NamedTuple

from parallel.pipeline.actions import Orders
from parallel.pipeline.building_block import building_blocks
from parallel.pipeline.cost import CostTable
from parallel.pipeline.program import Execution, Program, stages_with_split_heads
from parallel.pipeline.request import PLANNERS, PlanRequest, hosts, register
from parallel.pipeline.schedules import SCHEDULES, Conditions, compute_orders
from parallel.pipeline.simulate import peak_bytes
from parallel.pipeline.units import BLOCK, EMBEDDING, HEAD, MTP, NORM, Placement, Unit, lookup

HOST_LIMITS = (1, 2, 3, 4, 8)  # and all ranks
HAND_MADE = ("uniform", "balanced", "standalone", "split")
SLACK = (1.0, 1.01, 1.04)  # above the least T, layouts that may still be faster
MOST_SHAPES = 32  # placements whose schedule is built
MOST_RUNS = 4  # and whose schedule is simulated
MANY_STEPS = 10_000  # ranks times micro-batches from which half as many are
EPS = 1e-9


class Shape(NamedTuple):
    """How many blocks each rank has, the rank of each multi-token-prediction block, and how many
    chunks of each depth each rank hosts."""

    blocks: tuple[int, ...]
    mtp_ranks: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]  # by rank, then depth

    @property
    def idle_rank(self) -> int | None:
        """A rank without a unit."""
        for rank, count in enumerate(self.blocks):
            if rank and not count and rank not in self.mtp_ranks and not any(self.chunks[rank]):
                return rank
        return None


@dataclass(frozen=True)
class Planned:
    """A placement with its schedule for the request's micro-batches."""

    placement: Placement
    orders: Orders
    makespan: float


@register("adahc")
def adahc(request: PlanRequest) -> Placement:
    """The placement of the least simulated makespan under ``request.schedule``."""
    return best_plan(request).placement


def best_plan(request: PlanRequest) -> Planned:
    """The fastest of all candidates within the limits; ``ValueError`` when none keeps to them."""
    lookup("pipeline schedule", SCHEDULES, request.schedule)
    costs = request.known_costs("adahc")
    best: Planned | None = None
    refusals: list[str] = []
    chunked = _ranked(request, chunked_placements(request))
    many = request.num_ranks * request.microbatches >= MANY_STEPS
    for candidates, enough in (
        (chunked, MOST_RUNS // (1 + many)),
        (hand_made_placements(request), None),
    ):
        accepted = 0
        for placement in candidates:
            ideal = max(costs.rank_loads(placement)) * request.microbatches
            if accepted == enough or (best is not None and ideal >= best.makespan):
                continue
            try:
                planned = plan_within(request, placement)
            except ValueError as error:
                refusals.append(str(error))
                continue
            accepted += 1
            if best is None or planned.makespan < best.makespan:
                best = planned
    if best is None:
        why = refusals[-1] if refusals else f"{len(request.units)} units are too few"
        raise ValueError(
            f"planner adahc cannot place this model on {request.num_ranks} ranks: {why}"
        )
    return best


def hand_made_placements(request: PlanRequest) -> list[Placement]:
    """What the other planners propose, where they can; each once."""
    found: dict[tuple[tuple[Unit, ...], ...], Placement] = {}
    for name in HAND_MADE:
        try:
            placement = PLANNERS[name](request)
        except ValueError:
            continue
        if request.max_hosts is None or len(hosts(placement)) <= request.max_hosts:
            found.setdefault(placement.stages, placement)
    return list(found.values())


def plan_within(request: PlanRequest, placement: Placement) -> Planned:
    """Schedule a placement; ``ValueError`` when that breaks a limit of the request."""
    costs, limit = request.known_costs("adahc"), request.memory_bytes
    conditions = Conditions(costs, request.network, _in_flight_limits(request, placement))
    orders = compute_orders(request.schedule, placement, request.microbatches, conditions)
    program = Program(placement, costs, request.network, stages_with_split_heads(orders))
    run = Execution(program, program.steps(orders), record=limit is not None)
    if limit is not None:
        most = max(peak_bytes(run, orders, costs))
        if most > limit:
            raise ValueError(f"a rank needs {most:.4g} bytes, more than {limit:.4g}")
    return Planned(placement, orders, run.makespan)


def _in_flight_limits(request: PlanRequest, placement: Placement) -> list[int] | None:
    """The request's limit, or what its memory leaves room for where that is less."""
    limits = [request.max_in_flight] * placement.num_ranks if request.max_in_flight else None
    if request.memory_bytes is None:
        return limits
    costs = request.known_costs("adahc")
    rooms = []
    for rank, parameters in enumerate(costs.rank_parameters(placement)):
        stages = placement.stages_of(rank)
        trunk = [costs.stage(placement, s) for s in stages if not placement.head_only[s]]
        kept = max((cost.activation_bytes for cost in trunk), default=0.0)
        work = max((costs.stage(placement, s).workspace_bytes for s in stages), default=0.0)
        room = request.memory_bytes - parameters - work
        if room < kept:
            raise ValueError(
                f"rank {rank} needs {parameters + work + kept:.4g} bytes for one micro-batch, more "
                f"than {request.memory_bytes:.4g}"
            )
        most = len(trunk) * request.microbatches
        rooms.append(min(most, int(room / kept)) if kept else most)
    return rooms if limits is None else [min(pair) for pair in zip(rooms, limits)]


def _ranked(request: PlanRequest, placements: Iterable[Placement]) -> list[Placement]:
    """Placements by the end of their periodic schedule, the earliest first."""
    costs = request.known_costs("adahc")
    split = "zb" in request.schedule
    timed = []
    for number, placement in enumerate(placements):
        heads = [s for s, alone in enumerate(placement.head_only) if alone]
        program = Program(placement, costs, request.network, heads if split else ())
        blocks = building_blocks(program, request.microbatches, split=split)
        if blocks:
            timed.append((blocks[0].end(request.microbatches), number, placement))
    return [placement for _, _, placement in sorted(timed, key=lambda entry: entry[:2])]


def chunked_placements(request: PlanRequest) -> Iterator[Placement]:
    """Placements with heads divided over ranks, promising ones first; each once."""
    model = _Model(request)
    shapes: dict[Shape, float] = {}
    most = min(request.max_hosts or request.num_ranks, request.num_ranks)
    for limit in sorted({*(z for z in HOST_LIMITS if z < most), most}, reverse=True):
        shapes |= _Search(model, limit, whole_heads=False).shapes()
    shapes |= _Search(model, most, whole_heads=True).shapes()
    chosen = sorted(shapes, key=lambda shape: (shapes[shape], shape))
    for shape in chosen[:MOST_SHAPES]:
        yield model.placement(shape)


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
        self.head_chunk = [costs[Unit(HEAD, k)].load for k in range(self.depth + 1)]
        self.heads = sum(self.head_chunk) * self.chunks
        self.total = self.prefix[-1] + sum(self.mtp) + self.heads

    def mtp_placements(self) -> list[tuple[int, ...]]:
        """Ranks of the multi-token-prediction blocks: among the last, in order."""
        among = range(max(0, self.ranks - self.depth - 2), self.ranks)
        return list(combinations_with_replacement(among, self.depth))

    def placement(self, shape: Shape) -> Placement:
        """One stage per rank for what is not a head, then one per (depth, rank) with chunks."""
        stages, ranks, block = [], [], 0
        for rank, count in enumerate(shape.blocks):
            units = [Unit(EMBEDDING)] if rank == 0 else []
            units += [Unit(BLOCK, i) for i in range(block, block + count)]
            block += count
            if count and block == self.blocks:
                units.append(Unit(NORM))
            for k, owner in enumerate(shape.mtp_ranks, 1):
                units += [Unit(MTP, k), Unit(NORM, k)] if owner == rank else []
            if units:
                stages.append(tuple(units))
                ranks.append(rank)
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
    """Layouts of nearly the least T with at most ``limit`` hosts."""

    def __init__(self, model: _Model, limit: int, whole_heads: bool) -> None:
        self.model, self.limit = model, limit
        self.pieces = 1 if whole_heads else model.chunks  # per head
        self.piece_loads = [load * model.chunks / self.pieces for load in model.head_chunk]
        # How many of the last ranks keep the same room for heads; 0: heads get what is left.
        windows = sorted({n for n in (0, 1, 2, 3, 4, model.ranks // 2, model.ranks)
                          if n <= model.ranks})  # fmt: skip
        self.options = [(m, w) for m in model.mtp_placements() for w in windows]

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
        """Shapes of nearly the least T, with their largest loads."""
        found: dict[Shape, float] = {}
        least = self.least()
        for slack in SLACK:
            trunks = {}
            for option in self.options:
                trunk = self._trunk(option, least * slack)
                if trunk is not None:
                    trunks[trunk.blocks, option[0]] = trunk
            for (blocks, mtp_ranks), trunk in trunks.items():
                shape = Shape(blocks, mtp_ranks, self._even(trunk, least * slack))
                if shape.idle_rank is None:
                    found[shape] = self.load(shape, trunk)
        return found

    def load(self, shape: Shape, trunk: _Trunk) -> float:
        """Of the busiest rank."""
        sizes = self.model.head_chunk
        return max(
            load + sum(n * size for n, size in zip(mine, sizes))
            for load, mine in zip(trunk.loads, shape.chunks)
        )

    def _trunk(self, option: tuple[tuple[int, ...], int], target: float) -> _Trunk | None:
        """Everything but heads, with hosts that have room for these below ``target``."""
        mtp_ranks, window = option
        loads = [0.0] * self.model.ranks
        for rank, load in zip(mtp_ranks, self.model.mtp):
            loads[rank] += load
        if max(loads) > target * (1 + EPS):
            return None
        blocks = self._fill_blocks(loads, min(mtp_ranks, default=len(loads) - 1), window, target)
        if blocks is None:
            return None
        by_room = sorted(range(len(loads)), key=lambda rank: (loads[rank], -rank))
        room = accumulate(target - loads[rank] for rank in by_room)
        enough = self.model.heads * (1 - EPS)
        count = next((n for n, sum_ in enumerate(room, 1) if sum_ >= enough), len(loads) + 1)
        for size in range(count, self.limit + 1):
            chosen = sorted(by_room[:size])
            if _deal(chosen, loads, target, self.piece_loads, self.pieces) is not None:
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

    def _even(self, trunk: _Trunk, target: float) -> tuple[tuple[int, ...], ...]:
        """Chunks of each depth by rank, the hosts filled to the lowest common level."""
        high, low = target, 0.0
        for _ in range(8):
            middle = (low + high) / 2
            if _deal(trunk.hosts, trunk.loads, middle, self.piece_loads, self.pieces) is None:
                low = middle
            else:
                high = middle
        dealt = _deal(trunk.hosts, trunk.loads, high, self.piece_loads, self.pieces)
        assert dealt is not None
        scale = self.model.chunks // self.pieces
        chunks = [(0,) * len(self.piece_loads)] * self.model.ranks
        for rank, counts in zip(trunk.hosts, dealt):
            chunks[rank] = tuple(n * scale for n in counts)
        return tuple(chunks)


def _level(loads: Sequence[float], target: float, heads: float) -> float:
    """How high the loads of these ranks may get, all alike, so that ``heads`` still fit on top."""
    low, room = sorted(loads), target * len(loads) - heads
    for count in range(len(low), 0, -1):
        level = (room - sum(low[count:])) / count
        if level >= low[count - 1]:
            return level
    return 0.0


def _deal(
    hosts: Sequence[int], loads: Sequence[float], target: float, sizes: Sequence[float], pieces: int
) -> list[list[int]] | None:
    """Give the ``hosts`` in turn what fits below ``target``, depth after depth; by host."""
    dealt, depth, left = [], 0, pieces
    for rank in hosts:
        room = (target - loads[rank]) * (1 + EPS) + EPS * target
        counts = [0] * len(sizes)
        while depth < len(sizes):
            size = sizes[depth]
            taken = min(left, int(room / size)) if size > 0 else left
            if taken <= 0:
                break
            counts[depth] = taken
            room -= taken * size
            left -= taken
            if left:
                break
            depth, left = depth + 1, pieces
        dealt.append(counts)
    return dealt if depth == len(sizes) else None
