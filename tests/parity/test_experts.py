"""Expert layers under every layout: loss, auxiliary losses, figures and every gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models import experts as experts_module
from models.experts import BalanceConfig, MoE
from models.mtp import MTPConfig
from models.routers import LapSum, ReLU, Sigmoid, TopK, TopP
from models.routing import Router
from parallel import expert as expert_module
from parallel import gradients
from parallel.apply import BuildOptions, update_state
from parallel.checkpoint import CheckpointManager
from parallel.fingerprint import weights_hash
from parallel.gradients import clip_gradients, full_parameters, gradient_norm
from parallel.mesh import ParallelConfig, PipelineConfig, build_mesh
from pretrain.engine import Engine, build_engine
from pretrain.objectives.base import build_objective
from pretrain.objectives.causal import Causal
from pretrain.objectives.perturbed import Perturbed
from pretrain.optimizer import ShardedOptimizer
from pretrain.optimizer_config import MuonConfig, OptimizerConfig
from pretrain.state import weights
from tests.distributed import run_ranks
from tests.parity.harness import (
    SEQUENCE,
    SMALL,
    Case,
    assert_parity,
    build,
    gradient_error,
    micro_batches,
    reference,
    run_case,
    run_together,
)
from tests.parity.test_kill import finish, kill_after_a_checkpoint
from tests.parity.tiny_run import tiny_config, tiny_dataset

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
    "lapsum-learned": experts(LapSum.Config(learned=True, threshold=1.0)),
}  # fmt: skip


def model(router: str) -> Any:
    return replace(SMALL, feedforward=ROUTERS[router])


def cases(layout: str) -> dict[str, Case]:
    return {name: replace(LAYOUTS[layout], model=model(name)) for name in ROUTERS}


# Where these differ from another layout, it is not in what they do to a router.
ALIKE = ("micro", "recompute-selective", "pp2-zb", "dp4-ep2")


def later(layout: str, router: str) -> bool:
    return layout in ALIKE and router not in ("topk", "lapsum-learned")


def parameters() -> list[Any]:
    return [
        pytest.param(layout, router, marks=[pytest.mark.slow] * later(layout, router))
        for layout in LAYOUTS
        for router in ROUTERS
    ]


@pytest.mark.parametrize(("layout", "router"), parameters())
def test_layout_changes_nothing(layout: str, router: str) -> None:
    now = later(layout, router)
    chosen = {name: case for name, case in cases(layout).items() if later(layout, name) == now}
    run_together([case.reference() for case in chosen.values()])
    run_together(list(chosen.values()))
    case = chosen[router]
    assert_parity(case)
    wanted = reference(case)
    for found in run_case(case):
        assert found["total"] == pytest.approx(wanted["total"], rel=1e-10)
        assert found["experts"] == pytest.approx(wanted["experts"], rel=1e-9, abs=1e-12)


# --------------------------------------------------------------------------- single precision

SINGLE = ("tp2-sp", "pp2-uneven", "dp2-ep2", "micro")


def routed(rank: int, world: int, case: Case) -> dict[str, Any]:
    """One step, with what every router decided: its maps, and how far it was from another one."""
    torch.set_num_threads(1)
    engine = build(case)
    maps: dict[str, list[Tensor]] = {}
    margins: list[float] = []

    def note(name: str, router: Router, routing: Any) -> None:
        maps.setdefault(name, []).append(routing.map)
        k = int(routing.map[0].sum())
        best = routing.logits.detach().sort(-1, descending=True).values
        margins.append(float((best[:, k - 1] - best[:, k]).min()))

    for name, module in engine.model.part.named_modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda m, _, out, name=name: note(name, m, out))
    objective = build_objective(case.objective, case.model)
    result = engine.forward_backward(micro_batches(case, engine), objective)
    return {
        "maps": {name: torch.cat(parts) for name, parts in maps.items()},
        "margin": min(margins),
        "place": (engine.model.mesh.data_rank, engine.model.mesh.data_size),
        "losses": result.losses,
        "gradients": {n: g.clone() for n, g in gradients.full_gradients(engine.model).items()},
    }


@pytest.mark.parametrize("layout", SINGLE)
def test_single_precision_chooses_the_same_experts(layout: str) -> None:
    once = replace(LAYOUTS[layout].parallel, recompute="none")  # a router is asked once
    case = replace(LAYOUTS[layout], model=model("topk"), dtype=torch.float32, parallel=once)
    (wanted,) = run_ranks(1, routed, case.reference(), timeout=120)
    assert wanted["margin"] > 1e-6
    for found in run_ranks(case.world, routed, case, timeout=120):
        rank, size = found["place"]
        for name, chosen in found["maps"].items():
            assert torch.equal(chosen, wanted["maps"][name].chunk(size)[rank]), name
        for name, value in wanted["losses"].items():
            assert found["losses"][name] == pytest.approx(value, rel=1e-5), name
        error, worst = gradient_error(found["gradients"], wanted["gradients"])
        assert error <= 1e-5, worst


# --------------------------------------------------------------------------------- many steps

STEPS = 20
ADAMW = OptimizerConfig(lr=2e-3, budget_lr=5.0)
MUON = replace(ADAMW, matrices="muon", muon=MuonConfig(lr=4e-3))
CURVES: dict[str, tuple[str, str, OptimizerConfig]] = {
    "lapsum-learned pp2-uneven": ("lapsum-learned", "pp2-uneven", ADAMW),
    "lapsum-learned pp2-ep2": ("lapsum-learned", "pp2-ep2", ADAMW),
    "sigmoid dp2-ep2": ("sigmoid", "dp2-ep2", ADAMW),
    "switch-global ep2-tp2": ("switch-global", "ep2-tp2", ADAMW),
    "relu fsdp2": ("relu", "fsdp2", ADAMW),
    "topk ep2-tp2 muon": ("topk", "ep2-tp2", MUON),
}


def train(rank: int, world: int, case: Case, config: OptimizerConfig) -> dict[str, Any]:
    torch.set_num_threads(1)
    engine = build(case)
    objective = build_objective(case.objective, case.model)
    optimizer = ShardedOptimizer(engine.model, config, "torch")
    totals = []
    for step in range(STEPS):
        result = engine.forward_backward(micro_batches(case, engine, step), objective)
        clip_gradients(engine.model, gradient_norm(engine.model), 0.5)
        optimizer.step(config.lr)
        update_state(engine.model, step + 1)
        totals.append(result.total)
    tensors = full_parameters(engine.model) | dict(engine.model.named_state())
    return {"totals": totals, "tensors": {n: t.clone() for n, t in tensors.items()}}


# What they add to the others: both at once.
BOTH = ("topk ep2-tp2 muon", "lapsum-learned pp2-ep2")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in BOTH)) for n in CURVES]
)
def test_twenty_steps_give_the_same_curve(name: str) -> None:
    router, layout, config = CURVES[name]
    case = replace(LAYOUTS[layout], model=model(router))
    (wanted,) = run_ranks(1, train, case.reference(), config, timeout=180)
    ranks = run_ranks(case.world, train, case, config, timeout=180)
    for found in ranks:
        torch.testing.assert_close(found["totals"], wanted["totals"], rtol=1e-9, atol=0)
        for key, value in found["tensors"].items():
            error = (value - wanted["tensors"][key]).norm() / wanted["tensors"][key].norm()
            assert not error > 1e-8, f"{key} is off by {error:.1e}"
    budgets = [found["tensors"].get("shared.budget.eta") for found in ranks]
    if router == "lapsum-learned":
        assert budgets[0] is not None and budgets[0].abs().min() > 0  # it has moved
        for budget in budgets:  # on every stage alike, to the bit
            assert budget is not None and torch.equal(budget, budgets[0])


# -------------------------------------------------------------------------------- checkpoints


def engine_of(case: Case, seed: int = 7) -> Engine:
    mesh = build_mesh(case.parallel, torch.device("cpu"))
    options = BuildOptions(dtype=case.dtype, seed=seed)
    return build_engine(case.model, case.parallel, mesh, options, SEQUENCE)


def moved(rank: int, world: int, folder: str, cases: list[Case]) -> list[dict[str, Any]]:
    """The first case saves, every one of them loads: hash at the start, tensors after loading."""
    found = []
    group = dist.new_group(backend="gloo") if world > 1 else None
    root = Path(folder) / "checkpoints"
    checkpoints = CheckpointManager(root, asynchronous=False, process_group=group)
    for number, case in enumerate(cases):
        engine = engine_of(case)
        start = weights_hash(engine.model)
        if number == 0 and checkpoints.latest() is None:
            checkpoints.save(1, weights(engine.model), {})
        other = engine_of(case, seed=8)
        checkpoints.load(1, weights(other.model))
        tensors = full_parameters(other.model) | dict(other.model.named_state())
        loaded = weights_hash(other.model)
        found.append({"start": start, "loaded": loaded, "tensors": tensors})
    checkpoints.close()
    return found


def test_checkpoints_move_between_layouts(tmp_path: Path) -> None:
    """ep2 → ep2 and tp2 → one process; initial weights are those of one process."""
    chosen = model("lapsum-learned")
    two = [
        Case(2, ParallelConfig(dp=2, ep=2), model=chosen),
        Case(2, ParallelConfig(tp=2), model=chosen),
        Case(2, ParallelConfig(fsdp=2), model=chosen),
    ]
    ranks = run_ranks(2, moved, str(tmp_path), two, timeout=120)
    (alone,) = run_ranks(1, moved, str(tmp_path), [Case(model=chosen)], timeout=120)
    wanted = alone[0]
    for found in (result for rank in ranks for result in rank):
        assert found["start"] == found["loaded"] == wanted["start"] == wanted["loaded"]
        for name, value in wanted["tensors"].items():
            assert torch.equal(found["tensors"][name], value), name


def test_a_killed_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    tiny_dataset(tmp_path / "data")
    tree = tiny_config(tmp_path, steps=16, parallel={"dp": 2, "ep": 2})
    tree["model"]["feedforward"] = {
        "type": "moe",
        "experts": 4,
        "hidden": 16,
        "router": {"type": "lapsum", "learned": True, "k": 1.5},
        "balance": {"kind": "global"},
    }
    wanted = finish({**tree, "name": "undisturbed"})
    assert "model/blocks.0.feedforward.router.activity" in wanted
    assert "model/shared.budget.eta" in wanted
    kill_after_a_checkpoint({**tree, "name": "killed"})
    found = finish({**tree, "name": "killed"})
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


# ------------------------------------------------------------------- multi-token prediction


@pytest.mark.parametrize("kind", ["sequential", "repeated"])
def test_blocks_behind_the_trunk_have_experts_too(kind: Any) -> None:
    """They have a constant part of the budget, not one that is learned."""
    mtp = MTPConfig(depth=2, kind=kind)
    chosen = replace(model("lapsum-learned"), mtp=mtp)
    case = Case(2, ParallelConfig(pp=2, recompute="full"), model=chosen, micro_batches=3)
    assert_parity(case)
    found, wanted = run_case(case)[0], reference(case)
    assert found["gradients"].get("shared.budget.eta", torch.zeros(5)).shape == (5,)
    assert found["experts"] == pytest.approx(wanted["experts"], rel=1e-9, abs=1e-12)


# ---------------------------------------------------------------- two views of every sequence


@pytest.mark.parametrize("layout", ["tp2-sp", "pp2-uneven", "dp2-ep2"])
def test_both_views_are_routed(layout: str) -> None:
    """Self-distillation beside a learned budget: what balances experts is the mean of the views."""
    case = replace(LAYOUTS[layout], model=model("lapsum-learned"), objective=Perturbed.Config())
    assert_parity(case)
    wanted = reference(case)
    for found in run_case(case):
        assert found["total"] == pytest.approx(wanted["total"], rel=1e-10)
        assert found["experts"] == pytest.approx(wanted["experts"], rel=1e-9, abs=1e-12)
    views = [
        reference(replace(case, objective=objective))["experts"]
        for objective in (Causal.Config(), Perturbed.Config(method="pose"))
    ]
    mean = {name: (views[0][name] + views[1][name]) / 2 for name in wanted["experts"]}
    linear = [name for name in mean if name.endswith(("balance", "active", "kept_mass"))]
    assert linear and views[0][linear[0]] != views[1][linear[0]]
    for name in linear:
        assert wanted["experts"][name] == pytest.approx(mean[name], rel=1e-12), name


# -------------------------------------------------------------------------- negative controls


def keep_budget_gradients_apart(engine: Engine) -> None:
    engine.model.hosts = {n: r for n, r in engine.model.hosts.items() if "budget" not in n}


def count_the_budget_on_every_stage(engine: Engine) -> None:
    counted = gradients.counted_here
    gradients.counted_here = lambda model, name, p: "budget" in name or counted(model, name, p)


def note_in_the_forward_pass(engine: Engine) -> None:
    """A recomputed block adds its auxiliary loss to the log a second time."""
    forward = experts_module._Attach.forward

    def noting(ctx: Any, gates: Tensor, loss: Tensor, share: float, note: Any) -> Tensor:
        note()
        return forward(ctx, gates, loss, share, lambda: None)

    experts_module._Attach.forward = staticmethod(noting)  # type: ignore[method-assign]


def give_every_tensor_rank_the_whole_loss(engine: Engine) -> None:
    attach = experts_module._Attach.apply
    experts_module._Attach.apply = lambda gates, loss, share, note: attach(gates, loss, 1.0, note)


def divide_by_local_tokens(engine: Engine) -> None:
    begin = expert_module.ExpertLayers.begin_step
    expert_module.ExpertLayers.begin_step = (  # type: ignore[method-assign]
        lambda self, tokens: begin(self, tokens // engine.model.mesh.data_size)
    )


def sum_experts_over_all_replicas(engine: Engine) -> None:
    original = gradients._gradients_over

    def chosen(model: Any, axis: str) -> list[Tensor]:
        return original(model, axis) + (original(model, "edp") if axis == "data" else [])

    gradients._gradients_over = chosen


def balance_each_micro_batch(engine: Engine) -> None:
    """Shares of experts from all tokens of a micro-batch instead of one sequence's."""
    sequences = experts_module.sequence_balance
    experts_module.sequence_balance = lambda probabilities, chosen, _, *rest: sequences(
        probabilities, chosen, 1, *rest
    )


CONTROLS: dict[str, tuple[str, str, Any]] = {
    "budget-apart": ("lapsum-learned", "pp2-uneven", keep_budget_gradients_apart),
    "budget-counted-twice": ("lapsum-learned", "pp2-uneven", count_the_budget_on_every_stage),
    "noted-twice": ("topk", "recompute", note_in_the_forward_pass),
    "whole-loss-on-tensor-ranks": ("topk", "tp2", give_every_tensor_rank_the_whole_loss),
    "local-tokens": ("topk", "dp2-ep2", divide_by_local_tokens),
    "experts-summed-over-dp": ("topk", "dp2-ep2", sum_experts_over_all_replicas),
    "balance-per-micro-batch": ("topk", "micro", balance_each_micro_batch),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_sabotage_is_noticed(name: str) -> None:
    router, layout, sabotage = CONTROLS[name]
    case = replace(LAYOUTS[layout], model=model(router))
    assert_parity(case)  # intact, it passes
    with pytest.raises(AssertionError):
        assert_parity(replace(case, sabotage=sabotage))
