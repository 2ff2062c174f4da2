"""The weights of an export: which tensor goes into which file, and writing them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.config import ModelConfig
from models.declarations import named_state, wide_parameters
from models.hf_names import CUSTOM_TARGET, keeps_wide, layout
from models.hf_stored import Stored, restored
from models.initialize import unpadded_shape
from models.transformer import Transformer
from pretrain.trained import TrainedModel, check_names, expected_shapes


@dataclass(frozen=True)
class ExportedTensor:
    """One tensor to write: our name, its place in the files, unpadded shape and dtype there.

    wide: whether it may be wider than what was asked for.
    """

    name: str
    stored: Stored
    shape: tuple[int, ...]
    dtype: torch.dtype
    wide: bool

    @property
    def bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


Shards = Sequence[Sequence[ExportedTensor]]


def plan_shards(trained: TrainedModel, target: str, dtype: str, max_bytes: int) -> Shards:
    """Distribute the tensors over files of at most ``max_bytes`` (or one tensor), in model order.

    What to write follows from the configuration alone; it is an error if the checkpoint has
    anything else.
    """
    expected = expected_shapes(trained.config, padded=False)
    check_names(_unpadded(trained), expected, trained.path)
    places = layout(expected, target, trained.config)
    wide = wide_names(trained.config) if target == CUSTOM_TARGET else set()
    shards: list[list[ExportedTensor]] = []
    room = 0
    for name, parts in places.items():
        for place in parts:
            stays = name in wide or keeps_wide(place.name, target)
            kind = getattr(torch, trained.dtypes[name] if dtype == "stored" else dtype)
            if stays:
                kind = torch.promote_types(kind, torch.float32)
            tensor = ExportedTensor(name, place, place.shape(expected[name]), kind, stays)
            if not shards or tensor.bytes > room:
                shards.append([])
                room = max_bytes
            shards[-1].append(tensor)
            room -= tensor.bytes
    return shards


def wide_names(config: ModelConfig) -> set[str]:
    """Names of what is never cast to a narrower dtype: wide parameters and state."""
    with torch.device("meta"):
        model = Transformer(config)
    wide = wide_parameters(model)
    names = {name for name, parameter in model.named_parameters() if parameter in wide}
    return names | {name for name, _ in named_state(model)}


def _unpadded(trained: TrainedModel) -> dict[str, tuple[int, ...]]:
    """The stored shapes; a vocabulary that is padded to another multiple is no error."""
    return {
        name: tuple(map(min, shape, unpadded_shape(trained.config, name, shape)))
        for name, shape in trained.shapes.items()
    }


class _AsStored(Mapping[str, Tensor]):
    """The weights of ``trained`` as whoever reads the files gets them."""

    def __init__(self, trained: TrainedModel, shards: Shards) -> None:
        self.weights = trained.weights
        self.tensors: dict[str, list[ExportedTensor]] = {}
        for shard in shards:
            for tensor in shard:
                self.tensors.setdefault(tensor.name, []).append(tensor)

    def __getitem__(self, name: str) -> Tensor:
        whole = self.weights[name]
        if name not in self.tensors:
            return whole
        tensors = self.tensors[name]
        parts = [tensor.stored.export(whole).to(tensor.dtype) for tensor in tensors]
        return restored([tensor.stored for tensor in tensors], parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def as_stored(trained: TrainedModel, shards: Shards) -> TrainedModel:
    """The same model, its weights rounded as in the files."""
    return dataclasses.replace(trained, weights=_AsStored(trained, shards))


def write_shards(trained: TrainedModel, shards: Shards, folder: Path) -> int:
    """Write the safetensors files, one shard in memory at a time; returns the bytes of all."""
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content: dict[str, Tensor] = {}
        for name, tensors in itertools.groupby(shard, key=lambda tensor: tensor.name):
            whole = trained.weights[name]
            for tensor in tensors:
                value = tensor.stored.export(whole)
                if tuple(value.shape) != tensor.shape:
                    value = value[: tensor.shape[0]]
                content[tensor.stored.name] = value.to(tensor.dtype).contiguous()
                weight_map[tensor.stored.name] = file
            del whole, value
        save_file(content, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # save_file lets the owner alone read
    size = sum(tensor.bytes for shard in shards for tensor in shard)
    if len(shards) > 1:
        parameters = sum(t.bytes // t.dtype.itemsize for shard in shards for t in shard)
        metadata = {"total_parameters": parameters, "total_size": size}
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / "model.safetensors.index.json", index)
    return size


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")
