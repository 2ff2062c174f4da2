"""Autoregressive prediction of the next token, and of those behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig
from models.losses import IGNORE, CrossEntropy, Term, ZLoss
from models.token_weighting import TokenWeighting
from parallel.stage import MicroBatch

from .base import OBJECTIVES, ObjectiveConfig, count_labels

MTP_FIELDS = ("mtp_weight", "mtp_normalize")


@OBJECTIVES.register("causal")
class Causal:
    """Σ −log p(x[i+1] | x[≤i]) / number of labels, and of a model with multi-token prediction of
    depth D besides

        mtp_weight / D · Σ_k Σ_i −log p_k(x[i+k+1] | x[≤i+k]) / N_k    for k = 1 … D.

    N_k, over the global batch: the labels of depth k (``own_valid``), those of next-token
    prediction (``main_valid``), or the positions (``seq_len``).

    ``documents: attend`` lets a window's documents see each other and predicts across their
    boundaries; ``mask`` hides other documents and drops every label that would cross.

    With a ``weighting`` the loss of next-token prediction is Σ −w log p / number of labels, the
    term ``weighted``; the plain one is still reported, and evaluated.
    """

    primary = "cross_entropy"
    is_bound = False

    @dataclass(frozen=True)
    class Config(ObjectiveConfig):
        label_smoothing: float = field(default=0.0, metadata={"help": "ε in [0, 1), at all depths"})
        z_loss: float = field(
            default=0.0, metadata={"help": "weight of log_z² of the next token; 0 = off"}
        )
        weighting: TokenWeighting = field(
            default=TokenWeighting(), metadata={"help": "of tokens by their own probability"}
        )
        mtp_weight: float = field(
            default=0.3, metadata={"help": "multi-token prediction: weight of the mean over depths"}
        )
        mtp_normalize: Literal["own_valid", "main_valid", "seq_len"] = field(
            default="own_valid",
            metadata={
                "help": "divide a depth's loss by its labels, by depth 0's, or by all positions"
            },
        )

        def problems(self) -> list[tuple[str, str]]:
            found = []
            if not 0 <= self.label_smoothing < 1:
                found.append(("label_smoothing", f"must be in [0, 1), got {self.label_smoothing}"))
            if self.z_loss < 0:
                found.append(("z_loss", f"must not be negative, got {self.z_loss}"))
            if not 0 < self.mtp_weight < math.inf:
                text = f"must be positive and finite, got {self.mtp_weight}"
                found.append(("mtp_weight", text))
            return found

        def model_problems(self, model: ModelConfig) -> list[tuple[str, str]]:
            return [
                (name, "is set but model.mtp.depth=0: it would be ignored")
                for name in MTP_FIELDS
                if not model.mtp.depth and getattr(self, name) != getattr(type(self), name)
            ]

    def __init__(
        self, config: Config, model: ModelConfig | None = None, seed: int = 0, batch: int = 1
    ) -> None:
        self.config = config
        self.mtp_depth = 0 if model is None else model.mtp.depth

    def micro_batch(
        self, tokens: Tensor, documents: Tensor | None, sample_indices: Sequence[int]
    ) -> MicroBatch:
        masked = self.config.documents == "mask"
        if masked and documents is None:
            raise ValueError("objective.documents=mask needs data with document boundaries")
        fields = {
            _labels(depth): labels_ahead(tokens, documents, depth, masked)
            for depth in range(self.mtp_depth + 1)
        }
        seen = documents[:, :-1].contiguous() if masked and documents is not None else None
        return MicroBatch(tokens[:, :-1].contiguous(), fields, "causal", seen)

    def evaluation_batch(
        self, tokens: Tensor, documents: Tensor | None, sample_indices: Sequence[int]
    ) -> MicroBatch:
        return self.micro_batch(tokens, documents, sample_indices)

    def counts(self, batches: Sequence[MicroBatch]) -> dict[str, int]:
        names = [_labels(depth) for depth in range(self.mtp_depth + 1)]
        counts = {name: count_labels(batches, name, IGNORE) for name in names}
        if self.mtp_depth and self.config.mtp_normalize == "seq_len":
            counts["positions"] = sum(batch.ids.numel() for batch in batches)
        return counts

    def terms(self, counts: dict[str, int]) -> list[Term]:
        count = float(max(counts["labels"], 1))
        plain = CrossEntropy(count, self.config.label_smoothing)
        terms: list[Term] = [plain]
        if (weighting := self.config.weighting).kind != "none":
            terms = [
                replace(plain, weight=0.0),
                replace(plain, weighting=weighting, name="weighted"),
            ]
        if self.config.z_loss:
            terms.append(ZLoss(count, self.config.z_loss))
        return terms + [self._mtp_term(depth, counts) for depth in range(1, self.mtp_depth + 1)]

    def _mtp_term(self, depth: int, counts: dict[str, int]) -> Term:
        """Its mean is over its own labels, whatever the loss is divided by: that is in its weight,
        so that the logged figure means the same under every convention."""
        own = max(counts[_labels(depth)], 1)
        divisor = {
            "own_valid": own,
            "main_valid": max(counts["labels"], 1),
            "seq_len": counts.get("positions", 0),
        }[self.config.mtp_normalize]
        return CrossEntropy(
            float(own),
            self.config.label_smoothing,
            weight=self.config.mtp_weight / self.mtp_depth * (own / divisor),
            name=f"mtp_{depth}",
            labels=_labels(depth),
            depth=depth,
        )

    def evaluation_terms(self, counts: dict[str, int]) -> list[Term]:
        return [CrossEntropy(float(max(counts["labels"], 1)))]


def _labels(depth: int) -> str:
    return f"labels_{depth}" if depth else "labels"


def labels_ahead(tokens: Tensor, documents: Tensor | None, depth: int, masked: bool) -> Tensor:
    """Token i + depth + 1 of tokens [B, S+1] at position i, [B, S]; IGNORE where there is none, on
    padding, and if ``masked`` where it belongs to another document than token i."""
    length = tokens.shape[1] - 1

    def ahead(values: Tensor, nothing: int) -> Tensor:
        kept = values[:, depth + 1 :]
        return F.pad(kept, (0, length - kept.shape[1]), value=nothing)

    labels = ahead(tokens, IGNORE)
    if documents is not None:
        target = ahead(documents, -1)
        dropped = target < 0
        if masked:
            dropped |= target != documents[:, :-1]
        labels = labels.masked_fill(dropped, IGNORE)
    return labels.contiguous()
