"""What decides how weights are updated, and which rule each parameter follows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from models.config import ModelConfig
from models.transformer import Embedding, Head, Transformer, logical_name

GROUPS = ("position", "budget", "scalar")
"""What modules may name in ``optimizer_group``; each has a learning-rate multiplier here."""

Problems = list[tuple[str, str]]


def _positive(config: Any, *names: str) -> Problems:
    return [
        (name, f"must be positive and finite, got {getattr(config, name)}")
        for name in names
        if not 0 < getattr(config, name) < math.inf
    ]


def _momentum(config: Any, *names: str) -> Problems:
    return [
        (name, f"must be in [0, 1), got {getattr(config, name)}")
        for name in names
        if not 0 <= getattr(config, name) < 1
    ]


@dataclass(frozen=True)
class MuonConfig:
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon)."""

    lr: float | None = field(
        default=None, metadata={"help": "peak learning rate of matrices; null = optimizer.lr"}
    )
    momentum: float = field(default=0.95, metadata={"help": "decay of the averaged gradient"})
    nesterov: bool = field(default=True, metadata={"help": "look ahead along the momentum"})
    steps: int = field(default=5, metadata={"help": "Newton-Schulz iterations"})
    scale: Literal["match_rms", "spectral"] = field(
        default="match_rms",
        metadata={"help": "update times 0.2·sqrt(max(rows, columns)), or sqrt(max(1, rows/cols))"},
    )
    bfloat16: bool = field(
        default=False, metadata={"help": "Newton-Schulz in bfloat16 (on GPUs), not as stored"}
    )

    def problems(self) -> Problems:
        found = _momentum(self, "momentum") + _positive(self, "steps")
        return found + (_positive(self, "lr") if self.lr is not None else [])


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101), and Muon for matrices if asked."""

    lr: float = field(default=1e-3, metadata={"help": "peak learning rate"})
    beta1: float = field(default=0.9, metadata={"help": "decay of the first moment"})
    beta2: float = field(default=0.95, metadata={"help": "decay of the second moment"})
    eps: float = field(default=1e-8, metadata={"help": "added to the root of the second moment"})
    weight_decay: float = field(
        default=0.1, metadata={"help": "decoupled decay of matrices; norms and biases have none"}
    )
    decay_embeddings: bool = field(
        default=False, metadata={"help": "decay the token embedding (and a tied head) too"}
    )
    matrices: Literal["adamw", "muon"] = field(
        default="adamw",
        metadata={"help": "rule for the weight matrices of blocks; everything else has AdamW"},
    )
    muon: MuonConfig = MuonConfig()
    position_lr: float = field(
        default=1.0, metadata={"help": "learning-rate multiplier of learned position parameters"}
    )
    budget_lr: float = field(
        default=1.0, metadata={"help": "learning-rate multiplier of learned expert budgets"}
    )
    scalar_lr: float = field(
        default=1.0, metadata={"help": "learning-rate multiplier of learned scalars of norms"}
    )
    trainable: Literal["all", "positions"] = field(
        default="all", metadata={"help": "positions: learn position parameters, freeze the rest"}
    )

    def problems(self) -> Problems:
        multipliers = [f"{group}_lr" for group in GROUPS]
        found = _positive(self, "lr", "eps", *multipliers) + _momentum(self, "beta1", "beta2")
        if self.weight_decay < 0:
            found.append(("weight_decay", f"must not be negative, got {self.weight_decay}"))
        if self.decay_embeddings and self.weight_decay == 0:
            found.append(("decay_embeddings", "is set but weight_decay=0: it would be ignored"))
        if self.matrices != "muon" and self.muon != MuonConfig():
            found.append(("muon", f"is set but matrices={self.matrices}: it would be ignored"))
        if self.trainable == "positions":
            ignored = ["decay_embeddings", "matrices", "budget_lr", "scalar_lr"]
            found += [
                (name, "is set but trainable=positions: it would be ignored")
                for name in ignored
                if getattr(self, name) != getattr(type(self), name)
            ]
        return found

    def model_problems(self, model: ModelConfig) -> Problems:
        """What does not go with the model."""
        set_ = [group for group in GROUPS if getattr(self, f"{group}_lr") != 1]
        if not set_ and self.trainable == "all":
            return []
        there = {rule.group for rule in model_rules(model, self).values()}
        found = [
            (f"{group}_lr", f"is set but the model has no {group} parameters: it would be ignored")
            for group in set_
            if group not in there
        ]
        if self.trainable == "positions" and "position" not in there:
            found.append(("trainable", "positions, but the model has no learned position encoding"))
        return found


@dataclass(frozen=True)
class Rule:
    """How one parameter is updated.  lr: multiple of the learning rate."""

    method: Literal["adamw", "muon", "frozen"]
    decays: bool
    lr: float = 1.0
    group: str | None = None

    @property
    def moments(self) -> tuple[str, ...]:
        """Optimizer state that is as large as the parameter."""
        return {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum",), "frozen": ()}[
            self.method
        ]


def parameter_rules(part: Transformer, config: OptimizerConfig) -> dict[str, Rule]:
    """The rule of every parameter of (a part of) a model, by logical name.

    Matrices decay, of the token embedding only if asked; gains, biases and the groups that modules
    declare never do.  Muon takes the matrices of blocks: no embedding, no head, nothing that is
    kept wide (routers) or belongs to a group.
    """
    rules = {}
    for prefix, module in part.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                name = logical_name(f"{prefix}.{key}" if prefix else key, part.config)
                rules[name] = _rule(module, key, name, parameter, config)
    return rules


def model_rules(model: ModelConfig, config: OptimizerConfig) -> dict[str, Rule]:
    """``parameter_rules`` of a whole model."""
    with torch.device("meta"):
        return parameter_rules(Transformer(model), config)


def _rule(
    module: nn.Module, key: str, name: str, parameter: nn.Parameter, config: OptimizerConfig
) -> Rule:
    group = getattr(module, "optimizer_group", {}).get(key)
    assert group is None or group in GROUPS, f"{name}: unknown optimizer group {group!r}"
    if config.trainable == "positions" and group != "position":
        return Rule("frozen", False, group=group)
    if group is not None:
        return Rule("adamw", False, getattr(config, f"{group}_lr"), group)
    matrix = parameter.dim() >= 2 and not key.endswith("bias")
    decays = matrix and (config.decay_embeddings or not name.endswith("embedding.weight"))
    inner = not isinstance(module, (Embedding, Head)) and key not in getattr(module, "wide", ())
    if matrix and inner and config.matrices == "muon":
        return Rule("muon", decays)
    return Rule("adamw", decays)
