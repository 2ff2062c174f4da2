"""Wrong checkpoints, run folders, disks and ports: one clear error, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launch import compare, evaluate, pretrain
from parallel import resume
from parallel.checkpoint_format import latest_step, open_checkpoint
from pretrain.config import CheckpointConfig, RunConfig
from pretrain.decode import fields_of
from pretrain.run_folder import RunFolder
from tests.cli.workspace import Workspace, listing, prepared, refused, signals_restored
from tests.distributed import context

ROOT = Path(__file__).resolve().parents[2]
_trained: dict[str, Path] = {}


@pytest.fixture
def fresh(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    work = Workspace(tmp_path, prepared(tmp_path_factory))
    work.change(schedule={"warmup_steps": 1})
    return work


@pytest.fixture
def workspace(fresh: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace with a run of 4 steps and checkpoints of steps 2 and 4."""
    if "run" not in _trained:
        origin = Workspace(tmp_path_factory.mktemp("trained"), fresh.root / "data")
        origin.change(schedule={"warmup_steps": 1})
        origin.train()
        _trained["run"] = origin.folder
    shutil.copytree(_trained["run"], fresh.folder)
    return fresh


# --------------------------------------------------------------------- another experiment

MISMATCHES = {
    "model": (
        ["model.position=nope"],
        ["model.position.type: 'rope' -> 'nope'", "checkpoint.allow=[model]"],
    ),
    "shape": (["model.layers=3"], ["model.layers: 2 -> 3", "checkpoint.allow=[model]"]),
    "allowed shape": (
        ["model.layers=3", "checkpoint.allow=[model]"],
        ["does not fit this run's model", "model/blocks.2", "saved nothing"],
    ),
    "seed": (
        ["seed=1"],
        ["data, seed differ", "seed: 0 -> 1", "checkpoint.allow=[data,seed]", "another name"],
    ),
    "length": (
        ["training.sequence_length=16"],
        ["data_fingerprint", "training.sequence_length: 32 -> 16", "checkpoint.allow=[data]"],
    ),
    "objective": (
        ["objective.z_loss=0.1"],
        ["objective.z_loss: 0.0 -> 0.1", "checkpoint.allow=[objective]"],
    ),
    "precision": (
        ["precision={weights: float64, compute: float64}"],
        ["precision.weights", "saved float32[", "wanted float64["],
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_resuming_another_experiment(workspace: Workspace, capsys, case: str) -> None:
    overrides, words = MISMATCHES[case]
    refused(capsys, workspace.root, [workspace.recipe, *overrides], ["checkpoint: ", *words])


def test_resuming_on_other_data(workspace: Workspace, capsys) -> None:
    validation = str(workspace.root / "data" / "validation")
    workspace.change(data={"train": [{"path": validation, "max_epochs": 100}]})
    words = ["data_fingerprint: ", "checkpoint.allow=[data]"]
    refused(capsys, workspace.root, [workspace.recipe], words)


def test_resuming_with_another_tokenizer(workspace: Workspace, capsys) -> None:
    """One that gives this text the same ids."""
    for split in ("train", "validation"):
        path = workspace.root / "data" / f"{split}.manifest.json"
        content = json.loads(path.read_text())
        content["tokenizer"]["sha256"] = "ab" * 32
        path.write_text(json.dumps(content))
    words = ["data differ", "tokenizer_fingerprint: ", "-> 'abab", "checkpoint.allow=[data]"]
    refused(capsys, workspace.root, [workspace.recipe], words)
    # A checkpoint of an older version did not record it.
    path = workspace.folder / "checkpoints" / "step_00000004" / "manifest.json"
    content = json.loads(path.read_text())
    del content["metadata"]["tokenizer_fingerprint"]
    path.write_text(json.dumps(content))
    workspace.train("training.steps=6")
    assert "resuming after step 4" in capsys.readouterr().out


def test_a_setting_that_the_saved_version_did_not_have(workspace: Workspace, capsys) -> None:
    """Its default is what that version did; any other value is a change."""
    path = workspace.folder / "checkpoints" / "step_00000004" / "manifest.json"
    content = json.loads(path.read_text())
    config = content["metadata"]["config"]
    del config["model"]["logit_softcap"], config["objective"]["z_loss"], config["health"]
    path.write_text(json.dumps(content))
    words = ["model.logit_softcap: None -> 3.0", "checkpoint.allow=[model]"]
    refused(capsys, workspace.root, [workspace.recipe, "model.logit_softcap=3"], words)
    workspace.train("training.steps=6")
    out = capsys.readouterr().out
    assert "  training.steps: 4 -> 6" in out
    assert "(not set)" not in out


def test_what_may_change_is_shown_and_goes_on(workspace: Workspace, capsys) -> None:
    shutil.move(workspace.root / "data", workspace.root / "moved")
    sources = {
        name: [{"path": str(workspace.root / "moved" / name), "max_epochs": 50}]
        for name in ("train", "validation")
    }
    workspace.change(data=sources, training={"steps": 6}, optimizer={"lr": 2e-3})
    workspace.train()
    out = capsys.readouterr().out
    assert "resuming after step 4" in out
    assert "optimizer.lr: 0.001 -> 0.002" in out
    assert latest_step(workspace.folder / "checkpoints") == 6


def test_the_resume_policy_names_every_section() -> None:
    sections = set(fields_of(RunConfig))
    prints = {"data_fingerprint", "tokenizer_fingerprint"}
    assert {key.split(".")[0] for key in resume.POLICY} == sections | prints
    refused_sections = {key for key, effect in resume.POLICY.items() if effect == resume.REFUSED}
    allowed = CheckpointConfig.__annotations__["allow"]
    for name in refused_sections - prints:
        assert f"'{name}'" in allowed


# ---------------------------------------------------------------------- damaged checkpoints


def data_file(workspace: Workspace) -> Path:
    return next((workspace.folder / "checkpoints" / "step_00000004").glob("*.distcp"))


def test_truncated_checkpoint_file(workspace: Workspace, capsys) -> None:
    path = data_file(workspace)
    path.write_bytes(path.read_bytes()[:-100])
    words = [f"{path.name} has", "bytes instead of", "Remove this folder", "older checkpoint"]
    refused(capsys, workspace.root, [workspace.recipe], words)
    refused(capsys, workspace.root, [workspace.folder], words[:2], evaluate.main)


def test_flipped_bit_in_a_checkpoint(workspace: Workspace, capsys) -> None:
    path = data_file(workspace)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    refused(capsys, workspace.root, [workspace.recipe], ["wrong checksum", "Nothing was loaded"])


def test_damaged_manifest(workspace: Workspace, capsys) -> None:
    path = workspace.folder / "checkpoints" / "step_00000004" / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "version": 99}))
    refused(capsys, workspace.root, [workspace.recipe], ["format version 99", "reads version 1"])
    path.write_text(json.dumps({**content, "metadata": {}}))
    refused(capsys, workspace.root, [workspace.recipe], ["not saved by a training run"])
    refused(capsys, workspace.root, [workspace.folder], ["holds no settings"], evaluate.main)


