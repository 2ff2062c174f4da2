"""Find and open a trained model: a run folder, a checkpoint, or a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.config import ModelConfig
from models.declarations import named_state
from models.hf_names import layout, model_config_from_hf, target_of
from models.hf_stored import Stored, restored
from models.initialize import unpadded_shape
from models.mtp import MTPConfig
from models.positions import RNoPE
from models.transformer import Transformer
from parallel.checkpoint_format import (
    MANIFEST,
    Manifest,
    StoredCheckpoint,
    latest_step,
    list_steps,
    open_checkpoint,
    step_name,
)
from pretrain.decode import decode
from pretrain.yaml_text import nearest

DEFAULT_LENGTH = 2048  # of a model whose training length nobody wrote down
_WEIGHTS = "model/"
_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_CONSTANT = "rotary_emb.inv_freq"  # old files store this table as if it were a weight


class TrainedModelError(ValueError):
    """There is no usable trained model; the text says where and why."""


@dataclass(frozen=True)
class TrainedModel:
    """An opened model.  ``weights``: logical name -> full tensor on the CPU, read when asked for.

    path: the step or Hugging Face folder.  tokenizer: a folder that should hold the tokenizer, or
    None.  sequence_length: tokens per sequence in training.  objective: the settings that it was
    trained with, {"type": "causal"} where nobody wrote them down.
    """

    path: Path
    config: ModelConfig
    weights: Mapping[str, Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    sequence_length: int
    tokenizer: Path | None
    objective: Mapping[str, Any]


def open_trained(path: str | Path, step: int | None = None) -> TrainedModel:
    """Open a run folder, a folder of checkpoints, one checkpoint, or a Hugging Face folder.

    Raises TrainedModelError, CheckpointError (files damaged) or ConfigError.
    """
    path = Path(path)
    if not path.is_dir():
        raise TrainedModelError(f"{path}: no such folder")
    if (path / "config.json").is_file() and not (path / MANIFEST).is_file():
        if step is not None:
            raise TrainedModelError(f"{path} is a Hugging Face folder, which has no steps")
        return _open_hugging_face(path)
    return _open_checkpoint(find_checkpoint(path, step))


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """The step folder meant by ``path`` (itself, a run folder, a folder of checkpoints): the given
    step, or the one to resume from.  TrainedModelError where there is none."""
    if (path / MANIFEST).is_file():
        if step is not None and path.name != step_name(step):
            raise TrainedModelError(f"{path} is one checkpoint, and not of step {step}")
        return path
    if not path.is_dir():
        known = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise TrainedModelError(f"{path}: no such run or checkpoint{nearest(path.name, known)}")
    if (path / "config.json").is_file():
        raise TrainedModelError(
            f"{path} is a Hugging Face folder; launch/convert.py from-hf makes a checkpoint of one"
        )
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = list_steps(root)
    if not steps:
        raise TrainedModelError(f"{path}: there is no complete checkpoint in it")
    wanted = latest_step(root) if step is None else step
    assert wanted is not None
    if wanted not in steps:
        complete = ", ".join(map(str, steps))
        raise TrainedModelError(f"{root} has no complete step {wanted}; complete steps: {complete}")
    return root / step_name(wanted)


# --------------------------------------------------------------------------- own checkpoints


class _ModelTensors(Mapping[str, Tensor]):
    """The ``model/`` names of a checkpoint, without that prefix."""

    def __init__(self, checkpoint: StoredCheckpoint) -> None:
        self.checkpoint = checkpoint
        saved = checkpoint.manifest.tensors
        self.infos = {
            name.removeprefix(_WEIGHTS): info
            for name, info in saved.items()
            if name.startswith(_WEIGHTS)
        }

    def __getitem__(self, name: str) -> Tensor:
        return self.checkpoint[_WEIGHTS + name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)


def _open_checkpoint(folder: Path) -> TrainedModel:
    checkpoint = open_checkpoint(folder)
    model, length, tokenizer = training_facts(checkpoint.manifest, folder)
    tensors = _ModelTensors(checkpoint)
    config = decode(ModelConfig, model)
    shapes = {name: info.shape for name, info in tensors.infos.items()}
    check_names(shapes, expected_shapes(config, padded=True), folder)
    return TrainedModel(
        path=folder,
        config=config,
        weights=tensors,
        shapes=shapes,
        dtypes={name: info.dtype for name, info in tensors.infos.items()},
        sequence_length=length,
        tokenizer=tokenizer,
        objective=_objective(checkpoint.manifest.metadata["config"]),
    )


def training_facts(manifest: Manifest, folder: Path) -> tuple[dict[str, Any], int, Path | None]:
    """(model config tree, training sequence length, tokenizer folder) of a checkpoint.

    The only place that knows how a run describes itself in its checkpoints.
    """
    run = manifest.metadata.get("config")
    if not isinstance(run, dict) or not isinstance(run.get("model"), dict):
        raise TrainedModelError(f"{folder}: its metadata has no model configuration")
    length = (run.get("training") or {}).get("sequence_length") or DEFAULT_LENGTH
    data = run.get("data") or {}
    sources = [source["path"] for source in data.get("train") or [] if source.get("path")]
    places = [folder.parent.parent, folder.parent]
    places += [Path(data["tokenizer"])] if data.get("tokenizer") else []
    places += [Path(source).parent for source in sources[:1]]
    found = [place for place in places if holds_tokenizer(place)]
    return run["model"], length, found[0] if found else None


def _objective(tree: Mapping[str, Any]) -> dict[str, Any]:
    """What a saved configuration, or a config.json, says under that name."""
    return tree.get("objective") or {"type": "causal"}


def holds_tokenizer(place: Path) -> bool:
    return place.is_file() if place.suffix == ".json" else (place / "tokenizer.json").is_file()


# ----------------------------------------------------------------------- Hugging Face folders


class HuggingFaceTensors(Mapping[str, Tensor]):
    """Logical name -> tensor of a folder of safetensors files, unpadded, mapped into memory.

    ``places``: how every tensor of the model lies in files.  A stored copy of a tied head is
    checked against the embedding and left out, as is a tensor of which a part is missing.
    ``shapes`` also names, as they are, tensors of files that are none of the model's.
    """

    def __init__(self, folder: Path, places: Mapping[str, tuple[Stored, ...]], tied: bool) -> None:
        self.folder = folder
        self._opened: dict[str, Any] = {}
        self._files = {
            stored: file
            for stored, file in _weight_map(folder).items()
            if not stored.endswith(_CONSTANT)
        }
        self._places = {
            name: parts
            for name, parts in places.items()
            if parts and all(part.name in self._files for part in parts)
        }
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        for name, parts in self._places.items():
            pieces = [self._slice(part.name) for part in parts]
            shapes = {part.name: piece.get_shape() for part, piece in zip(parts, pieces)}
            first = shapes[parts[0].name]
            for stored, shape in shapes.items():
                if shape != first:
                    text = f"{stored} has shape {shape}, {parts[0].name} {first}"
                    raise TrainedModelError(f"{folder}: {text}")
            stack = () if parts[0].index is None else (len(parts),)
            self.shapes[name] = (*stack, *first)
            dtype = pieces[0].get_dtype()
            self.dtypes[name] = _DTYPES.get(dtype, dtype)
        known = {place.name for parts in places.values() for place in parts}
        for stored in sorted(self._files.keys() - known - ({_HEAD} if tied else set())):
            self.shapes[stored] = ()
        if tied and _HEAD in self._files:
            self._check_copy(places["embedding.weight"][0].name)

    def _check_copy(self, embedding: str) -> None:
        if not torch.equal(self._read(_HEAD), self._read(embedding)):
            raise TrainedModelError(
                f"{self.folder}: config.json ties the head to the embedding, but they differ"
            )

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            try:
                self._opened[file] = safe_open(self.folder / file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise TrainedModelError(f"{self.folder / file} cannot be read: {error}") from None
        return self._opened[file]

    def _slice(self, stored: str) -> Any:
        return self._open(self._files[stored]).get_slice(stored)

    def _read(self, stored: str) -> Tensor:
        tensor: Tensor = self._open(self._files[stored]).get_tensor(stored)
        return tensor

    def __getitem__(self, name: str) -> Tensor:
        parts = self._places[name]
        return restored(parts, [self._read(part.name) for part in parts])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


_HEAD = "lm_head.weight"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _weight_map(folder: Path) -> dict[str, str]:
    """Stored name -> file."""
    if (folder / _INDEX).is_file():
        found = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(found, dict):
            raise TrainedModelError(f"{folder / _INDEX} has no weight_map")
        return found
    if not (folder / _WHOLE).is_file():
        raise TrainedModelError(
            f"{folder}: no {_WHOLE} and no {_INDEX}; other formats are not read"
        )
    try:
        with safe_open(folder / _WHOLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), _WHOLE)
    except SafetensorError as error:
        raise TrainedModelError(f"{folder / _WHOLE} cannot be read: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainedModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise TrainedModelError(f"{path} is not a JSON object")
    return content


def _open_hugging_face(folder: Path) -> TrainedModel:
    content = read_json(folder / "config.json")
    try:
        config = decode(ModelConfig, model_config_from_hf(content))
        target = target_of(content)
    except (ValueError, KeyError) as error:
        raise TrainedModelError(f"{folder}: {error}") from None
    shapes = expected_shapes(config, padded=False)
    places = layout(shapes, target, config)
    tensors = HuggingFaceTensors(folder, places, config.tie_embeddings)
    check_names(tensors.shapes, shapes, folder)
    return TrainedModel(
        path=folder,
        config=config,
        weights=tensors,
        shapes=tensors.shapes,
        dtypes=tensors.dtypes,
        sequence_length=content.get("max_position_embeddings") or DEFAULT_LENGTH,
        tokenizer=folder if holds_tokenizer(folder) else None,
        objective=_objective(content),
    )


# ------------------------------------------------------------------------------ both of them


def expected_shapes(config: ModelConfig, *, padded: bool) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter and of the state, with or without vocabulary padding."""
    with torch.device("meta"):
        model = Transformer(config)
    return {
        name: tuple(p.shape if padded else unpadded_shape(config, name, p.shape))
        for name, p in stored_tensors(model)
    }


