"""Distributions small enough to be summed over: exact answers for objectives and samplers.

A model here is a function from what it sees to logits; its conditionals come from a known joint
distribution, or are arbitrary tables that belong to none.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.losses import HeadOptions, evaluate_head
from parallel.stage import MicroBatch
from pretrain.objectives.base import Objective

Logits = Callable[[MicroBatch], Tensor]
"""What a model makes of a micro-batch: logits [B, slots, vocabulary]."""


@dataclass
class Joint:
    """A distribution over sequences: ``table`` float64 of shape [vocabulary] * length."""

    table: Tensor

    @classmethod
    def random(cls, vocabulary: int, length: int, seed: int = 0) -> Joint:
        generator = torch.Generator().manual_seed(seed)
        shape = [vocabulary] * length
        weights = torch.rand(shape, generator=generator, dtype=torch.float64) ** 2 + 0.01
        return cls(weights / weights.sum())

    @property
    def length(self) -> int:
        return self.table.dim()

    @property
    def vocabulary(self) -> int:
        return self.table.shape[0]

    def sequences(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(range(self.vocabulary), repeat=self.length)

    def log_probability(self, x: Sequence[int]) -> float:
        return float(self.table[tuple(x)].log())

    def conditional(self, position: int, known: dict[int, int]) -> Tensor:
        """p(x[position] | x[i] = v for i, v in known), float64 [vocabulary]."""
        index = tuple(known.get(i, slice(None)) for i in range(self.length))
        if position in known:
            return torch.nn.functional.one_hot(
                torch.tensor(known[position]), self.vocabulary
            ).double()
        left = self.table[index]
        free = [i for i in range(self.length) if i not in known]
        others = [axis for axis, i in enumerate(free) if i != position]
        marginal = left.sum(others) if others else left
        return marginal / marginal.sum()

    def denoise(self, ids: Sequence[int], mask_id: int) -> Tensor:
        """p(x[i] | the tokens that are not masked) of every i, float64 [length, vocabulary]."""
        known = {i: int(v) for i, v in enumerate(ids) if int(v) != mask_id}
        return torch.stack([self.conditional(i, known) for i in range(self.length)])


def masked_model(joint: Joint, mask_id: int) -> Logits:
    """The perfect denoiser of ``joint`` as a model."""

    def logits(batch: MicroBatch) -> Tensor:
        return torch.stack([joint.denoise(row.tolist(), mask_id) for row in batch.ids]).log()

    return logits


def visible_conditionals(
    conditional: Callable[[int, dict[int, int]], Tensor], mask_id: int
) -> Logits:
    """A model whose every slot knows the tokens that the batch's own mask lets it see, masked ones
    left out, and answers ``conditional(position, known)``: one that sees too much knows too much.
    """

    @functools.cache
    def answer(position: int, known: tuple[tuple[int, int], ...]) -> Tensor:
        return conditional(position, dict(known)).log()

    def logits(batch: MicroBatch) -> Tensor:
        context, slots = batch.context(), batch.ids.shape[1]
        positions = context.positions.expand_as(batch.ids)
        dense = context.dense_mask(slots, slots, batch.ids.device)
        seen = (batch.ids != mask_id)[:, None].expand(-1, slots, -1)
        seen = seen if dense is None else seen & dense[:, 0]
        rows = []
        for ids, at, sees in zip(
            batch.ids.tolist(), positions.tolist(), seen.tolist(), strict=True
        ):
            for position, row in zip(at, sees, strict=True):
                known = {(p, i) for p, i, see in zip(at, ids, row, strict=True) if see}
                rows.append(answer(position, tuple(sorted(known))))
        return torch.stack(rows).unflatten(0, batch.ids.shape)

    return logits


def losses(
    objective: Objective,
    model: Logits,
    tokens: Tensor,
    sample_indices: Sequence[int],
    evaluation: bool = False,
) -> dict[str, float]:
    """Mean of each term of ``objective`` over tokens int64 [B, S+1], through the very code that
    trains: corruption, row fields and the row-wise terms."""
    make = objective.evaluation_batch if evaluation else objective.micro_batch
    batch = make(tokens, None, sample_indices)
    logits = model(batch)
    counts = objective.counts([batch])
    terms = objective.evaluation_terms(counts) if evaluation else objective.terms(counts)
    vocabulary = logits.shape[-1]
    result = evaluate_head(
        logits.flatten(0, 1).clamp(min=-1e30), torch.eye(vocabulary, dtype=torch.float64),
        {name: value.flatten(0, 1) for name, value in batch.fields.items()},
        terms, HeadOptions(vocabulary), gradients=False,
    )  # fmt: skip
    return {term.name: float(result.sums[term.name]) / term.normalizer for term in terms}
