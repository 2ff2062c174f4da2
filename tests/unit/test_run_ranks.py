"""The helper that every multi-process test stands on: it must report failures and leave nothing."""

import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankError, run_ranks


def _sum(rank: int, world_size: int, offset: float) -> torch.Tensor:
    total = torch.full((2,), rank + offset, dtype=torch.float64)
    dist.all_reduce(total)
    return total


def _fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("only this rank")
    dist.barrier()


def _die_on_one(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(7)
    dist.barrier()


def _hang_on_one(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(60)
    dist.barrier()


def test_results_come_back_by_rank():
    results = run_ranks(3, _sum, 0.5)
    assert [r.tolist() for r in results] == [[4.5, 4.5]] * 3


@pytest.mark.parametrize(
    "fn, text", [(_fail_on_one, "ValueError: only this rank"), (_die_on_one, "exit code 7")]
)
def test_a_failure_is_reported_with_its_cause(fn, text):
    with pytest.raises(RankError, match=text):
        run_ranks(2, fn)
    assert not multiprocessing.active_children()


def test_a_hang_ends():
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 0 of 2"):
        run_ranks(2, _hang_on_one, timeout=1.5)
    assert time.monotonic() - start < 10
    assert not multiprocessing.active_children()
