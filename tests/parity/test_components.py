"""Every registered component under every kind of parallelism: registering is joining."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from models.blocks import BLOCKS
from models.feedforward import FEEDFORWARDS
from models.norms import NORMS
from models.positions import POSITIONS, AdaRoPE
from parallel.mesh import ParallelConfig, PipelineConfig
from tests.parity.harness import SMALL, Case, assert_parity, run_together

pytestmark = pytest.mark.parity

LAYOUTS = {
    "tp2-sp": (2, 2, ParallelConfig(tp=2, sp=True)),
    "tp2": (2, 1, ParallelConfig(tp=2)),
    "pp2-interleaved": (2, 3, ParallelConfig(pp=2, pipeline=PipelineConfig("interleaved", 2))),
    "fsdp2-recompute": (2, 2, ParallelConfig(fsdp=2, recompute="selective")),
}
FIELDS: dict[str, Any] = {
    "norm": NORMS,
    "block": BLOCKS,
    "position": POSITIONS,
    "feedforward": FEEDFORWARDS,
}


def component_cases() -> dict[str, Any]:
    """``field-name`` to the small model with that component, default settings otherwise."""
    return {
        f"{field}-{name}": replace(SMALL, **{field: registry.config_class(name)()})
        for field, registry in FIELDS.items()
        for name in registry.names()
    } | {
        "qkv-bias": replace(SMALL, attention=replace(SMALL.attention, qkv_bias=True)),
        "softcap": replace(SMALL, logit_softcap=5.0),
        **{
            f"adarope-{g}-{t}": replace(
                SMALL, position=AdaRoPE.Config(granularity=g, temperature=t)
            )
            for g, t in (("none", "query"), ("global", "context"), ("layer", "power"))
        },
        "wide-residual": replace(SMALL, residual_dtype="float32"),
    }


def cases(layout: str) -> dict[str, Case]:
    world, micro_batches, parallel = LAYOUTS[layout]
    return {
        name: Case(world=world, micro_batches=micro_batches, parallel=parallel, model=model)
        for name, model in component_cases().items()
    }


@pytest.mark.parametrize("component", component_cases())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_component_under_layout(layout: str, component: str) -> None:
    chosen = cases(layout)
    run_together([case.reference() for case in chosen.values()])
    run_together(list(chosen.values()))
    assert_parity(chosen[component])
