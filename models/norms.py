"""Normalisations over the last dimension.

``Norm(config, dim, site)`` maps [..., dim] to [..., dim]; statistics are taken in at least fp32 and
the result has the input's dtype.  ``plan`` names how each parameter is stored under tensor
parallelism, ``roles`` where the norm can stand (elsewhere its model has a plain RMS norm), and
``placements`` the blocks that it goes with (none named: all).
Learned scalars have shape [1], stay wide, and their gradients are accumulated in at least fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .collectives import axis
from .linear import accumulation_dtype
from .norm_functions import mean_square, rms_normalised, squashed
from .registry import Registry

NORMS = Registry("norm")

Problems = list[tuple[str, str]]
Role = Literal["attention", "feedforward", "final", "input", "embedding", "head", "projection"]
EVERYWHERE: tuple[Role, ...] = (
    "attention", "feedforward", "final", "input", "embedding", "head", "projection",
)  # fmt: skip


@dataclass(frozen=True)
class Site:
    """Where a norm stands.

    role: in a block, at its attention or its feed-forward layer; behind the last block; on what a
    multi-token-prediction block reads; on the embeddings; inside attention, on one head or on a
    whole projection (of which a rank holds its heads).  layer: the block's global index, at least
    ``layers`` behind the trunk.  layers: the depth of the model.
    """

    role: Role = "feedforward"
    layer: int = 0
    layers: int = 1


def norm_class(config: Any) -> Any:
    """The registered class that ``config`` belongs to."""
    return NORMS.component(NORMS.name_of(type(config)))


def make_norm(config: Any, dim: int, site: Site) -> nn.Module:
    """The norm that a model with norm ``config`` has at ``site``."""
    if site.role not in norm_class(config).roles:
        config = RMSNorm.Config()
    if site.role == "projection":
        return ProjectionRMSNorm(config, dim, site)
    norm: nn.Module = NORMS.build(config, dim, site)
    return norm


def _positive(config: Any, *names: str) -> Problems:
    values = {name: getattr(config, name) for name in names}
    return [(k, f"must be positive, got {v}") for k, v in values.items() if not v > 0]


@NORMS.register("rms")
class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight  (Zhang & Sennrich 2019, arXiv 1910.07467, eq. 4)."""

    plan: ClassVar[dict[str, str]] = {"weight": "replicated"}
    roles: ClassVar[tuple[Role, ...]] = EVERYWHERE
    placements: ClassVar[tuple[str, ...]] = ()

    @dataclass(frozen=True)
    class Config:
        eps: float = field(default=1e-5, metadata={"help": "added to the mean square"})
        gain: float = field(
            default=1.0,
            metadata={"help": "initial weight of the norms of attention and feedforward"},
        )

        def problems(self) -> Problems:
            return _positive(self, "eps", "gain")

    def __init__(self, config: Config, dim: int, site: Site = Site()) -> None:
        super().__init__()
        self.eps = config.eps
        self.gain = config.gain if site.role in ("attention", "feedforward") else 1.0
        self.weight = nn.Parameter(torch.empty(dim))

    def initial(self, key: str) -> float:
        return self.gain

    def forward(self, x: Tensor) -> Tensor:
        return rms_normalised(x, self.weight, self.eps)


class ProjectionRMSNorm(RMSNorm):
    """RMS norm over all heads of a projection at once, of which this rank holds some."""

    plan: ClassVar[dict[str, str]] = {"weight": "head"}

    def forward(self, x: Tensor) -> Tensor:
        return rms_normalised(x, self.weight, self.eps, axis("tp"))


