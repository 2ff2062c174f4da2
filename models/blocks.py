"""Where norms and residual connections sit around attention and the feed-forward layer.

A block maps [B, S, D] to [B, S, D] and is built from its parts, so a placement is one small class.
Below, A is attention, F the feed-forward layer, N a norm, L the number of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .attention import SequenceContext
from .norm_functions import mean_square
from .norms import BHyT, Role
from .registry import Registry

BLOCKS = Registry("block")

NormFactory = Callable[[Role], nn.Module]
Problems = list[tuple[str, str]]


def block_class(config: Any) -> type[Block]:
    """The registered class that ``config`` belongs to."""
    return BLOCKS.component(BLOCKS.name_of(type(config)))


class Block(nn.Module):
    """Parts shared by every placement.

    final_norm: whether the last block's output still needs normalising.  head_norms: which of q, k
    and v are normalised per head whatever the attention's own setting.  wide_from: number of blocks
    from which the residual stream should be kept in float32 (updates are then so small beside it
    that rounding to bf16 would swallow a quarter of them).

    layer: the block's global index, at least ``layers`` behind the trunk.  layers: the depth of the
    model.  norm: builds the norm of a role.
    """

    final_norm: ClassVar[bool] = True
    head_norms: ClassVar[str] = ""
    wide_from: ClassVar[int | None] = None

    def __init__(
        self, config: Any, layer: int, layers: int, attention: nn.Module,
        feedforward: nn.Module, norm: NormFactory,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.layer, self.layers = config, layer, layers
        self.attention_norm: nn.Module | None = norm("attention")
        self.attention = attention
        self.feedforward_norm = norm("feedforward")
        self.feedforward = feedforward
        self.add_parts(norm)

    def add_parts(self, norm: NormFactory) -> None:
        """What a placement has besides."""

    @classmethod
    def shrink(cls, layers: int) -> dict[str, float]:
        """Linear maps (their last name) whose initial weights are divided by a factor."""
        return dict.fromkeys(OUTPUTS, math.sqrt(2 * layers))

    @classmethod
    def last_norm(cls, config: Any, norm: nn.Module, dim: int) -> nn.Module:
        """What is behind the last block, made of the model's norm."""
        return norm

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        raise NotImplementedError


OUTPUTS = ("o_proj", "down_proj")
"""Linear maps that write to the residual stream."""


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    out: Tensor = x if norm is None else norm(x)
    return out


def _pre(block: Block, x: Tensor, context: SequenceContext) -> Tensor:
    x = x + block.attention(_normed(block.attention_norm, x), context)
    out: Tensor = x + block.feedforward(block.feedforward_norm(x))
    return out


def _post(block: Block, x: Tensor, context: SequenceContext, alpha: float = 1) -> Tensor:
    x = _normed(block.attention_norm, torch.add(block.attention(x, context), x, alpha=alpha))
    out: Tensor = block.feedforward_norm(torch.add(block.feedforward(x), x, alpha=alpha))
    return out


@BLOCKS.register("pre")
class PreNormBlock(Block):
    """x + A(N(x)), then x + F(N(x))  (Xiong et al. 2020, arXiv 2002.04745, figure 1b)."""

    @dataclass(frozen=True)
    class Config:
        pass

    def add_parts(self, norm: NormFactory) -> None:
        second = self.feedforward_norm
        self.variance = second.after(self.attention) if isinstance(second, BHyT) else None

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        if self.variance is None:
            return _pre(self, x, context)
        first, square = self.attention_norm, mean_square(x)
        assert isinstance(first, BHyT)
        h = x + self.attention(first(x, square), context)
        estimate = self.variance(square, first.gain(square.dtype))
        out: Tensor = h + self.feedforward(self.feedforward_norm(h, estimate))
        return out


@BLOCKS.register("lns")
class LayerNormScalingBlock(Block):
    """Pre with every norm's output divided by √l in block l = 1 … L  (Sun et al. 2025,
    arXiv 2502.05795)."""

    @dataclass(frozen=True)
    class Config:
        pass

    @classmethod
    def shrink(cls, layers: int) -> dict[str, float]:
        return {}  # the norms do the shrinking

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        scale = 1 / math.sqrt(self.layer + 1)
        x = x + self.attention(_normed(self.attention_norm, x) * scale, context)
        out: Tensor = x + self.feedforward(self.feedforward_norm(x) * scale)
        return out


@BLOCKS.register("post")
class PostNormBlock(Block):
    """N(x + A(x)), then N(x + F(x))  (Vaswani et al. 2017, arXiv 1706.03762, section 3.1)."""

    final_norm = False

    @dataclass(frozen=True)
    class Config:
        pass

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        return _post(self, x, context)


@BLOCKS.register("deepnorm")
class DeepNormBlock(Block):
    """N(αx + A(x)), then N(αx + F(x)) with α = (2L)^¼; v, o, up and down start (8L)^¼ times smaller
    (Wang et al. 2022, arXiv 2203.00555, decoder-only; the gate of a GLU keeps its size)."""

    final_norm = False
    wide_from = 64

    @dataclass(frozen=True)
    class Config:
        pass

    @classmethod
    def shrink(cls, layers: int) -> dict[str, float]:
        return dict.fromkeys(("v_proj", "up_proj", *OUTPUTS), (8 * layers) ** 0.25)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        return _post(self, x, context, (2 * self.layers) ** 0.25)


