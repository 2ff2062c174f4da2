"""Units, placements, layout strings, costs and planners."""

from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.pipeline.baselines import balanced_cuts
from parallel.pipeline.cost import CostTable, UnitCost
from parallel.pipeline.layout import LayoutError, read_layout, write_layout
from parallel.pipeline.planner import PLANNERS, PlanRequest, make_placement
from parallel.pipeline.units import HEAD, Placement, Unit, data_flow, model_units

COSTS = CostTable({"E": UnitCost(), "n": UnitCost(), "t": UnitCost(1, 2), "m": UnitCost(1.1, 2.2),
                   "h": UnitCost(2, 4)})  # fmt: skip


def names(placement: Placement) -> list[str]:
    return [" ".join(map(str, stage)) for stage in placement.stages]


def test_units_come_in_data_flow_order() -> None:
    assert " ".join(map(str, model_units(2))) == "E t0 t1 n h0,0"
    units = model_units(1, mtp_depth=2, head_chunks=2)
    assert " ".join(map(str, units)) == "E t0 n m1 n1 m2 n2 h0,0 h0,1 h1,0 h1,1 h2,0 h2,1"
    for mtp_input in ("block", "norm", "trunk"):
        for unit, source in data_flow(units, mtp_input).items():
            assert (source is None) == (unit.kind == "E")
            assert source is None or units.index(source) < units.index(unit)
    assert data_flow(units, "block")[Unit("m", 1)] == Unit("t", 0)
    assert data_flow(units, "block")[Unit("m", 2)] == Unit("m", 1)
    assert data_flow(units, "norm")[Unit("m", 1)] == Unit("n")
    assert data_flow(units, "norm")[Unit("m", 2)] == Unit("n", 1)
    assert data_flow(units, "trunk")[Unit("m", 2)] == Unit("E")
    assert data_flow(model_units(3, 2), "trunk")[Unit("m", 2)] == Unit("t", 1)
    assert data_flow(units, "trunk")[Unit("h", 2, 1)] == Unit("n", 2)
    with pytest.raises(ValueError, match="'block', 'norm', 'trunk'"):
        data_flow(units, "blok")
    with pytest.raises(ValueError, match="unknown unit kind 'x'"):
        Unit("x")
    with pytest.raises(ValueError, match="head_chunks is 0: at least 1"):
        model_units(1, head_chunks=0)


def test_a_placement_names_every_wrong_unit() -> None:
    units = model_units(3)
    e, t0, t1, t2, n, h = units
    with pytest.raises(ValueError, match="units dropped: t1 n; units placed more than once: t2"):
        Placement.interleaved(units, [[e, t0, t2], [t2, h]], 2)
    with pytest.raises(ValueError, match="units not in the model: t3"):
        Placement.interleaved(units, [[e, t0, t1], [t2, Unit("t", 3), n, h]], 2)
    with pytest.raises(ValueError, match=r"stages without a unit: \[1\]"):
        Placement.interleaved(units, [[e, t0], [], [t1, t2, n, h]], 3)
    with pytest.raises(ValueError, match=r"unit t1 \(stage 1\) runs before t0 \(stage 2\)"):
        Placement.interleaved(units, [[e], [t1], [t0, t2, n, h]], 3)
    with pytest.raises(ValueError, match=r"unit t2 .* runs before t1"):
        Placement.interleaved(units, [[e, t0, t2, t1], [n, h]], 2)
    with pytest.raises(ValueError, match="without a gap"):
        Placement(tuple(units), ((e, t0, t1, t2), (n, h)), (0, 2))
    with pytest.raises(ValueError, match="2 stages but 1 ranks"):
        Placement(tuple(units), ((e, t0, t1, t2), (n, h)), (0,))
    with pytest.raises(ValueError, match="1 stages cannot occupy 2 ranks"):
        Placement.interleaved(units, [units], 2)


def test_edges_follow_the_data_flow_and_not_the_stage_order() -> None:
    placement = read_layout("Et|t|m|L", 4)
    assert [(e.tensor, e.source, e.target) for e in placement.edges] == [
        ("t0", 0, 1),
        ("t1", 1, 2),
        ("t1", 1, 3),
        ("n1", 2, 3),
    ]
    assert placement.head_only == (False, False, False, False)
    units = model_units(1, head_chunks=4)
    star = Placement(
        tuple(units),
        (tuple(units[:3]), (units[3], units[5]), (units[4],), (units[6],)),
        (0, 1, 0, 2),
    )
    assert [(e.tensor, e.target, e.share) for e in star.edges] == [
        ("n[0,2]", 1, Fraction(1, 2)),
        ("n[1]", 2, Fraction(1, 4)),
        ("n[3]", 3, Fraction(1, 4)),
    ]
    assert star.head_only == (False, True, True, True)
    assert star.stages_of(0) == (0, 2)


