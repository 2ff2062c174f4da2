"""AdamW over local shards.

The optimizer sees plain tensors that share storage with this rank's part of each stored parameter;
its state is named and placed like the parameters, so checkpoints reshard it like weights.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.apply import ParallelModel, local_tensor
from parallel.gradients import local_gradient

from .config import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


def decays(name: str, parameter: Tensor, config: OptimizerConfig) -> bool:
    """Matrices decay; norm gains and biases never; embeddings only if asked."""
    if parameter.dim() < 2:
        return False
    return config.decay_embeddings or not name.endswith("embedding.weight")


class ShardedAdamW:
    """AdamW with decay groups, on the local part of every parameter."""

    def __init__(self, model: ParallelModel, config: OptimizerConfig, library: str) -> None:
        self.stored: dict[str, Tensor] = dict(model.named_parameters())
        self.local = {name: nn.Parameter(local_tensor(p)) for name, p in self.stored.items()}
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, parameter in self.stored.items():
            if self.local[name].numel():  # an uneven split leaves some ranks without rows
                groups[decays(name, parameter, config)].append(self.local[name])
        self.optimizer = _build(
            [
                {"params": parameters, "weight_decay": config.weight_decay if decay else 0.0}
                for decay, parameters in groups.items()
                if parameters
            ],
            config,
            library,
        )
        self.steps = 0
        for local in self.local.values():
            self.optimizer.state[local] = {
                "step": torch.zeros((), dtype=torch.float32, device=local.device),
                **{moment: torch.zeros_like(local) for moment in MOMENTS},
            }

    def step(self, lr: float) -> None:
        """One update with learning rate ``lr`` from the stored parameters' gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for name, local in self.local.items():
            local.grad = local_gradient(self.stored[name])
        self.optimizer.step()
        for local in self.local.values():
            local.grad = None
        self.steps += 1

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments by ``moment/logical name``, placed like their parameters."""
        return {
            f"{moment}/{name}": _placed_like(self.stored[name], self.optimizer.state[local][moment])
            for name, local in self.local.items()
            for moment in MOMENTS
        }

    def restore(self, steps: int) -> None:
        """Continue after ``steps`` updates; the moments were loaded into ``state_tensors``."""
        self.steps = steps
        for local in self.local.values():
            self.optimizer.state[local]["step"].fill_(steps)
        for group in self.optimizer.param_groups:
            if "step" in group:  # apex counts per group
                group["step"] = steps


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
