"""Layouts of ranks: everything illegal is said, with its place; coordinates and groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from models.attention import AttentionConfig
from models.config import ModelConfig
from models.experts import MoE
from models.feedforward import SwiGLU
from parallel.mesh import (
    AXES,
    Mesh,
    ParallelConfig,
    PipelineConfig,
    build_mesh,
    initialize_process_group,
    layout_problems,
)
from tests.distributed import run_ranks

CPU = torch.device("cpu")
MODEL = ModelConfig(
    vocab_size=100,
    vocab_multiple=8,  # padded to 104
    hidden=32,
    layers=4,
    attention=AttentionConfig(heads=8, kv_heads=4, head_dim=4),
    feedforward=SwiGLU.Config(hidden=24),
)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (PipelineConfig(), []),
        (PipelineConfig("interleaved", 2), []),
        (PipelineConfig(planner="explicit", layout="Et|L"), []),
        (PipelineConfig(virtual_stages=0), [("virtual_stages", "must be positive, got 0")]),
        (
            PipelineConfig("interleaved"),
            [("schedule", "'interleaved' does not fit virtual_stages=1: interleaved needs at least"
              " 2, the others exactly 1")],
        ),
        (
            PipelineConfig("gpipe", 2),
            [("schedule", "'gpipe' does not fit virtual_stages=2: interleaved needs at least 2,"
              " the others exactly 1")],
        ),
        (PipelineConfig(max_memory_gib=4.0, flops_per_byte=-1.0),
         [("max_memory_gib", "is set but planner is not adahc: it would be ignored"),
          ("flops_per_byte", "must not be negative, got -1.0")]),
        (PipelineConfig(planner="explicit"),
         [("layout", "is given exactly when planner=explicit")]),
        (PipelineConfig(layout="Et|L"), [("layout", "is given exactly when planner=explicit")]),
    ],
    ids=str,
)  # fmt: skip
def test_pipeline_problems(config: PipelineConfig, wanted: list[tuple[str, str]]) -> None:
    assert config.problems() == wanted


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (ParallelConfig(), []),
        (ParallelConfig(dp=2, fsdp=2, tp=2, sp=True), []),
        (ParallelConfig(pp=2, fsdp=2, reshard_after_forward=False), []),
        (
            ParallelConfig(dp=0, fsdp=0, tp=-1, pp=0, timeout_minutes=0.0),
            [(name, f"must be positive, got {value}")
             for name, value in (("fsdp", 0), ("tp", -1), ("pp", 0), ("timeout_minutes", 0.0),
                                 ("dp", 0))],
        ),
        (ParallelConfig(sp=True),
         [("sp", "sequence parallelism needs tp > 1: it would be ignored")]),
        (ParallelConfig(pipeline=PipelineConfig("gpipe")),
         [("pipeline", "is set but pp=1: it would be ignored")]),
        (ParallelConfig(reshard_after_forward=False),
         [("reshard_after_forward", "is false but fsdp=1: it would be ignored")]),
        (ParallelConfig(pp=2, fsdp=2),
         [("reshard_after_forward", "must be false with pp > 1 and fsdp > 1: weights would be"
           " gathered again for every micro-batch")]),
        (ParallelConfig(ep=2, fsdp=4),
         [("ep", "2 does not go with fsdp=4: the two would divide the same dimension of the expert"
           " weights; use dp for the ranks that ep divides")]),
        (ParallelConfig(ep=0), [("ep", "must be positive, got 0")]),
    ],
    ids=str,
)  # fmt: skip
def test_parallel_problems(config: ParallelConfig, wanted: list[tuple[str, str]]) -> None:
    assert config.problems() == wanted


def explicit(layout: str, **parallel: Any) -> ParallelConfig:
    return ParallelConfig(pipeline=PipelineConfig(planner="explicit", layout=layout), **parallel)


UNIFORM = PipelineConfig(planner="uniform")
EXPERTS = replace(
    MODEL, feedforward=MoE.Config(experts=6, hidden=10, shared_experts=2, shared_hidden=6)
)
LAYOUTS: dict[str, tuple[ParallelConfig, ModelConfig, int, list[tuple[str, str]]]] = {
    "one": (ParallelConfig(), MODEL, 1, []),
    "replicas": (ParallelConfig(), MODEL, 5, []),
    "all-axes": (ParallelConfig(fsdp=2, tp=2, pp=2, sp=True), MODEL, 16, []),
    "most-stages": (ParallelConfig(pp=7), MODEL, 7, []),
    "uniform": (ParallelConfig(pp=4, pipeline=UNIFORM), MODEL, 4, []),
    "explicit": (explicit("Et*3|t,L", pp=2), MODEL, 2, []),
    "remainder": (
        ParallelConfig(tp=2), MODEL, 5,
        [("parallel", "dp·fsdp·tp·pp = 2·1·2·1 = 4, but 5 processes were started")],
    ),
    "too-few": (
        ParallelConfig(dp=2, fsdp=2), MODEL, 2,
        [("parallel", "dp·fsdp·tp·pp = 2·2·1·1 = 4, but 2 processes were started")],
    ),
    "model-larger-than-world": (
        ParallelConfig(tp=2, pp=2), MODEL, 2,
        [("parallel", "dp·fsdp·tp·pp = 1·1·2·2 = 4, but 2 processes were started")],
    ),
    "nothing-divides": (
        ParallelConfig(tp=3, sp=True), replace(MODEL, feedforward=SwiGLU.Config(hidden=25)), 3,
        [("parallel.tp", "3 does not divide model.attention.heads = 8"),
         ("parallel.tp", "3 does not divide model.attention.kv_heads = 4"),
         ("parallel.tp", "3 does not divide model.feedforward.hidden = 25"),
         ("parallel.tp", "3 does not divide the padded vocabulary = 104"),
         ("parallel.sp", "tp=3 does not divide sequence length 64")],
    ),
    "padding-helps": (
        ParallelConfig(tp=8), replace(MODEL, attention=AttentionConfig(8, 8, 4)), 8, [],
    ),
    "no-padding": (
        ParallelConfig(tp=8), replace(MODEL, vocab_multiple=1, attention=AttentionConfig(8, 8, 4)),
        8, [("parallel.tp", "8 does not divide the padded vocabulary = 100")],
    ),
    "experts": (ParallelConfig(ep=2, tp=2, pp=2), EXPERTS, 16, []),
    "no-experts": (
        ParallelConfig(ep=2), MODEL, 2,
        [("parallel.ep", "is 2 but model.feedforward has no experts: it would be ignored")],
    ),
    "experts-do-not-divide": (
        ParallelConfig(dp=6, ep=4, tp=4), EXPERTS, 24,
        [("parallel.tp", "4 does not divide model.feedforward.hidden = 10"),
         ("parallel.tp", "4 does not divide model.feedforward.shared_hidden = 6"),
         ("parallel.ep", "4 does not divide dp = 6"),
         ("parallel.ep", "4 does not divide model.feedforward.experts = 6")],
    ),
    "too-many-stages": (
        ParallelConfig(pp=4, pipeline=PipelineConfig("interleaved", 2)), MODEL, 4,
        [("parallel.pp", "8 stages cannot be filled by 4 blocks plus embedding, final norm and"
          " head")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_problems(name: str) -> None:
    parallel, model, world, wanted = LAYOUTS[name]
    assert layout_problems(parallel, model, world, 64) == wanted


def test_problems_are_reported_together() -> None:
    parallel = ParallelConfig(tp=3, pp=9)
    paths = [path for path, _ in layout_problems(parallel, MODEL, 5, 64)]
    assert paths == ["parallel", *["parallel.tp"] * 3, "parallel.pp"]


def test_replicas() -> None:
    config = ParallelConfig(fsdp=2, tp=2, pp=2)
    assert config.model_parallel == 8
    assert [config.replicas(world) for world in (4, 8, 16, 24, 30)] == [1, 1, 2, 3, 3]
    assert replace(config, dp=5).replicas(8) == 5


def test_one_process_needs_no_group() -> None:
    mesh = build_mesh(ParallelConfig(), CPU)
    assert mesh.device_mesh is None
    for axis in (*AXES, "data", "edp", "ep"):
        assert (mesh.size(axis), mesh.rank(axis), mesh.group(axis)) == (1, 0, None)
    initialize_process_group(CPU, 1.0)  # a plain process joins nothing
    assert not dist.is_initialized()


def test_an_unreachable_meeting_point_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "9"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="cannot meet the other processes at localhost:9") as error:
        initialize_process_group(CPU, 0.02)
    assert "\n" not in str(error.value)


SHAPES: list[dict[str, Any]] = [
    {"pp": 2, "tp": 2, "dp": 2},
    {"pp": 2, "fsdp": 2, "dp": 2},
    {"fsdp": 4, "tp": 2},
    {"dp": 2, "fsdp": 2, "tp": 2},
    {"dp": 4, "ep": 2, "tp": 2},
    {"pp": 2, "dp": 4, "ep": 4},
]


def _coordinates(rank: int, world: int) -> list[dict[str, Any]]:
    found = []
    for shape in SHAPES:
        mesh = build_mesh(ParallelConfig(**shape, reshard_after_forward=True), CPU)
        members = {}
        for axis in (*AXES, "data", "edp", "ep"):
            group = mesh.group(axis)
            members[axis] = [rank] if group is None else dist.get_process_group_ranks(group)
            assert mesh.size(axis) == len(members[axis])
            assert members[axis][mesh.rank(axis)] == rank
        assert mesh.sub("tp").size() == mesh.size("tp")
        found.append({"coordinate": mesh.coordinate, "members": members})
    return found


def test_coordinates_and_groups() -> None:
    """Outermost pp, then dp, fsdp, tp: ranks of a tensor group are neighbours.  dp = edp · ep."""
    ranks = run_ranks(8, _coordinates)
    for index, shape in enumerate(SHAPES):
        sizes = [shape.get(axis, 1) for axis in AXES]
        grid = torch.arange(8).reshape(sizes)
        for rank, found in enumerate(ranks):
            place = [int(i) for i in (grid == rank).nonzero()[0]]
            assert found[index]["coordinate"] == dict(zip(AXES, place))
            pp, dp, fsdp, tp = place
            ep = shape.get("ep", 1)
            assert found[index]["members"] == {
                "pp": grid[:, dp, fsdp, tp].tolist(),
                "dp": grid[pp, :, fsdp, tp].tolist(),
                "fsdp": grid[pp, dp, :, tp].tolist(),
                "tp": grid[pp, dp, fsdp].tolist(),
                "data": grid[pp, :, :, tp].flatten().tolist(),
                "edp": grid[pp, dp % ep :: ep, fsdp, tp].tolist(),
                "ep": grid[pp, dp - dp % ep : dp - dp % ep + ep, fsdp, tp].tolist(),
            }


def test_every_axis_has_a_place() -> None:
    mesh = Mesh({"tp": 3}, CPU)
    assert mesh.sizes == {"pp": 1, "dp": 1, "fsdp": 1, "tp": 3}
    assert mesh.data_size == 1
