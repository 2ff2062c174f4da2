"""Planners with multi-token prediction: properties, limits, brute force, re-balanced shares."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.pipeline.adahc import COPY_COST, HAND_MADE, ROUNDS_COST, best_plan
from parallel.pipeline.baselines import vocabulary_parallel
from parallel.pipeline.checker import check_schedule
from parallel.pipeline.cost import CostTable, Network, UnitCost, given_costs
from parallel.pipeline.fitted import WORTH
from parallel.pipeline.head_layouts import least_load
from parallel.pipeline.layout import write_layout
from parallel.pipeline.lowering import lower
from parallel.pipeline.planner import PLANNERS, PlanRequest, make_placement
from parallel.pipeline.rebalance import rebalanced
from parallel.pipeline.request import hosts
from parallel.pipeline.schedules import make_schedule
from parallel.pipeline.simulate import simulate, simulate_orders
from parallel.pipeline.units import HEAD, Placement, Unit, model_units


def request_for(
    layers: int, ranks: int, depth: int, head: float = 2.0, mtp: float = 1.1, chunks: int = 4,
    **options: object,
) -> PlanRequest:  # fmt: skip
    """A model whose blocks take 1, forward; transfers take 0.03."""
    units = tuple(model_units(layers, depth, chunks))
    given = {"t": 1, "h": head} | ({"m": mtp} if depth else {})
    costs, network = given_costs({"units": given, "latency": 0.03}, units)
    return PlanRequest(units, ranks, costs=costs, network=network, **options)  # type: ignore[arg-type]


def names(placement: Placement) -> list[str]:
    return [" ".join(map(str, stage)) for stage in placement.stages]


def largest(request: PlanRequest, placement: Placement) -> float:
    assert request.costs is not None
    return max(request.costs.rank_loads(placement))


# ------------------------------------------------------------------ hand-made layouts


def test_hand_made_layouts_of_a_small_model() -> None:
    request = request_for(8, 4, 2, chunks=1)
    placed = {name: names(make_placement(name, request)) for name in HAND_MADE}
    tail = "n m1 n1 m2 n2 h0,0 h1,0 h2,0"
    assert placed["uniform"] == ["E t0 t1", "t2 t3", "t4 t5", f"t6 t7 {tail}"]
    assert placed["balanced"] == ["E t0 t1", "t2 t3 t4", "t5 t6 t7", tail]
    assert placed["standalone"] == [
        "E t0 t1 t2", "t3 t4 t5 t6", "t7 m1 n1 m2 n2", "n h0,0 h1,0 h2,0",
    ]  # fmt: skip
    assert placed["split"] == [
        "E t0 t1 t2 t3", "t4 t5 t6 t7", "m1 n1 m2 n2 h2,0", "n h0,0 h1,0",
    ]  # fmt: skip
    layouts = {name: write_layout(make_placement(name, request)) for name in HAND_MADE}
    assert layouts["standalone"] == "Et*3|t*4|tm*2|L"
    spread = request_for(8, 4, 2, head=4.0, chunks=2)
    assert write_layout(make_placement("split", spread)) == "Et*7|tm*2L|L|L"


@pytest.mark.parametrize("mtp_input", ["block", "norm", "trunk"])
@pytest.mark.parametrize("name", sorted({*HAND_MADE, "adahc"}))
def test_every_wiring_is_placed(name: str, mtp_input: str) -> None:
    request = replace(request_for(7, 3, 2), mtp_input=mtp_input)
    placement = make_placement(name, request)
    assert placement.mtp_input == mtp_input
    schedule = make_schedule("1f1b" if name != "adahc" else "adahc", placement, 5)
    check_schedule(schedule)


def test_too_few_pieces() -> None:
    with pytest.raises(ValueError, match=r"standalone cannot fill 5 stages with the 3 pieces"):
        make_placement("standalone", request_for(1, 5, 0))
    with pytest.raises(ValueError, match=r"uniform needs a block for each of 5 stages"):
        make_placement("uniform", request_for(3, 5, 1))
    with pytest.raises(ValueError, match=r"adahc cannot place this model on 9 ranks"):
        make_placement("adahc", request_for(2, 9, 0, chunks=1))
    with pytest.raises(ValueError, match=r"vocab cannot fill 6 stages with 4 pieces"):
        vocabulary_parallel(request_for(2, 6, 1))


def test_vocabulary_parallel_heads_weigh_the_same_everywhere() -> None:
    request = request_for(8, 4, 1, head=3.0, mtp=2.0, chunks=6)
    placement, costs = vocabulary_parallel(request)
    loads = costs.rank_loads(placement)
    assert loads == pytest.approx([3 * (n + 6 / 4) for n in (2, 2, 3, 1 + 2)])
    # Every rank reads all rows of both depths.
    table = CostTable(by_unit={u: replace(c, output_bytes=8.0) for u, c in costs.by_unit.items()})
    received = sum(
        table[e.producer].output_bytes * 4 * e.share for e in placement.edges if e.chunks
    )
    assert received == 2 * 4 * 8


# ------------------------------------------------------------------ adahc


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    depth = draw(st.integers(0, 3))
    ranks = draw(st.integers(1, 5))
    return request_for(
        draw(st.integers(ranks, 14)),
        ranks,
        depth,
        head=draw(st.sampled_from([0.3, 1.0, 2.6, 6.0])),
        mtp=draw(st.sampled_from([0.5, 1.15, 2.0])),
        chunks=draw(st.integers(1, 6)),
        schedule=draw(st.sampled_from(["adahc", "adahc_zb"])),
        num_microbatches=draw(st.integers(1, 3 * ranks)),
        max_hosts=draw(st.one_of(st.none(), st.integers(1, ranks))),
    )


@settings(max_examples=25)
@given(requests())
def test_adahc_is_a_proven_plan_and_never_slower_than_a_hand_made_one(
    request: PlanRequest,
) -> None:
    plan = best_plan(request)
    placement, costs = plan.placement, request.costs
    assert costs is not None
    assert Counter(u for stage in placement.stages for u in stage) == Counter(request.units)
    assert placement.num_ranks == request.num_ranks
    assert len(hosts(placement)) <= (request.max_hosts or request.num_ranks)
    check_schedule(lower("adahc", placement, request.microbatches, plan.orders))
    result = simulate_orders(placement, plan.orders, costs, request.network)
    assert result.makespan == pytest.approx(plan.makespan)
    load = largest(request, placement)
    assert load >= costs.bound(request.units, request.num_ranks) - 1e-9
    assert plan.makespan >= load * request.microbatches - 1e-9
    plain = "1f1b" if request.schedule == "adahc" else "zb_h1"
    for name in HAND_MADE:
        try:
            made = make_placement(name, request)
        except ValueError:
            continue
        schedule = make_schedule(plain, made, request.microbatches)
        other = simulate(schedule, costs, request.network.latency)
        # A few thousandths are spent where they save micro-batches in flight.
        assert plan.makespan <= other.makespan * 1.004 + 1e-9, name


def every_layout(request: PlanRequest) -> Iterator[float]:
    """The largest load of every contiguous layout with any shares of the heads (equal depths)."""
    costs, ranks, limit = request.costs, request.num_ranks, request.max_hosts or request.num_ranks
    assert costs is not None
    layers = sum(unit.kind == "t" for unit in request.units)
    pieces = request.head_chunks * (request.mtp_depth + 1)
    piece = costs[Unit(HEAD)].load
    mtp = costs[Unit("m", 1)].load if request.mtp_depth else 0.0
    for cuts in itertools.combinations_with_replacement(range(layers + 1), ranks - 1):
        counts = [b - a for a, b in itertools.pairwise([0, *cuts, layers])]
        last = max(rank for rank in range(ranks) if counts[rank])
        among = range(last, ranks)
        for places in itertools.combinations_with_replacement(among, request.mtp_depth):
            loads = [3.0 * n + mtp * places.count(rank) for rank, n in enumerate(counts)]
            for owners in itertools.combinations_with_replacement(range(ranks), pieces):
                if len(set(owners)) <= limit:
                    yield max(load + piece * owners.count(r) for r, load in enumerate(loads))


@pytest.mark.parametrize("depth, chunks", [(0, 3), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("head", [0.7, 2.1, 5.0])
@pytest.mark.parametrize("max_hosts", [1, 2, None])
def test_the_least_load_is_that_of_brute_force(
    depth: int, chunks: int, head: float, max_hosts: int | None
) -> None:
    for layers, ranks in ((3, 2), (4, 3), (7, 3)):
        request = request_for(layers, ranks, depth, head=head, chunks=chunks, max_hosts=max_hosts)
        assert least_load(request) == pytest.approx(min(every_layout(request)), rel=2e-4)


def test_a_whole_head_is_a_head_in_one_chunk() -> None:
    """Heads that cost as much as some blocks balance the ranks without being divided."""
    request = request_for(6, 2, 0, head=2.0, chunks=4, num_microbatches=4)
    placement = best_plan(request).placement
    assert len(hosts(placement)) == 1  # four blocks | two blocks and the whole head
    assert largest(request, placement) == 12


def with_memory(request: PlanRequest) -> PlanRequest:
    """Blocks of 10 bytes that keep 4 per micro-batch; a head's weight is 50."""
    assert request.costs is not None
    table = {}
    for unit, cost in request.costs.by_unit.items():
        if unit.kind in "tm":
            cost = replace(cost, parameter_bytes=10.0, activation_bytes=4.0, output_bytes=1.0)
        if unit.kind == HEAD:
            cost = replace(cost, shared_bytes=(("head", 50.0),), activation_bytes=0.25)
        table[unit] = cost
    return replace(request, costs=CostTable(by_unit=table))


