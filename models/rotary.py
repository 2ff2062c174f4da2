"""What a position encoding is, and rotations of pairs of dimensions with their gradients.

Pairs are half-split, (i, i + d/2), the Hugging Face convention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from .linear import accumulation_dtype


@dataclass(frozen=True)
class HeadShape:
    """The heads of one attention layer, over all ranks, and where it stands: ``layer`` counts from
    0 over the whole model of ``layers`` blocks (blocks of multi-token prediction follow it)."""

    head_dim: int
    heads: int = 1
    kv_heads: int = 1
    layer: int = 0
    layers: int = 1


class PositionContext(Protocol):
    """What a position encoding may ask of a batch of sequences.

    positions: int64 [S] or [B, S].  cache: a dict that lives for one forward pass; layers with the
    same parameter-free table compute it once.
    """

    positions: Tensor
    cache: dict[Any, Any]

    def visible_keys(self, queries: int, device: torch.device) -> Tensor:
        """How many keys each query may attend to, int64 [S] or [B, S]."""
        ...


class Position(nn.Module):
    """A position encoding; this one does nothing."""

    plan: ClassVar[dict[str, str]] = {}

    def __init__(self, config: Any, shape: HeadShape) -> None:
        super().__init__()
        self.config = config
        self.shape = shape

    def rotate(self, q: Tensor, k: Tensor, context: PositionContext) -> tuple[Tensor, Tensor]:
        return q, k

    def slopes(self, heads: int, device: torch.device) -> Tensor | None:
        """m of each of this rank's ``heads``, by which attention scores fall with every token of
        distance; None where they do not."""
        return None


def wavelengths(base: float, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """base^(2f/dim): positions per radian of each pair."""
    exponent = torch.arange(0, dim, 2, device=device).to(dtype) / dim
    return base**exponent


def rope_frequencies(base: float, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """base^(−2f/dim) for f = 0 … dim/2 − 1 (Su et al. 2021, arXiv 2104.09864, section 3.2.2)."""
    return 1.0 / wavelengths(base, dim, dtype, device)


def rotate_half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2·cos.shape[-1] dimensions of x [..., d]; cos, sin [..., pairs]."""
    pairs = cos.shape[-1]
    wide = x.to(cos.dtype)
    first, second, rest = wide.split([pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(rotated, dim=-1).to(x.dtype)


def _tables(positions: Tensor, frequencies: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    """cos and sin [B or 1, S, G, 1, P] of positions [S] or [B, S] and frequencies [G, P]."""
    angle = positions.to(frequencies.dtype)[..., None, None] * frequencies
    angle = (angle if angle.dim() == 4 else angle.unsqueeze(0)).unsqueeze(3)
    return angle.cos() * magnitude, angle.sin() * magnitude


class LearnedRotation(torch.autograd.Function):
    """q and k rotated by tables that are learned, and q scaled, with the backward pass written out.

    With R(φ) the rotation and g = ∂L/∂(λ R(φ) x): u = R(−φ) g, ∂L/∂x = λ u, ∂L/∂λ = ⟨u, x⟩, and
    ∂L/∂θ_f = Σ_t p_t · D_tf with the torque D = λ (u₂x₁ − u₁x₂) of a pair (1, 2), summed over the
    heads that share the table.  Where only differences of positions matter, as in self-attention,
    the torques of q and k cancel over a sequence, so that p may be counted from any ``reference``:
    from the middle the sum loses the fewest digits.  All of it is in the dtype of ``frequencies``;
    what is kept for the backward pass are the inputs.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, frequencies: Tensor, scale: Tensor | None,
        positions: Tensor, reference: Tensor, magnitude: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """q [B, S, H, d], k [B, S, K, d], frequencies [G, P] with G dividing H and K; scale
        broadcastable to [B, S, H], or None; positions [S] or [B, S]; reference [] or [B, 1]."""
        ctx.save_for_backward(q, k, frequencies, scale, positions, reference)
        ctx.magnitude = magnitude
        groups = frequencies.shape[0]
        cos, sin = _tables(positions, frequencies, magnitude)
        wide = q.to(cos.dtype) if scale is None else q.to(cos.dtype) * scale.unsqueeze(-1)
        rotated = [
            rotate_half_split(x.unflatten(2, (groups, -1)), cos, sin).flatten(2, 3)
            for x in (wide, k)
        ]
        return rotated[0].to(q.dtype), rotated[1]

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Any, ...]:
        q, k, frequencies, scale, positions, reference = ctx.saved_tensors
        groups, dtype = frequencies.shape[0], frequencies.dtype
        cos, sin = _tables(positions, frequencies, ctx.magnitude)
        pairs = cos.shape[-1]
        away = (positions - reference).to(dtype).expand(q.shape[:2])
        results: list[Tensor] = []
        d_frequencies, d_scale = torch.zeros_like(frequencies), None
        for x, grad, factor in ((q, dq, scale), (k, dk, None)):
            back = rotate_half_split(grad.to(dtype).unflatten(2, (groups, -1)), cos, -sin)
            wide = x.to(dtype).unflatten(2, (groups, -1))
            if factor is not None:
                d_scale = torch.linalg.vecdot(back, wide).flatten(2)
                d_scale = d_scale.sum_to_size(factor.shape).to(factor.dtype)
                back = back * factor.expand(q.shape[:3]).unflatten(2, (groups, -1)).unsqueeze(-1)
            first, second = wide[..., :pairs], wide[..., pairs : 2 * pairs]
            torque = back[..., pairs : 2 * pairs] * first - back[..., :pairs] * second
            d_frequencies += torch.einsum("bs,bsghf->gf", away, torque)
            results.append(back.flatten(2, 3).to(x.dtype))
        return results[0], results[1], d_frequencies, d_scale, None, None, None


class FixedTable(Position):
    """A rotation by constant frequencies, which its configuration gives."""

    def rotate(self, q: Tensor, k: Tensor, context: PositionContext) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(q.dtype)
        key = (self.config, self.shape.head_dim, dtype)
        if key not in context.cache:
            inverse = self.config.frequencies(self.shape.head_dim, dtype, q.device)
            tables = _tables(context.positions, inverse[None], self.config.magnitude())
            context.cache[key] = tuple(table.squeeze(3) for table in tables)
        cos, sin = context.cache[key]
        return rotate_half_split(q, cos, sin), rotate_half_split(k, cos, sin)
