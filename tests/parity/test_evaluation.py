"""Validation: the same sequences and loss under every layout, without training's extras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from parallel.apply import BuildOptions
from parallel.mesh import build_mesh
from pretrain.config import RunConfig
from pretrain.decode import decode
from pretrain.engine import build_engine
from pretrain.evaluate import Evaluator, validation_blend
from pretrain.objectives.base import build_objective
from tests.distributed import run_ranks
from tests.parity.tiny_run import tiny_config, tiny_dataset

pytestmark = pytest.mark.parity

SEQUENCES = 5  # fills no batch of any layout below
LAYOUTS: dict[str, dict[str, int]] = {
    "micro": {},
    "dp2": {"dp": 2},
    "pp2": {"pp": 2},
    "tp2": {"tp": 2},
}


def config_of(root: Path, parallel: dict[str, int]) -> RunConfig:
    tree = tiny_config(root, 4, parallel)
    tree["objective"] = {"type": "causal", "label_smoothing": 0.2, "z_loss": 0.1}
    tree["evaluation"] = {"every": 0, "sequences": SEQUENCES}
    tree["precision"] = {"weights": "float64", "compute": "float64"}
    return decode(RunConfig, tree)


def _evaluate(rank: int, world: int, root: Path, parallel: dict[str, int]) -> dict[str, Any]:
    config = config_of(root, parallel)
    mesh = build_mesh(config.parallel, torch.device("cpu"))
    options = BuildOptions(dtype=torch.float64, seed=3)
    engine = build_engine(config.model, config.parallel, mesh, options, 32)
    return Evaluator(config, engine, build_objective(config.objective)).run()


def _plain(rank: int, world: int, root: Path) -> float:
    """The mean cross-entropy of the first sequences, one at a time."""
    config = config_of(root, {})
    mesh = build_mesh(config.parallel, torch.device("cpu"))
    options = BuildOptions(dtype=torch.float64, seed=3)
    model = build_engine(config.model, config.parallel, mesh, options, 32).model.part
    blend, count = validation_blend(config)
    assert count == SEQUENCES
    losses = []
    with torch.no_grad():
        for index in range(SEQUENCES):
            tokens = torch.from_numpy(blend.sample(index).tokens)
            losses.append(F.cross_entropy(model.logits(tokens[None, :-1])[0], tokens[1:]))
    return float(torch.stack(losses).mean())


@pytest.mark.parametrize("name", LAYOUTS)
def test_evaluation_does_not_depend_on_the_layout(name: str, tmp_path: Path) -> None:
    tiny_dataset(tmp_path / "data")
    [wanted] = run_ranks(1, _plain, tmp_path)
    world = 1 if name == "micro" else 2
    for found in run_ranks(world, _evaluate, tmp_path, LAYOUTS[name]):
        assert found["eval/loss"] == pytest.approx(wanted, rel=1e-10)
        assert found["eval/sequences"] == SEQUENCES
