"""Validation: the same sequences, noise and losses under every layout."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from parallel.apply import BuildOptions
from parallel.mesh import build_mesh
from pretrain.config import RunConfig
from pretrain.decode import decode
from pretrain.engine import Engine, build_engine
from pretrain.evaluate import Evaluator, validation_blend
from pretrain.objectives.base import build_objective
from tests.distributed import run_ranks
from tests.parity.tiny_run import tiny_config, tiny_dataset

pytestmark = pytest.mark.parity

SEQUENCES = 5  # fills no batch of any layout below
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "pp2": {"pp": 2},
    "tp2": {"tp": 2},
}
DIFFUSION: dict[str, dict[str, Any]] = {
    "masked": {"type": "masked"},
    "masked-count": {"type": "masked", "estimator": "count", "documents": "mask"},
    "uniform": {"type": "uniform", "clip": 3.0},
    "block": {"type": "block", "block_size": 8},
    "eso": {"type": "eso", "alpha0": 0.5},
}


def config_of(root: Path, objective: str, parallel: dict[str, Any], batch: int = 2) -> RunConfig:
    tree = tiny_config(root, 4, parallel)
    tree["objective"] = {"type": "causal", "label_smoothing": 0.2, "z_loss": 0.1}
    tree["evaluation"] = {"every": 0, "sequences": SEQUENCES}
    if objective in DIFFUSION:
        tree["objective"] = DIFFUSION[objective]
        tree["model"] |= {"vocab_size": 258, "mask_token": True}
        tree["evaluation"]["draws"] = 3
    tree["training"] |= {"micro_batch": batch}
    tree["precision"] = {"weights": "float64", "compute": "float64"}
    return decode(RunConfig, tree)


def engine_of(config: RunConfig) -> Engine:
    mesh = build_mesh(config.parallel, torch.device("cpu"))
    options = BuildOptions(dtype=torch.float64, seed=3)
    return build_engine(config.model, config.parallel, mesh, options, config.slots)


def _evaluate(
    rank: int, world: int, root: Path, layouts: list[tuple[dict[str, Any], int]]
) -> list[dict[str, Any]]:
    """Figures of every objective on each of (layout, micro-batch)."""
    found = []
    for parallel, batch in layouts:
        for name in ("causal", *DIFFUSION):
            config = config_of(root, name, parallel, batch)
            engine = engine_of(config)
            objective = build_objective(config.objective, config.model, seed=rank)
            evaluator = Evaluator(config, engine, objective)
            before = [p.detach().clone() for p in engine.model.part.parameters()]
            figures = evaluator.run()
            assert evaluator.run() == figures
            after = engine.model.part.parameters()
            assert all(map(torch.equal, before, after))
            found.append({"objective": name, **figures})
    return found


def _plain(rank: int, world: int, root: Path) -> list[float]:
    """The mean cross-entropy of each of the first sequences, one at a time."""
    config = config_of(root, "causal", {})
    model = engine_of(config).model.part
    blend, count = validation_blend(config)
    assert count == SEQUENCES
    losses = []
    with torch.no_grad():
        for index in range(SEQUENCES):
            tokens = torch.from_numpy(blend.sample(index).tokens)
            losses.append(float(F.cross_entropy(model.logits(tokens[None, :-1])[0], tokens[1:])))
    return losses


def _noised(rank: int, world: int, root: Path) -> dict[str, list[float]]:
    """The mean loss of each sequence over its draws, one noised sequence at a time."""
    found = {}
    for name in DIFFUSION:
        config = config_of(root, name, {})
        engine = engine_of(config)
        objective = build_objective(config.objective, config.model)
        blend, _ = validation_blend(config)
        losses = [0.0] * SEQUENCES
        for index in range(3 * SEQUENCES):
            sample = blend.sample(index % SEQUENCES)
            batch = objective.evaluation_batch(
                torch.from_numpy(sample.tokens)[None],
                torch.from_numpy(sample.documents).long()[None],
                [index],
            )
            batch.fields["sequence"] = torch.zeros_like(batch.ids)
            loss = engine.evaluate([batch], objective, 1).losses[objective.primary]
            losses[index % SEQUENCES] += loss / 3
        found[name] = losses
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("evaluation")
    tiny_dataset(root / "data")
    return root


@pytest.fixture(scope="module")
def wanted(data: Path) -> dict[str, list[float]]:
    [plain], [noised] = run_ranks(1, _plain, data), run_ranks(1, _noised, data)
    return {"causal": plain, **noised}


def check(found: dict[str, Any], losses: list[float]) -> None:
    assert found["eval/loss"] == pytest.approx(statistics.mean(losses), rel=1e-10)
    error = statistics.stdev(losses) / SEQUENCES**0.5
    assert found["eval/standard_error"] == pytest.approx(error, rel=1e-10)
    assert found["eval/sequences"] == SEQUENCES


@pytest.mark.parametrize("name", LAYOUTS)
def test_evaluation_does_not_depend_on_the_layout(
    name: str, data: Path, wanted: dict[str, list[float]]
) -> None:
    for rank in run_ranks(2, _evaluate, data, [(LAYOUTS[name], 2)]):
        for found in rank:
            check(found, wanted[found["objective"]])


def test_nor_on_the_batch(data: Path, wanted: dict[str, list[float]]) -> None:
    [found] = run_ranks(1, _evaluate, data, [({}, 1), ({}, 4)])
    for figures in found:
        check(figures, wanted[figures["objective"]])
    masked = [figures["eval/loss"] for figures in found if figures["objective"] != "causal"]
    assert len({round(loss, 6) for loss in masked}) == len(DIFFUSION)
