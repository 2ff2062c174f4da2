"""launch/pretrain.py: a whole run, its artefacts, going on after signals, and what it prints."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import compare, evaluate, pretrain
from parallel.checkpoint_format import list_steps
from pretrain.config import EvaluationConfig, RunConfig, load_run_config
from pretrain.decode import fields_of
from pretrain.run_folder import RunFolder, read_metrics
from tests.cli.workspace import Workspace, listing, prepared, signals_restored

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def workspace(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    work = Workspace(tmp_path, prepared(tmp_path_factory))
    work.change(schedule={"warmup_steps": 1}, metrics={"trackers": ["tensorboard"]})
    return work


def test_a_run_leaves_its_artefacts_and_is_evaluated(workspace: Workspace, capsys) -> None:
    workspace.train()
    out = capsys.readouterr().out
    assert "starting from initial weights" in out
    shown = out[: out.index("starting from")].splitlines()
    assert (
        shown[0] == f"settings other than the defaults; {workspace.folder}/config.yaml holds all:"
    )
    words = {word for line in shown[1:] for word in line.strip().split("  ")}
    assert {"name=tiny", "model.vocab_size=257", "training.clip_norm=0.5"} <= words
    assert not any(word.startswith(("seed=", "optimizer.")) for word in words)
    assert max(map(len, shown[1:])) <= 100 + len(str(workspace.root))
    assert "4/4  eval  loss" in out
    run = RunFolder(workspace.folder)
    assert run.read_status() == "finished"
    assert load_run_config([run.config], [], 1) == load_run_config([workspace.recipe], [], 1)
    assert json.loads(run.environment.read_text())["world_size"] == 1
    assert set(json.loads(run.fingerprints.read_text())) >= {"init_hash", "data_hash", "parameters"}
    assert run.command.read_text().startswith("launch/pretrain.py")
    assert list(run.events.glob("events.out.tfevents.*"))
    rows = read_metrics(run.metrics)
    assert [row["step"] for row in rows] == [1, 4]
    assert rows[-1]["data/tokens"] == 4 * 256
    assert list_steps(run.checkpoints) == [2, 4]
    ending = out[out.index("finished in ") :].splitlines()
    assert re.fullmatch(r"finished in (\d+ min )?\d+ s", ending[0])
    assert [line.split("  ")[1] for line in ending[1:]] == [
        "validation", "to compare", "checkpoint", "TensorBoard"
    ]  # fmt: skip
    bits = rows[-1]["eval/bits_per_byte"]
    assert re.search(rf" {bits:.3f} bits per byte, on 8 of 1,\d+ sequences$", ending[1])
    assert re.search(r" order-2 byte model: \d\.\d+, gzip -9: .*, xz -9e: .* whole", ending[2])
    assert ending[3].endswith(f" {run.checkpoints / 'step_00000004'}")

    logged = rows[-1]["eval/loss"]
    assert evaluate.main([str(workspace.folder), "--sequences", "8", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["tokens"] == 8 * 32
    assert figures["sequences"] == rows[-1]["eval/sequences"] == 8
    assert figures["loss"] == pytest.approx(logged, abs=1e-5)


def test_a_finished_run_stays_and_a_longer_one_goes_on(workspace: Workspace, capsys) -> None:
    workspace.train()
    before = listing(workspace.folder / "checkpoints")
    capsys.readouterr()
    workspace.train()
    assert listing(workspace.folder / "checkpoints") == before
    out = capsys.readouterr().out
    assert "all 4 steps are done" in out
    assert "To train longer, give training.steps=...; to train anew, another name=..." in out
    assert "differ" not in out and "not used" not in out
    workspace.train("training.steps=6")
    assert "resuming after step 4" in capsys.readouterr().out
    assert list_steps(workspace.folder / "checkpoints") == [4, 6]
    history = (workspace.folder / "resume_history.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in history] == [0, 4]


def test_initial_weights_of_another_run(workspace: Workspace, capsys) -> None:
    workspace.train()
    workspace.train("name=next", f"checkpoint.init_from={workspace.folder}", "training.steps=2")
    checkpoint = workspace.folder / "checkpoints" / "step_00000004"
    assert f"starting from the weights of {checkpoint}\n" in capsys.readouterr().out
    change = ["model.position={type: rope, base: 500.0}", "model.init.std=0.5"]
    workspace.train("name=other", f"checkpoint.init_from={workspace.folder}", *change)
    text = (
        "; its model had other settings (there -> here):\n  model.position.base: 10000.0 -> 500.0"
    )
    out = capsys.readouterr().out
    assert f"starting from the weights of {checkpoint}{text}\n" in out
    assert "model.init.std:" not in out
    hashes = [
        json.loads((workspace.folder.parent / name / "fingerprints.json").read_text())["init_hash"]
        for name in ("tiny", "next")
    ]
    assert hashes[0] != hashes[1]
    runs = [str(workspace.folder), str(workspace.folder.parent / "next")]
    compare.main([*runs, "--expect", "checkpoint.init_from"])
    assert "follows from checkpoint.init_from" in capsys.readouterr().out


def test_only_the_trackers_that_are_named_leave_files(workspace: Workspace) -> None:
    for trackers, found in (([], False), (["tensorboard"], True)):
        name = f"with-{len(trackers)}"
        workspace.train(f"name={name}", f"metrics.trackers={trackers}", "finish.report=true")
        folder = workspace.folder.parent / name
        assert "4 steps, 1,024 tokens; finished<" in (folder / "report.html").read_text()
        assert (folder / "events").exists() is found
        assert ("TensorBoard" in (folder / "report.html").read_text()) is found


def test_ids_that_never_occur_are_noted_once(workspace: Workspace, capsys) -> None:
    workspace.train("model.vocab_size=1300", "training.steps=2")
    notes = [line for line in capsys.readouterr().out.splitlines() if "note:" in line]
    text = "note: 1,043 of the 1,300 ids of model.vocab_size can never occur: tokenizer bytes"
    assert notes == [f"{text} has 257"]
    workspace.train("name=other", "training.steps=2")
    assert "note:" not in capsys.readouterr().out


def test_weights_that_became_nan_are_not_exported(workspace: Workspace, capsys) -> None:
    """Only the first update is finite; repeating the run says the same."""
    command = ["health.nan=warn", "optimizer.lr=1e30", "training.clip_norm=null"]
    command += ["finish.export=auto", "finish.report=true"]
    for _ in range(2):
        with signals_restored():
            assert pretrain.main([str(workspace.recipe), *command]) == 1
        printed = capsys.readouterr()
        assert printed.err.startswith("error: the weights are not finite since step 2 (health.nan")
        assert printed.err.count("\n") == 1
        assert "finished:" not in printed.out
        assert RunFolder(workspace.folder).read_status() == "failed"
        assert not (workspace.folder / "huggingface").exists()
    rows = [json.loads(line) for line in (workspace.folder / "health.jsonl").open()]
    assert [row["step"] for row in rows] == [2, 3, 4]


def test_printed_config_is_a_recipe(workspace: Workspace, capsys) -> None:
    workspace.tree["model"] = {"size": "1m"}  # and the vocabulary of the data
    workspace.change()
    command = [str(workspace.recipe), "model.norm=layer", "parallel.tp=2", "--print-config"]
    assert pretrain.main(command) == 0
    text = capsys.readouterr().out
    again = workspace.root / "printed.yaml"
    again.write_text(text)
    assert pretrain.main([str(again), "--print-config"]) == 0
    assert capsys.readouterr().out == text
    config = load_run_config([again], [], 2)
    assert config == load_run_config([workspace.recipe], command[1:3], 2)
    assert (config.model.layers, config.model.vocab_size) == (4, 257)
    assert not workspace.folder.exists()
    assert load_run_config([workspace.recipe], ["model.size=null"], 1).model.layers == 2


def test_what_a_recipe_sets_can_be_unset(workspace: Workspace) -> None:
    workspace.change(finish={"prompt": "a cat", "sample_tokens": 8})
    overrides = ["finish.sample_tokens=0", "finish.prompt=null"]
    overrides += ["data.validation=[]", "evaluation=null"]
    config = load_run_config([workspace.recipe], overrides, 1)
    assert (config.finish.prompt, config.evaluation) == (None, EvaluationConfig())
    (folder := workspace.root / "empty").mkdir()
    (folder / "sections.yaml").write_text("model:\nevaluation:\n")  # all of it commented out
    config = load_run_config([workspace.recipe, folder / "sections.yaml"], overrides, 1)
    assert config.model.vocab_size == 257


def test_keys_lists_every_setting(capsys) -> None:
    assert pretrain.main(["--keys"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    first = {words[0] for words in lines}
    for section in fields_of(RunConfig):
        assert any(key == section or key.startswith(f"{section}.") for key in first), section
    assert {"optimizer.lr", "parallel.pipeline.schedule", "checkpoint.allow"} <= first
    [size] = [words for words in lines if words[0] == "model.size"]
    assert size[1] == "null"


def test_a_path_with_an_equals_sign_is_a_recipe(workspace: Workspace, capsys) -> None:
    folder = workspace.root / "lr=1"
    folder.mkdir()
    (folder / "copy.yaml").write_text(workspace.recipe.read_text())
    assert pretrain.main([str(folder / "copy.yaml"), "seed=3", "--print-config"]) == 0
    assert "\nseed: 3\n" in capsys.readouterr().out


@pytest.mark.parametrize("module", ["numpy", "torch.nn"])
def test_ctrl_c_during_imports_is_one_line(workspace: Workspace, module: str) -> None:
    """The interpreter reports each import, so that the signal comes in the middle of them. torch
    catches whatever is raised while it imports numpy, and would go on without it."""
    script = ROOT / "launch" / "pretrain.py"
    command = [sys.executable, "-X", "importtime", str(script), str(workspace.recipe)]
    output = workspace.root / "output"
    with (
        output.open("w") as stdout,
        subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stderr is not None
        for line in process.stderr:
            if module in line:
                process.send_signal(signal.SIGINT)
                break
        lines = [line for line in process.stderr if not line.startswith("import time:")]
    assert lines == ["interrupted; the same command goes on from the last checkpoint\n"]
    assert process.returncode == 130
    assert output.read_text() == ""
    assert not workspace.folder.exists()


@pytest.mark.parametrize("when", ["last step", "export"])
def test_a_signal_after_training_leaves_the_rest_for_later(workspace: Workspace, when: str) -> None:
    """What is half made goes; the same command trains nothing and makes it."""
    workspace.change(finish={"export": "auto"}, metrics={"every": 1, "trackers": []})
    run = RunFolder(workspace.folder)
    command = [sys.executable, str(ROOT / "launch" / "pretrain.py"), str(workspace.recipe)]
    output = workspace.root / "output"
    with output.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        deadline = time.monotonic() + 60
        begun = "\n4/4  loss" if when == "last step" else "\n4/4  eval"
        while begun not in output.read_text() or (
            when == "export" and not list(run.path.glob(".huggingface.tmp*"))
        ):
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
    text = output.read_text()
    assert process.returncode == 0, text
    assert text.endswith(
        "\ninterrupted: all steps are saved; the same command makes what is missing\n"
    )
    assert run.read_status() == "preempted"
    assert list_steps(run.checkpoints) == [2, 4]
    assert not list(run.path.glob("*huggingface*"))

    workspace.train()
    assert run.read_status() == "finished"
    assert (run.path / "huggingface" / "config.json").is_file()


def test_ctrl_c_is_answered_at_once_and_in_the_end(workspace: Workspace) -> None:
    workspace.change(
        training={"steps": 10**4, "micro_batch": 8}, metrics={"every": 1, "trackers": []}
    )
    run = RunFolder(workspace.folder)
    command = [sys.executable, str(ROOT / "launch" / "pretrain.py"), str(workspace.recipe)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        wait_for_a_step(run, process)
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 0
    stopped = list_steps(run.checkpoints)[-1]
    assert errors.splitlines() == [
        "SIGINT: finishing this step and saving; Ctrl-C again stops at once",
        f"stopped after step {stopped}, which is saved; the same command goes on",
    ]
    assert run.read_status() == "preempted"


def wait_for_a_step(run: RunFolder, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not (run.metrics.exists() and run.metrics.stat().st_size):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_signal_stops_torchrun_and_the_same_command_finishes(workspace: Workspace) -> None:
    """SIGTERM reaches both ranks: they agree on a step, save it, and end; one process goes on."""
    steps = 150
    workspace.change(
        training={"steps": steps}, checkpoint={"every": 0}, metrics={"every": 1, "trackers": []}
    )
    run = RunFolder(workspace.folder)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", str(ROOT / "launch" / "pretrain.py"), str(workspace.recipe)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        wait_for_a_step(run, process)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=60)[0].decode()
    assert run.read_status() == "preempted", output
    assert "error:" not in output
    (stopped,) = list_steps(run.checkpoints)
    assert 0 < stopped < steps
    log = run.rank_log(0).read_text()
    for line in (
        "SIGTERM: finishing this step and saving\n",
        f"stopped after step {stopped}, which is saved; the same command goes on\n",
    ):
        assert output.count(line) == log.count(line) == 1, output
    assert sorted(path.name for path in run.logs.iterdir()) == ["rank0.log", "rank1.log"]
    assert json.loads(run.environment.read_text())["world_size"] == 2

    workspace.train()
    assert run.read_status() == "finished"
    assert list_steps(run.checkpoints) == [stopped, steps]
    assert json.loads(run.environment.read_text())["world_size"] == 1
    assert [row["step"] for row in read_metrics(run.metrics)] == list(range(1, steps + 1))


def test_changed_settings_are_on_record_and_nothing_is_proved(workspace: Workspace, capsys) -> None:
    workspace.train()
    run = RunFolder(workspace.folder)
    before = run.config.read_text()
    capsys.readouterr()
    workspace.train("optimizer.lr=5e-4")
    out = capsys.readouterr().out
    assert "not used, because nothing is trained: optimizer.lr: 0.001 -> 0.0005\n" in out
    assert "from here on" not in out and "differ" not in out
    assert run.config.read_text() == before, "a start that trains nothing relabels nothing"

    workspace.train("training.steps=6", "optimizer.lr=5e-4")
    capsys.readouterr()
    assert compare.main([str(workspace.folder), str(workspace.folder)]) == 2
    error = capsys.readouterr().err
    assert "settings changed after step 4" in error
    assert "optimizer.lr" in error


def test_a_step_to_skip_beyond_the_run_is_refused(workspace: Workspace, capsys) -> None:
    assert pretrain.main([str(workspace.recipe), "health.skip_steps=[2, 99]"]) == 2
    error = capsys.readouterr().err
    assert "health.skip_steps" in error
    assert "[99] lie beyond the last step 4" in error
