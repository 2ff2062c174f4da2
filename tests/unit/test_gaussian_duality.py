"""Uniform-state noise as the largest entry of Gaussian noise, and soft inputs to begin with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.attention import Mixture, SequenceContext
from models.config import ModelConfig
from models.transformer import Embedding, Transformer
from parallel.stage import MicroBatch
from pretrain.objectives.base import build_objective
from pretrain.objectives.gaussian import Curriculum, distinct, operator, soften, window
from pretrain.objectives.uniform import Uniform
from tests.enumerable import losses


@pytest.mark.parametrize(
    ("classes", "early", "late"),
    [(50257, 0.946, 0.049), (32001, 0.955, 0.061), (8, 1.0, 0.82)],
)
def test_published_levels(classes: int, early: float, late: float) -> None:
    assert operator(-3.55, classes)[0] == pytest.approx(early, abs=2e-3)
    assert operator(-1.85, classes)[0] == pytest.approx(late, abs=4e-3)


@pytest.mark.parametrize("classes", [2, 8, 83, 32001, 50257, 1_000_000])
def test_the_window_follows_the_vocabulary(classes: int) -> None:
    begin, end = window(classes)
    assert operator(begin, classes)[0] == pytest.approx(0.95, abs=1e-10)
    assert operator(end, classes)[0] == pytest.approx(0.05, abs=1e-10)
    for gamma in (begin, (begin + end) / 2, end):
        step = 1e-4
        around = [operator(gamma + s, classes)[0] for s in (-step, step)]
        slope = operator(gamma, classes)[1]
        assert slope == pytest.approx((around[1] - around[0]) / (2 * step), rel=1e-6)
        assert slope < 0


def test_two_tokens_have_a_closed_form() -> None:
    for gamma in (-3.0, 0.0, 3.0):
        wanted = torch.erf(torch.tensor(np.exp(-gamma / 2) / 2))
        assert operator(gamma, 2)[0] == pytest.approx(float(wanted), abs=1e-14)


@pytest.mark.parametrize("candidates", [1, 4, 8])
@pytest.mark.parametrize("classes", [8, 100])
def test_the_largest_entry_is_uniform_state_noise(classes: int, candidates: int) -> None:
    count, x, gamma = 60_000, 3, -1.0
    numbers = np.random.default_rng(0).random((count, 2 * candidates + 1))
    options = Curriculum(1, 0.1, candidates)
    ids, weights = soften(np.full(count, x), numbers, gamma, classes, options)
    alpha = operator(gamma, classes)[0]
    wanted = np.full(classes, (1 - alpha) / classes)
    wanted[x] += alpha
    share = np.bincount(ids[:, 0], minlength=classes) / count
    error = np.sqrt(wanted * (1 - wanted) / count)
    assert abs(share[x] - wanted[x]) < 3 * error[x]
    assert (np.abs(share - wanted) < 4.5 * error).all()
    assert ids.shape == weights.shape == (count, candidates)
    assert (np.sort(ids, 1)[:, 1:] != np.sort(ids, 1)[:, :-1]).all()
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-12)
    assert (np.diff(weights, axis=1) <= 0).all()


def test_order_statistics_are_those_of_all_entries() -> None:
    """Against drawing every entry and keeping the largest."""
    classes, kept, count, gamma, x = 12, 4, 40_000, -1.0, 5
    rng = np.random.default_rng(1)
    signal, spread = (1 / (1 + np.exp(s * gamma)) for s in (1, -1))
    w = np.sqrt(spread) * rng.standard_normal((count, classes))
    w[:, x] += np.sqrt(signal)
    order = np.argsort(-w, 1)[:, :kept]
    soft = np.exp(np.take_along_axis(w, order, 1) / 0.3)
    soft /= soft.sum(1, keepdims=True)
    numbers = rng.random((count, 2 * kept + 1))
    ids, weights = soften(np.full(count, x), numbers, gamma, classes, Curriculum(1, 0.3, kept))
    for rank in range(kept):
        for one, other in ((weights, soft), (ids == x, order == x), (weights**2, soft**2)):
            gap = one[:, rank].mean() - other[:, rank].mean()
            assert abs(gap) < 4.5 * np.hypot(one[:, rank].std(), other[:, rank].std()) / count**0.5
    whole, _ = soften(np.full(9, x), rng.random((9, 41)), gamma, classes, Curriculum(1, 0.3, 20))
    assert (np.sort(whole, 1) == np.arange(classes)).all()


def test_draws_without_replacement() -> None:
    drawn = distinct(np.random.default_rng(0).random((30_000, 3)), 4)
    codes, counts = np.unique(drawn @ np.array([16, 4, 1]), return_counts=True)
    assert len(codes) == 24  # ordered triples of four
    assert ((counts - 1250) ** 2 / 1250).sum() < 50  # χ² with 23 degrees of freedom: p = 1e-3


MODEL = ModelConfig(vocab_size=11, hidden=16, layers=2)


def config(temperature: float, steps: int = 3, **more: Any) -> Uniform.Config:
    return Uniform.Config(curriculum=Curriculum(steps, temperature, 4), **more)


def real_model() -> Any:
    torch.manual_seed(0)
    model = Transformer(MODEL).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)

    def logits(batch: MicroBatch) -> Tensor:
        with torch.no_grad():
            return model.logits(batch.ids, batch.context())

    return logits


def tokens(rows: int) -> Tensor:
    return torch.randint(0, 11, (rows, 9), generator=torch.Generator().manual_seed(0))


def test_without_temperature_inputs_are_tokens_again() -> None:
    model = real_model()

    def hard(batch: MicroBatch) -> Tensor:
        assert batch.mixture is not None
        return model(replace(batch, mixture=None))

    for temperature, equal in ((1e-9, True), (0.5, False)):
        objective = build_objective(config(temperature), MODEL, 0, 8)
        soft, plain = (losses(objective, m, tokens(8), range(8)) for m in (model, hard))
        assert (abs(soft["nelbo"] / plain["nelbo"] - 1) < 1e-12) == equal


def test_the_curriculum_ends_and_is_never_evaluated() -> None:
    objective, plain = (build_objective(c, MODEL, 0, 4) for c in (config(0.1, 2), Uniform.Config()))
    for step in range(4):
        indices = range(4 * step, 4 * step + 4)
        batch, other = (o.micro_batch(tokens(4), None, indices) for o in (objective, plain))
        assert (batch.mixture is not None) == (step < 2)
        assert batch.ids.equal(other.ids) == (step >= 2)
        evaluated = objective.evaluation_batch(tokens(4), None, indices)
        assert evaluated.mixture is None
        assert evaluated.ids.equal(plain.evaluation_batch(tokens(4), None, indices).ids)
        if step < 2:
            assert batch.noise is not None and batch.mixture is not None
            alpha = (-batch.noise).exp()
            assert float(alpha.min()) >= 0.05 and float(alpha.max()) <= 0.95
            assert batch.mixture.ids[:, :, 0].equal(batch.ids)
            assert (batch.fields["rate"] > 0).all()
            torch.testing.assert_close(
                batch.fields["odds"], (alpha / (1 - alpha)).expand(-1, 8), rtol=1e-12, atol=0
            )


def test_soft_inputs_belong_to_the_sample() -> None:
    documents = torch.zeros(12, 9, dtype=torch.long).masked_fill(torch.arange(9) > 6, -1)
    documents[4] = -1  # a window of padding alone

    def batch(rows: slice) -> MicroBatch:
        objective = build_objective(config(0.1), MODEL, 0, 6)
        return objective.micro_batch(tokens(12)[rows], documents[rows], range(12)[rows])

    whole = batch(slice(0, 12))
    parts = [batch(slice(i, i + 3)) for i in range(0, 12, 3)]
    together = [torch.cat(column) for column in zip(*(p.tensors() for p in parts), strict=True)]
    assert all(map(torch.equal, together, whole.tensors()))
    assert whole.mixture is not None
    padding = documents[:, 1:] < 0
    assert whole.ids[padding].equal(tokens(12)[:, 1:][padding])
    assert whole.mixture.weights[padding][:, 0].eq(1).all()
    assert whole.mixture.ids[padding][:, 0].equal(whole.ids[padding])
    one, many = batch(slice(0, 1)), batch(slice(0, 2))  # a step that is half in the curriculum
    assert one.mixture is not None and many.mixture is not None
    late = build_objective(config(0.1, 1), MODEL, 0, 6).micro_batch(tokens(2), None, (5, 6))
    assert late.mixture is not None and late.mixture.weights[1, :, 0].eq(1).all()


def test_a_mixture_embeds_as_the_mean_of_its_tokens() -> None:
    embedding = Embedding(MODEL).double()
    torch.nn.init.normal_(embedding.weight)
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 11, (2, 5, 3), generator=g)
    weights = torch.rand(2, 5, 3, generator=g, dtype=torch.float64).softmax(-1)
    found = embedding(ids[..., 0], Mixture(ids, weights))
    wanted = (embedding.weight[ids] * weights[..., None]).sum(2)
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-14)
    grads = [
        torch.autograd.grad((x * torch.arange(16)).square().sum(), embedding.weight)[0]
        for x in (found, wanted)
    ]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
    context = SequenceContext(torch.arange(5), "bidirectional", mixture=Mixture(ids, weights))
    model = Transformer(MODEL, ["embedding"]).double()
    model.embedding = embedding
    assert model.run_unit("embedding", None, ids[..., 0], context).equal(found)


def test_bad_curricula_are_refused() -> None:
    for bad in (Curriculum(-1), Curriculum(temperature=0.0), Curriculum(candidates=0)):
        assert len(bad.problems()) == 1
    assert not Curriculum(10, temperature=0.1).problems() and not Curriculum().problems()
    (idle,) = Curriculum(temperature=0.1).problems()
    assert idle[0] == "temperature" and "steps=0" in idle[1]


def test_a_curriculum_says_that_its_loss_is_no_bound() -> None:
    assert not Uniform.Config().notes()
    (note,) = Uniform.Config(curriculum=Curriculum(7)).notes()
    assert "up to step 7" in note and "bound is none in training" in note
