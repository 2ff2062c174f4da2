"""A diffusion run that starts from an autoregressive model: the mask token is added."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from launch import convert, pretrain
from pretrain.trained import open_trained
from tests.cli.workspace import Workspace, prepared, refused, signals_restored

MASKED = ["objective=masked", "model.mask_token=true", "model.vocab_size=258"]
NO_PADDING = "model.vocab_multiple=257"  # of the source; of the run there is some


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("autoregressive"), prepared(tmp_path_factory))
    made.train(NO_PADDING)
    return made


def embedding(workspace: Workspace, name: str, *overrides: str) -> Tensor:
    """Of a masked run whose weights stay where they begin, without padding."""
    still = ["training.steps=1", "schedule.warmup_steps=0", "optimizer.lr=1e-12", f"name={name}"]
    with signals_restored():
        assert pretrain.main([str(workspace.recipe), NO_PADDING, *MASKED, *still, *overrides]) == 0
    trained = open_trained(workspace.folder.parent / name)
    return trained.weights["embedding.weight"][: trained.config.vocab_size]


@pytest.mark.parametrize("kind", ["run", "folder"])
def test_the_mask_token_alone_is_new(workspace: Workspace, tmp_path: Path, kind: str) -> None:
    source, before = workspace.folder, open_trained(workspace.folder)
    if kind == "folder":
        source = tmp_path / "exported"
        assert convert.main(["to-hf", str(workspace.folder), str(source)]) == 0
    fresh = embedding(workspace, f"fresh {kind}")
    after = embedding(workspace, kind, f"checkpoint.init_from={source}")
    old = before.weights["embedding.weight"][: before.config.vocab_size]
    torch.testing.assert_close(after[:-1], old, rtol=0, atol=1e-9)
    torch.testing.assert_close(after[-1], fresh[-1], rtol=0, atol=1e-9)
    assert after[-1].abs().mean() > 1e-3


def test_no_other_vocabulary(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    start = f"checkpoint.init_from={workspace.folder}"
    words = ["has a vocabulary of", "one of 300: only a mask token may be added"]
    command = [workspace.recipe, "name=larger", "model.vocab_size=300", start]
    refused(capsys, workspace.root, command, words)
