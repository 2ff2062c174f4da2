"""The run folder: where everything about one run lives, and the rules for writing it.

    runs/<name>/config.yaml  environment.json  fingerprints.json  command.txt  status
                metrics.jsonl  health.jsonl  resume_history.jsonl
                events/  logs/rank*.log  checkpoints/  loss_curve.png  report.html

Whole files are published atomically; `.jsonl` files are only appended to. One live run owns the
folder through a lock that the kernel releases when the process dies, however it dies.
"""

import errno
import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

Status = Literal["running", "finished", "preempted", "failed"]

PACKAGES = (
    "torch numpy triton tokenizers safetensors transformers tensorboard pyyaml matplotlib pyarrow "
    "zstandard megatron-core transformer-engine flash-attn apex wandb trackio"
)
# An explicit list: other SLURM variables can hold credentials.
SLURM_VARIABLES = (
    "JOB_ID JOB_NAME JOB_PARTITION JOB_NODELIST JOB_NUM_NODES NTASKS NTASKS_PER_NODE "
    "CPUS_PER_TASK GPUS_ON_NODE RESTART_COUNT ARRAY_JOB_ID ARRAY_TASK_ID"
)
SOURCE_PACKAGES = ("models", "parallel", "pretrain", "data_tools", "launch")


class RunFolderBusyError(ValueError):
    """Another live run owns this run folder."""


class RunFolder:
    """Paths and writers of one run folder; `create()` makes the directories."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.name = self.path.resolve().name
        self.config = self.path / "config.yaml"
        self.environment = self.path / "environment.json"
        self.fingerprints = self.path / "fingerprints.json"
        self.command = self.path / "command.txt"
        self.status = self.path / "status"
        self.metrics = self.path / "metrics.jsonl"
        self.health = self.path / "health.jsonl"
        self.resume_history = self.path / "resume_history.jsonl"
        self.events = self.path / "events"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.loss_curve = self.path / "loss_curve.png"
        self.report = self.path / "report.html"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank{rank}.log"

    def create(self) -> None:
        """Make the folder and its directories. ValueError where a file is in the way."""
        for folder in (self.path, self.logs, self.checkpoints):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise ValueError(f"run folder {self.path}: {folder} is not a directory") from None
            except OSError as error:
                text = f"run folder {self.path}: cannot create {folder}: {error.strerror}"
                raise ValueError(text) from None

    def write_status(self, status: Status) -> None:
        assert status in get_args(Status), status
        write_atomic(self.status, status + "\n")

    def read_status(self) -> str | None:
        """The status word, or None for a folder in which no run has started."""
        return self.status.read_text().strip() if self.status.exists() else None

    def write_command(self, arguments: Sequence[str]) -> None:
        write_atomic(self.command, shlex.join(arguments) + "\n")

    def record_resume(self, step: int, **details: Any) -> None:
        """Append one line about this start of the run: from which step, when, where."""
        heal_jsonl(self.resume_history)
        append_jsonl(
            self.resume_history,
            {"step": step, "time": time.time(), "host": socket.gethostname(), **details},
        )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Own the folder for the length of a `with` block (one process per run: the main rank).

        Raises RunFolderBusyError while another live process owns it. The lock is a POSIX record
        lock: forked workers do not inherit it, network file systems share it between hosts, and
        a killed owner leaves nothing to clean up. On a file system without such locks the owner
        noted in the file decides: gone from this host, or this very SLURM job requeued.
        """
        path = (self.path / "lock").resolve()
        if path in _held:
            raise RunFolderBusyError(f"run folder {self.path}: already in use by this process")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            owner = _parse_owner(os.pread(descriptor, 4096, 0))
            if not _acquire(descriptor, owner):
                raise RunFolderBusyError(
                    f"run folder {self.path}: in use by process {owner.get('pid', 'unknown')} on "
                    f"{owner.get('host', 'an unknown host')}; wait for it to end, stop it, or "
                    f"give this run another name (if it is surely gone: remove {path})"
                )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_describe_self()).encode(), 0)
            _held.add(path)
            try:
                yield
            finally:
                _held.discard(path)
                os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)  # releases the lock


