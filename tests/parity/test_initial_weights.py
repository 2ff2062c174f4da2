"""A run that starts from a Hugging Face folder has the folder's weights, under every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.apply import BuildOptions, local_tensor
from parallel.gradients import full_parameters
from parallel.mesh import ParallelConfig, build_mesh
from pretrain.engine import build_engine
from pretrain.export import export_hugging_face
from pretrain.initial_weights import copy_shards
from pretrain.trained import open_trained
from tests.distributed import run_ranks
from tests.parity.test_kill import finish
from tests.parity.tiny_run import tiny_config, tiny_dataset

pytestmark = pytest.mark.parity

LAYOUTS = {
    "single": (1, ParallelConfig()),
    "fsdp2-tp2": (4, ParallelConfig(fsdp=2, tp=2)),
    "pp2": (2, ParallelConfig(pp=2)),
}


def _imported(rank: int, world: int, folder: str, layouts: list[ParallelConfig]) -> list[Any]:
    trained = open_trained(folder)
    found = []
    for parallel in layouts:
        mesh = build_mesh(parallel, torch.device("cpu"))
        engine = build_engine(trained.config, parallel, mesh, BuildOptions(seed=99), 32)
        for _, parameter in engine.model.named_parameters():
            local_tensor(parameter).fill_(7.0)
        copy_shards(trained, engine.model)
        found.append({n: t.clone() for n, t in full_parameters(engine.model).items()})
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    root = tmp_path_factory.mktemp("import")
    tiny_dataset(root / "data")
    tree = tiny_config(root, steps=4, parallel={"dp": 1})
    finish(tree)
    export_hugging_face(root / "runs" / "tiny", root / "folder", check=False)
    return tree, root / "folder"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_are_the_folders(exported: tuple[dict[str, Any], Path], layout: str) -> None:
    world, parallel = LAYOUTS[layout]
    wanted = open_trained(exported[1])
    for rank in run_ranks(world, _imported, str(exported[1]), [parallel]):
        for name, value in rank[0].items():
            whole = wanted.weights[name]
            assert torch.equal(value[: whole.shape[0]], whole), name
            assert not value[whole.shape[0] :].any(), f"{name}: padding is not zero"


def test_a_run_starts_from_a_folder(exported: tuple[dict[str, Any], Path]) -> None:
    tree, folder = exported
    tree = {**tree, "name": "continued"}
    tree["checkpoint"] = {"every": 0, "init_from": str(folder)}
    tree["optimizer"] = {"lr": 1e-12}
    before = open_trained(folder).weights["embedding.weight"]
    after = finish(tree)["model/embedding.weight"][: before.shape[0]]
    torch.testing.assert_close(after, before, rtol=0, atol=1e-9)
