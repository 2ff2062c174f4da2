"""Diffusion objectives over many steps, under every planner, and the data path that makes noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.gradients import clip_gradients, full_parameters, gradient_norm
from parallel.mesh import ParallelConfig, PipelineConfig
from parallel.stage import MicroBatch
from pretrain.config import RunConfig
from pretrain.data import Batches, Prefetcher, build_blend
from pretrain.decode import decode
from pretrain.objectives.base import build_objective
from pretrain.objectives.masked import Masked
from pretrain.optimizer import ShardedOptimizer
from pretrain.optimizer_config import OptimizerConfig
from tests.distributed import run_ranks
from tests.parity.harness import (
    Case,
    assert_parity,
    build,
    gradient_error,
    micro_batches,
    micro_batches_of,
    run_together,
)
from tests.parity.test_objectives import DIFFUSION, case_of
from tests.parity.tiny_run import tiny_config, tiny_dataset

pytestmark = pytest.mark.parity

MAIN = ("masked", "uniform", "block", "eso-half-flat")  # one of each objective
PLANS = {
    "uniform-1f1b": PipelineConfig("1f1b", planner="uniform"),
    "balanced-gpipe": PipelineConfig("gpipe", planner="balanced"),
    "split-zb": PipelineConfig("zb_h1", planner="split"),
    "adahc": PipelineConfig("adahc", planner="adahc", head_chunks=4),
}


def on_four_ranks(plan: str, name: str) -> Case:
    """Two stages of two tensor-parallel ranks; ``head_chunks`` cut canvases of any length."""
    parallel = ParallelConfig(tp=2, sp=True, pp=2, pipeline=PLANS[plan])
    return case_of(Case(world=4, micro_batches=3, parallel=parallel), name)


def _plans() -> list[Any]:
    """Plans without split backward passes or chunks of heads are left to test-all, but for one."""
    plain = ("uniform-1f1b", "balanced-gpipe")
    return [
        pytest.param(p, n, marks=[pytest.mark.slow] if p in plain and n != "masked" else [])
        for p in PLANS
        for n in MAIN
    ]


@pytest.mark.parametrize(("plan", "name"), _plans())
def test_every_plan_of_two_stages_of_two_ranks(plan: str, name: str) -> None:
    if plan in ("split-zb", "adahc"):
        run_together([on_four_ranks(plan, other) for other in MAIN])
    assert_parity(on_four_ranks(plan, name))


STEPS, CLIP = 20, 0.5
CURVES = {
    "dp2": Case(world=2, micro_batches=2, parallel=ParallelConfig(dp=2)),
    "fsdp2-tp2": Case(world=4, micro_batches=2, parallel=ParallelConfig(fsdp=2, tp=2)),
    "pp2-tp2": Case(world=4, micro_batches=3, parallel=ParallelConfig(pp=2, tp=2)),
}


def train(case: Case) -> dict[str, Any]:
    engine = build(case)
    objective = build_objective(case.objective, case.model, batch=case.sequences)
    optimizer = ShardedOptimizer(engine.model, OptimizerConfig(weight_decay=0.1), "torch")
    losses = []
    for step in range(STEPS):
        result = engine.forward_backward(micro_batches(case, engine, step), objective)
        clip_gradients(engine.model, gradient_norm(engine.model), CLIP)
        optimizer.step(2e-3)
        losses.append(result.losses["nelbo"])
    weights = {name: value.clone() for name, value in full_parameters(engine.model).items()}
    return {"losses": losses, "weights": weights}


def _ranks(rank: int, world: int, cases: list[Case]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [train(case) for case in cases]


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    cases = [case_of(CURVES["dp2"], name).reference() for name in MAIN]
    return dict(zip(MAIN, run_ranks(1, _ranks, cases, timeout=400)[0]))


@pytest.mark.parametrize(
    "layout",
    [pytest.param(n, marks=[pytest.mark.slow] if n == "fsdp2-tp2" else []) for n in CURVES],
)
def test_twenty_steps_give_the_same_curve(layout: str, alone: dict[str, dict[str, Any]]) -> None:
    cases = [case_of(CURVES[layout], name) for name in MAIN]
    for rank in run_ranks(CURVES[layout].world, _ranks, cases, timeout=400):
        for name, found in zip(MAIN, rank, strict=True):
            wanted = alone[name]
            pairs = zip(found["losses"], wanted["losses"], strict=True)
            assert max(abs(a - b) / abs(b) for a, b in pairs) <= 1e-9, name
            error, worst = gradient_error(found["weights"], wanted["weights"])
            assert error <= 1e-8, f"{name}: {worst} off by {error:.2e}"


# ------------------------------------------------------------------------------ the data path


def steps_of(
    config: RunConfig, objective: Any, data_size: int, micro_batch: int, first: int
) -> list[list[MicroBatch]]:
    """Each step's micro-batches of all data ranks in order, from sample ``first`` on."""
    length, total = config.training.sequence_length, 6 * config.training.batch
    blend = build_blend(config.data, config.data.train, length, config.seed, total)
    made = build_objective(objective, config.model, config.seed, config.training.batch)
    ranks = []
    for rank in range(data_size):
        device = torch.device("cpu")
        batches = Batches(blend, made, micro_batch, rank, data_size, device)
        ranks.append(Prefetcher(batches, config.training.batch))
    steps = []
    for step in range(first // config.training.batch, 6):
        start = step * config.training.batch
        steps.append([b for rank in ranks for b in rank.take(start, step < 5)])
    for prefetcher in ranks:
        prefetcher.close()
    return steps


def joined(batches: list[MicroBatch]) -> list[torch.Tensor]:
    return [torch.cat(parts) for parts in zip(*(batch.tensors() for batch in batches), strict=True)]


@pytest.mark.parametrize("name", DIFFUSION)
def test_noise_is_the_same_bits_under_every_layout_and_after_a_resume(
    tmp_path: Path, name: str
) -> None:
    tiny_dataset(tmp_path / "data")
    tree = tiny_config(tmp_path, steps=6, parallel={})
    tree["model"] |= {"vocab_size": 258, "mask_token": True}
    config = decode(RunConfig, tree)
    wanted = [joined(step) for step in steps_of(config, DIFFUSION[name], 1, 8, 0)]
    for data_size, micro_batch in ((2, 2), (4, 1), (1, 1)):
        found = steps_of(config, DIFFUSION[name], data_size, micro_batch, 0)
        for a, b in zip(found, wanted, strict=True):
            assert all(map(torch.equal, joined(a), b))
    resumed = steps_of(config, DIFFUSION[name], 2, 4, 3 * config.training.batch)
    for a, b in zip(resumed, wanted[3:], strict=True):
        assert all(map(torch.equal, joined(a), b))


def test_noise_that_depends_on_the_rank_is_noticed() -> None:
    """The mistake of other codebases: each data rank counts its own samples from 0."""
    case = case_of(CURVES["dp2"], "masked")
    assert isinstance(case.objective, Masked.Config)
    right = [micro_batches_of(case, 0, rank, 2) for rank in range(2)]
    objective = build_objective(case.objective, case.model, batch=case.sequences)
    whole = micro_batches_of(replace(case, micro_batches=1), 0, 0, 1)
    clean = torch.where(whole[0].fields["labels"] >= 0, whole[0].fields["labels"], whole[0].ids)
    tokens = torch.cat([torch.zeros(len(clean), 1, dtype=torch.long), clean], 1)
    half = len(tokens) // 2
    wrong = [objective.micro_batch(tokens[r * half :][:half], None, range(half)) for r in range(2)]
    patterns = [batch.ids == case.model.mask_id for batch in wrong]
    assert torch.equal(*patterns)  # both ranks mask the same positions ...
    found = [torch.cat([b.ids for b in rank]) == case.model.mask_id for rank in right]
    assert not torch.equal(*found)  # ... and with global indices they do not
