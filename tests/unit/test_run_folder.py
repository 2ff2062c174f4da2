"""The run folder: locks that survive kills, atomic files, append-only logs that heal."""

import errno
import fcntl
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from pretrain import run_folder as module
from pretrain.run_folder import (
    RunFolder,
    RunFolderBusyError,
    append_jsonl,
    describe_environment,
    heal_jsonl,
    read_jsonl,
    read_metrics,
    source_hash,
    write_atomic,
    write_json,
)

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import os, sys, time
from pretrain.run_folder import RunFolder
with RunFolder(sys.argv[1]).lock():
    if sys.argv[2] == "fork" and os.fork() == 0:
        time.sleep(30)  # a worker that outlives its killed parent
        os._exit(0)
    print("locked", flush=True)
    time.sleep(30)
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "runs" / "one")
    made.create()
    return made


@pytest.fixture
def holder(folder: RunFolder):
    """Starts another process that holds the folder's lock; kills its process group at the end."""
    started = []

    def start(mode: str = "plain") -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(folder.path), mode],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_live_owner_is_refused_and_named(folder, holder) -> None:
    process = holder()
    with pytest.raises(RunFolderBusyError) as caught, folder.lock():
        pass
    assert str(process.pid) in str(caught.value)
    assert socket.gethostname() in str(caught.value)
    assert str(folder.path) in str(caught.value)


@pytest.mark.parametrize("mode", ["plain", "fork"])
def test_a_killed_owner_leaves_nothing_in_the_way(folder, holder, mode) -> None:
    process = holder(mode)
    os.kill(process.pid, signal.SIGKILL)
    os.waitpid(process.pid, 0)
    process.returncode = -signal.SIGKILL
    assert (folder.path / "lock").read_text(), "a killed owner cannot have cleaned up"
    with folder.lock():
        assert json.loads((folder.path / "lock").read_text())["pid"] == os.getpid()


def test_released_lock_can_be_taken_again_but_not_twice_at_once(folder) -> None:
    with folder.lock(), pytest.raises(RunFolderBusyError), RunFolder(folder.path).lock():
        pass
    with folder.lock():
        pass
    with pytest.raises(KeyError), folder.lock():
        raise KeyError
    with folder.lock():
        pass


