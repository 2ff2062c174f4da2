"""The simulator against closed forms, and the drawings of its timelines."""

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from parallel.pipeline.actions import HW, Action, B, F, H, I, Orders, W
from parallel.pipeline.cost import CostTable, UnitCost, ideal_makespan
from parallel.pipeline.layout import read_layout
from parallel.pipeline.lowering import ScheduleError, lower
from parallel.pipeline.planner import PlanRequest, make_placement
from parallel.pipeline.schedules import Conditions, forward_schedule, make_schedule
from parallel.pipeline.simulate import Simulation, simulate
from parallel.pipeline.timeline import Event, ascii_timeline, chrome_trace, svg_timeline
from parallel.pipeline.units import Placement, model_units


def uniform(ranks: int, virtual: int, layers_per_stage: int = 1) -> Placement:
    units = tuple(model_units(ranks * virtual * layers_per_stage))
    return make_placement("uniform", PlanRequest(units, ranks, virtual))


def block_costs(forward: float, backward: float, weight_share: float = 0.5) -> CostTable:
    """Only blocks cost anything."""
    free = UnitCost()
    block = UnitCost(forward, backward, weight_share, activation_bytes=100, parameter_bytes=1000,
                     output_bytes=10)  # fmt: skip
    return CostTable({"E": free, "n": free, "h": free, "m": free, "t": block})


def run(name: str, ranks: int, virtual: int, count: int, f: int = 2, b: int = 4) -> Simulation:
    return simulate(make_schedule(name, uniform(ranks, virtual), count), block_costs(f, b))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("f, b", [(1, 2), (3, 3), (5, 7)])
def test_uniform_makespan_is_exact(name: str, ranks: int, f: int, b: int) -> None:
    for count in (1, ranks - 1 or 1, ranks, 2 * ranks, 3 * ranks + 1):
        result = run(name, ranks, 1, count, f, b)
        assert result.makespan == (count + ranks - 1) * (f + b)
        assert result.busy == (count * (f + b),) * ranks
        bubble = (ranks - 1) / (count + ranks - 1)
        assert result.bubble_fraction == pytest.approx(bubble, abs=1e-12)
        in_flight = [count if name == "gpipe" else min(count, ranks - r) for r in range(ranks)]
        assert list(result.peak_in_flight) == in_flight


@pytest.mark.parametrize("ranks, virtual", [(2, 2), (4, 2), (4, 3), (8, 2)])
def test_interleaving_divides_the_bubble(ranks: int, virtual: int) -> None:
    for rounds in (1, 2, 4):
        count = rounds * ranks
        result = run("interleaved", ranks, virtual, count)
        work = count * virtual * 6
        # (P - 1)/V of one micro-batch's forward and backward time on a rank, which is V * 6.
        assert result.makespan == work + (ranks - 1) * 6
    for count in range(ranks + 1, 3 * ranks):  # not divisible: more than that, less than GPipe
        result = run("interleaved", ranks, virtual, count)
        work = count * virtual * 6
        assert work + (ranks - 1) * 6 <= result.makespan < work + (ranks - 1) * virtual * 6


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("f, i, w", [(1, 1, 1), (3, 2, 2), (2, 3, 2), (2, 2, 3), (2, 3, 1)])
def test_split_weight_gradients_fill_the_bubble(ranks: int, f: int, i: int, w: int) -> None:
    """(P − 1)(I + max(F − W, 0)) remain of (P − 1)(F + I + W): a third where all are equal."""
    costs = block_costs(f, i + w, w / (i + w))
    for count in (ranks, 2 * ranks, 3 * ranks + 1):
        bubble = (ranks - 1) * (i + max(f - w, 0))
        schedule = make_schedule("zb_h1", uniform(ranks, 1), count)
        result = simulate(schedule, costs)
        assert result.makespan == pytest.approx(count * (f + i + w) + bubble)
        assert max(result.peak_in_flight) == min(ranks, count)
        fitted = make_schedule("adahc_zb", uniform(ranks, 1), count, Conditions(costs))
        assert simulate(fitted, costs).makespan <= result.makespan * 1.004 + 1e-9


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("f, b", [(1, 2), (3, 3), (5, 7)])
def test_a_periodic_schedule_of_equal_stages_is_1f1b(ranks: int, f: int, b: int) -> None:
    costs = block_costs(f, b)
    for count in (1, ranks, 3 * ranks + 1):
        schedule = make_schedule("adahc", uniform(ranks, 1), count, Conditions(costs))
        result = simulate(schedule, costs)
        assert result.makespan == (count + ranks - 1) * (f + b)
        assert max(result.peak_in_flight) <= ranks


