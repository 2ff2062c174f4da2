"""Uniform-state diffusion: its loss against three independent derivations, and its noise."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.config import ModelConfig
from models.losses import IGNORE, HeadOptions, LogitRows, evaluate_head, normalize_rows
from models.uniform_state import UniformState
from pretrain.objectives.base import Objective, build_objective
from pretrain.objectives.uniform import Uniform
from tests.enumerable import Joint, losses

VOCABULARY, LENGTH = 3, 2
MODEL = ModelConfig(vocab_size=VOCABULARY)
JOINT = Joint.random(VOCABULARY, LENGTH)
ONE = UniformState(1.0)


def fields(x: Tensor, z: Tensor, time: Tensor) -> dict[str, Tensor]:
    """Of α = 1 − t."""
    return {"targets": x, "noisy": z, "odds": (1 - time) / time, "rate": 1 / (1 - time)}


def rows(logits: Tensor, given: dict[str, Tensor], term: UniformState = ONE) -> Tensor:
    log_z, top = normalize_rows(logits, workspace := torch.empty_like(logits))
    loss, _ = term.rows(LogitRows(logits, 0, logits.shape[1], log_z, workspace, top), given)
    return loss


def rate_divergence(p: Tensor, x: Tensor, z: Tensor, time: Tensor) -> Tensor:
    """Divergence of the rates of two Markov chains that jump back from z, as it is defined."""
    classes, alpha = p.shape[-1], 1 - time
    clean = torch.nn.functional.one_hot(x, classes).to(p.dtype)

    def jumps(guess: Tensor) -> Tensor:
        marginal = alpha[:, None] * guess + (1 - alpha[:, None]) / classes
        return marginal / marginal.gather(1, z[:, None]) / (alpha * classes)[:, None]

    true, model = jumps(clean), jumps(p)
    away = torch.arange(classes) != z[:, None]
    return ((model - true + true * (true / model).log()) * away).sum(1)


def posterior_divergence(p: Tensor, x: Tensor, z: Tensor, time: Tensor, steps: int) -> Tensor:
    """steps · KL(q(z_s | z_t, x) ‖ q(z_s | z_t, p)) for s = t − 1/steps."""
    classes, alpha, before = p.shape[-1], 1 - time[:, None], 1 - time[:, None] + 1 / steps
    clean = torch.nn.functional.one_hot(x, classes).to(p.dtype)
    seen = torch.nn.functional.one_hot(z, classes).to(p.dtype)

    def posterior(guess: Tensor) -> Tensor:
        kept = alpha / before
        forward = kept * seen + (1 - kept) / classes  # q(z_t | z_s)
        weights = forward * (before * guess + (1 - before) / classes)
        return weights / weights.sum(1, keepdim=True)

    true = posterior(clean)
    return steps * (true * (true / posterior(p)).log()).sum(1)


def example(classes: int, count: int = 60) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, x, z (half of them x) and times."""
    g = torch.Generator().manual_seed(classes)
    logits = torch.randn(count, classes, generator=g, dtype=torch.float64)
    x, z = torch.randint(classes, (2, count), generator=g)
    z = torch.where(torch.arange(count) % 2 == 0, x, z)
    time = torch.rand(count, generator=g, dtype=torch.float64) * 0.98 + 0.01
    return logits, x, z, time


@pytest.mark.parametrize("classes", [2, 3, 7, 50])
def test_the_closed_form_is_the_divergence_of_rates(classes: int) -> None:
    logits, x, z, time = example(classes)
    found = rows(logits, fields(x, z, time))
    wanted = rate_divergence(logits.softmax(1), x, z, time)
    torch.testing.assert_close(found, wanted, rtol=2e-14, atol=1e-14)
    assert (found > 0).all()
    wrong = rows(logits, fields(z, x, time))  # x and z play different parts
    assert not torch.allclose(wrong, wanted, rtol=1e-3)


@pytest.mark.parametrize("classes", [2, 7, 50])
def test_the_closed_form_is_the_limit_of_small_steps(classes: int) -> None:
    logits, x, z, time = example(classes)
    found = rows(logits, fields(x, z, time))
    errors = [
        float((posterior_divergence(logits.softmax(1), x, z, time, n) / found - 1).abs().max())
        for n in (2_000, 20_000)
    ]
    assert errors[1] < 1e-2 and errors[1] < 0.15 * errors[0]


def test_certainty_of_the_truth_costs_nothing() -> None:
    logits, x, z, time = example(7)
    sure = torch.nn.functional.one_hot(x, 7).double() * 45
    found = rows(sure, fields(x, z, time))
    assert found.abs().max() < 1e-12
    wrong = torch.nn.functional.one_hot((x + 1) % 7, 7).double() * 45
    assert rows(wrong, fields(x, z, time)).min() > 0.05
    hidden = dict(fields(x, z, time), targets=torch.full_like(x, IGNORE))
    assert rows(logits, hidden).eq(0).all()


