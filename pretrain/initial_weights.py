"""Starting from other weights: a run, a checkpoint, or a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from parallel.apply import ParallelModel, local_tensor, shard_offsets, update_state
from parallel.checkpoint import load_checkpoint
from parallel.checkpoint_format import read_manifest
from parallel.resume import ABSENT, compare_configs

from .config import RunConfig
from .decode import encode
from .state import weights
from .trained import TrainedModel, check_names, expected_shapes, find_checkpoint, open_trained


def is_hugging_face(path: Path) -> bool:
    return (path / "config.json").is_file()


def check_hugging_face(config: RunConfig, path: Path) -> None:
    """``ValueError`` unless the folder holds a model of the same architecture."""
    trained = open_trained(path)
    differing = [
        name
        for name in ("attention", "block", "norm", "position", "logit_softcap", "mtp")
        if getattr(trained.config, name) != getattr(config.model, name)
    ]
    if differing:
        given = ", ".join(
            f"{name}: {getattr(config.model, name)} here, {getattr(trained.config, name)} there"
            for name in differing
        )
        raise ValueError(f"{path} is another architecture ({given})")
    check_names(trained.shapes, expected_shapes(config.model, padded=False), path)


def load_initial_weights(
    config: RunConfig, model: ParallelModel, group: dist.ProcessGroup | None
) -> str:
    """Fill the weights as ``checkpoint.init_from`` says; returns what was done."""
    assert config.checkpoint.init_from is not None
    path = Path(config.checkpoint.init_from)
    if is_hugging_face(path):
        copy_shards(open_trained(path), model)
        update_state(model, 0)
        return f"starting from the weights of {path}"
    path = find_checkpoint(path)
    load_checkpoint(path, weights(model), group)
    update_state(model, 0)
    changes = "".join(f"\n  {change}" for change in model_changes(config, path))
    note = f"; its model had other settings (there -> here):{changes}" if changes else ""
    return f"starting from the weights of {path}{note}"


def model_changes(config: RunConfig, path: Path) -> list[str]:
    """Settings in which the model of a checkpoint computes something else from the same weights."""
    there = (read_manifest(path).metadata.get("config") or {}).get("model") or {}
    found = compare_configs({"model": there}, {"model": encode(config.model)})
    return [
        str(change)
        for change in found
        # An older version did not have every setting.
        if change.saved != ABSENT and not change.key.startswith("model.init.")
    ]


@torch.no_grad()
def copy_shards(trained: TrainedModel, model: ParallelModel) -> None:
    """This rank's block of every tensor, one whole tensor in memory at a time; padding is zero."""
    for name, parameter in model.named_parameters():
        whole, local = trained.weights[name], local_tensor(parameter)
        offsets = shard_offsets(model, name, parameter)
        spans = tuple(slice(a, a + n) for a, n in zip(offsets, local.shape, strict=True))
        block = whole[spans]  # shorter than the local block where that is padding
        local.zero_()
        local[tuple(slice(0, n) for n in block.shape)] = block.to(local)
    for name, buffer in model.named_state():
        buffer.copy_(trained.weights[name])
