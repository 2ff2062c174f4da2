"""Learned positions beyond what every component goes through: float32, more ranks, bf16 compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from models.adarope import LearnedTable
from models.positions import AdaRoPE, LeRoPE
from parallel.gradients import local_gradient
from parallel.mesh import ParallelConfig
from pretrain.objectives.base import build_objective
from tests.distributed import run_ranks
from tests.parity.harness import SMALL, Case, assert_parity, build, micro_batches

pytestmark = pytest.mark.parity

ADAROPE = replace(SMALL, position=AdaRoPE.Config())
POWER = replace(SMALL, position=AdaRoPE.Config(temperature="power", reference_length=3))
LEROPE = replace(SMALL, position=LeRoPE.Config())
FOUR = replace(ADAROPE, attention=replace(SMALL.attention, kv_heads=4))
F32: dict[str, Any] = {"dtype": torch.float32}
CASES = {
    "tp2-sp-f32": Case(world=2, parallel=ParallelConfig(tp=2, sp=True), model=ADAROPE, **F32),
    "fsdp2-f32": Case(
        world=2, micro_batches=2, parallel=ParallelConfig(fsdp=2), model=POWER, **F32
    ),
    "pp2-shared-f32": Case(
        world=2, micro_batches=2, parallel=ParallelConfig(pp=2), model=LEROPE, **F32
    ),
    "tp4": Case(world=4, parallel=ParallelConfig(tp=4, sp=True), model=FOUR),
    "pp2-tp2-shared": Case(
        world=4, micro_batches=2, parallel=ParallelConfig(pp=2, tp=2), model=LEROPE
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_layout(name: str) -> None:
    assert_parity(CASES[name])


def _seen(rank: int, world: int, case: Case) -> set[torch.dtype]:
    """Dtypes of the learned parameters in forward, of their tables, and of their gradients."""
    engine = build(case)
    found: set[torch.dtype] = set()
    for module in engine.model.part.modules():
        if isinstance(module, LearnedTable):
            inner = module.frequencies

            def frequencies(*args: Any, module: Any = module, inner: Any = inner) -> Any:
                table = inner(*args)
                found.update([module.log_scale.dtype, module.beta.dtype, table.dtype])
                return table

            module.frequencies = frequencies  # type: ignore[method-assign]
    engine.forward_backward(micro_batches(case, engine), build_objective(case.objective))
    assert found, "no table was asked for"
    learned = [p for name, p in engine.model.named_parameters() if ".position." in name]
    return found | {local_gradient(p).dtype for p in learned}


@pytest.mark.parametrize("fsdp", [1, 2])
def test_nothing_learned_is_narrow_under_bf16(fsdp: int) -> None:
    case = Case(
        world=fsdp, micro_batches=2, parallel=ParallelConfig(fsdp=fsdp), model=ADAROPE,
        dtype=torch.float32, compute_dtype=torch.bfloat16,
    )  # fmt: skip
    for found in run_ranks(case.world, _seen, case):
        assert found == {torch.float32}