def test_memory_and_in_flight_limits() -> None:
    request = with_memory(request_for(12, 4, 1, head=4.0, num_microbatches=12))
    costs = request.costs
    assert costs is not None

    def peaks(request: PlanRequest) -> tuple[int, float, int]:
        plan = best_plan(request)
        result = simulate_orders(plan.placement, plan.orders, costs, request.network)
        return max(result.peak_in_flight), max(result.peak_bytes), len(hosts(plan.placement))

    in_flight, size, used = peaks(request)
    assert used > 1
    assert peaks(replace(request, max_in_flight=in_flight - 1))[0] <= in_flight - 1
    assert peaks(replace(request, max_in_flight=1))[0] == 1
    smaller = peaks(replace(request, memory_bytes=size - 1))
    assert smaller[1] <= size - 1
    one_host = peaks(replace(request, max_hosts=1))
    assert one_host[2] == 1
    with pytest.raises(ValueError, match=r"bytes for one micro-batch, more than 60"):
        best_plan(replace(request, memory_bytes=60))
    with pytest.raises(ValueError, match="max_hosts is 0: at least 1 is needed"):
        replace(request, max_hosts=0)
    with pytest.raises(ValueError, match=r"split puts heads on ranks \[2, 3\], but at most 1"):
        make_placement("split", replace(request, max_hosts=1))
    with pytest.raises(ValueError, match="unknown pipeline schedule 'adahcc'"):
        best_plan(replace(request, schedule="adahcc"))


