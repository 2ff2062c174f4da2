"""Where norms and residual connections sit around attention and the feed-forward layer.

A block maps [B, S, D] to [B, S, D] and is built from its parts, so a placement is one small class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from .attention import SequenceContext
from .norms import Role
from .registry import Registry

BLOCKS = Registry("block")

NormFactory = Callable[[Role], nn.Module]


class Block(nn.Module):
    """Parts shared by every placement.  ``final_norm`` tells the model whether the last block's
    output still needs normalising.

    layer: the block's global index, at least ``layers`` behind the trunk.  layers: the depth of the
    model.  norm: builds the norm of a role.
    """

    final_norm: ClassVar[bool] = True

    def __init__(
        self, config: Any, layer: int, layers: int, attention: nn.Module,
        feedforward: nn.Module, norm: NormFactory,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attention_norm = norm("attention")
        self.attention = attention
        self.feedforward_norm = norm("feedforward")
        self.feedforward = feedforward

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        raise NotImplementedError


@BLOCKS.register("pre")
class PreNormBlock(Block):
    """x + F(norm(x))  (Xiong et al. 2020, arXiv 2002.04745, figure 1b)."""

    @dataclass(frozen=True)
    class Config:
        pass

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        x = x + self.attention(self.attention_norm(x), context)
        return x + self.feedforward(self.feedforward_norm(x))


@BLOCKS.register("post")
class PostNormBlock(Block):
    """norm(x + F(x))  (Vaswani et al. 2017, arXiv 1706.03762, section 3.1)."""

    final_norm = False

    @dataclass(frozen=True)
    class Config:
        pass

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        x = self.attention_norm(x + self.attention(x, context))
        return self.feedforward_norm(x + self.feedforward(x))
