"""Run one function on several ranks: real processes, real gloo collectives, no port.

Workers fork from a server that has torch loaded already, so a four-rank test starts in a
fraction of a second. Each has one thread and a process group whose rendezvous is a file.
"""

import multiprocessing
import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

# After one rank fails, the others get this long to report their own failure.
GRACE_SECONDS = 2.0
PRELOAD = [
    "pytest",  # every test module imports it
    "torch",
    "torch._dynamo",  # the first DTensor imports it: a second in each worker
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "pretrain.engine",
    "pretrain.objectives",
    "tests.distributed",
]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOAD)


class RankError(RuntimeError):
    """At least one rank raised, died or ran out of time; the text holds every traceback."""


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list:
    """Call ``fn(rank, world_size, *args)`` on every rank; returns the results by rank.

    ``fn`` is a module-level function, and ``args`` and results are picklable (plain tensors
    are). The default process group is gloo with ``timeout`` (seconds), which also bounds the
    whole call. Raises RankError with the tracebacks; no process is left behind.
    """
    folder = tempfile.mkdtemp(prefix="ranks-")
    call = pickle.dumps((fn, args))
    processes: list[Any] = []
    pipes: list[Connection] = []
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_worker, args=(rank, world_size, call, folder, sender, timeout), daemon=True
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        return _collect(pipes, processes, timeout + GRACE_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()
        shutil.rmtree(folder, ignore_errors=True)


def _collect(pipes: list[Connection], processes: list[Any], timeout: float) -> list:
    results: list[Any] = [None] * len(pipes)
    failures: dict[int, str] = {}  # in order of arrival: the first is usually the cause
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + timeout
    while waiting:
        ready: list[Any] = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            for rank in waiting.values():
                failures.setdefault(rank, "no answer: hung, or still waiting for another rank")
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(1)
                ok, value = False, f"died without an answer, exit code {processes[rank].exitcode}"
            if ok:
                results[rank] = value
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if failures:
        parts = [f"rank {rank} of {len(pipes)}: {text}" for rank, text in failures.items()]
        raise RankError("\n".join(parts))
    return results


def _worker(
    rank: int, world_size: int, call: bytes, folder: str, sender: Connection, timeout: float
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        fn, args = pickle.loads(call)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        answer = pickle.dumps((True, fn(rank, world_size, *args)))
        # Nobody tears its connections down while a peer still uses them.
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    sender.send_bytes(answer)
    sender.close()