def test_layout_strings_of_megatron_are_read() -> None:
    placement = read_layout("Et*3|(tt|)*29,m|L", 16)
    assert placement.num_stages == 32 and placement.num_ranks == 16
    assert len(placement.stages[0]) == 4
    assert all(len(stage) == 2 for stage in placement.stages[1:30])
    assert names(placement)[30:] == ["m1 n1", "n h0,0 h1,0"]
    assert names(read_layout("E|t*2|t|L", 4)) == ["E", "t0 t1", "t2", "n h0,0"]
    split = read_layout("E|(t|)*10m|m|m|LL|LL", 8)
    assert names(split)[-2:] == ["h2,0 h3,0", "n h0,0 h1,0"]
    assert names(read_layout("E((t)*2|)*2 , L", 1)) == ["E t0 t1", "t2 t3", "n h0,0"]


@pytest.mark.parametrize(
    "text, position, problem",
    [
        ("Et||L", 4, "stage 1 is empty"),
        ("|EtL", 1, "stage 0 is empty"),
        ("EtL|", 4, "stage 1 is empty"),
        ("Et|tq|L", 5, "unexpected 'q'"),
        ("E(t|L", 2, "never closed"),
        ("Et)|L", 3, r"'\)' without"),
        ("Et*x|L", 3, "needs a number"),
        ("E|t*99999999|L", 4, "too long a layout"),
        ("tL", 1, "exactly one E is needed, 0 given"),
        ("EEtL", 2, "exactly one E is needed, 2 given"),
        ("Et|m|LLL", 8, "one L, or 2 for 1 m, is needed; 3 given"),
        ("Et", 2, "0 given"),
        ("", 1, "exactly one E"),
    ],
)
def test_layout_errors_show_the_place(text: str, position: int, problem: str) -> None:
    with pytest.raises(LayoutError, match=f"character {position}: .*{problem}"):
        read_layout(text, 1)


def test_layout_order_errors_name_the_string() -> None:
    with pytest.raises(ValueError, match=r"'Lt.E': bad placement: unit"):
        read_layout("Lt|E", 2)
    with pytest.raises(ValueError, match="1 stages cannot occupy 2 ranks"):
        read_layout("EtL", 2)
    # The final norm sits behind the block that would read it.
    with pytest.raises(ValueError, match=r"unit m1 .* runs before n"):
        read_layout("Et|m|L", 3, mtp_input="norm")
    assert names(read_layout("Et|mL", 2, mtp_input="norm"))[1] == "n m1 n1 h0,0 h1,0"


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_layouts_survive_a_round_trip(data: st.DataObject) -> None:
    layers, depth, chunks = (data.draw(st.integers(0, 6)), data.draw(st.integers(0, 3)),
                             data.draw(st.integers(1, 2)))  # fmt: skip
    tail = "m" * depth + data.draw(st.sampled_from(["L", "L" * (depth + 1)]))
    text = "E" + "t" * layers + tail
    cuts = data.draw(st.sets(st.integers(1, len(text) - 1)))
    bounds = [0, *sorted(cuts), len(text)]
    layout = "|".join(text[a:b] for a, b in pairwise(bounds))
    ranks = data.draw(st.integers(1, len(bounds) - 1))
    placement = read_layout(layout, ranks, chunks)
    assert read_layout(write_layout(placement), ranks, chunks) == placement


def test_placements_without_a_layout_string_are_refused() -> None:
    units = model_units(2, head_chunks=2)
    for stages in ([units[:5], units[5:]], [units[:4], units[4:]]):
        with pytest.raises(ValueError, match="cannot express this placement"):
            write_layout(Placement.interleaved(units, stages, 2))
    whole = [units[:3], units[3:]]
    with pytest.raises(ValueError, match="cannot express this placement"):
        write_layout(Placement(tuple(units), tuple(map(tuple, whole)), (1, 0)))
    assert write_layout(Placement.interleaved(units, whole, 2)) == "Et*2|L"


