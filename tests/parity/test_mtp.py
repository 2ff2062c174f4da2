"""Multi-token prediction: whatever runs where, the model that is trained is the same."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.mtp import MTPConfig
from parallel import gradients
from parallel.gradients import full_gradients
from parallel.mesh import ParallelConfig, PipelineConfig
from parallel.pipeline.schedules import Conditions, make_schedule
from parallel.ports import Port, _Deliver
from parallel.stage import MicroBatch
from pretrain.engine import Engine
from pretrain.objectives.base import build_objective
from pretrain.objectives.causal import Causal
from pretrain.placement import cost_table
from tests.distributed import run_ranks
from tests.parity.covering import MTP_FACTORS, Row, covering_array, pairs_of, table
from tests.parity.harness import (
    SEQUENCE,
    SMALL,
    Case,
    assert_parity,
    build,
    gradient_error,
    micro_batches,
    run_case,
    run_together,
)
from tests.parity.placements import scattered, tail_on_last
from tests.parity.replay import replay

pytestmark = pytest.mark.parity

ROWS = covering_array(MTP_FACTORS)
BESIDE: dict[str, dict[str, Any]] = {
    "-": {},
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "tp2+sp": {"tp": 2, "sp": True},
    "fsdp2": {"fsdp": 2, "reshard_after_forward": False},
}
ANY_ORDER = PipelineConfig("gpipe")


def case_of(row: Row, number: int = 0) -> Case:
    """The case that a row of the covering array describes."""
    depth, ranks = row["depth"], row["ranks"]
    assert isinstance(depth, int) and isinstance(ranks, int)
    mtp = MTPConfig()
    if depth:
        kind, read = row["kind"], row["input"] if row["kind"] != "parallel" else "block"
        mtp = MTPConfig(depth, kind, input=read)  # type: ignore[arg-type]
    model = replace(SMALL, mtp=mtp, tie_embeddings=row["tied"])
    placement = {
        "tail on last": tail_on_last(model, ranks),
        "whole heads": scattered(model, ranks, 1, number),
        "chunks": scattered(model, ranks, 4, number),
    }[str(row["plan"])]
    count = {"1": 1, "P-1": ranks - 1, "2P": 2 * ranks}[str(row["micro-batches"])]
    beside = BESIDE[str(row["beside"])]
    objective = Causal.Config(
        documents=row["documents"],
        mtp_normalize=row["normalize"],
    )
    return Case(
        world=ranks * (1 if row["beside"] == "-" else 2),
        parallel=ParallelConfig(pp=ranks, pipeline=ANY_ORDER, **beside),
        model=model,
        objective=objective,
        micro_batches=count,
        sequences=48,
        placement=placement,
    )


def test_every_pair_of_factor_values_occurs() -> None:
    found = {pair for row in ROWS for pair in pairs_of(row)}
    names = list(MTP_FACTORS)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            for x in MTP_FACTORS[a]:
                for y in MTP_FACTORS[b]:
                    assert ((a, x), (b, y)) in found, (a, x, b, y)


def test_the_documented_table_is_the_array() -> None:
    text = (Path(__file__).parents[2] / "docs" / "parity.md").read_text(encoding="utf-8")
    assert table(ROWS) in text, "run: python -m tests.parity.covering"


DOUBLE = pytest.param(torch.float64, id="f64")
SINGLE = pytest.param(torch.float32, id="f32", marks=pytest.mark.slow)


@pytest.mark.parametrize("number", range(len(ROWS)))
@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE])
def test_where_a_head_runs_changes_nothing(dtype: torch.dtype, number: int) -> None:
    rows = [replace(case_of(row, n), dtype=dtype) for n, row in enumerate(ROWS)]
    alike = [case for case in rows if case.world == rows[number].world]
    run_together([case.reference() for case in alike])
    run_together(alike)
    assert_parity(rows[number])


SEQUENTIAL = replace(SMALL, mtp=MTPConfig(depth=2))
STAR = Case(
    world=3,
    parallel=ParallelConfig(pp=3, pipeline=ANY_ORDER),
    model=SEQUENTIAL,
    micro_batches=4,
    placement=scattered(SEQUENTIAL, 3, 4, 5),
)


@pytest.mark.parametrize("kind", ["sequential", "parallel", "repeated"])
@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE])
def test_all_but_shared_weights_have_the_same_bits(kind: Any, dtype: torch.dtype) -> None:
    """Against one process with the same micro-batches: only what several ranks add up, or add in
    another order, may round differently."""
    model = replace(SMALL, mtp=MTPConfig(depth=2, kind=kind))
    case = replace(STAR, model=model, dtype=dtype, placement=scattered(model, 3, 4, 5))
    plain = replace(case.reference(), micro_batches=case.micro_batches)
    wanted = run_case(plain)[0]
    shared = {"head.weight", "embedding.weight"}
    for found in run_case(case):
        for name, gradient in found["gradients"].items():
            if name in shared or (kind == "repeated" and name.startswith("mtp")):
                limit = 1e-14 if dtype == torch.float64 else 1e-6
                assert gradient_error({name: gradient}, wanted["gradients"])[0] <= limit, name
            else:
                assert gradient.equal(wanted["gradients"][name]), name


@pytest.mark.parametrize("schedule", ["gpipe", "adahc", "adahc_zb"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE])
def test_every_bit_is_that_of_a_replay(schedule: Any, tied: bool, dtype: torch.dtype) -> None:
    """Against all ranks' actions in one process: shared weights included."""
    model = replace(SEQUENTIAL, tie_embeddings=tied)
    parallel = replace(STAR.parallel, pipeline=PipelineConfig(schedule))
    case = replace(STAR, model=model, dtype=dtype, parallel=parallel)
    assert case.placement is not None
    costs = cost_table(model, SEQUENCE, chunks=4)
    made = make_schedule(schedule, case.placement, case.micro_batches, Conditions(costs))
    wanted = replay(case, made.compute_orders())
    for found in run_case(case):
        for name, gradient in found["gradients"].items():
            assert gradient.equal(wanted[name]), name
    assert_parity(case)