def with_fixed(request: PlanRequest, fixed: float, exchange: float = 0.0) -> PlanRequest:
    """Heads whose chunks cost so much more on each stage; copies that exchange gradients."""
    assert request.costs is not None
    table = {
        unit: replace(cost, fixed=fixed) if unit.kind == HEAD else cost
        for unit, cost in request.costs.by_unit.items()
    }
    return replace(request, costs=CostTable(by_unit=table, exchange={"head": exchange}))


@settings(max_examples=15)
@given(requests(), st.sampled_from([0.2, 2.0, 8.0]), st.sampled_from([0.0, 3.0, 60.0]))
def test_what_heads_cost_once_is_planned_with(
    plain: PlanRequest, fixed: float, exchange: float
) -> None:
    request = with_fixed(plain, fixed, exchange)
    plan, costs = best_plan(request), request.costs
    assert costs is not None
    check_schedule(lower("adahc", plan.placement, request.microbatches, plan.orders))
    result = simulate_orders(plan.placement, plan.orders, costs, request.network)
    assert result.step == pytest.approx(plan.step)
    assert result.exchange == exchange * (len(hosts(plan.placement)) - 1)
    bound = costs.bound(request.units, request.num_ranks)
    assert max(costs.rank_loads(plan.placement)) >= bound - 1e-9

    def asked(placement: Placement) -> float:
        """What a plan must gain for its copies of the head."""
        return 1 + COPY_COST * (len(hosts(placement)) - 1)

    for name in HAND_MADE:
        try:
            made = make_placement(name, request)
        except ValueError:
            continue
        if len(hosts(made)) > (request.max_hosts or request.num_ranks):
            continue
        other = simulate(
            make_schedule("1f1b" if request.schedule == "adahc" else "zb_h1", made,
                          request.microbatches), costs, request.network.latency,
        )  # fmt: skip
        allowed = other.step * asked(made) * ROUNDS_COST * WORTH
        assert plan.step * asked(plan.placement) <= allowed + 1e-9, name


def test_a_head_is_not_spread_too_thin() -> None:
    """Dividing pays as long as each host's fixed part is less than what it takes over."""
    request = request_for(12, 4, 1, head=4.0, num_microbatches=16)
    thin, dear = with_fixed(request, 0.05), with_fixed(request, 6.0)

    def head_stages(request: PlanRequest) -> int:
        return sum(
            any(u.kind == HEAD for u in stage) for stage in best_plan(request).placement.stages
        )

    assert head_stages(request) >= head_stages(thin) > head_stages(dear) >= 2
    exchange = with_fixed(request, 0.05, exchange=1000.0)
    assert len(hosts(best_plan(exchange).placement)) == 1


