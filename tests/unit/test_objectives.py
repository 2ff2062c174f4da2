"""Objectives: labels, what each token may see, counts, terms; pure functions of the sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models.config import ModelConfig
from models.losses import IGNORE, CrossEntropy, ZLoss
from models.mtp import MTPConfig
from models.token_weighting import TokenWeighting
from pretrain.objectives.base import OBJECTIVES, build_objective, count_labels
from pretrain.objectives.causal import Causal

TOKENS = torch.tensor([[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]])
# the first row: three documents; the second: one, then padding
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, -1, -1]])


def build(depth: int = 0, **options: Any) -> Any:
    return build_objective(Causal.Config(**options), ModelConfig(mtp=MTPConfig(depth)))


def batch(boundaries: Tensor | None = DOCUMENTS, depth: int = 0, **options: Any) -> Any:
    return build(depth, **options).micro_batch(TOKENS, boundaries, range(2))


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


def test_weighted_tokens_are_optimised_and_plain_ones_reported() -> None:
    weighting = TokenWeighting("linear", 0.25)
    objective = build(depth=1, weighting=weighting, z_loss=1e-4)
    plain, weighted, z, mtp = objective.terms({"labels": 18, "labels_1": 16})
    assert (plain.name, plain.weight, plain.weighting) == ("cross_entropy", 0.0, None)
    assert (weighted.name, weighted.weight, weighted.weighting) == ("weighted", 1.0, weighting)
    assert plain.normalizer == weighted.normalizer == 18.0  # labels, never the sum of weights
    assert (z.name, mtp.name, mtp.weighting) == ("z_loss", "mtp_1", None)
    assert objective.evaluation_terms({"labels": 18}) == [CrossEntropy(18.0)]
    config = Causal.Config(weighting=TokenWeighting())
    assert build_objective(config).terms({"labels": 18}) == [CrossEntropy(18.0)]


X = IGNORE


def test_labels_further_ahead() -> None:
    plain = batch(boundaries=None, depth=4).fields
    assert list(plain) == ["labels", "labels_1", "labels_2", "labels_3", "labels_4"]
    assert plain["labels_1"].tolist() == [[13, 14, 15, 16, X], [23, 24, 25, 26, X]]
    assert plain["labels_2"].tolist() == [[14, 15, 16, X, X], [24, 25, 26, X, X]]
    assert plain["labels_4"].tolist() == [[16, X, X, X, X], [26, X, X, X, X]]
    assert all(field.is_contiguous() and field.dtype == torch.int64 for field in plain.values())
    attend = batch(depth=2).fields  # padding is never predicted, boundaries are crossed
    assert attend["labels_1"].tolist() == [[13, 14, 15, 16, X], [23, 24, X, X, X]]
    assert attend["labels_2"].tolist() == [[14, 15, 16, X, X], [24, X, X, X, X]]


def test_no_label_crosses_a_document() -> None:
    masked = batch(depth=2, documents="mask").fields
    assert masked["labels"].equal(batch(documents="mask").fields["labels"])
    assert masked["labels_1"].tolist() == [[X, X, 15, X, X], [23, 24, X, X, X]]
    assert masked["labels_2"].tolist() == [[X, X, X, X, X], [24, X, X, X, X]]
    # the property itself, on random documents; without the mask it does not hold
    g = torch.Generator().manual_seed(0)
    documents = (torch.rand(8, 33, generator=g) < 0.2).long().cumsum(1)
    tokens = documents * 100 + torch.arange(33)  # a token tells its document
    for mode, crosses in (("mask", False), ("attend", True)):
        fields = build(4, documents=mode).micro_batch(tokens, documents, range(8)).fields
        for name, labels in fields.items():
            valid = labels != IGNORE
            assert valid.any()
            other = labels[valid] // 100 != documents[:, :-1][valid]
            assert other.any() == crosses, (mode, name)


def test_sequences_shorter_than_the_depth() -> None:
    short = build(4).micro_batch(TOKENS[:, :3], None, range(2)).fields
    assert short["labels_1"].tolist() == [[13, X], [23, X]]
    assert short["labels_4"].tolist() == [[X, X], [X, X]]


# of TOKENS with DOCUMENTS masked, counted by hand in the lists above: first row + second row
COUNTS = {"labels": 3 + 3, "labels_1": 1 + 2, "labels_2": 0 + 1}


def test_counts_of_every_depth() -> None:
    objective = build(2, documents="mask")
    micro = batch(depth=2, documents="mask")
    assert objective.counts([micro]) == COUNTS
    assert objective.counts([micro, micro]) == {name: 2 * n for name, n in COUNTS.items()}
    by_length = build(2, documents="mask", mtp_normalize="seq_len")
    assert by_length.counts([micro, micro]) == objective.counts([micro, micro]) | {"positions": 20}


@pytest.mark.parametrize(
    ("normalize", "divisors"),
    [
        ("own_valid", (300, 100)),  # each depth by its own labels
        ("main_valid", (600, 600)),  # all by those of next-token prediction
        ("seq_len", (1000, 1000)),  # all by the positions, padding and boundaries included
    ],
)
def test_normalisation_of_every_kind(normalize: str, divisors: tuple[int, int]) -> None:
    """What multiplies a loss row, and the mean that is logged, from hand-made global counts."""
    counts = {"labels": 600, "labels_1": 300, "labels_2": 100, "positions": 1000}
    objective = build(2, mtp_weight=0.3, mtp_normalize=normalize, z_loss=1e-4, label_smoothing=0.1)
    terms = objective.terms(counts)
    assert terms[:2] == [CrossEntropy(600.0, 0.1), ZLoss(600.0, 1e-4)]
    assert [(t.name, t.labels, t.depth, t.label_smoothing) for t in terms[2:]] == [
        ("mtp_1", "labels_1", 1, 0.1),
        ("mtp_2", "labels_2", 2, 0.1),
    ]
    for term, divisor, own in zip(terms[2:], divisors, (300, 100), strict=True):
        assert term.weight / term.normalizer == pytest.approx(0.3 / 2 / divisor, rel=1e-15)
        assert term.normalizer == own
    evaluated = objective.evaluation_terms(counts)
    assert [term.name for term in evaluated] == [objective.primary]


def test_no_label_at_a_depth_divides_by_nothing() -> None:
    counts = {"labels": 0, "labels_1": 0, "positions": 10}
    for normalize in ("own_valid", "main_valid", "seq_len"):
        term = build(1, mtp_normalize=normalize).terms(counts)[1]
        assert term.normalizer == 1.0 and 0 < term.weight <= 0.3


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("name", OBJECTIVES.names())
def test_every_objective_is_a_function_of_the_sample(name: str, depth: int) -> None:
    """A micro-batch is its samples side by side, twice the same, and counts add up."""
    config = OBJECTIVES.config_class(name)()
    model = ModelConfig(mtp=MTPConfig(depth), mask_token=True)
    if depth and config.model_problems(model):  # not with multi-token prediction
        model = ModelConfig(mask_token=True)
    objective = build_objective(config, model)
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
        (
            Causal.Config(mtp_weight=float("inf")),
            [("mtp_weight", "must be positive and finite, got inf")],
        ),
    ],
    ids=str,
)
def test_problems(config: Causal.Config, wanted: list[tuple[str, str]]) -> None:
    assert config.problems() == wanted
