"""launch/evaluate.py on a diffusion model: bounds, draws of noise, and what it prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from launch import evaluate
from pretrain.run_folder import RunFolder, read_metrics
from tests.cli.workspace import Workspace, prepared, refused

MASKED = {"objective": {"type": "masked"}, "model": {"vocab_size": 258, "mask_token": True}}


@pytest.fixture
def workspace(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path, prepared(tmp_path_factory), steps=2)


def test_a_bound_is_called_one_and_more_draws_narrow_it(workspace: Workspace, capsys: Any) -> None:
    workspace.change(**MASKED, evaluation={"draws": 2})
    workspace.train("finish.report=true")
    out = capsys.readouterr().out
    assert "2/2  eval (bounds)  loss" in out
    assert re.search(r"validation +at most \d\.\d{3} bits per byte", out)
    page = RunFolder(workspace.folder).report.read_text()
    assert "validation: at most" in page and "<td class=n>at most" in page

    def measured(*options: str) -> dict[str, Any]:
        command = [str(workspace.folder), "--json", *options]
        assert evaluate.main(command) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    logged = read_metrics(RunFolder(workspace.folder).metrics)[-1]
    same = measured("--sequences", "8")  # with the draws of the run
    assert same["bound"] is True
    for name in ("loss", "standard_error", "perplexity", "bits_per_byte"):
        assert same[name] == pytest.approx(logged[f"eval/{name}"], rel=1e-5)
    assert measured("--sequences", "8", "training.micro_batch=4") == pytest.approx(same, rel=1e-5)
    one, many = (measured("--sequences", "8", "--draws", n) for n in ("1", "16"))
    assert many["standard_error"] < 0.6 * one["standard_error"]
    assert "standard_error" not in measured("--sequences", "1")
    assert evaluate.main([str(workspace.folder), "--sequences", "8"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["loss"] == f"at most {same['loss']:.4f}"
    assert lines["bits_per_byte"].startswith("at most ")
    assert lines["standard_error"] == f"{same['standard_error']:.4f}"
    assert "bound" not in lines
    command = [workspace.folder, "objective=uniform"]
    words = ["objective (command line)", "is a model of masked kind", "nothing as uniform"]
    refused(capsys, workspace.root, command, words, evaluate.main)


def test_a_model_without_noise_has_one_draw(workspace: Workspace, capsys: Any) -> None:
    workspace.train()
    capsys.readouterr()
    assert evaluate.main([str(workspace.folder), "--sequences", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bound"] is False and found["standard_error"] > 0
    words = ["evaluation.draws: must be 1, got 4", "draws no noise"]
    command = [workspace.folder, "--draws", "4"]
    refused(capsys, workspace.root, command, words, evaluate.main)
    command = [workspace.folder, "--draws", "0"]
    refused(capsys, workspace.root, command, ["--draws must be at least 1"], evaluate.main)
    refused(
        capsys, workspace.root, [workspace.recipe, "name=other", "evaluation.draws=2"], [words[1]]
    )
