"""Checkpoints in one process: atomic under kills and full disks, strict, bit for bit."""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from parallel import checkpoint_format
from parallel.checkpoint import CheckpointManager, load_checkpoint
from parallel.checkpoint_format import (
    MANIFEST,
    CheckpointError,
    latest_step,
    list_steps,
    open_checkpoint,
    step_name,
)
from parallel.resume import compare_configs, describe_mismatch, require_compatible
from tests.distributed import context

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def manager(root: Path, **options) -> CheckpointManager:
    return CheckpointManager(root, **{"keep_last": 2, "asynchronous": False} | options)


def state(value: float, rows: int = 64) -> dict[str, torch.Tensor]:
    """A small state in which every element tells which save it is from."""
    return {
        "model/weight": torch.full((rows, 64), value, dtype=torch.float32),
        "model/bias": torch.full((64,), value, dtype=torch.float64),
        "optimizer/exp_avg/weight": torch.full((rows, 64), value, dtype=torch.float32),
        "optimizer/step": torch.tensor(int(value)),
    }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def asides(root: Path) -> list[str]:
    return [entry.name for entry in root.iterdir() if ".tmp" in entry.name or "-" in entry.name]


def consistent_value(root: Path, step: int) -> float:
    """The one value that all tensors of a complete checkpoint hold."""
    loaded = state(-1)
    manifest = load_checkpoint(root / step_name(step), loaded)
    values = {float(v) for tensor in loaded.values() for v in tensor.reshape(-1).unique()}
    assert len(values) == 1, values
    assert manifest.metadata["value"] == values.copy().pop()
    return values.pop()


# ------------------------------------------------------------------------------- round trips


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path):
    generator = torch.Generator().manual_seed(0)
    saved = {}
    for dtype in DTYPES:
        raw = torch.randint(0, 256, (7, 5 * dtype.itemsize), dtype=torch.uint8, generator=generator)
        name = f"model/{dtype}"
        saved[name] = raw.remainder(2).bool() if dtype == torch.bool else raw.view(dtype)
        saved[f"{name}/scalar"] = saved[name][3, 2].clone()
    saved["model/empty"] = torch.empty(0, 3)
    saved["model/transposed"] = torch.arange(12.0).reshape(3, 4).t()
    saved["model/view"] = torch.arange(1000.0)[10:13]
    saved["model/leaf"] = torch.nn.Parameter(torch.tensor([0.0, -0.0, float("nan"), float("inf")]))
    with contextlib.closing(manager(tmp_path)) as checkpoints:
        checkpoints.save(1, saved, {})
        loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
        loaded["model/leaf"] = torch.nn.Parameter(torch.zeros(4))
        checkpoints.load(1, loaded)
    stored = open_checkpoint(tmp_path / step_name(1))
    assert set(stored) == set(saved)
    for name, tensor in saved.items():
        assert bits(loaded[name].detach()) == bits(tensor.detach()), name
        assert stored[name].dtype == tensor.dtype and stored[name].shape == tensor.shape
        assert bits(stored[name]) == bits(tensor.detach()), name


def test_the_manifest_says_what_is_inside(tmp_path):
    metadata = {"config": {"model": {"layers": 2}}, "samples": 10**15, "lr": 0.1 + 0.2}
    checkpoints = manager(tmp_path)
    checkpoints.save(42, state(1), metadata)
    manifest = checkpoints.read_manifest(42)
    assert manifest.metadata == metadata and manifest.step == 42 and manifest.world_size == 1
    assert str(manifest.tensors["model/weight"]) == "float32[64, 64]"
    assert str(manifest.tensors["optimizer/step"]) == "int64[]"
    present = {p.name for p in (tmp_path / "step_00000042").iterdir()}
    assert present == {*manifest.files, MANIFEST}
    assert (tmp_path / "latest").read_text() == "step_00000042\n"
    assert asides(tmp_path) == []


def test_weights_alone_can_be_loaded(tmp_path):
    checkpoints = manager(tmp_path)
    checkpoints.save(3, state(5), {})
    weights = {k: v for k, v in state(0).items() if k.startswith("model/")}
    checkpoints.load(3, weights)
    assert weights["model/weight"].unique().tolist() == [5]


class HeldManager(CheckpointManager):
    """Writes in the background only when told to."""

    go = threading.Event()

    def _write(self, *arguments) -> None:
        assert self.go.wait(30)
        super()._write(*arguments)


