"""Position-wise feed-forward layers: [B, S, D] to [B, S, D].

``FeedForward(config, dim, layer, layers)``: the block's global index and the model's depth, for
those that differ with depth.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .collectives import axis
from .linear import Linear
from .registry import Registry

FEEDFORWARDS = Registry("feedforward")


def widths(config: Any) -> dict[str, int]:
    """Hidden widths that tensor parallelism divides, by name of the config's field."""
    names = ("hidden", "shared_hidden", "dense_hidden")
    return {name: getattr(config, name) for name in names if getattr(config, name, None)}


@FEEDFORWARDS.register("swiglu")
class SwiGLU(nn.Module):
    """W_down (SiLU(W_gate x) ⊙ W_up x)  (Shazeer 2020, arXiv 2002.05202, eq. 6)."""

    plan: ClassVar[dict[str, str]] = {
        "gate_proj.weight": "column",
        "up_proj.weight": "column",
        "down_proj.weight": "row",
    }
    region: ClassVar[bool] = True

    @dataclass(frozen=True)
    class Config:
        hidden: int = field(default=512, metadata={"help": "width of the hidden layer"})

        def problems(self) -> list[tuple[str, str]]:
            return [] if self.hidden > 0 else [("hidden", f"must be positive, got {self.hidden}")]

    def __init__(self, config: Config, dim: int, layer: int = 0, layers: int = 1) -> None:
        super().__init__()
        self.gate_proj = Linear(dim, config.hidden)
        self.up_proj = Linear(dim, config.hidden)
        self.down_proj = Linear(config.hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@FEEDFORWARDS.register("geglu")
class GeGLU(SwiGLU):
    """W_down (GELU(W_gate x) ⊙ W_up x)  (Shazeer 2020, arXiv 2002.05202, eq. 6) with the tanh form
    of GELU, as in Gemma."""

    @dataclass(frozen=True)
    class Config(SwiGLU.Config):
        pass

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


@FEEDFORWARDS.register("gelu")
class GELU(nn.Module):
    """W_down GELU(W_up x + b) + c  (Hendrycks & Gimpel 2016, arXiv 1606.08415): the exact GELU and
    no biases, or as asked."""

    plan: ClassVar[dict[str, str]] = {
        "up_proj.weight": "column",
        "up_proj.bias": "column",
        "down_proj.weight": "row",
        "down_bias": "replicated",
    }
    region: ClassVar[bool] = True

    @dataclass(frozen=True)
    class Config(SwiGLU.Config):
        bias: bool = field(default=False, metadata={"help": "learn additive terms"})
        tanh: bool = field(default=False, metadata={"help": "the tanh form of GELU"})

    def __init__(self, config: Config, dim: int, layer: int = 0, layers: int = 1) -> None:
        super().__init__()
        self.approximate = "tanh" if config.tanh else "none"
        self.up_proj = Linear(dim, config.hidden, config.bias)
        self.down_proj = Linear(config.hidden, dim)
        # Not down_proj's own: the ranks' outputs are summed, and one of them adds it.
        self.down_bias = nn.Parameter(torch.empty(dim)) if config.bias else None

    def initial(self, key: str) -> float:
        return 0.0

    def forward(self, x: Tensor) -> Tensor:
        out = self.down_proj(F.gelu(self.up_proj(x), approximate=self.approximate))
        if self.down_bias is None:
            return out
        return out + self.down_bias.to(out.dtype) * (axis("tp").rank == 0)
