"""Saving and loading sharded training state: atomic, asynchronous, independent of the layout.

Tensors go by logical name (``model/blocks.3.attention.q_proj.weight``,
``optimizer/exp_avg/blocks.3...``); the part before the first slash is the namespace. Each rank
passes the names it holds, plain or DTensor. A tensor that several ranks hold is written once.
Loading reads into whatever placements it is given, on any number of ranks.

Every failure is agreed on: a save or load succeeds on all ranks or raises on all of them.
"""

import json
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from parallel.agreement import Ranks, numbers
from parallel.checkpoint_format import (
    MANIFEST,
    CheckpointError,
    FileInfo,
    Manifest,
    TensorInfo,
    aside_path,
    latest_step,
    list_steps,
    lock_folder,
    measure,
    publish,
    read_index,
    read_manifest,
    read_tensors,
    remove,
    step_name,
    tidy,
    verify_files,
    write_durably,
)

_SHOWN = 10

# ------------------------------------------------------------------------------------ saving


@dataclass(frozen=True)
class _Shard:
    """The part of a tensor that this rank holds."""

    name: str
    shape: torch.Size  # of the whole tensor
    offsets: torch.Size
    data: Tensor

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.name, self.offsets)

    def write_item(self) -> WriteItem:
        chunk = ChunkStorageMetadata(offsets=self.offsets, sizes=self.data.shape)
        properties = TensorProperties(dtype=self.data.dtype)
        data = TensorWriteData(chunk=chunk, properties=properties, size=self.shape)
        # SHARD also for a whole tensor: the other types may not occur on two ranks.
        return WriteItem(index=self.index, type=WriteItemType.SHARD, tensor_data=data)


def _shards(tensors: Mapping[str, Tensor]) -> list[_Shard]:
    shards = []
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            offsets, local = torch.Size([0] * tensor.dim()), tensor
        elif tensor.device_mesh.get_coordinate() is None:
            continue
        else:
            [chunk] = tensor.__create_chunk_list__()
            offsets, local = chunk.offsets, tensor.to_local()
            assert local.shape == chunk.sizes, (name, local.shape, chunk)
        # A rank beyond the end of an uneven split holds nothing; an empty tensor is kept.
        if local.numel() or not tensor.numel():
            shards.append(_Shard(name, tensor.shape, offsets, local.detach()))
    return shards


