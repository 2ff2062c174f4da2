"""Multi-token prediction: blocks behind the trunk that predict tokens further ahead.

The head of depth k reads y^k and predicts token i+k+1 at position i; depth 0 is next-token
prediction.  All depths share one head.  ``sequential`` blocks follow DeepSeek-V3 (arXiv 2412.19437,
section 2.2), ``repeated`` applies one such block again and again, and ``parallel`` blocks are the
heads of Gloeckle et al. (arXiv 2404.19737, section 2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import SequenceContext
from .blocks import NormFactory
from .linear import Linear

MAX_DEPTH = 4


@dataclass(frozen=True)
class MTPConfig:
    """Multi-token prediction: how far ahead, by which blocks, and their conventions."""

    depth: int = field(
        default=0, metadata={"help": f"tokens predicted beyond the next one, 0 to {MAX_DEPTH}"}
    )
    kind: Literal["sequential", "parallel", "repeated"] = field(
        default="sequential",
        metadata={"help": "a chain of blocks, blocks side by side on the trunk, one block reused"},
    )
    embedding: Literal["shared", "own"] = field(
        default="shared", metadata={"help": "where blocks embed tokens: the model's table, or own"}
    )
    input: Literal["block", "norm"] = field(
        default="block",
        metadata={"help": "hidden state that a block reads: before or after the norm"},
    )
    concat: Literal["embedding_first", "hidden_first"] = field(
        default="embedding_first", metadata={"help": "order of the projection's two inputs"}
    )

    @property
    def wiring(self) -> Literal["block", "norm", "trunk"]:
        """What blocks read: the last block's output and each other's, the same after their norms,
        or all of them the output of the last but one block of the model."""
        return "trunk" if self.kind == "parallel" else self.input

    @property
    def shares_embedding(self) -> bool:
        """Whether blocks read the model's own embedding."""
        return self.kind != "parallel" and self.embedding == "shared"

    @property
    def modules(self) -> range:
        """Depths whose block and norm have weights of their own."""
        return range(1, 1 + (min(self.depth, 1) if self.kind == "repeated" else self.depth))

    def problems(self) -> list[tuple[str, str]]:
        if not 0 <= self.depth <= MAX_DEPTH:
            return [("depth", f"must be 0 to {MAX_DEPTH}, got {self.depth}")]
        if self.depth and self.kind != "parallel":
            return []
        why, ignored = "kind=parallel", ["embedding", "input", "concat"]
        if not self.depth:
            why, ignored = "depth=0", ["kind", *ignored]
        return [
            (name, f"is set but {why}: it would be ignored")
            for name in ignored
            if getattr(self, name) != getattr(MTPConfig, name)
        ]


class MTPBlock(nn.Module):
    """One block that reads a hidden state and the embedding of the token to come:

    block(W [norm(e); norm(x)]), with e_i the embedding of token i + k at depth k.

    Under sequence parallelism x and e are this rank's positions; everything before the block
    works position by position.
    """

    plan: ClassVar[dict[str, str]] = {"projection.weight": "replicated"}

    def __init__(
        self,
        config: MTPConfig,
        hidden: int,
        block: nn.Module,
        norm: NormFactory,
        embedding: nn.Module | None,
    ) -> None:
        super().__init__()
        self.hidden_first = config.concat == "hidden_first"
        self.embedding = embedding
        self.embedding_norm = norm("input")
        self.hidden_norm = norm("input")
        self.projection = Linear(2 * hidden, hidden)
        self.block = block

    def forward(self, x: Tensor, tokens: Tensor, context: SequenceContext) -> Tensor:
        """x [B, S, D] and the tokens to come, embedded [B, S, D], or as ids [B, S] where the block
        has its own embedding."""
        embedded = tokens if self.embedding is None else self.embedding(tokens)
        parts = [self.embedding_norm(embedded), self.hidden_norm(x)]
        if self.hidden_first:
            parts.reverse()
        merged = self.projection(torch.cat(parts, -1)).to(x.dtype)  # the residual stream's dtype
        out: Tensor = self.block(merged, context)
        return out


def tokens_ahead(ids: Tensor, depth: int) -> Tensor:
    """Token i + depth at position i, [B, S].  Beyond the end there is none: 0 stands there, in rows
    that carry no label and that no row with a label sees."""
    kept = ids[:, depth:]
    return F.pad(kept, (0, ids.shape[1] - kept.shape[1]))


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        total = None
        for gradient in gradients:
            if gradient is not None:
                total = gradient if total is None else total + gradient
        return total, None


def fork(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """``count`` aliases of ``x`` for as many readers.

    Their gradients are added in this order.  Left to autograd the order would follow how the graph
    was built, and a model cut into stages would not give the same bits as a whole one.
    """
    if count == 1:
        return (x,)
    aliases: tuple[Tensor, ...] = _Fork.apply(x, count)
    return aliases
