"""The loss of each sequence of an evaluation, and what it says about their mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.losses import LogitGradient, LogitRows, Term
from parallel.stage import MicroBatch

from .objectives.base import Objective

SEQUENCE = "sequence"
"""Row field: the number of the row's sequence in the evaluation, beyond the last for padding."""


@dataclass(frozen=True)
class BySequence:
    """``term``, which besides adds its loss rows to those of their sequences, float64 [n + 1]."""

    term: Term
    sums: Tensor

    @property
    def name(self) -> str:
        return self.term.name

    @property
    def weight(self) -> float:
        return self.term.weight

    @property
    def normalizer(self) -> float:
        return self.term.normalizer

    @property
    def depth(self) -> int:
        return self.term.depth

    @property
    def views(self) -> int:
        return self.term.views

    def judges(self, fields: Mapping[str, Tensor]) -> Tensor | None:
        return self.term.judges(fields)

    def rows(self, rows: LogitRows, fields: Mapping[str, Tensor]) -> tuple[Tensor, LogitGradient]:
        loss, gradient = self.term.rows(rows, fields)
        # As a product: adding at repeated indices has no fixed order on a GPU.
        found, place = fields[SEQUENCE].unique(return_inverse=True)
        belongs = place == torch.arange(len(found), device=place.device)[:, None]
        self.sums[found] += belongs.to(self.sums.dtype) @ loss.to(self.sums.dtype)
        return loss, gradient


def sequence_sizes(batches: Sequence[MicroBatch], objective: Objective, sequences: int) -> Tensor:
    """What the primary loss of each sequence of these batches is divided by, float64 [n]."""
    sizes = torch.zeros(sequences + 1, dtype=torch.float64)
    for batch in batches:
        numbers = batch.fields[SEQUENCE][:, 0].tolist()
        for number in dict.fromkeys(numbers):
            rows = [row for row, other in enumerate(numbers) if other == number]
            fields = {name: value[rows] for name, value in batch.fields.items()}
            counts = objective.counts([MicroBatch(batch.ids[rows], fields)])
            if any(counts.values()):
                sizes[number] += _primary(objective, counts).normalizer
    return sizes[:-1]


def _primary(objective: Objective, counts: dict[str, int]) -> Term:
    terms = objective.evaluation_terms(counts)
    return next(term for term in terms if term.name == objective.primary)


def standard_error(sums: Tensor, sizes: Tensor) -> float | None:
    """Of the ratio Σ sums / Σ sizes over sequences [n] that are drawn independently, to first
    order: √(n / (n − 1) Σ (sum − ratio · size)²) / Σ sizes.  None of a single one."""
    count, total = len(sums), float(sizes.sum())
    if count < 2 or total == 0:
        return None
    off = sums - float(sums.sum()) / total * sizes
    return math.sqrt(count / (count - 1) * float(off.square().sum())) / total
