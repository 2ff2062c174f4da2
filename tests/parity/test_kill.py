"""Kill a run at random instants; the same command ends with the same bits.

Two real ranks run ``pretrain.run.run`` on a tiny model, save after almost every step, and are
SIGKILLed together at random times, inside checkpoint writes included.
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.checkpoint_format import open_checkpoint
from pretrain.config import RunConfig
from pretrain.decode import decode
from pretrain.run_folder import read_metrics
from pretrain.trained import find_checkpoint
from tests.distributed import context
from tests.parity.tiny_run import tiny_config, tiny_dataset

pytestmark = pytest.mark.parity
KILLS = 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(rank: int, world: int, port: int, tree: dict[str, Any]) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    from pretrain.run import run

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    raise SystemExit(run(decode(RunConfig, tree), ["test"]))


class Job:
    """The ranks of one start of a run."""

    def __init__(self, tree: dict[str, Any]) -> None:
        port = free_port()
        world = math.prod(tree["parallel"].get(axis, 1) for axis in ("dp", "fsdp", "tp", "pp"))
        self.processes = [
            context.Process(target=_rank, args=(rank, world, port, tree), daemon=True)
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def wait(self, seconds: float) -> list[int | None]:
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def finish(tree: dict[str, Any], seconds: float = 400) -> dict[str, torch.Tensor]:
    job = Job(tree)
    codes = job.wait(seconds)
    job.kill()
    assert set(codes) == {0}, codes
    return state_of(tree)


def state_of(tree: dict[str, Any]) -> dict[str, torch.Tensor]:
    stored = open_checkpoint(find_checkpoint(Path(tree["runs_folder"]) / tree["name"]))
    return {name: stored[name].clone() for name in stored}


LAYOUTS = {"dp2": {"dp": 2}, "pp2": {"pp": 2}, "fsdp2": {"fsdp": 2}}
STEPS = {"dp2": 800, "pp2": 800, "fsdp2": 400}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_kills_change_no_bit(tmp_path: Path, layout: str) -> None:
    tiny_dataset(tmp_path / "data")
    tree = tiny_config(tmp_path, steps=STEPS[layout], parallel=LAYOUTS[layout])
    wanted = finish({**tree, "name": "undisturbed"})
    chance = random.Random(layout)
    kills, starts, writing = 0, set(), 0
    checkpoints = tmp_path / "runs" / "killed" / "checkpoints"
    while kills < KILLS:
        job = Job({**tree, "name": "killed"})
        codes = job.wait(chance.uniform(0.5, 5.0))
        if None not in codes:
            job.kill()
            pytest.fail(f"the run ended with {codes} after {kills} kills: too few steps")
        job.kill()
        kills += 1
        writing += any(checkpoints.glob(".*tmp*"))
        history = checkpoints.parent / "resume_history.jsonl"
        if history.exists():
            starts = {json.loads(line)["step"] for line in history.read_text().splitlines()}
    assert len(starts) > KILLS // 4, f"the run hardly moved on between kills: {sorted(starts)}"
    found = finish({**tree, "name": "killed"})
    print(f"{layout}: {kills} kills, {writing} inside a checkpoint write, starts {sorted(starts)}")
    assert writing > 0, "no kill hit a checkpoint write"
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_a_killed_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """The quick form: two kills."""
    tiny_dataset(tmp_path / "data")
    tree = tiny_config(tmp_path, steps=30, parallel={"dp": 2})
    wanted = finish({**tree, "name": "undisturbed"})
    for _ in range(2):
        kill_after_a_checkpoint({**tree, "name": "killed"})
    found = finish({**tree, "name": "killed"})
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    averages = {
        name: {
            row["step"]: row["loss/ema"]
            for row in read_metrics(tmp_path / "runs" / name / "metrics.jsonl")
            if "loss/ema" in row
        }
        for name in ("undisturbed", "killed")
    }
    assert list(averages["killed"]) == [1, 10, 20, 30]
    assert averages["killed"] == averages["undisturbed"]


def kill_after_a_checkpoint(tree: dict[str, Any]) -> None:
    """Start the run and kill it as soon as it has published a further checkpoint."""
    folder = Path(tree["runs_folder"]) / tree["name"] / "checkpoints"
    seen = newest(folder)
    job = Job(tree)
    deadline = time.monotonic() + 60
    while newest(folder) == seen and time.monotonic() < deadline:
        time.sleep(0.01)
    job.kill()
    assert newest(folder) != seen, "no checkpoint within a minute"


def newest(folder: Path) -> str:
    return max((path.name for path in folder.glob("step_*")), default="")


INTERLEAVED: dict[str, Any] = {
    "schedule": "interleaved",
    "virtual_stages": 2,
    "planner": "explicit",
}
MTP_PLANS: list[dict[str, Any]] = [
    {"pp": 2, "pipeline": INTERLEAVED | {"layout": "E|t|tmm|L"}},  # heads beside the embedding
    {"pp": 2, "pipeline": {"planner": "adahc", "schedule": "adahc", "head_chunks": 8}},
    {"pp": 2, "pipeline": {"planner": "uniform"}},
    {"dp": 1},
]
MASKED = {
    "model": {"vocab_size": 258, "mask_token": True},
    "objective": {"type": "masked", "estimator": "count"},
}
MOVES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "tp2pp2-to-dp4": ([{"tp": 2, "pp": 2}, {"dp": 4}], {}),
    "fsdp2-to-single": ([{"fsdp": 2}, {"dp": 1}], {}),
    "muon-fsdp2-to-tp2": ([{"fsdp": 2}, {"tp": 2}], {"optimizer": {"matrices": "muon"}}),
    "masked-tp2pp2-to-fsdp2": ([{"tp": 2, "pp": 2}, {"fsdp": 2}], MASKED),
    "mtp-plans": (MTP_PLANS, {"model": {"mtp": {"depth": 2}}}),
    "mtp-plans-tied": (MTP_PLANS, {"model": {"mtp": {"depth": 2}, "tie_embeddings": True}}),
}


@pytest.mark.parametrize(
    "move",
    [pytest.param(m, marks=[pytest.mark.slow] if m.endswith("tied") else []) for m in MOVES],
)
def test_a_run_goes_on_under_another_layout(tmp_path: Path, move: str) -> None:
    """Killed under one layout, finished under another: the loss curve of one process."""
    tiny_dataset(tmp_path / "data")
    tree = tiny_config(tmp_path, steps=24, parallel={"dp": 1})
    layouts, changes = MOVES[move]
    tree |= {"metrics": {"every": 1, "trackers": []}}
    tree |= {section: tree.get(section, {}) | keys for section, keys in changes.items()}
    finish({**tree, "name": "undisturbed"})
    for layout in layouts[:-1]:
        kill_after_a_checkpoint({**tree, "name": "moved", "parallel": layout})
    finish({**tree, "name": "moved", "parallel": layouts[-1]})
    wanted, found = (
        [row["loss/train"] for row in read_metrics(tmp_path / "runs" / name / "metrics.jsonl")]
        for name in ("undisturbed", "moved")
    )
    assert len(found) == 24
    assert found == pytest.approx(wanted, rel=1e-5)
