"""Expert layers under every layout: loss, auxiliary losses, figures and every gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from models.experts import BalanceConfig, MoE
from models.routers import LapSum, ReLU, Sigmoid, TopK, TopP
from parallel.mesh import ParallelConfig, PipelineConfig
from tests.parity.harness import SMALL, Case, assert_parity, reference, run_case, run_together

pytestmark = pytest.mark.parity

UNEVEN = PipelineConfig("1f1b", planner="explicit", layout="Et|t*4L")
LAYOUTS: dict[str, Case] = {
    "micro": Case(micro_batches=3),
    "recompute": Case(micro_batches=2, parallel=ParallelConfig(recompute="full")),
    "recompute-selective": Case(parallel=ParallelConfig(recompute="selective")),
    "tp2": Case(2, ParallelConfig(tp=2), micro_batches=2),
    "tp2-sp": Case(2, ParallelConfig(tp=2, sp=True, recompute="full")),
    "pp2-uneven": Case(2, ParallelConfig(pp=2, pipeline=UNEVEN), micro_batches=3),
    "pp2-zb": Case(2, ParallelConfig(pp=2, pipeline=PipelineConfig("zb_h1")), micro_batches=3),
    "fsdp2": Case(2, ParallelConfig(fsdp=2), micro_batches=2),
    "dp2-ep2": Case(2, ParallelConfig(dp=2, ep=2), micro_batches=2),
    "dp4-ep2": Case(4, ParallelConfig(dp=4, ep=2)),
    "ep2-tp2": Case(4, ParallelConfig(dp=2, ep=2, tp=2, sp=True), micro_batches=2),
    "pp2-ep2": Case(
        4, ParallelConfig(pp=2, dp=2, ep=2, pipeline=UNEVEN, recompute="full"), micro_batches=2
    ),
}


def experts(router: Any, **more: Any) -> MoE.Config:
    balance = BalanceConfig(**more.pop("balance", {"weight": 0.3}))
    return MoE.Config(experts=4, hidden=12, router=router, balance=balance, **more)


ROUTERS: dict[str, MoE.Config] = {
    "topk": experts(
        TopK.Config(), balance={"weight": 0.3, "z_loss": 0.02}, shared_experts=1, shared_hidden=8
    ),
    "switch-global": experts(
        TopK.Config(k=1, gates="softmax"), balance={"kind": "global", "weight": 0.3},
        first_dense=1, every=2, dense_hidden=16,
    ),
    "sigmoid": experts(Sigmoid.Config(groups=2, scaling=2.0)),
    "relu": experts(ReLU.Config(coefficient=0.2), balance={}),
    "top_p": experts(TopP.Config(p=0.6), balance={"entropy": 0.05}),
    "lapsum": experts(LapSum.Config(threshold=1.0)),
    "lapsum-learned": experts(LapSum.Config(learned=True, threshold=1.0), first_dense=1,
                              dense_hidden=16),
}  # fmt: skip


def model(router: str) -> Any:
    return replace(SMALL, feedforward=ROUTERS[router])


def cases(layout: str) -> dict[str, Case]:
    return {name: replace(LAYOUTS[layout], model=model(name)) for name in ROUTERS}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_nothing(layout: str, router: str) -> None:
    chosen = cases(layout)
    run_together([case.reference() for case in chosen.values()])
    run_together(list(chosen.values()))
    case = chosen[router]
    assert_parity(case)
    wanted = reference(case)
    for found in run_case(case):
        assert found["total"] == pytest.approx(wanted["total"], rel=1e-10)
        assert found["experts"] == pytest.approx(wanted["experts"], rel=1e-9, abs=1e-12)
