"""The routers: how many experts a token uses, which, and with what gates."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .lapsum import lapsum
from .routing import ROUTERS, Router, Routing

__all__ = ["ROUTERS", "Router", "Routing"]

Problems = list[tuple[str, str]]

ROUNDING = 1e-5
"""What rounding may add to alpha·k without opening a further place: 2 · 1.5000001 is 3."""


def top_map(scores: Tensor, k: int) -> Tensor:
    """bool, True at the k largest of the last dim."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(k).indices, True)


def ranks(scores: Tensor) -> Tensor:
    """Place of each element in descending order of the last dim, 0 first; ties: lower index."""
    return scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)


def _range(name: str, value: float, low: float, high: float) -> Problems:
    return [] if low <= value <= high else [(name, f"must lie in {low} to {high}, got {value}")]


@ROUTERS.register("topk")
class TopK(Router):
    """The k experts with the largest logits.

    gates: ``softmax``, their part of the softmax over all experts (Fedus et al. 2021, Switch,
    arXiv 2101.03961, eq. 1); ``renormalised``, that divided by its sum (as Mixtral and Qwen3-MoE
    do); ``selected``, a softmax over the selected logits alone (Jiang et al. 2024, Mixtral, arXiv
    2401.04088, section 2.1), the same up to rounding.
    """

    @dataclass(frozen=True)
    class Config:
        k: int = field(default=2, metadata={"help": "active experts per token"})
        gates: Literal["softmax", "renormalised", "selected"] = field(
            default="renormalised", metadata={"help": "how the gates are made"}
        )

        def problems(self) -> Problems:
            return [] if self.k > 0 else [("k", f"must be positive, got {self.k}")]

        def problems_with(self, experts: int) -> Problems:
            return _range("k", self.k, 1, experts)

    @property
    def max_active(self) -> int:
        return self.config.k

    def select(self, logits: Tensor, values: Tensor, k: Tensor | None) -> Tensor:
        return top_map(logits, self.config.k)

    def weigh(self, logits: Tensor, values: Tensor, map: Tensor) -> Tensor:
        if self.config.gates == "selected":
            return logits.masked_fill(~map, -torch.inf).softmax(-1)
        gates = values.masked_fill(~map, 0.0)
        return gates / gates.sum(-1, keepdim=True) if self.config.gates != "softmax" else gates


@ROUTERS.register("sigmoid")
class Sigmoid(Router):
    """DeepSeek-V3's router (arXiv 2412.19437, section 2.1.2): sigmoid scores; the k largest of
    score + bias, from the ``top_groups`` groups whose two best add up to most; gates from the
    scores alone.

    Balanced without a loss: after every step each bias moves by ±``bias_rate``, up where an expert
    had less than the mean load of the global batch, down where it had more (arXiv 2408.15664).
    """

    selection_bias: Tensor

    @dataclass(frozen=True)
    class Config:
        k: int = field(default=2, metadata={"help": "active experts per token"})
        groups: int = field(default=1, metadata={"help": "equal groups of experts"})
        top_groups: int = field(default=1, metadata={"help": "groups that a token may use"})
        normalise: bool = field(default=True, metadata={"help": "divide gates by their sum"})
        scaling: float = field(default=1.0, metadata={"help": "factor of the gates"})
        bias_rate: float = field(
            default=1e-3, metadata={"help": "step of the balancing bias; 0 = leave it"}
        )

        def problems(self) -> Problems:
            found: Problems = [
                (name, f"must be positive, got {getattr(self, name)}")
                for name in ("k", "groups", "scaling")
                if getattr(self, name) <= 0
            ]
            if self.bias_rate < 0:
                found.append(("bias_rate", f"must not be negative, got {self.bias_rate}"))
            return found + _range("top_groups", self.top_groups, 1, max(1, self.groups))

        def problems_with(self, experts: int) -> Problems:
            if experts % self.groups:
                return [("groups", f"must divide the {experts} experts, got {self.groups}")]
            size = experts // self.groups
            if self.groups > 1 and size < 2:
                return [("groups", f"must leave at least 2 experts in a group, got {self.groups}")]
            return _range("k", self.k, 1, size * self.top_groups)

    def __init__(
        self, config: Config, dim: int, experts: int, carries_activity: bool = False
    ) -> None:
        super().__init__(config, dim, experts, carries_activity)
        self.carry("selection_bias", experts)

    def initial(self, key: str) -> float | None:
        return 0.0 if key == "selection_bias" else super().initial(key)

    @property
    def max_active(self) -> int:
        return self.config.k

    def values(self, logits: Tensor, k: Tensor | None) -> Tensor:
        return logits.sigmoid()

    def select(self, logits: Tensor, values: Tensor, k: Tensor | None) -> Tensor:
        scores, config = values + self.selection_bias, self.config
        if config.top_groups < config.groups:
            grouped = scores.unflatten(-1, (config.groups, -1))
            best = top_map(grouped.topk(2).values.sum(-1), config.top_groups)
            scores = grouped.masked_fill(~best[..., None], -torch.inf).flatten(-2)
        return top_map(scores, config.k)

    def weigh(self, logits: Tensor, values: Tensor, map: Tensor) -> Tensor:
        gates = values.masked_fill(~map, 0.0)
        if self.config.normalise:
            gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
        return gates * self.config.scaling

    def probabilities(self, logits: Tensor, values: Tensor) -> Tensor:
        return values / (values.sum(-1, keepdim=True) + 1e-20)

    def observe(self, activity: Tensor) -> None:
        self.selection_bias += self.config.bias_rate * (activity.mean() - activity).sign()


