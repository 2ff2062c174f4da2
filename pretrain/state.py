"""What a run carries from one start to the next: saved, resumed, or begun."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from parallel.apply import ParallelModel
from parallel.checkpoint import CheckpointManager, load_checkpoint
from parallel.checkpoint_format import latest_step, read_manifest, step_name
from parallel.resume import require_compatible

from .config import RunConfig, check_run
from .decode import decode, encode
from .health import HealthMonitor
from .optimizer import ShardedAdamW
from .yaml_text import COMMAND_LINE, combine, parse_overrides


def weights(model: ParallelModel) -> dict[str, Tensor]:
    """The stored parameters of this rank under their checkpoint names."""
    return {f"model/{name}": p.detach() for name, p in model.named_parameters()}


class RunState:
    """Steps done, samples consumed, weights and optimizer state."""

    def __init__(
        self,
        config: RunConfig,
        data_fingerprint: str,
        model: ParallelModel,
        optimizer: ShardedAdamW,
    ) -> None:
        self.config = config
        self.encoded: dict[str, Any] = encode(config)
        self.data_fingerprint = data_fingerprint
        self.model = model
        self.optimizer = optimizer
        self.step = 0
        self.samples = 0

    def tensors(self) -> dict[str, Tensor]:
        moments = self.optimizer.state_tensors()
        return weights(self.model) | {f"optimizer/{name}": t for name, t in moments.items()}

    def metadata(self, health: HealthMonitor) -> dict[str, Any]:
        return {
            "config": self.encoded,
            "data_fingerprint": self.data_fingerprint,
            "tokenizer": str(self.config.data.tokenizer_folder.resolve()),
            "step": self.step,
            "samples": self.samples,
            "updates": self.optimizer.steps,
            "health": health.state_dict(),
        }

    def save(self, checkpoints: CheckpointManager, health: HealthMonitor) -> None:
        checkpoints.save(self.step, self.tensors(), self.metadata(health))

    def start(self, checkpoints: CheckpointManager, health: HealthMonitor) -> str:
        """Resume from the newest checkpoint, or start from other weights, or from scratch.  Says
        which.  ``ValueError`` when the checkpoint is of another experiment."""
        latest = checkpoints.latest()
        if latest is not None:
            return self._resume(checkpoints, latest, health)
        if self.config.checkpoint.init_from is not None:
            path = find_checkpoint(Path(self.config.checkpoint.init_from))
            load_checkpoint(path, weights(self.model), checkpoints.process_group)
            return f"starting from the weights of {path}"
        return "starting from initial weights"

    def _resume(self, checkpoints: CheckpointManager, step: int, health: HealthMonitor) -> str:
        saved = checkpoints.read_manifest(step).metadata
        before = {**saved["config"], "data_fingerprint": saved["data_fingerprint"]}
        now = {**self.encoded, "data_fingerprint": self.data_fingerprint}
        changes = require_compatible(before, now, self.config.checkpoint.allow)
        checkpoints.load(step, self.tensors())
        self.step, self.samples = saved["step"], saved["samples"]
        self.optimizer.restore(saved["updates"])
        health.load_state_dict(saved["health"])
        note = f"resuming after step {step}"
        return f"{note}; settings that differ from the checkpoint:\n{changes}" if changes else note


def find_checkpoint(path: Path) -> Path:
    """A checkpoint folder from itself, from a run folder or from its ``checkpoints`` folder (the
    newest complete one)."""
    if path.name.startswith("step_"):
        return path
    for root in (path / "checkpoints", path):
        if root.is_dir():
            step = latest_step(root)
            if step is not None:
                return root / step_name(step)
    raise ValueError(f"{path}: there is no complete checkpoint in it")


def checkpoint_config(path: Path, overrides: Iterable[str], **changes: dict[str, Any]) -> RunConfig:
    """The config that a checkpoint was saved with, for use in this job: its layout and batch are
    replaced by one data-parallel sequence each, before ``overrides`` and ``changes``."""
    saved = read_manifest(path).metadata["config"]
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    fresh = {**saved, "parallel": {}, "checkpoint": {}, "finish": {}}
    fresh["training"] = {**saved["training"], "micro_batch": 1}
    tree, sources = combine(
        [(str(path), fresh), (COMMAND_LINE, parse_overrides(overrides)), ("", changes)]
    )
    match tree["training"]:
        case {"sequence_length": int(length), "micro_batch": int(micro_batch)}:
            tree["training"]["batch_tokens"] = length * micro_batch * world_size
    config = decode(RunConfig, tree, sources=sources)
    check_run(config, world_size, sources)
    return config