@BLOCKS.register("mixln")
class MixNormBlock(Block):
    """Post in the first blocks, pre in the others  (Li et al. 2024, arXiv 2412.13795)."""

    @dataclass(frozen=True)
    class Config:
        post_fraction: float = field(
            default=0.25, metadata={"help": "share of the blocks, from the first, that are post"}
        )

        def problems(self) -> Problems:
            inside = 0 <= self.post_fraction <= 1
            text = f"must be 0 to 1, got {self.post_fraction}"
            return [] if inside else [("post_fraction", text)]

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        posts = self.config.post_fraction * self.layers + 1e-9  # 0.7 of 10 blocks are 7
        return (_post if self.layer + 1 <= posts else _pre)(self, x, context)


@BLOCKS.register("span")
class SpanNormBlock(Block):
    """y = N(αx + A(x)), then N(αx + F(y)): the second residual starts at the block's input.  The
    first block's attention reads N(x)  (arXiv 2601.22580, wiring from a third party's code)."""

    final_norm = False

    @dataclass(frozen=True)
    class Config:
        residual_alpha: float = field(
            default=1.0, metadata={"help": "factor on the block's input in both sums"}
        )

        def problems(self) -> Problems:
            value = self.residual_alpha
            return [] if value > 0 else [("residual_alpha", f"must be positive, got {value}")]

    def add_parts(self, norm: NormFactory) -> None:
        self.input_norm = norm("attention") if self.layer == 0 else None

    @classmethod
    def shrink(cls, layers: int) -> dict[str, float]:
        return dict.fromkeys(OUTPUTS, math.sqrt(layers))

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        alpha = self.config.residual_alpha
        branch = self.attention(_normed(self.input_norm, x), context)
        y = _normed(self.attention_norm, torch.add(branch, x, alpha=alpha))
        out: Tensor = self.feedforward_norm(torch.add(self.feedforward(y), x, alpha=alpha))
        return out


class _DoubleNormBlock(Block):
    """A second norm behind each layer."""

    @classmethod
    def shrink(cls, layers: int) -> dict[str, float]:
        return {}  # the norms behind the layers would undo it

    def add_parts(self, norm: NormFactory) -> None:
        self.attention_output_norm = norm("attention")
        self.feedforward_output_norm = norm("feedforward")


@BLOCKS.register("peri")
class PeriNormBlock(_DoubleNormBlock):
    """x + N(A(N(x))), then x + N(F(N(x)))  (sandwich: Ding et al. 2021, arXiv 2105.13290; peri:
    Kim et al. 2025, arXiv 2502.02732)."""

    @dataclass(frozen=True)
    class Config:
        embedding_norm: bool = field(
            default=False, metadata={"help": "normalise what the first block reads"}
        )

    def add_parts(self, norm: NormFactory) -> None:
        super().add_parts(norm)
        first = self.config.embedding_norm and self.layer == 0
        self.embedding_norm = norm("embedding") if first else None

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        x = _normed(self.embedding_norm, x)
        branch = self.attention(_normed(self.attention_norm, x), context)
        x = x + self.attention_output_norm(branch)
        branch = self.feedforward(self.feedforward_norm(x))
        out: Tensor = x + self.feedforward_output_norm(branch)
        return out


@BLOCKS.register("keel")
class KeelBlock(_DoubleNormBlock):
    """N(αx + A(N(x))), then N(αx + F(N(x)))  (Chen & Wei 2026, arXiv 2601.19895)."""

    final_norm = False
    wide_from = 64

    @dataclass(frozen=True)
    class Config:
        alpha: float | None = field(
            default=None, metadata={"help": "factor on the residual; null for 2 · layers"}
        )

        def problems(self) -> Problems:
            good = self.alpha is None or self.alpha > 0
            return [] if good else [("alpha", f"must be positive, got {self.alpha}")]

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        alpha = 2 * self.layers if self.config.alpha is None else self.config.alpha
        branch = self.attention(_normed(self.attention_norm, x), context)
        x = self.attention_output_norm(torch.add(branch, x, alpha=alpha))
        branch = self.feedforward(self.feedforward_norm(x))
        out: Tensor = self.feedforward_output_norm(torch.add(branch, x, alpha=alpha))
        return out


@BLOCKS.register("reordered")
class ReorderedNormBlock(Block):
    """x + N(A(x)), then x + N(F(x))  (OLMo 2, arXiv 2501.00656; it normalises q and k
    too: attention.qk_norm)."""

    @dataclass(frozen=True)
    class Config:
        pass

    @classmethod
    def shrink(cls, layers: int) -> dict[str, float]:
        return {}  # the norms behind the layers would undo it

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        x = x + _normed(self.attention_norm, self.attention(x, context))
        out: Tensor = x + self.feedforward_norm(self.feedforward(x))
        return out


@BLOCKS.register("hybrid")
class HybridNormBlock(Block):
    """z = N(x + A(x)) with q, k and v normalised per head, then z + F(z)  (Zhuo et al. 2025,
    arXiv 2503.04598)."""

    head_norms = "qkv"

    @dataclass(frozen=True)
    class Config:
        pass

    def add_parts(self, norm: NormFactory) -> None:
        self.attention_norm = None

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        z = self.feedforward_norm(x + self.attention(x, context))
        out: Tensor = z + self.feedforward(z)
        return out


@BLOCKS.register("hybrid_star")
class HybridStarNormBlock(HybridNormBlock):
    """Hybrid, but the first block is pre, its heads normalised all the same  (arXiv 2503.04598)."""

    @dataclass(frozen=True)
    class Config:
        pass

    def add_parts(self, norm: NormFactory) -> None:
        if self.layer > 0:
            super().add_parts(norm)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        return _pre(self, x, context) if self.layer == 0 else super().forward(x, context)