def test_asynchronous_saves_hold_the_moment_of_the_call(tmp_path):
    checkpoints = HeldManager(tmp_path, keep_last=3, asynchronous=True)
    tensors, metadata = state(0), {"value": 0}
    for step in (1, 2, 3):
        for tensor in tensors.values():
            tensor.fill_(step)
        metadata["value"] = step
        checkpoints.wait()
        checkpoints.go.clear()
        checkpoints.save(step, tensors, metadata)
        for tensor in tensors.values():
            tensor.fill_(-7)
        metadata["value"] = -7
        assert step not in checkpoints.list()
        checkpoints.go.set()
    checkpoints.close()
    assert [consistent_value(tmp_path, step) for step in (1, 2, 3)] == [1, 2, 3]


# ---------------------------------------------------------------------------------- retention


def test_retention_keeps_the_last_and_every_nth(tmp_path):
    checkpoints = manager(tmp_path, keep_last=2, keep_every=10)
    for step in range(5, 45, 5):
        checkpoints.save(step, state(step), {"value": step})
    assert checkpoints.list() == [10, 20, 30, 35, 40]
    assert checkpoints.latest() == 40
    assert asides(tmp_path) == []


def test_going_back_never_deletes_the_checkpoint_in_use(tmp_path):
    checkpoints = manager(tmp_path, keep_last=3)
    for step in (10, 20, 30):
        checkpoints.save(step, state(step), {"value": step})
    checkpoints = manager(tmp_path, keep_last=1)
    checkpoints.save(15, state(15), {"value": 15})
    assert checkpoints.list() == [15, 20, 30] and checkpoints.latest() == 15
    checkpoints.save(20, state(99), {"value": 99})
    assert checkpoints.list() == [20, 30] and checkpoints.latest() == 20
    assert consistent_value(tmp_path, 20) == 99


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_every": 0}])
def test_bad_retention_is_refused(tmp_path, options):
    with pytest.raises(CheckpointError, match="at least 1"):
        manager(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


# -------------------------------------------------------------------------------- what counts


def test_only_folders_with_a_manifest_count(tmp_path):
    assert latest_step(tmp_path / "nowhere") is None and list_steps(tmp_path / "nowhere") == []
    checkpoints = manager(tmp_path, keep_last=9)
    for step in (1, 2, 3):
        checkpoints.save(step, state(step), {"value": step})
    (tmp_path / "step_00000004").mkdir()
    (tmp_path / "step_00000005").mkdir()
    (tmp_path / "step_00000005" / MANIFEST).write_text('{"format": "midspan-ch')
    (tmp_path / "latest").write_text("step_00000005\n")
    assert checkpoints.list() == [1, 2, 3] and checkpoints.latest() == 3
    (tmp_path / "latest").unlink()
    assert checkpoints.latest() == 3
    (tmp_path / "latest").write_text("step_00000002\n")
    assert checkpoints.latest() == 2
    with pytest.raises(CheckpointError, match=r"no complete checkpoint step_00000004.*1, 2, 3"):
        checkpoints.load(4, state(0))


def test_another_format_version_is_refused_not_skipped(tmp_path):
    checkpoints = manager(tmp_path)
    checkpoints.save(1, state(1), {})
    checkpoints.save(2, state(2), {})
    path = tmp_path / step_name(2) / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99}))
    assert checkpoints.latest() == 2
    with pytest.raises(CheckpointError, match="format version 99"):
        checkpoints.load(2, state(0))


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _flip_one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize(
    "damage, text",
    [(_truncate, "bytes instead of"), (_flip_one_bit, "checksum"), (Path.unlink, "No such file")],
)
def test_damage_is_refused_before_anything_is_loaded(tmp_path, name, damage, text):
    checkpoints = manager(tmp_path)
    checkpoints.save(1, state(1), {})
    damage(tmp_path / step_name(1) / name)
    target = state(8)
    with pytest.raises(CheckpointError, match=f"{name}.*{text}.*Nothing was loaded"):
        checkpoints.load(1, target)
    assert target["model/weight"].unique().tolist() == [8]
    with pytest.raises(CheckpointError, match=text):
        open_checkpoint(tmp_path / step_name(1))


