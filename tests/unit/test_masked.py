"""Masked diffusion: its noise, its bound on enumerable distributions, and its estimators."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.config import ModelConfig
from models.losses import IGNORE, CrossEntropy
from models.positions import NoPE
from pretrain.objectives.base import Objective, build_objective
from pretrain.objectives.masked import Masked
from tests.enumerable import Joint, Logits, losses, masked_model

VOCABULARY, LENGTH = 3, 4
MODEL = ModelConfig(vocab_size=VOCABULARY + 1, mask_token=True)
MASK = MODEL.mask_id
JOINT = Joint.random(VOCABULARY, LENGTH)
KINDS: dict[str, Any] = {"time": Masked.Config(), "count": Masked.Config(estimator="count")}


def objective(config: Any, batch: int = 1, seed: int = 0) -> Objective:
    return build_objective(config, MODEL, seed, batch)


def window(x: tuple[int, ...], rows: int = 1) -> Tensor:
    """A window whose first token the model does not see."""
    return torch.tensor([[0, *x]]).repeat(rows, 1)


Table = Callable[[tuple[int, ...], int], Tensor]
"""(what is seen, position) to probabilities."""


def exact_bound(table: Table, x: tuple[int, ...]) -> float:
    """Σ over sets S of masked positions of (k − 1)! (n − k)! / n! Σ_{i ∈ S} −log p(x[i] | rest)."""
    n, total = len(x), 0.0
    for k in range(1, n + 1):
        weight = math.factorial(k - 1) * math.factorial(n - k) / math.factorial(n)
        for chosen in itertools.combinations(range(n), k):
            seen = tuple(MASK if i in chosen else v for i, v in enumerate(x))
            total -= weight * sum(float(table(seen, i)[x[i]].log()) for i in chosen)
    return total


def perfect(seen: tuple[int, ...], position: int) -> Tensor:
    return JOINT.denoise(seen, MASK)[position]


def inconsistent(seen: tuple[int, ...], position: int) -> Tensor:
    """Conditionals that belong to no joint distribution."""
    generator = torch.Generator().manual_seed(hash((seen, position)) % 2**31)
    return torch.rand(VOCABULARY, generator=generator, dtype=torch.float64).softmax(0)


def as_model(table: Table) -> Logits:
    def logits(batch: Any) -> Tensor:
        rows = [[table(tuple(r.tolist()), i).log() for i in range(LENGTH)] for r in batch.ids]
        return torch.stack([torch.stack(row) for row in rows])

    return logits


def test_the_bound_is_exact_for_a_perfect_denoiser() -> None:
    for x in JOINT.sequences():
        assert exact_bound(perfect, x) == pytest.approx(-JOINT.log_probability(x), abs=1e-13)


def test_the_bound_is_the_mean_over_orders_and_above_the_likelihood_of_that_mixture() -> None:
    likelihood, gaps = 0.0, []
    for x in JOINT.sequences():
        chains = []
        for order in itertools.permutations(range(LENGTH)):
            seen, chain = [MASK] * LENGTH, 0.0
            for i in order:
                chain += float(inconsistent(tuple(seen), i)[x[i]].log())
                seen[i] = x[i]
            chains.append(chain)
        bound = exact_bound(inconsistent, x)
        assert bound == pytest.approx(-sum(chains) / len(chains), abs=1e-13)
        probability = sum(map(math.exp, chains)) / len(chains)
        likelihood += probability
        gaps.append(bound + math.log(probability))
    assert likelihood == pytest.approx(1, abs=1e-12)
    assert min(gaps) > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("evaluation", [False, True])
def test_the_objective_estimates_the_bound(kind: str, evaluation: bool) -> None:
    x, draws, groups = (2, 0, 1, 1), 64, 24
    found = [
        LENGTH * losses(objective(KINDS[kind], draws), as_model(inconsistent),
                        window(x, draws), range(g * draws, (g + 1) * draws), evaluation)["nelbo"]
        for g in range(groups)
    ]  # fmt: skip
    mean = sum(found) / groups
    error = (sum((f - mean) ** 2 for f in found) / (groups - 1) / groups) ** 0.5
    # (1 − ε) t of the tokens are masked, so that a share ε of the bound is missing at most
    bound = exact_bound(inconsistent, x)
    assert abs(mean - bound) < 4 * error + 2e-3 * bound
    assert error < 0.1 * bound


def test_stratification_and_exact_counts_lower_the_variance() -> None:
    x, draws = (2, 0, 1, 1), 32

    def deviation(kind: str, strata: int) -> float:
        found = torch.tensor([
            losses(objective(KINDS[kind], strata), masked_model(JOINT, MASK), window(x, draws),
                   range(g * draws, (g + 1) * draws))["nelbo"] for g in range(24)
        ])  # fmt: skip
        return float(found.std())

    time, count, stratified = deviation("time", 1), deviation("count", 1), deviation("count", draws)
    assert stratified < 0.8 * count < 0.8 * time


def test_flat_weights_train_but_do_not_evaluate() -> None:
    elbo, flat = objective(Masked.Config()), objective(Masked.Config(weighting="flat"))
    tokens = window((2, 0, 1, 1), 16)
    model = as_model(inconsistent)
    bound = losses(elbo, model, tokens, range(16))
    both = losses(flat, model, tokens, range(16))
    assert both["nelbo"] == bound["nelbo"] != both["flat"]
    assert losses(flat, model, tokens, range(16), True) == losses(elbo, model, tokens, range(16),
                                                                  True)  # fmt: skip
    optimised = [term for term in flat.terms({"tokens": 1}) if term.weight]
    assert optimised == [CrossEntropy(1.0, name="flat")]
    batch = flat.micro_batch(tokens, None, range(16))
    masked = batch.ids == MASK
    logits = model(batch)
    plain = -logits.gather(2, tokens[:, 1:, None])[..., 0][masked].sum() / masked.numel()
    assert both["flat"] == pytest.approx(float(plain), rel=1e-12)


def test_weights_are_those_of_the_schedule() -> None:
    """The share of masked tokens that is expected, times the weight, is 1 − ε at every time."""
    tokens = torch.zeros(64, 2001, dtype=torch.long)
    batch = objective(Masked.Config(), 64).micro_batch(tokens, None, range(64))
    masked = (batch.fields["labels"] != IGNORE).double().mean(1)
    time = 1 / batch.fields["weights"].amax(1)
    assert ((masked - (1 - 1e-3) * time).abs() < 5 * (time / 2000).sqrt() + 1e-3).all()
    assert (time.sort().values * 64 - torch.arange(64)).abs().max() <= 1.1  # one per stratum
    exact = objective(KINDS["count"], 64).micro_batch(tokens, None, range(64))
    k = (exact.fields["labels"] != IGNORE).sum(1)
    torch.testing.assert_close(exact.fields["weights"].amax(1), 2000 / k.double())


@pytest.mark.parametrize("kind", KINDS)
def test_noise_belongs_to_the_sample(kind: str) -> None:
    tokens = torch.randint(0, VOCABULARY, (12, 9), generator=torch.Generator().manual_seed(1))
    documents = torch.zeros_like(tokens).masked_fill(torch.arange(9) > 6, -1)
    whole = objective(KINDS[kind], 12).micro_batch(tokens, documents, range(40, 52))
    for size in (1, 3, 4):
        parts = [
            objective(KINDS[kind], 12).micro_batch(
                tokens[i : i + size], documents[i : i + size], range(40 + i, 40 + i + size)
            )
            for i in range(0, 12, size)
        ]
        assert torch.equal(torch.cat([part.ids for part in parts]), whole.ids)
        for name, value in whole.fields.items():
            assert torch.equal(torch.cat([part.fields[name] for part in parts]), value)
    padding = documents[:, 1:] < 0
    assert (whole.ids[padding] != MASK).all() and (whole.fields["targets"][padding] == IGNORE).all()
    assert whole.documents is not None and (whole.documents[padding] == 0).all()
    other = objective(KINDS[kind], 12, seed=1).micro_batch(tokens, documents, range(40, 52))
    assert not torch.equal(other.ids, whole.ids)
    evaluated = [
        objective(KINDS[kind], n, seed).evaluation_batch(tokens, documents, range(12)).ids
        for n, seed in ((12, 0), (3, 1))
    ]
    assert torch.equal(*evaluated)


def test_a_model_without_a_mask_token_is_refused() -> None:
    ((path, text),) = Masked.Config().model_problems(ModelConfig())
    assert path == "type" and "model.mask_token=true" in text
    assert not Masked.Config().model_problems(MODEL)


def test_masks_without_positions_are_refused() -> None:
    """Nothing would tell one hidden token from another."""
    ((path, text),) = Masked.Config().model_problems(replace(MODEL, position=NoPE.Config()))
    assert path == "type" and "model.position=nope" in text
