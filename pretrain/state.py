"""What a run carries from one start to the next: saved, resumed, or begun."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from models.families import family_of
from parallel.apply import ParallelModel
from parallel.checkpoint import CheckpointManager
from parallel.checkpoint_format import (
    CheckpointError,
    Manifest,
    read_manifest,
)
from parallel.resume import FREE, compare_configs, require_compatible

from .config import RunConfig, check_run
from .decode import decode, encode, fields_of, source_of
from .health import HealthMonitor
from .optimizer import ShardedOptimizer
from .yaml_text import COMMAND_LINE, ConfigError, Problem, combine, parse_overrides


def weights(model: ParallelModel) -> dict[str, Tensor]:
    """The stored parameters and the state of this rank under their checkpoint names."""
    tensors = [*model.named_parameters(), *model.named_state()]
    return {f"model/{name}": tensor.detach() for name, tensor in tensors}


class RunState:
    """Steps done, samples consumed, weights and optimizer state."""

    def __init__(
        self,
        config: RunConfig,
        fingerprints: Mapping[str, str],
        model: ParallelModel,
        optimizer: ShardedOptimizer,
    ) -> None:
        self.config = config
        self.encoded: dict[str, Any] = encode(config)
        self.fingerprints = fingerprints
        self.model = model
        self.optimizer = optimizer
        self.step = 0
        self.samples = 0
        self.changed: list[str] = []

    def tensors(self) -> dict[str, Tensor]:
        moments = self.optimizer.state_tensors()
        return weights(self.model) | {f"optimizer/{name}": t for name, t in moments.items()}

    def metadata(self, health: HealthMonitor) -> dict[str, Any]:
        return {
            "config": self.encoded,
            **self.fingerprints,
            "tokenizer": str(self.config.data.tokenizer_folder.resolve()),
            "step": self.step,
            "samples": self.samples,
            "updates": self.optimizer.steps,
            "health": health.state_dict(),
        }

    def save(self, checkpoints: CheckpointManager, health: HealthMonitor) -> None:
        checkpoints.save(self.step, self.tensors(), self.metadata(health))

    def resume(self, checkpoints: CheckpointManager, step: int, health: HealthMonitor) -> str:
        """Go on after the checkpoint of ``step``; returns a note for people.  ``ValueError`` when
        it is of another experiment."""
        manifest = checkpoints.read_manifest(step)
        changes = require_same_experiment(self.config, manifest, self.fingerprints)
        saved = manifest.metadata
        checkpoints.load(step, self.tensors())
        self.step, self.samples = saved["step"], saved["samples"]
        self.optimizer.restore(saved["updates"])
        health.load_state_dict(saved["health"])
        self.changed = [
            str(difference)
            for difference in compare_configs(*_both(self.config, saved, self.fingerprints))
            if difference.effect != FREE
        ]
        if step >= self.config.training.total_steps:
            return self._nothing_to_train()
        note = f"resuming after step {step}"
        return f"{note}; settings that differ from the checkpoint:\n{changes}" if changes else note

    def _nothing_to_train(self) -> str:
        length = "steps" if self.config.training.steps is not None else "tokens"
        ignored = "".join(
            f"\n  not used, because nothing is trained: {change}" for change in self.changed
        )
        return (
            f"all {self.step} steps are done; what finish.* asks for is made again. To train "
            f"longer, give training.{length}=...; to train anew, another name=...{ignored}"
        )


def require_same_experiment(
    config: RunConfig, manifest: Manifest, fingerprints: Mapping[str, str]
) -> str:
    """What changed since the checkpoint, for people; ``CheckpointError`` where that may not be."""
    saved = manifest.metadata
    missing = {"config", "data_fingerprint", "samples", "updates", "health"} - saved.keys()
    if missing:
        text = f"step {manifest.step} was not saved by a training run (no {', '.join(missing)})"
        raise CheckpointError(f"{text}: use it as checkpoint.init_from of a run of another name")
    before, now = _both(config, saved, fingerprints)
    return require_compatible(before, now, config.checkpoint.allow)


def _both(
    config: RunConfig, saved: dict[str, Any], fingerprints: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is compared between a checkpoint and this run; an older one lacks some fingerprints."""
    known = fingerprints.keys() & saved.keys()
    before, now = ({name: prints[name] for name in known} for prints in (saved, fingerprints))
    return {**_with_defaults(saved["config"]), **before}, {**encode(config), **now}


def _with_defaults(saved: dict[str, Any]) -> dict[str, Any]:
    """Settings of an older version; one that it did not know has the default, which changes
    nothing."""
    try:
        return encode(decode(RunConfig, saved))
    except ConfigError:  # it knew one that is gone
        return saved


def checkpoint_config(path: Path, overrides: Iterable[str], **changes: dict[str, Any]) -> RunConfig:
    """The config that a checkpoint was saved with, for use in this job: its layout and batch are
    replaced by one data-parallel sequence each, before ``overrides`` and ``changes``."""
    overrides = list(overrides)
    _refuse_without_effect(overrides)
    saved = read_manifest(path).metadata.get("config")
    if not isinstance(saved, dict) or "training" not in saved:
        raise CheckpointError(f"{path} was not saved by a training run: it holds no settings")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    fresh = {**saved, "parallel": {}, "checkpoint": {}, "metrics": {}, "finish": {}}
    fresh["training"] = {**saved["training"], "micro_batch": 1}
    tree, sources = combine(
        [(str(path), fresh), (COMMAND_LINE, parse_overrides(overrides)), ("", changes)]
    )
    match tree["training"]:
        case {"sequence_length": int(length), "micro_batch": int(micro_batch)}:
            tree["training"]["batch_tokens"] = length * micro_batch * world_size
    config = decode(RunConfig, tree, sources=sources)
    trained, asked = (family_of(found["objective"]) for found in (saved, encode(config)))
    if trained != asked:
        text = f"{path} is a model of {trained} kind, which says nothing as {asked}"
        raise ConfigError([Problem("objective", text, source_of("objective", sources))])
    check_run(config, world_size, sources)
    return config


# Settings that an evaluation depends on, besides --sequences.
_EVALUATED = (
    "model objective data precision kernels parallel device training.sequence_length "
    "training.micro_batch"
).split()


def _refuse_without_effect(overrides: Iterable[str]) -> None:
    keys = [text.partition("=")[0] for text in overrides]
    known = fields_of(RunConfig)
    ignored = [
        key
        for key in keys
        if key.partition(".")[0] in known
        and not any(f"{key}.".startswith(f"{root}.") for root in _EVALUATED)
    ]
    if ignored:
        text = f"has no effect on an evaluation; settings of {', '.join(_EVALUATED)} have"
        raise ConfigError([Problem(key, text, COMMAND_LINE) for key in ignored])