@NORMS.register("layer")
class LayerNorm(nn.Module):
    """(x − mean) / sqrt(var + eps) · weight + bias  (Ba et al. 2016, arXiv 1607.06450, eq. 4)."""

    plan: ClassVar[dict[str, str]] = {"weight": "replicated", "bias": "replicated"}
    roles: ClassVar[tuple[Role, ...]] = EVERYWHERE[:-1]
    placements: ClassVar[tuple[str, ...]] = ()

    @dataclass(frozen=True)
    class Config:
        eps: float = field(default=1e-5, metadata={"help": "added to the variance"})
        bias: bool = field(default=True, metadata={"help": "learn an additive term"})

        def problems(self) -> Problems:
            return _positive(self, "eps")

    def __init__(self, config: Config, dim: int, site: Site = Site()) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if config.bias else None

    def forward(self, x: Tensor) -> Tensor:
        dtype = accumulation_dtype(x.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        weight = self.weight.to(dtype)
        return F.layer_norm(x.to(dtype), weight.shape, weight, bias, self.eps).to(x.dtype)


@NORMS.register("dyt")
class DyT(nn.Module):
    """tanh(alpha · x) · weight + bias  (Zhu et al. 2025, arXiv 2503.10622)."""

    plan: ClassVar[dict[str, str]] = dict.fromkeys(("weight", "bias", "alpha"), "replicated")
    wide: ClassVar[tuple[str, ...]] = ("alpha",)
    optimizer_group: ClassVar[dict[str, str]] = {"alpha": "scalar"}
    roles: ClassVar[tuple[Role, ...]] = ("attention", "feedforward", "final", "input", "embedding")
    placements: ClassVar[tuple[str, ...]] = ()

    @dataclass(frozen=True)
    class Config:
        alpha: float = field(default=0.5, metadata={"help": "initial slope at zero"})
        attention_alpha: float | None = field(
            default=None, metadata={"help": "the same before attention; null for alpha"}
        )
        bias: bool = field(default=True, metadata={"help": "learn an additive term"})

        def problems(self) -> Problems:
            own = () if self.attention_alpha is None else ("attention_alpha",)
            return _positive(self, "alpha", *own)

    def __init__(self, config: Config, dim: int, site: Site = Site()) -> None:
        super().__init__()
        own = site.role == "attention" and config.attention_alpha is not None
        self.initial_alpha = config.attention_alpha if own else config.alpha
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if config.bias else None
        self.alpha = nn.Parameter(torch.empty(1))

    def initial(self, key: str) -> float | None:
        return self.initial_alpha if key == "alpha" else None

    def forward(self, x: Tensor) -> Tensor:
        out = squashed(x, self.alpha, self.weight)
        return out if self.bias is None else out + self.bias.to(x.dtype)


@NORMS.register("derf")
class Derf(DyT):
    """erf(alpha · x + shift) · weight + bias  (Derf: Chen et al. 2025, arXiv 2512.10938)."""

    plan: ClassVar[dict[str, str]] = {**DyT.plan, "shift": "replicated"}
    wide: ClassVar[tuple[str, ...]] = ("alpha", "shift")
    optimizer_group: ClassVar[dict[str, str]] = {"alpha": "scalar", "shift": "scalar"}

    @dataclass(frozen=True)
    class Config(DyT.Config):
        pass

    def __init__(self, config: Config, dim: int, site: Site = Site()) -> None:
        super().__init__(config, dim, site)
        self.shift = nn.Parameter(torch.empty(1))

    def initial(self, key: str) -> float | None:
        return 0.0 if key == "shift" else super().initial(key)

    def forward(self, x: Tensor) -> Tensor:
        out = squashed(x, self.alpha, self.weight, self.shift, "erf")
        return out if self.bias is None else out + self.bias.to(x.dtype)


@NORMS.register("bhyt_exact")
class BHyTExact(nn.Module):
    """tanh(lam / kappa · x / sqrt(mean(x²) + eps)) · weight, with statistics of its own input
    (BHyT*, arXiv 2601.09719)."""

    plan: ClassVar[dict[str, str]] = {"weight": "replicated", "lam": "replicated"}
    wide: ClassVar[tuple[str, ...]] = ("lam",)
    optimizer_group: ClassVar[dict[str, str]] = {"lam": "scalar"}
    roles: ClassVar[tuple[Role, ...]] = ("attention", "feedforward")
    placements: ClassVar[tuple[str, ...]] = ("pre",)

    @dataclass(frozen=True)
    class Config:
        attention_lambda: float = field(
            default=1.0, metadata={"help": "initial lambda of the norm before attention"}
        )
        feedforward_lambda: float = field(
            default=1.0,
            metadata={"help": "initial lambda of the norm before the feed-forward layer"},
        )
        kappa: float = field(
            default=10.0, metadata={"help": "at most a share kappa^-2 of a row exceeds kappa RMS"}
        )
        learn_lambda: bool = field(default=True, metadata={"help": "train lambda"})
        eps: float = field(default=1e-6, metadata={"help": "added to the mean square"})

        def problems(self) -> Problems:
            return _positive(self, "attention_lambda", "feedforward_lambda", "kappa", "eps")

        @property
        def largest_gain(self) -> float:
            return max(self.attention_lambda, self.feedforward_lambda) / self.kappa

    def __init__(self, config: Config, dim: int, site: Site = Site()) -> None:
        super().__init__()
        self.kappa, self.eps = config.kappa, config.eps
        before_attention = site.role == "attention"
        self.first_lam = config.attention_lambda if before_attention else config.feedforward_lambda
        self.weight = nn.Parameter(torch.empty(dim))
        self.lam = nn.Parameter(torch.empty(1)) if config.learn_lambda else None

    def initial(self, key: str) -> float | None:
        return self.first_lam if key == "lam" else None

    def gain(self, dtype: torch.dtype) -> Tensor | float:
        """lambda / kappa: the slope where tanh is straight and the input has unit mean square."""
        lam = self.first_lam if self.lam is None else self.lam.to(dtype)
        return lam / self.kappa

    def forward(self, x: Tensor, square: Tensor | None = None) -> Tensor:
        """x [..., D]; ``square`` [..., 1] in place of the mean square of its rows."""
        square = mean_square(x) if square is None else square
        scale = torch.rsqrt(square + self.eps) * self.gain(square.dtype)
        return squashed(x, scale, self.weight)


@NORMS.register("bhyt")
class BHyT(BHyTExact):
    """The same, but the norm before the feed-forward layer takes no statistics: its mean square is
    estimated from that of the block's input (BHyT, arXiv 2601.09719)."""

    @dataclass(frozen=True)
    class Config(BHyTExact.Config):
        sequence_length: int = field(
            default=1024, metadata={"help": "T of the estimate: tokens per sequence in training"}
        )
        refresh_every: int = field(
            default=100, metadata={"help": "updates between two looks at the weights"}
        )

        def problems(self) -> Problems:
            return super().problems() + _positive(self, "sequence_length", "refresh_every")

    def __init__(self, config: Config, dim: int, site: Site = Site()) -> None:
        super().__init__(config, dim, site)
        self.config = config

    def after(self, attention: nn.Module) -> AttentionVariance:
        """What the estimate needs to know of the attention in front of this norm."""
        return AttentionVariance(self.config, attention)


class AttentionVariance(nn.Module):
    """How much attention adds to the mean square of the residual stream, where it averages evenly
    over T tokens: c · (lambda / kappa)² with c = ‖W_O W_V‖_F² / (T · D).

    c is a state: it follows the weights of ``attention`` every ``refresh_every`` updates.
    """

    state: ClassVar[tuple[str, ...]] = ("c",)
    c: Tensor

    def __init__(self, config: BHyT.Config, attention: nn.Module) -> None:
        super().__init__()
        self.config = config
        self._of = (attention,)  # in a tuple: it is a submodule of the block already
        self.register_buffer("c", torch.empty(1))

    def initial(self, key: str) -> float:
        return 0.0

    def reads_weights(self, step: int) -> bool:
        return step % self.config.refresh_every == 0

    def update_state(self, step: int) -> None:
        if self.reads_weights(step):
            self.c.copy_(self.measured())

    @torch.no_grad()
    def measured(self) -> Tensor:
        """c of the weights as they are.  A rank of a tensor axis has some of the heads; the norm of
        the sum of the ranks' products is not the sum of their norms."""
        attention: Any = self._of[0]
        out, value = (p.weight.to(self.c.dtype) for p in (attention.o_proj, attention.v_proj))
        heads = value.unflatten(0, (-1, attention.head_dim))
        queries = out.shape[1] // value.shape[0]  # per value head
        product = axis("tp").sum_(out @ heads.repeat_interleave(queries, 0).flatten(0, 1))
        return product.square().sum() / (self.config.sequence_length * out.shape[0])

    def forward(self, square: Tensor, gain: Tensor | float) -> Tensor:
        """The mean square behind attention, from that of the block's input and the gain of the norm
        before attention.  No gradient reaches the gain."""
        gain = gain.detach() if isinstance(gain, Tensor) else gain
        return square + self.c.to(square.dtype) * gain**2
