"""Global norm, clipping and reduction on every kind of layout, against one process and torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel import gradients
from parallel.gradients import (
    clip_gradients,
    full_gradients,
    gradient_norm,
    local_gradient,
    scale_gradients,
    zero_gradients,
)
from parallel.mesh import ParallelConfig, PipelineConfig
from pretrain.engine import Engine
from pretrain.objectives.base import build_objective
from tests.distributed import run_ranks
from tests.parity.harness import SMALL, Case, build, micro_batches

TIED = replace(SMALL, tie_embeddings=True)
# Heads of 2 dimensions: over three ranks the last one holds no row of the q and k norms at all,
# and neither 88 vocabulary rows nor 20 hidden features divide by three.
NARROW = replace(SMALL, attention=replace(SMALL.attention, head_dim=2))
PLACED = PipelineConfig(planner="explicit", layout="Ett|tttL")
TWO = {
    "dp": Case(world=2, parallel=ParallelConfig(dp=2)),
    "fsdp": Case(world=2, parallel=ParallelConfig(fsdp=2)),
    "fsdp-tied": Case(world=2, parallel=ParallelConfig(fsdp=2), model=TIED),
    "tp": Case(world=2, parallel=ParallelConfig(tp=2)),
    "tp-sp-tied": Case(world=2, parallel=ParallelConfig(tp=2, sp=True), model=TIED),
    "pp": Case(world=2, parallel=ParallelConfig(pp=2, pipeline=PLACED)),
    "pp-tied": Case(world=2, parallel=ParallelConfig(pp=2, pipeline=PLACED), model=TIED),
}
THREE = {
    "fsdp-uneven": Case(world=3, parallel=ParallelConfig(fsdp=3), model=NARROW),
    "pp-tied": Case(world=3, parallel=ParallelConfig(pp=3), model=TIED),
}
ONE = {"single": Case(), "single-tied": Case(model=TIED), "single-narrow": Case(model=NARROW)}


def backward(case: Case) -> Engine:
    engine = build(case)
    objective = build_objective(case.objective)
    engine.forward_backward(micro_batches(case, engine), objective)
    return engine


def snapshot(engine: Engine) -> dict[str, Tensor]:
    parameters = engine.model.named_parameters()
    return {name: local_gradient(p).clone() for name, p in parameters}


def measure(case: Case) -> dict[str, Any]:
    """Norms and whole gradients before and after clipping, and with one bad element."""
    engine = backward(case)
    model = engine.model
    norm = gradient_norm(model)
    assert norm.dtype == torch.float64 and norm.dim() == 0
    found: dict[str, Any] = {"norm": norm, "gradients": full_gradients(model)}
    before = snapshot(engine)
    for maximum in (float(norm) * 1.0000001, float(norm), 1e9):
        clip_gradients(model, norm, maximum)
        after = snapshot(engine)
        assert all(after[name].equal(before[name]) for name in before), "not an exact identity"
    clip_gradients(model, norm, float(norm) / 7)
    found["clipped"] = gradient_norm(model)
    found["clipped-gradients"] = full_gradients(model)
    scale_gradients(model, 7.0)
    found["restored"] = gradient_norm(model)
    found["poisoned"] = poison(engine)
    zero_gradients(model)
    found["zero"] = gradient_norm(model)
    clip_gradients(model, found["zero"], 1.0)  # no division by zero
    found["zero-clipped"] = gradient_norm(model)
    return found


def poison(engine: Engine) -> list[float]:
    """The norm and the largest clipped gradient after one element became NaN, on one rank."""
    model = engine.model
    if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
        # of the last rank with a share of the last block; a replica's own NaN came from the sum
        name = "blocks.4.feedforward.down_proj.weight"
        local_gradient(dict(model.named_parameters())[name]).view(-1)[0] = torch.nan
    if model.mesh.size("dp") > 1:  # what the reduction does with it
        tensors = [local_gradient(p) for _, p in model.named_parameters()]
        gradients._sum_bucketed(tensors, model.mesh.group("data"))  # type: ignore[arg-type]
    norm = gradient_norm(model)
    clip_gradients(model, norm, 1.0)
    largest = max(float(g.abs().sum()) for g in snapshot(engine).values() if g.numel())
    return [float(norm), largest]


def _measure(rank: int, world: int, cases: list[Case]) -> list[dict[str, Any]]:
    return [measure(case) for case in cases]


_found: dict[int, dict[str, list[dict[str, Any]]]] = {}


def measured(world: int) -> dict[str, list[dict[str, Any]]]:
    """What every rank found, by case; one set of processes per world size."""
    if world not in _found:
        cases = {1: ONE, 2: TWO, 3: THREE}[world]
        ranks = run_ranks(world, _measure, list(cases.values()), timeout=120)
        _found[world] = {name: [rank[index] for rank in ranks] for index, name in enumerate(cases)}
    return _found[world]


def single(case: Case) -> dict[str, Any]:
    (name,) = [name for name, one in ONE.items() if one.model == case.model]
    return measured(1)[name][0]


CASES = [(2, name) for name in TWO] + [(3, name) for name in THREE]


@pytest.mark.parametrize(("world", "name"), CASES)
def test_norm_is_that_of_one_process_and_of_torch(world: int, name: str) -> None:
    case = {2: TWO, 3: THREE}[world][name]
    wanted, ranks = single(case), measured(world)[name]
    whole: dict[str, Tensor] = {}
    for rank in ranks:
        whole |= rank["gradients"]
    assert set(whole) == set(wanted["gradients"])
    torchs = nn.utils.get_total_norm(list(whole.values()))
    for rank in ranks:
        torch.testing.assert_close(rank["norm"], torchs, rtol=1e-13, atol=0)
        torch.testing.assert_close(rank["norm"], wanted["norm"], rtol=1e-12, atol=0)


@pytest.mark.parametrize(("world", "name"), [(1, name) for name in ONE] + CASES)
def test_clipping(world: int, name: str) -> None:
    for rank in measured(world)[name]:
        norm = float(rank["norm"])
        assert norm > 0
        assert float(rank["clipped"]) == pytest.approx(norm / 7, rel=1e-13)
        assert float(rank["restored"]) == pytest.approx(norm, rel=1e-13)
        parameters = [nn.Parameter(torch.empty_like(g)) for g in rank["gradients"].values()]
        for parameter, gradient in zip(parameters, rank["gradients"].values()):
            parameter.grad = gradient.clone()
        # torch's own, given the global norm: it adds 1e-6 to the denominator
        nn.utils.clip_grads_with_norm_(parameters, norm / 7, rank["norm"])
        for parameter, ours in zip(parameters, rank["clipped-gradients"].values()):
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-5, atol=0)
        assert float(rank["zero"]) == float(rank["zero-clipped"]) == 0


@pytest.mark.parametrize(("world", "name"), [(1, name) for name in ONE] + CASES)
def test_one_bad_element_reaches_every_rank(world: int, name: str) -> None:
    for rank in measured(world)[name]:
        norm, largest = rank["poisoned"]
        assert norm != norm and largest != largest


def test_at_the_limit_nothing_changes() -> None:
    """For every norm: a reciprocal would round below one for some of them."""
    engine = build(Case(dtype=torch.float64))
    for _, parameter in engine.model.named_parameters():
        parameter.grad = torch.ones_like(parameter)
    for norm in torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(0)):
        clip_gradients(engine.model, norm, float(norm))
        assert all(gradient.eq(1).all() for gradient in snapshot(engine).values()), norm


SIZES = [(5,), (0,), (3, 4), (), (64,), (2, 3), (1,), (100,)]
DTYPES = [torch.float32, torch.float32, torch.float64, torch.float64, torch.float32,
          torch.bfloat16, torch.float32, torch.float32]  # fmt: skip


def tensors(rank: int) -> list[Tensor]:
    """Small integers, so that sums are exact in any order and dtype; some are not contiguous."""
    g = torch.Generator().manual_seed(rank)
    drawn = [
        torch.randint(-9, 9, shape, generator=g).to(dtype)
        for shape, dtype in zip(SIZES, DTYPES, strict=True)
    ]
    return [t.T.contiguous().T if t.dim() == 2 else t for t in drawn]


def _buckets(rank: int, world: int) -> list[list[Tensor]]:
    found = []
    group = dist.group.WORLD
    assert group is not None
    for limit in (0, 1, 24, 256, 1 << 20):
        gradients.BUCKET_BYTES = limit
        mine = tensors(rank)
        places = [t.data_ptr() for t in mine]
        gradients._sum_bucketed(iter(mine), group)
        assert [t.data_ptr() for t in mine] == places
        found.append(mine)
    gradients._sum_bucketed([], group)
    return found


def test_buckets_of_any_size_and_dtype() -> None:
    wanted = [sum(parts) for parts in zip(*(tensors(rank) for rank in range(2)))]
    for rank in run_ranks(2, _buckets):
        for found in rank:
            for sums, right in zip(found, wanted, strict=True):
                assert isinstance(right, Tensor) and sums.dtype == right.dtype
                assert sums.equal(right)