@ROUTERS.register("relu")
class ReLU(Router):
    """ReMoE (Wang et al. 2024, arXiv 2412.14711): gates relu(logits), active where positive.

    What keeps them sparse is the balancing loss with the gates as its probabilities and ``k`` as
    its active experts: the L1 norm of the gates, each expert's weighted with its use.  Its weight
    ``coefficient`` is state: after every step it is multiplied by ``growth`` if more than ``k``
    experts were active, and divided by it if fewer.
    """

    coefficient: Tensor

    @dataclass(frozen=True)
    class Config:
        k: float = field(default=2.0, metadata={"help": "mean active experts to aim at"})
        coefficient: float = field(default=1e-8, metadata={"help": "first weight of the L1 term"})
        growth: float = field(default=1.2, metadata={"help": "factor of the weight per step"})

        def problems(self) -> Problems:
            found: Problems = [
                (name, f"must be positive, got {getattr(self, name)}")
                for name in ("k", "coefficient")
                if getattr(self, name) <= 0
            ]
            if self.growth <= 1:
                found.append(("growth", f"must exceed 1, got {self.growth}"))
            return found

        def problems_with(self, experts: int) -> Problems:
            return [] if self.k < experts else [("k", f"must be below {experts}, got {self.k}")]

    def __init__(
        self, config: Config, dim: int, experts: int, carries_activity: bool = False
    ) -> None:
        super().__init__(config, dim, experts, carries_activity)
        self.carry("coefficient")
        self.balance_active = config.k

    def initial(self, key: str) -> float | None:
        if key == "activity":
            return self.config.k / self.experts
        return self.config.coefficient if key == "coefficient" else None

    @property
    def balance_weight(self) -> Tensor | None:
        return self.coefficient

    def values(self, logits: Tensor, k: Tensor | None) -> Tensor:
        return logits.relu()

    def select(self, logits: Tensor, values: Tensor, k: Tensor | None) -> Tensor:
        return values > 0

    def observe(self, activity: Tensor) -> None:
        excess = (activity.sum() - self.config.k).sign()
        self.coefficient *= self.config.growth**excess


@ROUTERS.register("top_p")
class TopP(Router):
    """The most probable experts that together reach probability ``p`` (Huang et al. 2024, arXiv
    2403.07652), at most ``most`` of them; gates are their probabilities."""

    @dataclass(frozen=True)
    class Config:
        p: float = field(default=0.4, metadata={"help": "probability that they reach together"})
        most: int | None = field(default=None, metadata={"help": "cap; null for none"})
        renormalise: bool = field(default=False, metadata={"help": "divide gates by their sum"})

        def problems(self) -> Problems:
            found = [] if 0 < self.p <= 1 else [("p", f"must lie in (0, 1], got {self.p}")]
            if self.most is not None and self.most < 1:
                found.append(("most", f"must be positive, got {self.most}"))
            return found

        def problems_with(self, experts: int) -> Problems:
            return [] if self.most is None else _range("most", self.most, 1, experts)

    @property
    def max_active(self) -> int:
        return self.config.most or self.experts

    def select(self, logits: Tensor, values: Tensor, k: Tensor | None) -> Tensor:
        order = logits.argsort(dim=-1, descending=True, stable=True)
        sorted_values = values.gather(-1, order)
        before = sorted_values.cumsum(-1) - sorted_values
        before[..., self.max_active :] = torch.inf
        return torch.zeros_like(values, dtype=torch.bool).scatter_(
            -1, order, before < self.config.p
        )

    def weigh(self, logits: Tensor, values: Tensor, map: Tensor) -> Tensor:
        gates = values.masked_fill(~map, 0.0)
        return gates / gates.sum(-1, keepdim=True) if self.config.renormalise else gates


