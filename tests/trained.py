"""Small trained-looking models on disk, for tests of export, import and sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from data_tools.tokenizers import byte_tokenizer
from models.config import ModelConfig
from models.declarations import named_state
from models.transformer import Transformer
from parallel.checkpoint import CheckpointManager
from pretrain.decode import decode, encode
from pretrain.trained import stored_tensors

ATTENTION = {"heads": 4, "kv_heads": 2, "head_dim": 8}
BASE: dict[str, Any] = {
    "vocab_size": 301,
    "hidden": 32,
    "layers": 2,
    "attention": ATTENTION,
    "feedforward": {"type": "swiglu", "hidden": 40},
}
LENGTH = 48


def tiny_config(**changes: Any) -> ModelConfig:
    attention = {**ATTENTION, **changes.pop("attention", {})}
    return decode(ModelConfig, {**BASE, **changes, "attention": attention})


def tiny_model(config: ModelConfig, seed: int = 0) -> Transformer:
    """Weights and state large enough that every part shows in the logits; padding rows zero."""
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.add_(1.0)
            if name.endswith("embedding.weight") or name == "head.weight":
                parameter[config.vocab_size :] = 0
        for _, buffer in named_state(model):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) * 0.5 + 0.1)
    return model.eval()


def save_run(
    folder: Path,
    config: ModelConfig,
    model: Transformer | None = None,
    *,
    steps: tuple[int, ...] = (3,),
    tokenizer: bool = False,
    objective: dict[str, Any] | None = None,
) -> Transformer:
    """A run folder with checkpoints of ``model`` (the optimizer's state besides)."""
    model = tiny_model(config) if model is None else model
    tensors = {f"model/{name}": tensor.detach() for name, tensor in stored_tensors(model)}
    tensors |= {f"optimizer/exp_avg/{name}": p.data for name, p in model.named_parameters()}
    run = {"model": encode(config), "training": {"sequence_length": LENGTH}, "data": {"train": []}}
    if objective is not None:
        run["objective"] = objective
    manager = CheckpointManager(folder / "checkpoints", asynchronous=False, keep_last=len(steps))
    for step in steps:
        manager.save(step, tensors, {"config": run})
    manager.close()
    if tokenizer:
        byte_tokenizer().save(folder)
    return model
