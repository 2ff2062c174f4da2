"""The loss of uniform-state diffusion, in closed form and row by row.

A token x turns into z, any of the K predictable tokens, with chance α of still being itself and
chance (1 − α)/K of being each of them, itself included.  A model that predicts p for x jumps back
from z to j at the rate r s[j]/s[z], and the truth at r q[j]/q[z], with

    s = 1 + κ p,   q = 1 + κ onehot(x),   κ = K α/(1 − α),   r = (−α'/α)/K,

all of them times 1 − α.  The bound of −log p(x) in continuous time is their divergence

    loss = r Σ_{j ≠ z} q[j]/q[z] (u[j] − 1 − log u[j]),   u[j] = (s[j]/s[z]) (q[z]/q[j])

(Schiff et al. 2024, arXiv 2412.10193; Sahoo et al. 2025, arXiv 2506.10892), of which K/s[z],
Σ_j log s[j] and two picks are all that a vocabulary is needed for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .collectives import axis
from .losses import IGNORE, LogitGradient, LogitRows


@dataclass(frozen=True)
class UniformState:
    """Nats of each row, exact unless ``clip`` is set.

    Fields, each [n]: ``targets`` int64, x or IGNORE; ``noisy`` int64, z; ``odds`` α/(1 − α) and
    ``rate`` −α'/α of the row, positive and finite.

    Nothing cancels where the loss is not small itself: in fp32 the error is that of log Σ exp times
    −α'/(1 − α), as of a cross-entropy with that weight.

    clip: rows that cost more count, with their gradients, as if they cost this much.  For training
    alone: what is left is no bound.
    """

    normalizer: float
    weight: float = 1.0
    name: str = "nelbo"
    clip: float | None = None
    depth: ClassVar[int] = 0
    views: ClassVar[int] = 1

    def judges(self, fields: Mapping[str, Tensor]) -> Tensor | None:
        return fields["targets"] != IGNORE

    def rows(self, rows: LogitRows, fields: Mapping[str, Tensor]) -> tuple[Tensor, LogitGradient]:
        classes, dtype = rows.vocab_size, rows.log_z.dtype
        valid = fields["targets"] != IGNORE
        kappa = (classes * fields["odds"]).to(dtype)
        rate = ((fields["rate"] / classes) * valid).to(dtype)
        x, z = fields["targets"].where(valid, 0), fields["noisy"].where(valid, 0)
        log_px, log_pz = (rows.pick(ids) - rows.log_z for ids in (x, z))
        px, pz, missing = log_px.exp(), log_pz.exp(), -log_px.expm1()
        unit = (kappa * rows.normalizer)[:, None]
        shares = torch.mul(rows.exponentials, unit)  # κ p, [n, v]
        logs = shares.log1p_().sum(1)
        # 1/s, in the same memory, which the gradient takes over
        torch.mul(rows.exponentials, unit, out=shares).add_(1).reciprocal_()
        inverse = torch.linalg.vecdot(rows.exponentials, shares) * rows.normalizer
        logs, inverse = axis("tp").sum_(torch.stack((logs, inverse)))

        same = x == z
        scale = rate * torch.where(same, 1 / (1 + kappa), 1)
        # log (s[x]/q[x]), in the form that is exact at either end, and Σ log s over j ≠ x: where p
        # is almost onehot(x) both are almost 0
        log_sx, log_qx = torch.log1p(kappa * px), torch.log1p(kappa)
        near = torch.log1p(-missing * kappa / (1 + kappa))
        short = torch.where(missing < 0.5, near, log_sx - log_qx)
        others = logs - log_sx
        sz, total = 1 + kappa * pz, classes + kappa  # total: Σ s
        kept = total * missing * kappa / sz + (classes - 1) * short - others
        moved = total * (torch.log1p(kappa * pz) - kappa * pz / sz) - (1 + kappa) * short - others
        loss = scale * torch.where(same, kept, moved)
        if self.clip is not None:
            factor = torch.where(loss > self.clip, self.clip / loss, 1)
            loss, scale = loss * factor, scale * factor

        # p[id] times what a derivative w.r.t. p has at x and at z besides −κ/s[j] everywhere
        slope = scale * kappa
        at_z = torch.where(
            same, pz * (classes - total * (1 + kappa) / sz) / sz, total * kappa * pz**2 / sz**2
        )
        at_z = slope * at_z
        at_x = torch.where(same, 0, -slope * kappa * px / (1 + kappa * px))
        gradient = LogitGradient(
            softmax=slope * inverse - at_x - at_z,
            onehot=[(x, at_x), (z, at_z)],
            tilt=(slice(None), shares.mul_(-slope[:, None])),
        )
        return loss, gradient