def test_the_slowest_stage_sets_the_pace() -> None:
    costs = CostTable({"E": UnitCost(), "n": UnitCost(), "t": UnitCost(1, 2), "h": UnitCost(2, 4)})
    units = tuple(model_units(14))
    count = 32
    spans = {}
    for planner in ("uniform", "balanced"):
        placement = make_placement(planner, PlanRequest(units, 4, costs=costs))
        schedule = make_schedule("1f1b", placement, count)
        spans[planner] = simulate(schedule, costs).makespan
        bound = ideal_makespan(schedule, costs)
        assert bound <= spans[planner] <= bound * (1 + 3 / count)
    assert spans["balanced"] == (count + 3) * 12
    assert spans["uniform"] > 1.2 * spans["balanced"]


def test_latency_and_bandwidth() -> None:
    placement = uniform(2, 1)
    schedule = make_schedule("1f1b", placement, 1)
    costs = block_costs(2, 4)
    assert simulate(schedule, costs, latency=0.5).makespan == 2 + 0.5 + 2 + 4 + 0.5 + 4
    assert simulate(schedule, costs, bandwidth=20).makespan == 2 + 0.5 + 2 + 4 + 0.5 + 4
    # Transfers of one link queue up: three activations of 10 bytes at 1 byte per unit.
    forward = forward_schedule(make_schedule("gpipe", placement, 3))
    result = simulate(forward, costs, bandwidth=1)
    assert [e.start for e in result.events if e.rank == 1] == [12, 22, 32]
    with pytest.raises(ValueError, match="cannot be so small"):
        simulate(schedule, costs, latency=-1)


def test_memory_peaks() -> None:
    placement = uniform(2, 1, layers_per_stage=2)
    result = simulate(make_schedule("1f1b", placement, 4), block_costs(1, 2))
    # Parameters, activations of the micro-batches in flight, and a received tensor of 10 bytes.
    assert list(result.peak_bytes) == [2000 + 2 * 200 + 10, 2000 + 200 + 10]
    result = simulate(make_schedule("gpipe", placement, 4), block_costs(1, 2))
    assert list(result.peak_bytes) == [2000 + 4 * 200 + 10] * 2
    forward = forward_schedule(make_schedule("gpipe", placement, 4))
    assert simulate(forward, block_costs(1, 2)).peak_bytes == (2200, 2210)


def test_memory_of_a_rank_that_hosts_head_chunks() -> None:
    """Rank 0 hosts both chunks of depth 0 and one of two of depth 1, in stages of their own."""
    units = model_units(2, 1, 2)
    trunk = (tuple(units[:2]), tuple(units[2:6]))  # E t0 | t1 n m1 n1
    heads = (tuple(units[6:8]), (units[8],), (units[9],))
    placement = Placement(tuple(units), (*trunk, *heads), (0, 1, 0, 0, 1))
    block = UnitCost(1, 2, 0.5, activation_bytes=100, parameter_bytes=1000, output_bytes=64)
    head = UnitCost(1, 2, 0.5, activation_bytes=5, workspace_bytes=7, shared_bytes=(("W", 500),))
    free = UnitCost(output_bytes=64)
    costs = CostTable({"E": free, "n": free, "t": block, "m": block, "h": head})
    assert costs.rank_parameters(placement) == (1000 + 500, 2000 + 500)
    orders: Orders = [
        [Action(F, 0, 0), Action(H, 2, 0), Action(H, 3, 0), Action(B, 0, 0)],
        [Action(F, 1, 0), Action(H, 4, 0), Action(B, 1, 0)],
    ]
    result = simulate(lower("hosts", placement, 1, orders), costs)
    # Rank 0 while it runs the first H: its block's activations, 64 bytes of rows for two chunks
    # and 32 for the third, twice 5 bytes that a chunk keeps, and the workspace.
    assert result.peak_bytes[0] == 1500 + 100 + 64 + 32 + 2 * 5 + 7
    # Rank 1 while it runs B: two blocks, the returned gradients of both head stages on rank 0.
    assert result.peak_bytes[1] == 2500 + 200 + 64 + 32
    split: Orders = [
        [*orders[0][:3], Action(HW, 2, 0), Action(HW, 3, 0), orders[0][-1]],
        [*orders[1], Action(HW, 4, 0)],
    ]
    result = simulate(lower("hosts", placement, 1, split), costs)
    # Rows and what the chunks keep stay until HW: the most is there during the second H.
    assert result.peak_bytes[0] == 1500 + 100 + 64 + 32 + 3 * 5 + 7


