"""Token weights that depend on how probable the model finds a token (SAFT).

The weight is a mean of 1 and p = p(label), with share ``alpha`` for p, and carries no gradient: the
logit gradient of a token becomes w·(softmax − onehot).  ``alpha`` = 0 is plain cross-entropy; 1 is
dynamic fine-tuning (arXiv 2508.05629).  Formulas and bounds are those of SAFT's published trainers
(github.com/sjtu-scx/SAFT).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

LOWEST, HIGHEST = 1e-8, 10.0


@dataclass(frozen=True)
class TokenWeighting:
    """geometric: p^α.  harmonic: p / (α + (1 − α) p).  linear: (1 − α) + α p."""

    kind: Literal["none", "geometric", "harmonic", "linear"] = field(
        default="none", metadata={"help": "mean of 1 and the token's probability that weights it"}
    )
    alpha: float = field(default=0.5, metadata={"help": "share of the probability, 0 to 1"})

    def problems(self) -> list[tuple[str, str]]:
        if not 0 <= self.alpha <= 1:
            return [("alpha", f"must be in [0, 1], got {self.alpha}")]
        if self.kind == "none" and self.alpha != TokenWeighting.alpha:
            return [("alpha", "is set but kind=none: it would be ignored")]
        return []

    def weights(self, cross_entropy: Tensor) -> Tensor:
        """Weights of rows from their −log p, without gradient; exactly 1 for ``alpha`` = 0."""
        alpha, surprise = self.alpha, cross_entropy.detach().clamp(min=0)
        if self.kind == "geometric":
            found = torch.exp(-alpha * surprise)
        else:
            p = torch.exp(-surprise).clamp(min=torch.finfo(surprise.dtype).tiny)
            found = {
                "none": torch.ones_like(p),
                "harmonic": p / (alpha + (1 - alpha) * p),
                "linear": (1 - alpha) + alpha * p,
            }[self.kind]
        return found.clamp(LOWEST, HIGHEST)
