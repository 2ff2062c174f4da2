"""LapSum gates (Struski et al. 2025, arXiv 2503.06242) and the budget that layers share.

``p_i = F((r_i − t)/a)`` with F the distribution function of the standard Laplace law and t such
that ``Σ p_i = k``: differentiable gates in (0, 1) with a prescribed sum.  As a router of experts
they are SoftMoE's (Zasada et al. 2026, arXiv 2606.17952), not those of Puigcerver et al. 2023.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .linear import accumulation_dtype


def lapsum(r: Tensor, k: Tensor | float, scale: Tensor | float = 1.0) -> Tensor:
    """Gates p [..., n] of logits r [..., n], in at least fp32, with Σ p = k.

    ``k`` (0 < k < n) and ``scale`` (> 0) are numbers or tensors that broadcast to r's rows [...].
    All three are differentiable, once.  A number, or a tensor on the CPU, that is out of range
    raises ``ValueError``; on an accelerator that check would wait for the device.
    """
    dtype = accumulation_dtype(r.dtype)
    r = r.to(dtype)
    n = r.shape[-1]
    k = torch.as_tensor(k, dtype=dtype, device=r.device)
    scale = torch.as_tensor(scale, dtype=dtype, device=r.device)
    if r.device.type == "cpu":
        if k.numel() and not bool(((k > 0) & (k < n)).all()):
            given = f"{k.min().item():g}" if k.numel() == 1 else f"{k.min():g} to {k.max():g}"
            raise ValueError(f"lapsum: k must lie in (0, {n}) for {n} experts, got {given}")
        if scale.numel() and not bool((scale > 0).all()):
            raise ValueError(f"lapsum: scale must be positive, got {scale.min():g}")
    gates: Tensor = _LapSum.apply(r, k, scale)
    return gates


class _LapSum(torch.autograd.Function):
    """Keeps x = (r − t)/a, not its inputs, and changes neither."""

    @staticmethod
    def forward(ctx: Any, r: Tensor, k: Tensor, scale: Tensor) -> Tensor:
        x = _centred(r, k, scale)
        ctx.save_for_backward(x, scale)
        ctx.shapes = k.shape, scale.shape
        tail = (-x.abs()).exp() / 2
        return torch.where(x <= 0, tail, 1 - tail)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, scale = ctx.saved_tensors
        k_shape, scale_shape = ctx.shapes
        away = -x.abs()
        q = away.softmax(-1)  # dp/dk; finite where every exponential underflows
        slope = away.exp().sum(-1) / 2 / scale
        weighted = q * grad
        along = weighted.sum(-1)
        d_r = slope[..., None] * (weighted - q * along[..., None])
        d_k = along.sum_to_size(k_shape) if ctx.needs_input_grad[1] else None
        d_scale = -(d_r * x).sum(-1).sum_to_size(scale_shape) if ctx.needs_input_grad[2] else None
        return d_r, d_k, d_scale


def _centred(r: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """x = (r − t)/a, for which the Laplace distribution function sums to k over the last dim.

    With r ascending, A_i = Σ_{j≥i} e^{(r_i−r_j)/a} and B_i = Σ_{j≤i} e^{(r_j−r_i)/a}, the sum at
    t = r_i is n − i − 1/2 + (B_i − A_i)/2.  Between the knots j − 1 and j that k lies between, it
    is a quadratic equation in e^{t/a}.  Its root is taken in logarithms (at integer k and a wide
    gap between the knots both of its terms underflow), and relative to the knot nearby, so that
    only differences of logits enter.
    """
    n = r.shape[-1]
    sorted_r = r.sort(-1).values
    decay = F.pad((-sorted_r.diff(dim=-1) / scale[..., None]).exp(), (0, 1))
    above = _decaying_sums(decay)
    below = _decaying_sums(F.pad(decay[..., :-1].flip(-1), (0, 1))).flip(-1)
    index = torch.arange(n, dtype=r.dtype, device=r.device)
    totals = n - index - 0.5 + (below - above) / 2
    upper = (totals > k[..., None]).sum(-1, keepdim=True)  # 0 … n: first knot whose sum is ≤ k
    lower = (upper - 1).clamp(min=0)
    has_upper, has_lower = upper < n, upper > 0
    upper = upper.clamp(max=n - 1)
    at_lower, at_upper = sorted_r.gather(-1, lower), sorted_r.gather(-1, upper)
    log_b = below.gather(-1, lower).log().where(has_lower, -torch.inf)
    log_c = above.gather(-1, upper).log().where(has_upper, -torch.inf)
    count = torch.where(has_upper, n - upper, 0).to(r.dtype)
    excess = count - k[..., None]
    log_excess = excess.abs().log()
    gap = (at_lower - at_upper) / scale[..., None]
    root = torch.logaddexp(2 * log_excess, log_b + log_c + gap) / 2
    log_q = torch.logaddexp(log_excess, root)
    from_upper = excess > 0
    nearby = torch.where(from_upper, at_upper, at_lower)
    offset = torch.where(from_upper, log_q - log_c, log_b - log_q)
    return (r - nearby) / scale[..., None] - offset


def _decaying_sums(decay: Tensor) -> Tensor:
    """S_i = 1 + decay_i · S_{i+1} over the last dim, decay ≤ 1 and 0 at the end, by doubling."""
    sums, n = torch.ones_like(decay), decay.shape[-1]
    step = 1
    while step < n:
        sums = sums + F.pad(decay[..., :-step] * sums[..., step:], (0, step))
        decay = F.pad(decay[..., :-step] * decay[..., step:], (0, step))
        step *= 2
    return sums


def budget_split(eta: Tensor, total: float, most: float) -> Tensor:
    """k [L] with k_l ≥ 1, k_l ≤ most and Σ k_l = total, in at least fp32.

    Below the bound it is SoftMoE's k = 1 + softmax(eta)·(total − L).  The bound is ours (the paper
    has none, and k ≥ n has no solution): a layer whose share exceeds it gets ``most``, and what is
    left goes to the others in proportion to their softmax, again and again until all fit.  Fixed
    layers have no gradient, the others that of a softmax among themselves; it sums to 0.
    """
    layers = eta.shape[0]
    if not layers < total < layers * most:
        allowed = f"more than {layers} and less than {layers} · {most:g}"
        raise ValueError(f"budget of {layers} layers must be {allowed}, got {total:g}")
    eta = eta.to(accumulation_dtype(eta.dtype))
    free, room = total - layers, most - 1
    with torch.no_grad():
        # With the j largest shares at the bound, does the next one fit?
        shares, order = eta.softmax(0).sort(descending=True)
        rest = shares.flip(0).cumsum(0).flip(0)
        number = torch.arange(layers, dtype=eta.dtype, device=eta.device)
        fits = shares * (free - number * room) <= room * rest
        full = fits.to(torch.int64).argmax()
        bounded = torch.zeros_like(eta, dtype=torch.bool)
        bounded[order] = torch.arange(layers, device=eta.device) < full
    share = eta.masked_fill(bounded, -torch.inf).softmax(0)
    return (1 + share * (free - full * room)).masked_fill(bounded, most)


class Budget(nn.Module):
    """Learned LapSum sums of ``layers`` layers under one total; forward: k [layers].

    Every pipeline stage holds all of ``eta`` and computes all of k."""

    plan: ClassVar[dict[str, str]] = {"eta": "partial"}
    wide: ClassVar[tuple[str, ...]] = ("eta",)
    optimizer_group: ClassVar[dict[str, str]] = {"eta": "budget"}

    def __init__(self, layers: int, total: float, most: float) -> None:
        super().__init__()
        self.total, self.most = total, most
        self.eta = nn.Parameter(torch.empty(layers))

    def initial(self, key: str) -> float:
        return 0.0  # every layer starts with total / layers

    def forward(self) -> Tensor:
        return budget_split(self.eta, self.total, self.most)