PLANNED: dict[str, dict[str, Any]] = {
    "uniform": {"schedule": "1f1b"},
    "balanced": {"schedule": "zb_h1"},
    "standalone": {"schedule": "adahc"},
    "split": {"schedule": "adahc_zb"},
    "adahc": {"schedule": "adahc", "head_chunks": 8, "max_in_flight": 4},
    "adahc_zb": {"planner": "adahc", "schedule": "adahc_zb", "max_hosts": 2},
}


def planned(name: str, ranks: int, kind: Any) -> Case:
    """As a run has it: from the configuration, without a placement of the test's own."""
    pipeline = PipelineConfig(**({"planner": name} | PLANNED[name]))
    assert not pipeline.problems()
    return Case(
        world=ranks,
        parallel=ParallelConfig(pp=ranks, pipeline=pipeline),
        model=replace(SMALL, vocab_size=300, mtp=MTPConfig(2, kind)),
        micro_batches=4,
    )


@pytest.mark.parametrize("kind", ["sequential", "parallel"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", PLANNED)
def test_every_planner_trains_the_same_model(name: str, ranks: int, kind: Any) -> None:
    run_together([planned(other, ranks, kind) for other in PLANNED])
    assert_parity(planned(name, ranks, kind))


def _slow_runs(rank: int, world: int, case: Case, runs: int) -> list[str]:
    """Bits of every gradient after each of many steps in which every action sleeps a while."""
    torch.set_num_threads(1)
    engine, objective = build(case), build_objective(case.objective, case.model)
    batches = micro_batches(case, engine)
    pick = random.Random(rank)

    def sleepy(run: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any) -> Any:
            time.sleep(pick.random() * 0.003)
            return run(*args)

        return method

    for stage in engine.stages.values():
        stage.forward, stage.backward = sleepy(stage.forward), sleepy(stage.backward)  # type: ignore[method-assign]
    found = []
    for _ in range(runs):
        engine.forward_backward(batches, objective)
        found.append(_bits(full_gradients(engine.model)))
    return found


def _bits(tensors: dict[str, Tensor]) -> str:
    total = 0
    for name, tensor in sorted(tensors.items()):
        total = hash((total, name, tensor.numpy().tobytes()))
    return str(total)


@pytest.mark.slow
def test_a_hundred_runs_at_random_speed_give_the_same_bits() -> None:
    for bits in run_ranks(3, _slow_runs, STAR, 100, timeout=240):
        assert len(bits) == 100 and len(set(bits)) == 1


# Mistakes that the comparison must notice.


def count_depths_locally(engine: Engine) -> None:
    engine.global_counts = lambda counts: counts  # type: ignore[method-assign]


def keep_hosts_apart(engine: Engine) -> None:
    engine.model.hosts = {}


def count_every_host(engine: Engine) -> None:
    original = gradients.counted_here

    def counted(model: Any, name: str, parameter: Any) -> bool:
        return name == "head.weight" or original(model, name, parameter)

    gradients.counted_here = counted


def lose_a_chunk(engine: Engine) -> None:
    """The gradient of some rows never comes back from the rank that has them."""
    original = _Deliver.backward

    def backward(ctx: Any, *given: Tensor | None) -> Any:
        lost = next((i for i, port in enumerate(ctx.ports) if port.chunks), None)
        kept = [None if i == lost else g for i, g in enumerate(given)]
        return original(ctx, *kept)

    _Deliver.backward = staticmethod(backward)  # type: ignore[method-assign]


def read_other_rows(engine: Engine) -> None:
    """A chunk's labels are those of the rows before it."""
    for stage in engine.stages.values():
        stage._loss = partial(_loss_of_other_rows, stage._loss)  # type: ignore[method-assign]


def _loss_of_other_rows(
    loss: Callable[..., Tensor], depth: int, hidden: Tensor, port: Port, batch: MicroBatch
) -> Tensor:
    moved = {name: field.roll(1, 1) for name, field in batch.fields.items()}
    return loss(depth, hidden, port, replace(batch, fields=moved) if port.chunks else batch)


def shift_ids_once(engine: Engine) -> None:
    """Every depth embeds the next token, whatever its depth."""
    part = engine.model.part
    run = part.run_unit

    def run_unit(name: str, x: Any, ids: Tensor, context: Any) -> Tensor:
        wrong = name == "mtp.2"
        return run(name, x, ids.roll(1, 1) if wrong else ids, context)

    part.run_unit = run_unit  # type: ignore[method-assign]


CONTROLS: dict[str, tuple[Case, Callable[[Engine], None]]] = {
    "local-counts": (
        replace(STAR, world=6, parallel=replace(STAR.parallel, dp=2), micro_batches=2),
        count_depths_locally,
    ),
    "hosts-never-added": (STAR, keep_hosts_apart),
    "hosts-counted-twice": (STAR, count_every_host),
    "lost-rows": (STAR, lose_a_chunk),
    "labels-of-other-rows": (STAR, read_other_rows),
    "wrong-shift": (STAR, shift_ids_once),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_sabotage_is_noticed(name: str) -> None:
    case, sabotage = CONTROLS[name]
    assert_parity(case)
    with pytest.raises(AssertionError):
        assert_parity(replace(case, sabotage=sabotage))


def test_without_the_fixed_order_of_consumers_the_bits_differ() -> None:
    """The control of the bitwise comparison: gradients of the trunk's readers in another order."""
    model = replace(SMALL, mtp=MTPConfig(depth=3, kind="parallel"))
    case = replace(STAR, model=model, dtype=torch.float32, placement=scattered(model, 3, 4, 5))
    plain = replace(case.reference(), micro_batches=case.micro_batches)
    wanted = run_case(plain)[0]["gradients"]
    found = run_case(replace(plain, sabotage=reverse_consumers))[0]["gradients"]
    assert not found["blocks.0.attention.q_proj.weight"].equal(
        wanted["blocks.0.attention.q_proj.weight"]
    )


def reverse_consumers(engine: Engine) -> None:
    original = _Deliver.backward

    def backward(ctx: Any, *given: Tensor | None) -> Any:
        ctx.ports = tuple(replace(port, order=-port.order) for port in ctx.ports)
        return original(ctx, *given)

    _Deliver.backward = staticmethod(backward)  # type: ignore[method-assign]
