"""A run from start to finish on this rank: folder, training, and what is made of the result."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from parallel.agreement import Ranks, is_agreed
from parallel.mesh import initialize_process_group

from .config import RunConfig
from .decode import dump_yaml
from .describe import describe_changes
from .finish import finish
from .health import not_finite_since
from .preflight import check_start
from .run_folder import RunFolder, describe_environment, write_atomic, write_json
from .trainer import StopRequest, Trainer, choose_device

EXIT_CODES = {"finished": 0, "preempted": 0, "failed": 1}


def run(config: RunConfig, arguments: Sequence[str]) -> int:
    """Train, then evaluate, export, sample and report.  Exit code 0 when finished or when stopped
    by a signal after saving, 1 when the health policy stopped the run or its weights are not finite
    in the end."""
    started = time.monotonic()
    device = choose_device(config)
    initialize_process_group(device, config.parallel.timeout_minutes)
    folder = RunFolder(config.folder)
    rank = dist.get_rank() if dist.is_initialized() else 0
    try:
        with begun(config, device, folder), recorded(folder, rank):
            trainer = Trainer(config, device)
            if rank == 0:
                write_records(folder, config, trainer, arguments)
                folder.write_status("running")
                answer_signals(folder)
            outcome = trainer.run()
            if rank == 0 and outcome == "preempted":
                step = trainer.state.step
                say(folder, f"stopped after step {step}, which is saved; the same command goes on")
            if outcome == "finished" and not trainer.weights_are_finite():
                outcome = "failed"
                if rank == 0:
                    report_weights(config, folder, trainer.state.step)
            if rank == 0:
                if outcome == "finished" and not finished(trainer, started):
                    outcome = "preempted"
                folder.write_status(outcome)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return EXIT_CODES[outcome]


def answer_signals(folder: RunFolder) -> None:
    """From now on the first signal that stops the training is answered when it arrives."""
    answered = False

    def answering(stop: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
        def note(number: int, frame: Any) -> None:
            nonlocal answered
            if not answered:
                answered = True
                again = "; Ctrl-C again stops at once" if number == signal.SIGINT else ""
                say(folder, f"{signal.Signals(number).name}: finishing this step and saving{again}")
            stop(number, frame)

        return note

    for number in StopRequest.SIGNALS:
        stop = signal.getsignal(number)
        assert callable(stop)
        signal.signal(number, answering(stop))


def say(folder: RunFolder, text: str) -> None:
    """One line on the console and in the main rank's log; a signal handler may not print, because
    it may have interrupted a print."""
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, f"{text}\n".encode())
    log_file = folder.rank_log(0)
    with contextlib.suppress(OSError), log_file.open("a", encoding="utf-8") as log:  # disk full
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


def finished(trainer: Trainer, started: float) -> bool:
    """Make what the configuration wants of the result; whether no signal came before its end."""
    try:
        trainer.stop.release()
        finish(trainer.config, trainer.folder, started)
    except KeyboardInterrupt:
        print(
            "interrupted: all steps are saved; the same command makes what is missing", flush=True
        )
        return False
    return True


def report_weights(config: RunConfig, folder: RunFolder, last: int) -> None:
    """Say why a run that reached its end has no result."""
    since = not_finite_since(folder, last)
    print(
        f"error: the weights are not finite since step {since} (health.nan={config.health.nan}): "
        "nothing is exported. Train under another name with health.nan=stop or skip, "
        "or a lower optimizer.lr",
        file=sys.stderr,
        flush=True,
    )


@contextlib.contextmanager
def begun(config: RunConfig, device: torch.device, folder: RunFolder) -> Iterator[None]:
    """Every rank has checked what it can, then the main rank owns the run folder; or all ranks
    raise ``ValueError`` and nothing was written."""
    with contextlib.ExitStack() as owned:

        def own(checked: list[None]) -> list[None]:
            folder.create()
            owned.enter_context(folder.lock())
            return checked

        group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        ranks = Ranks(group, ValueError)
        ranks.exchange("cannot start", lambda: check_start(config, device), own)
        yield


@contextlib.contextmanager
def recorded(folder: RunFolder, rank: int) -> Iterator[None]:
    """A failure is noted in the run folder: its traceback in this rank's log, and ``status``."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError), folder.rank_log(rank).open("a", encoding="utf-8") as log:
            log.write(traceback.format_exc())  # the disk may be full
        with contextlib.suppress(OSError):
            if rank == 0 and folder.read_status() == "running":
                folder.write_status("failed")
        if rank and isinstance(error, ValueError) and not is_agreed(error):
            # The main rank, which reports what all ranks raise, does not know of this one.
            raise RuntimeError(f"rank {rank} failed") from error
        raise


def write_records(
    folder: RunFolder, config: RunConfig, trainer: Trainer, arguments: Sequence[str]
) -> None:
    """What was asked for, where it runs, and each start of the run; a start that has nothing left
    to train leaves the records of the training alone."""
    if trainer.state.step >= trainer.total_steps:
        return
    text = dump_yaml(config)
    write_atomic(folder.config, text)
    if trainer.state.step == 0:
        print(f"settings other than the defaults; {folder.config} holds all:")
        print(describe_changes(config), flush=True)
    world = dist.get_world_size() if dist.is_initialized() else 1
    environment = describe_environment(
        device=str(trainer.model.mesh.device), world_size=world, hosts=[socket.gethostname()]
    )
    write_json(folder.environment, environment)
    folder.write_command(["launch/pretrain.py", *arguments])
    folder.record_resume(trainer.state.step, changed=trainer.state.changed)
