"""LapSum against bisection, its limits, its gradients, numbers that break the plain formula; the
budget against water filling by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from models.lapsum import Budget, budget_split, lapsum

F64 = torch.float64
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-12}


def logits(*shape: int, seed: int = 0, dtype: torch.dtype = F64, spread: float = 1.0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=dtype) * spread


def bisection(r: Tensor, k: Tensor | float, scale: float = 1.0) -> Tensor:
    """Gates by halving an interval that holds the threshold, in float64."""
    r = r.double()
    k = torch.as_tensor(k, dtype=F64).expand(r.shape[:-1])[..., None]
    low = r.amin(-1, keepdim=True) - 60 * scale
    high = r.amax(-1, keepdim=True) + 60 * scale

    def gates(t: Tensor) -> Tensor:
        z = (r - t) / scale
        return torch.where(z <= 0, 0.5 * z.clamp(max=0).exp(), 1 - 0.5 * (-z.clamp(min=0)).exp())

    for _ in range(100):
        middle = (low + high) / 2
        too_many = gates(middle).sum(-1, keepdim=True) > k
        low, high = torch.where(too_many, middle, low), torch.where(too_many, high, middle)
    return gates((low + high) / 2)


@pytest.mark.parametrize("n", [1, 2, 7, 32, 256])
@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0])
def test_against_bisection(n: int, scale: float) -> None:
    for seed, spread in enumerate((0.01, 1.0, 8.0)):
        r = logits(40, n, seed=seed, spread=spread)
        k = torch.linspace(0.02, 0.98, 40, dtype=F64) * n
        torch.testing.assert_close(lapsum(r, k, scale), bisection(r, k, scale), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("n", [2, 32, 256])
def test_properties(n: int, dtype: torch.dtype) -> None:
    """The sum is k; gates lie in [0, 1], follow the order of the logits and grow with k; a common
    shift changes nothing, a permutation permutes."""
    tolerance = TOLERANCE[dtype]
    r = logits(50, n, dtype=dtype, spread=2)
    previous = torch.zeros_like(r)
    for share in (1e-6, 0.1, 0.5, 0.93):
        k = share * n
        p = lapsum(r, k)
        assert p.dtype == dtype
        assert (p.double().sum(-1) - k).abs().max() <= tolerance
        assert p.min() >= 0 and p.max() <= 1
        assert (p.gather(-1, r.argsort(dim=-1)).diff(dim=-1) >= 0).all()
        assert (p > previous).all()
        previous = p
        # In float32 a shift rounds the logits themselves.
        torch.testing.assert_close(lapsum(r + 3, k), p, rtol=0, atol=max(1e-12, tolerance / 10))
        order = torch.randperm(n, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(lapsum(r[:, order], k), p[:, order], rtol=0, atol=0)
        even = lapsum(torch.full_like(r, 7.0), k)
        torch.testing.assert_close(even, torch.full_like(r, k / n), rtol=0, atol=tolerance / 10)


def test_narrow_logits_give_float32_gates() -> None:
    r = logits(3, 8).bfloat16()
    torch.testing.assert_close(lapsum(r, 1.5), lapsum(r.float(), 1.5), rtol=0, atol=0)
    assert lapsum(r, 1.5).dtype == torch.float32


def test_k_and_scale_may_differ_per_row() -> None:
    r = logits(2, 3, 6)
    k, scale = torch.rand(2, 3, dtype=F64) * 5 + 0.5, torch.rand(2, 3, dtype=F64) + 0.1
    p = lapsum(r, k, scale)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(
                p[i, j], lapsum(r[i, j], k[i, j], scale[i, j]), rtol=0, atol=1e-15
            )


@pytest.mark.parametrize("per_row", [False, True])
def test_gradients(per_row: bool) -> None:
    rows = (3,) if per_row else ()
    for k in (0.7, 2.0, 4.2):
        inputs = (
            logits(3, 5).requires_grad_(),
            torch.full(rows, k, dtype=F64).requires_grad_(),
            torch.full(rows, 0.8, dtype=F64).requires_grad_(),
        )
        assert torch.autograd.gradcheck(lapsum, inputs)


def test_jacobian() -> None:
    """Gates do not follow a shift, add up to k whatever the logits, and move with them as finite
    differences say."""
    r = logits(9)
    by_r, by_k = torch.autograd.functional.jacobian(lapsum, (r, torch.tensor(3.3, dtype=F64)))
    assert by_r.sum(0).abs().max() < 1e-14 and by_r.sum(1).abs().max() < 1e-14
    assert abs(by_k.sum() - 1) < 1e-14 and (by_k > 0).all()
    direction, h = logits(9, seed=1), 1e-6
    moved = (lapsum(r + h * direction, 3.3) - lapsum(r - h * direction, 3.3)) / (2 * h)
    torch.testing.assert_close(by_r @ direction, moved, rtol=0, atol=1e-9)


def test_inputs_are_left_alone() -> None:
    """Another loss may use the same logits, before and after, and the graph may be used twice."""
    r = logits(4, 6).requires_grad_()
    leaf = r * 1.0
    before = leaf.detach().clone()
    z_loss = leaf.logsumexp(-1).square().sum()  # keeps leaf for its backward pass
    gates = lapsum(leaf, 2.0)
    total = (gates * logits(4, 6, seed=1)).sum() + z_loss
    (first,) = torch.autograd.grad(total, r, retain_graph=True)
    (second,) = torch.autograd.grad(total, r)
    assert torch.equal(first, second) and torch.equal(leaf, before)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("gap", [1.0, 10.0, 103.0, 104.0, 800.0, 1e4])
def test_wide_gap_at_integer_k(gap: float, dtype: torch.dtype) -> None:
    """Between ranks k and k + 1 both terms of the quadratic equation underflow."""
    r = logits(20, 8, dtype=dtype, spread=0.1)
    r[:, :2] += gap
    r.requires_grad_()
    k = torch.tensor(2.0, dtype=dtype, requires_grad=True)
    p = lapsum(r, k)
    assert (p.sum(-1) - 2).abs().max() < TOLERANCE[dtype]
    if gap > 50:
        torch.testing.assert_close(p[:, :2], torch.ones_like(p[:, :2]), rtol=0, atol=1e-6)
    else:
        expected = bisection(r.detach(), 2.0).to(dtype)
        torch.testing.assert_close(p, expected, rtol=0, atol=TOLERANCE[dtype])
    d_r, d_k = torch.autograd.grad((p * logits(8, seed=2, dtype=dtype)).sum(), (r, k))
    assert d_r.isfinite().all() and d_k.isfinite() and d_k != 0


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("gap", [0.0, 30.0, 1e4])
def test_sums_next_to_the_bounds(gap: float, dtype: torch.dtype) -> None:
    n = 16
    r = logits(10, n, dtype=dtype)
    r[:, 0] += gap
    largest = math.nextafter(n, 0) if dtype == F64 else n - 2.0**-20
    for k in (1e-6, n - 1e-6 if dtype == F64 else largest, largest):
        x = r.clone().requires_grad_()
        given = torch.tensor(k, dtype=dtype, requires_grad=True)
        p = lapsum(x, given)
        assert (p.double().sum(-1) - k).abs().max() < TOLERANCE[dtype]
        d_r, d_k = torch.autograd.grad(p.square().sum(), (x, given))
        assert d_r.isfinite().all() and d_k.isfinite()
        assert (1 - p if k > 1 else p).sum(-1).max() < 1e-5


def test_limits_of_the_scale() -> None:
    """Small: the k largest, the next one with what is left of k.  Large: the same for all."""
    r = torch.tensor([3.0, -1.0, 0.5, 2.0, 1.0], dtype=F64)
    for dtype in TOLERANCE:
        x = r.to(dtype)
        for k, expected in ((3.0, [1, 0, 0, 1, 1]), (2.4, [1, 0, 0, 1, 0.4])):
            target = torch.tensor(expected, dtype=dtype)
            torch.testing.assert_close(lapsum(x, k, 1e-5), target, rtol=0, atol=2e-6)
        even = torch.full((5,), 0.48, dtype=dtype)
        torch.testing.assert_close(lapsum(x, 2.4, 1e7), even, rtol=0, atol=1e-6)


@pytest.mark.parametrize("k", [0.0, -1.0, 4.0, 5.0, math.nan])
def test_impossible_sum(k: float) -> None:
    with pytest.raises(ValueError, match=r"k must lie in \(0, 4\) for 4 experts, got"):
        lapsum(logits(2, 4), k)
    with pytest.raises(ValueError, match=r"k must lie in \(0, 4\)"):
        lapsum(logits(2, 4), torch.tensor([1.0, k]))


def test_impossible_scale() -> None:
    with pytest.raises(ValueError, match="scale must be positive, got 0"):
        lapsum(logits(2, 4), 1.0, 0.0)


def filled(eta: Tensor, total: float, most: float) -> Tensor:
    """Shares in proportion to softmax(eta), by handing out again what goes over the bound."""
    pi = eta.double().softmax(0)
    k, full = torch.ones_like(pi), torch.zeros_like(pi, dtype=torch.bool)
    while True:
        free = total - len(pi) - (most - 1) * full.sum()
        k = torch.where(full, most, 1 + free * pi / pi[~full].sum())
        over = (k > most) & ~full
        if not over.any():
            return k
        full |= over


@pytest.mark.parametrize("total", [6.5, 9.0, 12.0, 17.9])
def test_budget_is_split(total: float) -> None:
    """Σ k = total, 1 ≤ k ≤ most, as filled by hand."""
    for seed in range(20):
        eta = logits(6, seed=seed, dtype=torch.float32, spread=(0.1, 1.0, 4.0, 20.0)[seed % 4])
        k = budget_split(eta, total, 3.0)
        assert k.dtype == torch.float32
        assert abs(float(k.double().sum()) - total) < 1e-5
        assert k.min() >= 1 and k.max() <= 3 + 1e-6
        torch.testing.assert_close(k.double(), filled(eta, total, 3.0), rtol=0, atol=1e-5)


def test_budget_below_the_bound_is_a_softmax() -> None:
    eta = logits(10, dtype=torch.float32)
    torch.testing.assert_close(budget_split(eta, 15.0, 1e9), 1 + 5 * eta.softmax(0), rtol=0, atol=0)
    assert torch.equal(budget_split(torch.zeros(10), 15.0, 16.0), torch.full((10,), 1.5))


def test_budget_gradient() -> None:
    """gradcheck with and without layers at the bound; components add up to nothing; the closed form
    (K − L) π (g − π·g)."""
    for eta in (logits(5), torch.tensor([4.0, 0.1, 0.3, -0.2, 3.5], dtype=F64)):
        eta.requires_grad_()
        assert torch.autograd.gradcheck(lambda e: budget_split(e, 11.0, 4.0), (eta,))
        (grad,) = torch.autograd.grad((budget_split(eta, 11.0, 4.0) * logits(5, seed=1)).sum(), eta)
        assert abs(grad.sum()) < 1e-14
        assert ((grad == 0) == (budget_split(eta, 11.0, 4.0) == 4)).all()
    eta = logits(5).requires_grad_()
    g, pi = logits(5, seed=1), eta.detach().softmax(0)
    (grad,) = torch.autograd.grad((budget_split(eta, 11.0, 99.0) * g).sum(), eta)
    torch.testing.assert_close(grad, 6 * pi * (g - pi @ g), rtol=0, atol=1e-15)


@pytest.mark.parametrize("total", [5.0, 4.0, 15.0])
def test_impossible_budget(total: float) -> None:
    with pytest.raises(ValueError, match=r"more than 5 and less than 5 · 3, got"):
        budget_split(torch.zeros(5), total, 3.0)


def test_budget_module() -> None:
    budget = Budget(4, 6.0, 4.0)
    torch.nn.init.constant_(budget.eta, budget.initial("eta"))
    assert torch.equal(budget(), torch.full((4,), 1.5))
    assert budget.wide == ("eta",) and budget.optimizer_group == {"eta": "budget"}
    budget().select(0, 2).backward()  # a stage with one layer
    assert budget.eta.grad is not None and budget.eta.grad[2] > 0