@ROUTERS.register("lapsum")
class LapSum(Router):
    """SoftMoE (Zasada et al. 2026, arXiv 2606.17952): LapSum gates that add up to k, of which those
    below ``threshold``·k/n are dropped; at most ceil(``expansion``·k) are kept, and at least one.
    What is kept is not renormalised.

    k is a sum of gates, not a number of experts: how many are active depends on the spread of the
    logits, and has to be reported.  ``learned``: k is this layer's part of a budget that layers
    share and ``k`` their mean.  The Laplace scale is constant, or falls from ``scale`` to
    ``final_scale`` along half a cosine over ``scale_steps`` updates (then it is state).
    """

    takes_budget: ClassVar[bool] = True
    scale: Tensor

    @dataclass(frozen=True)
    class Config:
        k: float = field(default=1.5, metadata={"help": "sum of the gates before dropping"})
        learned: bool = field(default=False, metadata={"help": "learn the split of k over layers"})
        threshold: float = field(default=1.8, metadata={"help": "c: drop gates below c·k/n"})
        expansion: float = field(
            default=2.0, metadata={"help": "alpha: keep ceil(alpha·k) at most"}
        )
        scale: float = field(default=1.0, metadata={"help": "scale of the Laplace law"})
        final_scale: float | None = field(
            default=None, metadata={"help": "scale after scale_steps; null: constant"}
        )
        scale_steps: int = field(default=0, metadata={"help": "updates until final_scale"})

        def problems(self) -> Problems:
            found: Problems = [
                (name, f"must be positive, got {value}")
                for name in ("k", "scale", "final_scale")
                if (value := getattr(self, name)) is not None and value <= 0
            ]
            if self.threshold < 0:
                found.append(("threshold", f"must not be negative, got {self.threshold}"))
            if self.expansion < 1:
                found.append(("expansion", f"must be at least 1, got {self.expansion}"))
            if (self.final_scale is None) != (self.scale_steps == 0) or self.scale_steps < 0:
                final = "null" if self.final_scale is None else self.final_scale
                wanted = "be 0" if self.final_scale is None else "be positive"
                text = f"must {wanted} with final_scale={final}, got {self.scale_steps}"
                found.append(("scale_steps", text))
            if self.learned and self.k <= 1:
                found.append(("k", f"must exceed 1 to be split over layers, got {self.k}"))
            return found

        def problems_with(self, experts: int) -> Problems:
            most = self.most(experts) if self.learned else experts
            if not self.k < most:
                return [("k", f"must be below {most:g}, got {self.k}")]
            if self.threshold * self.k < experts:
                return []
            text = f"must be below experts / k = {experts / self.k:.3g}, got {self.threshold}: no "
            return [("threshold", text + "gate could reach c·k/n, and no token two experts")]

        def most(self, experts: int) -> float:
            """Largest k of a layer under a learned budget: where the cap is all experts."""
            return experts / self.expansion

    def __init__(
        self, config: Config, dim: int, experts: int, carries_activity: bool = False
    ) -> None:
        super().__init__(config, dim, experts, carries_activity)
        if config.final_scale is not None:
            self.carry("scale")

    def initial(self, key: str) -> float | None:
        return self.config.scale if key == "scale" else super().initial(key)

    @property
    def max_active(self) -> int:
        if self.config.learned:
            return self.experts
        return min(self.experts, math.ceil(self.config.expansion * self.config.k - ROUNDING))

    def _k(self, k: Tensor | None, like: Tensor) -> Tensor:
        given = like.new_tensor(self.config.k) if k is None else k
        return given.to(like.dtype)

    def values(self, logits: Tensor, k: Tensor | None) -> Tensor:
        scale = self.scale if "scale" in self.state else self.config.scale
        return lapsum(logits, self._k(k, logits), scale)

    def select(self, logits: Tensor, values: Tensor, k: Tensor | None) -> Tensor:
        k = self._k(k, values)
        cap = (self.config.expansion * k - ROUNDING).ceil()
        place = ranks(logits)  # gates have its order, but may be equal where they saturate
        wanted = values >= self.config.threshold * k / self.experts
        return (place < cap) & (wanted | (place == 0))

    def probabilities(self, logits: Tensor, values: Tensor) -> Tensor:
        return logits.softmax(-1)

    def figures(
        self, gates: Tensor, values: Tensor, map: Tensor, k: Tensor | None
    ) -> dict[str, Tensor]:
        """Besides: k; cap_hits and floor_hits, shares of the tokens that lost an expert to the cap
        or kept one for the floor's sake; budget_gap, active experts beyond k."""
        k = self._k(k, values)
        wanted = (values >= self.config.threshold * k / self.experts).sum(-1)
        active = map.sum(-1)
        return {
            "kept_mass": gates.sum(-1).mean(),
            "k": k.clone(),
            "cap_hits": (wanted > active).to(values.dtype).mean(),
            "floor_hits": (wanted < active).to(values.dtype).mean(),
            "budget_gap": active.to(values.dtype).mean() - k,
        }

    def update_state(self, step: int) -> None:
        super().update_state(step)
        if "scale" in self.state:
            first, last = self.config.scale, self.config.final_scale
            done = min(1.0, step / self.config.scale_steps)
            self.scale.fill_(last + (first - last) * (1 + math.cos(math.pi * done)) / 2)