class _Planner(DefaultSavePlanner):
    """Plans the writing of shards that are described already."""

    def __init__(self, shards: Sequence[_Shard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.shards = {shard.index: shard for shard in shards}

    def create_local_plan(self) -> SavePlan:
        return SavePlan([shard.write_item() for shard in self.shards.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        seen: dict[str, tuple[torch.Size, torch.dtype]] = {}
        for item in (item for plan in all_plans for item in plan.items):
            assert item.tensor_data is not None
            kind = item.tensor_data.size, item.tensor_data.properties.dtype
            if seen.setdefault(item.index.fqn, kind) != kind:
                raise RuntimeError(f"{item.index.fqn} is {kind} on one rank, not on another")
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.shards[write_item.index].data


def _ranks(group: dist.ProcessGroup | None) -> Ranks:
    if group is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise CheckpointError("with several ranks, checkpoints need a gloo process group")
    return Ranks(group, CheckpointError)


class CheckpointManager:
    """Saves into and loads from ``root`` (a folder that all ranks see), on every rank alike.

    Only one run at a time may have a manager for a folder: making one removes what killed
    runs left behind. To just read, use ``load_checkpoint`` or ``open_checkpoint``.

    Args:
        keep_last: how many of the newest checkpoints to keep, at least 1.
        keep_every: steps divisible by this are kept for good.
        asynchronous: ``save`` returns once the tensors are copied to the CPU.
        process_group: a gloo group of all ranks that nothing else uses, since a background
            thread communicates on it; None in a single process.

    Raises CheckpointError if another live process saves there.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep_last: int = 2,
        keep_every: int | None = None,
        asynchronous: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if keep_last < 1 or (keep_every is not None and keep_every < 1):
            raise CheckpointError(
                f"keep_last and keep_every must be at least 1, not {keep_last} and {keep_every}"
            )
        self.root = Path(root)
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.process_group = process_group
        self._ranks = _ranks(process_group)
        self._lock: int | None = None
        self._executor = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._pending: Future[None] | None = None
        self._staged: dict[MetadataIndex, Tensor] = {}
        self._ranks.exchange("opening the checkpoint folder", lambda: None, self._open)

    def _open(self, everyone: list[None]) -> list[None]:
        self.root.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self.root)
        tidy(self.root)
        return everyone

    def save(self, step: int, tensors: Mapping[str, Tensor], metadata: dict[str, Any]) -> None:
        """Save ``tensors`` and the JSON-able ``metadata`` (rank 0's counts) as ``step``.

        Waits for the save before it, if that is still being written, and raises its error.
        Asynchronous: returns when ``tensors`` may change again; errors of the writing are
        raised by the next ``save``, ``wait``, ``load`` or ``close``. Raises CheckpointError;
        the older checkpoints stay as they are.
        """
        self.wait()
        try:
            frozen = json.dumps(metadata)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's metadata is not JSON: {error}") from None
        shards = _shards(tensors)
        if self._executor is None:
            self._write(step, shards, frozen)
        else:
            self._pending = self._executor.submit(self._write, step, self._stage(shards), frozen)

    def wait(self) -> None:
        """Return when nothing is being written; raises what went wrong since the last call."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, then let other processes save into the folder."""
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def load(self, step: int, tensors: Mapping[str, Tensor]) -> Manifest:
        """``load_checkpoint`` of ``step``, after waiting for a save in progress."""
        self.wait()
        return load_checkpoint(self.root / step_name(step), tensors, self.process_group)

    def read_manifest(self, step: int) -> Manifest:
        """The manifest of ``step``; raises CheckpointError."""
        return read_manifest(self.root / step_name(step))

    def latest(self) -> int | None:
        """The step to resume from: what ``latest`` names, else the newest complete one."""
        return latest_step(self.root)

    def list(self) -> Sequence[int]:
        """The complete steps, ascending."""
        return list_steps(self.root)

    def _stage(self, shards: Sequence[_Shard]) -> Sequence[_Shard]:
        """Copies on the CPU, in buffers that are kept for the next time."""
        staged = []
        for shard in shards:
            data = shard.data
            buffer = self._staged.get(shard.index)
            if buffer is None or buffer.shape != data.shape or buffer.dtype != data.dtype:
                pinned = data.device.type == "cuda"
                buffer = torch.empty(data.shape, dtype=data.dtype, pin_memory=pinned)
            buffer.copy_(data, non_blocking=True)
            staged.append(_Shard(shard.name, shard.shape, shard.offsets, buffer))
        if any(shard.data.device.type != "cpu" for shard in shards):
            torch.accelerator.synchronize()
        self._staged = {shard.index: shard.data for shard in staged}
        return staged

    def _write(self, step: int, shards: Sequence[_Shard], metadata: str) -> None:
        what = f"saving step {step} below {self.root}"
        planner = _Planner(shards)
        index = Metadata({})
        aside = Path()

        def plan(plans: Sequence[SavePlan]) -> Sequence[tuple[Path, SavePlan]]:
            nonlocal index, aside
            aside = aside_path(self.root, step, "tmp")
            aside.mkdir()
            plans, index = planner.create_global_plan([*plans])
            return [(aside, plan) for plan in FileSystemWriter(aside).prepare_global_plan(plans)]

        def write() -> tuple[Any, dict[str, FileInfo]]:
            if not aside.is_dir():
                raise CheckpointError(f"{self.root} must be on a file system that all ranks share")
            # No copy-ahead: it would open an accelerator context in the background thread.
            writer = FileSystemWriter(aside, sync_files=True, per_thread_copy_ahead=0)
            results = writer.write_data(mine, planner).value()
            files = aside.glob(f"__{self._ranks.rank}_*")
            return results, {path.name: measure(path) for path in files}

        def finish(written: Sequence[tuple[Any, dict[str, FileInfo]]]) -> Sequence[bool]:
            FileSystemWriter(aside, sync_files=True).finish(index, [r for r, _ in written])
            files = {name: info for _, infos in written for name, info in infos.items()}
            files[".metadata"] = measure(aside / ".metadata")
            manifest = Manifest(
                step, len(written), json.loads(metadata), _tensor_infos(index), files
            )
            write_durably(aside / MANIFEST, manifest.dump())
            publish(self.root, aside, step)
            self._expire(step)
            return [True] * len(written)

        try:
            aside, mine = self._ranks.exchange(what, planner.create_local_plan, plan)
            self._ranks.exchange(what, write, finish)
        except BaseException as error:
            if self._ranks.rank == 0 and aside.name:
                shutil.rmtree(aside, ignore_errors=True)
            if isinstance(error, CheckpointError):
                raise CheckpointError(
                    f"{error}. The older checkpoints are as they were; if the disk is full, "
                    "free some space or keep fewer (keep_last)"
                ) from error
            raise

    def _expire(self, step: int) -> None:
        """Delete what is no longer to be kept, after ``step`` (now ``latest``) was published.

        Steps after it, which a run that went back has yet to reach again, are left alone.
        """
        for old in [s for s in list_steps(self.root) if s <= step][: -self.keep_last]:
            if self.keep_every and old % self.keep_every == 0:
                continue
            try:
                remove(self.root, old)
            except OSError as error:
                warnings.warn(f"could not delete the old checkpoint: {error}", stacklevel=2)


def _tensor_infos(index: Metadata) -> dict[str, TensorInfo]:
    infos = {}
    for name, saved in index.state_dict_metadata.items():
        assert isinstance(saved, TensorStorageMetadata)
        infos[name] = TensorInfo.of(saved.size, saved.properties.dtype)
    return infos


# ----------------------------------------------------------------------------------- loading


def load_checkpoint(
    path: Path, tensors: Mapping[str, Tensor], process_group: dist.ProcessGroup | None = None
) -> Manifest:
    """Fill ``tensors`` in place from the checkpoint folder ``path``, whatever layout wrote it.

    Every rank of ``process_group`` calls this with the names it holds. Together they must ask
    for exactly the saved names of each namespace that they ask for at all: only ``model/...``
    names give a weights-only load. Raises CheckpointError, before anything is changed, if
    names, shapes or dtypes differ or a file is damaged.
    """
    path = Path(path)
    ranks = _ranks(process_group)
    manifest = Manifest(0, 0, {}, {}, {})

    def check() -> dict[str, TensorInfo]:
        nonlocal manifest
        manifest = _find(path)
        verify_files(path, manifest, ranks.rank, ranks.size)
        return {name: TensorInfo.of(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

    def judge(wanted: list[dict[str, TensorInfo]]) -> Sequence[None]:
        _require_same(path, manifest, wanted)
        return [None] * len(wanted)

    def read() -> None:
        read_tensors(path, read_index(path), dict(tensors))

    ranks.exchange("cannot load", check, judge)
    ranks.exchange(f"cannot load {path}", read, lambda everyone: everyone)
    return manifest


def _find(path: Path) -> Manifest:
    if not (path / MANIFEST).exists():
        steps = list_steps(path.parent)
        raise CheckpointError(
            f"there is no complete checkpoint {path.name}; complete steps: "
            f"{numbers(steps) or 'none'}"
        )
    return read_manifest(path)


def _require_same(path: Path, manifest: Manifest, wanted: list[dict[str, TensorInfo]]) -> None:
    saved = manifest.tensors
    requested = {item for infos in wanted for item in infos.items()}
    names = {name for name, _ in requested}
    namespaces = {name.partition("/")[0] for name in names}
    missing = sorted(names - saved.keys())
    extra = sorted(n for n in saved.keys() - names if n.partition("/")[0] in namespaces)
    different = sorted(
        f"{name}: saved {saved[name]}, wanted {info}"
        for name, info in requested
        if name in saved and saved[name] != info
    )
    problems = [
        f"{title} ({len(items)}): {', '.join(items[:_SHOWN])}"
        + (", ..." if len(items) > _SHOWN else "")
        for title, items in [
            ("not in the checkpoint", missing),
            ("only in the checkpoint", extra),
            ("of another shape or dtype", different),
        ]
        if items
    ]
    if problems:
        raise CheckpointError(
            f"{path} holds other tensors than this run: {'; '.join(problems)}. Resume with the "
            f"settings it was saved with ({MANIFEST} in it holds them), or choose another run "
            "folder to start a new run"
        )