@pytest.mark.parametrize("clip", [None, 2.0])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_gradient_is_that_of_the_definition(clip: float | None, softcap: float | None) -> None:
    logits, x, z, time = example(7)
    x[5] = IGNORE
    logits.requires_grad_()
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    wanted = rate_divergence(capped.softmax(1), x.clamp(min=0), z, time) * (x != IGNORE)
    if clip is not None:
        assert (wanted > clip).any() and (wanted < clip).any()
        wanted = wanted * (clip / wanted.detach().clamp(min=1e-30)).clamp(max=1)
    (gradient,) = torch.autograd.grad(0.25 * wanted.sum(), logits)
    result = evaluate_head(
        logits.detach(), torch.eye(7, dtype=torch.float64), fields(x, z, time),
        [UniformState(8.0, weight=2.0, clip=clip)], HeadOptions(7, softcap, 16), gradients=True,
    )  # fmt: skip
    assert float(result.sums["nelbo"]) == pytest.approx(float(wanted.detach().sum()), rel=1e-12)
    torch.testing.assert_close(result.d_hidden, gradient, rtol=1e-10, atol=1e-13)


def test_float32_is_enough_for_a_real_vocabulary() -> None:
    """Absolute errors are those of log Σ exp, times the weight 1/t that a row has."""
    classes, count = 32_001, 24
    g = torch.Generator().manual_seed(0)
    time = torch.logspace(-3, -1e-3, count, dtype=torch.float64).clamp(max=0.999)
    for scale, peak, same in itertools.product((0.0, 1.0, 6.0), (0.0, 12.0), (False, True)):
        logits = scale * torch.randn(count, classes, generator=g)
        x, z = torch.randint(classes, (2, count), generator=g)
        logits[torch.arange(count), x] += peak
        given = fields(x, x if same else z, time)
        single, double = rows(logits, given).double(), rows(logits.double(), given)
        assert ((single - double).abs() < 2e-6 * double + 2e-6 / time).all()


Posterior = Callable[[float], Tensor]
"""t to the probabilities of both tokens given z, float64 [z[0], z[1], LENGTH, VOCABULARY]."""


def kernel(time: float) -> Tensor:
    """p(z[i] | x[i]), float64 [z, x]."""
    return (1 - time) * torch.eye(VOCABULARY, dtype=torch.float64) + time / VOCABULARY


def leave_one_out(time: float) -> Tensor:
    """p(x[i] | the other z)."""
    first = (kernel(time) @ JOINT.table.T).expand(VOCABULARY, -1, -1)
    second = (kernel(time) @ JOINT.table)[:, None].expand(-1, VOCABULARY, -1)
    table = torch.stack((first, second), 2)
    return table / table.sum(-1, keepdim=True)


def full(time: float) -> Tensor:
    """p(x[i] | z)."""
    m = kernel(time)
    both = torch.einsum("ab,ya,zb->yzab", JOINT.table, m, m)
    table = torch.stack((both.sum(3), both.sum(2)), 2)
    return table / table.sum(-1, keepdim=True)


