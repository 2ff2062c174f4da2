"""The hash of all weights: the same under every layout, another for any change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from parallel.apply import BuildOptions, ParallelModel, local_tensor
from parallel.fingerprint import weights_hash
from parallel.mesh import ParallelConfig, PipelineConfig, build_mesh
from pretrain.engine import build_engine
from tests.distributed import run_ranks
from tests.parity.harness import SEQUENCE, SMALL, Case

TIED = replace(SMALL, tie_embeddings=True)
NARROW = replace(SMALL, attention=replace(SMALL.attention, head_dim=2))
INTERLEAVED = PipelineConfig("interleaved", virtual_stages=2)
LAYOUTS = {
    "dp2": Case(2, ParallelConfig(dp=2)),
    "fsdp2": Case(2, ParallelConfig(fsdp=2)),
    "tp2": Case(2, ParallelConfig(tp=2, sp=True)),
    "pp2": Case(2, ParallelConfig(pp=2)),
    "pp2-interleaved": Case(2, ParallelConfig(pp=2, pipeline=INTERLEAVED)),
    "fsdp3-uneven": Case(3, ParallelConfig(fsdp=3), model=NARROW),
}
CASES = {f"{name}-f32": replace(case, dtype=torch.float32) for name, case in LAYOUTS.items()} | {
    f"{name}-tied-f64": replace(case, model=TIED)
    for name, case in LAYOUTS.items()
    if case.model is SMALL
}


def model_of(case: Case, seed: int = 7) -> ParallelModel:
    mesh = build_mesh(case.parallel, torch.device("cpu"))
    options = BuildOptions(dtype=case.dtype, seed=seed)
    return build_engine(case.model, case.parallel, mesh, options, SEQUENCE).model


def parameter(model: ParallelModel, name: str) -> Tensor:
    return local_tensor(dict(model.named_parameters())[name])


def hashes(case: Case) -> list[str]:
    """Of the initial weights, and after the last rank changed one of its elements."""
    model = model_of(case)
    before = weights_hash(model)
    again = weights_hash(model)
    assert before == again
    name = "blocks.4.feedforward.down_proj.weight"
    if model.mesh.sizes["dp"] == 1 and torch.distributed.get_rank() == case.world - 1:
        parameter(model, name).view(-1)[-1] += 1
    return [before, weights_hash(model)]


def _hashes(rank: int, world: int, cases: list[Case]) -> list[list[str]]:
    return [hashes(case) for case in cases]


_found: dict[str, list[list[str]]] = {}


@pytest.mark.parametrize("name", CASES)
def test_equal_across_layouts(name: str) -> None:
    case = CASES[name]
    if name not in _found:
        together = {key: c for key, c in CASES.items() if c.world == case.world}
        ranks = run_ranks(case.world, _hashes, list(together.values()))
        _found.update({key: [r[i] for r in ranks] for i, key in enumerate(together)})
    wanted = weights_hash(model_of(case.reference()))
    assert len(wanted) == 64
    for before, after in _found[name]:
        assert before == wanted
        assert (after == wanted) == (case.parallel.dp == 2)  # the one layout left unchanged
    assert len({tuple(rank) for rank in _found[name]}) == 1


def change_one_bit(model: ParallelModel) -> None:
    bits = parameter(model, "blocks.2.attention.k_proj.weight").view(torch.int64)
    bits.view(-1)[5] ^= 1


def swap_two(model: ParallelModel) -> None:
    flat = parameter(model, "embedding.weight").view(-1)
    flat[[3, 40]] = flat[[40, 3]]


def swap_rows(model: ParallelModel) -> None:
    rows = parameter(model, "blocks.0.attention.o_proj.weight")
    rows[[1, 2]] = rows[[2, 1]]


def transpose(model: ParallelModel) -> None:
    square = parameter(model, "blocks.0.attention.o_proj.weight")
    square.copy_(square.T.clone())


def swap_parameters(model: ParallelModel) -> None:
    a, b = (parameter(model, f"blocks.0.feedforward.{n}_proj.weight") for n in ("gate", "up"))
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


def swap_equal_valued_layers(model: ParallelModel) -> None:
    """Two elements change by the same amount in opposite directions."""
    flat = parameter(model, "final_norm.weight").view(-1)
    flat[0] += 0.5
    flat[1] -= 0.5


def negate_zero(model: ParallelModel) -> None:
    padding = parameter(model, "head.weight")[SMALL.vocab_size :]
    padding.neg_()


CHANGES: list[Callable[[ParallelModel], None]] = [
    change_one_bit, swap_two, swap_rows, transpose, swap_parameters, swap_equal_valued_layers,
    negate_zero,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_any_change_is_seen(change: Callable[[ParallelModel], None]) -> None:
    model = model_of(Case())
    before = weights_hash(model)
    change(model)
    assert weights_hash(model) != before


def test_what_else_makes_a_difference() -> None:
    cases = [Case(), Case(dtype=torch.float32), Case(model=TIED), Case(model=NARROW)]
    found = [weights_hash(model_of(case)) for case in cases]
    found.append(weights_hash(model_of(Case(), seed=8)))
    assert len(set(found)) == len(found)
    assert weights_hash(model_of(Case())) == found[0]
