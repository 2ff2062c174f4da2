"""Twenty optimizer steps with clipping: the loss curve and the final weights of each layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from models.experts import MoE
from models.positions import AdaRoPE, LeRoPE
from models.routers import TopK
from parallel.apply import local_tensor
from parallel.gradients import clip_gradients, full_parameters, gradient_norm
from parallel.mesh import ParallelConfig, PipelineConfig
from pretrain.objectives.base import build_objective
from pretrain.optimizer import ShardedOptimizer
from pretrain.optimizer_config import MuonConfig, OptimizerConfig
from tests.distributed import run_ranks
from tests.parity.harness import SMALL, Case, build, gradient_error, micro_batches

pytestmark = pytest.mark.parity

STEPS = 20
CLIP = 0.5
TIED = replace(SMALL, tie_embeddings=True)
LAYOUTS = {
    "dp2": Case(world=2, micro_batches=2, parallel=ParallelConfig(dp=2)),
    "fsdp2-tied": Case(world=2, micro_batches=2, parallel=ParallelConfig(fsdp=2), model=TIED),
    "tp2-sp": Case(world=2, parallel=ParallelConfig(tp=2, sp=True)),
    "pp2-tied": Case(
        world=2,
        micro_batches=3,
        parallel=ParallelConfig(pp=2, pipeline=PipelineConfig("interleaved", 2)),
        model=TIED,
    ),
    "pp2-fsdp2": Case(
        world=4, micro_batches=2, parallel=ParallelConfig(pp=2, fsdp=2, reshard_after_forward=False)
    ),
    "fsdp2-tp2": Case(world=4, micro_batches=2, parallel=ParallelConfig(fsdp=2, tp=2)),
}
DTYPES = {"f64": torch.float64, "f32": torch.float32}


ADAMW = OptimizerConfig(lr=2e-3, weight_decay=0.1)
MUON = replace(ADAMW, matrices="muon", muon=MuonConfig(lr=4e-3))


def train(case: Case, config: OptimizerConfig) -> dict[str, Any]:
    """Loss and norm of every step, the weights after the last, and names: of all parameters here,
    those that have the same bits as before, a gradient, optimizer state."""
    engine = build(case)
    objective = build_objective(case.objective)
    optimizer = ShardedOptimizer(engine.model, config, "torch")
    parameters = dict(engine.model.named_parameters())
    before = {name: local_tensor(p).clone() for name, p in parameters.items()}
    losses, norms = [], []
    for step in range(STEPS):
        result = engine.forward_backward(micro_batches(case, engine, step), objective)
        norm = gradient_norm(engine.model)
        clip_gradients(engine.model, norm, CLIP)
        optimizer.step(2e-3)
        losses.append(result.losses["cross_entropy"])
        norms.append(float(norm))
    weights = {name: value.clone() for name, value in full_parameters(engine.model).items()}
    unchanged = {name for name, p in parameters.items() if local_tensor(p).equal(before[name])}
    return {
        "losses": losses,
        "norms": norms,
        "weights": weights,
        "names": set(parameters),
        "unchanged": unchanged,
        "graded": {name for name, p in parameters.items() if p.grad is not None},
        "state": {key.partition("/")[2] for key in optimizer.state_tensors()},
    }


def _ranks(rank: int, world: int, case: Case, config: OptimizerConfig) -> dict[str, Any]:
    return train(case, config)


_references: dict[str, dict[str, Any]] = {}


def reference(case: Case, config: OptimizerConfig) -> dict[str, Any]:
    plain = case.reference()
    key = f"{plain} {config}"
    if key not in _references:
        _references[key] = run_ranks(1, _ranks, plain, config, timeout=120)[0]
    return _references[key]


def _curves() -> list[Any]:
    """Float32 on four ranks is left to test-all."""
    return [
        pytest.param(
            name, dtype, marks=[pytest.mark.slow] if dtype == "f32" and case.world > 2 else []
        )
        for name, case in LAYOUTS.items()
        for dtype in DTYPES
    ]


@pytest.mark.parametrize(("name", "dtype"), _curves())
def test_twenty_steps_give_the_same_curve(name: str, dtype: str) -> None:
    compare(replace(LAYOUTS[name], dtype=DTYPES[dtype]), ADAMW)


# All experts are active, so that no rounding error can choose other ones.
EXPERTS = replace(
    SMALL, layers=2, feedforward=MoE.Config(experts=4, hidden=12, router=TopK.Config(k=4))
)
MUON_LAYOUTS = {
    **{name: LAYOUTS[name] for name in ("dp2", "fsdp2-tied", "tp2-sp", "pp2-tied", "fsdp2-tp2")},
    "ep2": Case(world=2, parallel=ParallelConfig(dp=2, ep=2), model=EXPERTS),
}


@pytest.mark.parametrize("name", MUON_LAYOUTS)
def test_muon_gives_the_same_curve(name: str) -> None:
    """In float64: small singular values are amplified, and so are float32's rounding errors."""
    compare(MUON_LAYOUTS[name], MUON)


POSITIONS_ONLY = OptimizerConfig(lr=2e-3, trainable="positions", position_lr=10.0)
LEARNED = replace(SMALL, position=AdaRoPE.Config(temperature="power"))
SHARED = replace(SMALL, position=LeRoPE.Config())
ALONE = ParallelConfig(pp=2, pipeline=PipelineConfig("1f1b", planner="explicit", layout="E|t*5L"))
SPLIT = ParallelConfig(pp=2, pipeline=PipelineConfig("zb_h1"))
FROZEN = {
    "dp2": Case(world=2, micro_batches=2, parallel=ParallelConfig(dp=2), model=LEARNED),
    "fsdp2": Case(world=2, micro_batches=2, parallel=ParallelConfig(fsdp=2), model=SHARED),
    "tp2-sp-full": Case(
        world=2, parallel=ParallelConfig(tp=2, sp=True, recompute="full"), model=LEARNED
    ),
    "nothing-to-learn-on-rank-0": Case(world=2, micro_batches=2, parallel=ALONE, model=LEARNED),
    "pp2-zb": Case(world=2, micro_batches=3, parallel=SPLIT, model=SHARED),
}


@pytest.mark.parametrize("name", FROZEN)
def test_positions_alone_learn(name: str) -> None:
    for found in compare(FROZEN[name], POSITIONS_ONLY, clips=False):
        rest = {name for name in found["names"] if ".position." not in f".{name}"}
        assert rest and found["unchanged"] == rest  # bit for bit
        assert found["state"] == found["graded"] == found["names"] - rest


def compare(case: Case, config: OptimizerConfig, clips: bool = True) -> list[dict[str, Any]]:
    """What every rank found, which is what one process finds."""
    wanted = reference(case, config)
    assert not clips or min(wanted["norms"]) > CLIP, "clipping must be active in every step"
    assert wanted["losses"][-1] != wanted["losses"][0]
    double = case.dtype == torch.float64
    ranks = run_ranks(case.world, _ranks, case, config, timeout=120)
    for rank, found in enumerate(ranks):
        errors = [abs(a - b) / b for a, b in zip(found["losses"], wanted["losses"], strict=True)]
        tolerance = 1e-9 if double else 1e-5
        assert max(errors) <= tolerance, f"rank {rank}: loss off by {max(errors):.2e}"
        if double:
            error, worst = gradient_error(found["weights"], wanted["weights"])
            assert error <= 1e-8, f"rank {rank}: {worst} off by {error:.2e}"
    return ranks