def test_initial_weights_that_are_not_there(workspace: Workspace, capsys) -> None:
    runs = workspace.folder.parent
    (workspace.root / "exported").mkdir()
    (workspace.root / "exported" / "config.json").write_text("{}")
    for given, words in (
        (workspace.root / "exported", ["model_type"]),
        (workspace.root / "data", ["there is no complete checkpoint in it"]),
        (runs / "tinny", ["no such run or checkpoint; did you mean 'tiny'?"]),
        (workspace.folder / "checkpoints" / "step_00000003", ["no such run or checkpoint"]),
    ):
        command = [workspace.recipe, "name=next", f"checkpoint.init_from={given}"]
        refused(capsys, workspace.root, command, ["checkpoint: ", str(given), *words])
    command = [workspace.recipe, "name=next", f"checkpoint.init_from={workspace.folder}"]
    words = ["does not fit", "saved float32[48, 32], wanted float32[64, 32]"]
    refused(capsys, workspace.root, [*command, "model.feedforward.hidden=64"], words)
    workspace.train(*command[1:])


def test_wrong_evaluations(workspace: Workspace, capsys) -> None:
    run, root = workspace.folder, workspace.root
    (root / "exported").mkdir()
    (root / "exported" / "config.json").write_text("{}")
    for command, words in (
        ([root / "data"], ["there is no complete checkpoint in it"]),
        ([root / "exported"], ["convert.py from-hf makes a checkpoint of one"]),
        ([run / "checkpoints" / "step_00000003"], ["no such run or checkpoint"]),
        ([run.parent / "tini"], ["no such run or checkpoint; did you mean 'tiny'?"]),
        ([run, "--sequences", 0], ["--sequences must be at least 1"]),
        ([run, "optimizer.lr=1"], ["optimizer.lr", "no effect on an evaluation"]),
        ([run, "parallel.tp=2"], ["dp·fsdp·tp·pp", "1 process was started"]),
        ([run, "modle.layers=1"], ["modle", "did you mean 'model'?"]),
        ([run, "training=5"], ["training", "no effect on an evaluation"]),
        ([run, "training.micro_batch=x"], ["training.micro_batch", "an integer"]),
        ([run, "model.layers=3"], ["does not fit", "model/blocks.2"]),
        ([run, "data.validation=[]"], ["data.validation"]),
        ([run, "kernels.attention=flex"], ["flex has no backward pass"]),
        ([run, "--josn"], ["unrecognized arguments: --josn"]),
        ([], ["required: RUN|CHECKPOINT"]),
    ):
        refused(capsys, root, command, words, evaluate.main)
    shutil.rmtree(run / "checkpoints")
    refused(capsys, root, [run], ["there is no complete checkpoint in it"], evaluate.main)