def test_split_backward_and_fused_heads_are_timed() -> None:
    costs = CostTable(
        {"E": UnitCost(), "n": UnitCost(), "t": UnitCost(2, 4, 0.25), "h": UnitCost(1, 2)}
    )
    units = model_units(2)
    groups = (tuple(units[:2]), tuple(units[2:4]), tuple(units[4:]))
    placement = Placement(tuple(units), groups, (0, 1, 0))
    orders: Orders = [
        [Action(F, 0, 0), Action(H, 2, 0), Action(HW, 2, 0), Action(B, 0, 0)],
        [Action(F, 1, 0), Action(I, 1, 0), Action(W, 1, 0)],
    ]
    result = simulate(lower("split", placement, 1, orders), costs)
    spans = {(e.rank, str(e.action.kind)): (e.start, e.end) for e in result.events}
    assert spans == {
        (0, "F"): (0, 2),
        (1, "F"): (2, 4),
        (0, "H"): (4, 6),  # forward 1 and half of the backward
        (0, "HW"): (6, 7),
        (1, "I"): (6, 9),
        (1, "W"): (9, 10),
        (0, "B"): (9, 13),
    }
    assert result.busy == (9, 6)


def test_mtp_tail_on_its_own_stage() -> None:
    costs = CostTable({"E": UnitCost(), "n": UnitCost(), "t": UnitCost(1, 2), "m": UnitCost(1, 2),
                       "h": UnitCost(0.5, 1)})  # fmt: skip
    spread = make_schedule("1f1b", read_layout("Et|t|m|L", 4), 8)
    assert simulate(spread, costs).makespan == (8 + 3) * 3


def test_a_stuck_schedule_is_an_error() -> None:
    schedule = make_schedule("1f1b", uniform(2, 1), 2)
    broken = tuple(a for a in schedule.actions[1] if a.kind is not B)
    schedule = type(schedule)("broken", schedule.placement, 2, (schedule.actions[0], broken))
    with pytest.raises(
        ScheduleError, match=r"rank 0 never gets gradient of t0 .* for B of stage 0"
    ):
        simulate(schedule, block_costs(1, 2))


def test_ascii_timeline() -> None:
    result = run("1f1b", 2, 1, 2, 2, 4)
    assert ascii_timeline(result.events, width=18).splitlines() == [
        "rank   0 |0-1-....0===..1===|",
        "rank   1 |..0-0===1-1===....|",
        "- F  = B  . idle  (numbers are micro-batches; 18 in all)",
    ]
    assert ascii_timeline([]) == "(nothing to draw)"
    long = ascii_timeline(run("interleaved", 4, 2, 16).events, width=60)
    assert {len(line) for line in long.splitlines()[:-1]} == {len("rank   0 ||") + 60}


def test_svg_timeline_is_well_formed_and_complete() -> None:
    result = run("interleaved", 4, 2, 8)
    root = ElementTree.fromstring(svg_timeline(result.events, title="a < b"))
    space = "{http://www.w3.org/2000/svg}"
    boxes = root.findall(f"{space}g")
    assert len(boxes) == len(result.events) == 4 * 2 * 8 * 2
    titles = {box.findtext(f"{space}title") for box in boxes}
    assert "F of stage 0, micro-batch 0: 0 to 2" in titles
    ends = [float(r.get("x", 0)) + float(r.get("width", 0)) for r in root.iter(f"{space}rect")
            if r.get("stroke")]  # fmt: skip
    assert max(ends) == pytest.approx(990, abs=0.01)
    assert any(text.text == "a < b" for text in root.iter(f"{space}text"))


@pytest.mark.parametrize(
    "seconds, unit, ticks, caption",
    [
        (0.1, "s", ["0", "200", "400", "600", "800"], "time, ms (900 in all)"),
        (2e9, "FLOP", ["0", "5", "10", "15"], "time, GFLOP (18 in all)"),
        (1.0, "", ["0", "2", "4", "6", "8"], "time (9 in all)"),
    ],
)
def test_svg_timeline_has_an_axis_and_a_legend(seconds, unit, ticks, caption) -> None:
    events = run("zb_h1", 1, 1, 3, 1, 2).events
    drawn = [replace(e, start=e.start * seconds, end=e.end * seconds) for e in events]
    root = ElementTree.fromstring(svg_timeline(drawn, unit=unit))
    words = [text.text for text in root.findall("{http://www.w3.org/2000/svg}text")]
    legend = ["forward", "backward, inputs only", "weight gradients", "idle"]
    assert words[2:] == [*ticks, caption, *legend, "numbers: micro-batches"]


def test_chrome_trace() -> None:
    events = [Event(1, Action(F, 1, 3), 0.5, 0.75)]
    trace = json.loads(json.dumps(chrome_trace(events)))
    assert trace["traceEvents"] == [
        {
            "name": "F of stage 1, micro-batch 3",
            "cat": "F",
            "ph": "X",
            "ts": 5e5,
            "dur": 2.5e5,
            "pid": 0,
            "tid": 1,
        }
    ]
