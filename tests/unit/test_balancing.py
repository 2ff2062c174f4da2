"""Balancing losses against their formulas, and as sums over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from models.balancing import entropy, global_balance, router_z, sequence_balance
from models.collectives import bound
from parallel.collectives import GroupAxis
from tests.distributed import run_ranks

SEQUENCES, LENGTH, EXPERTS = 4, 6, 5
F64 = torch.float64


def routed() -> tuple[Tensor, Tensor]:
    """Probabilities and a map with one to four active experts, [SEQUENCES · LENGTH, EXPERTS]."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(SEQUENCES * LENGTH, EXPERTS, generator=g, dtype=F64) * 2
    number = torch.randint(1, 5, (SEQUENCES * LENGTH, 1), generator=g)
    place = logits.argsort(dim=-1, descending=True).argsort(dim=-1)
    return logits.softmax(-1), place < number


@pytest.mark.parametrize("active", [None, 1.7])
def test_sequence_balance_is_the_formula(active: float | None) -> None:
    probabilities, map = routed()
    total = 0.0
    for n in range(SEQUENCES):
        rows = range(n * LENGTH, (n + 1) * LENGTH)
        f = [sum(float(map[t, e]) for t in rows) / LENGTH for e in range(EXPERTS)]
        p = [sum(float(probabilities[t, e]) for t in rows) / LENGTH for e in range(EXPERTS)]
        a = active or sum(f)
        total += LENGTH * EXPERTS * sum(f[e] / a * p[e] for e in range(EXPERTS))
    assert float(sequence_balance(probabilities, map, SEQUENCES, active=active)) == pytest.approx(
        total, rel=1e-13
    )


def test_is_the_loss_of_mixtral_divided_by_k() -> None:
    """For one sequence and a fixed number of experts."""
    logits = torch.randn(30, 8, generator=torch.Generator().manual_seed(2))
    chosen = torch.zeros(30, 8, dtype=torch.bool).scatter(1, logits.topk(2).indices, True)
    ours = sequence_balance(logits.softmax(-1), chosen, 1) / 30
    theirs = load_balancing_loss_func((logits,), num_experts=8, top_k=2)
    torch.testing.assert_close(ours, theirs / 2, rtol=1e-6, atol=0)


def test_equal_use_costs_one_per_token() -> None:
    even = torch.full((8, 4), 0.25, dtype=F64)
    map = torch.eye(4, dtype=torch.bool).repeat(2, 1) | torch.eye(4, dtype=torch.bool).roll(
        1, 0
    ).repeat(2, 1)
    assert float(sequence_balance(even, map, 2)) == pytest.approx(8)
    assert float(global_balance(even, map.double().mean(0))) == pytest.approx(8)


@pytest.mark.parametrize("active", [None, 1.7])
def test_global_balance_is_the_formula(active: float | None) -> None:
    probabilities, map = routed()
    f = map.double().mean(0)
    a = active or float(f.sum())
    p = probabilities.mean(0)
    expected = len(map) * EXPERTS * sum(float(f[e] / a * p[e]) for e in range(EXPERTS))
    assert float(global_balance(probabilities, f, active)) == pytest.approx(expected, rel=1e-13)


def losses(probabilities: Tensor, map: Tensor, sequences: int, use: Tensor) -> list[Tensor]:
    return [
        sequence_balance(probabilities, map, sequences),
        global_balance(probabilities, use),
        router_z(probabilities.log()),
        entropy(probabilities.log()),
    ]


def test_micro_batches_add_up() -> None:
    """Values and gradients; a product of averages over the micro-batch would not."""
    probabilities, map = routed()
    use = torch.rand(EXPERTS, dtype=F64, generator=torch.Generator().manual_seed(1))
    leaf = probabilities.clone().requires_grad_()
    whole = losses(leaf, map, SEQUENCES, use)
    parts = [
        losses(p, m, 1, use) for p, m in zip(leaf.split(LENGTH), map.split(LENGTH), strict=True)
    ]
    for total, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        together = torch.stack(pieces).sum()
        torch.testing.assert_close(total, together, rtol=1e-13, atol=0)
        gradients = [
            torch.autograd.grad(value, leaf, retain_graph=True)[0] for value in (total, together)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-15)
    crossed = sequence_balance(leaf, map, 1), sequence_balance(leaf, map, 2)
    assert abs(crossed[0] - crossed[1]) > 1e-3


def share(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Loss and gradient of the positions that this rank has of every sequence."""
    part = [
        x.unflatten(0, (SEQUENCES, LENGTH)).chunk(world, 1)[rank].flatten(0, 1) for x in routed()
    ]
    probabilities = part[0].clone().requires_grad_()
    with bound({"cp": GroupAxis(dist.group.WORLD)}):  # type: ignore[arg-type]
        loss = sequence_balance(probabilities, part[1], SEQUENCES, axes=("cp",))
    loss.backward()
    assert probabilities.grad is not None
    return loss.detach(), probabilities.grad


def test_positions_on_several_ranks_add_up() -> None:
    probabilities, map = routed()
    probabilities.requires_grad_()
    whole = sequence_balance(probabilities, map, SEQUENCES)
    (gradient,) = torch.autograd.grad(whole, probabilities)
    results = run_ranks(2, share)
    torch.testing.assert_close(sum(loss for loss, _ in results), whole.detach(), rtol=1e-13, atol=0)
    gradients = torch.cat([g.unflatten(0, (SEQUENCES, -1)) for _, g in results], 1).flatten(0, 1)
    torch.testing.assert_close(gradients, gradient, rtol=1e-13, atol=0)


def test_router_z_and_entropy() -> None:
    logits = torch.tensor([[0.0, 1.0], [2.0, -1.0]], dtype=F64)
    z = [torch.tensor(row, dtype=F64).exp().sum().log() for row in logits.tolist()]
    assert float(router_z(logits)) == pytest.approx(float(z[0] ** 2 + z[1] ** 2), rel=1e-14)
    logits = torch.tensor([[7.0, 7.0], [0.0, 900.0]], dtype=F64)
    assert float(entropy(logits)) == pytest.approx(0.6931471805599453, rel=1e-14)


@pytest.mark.parametrize("function", [router_z, entropy])
def test_gradients(function: Callable[[Tensor], Tensor]) -> None:
    logits = routed()[0].log().requires_grad_()
    assert torch.autograd.gradcheck(function, (logits,))


def test_entropy_of_a_certain_choice_has_a_finite_gradient() -> None:
    """Where a probability is exactly 0."""
    logits = torch.tensor([[0.0, 2000.0]], requires_grad=True)
    entropy(logits).backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
