"""What a checkpoint is on disk, and everything that works on it without other ranks.

    checkpoints/
      latest                  text: the name of the folder to resume from
      step_00000042/
        manifest.json         written last; a folder without a valid one does not count
        .metadata             torch.distributed.checkpoint's index (a pickle: load only
        __0_0.distcp ...      checkpoints you trust) and one data file per rank
      .step_00000043.tmp-...  being written
      .step_00000042.old-...  replaced by a newer save of the same step
      .step_00000041.del-...  being deleted

A folder gets its public name by one rename, after every file in it is on the disk, and loses
it by one rename, before the first file goes. So at any instant each ``step_*`` folder is whole.
"""

import fcntl
import json
import os
import re
import shutil
import socket
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata

FORMAT = "midspan-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
LATEST = "latest"
# A run that was told to stop may need a moment to let go of its folder.
LOCK_PATIENCE_SECONDS = 10.0
_STEP = re.compile(r"step_(\d{8,})")
_ASIDE = re.compile(r"\.(step_\d{8,})\.(tmp|old|del)-\w+")


class CheckpointError(ValueError):
    """A checkpoint cannot be saved or loaded; the text says why and how to proceed."""


@dataclass(frozen=True)
class TensorInfo:
    """Global shape and dtype ("float32", "bfloat16", ...) of one saved tensor."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, shape: Iterable[int], dtype: torch.dtype) -> "TensorInfo":
        return cls(tuple(shape), str(dtype).removeprefix("torch."))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class FileInfo:
    """Size in bytes and CRC-32 of one file."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint except the numbers in its tensors."""

    step: int
    world_size: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    files: dict[str, FileInfo]

    def dump(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION} | asdict(self), indent=1)


def step_name(step: int) -> str:
    """The folder name of a step: ``step_00000042``."""
    return f"step_{step:08d}"


# ---------------------------------------------------------------------------------- reading


def read_manifest(path: Path | str) -> Manifest:
    """The manifest of the checkpoint folder ``path``.

    Raises CheckpointError if there is none, if it is damaged or of another format version.
    """
    path = Path(path)
    try:
        fields = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a complete checkpoint: no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise CheckpointError(f"{path / MANIFEST} is not the manifest of a {FORMAT}")
    if fields.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has format version {fields.get('version')}, this program reads version "
            f"{VERSION}: use the program version that wrote it"
        )
    try:
        tensors = {
            name: TensorInfo(tuple(info["shape"]), info["dtype"])
            for name, info in fields["tensors"].items()
        }
        files = {name: FileInfo(**info) for name, info in fields["files"].items()}
        return Manifest(fields["step"], fields["world_size"], fields["metadata"], tensors, files)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged: {error!r}") from None


def list_steps(root: Path | str) -> list[int]:
    """Steps with a complete checkpoint below ``root``, ascending.

    A checkpoint of another format version is listed (loading it is refused): were it skipped,
    a run would silently start again from an older one.
    """
    root = Path(root)
    steps = []
    for entry in root.iterdir() if root.is_dir() else ():
        match = _STEP.fullmatch(entry.name)
        if match and _has_manifest(entry):
            steps.append(int(match[1]))
    return sorted(steps)


def latest_step(root: Path | str) -> int | None:
    """The step to resume from: what ``latest`` names, else the newest complete one."""
    root = Path(root)
    try:
        match = _STEP.fullmatch((root / LATEST).read_text().strip())
    except (OSError, UnicodeDecodeError):
        match = None
    if match and _has_manifest(root / match[0]):
        return int(match[1])
    return max(list_steps(root), default=None)


def _has_manifest(path: Path) -> bool:
    try:
        fields = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(fields, dict) and fields.get("format") == FORMAT


def measure(path: Path) -> FileInfo:
    """Size and CRC-32 of a file, read in pieces."""
    size = crc = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
    return FileInfo(size, crc)