def test_all_differences_are_listed_and_nothing_changes(tmp_path):
    checkpoints = manager(tmp_path)
    checkpoints.save(1, state(1), {})
    target = state(8, rows=65)
    target["model/bias"] = target["model/bias"].float()
    target["model/new"] = torch.zeros(2)
    del target["optimizer/step"]
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(1, target)
    text = str(caught.value)
    for part in (
        "not in the checkpoint (1): model/new",
        "only in the checkpoint (1): optimizer/step",
        "model/bias: saved float64[64], wanted float32[64]",
        "model/weight: saved float32[64, 64], wanted float32[65, 64]",
        "Resume with the settings it was saved with",
    ):
        assert part in text
    assert "\n" not in text
    assert target["model/weight"].unique().tolist() == [8]


def test_metadata_must_be_json(tmp_path):
    checkpoints = manager(tmp_path)
    with pytest.raises(CheckpointError, match=r"not JSON.*Tensor"):
        checkpoints.save(1, state(1), {"loss": torch.zeros(1)})
    assert checkpoints.list() == [] and asides(tmp_path) == []


# ----------------------------------------------------------------------------------- full disk


@pytest.fixture
def small_disk(tmp_path) -> Iterator[tuple[Path, contextlib.AbstractContextManager]]:
    """A folder and a context in which it has no room for 2 MB: a real 1 MB file system where
    one can be mounted, else a limit on the size of a file."""
    root = tmp_path / "disk"
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(root)]
    if shutil.which("mount") and subprocess.run(mount, capture_output=True).returncode == 0:
        yield root, contextlib.nullcontext()
        subprocess.run(["umount", str(root)], check=True)
    else:
        yield root, limited_file_size(1 << 20)


@contextlib.contextmanager
def limited_file_size(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_leaves_the_older_checkpoint(small_disk, asynchronous):
    root, full = small_disk
    with contextlib.closing(manager(root, asynchronous=asynchronous)) as checkpoints:
        checkpoints.save(1, state(1), {"value": 1})
        checkpoints.wait()
        large = state(2, rows=8192)
        full_error = pytest.raises(
            CheckpointError, match=r"saving step 2.*(space left|too large).*free"
        )
        with full, full_error:
            checkpoints.save(2, large, {"value": 2})
            assert asynchronous, "the call itself should have raised"
            checkpoints.save(3, state(3), {"value": 3})
        assert checkpoints.list() == [1] and asides(root) == []
        assert consistent_value(root, 1) == 1
        # The error is told once; after that the manager works again.
        checkpoints.save(3, state(3), {"value": 3})
        checkpoints.wait()
        assert checkpoints.latest() == 3 and consistent_value(root, 3) == 3


def test_a_background_failure_reaches_wait(tmp_path):
    checkpoints = manager(tmp_path / "root", asynchronous=True)
    shutil.rmtree(tmp_path / "root")
    checkpoints.save(1, state(1), {})
    with pytest.raises(CheckpointError, match=r"saving step 1.*No such file"):
        checkpoints.close()


# --------------------------------------------------------------------------------------- kills


def _save_in_a_loop(root: str, asynchronous: bool, sender) -> None:
    checkpoints = manager(Path(root), asynchronous=asynchronous)
    step = checkpoints.latest() or 0
    sender.send(step)
    while True:
        step += 1
        checkpoints.save(step, state(step), {"value": step})
        # An asynchronous save has waited for the one before it.
        sender.send(step - 1 if asynchronous else step)


def test_twenty_random_kills(tmp_path):
    """Kill a process that does nothing but save: what counts is always whole, and nothing
    that was reported as saved is lost."""
    moments = random.Random(7)
    inside_a_write = 0
    for attempt in range(20):
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(
            target=_save_in_a_loop, args=(str(tmp_path), attempt % 2 == 1, sender)
        )
        child.start()
        sender.close()
        for _ in range(moments.randint(2, 5)):
            reported = receiver.recv()
        time.sleep(moments.uniform(0, 0.02))
        child.kill()
        child.join()
        with contextlib.suppress(EOFError):
            while True:
                reported = receiver.recv()
        inside_a_write += bool(asides(tmp_path))
        step = latest_step(tmp_path)
        assert (step or 0) >= reported
        for complete in list_steps(tmp_path):
            assert consistent_value(tmp_path, complete) == complete
    assert inside_a_write >= 5, "too few kills fell into a write to prove anything"
    with contextlib.closing(manager(tmp_path)) as checkpoints:
        assert asides(tmp_path) == []
        assert checkpoints.latest() == step >= 10  # one for each synchronous child at least


FILE_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}