def exact_bounds(posterior: Posterior, nodes: int = 64) -> Tensor:
    """The NELBO of every x, [VOCABULARY] * LENGTH, by Gauss-Legendre quadrature over s, with
    t = s²(3 − 2s)."""
    points, weights = np.polynomial.legendre.leggauss(nodes)
    total = torch.zeros_like(JOINT.table)
    pairs = torch.tensor(list(JOINT.sequences()))
    z, x = (half.repeat_interleave(r, 0).repeat(9 // r, 1) for half, r in ((pairs, 9), (pairs, 1)))
    for s, weight in zip((points + 1) / 2, weights / 2, strict=True):
        time, slope = float(s * s * (3 - 2 * s)), float(6 * s * (1 - s))
        table = posterior(time)[z[:, 0], z[:, 1]].log()
        times = torch.full((x.numel(),), time, dtype=torch.float64)
        found = rows(table.flatten(0, 1), fields(x.flatten(), z.flatten(), times)).view(-1, LENGTH)
        likely = kernel(time)[z, x].prod(1)
        total += weight * slope * (likely * found.sum(1)).view(9, 3, 3).sum(0)
    return total


def test_leaving_out_a_token_gives_the_likelihood_and_looking_at_it_does_not() -> None:
    right, wrong = exact_bounds(leave_one_out), exact_bounds(full)
    torch.testing.assert_close(right, -JOINT.table.log(), rtol=0, atol=2e-5)
    entropy = -(JOINT.table * JOINT.table.log()).sum()
    assert (JOINT.table * wrong).sum() > entropy + 0.3


def objective(config: Any = None, batch: int = 1, seed: int = 0, model: Any = MODEL) -> Objective:
    return build_objective(config or Uniform.Config(), model, seed, batch)


def as_model(posterior: Posterior) -> Any:
    def logits(batch: Any) -> Tensor:
        times = (1 - (-batch.noise[:, 0]).exp()).tolist()
        pairs = zip(batch.ids.tolist(), times, strict=True)
        return torch.stack([posterior(t)[z[0], z[1]].log() for z, t in pairs])

    return logits


@pytest.mark.parametrize("evaluation", [False, True])
def test_the_objective_estimates_the_bound(evaluation: bool) -> None:
    x, draws, groups = (0, 0), 128, 16
    tokens = torch.tensor([[0, *x]]).repeat(draws, 1)
    found = [
        LENGTH * losses(objective(batch=draws), as_model(leave_one_out), tokens,
                        range(g * draws, (g + 1) * draws), evaluation)["nelbo"]
        for g in range(groups)
    ]  # fmt: skip
    mean = sum(found) / groups
    error = (sum((f - mean) ** 2 for f in found) / (groups - 1) / groups) ** 0.5
    bound = -JOINT.log_probability(x)
    assert error < 0.25 * bound  # replaced tokens near t = 0 cost log(1/t)/t
    assert abs(mean - bound) < 4 * error + 5e-3 * bound  # the ends of time are left out


def test_only_tokens_that_are_predicted_are_drawn_and_each_as_often() -> None:
    model = ModelConfig(vocab_size=6, mask_token=True)
    tokens = torch.full((40, 2001), 3)
    batch = objective(batch=40, model=model).micro_batch(tokens, None, range(40))
    assert int(batch.ids.max()) == 4  # neither the mask token, 5, nor a padded row
    assert batch.noise is not None
    alpha = (-batch.noise[:, 0]).exp()
    order = alpha.argsort()
    assert (alpha[order].diff() > 0).all() and alpha.min() < 0.05 and alpha.max() > 0.95
    for token in range(5):
        share = (batch.ids == token).double().mean(1)
        wanted = (1 - alpha) / 5 + alpha * (token == 3)
        assert ((share - wanted).abs() < 5 * (wanted * (1 - wanted) / 2000).sqrt() + 1e-3).all()
    odds, rate = batch.fields["odds"][:, 0], batch.fields["rate"][:, 0]
    torch.testing.assert_close(odds, alpha / (1 - alpha), rtol=1e-10, atol=0)
    torch.testing.assert_close(rate, 0.999 / alpha, rtol=1e-10, atol=0)


def test_noise_belongs_to_the_sample() -> None:
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (12, 9), generator=g)
    documents = torch.zeros_like(tokens).masked_fill(torch.arange(9) > 6, -1)
    whole = objective(batch=12).micro_batch(tokens, documents, range(40, 52))
    assert whole.noise is not None and whole.documents is not None
    for size in (1, 3, 4):
        parts = [
            objective(batch=12).micro_batch(
                tokens[i : i + size], documents[i : i + size], range(40 + i, 40 + i + size)
            )
            for i in range(0, 12, size)
        ]
        assert torch.equal(torch.cat([part.ids for part in parts]), whole.ids)
        assert torch.equal(torch.cat([part.noise for part in parts]), whole.noise)  # type: ignore[misc]
        for name, value in whole.fields.items():
            assert torch.equal(torch.cat([part.fields[name] for part in parts]), value)
    padding = documents[:, 1:] < 0
    assert torch.equal(whole.ids[padding], tokens[:, 1:][padding])
    assert (whole.fields["targets"][padding] == IGNORE).all()
    other = objective(batch=12, seed=1).micro_batch(tokens, documents, range(40, 52))
    assert not torch.equal(other.ids, whole.ids)
    evaluated = [
        objective(batch=n, seed=seed).evaluation_batch(tokens, documents, range(12)).ids
        for n, seed in ((12, 0), (3, 1))
    ]
    assert torch.equal(*evaluated)


def test_a_clip_trains_but_does_not_evaluate() -> None:
    plain, clipped = objective(), objective(Uniform.Config(clip=1.5))
    tokens = torch.tensor([[0, 2, 0]]).repeat(32, 1)
    model = as_model(full)
    exact, both = (losses(o, model, tokens, range(32)) for o in (plain, clipped))
    assert exact["nelbo"] == both["nelbo"] > both["clipped"] > 0
    assert exact["denoising"] == both["denoising"] > 0
    optimised = [term.name for term in clipped.terms({"tokens": 1}) if term.weight]
    assert optimised == ["clipped"]
    assert [t.name for t in plain.terms({"tokens": 1}) if t.weight] == ["nelbo"]
    found = [losses(o, model, tokens, range(32), True) for o in (plain, clipped)]
    assert found[0] == found[1] and list(found[0]) == ["nelbo"]


def test_what_does_not_go_together_is_refused() -> None:
    assert Uniform.Config(clip=0.0).problems()[0][0] == "clip"
    ((path, text),) = Uniform.Config().model_problems(ModelConfig(vocab_size=2, mask_token=True))
    assert path == "type" and "two" in text
    assert not Uniform.Config().model_problems(MODEL)
