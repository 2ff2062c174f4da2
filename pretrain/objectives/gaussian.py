"""Gaussian duality: uniform-state noise as the largest entry of Gaussian noise.

Let w = α̃ onehot(x) + σ̃ ε with ε normal over the K tokens, α̃² = sigmoid(−γ), σ̃² = sigmoid(γ).
Then argmax w is x replaced by a uniform draw with chance 1 − α, where

    α(γ) = (K P − 1)/(K − 1),   P = ∫ φ(u − e^(−γ/2)) Φ(u)^(K − 1) du

(Sahoo et al. 2025, arXiv 2506.10892).  A model may be given softmax(w/τ), of which argmax w is the
limit τ → 0, to begin with: its gradients vary less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

WINDOW = (0.95, 0.05)
"""α at the two ends of time."""

_GRID = torch.arange(-12, 12, 0.01, dtype=torch.float64)


def operator(gamma: float, classes: int) -> tuple[float, float]:
    """α and dα/dγ.  The integrals are sums over an even grid, which is exact to rounding for so
    smooth a function."""
    mean = math.exp(-gamma / 2)
    largest = torch.special.log_ndtr(_GRID + mean) * (classes - 1)
    density = (largest - _GRID.square() / 2).exp() * (0.01 / math.sqrt(2 * math.pi))
    scale = classes / (classes - 1)
    alpha = scale * float(density.sum()) - 1 / (classes - 1)
    return alpha, -scale * mean / 2 * float((_GRID * density).sum())


@cache
def window(classes: int) -> tuple[float, float]:
    """γ at which α has the values of WINDOW; they depend on the vocabulary."""
    found = []
    for alpha in WINDOW:
        low, high = -12.0, 12.0
        while high - low > 1e-12:
            middle = (low + high) / 2
            low, high = (middle, high) if operator(middle, classes)[0] > alpha else (low, middle)
        found.append((low + high) / 2)
    return found[0], found[1]


@dataclass(frozen=True)
class Curriculum:
    """How long inputs are soft, and how soft."""

    steps: int = field(default=0, metadata={"help": "optimizer steps with soft inputs; 0 for none"})
    temperature: float = field(default=1e-3, metadata={"help": "of the softmax"})
    candidates: int = field(
        default=8, metadata={"help": "largest entries of the softmax that are kept"}
    )

    def problems(self) -> list[tuple[str, str]]:
        found = []
        if self.steps < 0:
            found.append(("steps", f"must not be negative, got {self.steps}"))
        if not self.temperature > 0:
            found.append(("temperature", f"must be positive, got {self.temperature}"))
        if self.candidates < 1:
            found.append(("candidates", f"must be positive, got {self.candidates}"))
        for name in ("temperature", "candidates") if not (self.steps or found) else ():
            if getattr(self, name) != getattr(type(self), name):
                found.append((name, "is set but steps=0: it would be ignored"))
        return found


def distinct(uniforms: np.ndarray, classes: int) -> np.ndarray:
    """Ordered draws without replacement from 0 … classes − 1, int64, of the shape [n, k] of
    ``uniforms`` in (0, 1)."""
    drawn = np.empty(uniforms.shape, dtype=np.int64)
    for i in range(uniforms.shape[1]):
        left = classes - i
        rank = np.minimum(uniforms[:, i] * left, left - 1).astype(np.int64)
        # the rank-th of those that are left lies behind so many that are not
        taken = np.sort(drawn[:, :i], 1) - np.arange(i)
        drawn[:, i] = rank + (taken <= rank[:, None]).sum(1)
    return drawn


def soften(
    tokens: np.ndarray, uniforms: np.ndarray, gamma: float, classes: int, curriculum: Curriculum
) -> tuple[np.ndarray, np.ndarray]:
    """The largest entries of softmax(w/τ) of each of ``tokens`` int64 [n]: their ids int64 [n, k],
    largest first, so that ids[:, 0] is argmax w, and their values [n, k], divided by their sum.

    ``uniforms``: [n, 2 candidates + 1] in (0, 1).  Only what is kept is drawn: the largest of the
    K − 1 entries besides x are order statistics, and any of the tokens may own them.
    """
    k = min(curriculum.candidates, classes - 1)
    own, ranks, owners = np.split(uniforms, [1, 1 + curriculum.candidates], 1)
    # log of the largest of m uniform numbers is log(u)/m; the next is the largest of m − 1 below it
    log_largest = (np.log(ranks[:, :k]) / (classes - 1 - np.arange(k))).cumsum(1)
    ids = distinct(owners[:, :k], classes - 1)
    ids = np.concatenate((tokens[:, None], ids + (ids >= tokens[:, None])), 1)
    normal = -torch.special.ndtri(
        torch.from_numpy(np.concatenate((own, -np.expm1(log_largest)), 1))
    ).numpy()
    signal, spread = (
        float(torch.sigmoid(torch.tensor(s * gamma).double()).sqrt()) for s in (-1, 1)
    )
    w = spread * normal
    w[:, 0] += signal
    order = np.argsort(-w, 1)[:, : curriculum.candidates]
    w, ids = np.take_along_axis(w, order, 1), np.take_along_axis(ids, order, 1)
    weights = np.exp((w - w[:, :1]) / curriculum.temperature)
    return ids, weights / weights.sum(1, keepdims=True)
