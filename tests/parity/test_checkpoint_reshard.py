"""A checkpoint saved under one layout, loaded under others: every bit equal.

Four ranks save: two pipeline stages of two ranks each, tensor parallel or FSDP within a stage,
names that only one stage holds, one tensor that both hold, odd sizes that do not divide.
"""

import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallel.checkpoint import CheckpointManager, load_checkpoint
from parallel.checkpoint_format import (
    CheckpointError,
    latest_step,
    list_steps,
    open_checkpoint,
    step_name,
)
from tests.distributed import RankError, run_ranks

pytestmark = pytest.mark.parity

STEP = 7
# Global shape, dtype, and the pipeline stage(s) that hold the tensor.
TENSORS = {
    "model/embedding.weight": ((13, 6), torch.float32, (0, 1)),  # tied: on both stages
    "model/blocks.0.q_proj.weight": ((10, 6), torch.float32, (0,)),
    "model/blocks.0.o_proj.weight": ((6, 10), torch.bfloat16, (0,)),
    "model/blocks.0.norm.weight": ((5,), torch.float64, (0,)),
    "model/blocks.1.q_proj.weight": ((7, 3), torch.float64, (1,)),
    "model/blocks.1.short.weight": ((1, 4), torch.float32, (1,)),  # fewer rows than ranks
    "optimizer/exp_avg/blocks.1.q_proj.weight": ((7, 3), torch.float32, (1,)),
    "optimizer/step": ((), torch.int64, (0, 1)),
}


def full(name: str) -> Tensor:
    shape, dtype, _ = TENSORS[name]
    generator = torch.Generator().manual_seed(sorted(TENSORS).index(name))
    if dtype == torch.int64:
        return torch.randint(1 << 60, shape, generator=generator)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def sharded(tensor: Tensor, mesh: DeviceMesh, placements: list) -> DTensor:
    """``tensor``, which every rank has, as a DTensor: each rank keeps its part."""
    local = tensor
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            chunks = local.tensor_split(
                _ends(local.shape[placement.dim], mesh.size(dim)), placement.dim
            )
            local = chunks[mesh.get_local_rank(dim)]
    return DTensor.from_local(
        local.contiguous(),
        mesh,
        placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.contiguous().stride(),
    )