@pytest.mark.parametrize("fixed", [0.5, 2.0])
@pytest.mark.parametrize("chunks", [2, 3])
def test_the_least_load_with_fixed_costs_is_that_of_brute_force(chunks: int, fixed: float) -> None:
    for layers, ranks, depth in ((3, 2, 1), (4, 3, 0), (5, 3, 1)):
        request = with_fixed(request_for(layers, ranks, depth, head=2.1, chunks=chunks), fixed)
        costs = request.costs
        assert costs is not None
        mtp = costs[Unit("m", 1)].load if depth else 0.0
        least = float("inf")
        for cuts in itertools.combinations_with_replacement(range(layers + 1), ranks - 1):
            counts = [b - a for a, b in itertools.pairwise([0, *cuts, layers])]
            last = max(rank for rank in range(ranks) if counts[rank])
            for place in range(last, ranks):
                for owners in itertools.product(range(ranks), repeat=chunks * (depth + 1)):
                    loads = [3.0 * n + mtp * (rank == place) for rank, n in enumerate(counts)]
                    for rank in range(ranks):
                        mine = [i // chunks for i, owner in enumerate(owners) if owner == rank]
                        loads[rank] += len(mine) * costs[Unit(HEAD)].load + len(set(mine)) * fixed
                    least = min(least, max(loads))
        assert least_load(request) == pytest.approx(least, rel=2e-4)


def test_plans_are_deterministic() -> None:
    request = request_for(13, 4, 2, head=3.1, chunks=5, num_microbatches=9)
    first, again = best_plan(request), best_plan(request)
    assert first.placement == again.placement and first.orders == again.orders


def test_planners_without_costs_say_so() -> None:
    request = replace(request_for(8, 2, 1), costs=None)
    for name in sorted(set(PLANNERS) - {"uniform", "explicit"}):
        with pytest.raises(ValueError, match=f"planner {name} needs a cost table"):
            make_placement(name, request)


# ------------------------------------------------------------------ shares from measured times


def measured(placement: Placement, costs: CostTable, speed: list[float]) -> CostTable:
    """The same costs on ranks that are so many times slower."""
    table = {}
    for stage, units in enumerate(placement.stages):
        factor = speed[placement.ranks[stage]]
        for unit in units:
            cost = costs[unit]
            table[unit] = replace(
                cost, forward=cost.forward * factor, backward=cost.backward * factor
            )
    return CostTable(by_unit=table)


@settings(max_examples=12)
@given(requests(), st.lists(st.sampled_from([0.8, 1.0, 1.0, 1.3]), min_size=5, max_size=5))
def test_rebalancing_keeps_hosts_and_helps_the_busiest(
    request: PlanRequest, speed: list[float]
) -> None:
    old = best_plan(request).placement
    assert request.costs is not None
    costs = measured(old, request.costs, speed)
    new = rebalanced(old, costs)
    assert hosts(new) == hosts(old)
    trunk = [stage for stage, alone in zip(old.stages, old.head_only) if not alone]
    assert [stage for stage, alone in zip(new.stages, new.head_only) if not alone] == trunk
    after = measured(new, request.costs, speed)
    busiest = max(after.rank_loads(new)[rank] for rank in hosts(new))
    assert busiest <= max(costs.rank_loads(old)[rank] for rank in hosts(old)) + 1e-9
    check_schedule(make_schedule("adahc", new, 3))
    if new is not old:
        assert rebalanced(new, after) is new


def test_a_slow_rank_hands_chunks_on() -> None:
    request = request_for(12, 4, 2, head=3.0, chunks=8)
    old = best_plan(request).placement
    assert request.costs is not None
    assert rebalanced(old, request.costs) is old
    slow = max(hosts(old))
    costs = measured(old, request.costs, [1.3 if rank == slow else 1.0 for rank in range(4)])
    new = rebalanced(old, costs)

    def share(placement: Placement) -> int:
        return sum(u.kind == HEAD for s in placement.stages_of(slow) for u in placement.stages[s])

    assert 0 < share(new) < share(old)


# ------------------------------------------------------------------ costs that are not alike


def test_uneven_blocks_and_a_costly_embedding() -> None:
    units = tuple(model_units(6, 1, 4))
    given = {"E": 1.5, "t": 1, "t0": 3, "t1": 3, "m": 1, "h0": 2, "h1": 1, "n": 0.1}
    costs, _ = given_costs({"units": given}, units)
    request = PlanRequest(units, 3, costs=costs, num_microbatches=12)
    plan = best_plan(request)
    loads = costs.rank_loads(plan.placement)
    assert sum(loads) == pytest.approx(3 * (1.5 + 3 + 3 + 4 + 1 + 2 + 1 + 0.2))
    assert max(loads) <= 3 * 6.0
    assert max(loads) <= largest(request, make_placement("split", request)) + 1e-9


def test_transfers_that_take_long_are_counted() -> None:
    request = request_for(8, 2, 1, head=3.0, num_microbatches=6)
    assert request.costs is not None
    table = {u: replace(c, output_bytes=1.0) for u, c in request.costs.by_unit.items()}
    slow = replace(request, costs=CostTable(by_unit=table), network=Network(0.0, 1 / 4))
    assert best_plan(slow).makespan > best_plan(request).makespan
    assert UnitCost().load == 0
