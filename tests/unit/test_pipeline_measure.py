"""From recorded events to costs, and from costs to better shares of the heads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from models.config import ModelConfig
from models.mtp import MTPConfig
from parallel.pipeline.actions import Action, B, F, H, Kind
from parallel.pipeline.cost import CostTable, UnitCost
from parallel.pipeline.measure import (
    measured_bubble,
    measured_costs,
    stage_seconds,
    whole_heads,
)
from parallel.pipeline.rebalance import rebalanced
from parallel.pipeline.request import hosts
from parallel.pipeline.timeline import Event
from parallel.pipeline.units import HEAD, Placement, Unit, model_units
from pretrain.placement import cost_table

UNITS = tuple(model_units(2, 1, 4))


def star(owners: list[list[int]]) -> Placement:
    """Two ranks with a block each; ``owners`` of the chunks by depth."""
    trunk = [unit for unit in UNITS if unit.kind != HEAD]
    stages, ranks = [tuple(trunk[:2]), tuple(trunk[2:])], [0, 1]
    for depth, owner in enumerate(owners):
        for rank in (0, 1):
            mine = tuple(Unit(HEAD, depth, c) for c in range(4) if owner[c] == rank)
            if mine:
                stages.append(mine)
                ranks.append(rank)
    return Placement(UNITS, tuple(stages), tuple(ranks))


def costs(block: float = 1.0, chunk: float = 1.0, mtp: float = 1.0) -> CostTable:
    by_kind = {"E": UnitCost(), "n": UnitCost(), "t": UnitCost(block, 2 * block)}
    return CostTable({**by_kind, "m": UnitCost(mtp, 2 * mtp), "h": UnitCost(chunk, 2 * chunk)})


def test_medians_of_every_stage_and_kind() -> None:
    events = [Event(0, Action(F, 0, i), 10 * i, 10 * i + seconds)
              for i, seconds in enumerate((9.0, 1.0, 2.0))]  # fmt: skip
    events += [Event(0, Action(Kind.RECV, 0, 0), 0.0, 5.0), Event(1, Action(H, 1, 0), 0.0, 3.0)]
    assert stage_seconds(events) == {(0, F): 2.0, (1, H): 3.0}


def test_units_share_what_their_stage_took() -> None:
    placement = star([[0, 0, 0, 1], [1, 1, 1, 1]])
    seconds = {(0, F): 2.0, (0, B): 6.0, (1, F): 5.0, (1, B): 8.0}
    seconds |= {(2, H): 9.0, (3, H): 1.0, (4, H): 4.0}
    table = measured_costs(placement, costs(mtp=1.5), seconds)
    assert table[Unit("t", 0)] == UnitCost(2.0, 6.0)
    assert table[Unit("t", 1)].forward == pytest.approx(2.0)  # 1 of 2.5 parts of five seconds
    assert table[Unit("m", 1)].forward == pytest.approx(3.0)
    assert table[Unit("h", 0, 2)].load == pytest.approx(3.0)
    assert table[Unit("h", 0, 2)].backward == pytest.approx(2.0)
    assert table[Unit("h", 1, 0)].load == pytest.approx(1.0)
    loads = table.rank_loads(placement)
    assert loads == pytest.approx((17.0, 18.0))
    head = whole_heads(table, placement)["h0"]
    assert (head.forward, head.backward) == pytest.approx((10 / 3, 20 / 3))


def test_what_is_fixed_is_measured_with_the_rest() -> None:
    placement = star([[0, 0, 0, 1], [1, 1, 1, 1]])
    before = replace(costs(), exchange={"head": 7.0})
    fixed = replace(before.by_kind["h"], fixed=3.0)
    before = replace(before, by_kind={**before.by_kind, "h": fixed})
    seconds = {(0, F): 2.0, (0, B): 4.0, (1, F): 4.0, (1, B): 8.0}
    seconds |= {(2, H): 24.0, (3, H): 6.0, (4, H): 30.0}
    table = measured_costs(placement, before, seconds)
    assert table.rank_loads(placement) == pytest.approx((6 + 24, 12 + 6 + 30))
    first, last = table[Unit("h", 0, 0)], table[Unit("h", 0, 3)]
    assert (first.load, first.fixed) == pytest.approx((6.0, 6.0))  # twice 3 · 3 + 3
    assert (last.load, last.fixed) == pytest.approx((3.0, 3.0))
    assert table.exchange == {"head": pytest.approx(7 * 78 / 42)}
    assert whole_heads(table, placement)["h0"].fixed == pytest.approx(6.0)


def test_the_first_chunk_of_a_head_costs_more() -> None:
    """A rank gets the rows of a head that it already has some of, or none at all."""
    heavy = costs()
    heavy = replace(heavy, by_kind={**heavy.by_kind, "h": replace(heavy.by_kind["h"], fixed=5.0)})
    apart = star([[0, 0, 0, 0], [1, 1, 1, 1]])
    assert heavy.rank_loads(apart) == (3 + 12 + 5, 6 + 12 + 5)
    assert rebalanced(apart, heavy) is apart  # 3 more on one rank, 5 if a chunk of h1 moved
    assert rebalanced(apart, costs(mtp=4.0)) is not apart
    shared = star([[0, 0, 0, 1], [1, 1, 1, 1]])
    better = rebalanced(shared, heavy)
    assert heavy.rank_loads(better) == pytest.approx((3 + 12 + 5, 6 + 12 + 5))


def test_bubble_from_busy_times() -> None:
    assert measured_bubble([3.0, 1.0], [4.0, 3.5]) == pytest.approx(0.5)
    assert measured_bubble([0.0], [0.0]) == 0


def test_chunks_go_where_there_is_room() -> None:
    placement = star([[0, 0, 1, 1], [1, 1, 1, 1]])
    better = rebalanced(placement, costs())
    before, after = costs().rank_loads(placement), costs().rank_loads(better)
    assert before == (9.0, 24.0)
    assert max(after) == 18.0 and sum(after) == sum(before)
    assert hosts(better) == hosts(placement) == (0, 1)
    assert rebalanced(better, costs()) is better


def test_nothing_moves_to_a_rank_without_a_head_or_for_little() -> None:
    alone = star([[1, 1, 1, 1], [1, 1, 1, 1]])
    assert rebalanced(alone, costs()) is alone
    even = star([[0, 0, 0, 0], [1, 1, 1, 1]])
    nearly = costs(chunk=0.001)
    assert rebalanced(even, nearly) is even


def test_costs_of_a_model_count_shared_weights_once_per_rank() -> None:
    config = ModelConfig(vocab_size=200, layers=2, mtp=MTPConfig(depth=1), tie_embeddings=True)
    table = cost_table(config, 32, chunks=4)
    vocabulary = 256 * config.hidden * 4
    apart = star([[0, 0, 1, 1], [1, 1, 1, 1]])
    block = table[Unit("t", 0)].parameter_bytes
    assert table.rank_parameters(apart)[0] == vocabulary + block
    flops = 2 * 200 * config.hidden * 32
    for micro_batch, per_byte in ((1, 0.0), (3, 10.0), (1, 100.0)):
        table = cost_table(config, 32, 4, micro_batch, per_byte)
        whole = table.together(Unit("h", 0, c) for c in range(4))
        assert whole.forward == pytest.approx(flops * micro_batch)
        assert whole.load == pytest.approx(3 * flops * micro_batch)
        half = table.together(Unit("h", 0, c) for c in range(2)).load
        moved = 4 * vocabulary * per_byte
        share = moved / (moved + whole.load)
        assert half / whole.load == pytest.approx((1 + share) / 2)
        assert table.exchange == {"vocabulary": 5 * vocabulary * per_byte}
        assert table[Unit("n")].output_bytes == config.hidden * 32 * micro_batch * 4
