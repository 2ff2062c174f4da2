"""log p(answer | prompt) against distributions small enough to be summed over."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from models.likelihood import (
    Estimate,
    Predict,
    Request,
    causal_likelihood,
    check_requests,
    greedy_answer,
    masked_likelihood,
    uniform_likelihood,
)
from tests.enumerable import Joint

VOCABULARY, LENGTH = 3, 4
MASK = VOCABULARY
JOINT = Joint.random(VOCABULARY, LENGTH)


def perfect(ids: Tensor, noise: Tensor | None) -> Tensor:
    assert noise is None
    return torch.stack([JOINT.denoise(row.tolist(), MASK)[: len(row)] for row in ids]).log()


def inconsistent(ids: Tensor, noise: Tensor | None) -> Tensor:
    """Conditionals that belong to no distribution."""
    rows = []
    for row in ids.tolist():
        code = sum((v + 1) * 5**i for i, v in enumerate(row))
        generator = torch.Generator().manual_seed(code)
        rows.append(torch.randn(len(row), VOCABULARY, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


def next_token(ids: Tensor, noise: Tensor | None) -> Tensor:
    rows = []
    for row in ids.tolist():
        known = [dict(enumerate(row[: i + 1])) for i in range(len(row))]
        rows.append(torch.stack([JOINT.conditional(i + 1, k) for i, k in enumerate(known)]))
    return torch.stack(rows).log()


def truth(request: Request) -> float:
    """log P(answer | prompt), summed over what comes behind them."""

    def of(ids: Sequence[int]) -> float:
        return math.log(float(JOINT.table[tuple(ids)].sum()))

    before = of(request.prompt) if request.prompt else 0.0
    return of(request.prompt + request.answer) - before


def requests(least: int = 0) -> list[Request]:
    return [
        Request(ids[:cut], ids[cut:])
        for length in range(1, LENGTH + 1)
        for ids in itertools.product(range(VOCABULARY), repeat=length)
        for cut in range(least, length)
    ]


def test_a_perfect_masked_model_gives_the_likelihood_exactly() -> None:
    asked = requests()
    found = masked_likelihood(perfect, asked, MASK, draws=16, batch=64)
    for request, estimate in zip(asked, found, strict=True):
        assert estimate.error == 0
        assert estimate.nats == pytest.approx(truth(request), abs=1e-12)


def test_a_causal_model_gives_it_exactly() -> None:
    asked = requests(1)
    found = causal_likelihood(next_token, asked, batch=7)
    for request, estimate in zip(asked, found, strict=True):
        assert estimate.nats == pytest.approx(truth(request), abs=1e-12)
    first = (2,)
    continuations = itertools.product(range(VOCABULARY), repeat=3)
    greedy = causal_likelihood(next_token, [Request(first, ids) for ids in continuations])
    assert sum(bool(estimate.greedy) for estimate in greedy) == 1


def test_other_conditionals_give_the_mean_over_orders() -> None:
    request = Request((1,), (2, 0, 2))
    chains = []
    for order in itertools.permutations(range(3)):
        ids, chain = [1, MASK, MASK, MASK], 0.0
        for place in order:
            logits = inconsistent(torch.tensor([ids]), None)[0, 1 + place]
            chain += float(logits.log_softmax(-1)[request.answer[place]])
            ids[1 + place] = request.answer[place]
        chains.append(chain)
    [found] = masked_likelihood(inconsistent, [request], MASK, draws=8)
    assert found.nats == pytest.approx(statistics.mean(chains), abs=1e-12)


@pytest.mark.parametrize("draws", [2, 6, 14])
def test_draws_estimate_the_exact_sum_and_know_their_error(draws: int) -> None:
    request = Request((), (2, 0, 1, 1))
    [exact] = masked_likelihood(inconsistent, [request], MASK, draws=16)
    assert exact.error == 0
    seeds = 300
    found = [
        masked_likelihood(inconsistent, [request], MASK, draws=draws, seed=seed, batch=draws)[0]
        for seed in range(seeds)
    ]
    mean = statistics.mean(estimate.nats for estimate in found)
    error = statistics.mean(estimate.error**2 for estimate in found) ** 0.5
    spread = statistics.stdev(estimate.nats for estimate in found)
    assert 0 < error == pytest.approx(spread, rel=0.15)
    assert abs(mean - exact.nats) < 4 * spread / seeds**0.5


def test_an_estimate_belongs_to_its_request() -> None:
    asked = [Request((), (2, 0, 1, 1)), Request((1,), (0, 2, 1)), Request((), (0, 2, 1, 1))]
    together = masked_likelihood(inconsistent, asked, MASK, draws=4, seed=3, batch=5)
    alone = [masked_likelihood(inconsistent, [r], MASK, draws=4, seed=3)[0] for r in asked[::-1]]
    assert together == alone[::-1]
    other = masked_likelihood(inconsistent, asked, MASK, draws=4, seed=4)
    assert all(a.nats != b.nats for a, b in zip(together, other, strict=True))


def test_blocks_add_up() -> None:
    for request in requests()[-81:]:
        for size in (1, 2, 3):
            parts = request.blocks(size)
            assert [*parts[0].prompt, *(v for part in parts for v in part.answer)] == [
                *request.prompt, *request.answer
            ]  # fmt: skip
            found = Estimate.total(masked_likelihood(perfect, parts, MASK, draws=16))
            assert found.nats == pytest.approx(truth(request), abs=1e-12)


def test_guidance_moves_away_from_the_model_without_a_prompt() -> None:
    request = Request((1, 2), (0,))
    seen = inconsistent(torch.tensor([[1, 2, MASK]]), None)[0, 2]
    blind = inconsistent(torch.tensor([[MASK, MASK, MASK]]), None)[0, 2]
    [found] = masked_likelihood(inconsistent, [request], MASK, guidance=0.5)
    wanted = (blind + 1.5 * (seen - blind)).log_softmax(-1)[0]
    assert found.nats == pytest.approx(float(wanted), abs=1e-12)


def test_one_answer_is_the_greedy_one() -> None:
    answers = list(itertools.product(range(VOCABULARY), repeat=3))
    greedy = [ids for ids in answers if greedy_answer(inconsistent, Request((1,), ids), MASK)]
    assert len(greedy) == 1


def posterior(joint: Joint, alone: bool) -> Predict:
    """p(x[i] | z) of tokens that may be replaced by any, or p(x[i] | z without z[i]), which is what
    a uniform-state model learns."""
    xs, prior = torch.tensor(list(joint.sequences())), joint.table.flatten()

    def predict(ids: Tensor, noise: Tensor | None) -> Tensor:
        assert noise is not None
        alpha = (-noise[:, :1, None]).exp()
        likely = (alpha * (ids[:, None] == xs) + (1 - alpha) / joint.vocabulary).log()  # [B, X, S]
        weights = (likely.sum(2, keepdim=True) - likely * alone + prior.log()[:, None]).exp()
        chances = [(weights * (xs == v)).sum(1) for v in range(joint.vocabulary)]
        return torch.stack(chances, 2).log()

    return predict


def test_uniform_noise_gives_the_likelihood_of_the_whole() -> None:
    """In the mean over the distribution; and a model that does not look away from a token itself,
    however well it knows the truth, is far off."""
    joint = Joint.random(3, 2, seed=4)
    asked = [Request(ids[:1], ids[1:]) for ids in joint.sequences()]
    chances = joint.table.flatten()
    entropy = -float((chances * chances.log()).sum())
    found = {}
    for alone in (True, False):
        model = posterior(joint, alone)
        each = uniform_likelihood(model, asked, 3, epsilon=1e-3, draws=1000, seed=1, batch=999)
        nats, error = torch.tensor([(e.nats, e.error) for e in each], dtype=torch.float64).T
        found[alone] = -float((chances * nats).sum()), float((chances * error).norm())
    bound, error = found[True]
    assert 0 < error < 0.1
    assert abs(bound - entropy) < 4 * error
    bound, _ = found[False]
    assert bound > entropy + 0.4


def test_what_cannot_be_scored_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 \+ 2 tokens is longer than the 4 tokens"):
        check_requests([Request((0, 1), (1,)), Request((0, 1, 2), (1, 1))], 4)
    with pytest.raises(ValueError, match="continuation is empty"):
        check_requests([Request((0, 1), ())], 4)
    with pytest.raises(ValueError, match="even number"):
        masked_likelihood(perfect, [Request((), (1, 2))], MASK, draws=5)
    check_requests([Request((0, 1), (1, 1))], 4)
