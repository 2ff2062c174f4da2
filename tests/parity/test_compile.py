"""torch.compile per block changes nothing, on plain and on sharded weights."""

from __future__ import annotations

import pytest

from parallel.mesh import ParallelConfig
from tests.parity.harness import Case, assert_parity

pytestmark = [pytest.mark.parity, pytest.mark.slow]

LAYOUTS = {
    "single": Case(micro_batches=2, compile=True),
    "recompute": Case(compile=True, parallel=ParallelConfig(recompute="full")),
    "fsdp2": Case(world=2, micro_batches=2, compile=True, parallel=ParallelConfig(fsdp=2)),
    "tp2-sp": Case(world=2, compile=True, parallel=ParallelConfig(tp=2, sp=True)),
    "fsdp2-tp2": Case(world=4, compile=True, parallel=ParallelConfig(fsdp=2, tp=2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_blocks(name: str) -> None:
    assert_parity(LAYOUTS[name])
