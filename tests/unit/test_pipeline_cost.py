"""Cost tables written by hand, shared weights, and the time of a program's steps."""

import pytest

from parallel.pipeline.actions import F, H
from parallel.pipeline.cost import INSTANT, CostTable, Network, UnitCost, given_costs
from parallel.pipeline.program import Execution, Program
from parallel.pipeline.units import Placement, Unit, model_units


def test_costs_by_hand() -> None:
    units = model_units(2, 1, 4)
    table, network = given_costs(
        {
            "units": {
                "t": 1,
                "t1": {"forward": 2, "backward": 3, "weight_share": 0.25, "activation_bytes": 9},
                "m": 1.5,
                "h": {"forward": 2, "parameter_bytes": 100, "workspace_bytes": 8},
                "h1": 4,
            },
            "latency": 0.03,
        },
        units,
    )
    assert network == Network(0.03)
    assert table[Unit("E")] == table[Unit("n", 1)] == UnitCost()
    assert table[Unit("t", 0)] == UnitCost(1, 2)
    assert table[Unit("t", 1)] == UnitCost(2, 3, 0.25, activation_bytes=9)
    assert table[Unit("m", 1)] == UnitCost(1.5, 3)
    chunk = UnitCost(0.5, 1, workspace_bytes=2, shared_bytes=(("head", 100.0),))
    assert [table[Unit("h", 0, c)] for c in range(4)] == [chunk] * 4
    assert table[Unit("h", 1, 3)].load == 3
    assert table.bound(units, 2) == (3 + 5 + 4.5 + 6 + 12) / 2


def test_what_a_head_costs_once_per_stage() -> None:
    units = model_units(2, 1, 4)
    given = {"units": {"t": 1, "m": 1, "h": {"forward": 4, "fixed": 3}}, "exchange": {"head": 2}}
    table, _ = given_costs(given, units)
    trunk = [unit for unit in units if unit.kind != "h"]
    assert table[Unit("h", 1, 2)] == UnitCost(1, 2, fixed=3, shared_bytes=(("head", 0.0),))
    assert table.together([Unit("h", 0, 0)]).load == 3 + 3
    assert table.together([Unit("h", 0, 0), Unit("h", 0, 3)]) == UnitCost(
        3, 6, shared_bytes=(("head", 0.0),)
    )
    assert table.together([Unit("h", 0, 0), Unit("h", 1, 0)]).load == 2 * (3 + 3)
    assert table.bound(units, 2) == (3 * 3 + 2 * (12 + 3)) / 2

    def placed(*heads: list[int]) -> Placement:
        """Each list: the chunks of h0 on one rank; the rest of the model is on the first."""
        first = [*trunk, *(Unit("h", 0, c) for c in heads[0]), *units[-4:]]
        others = [tuple(Unit("h", 0, c) for c in chunks) for chunks in heads[1:]]
        stages = (tuple(first), *others)
        return Placement(tuple(units), stages, tuple(range(len(stages))))

    assert table.rank_loads(placed([0, 1], [2, 3])) == (9 + 6 + 3 + 15, 6 + 3)
    assert table.rank_loads(placed([0, 1], [2], [3]))[1:] == (3 + 3, 3 + 3)
    copies = [table.step_exchange(placed(*h)) for h in ([[0, 1, 2, 3]], [[0], [1, 2, 3]],
                                                         [[0, 1], [2], [3]])]  # fmt: skip
    assert copies == [0, 2, 4]
    half = table.scaled(0.5)
    assert half[Unit("h", 0, 1)].fixed == 1.5 and half.exchange == {"head": 1.0}


@pytest.mark.parametrize(
    "document, message",
    [
        ({"unit": {}}, "entry of the cost table 'unit'.*did you mean 'units'"),
        ({"units": 3}, "needs 'units'"),
        ({"units": {"t": 1}}, "no entry for unit m1: give 'm'"),
        ({"units": {"t7": 1}}, "single unit of this model, in the cost table 't7': allowed"),
        ({"units": {"t": "fast"}}, "t.forward must be a finite number, got 'fast'"),
        ({"units": {"t": True}}, "t.forward must be a finite number"),
        ({"units": {"t": {"backward": 1}}}, "the cost of unit t has no 'forward'"),
        ({"units": {"t": {"forwards": 1}}}, "unknown cost of unit t 'forwards'.*'forward'"),
        ({"units": {"t": -1}}, "unit t: cost forward is -1.0: it cannot be negative"),
        ({"units": {"t": 1, "m": 1, "h": 1}, "latency": -1}, "cannot be so small"),
        ({"units": {"t": 1, "m": 1, "h": 1}, "bandwidth": "x"}, "bandwidth must be a finite"),
        ({"units": {"t": 1, "m": 1, "h": 1}, "exchange": 3}, "exchange needs names"),
        ({"units": {"t": 1, "m": 1, "h": 1}, "exchange": {"heads": 3}}, "'heads'.*mean 'head'"),
        ({"units": {"t": 1, "m": 1, "h": 1}, "exchange": {"head": -1}}, "head is -1.0: it cannot"),
    ],
)
def test_wrong_costs_by_hand(document: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        given_costs(document, model_units(2, 1))


def test_shared_weights_count_once_per_rank() -> None:
    units = model_units(1, 1, 2)
    placement = Placement.interleaved(units, [units[:3], units[3:6], units[6:]], 2)
    vocabulary = (("embedding.weight", 100.0),)
    costs = CostTable(
        {
            "E": UnitCost(parameter_bytes=50, shared_bytes=vocabulary),
            "t": UnitCost(parameter_bytes=7),
            "n": UnitCost(parameter_bytes=1),
            "m": UnitCost(parameter_bytes=8, shared_bytes=vocabulary),
            "h": UnitCost(shared_bytes=vocabulary),
        }
    )
    assert costs.rank_parameters(placement) == (50 + 7 + 1 + 100, 8 + 1 + 100)


def test_steps_wait_for_their_inputs_alone() -> None:
    """A rank's second step starts when the tensor it reads has crossed the link."""
    units = model_units(1)
    placement = Placement.interleaved(units, [units[:2], units[2:]], 2)
    costs = CostTable({"E": UnitCost(), "t": UnitCost(2, 4, output_bytes=10), "n": UnitCost(),
                       "h": UnitCost(3, 6)})  # fmt: skip
    program = Program(placement, costs, Network(latency=0.5, bandwidth=10))
    forward, head = program.op(0, F), program.op(1, F)
    run = Execution(program, [[(forward, 0), (forward, 1)], [(head, 0), (head, 1)]], record=True)
    assert run.spans == [[(0, 2), (2, 4)], [(3.5, 6.5), (6.5, 9.5)]]
    assert [time for time, _, _ in run.arrivals[1]] == [3.5, 5.5]
    assert run.makespan == 9.5
    assert program.network != INSTANT
    heads = Placement(tuple(units), (tuple(units[:3]), tuple(units[3:])), (0, 1))
    assert Program(heads, costs).op(1, H).duration == 9
    assert Program(heads, costs, split_heads={1}).op(1, H).duration == 6
