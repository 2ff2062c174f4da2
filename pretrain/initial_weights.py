"""Starting from other weights: a run, a checkpoint, or a Hugging Face folder.

Positions may be others than there: what they learn starts from their own table where the given
weights have nothing of it, so that a model can be taken to longer contexts.  A mask token may be
added, so that an autoregressive model can become a diffusion model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from models.config import ModelConfig
from models.initialize import copy_block, initialize_, is_vocabulary, unpadded_shape
from parallel.apply import ParallelModel, local_tensor, shard_offsets, update_state
from parallel.checkpoint import load_checkpoint
from parallel.checkpoint_format import Manifest, read_manifest
from parallel.resume import ABSENT, compare_configs

from .config import RunConfig
from .decode import encode
from .optimizer_config import OptimizerConfig, model_rules
from .state import weights
from .trained import TrainedModel, check_names, expected_shapes, find_checkpoint, open_trained


def is_hugging_face(path: Path) -> bool:
    return (path / "config.json").is_file()


def check_hugging_face(config: RunConfig, path: Path) -> None:
    """``ValueError`` unless the folder holds a model of the same architecture."""
    trained = open_trained(path)
    differing = [
        name
        for name in ("attention", "block", "norm", "logit_softcap", "mtp")
        if getattr(trained.config, name) != getattr(config.model, name)
    ]
    if differing:
        given = ", ".join(
            f"{name}: {getattr(config.model, name)} here, {getattr(trained.config, name)} there"
            for name in differing
        )
        raise ValueError(f"{path} is another architecture ({given})")
    model = with_vocabulary_of(config.model, encode(trained.config), path)
    expected, new = expected_shapes(model, padded=False), new_positions(config, trained.shapes)
    check_names(trained.shapes, {n: s for n, s in expected.items() if n not in new}, path)


def with_vocabulary_of(here: ModelConfig, there: Mapping[str, Any], path: Path) -> ModelConfig:
    """``here`` without the mask token that it adds to the model ``there``, if it does.
    ``ValueError`` where the vocabularies differ otherwise."""
    size = there.get("vocab_size", here.vocab_size)
    if size == here.vocab_size:
        return here
    if size + 1 == here.vocab_size and here.mask_token and not there.get("mask_token"):
        return replace(here, vocab_size=size, mask_token=False)
    raise ValueError(
        f"{path} has a vocabulary of {size}, this run one of {here.vocab_size}: only a mask token "
        "may be added, one more, by model.mask_token=true"
    )


def new_positions(config: RunConfig, given: Collection[str]) -> set[str]:
    """The learned position parameters of the model that the ``given`` ones lack."""
    rules = model_rules(config.model, OptimizerConfig())
    return {name for name, rule in rules.items() if rule.group == "position" and name not in given}


def load_initial_weights(
    config: RunConfig, model: ParallelModel, group: dist.ProcessGroup | None
) -> str:
    """Fill the weights as ``checkpoint.init_from`` says; returns what was done."""
    assert config.checkpoint.init_from is not None
    path = Path(config.checkpoint.init_from)
    there: Any
    copies = is_hugging_face(path)
    if copies:
        trained = open_trained(path)
        new, there = new_positions(config, trained.weights), encode(trained.config)
    else:
        path = find_checkpoint(path)
        manifest = read_manifest(path)
        saved = {name.removeprefix("model/") for name in manifest.tensors}
        new, there = new_positions(config, saved), model_of(manifest)
    adds_mask = with_vocabulary_of(config.model, there, path) != config.model
    if copies or adds_mask:  # a longer vocabulary may be padded to another size
        copy_shards(open_trained(path), model, new)
    else:
        tensors = {n: t for n, t in weights(model).items() if n.removeprefix("model/") not in new}
        load_checkpoint(path, tensors, group)
    if adds_mask:
        begin_mask_token(config, model)
    update_state(model, 0)
    note = f"starting from the weights of {path}"
    changes = "".join(f"\n  {change}" for change in model_changes(config.model, there))
    if changes:
        note += f"; its model had other settings (there -> here):{changes}"
    if adds_mask:
        note += "\nthe mask token is new and starts at random"
    if new:
        note += f"\n{len(new)} position parameters are new and start at {config.model.position}"
    return note


def model_of(manifest: Manifest) -> Mapping[str, Any]:
    return (manifest.metadata.get("config") or {}).get("model") or {}


def model_changes(here: ModelConfig, there: Mapping[str, Any]) -> list[str]:
    """Settings in which a model ``there`` computes something else from the same weights."""
    found = compare_configs({"model": there}, {"model": encode(here)})
    return [
        str(change)
        for change in found
        # An older version did not have every setting.
        if change.saved != ABSENT and not change.key.startswith("model.init.")
    ]


@torch.no_grad()
def copy_shards(trained: TrainedModel, model: ParallelModel, new: Collection[str] = ()) -> None:
    """This rank's block of every tensor that is not ``new``, one whole tensor in memory at a time;
    padding is zero."""
    for name, parameter in model.named_parameters():
        if name in new:
            continue
        offsets = shard_offsets(model, name, parameter)
        copy_block(local_tensor(parameter), trained.weights[name], offsets)
    for name, buffer in model.named_state():
        buffer.copy_(trained.weights[name])


@torch.no_grad()
def begin_mask_token(config: RunConfig, model: ParallelModel) -> None:
    """Give the mask token's rows the values that they have in a model that starts from nothing: a
    row of zeros has enormous gradients behind a norm."""
    for name, parameter in model.named_parameters():
        if not is_vocabulary(name):
            continue
        shape, offsets = model.plans[name].shape, shard_offsets(model, name, parameter)
        whole, rows = unpadded_shape(config.model, name, shape), local_tensor(parameter)
        row = config.model.mask_id - offsets[0]
        if 0 <= row < len(rows):
            place = [config.model.mask_id, *offsets[1:]]
            initialize_(rows[row : row + 1], config.model, config.seed, name, place, whole)