def test_cost_tables() -> None:
    cost = UnitCost(forward=2, backward=6, weight_share=1 / 3, output_bytes=8)
    from parallel.pipeline.actions import HW, B, F, H, I, W

    assert [cost.duration(kind) for kind in (F, B, I, W, H, HW)] == [2, 6, 4, 2, 8, 2]
    assert cost.duration(H, split=True) == 6
    units = model_units(2)
    table = CostTable({"t": cost, "E": UnitCost(), "n": UnitCost(1, 0)}, {units[-1]: UnitCost(5)})
    placement = Placement.interleaved(units, [units[:2], units[2:]], 2)
    stage = table.stage(placement, 1)
    assert (stage.forward, stage.backward, stage.weight_share) == (8, 6, 1 / 3)
    assert table.stage(placement, 0).output_bytes == 8 and stage.output_bytes == 0
    assert table.rank_loads(placement) == (8, 14)
    assert table.scaled(0.5).rank_loads(placement) == (4, 7)
    with pytest.raises(ValueError, match="no entry for unit m1"):
        table[Unit("m", 1)]
    with pytest.raises(ValueError, match="forward is -1"):
        UnitCost(forward=-1)
    with pytest.raises(ValueError, match="cannot exceed 1"):
        UnitCost(weight_share=2)


@pytest.mark.parametrize("layers", [4, 5, 7, 11])
@pytest.mark.parametrize("ranks, virtual", [(1, 1), (2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("depth", [0, 2])
def test_every_planner_places_every_unit_once(
    layers: int, ranks: int, virtual: int, depth: int
) -> None:
    units = tuple(model_units(layers, depth, head_chunks=2))
    stages = ranks * virtual
    layout = "E" + "t" * (layers - stages + 1) + "|t" * (stages - 1) + "m" * depth + "L"
    for name in PLANNERS:
        request = PlanRequest(units, ranks, virtual, COSTS, layout)
        placement = make_placement(name, request)
        assert sorted(map(str, units)) == sorted(str(u) for s in placement.stages for u in s), name
        assert placement.num_ranks == ranks
        if name != "adahc":
            assert placement.num_stages == stages
            assert placement.ranks == tuple(s % ranks for s in range(stages))


def test_uniform_gives_the_remainder_to_the_first_stages() -> None:
    placement = make_placement("uniform", PlanRequest(tuple(model_units(7, 1)), 3))
    assert names(placement) == ["E t0 t1 t2", "t3 t4", "t5 t6 n m1 n1 h0,0 h1,0"]
    with pytest.raises(ValueError, match="a block for each of 3 stages, the model has 2"):
        make_placement("uniform", PlanRequest(tuple(model_units(2)), 3))


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_balanced_cuts_are_optimal(loads: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(loads)))

    def value(cuts: list[int]) -> tuple[int, int]:
        sums = [sum(loads[a:b]) for a, b in pairwise(cuts)]
        return max(sums), sum(x * x for x in sums)

    every = [[0, *inner, len(loads)] for inner in combinations(range(1, len(loads)), parts - 1)]
    found = balanced_cuts(loads, parts)
    assert found in every
    assert value(found) == min(map(value, every))


def test_balanced_moves_blocks_away_from_the_head() -> None:
    placement = make_placement("balanced", PlanRequest(tuple(model_units(10)), 4, costs=COSTS))
    assert COSTS.rank_loads(placement) == (9.0, 9.0, 9.0, 9.0)
    assert [unit.kind for unit in placement.stages[-1]] == ["t", "n", HEAD]
    with pytest.raises(ValueError, match="needs a cost table"):
        make_placement("balanced", PlanRequest(tuple(model_units(10)), 4))
    with pytest.raises(ValueError, match="cannot fill 5 stages with the 4 pieces"):
        make_placement("balanced", PlanRequest(tuple(model_units(1)), 5, costs=COSTS))


def test_planner_errors() -> None:
    units = tuple(model_units(4))
    with pytest.raises(ValueError, match=r"unknown pipeline planner 'balance'.*'balanced'"):
        make_placement("balance", PlanRequest(units, 2))
    with pytest.raises(ValueError, match="has 3 t and 0 m; the model has 4 and 0"):
        make_placement("explicit", PlanRequest(units, 2, layout="Ett|tL"))
    with pytest.raises(ValueError, match="has 2 stages; 2 ranks with 2 stages each need 4"):
        make_placement("explicit", PlanRequest(units, 2, 2, layout="Ett|ttL"))
    with pytest.raises(ValueError, match="needs a layout string"):
        make_placement("explicit", PlanRequest(units, 2))
    with pytest.raises(ValueError, match=r"vocab.* cannot be run; planner 'adahc' divides"):
        make_placement("vocab", PlanRequest(units, 2))
    with pytest.raises(ValueError, match="both must be at least 1"):
        PlanRequest(units, 0)