# A process can lock the same file twice, and closing either descriptor releases both locks.
_held: set[Path] = set()


def _acquire(descriptor: int, owner: Mapping[str, Any]) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            return not _may_be_alive(owner)
        raise
    return True


def _describe_self() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "started": _start_time(os.getpid()),
        "host": socket.gethostname(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }


def _parse_owner(content: bytes) -> dict[str, Any]:
    try:
        owner = json.loads(content)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _may_be_alive(owner: Mapping[str, Any]) -> bool:
    if not owner:
        return False
    if owner["host"] != socket.gethostname():
        job = os.environ.get("SLURM_JOB_ID")
        return job is None or owner["slurm_job"] != job
    return _start_time(owner["pid"]) == owner["started"] is not None


def _start_time(pid: int) -> str | None:
    """Start time of a live process in clock ticks; tells a process from a later one with its id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a whole file; a reader, or a kill at any instant, finds the old or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path), temporary.open("wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of writing, such as a full disk, name the file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write one JSON object atomically, with sorted keys."""
    write_atomic(path, json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n")


# JSON has no NaN; strings keep every reader working, and read_jsonl turns them back.
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def json_value(value: Any) -> Any:
    """`value` as strict JSON can hold it: a non-finite float becomes a string."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def append_jsonl(path: Path, row: Mapping[str, Any]) -> None:
    """Append one flat object as one line, in one write. Non-finite floats become strings."""
    line = json.dumps({key: json_value(value) for key, value in row.items()}, allow_nan=False)
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def heal_jsonl(path: Path) -> None:
    """Cut off a last line that a kill left half-written, so that appending is safe again."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        complete, _, tail = file.read().rpartition(b"\n")
        if tail:
            file.truncate(len(complete) + 1 if complete else 0)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All complete lines. A half-written last line is ignored; any other damage is a ValueError."""
    try:
        lines = Path(path).read_bytes().split(b"\n")[:-1]  # the last piece has no line end
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object: {line[:60]!r}")
        rows.append({k: _NON_FINITE.get(v, v) if isinstance(v, str) else v for k, v in row.items()})
    return rows


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl` as they count, sorted by step.

    The last line of a step counts. A line with `resumed_from` begins a resumed attempt: what an
    earlier attempt had logged beyond that step is dropped, because those updates were redone.
    """
    rows: dict[int, dict[str, Any]] = {}
    for number, row in enumerate(read_jsonl(path), 1):
        if not isinstance(row.get("step"), int):
            raise ValueError(f"{path}, line {number}: no step")
        if "resumed_from" in row:
            rows = {step: kept for step, kept in rows.items() if step <= row["resumed_from"]}
        rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]


def describe_environment(
    *, device: str, world_size: int, hosts: Sequence[str] | None = None
) -> dict[str, Any]:
    """What this process runs on and with; written to `environment.json` by the main rank.

    `hosts` are the host names of all ranks, where the caller has gathered them. `source_hash`
    covers the project's own Python files, so it tells whether two runs executed the same code
    even between commits or outside a git checkout.
    """
    import torch  # here, because readers of run folders should not wait for it

    root = Path(__file__).resolve().parent.parent
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "packages": _package_versions(),
        "source_hash": source_hash(root),
        "git": _git_state(root),
        "platform": platform.platform(),
        "device": device,
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "hosts": sorted(set(hosts or [socket.gethostname()])),
        "world_size": world_size,
        "slurm": {
            name: os.environ[f"SLURM_{name}"]
            for name in SLURM_VARIABLES.split()
            if f"SLURM_{name}" in os.environ
        },
        "executable": sys.executable,
    }


def source_hash(root: Path) -> str:
    """SHA-256 over the names and contents of the project's Python files below `root`."""
    digest = hashlib.sha256()
    for package in SOURCE_PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _package_versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES.split():
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _git_state(root: Path) -> dict[str, Any] | None:
    """Commit and whether tracked files were changed; None outside a git checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no").splitlines()
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed), "changed": changed[:50]}
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