def test_without_file_locks_the_noted_owner_decides(folder, holder, monkeypatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    process = holder()
    monkeypatch.setattr(fcntl, "lockf", unsupported)
    with pytest.raises(RunFolderBusyError), folder.lock():
        pass
    process.kill()
    process.wait()
    with folder.lock():
        pass

    lock = folder.path / "lock"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    elsewhere = {"pid": 1, "started": "1", "host": "another-node", "slurm_job": "6"}
    lock.write_text(json.dumps(elsewhere))
    with pytest.raises(RunFolderBusyError, match="another-node"), folder.lock():
        pass
    lock.write_text(json.dumps(elsewhere | {"slurm_job": "7"}))  # this job, requeued elsewhere
    with folder.lock():
        pass
    # The same process id with another start time is another process.
    recycled = {"pid": os.getpid(), "started": "1", "host": socket.gethostname(), "slurm_job": None}
    lock.write_text(json.dumps(recycled))
    with folder.lock():
        pass


def test_status_is_one_word_replaced_atomically(folder) -> None:
    assert folder.read_status() is None
    for status in ("running", "preempted", "running", "failed", "finished"):
        folder.write_status(status)
        assert folder.status.read_text() == status + "\n"
        assert folder.read_status() == status
    with pytest.raises(AssertionError):
        folder.write_status("done")
    assert sorted(path.name for path in folder.path.iterdir()) == [
        "checkpoints",
        "logs",
        "status",
    ]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    target = tmp_path / "config.yaml"
    write_atomic(target, "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(target, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert target.read_text() == "old"


def test_create_refuses_a_file_in_the_way(tmp_path) -> None:
    (tmp_path / "run").write_text("not a folder")
    with pytest.raises(ValueError, match="not a directory"):
        RunFolder(tmp_path / "run").create()
    with pytest.raises(ValueError, match="not a directory"):
        RunFolder(tmp_path / "run" / "below").create()


def test_command_is_kept_quoted(folder) -> None:
    folder.write_command(["torchrun", "launch/pretrain.py", "name=two words"])
    assert folder.command.read_text() == "torchrun launch/pretrain.py 'name=two words'\n"


def test_resume_history_appends(folder) -> None:
    folder.record_resume(0, world_size=2)
    folder.resume_history.open("a").write('{"step": 7, "ti')  # killed in the middle of a write
    folder.record_resume(40, world_size=4)
    rows = read_jsonl(folder.resume_history)
    assert [(row["step"], row["world_size"]) for row in rows] == [(0, 2), (40, 4)]
    assert abs(rows[1]["time"] - time.time()) < 60


def test_a_half_written_line_is_tolerated_at_every_byte(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        append_jsonl(path, {"step": step, "loss/train": 1 / step})
    content = path.read_bytes()
    last = content[:-1].rindex(b"\n") + 1
    for cut in range(last, len(content)):
        path.write_bytes(content[:cut])
        assert [row["step"] for row in read_metrics(path)] == [1, 2]
        heal_jsonl(path)
        append_jsonl(path, {"step": 3, "loss/train": 1 / 3})
        assert path.read_bytes() == content


def test_healing_a_file_with_one_broken_line_empties_it(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1')
    assert read_metrics(path) == []
    heal_jsonl(path)
    assert path.read_text() == ""
    heal_jsonl(tmp_path / "absent.jsonl")


def test_damage_elsewhere_is_an_error_with_its_place(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: not a JSON object"):
        read_metrics(path)
    path.write_text('{"step": 1}\n{"loss": 2}\n')
    with pytest.raises(ValueError, match="line 2: no step"):
        read_metrics(path)
    with pytest.raises(ValueError, match="no such file"):
        read_metrics(tmp_path / "absent.jsonl")


def test_the_last_line_per_step_counts(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step, loss in [(1, 5.0), (2, 4.0), (3, 3.0), (2, 4.5)]:
        append_jsonl(path, {"step": step, "loss/train": loss})
    assert [(r["step"], r["loss/train"]) for r in read_metrics(path)] == [
        (1, 5.0),
        (2, 4.5),
        (3, 3.0),
    ]


def test_a_resumed_attempt_replaces_what_lay_beyond_it(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in range(1, 9):
        append_jsonl(path, {"step": step, "attempt": 1})
    append_jsonl(path, {"step": 5, "attempt": 2, "resumed_from": 4})
    append_jsonl(path, {"step": 6, "attempt": 2})
    assert [(r["step"], r["attempt"]) for r in read_metrics(path)] == [
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 1),
        (5, 2),
        (6, 2),
    ]


def test_non_finite_numbers_are_strict_json_and_come_back(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_jsonl(path, {"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e-300})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (row,) = read_metrics(path)
    assert math.isnan(row["a"])
    assert (row["b"], row["c"], row["d"]) == (math.inf, -math.inf, 1e-300)


def test_environment_is_complete_json_without_credentials(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    monkeypatch.setenv("SLURM_JWT", "secret-token")
    environment = describe_environment(device="cpu", world_size=4, hosts=["b", "a", "b"])
    write_json(tmp_path / "environment.json", environment)
    text = (tmp_path / "environment.json").read_text()
    assert "secret-token" not in text
    read = json.loads(text)
    assert read["hosts"] == ["a", "b"]
    assert read["world_size"] == 4
    assert read["slurm"] == {"JOB_ID": "123"}
    assert read["packages"]["torch"].startswith("2.")
    assert read["source_hash"] == source_hash(ROOT)
    assert read["cpu"]
    assert read["threads"] >= 1


def test_git_state_knows_commit_and_changes(tmp_path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True)

    assert module._git_state(tmp_path) is None
    git("init", "-q")
    (tmp_path / "a.py").write_text("x = 1\n")
    git("add", "a.py")
    git("commit", "-q", "-m", "first")
    clean = module._git_state(tmp_path)
    assert clean is not None
    assert (len(clean["commit"]), clean["dirty"]) == (40, False)
    (tmp_path / "a.py").write_text("x = 2\n")
    changed = module._git_state(tmp_path)
    assert changed is not None
    assert changed["dirty"] and "a.py" in changed["changed"][0]


def test_source_hash_sees_every_python_file_and_nothing_else(tmp_path) -> None:
    (tmp_path / "models").mkdir()
    file = tmp_path / "models" / "norms.py"
    file.write_text("eps = 1e-6\n")
    first = source_hash(tmp_path)
    (tmp_path / "README.md").write_text("words")
    assert source_hash(tmp_path) == first
    file.write_text("eps = 1e-5\n")
    second = source_hash(tmp_path)
    file.rename(file.with_name("norm.py"))
    assert len({first, second, source_hash(tmp_path)}) == 3
