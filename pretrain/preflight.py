"""What can be wrong about a run for the user's reasons, found before anything is written."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from data_tools.tokenizers import load_tokenizer
from parallel.checkpoint_format import MANIFEST, TensorInfo, latest_step, read_manifest, step_name

from .config import Problems, RunConfig
from .data import build_blend, check_vocabulary, fingerprints, manifests
from .evaluate import validation_blend
from .initial_weights import (
    check_hugging_face,
    is_hugging_face,
    model_of,
    new_positions,
    with_vocabulary_of,
)
from .optimizer import fused_adam
from .optimizer_config import Rule, model_rules
from .run_folder import RunFolder
from .state import require_same_experiment
from .trained import expected_shapes, find_checkpoint
from .yaml_text import ConfigError, Problem


def check_start(config: RunConfig, device: torch.device) -> None:
    """``ConfigError`` with all that would stop this run on this rank's machine."""
    found = kernel_problems(config, device) + data_problems(config)
    if config.finish.export != "none" and importlib.util.find_spec("transformers") is None:
        found.append(("finish.export", 'needs transformers: pip install -e ".[hf]", or none'))
    if not found:
        _collect(found, "checkpoint", lambda: check_checkpoint(config))
    if found:
        raise ConfigError([Problem(*problem) for problem in found])


def check_evaluation(config: RunConfig, device: torch.device, checkpoint: Path) -> None:
    """``ConfigError`` with all that would stop the evaluation of ``checkpoint``."""
    found = kernel_problems(config, device)
    sources = config.data.validation
    _collect(found, "data.validation", lambda: check_vocabulary(config, sources))
    _collect(found, "data.validation", lambda: validation_blend(config))
    _collect(found, "checkpoint", lambda: require_tensors(config, checkpoint))
    if found:
        raise ConfigError([Problem(*problem) for problem in dict.fromkeys(found)])


def check_data(config: RunConfig) -> str:
    """``ConfigError`` where the datasets cannot give what the run needs; a note for people where
    none of them is on this machine."""
    paths = [source.path for source in (*config.data.train, *config.data.validation)]
    if not any(Path(f"{path}.idx").exists() for path in paths):
        return f"the datasets are not here, so they were not checked: {', '.join(paths)}\n"
    if found := data_problems(config):
        raise ConfigError([Problem(*problem) for problem in found])
    return ""


def check_initial_weights(config: RunConfig) -> str:
    """``ConfigError`` where the run cannot start from what it names; a note where that is not on
    this machine."""
    source = config.checkpoint.init_from
    if source is None:
        return ""
    if not Path(source).exists():
        return f"checkpoint.init_from is not here, so it was not checked: {source}\n"
    found: Problems = []
    _collect(found, "checkpoint.init_from", lambda: check_source(config, Path(source)))
    if found:
        raise ConfigError([Problem(*problem) for problem in found])
    return ""


def data_problems(config: RunConfig) -> Problems:
    """Why the datasets cannot give what the run needs."""
    samples = config.training.total_steps * config.training.batch
    length, data = config.training.sequence_length, config.data
    found: Problems = []
    _collect(found, "data", lambda: check_vocabulary(config))
    _collect(
        found, "data.train", lambda: build_blend(data, data.train, length, config.seed, samples)
    )
    if data.validation:
        _collect(found, "data.validation", lambda: validation_blend(config))
    _collect(found, "data.tokenizer", lambda: check_tokenizer(config))
    # What is wrong with a file stops several checks, and is said once.
    first = {message: path for path, message in reversed(found)}
    return [problem for problem in found if first[problem[1]] == problem[0]]


def _collect(found: Problems, path: str, check: Callable[[], object]) -> None:
    try:
        check()
    except ValueError as error:
        found.append((path, str(error)))


def kernel_problems(config: RunConfig, device: torch.device) -> Problems:
    """Kernels that this machine or device does not have."""
    found: Problems = []
    attention = config.kernels.attention
    if attention in ("flex", "flash") and device.type == "cpu":
        why = "has no backward pass" if attention == "flex" else "does not run"
        found.append(("kernels.attention", f"{attention} {why} on a CPU: use auto or sdpa"))
    if attention == "flash" and importlib.util.find_spec("flash_attn") is None:
        found.append(("kernels.attention", "flash needs flash-attn: pip install flash-attn"))
    if config.kernels.optimizer == "apex":
        _collect(found, "kernels.optimizer", fused_adam)
    return found


def check_tokenizer(config: RunConfig) -> None:
    """``ValueError`` unless a tokenizer that is named, or needed in the end, made the data."""
    if config.data.tokenizer is None and not config.finish.sample_tokens:
        return
    tokenizer = load_tokenizer(config.data.tokenizer_folder)
    made_by = manifests(config.data.train)[0].tokenizer
    if tokenizer.sha256 != made_by["sha256"]:
        raise ValueError(
            f"{config.data.tokenizer_folder} holds tokenizer {tokenizer.name}, but "
            f"{config.data.train[0].path} was made with {made_by['name']}"
        )


def check_checkpoint(config: RunConfig) -> None:
    """``ValueError`` unless the checkpoint that the run would go on or start from fits it."""
    root = RunFolder(config.folder).checkpoints
    step = latest_step(root)
    if step is not None:
        path = root / step_name(step)
        require_same_experiment(config, read_manifest(path), fingerprints(config))
        require_tensors(config, path, model_rules(config.model, config.optimizer))
    elif config.checkpoint.init_from is not None:
        check_source(config, Path(config.checkpoint.init_from))


def check_source(config: RunConfig, source: Path) -> None:
    """``ValueError`` unless ``source`` holds weights that the run's model can start from."""
    if is_hugging_face(source):
        check_hugging_face(config, source)
        return
    path = find_checkpoint(source)
    manifest = read_manifest(path)
    saved = {name.removeprefix("model/") for name in manifest.tensors}
    there = replace(config, model=with_vocabulary_of(config.model, model_of(manifest), path))
    require_tensors(there, path, leave_out=new_positions(config, saved))


def require_tensors(
    config: RunConfig,
    path: Path,
    rules: Mapping[str, Rule] | None = None,
    leave_out: Collection[str] = (),
) -> None:
    """``ValueError`` unless the checkpoint holds this model's tensors (but those to ``leave_out``)
    in its shapes and dtype, and the optimizer's of parameters with ``rules``."""
    saved, dtype = read_manifest(path).tensors, config.precision.weight_dtype
    expected = expected_shapes(config.model, padded=True)
    problems = [
        f"{name}: saved {info}, wanted nothing"
        for name, info in saved.items()
        if name.startswith("model/") and name.removeprefix("model/") not in expected
    ]
    for name, shape in expected.items():
        if name in leave_out:
            continue
        wanted = TensorInfo.of(shape, dtype)
        moments = rules[name].moments if rules and name in rules else ()
        for full in (f"{kind}/{name}" for kind in ("model", *(f"optimizer/{m}" for m in moments))):
            if saved.get(full) != wanted:
                problems.append(f"{full}: saved {saved.get(full, 'nothing')}, wanted {wanted}")
    if problems:
        shown = "; ".join(problems[:4]) + ("; ..." if len(problems) > 4 else "")
        raise ValueError(
            f"{path} does not fit this run's model, precision.weights and optimizer "
            f"({len(problems)} tensors differ): {shown}. The settings it was saved with are in "
            f"{path / MANIFEST}"
        )
