"""Layout invariance: loss and every gradient of each layout against one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from parallel.mesh import ParallelConfig
from pretrain.objectives.causal import Causal
from tests.parity.harness import SMALL, Case, assert_parity

pytestmark = pytest.mark.parity

LAYOUTS = {
    "micro": Case(micro_batches=3),
    "recompute-full": Case(parallel=ParallelConfig(recompute="full"), micro_batches=2),
    "recompute-selective": Case(parallel=ParallelConfig(recompute="selective")),
    "dp2": Case(world=2, parallel=ParallelConfig(dp=2), micro_batches=2),
    "fsdp2": Case(world=2, parallel=ParallelConfig(fsdp=2), micro_batches=3),
    "fsdp2-recompute": Case(
        world=2, parallel=ParallelConfig(fsdp=2, recompute="full"), micro_batches=2
    ),
    "fsdp4-uneven": Case(world=4, parallel=ParallelConfig(fsdp=4)),
    "dp2-fsdp2": Case(world=4, parallel=ParallelConfig(dp=2, fsdp=2), micro_batches=3),
    "tp2": Case(world=2, parallel=ParallelConfig(tp=2), micro_batches=2),
    "tp2-sp": Case(world=2, parallel=ParallelConfig(tp=2, sp=True), micro_batches=2),
    "tp2-sp-recompute": Case(
        world=2, parallel=ParallelConfig(tp=2, sp=True, recompute="selective"), micro_batches=2
    ),
    "fsdp2-tp2": Case(world=4, parallel=ParallelConfig(fsdp=2, tp=2), micro_batches=2),
    "fsdp2-tp2-sp": Case(
        world=4, parallel=ParallelConfig(fsdp=2, tp=2, sp=True), micro_batches=3
    ),
    "dp2-tp2": Case(world=4, parallel=ParallelConfig(dp=2, tp=2), micro_batches=1),
}
VARIANTS = {
    "untied": {},
    "tied": {"model": replace(SMALL, tie_embeddings=True)},
    "documents": {"objective": Causal.Config(documents="mask", label_smoothing=0.1)},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_nothing(layout: str, variant: str, dtype: torch.dtype) -> None:
    assert_parity(replace(LAYOUTS[layout], dtype=dtype, **VARIANTS[variant]))