def _save_and_die(root: str, moment: int, sender) -> None:
    """Save 1, 2, and 2 again with other contents; die before file operation ``moment``."""
    count = 0

    def watch(event: str, arguments: tuple) -> None:
        nonlocal count
        if event in FILE_EVENTS and (event != "open" or root in str(arguments[0])):
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    checkpoints = manager(Path(root), keep_last=1)
    sys.addaudithook(watch)
    for step, value in [(1, 1), (2, 2), (2, 3)]:
        checkpoints.save(step, state(value), {"value": value})
        sender.send(value)


def test_a_kill_before_every_single_file_operation(tmp_path):
    outcomes = set()
    for moment in range(1000):
        root = tmp_path / str(moment)
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_save_and_die, args=(str(root), moment, sender))
        child.start()
        sender.close()
        reported = 0
        with contextlib.suppress(EOFError):
            while True:
                reported = receiver.recv()
        child.join()
        for step in list_steps(root):
            consistent_value(root, step)
        with contextlib.closing(manager(root)) as checkpoints:
            assert asides(root) == []
            step = checkpoints.latest()
            value = 0 if step is None else consistent_value(root, step)
        # Everything reported is there; what was being saved may be there already.
        assert reported <= value <= reported + 1, (moment, reported, value)
        outcomes.add((reported, value))
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
    assert outcomes == {(0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3)}
    assert moment > 60


def test_a_folder_has_one_writer(tmp_path, monkeypatch):
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_save_in_a_loop, args=(str(tmp_path), False, sender))
    child.start()
    receiver.recv()
    monkeypatch.setattr(checkpoint_format, "LOCK_PATIENCE_SECONDS", 0.2)
    with pytest.raises(CheckpointError, match=f"another run is saving.*process {child.pid} on"):
        manager(tmp_path)
    child.kill()
    child.join()
    manager(tmp_path).close()


# -------------------------------------------------------------------------------------- resume

CONFIG = {
    "model": {"layers": 4, "norm": {"type": "rms"}, "heads": (2, 2)},
    "data": {"path": "a.bin"},
    "data_fingerprint": "1234",
    "optimizer": {"lr": 1e-3},
    "parallel": {"tp": 2},
    "seed": 1,
}


def changed(**updates) -> dict:
    return json.loads(json.dumps(CONFIG | updates))


def test_layout_moved_files_and_learning_rate_do_not_stop_a_run():
    current = changed(parallel={"tp": 1, "pp": 2}, data={"path": "b.bin"}, optimizer={"lr": 2e-3})
    text = require_compatible(CONFIG, current)
    assert text == describe_mismatch(CONFIG, current)
    assert text.splitlines() == [
        "changes the run from here on:",
        "  optimizer.lr: 0.001 -> 0.002",
        "makes no difference:",
        "  data.path: 'a.bin' -> 'b.bin'",
        "  parallel.pp: '(not set)' -> 2",
        "  parallel.tp: 2 -> 1",
    ]
    assert compare_configs(CONFIG, changed()) == [] and require_compatible(CONFIG, changed()) == ""


@pytest.mark.parametrize(
    "part, updates",
    [
        ("model", {"model": CONFIG["model"] | {"norm": {"type": "layer"}}}),
        ("data", {"data_fingerprint": "5678"}),
        ("seed", {"seed": 2}),
    ],
)
def test_another_experiment_is_refused_unless_allowed(part, updates):
    with pytest.raises(
        CheckpointError, match=rf"(?s)this run's {part} .*checkpoint.allow=\[{part}\]"
    ) as caught:
        require_compatible(CONFIG, changed(**updates))
    assert f"{describe_mismatch(CONFIG, changed(**updates))}" in str(caught.value)
    assert require_compatible(CONFIG, changed(**updates), allow=[part]).startswith("refused:")


def test_the_advice_keeps_what_was_allowed_already():
    current = changed(seed=2, data_fingerprint="5678")
    with pytest.raises(CheckpointError, match=r"this run's data differ.*") as caught:
        require_compatible(CONFIG, current, allow=["seed"])
    assert str(caught.value).endswith("checkpoint.allow=[data,seed]")
    assert require_compatible(CONFIG, current, allow=["data", "seed"]).startswith("refused:")


def test_without_fingerprints_the_data_settings_decide():
    saved, current = (
        changed(data_fingerprint=None),
        changed(data_fingerprint=None, data={"path": "c"}),
    )
    with pytest.raises(CheckpointError, match=r"data.path: 'a.bin' -> 'c'"):
        require_compatible(saved, current)
