"""Autoregressive next-token prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from models.losses import IGNORE, CrossEntropy, Term, ZLoss
from parallel.stage import MicroBatch

from .base import OBJECTIVES, count_labels


@OBJECTIVES.register("causal")
class Causal:
    """Σ −log p(x[i+1] | x[≤i]) / number of labels.

    ``documents: attend`` lets a window's documents see each other and predicts across their
    boundaries; ``mask`` hides other documents and drops the label that would cross.
    """

    primary = "cross_entropy"
    is_bound = False

    @dataclass(frozen=True)
    class Config:
        documents: Literal["attend", "mask"] = field(
            default="attend", metadata={"help": "may tokens see other documents of their window"}
        )
        label_smoothing: float = field(default=0.0, metadata={"help": "ε in [0, 1)"})
        z_loss: float = field(default=0.0, metadata={"help": "weight of log_z²; 0 = off"})

        def problems(self) -> list[tuple[str, str]]:
            found = []
            if not 0 <= self.label_smoothing < 1:
                found.append(("label_smoothing", f"must be in [0, 1), got {self.label_smoothing}"))
            if self.z_loss < 0:
                found.append(("z_loss", f"must not be negative, got {self.z_loss}"))
            return found

    def __init__(self, config: Config) -> None:
        self.config = config

    def micro_batch(
        self, tokens: Tensor, documents: Tensor | None, sample_indices: Sequence[int]
    ) -> MicroBatch:
        ids, labels = tokens[:, :-1], tokens[:, 1:]
        seen = None
        if documents is not None:
            labels = labels.masked_fill(documents[:, 1:] < 0, IGNORE)
        if self.config.documents == "mask":
            if documents is None:
                raise ValueError("objective.documents=mask needs data with document boundaries")
            labels = labels.masked_fill(documents[:, 1:] != documents[:, :-1], IGNORE)
            seen = documents[:, :-1].contiguous()
        return MicroBatch(ids.contiguous(), {"labels": labels.contiguous()}, "causal", seen)

    def counts(self, batches: Sequence[MicroBatch]) -> dict[str, int]:
        return {"labels": count_labels(batches, "labels", IGNORE)}

    def terms(self, counts: dict[str, int]) -> list[Term]:
        count = float(max(counts["labels"], 1))
        terms: list[Term] = [CrossEntropy(count, self.config.label_smoothing)]
        if self.config.z_loss:
            terms.append(ZLoss(count, self.config.z_loss))
        return terms

    def evaluation_terms(self, counts: dict[str, int]) -> list[Term]:
        return [CrossEntropy(float(max(counts["labels"], 1)))]