def test_compare_needs_runs_that_started(workspace: Workspace, capsys) -> None:
    run = workspace.folder
    words = ["no such run folder", "did you mean 'tiny'?"]
    refused(capsys, workspace.root, [run, run.parent / "tinny"], words, compare.main)
    (run / "fingerprints.json").unlink()
    refused(capsys, workspace.root, [run, run], ["has the run started?"], compare.main)


# ------------------------------------------------------------------------- folders and disks


def test_run_folder_that_cannot_be_made(fresh: Workspace, capsys) -> None:
    root = fresh.root
    (root / "file").write_text("mine")
    for folder, words in (
        ("file", ["is not a directory"]),
        ("file/below", ["is not a directory"]),
    ):
        command = [fresh.recipe, f"runs_folder={root / folder}"]
        refused(capsys, root, command, ["cannot start: run folder", *words])
    (root / "runs").mkdir()
    fresh.folder.write_text("mine")
    refused(capsys, root, [fresh.recipe], ["is not a directory"])
    # /proc takes no new folders, not even from root.
    command = [fresh.recipe, "runs_folder=/proc/self"]
    refused(capsys, root, command, ["run folder /proc/self/tiny", os.strerror(errno.ENOENT)])


def test_a_run_that_cannot_log_has_failed(workspace: Workspace, capsys) -> None:
    log = workspace.folder / "logs" / "rank0.log"
    log.unlink()
    log.mkdir()
    with signals_restored():
        assert pretrain.main([str(workspace.recipe), "training.steps=6"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and str(log) in text
    assert RunFolder(workspace.folder).read_status() == "failed"
    log.rmdir()
    workspace.train("training.steps=6")


HOLD_LOCK = """
import sys
sys.path.insert(0, sys.argv[1])
from pretrain.run_folder import RunFolder
with RunFolder(sys.argv[2]).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def locked(workspace: Workspace):
    """A live process that owns the run folder."""
    command = [sys.executable, "-c", HOLD_LOCK, str(ROOT), str(workspace.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield holder
        holder.kill()


def test_run_folder_in_use(workspace: Workspace, capsys, locked) -> None:
    words = [f"in use by process {locked.pid}", "another name"]
    refused(capsys, workspace.root, [workspace.recipe], words)


def _rank(rank: int, port: int, recipe: str, output: str) -> None:
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 2)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    raise SystemExit(pretrain.main([recipe]))


def test_failure_of_the_main_rank_alone_ends_all_ranks(
    workspace: Workspace, locked, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No launcher ends the other rank here, and a lost collective would wait for 10 minutes."""
    outputs = [tmp_path_factory.mktemp("output") / str(rank) for rank in range(2)]
    before = listing(workspace.root)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        context.Process(target=_rank, args=(rank, port, str(workspace.recipe), str(output)))
        for rank, output in enumerate(outputs)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [2, 2]
    printed = [output.read_text() for output in outputs]
    assert printed[0].startswith("error: cannot start: run folder")
    assert f"in use by process {locked.pid}" in printed[0]
    assert printed[1] == ""
    assert listing(workspace.root) == before


def test_wrong_setting_under_torchrun_is_said_once(fresh: Workspace) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    script = str(ROOT / "launch" / "pretrain.py")
    done = subprocess.run(
        [*command, "2", script, str(fresh.recipe), "parallel.tp=3"],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode != 0
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("error: ") == 1
    assert "2 processes were started" in done.stderr
    assert f'"{script}", line' not in done.stderr  # a traceback of ours
    assert not fresh.folder.exists()


def test_port_that_is_taken(fresh: Workspace, capsys, monkeypatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": port}
        for name, value in {**variables, "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, str(value))
        words = [f"127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT)", "in use", "choose another one"]
        refused(capsys, fresh.root, [fresh.recipe], words)


@pytest.fixture
def file_size_limit():
    """Sets a size that no file may exceed: the kernel refuses a write as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def disk_error(capsys: pytest.CaptureFixture[str], workspace: Workspace, words: list[str]) -> None:
    """A run that cannot write a checkpoint: an error, exit code 2, the older one intact."""
    checkpoints = workspace.folder / "checkpoints"
    before = listing(checkpoints)
    capsys.readouterr()
    with signals_restored():
        code = pretrain.main([str(workspace.recipe), "training.steps=6"])
    text = capsys.readouterr().err
    assert code == 2
    assert text.startswith("error: saving step 6 below")
    assert text.count("error:") == 1
    missing = [
        word for word in [*words, "The older checkpoints are as they were"] if word not in text
    ]
    assert not missing, text
    assert listing(checkpoints) == before
    assert RunFolder(workspace.folder).read_status() == "failed"
    assert "Traceback" in (workspace.folder / "logs" / "rank0.log").read_text()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_checkpoint_that_cannot_be_written(
    workspace: Workspace, capsys, file_size_limit, asynchronous: bool
) -> None:
    workspace.change(checkpoint={"asynchronous": asynchronous})
    size = data_file(workspace).stat().st_size
    file_size_limit(size // 2)
    disk_error(capsys, workspace, [os.strerror(errno.EFBIG)])
    file_size_limit(resource.RLIM_INFINITY)
    workspace.train("training.steps=6")
    assert latest_step(workspace.folder / "checkpoints") == 6


@pytest.mark.slow  # not everywhere may one mount
def test_full_disk(workspace: Workspace, tmp_path: Path) -> None:
    """In a file system of its own, so small that the next checkpoint does not fit."""
    run, small = workspace.folder, tmp_path / "small"
    small.mkdir()
    used = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    room = used + data_file(workspace).stat().st_size // 2
    script = f"""
        mount -t tmpfs -o size={room // 4096 * 4096 + 65536} tmpfs {small} && cp -r {run} {small} &&
        {sys.executable} {ROOT / "launch/pretrain.py"} {workspace.recipe} \
            runs_folder={small} training.steps=6 checkpoint.keep_last=9
        code=$?; ls {small}/tiny/checkpoints; cat {small}/tiny/status; exit $code"""
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 2, done.stderr
    assert os.strerror(errno.ENOSPC) in done.stderr
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr
    assert "if the disk is full, free some space" in done.stderr
    assert done.stdout.splitlines()[-4:] == ["latest", "step_00000002", "step_00000004", "failed"]


def test_the_saved_run_is_whole(workspace: Workspace) -> None:
    """Control: what the tests above damage can be read before."""
    stored = open_checkpoint(workspace.folder / "checkpoints" / "step_00000004")
    assert all(bool(torch.isfinite(stored[name]).all()) for name in stored)
