"""Losses of single sequences: exact sums, and the standard error of their mean."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch

from models.losses import IGNORE, CrossEntropy, HeadOptions, evaluate_head
from parallel.stage import MicroBatch
from pretrain.objectives.base import build_objective
from pretrain.objectives.causal import Causal
from pretrain.sequence_losses import SEQUENCE, BySequence, sequence_sizes, standard_error


def test_rows_go_to_their_sequences_and_change_nothing_else() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(60, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(11, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 11, (60,), generator=generator)
    labels[7:19] = IGNORE
    sequence = torch.randint(0, 5, (60,), generator=generator)  # 4 is padding
    fields = {"labels": labels, SEQUENCE: sequence}
    sums = torch.zeros(5, dtype=torch.float64)
    term, options = CrossEntropy(3.0), HeadOptions(11, chunk_rows=16)
    plain = evaluate_head(hidden, weight, fields, [term], options, gradients=True)
    found = evaluate_head(hidden, weight, fields, [BySequence(term, sums)], options, gradients=True)
    assert torch.equal(plain.total, found.total) and plain.sums == found.sums
    assert torch.equal(plain.d_weight, found.d_weight)  # type: ignore[arg-type]
    rows = torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="none")
    for number in range(5):
        wanted = rows[(sequence == number) & (labels != IGNORE)].sum()
        torch.testing.assert_close(sums[number], wanted, rtol=1e-12, atol=0)


def test_sizes_are_the_labels_of_each_sequence() -> None:
    labels = torch.zeros(4, 6, dtype=torch.long)
    labels[0, 2:] = labels[1, 5:] = labels[3] = IGNORE
    numbers = torch.tensor([0, 2, 0, 3])[:, None].repeat(1, 6)
    batch = MicroBatch(torch.zeros(4, 6, dtype=torch.long), {"labels": labels, SEQUENCE: numbers})
    objective = build_objective(Causal.Config())
    assert sequence_sizes([batch, replace(batch)], objective, 3).tolist() == [16, 0, 10]


def test_the_standard_error_is_that_of_the_mean() -> None:
    losses = [2.0, 3.5, 1.0, 4.0]
    found = standard_error(torch.tensor(losses).double() * 7, torch.full((4,), 7.0).double())
    assert found == pytest.approx(statistics.stdev(losses) / 2, rel=1e-12)


def test_the_standard_error_covers_sequences_of_any_length() -> None:
    """Against the spread of the ratio itself over many sets of sequences."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(1, 20, (2000, 50), generator=generator).double()
    means = 3 + torch.randn(2000, 50, generator=generator, dtype=torch.float64)
    sums = means * sizes
    spread = float((sums.sum(1) / sizes.sum(1)).std())
    found = [standard_error(*pair) for pair in zip(sums, sizes, strict=True)]
    assert statistics.mean(found) == pytest.approx(spread, rel=0.05)