def stored_tensors(model: Transformer) -> list[tuple[str, Tensor]]:
    """What a checkpoint holds of a whole model."""
    return [*model.named_parameters(), *named_state(model)]


def check_names(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], place: Path | str
) -> None:
    """TrainedModelError unless exactly the expected tensors are there, in the expected shapes."""
    problems = []
    for title, names in (
        ("missing", sorted(expected.keys() - found.keys())),
        ("not in the model", sorted(found.keys() - expected.keys())),
    ):
        if names:
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            problems.append(f"{title} ({len(names)}): {shown}")
    problems += [
        f"{name} has shape {list(found[name])}, not {list(expected[name])}"
        for name in sorted(expected.keys() & found.keys())
        if tuple(found[name]) != tuple(expected[name])
    ]
    if problems:
        raise TrainedModelError(f"{place} does not fit its configuration: {'; '.join(problems)}")


def without_mtp(trained: TrainedModel) -> TrainedModel:
    """The same model without multi-token prediction."""
    config = dataclasses.replace(trained.config, mtp=MTPConfig())
    kept = {
        name: shape
        for name, shape in trained.shapes.items()
        if not name.startswith(("mtp.", "mtp_norms."))
    }
    return dataclasses.replace(trained, config=config, shapes=kept)


_LEARNED = (".log_scale", ".beta")  # zero until they are learned


