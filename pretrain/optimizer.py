"""Updates of the stored weights, on local shards.

The optimizer sees plain tensors that share storage with this rank's part of each stored parameter;
its state is named and placed like the parameters, so checkpoints reshard it like weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.apply import ParallelModel, local_tensor
from parallel.gradients import local_gradient

from .muon import ShardedMuon
from .optimizer_config import OptimizerConfig, Rule, parameter_rules


class ShardedOptimizer:
    """AdamW by groups, and Muon where the config gives matrices to it, on the local part of every
    parameter.  Frozen parameters have no state; from here on no gradient is computed for them."""

    def __init__(self, model: ParallelModel, config: OptimizerConfig, library: str) -> None:
        self.rules = parameter_rules(model.part, config)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.rules[name].method != "frozen")
        self.stored: dict[str, Tensor] = {
            name: p for name, p in model.named_parameters() if p.requires_grad
        }
        self.local = {
            name: nn.Parameter(local_tensor(p))
            for name, p in self.stored.items()
            if self.rules[name].method == "adamw"
        }
        groups = _groups(self.local, self.rules, config)
        self.optimizer = _build(groups, config, library) if groups else None
        matrices = {name: p for name, p in self.stored.items() if name not in self.local}
        self.muon = None
        if config.matrices == "muon":
            self.muon = ShardedMuon(model, matrices, config.muon, config.weight_decay)
        self.muon_lr = 1.0 if config.muon.lr is None else config.muon.lr / config.lr
        self.steps = 0
        self.state: dict[Tensor, dict[str, Tensor]] = (
            {} if self.optimizer is None else self.optimizer.state
        )
        for name, local in self.local.items():
            self.state[local] = {
                "step": torch.zeros((), dtype=torch.float32, device=local.device),
                **{moment: torch.zeros_like(local) for moment in self.rules[name].moments},
            }

    def step(self, lr: float) -> None:
        """One update from the stored parameters' gradients.  ``lr``: of AdamW without a multiplier;
        the others follow in proportion."""
        gradients = {name: local_gradient(parameter) for name, parameter in self.stored.items()}
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group["multiplier"]
            for name, local in self.local.items():
                local.grad = gradients[name]
            self.optimizer.step()
            for local in self.local.values():
                local.grad = None
        if self.muon is not None:
            self.muon.step(lr * self.muon_lr, gradients)
        self.steps += 1

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments by ``moment/logical name``, placed like their parameters."""
        return {
            f"{moment}/{name}": _placed_like(stored, self._moment(moment, name))
            for name, stored in self.stored.items()
            for moment in self.rules[name].moments
        }

    def _moment(self, moment: str, name: str) -> Tensor:
        if name in self.local:
            return self.state[self.local[name]][moment]
        assert self.muon is not None
        return self.muon.momentum[name]

    def restore(self, steps: int) -> None:
        """Continue after ``steps`` updates; the moments were loaded into ``state_tensors``."""
        self.steps = steps
        for local in self.local.values():
            self.state[local]["step"].fill_(steps)
        for group in [] if self.optimizer is None else self.optimizer.param_groups:
            if "step" in group:  # apex counts per group
                group["step"] = steps


def _groups(
    local: Mapping[str, Tensor], rules: Mapping[str, Rule], config: OptimizerConfig
) -> list[dict[str, Any]]:
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in local.items():
        if parameter.numel():  # an uneven split leaves some ranks without rows
            decay = config.weight_decay if rules[name].decays else 0.0
            groups.setdefault((decay, rules[name].lr), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "multiplier": multiplier}
        for (decay, multiplier), parameters in groups.items()
    ]


def _placed_like(stored: Tensor, local: Tensor) -> Tensor:
    if not isinstance(stored, DTensor):
        return local
    return DTensor.from_local(
        local,
        stored.device_mesh,
        stored.placements,
        run_check=False,
        shape=stored.shape,
        stride=stored.stride(),
    )


def _build(groups: list[dict[str, Any]], config: OptimizerConfig, library: str) -> Any:
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
    }
    if library == "torch":
        return torch.optim.AdamW(groups, fused=True, **options)
    return fused_adam()(groups, adam_w_mode=True, **options)


def fused_adam() -> Any:
    """NVIDIA apex's optimizer class; ``ValueError`` without it.  Not yet run on a GPU."""
    try:
        return importlib.import_module("apex.optimizers").FusedAdam
    except (ImportError, AttributeError) as error:
        raise ValueError(
            "apex here means NVIDIA apex built from source (the PyPI package of that name is "
            f"another project): {error}; launch/doctor.py tells more"
        ) from None