def verify_files(path: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> None:
    """Compare every ``parts``-th file with the manifest, beginning at ``part``.

    Raises CheckpointError naming each file that is missing or damaged.
    """
    problems = []
    for name in sorted(manifest.files)[part::parts]:
        expected = manifest.files[name]
        try:
            size = (path / name).stat().st_size
            if size != expected.size:
                problems.append(f"{name} has {size} bytes instead of {expected.size}")
            elif measure(path / name) != expected:
                problems.append(f"{name} has the right size but a wrong checksum")
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
    if problems:
        raise CheckpointError(
            f"checkpoint {path} is damaged: {'; '.join(problems)}. Nothing was loaded. Remove "
            "this folder to go on from an older checkpoint"
        )


def read_index(path: Path) -> Metadata:
    """torch.distributed.checkpoint's index of the folder ``path``."""
    return FileSystemReader(path).read_metadata()


def read_tensors(path: Path, index: Metadata, tensors: dict[str, Tensor]) -> None:
    """Fill ``tensors`` (plain or DTensor, any placement) in place from verified files."""
    reader = FileSystemReader(path)
    reader.set_up_storage_reader(index, is_coordinator=True)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, index, is_coordinator=True)
    with torch.no_grad():
        reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()


class StoredCheckpoint(Mapping[str, Tensor]):
    """Name -> full tensor on the CPU, read when asked for and not kept.

    ``manifest.tensors`` has names, shapes and dtypes without reading anything.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        verify_files(self.path, self.manifest)
        self._index = read_index(self.path)

    def __getitem__(self, name: str) -> Tensor:
        info = self.manifest.tensors[name]
        tensor = torch.empty(info.shape, dtype=getattr(torch, info.dtype))
        read_tensors(self.path, self._index, {name: tensor})
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.tensors)

    def __len__(self) -> int:
        return len(self.manifest.tensors)


def open_checkpoint(path: Path | str) -> StoredCheckpoint:
    """Open one ``step_*`` folder in one process, without a process group.

    Every file is checked first. Each read holds about twice the tensor asked for, no more.
    Raises CheckpointError.
    """
    return StoredCheckpoint(path)


# ---------------------------------------------------------------------------------- writing


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Replace the file ``path`` in one instant, and wait until that is on the disk."""
    aside = path.with_name(f".{path.name}.tmp")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    sync(path.parent)


def lock_folder(root: Path) -> int:
    """Lock ``root`` until the descriptor is closed or this process ends, however it ends."""
    descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
    while True:
        try:
            # A record lock: a forked data worker that outlives its parent does not hold it.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace")
                os.close(descriptor)
                raise CheckpointError(
                    f"another run is saving below {root} ({holder}): stop it, or choose "
                    "another run folder"
                ) from None
            time.sleep(0.05)
        except OSError:  # a file system without locks
            break
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return descriptor


def aside_path(root: Path, step: int, kind: str) -> Path:
    """A fresh hidden name for a step folder: ``tmp`` (writing), ``old`` or ``del``."""
    return root / f".{step_name(step)}.{kind}-{uuid.uuid4().hex[:12]}"


def publish(root: Path, written: Path, step: int) -> None:
    """Give a finished folder its public name and point ``latest`` at it."""
    public, replaced = root / step_name(step), None
    if public.exists():
        replaced = aside_path(root, step, "old")
        public.rename(replaced)
    written.rename(public)
    sync(root)
    write_durably(root / LATEST, public.name + "\n")
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def remove(root: Path, step: int) -> None:
    """Delete a checkpoint so that no instant shows a part of it."""
    aside = aside_path(root, step, "del")
    (root / step_name(step)).rename(aside)
    sync(root)
    shutil.rmtree(aside, ignore_errors=True)


def tidy(root: Path) -> None:
    """Undo what killed runs left behind; only while no other process saves below ``root``.

    A replaced folder whose replacement never got its name gets the name back; everything
    else that was set aside goes.
    """
    (root / f".{LATEST}.tmp").unlink(missing_ok=True)
    for entry in sorted(root.iterdir()):
        match = _ASIDE.fullmatch(entry.name)
        if not match:
            continue
        if match[2] == "old" and not (root / match[1]).exists() and _has_manifest(entry):
            entry.rename(root / match[1])
        else:
            shutil.rmtree(entry)
    sync(root)
