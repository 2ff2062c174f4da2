"""Choosing the device of a run, and what determinism needs of the environment."""

from __future__ import annotations

import os

import pytest
import torch

from pretrain.config import RunConfig
from pretrain.trainer import choose_device, fix_workspace

NAME = "CUBLAS_WORKSPACE_CONFIG"


@pytest.mark.parametrize("given", [None, ":4096:8", ":16:8"])
def test_a_workspace_of_fixed_size_is_named_or_kept(given: str | None) -> None:
    environment = {} if given is None else {NAME: given}
    fix_workspace(environment)
    assert environment == {NAME: given or ":4096:8"}


@pytest.mark.parametrize("given", ["", ":0:0", ":4096:2:16:8"])
def test_any_other_workspace_is_refused(given: str) -> None:
    environment = {NAME: given}
    with pytest.raises(ValueError, match=f"deterministic=true needs {NAME}.*given '{given}'"):
        fix_workspace(environment)
    assert environment == {NAME: given}


@pytest.mark.parametrize("deterministic", [True, False])
def test_it_is_named_before_cuda_starts(monkeypatch, deterministic: bool) -> None:
    """Only a machine with a GPU can do the rest: here CUDA says what it would have found."""
    found: list[str | None] = []
    monkeypatch.delenv(NAME, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: found.append(os.environ.get(NAME)))
    with monkeypatch.context() as restored:  # what is set inside goes again
        restored.setenv(NAME, "")
        restored.delenv(NAME)
        device = choose_device(RunConfig(device="cuda", deterministic=deterministic))
    assert device == torch.device("cuda", 0)
    assert found == [":4096:8" if deterministic else None]
    assert NAME not in os.environ


def test_a_cpu_needs_no_workspace(monkeypatch) -> None:
    monkeypatch.setenv(NAME, ":0:0")
    config = RunConfig(device="cpu", deterministic=True)
    assert choose_device(config) == torch.device("cpu")
    assert os.environ[NAME] == ":0:0"