def _ends(length: int, parts: int) -> list[int]:
    step = -(-length // parts)
    return [min(step * (i + 1), length) for i in range(parts - 1)]


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like_zero(tensor: Tensor) -> Tensor:
    """The same placement, with other contents."""
    target = tensor.detach().clone()
    local(target).fill_(1)
    return target


def require_equal(loaded: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        mine, theirs = local(loaded[name]), local(tensor)
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, name
        same = (
            mine.contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(theirs.contiguous().view(-1).view(torch.uint8))
        )
        assert same, name


def pipeline_by_tensor_parallel(rank: int) -> dict[str, Tensor]:
    """Stages of two tensor-parallel ranks, as plain tensors where they are replicated."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage, tp = mesh.get_local_rank("pp"), mesh["tp"]
    plan = {"q_proj": Shard(0), "o_proj": Shard(1), "embedding": Shard(0), "short": Shard(0)}
    tensors: dict[str, Tensor] = {}
    for name, (_, _, stages) in TENSORS.items():
        if stage in stages:
            [placement] = [p for key, p in plan.items() if key in name] or [None]
            tensor = full(name)
            tensors[name] = sharded(tensor, tp, [placement]) if placement else tensor
    return tensors


def data_by_tensor_parallel(rank: int) -> dict[str, Tensor]:
    """dp2 (replicated) x tp2: every name on every rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return {
        name: sharded(full(name), mesh, [Replicate(), Shard(len(shape) - 1)])
        if shape
        else full(name)
        for name, (shape, _, _) in TENSORS.items()
    }


def fsdp(rank: int) -> dict[str, Tensor]:
    """Rows over all ranks, uneven, some ranks with none."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: sharded(full(name), mesh, [Shard(0)]) if shape else full(name)
        for name, (shape, _, _) in TENSORS.items()
    }


def fsdp_by_tensor_parallel(rank: int) -> dict[str, Tensor]:
    """2-D: torch's own fully_shard on top of tensor-parallel rows, so both split dimension 0."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensors: dict[str, Tensor] = {}
    for name, (shape, dtype, _) in TENSORS.items():
        if not shape or dtype == torch.int64:
            tensors[name] = full(name)
            continue
        module = torch.nn.Module()
        parameter = sharded(full(name), mesh["tp"], [Shard(0)])
        module.register_parameter("weight", torch.nn.Parameter(parameter))
        fully_shard(module, mesh=mesh["dp"])
        tensors[name] = module.weight
    return tensors


def swapped_stages(rank: int) -> dict[str, Tensor]:
    """Two stages of one rank each, each with the names that the other stage saved."""
    return {name: full(name) for name, (_, _, stages) in TENSORS.items() if 1 - rank % 2 in stages}


def replicated(rank: int) -> dict[str, Tensor]:
    return {name: full(name) for name in TENSORS}


def save(rank: int, world_size: int, root: Path, layout, asynchronous: bool) -> None:
    checkpoints = CheckpointManager(
        root, keep_last=2, asynchronous=asynchronous, process_group=dist.new_group(backend="gloo")
    )
    tensors = layout(rank)
    checkpoints.save(STEP, tensors, {"samples": 3})
    if asynchronous:  # the tensors may change at once
        for tensor in tensors.values():
            local(tensor).fill_(0)
    checkpoints.close()
    assert latest_step(root) == STEP


def load(rank: int, world_size: int, root: Path, layout) -> None:
    expected = layout(rank)
    loaded = {name: like_zero(tensor) for name, tensor in expected.items()}
    manifest = load_checkpoint(root / step_name(STEP), loaded, dist.group.WORLD)
    assert manifest.metadata == {"samples": 3} and manifest.world_size == 4
    require_equal(loaded, expected)


@pytest.fixture(
    scope="module",
    params=[
        (pipeline_by_tensor_parallel, False),
        pytest.param((pipeline_by_tensor_parallel, True), marks=pytest.mark.smoke),
        (data_by_tensor_parallel, True),
        (fsdp, False),
        (fsdp_by_tensor_parallel, True),
    ],
    ids=lambda p: f"{p[0].__name__}-{'async' if p[1] else 'sync'}",
)
def saved(request, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    run_ranks(4, save, root, *request.param)
    return root


@pytest.mark.parametrize(
    "world_size, layout",
    [
        (4, replicated),
        (2, fsdp),
        (2, swapped_stages),
        (4, fsdp_by_tensor_parallel),
        (4, pipeline_by_tensor_parallel),
        (3, fsdp),
    ],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_loads_bit_for_bit_under_another_layout(saved, world_size, layout):
    run_ranks(world_size, load, saved, layout)


def test_loads_bit_for_bit_in_one_process(saved):
    expected = replicated(0)
    loaded = {name: like_zero(tensor) for name, tensor in expected.items()}
    load_checkpoint(saved / step_name(STEP), loaded)
    require_equal(loaded, expected)
    require_equal(dict(open_checkpoint(saved / step_name(STEP))), expected)


def test_each_number_is_written_once(saved):
    """Replicas and tied weights cost nothing: the files hold the numbers plus small headers."""
    stored = open_checkpoint(saved / step_name(STEP))
    index = stored._index
    for name, (shape, _, _) in TENSORS.items():
        chunks = index.state_dict_metadata[name].chunks
        volume = sum(torch.Size(chunk.sizes).numel() for chunk in chunks)
        assert volume == torch.Size(shape).numel(), name


# ------------------------------------------------------------------- failures are agreed upon


def _disk_full_on_rank_1(rank: int, world_size: int, root: Path) -> str:
    checkpoints = CheckpointManager(
        root, keep_last=1, asynchronous=True, process_group=dist.new_group(backend="gloo")
    )
    small, large = {f"model/{rank}": torch.ones(10)}, {f"model/{rank}": torch.ones(300_000)}
    checkpoints.save(1, small, {})
    checkpoints.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    checkpoints.save(2, large, {})
    with pytest.raises(CheckpointError) as caught:
        checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpoints.wait()
    dist.barrier()
    assert checkpoints.list() == [1]
    assert not [p for p in root.iterdir() if ".tmp" in p.name]
    dist.barrier()
    checkpoints.save(3, large, {})
    checkpoints.close()
    assert checkpoints.list() == [3]
    return str(caught.value)


def test_a_full_disk_on_one_rank_fails_the_save_on_all(tmp_path):
    first, second = run_ranks(2, _disk_full_on_rank_1, tmp_path)
    assert first == second
    assert "saving step 2" in first and "rank 1: [Errno 27] File too large" in first


def _one_rank_dies(rank: int, world_size: int, root: Path) -> None:
    checkpoints = CheckpointManager(
        root, keep_last=2, asynchronous=True, process_group=dist.new_group(backend="gloo")
    )
    for step in range(1, 1000):
        if rank == 1 and step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        checkpoints.save(step, {f"model/{rank}": torch.full((1000,), float(step))}, {})


def test_a_rank_that_dies_ends_the_save_on_the_others(tmp_path):
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(2, _one_rank_dies, tmp_path)
    assert "rank 1 of 2: died without an answer, exit code -9" in str(caught.value)
    assert "rank 0 of 2: Traceback" in str(caught.value), "rank 0 should have noticed"
    assert time.monotonic() - start < 20
    step = latest_step(tmp_path)
    assert step in (2, 3)
    assert list_steps(tmp_path) == [step - 1, step]
    stored = open_checkpoint(tmp_path / step_name(step))
    assert {float(v) for t in stored.values() for v in t} == {float(step)}
    CheckpointManager(tmp_path, keep_last=1).close()
    assert not [p for p in tmp_path.iterdir() if "-" in p.name]


def _different_requests(rank: int, world_size: int, path: Path) -> str:
    tensors = {"model/a": torch.zeros(3)} if rank == 0 else {"model/c": torch.zeros(2)}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, tensors, dist.group.WORLD)
    return str(caught.value)


def test_all_ranks_hear_of_every_mismatch(tmp_path):
    checkpoints = CheckpointManager(tmp_path, keep_last=1, asynchronous=False)
    checkpoints.save(1, {"model/a": torch.ones(4), "model/b": torch.ones(1)}, {})
    texts = run_ranks(3, _different_requests, tmp_path / step_name(1))
    assert len(set(texts)) == 1
    for part in ("model/c", "model/b", "model/a: saved float32[4], wanted float32[3]"):
        assert part in texts[0]


def _needs_a_group(rank: int, world_size: int, root: Path) -> None:
    with pytest.raises(CheckpointError, match="need a gloo process group"):
        CheckpointManager(root, keep_last=1, asynchronous=False)


def test_several_ranks_need_a_process_group(tmp_path):
    run_ranks(2, _needs_a_group, tmp_path)


def _disagreeing_shapes(rank: int, world_size: int, root: Path) -> None:
    checkpoints = CheckpointManager(
        root, keep_last=1, asynchronous=False, process_group=dist.new_group(backend="gloo")
    )
    with pytest.raises(RuntimeError, match=r"model/a is .* on one rank"):
        checkpoints.save(1, {"model/a": torch.ones(3 + rank)}, {})
    assert checkpoints.list() == []


def test_a_name_that_means_two_things_is_an_error(tmp_path):
    run_ranks(2, _disagreeing_shapes, tmp_path)
