"""Longer contexts from a checkpoint: the recipes, end to end, and what starts from where."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from launch import convert, pretrain
from pretrain.trained import open_trained
from tests.cli.workspace import Workspace, prepared, refused, signals_restored

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
LENGTHS = {
    "yarn": ["model.position.original_length=32"],
    "abf": [],
    "adarope": ["model.position.start.original_length=32", "model.position.reference_length=32"],
    "adarope-frozen": ["model.position.reference_length=32"],
}
PER_LAYER = {"log_scale", "beta"}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("extension"), prepared(tmp_path_factory))
    made.train()
    return made


def extend(workspace: Workspace, kind: str, *overrides: str, source: Path | None = None) -> Path:
    """Run a recipe at four times the length; returns the run's folder."""
    name = f"{kind}-{len(list(workspace.folder.parent.iterdir()))}"
    short = ["training.sequence_length=128", "training.batch_tokens=512", "training.steps=2"]
    short += ["schedule.warmup_steps=0"]
    command = [str(workspace.recipe), str(RECIPES / f"extend-{kind}.yaml"), f"name={name}"]
    command += [f"checkpoint.init_from={source or workspace.folder}", *short, *LENGTHS[kind]]
    with signals_restored():
        assert pretrain.main([*command, *overrides]) == 0
    return workspace.folder.parent / name


def tensors(run: Path) -> dict[str, Tensor]:
    return dict(open_trained(run).weights.items())


@pytest.mark.parametrize("kind", LENGTHS)
def test_recipe(kind: str, workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    run = extend(workspace, kind)
    said = capsys.readouterr().out
    before, after = tensors(workspace.folder), tensors(run)
    new = after.keys() - before.keys()
    assert before.keys() <= after.keys()
    if "adarope" not in kind:
        assert not new and "position parameters are new" not in said
    else:
        assert {name.rpartition(".")[2] for name in new} == PER_LAYER and len(new) == 2 * 2
        assert "4 position parameters are new and start at AdaRoPE.Config(start=" in said
        assert "model.position.type: 'rope' -> 'adarope'" in said
        for name in new:
            assert 0 < after[name].abs().max() < 0.1, name
    kept = [name for name in before if torch.equal(before[name], after[name])]
    assert len(kept) == (len(before) if kind == "adarope-frozen" else 0)


def test_what_was_learned_is_kept(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    """From learned tables to learned tables; temperatures that are new start at 1."""
    first = extend(workspace, "adarope", "model.position.temperature=none",
                   "model.position.reference_length=1")  # fmt: skip
    capsys.readouterr()
    second = extend(workspace, "adarope", "training.steps=1", "optimizer.lr=1e-12",
                    "schedule.warmup_steps=0", source=first)  # fmt: skip
    assert "2 position parameters are new" in capsys.readouterr().out
    before, after = tensors(first), tensors(second)
    name = "blocks.1.attention.position.log_scale"
    assert before[name].abs().max() > 1e-4
    torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-10)
    assert after["blocks.1.attention.position.beta"].abs().max() < 1e-10


def test_a_hugging_face_model_learns_positions(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = workspace.root / "llama"
    assert convert.main(["to-hf", str(workspace.folder), str(folder), "--target", "llama"]) == 0
    capsys.readouterr()
    run = extend(workspace, "adarope-frozen", source=folder)
    said = capsys.readouterr().out
    assert "4 position parameters are new" in said and "'rope' -> 'adarope'" in said
    before, after = tensors(workspace.folder), tensors(run)
    for name, tensor in before.items():
        rows = 257 if name in ("embedding.weight", "head.weight") else len(tensor)
        assert torch.equal(after[name][:rows], tensor[:rows]), name


def test_learned_positions_are_not_dropped(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    learned = extend(workspace, "adarope")
    command = [workspace.recipe, "name=back", f"checkpoint.init_from={learned}"]
    refused(capsys, workspace.root, command, ["log_scale"])


def test_a_dry_run_looks_at_what_a_run_would_start_from(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    dry = [str(workspace.recipe), "name=dry", "--dry-run"]
    absent = workspace.root / "absent"
    assert pretrain.main([*dry, f"checkpoint.init_from={absent}"]) == 0
    assert f"init_from is not here, so it was not checked: {absent}" in capsys.readouterr().out
    here = [*dry, f"checkpoint.init_from={workspace.folder}"]
    refused(capsys, workspace.root, [*here, "model.norm=layer"],
            ["checkpoint.init_from: ", "does not fit this run's model"])  # fmt: skip
    assert pretrain.main([*here, "model.position={type: adarope, reference_length: 999}"]) == 0
    assert "note: model.position.reference_length = 999 is not below" in capsys.readouterr().out
