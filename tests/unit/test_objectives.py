"""Objectives: labels, what each token may see, counts, terms; pure functions of the sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models.losses import IGNORE, CrossEntropy, ZLoss
from pretrain.objectives.base import OBJECTIVES, build_objective, count_labels
from pretrain.objectives.causal import Causal

TOKENS = torch.tensor([[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]])
# the first row: three documents; the second: one, then padding
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, -1, -1]])


def batch(boundaries: Tensor | None = DOCUMENTS, **options: Any) -> Any:
    return build_objective(Causal.Config(**options)).micro_batch(TOKENS, boundaries, range(2))


def test_labels_are_the_next_tokens() -> None:
    found = batch(boundaries=None)
    assert found.ids.equal(TOKENS[:, :-1])
    assert found.fields["labels"].equal(TOKENS[:, 1:])
    assert (found.mask, found.documents) == ("causal", None)
    assert found.ids.is_contiguous() and found.fields["labels"].is_contiguous()


def test_attend_predicts_across_documents_but_never_padding() -> None:
    found = batch()
    assert found.fields["labels"].tolist() == [
        [12, 13, 14, 15, 16],
        [22, 23, 24, IGNORE, IGNORE],
    ]
    assert found.documents is None


def test_mask_hides_other_documents_and_drops_the_crossing_label() -> None:
    masked = batch(documents="mask")
    assert masked.fields["labels"].tolist() == [
        [12, IGNORE, 14, 15, IGNORE],
        [22, 23, 24, IGNORE, IGNORE],
    ]
    assert masked.documents is not None and masked.documents.equal(DOCUMENTS[:, :-1])
    assert masked.ids.equal(batch().ids)


def test_mask_needs_documents() -> None:
    with pytest.raises(ValueError, match="documents=mask needs data with document boundaries"):
        batch(boundaries=None, documents="mask")


def test_inputs_are_left_alone() -> None:
    tokens, documents = TOKENS.clone(), DOCUMENTS.clone()
    build_objective(Causal.Config(documents="mask")).micro_batch(tokens, documents, range(2))
    assert tokens.equal(TOKENS) and documents.equal(DOCUMENTS)


def test_counts_and_terms() -> None:
    objective = build_objective(Causal.Config())
    assert objective.counts([batch(), batch(boundaries=None)]) == {"labels": 8 + 10}
    assert objective.terms({"labels": 18}) == [CrossEntropy(18.0)]
    full = build_objective(Causal.Config(label_smoothing=0.1, z_loss=1e-4))
    assert full.terms({"labels": 18}) == [CrossEntropy(18.0, 0.1), ZLoss(18.0, 1e-4)]
    assert objective.terms({"labels": 0}) == [CrossEntropy(1.0)]  # no label anywhere: no division
    assert count_labels([], "labels", IGNORE) == 0


@pytest.mark.parametrize("name", OBJECTIVES.names())
def test_every_objective_is_a_function_of_the_sample(name: str) -> None:
    """A micro-batch is its samples side by side, twice the same, and counts add up."""
    objective = build_objective(OBJECTIVES.config_class(name)())
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (6, 17), generator=g)
    documents = (torch.rand(6, 17, generator=g) < 0.2).long().cumsum(1)
    whole = objective.micro_batch(tokens, documents, range(40, 46))
    for size in (1, 2, 3):
        parts = [
            objective.micro_batch(
                tokens[i : i + size], documents[i : i + size], range(40 + i, 40 + i + size)
            )
            for i in range(0, 6, size)
        ]
        assert torch.cat([part.ids for part in parts]).equal(whole.ids)
        for field, value in whole.fields.items():
            assert value.shape[:2] == whole.ids.shape
            assert torch.cat([part.fields[field] for part in parts]).equal(value), field
        counts = objective.counts([whole])
        assert all(isinstance(count, int) and count > 0 for count in counts.values())
        shares = [objective.counts([part]) for part in parts]
        assert {key: sum(share[key] for share in shares) for key in counts} == counts
        assert objective.counts(parts) == counts
    terms = objective.terms(counts)
    assert objective.primary in [term.name for term in terms]
    assert len({term.name for term in terms}) == len(terms)
    assert all(term.normalizer > 0 for term in terms)
    assert isinstance(objective.is_bound, bool)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (Causal.Config(), []),
        (Causal.Config(label_smoothing=0.99, z_loss=1.0), []),
        (
            Causal.Config(label_smoothing=1.0, z_loss=-0.5),
            [
                ("label_smoothing", "must be in [0, 1), got 1.0"),
                ("z_loss", "must not be negative, got -0.5"),
            ],
        ),
    ],
    ids=str,
)
def test_problems(config: Causal.Config, wanted: list[tuple[str, str]]) -> None:
    assert config.problems() == wanted