def without_learned_positions(trained: TrainedModel) -> TrainedModel:
    """The same model with the table that its learned positions start from, if they are there still:
    it computes the same, bit for bit."""
    position = _start_of(trained.config.position)
    learned = [name for name in trained.shapes if ".position." in name]
    moved = (name for name in learned if name.endswith(_LEARNED) and trained.weights[name].any())
    if position is None or any(moved):
        return trained
    config = dataclasses.replace(trained.config, position=position)
    kept = {name: shape for name, shape in trained.shapes.items() if name not in learned}
    return dataclasses.replace(trained, config=config, shapes=kept)


def _start_of(position: Any) -> Any:
    """The position encoding without learned parts; None if it has none to begin with."""
    if isinstance(position, RNoPE.Config):
        inner = _start_of(position.inner)
        return None if inner is None else dataclasses.replace(position, inner=inner)
    return getattr(position, "start", None)


def build_model(
    trained: TrainedModel,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | str = "cpu",
) -> Transformer:
    """The model with its weights, one tensor at a time; padding rows are zero."""
    with torch.device(device):
        model = Transformer(trained.config).to(dtype)
    with torch.no_grad():
        for name, parameter in stored_tensors(model):
            tensor = trained.weights[name]
            if tensor.shape != parameter.shape:
                parameter.zero_()
                parameter[: tensor.shape[0]] = tensor
            else:
                parameter.copy_(tensor)
    return model.eval()
