"""bf16 matrix products over float32 weights: what stays wide, and that layouts agree.

Tiny, because a CPU multiplies bf16 very slowly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from parallel.gradients import local_gradient
from parallel.mesh import ParallelConfig
from pretrain.objectives.base import build_objective
from tests.distributed import run_ranks
from tests.parity.harness import (
    SMALL,
    Case,
    build,
    gradient_error,
    micro_batches,
    reference,
    run_case,
    run_together,
)

pytestmark = pytest.mark.parity

BF16 = {"dtype": torch.float32, "compute_dtype": torch.bfloat16}
WIDE = replace(SMALL, residual_dtype="float32")
LAYOUTS = {
    "single": Case(micro_batches=2, **BF16),
    "dp2": Case(world=2, parallel=ParallelConfig(dp=2), **BF16),
    "fsdp2": Case(world=2, micro_batches=2, parallel=ParallelConfig(fsdp=2), **BF16),
    "tp2-sp": Case(world=2, parallel=ParallelConfig(tp=2, sp=True), **BF16),
    "pp2": Case(world=2, micro_batches=2, parallel=ParallelConfig(pp=2), **BF16),
    "fsdp2-tp2": Case(world=4, parallel=ParallelConfig(fsdp=2, tp=2), **BF16),
}


@pytest.mark.parametrize("model", ["narrow", "wide"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_bf16_stays_near_float32(name: str, model: str) -> None:
    """Loss within 1 %, every gradient within 10 % (bf16 rounds to 0.4 %) of the float32 run."""
    both = [replace(LAYOUTS[name], model=m) for m in (SMALL, WIDE)]
    run_together(both)
    case = both[model == "wide"]
    wanted = reference(case)
    for found in run_case(case):
        assert found["losses"]["cross_entropy"] == pytest.approx(
            wanted["losses"]["cross_entropy"], rel=1e-2
        )
        error, worst = gradient_error(found["gradients"], wanted["gradients"])
        assert error < 0.1, f"{worst} is off by {error:.2g}"
        assert all(g.dtype == torch.float32 for g in found["gradients"].values())


def _dtypes(rank: int, world: int, case: Case) -> dict[str, Any]:
    """Dtypes that a step meets: linear weights in forward, block outputs, stored gradients."""
    engine = build(case)
    seen: dict[str, Any] = {}
    block = engine.model.part.blocks["0"]
    projection = block.attention.q_proj
    projection.register_forward_hook(lambda m, i, o: seen.update(product=o.dtype))
    block.register_forward_hook(lambda m, i, o: seen.update(residual=o.dtype))
    engine.forward_backward(micro_batches(case, engine), build_objective(case.objective))
    seen["gradients"] = {local_gradient(p).dtype for _, p in engine.model.named_parameters()}
    return seen


@pytest.mark.parametrize("fsdp", [1, 2])
@pytest.mark.parametrize("wide", [False, True])
def test_what_is_narrow_and_what_is_wide(wide: bool, fsdp: int) -> None:
    case = Case(
        world=fsdp,
        model=WIDE if wide else SMALL,
        parallel=ParallelConfig(fsdp=fsdp),
        micro_batches=2,
        **BF16,
    )
    for seen in run_ranks(case.world, _dtypes, case):
        assert seen["product"] == torch.bfloat16
        assert seen["residual"] == (torch.float32 if wide else torch.bfloat16)
        assert seen["gradients"] == {torch.float32}
