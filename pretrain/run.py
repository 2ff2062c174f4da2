"""A run from start to finish on this rank: folder, training, and what is made of the result."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from parallel.mesh import initialize_process_group

from .config import RunConfig
from .decode import dump_yaml
from .finish import finish
from .run_folder import RunFolder, describe_environment, write_atomic, write_json
from .trainer import Trainer, choose_device

EXIT_CODES = {"finished": 0, "preempted": 0, "failed": 1}


def run(config: RunConfig, arguments: Sequence[str]) -> int:
    """Train, then evaluate, export, sample and report.  Exit code 0 when finished or when stopped
    by a signal after saving, 1 when the health policy stopped the run."""
    device = choose_device(config)
    folder = RunFolder(config.folder)
    main_rank = int(os.environ.get("RANK", "0")) == 0
    with owned(folder, main_rank):
        initialize_process_group(device, config.parallel.timeout_minutes)
        try:
            trainer = Trainer(config, device)
            if main_rank:
                write_records(folder, config, trainer, arguments)
            with failed_unless_done(folder, main_rank):
                outcome = trainer.run()
                if outcome == "finished" and main_rank:
                    finish(config, trainer)
                if main_rank:
                    folder.write_status(outcome)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    return EXIT_CODES[outcome]


@contextlib.contextmanager
def owned(folder: RunFolder, main_rank: bool) -> Iterator[None]:
    """The main rank holds the run folder's lock; a folder in use stops the run before it begins."""
    if not main_rank:
        yield
        return
    folder.create()
    with folder.lock():
        yield


@contextlib.contextmanager
def failed_unless_done(folder: RunFolder, main_rank: bool) -> Iterator[None]:
    if main_rank:
        folder.write_status("running")
    try:
        yield
    except BaseException:
        if main_rank:
            folder.write_status("failed")
        raise


def write_records(
    folder: RunFolder, config: RunConfig, trainer: Trainer, arguments: Sequence[str]
) -> None:
    """What was asked for, where it runs, and each start of the run."""
    text = dump_yaml(config)
    if trainer.state.step == 0:
        print(text, flush=True)
    write_atomic(folder.config, text)
    world = dist.get_world_size() if dist.is_initialized() else 1
    environment = describe_environment(
        device=str(trainer.model.mesh.device), world_size=world, hosts=[socket.gethostname()]
    )
    write_json(folder.environment, environment)
    folder.write_command(["launch/pretrain.py", *arguments])
    folder.record_resume(trainer.state.step)
