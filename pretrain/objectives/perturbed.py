"""Tokens seen with perturbed positions besides, or instead of, the true ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from models.config import ModelConfig
from models.distillation import ViewDivergence
from models.losses import IGNORE, Term
from models.positions import biases_scores, position_name
from parallel.stage import MicroBatch

from .base import OBJECTIVES
from .causal import Causal
from .noise import SampleNoise

DIVERGENCE = "divergence_weights"


@OBJECTIVES.register("perturbed")
class Perturbed(Causal):
    """RoPE-perturbed self-distillation: next-token prediction from the true positions, plus

        distill_weight / sequences · Σ_sequences 1 / (e − s) Σ_{s ≤ i < e} KL(q_i ‖ stop(p_i))

    with p predicted from true and q from perturbed positions by the same weights.  Both views are
    in one batch, a sequence's perturbed view right behind its true one.  s is uniform over the
    tokens of a sequence, e its end, or that of the document around s where documents are masked.

    ``skip`` adds y ~ U{1 … Y} to the positions s … e − 1; ``cyclic`` turns the positions of
    [0, e) (of the document) so that s comes first.  Before s no distance changes in either.

    ``method: pose`` predicts the next token from the perturbed view alone.
    """

    @dataclass(frozen=True)
    class Config(Causal.Config):
        method: Literal["distill", "pose"] = field(
            default="distill", metadata={"help": "draw the perturbed view to the true one, or train"
            " on the perturbed one alone"},
        )  # fmt: skip
        view: Literal["skip", "cyclic"] = field(
            default="skip", metadata={"help": "how positions are perturbed from a random token on"}
        )
        max_skip: int | None = field(
            default=None, metadata={"help": "view=skip: largest gap; null = the sequence length"}
        )
        distill_weight: float = field(
            default=1.0, metadata={"help": "method=distill: weight of the divergence"}
        )

        @property
        def views(self) -> int:
            return 2 if self.method == "distill" else 1

        def problems(self) -> list[tuple[str, str]]:
            found = super().problems()
            if not 0 < self.distill_weight < math.inf:
                text = f"must be positive and finite, got {self.distill_weight}"
                found.append(("distill_weight", text))
            if self.method == "pose" and self.distill_weight != type(self).distill_weight:
                found.append(("distill_weight", "is set but method=pose: it would be ignored"))
            if self.max_skip is not None and self.view != "skip":
                found.append(("max_skip", f"is set but view={self.view}: it would be ignored"))
            elif self.max_skip is not None and self.max_skip < 1:
                found.append(("max_skip", f"must be positive, got {self.max_skip}"))
            return found

        def model_problems(self, model: ModelConfig) -> list[tuple[str, str]]:
            found = super().model_problems(model)
            if position_name(model.position) == "nope" or biases_scores(model.position):
                text = f"perturbed needs rotary positions, not {position_name(model.position)}"
                found.append(("type", text))
            return found

    config: Config

    def __init__(
        self, config: Config, model: ModelConfig | None = None, seed: int = 0, batch: int = 1
    ) -> None:
        super().__init__(config, model, seed)
        self.noise = SampleNoise(seed, "perturbed positions")

    def micro_batch(
        self, tokens: Tensor, documents: Tensor | None, sample_indices: Sequence[int]
    ) -> MicroBatch:
        plain = super().micro_batch(tokens, documents, sample_indices)
        ids = plain.ids
        positions = torch.arange(ids.shape[1]).repeat(len(ids), 1)
        weights = torch.zeros(ids.shape, dtype=torch.float64)
        for row, index in enumerate(sample_indices):
            seen = None if documents is None else documents[row, :-1]
            self._perturb(index, seen, positions[row], weights[row])
        if self.config.method == "pose":
            return replace(plain, positions=positions)
        fields = {
            name: torch.stack([labels, torch.full_like(labels, IGNORE)], 1).flatten(0, 1)
            for name, labels in plain.fields.items()
        }
        fields[DIVERGENCE] = torch.stack([torch.zeros_like(weights), weights], 1).flatten(0, 1)
        true = torch.arange(ids.shape[1]).expand_as(ids)
        twice = plain.documents
        return replace(
            plain,
            ids=ids.repeat_interleave(2, 0),
            fields=fields,
            documents=None if twice is None else twice.repeat_interleave(2, 0),
            positions=torch.stack([true, positions], 1).flatten(0, 1),
        )

    def evaluation_batch(
        self, tokens: Tensor, documents: Tensor | None, sample_indices: Sequence[int]
    ) -> MicroBatch:
        return super().micro_batch(tokens, documents, sample_indices)

    def _perturb(
        self, index: int, documents: Tensor | None, positions: Tensor, weights: Tensor
    ) -> None:
        """Perturb ``positions`` [S] of sample ``index`` in place, and weight what changes."""
        begin, end = 0, len(positions)
        if documents is not None:
            end = int((documents >= 0).sum())  # padding comes last
        if end == 0:
            return
        first, second = self.noise.bits(index, 2).tolist()
        start = first * end >> 64
        if documents is not None and self.config.documents == "mask":
            inside = (documents == documents[start]).nonzero()
            begin, end = int(inside[0]), int(inside[-1]) + 1
        if self.config.view == "skip":
            most = self.config.max_skip or len(positions)
            positions[start:end] += 1 + (second * most >> 64)
        else:
            positions[begin:start] += end - start
            positions[start:end] -= start - begin
        weights[start:end] = 1 / (end - start)

    def counts(self, batches: Sequence[MicroBatch]) -> dict[str, int]:
        counts = super().counts(batches)
        if self.config.method == "distill":
            weights = [b.fields[DIVERGENCE] for b in batches if DIVERGENCE in b.fields]
            counts["sequences"] = sum(int((w != 0).any(1).sum()) for w in weights)
        return counts

    def terms(self, counts: dict[str, int]) -> list[Term]:
        terms = super().terms(counts)
        if self.config.method == "distill":
            sequences = float(max(counts["sequences"], 1))
            terms.append(ViewDivergence(sequences, self.config.distill_weight, field=DIVERGENCE))
        return terms
