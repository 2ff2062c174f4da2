"""A self-test of the collectives between two processes of this machine, in a few seconds."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

DEADLINE = 90.0  # seconds for both processes: each imports torch, maybe on a busy machine
TIMEOUT = timedelta(seconds=20)  # of one collective


def check_two_processes(deadline: float = DEADLINE) -> tuple[list[str], list[str]]:
    """Run every collective over gloo; returns (names of those tried, faults in words)."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    names: list[str] = []
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=_worker, args=(rank, f"file://{folder}/store", results))
            for rank in range(2)
        ]
        for worker in workers:
            worker.start()
        end = time.monotonic() + deadline
        answers = 0
        while answers < len(workers):
            alive = any(worker.is_alive() for worker in workers)
            try:
                names, found = results.get(timeout=0.5)
                faults += found
                answers += 1
            except queue.Empty:
                if not alive or time.monotonic() > end:
                    codes = ", ".join(str(worker.exitcode) for worker in workers)
                    silent = len(workers) - answers
                    faults.append(f"no answer from {silent} of 2 processes (exit codes {codes})")
                    break
        for worker in workers:
            worker.join(timeout=0 if faults else 10)
            worker.kill()
            worker.join()
    return names, faults


def _worker(rank: int, store: str, results: Any) -> None:
    """Body of one process: puts (names of the collectives tried, faults) into ``results``."""
    names: list[str] = []
    faults: list[str] = []
    try:
        warnings.simplefilter("ignore")
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=20)
        )
        for name, got, expected in collective_cases(rank):
            names.append(name)
            if got != expected:
                faults.append(f"rank {rank}: {name} gave {got}, not {expected}")
        dist.destroy_process_group()
    except Exception as error:
        stage = f"after {names[-1]}" if names else "at start-up"
        faults.append(f"rank {rank} {stage}: {' '.join(str(error).split())[:200]}")
    results.put((names, faults))


def collective_cases(rank: int) -> Iterator[tuple[str, list[float], list[float]]]:
    """(name, values received, values expected) of each collective between ranks 0 and 1."""
    other = 1 - rank
    mine = torch.arange(4.0) + 10 * rank  # rank 0: 0 1 2 3, rank 1: 10 11 12 13

    total = mine.clone()
    dist.all_reduce(total)
    yield "all_reduce", total.tolist(), [10.0, 12.0, 14.0, 16.0]

    gathered = torch.empty(8)
    dist.all_gather_into_tensor(gathered, mine)
    yield "all_gather", gathered.tolist(), [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]

    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, mine.clone())
    yield "reduce_scatter", part.tolist(), [[10.0, 12.0], [14.0, 16.0]][rank]

    # Uneven: rank 0 sends 1 element to itself and 3 to rank 1; rank 1 sends 2 to each.
    received = torch.empty([3, 5][rank])
    dist.all_to_all_single(received, mine, [[1, 2], [3, 2]][rank], [[1, 3], [2, 2]][rank])
    expected = [[0.0, 10.0, 11.0], [1.0, 2.0, 3.0, 12.0, 13.0]][rank]
    yield "all_to_all", received.tolist(), expected

    incoming = torch.empty(4)
    operations = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, incoming, other)]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    yield "send and receive", incoming.tolist(), [x + 10 * other for x in (0.0, 1.0, 2.0, 3.0)]
