"""The model as a list of units: embedding, blocks, final norm, head.

Any unit may be absent, so one pipeline stage is a ``Transformer`` with fewer units; names carry
the global layer index and do not change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Attention, AttentionBackend, SequenceContext
from .blocks import BLOCKS, Block
from .collectives import axis
from .config import ModelConfig
from .feedforward import FEEDFORWARDS
from .linear import accumulation_dtype
from .losses import HeadOptions, Term, capped, chunked_head_loss
from .norms import NORMS


def unit_names(config: ModelConfig) -> list[str]:
    """Every unit in execution order: embedding, blocks.0 …, final_norm, head."""
    blocks = [f"blocks.{layer}" for layer in range(config.layers)]
    return ["embedding", *blocks, "final_norm", "head"]


class Embedding(nn.Module):
    """Token ids int64 [B, S] to [B, S, D]; the vocabulary may be sharded over ``tp``."""

    plan: ClassVar[dict[str, str]] = {"weight": "vocab"}
    region: ClassVar[bool] = True
    region_input: ClassVar[bool] = False  # ids are whole on every rank and carry no gradient

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.compute_dtype: torch.dtype | None = None
        self.wide_residual = config.residual_dtype == "float32"
        self.weight = nn.Parameter(torch.empty(config.padded_vocab_size, config.hidden))

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.weight
        if axis("tp").size == 1:
            x = F.embedding(ids, weight)
        else:
            local = ids - axis("tp").rank * weight.shape[0]
            inside = (local >= 0) & (local < weight.shape[0])
            x = F.embedding(local.clamp(0, weight.shape[0] - 1), weight) * inside[..., None]
        if self.wide_residual:
            return x.to(accumulation_dtype(x.dtype))
        return x if self.compute_dtype is None else x.to(self.compute_dtype)


class Head(nn.Module):
    """Output projection and loss.  A tied head owns no weight where the embedding is present."""

    plan: ClassVar[dict[str, str]] = {"weight": "vocab"}
    region: ClassVar[bool] = True
    region_output: ClassVar[bool] = False  # the loss is complete on every rank

    def __init__(self, config: ModelConfig, embedding: Embedding | None) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        self.softcap = config.logit_softcap
        self.chunk_rows = 0
        self.compute_dtype: torch.dtype | None = None
        # In a tuple, so that the embedding is not registered as a submodule a second time.
        self._tied = (embedding,)
        if embedding is None:
            self.weight = nn.Parameter(torch.empty(config.padded_vocab_size, config.hidden))

    def matrix(self) -> Tensor:
        """The vocabulary matrix in its stored dtype (the head casts it), [V or V_local, D]."""
        owner = self if self._tied[0] is None else self._tied[0]
        weight: Tensor = owner.weight
        return weight

    def forward(
        self, x: Tensor, fields: Mapping[str, Tensor], terms: Sequence[Term]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """x [B, S, D] and fields [B, S] to (total loss, per-term sums)."""
        options = HeadOptions(self.vocab_size, self.softcap, self.chunk_rows, self.compute_dtype)
        rows = {name: value.reshape(-1) for name, value in fields.items()}
        return chunked_head_loss(x.flatten(0, 1), self.matrix(), rows, terms, options)

    def logits(self, x: Tensor) -> Tensor:
        """Whole-vocabulary logits of x [..., D]: [..., vocab_size].  Single-process use."""
        weight = self.matrix()
        weight = weight[: self.vocab_size].to(self.compute_dtype or weight.dtype)
        logits = F.linear(x.to(weight.dtype), weight)
        return capped(logits.to(accumulation_dtype(logits.dtype)), self.softcap)


def build_block(config: ModelConfig, layer: int, backend: AttentionBackend) -> Block:
    attention = Attention(
        config.attention, config.hidden, layer, config.norm, config.position, backend
    )
    feedforward = FEEDFORWARDS.build(config.feedforward, config.hidden)
    block: Block = BLOCKS.build(
        config.block, layer, attention, feedforward, lambda: NORMS.build(config.norm, config.hidden)
    )
    return block


class Transformer(nn.Module):
    """Whole model, or the part of it named by ``units`` (names as in :func:`unit_names`)."""

    def __init__(
        self,
        config: ModelConfig,
        units: Collection[str] | None = None,
        attention_backend: AttentionBackend = "auto",
    ) -> None:
        super().__init__()
        names = unit_names(config)
        present = names if units is None else list(units)
        assert set(present) <= set(names), f"unknown units {set(present) - set(names)}"
        self.config = config
        self.embedding = Embedding(config) if "embedding" in present else None
        self.blocks = nn.ModuleDict(
            {
                str(layer): build_block(config, layer, attention_backend)
                for layer in range(config.layers)
                if f"blocks.{layer}" in present
            }
        )
        wants_norm = BLOCKS.component(BLOCKS.name_of(type(config.block))).final_norm  # type: ignore[attr-defined]
        self.final_norm = (
            NORMS.build(config.norm, config.hidden)
            if "final_norm" in present and wants_norm
            else None
        )
        tied = self.embedding if config.tie_embeddings else None
        self.head = Head(config, tied) if "head" in present else None

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """Token ids [B, S] (or hidden [B, S, D] when the embedding is elsewhere) through every
        unit but the head: hidden [B, S, D]."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x, context)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x

    def logits(self, ids: Tensor, context: SequenceContext | None = None) -> Tensor:
        """Token ids [B, S] to logits [B, S, vocab_size] in at least fp32."""
        assert self.head is not None
        context = context or SequenceContext(torch.arange(ids.shape[1], device=ids.device))
        logits: Tensor = self.head.logits(self(ids, context))
        return logits


def logical_name(name: str, config: ModelConfig) -> str:
    """The parameter that ``name`` stands for: a tied head is the embedding, wherever it lives."""
    return "embedding.weight" if config.tie_embeddings and name == "head.weight" else name
