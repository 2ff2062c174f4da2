"""Every registered component under every kind of parallelism: registering is joining."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from models.blocks import PeriNormBlock, ReorderedNormBlock, SpanNormBlock
from models.conditioned import AdaLNBlock
from models.config import InitConfig, ModelConfig
from models.feedforward import GELU
from models.mtp import MTPConfig
from models.norms import BHyT, RMSNorm
from models.positions import AdaRoPE
from parallel.mesh import ParallelConfig, PipelineConfig
from tests.components import FIELDS, chosen, legal_pairs
from tests.parity.harness import SMALL, Case, assert_parity, run_together

pytestmark = pytest.mark.parity

# Under stages gradients add up over micro-batches; test_matrix.py has them everywhere.
LAYOUTS = {
    "tp2-sp": (2, 1, ParallelConfig(tp=2, sp=True)),
    "tp2": (2, 1, ParallelConfig(tp=2)),
    "pp2-interleaved": (2, 3, ParallelConfig(pp=2, pipeline=PipelineConfig("interleaved", 2))),
    "pp2-uneven": (2, 3, ParallelConfig(pp=2)),  # five blocks
    "fsdp2-recompute": (2, 1, ParallelConfig(fsdp=2, recompute="selective")),
}
WHOLE = replace(SMALL.attention, qk_norm_span="projection")
# Weights so large, and sequences so short, that attention adds much to the residual stream.
STRONG = InitConfig(std=0.2, scale_outputs=False)
STRONG_BHYT = BHyT.Config(sequence_length=2, attention_lambda=5.0)


def entry_cases() -> dict[str, ModelConfig]:
    """``field-name`` to the small model with that component, default settings otherwise."""
    return {
        f"{field}-{name}": chosen(SMALL, **{field: name})
        for field, registry in FIELDS.items()
        for name in registry.names()
    }


def variant_cases() -> dict[str, ModelConfig]:
    """Components with other settings."""
    return {
        "qkv-bias": replace(SMALL, attention=replace(SMALL.attention, qkv_bias=True)),
        "softcap": replace(SMALL, logit_softcap=5.0),
        **{
            f"adarope-{g}-{t}": replace(
                SMALL, position=AdaRoPE.Config(granularity=g, temperature=t)
            )
            for g, t in (("none", "query"), ("global", "context"), ("layer", "power"))
        },
        "wide-residual": replace(SMALL, residual_dtype="float32"),
        "bhyt-strong": replace(SMALL, norm=STRONG_BHYT, init=STRONG),
        "bhyt-fixed": replace(SMALL, norm=BHyT.Config(learn_lambda=False)),
        "rms-gain": replace(SMALL, norm=RMSNorm.Config(gain=0.1)),
        "olmo2": replace(SMALL, block=ReorderedNormBlock.Config(), attention=WHOLE),
        "span-alpha": replace(SMALL, block=SpanNormBlock.Config(residual_alpha=2.0)),
        "peri-embedding": replace(SMALL, block=PeriNormBlock.Config(embedding_norm=True)),
        "lns-mtp": replace(chosen(SMALL, block="lns"), mtp=MTPConfig(2)),
        "hybrid_star-mtp": replace(chosen(SMALL, block="hybrid_star"), mtp=MTPConfig(2)),
        "adaln-mtp": replace(chosen(SMALL, block="adaln"), mtp=MTPConfig(1)),
        "gelu-bias": replace(SMALL, feedforward=GELU.Config(hidden=20, bias=True, tanh=True)),
    }


def component_cases() -> dict[str, ModelConfig]:
    return entry_cases() | variant_cases()


def pair_cases() -> dict[str, ModelConfig]:
    """Every norm with every block that it goes with."""
    return {f"{n}-{b}": chosen(SMALL, norm=n, block=b) for n, b in legal_pairs()}


def cases(layout: str, models: dict[str, ModelConfig]) -> dict[str, Case]:
    world, micro_batches, parallel = LAYOUTS[layout]
    return {
        name: Case(
            world=world,
            micro_batches=micro_batches,
            parallel=parallel,
            model=model,
            noise=isinstance(model.block, AdaLNBlock.Config),
        )
        for name, model in models.items()
    }


def check(layout: str, models: dict[str, ModelConfig], name: str) -> None:
    found = cases(layout, models)
    run_together([case.reference() for case in found.values()])
    run_together(list(found.values()))
    assert_parity(found[name])


def later(layout: str, name: str) -> bool:
    """Whether another case implies it, so that test-all alone runs it.

    Every norm and every block is under uneven stages with all of its partners; other settings are
    under tensor parallelism with sp and under stages, those with parameters of their own under
    fsdp2 too.
    """
    if layout == "pp2-interleaved":
        return name.startswith(("norm-", "block-"))
    if layout == "tp2-sp" or name not in variant_cases():
        return False
    return layout == "tp2" or not name.startswith(("adarope", "bhyt-strong"))


def parameters() -> list[Any]:
    return [
        pytest.param(layout, name, marks=[pytest.mark.slow] * later(layout, name))
        for layout in ("tp2-sp", "tp2", "pp2-interleaved", "fsdp2-recompute")
        for name in component_cases()
    ]


@pytest.mark.parametrize(("layout", "component"), parameters())
def test_component_under_layout(layout: str, component: str) -> None:
    now = later(layout, component)
    models = {n: model for n, model in component_cases().items() if later(layout, n) == now}
    check(layout, models, component)


@pytest.mark.parametrize("pair", pair_cases())
@pytest.mark.parametrize("layout", ["tp2-sp", "pp2-uneven"])
def test_norm_and_block_under_layout(layout: str, pair: str) -> None:
    check(layout, pair_cases(), pair)
