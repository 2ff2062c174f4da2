"""Mixture of experts: every token goes through the experts that its router chose, and no other.

Tokens are never dropped and a token may have any number of experts.  Work follows a flat list of
(token, expert) pairs, expert after expert; a fixed top-k is a special case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .collectives import axis
from .linear import accumulation_dtype


@dataclass(frozen=True)
class Pairs:
    """Active (token, expert) pairs, expert after expert, tokens ascending.

    tokens, experts: int64 [N].  counts: pairs of each expert.
    """

    tokens: Tensor
    experts: Tensor
    counts: list[int]


def active_pairs(chosen: Tensor, expected: float) -> Pairs:
    """The true entries of ``chosen`` bool [T, E].

    expected: experts per token.  Without data (on the meta device) there are so many, in equal
    shares: what a plan of memory assumes.
    """
    if chosen.is_meta:
        each = round(chosen.shape[0] * expected / chosen.shape[1])
        index = chosen.new_empty(each * chosen.shape[1], dtype=torch.int64)
        return Pairs(index, index, [each] * chosen.shape[1])
    experts, tokens = chosen.T.nonzero(as_tuple=True)
    return Pairs(tokens, experts, chosen.sum(0).tolist())


def _grouped_kernel(x: Tensor) -> bool:
    """Whether torch's grouped product takes these rows.  Not yet run on a GPU."""
    return x.is_cuda and x.dtype == torch.bfloat16 and hasattr(torch, "_grouped_mm")


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(counts, device=device).cumsum(0).to(torch.int32)


class _GroupedLinear(torch.autograd.Function):
    """Every group of rows through its own matrix.  The weight's gradient is made as a whole, zero
    for experts without tokens: on every rank there is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        if _grouped_kernel(x):
            out: Tensor = torch._grouped_mm(x, weight.transpose(1, 2), offs=_ends(counts, x.device))
            return out
        return torch.cat([part @ w.T for part, w in zip(x.split(counts), weight, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        d_x = d_weight = None
        if _grouped_kernel(x):
            ends = _ends(ctx.counts, x.device)
            if ctx.needs_input_grad[0]:
                d_x = torch._grouped_mm(grad, weight, offs=ends)
            if ctx.needs_input_grad[1]:
                d_weight = torch._grouped_mm(grad.T, x, offs=ends)
            return d_x, d_weight, None
        parts = grad.split(ctx.counts)
        if ctx.needs_input_grad[0]:
            d_x = torch.cat([part @ w for part, w in zip(parts, weight, strict=True)])
        if ctx.needs_input_grad[1]:
            d_weight = torch.empty_like(weight)
            for out, part, rows in zip(d_weight, parts, x.split(ctx.counts), strict=True):
                torch.mm(part.T, rows, out=out)
        return d_x, d_weight, None


class ExpertLinear(nn.Module):
    """One linear map per expert, ``weight`` [E, out_features, in_features]."""

    def __init__(self, experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features))

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """x [sum(counts), in_features], the rows of the first expert first."""
        weight = self.weight
        out: Tensor = _GroupedLinear.apply(x.to(weight.dtype), weight, counts)
        return out


def exchange_blocks(rows: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Rows that lie in blocks [A][B] of ``sizes`` rows, put in the order [B][A]."""
    width = len(sizes[0])
    if len(sizes) == 1 or width == 1:
        return rows
    blocks = rows.split([size for line in sizes for size in line])
    return torch.cat([block for b in range(width) for block in blocks[b::width]])


class Experts(nn.Module):
    """SwiGLU experts.  Each rank of ``ep`` holds some of them, each rank of ``tp`` a slice of all
    of those, which gives a share of the result."""

    plan: ClassVar[dict[str, str]] = {
        "gate_proj.weight": "expert_column",
        "up_proj.weight": "expert_column",
        "down_proj.weight": "expert_row",
    }

    def __init__(self, experts: int, dim: int, hidden: int, expected: float) -> None:
        super().__init__()
        self.expected = expected
        self.gate_proj = ExpertLinear(experts, dim, hidden)
        self.up_proj = ExpertLinear(experts, dim, hidden)
        self.down_proj = ExpertLinear(experts, hidden, dim)

    def forward(self, x: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        """Σ_e gates[t, e] · expert_e(x[t]) over ``chosen`` [T, E], for x [T, D]: [T, D].

        Terms of a token are added in the order of the experts, in at least fp32.
        """
        pairs = active_pairs(chosen, self.expected)
        rows = x.to(self.gate_proj.weight.dtype).index_select(0, pairs.tokens)
        rows = self._at_owners(rows, pairs.counts)
        weighted = rows.to(accumulation_dtype(rows.dtype))
        weighted = weighted * gates[pairs.tokens, pairs.experts].to(weighted.dtype)[:, None]
        out = weighted.new_zeros(x.shape).index_add(0, pairs.tokens, weighted)
        return out.to(rows.dtype)

    def _at_owners(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Rows through the experts that they are for, wherever those are, and back."""
        ep = axis("ep")
        if ep.size == 1:
            return self._compute(rows, counts)
        local = len(counts) // ep.size
        sent = [counts[i : i + local] for i in range(0, len(counts), local)]
        if rows.is_meta:
            arrived = [counts[:local]] * ep.size
        else:
            ones = [1] * ep.size
            arrived = ep.exchange(torch.tensor(sent, device=rows.device), ones, ones).tolist()
        send, receive = [sum(line) for line in sent], [sum(line) for line in arrived]
        here = exchange_blocks(ep.exchange(rows, send, receive), arrived)
        each = [sum(column) for column in zip(*arrived, strict=True)]
        back = exchange_blocks(self._compute(here, each), [*zip(*arrived, strict=True)])
        return ep.exchange(back, receive, send)

    def _compute(self, rows: Tensor, counts: list[int]) -> Tensor:
        hidden = F.silu(self.gate_proj(rows, counts)) * self.up_proj(rows, counts)
        out: Tensor = self.down_proj(hidden, counts)
        return out
