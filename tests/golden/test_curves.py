"""A change that is not meant to change numerics leaves these curves where they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.curves import RECIPES, STEPS, STORE, curve
from tests.parity.tiny_run import tiny_dataset


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    tiny_dataset(folder / "data")
    return folder


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", RECIPES)
def test_loss_curve_is_the_stored_one(name: str, threads: int, root: Path) -> None:
    stored = json.loads(STORE.read_text())[name]
    found = curve(name, root, threads)
    assert len(stored) == STEPS + 1
    assert found == pytest.approx(stored, rel=1e-9)
    assert stored[-2] < stored[0] - 0.5, "the run learns something"
