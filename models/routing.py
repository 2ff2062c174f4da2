"""What every router is made of.

A router maps x [T, D] to a :class:`Routing`; every token is routed alone, so routing is causal and
does not depend on the batch.  Logits are made in at least fp32 from weights that are never cast to
the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .collectives import axis
from .linear import accumulation_dtype
from .registry import Registry

ROUTERS = Registry("router")


@dataclass
class Routing:
    """What a router decided for T tokens and E experts.

    map: bool [T, E], the active experts.  gates: [T, E] in at least fp32, exactly 0 where not
    active, differentiable.  logits: [T, E] in at least fp32, before any selection.  probabilities:
    [T, E], what a balancing loss pushes around, differentiable.  figures: detached scalars for
    the log, means over the tokens.
    """

    map: Tensor
    gates: Tensor
    logits: Tensor
    probabilities: Tensor
    figures: dict[str, Tensor]


class Router(nn.Module):
    """Base of all routers: ``Router(config, dim, experts)``.

    A router defines ``values`` (from logits to what gates are made of), ``select`` (which experts,
    without gradient) and, where gates are more than values, ``weigh``.

    carries_activity: keep ``activity`` [E], the share of the previous step's tokens that used each
    expert, as state; its sum is the mean number of active experts.
    """

    plan: ClassVar[dict[str, str]] = {"weight": "replicated"}
    wide: ClassVar[tuple[str, ...]] = ("weight",)
    takes_budget: ClassVar[bool] = False
    balance_active: float | None = None
    """Active experts that the balancing loss divides by; None: those that were really active."""

    def __init__(self, config: Any, dim: int, experts: int, carries_activity: bool = False) -> None:
        super().__init__()
        self.config, self.experts = config, experts
        self.weight = nn.Parameter(torch.empty(experts, dim))
        self.state: tuple[str, ...] = ()
        self._counts: Tensor | None = None
        if carries_activity:
            self.carry("activity", experts)

    def carry(self, name: str, *shape: int) -> None:
        """Add a persistent buffer that is state."""
        self.register_buffer(name, torch.empty(shape))
        self.state = (*self.state, name)

    def initial(self, key: str) -> float | None:
        return self.max_active / self.experts if key == "activity" else None

    @property
    def max_active(self) -> int:
        """Upper bound of the active experts of a token."""
        return self.experts

    @property
    def balance_weight(self) -> Tensor | None:
        """Weight of the balancing loss where the router adapts it; None: the configured one."""
        return None

    def forward(self, x: Tensor, k: Tensor | None = None) -> Routing:
        """x [T, D]; k: 0-dim, this layer's part of a learned budget (None: a constant)."""
        assert k is None or self.takes_budget, f"{type(self).__name__} takes no budget"
        dtype = accumulation_dtype(torch.promote_types(x.dtype, self.weight.dtype))
        logits = F.linear(x.to(dtype), self.weight.to(dtype))
        values = self.values(logits, k)
        with torch.no_grad():
            map = self.select(logits, values, k)
        gates = self.weigh(logits, values, map)
        with torch.no_grad():
            figures = self.figures(gates, values, map, k)
        return Routing(map, gates, logits, self.probabilities(logits, values), figures)

    def values(self, logits: Tensor, k: Tensor | None) -> Tensor:
        return logits.softmax(-1)

    def select(self, logits: Tensor, values: Tensor, k: Tensor | None) -> Tensor:
        raise NotImplementedError

    def weigh(self, logits: Tensor, values: Tensor, map: Tensor) -> Tensor:
        return values.masked_fill(~map, 0.0)

    def probabilities(self, logits: Tensor, values: Tensor) -> Tensor:
        return values

    def figures(
        self, gates: Tensor, values: Tensor, map: Tensor, k: Tensor | None
    ) -> dict[str, Tensor]:
        """kept_mass: sum of a token's gates."""
        return {"kept_mass": gates.sum(-1).mean()}

    def forget(self) -> None:
        """Begin a step: nothing was counted."""
        self._counts = None

    def count(self, used: Tensor, tokens: int) -> None:
        """Add a micro-batch: used int64 [E], its tokens that used each expert.  To be called once,
        in the backward pass: a forward pass may be repeated (recomputation)."""
        counts = torch.cat((used, used.new_tensor([tokens])))
        self._counts = counts if self._counts is None else self._counts + counts

    def update_state(self, step: int) -> None:
        """Learn from the experts' use in the optimizer step that just ended."""
        if not self.state or self._counts is None:
            self._counts = None
            return
        counts, self._counts = self._counts, None
        for name in ("cp", "dp"):  # tokens are whole on every rank of tp
            counts = axis(name).sum_(counts)
        activity = counts[:-1].to(self.weight.dtype) / counts[-1]
        if "activity" in self.state:
            self.get_buffer("activity").copy_(activity)
        self.observe(activity)

    def observe(self, activity: Tensor) -> None:
        """Move state on.  activity [E]: share of the step's tokens that used each expert."""
