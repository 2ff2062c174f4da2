"""The expert layers of one rank in a training step, and what those of all ranks add up to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from models.config import ModelConfig
from models.experts import MoE
from models.routers import ROUTERS

from .apply import ParallelModel

FIGURES = ("kept_mass", "k", "cap_hits", "floor_hits", "budget_gap")
"""Means over tokens that routers report: all of them, or the first by those without a budget."""


@dataclass
class ExpertReport:
    """losses: of each kind, the mean over the global batch's tokens and the expert layers (a block
    of multi-token prediction as often as it is used), before its weight.  total: their weighted sum
    over layers, as it was optimised.  figures: means over the tokens by ``layer/name``, and by
    ``name`` over the layers as well."""

    losses: dict[str, float]
    total: float
    figures: dict[str, float]


def expert_layers(config: ModelConfig) -> list[int]:
    """Global indices of the layers that have experts; those of multi-token prediction come last."""
    experts = config.feedforward
    if not isinstance(experts, MoE.Config):
        return []
    layers = range(config.layers + len(config.mtp.modules))
    return [layer for layer in layers if experts.at(layer) is experts]


class ExpertLayers:
    """Those of one rank; there may be none."""

    def __init__(self, model: ParallelModel) -> None:
        config = model.config.feedforward
        self.mesh, self.all = model.mesh, expert_layers(model.config)
        self.here = {m.layer: m for m in model.part.modules() if isinstance(m, MoE)}
        self.losses: list[str] = []
        self.tokens = 0
        if self.all:
            behind = model.config.layers in self.all and model.config.mtp.kind == "repeated"
            self.uses = len(self.all) + (model.config.mtp.depth - 1 if behind else 0)
            balance = config.balance
            used = {"balance": balance.kind != "none", "router_z": balance.z_loss > 0,
                    "router_entropy": balance.entropy > 0}  # fmt: skip
            self.losses = [name for name, is_used in used.items() if is_used]
            self.experts = config.experts
            self.budgeted = ROUTERS.component(ROUTERS.name_of(type(config.router))).takes_budget  # type: ignore[attr-defined]

    def begin_step(self, tokens: int) -> None:
        """``tokens`` of the global batch."""
        self.tokens = tokens
        for layer in self.here.values():
            layer.begin_step(tokens)

    def report(self) -> ExpertReport:
        """What the step's passes noted, summed over the data and pipeline ranks
        (collective)."""
        names = [*self.losses, "total", "tokens", *FIGURES]
        width = len(names) + self.experts
        table = torch.zeros(len(self.all), width, dtype=torch.float64, device=self.mesh.device)
        for number, layer in enumerate(self.all):
            if layer in self.here:
                table[number] = self._row(self.here[layer].sums, names)
        for axis in ("data", "pp"):
            group = self.mesh.group(axis)
            if group is not None:
                dist.all_reduce(table, group=group)
        sums, counts = table.split([len(names), self.experts], 1)
        columns = dict(zip(names, sums.T.tolist(), strict=True))
        return ExpertReport(
            losses={n: sum(columns[n]) / (self.tokens * self.uses) for n in self.losses},
            total=sum(columns["total"]),
            figures=self._figures(columns, counts),
        )

    def _row(self, sums: dict[str, Tensor], names: list[str]) -> Tensor:
        zero = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        counts = sums.get("counts", zero.expand(self.experts)).double()
        return torch.cat((torch.stack([sums.get(name, zero).double() for name in names]), counts))

    def _figures(self, columns: dict[str, list[float]], counts: Tensor) -> dict[str, float]:
        known = FIGURES if self.budgeted else ("kept_mass",)
        found: dict[str, list[float]] = {name: [] for name in ("active", "load_cv", *known)}
        for number, used in enumerate(counts):
            tokens = max(columns["tokens"][number], 1)
            found["active"].append(float(used.sum()) / tokens)
            mean = max(float(used.mean()), 1e-12)
            found["load_cv"].append(float(used.std(correction=0)) / mean)
            for name in known:
                found[name].append(columns[name][number] / tokens)
        figures = {name: sum(values) / len(values) for name, values in found.items()}
        for name, values in found.items():
            figures |= {f"{layer}/{name}": v for layer, v in zip(self.all, values, strict=True)}
        return figures
