"""A divergence between two views of the same tokens, row by row.

Used by RoPE-perturbed self-distillation: the model sees the tokens as they are and with other
positions, and what it predicts from the second view is drawn to what it predicts from the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .collectives import axis
from .losses import LogitGradient, LogitRows


@dataclass(frozen=True)
class ViewDivergence:
    """KL(p_perturbed ‖ p_clean) of neighbouring rows (clean, perturbed), times ``field`` of the
    perturbed row.  The clean view is a constant: its rows get no gradient.

    The log-ratio of the two is formed before it is averaged, so that equal views give exactly 0.
    """

    normalizer: float
    weight: float = 1.0
    name: str = "distillation"
    field: str = "divergence_weights"
    depth: int = 0
    views: ClassVar[int] = 2

    def judges(self, fields: Mapping[str, Tensor]) -> Tensor | None:
        return None

    def rows(self, rows: LogitRows, fields: Mapping[str, Tensor]) -> tuple[Tensor, LogitGradient]:
        clean, perturbed = slice(0, None, 2), slice(1, None, 2)
        ratio = rows.logits[perturbed] - rows.logits[clean]  # [m, v]
        ratio -= (rows.log_z[perturbed] - rows.log_z[clean])[:, None]
        expected = torch.linalg.vecdot(rows.exponentials[perturbed], ratio)
        divergence = axis("tp").sum_(expected * rows.normalizer[perturbed])
        weights = fields[self.field].to(divergence.dtype)[perturbed]
        loss = torch.zeros_like(rows.log_z)
        loss[perturbed] = divergence * weights
        ratio.sub_(divergence[:, None]).mul_(weights[:, None])
        return loss, LogitGradient(tilt=(perturbed, ratio))
