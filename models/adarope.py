"""Learned rotary frequencies and learned attention temperatures (AdaRoPE, LeRoPE)."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .collectives import axis
from .linear import accumulation_dtype
from .rotary import FixedTable, HeadShape, LearnedRotation, PositionContext

Granularity = Literal["none", "global", "layer", "kv_head"]
Temperature = Literal["none", "context", "query", "power"]
LOG_POWER_LIMIT = math.log(4)  # the power form stays within [1/4, 4]


class LogScale(nn.Module):
    """ξ [tables, pairs]: the logarithm of learned frequencies over those of the start table, so 0
    at the start.  On its own where all layers share one table."""

    plan: ClassVar[dict[str, str]] = {"log_scale": "partial"}
    wide: ClassVar[tuple[str, ...]] = ("log_scale",)
    optimizer_group: ClassVar[dict[str, str]] = {"log_scale": "position"}

    def __init__(self, tables: int, pairs: int) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.empty(tables, pairs))

    def initial(self, key: str) -> float:
        return 0.0


class LearnedTable(FixedTable):
    """Rotation by θ = θ₀ · exp(ξ), and queries times a temperature λ.

    ``granularity`` says who shares a row of ξ: all layers (``global``), all heads of a layer, or a
    key/value head and its queries; with ``none`` θ is θ₀.  With x = ln(max(n, L₀) / L₀), λ of query
    head h is, by form,

        query    1 + β_h x, n = keys that the query may attend to
        context  1 + β_h x, n = the largest such number of the sequence
        power    exp(β_h x^(1 + softplus γ_h)), n as in ``context``, clamped to [1/4, 4]

    Keys do not depend on n, so they can be cached, and only ``query`` computes for a token what it
    computed before more tokens came.  ``table``: a TableConfig, of θ₀.
    """

    wide: ClassVar[tuple[str, ...]] = ("log_scale", "beta", "gamma")
    optimizer_group: ClassVar[dict[str, str]] = {
        "log_scale": "position",
        "beta": "position",
        "gamma": "position",
    }

    def __init__(
        self,
        config: Any,
        shape: HeadShape,
        granularity: Granularity,
        temperature: Temperature = "none",
        reference_length: int = 1,
    ) -> None:
        super().__init__(config.start, shape)
        self.granularity, self.temperature = granularity, temperature
        self.reference_length = reference_length
        self.plan = {"beta": "head", "gamma": "head"}  # type: ignore[misc]
        self.plan["log_scale"] = "head" if granularity == "kv_head" else "replicated"
        self._shared: tuple[LogScale, ...] = ()
        if granularity in ("layer", "kv_head"):
            tables = shape.kv_heads if granularity == "kv_head" else 1
            self.log_scale = nn.Parameter(torch.empty(tables, shape.head_dim // 2))
        if temperature != "none":
            self.beta = nn.Parameter(torch.empty(shape.heads))
        if temperature == "power":
            self.gamma = nn.Parameter(torch.empty(shape.heads))

    def initial(self, key: str) -> float:
        return 0.0

    def use_shared(self, shared: nn.ModuleDict) -> None:
        if self.granularity == "global":
            if "position" not in shared:
                shared["position"] = LogScale(1, self.shape.head_dim // 2)
            module = shared["position"]
            assert isinstance(module, LogScale)
            self._shared = (module,)

    def frequencies(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """θ [tables, pairs], with its gradient."""
        start: Tensor = self.config.frequencies(self.shape.head_dim, dtype, device)
        if self.granularity == "none":
            return start[None]
        holder = self._shared[0] if self.granularity == "global" else self
        log_scale: Tensor = holder.log_scale
        return start * log_scale.to(dtype).exp()

    def scale(self, queries: int, dtype: torch.dtype, context: PositionContext) -> Tensor | None:
        """λ [B or 1, S or 1, H], with its gradient; None for 1."""
        if self.temperature == "none":
            return None
        beta = self.beta.to(dtype)
        count = context.visible_keys(queries, beta.device)
        if self.temperature != "query":
            count = count.amax(-1, keepdim=True)
        x = (count.to(dtype) / self.reference_length).clamp(min=1).log()
        x = (x if x.dim() == 2 else x.unsqueeze(0)).unsqueeze(-1)
        if self.temperature != "power":
            return 1 + beta * x
        logarithm = beta * x ** (1 + F.softplus(self.gamma.to(dtype)))
        return logarithm.clamp(-LOG_POWER_LIMIT, LOG_POWER_LIMIT).exp()

    def rotate(self, q: Tensor, k: Tensor, context: PositionContext) -> tuple[Tensor, Tensor]:
        if self.granularity == self.temperature == "none":
            return super().rotate(q, k, context)
        dtype = accumulation_dtype(q.dtype)
        theta = self.frequencies(dtype, q.device)
        scale = self.scale(q.shape[1], dtype, context)
        reference, magnitude = middle(context), self.config.magnitude()
        positions = context.positions
        out: tuple[Tensor, Tensor] = LearnedRotation.apply(
            q, k, theta, scale, positions, reference, magnitude
        )
        return out


def middle(context: PositionContext) -> Tensor:
    """Halfway between the first and the last position of each sequence, int64 [1] or [B, 1]."""
    if "middle" not in context.cache:
        positions = context.positions
        ends = torch.stack([positions.amax(-1), -positions.amin(-1)])
        last, first = axis("cp").max_(ends).unbind(0)
        context.cache["middle"] = (last - first).div(2, rounding_mode="floor").unsqueeze(-1)
    found: Tensor = context.cache["middle"]
    return found
