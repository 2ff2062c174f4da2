"""Twenty optimizer steps of multi-token prediction: curves, hosts in step, chunks that move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from models.mtp import MTPConfig
from parallel.apply import local_tensor
from parallel.gradients import clip_gradients, full_parameters, gradient_norm
from parallel.mesh import ParallelConfig, PipelineConfig
from parallel.pipeline.units import HEAD, Placement, Unit
from pretrain.engine import Engine
from pretrain.objectives.base import build_objective
from pretrain.optimizer import ShardedOptimizer
from pretrain.optimizer_config import OptimizerConfig
from pretrain.placement import shared_hosts
from tests.distributed import run_ranks
from tests.parity.harness import SMALL, Case, build, gradient_error, micro_batches
from tests.parity.placements import scattered, tail_on_last

pytestmark = pytest.mark.parity

STEPS = 20
CLIP = 0.5
MOVE_AT = 7
UNTIED = replace(SMALL, mtp=MTPConfig(depth=2))
TIED = replace(UNTIED, tie_embeddings=True)
REPEATED = replace(SMALL, mtp=MTPConfig(depth=2, kind="repeated"))


def rotated(placement: Placement) -> Placement:
    """The chunks of every depth with one hosting rank handed on to the next host of that depth."""
    stages = list(placement.stages)
    for depth in {u.index for u in placement.units if u.kind == HEAD}:
        held = [s for s, units in enumerate(stages) if units[0].kind == HEAD == units[-1].kind
                and units[0].index == depth]  # fmt: skip
        chunks = [stages[s] for s in held]
        for stage, taken in zip(held, chunks[1:] + chunks[:1]):
            stages[stage] = taken
    return replace(placement, stages=tuple(stages))


def star(model: Any, ranks: int, world: int, seed: int = 5, **parallel: Any) -> Case:
    return Case(
        world=world,
        parallel=ParallelConfig(pp=ranks, pipeline=PipelineConfig("gpipe"), **parallel),
        model=model,
        micro_batches=2,
        placement=scattered(model, ranks, 4, seed),
    )


CASES = {
    "chunks": star(UNTIED, 3, 3),
    "chunks-tied": star(TIED, 2, 2),
    "chunks-repeated": star(REPEATED, 3, 3),
    "chunks-dp2": star(UNTIED, 2, 4, dp=2),
    "chunks-fsdp2": star(UNTIED, 2, 4, fsdp=2, reshard_after_forward=False),
    "chunks-tp2": star(TIED, 2, 4, tp=2, sp=True),
    "tail-on-last": replace(star(UNTIED, 2, 2), placement=tail_on_last(UNTIED, 2)),
}


def shared_bits(engine: Engine) -> dict[str, bytes]:
    """This rank's copy of every weight that several pipeline ranks hold."""
    hosts = shared_hosts(engine.model.config, engine.placement)
    return {
        name: local_tensor(parameter).numpy().tobytes()
        for name, parameter in engine.model.named_parameters()
        if name in hosts
    }


def train(case: Case) -> dict[str, Any]:
    engine, objective = build(case), build_objective(case.objective, case.model)
    optimizer = ShardedOptimizer(engine.model, OptimizerConfig(lr=2e-3, weight_decay=0.1), "torch")
    losses: list[dict[str, float]] = []
    norms, copies = [], []
    for step in range(STEPS):
        if step == MOVE_AT and case.placement is not None:
            engine.place(rotated(case.placement))
        result = engine.forward_backward(micro_batches(case, engine, step), objective)
        norm = gradient_norm(engine.model)
        clip_gradients(engine.model, norm, CLIP)
        optimizer.step(2e-3)
        losses.append(result.losses)
        norms.append(float(norm))
        copies.append(shared_bits(engine))
    weights = {name: value.clone() for name, value in full_parameters(engine.model).items()}
    mesh = engine.model.mesh.coordinate
    place = tuple(mesh[axis] for axis in mesh if axis != "pp")
    return {"losses": losses, "norms": norms, "weights": weights, "copies": copies, "place": place}


def _ranks(rank: int, world: int, case: Case) -> dict[str, Any]:
    torch.set_num_threads(1)
    return train(case)


_references: dict[str, dict[str, Any]] = {}


def reference(case: Case) -> dict[str, Any]:
    plain = case.reference()
    if repr(plain) not in _references:
        _references[repr(plain)] = run_ranks(1, _ranks, plain, timeout=120)[0]
    return _references[repr(plain)]


SINGLE = pytest.param(torch.float32, id="f32", marks=pytest.mark.slow)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, id="f64"), SINGLE])
@pytest.mark.parametrize("name", CASES)
def test_twenty_steps(name: str, dtype: torch.dtype) -> None:
    """The curve of every depth as in one process, chunks moving between hosts on the way, and all
    copies of a weight bitwise equal after every step."""
    case = replace(CASES[name], dtype=dtype)
    wanted = reference(case)
    assert min(wanted["norms"]) > CLIP, "clipping must be active in every step"
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    ranks = run_ranks(case.world, _ranks, case, timeout=120)
    for found in ranks:
        for losses, expected in zip(found["losses"], wanted["losses"], strict=True):
            assert losses == pytest.approx(expected, rel=tolerance)
        if dtype == torch.float64:
            error, worst = gradient_error(found["weights"], wanted["weights"])
            assert error <= 1e-8, f"{worst} off by {error:.2e}"
    compared = 0
    for step in range(STEPS):
        seen: dict[Any, bytes] = {}
        for found in ranks:
            for weight, bits in found["copies"][step].items():
                compared += (weight, found["place"]) in seen
                assert seen.setdefault((weight, found["place"]), bits) == bits, (weight, step)
    assert compared >= STEPS or name == "tail-on-last"


def test_chunks_do_move() -> None:
    for case in CASES.values():
        assert case.placement is not None
        if case.placement.head_only[-1]:
            assert rotated(case.placement) != case.placement
    assert Unit(HEAD, 0, 0) in CASES["chunks"].placement.units  # type: ignore[union-attr]
